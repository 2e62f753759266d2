// cuda_mma for bf16 queries and caches.
#include "backend/cuda/cuda_mma.cuh"
#include "backend/cuda/cuda_mma_kernels.hpp"

namespace treemla {

const void* mma_kernel_bf16(const MmaTile& tile) {
  return mma::find_kernel<__nv_bfloat16, MmaCache::k16Bit>(tile);
}

}  // namespace treemla
