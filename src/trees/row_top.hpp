// The best tokens of one row of scores, on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "treemla/build.hpp"
#include "trees/tree_fault.hpp"

namespace treemla {

struct RowTop {
  std::vector<uint64_t>
      keys;       // rank_key() of the k best tokens, best first; fewer where the rest has probability 0
  float max = 0;  // logits: the largest; log-probabilities: 0
  int64_t log_total = 0;  // logits: fixed_log of the weights' sum; log-probabilities: 0
  TreeFault fault = TreeFault::kNone;

  int size() const { return static_cast<int>(keys.size()); }
  int token(int rank) const;
  int64_t log_prob(int rank) const;  // kNoLogProb past the end
};

// k >= 1. Stops at the first fault.
RowTop top_of_row(const ScoreView& scores, int64_t row, int k);

}  // namespace treemla
