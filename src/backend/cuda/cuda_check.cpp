#include "backend/cuda/cuda_check.hpp"

#include <fmt/format.h>

#include "treemla/error.hpp"

namespace treemla {

void check_cuda(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // clears it, unless the device itself is lost
  throw Error(code == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDevice, "",
              fmt::format("{} failed: {} ({})", what, cudaGetErrorString(code), cudaGetErrorName(code)));
}

void check_cuda(cudaError_t code, const std::string& what) { check_cuda(code, what.c_str()); }

void check_launch(const char* kernel) {
  const cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess) check_cuda(code, fmt::format("launching {}", kernel));
}

}  // namespace treemla
