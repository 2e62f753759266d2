// cuda_mma for packed e4m3 rows: their rope part is bf16, and so are their queries.
#include "backend/cuda/cuda_mma.cuh"
#include "backend/cuda/cuda_mma_kernels.hpp"

namespace treemla {

const void* mma_kernel_packed(const MmaTile& tile) {
  return mma::find_kernel<__nv_bfloat16, MmaCache::kPacked>(tile);
}

}  // namespace treemla
