// cuda_wgmma: keys and queries to shared memory, by 128 threads, 8 a row, 16 bytes a thread.
#pragma once

#include "backend/cuda/cuda_wgmma_shared.cuh"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/work_list.cuh"

namespace treemla::wgmma {

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

// Element 0 of a (node, head) row of the item's request.
__device__ __forceinline__ int64_t query_at(const KernelArgs& args, const CudaWorkItem& item, int packed) {
  const int node = args.heads.quotient(packed), head = packed - node * args.h_q;
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
// Those of this CTA's first keys, by a warpgroup that has nothing to do yet: whoever copies keys would come to them a microsecond later.
template <class C>
__device__ __forceinline__ void copy_first_queries(const KernelArgs& args, const SharedMap<C>& map,
                                                   int thread) {
  WorkList list(args.plan, worker<C>());
  while (const CudaWorkItem* item = list.next()) {
    const OwnKeys<C> keys(*item);
    if (keys.begin == keys.end) continue;
    copy_queries(args, map, *item, thread / 8, thread % 8);
    return;
  }
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
  // Of this CTA's first keys they are on their way by now: see copy_first_queries().
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

}  // namespace treemla::wgmma
