// The compiled instances of cuda_wgmma: each takes a tile of kWgmmaTiles, and gives the kernel.
#pragma once

#include "plan/cuda_tiles.hpp"

namespace treemla {

const void* wgmma_kernel_bf16(const WgmmaTile& tile);
const void* wgmma_kernel_fp16(const WgmmaTile& tile);
const void* wgmma_rows_kernel(const WgmmaTile& tile, bool is_bf16);  // tiles with rows as M
const void* wgmma_kernel_e4m3(const WgmmaTile& tile, bool q_is_bf16);
const void* wgmma_kernel_packed(const WgmmaTile& tile);

}  // namespace treemla
