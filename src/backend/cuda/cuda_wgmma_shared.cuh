// What the warpgroups of cuda_wgmma have in common: the shared-memory map, and which keys are this CTA's.
#pragma once

#include "backend/cuda/cuda_wgmma_config.cuh"
#include "backend/cuda/kernel_args.hpp"
#include "backend/cuda/ptx_sm80.cuh"
#include "backend/cuda/ptx_sm90.cuh"

namespace treemla::wgmma {

// The shared-memory map from its address on.
template <class C>
struct SharedMap {
  uint32_t base;

  __device__ __forceinline__ uint32_t panel(int stage, int p) const {
    return base + (stage * C::kPanels + p) * C::kPanelBytes;
  }
  __device__ __forceinline__ uint32_t rope(int stage) const {
    return base + C::kRopeAt + stage * C::kPanelBytes;
  }
  __device__ __forceinline__ uint32_t q_panel(int p) const { return base + C::kQAt + p * C::kQPanelBytes; }
  __device__ __forceinline__ uint32_t weights() const { return base + C::kWeightsAt; }
  __device__ __forceinline__ uint32_t factors() const { return base + C::kFactorsAt; }
  __device__ __forceinline__ uint32_t tops() const { return base + C::kTopsAt; }
  __device__ __forceinline__ uint32_t raised() const { return base + C::kRaisedAt; }
  // Barriers.
  __device__ __forceinline__ uint32_t full(int stage, int chunk) const {
    return base + C::kFullAt + 8 * (stage * C::kChunks + chunk);
  }
  __device__ __forceinline__ uint32_t empty(int stage, int chunk) const {
    return base + C::kEmptyAt + 8 * (stage * C::kChunks + chunk);
  }
  __device__ __forceinline__ uint32_t rope_full(int stage) const { return base + C::kRopeFullAt + 8 * stage; }
  __device__ __forceinline__ uint32_t rope_empty(int stage) const {
    return base + C::kRopeEmptyAt + 8 * stage;
  }
  __device__ __forceinline__ uint32_t q_full() const { return base + C::kQFullAt; }
  __device__ __forceinline__ uint32_t q_empty() const { return base + C::kQEmptyAt; }
  __device__ __forceinline__ uint32_t weights_full() const { return base + C::kWeightsFullAt; }
  __device__ __forceinline__ uint32_t weights_empty() const { return base + C::kWeightsEmptyAt; }

  // From the other CTA of a worker, when an item's keys are done with: maximum and sum of each row, and sums of values.
  __device__ __forceinline__ uint32_t totals() const { return base + C::kRopeAt; }
  __device__ __forceinline__ uint32_t parts() const { return base; }
  __device__ __forceinline__ uint32_t totals_empty() const { return base + C::kTotalsEmptyAt; }
  __device__ __forceinline__ uint32_t totals_full() const { return base + C::kTotalsFullAt; }
  __device__ __forceinline__ uint32_t parts_free() const { return base + C::kPartsFreeAt; }
  __device__ __forceinline__ uint32_t parts_full() const { return base + C::kPartsFullAt; }
  __device__ __forceinline__ uint32_t parts_empty() const { return base + C::kPartsEmptyAt; }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < C::kStages * C::kChunks; ++i) {
      init_barrier(base + C::kFullAt + 8 * i, C::kFullArrivals);
      init_barrier(base + C::kEmptyAt + 8 * i, 4);
    }
    for (int i = 0; i < C::kRopeStages; ++i) {
      init_barrier(rope_full(i), C::kFullArrivals);
      init_barrier(rope_empty(i), 4);
    }
    init_barrier(q_full(), 128);
    init_barrier(q_empty(), 4);
    init_barrier(weights_full(), 4);
    init_barrier(weights_empty(), 8);
    init_barrier(totals_empty(), 1);
    init_barrier(totals_full(), 1);
    init_barrier(parts_free(), 1);
    init_barrier(parts_full(), 8);
    init_barrier(parts_empty(), 8);
  }
};

// The same number, of which the compiler knows nothing: else it works out the sums it occurs in ahead of a loop, and keeps them all in
// registers that it doesn't have.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// CTAs of a worker.
template <class C>
__device__ __forceinline__ int ctas() {
  return C::kClusters ? cluster_size() : 1;
}
template <class C>
__device__ __forceinline__ int worker() {
  return static_cast<int>(blockIdx.x) >> (ctas<C>() - 1);
}

// What of an item's keys is this CTA's: of two that are one worker each has half of the tiles.
template <class C>
struct OwnKeys {
  int begin, end;
  __device__ __forceinline__ explicit OwnKeys(const CudaWorkItem& item)
      : begin(item.key_begin), end(item.key_end) {
    if (ctas<C>() == 1) return;
    const int middle = begin + ceil_div(end - begin, C::kKeys) / 2 * C::kKeys;
    if (cluster_rank() == 0)
      end = middle;
    else
      begin = middle;
  }
};

// The thread's number within its warpgroup, read again: for who would rather not keep it.
__device__ __forceinline__ int thread_of_group() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread & 127;
}
// One arrival for the warp, after all of its lanes.
__device__ __forceinline__ void arrive_warp(uint32_t barrier) {
  __syncwarp();
  if ((thread_of_group() & 31) == 0) arrive(barrier);
}

}  // namespace treemla::wgmma
