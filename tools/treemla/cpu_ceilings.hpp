// What this CPU can do at best, measured: the ceilings that a benchmark's rows are held against.
#pragma once

#include <cstddef>

namespace treemla::cli {

struct CpuCeilings {
  int threads = 0;
  double fma_flops_per_s = 0;  // float32 fused multiply-add on every thread at once, 2 operations an FMA
  double dot_flops_per_s = 0;  // bf16 dot products summed in float32, likewise; 0: no such instruction
  double amx_flops_per_s = 0;  // the same on AMX; 0: none
  double read_bytes_per_s =
      0;  // streaming reads by every thread of a buffer that no cache holds; 0: no memory for it
  double buffer_bytes = 0;  // of that buffer
};

// The loops behind them, on the calling thread.
double fma_chains(int steps, float* sink);                         // returns the operations done
void read_sum(const float* data, std::size_t count, float* sink);  // `count` is a multiple of 1024

// Takes about two seconds.
CpuCeilings measure_cpu_ceilings(int threads);

}  // namespace treemla::cli
