// cuda_mma: a work item's rows and their lse, or a part of them to be merged.
#pragma once

#include <type_traits>

#include "backend/cuda/cuda_mma_worker.cuh"
#include "backend/cuda/kernel_io.cuh"

namespace treemla::mma {

// Each row's lse, in place of shrink what its sums are to be multiplied by, and in place of the mark which rows saw no key with a weight.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::finish_rows(int j) {
  if constexpr (C::kSharedTops) load_tops(lane & 3);
  unsigned weightless = 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float total = sums[e];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    const bool none = total == 0;
    weightless |= (__ballot_sync(~0u, none) & 15) << 4 * e;
    if (lane >= 4) continue;
    store_shared(shrink_at(j, lane) + 4 * e, none ? 0.0f : args.value_scale / total);
    const int row = tile_row(j) + 2 * lane + e, packed = item.row_begin + row;
    if (packed >= item.row_end) continue;
    const float lse = none ? -INFINITY : (tops[e] + log2f(total)) * 0.693147180559945309417f;
    if (item.partial >= 0)
      args.partial_lse[static_cast<int64_t>(item.partial) * C::kRows + row] = lse;
    else if (args.lse)
      args.lse[static_cast<int64_t>(item.q_begin) * args.h_q + packed] = lse;
  }
  if (lane == 0) store_shared(raised_at(j), weightless);
}

// Keys whose scores are -inf may have left NaN in the sums of such a row: 0 * inf. It is 0.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::clear_weightless() {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const unsigned weightless = load_shared<unsigned>(raised_at(tile(j))) >> (lane & 3);
    if (weightless == 0) continue;
#pragma unroll
    for (int c = 0; c < C::kColumnTiles; ++c) {
      if (weightless & 1) out[c][j][0] = out[c][j][2] = 0;
      if (weightless & 16) out[c][j][1] = out[c][j][3] = 0;
    }
  }
}

template <class C, Part kPart>
template <class To>
__device__ __forceinline__ void Worker<C, kPart>::write_rows(To* to) const {
  to += 16 * C::kColumnTiles * quarter + (C::kIsFp8 ? 2 : 1) * (lane >> 2);
  const int num_rows = item.row_end - item.row_begin;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float2 by = load_shared<float2>(shrink_at(tile(j), lane & 3));
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = tile_row(tile(j)) + 2 * (lane & 3) + e;
      if (row >= num_rows) continue;
      To* at = to + static_cast<int64_t>(row) * C::kDv;
#pragma unroll
      for (int c = 0; c < C::kColumnTiles; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = out[c][j][2 * h + e] * (e == 0 ? by.x : by.y);
          To& y = at[16 * c + (C::kIsFp8 ? 1 : 8) * h];
          if constexpr (std::is_same_v<To, float>)
            y = x;
          else
            y = __builtin_bit_cast(To, narrow<To>(x));
        }
    }
  }
}

// float32 rows aligned to 8 bytes, two columns at a time. Lanes 4 apart have neighbouring columns of the same two rows: each takes a row.
// FP8: a lane has both columns.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::write_pairs(float* to) const {
  const int odd = C::kIsFp8 ? 0 : lane >> 2 & 1, num_rows = item.row_end - item.row_begin;
  to += 16 * C::kColumnTiles * quarter + (C::kIsFp8 ? 2 * (lane >> 2) : lane >> 2 & 6);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float2 by = load_shared<float2>(shrink_at(tile(j), lane & 3));
    const int row = tile_row(tile(j)) + 2 * (lane & 3) + odd;
    float* at = to + static_cast<int64_t>(row) * C::kDv;
#pragma unroll
    for (int c = 0; c < C::kColumnTiles; ++c) {
      const float x[4] = {out[c][j][0] * by.x, out[c][j][1] * by.y, out[c][j][2] * by.x, out[c][j][3] * by.y};
      if constexpr (C::kIsFp8) {
        if (row < num_rows) *reinterpret_cast<float2*>(at + 16 * c) = {x[0], x[2]};
        if (row + 1 < num_rows) *reinterpret_cast<float2*>(at + 16 * c + C::kDv) = {x[1], x[3]};
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float other = __shfl_xor_sync(~0u, odd ? x[2 * h] : x[2 * h + 1], 4);
          if (row < num_rows)
            *reinterpret_cast<float2*>(at + 16 * c + 8 * h) =
                odd ? float2{other, x[2 * h + 1]} : float2{x[2 * h], other};
        }
      }
    }
  }
}

// 16-bit outputs whose rows are aligned to 8 bytes. Fragments are transposed, so that a lane has columns t, t + 1 of row g and of the
// eight columns after; neighbours swap halves, and a lane stores four columns. FP8: it has every other of four columns, and the others.
template <class C, Part kPart>
template <class To>
__device__ __forceinline__ void Worker<C, kPart>::write_quads(To* to) const {
  const int odd = lane & 1, row = lane >> 2, num_rows = item.row_end - item.row_begin;
  to += 16 * C::kColumnTiles * quarter + (C::kIsFp8 ? 4 * (lane & 3)
                                          : odd     ? 8 + 2 * ((lane & 3) - 1)
                                                    : 2 * (lane & 3));
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float2 by = load_shared<float2>(shrink_at(tile(j), lane & 3));
    const bool there = tile_row(tile(j)) + row < num_rows;
    To* at = to + static_cast<int64_t>(tile_row(tile(j)) + row) * C::kDv;
#pragma unroll
    for (int c = 0; c < C::kColumnTiles; ++c) {
      uint32_t x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        x[h] = transposed(narrow_pair<To>(out[c][j][2 * h] * by.x, out[c][j][2 * h + 1] * by.y));
      uint2 four;
      if constexpr (C::kIsFp8) {
        four = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632)};
      } else {
        const uint32_t other = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
        four = odd ? uint2{other, x[1]} : uint2{x[0], other};
      }
      if (there) *reinterpret_cast<uint2*>(at + 16 * c) = four;
    }
  }
}

template <class C, Part kPart>
template <class To>
__device__ __forceinline__ void Worker<C, kPart>::write_to(To* to) const {
  if (reinterpret_cast<uintptr_t>(to) % 8 != 0)
    write_rows(to);
  else if constexpr (std::is_same_v<To, float>)
    write_pairs(to);
  else
    write_quads(to);
}

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::write() {
  quarter = warp_index() % 4;  // again, rather than kept for it
  asm volatile("" : "+r"(lane), "+r"(quarter));
  sync_own();  // the last tile's shrink is used
  if (kTiles == 4 || quarter < kTiles) finish_rows(quarter);
  sync_own();
  clear_weightless();
  const DType dtype = dtype_of_rows(args, item);
  if (dtype == DType::kF32)
    write_to(place_of_rows<float>(args, item, C::kRows, C::kDv));
  else if (dtype == DType::kBF16)
    write_to(place_of_rows<__nv_bfloat16>(args, item, C::kRows, C::kDv));
  else
    write_to(place_of_rows<__half>(args, item, C::kRows, C::kDv));
}

}  // namespace treemla::mma
