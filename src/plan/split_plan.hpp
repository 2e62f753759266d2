// A whole split, spelled out on the host: the list of work items and merges of one call.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/split.hpp"

namespace treemla {

// Rows [row_begin, row_end) of a request (packed (node, head) pairs) against its keys [key_begin, key_end).
struct WorkItem {
  int worker = 0;
  int request = 0;
  int row_begin = 0, row_end = 0;
  int key_begin = 0, key_end = 0;
  int partial = -1;  // slot of the partial result, or -1: the item covers all keys and writes the output
  int64_t cost = 0;
};

// Merge of the partials of rows [row_begin, row_end) of a request.
struct CombineItem {
  int request = 0;
  int row_begin = 0, row_end = 0;
  PartialSlots partials;
};

struct SplitPlan {
  SplitParams params;
  std::vector<WorkItem> items;     // grouped by worker, in line order
  std::vector<int> worker_indptr;  // [num_workers + 1] into items
  std::vector<CombineItem> combines;
  std::vector<int> inert;  // requests with rows but no keys: out 0, lse -inf
  int num_partials = 0;    // slots to allocate, each [rows_per_tile, d_v] and [rows_per_tile]
  int gang = 1;            // workers that have row tiles of a request at the same keys
  int64_t total_cost = 0;  // length of the line, or number of pieces
  int64_t max_worker_cost = 0;
  // Mean over busiest worker: 1 is perfect.
  double balance() const;
  int busy_workers() const;
};

// q_len [b], kv_len [b] as check_problem() accepts them.
SplitPlan make_split_plan(const SplitParams& params, std::span<const int32_t> q_len,
                          std::span<const int32_t> kv_len);

// A few lines for people: tiles, workers, splits, partials, balance.
std::string describe(const SplitPlan& plan);
// One line an item; long plans are cut after `max_items`.
std::string list_items(const SplitPlan& plan, int max_items);

}  // namespace treemla
