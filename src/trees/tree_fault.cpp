#include "trees/tree_fault.hpp"

#include "core/fail.hpp"

namespace treemla {

void throw_if_fault(FaultWord fault) {
  if (!fault) return;
  const auto code = static_cast<TreeFault>(fault.word >> 56);
  const int r = static_cast<int>(fault.word >> 32 & 0xFFFFFF);
  const int at = static_cast<int>(static_cast<uint32_t>(fault.word));
  switch (code) {
    case TreeFault::kNone:
      return;
    case TreeFault::kScoreNaN:
      fail("scores", "scores of request {}, row {}, hold NaN: each must be a number or -inf", r, at);
    case TreeFault::kScoreInfinite:
      fail("scores", "scores of request {}, row {}, hold +inf: each must be below", r, at);
    case TreeFault::kScoresEmpty:
      fail("scores", "scores of request {}, row {}, are all -inf: one token must have a probability", r, at);
    case TreeFault::kParent:
      fail("parents",
           "parent of node {} of request {} must be -1 for node 0 and otherwise in [0, {}): parents come "
           "before "
           "their children, and a request has one root",
           at, r, at);
    case TreeFault::kPrefixLen:
      fail("prefix_len", "prefix_len[{}] = {} must not be negative, and positions must fit 32 bits", r, at);
    case TreeFault::kCandidateParent:
      fail("candidate_parents", "candidate_parents[{}] of request {} is outside [-1, {}): parents come first",
           at, r, at);
    case TreeFault::kCandidateNaN:
      fail("candidate_log_probs", "candidate_log_probs[{}] of request {} must be a number or -inf", at, r);
    case TreeFault::kBeamNaN:
      fail("row_log_probs", "row_log_probs[{}] of request {} must be a number or -inf", at, r);
    case TreeFault::kQIndptr:
      fail("q_indptr", "q_indptr[{}] must not fall, be negative or pass total_q", at);
    case TreeFault::kLink:
      fail("retrieve_next_token",
           "a link of node {} of request {} leaves the tree or leads to a node that is not after its parent",
           at, r);
    case TreeFault::kLinkCycle:
      fail("retrieve_next_sibling",
           "links of request {} reach more children than there are nodes: node {} is reached twice", r, at);
    case TreeFault::kTemperature:
      fail("temperature", "temperature[{}] must be finite and not negative", r);
    case TreeFault::kDraftProb:
      fail("draft_probs", "draft_probs of node {} of request {} must be in [0, 2]", at, r);
    case TreeFault::kCoin:
      fail("coins", "the coin of node {} of request {} is outside [0, 1)", at, r);
    case TreeFault::kArgmax:
      fail("target_argmax", "target_argmax of node {} of request {} must not be negative", at, r);
    case TreeFault::kKvLen:
      fail("kv_len", "kv_len[{}] = {} must be 0 or at least the number of the request's nodes", r, at);
    case TreeFault::kPageTable:
      fail("pages", "the page table of request {} is too short for kv_len {}, or passes num_entries", r, at);
    case TreeFault::kPageEntry:
      fail("pages.entries", "page entry {} of request {} (pages.entries) is outside [0, num_pages)", at, r);
    case TreeFault::kAcceptIndex:
      fail("accept_index",
           "accept_index[{}, {}] must be a row of request {}: its root at first, then ever later ones", r, at,
           r);
    case TreeFault::kNumAccepted:
      fail("num_accepted",
           "num_accepted[{}] = {} must be below path_stride and the number of the request's nodes", r, at);
    case TreeFault::kLayerPointer:
      fail("layers",
           "layers[{}] is null or not aligned to the unit that row_bytes and row_stride_bytes share", at);
    case TreeFault::kRowIndex:
      fail("row_index", "row_index[{}] = {} is outside the token table's [0, num_rows)", r, at);
    case TreeFault::kSeqLen:
      fail("seq_len",
           "seq_len[{}] = {} must not be negative, and kv_len must fit a row of the token table and "
           "page_stride",
           r, at);
  }
  throw Error(ErrorCode::kInternal, "", fmt::format("fault word {:#x}", fault.word));
}

}  // namespace treemla
