// The work of one CTA, from the requests that device_plan.cu laid out: the arithmetic is plan/split.hpp's, the same that
// make_split_plan() spells out on the host.
#pragma once

#include "backend/cuda/kernel_args.hpp"

namespace treemla {

// Steps through the items of one worker, along the line of plan/split.hpp.
class WorkCursor {
 public:
  // At the last request that starts at or before the worker's piece of the line, and in it the pair that holds its first coordinate.
  __device__ WorkCursor(const DevicePlanView& plan, int worker) : plan_(plan), worker_(worker) {
    const int64_t from = worker * plan.header->payload;
    const int num_active = plan.header->num_active;
    index_ = num_active;
    if (from >= plan.header->total_cost) return;
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
    const RequestCost cost = request_cost(plan.params, r.q_len, r.kv_len, plan.header->layout);
    const int64_t tile = quotient64(from - r.start, cost.pair_start(1));
    row_tile_ = static_cast<int>(tile < cost.row_tiles ? tile : cost.row_tiles - 1);
  }

  __device__ bool next(CudaWorkItem& item) {
    const SplitParams& p = plan_.params;
    const int64_t payload = plan_.header->payload;
    const int num_active = plan_.header->num_active;
    for (; index_ < num_active; ++index_, row_tile_ = 0) {
      const DeviceRequest r = plan_.requests[index_];
      const RequestCost cost = request_cost(p, r.q_len, r.kv_len, plan_.header->layout);
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

  // In plan.items, of the last item: one higher from each of a worker's items to the next, and different for all.
  __device__ int place() const { return place_; }

 private:
  __device__ bool fill(CudaWorkItem& item, const DeviceRequest& r, const RequestCost& cost, int64_t start,
                       int64_t payload, UnitRange owned) {
    const SplitParams& p = plan_.params;
    const int64_t keys_per_unit =
        static_cast<int64_t>(p.tile.keys_per_tile) * (p.fixed_tiles > 0 ? p.fixed_tiles : 1);
    const int64_t end = owned.end * keys_per_unit;
    const PartialSlots slots =
        partial_slots(p, cost, row_tile_, start, payload, r.unit_base + row_tile_ * cost.units);
    // Balanced pieces are numbered by worker, fixed ones by unit.
    const int piece =
        p.fixed_tiles > 0 ? owned.begin : worker_ - worker_of_unit(cost, row_tile_, start, payload, 0);
    // Each item after the first begins another pair, or is another worker's.
    place_ = p.fixed_tiles > 0 ? r.unit_base + row_tile_ * cost.units + owned.begin
                               : r.tile_base + row_tile_ + worker_;
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
  int place_ = 0;
};

}  // namespace treemla
