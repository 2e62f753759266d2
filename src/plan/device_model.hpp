// What a plan needs to know of a device, as data: plans for any card are computed and tested without it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace treemla {

struct DeviceModel {
  std::string name;  // as typed by people: "h200", "rtx_pro_6000", ...
  std::string arch;  // "sm_90a", "sm_120", ... or "cpu"
  int num_sms = 1;   // streaming multiprocessors, or CPU cores
  int smem_per_block_bytes = 0;
  int smem_per_sm_bytes = 0;
  int smem_reserved_per_block_bytes = 0;  // the driver's own share of each block
  int regs_per_sm = 0;
  int max_threads_per_sm = 0;
  int max_blocks_per_sm = 0;
  int64_t l2_bytes = 0;
  double mem_bytes_per_s = 0;  // sustained read rate of device memory (or DRAM)
  double fp32_flops = 0;       // float32 FMA rate, 2 operations an FMA
  double mma16_flops = 0;      // dense bf16 matrix rate with float32 accumulation
  double launch_us = 0;        // an empty kernel inside a graph; 0 on a CPU
  std::string provenance;      // where the rates come from: measured, reported, datasheet
};

// cpu, h200, h100, rtx_pro_6000, rtx_5090, a100, l40s.
const std::vector<DeviceModel>& device_models();
// By name or by arch ("sm_120" gives the first of that arch). Throws Error(kInvalidArgument) listing what exists.
const DeviceModel& find_device_model(std::string_view name_or_arch);
std::string describe(const DeviceModel& model);

}  // namespace treemla
