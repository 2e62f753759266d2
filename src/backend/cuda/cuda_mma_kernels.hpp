// The compiled instances of cuda_mma: each takes a tile of kMmaTiles, and gives the kernel.
#pragma once

#include "plan/cuda_tiles.hpp"

namespace treemla {

const void* mma_kernel_bf16(const MmaTile& tile);
const void* mma_kernel_fp16(const MmaTile& tile);
const void* mma_kernel_e4m3(const MmaTile& tile, bool q_is_bf16);
const void* mma_kernel_packed(const MmaTile& tile);

}  // namespace treemla
