// The device code of cuda_mma; cuda_mma.cu says what it computes, with the shared-memory map and the layouts.
#pragma once

#include <iterator>

#include "backend/cuda/cuda_mma_accumulate.cuh"
#include "backend/cuda/cuda_mma_copy.cuh"
#include "backend/cuda/cuda_mma_output.cuh"
#include "backend/cuda/cuda_mma_queries.cuh"
#include "backend/cuda/cuda_mma_score.cuh"
#include "backend/cuda/cuda_mma_softmax.cuh"
#include "plan/cuda_tiles.hpp"

namespace treemla::mma {

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::begin(SharedWork<C::kThreads>& work) {
  const int window = item.key_begin & -kWindow;
  if constexpr (kCopied > 0)
    if (copies()) fetch_entries(window);
  const bool aligned =
      reinterpret_cast<uintptr_t>(args.q) % 16 == 0 && (args.q_token_stride | args.q_head_stride) % 8 == 0;
  [[maybe_unused]] QueryLoads queries;
  if constexpr (!C::kIsFp8) {
    if (aligned)
      fetch_q<true>(queries);
    else
      fetch_q<false>(queries);
  }
  if constexpr (kCopied > 0)
    if (copies()) {
      clear_rope();
      find_rows(window);
      fetch_entries(window + kWindow);
#pragma unroll
      for (int i = 0; i + 1 < C::kStages; ++i) copy(item.key_begin + i * C::kKeys, i);
    }
  work.look_ahead();
  if constexpr (kTiles > 0 && C::kIsFp8)  // it meets the group, which one that only copies must not
    load_scaled_q(aligned);
  else
    keep_q(queries);
#pragma unroll
  for (int c = 0; c < C::kColumnTiles; ++c)
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[c][j][e] = 0;
  sums[0] = sums[1] = 0;
  tops[0] = tops[1] = -INFINITY;
  if (C::kSharedTops && lane < 4 && quarter < kTiles)
    store_shared(top_at(quarter, lane), float2{tops[0], tops[1]});
  if (lane < kTiles) store_shared(raised_at(lane), -1);  // whoever raises first does so after sync_own()
}

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::attend(SharedWork<C::kThreads>& work) {
  begin(work);
  if (C::kGroups == 3)
    attend_keys(1 + group());
  else if (group() == 0)
    attend_keys(1);
  else
    attend_keys(2);
  if constexpr (kTiles > 0) {
    if (group() == 0) prefetch_queries(work.after());
    write();
  }
}

// The groups have the ring of keys in common and nothing else: while one waits for its softmax the others keep the tensor cores busy. Two
// groups have the loop each, with its barrier a constant, without which it takes 8% longer; three share it, for three of it are more
// than the instruction caches hold and take 4% longer.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::attend_keys(int barrier) {
#pragma unroll 1
  for (int key = item.key_begin; key < key_end; key += C::kKeys) {
    wait_tile();
    Fragment own = {};
    bool is_suspect = false;
    if constexpr (kTiles > 0) is_suspect = score(own);
    if constexpr (kCopied > 0 && !C::kIdleCopies) copy(key + (C::kStages - 1) * C::kKeys, C::kStages - 1);
    unsigned hidden = 0;
    if (key > last_unmasked) {
      if (C::kEarlyMask && (kTiles == 4 || quarter < kTiles)) hidden = hidden_bits(quarter, key);
      if (__syncthreads_or(is_suspect)) {  // everyone has scored
        if constexpr (kCopied > 0) clear_nonfinite();
        __syncthreads();
      }
    } else if constexpr (kTiles > 0) {
      sync_group(barrier);  // the parts are there
    }
    if constexpr (kTiles > 0) {
      bool raised = false;
      if (kTiles == 4 || quarter < kTiles)
        raised = softmax(own, key, hidden);
      else if constexpr (C::kIdleCopies)
        copy(key + (C::kStages - 1) * C::kKeys, C::kStages - 1);
      ValueReader v(*this);  // its first fragments come while others are at the softmax
      const bool shrinks = sync_group_or(barrier, raised);
      accumulate(v, key, shrinks);
    }
    release_tile();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kTile.blocks)
    mma_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ SharedWork<C::kThreads> work;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  if (threadIdx.x < C::kStages) {
    init_barrier(smem + C::kBarriersAt + 8 * threadIdx.x, C::kCopyingThreads);
    init_barrier(smem + C::kBarriersAt + 8 * (C::kStages + threadIdx.x),
                 C::kOneCopies ? C::kThreads / 2 : C::kThreads / 32);
  }
  allow_dependent_launch();
  Ring ring;
  for (bool more = work.begin(args.plan, static_cast<int>(blockIdx.x)); more; more = work.next()) {
    if constexpr (!C::kOneCopies)
      Worker<C, Part::kAll>(args, work.item(), smem, ring).attend(work);
    else if (threadIdx.x < C::kThreads / 2)
      Worker<C, Part::kAttend>(args, work.item(), smem, ring).attend(work);
    else
      Worker<C, Part::kCopy>(args, work.item(), smem, ring).attend(work);
  }
}

// The kernel of a tile for caches of kCache and queries of type T.
template <class T, MmaCache kCache, int i = 0>
const void* find_kernel(const MmaTile& tile) {
  if constexpr (i == static_cast<int>(std::size(kMmaTiles))) {
    return nullptr;
  } else if constexpr (kMmaTiles[i].cache != kCache) {
    return find_kernel<T, kCache, i + 1>(tile);
  } else {
    constexpr const MmaTile& kTile = kMmaTiles[i];
    if (tile.d_v != kTile.d_v || tile.row_tiles != kTile.row_tiles)
      return find_kernel<T, kCache, i + 1>(tile);
    return reinterpret_cast<const void*>(
        &mma_kernel<Config<T, kTile.d_v, kTile.rows(), static_cast<int>(kCache)>>);
  }
}

}  // namespace treemla::mma
