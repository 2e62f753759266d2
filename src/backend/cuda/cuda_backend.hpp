// What all CUDA kernel families share: checks, the plan and its workspace, launches. A family adds its kernel: which shapes it
// takes, which compiled instance serves them, with which tile.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "backend/backend.hpp"
#include "backend/cuda/device_properties.hpp"
#include "backend/cuda/kernel_args.hpp"

namespace treemla {

// A compiled kernel and how it is launched: `__global__ void f(const __grid_constant__ KernelArgs)`, a worker is a cluster of
// CTAs, which for most kernels is one.
struct CudaInstance {
  const void* function = nullptr;
  int threads = 0;
  int64_t smem_bytes = 0;  // dynamic
  // CTAs of a worker: see clustered(). Above 1 only on cards that have clusters; 1 where bits must not depend on the batch.
  int cluster = 1;
  TilePolicy tile;          // of a CTA
  int64_t min_payload = 0;  // least cost worth a worker of its own: see plan/split.hpp
  int smem_keys = 0;        // cuda_naive alone
  bool splits = true;       // false: a block a (node, head) row, which writes every row itself; no combine
  bool single_wave = true;  // num_workers = all CTAs that fit the device at once
  bool narrow_partials = false;  // writes partials in the dtype of q if the output has 16 bits too
  const char* label = "";        // for describe(): what is special about this instance
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(std::string_view name, bool takes_fp8 = false) : name_(name), takes_fp8_(takes_fp8) {}
  std::string_view name() const override { return name_; }
  Memory memory() const override { return Memory::kDevice; }
  const MemorySpace& space() const override;
  Support available() const override;
  Support supports(const VerifyProblem& problem) const override;
  std::unique_ptr<BackendPlan> plan(const VerifyProblem& problem, const RunOptions& options) const override;
  void prepare(const BackendPlan& plan, const VerifyProblem& problem, void* workspace,
               const RunOptions& options) const override;
  void run(const BackendPlan& plan, const VerifyProblem& problem, const VerifyOutput& output, void* workspace,
           const RunOptions& options) const override;
  void check_contents(const VerifyProblem& problem, void* stream) const override;
  void check_prepared(const BackendPlan& plan, const void* workspace,
                      const RunOptions& options) const override;

 protected:
  // Shapes, dtypes and alignments, on this device or, if there is none (cc 0), on any. What every family needs is checked already.
  virtual Support supports_kernel(const VerifyProblem& problem, const CudaDevice& device) const = 0;
  // Only for problems that supports_kernel() takes.
  virtual CudaInstance instance(const VerifyProblem& problem, const CudaDevice& device) const = 0;
  // The one where bits must not depend on the batch.
  virtual CudaInstance invariant_instance(const VerifyProblem& problem, const CudaDevice& device) const {
    return instance(problem, device);
  }

 private:
  std::string name_;
  bool takes_fp8_;
};

// For supports_kernel(): the shapes and dtypes that the ladder is compiled for.
Support supports_ladder_shape(const VerifyProblem& problem);
// Reads of `bytes` bytes at a time need aligned rows: "" or what stands in the way.
std::string why_not_aligned(const VerifyProblem& problem, int bytes);
// The same of the queries.
std::string why_q_not_aligned(const VerifyProblem& problem, int bytes);
// For kernels that keep pool rows and the bytes between them in 32 bits each: "" or what stands in the way.
std::string why_pool_too_large(const VerifyProblem& problem);
// For kernels that keep every score of a row in shared memory.
Support supports_kv_len(int64_t bound, int64_t most);
// Most cached rows that a request can have, by max_kv_len or the page table.
int64_t kv_len_bound(const VerifyProblem& problem);

}  // namespace treemla
