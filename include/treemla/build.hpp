// Building draft trees: what a drafter scored becomes token ids, parents and everything that verification and acceptance need.
//
// A tree has q_len = budget + 1 nodes; node 0 is the root, the last token emitted, and parents come before their children. Every
// request of a batch gets the same q_len, so that shapes are fixed: where a drafter offers fewer nodes than the budget, the rest
// are padding, children of the root with token `pad_token`. They see the prefix, the root and themselves, and with the default
// pad_token of -1 no acceptance ever takes one.
//
// Methods:
//   kDdtree      best-first over per-depth scores (DDTree, arXiv 2604.12989): of all trees with `budget` nodes, one with the
//                largest sum of path probabilities. Ties break on the path of ranks, lexicographically; a rank is a token's place
//                at its depth, best first, equal scores by token id. Nodes are numbered in the order they are chosen, so the
//                first n + 1 nodes are the tree of budget n. Tokens of score -inf are never chosen.
//   kCandidates  the global top `budget` by path log-probability among candidates that a beam search collected (EAGLE-2, arXiv
//                2406.16858, section 4.2), ties by index, numbered in candidate order. A candidate counts at most as much as its
//                parent, so the choice is closed under ancestors whatever the numbers say; -inf is never chosen. expand_beam()
//                makes the candidates.
//   kChain       budget drafted tokens in a row. A negative token ends the chain; the rest is padding.
//   kParents     a tree of the caller's, checked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "treemla/dtype.hpp"
#include "treemla/tree_run.hpp"

namespace treemla {

constexpr int kMaxTreeBudget = 1024;
constexpr int kMaxTreeDepths = 64;
constexpr int kMaxTreeCandidates = 4096;
constexpr int kMaxBeamWidth = 64;
constexpr int kMaxVocab = 1 << 22;

// Scores over the vocabulary, one row after the other. Logits are normalised on the fly (log_softmax); log-probabilities are taken
// as they are. -inf is a token of probability 0; NaN, +inf and a row of logits with nothing but -inf are faults. Magnitudes count
// up to 2^20.
struct ScoreView {
  const void* data = nullptr;  // [rows, vocab]
  DType dtype = DType::kF32;   // fp32 or bf16
  int vocab = 0;               // 1..kMaxVocab
  int64_t row_stride = 0;      // elements between rows; 0 means vocab
  bool are_log_probs = false;
};

enum class BuildMethod : int { kDdtree = 0, kCandidates = 1, kChain = 2, kParents = 3 };

struct BuildProblem {
  BuildMethod method = BuildMethod::kDdtree;
  int b = 0;       // requests
  int budget = 0;  // draft nodes besides the root, 1..kMaxTreeBudget
  // [b] token of the root, or null: -1
  const int32_t* root_tokens = nullptr;
  // [b] cached tokens before the tree, or null: 0. Negative is a fault
  const int32_t* prefix_len = nullptr;
  int32_t pad_token = -1;

  // kDdtree
  int num_depths = 0;  // L, 1..kMaxTreeDepths: row r * L + d scores the tokens at depth d + 1 of request r
  ScoreView scores{};  // [b, num_depths, vocab]

  // kCandidates: [b, num_candidates] each; a candidate's parent comes before it, -1 is the root. NaN is a fault
  int num_candidates = 0;  // 1..kMaxTreeCandidates
  const int32_t* candidate_tokens = nullptr;
  const int32_t* candidate_parents = nullptr;
  const float* candidate_log_probs = nullptr;  // of the whole path

  // kChain: [b, budget]. kParents: [b, budget + 1], the root's included, or null: -1
  const int32_t* tokens = nullptr;
  const int32_t* parents = nullptr;  // kParents: [b, budget + 1]

  Memory memory = Memory::kHost;  // of every pointer above and of the output
};

// Any pointer may be null where the array isn't wanted. Row r * q_len + i is node i of request r.
struct TreeOutput {
  int32_t* token_ids = nullptr;              // [b, q_len]
  int32_t* parents = nullptr;                // [b, q_len], -1 for the root
  int32_t* depth = nullptr;                  // [b, q_len] steps to the root
  int32_t* positions = nullptr;              // [b, q_len] prefix_len + depth
  uint32_t* ancestor_bits = nullptr;         // [b, q_len, words_per_row]; bit j of row i: node i sees node j
  int words_per_row = 0;                     // >= ceil(q_len / 32) with ancestor_bits
  int32_t* retrieve_next_token = nullptr;    // [b, q_len] first child, -1 for a leaf
  int32_t* retrieve_next_sibling = nullptr;  // [b, q_len] next child of the same parent, -1 for the last
  float* log_probs =
      nullptr;  // [b, q_len] of the path (kDdtree, kCandidates): 0 for the root, -inf for padding
  int32_t* num_nodes = nullptr;  // [b] nodes that are no padding, root included
};

// Throws Error(kInvalidArgument) naming the argument, its value and what is allowed; Error(kUnsupported) for device memory in a
// build without CUDA. A request with a fault on a device comes out as a root with padding, num_nodes 1.
void build_tree(const BuildProblem& problem, const TreeOutput& output, const TreeRun& run = {});
// 0 for host problems. Depends on no pointer.
std::size_t build_workspace_bytes(const BuildProblem& problem);

// One depth of a beam search: of each of `rows` nodes of the beam its top_k continuations, and of all these the top_k with which
// the beam goes on. Equal scores go by token id, then by index.
struct BeamProblem {
  int b = 0;
  int rows = 0;        // nodes in the beam: 1 at the root, then top_k. 1..kMaxBeamWidth
  int top_k = 0;       // 1..kMaxBeamWidth
  ScoreView scores{};  // [b, rows, vocab]
  // [b, rows] log-probability of the path to each node, or null: 0. NaN is a fault
  const float* row_log_probs = nullptr;
  Memory memory = Memory::kHost;
};

// Continuations that don't exist (a vocabulary smaller than top_k, or scores of -inf) have token -1 and log-probability -inf.
struct BeamOutput {
  int32_t* token_ids = nullptr;  // [b, rows, top_k], best first within a row
  float* log_probs = nullptr;    // [b, rows, top_k] of the path: the row's plus the token's
  // [b, top_k] best first: index into the request's rows * top_k continuations, -1 where there are fewer. Or null
  int32_t* beam = nullptr;
};

// Errors as build_tree(). A request with a fault on a device gets tokens -1.
void expand_beam(const BeamProblem& problem, const BeamOutput& output, const TreeRun& run = {});
std::size_t beam_workspace_bytes(const BeamProblem& problem);

}  // namespace treemla
