// cuda_mma: parts of the scores added up, masked and turned into weights.
#pragma once

#include "backend/cuda/cuda_mma_worker.cuh"

namespace treemla::mma {

// Bit e: hidden from row e % 2 is key e / 2 * 8 of this lane. Rows that are padding: as from the last one. Of both rows at a time, since each
// waits for words of the mask.
template <class C, Part kPart>
__device__ __forceinline__ unsigned Worker<C, kPart>::hidden_bits(int j, int first_key) const {
  const int first = first_key - item.prefix_len, from = max(first, 0),
            before = max(-first, 0);  // tree key of bit 0 of `tree`; keys of the prefix
  unsigned bits = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int packed = item.row_begin + tile_row(j) + 2 * (lane & 3) + r,
              node = args.heads.quotient(min(packed, item.row_end - 1));
    uint32_t tree = ~0u;
    if (args.mask.kind == MaskKind::kCausal) {
      const int seen = node + 1 - from;
      tree = seen >= 32 ? ~0u : (1u << max(seen, 0)) - 1;
    } else if (args.mask.kind == MaskKind::kTree) {
      const uint32_t* words = args.mask.bits + (static_cast<int64_t>(item.q_begin) + node) * args.mask.words;
      const int w = from >> 5;
      const uint32_t low = w < args.mask.words ? __ldg(words + w) : 0,
                     high = w + 1 < args.mask.words ? __ldg(words + w + 1) : 0;
      tree = __funnelshift_r(low, high, from);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = (lane >> 2) + 8 * h;
      const bool hidden = first_key + i >= key_end || (i >= before && (tree >> (i - before) & 1) == 0);
      bits |= static_cast<unsigned>(hidden) << (2 * h + r);
    }
  }
  return bits;
}

// Online softmax (Milakov and Gimelshein, 2018), in three steps: m is about the largest score so far, the weights are 2^(s - m), and
// shrink = 2^(m_old - m) is what the sums so far must be multiplied by.
// Adds the others' parts to this warp's. In pairs, so that the sum is the same whoever makes it: a row's bits don't depend on its place.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::gather_scores(Fragment& x, int j, int first_key,
                                                                unsigned hidden) const {
  const float4 v1 = load_shared<float4>(part_at(j, 1)), v2 = load_shared<float4>(part_at(j, 2)),
               v3 = load_shared<float4>(part_at(j, 3));
  float2 scale;
  if constexpr (C::kIsFp8)
    scale = load_shared<float2>(row_scale_at(j, lane & 3));
  else
    scale.x = scale.y = score_scale();
  x[0] = ((x[0] + v1.x) + (v2.x + v3.x)) * scale.x;
  x[1] = ((x[1] + v1.y) + (v2.y + v3.y)) * scale.y;
  x[2] = ((x[2] + v1.z) + (v2.z + v3.z)) * scale.x;
  x[3] = ((x[3] + v1.w) + (v2.w + v3.w)) * scale.y;
  if (first_key <= last_unmasked) return;
  if constexpr (!C::kEarlyMask) hidden = hidden_bits(j, first_key);
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (hidden >> e & 1) x[e] = -INFINITY;
}

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::load_tops(int pair) {
  const float2 x = load_shared<float2>(top_at(quarter, pair));
  tops[0] = x.x, tops[1] = x.y;
}

// True if this one does.
template <class C, Part kPart>
__device__ __forceinline__ bool Worker<C, kPart>::raise_tops(const Fragment& x, int j, int first_key) {
  float largest[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
  const bool raise = __any_sync(~0u, largest[0] > tops[0] + kSlack || largest[1] > tops[1] + kSlack);
  if (raise) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2)
        largest[e] = fmaxf(largest[e], __shfl_xor_sync(~0u, largest[e], step));
      float shrink = 1;
      if (largest[e] > tops[e] + kSlack) {
        shrink = exp2_fast(tops[e] - largest[e]);
        tops[e] = largest[e];
      }
      sums[e] *= shrink;
      if (lane >= 4) continue;
      store_shared(shrink_at(j, lane) + 4 * e, shrink);
      if constexpr (C::kSharedTops) store_shared(top_at(j, lane) + 4 * e, tops[e]);
    }
    if (lane == 0) store_shared(raised_at(j), first_key);
  }
  return raise;
}

template <class C, Part kPart>
__device__ __forceinline__ float Worker<C, kPart>::scaled(float weight, float scale) {
  return weight == 0 ? 0.0f : weight * scale;
}

template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::store_pair(uint32_t at, float w0, float w1) {
  store_shared(at, narrow_pair<typename C::Value>(w0, w1));
}

// Weights of a row tile lie as they are found, [16 keys][8 rows], and are transposed as they are read.
template <class C, Part kPart>
__device__ __forceinline__ void Worker<C, kPart>::store_weights(const Fragment& x, int j) {
  float w[2][2];  // [key / 8][row]
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float base = tops[e] == -INFINITY ? 0.0f : tops[e];  // nothing seen yet: never -inf + inf
    w[0][e] = exp2_fast(x[e] - base), w[1][e] = exp2_fast(x[e + 2] - base);
    sums[e] += w[0][e] + w[1][e];
  }
  const uint32_t at = own + kWeightsAt + C::kTileWeights * j + 4 * lane;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (C::kIsPacked) {
      // Each quarter of the columns has its own scale. None for hidden keys: it may be NaN.
      const float4 scales = load_shared<float4>(scales_at(ring.stage, (lane >> 2) + 8 * h));
      store_pair(at + 128 * h, scaled(w[h][0], scales.x), scaled(w[h][1], scales.x));
      store_pair(at + 128 * h + kWeightsBytes, scaled(w[h][0], scales.y), scaled(w[h][1], scales.y));
      store_pair(at + 128 * h + 2 * kWeightsBytes, scaled(w[h][0], scales.z), scaled(w[h][1], scales.z));
      store_pair(at + 128 * h + 3 * kWeightsBytes, scaled(w[h][0], scales.w), scaled(w[h][1], scales.w));
    } else {
      store_pair(at + 128 * h, w[h][0], w[h][1]);
    }
  }
}

// Of this warp's row tile.
template <class C, Part kPart>
__device__ __forceinline__ bool Worker<C, kPart>::softmax(Fragment& own, int first_key, unsigned hidden) {
  gather_scores(own, quarter, first_key, hidden);
  if constexpr (C::kSharedTops) load_tops(lane & 3);
  const bool raised = raise_tops(own, quarter, first_key);
  store_weights(own, quarter);
  return raised;
}

}  // namespace treemla::mma
