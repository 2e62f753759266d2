// DDTree's order of choosing: what the host's heap and the GPU's warp compare by.
//
// An entry of the frontier is a node that may be chosen next: rank `rank` of depth `depth` + 1 below node `parent`. Its key is the
// log-probability of its path, an integer, so adding and taking away is exact; equal keys go by the path of ranks.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "trees/exact.hpp"

namespace treemla {

struct FrontierEntry {
  int64_t key = kNoLogProb;
  int32_t parent = 0;
  int16_t depth = 0;  // of the parent: the row of scores that ranks the entry
  int16_t rank = 0;
};
static_assert(sizeof(FrontierEntry) == 16);

// Which of two entries with the same key comes first? Ranks from the root down decide; both paths are walked up to where they part,
// at most kMaxTreeDepths steps. node_parent and node_rank describe the nodes chosen so far.
TREEMLA_HD inline bool path_before(const FrontierEntry& a, const FrontierEntry& b, const int32_t* node_parent,
                                   const int16_t* node_rank) {
  int parent_a = a.parent, parent_b = b.parent, rank_a = a.rank, rank_b = b.rank;
  int depth_a = a.depth, depth_b = b.depth;
  while (depth_a > depth_b) {
    rank_a = node_rank[parent_a];
    parent_a = node_parent[parent_a];
    --depth_a;
  }
  while (depth_b > depth_a) {
    rank_b = node_rank[parent_b];
    parent_b = node_parent[parent_b];
    --depth_b;
  }
  while (parent_a != parent_b) {
    rank_a = node_rank[parent_a];
    parent_a = node_parent[parent_a];
    rank_b = node_rank[parent_b];
    parent_b = node_parent[parent_b];
  }
  return rank_a < rank_b;
}

}  // namespace treemla
