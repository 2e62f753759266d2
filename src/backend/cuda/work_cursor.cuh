// The work of one CTA, derived on the device from the plan that device_plan.cu wrote: the arithmetic is plan/split.hpp's, the
// same that make_split_plan() spells out on the host.
#pragma once

#include <new>

#include "backend/cuda/kernel_args.hpp"

namespace treemla {

// Steps through the items of one worker. Every thread of a CTA steps alike, with no communication:
//
//     WorkCursor cursor(args.plan, blockIdx.x);
//     for (CudaWorkItem item; cursor.next(item);) attend(args, item);
//
// Only a few numbers are kept between items, so that a kernel's registers are its own; the rest is worked out again each time.
class WorkCursor {
 public:
  __device__ WorkCursor(const DevicePlanView& plan, int worker)
      : plan_(plan), worker_(worker), begins_(true) {}

  // The same, after the first item.
  __device__ WorkCursor(const DevicePlanView& plan, int worker, const WorkerStart& start)
      : plan_(plan), worker_(worker), begins_(false) {
    go_on(start);
  }

  // What the plan keeps of a worker.
  __device__ static WorkerStart find_start(const DevicePlanView& plan, int worker) {
    WorkCursor cursor(plan, worker);
    cursor.search();
    WorkerStart start;
    start.has_item = cursor.next(start.item);
    start.index = cursor.index_;
    start.row_tile = cursor.row_tile_;
    start.unit = cursor.unit_;
    return start;
  }

  __device__ bool next(CudaWorkItem& item) {
    if (begins_) {
      begins_ = false;
      const WorkerStart start = plan_.starts[worker_];
      item = start.item;
      go_on(start);
      return start.has_item;
    }
    const SplitParams& p = plan_.params;
    const int64_t payload = plan_.header->payload;
    const int num_active = plan_.header->num_active;
    for (; index_ < num_active; ++index_, row_tile_ = 0) {
      const DeviceRequest r = plan_.requests[index_];
      const RequestCost cost = request_cost(p, r.q_len, r.kv_len);
      for (; row_tile_ < cost.row_tiles; ++row_tile_, unit_ = -1) {
        const int64_t start = r.start + cost.pair_start(row_tile_);
        // No later unit is ours once a pair's first one belongs to a later worker.
        if (start + cost.offset >= (worker_ + 1) * payload) {
          index_ = num_active;
          return false;
        }
        UnitRange owned = worker_units(cost, row_tile_, start, payload, worker_);
        if (unit_ >= 0) owned.begin = unit_;
        if (owned.begin >= owned.end) continue;
        if (p.fixed_tiles > 0) owned.end = owned.begin + 1;
        unit_ = owned.end;
        if (fill(item, r, cost, start, payload, owned)) return true;
      }
    }
    return false;
  }

 private:
  __device__ void go_on(const WorkerStart& start) {
    index_ = start.index;
    row_tile_ = start.row_tile;
    unit_ = start.unit;
  }

  // The last request that starts at or before our piece of the line, and in it the pair that holds its first coordinate.
  __device__ void search() {
    begins_ = false;
    const int64_t from = worker_ * plan_.header->payload;
    const int num_active = plan_.header->num_active;
    index_ = num_active;
    if (from >= plan_.header->total_cost) return;
    int low = 0, high = num_active;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (plan_.requests[middle].start <= from)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == 0) return;
    index_ = low - 1;
    const DeviceRequest& r = plan_.requests[index_];
    const RequestCost cost = request_cost(plan_.params, r.q_len, r.kv_len);
    const int64_t tile = quotient64(from - r.start, cost.offset + cost.units * cost.full_unit);
    row_tile_ = static_cast<int>(tile < cost.row_tiles ? tile : cost.row_tiles - 1);
  }

  __device__ bool fill(CudaWorkItem& item, const DeviceRequest& r, const RequestCost& cost, int64_t start,
                       int64_t payload, UnitRange owned) const {
    const SplitParams& p = plan_.params;
    const int64_t keys_per_unit =
        static_cast<int64_t>(p.tile.keys_per_tile) * (p.fixed_tiles > 0 ? p.fixed_tiles : 1);
    const int64_t end = owned.end * keys_per_unit;
    const PartialSlots slots =
        partial_slots(p, cost, row_tile_, start, payload, r.unit_base + row_tile_ * cost.units);
    // Balanced pieces are numbered by worker, fixed ones by unit.
    const int piece =
        p.fixed_tiles > 0 ? owned.begin : worker_ - worker_of_unit(cost, row_tile_, start, payload, 0);
    item.request = r.request;
    item.q_begin = r.q_begin;
    item.row_begin = row_tile_ * p.tile.rows_per_tile;
    item.row_end = item.row_begin + p.tile.rows_per_tile;
    if (item.row_end > cost.rows) item.row_end = cost.rows;
    item.key_begin = static_cast<int>(owned.begin * keys_per_unit);
    item.key_end = static_cast<int>(end < r.kv_len ? end : r.kv_len);
    item.kv_len = r.kv_len;
    item.prefix_len = r.kv_len - r.q_len;
    item.page_base = r.page_base;
    item.partial = slots.count == 1 ? -1 : slots.slot(piece);
    return item.partial < plan_.num_slots;  // only lengths that lie can pass it
  }

  const DevicePlanView& plan_;
  int worker_, index_ = 0, row_tile_ = 0, unit_ = -1;
  bool begins_;  // with what the plan keeps
};

// The same with cursor and item in shared memory, for kernels that have no register to spare: one thread steps.
//
//     __shared__ SharedWork work;
//     for (bool more = work.begin(args.plan, blockIdx.x); more; more = work.next()) attend(args, work.item());
struct SharedWork {
  // The first item, read by as many threads as it has words. Also a barrier for what the CTA did to shared memory.
  __device__ bool begin(const DevicePlanView& plan, int worker) {
    static_assert(sizeof(CudaWorkItem) % 4 == 0);
    const WorkerStart& start = plan.starts[worker];
    if (threadIdx.x < sizeof(CudaWorkItem) / 4)
      reinterpret_cast<uint32_t*>(&items_[0])[threadIdx.x] =
          reinterpret_cast<const uint32_t*>(&start.item)[threadIdx.x];
    if (is_stepper()) {
      new (cursor_) WorkCursor(plan, worker, start);
      more_[0] = start.has_item;
      current_ = 0;
      is_ahead_ = false;
    }
    __syncthreads();
    return more_[0];
  }
  // Also a barrier for what the CTA does with shared memory.
  __device__ bool next() {
    __syncthreads();
    if (is_stepper()) {
      if (!is_ahead_) step();
      is_ahead_ = false;
      current_ ^= 1;
    }
    __syncthreads();
    return more_[current_];
  }
  // The present item, until next().
  __device__ const CudaWorkItem& item() const { return items_[current_]; }
  // Finds the item after it, once at most, so that next() does not wait for that. For every thread to call, while its loads are on their way.
  __device__ __forceinline__ void look_ahead() {
    if (!is_stepper()) return;
    step();
    is_ahead_ = true;
  }

 private:
  // The last thread: in cuda_mma its warps are those with less to do.
  __device__ static bool is_stepper() { return threadIdx.x == blockDim.x - 1; }
  // A call of its own: inlined, its registers would add to those of the kernel's inner loop.
  __device__ __noinline__ void step() {
    more_[current_ ^ 1] = reinterpret_cast<WorkCursor*>(cursor_)->next(items_[current_ ^ 1]);
  }

  CudaWorkItem items_[2];
  bool more_[2];
  int current_;
  bool is_ahead_;
  alignas(WorkCursor) unsigned char cursor_[sizeof(WorkCursor)];
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
