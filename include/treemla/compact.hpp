// Compacting the cache after acceptance: of a request's tree rows the accepted ones move to consecutive places behind the prefix,
// in every layer, and the rest is free again.
//
//     row prefix_len + a[j]  ->  row prefix_len + j          a[0] = 0 < a[1] < ...: the accepted path
//
// In place, through the page table, at any page size: rows are opaque bytes (bf16, fp16, fp32, fp8, packed 656-byte rows of scales
// and rope). a[j] >= j, so moving j = 0, 1, 2, ... never overwrites a row that is still to be moved; on a device every thread does
// so for its own bytes of a row. The rope part was rotated at its node's depth, which is where the row ends up: it stays as it is.
// Rows of two requests must not share a page that either of them writes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "treemla/dtype.hpp"
#include "treemla/problem.hpp"
#include "treemla/tree_run.hpp"

namespace treemla {

struct CompactProblem {
  int b = 0;           // requests
  int num_layers = 1;  // 0: lengths and freed pages only
  // One base pointer a layer, or one pool with the layers layer_stride_bytes apart.
  void* const* layers = nullptr;  // [num_layers], itself in `memory`
  void* pool = nullptr;
  int64_t layer_stride_bytes = 0;

  int64_t row_bytes = 0;         // bytes of a cached row: 1152 for 576 bf16, 656 packed, 612 q8_0
  int64_t row_stride_bytes = 0;  // bytes between rows; 0 means row_bytes
  int64_t num_pages = 0;         // in each layer
  int page_size = 1;             // tokens a page: a page is page_size * row_stride_bytes bytes
  PageTable pages{};             // the same for all layers: see problem.hpp

  const int32_t* q_indptr = nullptr;  // [b + 1]
  int64_t total_q = 0;                // q_indptr[b], or more: padding
  const int32_t* kv_len = nullptr;    // [b] cached rows, tree rows included; 0 makes a request inert

  // As accept_path() writes them.
  const int32_t* accept_index = nullptr;  // [b, path_stride] rows q_indptr[r] + a[j], root first
  int path_stride = 0;
  const int32_t* num_accepted = nullptr;  // [b]; negative makes a request inert

  Memory memory = Memory::kHost;  // of every pointer above and of the output
};

// Any pointer may be null.
struct CompactOutput {
  int32_t* kv_len =
      nullptr;  // [b] prefix_len + 1 + num_accepted; as it was for inert requests. Not the input array
  // Pages that hold no row any more, in table order, from element q_indptr[r] on: at most q_len of them. With page_size 1 these
  // are the slots of the rejected rows. The rest of the array keeps what it holds.
  int64_t* freed_pages = nullptr;  // [total_q]
  int32_t* num_freed = nullptr;    // [b]
};

// Throws Error(kInvalidArgument) naming the argument, its value and what is allowed; on the host before anything has moved. A
// request with a fault on a device is left as it is: nothing moved, nothing freed.
void compact_cache(const CompactProblem& problem, const CompactOutput& output, const TreeRun& run = {});
// 0 for host problems. Depends on no pointer.
std::size_t compact_workspace_bytes(const CompactProblem& problem);

}  // namespace treemla
