// The compiled instances of cuda_wgmma: each takes a tile of kWgmmaTiles, and gives the kernel.
#pragma once

#include "plan/cuda_tiles.hpp"

namespace treemla {

const void* wgmma_kernel_bf16(const WgmmaTile& tile);
const void* wgmma_kernel_fp16(const WgmmaTile& tile);

}  // namespace treemla
