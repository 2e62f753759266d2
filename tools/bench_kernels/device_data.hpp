// Random tensors made on the device, and the card's ceilings measured by real kernels.
#pragma once

#include <cstdint>

#include "treemla/dtype.hpp"

namespace treemla::bench {

// Elements of N(0, scale^2) (a sum of four uniforms), element i a function of seed and i alone.
void fill_normal(void* to, DType dtype, int64_t count, float scale, uint64_t seed, void* stream);

struct Ceilings {
  double copy_bytes_per_s = 0;  // read and written bytes of a copy kernel
  double read_bytes_per_s = 0;  // of a kernel that only reads, from memory
  double l2_bytes_per_s = 0;    // the same from a buffer that stays in the L2 cache
  double fma_flops_per_s = 0;   // float32 FMA, two operations each, operands in registers
};
Ceilings measure_ceilings(void* stream);

}  // namespace treemla::bench
