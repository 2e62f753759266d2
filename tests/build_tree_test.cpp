// Building trees: DDTree against every tree there could be, the order of ties, beams, chains, hostile scores and trees.

#include "treemla/build.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "error_of.hpp"
#include "treemla/error.hpp"
#include "treemla/tree.hpp"
#include "trees/exact.hpp"

namespace treemla {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Everything build_tree() writes, poisoned before.
struct Built {
  int q_len, words;
  Ints token_ids, parents, depth, positions, next_token, next_sibling, num_nodes;
  std::vector<uint32_t> bits;
  Floats log_probs;

  explicit Built(const BuildProblem& p) : q_len(p.budget + 1), words(words_per_row(q_len)) {
    const std::size_t n = static_cast<std::size_t>(p.b) * q_len;
    for (Ints* a : {&token_ids, &parents, &depth, &positions, &next_token, &next_sibling}) a->assign(n, -77);
    num_nodes.assign(p.b, -77);
    bits.assign(n * words, 0xDEADBEEF);
    log_probs.assign(n, kNaN);
    build_tree(p, {token_ids.data(), parents.data(), depth.data(), positions.data(), bits.data(), words,
                   next_token.data(), next_sibling.data(), log_probs.data(), num_nodes.data()});
  }

  // The parts agree with each other, by the functions of tree.hpp.
  void expect_consistent(const BuildProblem& p) const {
    for (int r = 0; r < p.b; ++r) {
      const auto of = [&](const auto& v, int width = 1) {
        return std::vector(v.begin() + int64_t{r} * q_len * width,
                           v.begin() + int64_t{r + 1} * q_len * width);
      };
      const Ints tree = of(parents);
      ASSERT_NO_THROW(check_parents(tree));
      EXPECT_EQ(of(depth), tree_depths(tree));
      EXPECT_EQ(of(positions), tree_positions(tree, p.prefix_len ? p.prefix_len[r] : 0));
      EXPECT_EQ(of(bits, words), bits_from_parents(tree));
      EXPECT_EQ(of(next_token), links_from_parents(tree).next_token);
      EXPECT_EQ(of(next_sibling), links_from_parents(tree).next_sibling);
      for (int i = num_nodes[r]; i < q_len; ++i) {
        EXPECT_EQ(tree[i], 0);
        EXPECT_EQ(of(token_ids)[i], p.pad_token);
        EXPECT_EQ(of(log_probs)[i], -kInf);
      }
    }
  }
};

BuildProblem ddtree(int b, int budget, int num_depths, int vocab, const void* scores,
                    bool are_log_probs = false, DType dtype = DType::kF32) {
  BuildProblem p;
  p.b = b;
  p.budget = budget;
  p.num_depths = num_depths;
  p.scores = {scores, dtype, vocab, 0, are_log_probs};
  return p;
}

std::vector<double> log_softmax(const float* row, int vocab) {
  double sum = 0;
  for (int i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(row[i]));
  std::vector<double> result(row, row + vocab);
  for (double& x : result) x -= std::log(sum);
  return result;
}

// Log-probabilities of every path through the depths, the most probable first.
std::vector<double> all_paths(const std::vector<std::vector<double>>& log_probs) {
  std::vector<double> paths, last{0};
  for (const auto& row : log_probs) {
    std::vector<double> next;
    for (const double path : last)
      for (const double x : row)
        if (x > -INFINITY) next.push_back(path + x);
    paths.insert(paths.end(), next.begin(), next.end());
    last = std::move(next);
  }
  std::sort(paths.begin(), paths.end(), std::greater<>());
  return paths;
}

// No tree with `budget` nodes has a larger sum than the budget most probable paths, wherever they hang.
TEST(Ddtree, IsOptimalOn1000RandomCases) {
  std::mt19937 rng(20261130);
  const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 1000; ++trial) {
    SCOPED_TRACE(trial);
    const int b = 1 + below(3), num_depths = 1 + below(4), vocab = 1 + below(5), budget = 1 + below(24);
    const bool are_log_probs = below(2), half = below(2);
    std::normal_distribution<float> normal(0, 0.5f + static_cast<float>(below(4)));
    Floats scores(static_cast<std::size_t>(b) * num_depths * vocab);
    for (float& x : scores) x = below(12) == 0 ? -kInf : normal(rng);
    for (std::size_t row = 0; row < scores.size(); row += vocab) {
      scores[row + below(vocab)] = normal(rng);  // a row of nothing but -inf is a fault
      if (!are_log_probs) continue;
      const auto normalised = log_softmax(&scores[row], vocab);
      for (int i = 0; i < vocab; ++i) scores[row + i] = static_cast<float>(std::min(0.0, normalised[i]));
    }
    std::vector<uint16_t> halves(scores.size());
    for (std::size_t i = 0; i < scores.size() && half; ++i)
      scores[i] = bf16_to_float(halves[i] = float_to_bf16(scores[i]));
    const Ints prefix_len{5, 0, 1000}, roots{7, 8, 9};
    BuildProblem p = half ? ddtree(b, budget, num_depths, vocab, halves.data(), are_log_probs, DType::kBF16)
                          : ddtree(b, budget, num_depths, vocab, scores.data(), are_log_probs);
    p.prefix_len = prefix_len.data();
    p.root_tokens = roots.data();
    const Built built(p);
    built.expect_consistent(p);

    for (int r = 0; r < b; ++r) {
      std::vector<std::vector<double>> log_probs;
      for (int d = 0; d < num_depths; ++d) {
        const float* row = &scores[(static_cast<std::size_t>(r) * num_depths + d) * vocab];
        log_probs.push_back(are_log_probs ? std::vector<double>(row, row + vocab) : log_softmax(row, vocab));
      }
      const std::vector<double> paths = all_paths(log_probs);
      const int chosen = std::min<int>(budget, static_cast<int>(paths.size()));
      ASSERT_EQ(built.num_nodes[r], 1 + chosen);
      double best = 0, sum = 0;
      for (int i = 0; i < chosen; ++i) best += std::exp(paths[i]);
      std::vector<double> path(chosen + 1, 0);
      std::set<std::pair<int32_t, int32_t>> siblings;
      const int64_t base = int64_t{r} * built.q_len;
      EXPECT_EQ(built.token_ids[base], roots[r]);
      for (int i = 1; i <= chosen; ++i) {
        const int parent = built.parents[base + i], token = built.token_ids[base + i];
        ASSERT_TRUE(token >= 0 && token < vocab);
        EXPECT_TRUE(siblings.insert({parent, token}).second)
            << "token " << token << " twice below " << parent;
        path[i] = path[parent] + log_probs[built.depth[base + i] - 1][token];
        EXPECT_NEAR(built.log_probs[base + i], path[i], 2e-6 * (1 + std::abs(path[i])));
        sum += std::exp(path[i]);
      }
      EXPECT_NEAR(sum, best, 1e-6 * best);
    }
  }
}

TEST(Ddtree, TiesGoByThePathOfRanks) {
  const Floats zeros(2 * 3, 0.0f);  // every token of a depth alike: all paths of a length tie
  const Built built(ddtree(1, 9, 2, 3, zeros.data()));
  EXPECT_THAT(built.parents, ElementsAre(-1, 0, 0, 0, 1, 1, 1, 2, 2, 2));
  EXPECT_THAT(built.token_ids, ElementsAre(-1, 0, 1, 2, 0, 1, 2, 0, 1, 2));
  // A token of probability 1 a depth: a child ties with its parent, so the first path of ranks goes down.
  const Floats sure{0, -1, 0, -1, 0, -1};
  const Built deep(ddtree(1, 4, 3, 2, sure.data(), true));
  EXPECT_THAT(deep.parents, ElementsAre(-1, 0, 1, 2, 2));
  EXPECT_THAT(deep.token_ids, ElementsAre(-1, 0, 0, 0, 1));
}

TEST(Ddtree, ASmallerBudgetIsTheBeginningOfALargerOne) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal(0, 3);
  Floats scores(6 * 2000);
  for (float& x : scores) x = std::round(normal(rng) * 4) / 4;  // many ties
  const Built large(ddtree(1, 1024, 6, 2000, scores.data()));
  large.expect_consistent(ddtree(1, 1024, 6, 2000, scores.data()));
  for (int budget : {1, 7, 64, 300}) {
    const Built small(ddtree(1, budget, 6, 2000, scores.data()));
    EXPECT_TRUE(std::equal(small.parents.begin(), small.parents.end(), large.parents.begin()));
    EXPECT_TRUE(std::equal(small.token_ids.begin(), small.token_ids.end(), large.token_ids.begin()));
  }
}

TEST(Ddtree, RowsMayBeFarApartAndVocabulariesLong) {
  constexpr int kVocab = 3 * kScoreChunk + 17, kStride = kVocab + 5;
  Floats scores(2 * kStride, kNaN);  // what lies between rows is never read
  for (int d = 0; d < 2; ++d)
    for (int i = 0; i < kVocab; ++i)
      scores[d * kStride + i] = static_cast<float>((i * 7919) % kVocab) * 1e-3f;
  BuildProblem p = ddtree(1, 8, 2, kVocab, scores.data());
  p.scores.row_stride = kStride;
  const Built built(p);
  const auto expected = log_softmax(scores.data(), kVocab);
  EXPECT_NEAR(built.log_probs[1], *std::max_element(expected.begin(), expected.end()), 1e-5);
}

TEST(Ddtree, HostileScores) {
  const auto build = [](Floats scores, bool are_log_probs = false) {
    Built built(ddtree(1, 4, 1, static_cast<int>(scores.size()), scores.data(), are_log_probs));
    return built.num_nodes[0];
  };
  EXPECT_THAT(error_of([&] { build({1, kNaN, 2}); }), HasSubstr("scores of request 0, row 0, hold NaN"));
  EXPECT_THAT(error_of([&] { build({1, kInf, 2}, true); }), HasSubstr("hold +inf"));
  EXPECT_THAT(error_of([&] { build({-kInf, -kInf}); }), HasSubstr("are all -inf"));
  EXPECT_EQ(build({-kInf, -kInf}, true), 1);
  EXPECT_EQ(build({-kInf, 5, -kInf}), 2);
  EXPECT_EQ(build({3e38f, -3e38f}), 3);
  EXPECT_EQ(build({3e38f, 3e38f}, true), 3);
}

TEST(Build, ChainsEndAtANegativeToken) {
  const Ints tokens{4, 5, 6, 7, -1, 9};
  BuildProblem p;
  p.method = BuildMethod::kChain;
  p.b = 2;
  p.budget = 3;
  p.tokens = tokens.data();
  const Built built(p);
  built.expect_consistent(p);
  EXPECT_THAT(built.token_ids, ElementsAre(-1, 4, 5, 6, -1, 7, -1, -1));
  EXPECT_THAT(built.parents, ElementsAre(-1, 0, 1, 2, -1, 0, 0, 0));
  EXPECT_THAT(built.num_nodes, ElementsAre(4, 2));
}

TEST(Build, ParentsOfTheCallers) {
  const Ints parents{-1, 0, 0, 1, -1, 0, 1, 0}, tokens{1, 2, 3, 4, 5, 6, 7, 8};
  BuildProblem p;
  p.method = BuildMethod::kParents;
  p.b = 2;
  p.budget = 3;
  p.parents = parents.data();
  p.tokens = tokens.data();
  const Built built(p);
  built.expect_consistent(p);
  EXPECT_EQ(built.parents, parents);
  EXPECT_EQ(built.token_ids, tokens);
  for (const Ints& bad : {Ints{-1, 0, 2, 1}, Ints{0, 0, 0, 0}, Ints{-1, -1, 0, 0}, Ints{-1, 0, 7, 0}}) {
    p.parents = bad.data();
    p.b = 1;
    EXPECT_THAT(error_of([&] { Built b(p); }), HasSubstr("parents: parent of node"));
  }
}

// ---- beams ----

struct Candidates {
  Ints tokens, parents;
  Floats log_probs;
  BuildProblem problem(int budget) const {
    BuildProblem p;
    p.method = BuildMethod::kCandidates;
    p.b = 1;
    p.budget = budget;
    p.num_candidates = static_cast<int>(tokens.size());
    p.candidate_tokens = tokens.data();
    p.candidate_parents = parents.data();
    p.candidate_log_probs = log_probs.data();
    return p;
  }
};

TEST(Eagle, TheGlobalTopOfRandomCandidates) {
  std::mt19937 rng(11);
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const int count = 1 + static_cast<int>(rng() % 60), budget = 1 + static_cast<int>(rng() % 40);
    const bool lies = trial % 3 == 0;  // children better than their parents
    Candidates c;
    for (int i = 0; i < count; ++i) {
      const int parent = static_cast<int>(rng() % static_cast<unsigned>(i + 1)) - 1;
      c.parents.push_back(parent);
      c.tokens.push_back(static_cast<int32_t>(rng() % 1000));
      const float step = -static_cast<float>(rng() % 8);
      c.log_probs.push_back(lies ? step : step + (parent < 0 ? 0 : c.log_probs[parent]));
      if (rng() % 20 == 0) c.log_probs.back() = -kInf;
    }
    const BuildProblem p = c.problem(budget);
    const Built built(p);
    built.expect_consistent(p);

    Floats effective = c.log_probs;
    for (int i = 0; i < count; ++i)
      if (c.parents[i] >= 0) effective[i] = std::min(effective[i], effective[c.parents[i]]);
    std::vector<std::pair<float, int>> order;
    for (int i = 0; i < count; ++i)
      if (effective[i] > -kInf) order.push_back({-effective[i], i});
    std::sort(order.begin(), order.end());
    order.resize(std::min<std::size_t>(order.size(), budget));
    std::vector<int> chosen;
    for (const auto& [score, i] : order) chosen.push_back(i);
    std::sort(chosen.begin(), chosen.end());
    ASSERT_EQ(built.num_nodes[0], 1 + static_cast<int>(chosen.size()));
    for (std::size_t n = 0; n < chosen.size(); ++n) {
      EXPECT_EQ(built.token_ids[n + 1], c.tokens[chosen[n]]);
      const int parent = c.parents[chosen[n]];
      const auto at = std::find(chosen.begin(), chosen.end(), parent);
      EXPECT_EQ(built.parents[n + 1], parent < 0 ? 0 : 1 + (at - chosen.begin()));
    }
  }
}

TEST(Eagle, ABeamFindsTheBestContinuations) {
  const Floats scores{0, 1, 2, 3, 5, 5, 5, 4};  // two rows of four
  const Floats paths{-1, -2};
  Ints tokens(4, -9), beam(2, -9);
  Floats log_probs(4, kNaN);
  BeamProblem p;
  p.b = 1;
  p.rows = 2;
  p.top_k = 2;
  p.scores = {scores.data(), DType::kF32, 4};
  p.row_log_probs = paths.data();
  expand_beam(p, {tokens.data(), log_probs.data(), beam.data()});
  EXPECT_THAT(tokens, ElementsAre(3, 2, 0, 1));
  EXPECT_NEAR(log_probs[0], -1 + log_softmax(scores.data(), 4)[3], 1e-6);
  EXPECT_NEAR(log_probs[3], -2 + log_softmax(scores.data() + 4, 4)[1], 1e-6);
  EXPECT_THAT(beam, ElementsAre(0, 1));
  // Fewer tokens than places.
  p.top_k = 3;
  p.scores.vocab = 2;
  p.rows = 1;
  tokens.assign(3, -9);
  log_probs.assign(3, kNaN);
  beam.assign(3, -9);
  expand_beam(p, {tokens.data(), log_probs.data(), beam.data()});
  EXPECT_THAT(tokens, ElementsAre(1, 0, -1));
  EXPECT_EQ(log_probs[2], -kInf);
  EXPECT_THAT(beam, ElementsAre(0, 1, -1));
  const Floats bad{kNaN};
  p.row_log_probs = bad.data();
  EXPECT_THAT(error_of([&] {
                expand_beam(p, {tokens.data(), log_probs.data(), beam.data()});
              }),
              HasSubstr("row_log_probs[0]"));
}

TEST(Eagle, HostileCandidates) {
  Candidates c{{1, 2}, {-1, 1}, {0, 0}};
  EXPECT_THAT(error_of([&] { Built b(c.problem(2)); }), HasSubstr("candidate_parents[1] of request 0"));
  c.parents[1] = -2;
  EXPECT_THAT(error_of([&] { Built b(c.problem(2)); }), HasSubstr("candidate_parents[1] of request 0"));
  c.parents[1] = 0;
  c.log_probs[0] = kNaN;
  EXPECT_THAT(error_of([&] { Built b(c.problem(2)); }), HasSubstr("candidate_log_probs[0]"));
}

TEST(Build, ArgumentsAreChecked) {
  const Floats scores(8, 0.0f);
  const Ints prefix{-1}, huge{std::numeric_limits<int32_t>::max()};
  const auto error_with = [&](auto change) {
    BuildProblem p = ddtree(1, 3, 2, 4, scores.data());
    change(p);
    return error_of([&] { build_tree(p, {}); });
  };
  EXPECT_THAT(error_with([](auto& p) { p.budget = 0; }), HasSubstr("budget = 0 is outside [1, 1024]"));
  EXPECT_THAT(error_with([](auto& p) { p.budget = 1025; }), HasSubstr("budget"));
  EXPECT_THAT(error_with([](auto& p) { p.num_depths = 65; }), HasSubstr("num_depths"));
  EXPECT_THAT(error_with([](auto& p) { p.scores.data = nullptr; }), HasSubstr("scores.data is null"));
  EXPECT_THAT(error_with([](auto& p) { p.scores.dtype = DType::kF16; }), HasSubstr("fp32 or bf16"));
  EXPECT_THAT(error_with([](auto& p) { p.scores.vocab = 0; }), HasSubstr("scores.vocab"));
  EXPECT_THAT(error_with([](auto& p) { p.scores.row_stride = 3; }), HasSubstr("scores.row_stride"));
  EXPECT_THAT(error_with([](auto& p) { p.scores.row_stride = int64_t{1} << 62; }), HasSubstr("64-bit"));
  EXPECT_THAT(error_with([](auto& p) { p.method = static_cast<BuildMethod>(9); }), HasSubstr("method"));
  EXPECT_THAT(error_with([](auto& p) { p.b = -1; }), HasSubstr("b = -1"));
  EXPECT_THAT(error_with([&](auto& p) { p.prefix_len = prefix.data(); }), HasSubstr("prefix_len[0] = -1"));
  EXPECT_THAT(error_with([&](auto& p) { p.prefix_len = huge.data(); }), HasSubstr("prefix_len[0]"));
  BuildProblem p = ddtree(1, 40, 2, 4, scores.data());
  std::vector<uint32_t> bits(41);
  TreeOutput out;
  out.ancestor_bits = bits.data();
  out.words_per_row = 1;
  EXPECT_THAT(error_of([&] { build_tree(p, out); }), HasSubstr("output.words_per_row = 1"));
  p.b = 0;
  EXPECT_NO_THROW(build_tree(p, {}));
}

// ---- the arithmetic below ----

TEST(Exact, WeightsAndLogarithmsAreWhatTheySay) {
  for (float d = 0; d > -29; d -= 0.00371f) {
    const double expected = std::ldexp(std::exp(static_cast<double>(d)), 40);
    ASSERT_NEAR(static_cast<double>(exp_weight(d)), expected, 2e-7 * expected + 1) << d;
  }
  EXPECT_EQ(exp_weight(0), kWeightOne);
  EXPECT_EQ(exp_weight(-kInf), 0u);
  EXPECT_EQ(exp_weight(kNaN), 0u);
  for (const double x : {1.0, 1.5, 2.0, 3.7, 1000.25, 163840.0, 0.3}) {
    const auto total = static_cast<uint64_t>(std::ldexp(x, 40));
    EXPECT_NEAR(std::ldexp(static_cast<double>(fixed_log(total)), -32), std::log(x), 1e-9) << x;
  }
  for (const float x : {-kInf, -3e38f, -1.5f, -1e-40f, 0.0f, 1e-40f, 2.0f, 3e38f})
    EXPECT_EQ(float_of_order(order_of(x)), x);
  EXPECT_EQ(order_of(-0.0f), order_of(0.0f));
  EXPECT_LT(order_of(-3e38f), order_of(-1.0f));
  EXPECT_LT(order_of(-kInf), order_of(-3e38f));
}

}  // namespace
}  // namespace treemla
