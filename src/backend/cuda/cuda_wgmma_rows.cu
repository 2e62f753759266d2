// cuda_wgmma with rows as M, for bf16 and fp16.
#include "backend/cuda/cuda_wgmma_rows.cuh"

#include "backend/cuda/cuda_wgmma_kernels.hpp"

namespace treemla {

const void* wgmma_rows_kernel(const WgmmaTile& tile, bool is_bf16) {
  return is_bf16 ? wgmma::find_rows_kernel<__nv_bfloat16>(tile) : wgmma::find_rows_kernel<__half>(tile);
}

}  // namespace treemla
