// From and to the 16-bit types that tensor cores multiply, T being __nv_bfloat16 or __half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace treemla {

// Rounds to nearest even.
template <class T>
__device__ __forceinline__ uint16_t narrow(float x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half_as_ushort(__float2half_rn(x));
  else
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Two e4m3 numbers, in the upper halves of x's 16-bit words, to T: exponent and fraction move into place, and one exact multiplication
// makes up for the difference of the exponents' biases, subnormal numbers included. Not for NaN.
template <class T>
__device__ __forceinline__ uint32_t widen_pair(uint32_t x) {
  if constexpr (std::is_same_v<T, __half>) {
    const uint32_t moved = (x & 0x80008000) | (x & 0x7F007F00) >> 1;
    const __half2 y = __hmul2(reinterpret_cast<const __half2&>(moved), __float2half2_rn(256.0f));
    return reinterpret_cast<const uint32_t&>(y);
  } else {
    const uint32_t moved = (x & 0x80008000) | (x & 0x7F007F00) >> 4;
    const __nv_bfloat162 y =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(moved), __float2bfloat162_rn(0x1p120f));
    return reinterpret_cast<const uint32_t&>(y);
  }
}
// Four of them, in order.
template <class T>
__device__ __forceinline__ uint2 widen_quad(uint32_t x) {
  uint2 y = {widen_pair<T>(__byte_perm(x, 0, 0x1404)), widen_pair<T>(__byte_perm(x, 0, 0x3424))};
  if (((x & 0x7F7F7F7F) + 0x01010101) & 0x80808080) {  // a NaN: 0x7F or 0xFF
    if ((x & 0x7F) == 0x7F) y.x |= 0x7FFF;
    if ((x >> 8 & 0x7F) == 0x7F) y.x |= 0x7FFF0000;
    if ((x >> 16 & 0x7F) == 0x7F) y.y |= 0x7FFF;
    if ((x >> 24 & 0x7F) == 0x7F) y.y |= 0x7FFF0000;
  }
  return y;
}

}  // namespace treemla
