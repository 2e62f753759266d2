#include "core/kv_row.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/fail.hpp"

namespace treemla {

void check_kv_widths(const MlaShape& s, DType dtype) {
  if (dtype == DType::kQ8) {
    for (const auto& [name, width] : {std::pair{"shape.d_v", s.d_v}, std::pair{"shape.d_rope", s.d_rope}}) {
      if (width % kQ8Block != 0)
        fail(name, "{} = {} must be a multiple of {}, the columns that share a scale of {}", name, width,
             kQ8Block, dtype_name(dtype));
    }
  }
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

void store_q8_row(const float* from, const MlaShape& shape, void* row) {
  constexpr float kLargest = 127, kLargestScale = 65504;
  auto* to = static_cast<unsigned char*>(row);
  for (int block = 0; block < shape.d_qk() / kQ8Block; ++block, from += kQ8Block, to += kQ8BlockBytes) {
    float largest = 0;
    bool finite = true;
    for (int i = 0; i < kQ8Block; ++i) {
      largest = std::max(largest, std::fabs(from[i]));
      finite = finite && std::isfinite(from[i]);
    }
    if (!finite) {
      fill_nan(to, DType::kQ8, kQ8BlockBytes);
      continue;
    }
    store_element(to, DType::kF16, 0, std::min(largest / kLargest, kLargestScale));
    const double scale = q8_scale(to, 0);  // double: a quotient near a tie stays on its side
    for (int i = 0; i < kQ8Block; ++i) {
      const double x = scale > 0 ? std::nearbyint(from[i] / scale) : 0;  // too small for any fp16 scale: 0
      to[2 + i] = static_cast<unsigned char>(static_cast<int>(std::clamp<double>(x, -kLargest, kLargest)));
    }
  }
}

void fill_nan(void* data, DType dtype, int64_t n) {
  if (has_scales(dtype)) {
    std::memset(data, 0xFF, static_cast<std::size_t>(n));
    return;
  }
  for (int64_t i = 0; i < n; ++i) store_element(data, dtype, i, std::numeric_limits<float>::quiet_NaN());
}

}  // namespace treemla
