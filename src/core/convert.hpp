// Scalar conversions between the element types and float32. All widening is exact.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "treemla/dtype.hpp"

namespace treemla {

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
  const uint32_t exp = (x >> 10) & 31, man = x & 0x3FF;
  if (exp == 31) return std::bit_cast<float>(sign | 0x7F800000 | (man << 13));
  if (exp == 0) {  // subnormal: man * 2^-24
    const float v = static_cast<float>(man) * 0x1p-24f;
    return sign ? -v : v;
  }
  return std::bit_cast<float>(sign | ((exp + 112) << 23) | (man << 13));
}

// Round to nearest even; overflow gives infinity, NaN stays NaN.
inline uint16_t float_to_f16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
  const float a = std::fabs(x);
  if (x != x) return static_cast<uint16_t>(sign | 0x7E00);
  if (a >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00);
  if (a < 0x1p-14f) {  // subnormal: adding 2^-1 * 2^k rounds to a multiple of 2^-24
    const float r = a + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(r) - std::bit_cast<uint32_t>(0.5f)));
  }
  const uint32_t v = std::bit_cast<uint32_t>(a);
  const uint32_t r = v + 0xFFF + ((v >> 13) & 1);
  return static_cast<uint16_t>(sign | ((r >> 13) - (112u << 10)));
}

inline float e4m3_to_float(uint8_t x) {
  const uint32_t exp = (x >> 3) & 15, man = x & 7;
  float v;
  if ((x & 0x7F) == 0x7F) {
    v = std::numeric_limits<float>::quiet_NaN();
  } else if (exp == 0) {
    v = static_cast<float>(man) * 0x1p-9f;
  } else {
    v = std::bit_cast<float>(((exp + 120) << 23) | (man << 20));
  }
  return (x & 0x80) ? -v : v;
}

// Round to nearest even; magnitudes past 448 saturate (the serving engines' convention), NaN stays NaN.
inline uint8_t float_to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (x != x) return static_cast<uint8_t>(sign | 0x7F);
  const float a = std::fabs(x);
  if (a >= 448.0f) return static_cast<uint8_t>(sign | 0x7E);
  if (a < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::nearbyint(a * 512.0f)));
  const uint32_t v = std::bit_cast<uint32_t>(a);
  const uint32_t r = v + 0x7FFFF + ((v >> 20) & 1);
  return static_cast<uint8_t>(sign | ((r >> 20) - (120u << 3)));
}

// Element i of an array of any dtype but those with scales, whose rows are not made of one kind of element: core/kv_row.hpp has
// those, and here they are NaN, so that a mistake shows.
inline float load_element(const void* data, DType t, int64_t i) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint16_t h;
  float f;
  switch (t) {
    case DType::kF32:
      std::memcpy(&f, bytes + 4 * i, 4);
      return f;
    case DType::kF16:
      std::memcpy(&h, bytes + 2 * i, 2);
      return f16_to_float(h);
    case DType::kBF16:
      std::memcpy(&h, bytes + 2 * i, 2);
      return bf16_to_float(h);
    case DType::kF8E4M3:
      return e4m3_to_float(bytes[i]);
    case DType::kF8E4M3Packed:
    case DType::kQ8:
      break;
  }
  return std::numeric_limits<float>::quiet_NaN();
}

inline void store_element(void* data, DType t, int64_t i, float x) {
  auto* bytes = static_cast<unsigned char*>(data);
  uint16_t h;
  switch (t) {
    case DType::kF32:
      std::memcpy(bytes + 4 * i, &x, 4);
      return;
    case DType::kF16:
      h = float_to_f16(x);
      std::memcpy(bytes + 2 * i, &h, 2);
      return;
    case DType::kBF16:
      h = float_to_bf16(x);
      std::memcpy(bytes + 2 * i, &h, 2);
      return;
    case DType::kF8E4M3:
      bytes[i] = float_to_e4m3(x);
      return;
    case DType::kF8E4M3Packed:
    case DType::kQ8:
      return;
  }
}

}  // namespace treemla
