// The C ABI in process: the same results as C++, every error as a status with the argument's name, no
// exception.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "core/compare.hpp"
#include "treemla/case_file.hpp"
#include "treemla/tree.hpp"
#include "treemla/treemla.h"
#include "treemla/verify.hpp"
#include "treemla/version.hpp"

namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

const std::string kCaseFile = std::string(TREEMLA_CASES_DIR) + "/h20_ragged_b3.kdtr";

// One request of two nodes (root and child) after a prefix of one token; widths 2 + 1, one head, float32.
struct Tiny {
  std::array<float, 6> q = {1, 0, 0, 0, 1, 0};
  std::array<float, 9> kv = {1, 0, 0, 0, 1, 0, 1, 1, 0};
  std::array<int32_t, 3> pages = {0, 1, 2};
  std::array<int32_t, 2> page_indptr = {0, 3};
  std::array<int32_t, 2> q_indptr = {0, 2};
  std::array<int32_t, 1> kv_len = {3};
  std::array<int32_t, 2> parents = {-1, 0};
  std::array<float, 4> out{};
  std::array<float, 2> lse{};
  treemla_problem problem;
  treemla_output output;

  Tiny() {
    treemla_problem_init(&problem, sizeof problem);
    problem.h_q = 1;
    problem.d_v = 2;
    problem.d_rope = 1;
    problem.b = 1;
    problem.q = q.data();
    problem.q_dtype = TREEMLA_F32;
    problem.total_q = 2;
    problem.kv = kv.data();
    problem.kv_dtype = TREEMLA_F32;
    problem.num_pages = 3;
    problem.page_entries = pages.data();
    problem.num_page_entries = 3;
    problem.page_indptr = page_indptr.data();
    problem.q_indptr = q_indptr.data();
    problem.kv_len = kv_len.data();
    problem.mask = TREEMLA_MASK_TREE;
    problem.parents = parents.data();
    problem.sm_scale = 1.0;
    treemla_output_init(&output, sizeof output);
    output.out = out.data();
    output.lse = lse.data();
  }
};

void expect_error(treemla_status status, treemla_status wanted, const std::string& argument,
                  const std::string& text) {
  EXPECT_EQ(status, wanted) << treemla_last_error();
  EXPECT_EQ(treemla_last_error_argument(), argument) << treemla_last_error();
  EXPECT_THAT(treemla_last_error(), HasSubstr(text));
}

TEST(CApi, VersionIsTheHeadersVersion) { EXPECT_STREQ(treemla_version(), TREEMLA_VERSION); }

TEST(CApi, StatusNames) {
  EXPECT_STREQ(treemla_status_name(TREEMLA_OK), "ok");
  for (int i = 1; i <= TREEMLA_INTERNAL_ERROR; ++i) {
    EXPECT_STRNE(treemla_status_name(static_cast<treemla_status>(i)), "unknown status") << i;
  }
}

TEST(CApi, InitGivesTheDefaultsOfTheCppStructs) {
  treemla_problem problem;
  std::memset(static_cast<void*>(&problem), 0xFF, sizeof problem);
  treemla_problem_init(&problem, sizeof problem);
  EXPECT_EQ(problem.size, sizeof problem);
  EXPECT_EQ(problem.q_dtype, TREEMLA_BF16);
  EXPECT_EQ(problem.kv_dtype, TREEMLA_BF16);
  EXPECT_EQ(problem.kv_scale, 1.0);
  EXPECT_EQ(problem.page_size, 1);
  EXPECT_EQ(problem.q, nullptr);
  EXPECT_EQ(problem.kv_layout, TREEMLA_KV_ROW_MAJOR);
}

TEST(CApi, InitWritesNoFurtherThanTheCallersStruct) {
  struct {
    treemla_output output;
    uint64_t after;
  } s;
  s.after = 0x1234;
  treemla_output_init(&s.output, offsetof(treemla_output, lse));  // an older header without lse
  EXPECT_EQ(s.output.size, offsetof(treemla_output, lse));
  treemla_output_init(&s.output, sizeof s.output);
  EXPECT_EQ(s.after, 0x1234u);
  treemla_output_init(nullptr, sizeof s.output);
}

// Node 0 sees keys 0 and 1 with scores 1 and 0; node 1 sees keys 0, 1, 2 with scores 0, 1, 1.
void expect_tiny_result(const Tiny& t) {
  const double e = std::exp(1.0);
  EXPECT_NEAR(t.lse[0], std::log(e + 1), 1e-5);
  EXPECT_NEAR(t.out[0], e / (e + 1), 1e-5);
  EXPECT_NEAR(t.out[1], 1 / (e + 1), 1e-5);
  EXPECT_NEAR(t.lse[1], std::log(1 + 2 * e), 1e-5);
  EXPECT_NEAR(t.out[2], (1 + e) / (1 + 2 * e), 1e-5);
  EXPECT_NEAR(t.out[3], 2 * e / (1 + 2 * e), 1e-5);
}

TEST(CApi, VerifiesByEveryHostBackend) {
  ASSERT_GE(treemla_backend_count(), 1);
  for (int32_t i = 0; i < treemla_backend_count(); ++i) {
    treemla_backend_info info;
    info.size = sizeof info;
    ASSERT_EQ(treemla_backend_at(i, &info), TREEMLA_OK) << treemla_last_error();
    SCOPED_TRACE(info.name);
    if (!info.available || info.memory != TREEMLA_MEMORY_HOST) continue;
    Tiny t;
    ASSERT_EQ(treemla_check(&t.problem, &t.output), TREEMLA_OK) << treemla_last_error();
    if (treemla_backend_supports(info.name, &t.problem) == TREEMLA_UNSUPPORTED) continue;
    treemla_options options;
    treemla_options_init(&options, sizeof options);
    options.backend = info.name;
    ASSERT_EQ(treemla_verify(&t.problem, &t.output, &options), TREEMLA_OK) << treemla_last_error();
    expect_tiny_result(t);
  }
}

TEST(CApi, PlansOnceAndRunsForOtherData) {
  Tiny t;
  treemla_plan* plan = nullptr;
  ASSERT_EQ(treemla_plan_create(&t.problem, nullptr, &plan), TREEMLA_OK) << treemla_last_error();
  EXPECT_STRNE(treemla_plan_backend(plan), "");
  EXPECT_STRNE(treemla_plan_describe(plan), "");
  ASSERT_EQ(treemla_plan_run(plan, &t.problem, &t.output), TREEMLA_OK) << treemla_last_error();
  expect_tiny_result(t);

  auto other_kv = t.kv;  // another layer: every value doubled
  for (float& x : other_kv) x *= 2;
  t.problem.kv = other_kv.data();
  ASSERT_EQ(treemla_plan_run(plan, &t.problem, &t.output), TREEMLA_OK) << treemla_last_error();
  EXPECT_NEAR(t.lse[0], std::log(std::exp(2.0) + 1), 1e-5);

  t.kv_len[0] = 2;  // without the cached token: the root sees itself, its child both
  ASSERT_EQ(treemla_plan_update(plan, &t.problem), TREEMLA_OK) << treemla_last_error();
  ASSERT_EQ(treemla_plan_run(plan, &t.problem, &t.output), TREEMLA_OK) << treemla_last_error();
  EXPECT_NEAR(t.lse[0], 2.0, 1e-5);
  EXPECT_NEAR(t.lse[1], std::log(1 + std::exp(2.0)), 1e-5);
  EXPECT_EQ(treemla_plan_check_device(plan), TREEMLA_OK) << treemla_last_error();
  EXPECT_EQ(treemla_check_device_problem(&t.problem, nullptr), TREEMLA_OK) << treemla_last_error();

  t.problem.d_rope = 0;
  t.problem.d_v = 3;
  EXPECT_EQ(treemla_plan_run(plan, &t.problem, &t.output), TREEMLA_INVALID_ARGUMENT);
  treemla_plan_destroy(plan);
  treemla_plan_destroy(nullptr);
  EXPECT_STREQ(treemla_plan_backend(nullptr), "");
  EXPECT_STREQ(treemla_plan_describe(nullptr), "");
  EXPECT_EQ(treemla_plan_workspace_bytes(nullptr), 0u);
}

TEST(CApi, ErrorsNameTheArgument) {
  {
    Tiny t;
    t.pages[1] = 7;
    expect_error(treemla_verify(&t.problem, &t.output, nullptr), TREEMLA_INVALID_ARGUMENT, "pages.entries",
                 "7");
  }
  {
    Tiny t;
    t.parents[1] = 1;
    expect_error(treemla_check(&t.problem, nullptr), TREEMLA_INVALID_ARGUMENT, "mask.parents",
                 "node 1 of request 0");
  }
  {
    Tiny t;
    t.problem.kv_scale = 0;
    expect_error(treemla_check(&t.problem, nullptr), TREEMLA_INVALID_ARGUMENT, "kv.scale", "0");
  }
  {
    Tiny t;
    t.problem.kv_dtype = TREEMLA_F8E4M3_PACKED;
    expect_error(treemla_check(&t.problem, nullptr), TREEMLA_INVALID_ARGUMENT, "shape.d_v", "e4m3_packed");
  }
  {
    Tiny t;
    t.problem.kv_dtype = TREEMLA_Q8;
    expect_error(treemla_check(&t.problem, nullptr), TREEMLA_INVALID_ARGUMENT, "shape.d_v", "q8_0");
  }
  {
    Tiny t;
    t.problem.q_dtype = 77;
    expect_error(treemla_check(&t.problem, nullptr), TREEMLA_INVALID_ARGUMENT, "q.dtype", "77");
  }
  {
    Tiny t;
    t.output.out = nullptr;
    expect_error(treemla_check(&t.problem, &t.output), TREEMLA_INVALID_ARGUMENT, "out", "null");
  }
  {
    Tiny t;
    treemla_options options;
    treemla_options_init(&options, sizeof options);
    options.backend = "abacus";
    expect_error(treemla_verify(&t.problem, &t.output, &options), TREEMLA_INVALID_ARGUMENT, "backend",
                 "abacus");
    treemla_plan* plan = reinterpret_cast<treemla_plan*>(&t);
    EXPECT_EQ(treemla_plan_create(&t.problem, &options, &plan), TREEMLA_INVALID_ARGUMENT);
    EXPECT_EQ(plan, nullptr);
    EXPECT_EQ(treemla_backend_supports("abacus", &t.problem), TREEMLA_INVALID_ARGUMENT);
  }
}

TEST(CApi, NullArgumentsAreErrors) {
  Tiny t;
  treemla_plan* plan = nullptr;
  treemla_backend_info info{};
  info.size = sizeof info;
  expect_error(treemla_check(nullptr, nullptr), TREEMLA_INVALID_ARGUMENT, "problem", "null");
  expect_error(treemla_verify(nullptr, &t.output, nullptr), TREEMLA_INVALID_ARGUMENT, "problem", "null");
  expect_error(treemla_verify(&t.problem, nullptr, nullptr), TREEMLA_INVALID_ARGUMENT, "output", "null");
  expect_error(treemla_plan_create(&t.problem, nullptr, nullptr), TREEMLA_INVALID_ARGUMENT, "plan", "null");
  expect_error(treemla_plan_create(nullptr, nullptr, &plan), TREEMLA_INVALID_ARGUMENT, "problem", "null");
  expect_error(treemla_plan_run(nullptr, &t.problem, &t.output), TREEMLA_INVALID_ARGUMENT, "plan", "null");
  expect_error(treemla_plan_update(nullptr, &t.problem), TREEMLA_INVALID_ARGUMENT, "plan", "null");
  expect_error(treemla_plan_check_device(nullptr), TREEMLA_INVALID_ARGUMENT, "plan", "null");
  expect_error(treemla_check_device_problem(nullptr, nullptr), TREEMLA_INVALID_ARGUMENT, "problem", "null");
  expect_error(treemla_backend_at(0, nullptr), TREEMLA_INVALID_ARGUMENT, "info", "null");
  expect_error(treemla_backend_at(-1, &info), TREEMLA_INVALID_ARGUMENT, "index", "-1");
  expect_error(treemla_backend_at(1000, &info), TREEMLA_INVALID_ARGUMENT, "index", "1000");
  expect_error(treemla_backend_supports(nullptr, &t.problem), TREEMLA_INVALID_ARGUMENT, "backend", "null");
  expect_error(treemla_case_read(nullptr, nullptr), TREEMLA_INVALID_ARGUMENT, "c", "null");
  expect_error(treemla_case_problem(nullptr, &t.problem), TREEMLA_INVALID_ARGUMENT, "c", "null");
  EXPECT_EQ(treemla_case_expected_out(nullptr), nullptr);
  EXPECT_EQ(treemla_case_expected_lse(nullptr), nullptr);
  treemla_case_free(nullptr);
}

TEST(CApi, StructSizesOfOtherVersions) {
  Tiny t;
  for (const std::size_t size :
       {std::size_t{0}, sizeof t.problem - 8, std::numeric_limits<std::size_t>::max()}) {
    t.problem.size = size;
    expect_error(treemla_check(&t.problem, nullptr), TREEMLA_INVALID_ARGUMENT, "problem", "size");
  }
  struct {
    treemla_problem problem;
    int64_t field_of_the_future;
  } newer;
  treemla_problem_init(&newer.problem, sizeof newer);
  EXPECT_EQ(newer.field_of_the_future, 0);
  newer.problem = t.problem;
  newer.problem.size = sizeof newer;
  newer.field_of_the_future = 0;
  EXPECT_EQ(treemla_check(&newer.problem, nullptr), TREEMLA_OK) << treemla_last_error();
  newer.field_of_the_future = 1;
  expect_error(treemla_check(&newer.problem, nullptr), TREEMLA_INVALID_ARGUMENT, "problem", "does not know");
}

TEST(CApi, LastErrorBelongsToTheThread) {
  EXPECT_EQ(treemla_check(nullptr, nullptr), TREEMLA_INVALID_ARGUMENT);
  std::string other = "unset";
  std::thread([&] { other = treemla_last_error(); }).join();
  EXPECT_EQ(other, "");
  EXPECT_STRNE(treemla_last_error(), "");
}

TEST(CApi, TreeConversionsAgreeWithCpp) {
  const std::vector<int32_t> parents = {-1, 0, 0, 1, 1, 3};
  const auto q = static_cast<int32_t>(parents.size());
  const int words = 2;
  std::vector<int32_t> depths(6), positions(6), back(6), next(6), sibling(6);
  std::vector<uint32_t> bits(12, 0xFFFFFFFF);
  std::vector<uint8_t> dense(36), full(6 * 10);
  ASSERT_EQ(treemla_check_parents(parents.data(), q), TREEMLA_OK);
  ASSERT_EQ(treemla_tree_depths(parents.data(), q, depths.data()), TREEMLA_OK);
  EXPECT_EQ(depths, treemla::tree_depths(parents));
  ASSERT_EQ(treemla_tree_positions(parents.data(), q, 100, positions.data()), TREEMLA_OK);
  EXPECT_THAT(positions, ElementsAre(100, 101, 101, 102, 102, 103));
  ASSERT_EQ(treemla_bits_from_parents(parents.data(), q, words, bits.data()), TREEMLA_OK);
  EXPECT_EQ(bits, treemla::bits_from_parents(parents, words));
  ASSERT_EQ(treemla_parents_from_bits(bits.data(), q, words, back.data()), TREEMLA_OK);
  EXPECT_EQ(back, parents);
  ASSERT_EQ(treemla_dense_from_parents(parents.data(), q, dense.data()), TREEMLA_OK);
  EXPECT_EQ(dense, treemla::dense_from_parents(parents));
  std::vector<uint8_t> dense_again(36, 9);
  ASSERT_EQ(treemla_dense_from_bits(bits.data(), q, words, dense_again.data()), TREEMLA_OK);
  EXPECT_EQ(dense_again, dense);
  std::vector<uint32_t> bits_again(12, 9);
  ASSERT_EQ(treemla_bits_from_dense(dense.data(), q, words, bits_again.data()), TREEMLA_OK);
  EXPECT_EQ(bits_again, bits);
  ASSERT_EQ(treemla_parents_from_dense(dense.data(), q, back.data()), TREEMLA_OK);
  EXPECT_EQ(back, parents);
  ASSERT_EQ(treemla_full_mask_from_parents(parents.data(), q, 4, full.data()), TREEMLA_OK);
  EXPECT_EQ(full, treemla::full_mask_from_parents(parents, 4));
  ASSERT_EQ(treemla_bits_from_full_mask(full.data(), q, 4, words, bits_again.data()), TREEMLA_OK);
  EXPECT_EQ(bits_again, bits);
  ASSERT_EQ(treemla_parents_from_full_mask(full.data(), q, 4, back.data()), TREEMLA_OK);
  EXPECT_EQ(back, parents);
  ASSERT_EQ(treemla_links_from_parents(parents.data(), q, next.data(), sibling.data()), TREEMLA_OK);
  EXPECT_THAT(next, ElementsAre(1, 3, -1, 5, -1, -1));
  EXPECT_THAT(sibling, ElementsAre(-1, 2, -1, 4, -1, -1));
  ASSERT_EQ(treemla_parents_from_links(next.data(), sibling.data(), q, back.data()), TREEMLA_OK);
  EXPECT_EQ(back, parents);
  EXPECT_EQ(treemla_words_per_row(33), 2);
  EXPECT_EQ(treemla_words_per_row(-1), 0);
}

TEST(CApi, BatchBitsFillRowsOfAnyWidth) {
  const std::vector<int32_t> parents = {-1, 0, -1, 0, 0}, q_indptr = {0, 2, 2, 5};
  std::vector<uint32_t> bits(15, 0xFFFFFFFF);
  ASSERT_EQ(treemla_batch_bits_from_parents(parents.data(), q_indptr.data(), 3, 3, bits.data()), TREEMLA_OK)
      << treemla_last_error();
  EXPECT_THAT(bits, ElementsAreArray({1, 0, 0, 3, 0, 0, 1, 0, 0, 3, 0, 0, 5, 0, 0}));
  expect_error(treemla_batch_bits_from_parents(parents.data(), q_indptr.data(), 3, 0, bits.data()),
               TREEMLA_INVALID_ARGUMENT, "words", "at least 1");
  expect_error(treemla_batch_bits_from_parents(parents.data(), q_indptr.data(), -1, 1, bits.data()),
               TREEMLA_INVALID_ARGUMENT, "b", "-1");
}

TEST(CApi, TreeErrorsLeaveOutputsAlone) {
  const std::vector<int32_t> cycle = {-1, 2, 1};
  std::vector<int32_t> depths(3, 42);
  expect_error(treemla_tree_depths(cycle.data(), 3, depths.data()), TREEMLA_INVALID_ARGUMENT, "parents",
               "node 1");
  EXPECT_THAT(depths, ElementsAre(42, 42, 42));
  const std::vector<int32_t> chain = {-1, 0, 1};
  uint32_t bits[3] = {};
  expect_error(treemla_tree_depths(nullptr, 3, depths.data()), TREEMLA_INVALID_ARGUMENT, "parents", "null");
  expect_error(treemla_tree_depths(chain.data(), 3, nullptr), TREEMLA_INVALID_ARGUMENT, "depths", "null");
  expect_error(treemla_tree_depths(chain.data(), -3, depths.data()), TREEMLA_INVALID_ARGUMENT, "q_len", "-3");
  expect_error(treemla_bits_from_parents(chain.data(), 3, 0, bits), TREEMLA_INVALID_ARGUMENT, "words",
               "at least 1");
  expect_error(treemla_parents_from_bits(bits, 3, -1, depths.data()), TREEMLA_INVALID_ARGUMENT, "words",
               "-1");
  expect_error(treemla_bits_from_full_mask(nullptr, 3, -1, 1, bits), TREEMLA_INVALID_ARGUMENT, "prefix_len",
               "-1");
  std::vector<int32_t> next(3, 7);
  EXPECT_EQ(treemla_links_from_parents(chain.data(), 3, next.data(), nullptr), TREEMLA_INVALID_ARGUMENT);
  EXPECT_THAT(next, ElementsAre(7, 7, 7));
}

TEST(CApi, ReadsAndVerifiesACase) {
  treemla_case* c = nullptr;
  ASSERT_EQ(treemla_case_read(kCaseFile.c_str(), &c), TREEMLA_OK) << treemla_last_error();
  treemla_problem problem;
  treemla_problem_init(&problem, sizeof problem);
  ASSERT_EQ(treemla_case_problem(c, &problem), TREEMLA_OK) << treemla_last_error();
  EXPECT_EQ(problem.size, sizeof problem);
  EXPECT_EQ(problem.h_q, 20);
  EXPECT_EQ(problem.b, 3);
  EXPECT_EQ(problem.mask, TREEMLA_MASK_TREE);
  std::vector<float> out(static_cast<std::size_t>(problem.total_q) * problem.h_q * problem.d_v);
  std::vector<float> lse(static_cast<std::size_t>(problem.total_q) * problem.h_q);
  treemla_output output;
  treemla_output_init(&output, sizeof output);
  output.out = out.data();
  output.lse = lse.data();
  ASSERT_EQ(treemla_verify(&problem, &output, nullptr), TREEMLA_OK) << treemla_last_error();
  ASSERT_NE(treemla_case_expected_out(c), nullptr);
  ASSERT_NE(treemla_case_expected_lse(c), nullptr);
  const treemla::Comparison comparison = treemla::compare(
      {problem.h_q, problem.d_v, problem.d_rope}, problem.total_q, out.data(), treemla_case_expected_out(c),
      lse.data(), treemla_case_expected_lse(c), treemla::Precision::kF32);
  EXPECT_TRUE(comparison.ok) << comparison.failure;
  treemla_case_free(c);
}

TEST(CApi, InterleavesRows) {
  const std::vector<uint16_t> rows = [] {
    std::vector<uint16_t> v(2 * 32);
    for (int i = 0; i < 64; ++i) v[i] = static_cast<uint16_t>(i);
    return v;
  }();
  std::vector<uint16_t> pool(3 * 32, 0xFFFF);
  const int64_t slots[] = {2, 0};
  treemla_interleave interleave;
  treemla_interleave_init(&interleave, sizeof interleave);
  EXPECT_EQ(interleave.slots, nullptr);
  interleave.d_v = 32;
  interleave.rows = rows.data();
  interleave.num_rows = 2;
  interleave.pool = pool.data();
  interleave.pool_rows = 3;
  interleave.slots = slots;
  ASSERT_EQ(treemla_interleave_rows(&interleave), TREEMLA_OK) << treemla_last_error();
  EXPECT_EQ(pool[0], 32);
  EXPECT_EQ(pool[1], 48);
  EXPECT_EQ(pool[32], 0xFFFF);
  EXPECT_EQ(pool[64 + 31], 31);
  interleave.pool_rows = 2;
  expect_error(treemla_interleave_rows(&interleave), TREEMLA_INVALID_ARGUMENT, "slots", "slots[0] = 2");
  expect_error(treemla_interleave_rows(nullptr), TREEMLA_INVALID_ARGUMENT, "interleave", "null");

  Tiny t;
  t.problem.kv_layout = 7;
  expect_error(treemla_verify(&t.problem, &t.output, nullptr), TREEMLA_INVALID_ARGUMENT, "kv.layout", "7");
}

TEST(CApi, BadFilesAreErrors) {
  treemla_case* c = nullptr;
  EXPECT_EQ(treemla_case_read("/nonexistent/case.kdtr", &c), TREEMLA_IO_ERROR);
  EXPECT_THAT(treemla_last_error(), HasSubstr("/nonexistent/case.kdtr"));
  EXPECT_EQ(c, nullptr);
  EXPECT_EQ(treemla_case_parse("not a case", 10, &c), TREEMLA_BAD_FILE);
  EXPECT_EQ(treemla_case_parse(nullptr, 10, &c), TREEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(treemla_case_parse("", 0, &c), TREEMLA_BAD_FILE);
  EXPECT_EQ(c, nullptr);
}

}  // namespace
