// Device memory of the current GPU.
#pragma once

#include "backend/backend.hpp"

namespace treemla {

const MemorySpace& cuda_memory();

}  // namespace treemla
