// CUDA calls that say what failed. The library never leaves an error behind for the next call to find.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace treemla {

// Throws Error(kDevice), or Error(kOutOfMemory), with `what` and CUDA's own name and text for the code.
void check_cuda(cudaError_t code, const char* what);
void check_cuda(cudaError_t code, const std::string& what);
// For the launch just made.
void check_launch(const char* kernel);

}  // namespace treemla
