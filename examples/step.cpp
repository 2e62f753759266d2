#include <cstdio>
#include <vector>

#include "treemla/treemla.hpp"

// One step of speculative decoding for a request with 4 cached tokens. 2 heads, latent 16, rope 8.
int main() {
  constexpr int kBudget = 5, kNodes = kBudget + 1, kDepths = 3, kVocab = 8, kPrefix = 4, kRow = 16 + 8;
  const std::vector<int32_t> prefix_len{kPrefix}, root{7}, q_indptr{0, kNodes}, kv_len{kPrefix + kNodes};

  // 1. Build: the drafter's logits, a row a depth, become the tree with the largest sum of path probabilities.
  std::vector<float> draft(kDepths * kVocab);
  for (int i = 0; i < kDepths * kVocab; ++i) draft[i] = static_cast<float>(i * 5 % 8);
  std::vector<int32_t> tokens(kNodes), parents(kNodes), positions(kNodes);
  treemla::BuildProblem build{.b = 1, .budget = kBudget, .root_tokens = root.data()};
  build.prefix_len = prefix_len.data();
  build.num_depths = kDepths;
  build.scores = {.data = draft.data(), .vocab = kVocab};
  treemla::build_tree(build, {tokens.data(), parents.data(), nullptr, positions.data()});

  // 2. Mask: which node sees which. 3. Verify: each layer has written the rows of tokens[] behind the prefix.
  const std::vector<int32_t> slots{5, 2, 9, 7, 1, 3, 8, 11, 0, 4};  // page size 1, any order
  std::vector<float> q(kNodes * 2 * kRow, 0.1f), kv(12 * kRow), out(kNodes * 2 * 16), lse(kNodes * 2);
  for (int i = 0; i < 12 * kRow; ++i) kv[i] = static_cast<float>(i / kRow);  // row 3 holds threes
  treemla::VerifyProblem verify;
  verify.shape = {.h_q = 2, .d_v = 16, .d_rope = 8};
  verify.b = 1;
  verify.q = {.data = q.data(), .dtype = treemla::DType::kF32, .total_q = kNodes};
  verify.kv = {.data = kv.data(), .dtype = treemla::DType::kF32, .num_pages = 12};
  verify.pages = {.entries = slots.data(), .num_entries = 10, .stride = 10};
  verify.q_indptr = q_indptr.data();
  verify.kv_len = kv_len.data();
  verify.mask = {.kind = treemla::MaskKind::kTree, .parents = parents.data()};
  verify.sm_scale = 0.1447;
  treemla::verify(verify, {.out = out.data(), .lse = lse.data()});

  // 4. Accept: the argmax of the target's logits at each node. Made up here, it leads to the last node.
  std::vector<int32_t> argmax(kNodes, 6), path(kNodes), num_accepted(1), bonus(1), new_len(1);
  for (int i = kNodes - 1; i > 0; i = parents[i]) argmax[parents[i]] = tokens[i];
  treemla::AcceptProblem accept{.b = 1, .total_q = kNodes, .q_indptr = q_indptr.data()};
  accept.token_ids = tokens.data();
  accept.parents = parents.data();
  accept.target_argmax = argmax.data();
  treemla::accept_path(accept, {path.data(), kNodes, num_accepted.data(), bonus.data()});

  // 5. Compact: the accepted rows move to consecutive places behind the prefix, in every layer.
  treemla::CompactProblem compact{.b = 1, .pool = kv.data(), .row_bytes = kRow * 4, .num_pages = 12};
  compact.pages = verify.pages;
  compact.q_indptr = q_indptr.data();
  compact.total_q = kNodes;
  compact.kv_len = kv_len.data();
  compact.accept_index = path.data();
  compact.path_stride = kNodes;
  compact.num_accepted = num_accepted.data();
  treemla::compact_cache(compact, {.kv_len = new_len.data()});
  std::printf("accepted %d, then token %d; %d cached rows, the last was row %g\n", num_accepted[0], bonus[0],
              new_len[0], kv[slots[new_len[0] - 1] * kRow]);
}
