// The tile a backend uses on a device, and what one block of it occupies.
#pragma once

#include <string>
#include <vector>

#include "plan/device_model.hpp"
#include "plan/split.hpp"
#include "treemla/problem.hpp"

namespace treemla {

// A kernel as the plan sees it: its tile and its footprint.
struct KernelModel {
  std::string backend;  // "cpu_simd", ...
  TilePolicy tile;      // of a block
  int threads_per_block = 1;
  int regs_per_thread = 0;  // 0 on a CPU
  int smem_per_block_bytes = 0;
  bool tensor_cores = false;
  int cluster = 1;  // blocks of a worker, unless bits must not depend on the batch: see clustered()
};

// The tile of cpu_simd for batches whose largest q_len * h_q is `rows`.
TilePolicy cpu_simd_tile(int rows);
// The same where AMX multiplies (the CPU's own affair: no model of a device says so).
TilePolicy cpu_simd_amx_tile(int rows);

// Models of the kernels that could run the shape on the device, in order of the ladder, those on tensor cores as calls prefer them, whether
// this build has them or not;
// cpu_simd for the CPU. `rows` is the largest q_len * h_q of the batch of `requests`, `keys` its largest kv_len.
std::vector<KernelModel> kernel_models(const DeviceModel& device, const MlaShape& shape, DType kv_dtype,
                                       int requests, int rows, int64_t keys, bool batch_invariant = false);

}  // namespace treemla
