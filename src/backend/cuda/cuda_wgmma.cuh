// The device code of cuda_wgmma; cuda_wgmma.cu says what it computes, with the shared-memory map and the layouts.
#pragma once

#include <iterator>
#include <type_traits>

#include "backend/cuda/cuda_wgmma_config.cuh"
#include "backend/cuda/fragment_output.cuh"
#include "backend/cuda/half_types.cuh"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/ptx_sm80.cuh"
#include "backend/cuda/ptx_sm90.cuh"
#include "backend/cuda/work_list.cuh"
#include "plan/cuda_tiles.hpp"

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

// ---- pool rows, of which the page table's entries are fetched a tile ahead ----

__device__ __forceinline__ int64_t entry_index(const KernelArgs& args, int64_t page_base, int key) {
  return page_base + args.pages.page_size.quotient(key);
}
// Of a 64-bit entry the lower half: unread, so that nobody waits for it.
__device__ __forceinline__ uint32_t fetch_entry(const KernelArgs& args, int64_t page_base, int key) {
  return __ldg(static_cast<const uint32_t*>(args.pages.entries) +
               (entry_index(args, page_base, key) << args.pages.is_int64));
}
// Pool rows fit 32 bits: supports_kernel() looks. As in pool_row(), an entry outside the pool counts as 0.
__device__ __forceinline__ uint32_t row_of_entry(const KernelArgs& args, const CudaWorkItem& item,
                                                 int64_t page_base, int key, uint32_t low) {
  const int size = args.pages.page_size.divisor, page = args.pages.page_size.quotient(key);
  const int32_t high =
      args.pages.is_int64
          ? __ldg(static_cast<const int32_t*>(args.pages.entries) + 2 * entry_index(args, page_base, key) + 1)
          : static_cast<int32_t>(low) >> 31;
  uint64_t entry = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | low;
  if (entry >= static_cast<uint64_t>(args.pages.num_pages)) {
    report_fault(args.plan, DeviceFault::kPageEntry, item.request, page);
    entry = 0;
  }
  return static_cast<uint32_t>(entry) * size + (key - page * size);
}

// ---- copy: keys and queries to shared memory, by 128 threads, 8 a row, 16 bytes a thread ----

// Element 0 of a (node, head) row of the item's request.
__device__ __forceinline__ int64_t query_at(const KernelArgs& args, const CudaWorkItem& item, int packed) {
  const int node = packed / args.h_q, head = packed - node * args.h_q;
  return (static_cast<int64_t>(item.q_begin) + node) * args.q_token_stride + head * args.q_head_stride;
}
// Rows first_row + 16 i of an item's queries, chunk of 16 bytes of each panel: by the 128 threads of a warpgroup.
template <class C>
__device__ __forceinline__ void copy_queries(const KernelArgs& args, const SharedMap<C>& map,
                                             const CudaWorkItem& item, int first_row, int chunk) {
#pragma unroll 1
  for (int row = first_row; row < C::kRows; row += 16) {
    const int packed = item.row_begin + row;
    const bool ok = packed < item.row_end;
    const char* from = static_cast<const char*>(args.q) + 16 * chunk;
    if (ok) from += 2 * query_at(args, item, packed);
    const bool has_rope = ok && 8 * chunk < args.d_rope;
#pragma unroll
    for (int p = 0; p < C::kPanels + C::kQRopePanels; ++p)
      copy16(map.q_panel(p) + swizzled(row, chunk), from + (p < C::kPanels || has_rope ? 128 * p : 0),
             p < C::kPanels ? ok : has_rope);
  }
  arrive_after_copies(map.q_full());
}

template <class C>
struct Copier {
  const KernelArgs& args;
  const SharedMap<C>& map;
  int first_row, chunk;  // rows first_row + 16 i; chunk of 16 bytes of a panel's 128
  Ring<C::kStages> ring;
  Ring<C::kRopeStages> rope_ring;
  uint32_t q_round = 0;
  bool has_begun = false;
  static constexpr int kKeyRows = C::kKeys / 16;
  // This thread's chunk of the first panel of its rows, and what the page table says of one of the next tile.
  const char* rows[kKeyRows];
  uint32_t entry;

  __device__ __forceinline__ Copier(const KernelArgs& a, const SharedMap<C>& m, int thread)
      : args(a), map(m), first_row(thread / 8), chunk(thread % 8) {}

  // Of the 16 rows of a warp lane l looks up one: row l / 4 % 4 of those lanes whose first_row is l % 4 on. So nobody waits for four lookups.
  static_assert(kKeyRows == 4);
  __device__ __forceinline__ int looked_up() const {
    return (first_row & ~3) + (chunk & 3) + 16 * (2 * (first_row & 1) + (chunk >> 2));
  }
  __device__ __forceinline__ void fetch_entries(const CudaWorkItem& item, int tile_key) {
    const int key = tile_key + looked_up();
    if (key < item.key_end) entry = fetch_entry(args, item.page_base, key);
  }
  // The bytes between rows fit 32 bits: supports_kernel() looks. Rows past the item's end are row 0, of which nothing is read.
  __device__ __forceinline__ void find_rows(const CudaWorkItem& item, int tile_key) {
    const int key = tile_key + looked_up();
    const uint32_t one = key < item.key_end ? row_of_entry(args, item, item.page_base, key, entry) : 0;
#pragma unroll
    for (int i = 0; i < kKeyRows; ++i) {
      const uint32_t row = __shfl_sync(~0u, one, 4 * i + (first_row & 3));
      rows[i] = static_cast<const char*>(args.kv) + 16 * chunk +
                static_cast<uint64_t>(row) * (2 * static_cast<uint32_t>(args.kv_row_stride));
    }
  }
  // A tile of which the item has so many keys.
  __device__ __forceinline__ void copy_keys(int num_keys) {
    num_keys -= first_row;  // row i is there if 16 i < num_keys
    const uint32_t to = map.panel(ring.stage, 0) + swizzled(first_row, chunk);
#pragma unroll
    for (int c = 0; c < C::kChunks; ++c) {
      wait_barrier(map.empty(ring.stage, c), ring.round ^ 1);
#pragma unroll
      for (int i = 0; i < kKeyRows; ++i)
#pragma unroll
        for (int p = C::kChunkPanels * c; p < C::kChunkPanels * (c + 1); ++p)
          copy16(to + p * C::kPanelBytes + 2048 * i, rows[i] + 128 * p, 16 * i < num_keys);
      arrive_after_copies(map.full(ring.stage, c));
    }
    const bool has_rope = 8 * chunk < args.d_rope;
    wait_barrier(map.rope_empty(rope_ring.stage), rope_ring.round ^ 1);
#pragma unroll
    for (int i = 0; i < kKeyRows; ++i)
      copy16(map.rope(rope_ring.stage) + swizzled(first_row, chunk) + 2048 * i,
             rows[i] + (has_rope ? 128 * C::kPanels : 0), has_rope && 16 * i < num_keys);
    arrive_after_copies(map.rope_full(rope_ring.stage));
    ring.step();
    rope_ring.step();
  }
  // Of this CTA's first keys they are on their way by now: see begin(), of who accumulates.
  __device__ __forceinline__ void copy_queries(const CudaWorkItem& item) {
    wait_barrier(map.q_empty(), q_round ^ 1);
    q_round ^= 1;
    if (has_begun) treemla::wgmma::copy_queries(args, map, item, first_row, chunk);
    has_begun = true;
  }
  __device__ __forceinline__ void run() {
    WorkList list(args.plan, worker<C>());
    uint32_t parts_round = 1;
    while (const CudaWorkItem* item = list.next()) {
      const OwnKeys<C> keys(*item);
      const int key_begin = keys.begin, key_end = keys.end;
      fetch_entries(*item, key_begin);
      // The last item's parts lie where keys go.
      if (ctas<C>() > 1) wait_barrier(map.parts_empty(), parts_round);
      parts_round ^= 1;
#pragma unroll 1
      for (int key = key_begin; key < key_end; key += C::kKeys) {
        find_rows(*item, key);
        fetch_entries(*item, key + C::kKeys);
        copy_keys(key_end - key);
        if (key == key_begin) copy_queries(*item);
      }
    }
    wait_copies<0>();
  }
};

// Who copies for a configuration; FP8 caches: cuda_wgmma_fp8.cuh.
template <class C>
struct CopierOf {
  using Type = Copier<C>;
};

// ---- score: S^T = K Q^T, mask, softmax; weights to shared memory ----

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

// ---- masks ----

// Bit i: the row sees key tile_key + i. Any number of them for rows that are padding.
__device__ __forceinline__ uint64_t seen_keys(const KernelArgs& args, const CudaWorkItem& item, int tile_key,
                                              int row) {
  const int packed = min(item.row_begin + row, item.row_end - 1), node = packed / args.h_q;
  const int first = tile_key - item.prefix_len,
            before = max(-first, 0);  // tree key of bit 0; keys of the prefix
  const auto lowest = [](int n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
  uint64_t seen = ~uint64_t{0};
  if (before < WgmmaTile::kKeys) {
    const int from = max(first, 0);
    uint64_t tree = ~uint64_t{0};
    if (args.mask.kind == MaskKind::kCausal) {
      tree = lowest(max(node + 1 - from, 0));
    } else if (args.mask.kind == MaskKind::kTree) {
      const uint32_t* words = args.mask.bits + (static_cast<int64_t>(item.q_begin) + node) * args.mask.words;
      const auto word = [&](int i) { return i < args.mask.words ? words[i] : 0u; };
      const int w = from >> 5;
      tree = static_cast<uint64_t>(__funnelshift_r(word(w + 1), word(w + 2), from)) << 32 |
             __funnelshift_r(word(w), word(w + 1), from);
    }
    seen = tree << before | lowest(before);
  }
  return seen & lowest(item.key_end - tile_key);
}
// A hidden row may hold NaN or infinity, and a weight of 0 would not keep it out of a product: zeros instead. Whoever sees the row has
// NaN among its weights.
template <class C>
__device__ __forceinline__ void clear_nonfinite(uint32_t panels, const CudaWorkItem& item, int tile_key) {
  const int thread = thread_of_group();
  constexpr int kRowChunks = 8 * C::kPanels;
  const int begin = max(item.prefix_len - tile_key, 0), end = min(item.key_end - tile_key, C::kKeys);
#pragma unroll 1
  for (int i = begin * kRowChunks + thread; i < end * kRowChunks; i += 128) {
    const int row = i / kRowChunks, c = i % kRowChunks;
    const uint32_t at = panels + c / 8 * C::kPanelBytes + row * 128 + c % 8 * 16;
    uint4 x = load_shared<uint4>(at);
    clear_nonfinite_pair<typename C::T>(x.x), clear_nonfinite_pair<typename C::T>(x.y);
    clear_nonfinite_pair<typename C::T>(x.z), clear_nonfinite_pair<typename C::T>(x.w);
    store_shared(at, x);
  }
}

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
  __device__ __forceinline__ static void sync() { sync_group<kBarrier>(); }

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

  // By way of the place of the weights: the last ones must be used.
  __device__ __forceinline__ void hide(float (&x)[kSums], const CudaWorkItem& item, int tile_key) const {
    const int thread = thread_of_group(), lane = thread % 32, warp = thread / 32;
    wait_weights_used();
    if (thread < C::kRows) store_shared(map.weights() + 8 * thread, seen_keys(args, item, tile_key, thread));
    sync();
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      const uint64_t seen = load_shared<uint64_t>(map.weights() + 8 * (i / 2 * 8 + 2 * (lane & 3) + i % 2)) >>
                            (16 * warp + (lane >> 2));
      if (!(seen & 1)) x[i / 2 * 4 + i % 2] = -INFINITY;
      if (!(seen >> 8 & 1)) x[i / 2 * 4 + 2 + i % 2] = -INFINITY;
    }
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
      if (key + C::kKeys > min(item.prefix_len, key_end)) {
        hide(x, item, key);
        if constexpr (!C::kIsPacked)
          clear_nonfinite<C>(map.panel(ring.stage, 0), item, key);  // else by whoever scales them
      }
      const bool raises = sync_group_or<kBarrier>(exceeds(x));
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

// ---- accumulate: O^T = O^T * shrink + V^T P^T over half of the columns, and write ----

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

  // The queries of this CTA's first keys: whoever copies those would come to them a microsecond later.
  __device__ __forceinline__ void begin() const {
    WorkList list(args.plan, worker<C>());
    while (const CudaWorkItem* item = list.next()) {
      const OwnKeys<C> keys(*item);
      if (keys.begin == keys.end) continue;
      copy_queries(args, map, *item, thread_of_group() / 8, thread_of_group() % 8);
      return;
    }
  }
  __device__ __forceinline__ void run() {
    if (half == 1) begin();
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

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_kernel(const __grid_constant__ KernelArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const SharedMap<C> map{static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory))};
  if (threadIdx.x == 0) map.init_barriers();
  allow_dependent_launch();
  if (ctas<C>() > 1)
    sync_cluster();
  else
    __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0),
            thread = static_cast<int>(threadIdx.x) % 128;
  if (group == 0) {
    set_registers<C::kCopyRegisters>();
    typename CopierOf<C>::Type(args, map, thread).run();
  } else if (group == 1) {
    set_registers<C::kScoreRegisters>();
    Scorer<C>(args, map).run();
  } else {
    set_registers<C::kValueRegisters>();
    Accumulator<C>(args, map, group - 2).run();
  }
#endif
}

// The kernel of a tile for queries and caches of type T.
template <class T, int i = 0>
const void* find_kernel(const WgmmaTile& tile) {
  if constexpr (i == static_cast<int>(std::size(kWgmmaTiles))) {
    return nullptr;
  } else {
    constexpr const WgmmaTile& kTile = kWgmmaTiles[i];
    if constexpr (kTile.rows_are_m) {  // see cuda_wgmma_rows.cuh
      return find_kernel<T, i + 1>(tile);
    } else {
      if (tile.d_v != kTile.d_v || tile.rows != kTile.rows) return find_kernel<T, i + 1>(tile);
      return reinterpret_cast<const void*>(&wgmma_kernel<Config<T, kTile.d_v, kTile.rows>>);
    }
  }
}

}  // namespace treemla::wgmma
