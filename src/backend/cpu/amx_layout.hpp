// How operands of AMX lie in memory (amx.hpp draws it), and in plain code what packs and multiplies them: the kernel does the same
// by vectors and tile registers and is held against this, which runs on any CPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "backend/cpu/amx.hpp"

namespace treemla {

#define TREEMLA_AMX_INLINE inline __attribute__((always_inline))

// Element (key, column 32 * step) of `keys`.
TREEMLA_AMX_INLINE int64_t amx_key_offset(int key, int step, int d_qk) {
  return (static_cast<int64_t>(key / kAmxTile) * (d_qk / kAmxStep) + step) * (2 * kAmxTileWords) +
         key % kAmxTile * kAmxStep;
}
// Word (columns 2 * word and 2 * word + 1, row) of `q`.
TREEMLA_AMX_INLINE int64_t amx_q_offset(int row, int word, int d_qk) {
  return (static_cast<int64_t>(row / kAmxTile) * (d_qk / kAmxStep) + word / kAmxTile) * kAmxTileWords +
         word % kAmxTile * kAmxTile + row % kAmxTile;
}
// Word (row, keys 2 * word and 2 * word + 1) of `weights`.
TREEMLA_AMX_INLINE int64_t amx_weight_offset(int row, int word) {
  return (static_cast<int64_t>(row / kAmxTile) * (kAmxKeys / kAmxStep) + word / kAmxTile) * kAmxTileWords +
         row % kAmxTile * kAmxTile + word % kAmxTile;
}
// Word (keys 2 * word and 2 * word + 1, column) of `values`.
TREEMLA_AMX_INLINE int64_t amx_value_offset(int word, int column) {
  return static_cast<int64_t>(column / kAmxTile) * kAmxValuesStride + word * kAmxTile + column % kAmxTile;
}

// A row of `q`, or zeros for null. The kernel moves 16 at a time.
TREEMLA_AMX_INLINE void amx_pack_query(const uint16_t* row, int r, int width, uint32_t* q) {
  for (int word = 0; word < width / 2; ++word)
    q[amx_q_offset(r, word, width)] =
        row ? row[2 * word] | static_cast<uint32_t>(row[2 * word + 1]) << 16 : 0;
}

TREEMLA_AMX_INLINE void amx_copy_key(const uint16_t* row, int key, int step, int d_qk, uint16_t* keys) {
  std::memcpy(keys + amx_key_offset(key, step, d_qk), row + step * kAmxStep, kAmxStep * sizeof(uint16_t));
}

// Columns c to c + 31 of keys 2 * word and 2 * word + 1.
TREEMLA_AMX_INLINE void amx_pack_values(const uint16_t* even, const uint16_t* odd, int word, int c,
                                        uint32_t* values) {
  for (int i = c; i < c + kAmxStep; ++i)
    values[amx_value_offset(word, i)] = even[i] | static_cast<uint32_t>(odd[i]) << 16;
}

// The same of interleaved rows, whose words already hold columns i and i + 16.
TREEMLA_AMX_INLINE void amx_pack_interleaved_values(const uint16_t* even, const uint16_t* odd, int word,
                                                    int c, uint32_t* values) {
  uint32_t a[kAmxTile], b[kAmxTile];
  std::memcpy(a, even + c, sizeof a);
  std::memcpy(b, odd + c, sizeof b);
  uint32_t *lower = values + amx_value_offset(word, c),
           *upper = values + amx_value_offset(word, c + kAmxTile);
  for (int i = 0; i < kAmxTile; ++i) lower[i] = (a[i] & 0xFFFFu) | b[i] << 16;
  for (int i = 0; i < kAmxTile; ++i) upper[i] = a[i] >> 16 | (b[i] & 0xFFFF0000u);
}

// Keys j and j + 1 of an even j. The kernel's own does the same by vectors.
template <bool kInterleaved>
TREEMLA_AMX_INLINE void amx_load_pair(const uint16_t* even, const uint16_t* odd, int j, int d_qk, int d_v,
                                      uint16_t* keys, uint32_t* values) {
  for (int step = 0; step < d_qk / kAmxStep; ++step) {
    amx_copy_key(even, j, step, d_qk, keys);
    amx_copy_key(odd, j + 1, step, d_qk, keys);
    if (step >= d_v / kAmxStep) continue;
    if constexpr (kInterleaved)
      amx_pack_interleaved_values(even, odd, j / 2, step * kAmxStep, values);
    else
      amx_pack_values(even, odd, j / 2, step * kAmxStep, values);
  }
}

// What tdpbf16ps computes of 16 rows of A and 16 columns of B: sums of the even and of the odd terms from 0 by fused multiply-add,
// then both added to C. (It takes subnormals as 0, which this does not.)
TREEMLA_AMX_INLINE void amx_emulate_dot(float* c, const uint32_t* a, const uint32_t* b) {
  for (int m = 0; m < kAmxTile; ++m) {
    float even[kAmxTile] = {}, odd[kAmxTile] = {};
    for (int k = 0; k < kAmxTile; ++k) {
      const auto number = [](uint32_t bits) {
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
      };
      const uint32_t word = a[m * kAmxTile + k];
      const float a_even = number(word << 16), a_odd = number(word & 0xFFFF0000u);
      for (int n = 0; n < kAmxTile; ++n) {
        const uint32_t pair = b[k * kAmxTile + n];
        even[n] = __builtin_fmaf(a_even, number(pair << 16), even[n]);
        odd[n] = __builtin_fmaf(a_odd, number(pair & 0xFFFF0000u), odd[n]);
      }
    }
    for (int n = 0; n < kAmxTile; ++n) c[m * kAmxTile + n] += even[n] + odd[n];
  }
}

}  // namespace treemla
