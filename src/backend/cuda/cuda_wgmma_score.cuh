// cuda_wgmma with rows as N, scores: S^T = K Q^T, mask, softmax; weights to shared memory.
#pragma once

#include <type_traits>

#include "backend/cuda/cuda_wgmma_copy.cuh"
#include "backend/cuda/cuda_wgmma_masks.cuh"

namespace treemla::wgmma {

// The scales of a packed tile's keys g and g + 8 of the warp's: lane t of the four that have these keys holds scale t. Shared memory has no
// room for them; they are read from the pool, a tile ahead.
struct PackedScales {
  uint32_t entries[2];
  float scales[2];

  __device__ __forceinline__ static int key_of(int tile_key, int i) {
    return tile_key + (thread_of_group() >> 5) * 16 + (thread_of_group() >> 2 & 7) + 8 * i;
  }
  __device__ __forceinline__ void fetch(const KernelArgs& args, const CudaWorkItem& item, int tile_key) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (key_of(tile_key, i) < item.key_end)
        entries[i] = fetch_entry(args, item.page_base, key_of(tile_key, i));
  }
  // Sums are divided by the scale of the group that they go on with: one that is 0, or next to nothing beside its row's others, becomes so
  // much that it still counts for nothing.
  __device__ __forceinline__ static float divisible(float scale) {
    float largest = fabsf(scale);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1, 4));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2, 4));
    const float least = fmaxf(largest * 0x1p-60f, 0x1p-100f);
    return fabsf(scale) < least ? least : scale;
  }
  // Of the tile whose entries were fetched; of the next one entries are.
  __device__ __forceinline__ void load(const KernelArgs& args, const CudaWorkItem& item, int tile_key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = key_of(tile_key, i);
      scales[i] = 1;
      if (key < item.key_end) {
        const uint64_t at = static_cast<uint64_t>(row_of_entry(args, item, item.page_base, key, entries[i])) *
                                static_cast<uint32_t>(args.kv_row_stride) +
                            4 * kPackedGroup;
        scales[i] = __ldg(reinterpret_cast<const float*>(static_cast<const char*>(args.kv) + at) +
                          (thread_of_group() & 3));
      }
      scales[i] = divisible(scales[i]);
    }
    fetch(args, item, tile_key + WgmmaTile::kKeys);
  }
  __device__ __forceinline__ void begin(const KernelArgs& args, const CudaWorkItem& item, int tile_key) {
    fetch(args, item, tile_key);
    load(args, item, tile_key);
  }
  // From the units of group g to those of the next, after the last to those of the rope columns.
  __device__ __forceinline__ float ratio(int i, int g) const {
    const float own = __shfl_sync(~0u, scales[i], g, 4);
    return g < 3 ? __fdividef(own, __shfl_sync(~0u, scales[i], g + 1, 4)) : own;
  }
};

// Sums of a thread: key g or g + 8 of the warp's 16 x rows 8 j + t, 8 j + t + 1, as multiply() has them.
template <class C>
struct Scorer {
  using T = typename C::T;
  static constexpr int kSums = C::kRows / 2, kOwnRows = C::kRows / 4;
  const KernelArgs& args;
  const SharedMap<C>& map;
  Ring<C::kStages> ring;
  Ring<C::kRopeStages> rope_ring;
  // Parities. Bit 0: of items with keys, for queries; 1: of the uses of the weights' place; 2: of items, for workers of two CTAs.
  uint32_t rounds = 0;
  // Of rows 8 j + t + e, at 2 j + e: sum of the weights of this thread's keys. Its largest score, about, in base-2 logarithms, or more, lies
  // in shared memory.
  float sum[kOwnRows];

  __device__ __forceinline__ Scorer(const KernelArgs& a, const SharedMap<C>& m) : args(a), map(m) {}

  __device__ __forceinline__ float scale() const { return args.score_scale * 1.44269504088896340736f; }
  static constexpr int kBarrier = 1;
  __device__ __forceinline__ static void sync() { sync_group(kBarrier); }

  __device__ __forceinline__ void wait_queries() {
    wait_barrier(map.q_full(), rounds & 1);
    rounds ^= 1;
  }
  __device__ __forceinline__ void wait_weights_used() const {
    wait_barrier(map.weights_empty(), (rounds >> 1 & 1) ^ 1);
  }
  __device__ __forceinline__ void multiply_panel(float (&s)[kSums], uint32_t keys, int p) const {
    const uint64_t a = matrix_at(keys), b = matrix_at(map.q_panel(p));
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply<T, false>(s, matrix_after(a, 32 * k), matrix_after(b, 32 * k), p > 0 || k > 0);
  }
  __device__ __forceinline__ void multiply_tile(float (&s)[kSums]) {
    pin(s);
    // Two chunks at a time, the rope columns with the last: a fence takes as long as a panel's products.
    constexpr int kAtOnce = 2;
#pragma unroll
    for (int c = 0; c < C::kChunks; c += kAtOnce) {
      const bool last = c + kAtOnce >= C::kChunks;
      wait_barrier(map.full(ring.stage, c), ring.round);
      wait_barrier(map.full(ring.stage, c + 1), ring.round);
      if (last) wait_barrier(map.rope_full(rope_ring.stage), rope_ring.round);
      fence_async_reads();
      begin_products();
#pragma unroll
      for (int p = C::kChunkPanels * c; p < C::kChunkPanels * (c + kAtOnce); ++p)
        multiply_panel(s, map.panel(ring.stage, p), p);
      if (last) multiply_panel(s, map.rope(rope_ring.stage), C::kPanels);
    }
    commit_products();
    wait_products<0>();
    pin(s);
  }

  // Packed rows: sums of 128 latents' products are in units of that group's scale, and become those of the next group's.
  __device__ __forceinline__ void multiply_packed_tile(float (&s)[kSums], const PackedScales& scales) {
    pin(s);
#pragma unroll
    for (int c = 0; c <= C::kChunks; ++c) {
      if (c % 2 == 0 && c < C::kChunks) {
        wait_barrier(map.full(ring.stage, c), 0);
        wait_barrier(map.full(ring.stage, c + 1), 0);
        if (c + 2 == C::kChunks) wait_barrier(map.rope_full(rope_ring.stage), rope_ring.round);
        fence_async_reads();
      }
      begin_products();
      if (c == C::kChunks) {
        multiply_panel(s, map.rope(rope_ring.stage), C::kPanels);
      } else {
#pragma unroll
        for (int p = C::kChunkPanels * c; p < C::kChunkPanels * (c + 1); ++p)
          multiply_panel(s, map.panel(ring.stage, p), p);
      }
      commit_products();
      wait_products<0>();
      pin(s);
      if (c == C::kChunks) break;
      const float by = scales.ratio(0, c), by_8 = scales.ratio(1, c);  // keys g, g + 8
#pragma unroll
      for (int i = 0; i < kSums; ++i) s[i] *= i % 4 < 2 ? by : by_8;
      pin(s);
    }
  }

  // By way of the place of the weights: the last ones must be used. True if keys of the tile are not finite.
  __device__ __forceinline__ bool hide(float (&x)[kSums], const CudaWorkItem& item, int tile_key,
                                       const MaskWords& mask) const {
    const int thread = thread_of_group(), lane = thread % 32, warp = thread / 32;
    const bool any = any_nonfinite(x);
    wait_weights_used();
    if (thread < C::kRows) store_shared(map.weights() + 8 * thread, mask.seen(args, item, tile_key));
    const bool of_any = sync_group_or(kBarrier, any);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const uint64_t seen = load_shared<uint64_t>(map.weights() + 8 * (i / 2 * 8 + 2 * (lane & 3) + i % 2)) >>
                            (16 * warp + (lane >> 2));
      if (!(seen & 1)) x[i / 2 * 4 + i % 2] = -INFINITY;
      if (!(seen >> 8 & 1)) x[i / 2 * 4 + 2 + i % 2] = -INFINITY;
    }
    return of_any;
  }
  // Online softmax (Milakov and Gimelshein, 2018): m is about the largest score so far, the weights are 2^(s - m), and
  // 2^(m_old - m) is what the sums so far must be multiplied by. Whether m is raised is a row's own affair: its bits don't depend on others.
  __device__ __forceinline__ uint32_t own_tops() const {
    return opaque(map.tops() + 8 * (thread_of_group() & 3));
  }
  __device__ __forceinline__ bool exceeds(const float (&x)[kSums]) const {
    bool any = false;
    const uint32_t tops = own_tops();
#pragma unroll
    for (int j = 0; j < C::kRowTiles; ++j) {
      const float2 top = load_shared<float2>(tops + 32 * j);
      any |= fmaxf(x[4 * j], x[4 * j + 2]) > top.x + kSlack;
      any |= fmaxf(x[4 * j + 1], x[4 * j + 3]) > top.y + kSlack;
    }
    return any;
  }
  // In the place of the weights, and of factors: of this thread's rows.
  __device__ __forceinline__ uint32_t scratch() const {
    return opaque(map.weights() + 8 * (thread_of_group() & 3));
  }
  __device__ __forceinline__ static int number(int w, int i) {
    return 4 * (w * C::kRows + i / 2 * 8 + i % 2);
  }
  __device__ __forceinline__ void raise_tops(const float (&x)[kSums]) {
    wait_weights_used();
    const int thread = thread_of_group(), lane = thread % 32;
    const uint32_t at = scratch() + 4 * C::kRows * (thread / 32);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      float largest = fmaxf(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      if (lane < 4) store_shared(at + number(0, i), largest);
    }
    sync();
    if (thread < C::kRows) {
      const uint32_t row = 4 * thread;
      const auto of_warp = [&](int w) { return load_shared<float>(map.weights() + 4 * w * C::kRows + row); };
      const float largest = fmaxf(fmaxf(of_warp(0), of_warp(1)), fmaxf(of_warp(2), of_warp(3))),
                  top = load_shared<float>(map.tops() + row);
      const bool raise = largest > top + kSlack;
      const float raised = raise ? largest + kMargin : top;
      store_shared(map.factors() + row, raise ? exp2_fast(top - raised) : 1.0f);
      store_shared(map.tops() + row, raised);
    }
    sync();
    const uint32_t factors = opaque(map.factors() + 8 * (lane & 3));
#pragma unroll
    for (int j = 0; j < C::kRowTiles; ++j) {
      const float2 by = load_shared<float2>(factors + 32 * j);
      sum[2 * j] *= by.x, sum[2 * j + 1] *= by.y;
    }
  }
  // Weights of row tile j, for keys g (0) and g + 8 (1) of the warp's.
  __device__ __forceinline__ void weigh(uint32_t (&w)[2], const float (&x)[kSums], int j, uint32_t tops) {
    float2 top = load_shared<float2>(tops + 32 * j);
    if (top.x == -INFINITY) top.x = 0;  // nothing seen yet: never -inf + inf
    if (top.y == -INFINITY) top.y = 0;
    const float y0 = exp2_fast(x[4 * j] - top.x), y1 = exp2_fast(x[4 * j + 1] - top.y),
                y2 = exp2_fast(x[4 * j + 2] - top.x), y3 = exp2_fast(x[4 * j + 3] - top.y);
    sum[2 * j] += y0 + y2;
    sum[2 * j + 1] += y1 + y3;
    w[0] = narrow_pair<T>(y0, y1);
    w[1] = narrow_pair<T>(y2, y3);
  }
  // Worked out before their place is free.
  __device__ __forceinline__ void store_weights(const float (&x)[kSums]) {
    uint32_t w[C::kRowTiles][2];
    const uint32_t tops = own_tops();
#pragma unroll
    for (int j = 0; j < C::kRowTiles; ++j) weigh(w[j], x, j, tops);
    wait_weights_used();
    const int thread = thread_of_group(), lane = thread % 32, warp = thread / 32;
    // Lane l: row l % 8 of row tile l / 16, keys 8 * (l / 8 % 2) on of the warp's.
    const uint32_t to =
        opaque(map.weights() + swizzled(8 * (lane >> 4) + (lane & 7), 2 * warp + (lane >> 3 & 1)));
#pragma unroll
    for (int j = 0; j + 1 < C::kRowTiles; j += 2)
      store_matrices_transposed(to + 1024 * j, w[j][0], w[j][1], w[j + 1][0], w[j + 1][1]);
    if constexpr (C::kRowTiles % 2 == 1) {
      constexpr int j = C::kRowTiles - 1;
      store_matrices_transposed(to + 1024 * j, w[j][0], w[j][1]);
    }
  }
  __device__ __forceinline__ void hand_over_weights() {
    fence_async_reads();
    arrive_warp(map.weights_full());
    rounds ^= 2;
  }

  // After the last products of an item: rope columns are done with.
  __device__ __forceinline__ void announce_totals() const {
    if (ctas<C>() == 1) return;
    sync();
    if (thread_of_group() == 0) arrive_remote(in_other_cta(map.totals_empty()));
  }

  // Each row's lse, and as its factor what its sums are to be multiplied by.
  __device__ __forceinline__ void finish(const CudaWorkItem& item) {
    const int thread = thread_of_group(), lane = thread % 32, warp = thread / 32;
    wait_weights_used();
    const uint32_t to = scratch();
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
      if (lane < 4) store_shared(to + number(0, i) + 4 * C::kRows * warp, sum[i]);
    }
    sync();
    float total = 0, top = 0;
    if (thread < C::kRows) {
      const auto at = [&](int w) { return load_shared<float>(map.weights() + 4 * (w * C::kRows + thread)); };
      total = (at(0) + at(1)) + (at(2) + at(3));
      top = load_shared<float>(map.tops() + 4 * thread);
    }
    // With those of the other CTA, of a worker of two; and what a sum of this one counts in them.
    float all = total, own = 1;
    if (ctas<C>() > 1) {
      const uint32_t round = rounds >> 2;
      rounds ^= 4;
      if (thread == 0) {
        arrive_remote(in_other_cta(map.parts_free()));
        arrive_and_expect(map.totals_full(), 8 * C::kRows);
      }
      wait_barrier(map.totals_empty(), round);
      const uint32_t place = map.totals() + 8 * thread;
      if (thread < C::kRows)
        store_remote(in_other_cta(place), in_other_cta(map.totals_full()), float2{top, total});
      wait_barrier(map.totals_full(), round);
      if (thread < C::kRows) {
        const float2 other = load_shared<float2>(place);
        if (other.y != 0) {
          const float raised = total == 0 ? other.x : fmaxf(top, other.x);
          own = exp2_fast(top - raised);
          all = total * own + other.y * exp2_fast(other.x - raised);
          top = raised;
        }
      }
    }
    if (thread < C::kRows) {
      store_shared(map.factors() + 4 * thread, total == 0 ? kNoKey : own * args.value_scale / all);
      const int packed = item.row_begin + thread;
      if (packed < item.row_end && (ctas<C>() == 1 || cluster_rank() == 0)) {
        const float lse = all == 0 ? -INFINITY : (top + log2f(all)) * 0.693147180559945309417f;
        if (item.partial >= 0)
          args.partial_lse[static_cast<int64_t>(item.partial) * C::kRows + thread] = lse;
        else if (args.lse)
          args.lse[static_cast<int64_t>(item.q_begin) * args.h_q + packed] = lse;
      }
    }
    sync();
    hand_over_weights();
  }

  __device__ __forceinline__ void score(const CudaWorkItem& item) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) sum[i] = 0;
    if (thread_of_group() < C::kRows) store_shared(map.tops() + 4 * thread_of_group(), -INFINITY);
    sync();
    const OwnKeys<C> keys(item);
    const int key_end = keys.end;
    int key = keys.begin;
    [[maybe_unused]] PackedScales scales;
    if constexpr (C::kIsPacked) scales.begin(args, item, key);
    if (key < key_end)
      wait_queries();
    else
      announce_totals();
#pragma unroll 1
    for (; key < key_end; key += C::kKeys) {
      float x[kSums];
      const bool masks = key + C::kKeys > min(item.prefix_len, key_end);
      MaskWords mask = {};
      if (masks) mask.fetch(args, item, key, thread_of_group());
      if constexpr (C::kIsPacked)
        multiply_packed_tile(x, scales);
      else
        multiply_tile(x);
      arrive_warp(map.rope_empty(rope_ring.stage));
      if (key + C::kKeys >= key_end) {
        arrive_warp(map.q_empty());
        announce_totals();
      }
      if constexpr (C::kIsPacked) scales.load(args, item, key + C::kKeys);
#pragma unroll
      for (int i = 0; i < kSums; ++i) x[i] *= scale();
      if (masks) {
        const bool clears = hide(x, item, key, mask);
        if constexpr (!C::kIsPacked)  // else by whoever scales them
          if (clears) clear_nonfinite<C>(map.panel(ring.stage, 0), item, key);
      }
      const bool raises = sync_group_or(kBarrier, exceeds(x));
      if (raises) raise_tops(x);
      store_weights(x);
      if (thread_of_group() == 0) store_shared(map.raised(), static_cast<int>(raises));
      hand_over_weights();
      ring.step();
      rope_ring.step();
    }
    finish(item);
  }
  __device__ __forceinline__ void run() {
    WorkList list(args.plan, worker<C>());
    while (const CudaWorkItem* item = list.next()) score(*item);
  }
};

}  // namespace treemla::wgmma
