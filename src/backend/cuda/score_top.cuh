// The best tokens of many rows of scores: what DDTree and beams begin with.
//
//   score_chunk_kernel   a block a run of chunks of 8,192 tokens: reads each once into registers; its best k, the chunks' maxima and
//                        weights' sums
//   score_merge_kernel   a block a row: the best k of its parts' best, and their log-probabilities
#pragma once

#include <cuda_runtime_api.h>

#include "backend/cuda/tree_workspace.hpp"
#include "treemla/build.hpp"
#include "trees/exact.hpp"

namespace treemla {

struct ScoreTop {
  int rows = 0, chunks = 0, k = 0;
  int chunks_each = 1, parts = 0;  // chunks of a block, blocks of a row
  bool are_log_probs = false;
  // What comes out.
  uint64_t* keys = nullptr;      // [rows, k] rank_key(), best first, 0 past the end
  int64_t* log_probs = nullptr;  // [rows, k] of these tokens
  TreeFault* faults = nullptr;   // [rows]
  // On the way.
  uint64_t* part_keys = nullptr;     // [rows, parts, k]
  float* chunk_max = nullptr;        // [rows, chunks] of logits
  uint64_t* chunk_total = nullptr;   // [rows, chunks] of logits: weights relative to the chunk's maximum
  TreeFault* chunk_fault = nullptr;  // [rows, chunks]
};

ScoreTop take_score_top(TreeWorkspace& workspace, const ScoreView& scores, int64_t rows, int k);
void launch_score_top(const ScoreView& scores, const ScoreTop& top, cudaStream_t stream);
void load_score_top(const ScoreView& scores);

}  // namespace treemla
