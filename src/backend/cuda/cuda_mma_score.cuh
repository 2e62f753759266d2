// cuda_mma: S^T = K Q^T, a quarter of the columns a warp.
#pragma once

#include "backend/cuda/cuda_mma_worker.cuh"

namespace treemla::mma {

// Fragments of the keys' columns, piece by piece, fetched as far ahead as registers go.
template <class C, Part kPart>
struct Worker<C, kPart>::KeyReader {
  uint32_t latent, rope;
  uint32_t x[1 + kAhead][4];
  __device__ __forceinline__ explicit KeyReader(const Worker& w) {
    const uint32_t row = w.keys + w.ring.stage * C::kStageBytes;
    latent = row + C::kElementBytes * C::kDv / 4 * w.quarter;
    rope = C::kIsPacked ? row + C::kRopeAt + 32 * w.quarter
                        : (row ^ 16 * C::kRopeBytes * w.quarter) + C::kRopeAt;
    if (kAhead == 1) fetch(0);
  }
  // Of FP8 rows two pieces of latents at once, for steps 2 * i and the next.
  static constexpr int kFetches = C::kIsFp8 ? C::kLatentSteps / 2 + 1 : C::kSteps;
  __device__ __forceinline__ void fetch(int i) {
    if (i < kFetches) load_matrices(x[i % (1 + kAhead)], i + 1 < kFetches ? chunks_later(latent, i) : rope);
  }
  __device__ __forceinline__ void read(uint32_t (&a)[4], int step) {
    const int i = C::kIsFp8 ? step / 2 : step;
    if (!C::kIsFp8 || step % 2 == 0) fetch(i + kAhead);
    const auto& y = x[i % (1 + kAhead)];
    if constexpr (!C::kIsFp8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = y[e];
    } else if (C::kIsPacked && step >= C::kLatentSteps) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = y[e];
    } else {
      // Bytes 0 and 1 of a lane's four are its columns t, t + 1 of the piece, bytes 2 and 3 its columns t + 8, t + 9.
      const int second = step < C::kLatentSteps && step % 2 == 1 ? 2 : 0;
      const uint2 lo = widen_quad(y[second]), hi = widen_quad(y[second + 1]);
      a[0] = lo.x, a[1] = hi.x, a[2] = lo.y, a[3] = hi.y;
    }
  }
};

// Returns whether a key may hold NaN or infinity: whatever the query, its score then does.
template <class C, Part kPart>
__device__ __forceinline__ bool Worker<C, kPart>::score(Fragment& own) const {
  float s[kTiles][4] = {};
  KeyReader k(*this);
#pragma unroll
  for (int i = 0; i < C::kSteps; ++i) {
    uint32_t a[4];
    k.read(a, i);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int f = i * kTiles + j;
      const uint2 b = f < kOwnQ ? uint2{q[f][0], q[f][1]} : load_shared<uint2>(shared_q(f));
      if (i < C::kLatentSteps)
        multiply_add<typename C::Latent>(s[j], a, b.x, b.y);
      else
        multiply_add<typename C::Rope>(s[j], a, b.x, b.y);
    }
    if (C::kIsPacked && i + 1 == C::kLatentSteps) {  // a quarter of a packed row has one scale
      const float scale0 = load_shared<float>(scales_at(ring.stage, lane >> 2) + 4 * quarter),
                  scale8 = load_shared<float>(scales_at(ring.stage, (lane >> 2) + 8) + 4 * quarter);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        s[j][0] *= scale0, s[j][1] *= scale0, s[j][2] *= scale8, s[j][3] *= scale8;
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    // Read ahead of the branch, where the compiler would index s by `quarter`, in memory.
    const float4 x = {s[j][0], s[j][1], s[j][2], s[j][3]};
    if (kOwnFirst ? j > 0 : quarter != j)
      store_shared(part_at(tile(j), kOwnFirst ? j : quarter ^ j), x);
    else
      own[0] = x.x, own[1] = x.y, own[2] = x.z, own[3] = x.w;
  }
  return !(fabsf(s[0][0]) < INFINITY && fabsf(s[0][2]) < INFINITY);
}

}  // namespace treemla::mma
