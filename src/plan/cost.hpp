// The one place that counts the work of a call: tests, plans and benchmarks all use it.
#pragma once

#include <cstdint>
#include <span>

#include "plan/device_model.hpp"
#include "treemla/problem.hpp"

namespace treemla {

struct Work {
  double flops = 0;     // 2 * q_len * h_q * kv_len * (d_qk + d_v), summed over requests
  double kv_bytes = 0;  // each cached row of each request once
  double io_bytes = 0;  // q read, out and lse written
  double bytes() const { return kv_bytes + io_bytes; }
};

// q_len [b], kv_len [b]; requests with either 0 cost nothing.
Work count_work(const MlaShape& shape, std::span<const int32_t> q_len, std::span<const int32_t> kv_len,
                DType q_dtype, DType kv_dtype, DType out_dtype);

// The least time the device could take, in seconds, and which resource sets it.
struct Floor {
  double memory_s = 0;
  double compute_s = 0;  // matrix rate for 16-bit and FP8 caches, FMA rate for float32
  double seconds() const { return memory_s > compute_s ? memory_s : compute_s; }
  const char* bound() const { return memory_s >= compute_s ? "memory" : "compute"; }
};
Floor floor_time(const Work& work, const DeviceModel& model, bool tensor_cores);

}  // namespace treemla
