// cuda_mma: what follows from a tile of kMmaTiles, the shared-memory map among it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "plan/cuda_tiles.hpp"

namespace treemla::mma {

// What follows from a tile of kMmaTiles, for queries of type T. By three numbers that tell a tile: kernels can't be templates over a value
// of class type.
template <class T_, int kTileDv, int kTileRows, int kTileCache>
struct Config {
  using T = T_;
  static constexpr MmaTile kTile = find_mma_tile(kTileDv, kTileRows, static_cast<MmaCache>(kTileCache));
  static constexpr int kThreads = kTile.threads(), kGroups = kTile.groups(),
                       kGroupTiles = kTile.group_tiles();
  static constexpr int kDv = kTile.d_v, kRows = kTile.rows(), kKeys = MmaTile::kKeys;
  static constexpr int kStages = kTile.stages;
  static constexpr bool kIsFp8 = kTile.cache != MmaCache::k16Bit,
                        kIsPacked = kTile.cache == MmaCache::kPacked;
  // What the latents' scores, the rope's and the values are multiplied in. e4m3 is exact in fp16, which queries reach by a power of two a
  // row; weights times a packed row's scales need the range of bf16.
  using Latent = std::conditional_t<kIsFp8, __half, T>;
  using Rope = std::conditional_t<kIsPacked, __nv_bfloat16, Latent>;
  using Value = std::conditional_t<kIsPacked, __nv_bfloat16, Latent>;
  // One row tile: a group attends, the other copies, and they meet at the ring's barriers alone. There each reader says for itself that it is
  // done with a tile: compute-sanitizer's racecheck doesn't see that the lane which arrives for its warp comes after the others' reads.
  static constexpr bool kOneCopies = kTile.row_tiles == 1;
  // Three groups have three row tiles each, so that a warp of each has none of its own, and copies.
  static constexpr bool kIdleCopies = kGroups == 3;
  static constexpr int kCopyingThreads = kIdleCopies ? 96 : kOneCopies ? 128 : 256;
  // Pieces of 16 columns that a warp accumulates; that it scores, first of the latent part.
  static constexpr int kColumnTiles = kDv / 64;
  static constexpr int kLatentSteps = kDv / 64, kSteps = kTile.steps();
  // The mask is looked up ahead of the barrier that the scores need, if there are registers to keep it in.
  static constexpr bool kEarlyMask = kGroups == 2;
  static constexpr int kSharedQ = kTile.shared_q, kQBytes = kTile.q_bytes();
  static constexpr bool kSharedTops = kTile.shared_tops();

  // Shared memory, in bytes.
  static constexpr int kKeyStride = kTile.key_stride(), kStageBytes = kTile.stage_bytes();
  // A chunk of 16 bytes goes to another place among the 8 (e4m3: 4) around it, by its row's number: 8 rows of a chunk then meet 32 banks, and
  // what comes from the pool as 128 bytes is written as such. Packed rows are an odd number of chunks and stay as they are.
  static constexpr int kMovedPairs = kIsPacked ? 1 : kIsFp8 ? 2 : 4;
  __device__ static constexpr int moved(int row) { return kIsPacked ? 0 : kIsFp8 ? row >> 1 & 3 : row & 7; }
  static constexpr int kElementBytes = kIsFp8 ? 1 : 2;                                      // of a latent
  static constexpr int kRopeAt = kTile.rope_at(), kRopeBytes = kTile.rope_element_bytes();  // within a row
  static constexpr int kTileWeights = MmaTile::kTileWeights, kWeightCopies = kTile.weight_copies();
  static constexpr int kGroupsAt = kStages * kStageBytes, kGroupBytes = kTile.group_bytes();
  static constexpr int kBarriersAt = kGroupsAt + kTile.attending_groups() * kGroupBytes;  // full, then empty
  static constexpr int kSmemBytes = kBarriersAt + 16 * kStages;
  static_assert(kSmemBytes == kTile.smem_bytes() && kSmemBytes <= 99 * 1024 - 256);
};

// A weight may exceed 1 by this power of 2 before sums are rescaled to a new maximum: most maxima then cost nothing, and no digit of
// a bf16 or fp16 weight is lost.
constexpr float kSlack = 8;

// Where a CTA is in the ring of key tiles, from item to item.
struct Ring {
  int stage = 0;       // of the tile in use
  uint32_t round = 0;  // parity of the times round that the ring has been used
};

}  // namespace treemla::mma
