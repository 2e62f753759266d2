// cuda_mma for e4m3 caches with one scale.
#include "backend/cuda/cuda_mma.cuh"
#include "backend/cuda/cuda_mma_kernels.hpp"

namespace treemla {

const void* mma_kernel_e4m3(const MmaTile& tile, bool q_is_bf16) {
  return q_is_bf16 ? mma::find_kernel<__nv_bfloat16, MmaCache::kE4M3>(tile)
                   : mma::find_kernel<__half, MmaCache::kE4M3>(tile);
}

}  // namespace treemla
