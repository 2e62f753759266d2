// What every CPU backend keeps of a planned problem: lengths, pool rows and mask, copied so that run() trusts
// no caller memory but the tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "treemla/problem.hpp"

namespace treemla {

struct HostPlan {
  explicit HostPlan(const VerifyProblem& problem);

  int b = 0;
  std::vector<int32_t> q_begin;    // [b] first query row
  std::vector<int32_t> q_len;      // [b]
  std::vector<int32_t> kv_len;     // [b]
  std::vector<int64_t> kv_begin;   // [b] first entry in pool_rows
  std::vector<int64_t> pool_rows;  // pool row of each cached token, request after request
  std::vector<uint32_t> bits;      // [total_q, words] the mask of the tree rows, whatever its kind
  int words = 0;

  // May query node i of request r see tree node j of that request?
  bool sees(int r, int i, int j) const {
    const uint32_t* row = bits.data() + (static_cast<int64_t>(q_begin[r]) + i) * words;
    return (row[j >> 5] >> (j & 31)) & 1;
  }
};

}  // namespace treemla
