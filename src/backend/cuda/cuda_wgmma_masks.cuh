// cuda_wgmma: what rows see of a tile of keys.
#pragma once

#include "backend/cuda/cuda_wgmma_shared.cuh"
#include "backend/cuda/half_types.cuh"

namespace treemla::wgmma {

// Bit i: the row sees key tile_key + i. Any number of them for rows that are padding.
__device__ __forceinline__ uint64_t seen_keys(const KernelArgs& args, const CudaWorkItem& item, int tile_key,
                                              int row) {
  const int packed = min(item.row_begin + row, item.row_end - 1), node = packed / args.h_q;
  const int first = tile_key - item.prefix_len,
            before = max(-first, 0);  // tree key of bit 0; keys of the prefix
  const auto lowest = [](int n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
  uint64_t seen = ~uint64_t{0};
  if (before < WgmmaTile::kKeys) {
    const int from = max(first, 0);
    uint64_t tree = ~uint64_t{0};
    if (args.mask.kind == MaskKind::kCausal) {
      tree = lowest(max(node + 1 - from, 0));
    } else if (args.mask.kind == MaskKind::kTree) {
      const uint32_t* words = args.mask.bits + (static_cast<int64_t>(item.q_begin) + node) * args.mask.words;
      const auto word = [&](int i) { return i < args.mask.words ? words[i] : 0u; };
      const int w = from >> 5;
      tree = static_cast<uint64_t>(__funnelshift_r(word(w + 1), word(w + 2), from)) << 32 |
             __funnelshift_r(word(w), word(w + 1), from);
    }
    seen = tree << before | lowest(before);
  }
  return seen & lowest(item.key_end - tile_key);
}
// Are any of a tile's scores, masked by nothing yet, infinite or NaN? They are if any latent is, whatever the queries.
template <int kCount>
__device__ __forceinline__ bool any_nonfinite(const float (&scores)[kCount]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum = fmaf(scores[i], 0.0f, sum);
  return sum != sum;
}
// A hidden row may hold NaN or infinity, and a weight of 0 would not keep it out of a product: zeros instead. Whoever sees the row has
// NaN among its weights.
template <class C>
__device__ __forceinline__ void clear_nonfinite(uint32_t panels, const CudaWorkItem& item, int tile_key) {
  const int thread = thread_of_group();
  constexpr int kRowChunks = 8 * C::kPanels;
  const int begin = max(item.prefix_len - tile_key, 0), end = min(item.key_end - tile_key, C::kKeys);
#pragma unroll 1
  for (int i = begin * kRowChunks + thread; i < end * kRowChunks; i += 128) {
    const int row = i / kRowChunks, c = i % kRowChunks;
    const uint32_t at = panels + c / 8 * C::kPanelBytes + row * 128 + c % 8 * 16;
    uint4 x = load_shared<uint4>(at);
    clear_nonfinite_pair<typename C::T>(x.x), clear_nonfinite_pair<typename C::T>(x.y);
    clear_nonfinite_pair<typename C::T>(x.z), clear_nonfinite_pair<typename C::T>(x.w);
    store_shared(at, x);
  }
}

}  // namespace treemla::wgmma
