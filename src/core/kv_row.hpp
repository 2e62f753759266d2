// Cached rows of any dtype, as numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/convert.hpp"
#include "treemla/problem.hpp"

namespace treemla {

// Can rows of these widths have this dtype? Throws Error(kInvalidArgument) naming shape.d_v or shape.d_rope.
void check_kv_widths(const MlaShape& shape, DType dtype);

// Can rows of these widths and dtype have this layout? Throws Error(kInvalidArgument) naming kv.layout, shape.d_v or shape.d_rope.
void check_kv_layout(const MlaShape& shape, DType dtype, KvLayout layout);

// One row of n columns in order, interleaved.
void interleave_row(const uint16_t* from, int n, uint16_t* to);

// What addresses of rows must be multiples of, in bytes: interleaved ones are read as words.
inline int64_t kv_alignment(const KvPool& kv) {
  const auto alignment = static_cast<int64_t>(dtype_alignment(kv.dtype));
  return kv.layout == KvLayout::kInterleaved ? 2 * alignment : alignment;
}

// The scale of latents kPackedGroup * g and on.
inline float packed_scale(const void* row, const MlaShape& shape, int g) {
  float scale;
  std::memcpy(&scale, static_cast<const char*>(row) + shape.d_v + 4 * g, 4);
  return scale;
}

// The scale of columns kQ8Block * block and on of a row of kQ8.
inline float q8_scale(const void* row, int block) {
  return load_element(static_cast<const char*>(row) + block * kQ8BlockBytes, DType::kF16, 0);
}

// The row at `row`, KvPool::scale left out, to to[0:d_qk]. T is float or double; e4m3 times a float32 scale is exact in double
// and rounded once in float, everything else exact in both: int8 times fp16 needs 18 bits.
template <class T>
void load_kv_row(const void* row, const MlaShape& shape, DType dtype, T* to,
                 KvLayout layout = KvLayout::kRowMajor) {
  if (layout == KvLayout::kInterleaved) {
    for (int i = 0; i < shape.d_qk(); ++i) to[i] = load_element(row, dtype, interleaved_element(i));
    return;
  }
  if (!has_scales(dtype)) {
    for (int i = 0; i < shape.d_qk(); ++i) to[i] = load_element(row, dtype, i);
    return;
  }
  if (dtype == DType::kQ8) {
    const auto* bytes = static_cast<const int8_t*>(row);
    for (int i = 0; i < shape.d_qk(); ++i) {
      const int block = i / kQ8Block;
      to[i] = static_cast<T>(bytes[2 + i + 2 * block]) * static_cast<T>(q8_scale(row, block));
    }
    return;
  }
  for (int i = 0; i < shape.d_v; ++i) {
    to[i] = static_cast<T>(load_element(row, DType::kF8E4M3, i)) *
            static_cast<T>(packed_scale(row, shape, i / kPackedGroup));
  }
  const void* rope = static_cast<const char*>(row) + packed_rope_offset(shape);
  for (int i = 0; i < shape.d_rope; ++i) to[shape.d_v + i] = load_element(rope, DType::kBF16, i);
}

// from[0:d_qk] as a row of kF8E4M3Packed: the largest latent of a group becomes 448, the largest e4m3.
void store_packed_row(const float* from, const MlaShape& shape, void* row);

// from[0:d_qk] as a row of kQ8. A scale is the largest magnitude of its block / 127, rounded to fp16 and at most its largest number;
// a column is divided by that and rounded to the nearest integer, ties to even, within +-127. int8 has no NaN: a block with NaN or
// infinity in it gets a scale of NaN, and so is NaN as a whole.
void store_q8_row(const float* from, const MlaShape& shape, void* row);

// n elements of NaN; of a pool with scales, bytes that are NaN as latents, as scales and as rope.
void fill_nan(void* data, DType dtype, int64_t n);

}  // namespace treemla
