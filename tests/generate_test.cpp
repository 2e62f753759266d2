// The generator: reproducible, poisoned where nothing may be read, and with the statistics it promises.

#include "core/generate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "core/kv_row.hpp"
#include "core/lookup.hpp"
#include "treemla/error.hpp"
#include "treemla/tree.hpp"

namespace treemla {
namespace {

using testing::HasSubstr;
using Ints = std::vector<int32_t>;
constexpr TreeKind kKinds[] = {TreeKind::kChain, TreeKind::kStar, TreeKind::kBinary, TreeKind::kRandom,
                               TreeKind::kDdtree};
constexpr DType kDtypes[] = {DType::kF32,    DType::kF16,          DType::kBF16,
                             DType::kF8E4M3, DType::kF8E4M3Packed, DType::kQ8};

Ints ints(const Case& c, const char* name) {
  const CaseTensor* t = c.find(name);
  if (t == nullptr) return {};
  const auto* data = reinterpret_cast<const int32_t*>(t->data);
  return {data, data + t->shape[0]};
}

bool same_bytes(const Case& a, const Case& b) {
  if (a.tensors().size() != b.tensors().size()) return false;
  for (const CaseTensor& t : a.tensors()) {
    const CaseTensor* u = b.find(t.name);
    if (!u || t.dtype != u->dtype || t.shape != u->shape || t.bytes != u->bytes) return false;
    if (std::memcmp(t.data, u->data, t.bytes) != 0) return false;
  }
  return true;
}

CaseSpec small_spec() {
  CaseSpec s;
  s.requests = {{100, 9}, {0, 5}, {0, 0}, {33, 1}, {17, 0}, {61, 33}};
  s.shape = {4, 48, 16};
  s.page_size = 16;
  s.seed = 7;
  return s;
}

// ---- trees

TEST(MakeTree, EveryKindAndSizeIsATree) {
  for (TreeKind kind : kKinds) {
    for (int q_len : {0, 1, 2, 9, 33, 257, 1025}) {
      const Ints parents = make_tree(kind, q_len, 3);
      EXPECT_EQ(parents.size(), static_cast<std::size_t>(q_len));
      EXPECT_NO_THROW(check_parents(parents)) << tree_kind_name(kind) << " " << q_len;
      EXPECT_EQ(make_tree(kind, q_len, 3), parents);
    }
  }
}

TEST(MakeTree, Shapes) {
  EXPECT_EQ(make_tree(TreeKind::kChain, 4, 1), (Ints{-1, 0, 1, 2}));
  EXPECT_EQ(make_tree(TreeKind::kStar, 4, 1), (Ints{-1, 0, 0, 0}));
  EXPECT_EQ(make_tree(TreeKind::kBinary, 7, 1), (Ints{-1, 0, 0, 1, 1, 2, 2}));
}

TEST(MakeTree, RandomOnesDependOnTheSeedAndUseEveryNode) {
  EXPECT_NE(make_tree(TreeKind::kRandom, 33, 1), make_tree(TreeKind::kRandom, 33, 2));
  EXPECT_NE(make_tree(TreeKind::kDdtree, 33, 1), make_tree(TreeKind::kDdtree, 33, 2));
  std::vector<int> count(8);  // the parent of node 8 is uniform over 0..7
  for (uint64_t seed = 0; seed < 8000; ++seed) ++count[make_tree(TreeKind::kRandom, 9, seed)[8]];
  for (int n : count) EXPECT_NEAR(n, 1000, 150);
}

TEST(MakeTree, DdtreeBranchesAndGrowsDeep) {
  const Ints parents = make_tree(TreeKind::kDdtree, 129, 5), depths = tree_depths(parents);
  EXPECT_GT(*std::max_element(depths.begin(), depths.end()), 2);
  EXPECT_GT(std::count(parents.begin(), parents.end(), 0), 1);
  EXPECT_FALSE(std::is_sorted(depths.begin(), depths.end()));
}

// Depths share their distributions, so what grows under a child of rank r + 1 has a better twin under rank r.
TEST(MakeTree, DdtreePrefersBetterSiblings) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Ints parents = make_tree(TreeKind::kDdtree, 257, seed);
    Ints size(257, 1), last_size(257, 257);
    for (int i = 256; i > 0; --i) size[parents[i]] += size[i];
    for (int i = 1; i < 257; ++i) {
      ASSERT_LE(size[i], last_size[parents[i]]) << "seed " << seed << " node " << i;
      last_size[parents[i]] = size[i];
    }
  }
}

TEST(MakeTree, BadArguments) {
  for (int q_len : {-1, 65537, std::numeric_limits<int>::max()}) {
    for (TreeKind kind : kKinds) {
      try {
        make_tree(kind, q_len, 1);
        FAIL();
      } catch (const Error& e) {
        EXPECT_THAT(e.what(), HasSubstr("q_len = " + std::to_string(q_len)));
        EXPECT_THAT(e.what(), HasSubstr("[0, 65536]"));
      }
    }
  }
}

TEST(MakeTree, Names) {
  for (TreeKind kind : kKinds) EXPECT_EQ(parse_tree_kind(tree_kind_name(kind)), kind);
  try {
    parse_tree_kind("shrub");
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("\"shrub\""));
    EXPECT_THAT(e.what(), HasSubstr("chain, star, binary, random, ddtree"));
  }
}

// ---- numbers

TEST(CounterNormal, MomentsAndIndependence) {
  constexpr int kN = 1 << 20;
  double sum = 0, sum2 = 0, sum4 = 0, lag = 0, other = 0;
  for (int i = 0; i < kN; ++i) {
    const double x = counter_normal(1, i);
    sum += x;
    sum2 += x * x;
    sum4 += x * x * x * x;
    lag += x * counter_normal(1, i + 1);
    other += x * counter_normal(2, i);
  }
  EXPECT_NEAR(sum / kN, 0, 0.005);
  EXPECT_NEAR(sum2 / kN, 1, 0.005);
  EXPECT_NEAR(sum4 / kN, 2.7, 0.05);  // a sum of four uniforms; a normal has 3
  EXPECT_NEAR(lag / kN, 0, 0.005);
  EXPECT_NEAR(other / kN, 0, 0.005);
}

TEST(CounterNormal, IsAFunctionOfSeedAndCounter) {
  const float a = counter_normal(5, 1000);
  counter_normal(5, 0);
  EXPECT_EQ(counter_normal(5, 1000), a);
  EXPECT_NE(counter_normal(5, 1001), a);
  EXPECT_NE(counter_normal(6, 1000), a);
}

class Scores : public testing::TestWithParam<std::tuple<DType, double>> {};
INSTANTIATE_TEST_SUITE_P(Generate, Scores,
                         testing::Combine(testing::ValuesIn(kDtypes), testing::Values(0.25, 1.0)));

TEST_P(Scores, HaveTheStandardDeviationAskedFor) {
  const auto [kv_dtype, kv_scale] = GetParam();
  for (double gain : {0.5, 4.0, 30.0}) {
    CaseSpec s;
    s.requests = {{600, 9}};
    s.shape = {8, 128, 64};
    s.kv_dtype = kv_dtype;
    s.kv_scale = kv_scale;
    s.gain = gain;
    const Case c = generate_case(s);
    const VerifyProblem p = c.problem();
    double sum = 0, sum2 = 0, row2 = 0;
    int64_t n = 0;
    std::vector<double> row(192);
    for (int64_t t = 0; t < 609; ++t) {
      load_kv_row(kv_row_at(p, pool_row(p.pages, s.page_size, 0, t)), p.shape, kv_dtype, row.data());
      for (int64_t i = 0; i < 9 * 8; ++i) {
        double dot = 0;
        for (int64_t k = 0; k < 192; ++k) {
          dot += double(load_element(p.q.data, p.q.dtype, i * 192 + k)) * row[k];
        }
        const double score = s.sm_scale * dot * kv_scale;
        sum += score;
        sum2 += score * score;
        ++n;
      }
      for (int64_t k = 0; k < 192; ++k) {
        row2 += std::pow(row[k] * kv_scale, 2);
      }
    }
    EXPECT_NEAR(sum / n / gain, 0, 0.1);
    EXPECT_NEAR(std::sqrt(sum2 / n) / gain, 1, 0.05);
    EXPECT_NEAR(row2 / (609 * 192), 1, 0.02);  // real rows are N(0, 1)
  }
}

// ---- the case

class EveryLayout : public testing::TestWithParam<std::tuple<DType, int>> {};
INSTANTIATE_TEST_SUITE_P(Generate, EveryLayout,
                         testing::Combine(testing::ValuesIn(kDtypes), testing::Values(1, 3, 16, 64)));

TEST_P(EveryLayout, IsAValidCaseWithPoisonAroundIt) {
  CaseSpec s = small_spec();
  std::tie(s.kv_dtype, s.page_size) = GetParam();
  if (s.kv_dtype == DType::kF8E4M3Packed) s.shape.d_v = 256;
  if (s.kv_dtype == DType::kQ8) s.shape = {4, 64, 32};
  const Case c = generate_case(s);
  const VerifyProblem p = c.problem();
  EXPECT_NO_THROW(check_problem(p));
  EXPECT_EQ(c.b(), 6);
  EXPECT_EQ(c.total_q(), 48);
  EXPECT_EQ(ints(c, "q_indptr"), (Ints{0, 9, 14, 14, 15, 15, 48}));
  EXPECT_EQ(ints(c, "kv_len"), (Ints{109, 5, 0, 34, 17, 94}));

  // Rows owned by requests, each once, none in page 0.
  std::vector<char> owned(p.kv.num_pages * s.page_size);
  for (int r = 0; r < p.b; ++r) {
    for (int64_t t = 0; t < p.kv_len[r]; ++t) {
      const int64_t row = pool_row(p.pages, s.page_size, page_base(p.pages, r), t);
      EXPECT_GE(row, s.page_size);
      EXPECT_FALSE(owned[row]);
      owned[row] = 1;
    }
  }
  const int64_t d_qk = s.shape.d_qk();
  std::vector<float> numbers(d_qk);
  for (int64_t row = 0; row < std::ssize(owned); ++row) {
    load_kv_row(kv_row_at(p, row), p.shape, p.kv.dtype, numbers.data());
    for (int64_t k = 0; k < d_qk; ++k) ASSERT_EQ(std::isnan(numbers[k]), !owned[row]) << row << " " << k;
  }
  const auto used = static_cast<int64_t>(ints(c, "page_indices").size());
  EXPECT_GE(p.kv.num_pages, used + 2);
  EXPECT_NEAR(static_cast<double>(p.kv.num_pages), 1.125 * static_cast<double>(used) + 1, 1.0);

  for (int64_t i = 0; i < c.total_q() * s.shape.h_q * d_qk; ++i) {
    ASSERT_TRUE(std::isfinite(load_element(p.q.data, p.q.dtype, i)));
  }
}

TEST(Generate, Q8RowsHaveScalesOfTheirOwn) {
  CaseSpec s = small_spec();
  s.shape = {2, 64, 32};
  s.kv_dtype = DType::kQ8;
  const Case c = generate_case(s);
  const VerifyProblem p = c.problem();
  EXPECT_EQ(c.find("kv")->dtype, "U8");
  EXPECT_EQ(c.find("kv")->shape[1], 102);
  EXPECT_EQ(p.kv.dtype, DType::kQ8);

  s.kv_dtype = DType::kF32;
  const Case exact = generate_case(s);
  const VerifyProblem e = exact.problem();
  int num_powers_of_two = 0, num_scales = 0;
  std::vector<double> got(96), want(96);
  for (int64_t row = 0; row < p.kv.num_pages * p.kv.page_size; ++row) {
    load_kv_row(kv_row_at(p, row), p.shape, p.kv.dtype, got.data());
    load_kv_row(kv_row_at(e, row), e.shape, e.kv.dtype, want.data());
    for (int block = 0; block < 3; ++block) {
      const float scale = q8_scale(kv_row_at(p, row), block);
      ASSERT_EQ(std::isnan(scale), std::isnan(want[0])) << row;
      if (std::isnan(scale)) continue;
      for (int i = 32 * block; i < 32 * block + 32; ++i)
        ASSERT_NEAR(got[i], want[i], scale * 0.5625)
            << row << " " << i;  // 127 of a scale rounded down: 0.0625
      int exponent;
      num_powers_of_two += std::frexp(scale, &exponent) == 0.5f;
      ++num_scales;
    }
  }
  EXPECT_GT(num_scales, 500);
  EXPECT_LT(num_powers_of_two, num_scales / 20);
}

// Each part of an unowned row is poison by itself: a kernel that reads the wrong scale or latent shows it.
TEST(Generate, PackedRowsHaveScalesOfTheirOwn) {
  CaseSpec s = small_spec();
  s.shape = {2, 256, 6};
  s.kv_dtype = DType::kF8E4M3Packed;
  const Case c = generate_case(s);
  const VerifyProblem p = c.problem();
  EXPECT_EQ(c.find("kv")->dtype, "U8");
  EXPECT_EQ(c.find("kv")->shape[1], 256 + 8 + 12);

  s.kv_dtype = DType::kF32;
  const Case exact = generate_case(s);
  const VerifyProblem e = exact.problem();
  int num_powers_of_two = 0, num_scales = 0, num_full = 0;
  std::vector<double> got(262), want(262);
  for (int64_t row = 0; row < p.kv.num_pages * p.kv.page_size; ++row) {
    const void* bytes = kv_row_at(p, row);
    load_kv_row(bytes, p.shape, p.kv.dtype, got.data());
    load_kv_row(kv_row_at(e, row), e.shape, e.kv.dtype, want.data());
    for (int g = 0; g < 2; ++g) {
      const float scale = packed_scale(bytes, p.shape, g);
      ASSERT_EQ(std::isnan(scale), std::isnan(want[0])) << row;
      if (std::isnan(scale)) continue;
      double largest = 0;
      for (int i = 128 * g; i < 128 * g + 128; ++i) {
        largest = std::max(largest, std::fabs(want[i]));
        ASSERT_NEAR(got[i], want[i], std::fabs(want[i]) / 16 + scale * 0x1p-10) << row << " " << i;
        num_full += std::fabs(load_element(bytes, DType::kF8E4M3, i)) == 448;
      }
      ASSERT_NEAR(scale, largest / 448, largest * 1e-6);
      int exponent;
      num_powers_of_two += std::frexp(scale, &exponent) == 0.5f;
      ++num_scales;
    }
    for (int i = 256; i < 262 && !std::isnan(want[i]); ++i)
      ASSERT_EQ(got[i], bf16_to_float(float_to_bf16(static_cast<float>(want[i]))));
  }
  EXPECT_EQ(num_scales, 2 * (109 + 5 + 34 + 17 + 94));
  EXPECT_GE(num_full, num_scales);
  EXPECT_LT(num_powers_of_two, num_scales / 10);
}

TEST(Generate, PagesAreOutOfOrderAndInterleaved) {
  CaseSpec s;
  s.requests = {{500, 3}, {500, 3}};
  s.shape = {1, 8, 0};
  const Case c = generate_case(s);
  const Ints pages = ints(c, "page_indices");
  int falls = 0;
  for (std::size_t i = 1; i < pages.size(); ++i) falls += pages[i] < pages[i - 1];
  EXPECT_NEAR(falls, 503, 60);
  const auto middle = pages.begin() + 503;
  const auto [low_a, high_a] = std::minmax_element(pages.begin(), middle);
  const auto [low_b, high_b] = std::minmax_element(middle, pages.end());
  EXPECT_LT(*low_a, *high_b);
  EXPECT_LT(*low_b, *high_a);
  EXPECT_EQ(std::set<int32_t>(pages.begin(), pages.end()).size(), pages.size());
}

TEST(Generate, TreesAndPositions) {
  for (TreeKind kind : kKinds) {
    CaseSpec s = small_spec();
    s.tree = kind;
    const Case c = generate_case(s);
    const Ints parents = ints(c, "parents"), positions = ints(c, "positions"), q_indptr = ints(c, "q_indptr");
    for (std::size_t r = 0; r < s.requests.size(); ++r) {
      const Ints tree(parents.begin() + q_indptr[r], parents.begin() + q_indptr[r + 1]);
      const Ints at(positions.begin() + q_indptr[r], positions.begin() + q_indptr[r + 1]);
      EXPECT_EQ(tree_positions(tree, s.requests[r].prefix_len), at);
    }
  }
}

TEST(Generate, OtherMasksHaveNoParents) {
  for (MaskKind mask : {MaskKind::kCausal, MaskKind::kNone}) {
    CaseSpec s = small_spec();
    s.mask = mask;
    const Case c = generate_case(s);
    EXPECT_EQ(c.find("parents"), nullptr);
    EXPECT_EQ(c.problem().mask.kind, mask);
    const Ints positions = ints(c, "positions");
    EXPECT_EQ(Ints(positions.begin(), positions.begin() + 9),
              (Ints{100, 101, 102, 103, 104, 105, 106, 107, 108}));
  }
}

TEST(Generate, IsReproducible) {
  const CaseSpec s = small_spec();
  const Case a = generate_case(s);
  EXPECT_TRUE(same_bytes(a, generate_case(s)));
  CaseSpec t = s;
  t.seed = 8;
  EXPECT_FALSE(same_bytes(a, generate_case(t)));
}

TEST(Generate, PageSizeMovesRowsButDoesNotChangeThem) {
  CaseSpec s = small_spec(), t = s;
  s.page_size = 1;
  t.page_size = 64;
  const Case a = generate_case(s), b = generate_case(t);
  const VerifyProblem p = a.problem(), q = b.problem();
  const int64_t row_bytes = s.shape.d_qk() * 2;
  for (int r = 0; r < p.b; ++r) {
    for (int64_t i = 0; i < p.kv_len[r]; ++i) {
      const auto* x = a.find("kv")->data + pool_row(p.pages, 1, page_base(p.pages, r), i) * row_bytes;
      const auto* y = b.find("kv")->data + pool_row(q.pages, 64, page_base(q.pages, r), i) * row_bytes;
      ASSERT_EQ(std::memcmp(x, y, row_bytes), 0) << r << " " << i;
    }
  }
  EXPECT_EQ(std::memcmp(a.find("q")->data, b.find("q")->data, a.find("q")->bytes), 0);
}

TEST(Generate, LargeFillDoesNotDependOnChunks) {  // rows of many chunks equal the counter's own numbers
  CaseSpec s;
  s.requests = {{3000, 1}};
  s.shape = {1, 32, 0};
  s.kv_dtype = DType::kF32;
  const Case c = generate_case(s);
  const VerifyProblem p = c.problem();
  std::set<float> seen;
  for (int64_t t = 0; t < 3001; ++t) {
    for (int k = 0; k < 32; ++k) {
      seen.insert(load_element(p.kv.data, DType::kF32, pool_row(p.pages, 1, 0, t) * 32 + k));
    }
  }
  EXPECT_GT(seen.size(), 60000u);  // of 96032 draws from 2^18 levels: no chunk repeats another
  EXPECT_TRUE(same_bytes(c, generate_case(s)));
}

TEST(Generate, PaddingAndEmptyBatches) {
  for (const auto& requests : {std::vector<RequestSpec>{}, {{0, 0}}, {{0, 0}, {5, 0}, {0, 0}}}) {
    CaseSpec s;
    s.requests = requests;
    s.shape = {2, 8, 4};
    const Case c = generate_case(s);
    EXPECT_EQ(c.b(), static_cast<int>(requests.size()));
    EXPECT_EQ(c.total_q(), 0);
    EXPECT_NO_THROW(check_problem(c.problem()));
  }
}

TEST(Generate, HugePagesOfFewRows) {
  CaseSpec s;
  s.requests = {{0, 1}};
  s.shape = {1, 1, 0};
  s.page_size = 1 << 20;
  const Case c = generate_case(s);
  EXPECT_EQ(ints(c, "page_indices").size(), 1u);
  EXPECT_NO_THROW(check_problem(c.problem()));
}

TEST(Generate, DescribeNamesEverything) {
  CaseSpec s = small_spec();
  s.requests = {{4096, 9}, {4096, 9}, {0, 0}};
  const std::string text = describe(s);
  for (const char* part :
       {"requests=2x4096+9,1x0+0", "h_q=4", "d_v=48", "d_rope=16", "tree=random", "mask=tree", "q=bf16",
        "kv=bf16", "page_size=16", "sm_scale=0.1447", "gain=4", "kv_scale=1", "seed=7"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(generate_case(s).source, HasSubstr(text));
}

TEST(Generate, ImpossibleSpecsAreRefused) {
  const double nan = std::nan("");
  const struct {
    void (*spoil)(CaseSpec&, double);
    const char* argument;
    std::vector<const char*> says;
  } kBad[] = {
      {[](CaseSpec& s, double) { s.shape.h_q = 0; }, "shape.h_q", {"= 0", "[1, 1024]"}},
      {[](CaseSpec& s, double) { s.shape.d_v = 4097; }, "shape.d_v", {"= 4097", "[1, 4096]"}},
      {[](CaseSpec& s, double) { s.shape.d_rope = 2147483647; }, "shape.d_rope", {"2147483647", "[0, 4048]"}},
      {[](CaseSpec& s, double) { s.q_dtype = DType::kF8E4M3; }, "q_dtype", {"e4m3", "fp32, fp16, bf16"}},
      {[](CaseSpec& s, double) { s.q_dtype = DType::kF8E4M3Packed; },
       "q_dtype",
       {"e4m3_packed", "fp32, fp16, bf16"}},
      {[](CaseSpec& s, double) { s.q_dtype = DType::kQ8; }, "q_dtype", {"q8_0", "fp32, fp16, bf16"}},
      {[](CaseSpec& s, double) { s.kv_dtype = DType::kQ8; }, "shape.d_v", {"= 48", "32", "q8_0"}},
      {[](CaseSpec& s, double) {
         s.kv_dtype = DType::kQ8, s.shape = {4, 64, 32}, s.kv_scale = 129;
       },
       "kv_scale",
       {"= 129", "128]", "q8_0"}},
      {[](CaseSpec& s, double) { s.kv_dtype = DType::kF8E4M3Packed; },
       "shape.d_v",
       {"= 48", "128", "e4m3_packed"}},
      {[](CaseSpec& s, double) {
         s.kv_dtype = DType::kF8E4M3Packed, s.shape = {4, 128, 7};
       },
       "shape.d_rope",
       {"= 7", "even"}},
      {[](CaseSpec& s, double) { s.page_size = 0; }, "page_size", {"= 0", "at least 1"}},
      {[](CaseSpec& s, double) { s.sm_scale = 0; }, "sm_scale", {"= 0"}},
      {[](CaseSpec& s, double x) { s.sm_scale = x; }, "sm_scale", {"nan"}},
      {[](CaseSpec& s, double x) { s.gain = x; }, "gain", {"nan", "finite"}},
      {[](CaseSpec& s, double) { s.gain = -1; }, "gain", {"= -1"}},
      {[](CaseSpec& s, double) { s.q_dtype = DType::kF16, s.gain = 1e5; },
       "gain",
       {"100000", "fp16 ends at 65504"}},
      {[](CaseSpec& s, double) { s.kv_scale = -1; }, "kv_scale", {"= -1"}},
      {[](CaseSpec& s, double) { s.kv_dtype = DType::kF8E4M3, s.kv_scale = 1e-3; },
       "kv_scale",
       {"0.001", "e4m3", "64]"}},
      {[](CaseSpec& s, double) { s.kv_dtype = DType::kF8E4M3, s.kv_scale = 65; },
       "kv_scale",
       {"= 65", "64]"}},
      {[](CaseSpec& s, double) { s.requests[3].q_len = -1; }, "requests[3].q_len", {"= -1", "[0, 65536]"}},
      {[](CaseSpec& s, double) { s.requests[1].q_len = 65537; }, "requests[1].q_len", {"= 65537"}},
      {[](CaseSpec& s, double) { s.requests[2].prefix_len = -4; },
       "requests",
       {"requests[2].prefix_len = -4"}},
      {[](CaseSpec& s, double) { s.requests[0].prefix_len = 2147483640; }, "requests", {"[0, 2147483638]"}},
      {[](CaseSpec& s, double) {
         s.requests.assign(3, {2000000000, 1}), s.page_size = 1;
       },
       "requests",
       {"pages of 1"}},
      {[](CaseSpec& s, double) {
         s.requests.assign(40000, {0, 65536});
       },
       "requests",
       {"2621440000 tree nodes"}},
  };
  for (const auto& bad : kBad) {
    CaseSpec s = small_spec();
    bad.spoil(s, nan);
    try {
      generate_case(s);
      ADD_FAILURE() << bad.argument << " " << bad.says[0];
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(e.argument(), bad.argument);
      for (const char* part : bad.says) EXPECT_THAT(e.what(), HasSubstr(part));
    }
  }
}

}  // namespace
}  // namespace treemla
