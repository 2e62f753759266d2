// Writing sums that tensor cores left in fragments: O^T [columns, rows], in tiles of 16 columns x 8 rows, to rows of the output.
//
// Lane l holds columns g, g + 8 of rows t, t + 1 of a tile, with g = l / 4 and t = 2 * (l % 4): numbers 0, 1, then 2, 3.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backend/cuda/half_types.cuh"
#include "backend/cuda/ptx_sm80.cuh"

namespace treemla {

// What a row's sums are multiplied by; with kNoKey, for a row that saw no key, its output is 0 whatever they are.
constexpr float kNoKey = -1;
__device__ __forceinline__ float finished(float sum, float by) { return by == kNoKey ? 0.0f : sum * by; }

// kColumnTiles tiles by kRowTiles tiles of rows. Of two tiles the second is kStep columns after the first, and every two are kPairStep
// columns after the two before. sums[c][4 * j + number]; factors: shared, a float a row, or unused if the sums are what is to be written.
template <int kDv, int kColumnTiles, int kStep, int kPairStep, int kRowTiles, bool kFinished = false>
struct FragmentWriter {
  const float (&sums)[kColumnTiles][4 * kRowTiles];
  uint32_t factors;
  int lane;
  int num_rows;  // to write: others are padding

  // `to`: column 0 of row 0. Any alignment.
  template <class To>
  __device__ __forceinline__ void write_any(To* to) const {
    to += lane >> 2;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 by = factor(j);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * j + 2 * (lane & 3) + e;
        if (row >= num_rows) continue;
        To* at = to + static_cast<int64_t>(row) * kDv;
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float x = finished(sums[c][4 * j + 2 * h + e], e == 0 ? by.x : by.y);
            if constexpr (std::is_same_v<To, float>)
              at[column(c) + 8 * h] = x;
            else
              at[column(c) + 8 * h] = __builtin_bit_cast(To, narrow<To>(x));
          }
      }
    }
  }
  // float32, aligned to 8 bytes, two columns at a time: lanes 4 apart have neighbouring columns of the same two rows, and each takes a row.
  __device__ __forceinline__ void write_pairs(float* to) const {
    const int odd = lane >> 2 & 1;
    to += lane >> 2 & 6;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 by = factor(j);
      const int row = 8 * j + 2 * (lane & 3) + odd;
      float* at = to + static_cast<int64_t>(row) * kDv;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x0 = finished(sums[c][4 * j + 2 * h], by.x),
                      x1 = finished(sums[c][4 * j + 2 * h + 1], by.y);
          const float other = __shfl_xor_sync(~0u, odd ? x0 : x1, 4);
          if (row < num_rows)
            *reinterpret_cast<float2*>(at + column(c) + 8 * h) = odd ? float2{other, x1} : float2{x0, other};
        }
    }
  }
  // 16-bit numbers, aligned to 8 bytes. Fragments are transposed, so that a lane has columns t, t + 1 of row g and of the eight columns
  // after; neighbours swap halves, and a lane stores four columns.
  template <class To>
  __device__ __forceinline__ void write_quads(To* to) const {
    const int odd = lane & 1, row = lane >> 2;
    to += odd ? 8 + 2 * ((lane & 3) - 1) : 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float2 by = factor(j);
      const bool there = 8 * j + row < num_rows;
      To* at = to + static_cast<int64_t>(8 * j + row) * kDv;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        uint32_t x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          x[h] =
              transposed(narrow<To>(finished(sums[c][4 * j + 2 * h], by.x)) |
                         static_cast<uint32_t>(narrow<To>(finished(sums[c][4 * j + 2 * h + 1], by.y))) << 16);
        const uint32_t other = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
        if (there) *reinterpret_cast<uint2*>(at + column(c)) = odd ? uint2{other, x[1]} : uint2{x[0], other};
      }
    }
  }
  template <class To>
  __device__ __forceinline__ void write(To* to) const {
    if (reinterpret_cast<uintptr_t>(to) % 8 != 0)
      write_any(to);
    else if constexpr (std::is_same_v<To, float>)
      write_pairs(to);
    else
      write_quads(to);
  }

 private:
  __device__ __forceinline__ static constexpr int column(int c) { return c / 2 * kPairStep + c % 2 * kStep; }
  __device__ __forceinline__ float2 factor(int j) const {
    if (kFinished) return {1, 1};
    return load_shared<float2>(factors + 4 * (8 * j + 2 * (lane & 3)));
  }
};

}  // namespace treemla
