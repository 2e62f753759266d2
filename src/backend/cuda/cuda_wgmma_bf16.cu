// cuda_wgmma for bf16 queries and caches.
#include "backend/cuda/cuda_wgmma.cuh"
#include "backend/cuda/cuda_wgmma_kernels.hpp"

namespace treemla {

const void* wgmma_kernel_bf16(const WgmmaTile& tile) { return wgmma::find_kernel<__nv_bfloat16>(tile); }

}  // namespace treemla
