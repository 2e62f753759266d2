#include "trees/row_top.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/convert.hpp"
#include "trees/exact.hpp"

namespace treemla {
namespace {

float load(const float* data, int64_t i) { return data[i]; }
float load(const uint16_t* data, int64_t i) { return bf16_to_float(data[i]); }

template <typename T>
RowTop scan(const T* row, int vocab, bool are_logits, int k) {
  RowTop top;
  // A heap whose front is the worst of the k best so far; `enough` is what a token has to beat.
  std::vector<uint64_t>& heap = top.keys;
  heap.reserve(static_cast<std::size_t>(std::min(k, vocab)));
  float enough = -INFINITY;
  struct Chunk {
    float max;
    uint64_t total;
  };
  std::vector<Chunk> chunks;
  float row_max = -INFINITY;
  for (int begin = 0; begin < vocab; begin += kScoreChunk) {
    const int end = std::min(vocab, begin + kScoreChunk);
    float chunk_max = -INFINITY;
    for (int i = begin; i < end; ++i) {
      const float x = load(row, i);
      if (!(x < INFINITY)) {
        top.fault = std::isnan(x) ? TreeFault::kScoreNaN : TreeFault::kScoreInfinite;
        return top;
      }
      chunk_max = std::max(chunk_max, x);
      if (!(x > enough)) continue;  // an equal score of a later token ranks behind
      heap.push_back(rank_key(order_of(x), i));
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
      if (static_cast<int>(heap.size()) > k) {
        std::pop_heap(heap.begin(), heap.end(), std::greater<>());
        heap.pop_back();
      }
      if (static_cast<int>(heap.size()) == k) enough = score_of_key(heap.front());
    }
    if (are_logits) {
      uint64_t total = 0;
      for (int i = begin; i < end; ++i) total += exp_weight(add_rn(load(row, i), -chunk_max));
      chunks.push_back({chunk_max, total});
      row_max = std::max(row_max, chunk_max);
    }
  }
  std::sort_heap(heap.begin(), heap.end(), std::greater<>());
  if (are_logits) {
    if (row_max == -INFINITY) {
      top.fault = TreeFault::kScoresEmpty;
      return top;
    }
    uint64_t total = 0;
    for (const Chunk& c : chunks) total += rescale_weight(c.total, c.max, row_max);
    top.max = row_max;
    top.log_total = fixed_log(total);
  }
  return top;
}

}  // namespace

int RowTop::token(int rank) const { return rank < size() ? token_of_key(keys[rank]) : -1; }
int64_t RowTop::log_prob(int rank) const {
  return rank < size() ? token_log_prob(score_of_key(keys[rank]), max, log_total) : kNoLogProb;
}

RowTop top_of_row(const ScoreView& scores, int64_t row, int k) {
  const int64_t first = row * (scores.row_stride ? scores.row_stride : scores.vocab);
  if (scores.dtype == DType::kF32)
    return scan(static_cast<const float*>(scores.data) + first, scores.vocab, !scores.are_log_probs, k);
  return scan(static_cast<const uint16_t*>(scores.data) + first, scores.vocab, !scores.are_log_probs, k);
}

}  // namespace treemla
