// Reductions over a warp and a block whose result every thread gets.
#pragma once

#include <cstdint>

namespace treemla {

__device__ inline uint64_t warp_sum64(uint64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
__device__ inline uint64_t warp_max64(uint64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, x, step);
    if (other > x) x = other;
  }
  return x;
}

// Room for the reductions of a block of up to 1024 threads, all of whose threads call them, in whole warps.
struct BlockScratch {
  uint64_t warps[32];
};

namespace detail {
// op over the warps' values; `mine` is already the warp's.
template <class Op>
__device__ inline uint64_t over_warps(uint64_t mine, BlockScratch& scratch, Op op) {
  __syncthreads();  // readers of the last call are done
  if (threadIdx.x % 32 == 0) scratch.warps[threadIdx.x / 32] = mine;
  __syncthreads();
  const int warps = blockDim.x / 32;
  uint64_t result = scratch.warps[0];
  for (int w = 1; w < warps; ++w) result = op(result, scratch.warps[w]);
  return result;
}
}  // namespace detail

__device__ inline uint64_t block_sum64(uint64_t x, BlockScratch& scratch) {
  return detail::over_warps(warp_sum64(x), scratch, [](uint64_t a, uint64_t b) { return a + b; });
}
__device__ inline uint64_t block_max64(uint64_t x, BlockScratch& scratch) {
  return detail::over_warps(warp_max64(x), scratch, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

}  // namespace treemla
