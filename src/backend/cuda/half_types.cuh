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

// Two numbers, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t narrow_pair(float x0, float x1) {
  std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> y;
  if constexpr (std::is_same_v<T, __half>)
    y = __floats2half2_rn(x0, x1);
  else
    y = __floats2bfloat162_rn(x0, x1);
  return reinterpret_cast<const uint32_t&>(y);
}

// The two as float32.
template <class T>
__device__ __forceinline__ float2 widen_two(uint32_t x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half22float2(reinterpret_cast<const __half2&>(x));
  else
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000)};
}

// NaN and infinities among two numbers become zeros.
template <class T>
__device__ __forceinline__ void clear_nonfinite_pair(uint32_t& x) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7C00 : 0x7F80;
  if ((x & kExponent) == kExponent) x &= 0xFFFF0000;
  if ((x >> 16 & kExponent) == kExponent) x &= 0xFFFF;
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
// Four e4m3 numbers, in order, to fp16, where they are exact. NaN stays NaN.
__device__ __forceinline__ uint2 widen_quad(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  uint2 y;
  asm("{\n\t.reg .b16 lo, hi;\n\tmov.b32 {lo, hi}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, lo;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, hi;\n\t}"
      : "=r"(y.x), "=r"(y.y)
      : "r"(x));
  return y;
#else
  uint2 y = {widen_pair<__half>(__byte_perm(x, 0, 0x1404)), widen_pair<__half>(__byte_perm(x, 0, 0x3424))};
  if (((x & 0x7F7F7F7F) + 0x01010101) & 0x80808080) {  // a NaN: 0x7F or 0xFF
    if ((x & 0x7F) == 0x7F) y.x |= 0x7FFF;
    if ((x >> 8 & 0x7F) == 0x7F) y.x |= 0x7FFF0000;
    if ((x >> 16 & 0x7F) == 0x7F) y.y |= 0x7FFF;
    if ((x >> 24 & 0x7F) == 0x7F) y.y |= 0x7FFF0000;
  }
  return y;
#endif
}
// The same to T. To bf16 by way of float32, whose lower half is zeros.
template <class T>
__device__ __forceinline__ uint2 widen_quad_to(uint32_t x) {
  const uint2 y = widen_quad(x);
  if constexpr (std::is_same_v<T, __half>) {
    return y;
  } else {
    const auto upper_halves = [](uint32_t pair) {
      const float2 z = __half22float2(reinterpret_cast<const __half2&>(pair));
      return __byte_perm(__float_as_uint(z.x), __float_as_uint(z.y), 0x7632);
    };
    return {upper_halves(y.x), upper_halves(y.y)};
  }
}
// Bytes 0 and 2, then bytes 1 and 3, of four e4m3 numbers to T. Not for NaN.
template <class T>
__device__ __forceinline__ uint2 widen_columns(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<T, __half>) return widen_quad(__byte_perm(x, 0, 0x3120));
#endif
  return {widen_pair<T>(x << 8), widen_pair<T>(x)};
}

// Two numbers of type T as floats.
template <class T>
__device__ __forceinline__ float2 floats_of(uint32_t x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half22float2(reinterpret_cast<const __half2&>(x));
  else
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000)};
}
// The larger magnitude of two; NaN counts as 0.
template <class T>
__device__ __forceinline__ float largest_of(uint32_t x) {
  const float2 y = floats_of<T>(x);
  return fmaxf(fmaxf(fabsf(y.x), fabsf(y.y)), 0.0f);
}
// Two numbers times `by`, rounded to To.
template <class T, class To>
__device__ __forceinline__ uint32_t scale_two(uint32_t x, float by) {
  const float2 y = floats_of<T>(x);
  return narrow<To>(y.x * by) | static_cast<uint32_t>(narrow<To>(y.y * by)) << 16;
}

}  // namespace treemla
