// The work of one CTA, derived on the device from the plan that device_plan.cu wrote: the arithmetic is plan/split.hpp's, the
// same that make_split_plan() spells out on the host.
#pragma once

#include <new>

#include "backend/cuda/kernel_args.hpp"

namespace treemla {

// Rows [row_begin, row_end) of a request (packed (node, head) pairs, heads fastest) against its keys [key_begin, key_end).
struct CudaWorkItem {
  int request;             // number in the batch
  int q_begin;             // node of row 0
  int row_begin, row_end;  // at most rows_per_tile of them
  int key_begin, key_end;
  int kv_len, prefix_len;  // keys from prefix_len on are tree rows: those and only those need the mask
  int64_t page_base;       // for pool_row()
  int partial;  // slot of the partial result, or -1: the item covers all keys and writes the output
};

// Steps through the items of one worker. Every thread of a CTA steps alike, with no communication:
//
//     WorkCursor cursor(args.plan, blockIdx.x);
//     for (CudaWorkItem item; cursor.next(item);) attend(args, item);
//
// Only three numbers are kept between items, so that a kernel's registers are its own; the rest is worked out again each time.
class WorkCursor {
 public:
  __device__ WorkCursor(const DevicePlanView& plan, int worker) : plan_(plan), worker_(worker) {
    const int64_t from = worker * plan.header->payload;
    const int num_active = plan.header->num_active;
    index_ = num_active;
    if (from >= plan.header->total_cost) return;
    // The last request that starts at or before our piece of the line, and in it the pair that holds its first coordinate.
    int low = 0, high = num_active;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (plan.requests[middle].start <= from)
        low = middle + 1;
      else
        high = middle;
    }
    if (low == 0) return;
    index_ = low - 1;
    const DeviceRequest& r = plan.requests[index_];
    const RequestCost cost = request_cost(plan.params, r.q_len, r.kv_len);
    const int64_t tile = quotient64(from - r.start, cost.offset + cost.units * cost.full_unit);
    row_tile_ = static_cast<int>(tile < cost.row_tiles ? tile : cost.row_tiles - 1);
  }

  __device__ bool next(CudaWorkItem& item) {
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
};

// The same with cursor and item in shared memory, for kernels that have no register to spare: one thread steps.
//
//     __shared__ SharedWork work;
//     work.begin(args.plan, blockIdx.x);
//     while (work.next()) attend(args, work.item());
struct SharedWork {
  __device__ void begin(const DevicePlanView& plan, int worker) {
    if (!is_stepper()) return;
    new (cursor_) WorkCursor(plan, worker);
    current_ = 0;
    is_ahead_ = false;
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
