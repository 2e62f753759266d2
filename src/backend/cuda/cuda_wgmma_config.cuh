// cuda_wgmma: what follows from a tile of kWgmmaTiles, the shared-memory map among it.
#pragma once

#include <cstdint>

#include "plan/cuda_tiles.hpp"

namespace treemla::wgmma {

// By two numbers that tell a tile: kernels can't be templates over a value of class type.
template <class T_, int kTileDv, int kTileRows>
struct Config {
  using T = T_;
  static constexpr WgmmaTile kTile = find_wgmma_tile(kTileDv, kTileRows);
  static constexpr int kThreads = WgmmaTile::kThreads;
  static constexpr int kDv = kTile.d_v, kRows = kTile.rows, kKeys = WgmmaTile::kKeys;
  static constexpr int kRowTiles = kRows / 8;  // of 8 rows
  static constexpr int kQRopePanels = 1;       // of the queries' rope columns, in shared memory
  static constexpr int kPanels = kTile.panels(), kChunkPanels = WgmmaTile::kChunkPanels,
                       kChunks = kTile.chunks();
  static constexpr int kOwnChunks = kChunks / 2, kOwnPanels = kPanels / 2;  // of a warpgroup that accumulates
  static constexpr bool kClusters = kTile.can_cluster(DType::kBF16);
  static constexpr int kStages = kTile.stages, kRopeStages = kTile.rope_stages;

  // Registers of a thread, by warpgroup: 512 altogether.
  static constexpr int kCopyRegisters = kRows == 72 ? 48 : 64, kValueRegisters = kRows == 72 ? 176 : 160,
                       kScoreRegisters = 512 - kCopyRegisters - 2 * kValueRegisters;

  // Shared memory, in bytes.
  static constexpr int kPanelBytes = WgmmaTile::kPanelBytes, kQPanelBytes = 128 * kRows;
  static constexpr int kRopeAt = kStages * kPanels * kPanelBytes;
  static constexpr int kQAt = kTile.q_at(), kWeightsAt = kTile.weights_at();
  static constexpr int kFactorsAt = kTile.factors_at(), kTopsAt = kFactorsAt + 4 * kRows,
                       kRaisedAt = kTopsAt + 4 * kRows;
  static constexpr bool kIsPacked = false;   // see cuda_wgmma_fp8.cuh
  static constexpr int kFullArrivals = 128;  // of keys: a thread's when its copies have landed
  // Barriers: full, what is to be read is there; empty, it has been, and its place is free. Of chunks, rope columns, queries, weights.
  static constexpr int kFullAt = kTile.barriers_at();
  static constexpr int kRopeFullAt = kFullAt + 8 * kStages * kChunks;
  static constexpr int kEmptyAt = kRopeFullAt + 8 * kRopeStages;
  static constexpr int kRopeEmptyAt = kEmptyAt + 8 * kStages * kChunks;
  static constexpr int kQFullAt = kRopeEmptyAt + 8 * kRopeStages, kQEmptyAt = kQFullAt + 8;
  static constexpr int kWeightsFullAt = kQEmptyAt + 8, kWeightsEmptyAt = kQEmptyAt + 16;
  // Of clusters: the places of totals and of parts, free in every CTA; they are here; parts are read.
  static constexpr int kTotalsEmptyAt = kWeightsEmptyAt + 8, kTotalsFullAt = kTotalsEmptyAt + 8,
                       kPartsFreeAt = kTotalsEmptyAt + 16, kPartsFullAt = kTotalsEmptyAt + 24,
                       kPartsEmptyAt = kTotalsEmptyAt + 32;
  static constexpr int kSmemBytes = kTile.smem_bytes();
  static_assert(kQAt % 1024 == 0 && kWeightsAt % 1024 == 0, "swizzled rows");
  static_assert(kPartsEmptyAt + 8 <= kSmemBytes && kSmemBytes <= 227 * 1024);
};

// A weight may exceed 1 by this power of 2 before sums are rescaled to a new maximum: most maxima then cost nothing, and no digit of
// a bf16 or fp16 weight is lost.
constexpr float kSlack = 8;
// A raised maximum is set this much higher than the score, so that the next ones rarely pass it again: raising takes half of a tile's time.
constexpr float kMargin = 4;

// A place in a ring that is gone through from work item to work item.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t round = 0;  // parity of the times round
  __device__ __forceinline__ void step() {
    if (++stage == kStages) {
      stage = 0;
      round ^= 1;
    }
  }
};

}  // namespace treemla::wgmma
