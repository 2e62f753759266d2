// Planning on the device: what prepare() enqueues.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "backend/cuda/kernel_args.hpp"
#include "plan/split_plan.hpp"
#include "treemla/problem.hpp"

namespace treemla {

struct PlanArgs {
  int b = 0, total_q = 0;
  const int32_t* q_indptr = nullptr;     // [b + 1]
  const int32_t* kv_len = nullptr;       // [b]
  const int32_t* page_indptr = nullptr;  // [b + 1], or null for a block table
  int64_t page_stride = 0, num_entries = 0, num_pages = 0;
  const void* entries = nullptr;  // only check_device_problem() reads them
  bool entries_are_int64 = false;
  FastDiv page_size;
  int max_q_len = 0, max_kv_len = 0;  // bounds of the workspace
  MaskKind mask = MaskKind::kNone;
  const int32_t* parents = nullptr;  // [total_q]; null: none to convert
  uint32_t* bits = nullptr;          // [total_q, words], written if parents are given
  int words = 0;                     // 0: no tree mask
  DevicePlanView plan;               // what is written
};

// Fills the plan and the bits. Launch shape: a function of total_q, b and the number of workers.
void launch_device_plan(const PlanArgs& args, cudaStream_t stream);
// Merges partials and writes inert rows. Launch shape: a function of total_q, h_q and d_v.
void launch_combine(const KernelArgs& args, cudaStream_t stream);
// Load the kernels onto the current device: a graph capture may not.
void load_plan_kernels();
void load_combine_kernel();

// The items that the device derives from its plan, worker by worker: for the test that compares them with make_split_plan().
// Waits for the stream.
std::vector<WorkItem> list_device_items(const DevicePlanView& plan, int max_items_per_worker,
                                        cudaStream_t stream);

// The debug kernel behind check_device_problem(): kNoFault, or the first fault packed by pack_fault(). Waits for the stream.
uint64_t find_device_fault(const PlanArgs& args, cudaStream_t stream);

}  // namespace treemla
