// cuda_mma: keys from the pool to the ring.
#pragma once

#include <type_traits>

#include "backend/cuda/cuda_mma_worker.cuh"
#include "backend/cuda/kernel_io.cuh"

namespace treemla::mma {

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::fetch_entries(int window) {
  const int key = window_key(window);
  if (key < key_end)
    next_entry =
        __ldg(static_cast<const uint32_t*>(args.pages.entries) + (entry_index(key) << args.pages.is_int64));
}

// Pool rows fit 32 bits: supports_kernel() looks. As in pool_row(), an entry outside the pool counts as 0.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::find_rows(int window) {
  const int key = window_key(window);
  rows = 0;
  if (key >= key_end) return;
  const int size = args.pages.page_size.divisor, page = args.pages.page_size.quotient(key);
  const int32_t high = args.pages.is_int64
                           ? __ldg(static_cast<const int32_t*>(args.pages.entries) + 2 * entry_index(key) + 1)
                           : static_cast<int32_t>(next_entry) >> 31;
  uint64_t entry = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | next_entry;
  if (entry >= static_cast<uint64_t>(args.pages.num_pages)) {
    report_fault(args.plan, DeviceFault::kPageEntry, item.request, page);
    entry = 0;
  }
  rows = static_cast<uint32_t>(entry) * size + (key - page * size);
}

// The window that the tile belongs to must be there; first_key goes up by a tile from call to call.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::enter_window(int first_key) {
  if ((first_key & (kWindow - 1)) != 0 || first_key == item.key_begin) return;
  find_rows(first_key);
  fetch_entries(first_key + kWindow);
}

// Rows and the bytes between them fit 32 bits each: supports_kernel() looks.
template <class C, Part kPart>
__device__ __forceinline__ const char* Worker<C, kPart>::row_at(const char* from, uint32_t row) const {
  uint64_t at;
  asm("mad.wide.u32 %0, %1, %2, %3;"
      : "=l"(at)
      : "r"(row), "r"(C::kElementBytes * static_cast<uint32_t>(args.kv_row_stride)), "l"(from));
  return reinterpret_cast<const char*>(at);
}

// The tile whose first key is first_key, `ahead` tiles after the one in use, into the ring. Past the item's end it is zeros that are
// copied.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::copy(int first_key, int ahead) {
  if (first_key >= key_end) return;
  const bool wraps = ring.stage + ahead >= C::kStages;
  const int stage = ring.stage + ahead - (wraps ? C::kStages : 0);
  enter_window(first_key);
  const uint32_t full = smem + C::kBarriersAt + 8 * stage, empty = full + 8 * C::kStages;
  const char* from[kPairs];  // ahead of the wait, where it costs nothing
#pragma unroll
  for (int p = 0; p < kPairs; ++p)
    from[p] = row_at(static_cast<const char*>(args.kv) + 16 * (lane & 15),
                     __shfl_sync(~0u, rows,
                                 static_cast<unsigned>(first_key) / C::kKeys % kWindowTiles * kCopied +
                                     2 * p + (lane >> 4)));
  // Until the groups are done with what was there, a round earlier. Before the first round that is so at once.
  wait_barrier(empty, ring.round ^ !wraps);
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    if (kLastPairMayLack && p + 1 == kPairs && copied_row(p) >= C::kKeys) break;
    const bool ok = first_key + copied_row(p) + (lane >> 4) < key_end;
    const uint32_t to = chunk_at(copied_row(p) + (lane >> 4), lane & 15) + stage * C::kStageBytes;
#pragma unroll
    for (int i = 0; i < kWholeCopies; ++i) copy16(to + 256 * i, from[p] + 256 * i, ok);
    copy16_if((lane & 15) < rest_chunks(), to + 256 * kWholeCopies, from[p] + 256 * kWholeCopies, ok);
  }
  arrive_after_copies(full);
}

// Rope columns that the cache lacks are zeros, which no copy touches. For the copying warps, whose arrival the readers wait for.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::clear_rope() const {
  if (args.d_rope == MmaTile::kRope) return;
  constexpr int kChunks = MmaTile::kRope * C::kRopeBytes / 16;
  for (int i = 32 * copier() + lane; i < C::kStages * C::kKeys * kChunks; i += 32 * kCopiers) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk >= args.d_rope * C::kRopeBytes / 16)
      store_shared(chunk_at(row % C::kKeys, chunk) + row / C::kKeys * C::kStageBytes + C::kRopeAt,
                   uint4{0, 0, 0, 0});
  }
}

// A hidden row may hold NaN or infinity, and a weight of 0 would not keep it out of a product: zeros instead. Whoever sees the row has
// NaN in its weights.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::clear_nonfinite() const {
  const auto clear = [](uint32_t& x) {
    if constexpr (C::kIsFp8) {
      x &= ~(((x & 0x7F7F7F7F) + 0x01010101 >> 7 & 0x01010101) * 0xFF);
    } else {
      clear_nonfinite_pair<T>(x);
    }
  };
  constexpr int kWarps = kPart == Part::kCopy ? 4 : 8;  // a third group has no rows left to clear
  if (C::kGroups > 2 && group() == 2) return;
  const uint32_t at =
      chunk_at(2 * (4 * group() + quarter) + (lane >> 4), lane & 15) + ring.stage * C::kStageBytes;
#pragma unroll
  for (int r = 0; r < C::kKeys; r += 2 * kWarps)
#pragma unroll 1
    for (uint32_t i = at + r * C::kKeyStride; i < at + r * C::kKeyStride + 256 * kWholeCopies; i += 256) {
      uint4 x = load_shared<uint4>(i);
      clear(x.x), clear(x.y), clear(x.z), clear(x.w);
      store_shared(i, x);
    }
}

}  // namespace treemla::mma
