// cuda_mma for fp16 queries and caches.
#include "backend/cuda/cuda_mma.cuh"
#include "backend/cuda/cuda_mma_kernels.hpp"

namespace treemla {

const void* mma_kernel_fp16(const MmaTile& tile) { return mma::find_kernel<__half, MmaCache::k16Bit>(tile); }

}  // namespace treemla
