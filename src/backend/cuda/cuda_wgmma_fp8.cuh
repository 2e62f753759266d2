// cuda_wgmma for FP8 caches: who copies also widens, and everyone else finds 16-bit keys.
//
// 128 latents of a row, a chunk, are 128 bytes, which eight threads copy to the row's place in the first of the two panels that the chunk
// will fill. Each reads its 16 bytes again when its own copies have landed, waits for the others of the warp to have read theirs, and
// stores 32 bytes: no barrier in between. Raw bytes must lie without gaps: 16 in every 32 took 8 times as long to be written, and twice
// the reads of L2.
//
//     raw       | 0 1 2 3 4 5 6 7 |                                   thread t copies 16 of 128 bytes
//     widened   | 0 0 1 1 2 2 3 3 |    | 4 4 5 5 6 6 7 7 |            rows of two panels, swizzled
//
//     issue     | tile i, chunk by chunk as places come free |                  | tile i + 1
//     widen                                                  | tile i - kLag    |
//
// With two tiles in shared memory a tile is widened once all of it is on its way; with more, kLag tiles later, and those are on their way
// meanwhile.
//
// Whoever multiplies fences what it saw written from its products' reads. A fence of the writer's would also wait for all copies that are
// on their way.
//
// Packed rows are scored as they are, unscaled: e4m3 is exact in bf16, and a scale meets its sums in float32 (Scorer), whereas rounded
// products of latents and scales would move lse by more than its bound. The values are such products, rounded once: when a tile has been
// scored its latents are multiplied where they lie, while the softmax runs, and handed over a second time. Both happen in each round of
// the ring, so that a chunk's `full` ends an even phase when it may be scored, an odd one when it may be accumulated.
//
//     issue     | tile i |           |                   | tile i + 1 |
//     scale              | tile i - kLag - 1, scored by now           | ...
//     widen                          | tile i - kLag     |
#pragma once

#include "backend/cuda/cuda_wgmma.cuh"

namespace treemla::wgmma {

// Caches of e4m3 with one scale, queries of type T; or of packed rows, bf16 queries.
template <class T, int kTileDv, int kTileRows, bool kPacked>
struct Fp8Config : Config<T, kTileDv, kTileRows> {
  static constexpr bool kIsPacked = kPacked, kClusters = false;
  static constexpr int kFullArrivals = 4;  // of keys: a warp's when it has widened them
  // Widening is bound by how much of it is under way at once.
  static constexpr int kCopyRegisters = kTileRows != 72 ? 96
                                        : kPacked       ? 64
                                                        : 72,
                       kValueRegisters = kTileRows == 72  ? 176
                                         : kTileRows > 16 ? 160
                                                          : 144,
                       kScoreRegisters = 512 - kCopyRegisters - 2 * kValueRegisters;
};

template <class C>
struct Fp8Copier : Copier<C> {
  using Base = Copier<C>;
  using T = typename C::T;
  using Base::args, Base::map, Base::ring, Base::rope_ring, Base::first_row, Base::chunk, Base::kKeyRows;
  // The next tile to widen; without lag that is the last one issued, and these are not used.
  Ring<C::kStages> widened;
  Ring<C::kRopeStages> widened_rope;
  // Lane l has pool row l % 16 of the warp's, which is row l % 4 + 16 * (l % 16 / 4) after the warp's first, and what the page table says
  // of the next tile's.
  uint32_t pool_row, entry;
  // With one place for rope columns, which is free only when the tile before is scored, they wait for it in registers.
  static constexpr bool kRopeInRegisters = C::kRopeStages == 1 && !C::kIsPacked;
  uint4 rope_raw[kKeyRows / 2];
  // Tiles under way when one is widened, and groups of copies of a tile: its chunks, its rope columns.
  static constexpr int kLag = C::kStages - 2, kGroups = C::kChunks + !kRopeInRegisters;
  static_assert(C::kRopeStages > kLag, "the rope columns of tile i take the place of a tile that is widened");
  // Where a packed row's scales and rope columns begin.
  static constexpr int kScalesAt = C::kDv, kRopeAt = C::kDv + (C::kIsPacked ? C::kDv / kPackedGroup * 4 : 0);
  static constexpr int kRowsApart = 16 * 128;  // in a panel, this thread's
  // Packed rows: of tiles not scaled yet, the oldest last, scale `chunk` % 4 of rows i and i + 1, where i is 0 if chunk < 4, else 2; and
  // the first of the tile's keys whose latents must be cleared of what is not finite.
  struct RowScales {
    float of[2];
    int clear_from;
  };
  RowScales scales[kLag + 1];

  // The work item, and what of it is needed too often to be read each time.
  struct Keys {
    const CudaWorkItem* item = nullptr;
    int64_t kept_page_base = 0;
    int end = 0;
    // Read each time where registers are few.
    __device__ __forceinline__ int64_t page_base() const {
      return C::kRows == 72 ? item->page_base : kept_page_base;
    }
  };

  __device__ __forceinline__ Fp8Copier(const KernelArgs& a, const SharedMap<C>& m, int thread)
      : Base(a, m, thread) {}

  // first_row is 4 * warp + lane / 8, chunk lane % 8.
  __device__ __forceinline__ int own_key(int tile_key) const {
    return tile_key + (first_row & ~3) + (chunk & 3) + 16 * ((first_row & 1) * 2 + (chunk >> 2));
  }
  __device__ __forceinline__ void arrive_warp(uint32_t barrier) const {
    __syncwarp();
    if (((first_row & 3) | chunk) == 0) arrive(barrier);
  }
  __device__ __forceinline__ void fetch_entries(const Keys& keys, int tile_key) {
    const int key = own_key(tile_key);
    if (key < keys.end) entry = fetch_entry(args, keys.page_base(), key);
  }
  __device__ __forceinline__ void find_rows(const Keys& keys, int tile_key) {
    const int key = own_key(tile_key);
    pool_row = key < keys.end ? row_of_entry(args, *keys.item, keys.page_base(), key, entry) : 0;
  }
  // Row first_row + 16 i of the tile found last, in the pool.
  __device__ __forceinline__ const char* row_at(int i) const {
    const uint32_t found = __shfl_sync(~0u, pool_row, 4 * i + (first_row & 3));
    return static_cast<const char*>(args.kv) +
           static_cast<uint64_t>(found) * static_cast<uint32_t>(args.kv_row_stride);
  }
  // Of the rows found last; none: the others grow older all the same.
  __device__ __forceinline__ void fetch_scales(const Keys& keys, int tile_key, bool none) {
#pragma unroll
    for (int j = kLag; j > 0; --j) scales[j] = scales[j - 1];
    if (none) return;
    scales[0].clear_from = keys.item->prefix_len - tile_key;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = (chunk & 4) / 2 + j;
      const char* from = row_at(i) + kScalesAt + 4 * (chunk & 3);
      scales[0].of[j] = 0;
      if (tile_key + first_row + 16 * i < keys.end)
        scales[0].of[j] = __ldg(reinterpret_cast<const float*>(from));
    }
  }

  // A tile of which the item has so many keys.
  __device__ __forceinline__ void issue(int num_keys) {
    num_keys -= first_row;  // row i is there if 16 i < num_keys
    const char* rows[kKeyRows];
#pragma unroll
    for (int i = 0; i < kKeyRows; ++i) rows[i] = row_at(i) + 16 * chunk;
    const uint32_t place = swizzled(first_row, chunk);
#pragma unroll
    for (int c = 0; c < C::kChunks; ++c) {
      // Each half of the values frees its chunks in order: once for all where nothing is gained by less.
      if (kLag == 0)
        wait_barrier(map.empty(ring.stage, c), ring.round ^ 1);
      else if (c < 2)
        wait_barrier(map.empty(ring.stage, C::kChunks - 2 + c), ring.round ^ 1);
      const uint32_t to = map.panel(ring.stage, C::kChunkPanels * c) + place;
#pragma unroll
      for (int i = 0; i < kKeyRows; ++i) copy16(to + kRowsApart * i, rows[i] + 128 * c, 16 * i < num_keys);
      commit_copies();
    }
    const uint32_t rope = map.rope(rope_ring.stage);
    if constexpr (!kRopeInRegisters) wait_barrier(map.rope_empty(rope_ring.stage), rope_ring.round ^ 1);
    if constexpr (C::kIsPacked) {
      const bool has_rope = 8 * chunk < args.d_rope;
#pragma unroll
      for (int i = 0; i < kKeyRows; ++i)
        copy16(rope + place + kRowsApart * i, rows[i] + (has_rope ? kRopeAt : 0),
               has_rope && 16 * i < num_keys);
    } else {  // 64 bytes a row: four threads each of two rows
      const int quarter = chunk & 3, odd = chunk >> 2;
      const bool has_rope = 16 * quarter < args.d_rope;
#pragma unroll
      for (int i = 0; i < kKeyRows; i += 2) {
        const char* from = (odd ? rows[i + 1] - 64 : rows[i]) + (has_rope ? kRopeAt : 0);
        const bool ok = has_rope && 16 * (i + odd) < num_keys;
        if constexpr (kRopeInRegisters)
          rope_raw[i / 2] = ok ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
        else
          copy16(rope + swizzled(first_row, quarter) + kRowsApart * (i + odd), from, ok);
      }
    }
    if constexpr (!kRopeInRegisters) commit_copies();
    ring.step();
    rope_ring.step();
  }

  // 16 latents; those of half of the threads lie the other way round, so that 8 lanes of a row meet 8 different groups of banks.
  __device__ __forceinline__ void widen_raw(const uint4& raw, uint32_t first, uint32_t second) const {
    const bool swaps = chunk & 4;
    const uint2 x = widen_quad_to<T>(swaps ? raw.z : raw.x), y = widen_quad_to<T>(swaps ? raw.w : raw.y),
                z = widen_quad_to<T>(swaps ? raw.x : raw.z), w = widen_quad_to<T>(swaps ? raw.y : raw.w);
    store_shared(first, uint4{x.x, x.y, y.x, y.y});
    store_shared(second, uint4{z.x, z.y, w.x, w.y});
  }
  // Where the two lie in the row of a panel, in the order of widen_raw().
  __device__ __forceinline__ uint32_t wide_place() const {
    return swizzled(first_row, 2 * (chunk & 3) + (chunk >> 2));
  }
  // Until this thread's copies of group g of the tile have landed, kLag whole tiles being issued after it.
  template <int g>
  __device__ __forceinline__ static void wait_group() {
    wait_copies<kLag * kGroups + kGroups - 1 - g>();
  }
  // Rows that are read at once, while those before are widened; by addresses that are constants apart.
  static constexpr int kAtOnce = C::kRows == 72 ? 2 : 4, kSteps = kKeyRows / kAtOnce;
  struct Raw {
    uint4 of[kAtOnce];
  };
  template <int step>
  __device__ __forceinline__ static void read_raw(Raw& raw, uint32_t from) {
    if constexpr (step % kSteps == 0) wait_group<step / kSteps>();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      raw.of[i] = load_shared<uint4>(from + step / kSteps * C::kChunkPanels * C::kPanelBytes +
                                     kRowsApart * (step % kSteps * kAtOnce + i));
  }
  // The next tile's latents from a step on.
  template <int step>
  __device__ __forceinline__ void widen_from(const Raw& raw, int stage, uint32_t from, uint32_t first,
                                             uint32_t second) {
    constexpr int kChunk = step / kSteps, kNext = step + 1;
    Raw next;
    if constexpr (kNext < kSteps * C::kChunks) read_raw<kNext>(next, from);
    __syncwarp();  // all have read what is written over
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      constexpr int kAt = kChunk * C::kChunkPanels * C::kPanelBytes;
      const int at = kAt + kRowsApart * (step % kSteps * kAtOnce + i);
      widen_raw(raw.of[i], first + at, second + at);
    }
    if constexpr (kNext % kSteps == 0) arrive_warp(map.full(stage, kChunk));
    if constexpr (kNext < kSteps * C::kChunks) widen_from<kNext>(next, stage, from, first, second);
  }
  __device__ __forceinline__ void widen() {
    const int stage = kLag == 0 ? before(ring).stage : widened.stage,
              rope_stage = kLag == 0 ? before(rope_ring).stage : widened_rope.stage;
    const uint32_t panel = map.panel(stage, 0), from = opaque(panel + swizzled(first_row, chunk)),
                   first = opaque(panel + (chunk >> 2) * C::kPanelBytes + wide_place()),
                   second = opaque(first ^ 16);
    Raw raw;
    read_raw<0>(raw, from);
    widen_from<0>(raw, stage, from, first, second);
    if constexpr (kRopeInRegisters)
      wait_barrier(map.rope_empty(rope_stage), before(rope_ring).round ^ 1);
    else
      wait_group<C::kChunks>();
    if constexpr (!C::kIsPacked) {
      const uint32_t rope = map.rope(rope_stage) + kRowsApart * (chunk >> 2),
                     wide = opaque(rope + wide_place());
      if constexpr (!kRopeInRegisters) {
#pragma unroll
        for (int i = 0; i < kKeyRows / 2; ++i)
          rope_raw[i] = load_shared<uint4>(rope + swizzled(first_row, chunk & 3) + 2 * kRowsApart * i);
        __syncwarp();
      }
#pragma unroll
      for (int i = 0; i < kKeyRows / 2; ++i)
        widen_raw(rope_raw[i], wide + 2 * kRowsApart * i, (wide ^ 16) + 2 * kRowsApart * i);
    }
    arrive_warp(map.rope_full(rope_stage));
    if constexpr (kLag > 0) widened.step(), widened_rope.step();
  }

  // Times a scale, as a sum of two bf16: rounded once, about.
  struct Factor {
    __nv_bfloat162 high, low;
    __device__ __forceinline__ explicit Factor(float x) : high(__float2bfloat162_rn(x)) {
      low = __float2bfloat162_rn(x - __low2float(high));
    }
    __device__ __forceinline__ void scale(uint32_t& x) const {
      const auto y = reinterpret_cast<const __nv_bfloat162&>(x);
      const __nv_bfloat162 z = __hfma2(y, high, __hmul2(y, low));
      x = reinterpret_cast<const uint32_t&>(z);
    }
    __device__ __forceinline__ void scale(uint4& x) const { scale(x.x), scale(x.y), scale(x.z), scale(x.w); }
  };
  __device__ __forceinline__ static void clear(uint4& x) {
    clear_nonfinite_pair<T>(x.x), clear_nonfinite_pair<T>(x.y);
    clear_nonfinite_pair<T>(x.z), clear_nonfinite_pair<T>(x.w);
  }
  static constexpr int kScaledAtOnce = C::kRows == 72 ? 2 : 4;
  // The youngest widened tile, once it has been scored: of each thread what it has widened.
  __device__ __forceinline__ void scale(bool ended) {
    auto own = before(kLag == 0 ? ring : widened);
    auto own_rope = before(kLag == 0 ? rope_ring : widened_rope);
    if (kLag == 0 && !ended) own = before(own), own_rope = before(own_rope);  // one more is issued
    wait_barrier(map.rope_empty(own_rope.stage), own_rope.round);
    const RowScales& by = scales[kLag];
    const uint32_t first = opaque(map.panel(own.stage, 0) + (chunk >> 2) * C::kPanelBytes + wide_place()),
                   second = opaque(first ^ 16);
#pragma unroll
    for (int c = 0; c < C::kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kKeyRows; i += kScaledAtOnce) {
        const int at = C::kChunkPanels * c * C::kPanelBytes + kRowsApart * i;
        uint4 x[kScaledAtOnce][2];
#pragma unroll
        for (int j = 0; j < kScaledAtOnce; ++j) {
          x[j][0] = load_shared<uint4>(first + at + kRowsApart * j);
          x[j][1] = load_shared<uint4>(second + at + kRowsApart * j);
        }
#pragma unroll
        for (int j = 0; j < kScaledAtOnce; ++j) {
          const Factor factor(__shfl_sync(~0u, by.of[(i + j) % 2], (i + j) / 2 * 4 + c, 8));
          factor.scale(x[j][0]), factor.scale(x[j][1]);
          if (first_row + 16 * (i + j) >= by.clear_from) clear(x[j][0]), clear(x[j][1]);
        }
#pragma unroll
        for (int j = 0; j < kScaledAtOnce; ++j) {
          store_shared(first + at + kRowsApart * j, x[j][0]);
          store_shared(second + at + kRowsApart * j, x[j][1]);
        }
      }
      arrive_warp(map.full(own.stage, c));
    }
  }
  template <int kStages>
  __device__ __forceinline__ static Ring<kStages> before(Ring<kStages> r) {
    if (r.stage == 0) return {kStages - 1, r.round ^ 1};
    return {r.stage - 1, r.round};
  }

  // One step a tile, and as many after the last as tiles wait for one.
  __device__ __forceinline__ void run() {
    WorkList list(args.plan, static_cast<int>(blockIdx.x));
    Keys keys;
    int key = 0, left = kLag + C::kIsPacked;
    int under_way = 0;      // tiles issued and not widened
    bool unscaled = false;  // the last widened tile is not scaled yet
    bool ended = false;
#pragma unroll 1
    for (;;) {
      bool begins = false;
      if (!ended) {
        key += C::kKeys;
#pragma unroll 1
        while (key >= keys.end) {
          keys.item = list.next();
          ended = keys.item == nullptr;
          if (ended) break;
          begins = true;
          key = keys.item->key_begin, keys.end = keys.item->key_end,
          keys.kept_page_base = keys.item->page_base;
          fetch_entries(keys, key);
        }
      }
      if (ended && left-- == 0) break;
      if (!ended) {
        find_rows(keys, key);
        fetch_entries(keys, key + C::kKeys);
        issue(keys.end - key);
        ++under_way;
        if (kLag == 0 && begins) Base::copy_queries(*keys.item);
      }
      if constexpr (C::kIsPacked) {
        if (unscaled) scale(ended);
        unscaled = false;
        fetch_scales(keys, key, ended);
      }
      // The place of the queries is free once all tiles before are scored.
      const int stay = ended ? 0 : kLag > 0 && begins ? 1 : kLag;
      static_assert(kLag <= 1 || !C::kIsPacked, "a tile widened a step");
#pragma unroll 1
      for (; under_way > stay; --under_way) {
        if (kLag > 0 && under_way <= kLag) {  // fewer were issued after it
          if (ended)
            wait_copies<0>();
          else
            wait_copies<kGroups>();
        }
        widen();
        unscaled = true;
      }
      if (kLag > 0 && begins) Base::copy_queries(*keys.item);
    }
    wait_copies<0>();
  }
};

template <class T, int kTileDv, int kTileRows, bool kPacked>
struct CopierOf<Fp8Config<T, kTileDv, kTileRows, kPacked>> {
  using Type = Fp8Copier<Fp8Config<T, kTileDv, kTileRows, kPacked>>;
};

// The kernel of a tile for FP8 caches and queries of type T.
template <class T, bool kPacked, int i = 0>
const void* find_fp8_kernel(const WgmmaTile& tile) {
  if constexpr (i == static_cast<int>(std::size(kWgmmaTiles))) {
    return nullptr;
  } else {
    constexpr const WgmmaTile& kTile = kWgmmaTiles[i];
    if constexpr (kTile.cost(kPacked ? DType::kF8E4M3Packed : DType::kF8E4M3) == 0) {
      return find_fp8_kernel<T, kPacked, i + 1>(tile);
    } else {
      if (tile.d_v != kTile.d_v || tile.rows != kTile.rows) return find_fp8_kernel<T, kPacked, i + 1>(tile);
      return reinterpret_cast<const void*>(&wgmma_kernel<Fp8Config<T, kTile.d_v, kTile.rows, kPacked>>);
    }
  }
}

}  // namespace treemla::wgmma
