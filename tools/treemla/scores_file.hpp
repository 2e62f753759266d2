// A drafter's scores from a safetensors file: what `treemla tree --scores` builds from.
#pragma once

#include <string>

#include "core/file_io.hpp"
#include "treemla/build.hpp"

namespace treemla::cli {

struct ScoresFile {
  FileBytes file;  // the scores point into it
  int b = 0, num_depths = 0;
  ScoreView scores;
};

// Tensor "logits" or "log_probs", F32 or BF16, [L, V] or [b, L, V]. Throws Error(kBadFile) naming the file and what is wrong.
ScoresFile read_scores(const std::string& path);

}  // namespace treemla::cli
