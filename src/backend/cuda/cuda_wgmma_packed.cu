// cuda_wgmma for packed e4m3 rows: their rope part is bf16, and so are their queries.
#include "backend/cuda/cuda_wgmma_fp8.cuh"
#include "backend/cuda/cuda_wgmma_kernels.hpp"

namespace treemla {

const void* wgmma_kernel_packed(const WgmmaTile& tile) {
  return wgmma::find_fp8_kernel<__nv_bfloat16, true>(tile);
}

}  // namespace treemla
