// The tree steps through the C ABI: the five steps of a request in C, and errors as statuses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "treemla/treemla.h"

namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Ints = std::vector<int32_t>;

TEST(CApiTrees, BuildAcceptAndCompact) {
  // Two depths over four tokens: 2 then 1 is the likeliest path, 2 then 3 the next.
  const std::vector<float> scores = {0, 1, 3, 0, 0, 3, 0, 2};
  const Ints root{9}, prefix{4};
  Ints tokens(4), parents(4), positions(4), next_token(4), next_sibling(4), num_nodes(1);
  treemla_build build;
  treemla_build_init(&build, sizeof build);
  EXPECT_EQ(build.pad_token, -1);
  build.b = 1;
  build.budget = 3;
  build.scores = scores.data();
  build.num_depths = 2;
  build.vocab = 4;
  build.root_tokens = root.data();
  build.prefix_len = prefix.data();
  treemla_tree_output tree;
  treemla_tree_output_init(&tree, sizeof tree);
  tree.token_ids = tokens.data();
  tree.parents = parents.data();
  tree.positions = positions.data();
  tree.retrieve_next_token = next_token.data();
  tree.retrieve_next_sibling = next_sibling.data();
  tree.num_nodes = num_nodes.data();
  size_t bytes = 1;
  ASSERT_EQ(treemla_build_workspace_bytes(&build, &bytes), TREEMLA_OK);
  EXPECT_EQ(bytes, 0u);
  ASSERT_EQ(treemla_build_tree(&build, &tree, nullptr), TREEMLA_OK) << treemla_last_error();
  EXPECT_THAT(tokens, ElementsAre(9, 2, 1, 3));
  EXPECT_THAT(parents, ElementsAre(-1, 0, 1, 1));
  EXPECT_THAT(positions, ElementsAre(4, 5, 6, 6));
  EXPECT_THAT(num_nodes, ElementsAre(4));

  const Ints q_indptr{0, 4}, argmax{2, 3, 7, 5};
  Ints path(4), count(1), bonus(1), predicts(4);
  treemla_accept accept;
  treemla_accept_init(&accept, sizeof accept);
  accept.b = 1;
  accept.total_q = 4;
  accept.q_indptr = q_indptr.data();
  accept.token_ids = tokens.data();
  accept.retrieve_next_token = next_token.data();
  accept.retrieve_next_sibling = next_sibling.data();
  accept.target_argmax = argmax.data();
  treemla_accept_output accepted;
  treemla_accept_output_init(&accepted, sizeof accepted);
  accepted.accept_index = path.data();
  accepted.path_stride = 4;
  accepted.num_accepted = count.data();
  accepted.bonus_token = bonus.data();
  accepted.predicts = predicts.data();
  ASSERT_EQ(treemla_accept_path(&accept, &accepted, nullptr), TREEMLA_OK) << treemla_last_error();
  EXPECT_THAT(path, ElementsAre(0, 1, 3, -1));
  EXPECT_THAT(count, ElementsAre(2));
  EXPECT_THAT(bonus, ElementsAre(5));
  EXPECT_THAT(predicts, ElementsAre(2, 3, -1, 5));

  std::string pool = "abcdrstu";  // prefix a..d, then the tree's rows
  const Ints slots{0, 1, 2, 3, 4, 5, 6, 7}, kv_len{8};
  Ints new_len(1), num_freed(1);
  std::vector<int64_t> freed(4, -9);
  treemla_compact compact;
  treemla_compact_init(&compact, sizeof compact);
  compact.b = 1;
  compact.pool = pool.data();
  compact.row_bytes = 1;
  compact.num_pages = 8;
  compact.page_entries = slots.data();
  compact.num_page_entries = 8;
  compact.page_stride = 8;
  compact.q_indptr = q_indptr.data();
  compact.total_q = 4;
  compact.kv_len = kv_len.data();
  compact.accept_index = path.data();
  compact.path_stride = 4;
  compact.num_accepted = count.data();
  treemla_compact_output compacted;
  treemla_compact_output_init(&compacted, sizeof compacted);
  compacted.kv_len = new_len.data();
  compacted.freed_pages = freed.data();
  compacted.num_freed = num_freed.data();
  treemla_tree_run run;
  treemla_tree_run_init(&run, sizeof run);
  ASSERT_EQ(treemla_compact_cache(&compact, &compacted, &run), TREEMLA_OK) << treemla_last_error();
  EXPECT_EQ(pool, "abcdrsuu");
  EXPECT_THAT(new_len, ElementsAre(7));
  EXPECT_THAT(num_freed, ElementsAre(1));
  EXPECT_THAT(freed, ElementsAre(7, -9, -9, -9));
  EXPECT_EQ(treemla_check_tree_run(&run, 1), TREEMLA_OK);
}

TEST(CApiTrees, ImportsAnEnginesBatch) {
  const Ints table = {10, 11, 12, 13, 20, 21, 22, 23};
  const std::vector<int64_t> rows = {1, 0}, seq_len = {2, 1};
  const std::vector<uint8_t> mask = {1, 0, 1, 1, 1,
                                     1, 0, 1};  // a root and its child, then a pair that can't see each other
  Ints kv_len(2), pages(8, -1);
  std::vector<uint32_t> bits(4);
  treemla_import batch;
  treemla_import_init(&batch, sizeof batch);
  EXPECT_EQ(batch.q_len, 1);
  batch.b = 2;
  batch.q_len = 2;
  batch.token_table = table.data();
  batch.num_rows = 2;
  batch.row_width = 4;
  batch.row_index = rows.data();
  batch.row_index_type = TREEMLA_I64;
  batch.seq_len = seq_len.data();
  batch.seq_len_type = TREEMLA_I64;
  batch.mask = mask.data();
  batch.mask_len = 8;
  batch.mask_layout = TREEMLA_MASK_LAYOUT_QLEN_ONLY;
  treemla_import_output output;
  treemla_import_output_init(&output, sizeof output);
  output.kv_len = kv_len.data();
  output.page_table = pages.data();
  output.page_stride = 4;
  output.ancestor_bits = bits.data();
  output.words_per_row = 1;
  ASSERT_EQ(treemla_import_batch(&batch, &output, nullptr), TREEMLA_OK) << treemla_last_error();
  EXPECT_THAT(kv_len, ElementsAre(4, 3));
  EXPECT_THAT(pages, ElementsAre(20, 21, 22, 23, 10, 11, 12, -1));
  EXPECT_THAT(bits, ElementsAre(1, 3, 3, 2));
  size_t bytes = 9;
  EXPECT_EQ(treemla_import_workspace_bytes(&batch, &bytes), TREEMLA_OK);
  EXPECT_EQ(bytes, 0u);
  output.reserved = 1;
  EXPECT_EQ(treemla_import_batch(&batch, &output, nullptr), TREEMLA_INVALID_ARGUMENT);
}

TEST(CApiTrees, Beams) {
  const std::vector<float> scores = {0, 1, 3, 0, 0, 3, 0, 2};
  Ints tokens(4), beam(2);
  std::vector<float> log_probs(4);
  treemla_beam problem;
  treemla_beam_init(&problem, sizeof problem);
  problem.b = 1;
  problem.rows = 2;
  problem.top_k = 2;
  problem.vocab = 4;
  problem.scores = scores.data();
  treemla_beam_output output;
  treemla_beam_output_init(&output, sizeof output);
  output.token_ids = tokens.data();
  output.log_probs = log_probs.data();
  output.beam = beam.data();
  ASSERT_EQ(treemla_expand_beam(&problem, &output, nullptr), TREEMLA_OK) << treemla_last_error();
  EXPECT_THAT(tokens, ElementsAre(2, 1, 1, 3));
  EXPECT_THAT(beam, ElementsAre(0, 2));
}

TEST(CApiTrees, ErrorsAreStatuses) {
  treemla_build build;
  treemla_build_init(&build, sizeof build);
  treemla_tree_output tree;
  treemla_tree_output_init(&tree, sizeof tree);
  build.b = 1;
  EXPECT_EQ(treemla_build_tree(&build, &tree, nullptr), TREEMLA_INVALID_ARGUMENT);
  EXPECT_STREQ(treemla_last_error_argument(), "budget");
  EXPECT_EQ(treemla_build_tree(nullptr, &tree, nullptr), TREEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(treemla_build_tree(&build, nullptr, nullptr), TREEMLA_INVALID_ARGUMENT);
  build.size = 8;
  EXPECT_EQ(treemla_build_tree(&build, &tree, nullptr), TREEMLA_INVALID_ARGUMENT);
  EXPECT_THAT(treemla_last_error(), HasSubstr("_init"));
  EXPECT_EQ(treemla_build_workspace_bytes(&build, nullptr), TREEMLA_INVALID_ARGUMENT);

  treemla_accept accept;
  treemla_accept_init(&accept, sizeof accept);
  treemla_accept_output accepted;
  treemla_accept_output_init(&accepted, sizeof accepted);
  accept.reserved = 1;
  EXPECT_EQ(treemla_accept_path(&accept, &accepted, nullptr), TREEMLA_INVALID_ARGUMENT);
  accept.reserved = 0;
  accept.b = 3;
  EXPECT_EQ(treemla_accept_path(&accept, &accepted, nullptr), TREEMLA_INVALID_ARGUMENT);
  EXPECT_STREQ(treemla_last_error_argument(), "q_indptr");
}

}  // namespace
