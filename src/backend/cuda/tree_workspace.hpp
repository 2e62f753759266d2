// The workspace of a tree step: a fault word a request, which its block writes whether there is one or not, then the step's own
// arrays.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "treemla/tree_run.hpp"
#include "trees/tree_fault.hpp"

namespace treemla {

// Hands out aligned arrays one after the other; with a null base it only counts.
class TreeWorkspace {
 public:
  explicit TreeWorkspace(void* base, int b) : base_(static_cast<char*>(base)) {
    faults_ = take<FaultWord>(static_cast<std::size_t>(b));
  }
  template <class T>
  T* take(std::size_t count) {
    constexpr std::size_t kAlign = 256;
    char* at = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return reinterpret_cast<T*>(at);
  }
  FaultWord* faults() const { return faults_; }  // [b]
  std::size_t bytes() const { return bytes_; }

 private:
  char* base_;
  std::size_t bytes_ = 0;
  FaultWord* faults_;
};

inline cudaStream_t stream_of(const TreeRun& run) { return static_cast<cudaStream_t>(run.stream); }

// Loads a kernel onto the current device, if there is one, and lets it use that much dynamic shared memory.
template <class Kernel>
void load_tree_kernel(Kernel* kernel, std::size_t smem_bytes = 0) {
  cudaFuncAttributes attributes;
  const void* function = reinterpret_cast<const void*>(kernel);
  if (cudaFuncGetAttributes(&attributes, function) != cudaSuccess ||
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(smem_bytes)) != cudaSuccess)
    cudaGetLastError();  // the launch will say what is wrong
}

}  // namespace treemla
