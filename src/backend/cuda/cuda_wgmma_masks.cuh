// cuda_wgmma: what rows see of a tile of keys.
#pragma once

#include "backend/cuda/cuda_wgmma_shared.cuh"
#include "backend/cuda/half_types.cuh"

namespace treemla::wgmma {

// What is to be read of the mask for one row and a tile of keys: fetched before the tile is scored, so that nobody waits for it then.
struct MaskWords {
  // Of a tree's row, from the tile's first tree key on; if causal, the first is the row's node.
  uint32_t words[3];

  __device__ __forceinline__ static int first_tree_key(const CudaWorkItem& item, int tile_key) {
    return max(tile_key - item.prefix_len, 0);
  }
  __device__ __forceinline__ void fetch(const KernelArgs& args, const CudaWorkItem& item, int tile_key,
                                        int row) {
    const int packed = min(item.row_begin + row, item.row_end - 1), node = args.heads.quotient(packed);
    words[0] = static_cast<uint32_t>(node);
    if (args.mask.kind != MaskKind::kTree) return;
    const uint32_t* from = args.mask.bits + (static_cast<int64_t>(item.q_begin) + node) * args.mask.words;
    const int first = first_tree_key(item, tile_key) >> 5;
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i] = first + i < args.mask.words ? __ldg(from + first + i) : 0;
  }
  // Bit i: the row sees key tile_key + i. Any number of them for rows that are padding.
  __device__ __forceinline__ uint64_t seen(const KernelArgs& args, const CudaWorkItem& item,
                                           int tile_key) const {
    const int before = max(item.prefix_len - tile_key, 0), from = first_tree_key(item, tile_key);
    const auto lowest = [](int n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
    uint64_t keys = ~uint64_t{0};
    if (before < WgmmaTile::kKeys) {
      uint64_t tree = ~uint64_t{0};
      if (args.mask.kind == MaskKind::kCausal)
        tree = lowest(max(static_cast<int>(words[0]) + 1 - from, 0));
      else if (args.mask.kind == MaskKind::kTree)
        tree = static_cast<uint64_t>(__funnelshift_r(words[1], words[2], from)) << 32 |
               __funnelshift_r(words[0], words[1], from);
      keys = tree << before | lowest(before);
    }
    return keys & lowest(item.key_end - tile_key);
  }
};
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
