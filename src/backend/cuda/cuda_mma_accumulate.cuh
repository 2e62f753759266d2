// cuda_mma: O^T = O^T * shrink + V^T P^T, a quarter of the columns a warp.
#pragma once

#include "backend/cuda/cuda_mma_worker.cuh"

namespace treemla::mma {

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::shrink_out(int first_key) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (load_shared<int>(raised_at(tile(j))) != first_key) continue;
    const float2 shrink = load_shared<float2>(shrink_at(tile(j), lane & 3));
#pragma unroll
    for (int c = 0; c < C::kColumnTiles; ++c) {
      out[c][j][0] *= shrink.x, out[c][j][1] *= shrink.y;
      out[c][j][2] *= shrink.x, out[c][j][3] *= shrink.y;
    }
  }
}

// Fragments of V^T, 16 columns after the other. FP8: rows of fragments are columns 2 * g and 2 * g + 1 where they are g and g + 8 of
// 16-bit caches.
template <class C, Part kPart>
struct Worker<C, kPart>::ValueReader {
  uint32_t at;
  uint32_t x[1 + kAhead][4];
  __device__ __forceinline__ explicit ValueReader(const Worker& w) {
    // Lane l has key l % 8 + 8 * (l / 16), columns 8 * (l / 8 % 2) on; of FP8 rows key l % 16, columns 16 * (l / 16) on.
    const int key = C::kIsFp8 ? w.lane & 15 : (w.lane & 7) + (w.lane >> 4) * 8,
              half = C::kIsFp8 ? w.lane >> 4 : w.lane >> 3 & 1;
    at = w.chunk_at(key, half) + w.ring.stage * C::kStageBytes + C::kElementBytes * C::kDv / 4 * w.quarter;
    fetch(0);
  }
  static constexpr int kFetches = C::kIsFp8 ? C::kColumnTiles / 2 : C::kColumnTiles;
  __device__ __forceinline__ void fetch(int i) {
    if (i < kFetches) load_matrices_transposed(x[i % (1 + kAhead)], chunks_later(at, i));
  }
  __device__ __forceinline__ void read(uint32_t (&a)[4], int c) {
    const int i = C::kIsFp8 ? c / 2 : c;
    if ((!C::kIsFp8 || c % 2 == 0) && i + kAhead > 0) fetch(i + kAhead);
    const auto& y = x[i % (1 + kAhead)];
    if constexpr (!C::kIsFp8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = y[e];
    } else {
      // A lane's bytes: columns 2 * g, 2 * g + 1 of key t, then of key t + 1.
      const int first = c % 2 * 2;
      const uint2 lo = widen_columns<typename C::Value>(y[first]),
                  hi = widen_columns<typename C::Value>(y[first + 1]);
      a[0] = lo.x, a[1] = lo.y, a[2] = hi.x, a[3] = hi.y;
    }
  }
};

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::accumulate(ValueReader& v, int first_key, bool shrinks) {
  uint32_t p[kTiles][2];
  // Lane l has key l % 16 of row tile l / 16.
  const uint32_t weights = own + kWeightsAt + (C::kIsPacked ? quarter * kWeightsBytes : 0) +
                           C::kTileWeights * tile(lane >> 4) + 16 * (lane & 15);
#pragma unroll
  for (int j = 0; j + 1 < kTiles; j += 2) {
    uint32_t x[4];
    // From the first pair's row tiles to the second's: tile(j) ^ 2.
    const int pair = kOwnFirst && j == 2 && (quarter & 2) ? -2 : j;
    load_matrices_transposed(x, weights + C::kTileWeights * pair);
    p[j][0] = x[0], p[j][1] = x[1], p[j + 1][0] = x[2], p[j + 1][1] = x[3];
  }
  if constexpr (kTiles % 2 == 1) {
    constexpr int j = kTiles - 1;  // only lanes 0-15 say where
    load_matrices_transposed(p[j][0], p[j][1], weights + C::kTileWeights * j);
  }
  if (shrinks) shrink_out(first_key);
#pragma unroll
  for (int c = 0; c < C::kColumnTiles; ++c) {
    uint32_t a[4];
    v.read(a, c);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) multiply_add<typename C::Value>(out[c][j], a, p[j][0], p[j][1]);
  }
}

}  // namespace treemla::mma
