// The kernel of cuda_wgmma with rows as N; cuda_wgmma.cu says what it computes, with the shared-memory map and the layouts.
#pragma once

#include <iterator>

#include "backend/cuda/cuda_wgmma_accumulate.cuh"
#include "backend/cuda/cuda_wgmma_score.cuh"

namespace treemla::wgmma {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_kernel(const __grid_constant__ KernelArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const SharedMap<C> map{static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory))};
  if (threadIdx.x == 0) map.init_barriers();
  allow_dependent_launch();
  if (ctas<C>() > 1)
    sync_cluster();
  else
    __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0),
            thread = static_cast<int>(threadIdx.x) % 128;
  if (group == 0) {
    set_registers<C::kCopyRegisters>();
    typename CopierOf<C>::Type(args, map, thread).run();
  } else if (group == 1) {
    set_registers<C::kScoreRegisters>();
    Scorer<C>(args, map).run();
  } else {
    set_registers<C::kValueRegisters>();
    Accumulator<C>(args, map, group - 2).run();
  }
#endif
}

// The kernel of a tile for queries and caches of type T.
template <class T, int i = 0>
const void* find_kernel(const WgmmaTile& tile) {
  if constexpr (i == static_cast<int>(std::size(kWgmmaTiles))) {
    return nullptr;
  } else {
    constexpr const WgmmaTile& kTile = kWgmmaTiles[i];
    if constexpr (kTile.rows_are_m) {  // see cuda_wgmma_rows.cuh
      return find_kernel<T, i + 1>(tile);
    } else {
      if (tile.d_v != kTile.d_v || tile.rows != kTile.rows) return find_kernel<T, i + 1>(tile);
      return reinterpret_cast<const void*>(&wgmma_kernel<Config<T, kTile.d_v, kTile.rows>>);
    }
  }
}

}  // namespace treemla::wgmma
