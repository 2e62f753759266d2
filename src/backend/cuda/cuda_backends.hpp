// The CUDA kernel families.
#pragma once

#include "backend/backend.hpp"

namespace treemla {

const Backend& cuda_naive_backend();
const Backend& cuda_head_tile_backend();
const Backend& cuda_warp_per_key_backend();         // 16-byte loads
const Backend& cuda_warp_per_key_scalar_backend();  // an element a load: what vector loads are worth
const Backend& cuda_mma_backend();
const Backend& cuda_wgmma_backend();
const Backend& cuda_fp32_tiled_backend();

}  // namespace treemla
