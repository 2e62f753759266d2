// The best tokens of many rows of scores: what DDTree and beams begin with.
//
//   score_chunk_kernel   a block a chunk of 8,192 tokens: reads it once into registers; its best k, its maximum, its weights' sum
//   score_merge_kernel   a block a row: the best k of its chunks' best
//   RowNorm              whoever uses a row brings the chunks' maxima and sums together: a thread a row
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/tree_workspace.hpp"
#include "treemla/build.hpp"
#include "trees/exact.hpp"

namespace treemla {

struct ScoreTop {
  int rows = 0, chunks = 0, k = 0;
  bool are_log_probs = false;
  uint64_t* keys = nullptr;          // [rows, k] rank_key(), best first, 0 past the end
  uint64_t* chunk_keys = nullptr;    // [rows, chunks, k]
  float* chunk_max = nullptr;        // [rows, chunks]
  uint64_t* chunk_total = nullptr;   // [rows, chunks] weights relative to the chunk's maximum
  TreeFault* chunk_fault = nullptr;  // [rows, chunks]
};

ScoreTop take_score_top(TreeWorkspace& workspace, const ScoreView& scores, int64_t rows, int k);
void launch_score_top(const ScoreView& scores, const ScoreTop& top, cudaStream_t stream);
void load_score_top(const ScoreView& scores);

#if defined(__CUDACC__)
struct RowNorm {  // no initialisers: it lies in shared memory
  float max;
  int64_t log_total;
  TreeFault fault;
};

// By one thread.
__device__ inline RowNorm row_norm(const ScoreTop& top, int64_t row) {
  RowNorm norm = {0, 0, TreeFault::kNone};
  const int64_t first = row * top.chunks;
  float max = -INFINITY;
  for (int c = 0; c < top.chunks; ++c) {
    const TreeFault fault = top.chunk_fault[first + c];
    if (fault != TreeFault::kNone && norm.fault == TreeFault::kNone) norm.fault = fault;
    max = fmaxf(max, top.chunk_max[first + c]);
  }
  if (top.are_log_probs || norm.fault != TreeFault::kNone) return norm;
  if (max == -INFINITY) {
    norm.fault = TreeFault::kScoresEmpty;
    return norm;
  }
  uint64_t total = 0;
  for (int c = 0; c < top.chunks; ++c)
    total += rescale_weight(top.chunk_total[first + c], top.chunk_max[first + c], max);
  norm.max = max;
  norm.log_total = fixed_log(total);
  return norm;
}

__device__ inline int64_t key_log_prob(uint64_t key, const RowNorm& norm) {
  return key == 0 ? kNoLogProb : token_log_prob(score_of_key(key), norm.max, norm.log_total);
}
#endif

}  // namespace treemla
