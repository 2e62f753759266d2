// Tiles and shared memory of the CUDA kernels, as data: the kernels are compiled from these figures, the planner splits by them
// and `treemla plan` prints them for any card.
#pragma once

#include <cstdint>

#include "plan/split.hpp"
#include "treemla/dtype.hpp"

namespace treemla {

// cuda_naive: a block per (node, head) row, all of the row's scores in shared memory. No split.
struct NaiveTile {
  static constexpr int kThreads = 256;
  static constexpr int kBytesPerKey = 4;  // a float32 score
  // The query and the scratch of block-wide sums; the scores come on top.
  static constexpr int fixed_bytes(int d_qk) { return 4 * (round_up(d_qk, 4) + kThreads); }
  static constexpr int64_t smem_bytes(int d_qk, int64_t keys) {
    return fixed_bytes(d_qk) + kBytesPerKey * round_up<int64_t>(keys, 4);
  }
  // One key tile for all keys of a row: nothing is ever split.
  static constexpr TilePolicy policy(int64_t keys) {
    TilePolicy t;
    t.rows_per_tile = 1;
    t.keys_per_tile = static_cast<int>(keys < 1 ? 1 : keys);
    return t;
  }
};

// cuda_head_tile: 8 heads (consecutive rows) share each tile of 24 keys.
struct HeadTile {
  static constexpr int kThreads = 128;
  static constexpr int kRows = 8;
  static constexpr int kKeys = 24;
  static constexpr int kPad = 16;  // floats after each row: see the bank drawing in cuda_head_tile.cu
  static constexpr int smem_bytes(int d_qk) {
    // queries, keys, probabilities and three numbers a row
    return 4 * (kRows * (d_qk + kPad) + kKeys * d_qk + kKeys * kRows + 3 * kRows);
  }
  static constexpr TilePolicy policy() {
    TilePolicy t;
    t.rows_per_tile = kRows;
    t.keys_per_tile = kKeys;
    t.row_cost = 1;
    t.load_cost = kRows;      // loading a tile takes about as long as using it
    t.pair_cost = 4 * kRows;  // queries in, output or partial out: about two tiles
    return t;
  }
};

// cuda_warp_per_key: one row a block, a warp a key.
struct WarpPerKey {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  // Elements of a row that a lane loads at once. The scalar instance: 1.
  static constexpr int vector_width(int element_bytes) { return 16 / element_bytes; }
  // The query in lane order, its rope part padded to a whole warp-wide load; an accumulator, 32 row offsets, a maximum and a sum for each
  // warp.
  static constexpr int smem_bytes(int d_v, int d_rope, int width) {
    return 4 * (d_v + round_up(d_rope, 32 * width) + kWarps * (d_v + 64 + 2));
  }
  static constexpr TilePolicy policy() {
    TilePolicy t;
    t.rows_per_tile = 1;
    t.keys_per_tile = 64;  // 8 keys a warp
    t.row_cost = 2;
    t.pair_cost = 2;  // merging 8 warps and writing a row: about 64 keys
    return t;
  }
};

// cuda_fp32_tiled: 4 * thread_rows rows against tiles of `keys` keys, 8 warps, each with an eighth of the columns. The arithmetic of a row
// depends on `keys` alone, so tiles of equal `keys` give equal bits.
struct Fp32Tile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  int d_v = 0;
  int thread_rows = 0;  // rows of a thread
  int keys = 0;         // keys of a tile
  int slots = 0;        // rows of the key ring, a tile and some more to be loaded ahead
  int unroll = 1;       // ring groups a turn of the value loop: what the compiler schedules best
  int tile_cost = 0;    // measured: tenths of a microsecond a tile takes on an SM of the H200

  constexpr int rows() const { return 4 * thread_rows; }
  // Columns of a cached row that a warp owns: its values and up to 8 rope columns.
  constexpr int slice() const { return d_v / kWarps + 8; }
  // Floats from key to key of scores and weights. 4 modulo 8 spreads a warp's stores over the banks; at 24 rows that would be 28, and pass
  // the 163 KB of sm_80.
  constexpr int stride() const { return thread_rows % 2 == 1 || thread_rows == 6 ? rows() : rows() + 4; }
  constexpr int q_bytes() const { return 4 * kWarps * slice() * rows(); }
  constexpr int ring_bytes() const { return 4 * kWarps * slice() * slots; }
  constexpr int scores_bytes() const { return 4 * keys * stride(); }
  constexpr int smem_bytes() const {
    return q_bytes() + ring_bytes() + (kWarps + 1) * scores_bytes() + 4 * rows();
  }

  // In tenths of a microsecond on the H200.
  constexpr TilePolicy policy() const {
    TilePolicy t;
    t.rows_per_tile = rows();
    t.row_granularity = rows();  // narrow row tiles take as long as full ones
    t.keys_per_tile = keys;
    t.row_cost = 0;
    t.load_cost = tile_cost;
    t.pair_cost = 90;
    return t;
  }
};

// The compiled instances. Widest rows first: they make the most of each loaded key.
inline constexpr Fp32Tile kFp32Tiles[] = {
    {512, 10, 32, 36, 1, 96},  // sm_90: many rows
    {512, 9, 32, 44, 2, 89},   // sm_90: 36 rows, the 72 of 8 heads x 9 nodes in two tiles
    {512, 8, 32, 44, 2, 75},   // sm_90: 32 rows, 64 and 128 heads without a padded row
    {512, 6, 32, 36, 2, 64},   // sm_80: all that 163 KB hold
    {512, 4, 32, 44, 1, 49},   // few rows
    {512, 2, 32, 56, 2, 33},   // 8 rows, a decoded token of a TP8 rank: the deep ring hides the memory
    {512, 4, 16, 20, 1, 34},   // sm_86, sm_89, sm_120: all that 99 KB hold
    {512, 2, 16, 32, 1, 23},  {256, 10, 32, 48, 1, 60},  // sm_80, sm_90
    {256, 6, 32, 44, 1, 44},  {256, 4, 32, 44, 1, 32},   // from here on any card
    {256, 2, 32, 56, 1, 23},
};

constexpr Fp32Tile find_fp32_tile(int d_v, int rows, int keys) {
  for (const Fp32Tile& t : kFp32Tiles)
    if (t.d_v == d_v && t.rows() == rows && t.keys == keys) return t;
  return {};
}

// The tile that should end first for `requests` requests of about `rows` (node, head) rows and at most `keys` keys; null if none fits the
// card. Cards that can hold tiles of 32 keys never mix them with those of 16, so that a row's bits don't depend on the choice.
inline const Fp32Tile* choose_fp32_tile(int d_v, int64_t requests, int64_t rows, int64_t keys,
                                        int num_workers, int64_t smem_per_block) {
  const Fp32Tile* best = nullptr;
  int64_t best_cost = 0;
  for (const Fp32Tile& t : kFp32Tiles) {
    if (t.d_v != d_v || t.smem_bytes() > smem_per_block || (best != nullptr && t.keys < best->keys)) continue;
    const TilePolicy policy = t.policy();
    const int64_t unit = policy.load_cost, pair = policy.pair_cost + ceil_div<int64_t>(keys, t.keys) * unit;
    int64_t cost = ceil_div<int64_t>(requests * ceil_div<int64_t>(rows, t.rows()) * pair, num_workers);
    if (cost < policy.pair_cost + unit) cost = policy.pair_cost + unit;
    if (best == nullptr || cost < best_cost) {
      best = &t;
      best_cost = cost;
    }
  }
  return best;
}

// How cuda_mma finds the cache: in 16 bits, as e4m3 with one scale, or as packed rows with a scale every 128 latents.
enum class MmaCache { k16Bit, kE4M3, kPacked };
constexpr MmaCache mma_cache(DType kv_dtype) {
  return kv_dtype == DType::kF8E4M3         ? MmaCache::kE4M3
         : kv_dtype == DType::kF8E4M3Packed ? MmaCache::kPacked
                                            : MmaCache::k16Bit;
}

// cuda_mma: row_tiles x 8 (node, head) rows against tiles of 16 keys, by groups of four warps. A row's bits don't depend on the tile.
struct MmaTile {
  static constexpr int kKeys = 16;
  static constexpr int kRope = 64;  // rope columns that there is room for
  int d_v = 0;
  MmaCache cache = MmaCache::k16Bit;
  int row_tiles = 0;  // of 8 rows
  int stages = 3;     // of the ring of key tiles
  // Of a group's queries, fragments of 16 columns and 8 rows a warp that live in shared memory; the others are in registers.
  int shared_q = 0;
  int blocks = 1;  // an SM, as far as registers go
  // Hundredths of a microsecond that a key tile takes on an SM of the H200, as measured or between two that were.
  int tile_cost = 0;

  constexpr int rows() const { return 8 * row_tiles; }
  // Two groups, or three if they divide the row tiles; of a single row tile the second group only copies.
  constexpr int groups() const { return row_tiles % 3 == 0 ? 3 : 2; }
  constexpr int attending_groups() const { return row_tiles == 1 ? 1 : groups(); }
  constexpr int group_tiles() const { return row_tiles / attending_groups(); }
  constexpr int threads() const { return 128 * groups(); }
  // Do the rows' maxima live in shared memory?
  constexpr bool shared_tops() const { return groups() > 2; }
  // Bytes of a row of the ring, with room for all rope columns.
  constexpr int element_bytes() const { return cache == MmaCache::k16Bit ? 2 : 1; }
  constexpr int rope_element_bytes() const { return cache == MmaCache::kE4M3 ? 1 : 2; }
  constexpr int rope_at() const {
    return d_v * element_bytes() + (cache == MmaCache::kPacked ? d_v / 128 * 4 : 0);
  }
  constexpr int key_stride() const { return rope_at() + kRope * rope_element_bytes(); }
  constexpr int stage_bytes() const { return kKeys * key_stride(); }
  // Pieces of 16 columns of a quarter of a row.
  constexpr int steps() const { return d_v / 64 + kRope / 64; }
  static constexpr int kTileWeights = 2 * 8 * kKeys;  // bytes of a row tile's weights
  // Weights times each of the four scales of a packed row.
  constexpr int weight_copies() const { return cache == MmaCache::kPacked ? 4 : 1; }
  // Fragments of queries, and while they are made 512 bytes a warp.
  constexpr int q_bytes() const {
    const int fragments = shared_q * 4 * 256;
    return cache == MmaCache::k16Bit && fragments < 2048 ? 2048 : fragments;
  }
  // Queries, three parts of the scores, weights, factors, maxima and marks.
  constexpr int group_bytes() const {
    const int per_tile = 3 * 512 + weight_copies() * kTileWeights + (shared_tops() ? 64 : 32) +
                         (cache == MmaCache::k16Bit ? 0 : 32) + 4;
    return round_up(q_bytes() + group_tiles() * per_tile, 32);
  }
  constexpr int smem_bytes() const {
    return stages * (stage_bytes() + 16) + attending_groups() * group_bytes();
  }

  // In hundredths of a microsecond on the H200.
  constexpr TilePolicy policy() const {
    TilePolicy t;
    t.rows_per_tile = rows();
    t.row_granularity = rows();  // narrow row tiles take as long as full ones
    t.keys_per_tile = kKeys;
    t.row_cost = 0;
    t.load_cost = tile_cost;
    t.pair_cost = 600 + 60 * row_tiles;
    t.merge_cost = 250;
    t.piece_cost = 3;
    t.reread_percent = 10;
    return t;
  }
};

// The compiled instances. Widest rows first: they make the most of each loaded key.
inline constexpr MmaTile kMmaTiles[] = {
    {512, MmaCache::k16Bit, 9, 3, 9, 1, 117},    // 72 rows: 8 heads x 9 nodes
    {512, MmaCache::k16Bit, 8, 3, 8, 1, 94},     // 64 rows
    {512, MmaCache::k16Bit, 4, 4, 0, 1, 80},     // 32 rows
    {512, MmaCache::k16Bit, 2, 4, 0, 2, 105},    // 16 rows
    {512, MmaCache::k16Bit, 1, 4, 0, 2, 70},     // 8 rows: a decoded token of a TP8 rank
    {256, MmaCache::k16Bit, 8, 4, 0, 1, 84},     // 64 rows
    {256, MmaCache::k16Bit, 2, 4, 0, 2, 86},     // 16 rows
    {512, MmaCache::kE4M3, 9, 4, 11, 1, 118},    // 72 rows
    {512, MmaCache::kE4M3, 8, 6, 6, 1, 97},      // 64 rows
    {512, MmaCache::kE4M3, 4, 8, 0, 1, 77},      // 32 rows
    {512, MmaCache::kE4M3, 1, 8, 0, 2, 75},      // 8 rows
    {256, MmaCache::kE4M3, 8, 8, 0, 1, 86},      // 64 rows
    {512, MmaCache::kPacked, 9, 3, 14, 1, 150},  // packed rows: 72 rows
    {512, MmaCache::kPacked, 8, 5, 8, 1, 123},   // 64 rows
    {512, MmaCache::kPacked, 4, 7, 0, 1, 92},    // 32 rows
    {512, MmaCache::kPacked, 1, 7, 0, 2, 92},    // 8 rows
};

constexpr MmaTile find_mma_tile(int d_v, int rows, MmaCache cache) {
  for (const MmaTile& t : kMmaTiles)
    if (t.d_v == d_v && t.rows() == rows && t.cache == cache) return t;
  return {};
}

// The tile that should end first for `requests` requests of about `rows` (node, head) rows and at most `keys` keys.
inline const MmaTile* choose_mma_tile(int d_v, MmaCache cache, int64_t requests, int64_t rows, int64_t keys,
                                      int num_sms, int64_t smem_per_sm) {
  const MmaTile* best = nullptr;
  int64_t best_cost = 0;
  for (const MmaTile& t : kMmaTiles) {
    if (t.d_v != d_v || t.cache != cache) continue;
    const int64_t by_smem = smem_per_sm / (t.smem_bytes() + 1024);
    SplitParams split;
    split.tile = t.policy();
    split.num_workers =
        static_cast<int>(num_sms * (by_smem < t.blocks ? (by_smem > 0 ? by_smem : 1) : t.blocks));
    const int64_t cost = equal_batch_cost(split, equal_batch(split, requests, rows, keys));
    if (best == nullptr || cost < best_cost) {
      best = &t;
      best_cost = cost;
    }
  }
  return best;
}

// cuda_wgmma: `rows` (node, head) rows against tiles of 64 keys on Hopper: a warpgroup that copies, one that scores, two that accumulate.
//
// Two forms of it, by what the rows are of wgmma's m64nNk16: N, of which there may be any multiple of 8; or M, in tiles of 64 that take less
// of shared memory's bandwidth, by two warpgroups that score and accumulate (16-bit caches; cuda_wgmma_rows.cuh). A row's bits depend on the
// form alone.
struct WgmmaTile {
  static constexpr int kThreads = 512, kRowsAreMThreads = 384;
  static constexpr int kKeys = 64;
  static constexpr int kRope = 64;              // rope columns that there is room for
  static constexpr int kPanelColumns = 64;      // shared memory has rows in panels of 128 bytes
  static constexpr int kPanelBytes = 64 * 128;  // of a tile of keys
  static constexpr int kChunkPanels = 2;        // what is handed from warpgroup to warpgroup at once
  int d_v = 0;
  int rows = 0;
  int stages = 2;       // of latents
  int rope_stages = 1;  // of rope columns, which are done with earlier
  // Hundredths of a microsecond that a key tile takes on an SM of the H200: of a 16-bit cache, of e4m3 with one scale, of packed rows. 0: not
  // compiled for these.
  int tile_cost = 0, e4m3_tile_cost = 0, packed_tile_cost = 0;
  bool rows_are_m = false;
  constexpr int threads() const { return rows_are_m ? kRowsAreMThreads : kThreads; }
  constexpr int cost(DType kv_dtype) const {
    return kv_dtype == DType::kF8E4M3         ? e4m3_tile_cost
           : kv_dtype == DType::kF8E4M3Packed ? packed_tile_cost
                                              : tile_cost;
  }

  // Narrow tiles leave little to merge, and start sooner without what clusters need; FP8 rows leave no registers for it.
  constexpr bool can_cluster(DType kv_dtype) const { return rows >= 64 && !is_fp8(kv_dtype) && !rows_are_m; }
  constexpr int panels() const { return d_v / kPanelColumns; }
  constexpr int chunks() const { return panels() / kChunkPanels; }
  constexpr int q_at() const { return (stages * panels() + rope_stages) * kPanelBytes; }
  // Where rows are M, the queries' rope columns are in registers, and two tiles have weights, factors and maxima at a time.
  constexpr int weights_at() const { return q_at() + (panels() + (rows_are_m ? 0 : 1)) * rows * 128; }
  // A factor and a maximum a row, a mark, barriers.
  constexpr int factors_at() const { return weights_at() + (rows_are_m ? 2 : 1) * rows * 128; }
  constexpr int barriers_at() const { return factors_at() + (rows_are_m ? 32 : 8) * rows + 16; }
  constexpr int num_barriers() const { return 2 * (stages * chunks() + rope_stages) + 9; }
  constexpr int smem_bytes() const { return barriers_at() + 8 * num_barriers(); }

  // In hundredths of a microsecond on the H200.
  constexpr TilePolicy policy(DType kv_dtype) const {
    TilePolicy t;
    t.rows_per_tile = rows;
    t.row_granularity = rows;  // narrow row tiles take as long as full ones
    t.keys_per_tile = kKeys;
    t.row_cost = 0;
    t.load_cost = cost(kv_dtype);
    t.pair_cost = rows_are_m ? 700 : 300 + 11 * rows / 2;
    t.merge_cost = 200;
    t.piece_cost = rows > 32 ? rows / 24 : 0;
    t.switch_cost = 2 * t.pair_cost;
    t.reread_percent = 36;
    t.cluster_cost = 400;
    return t;
  }
};

// The compiled instances. Widest rows first: they make the most of each loaded key.
inline constexpr WgmmaTile kWgmmaTiles[] = {
    {512, 72, 2, 1, 213, 300, 510},  // 8 heads x 9 nodes
    {512, 64, 2, 2, 194, 260, 450},
    {512, 32, 2, 2, 205, 250, 440},
    {512, 16, 3, 1, 195},  // e4m3: the next tile's rope columns would need a place before these are scored
    {512, 8, 3, 3, 195, 210, 430},  // a decoded token of a TP8 rank
    {256, 64, 4, 4, 120, 150},
    {256, 16, 5, 5, 120, 130},
    {512, 64, 2, 2, 161, 0, 0, true},  // hundreds of rows a request
};

constexpr WgmmaTile find_wgmma_tile(int d_v, int rows, bool rows_are_m = false) {
  for (const WgmmaTile& t : kWgmmaTiles)
    if (t.d_v == d_v && t.rows == rows && t.rows_are_m == rows_are_m) return t;
  return {};
}

// A tile, and how many CTAs work as one: they share out the keys of a row tile and merge what they have in each other's shared memory.
struct WgmmaChoice {
  const WgmmaTile* tile = nullptr;
  int cluster = 1;
};

// What should end first for `requests` requests of about `rows` (node, head) rows and at most `keys` keys; null for a d_v without tiles.
// Two CTAs a worker only where each pair of a row tile and its keys then has a worker of its own: nothing is left to merge by way of memory.
// If a row's bits must not depend on the batch, of one form, and no two CTAs merge.
inline WgmmaChoice choose_wgmma(int d_v, DType kv_dtype, int64_t requests, int64_t rows, int64_t keys,
                                int num_sms, bool batch_invariant = false) {
  WgmmaChoice best;
  int64_t best_cost = 0;
  for (const WgmmaTile& t : kWgmmaTiles)
    for (const int cluster : {1, 2}) {
      SplitParams split;
      split.tile = clustered(t.policy(kv_dtype), cluster);
      split.num_workers = num_sms >= cluster ? num_sms / cluster : 1;
      if (t.d_v != d_v || split.tile.load_cost == 0) continue;
      // Few rows wait for memory, of which narrow tiles keep more on its way.
      if (t.rows_are_m && (batch_invariant || rows < t.rows)) continue;
      const BatchCost batch = equal_batch(split, requests, rows, keys);
      if (cluster > 1 && (!t.can_cluster(kv_dtype) || batch.pairs > split.num_workers)) continue;
      int64_t cost = cluster > 1 ? whole_cost(split, batch) : equal_batch_cost(split, batch);
      cost += t.rows;  // narrower if they end together
      if (best.tile == nullptr || cost < best_cost) {
        best = {&t, cluster};
        best_cost = cost;
      }
    }
  if (batch_invariant) best.cluster = 1;
  return best;
}

// Is it faster than cuda_mma, as measured on the H200? It is wherever 16-bit caches are concerned; FP8 rows are widened by one warpgroup,
// which few rows wait for, packed ones in few tiles as well.
constexpr bool prefers_wgmma(const WgmmaTile& tile, DType kv_dtype, int64_t keys) {
  if (kv_dtype == DType::kF8E4M3) return tile.rows > 8;
  if (kv_dtype == DType::kF8E4M3Packed) return tile.rows > 8 && keys > 512;
  return true;
}

}  // namespace treemla
