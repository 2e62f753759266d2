// cuda_wgmma for fp16 queries and caches.
#include "backend/cuda/cuda_wgmma.cuh"
#include "backend/cuda/cuda_wgmma_kernels.hpp"

namespace treemla {

const void* wgmma_kernel_fp16(const WgmmaTile& tile) { return wgmma::find_kernel<__half>(tile); }

}  // namespace treemla
