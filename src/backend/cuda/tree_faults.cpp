#include <vector>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/tree_kernels.hpp"
#include "backend/cuda/tree_workspace.hpp"

namespace treemla {

void throw_device_tree_fault(const TreeRun& run, int b) {
  if (b <= 0) return;
  std::vector<FaultWord> faults(static_cast<std::size_t>(b));
  check_cuda(cudaMemcpyAsync(faults.data(), run.workspace, faults.size() * sizeof(FaultWord),
                             cudaMemcpyDeviceToHost, stream_of(run)),
             "copying fault words");
  check_cuda(cudaStreamSynchronize(stream_of(run)), "the last tree step");
  for (const FaultWord& fault : faults) throw_if_fault(fault);
}

}  // namespace treemla
