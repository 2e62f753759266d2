// Marks arithmetic that the host and the GPU must do alike.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TREEMLA_HD __host__ __device__
#else
#define TREEMLA_HD
#endif

namespace treemla {

template <class T>
TREEMLA_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
TREEMLA_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// a / b for 0 <= a, 0 < b and a quotient below 2^31. A GPU divides 64-bit numbers in a subroutine of a hundred instructions, which
// also costs its caller registers; here two estimates in float32 leave an error of one at most.
TREEMLA_HD inline int64_t quotient64(int64_t a, int64_t b) {
#if defined(__CUDA_ARCH__)
  const float inverse = __fdividef(1.0f, static_cast<float>(b));
  int64_t q = static_cast<int64_t>(static_cast<float>(a) * inverse);           // off by up to q / 2^21
  q += static_cast<int64_t>(floorf(static_cast<float>(a - q * b) * inverse));  // by one
  const int64_t left = a - q * b;
  return left < 0 ? q - 1 : left >= b ? q + 1 : q;
#else
  return a / b;
#endif
}

}  // namespace treemla
