// A worker's items, as device_plan.cu listed them.
#pragma once

#include "backend/cuda/kernel_args.hpp"

namespace treemla {

// Every thread of a CTA steps alike, with no communication:
//
//     WorkList list(args.plan, blockIdx.x);
//     for (CudaWorkItem item; list.next(item);) attend(args, item);
class WorkList {
 public:
  __device__ WorkList(const DevicePlanView& plan, int worker) : plan_(plan), worker_(worker) {}
  __device__ bool next(CudaWorkItem& item) {
    const CudaWorkItem* i = next();
    if (i != nullptr) item = *i;
    return i != nullptr;
  }
  // Where it lies, for who has no registers for all of it; null after the last.
  __device__ const CudaWorkItem* next() {
    const WorkerItems& w = plan_.workers[worker_];
    if (done_ == w.count) return nullptr;
    const CudaWorkItem* i = done_ == 0 ? &w.item : plan_.items + w.first + done_;
    ++done_;
    return i;
  }

 private:
  const DevicePlanView& plan_;
  int worker_, done_ = 0;
};

// The same in shared memory, for kernels that have no register to spare:
//
//     __shared__ SharedWork<kThreads> work;
//     for (bool more = work.begin(args.plan, blockIdx.x); more; more = work.next()) attend(args, work);
//
// where attend() calls look_ahead() once. begin() and next() are barriers for what the CTA does with shared memory.
template <int kThreads>
struct SharedWork {
  __device__ bool begin(const DevicePlanView& plan, int worker) {
    const WorkerItems& w = plan.workers[worker];
    copy(items_[0], w.item);
    if (is_stepper()) {
      next_ = plan.items + w.first + 1;
      left_ = w.count;
      current_ = 0;
    }
    __syncthreads();
    return left_ > 0;
  }
  __device__ bool next() {
    __syncthreads();
    if (is_stepper()) {
      ++next_;
      --left_;
      current_ ^= 1;
    }
    __syncthreads();
    return left_ > 0;
  }
  // The present item, until next().
  __device__ const CudaWorkItem& item() const { return items_[current_]; }
  // Reads the item after it, so that next() does not wait for that. For every thread to call, while its own loads are on their way.
  __device__ void look_ahead() {
    if (left_ > 1) copy(items_[current_ ^ 1], *next_);
  }

  // The item after it, if there is one: what look_ahead() read, after a barrier.
  __device__ const CudaWorkItem* after() const { return left_ > 1 ? &items_[current_ ^ 1] : nullptr; }

 private:
  __device__ static bool is_stepper() { return threadIdx.x == kThreads - 1; }
  // By as many threads as it has words.
  __device__ static void copy(CudaWorkItem& to, const CudaWorkItem& from) {
    static_assert(sizeof(CudaWorkItem) % 4 == 0);
    if (threadIdx.x < sizeof(CudaWorkItem) / 4)
      reinterpret_cast<uint32_t*>(&to)[threadIdx.x] = reinterpret_cast<const uint32_t*>(&from)[threadIdx.x];
  }

  CudaWorkItem items_[2];
  const CudaWorkItem* next_;
  int left_;
  int current_;
};

// Index in plan.requests of the active request that owns a query node, or -1: the node's rows are inert.
__device__ inline int find_request(const DevicePlanView& plan, int node) {
  int low = 0, high = plan.header->num_active;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (plan.requests[middle].q_begin <= node)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0) return -1;
  const DeviceRequest& r = plan.requests[low - 1];
  return node < r.q_begin + r.q_len ? low - 1 : -1;
}

}  // namespace treemla
