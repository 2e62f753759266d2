// cuda_wgmma with rows as N, values: O^T = O^T * shrink + V^T P^T over half of the columns, and the output.
#pragma once

#include <type_traits>

#include "backend/cuda/cuda_wgmma_copy.cuh"
#include "backend/cuda/fragment_output.cuh"

namespace treemla::wgmma {

template <class C>
struct Accumulator {
  using T = typename C::T;
  static constexpr int kSums = C::kRows / 2;
  const KernelArgs& args;
  const SharedMap<C>& map;
  int half;  // of the columns
  Ring<C::kStages> ring;
  uint32_t weights_round =
      0;  // parities. Bit 0: of uses of the weights' place; 1: of items, for workers of two CTAs
  float out[C::kOwnPanels][kSums];  // panels of 64 columns, of which a warp has 16

  __device__ __forceinline__ Accumulator(const KernelArgs& a, const SharedMap<C>& m, int h)
      : args(a), map(m), half(h) {}

  __device__ __forceinline__ void wait_weights() {
    wait_barrier(map.weights_full(), weights_round & 1);
    weights_round ^= 1;
  }
  // Of this thread's rows.
  __device__ __forceinline__ uint32_t own_factors() const {
    return opaque(map.factors() + 8 * (thread_of_group() & 3));
  }
  __device__ __forceinline__ void shrink() {
    const uint32_t factors = own_factors();
#pragma unroll
    for (int j = 0; j < C::kRowTiles; ++j) {
      const float2 by = load_shared<float2>(factors + 32 * j);
#pragma unroll
      for (int p = 0; p < C::kOwnPanels; ++p) {
        out[p][4 * j] *= by.x, out[p][4 * j + 1] *= by.y;
        out[p][4 * j + 2] *= by.x, out[p][4 * j + 3] *= by.y;
      }
    }
  }
  // The products of own chunk i. Chunks alternate between the two halves, so that they are free again in the order that they are copied in.
  __device__ __forceinline__ void multiply_chunk(int i, bool first) {
    const uint64_t weights = matrix_at(map.weights());
#pragma unroll
    for (int p = C::kChunkPanels * i; p < C::kChunkPanels * (i + 1); ++p) {
      const uint64_t values =
          matrix_at(map.panel(ring.stage, C::kChunkPanels * (2 * i + half) + p % C::kChunkPanels));
#pragma unroll
      for (int k = 0; k < C::kKeys / 16; ++k)
        multiply<T, true>(out[p], matrix_after(values, 2048 * k), matrix_after(weights, 32 * k),
                          !first || k > 0);
    }
    commit_products();
  }
  __device__ __forceinline__ void pin_out() {
#pragma unroll
    for (int p = 0; p < C::kOwnPanels; ++p) pin(out[p]);
  }
  __device__ __forceinline__ void accumulate(bool first) {
    wait_weights();
    if constexpr (C::kIsPacked) {  // scaled by now?
#pragma unroll
      for (int i = 0; i < C::kOwnChunks; ++i) wait_barrier(map.full(ring.stage, 2 * i + half), 1);
    }
    fence_async_reads();  // of the copies: the scorer saw them land
    if (!first && load_shared<int>(map.raised()) != 0) shrink();
    pin_out();
    begin_products();
#pragma unroll
    for (int i = 0; i < C::kOwnChunks; ++i) multiply_chunk(i, first);
    static_assert(C::kOwnChunks <= 2);
    if constexpr (C::kOwnChunks == 2) {
      wait_products<1>();
      arrive_warp(map.empty(ring.stage, half));
    }
    wait_products<0>();
    pin_out();
    arrive_warp(map.empty(ring.stage, 2 * (C::kOwnChunks - 1) + half));
    arrive_warp(map.weights_empty());
    ring.step();
  }
  // Sums of the first kPanels own panels, which are numbers first_panel on of the row's.
  template <int kPanels, bool kFinished>
  __device__ __forceinline__ void write(const CudaWorkItem& item, int first_panel) const {
    const int thread = thread_of_group(), lane = thread % 32, warp = thread / 32;
    const FragmentWriter<C::kDv, kPanels, 64, 256, C::kRowTiles, kFinished> writer{
        reinterpret_cast<const float(&)[kPanels][kSums]>(out), map.factors(), lane,
        item.row_end - item.row_begin};
    const int column = 256 * (first_panel / 2) + 128 * half + 64 * (first_panel % 2) + 16 * warp;
    const DType dtype = dtype_of_rows(args, item);
    if (dtype == DType::kF32)
      writer.write(place_of_rows<float>(args, item, C::kRows, C::kDv) + column);
    else if (dtype == DType::kBF16)
      writer.write(place_of_rows<__nv_bfloat16>(args, item, C::kRows, C::kDv) + column);
    else
      writer.write(place_of_rows<__half>(args, item, C::kRows, C::kDv) + column);
  }

  // ---- merge: of two CTAs each gets the other's sums of its half of the panels, and writes those ----

  static constexpr int kShare = C::kOwnPanels / 2;
  // Where panel p of this thread's share is received: float4s of row tiles, 2,048 bytes apart.
  __device__ __forceinline__ uint32_t part_at(int p) const {
    return map.parts() + (half * kShare + p) * C::kRowTiles * 2048 + 16 * thread_of_group();
  }
  __device__ __forceinline__ void merge(const CudaWorkItem& item) {
    const uint32_t round = weights_round >> 1;
    weights_round ^= 2;
    wait_barrier(map.parts_free(), round);
    // The other's panels go to it: the last ones, if this is the first CTA.
    const int rank = cluster_rank();
#pragma unroll
    for (int p = 0; p < kShare; ++p) {
      const uint32_t to = in_other_cta(part_at(p)), factors = own_factors();
#pragma unroll
      for (int j = 0; j < C::kRowTiles; ++j) {
        const float2 by = load_shared<float2>(factors + 32 * j);
        float sent[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &x = out[p][4 * j + i], &y = out[kShare + p][4 * j + i];
          const float first = finished(x, i % 2 == 0 ? by.x : by.y),
                      last = finished(y, i % 2 == 0 ? by.x : by.y);
          sent[i] = rank == 0 ? last : first;
          x = rank == 0 ? first : last;
        }
        store_remote(to + 2048 * j, {sent[0], sent[1], sent[2], sent[3]});
      }
    }
    __syncwarp();
    if ((thread_of_group() & 31) == 0) {
      fence_cluster();
      arrive_remote(in_other_cta(map.parts_full()));
    }
    wait_for_cluster(map.parts_full(), round);
#pragma unroll
    for (int p = 0; p < kShare; ++p)
#pragma unroll
      for (int j = 0; j < C::kRowTiles; ++j) {
        const float4 part = load_shared<float4>(part_at(p) + 2048 * j);
        out[p][4 * j] += part.x, out[p][4 * j + 1] += part.y;
        out[p][4 * j + 2] += part.z, out[p][4 * j + 3] += part.w;
      }
    arrive_warp(map.parts_empty());
    write<kShare, true>(item, rank * kShare);
  }

  __device__ __forceinline__ void run() {
    if (half == 1) copy_first_queries(args, map, thread_of_group());
    WorkList list(args.plan, worker<C>());
    while (const CudaWorkItem* item = list.next()) {
      const OwnKeys<C> keys(*item);
      const int tiles = ceil_div(keys.end - keys.begin, C::kKeys);
#pragma unroll
      for (int p = 0; p < C::kOwnPanels; ++p)
#pragma unroll
        for (int i = 0; i < kSums; ++i) out[p][i] = 0;
      pin_out();
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) accumulate(i == 0);
      wait_weights();
      if (ctas<C>() == 1)
        write<C::kOwnPanels, false>(*item, 0);
      else if constexpr (C::kClusters)
        merge(*item);
      arrive_warp(map.weights_empty());
    }
  }
};

}  // namespace treemla::wgmma
