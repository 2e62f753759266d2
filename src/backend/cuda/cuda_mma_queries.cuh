// cuda_mma: queries, as fragments.
#pragma once

#include <type_traits>

#include "backend/cuda/cuda_mma_worker.cuh"

namespace treemla::mma {

template <class C, Part kPart>
template <bool kAligned>
__device__ __forceinline__ void Worker<C, kPart>::fetch_q(QueryLoads& loads) const {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const T* row = q_row(j, lane >> 2);
    if (row != nullptr) row += 8 * (lane & 3);
#pragma unroll
    for (int i = 0; i < QueryLoads::kPieces; ++i) {
      const bool is_rope = i + 1 == QueryLoads::kPieces;
      loads.x[j][i] = {0, 0, 0, 0};
      if (row == nullptr || (is_rope && ((lane & 3) >= 2 || 16 * quarter >= args.d_rope))) continue;
      const T* from = row + (is_rope ? C::kDv + 16 * quarter : C::kDv / 4 * quarter + 32 * i);
      if constexpr (kAligned)
        loads.x[j][i] = __ldg(reinterpret_cast<const uint4*>(from));
      else
        loads.x[j][i] = eight_of(from);
    }
  }
}

// Fragments of two steps out of a piece, by way of the shared memory where the warp will keep its own. A row's four chunks of 16 bytes change
// places, so that 8 rows of one meet 32 banks.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::keep_q(const QueryLoads& loads) {
  constexpr int kSlots = C::kQBytes / 4 / 512, kAll = kTiles * QueryLoads::kPieces;
  const uint32_t place = own + C::kQBytes / 4 * quarter,
                 to = place + 16 * ((lane & ~3) + (lane & 3 ^ lane >> 3 & 3)),
                 from = place + 16 * (4 * (lane & 7) + (lane >> 3 ^ lane >> 1 & 3));
  uint32_t kept[kAll > 0 ? kAll : 1][4];
#pragma unroll
  for (int first = 0; first < kAll; first += kSlots) {
#pragma unroll
    for (int f = first; f < kAll && f < first + kSlots; ++f)
      store_shared(to + (f - first) * 512, loads.x[f % kTiles][f / kTiles]);
    __syncwarp();
#pragma unroll
    for (int f = first; f < kAll && f < first + kSlots; ++f) load_matrices(kept[f], from + (f - first) * 512);
    __syncwarp();
  }
#pragma unroll
  for (int f = 0; f < kAll; ++f) {
    const int j = f % kTiles, i = f / kTiles;
    keep_q(j, 2 * i, kept[f][0], kept[f][1]);
    if (2 * i + 1 < C::kSteps) keep_q(j, 2 * i + 1, kept[f][2], kept[f][3]);
  }
}

// For FP8 caches: in fp16, each row times the power of two that brings its largest number below 2^15. A lane has columns 4 * (l % 4) to
// 4 * (l % 4) + 3 of a piece of 16, as score() finds them in a cached row.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::load_scaled_q(bool aligned) {
  uint2 x[kTiles > 0 ? kTiles : 1][C::kSteps];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const T* row = q_row(j, lane >> 2);
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      const bool is_rope = i >= C::kLatentSteps;
      const int column = (is_rope ? C::kDv + 16 * quarter : C::kDv / 4 * quarter + 16 * i) +
                         (is_rope && C::kIsPacked ? 2 : 4) * (lane & 3);
      x[j][i] = {0, 0};
      if (row == nullptr || (is_rope && 16 * quarter >= args.d_rope)) continue;
      if (is_rope && C::kIsPacked)
        x[j][i] = {load_two(row + column, aligned), load_two(row + column + 8, aligned)};
      else if (aligned)
        x[j][i] = __ldg(reinterpret_cast<const uint2*>(row + column));
      else
        x[j][i] = {load_two(row + column, false), load_two(row + column + 2, false)};
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i)
      largest = fmaxf(largest, fmaxf(largest_of<T>(x[j][i].x), largest_of<T>(x[j][i].y)));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if ((lane & 3) == 0) store_shared(largest_at(tile(j), lane >> 2) + 4 * quarter, largest);
  }
  sync_own();
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float4 l = load_shared<float4>(largest_at(tile(j), lane >> 2));
    const int exponent =
        static_cast<int>(__float_as_uint(fmaxf(fmaxf(l.x, l.y), fmaxf(l.z, l.w))) >> 23) - 127;
    const int up = min(max(14 - exponent, -113), 100);
    const float by = __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
    if (quarter == 0 && (lane & 3) == 0)
      store_shared(row_scale_at(tile(j), 0) + 4 * (lane >> 2),
                   __uint_as_float(static_cast<uint32_t>(127 - up) << 23) * score_scale());
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      using To = std::conditional_t<C::kIsPacked, __nv_bfloat16, __half>;
      if (i < C::kLatentSteps)
        keep_q(j, i, scale_two<T, __half>(x[j][i].x, by), scale_two<T, __half>(x[j][i].y, by));
      else
        keep_q(j, i, scale_two<T, To>(x[j][i].x, by), scale_two<T, To>(x[j][i].y, by));
    }
  }
}

template <class C, Part kPart>
__device__ __forceinline__ uint4 Worker<C, kPart>::eight_of(const T* from) {
  return {load_two(from, false), load_two(from + 2, false), load_two(from + 4, false),
          load_two(from + 6, false)};
}

template <class C, Part kPart>
__device__ __forceinline__ uint32_t Worker<C, kPart>::load_two(const T* from, bool aligned) {
  const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
  return aligned ? *reinterpret_cast<const uint32_t*>(x) : x[0] | static_cast<uint32_t>(x[1]) << 16;
}

// The next item's queries to L2 while this one's output is on its way, by the first group, which read that item: two threads a row.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::prefetch_queries(const CudaWorkItem* next) const {
  if (next == nullptr) return;
  // Three groups have no register left to keep `quarter` in until here; two would spill another.
  const int thread = C::kGroups > 2 ? static_cast<int>(thread_index()) : 32 * quarter + lane,
            num_rows = next->row_end - next->row_begin;
#pragma unroll 1
  for (int row = thread / 2; row < num_rows; row += 64) {
    const T* from = q_row(*next, next->row_begin + row);
#pragma unroll
    for (int column = thread % 2 * 64; column < C::kDv + MmaTile::kRope; column += 128)
      if (column < C::kDv + args.d_rope) prefetch_l2(from + column);
  }
}

}  // namespace treemla::mma
