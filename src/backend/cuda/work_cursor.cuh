// The work of one CTA, from the requests that device_plan.cu laid out: the arithmetic is plan/split.hpp's, the same that
// make_split_plan() spells out on the host.
#pragma once

#include "backend/cuda/kernel_args.hpp"

namespace treemla {

// Steps through the items of one worker: along the line of plan/split.hpp, or from piece to piece.
class WorkCursor {
 public:
  __device__ WorkCursor(const DevicePlanView& plan, int worker)
      : plan_(plan), layout_(plan.header->layout), worker_(worker), piece_(worker) {
    if (layout_.pieces > 0) return;
    // At the last request that starts at or before the gang's piece of the line, and in it the pair that holds its first coordinate.
    gang_ = worker / layout_.gang;
    member_ = worker - gang_ * layout_.gang;
    if (gang_ >= plan.params.num_workers / layout_.gang) {
      index_ = plan.header->num_active;
      return;
    }
    const int64_t from = gang_ * plan.header->payload;
    index_ = from < plan.header->total_cost ? request_at(from) : -1;
    if (index_ < 0) {
      index_ = plan.header->num_active;
      return;
    }
    const DeviceRequest& r = plan.requests[index_];
    const RequestCost cost = request_cost(plan.params, r.q_len, r.kv_len);
    const int64_t pair = quotient64(from - r.start, cost.pair_start(1));
    const int pairs = cost.gang_pairs(layout_.gang);
    pair_ = static_cast<int>(pair < pairs ? pair : pairs - 1);
  }

  __device__ bool next(CudaWorkItem& item) {
    return layout_.pieces > 0 ? next_piece(item) : next_on_line(item);
  }

  // In plan.items, of the last item: one higher from each of a worker's items to the next, and different for all.
  __device__ int place() const { return place_; }

 private:
  // The last request that starts at or before there, or -1.
  __device__ int request_at(int64_t start) const {
    int low = 0, high = plan_.header->num_active;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (plan_.requests[middle].start <= start)
        low = middle + 1;
      else
        high = middle;
    }
    return low - 1;
  }
  __device__ bool next_piece(CudaWorkItem& item) {
    if (piece_ >= layout_.pieces) return false;
    const int index = request_at(piece_);
    if (index < 0) return false;  // only lengths that lie come here
    const SplitParams& p = plan_.params;
    const DeviceRequest r = plan_.requests[index];
    const RequestCost cost = request_cost(p, r.q_len, r.kv_len);
    const int row_tile = row_tile_of_piece(layout_, cost, r.start, r.tile_base, piece_);
    const PairPieces pieces = pieces_of_pair(layout_, cost, r.start, r.tile_base + row_tile, row_tile);
    const int own = static_cast<int>(piece_ - pieces.first);
    const int rounds = static_cast<int>(ceil_div<int64_t>(layout_.pieces, p.num_workers));
    place_ = worker_ * rounds + round_++;
    piece_ += p.num_workers;
    return fill(item, r, cost, row_tile, piece_units(cost, pieces, own), p.tile.keys_per_tile,
                piece_slots(layout_, pieces), own);
  }
  __device__ bool next_on_line(CudaWorkItem& item) {
    const SplitParams& p = plan_.params;
    const int64_t payload = plan_.header->payload;
    const int num_active = plan_.header->num_active;
    for (; index_ < num_active; ++index_, pair_ = 0) {
      const DeviceRequest r = plan_.requests[index_];
      const RequestCost cost = request_cost(p, r.q_len, r.kv_len);
      const int pairs = cost.gang_pairs(layout_.gang);
      for (; pair_ < pairs; ++pair_, unit_ = -1) {
        const int row_tile = pair_ * layout_.gang + member_;
        const int64_t start = r.start + cost.pair_start(pair_);
        // No later unit is ours once a pair's first one belongs to a later gang.
        if (start + cost.offset >= (gang_ + 1) * payload) {
          index_ = num_active;
          return false;
        }
        if (row_tile >= cost.row_tiles) continue;
        UnitRange owned = worker_units(cost, row_tile, start, payload, gang_);
        if (unit_ >= 0) owned.begin = unit_;
        if (owned.begin >= owned.end) continue;
        if (p.fixed_tiles > 0) owned.end = owned.begin + 1;
        unit_ = owned.end;
        // Balanced pieces are numbered by gang, fixed ones by unit.
        const int piece =
            p.fixed_tiles > 0 ? owned.begin : gang_ - worker_of_unit(cost, row_tile, start, payload, 0);
        // Of one worker of each gang: every item after the first begins another pair, or is another gang's.
        if (place_ >= 0)
          ++place_;
        else
          place_ = p.fixed_tiles > 0 ? r.unit_base + row_tile * cost.units + owned.begin
                                     : member_ * plan_.header->member_items + r.tile_base + pair_ + gang_;
        const int64_t keys_per_unit =
            static_cast<int64_t>(p.tile.keys_per_tile) * (p.fixed_tiles > 0 ? p.fixed_tiles : 1);
        const PartialSlots slots = partial_slots(p, cost, row_tile, start, payload,
                                                 r.unit_base + row_tile * cost.units, layout_.gang);
        if (fill(item, r, cost, row_tile, owned, keys_per_unit, slots, piece)) return true;
      }
    }
    return false;
  }
  __device__ bool fill(CudaWorkItem& item, const DeviceRequest& r, const RequestCost& cost, int row_tile,
                       UnitRange owned, int64_t keys_per_unit, const PartialSlots& slots, int piece) {
    const SplitParams& p = plan_.params;
    const int64_t end = owned.end * keys_per_unit;
    item.request = r.request;
    item.q_begin = r.q_begin;
    item.row_begin = row_tile * p.tile.rows_per_tile;
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
  const PairLayout layout_;
  int worker_, gang_ = 0, member_ = 0, index_ = 0, pair_ = 0, unit_ = -1;
  int64_t piece_;  // the next one's number
  int round_ = 0, place_ = -1;
};

}  // namespace treemla
