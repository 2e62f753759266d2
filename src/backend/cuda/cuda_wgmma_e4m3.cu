// cuda_wgmma for e4m3 caches with one scale.
#include "backend/cuda/cuda_wgmma_fp8.cuh"
#include "backend/cuda/cuda_wgmma_kernels.hpp"

namespace treemla {

const void* wgmma_kernel_e4m3(const WgmmaTile& tile, bool q_is_bf16) {
  return q_is_bf16 ? wgmma::find_fp8_kernel<__nv_bfloat16, false>(tile)
                   : wgmma::find_fp8_kernel<__half, false>(tile);
}

}  // namespace treemla
