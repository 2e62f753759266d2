// Writing rows of an interleaved cache (KvLayout::kInterleaved in problem.hpp): once for each cached token, where an engine would
// otherwise copy its row.
#pragma once

#include <cstdint>

#include "treemla/problem.hpp"

namespace treemla {

struct InterleaveProblem {
  MlaShape shape;              // d_v and d_rope, multiples of 32; h_q is not looked at
  const void* rows = nullptr;  // [num_rows, d_qk] bf16, columns in order
  int64_t num_rows = 0;
  int64_t row_stride = 0;          // elements between rows; 0 means d_qk
  void* pool = nullptr;            // [pool_rows, d_qk] bf16, the pool that KvPool::data names
  int64_t pool_rows = 0;           // num_pages * page_size
  int64_t pool_row_stride = 0;     // KvPool::row_stride
  const int64_t* slots = nullptr;  // [num_rows] pool row of each; -1: written nowhere. Null: 0, 1, 2, ...
};

// pool[slots[i]] = rows[i], interleaved. `rows` and `pool` must not overlap. Host memory. With two equal slots the later row
// stays. Throws Error(kInvalidArgument) naming the argument, its value and what is allowed, before anything is written.
void interleave_rows(const InterleaveProblem& problem);

}  // namespace treemla
