// Tiles and shared memory of the CUDA kernels, as data: the kernels are compiled from these figures, the planner splits by them
// and `treemla plan` prints them for any card.
#pragma once

#include <cstdint>

#include "plan/split.hpp"

namespace treemla {

// cuda_naive: a block per (node, head) row, all of the row's scores in shared memory. No split.
struct NaiveTile {
  static constexpr int kThreads = 256;
  static constexpr int kBytesPerKey = 4;  // a float32 score
  // The query and the scratch of block-wide sums; the scores come on top.
  static constexpr int fixed_bytes(int d_qk) { return 4 * (round_up(d_qk, 4) + kThreads); }
  static constexpr int64_t smem_bytes(int d_qk, int64_t keys) { return fixed_bytes(d_qk) + kBytesPerKey * round_up<int64_t>(keys, 4); }
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

}  // namespace treemla
