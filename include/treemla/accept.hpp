// Accepting a path of a verified draft tree: from the root down, while drafted tokens are what the target model emits.
//
// Greedy: go to the first child that carries the target's argmax at the current node. Otherwise a lossless walk: whatever was
// drafted, each emitted token is distributed as the target's distribution p at its node, after temperature, top-k and top-p:
//
//   deterministic       children x in order: accept with probability p[x], else p <- normalise(p without x)
//   independent         children drawn i.i.d. from q: accept with min(1, p[x] / q[x]), else p <- normalise(max(p - q, 0))
//                       (SpecInfer, arXiv 2305.09781, algorithm 2)
//   without_replacement the same, and q <- normalise(q without x) after each child (Sequoia, arXiv 2402.12374, algorithm 2)
//
// and where no child is accepted, a draw from what is left of p is the bonus token. A child that q says could not have been drawn,
// q[x] = 0, is judged as a deterministic one, which is lossless for any child.
//
// Randomness: the coin of a decision is 64 bits of Philox4x32-10 (Salmon et al., 2011) with key = seeds[r] and counter = {node,
// purpose, offsets[r] low, high}; purpose 0 judges child `node`, 1 draws the bonus token at `node`. So a request's result is a
// function of its own tree, rows, seed and offset, not of the batch or the machine. A coin passes below the acceptance probability,
// strictly: a coin of 0 does not accept a token of probability 0.
//
// Arithmetic: a token's weight is floor(2^40 * exp((logit - max) / temperature)), an integer, and every later step is integer.
// Tokens of less than 2^-40 of the likeliest one's probability have none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "treemla/dtype.hpp"
#include "treemla/tree_run.hpp"

namespace treemla {

enum class AcceptMethod : int {
  kGreedy = 0,
  kDeterministic = 1,
  kIndependent = 2,
  kWithoutReplacement = 3,
};

struct AcceptProblem {
  AcceptMethod method = AcceptMethod::kGreedy;
  int b = 0;            // requests
  int64_t total_q = 0;  // rows of all arrays below
  const int32_t* q_indptr =
      nullptr;  // [b + 1]; rows past q_indptr[b] are padding. A request of 0 nodes is inert
  const int32_t* token_ids = nullptr;  // [total_q]

  // The trees: links (indices within the request, -1 ends), whose order of siblings is the order of judging, or parents, judged in
  // numbering order. Links win when both are given. A child must come after its parent, and no node may be reached twice.
  const int32_t* retrieve_next_token = nullptr;    // [total_q]
  const int32_t* retrieve_next_sibling = nullptr;  // [total_q]
  const int32_t* parents = nullptr;                // [total_q]

  // What the target says at each node. kGreedy takes either (the argmax wins), the others need logits. Equal logits: the
  // smallest token id. NaN, +inf, and rows with nothing but -inf are faults, in rows that the walk visits.
  const int32_t* target_argmax = nullptr;  // [total_q]
  const void* logits = nullptr;            // [total_q, vocab]
  DType logits_dtype = DType::kF32;        // fp32 or bf16
  int vocab = 0;                           // 1..2^22
  int64_t logits_stride = 0;               // elements between rows; 0 means vocab

  // kIndependent, kWithoutReplacement: row i is the distribution that the children of node i were drawn from. Each row is
  // normalised by its own sum; a row of zeros makes its children deterministic. NaN, negative and above 2 are faults.
  const float* draft_probs = nullptr;  // [total_q, vocab]

  // [b] each, or null for none. temperature 0 keeps the argmax alone; negative, NaN and infinite are faults. Then top_k: weights not
  // below the top_k-th largest stay (0 or less: all). Then top_p of the rest: the fewest largest weights that make up top_p of it
  // stay, ties at the edge too (1 or more: all; NaN and 0 or less: the largest alone).
  const float* temperature = nullptr;
  const int32_t* top_k = nullptr;
  const float* top_p = nullptr;

  const uint64_t* seeds = nullptr;  // [b], or null: 0
  const uint64_t* offsets =
      nullptr;  // [b], or null: 0. Never the same twice for a seed: tokens emitted so far, say
  // Coins of the caller's in place of Philox, in [0, 1); others are faults. Give both or none.
  const float* coins = nullptr;        // [total_q] judging node i
  const float* final_coins = nullptr;  // [b] drawing the bonus token

  Memory memory = Memory::kHost;  // of every pointer above and of the output
};

// Any pointer but accept_index and num_accepted may be null.
struct AcceptOutput {
  // [b, path_stride] the path as rows q_indptr[r] + node, root first, -1 past its end
  int32_t* accept_index = nullptr;
  int path_stride = 0;  // >= 1. A path that fills it ends there, with the bonus token drawn at its last node
  int32_t* num_accepted =
      nullptr;  // [b] drafted tokens on the path: its nodes besides the root. -1 after a fault
  int32_t* bonus_token = nullptr;  // [b] emitted after the path, the next root; -1 where there is none
  // [total_q] the token emitted after node i if i is on the path, else -1 (SGLang's `predicts`)
  int32_t* predicts = nullptr;
};

// Throws Error(kInvalidArgument) naming the argument, its value and what is allowed. A request that is inert has num_accepted 0
// and bonus_token -1; one with a fault on a device num_accepted -1, bonus_token -1 and no path.
void accept_path(const AcceptProblem& problem, const AcceptOutput& output, const TreeRun& run = {});
// 0 for host problems. Depends on no pointer, except whether target_argmax is given.
std::size_t accept_workspace_bytes(const AcceptProblem& problem);

}  // namespace treemla
