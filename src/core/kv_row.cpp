#include "core/kv_row.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/fail.hpp"

namespace treemla {

void check_kv_widths(const MlaShape& s, DType dtype) {
  if (dtype != DType::kF8E4M3Packed) return;
  if (s.d_v % kPackedGroup != 0) {
    fail("shape.d_v", "shape.d_v = {} must be a multiple of {}, the latents that share a scale of {}", s.d_v,
         kPackedGroup, dtype_name(dtype));
  }
  if (s.d_rope % 2 != 0) {
    fail("shape.d_rope", "shape.d_rope = {} must be even: {} rows are whole numbers of float32", s.d_rope,
         dtype_name(dtype));
  }
}

void store_packed_row(const float* from, const MlaShape& shape, void* row) {
  constexpr float kLargest = 448;
  auto* bytes = static_cast<unsigned char*>(row);
  for (int g = 0; g < shape.d_v / kPackedGroup; ++g) {
    const float* latents = from + g * kPackedGroup;
    float largest = 0;
    for (int i = 0; i < kPackedGroup; ++i) largest = std::max(largest, std::fabs(latents[i]));
    // A group of zeros still needs a scale above 0.
    const float scale = std::max(largest / kLargest, std::numeric_limits<float>::min());
    for (int i = 0; i < kPackedGroup; ++i)
      store_element(bytes, DType::kF8E4M3, g * kPackedGroup + i, latents[i] / scale);
    store_element(bytes + shape.d_v, DType::kF32, g, scale);
  }
  for (int i = 0; i < shape.d_rope; ++i)
    store_element(bytes + packed_rope_offset(shape), DType::kBF16, i, from[shape.d_v + i]);
}

void fill_nan(void* data, DType dtype, int64_t n) {
  if (dtype == DType::kF8E4M3Packed) {
    std::memset(data, 0xFF, static_cast<std::size_t>(n));
    return;
  }
  for (int64_t i = 0; i < n; ++i) store_element(data, dtype, i, std::numeric_limits<float>::quiet_NaN());
}

}  // namespace treemla
