// Accepting paths: the golden vector of SGLang's verify buffers, greedy walks against a plain one, lossless sampling against the
// target's distribution, coins and counters, hostile trees.

#include "treemla/accept.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "error_of.hpp"
#include "treemla/error.hpp"
#include "treemla/tree.hpp"
#include "trees/philox.hpp"

namespace treemla {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Accepted {
  Ints accept_index, num_accepted, bonus_token, predicts;
  explicit Accepted(const AcceptProblem& p, int path_stride = 8) {
    accept_index.assign(static_cast<std::size_t>(p.b) * path_stride, -77);
    num_accepted.assign(p.b, -77);
    bonus_token.assign(p.b, -77);
    predicts.assign(p.total_q, -77);
    accept_path(p,
                {accept_index.data(), path_stride, num_accepted.data(), bonus_token.data(), predicts.data()});
  }
};

// ---- greedy ----

struct Golden {
  Ints q_indptr{0, 6, 12}, token_ids{0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12};
  Ints next_token{1, 2, -1, 4, 5, -1, 4, 2, 3, -1, 5, -1};
  Ints next_sibling{-1, 3, -1, -1, -1, -1, -1, -1, -1, -1, 1, -1};
  Ints argmax = Ints(12, 18);
  Golden() {
    argmax[0] = 3;
    argmax[3] = 4;
    argmax[4] = 5;
    argmax[6] = 11;
    argmax[10] = 12;
  }
  AcceptProblem problem() const {
    AcceptProblem p;
    p.b = 2;
    p.total_q = 12;
    p.q_indptr = q_indptr.data();
    p.token_ids = token_ids.data();
    p.retrieve_next_token = next_token.data();
    p.retrieve_next_sibling = next_sibling.data();
    p.target_argmax = argmax.data();
    return p;
  }
};

void expect_golden(const AcceptProblem& p) {
  const Accepted a(p, 4);
  EXPECT_THAT(a.accept_index, ElementsAre(0, 3, 4, 5, 6, 10, 11, -1));
  EXPECT_THAT(a.num_accepted, ElementsAre(3, 2));
  EXPECT_THAT(a.predicts, ElementsAre(3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18));
  EXPECT_THAT(a.bonus_token, ElementsAre(18, 18));
}

TEST(Greedy, TheGoldenVector) {
  const Golden golden;
  AcceptProblem p = golden.problem();
  expect_golden(p);
  // The same from logits, in both dtypes, and by sampling at temperature 0.
  constexpr int kVocab = 20;
  Floats logits(12 * kVocab);
  std::mt19937 rng(1);
  std::vector<uint16_t> halves(logits.size());
  for (int i = 0; i < 12; ++i) {
    for (int v = 0; v < kVocab; ++v) logits[i * kVocab + v] = static_cast<float>(rng() % 1000) / 256;
    logits[i * kVocab + golden.argmax[i]] = 5;
  }
  std::transform(logits.begin(), logits.end(), halves.begin(), float_to_bf16);
  p.target_argmax = nullptr;
  p.vocab = kVocab;
  p.logits = logits.data();
  expect_golden(p);
  p.logits = halves.data();
  p.logits_dtype = DType::kBF16;
  expect_golden(p);
  const Floats zero(2, 0.0f);
  p.temperature = zero.data();
  p.method = AcceptMethod::kDeterministic;
  expect_golden(p);
  // The same trees as parents.
  const Ints parents{-1, 0, 1, 0, 3, 4, -1, 0, 1, 2, 0, 4};
  p = golden.problem();
  p.parents = parents.data();
  p.retrieve_next_token = p.retrieve_next_sibling = nullptr;
  expect_golden(p);
}

TEST(Greedy, RandomTreesAgainstAPlainWalk) {
  std::mt19937 rng(3);
  const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const int b = below(5);
    Ints q_indptr{0}, tokens, parents, argmax, next_token, next_sibling;
    for (int r = 0; r < b; ++r) {
      const int q_len = below(4) == 0 ? below(3) : below(70);
      q_indptr.push_back(q_indptr.back() + q_len);
      Ints tree;
      for (int i = 0; i < q_len; ++i) tree.push_back(i == 0 ? -1 : below(i));
      const RetrieveLinks links = links_from_parents(tree);
      next_token.insert(next_token.end(), links.next_token.begin(), links.next_token.end());
      next_sibling.insert(next_sibling.end(), links.next_sibling.begin(), links.next_sibling.end());
      parents.insert(parents.end(), tree.begin(), tree.end());
      for (int i = 0; i < q_len; ++i) {
        tokens.push_back(below(4));
        argmax.push_back(below(4));
      }
    }
    const int padding = below(3);
    for (int i = 0; i < padding; ++i) {  // rows of nobody
      for (Ints* a : {&tokens, &parents, &argmax, &next_token, &next_sibling}) a->push_back(2147480000);
    }
    const int path_stride = 1 + below(12);
    Ints index(static_cast<std::size_t>(b) * path_stride, -1), predicts(tokens.size(), -1), counts, bonus;
    for (int r = 0; r < b; ++r) {
      const int begin = q_indptr[r], end = q_indptr[r + 1];
      int at = begin, length = 0;
      counts.push_back(0);
      bonus.push_back(-1);
      while (begin < end) {
        index[r * path_stride + length++] = at;
        predicts[at] = argmax[at];
        int child = -1;
        for (int i = at + 1; i < end && child < 0; ++i)
          if (parents[i] == at - begin && tokens[i] == argmax[at]) child = i;
        if (child < 0 || length == path_stride) {
          counts[r] = length - 1;
          bonus[r] = argmax[at];
          break;
        }
        at = child;
      }
    }
    AcceptProblem p;
    p.b = b;
    p.total_q = static_cast<int64_t>(tokens.size());
    p.q_indptr = q_indptr.data();
    p.token_ids = tokens.data();
    p.target_argmax = argmax.data();
    for (const bool by_links : {true, false}) {
      p.parents = by_links ? nullptr : parents.data();
      p.retrieve_next_token = by_links ? next_token.data() : nullptr;
      p.retrieve_next_sibling = by_links ? next_sibling.data() : nullptr;
      const Accepted a(p, path_stride);
      EXPECT_EQ(a.accept_index, index);
      EXPECT_EQ(a.num_accepted, counts);
      EXPECT_EQ(a.bonus_token, bonus);
      EXPECT_EQ(a.predicts, predicts);
    }
  }
}

TEST(Greedy, HostileTreesEndWithAnError) {
  const auto error_with = [](auto change) {
    Golden g;
    change(g);
    return error_of([&] { Accepted a(g.problem()); });
  };
  EXPECT_THAT(error_with([](Golden& g) {
                g.next_sibling[1] = 1;
                g.argmax[0] = 99;
              }),
              HasSubstr("more children than there are nodes"));
  EXPECT_THAT(error_with([](Golden& g) { g.next_token[3] = 0; }), HasSubstr("a link of node 3 of request 0"));
  EXPECT_THAT(error_with([](Golden& g) { g.next_token[5] = 3; }), HasSubstr("a link of node 5"));
  EXPECT_THAT(error_with([](Golden& g) { g.next_token[6] = 6; }), HasSubstr("a link of node 0 of request 1"));
  EXPECT_THAT(error_with([](Golden& g) { g.next_sibling[1] = 2147480000; }), HasSubstr("a link of node 1"));
  EXPECT_THAT(error_with([](Golden& g) { g.next_token[0] = -7; }), HasSubstr("a link of node 0"));
  EXPECT_THAT(error_with([](Golden& g) { g.argmax[4] = -1; }), HasSubstr("target_argmax of node 4"));
  EXPECT_THAT(error_with([](Golden& g) { g.q_indptr = {0, 7, 6}; }), HasSubstr("q_indptr[2] = 6"));
  EXPECT_THAT(error_with([](Golden& g) { g.q_indptr = {1, 6, 12}; }), HasSubstr("q_indptr[0] = 1"));
  EXPECT_THAT(error_with([](Golden& g) { g.q_indptr = {0, 6, 13}; }), HasSubstr("q_indptr[2] = 13"));
  Golden g;
  AcceptProblem p = g.problem();
  const Ints forward{-1, 0, 3, 1, 0, 0, -1, 0, 0, 0, 0, 0};
  p.retrieve_next_token = p.retrieve_next_sibling = nullptr;
  p.parents = forward.data();
  EXPECT_THAT(error_of([&] { Accepted a(p); }), HasSubstr("parent of node 2"));
  p.parents = nullptr;
  EXPECT_THAT(error_of([&] { Accepted a(p); }), HasSubstr("parents is null"));
  p = g.problem();
  p.retrieve_next_sibling = nullptr;
  EXPECT_THAT(error_of([&] { Accepted a(p); }), HasSubstr("retrieve_next_sibling is null"));
  p = g.problem();
  p.target_argmax = nullptr;
  EXPECT_THAT(error_of([&] { Accepted a(p); }), HasSubstr("logits is null"));
  p = g.problem();
  p.method = AcceptMethod::kIndependent;
  const Floats logits(12, 0);
  p.logits = logits.data();
  p.vocab = 1;
  EXPECT_THAT(error_of([&] { Accepted a(p); }), HasSubstr("draft_probs is null"));
}

// ---- sampling ----

TEST(Philox, KnownAnswers) {  // Random123's kat_vectors, philox4x32-10
  const auto run = [](Philox4 counter, uint64_t key) {
    const Philox4 r = philox4x32(counter, key);
    return std::vector<uint32_t>(r.x, r.x + 4);
  };
  EXPECT_THAT(run({{0, 0, 0, 0}}, 0), ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(run({{~0u, ~0u, ~0u, ~0u}}, ~uint64_t{0}),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(run({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822),
              ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

// What temperature, top-k and top-p make of logits, in float64 and by sorting.
std::vector<double> target_distribution(const float* logits, int vocab, float temperature, int top_k,
                                        float top_p) {
  const float max = *std::max_element(logits, logits + vocab);
  std::vector<double> p(vocab);
  for (int i = 0; i < vocab; ++i) p[i] = std::exp((static_cast<double>(logits[i]) - max) / temperature);
  std::vector<double> sorted = p;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  if (top_k > 0 && top_k < vocab) sorted.resize(top_k);
  const double kept = std::accumulate(sorted.begin(), sorted.end(), 0.0);
  double cut = sorted.back(), mass = 0;
  for (const double x : sorted) {
    cut = x;
    if ((mass += x) >= top_p * kept) break;
  }
  for (double& x : p)
    if (x < cut) x = 0;
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

// The upper tail of a chi-square distribution, by Wilson and Hilferty's cube root.
double chi_square_p(double statistic, int freedom) {
  if (freedom == 0) return 1;
  const double s = 2.0 / (9.0 * freedom);
  return 0.5 * std::erfc((std::cbrt(statistic / freedom) - (1 - s)) / std::sqrt(2 * s));
}

// A world of small distributions: the target's and the draft's depend on a node's depth and token.
struct World {
  static constexpr int kVocab = 10;
  int q_len;
  Ints parents, depth;
  std::vector<Floats> logits, draft;  // [depth * kVocab + token][kVocab]
  float temperature, top_p;
  int top_k;

  World(uint32_t seed, bool unnormalised) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal(0, 1.5f);
    q_len = 6 + static_cast<int>(rng() % 7);
    parents.assign(q_len, -1);
    for (int i = 1; i < q_len; ++i)
      parents[i] = static_cast<int32_t>(rng() % static_cast<unsigned>(std::min(i, 4)));
    depth = tree_depths(parents);
    const int deepest = *std::max_element(depth.begin(), depth.end());
    for (int i = 0; i < (deepest + 1) * kVocab; ++i) {
      Floats l(kVocab), d(kVocab);
      for (int v = 0; v < kVocab; ++v) {
        l[v] = normal(rng);
        d[v] = std::exp(0.6f * l[v] + 0.7f * normal(rng));
        if (rng() % 7 == 0) d[v] = 0;  // the draft may exclude what the target likes
        if (rng() % 9 == 0) l[v] = -kInf;
      }
      l[rng() % kVocab] = 1;
      for (int v = 0; v < 7; ++v) d[v] += 0.02f;  // tokens enough for draws without replacement
      float sum = std::accumulate(d.begin(), d.end(), 0.0f);
      if (unnormalised) sum *= 1.5f;  // probabilities that don't sum to 1 count by their share
      for (float& x : d) x /= sum;
      logits.push_back(l);
      draft.push_back(d);
    }
    temperature = seed % 3 == 1 ? 0.7f : 1.0f;
    top_k = seed % 4 == 2 ? 6 : 0;
    top_p = seed % 5 == 3 ? 0.8f : 1.0f;
  }
  std::size_t at(int node_depth, int token) const {
    return static_cast<std::size_t>(node_depth * kVocab + token);
  }
};

int draw_from(const Floats& weights, std::mt19937& rng) {
  float sum = std::accumulate(weights.begin(), weights.end(), 0.0f);
  float u = std::uniform_real_distribution<float>(0, sum)(rng);
  int last = 0;
  for (std::size_t v = 0; v < weights.size(); ++v) {
    if (weights[v] <= 0) continue;
    last = static_cast<int>(v);
    if ((u -= weights[v]) < 0) break;
  }
  return last;
}

#if defined(__SANITIZE_ADDRESS__)
constexpr int kDraws =
    5'000;  // of each of 20 trees: slower, and distributions are not what sanitizers look for
#else
constexpr int kDraws = 50'000;
#endif

struct Method {
  AcceptMethod method;
  const char* name;
};
class Lossless : public testing::TestWithParam<Method> {};
INSTANTIATE_TEST_SUITE_P(All, Lossless,
                         testing::Values(Method{AcceptMethod::kDeterministic, "Deterministic"},
                                         Method{AcceptMethod::kIndependent, "Independent"},
                                         Method{AcceptMethod::kWithoutReplacement, "WithoutReplacement"}),
                         [](const auto& i) { return i.param.name; });

// 20 trees of 50,000 draws: at every node reached, the tokens emitted are distributed as the target says.
TEST_P(Lossless, EmittedTokensFollowTheTarget) {
  constexpr int kVocab = World::kVocab, kBatch = 500;
  for (uint32_t tree = 1; tree <= 20; ++tree) {
    const World world(tree * 101 + static_cast<uint32_t>(GetParam().method), tree % 4 == 0);
    SCOPED_TRACE(testing::Message() << "tree " << tree << ", q_len " << world.q_len);
    const int q_len = world.q_len;
    std::mt19937 rng(tree);
    const int rows = kBatch * q_len;
    Ints q_indptr(kBatch + 1), tokens(rows), parents(rows);
    Floats logits(static_cast<std::size_t>(rows) * kVocab), draft(logits.size());
    const Floats temperature(kBatch, world.temperature), top_p(kBatch, world.top_p);
    const Ints top_k(kBatch, world.top_k);
    std::vector<uint64_t> seeds(kBatch), offsets(kBatch);
    for (int r = 0; r <= kBatch; ++r) q_indptr[r] = r * q_len;
    for (int i = 0; i < rows; ++i) parents[i] = world.parents[i % q_len];
    AcceptProblem p;
    p.method = GetParam().method;
    p.b = kBatch;
    p.total_q = rows;
    p.q_indptr = q_indptr.data();
    p.token_ids = tokens.data();
    p.parents = parents.data();
    p.logits = logits.data();
    p.vocab = kVocab;
    p.draft_probs = draft.data();
    p.temperature = temperature.data();
    p.top_k = top_k.data();
    p.top_p = top_p.data();
    p.seeds = seeds.data();
    p.offsets = offsets.data();

    std::vector<std::vector<double>> expected;
    for (const Floats& l : world.logits)
      expected.push_back(target_distribution(l.data(), kVocab, world.temperature, world.top_k, world.top_p));
    std::vector<std::vector<int>> counts(world.logits.size(), std::vector<int>(kVocab, 0));
    Ints fixed(q_len);
    for (int32_t& x : fixed) x = static_cast<int32_t>(rng() % kVocab);
    for (int done = 0; done < kDraws; done += kBatch) {
      for (int r = 0; r < kBatch; ++r) {
        seeds[r] = tree * 1000003ull + static_cast<uint64_t>(done + r) / 7;
        offsets[r] = static_cast<uint64_t>(done + r) % 7;
        std::vector<Floats> left(q_len);  // of each node's draft distribution
        for (int i = 0; i < q_len; ++i) {
          const int parent = world.parents[i];
          int token = 0;  // the root's
          if (i > 0 && GetParam().method == AcceptMethod::kDeterministic) token = fixed[i];
          if (i > 0 && GetParam().method != AcceptMethod::kDeterministic) {
            token = draw_from(left[parent], rng);
            if (GetParam().method == AcceptMethod::kWithoutReplacement) left[parent][token] = 0;
          }
          tokens[r * q_len + i] = token;
          const std::size_t at = world.at(world.depth[i], token);
          left[i] = world.draft[at];
          std::copy(world.logits[at].begin(), world.logits[at].end(), &logits[(r * q_len + i) * kVocab]);
          std::copy(left[i].begin(), left[i].end(), &draft[(r * q_len + i) * kVocab]);
        }
      }
      const Accepted a(p, q_len);
      for (int i = 0; i < rows; ++i)
        if (a.predicts[i] >= 0) ++counts[world.at(world.depth[i % q_len], tokens[i])][a.predicts[i]];
    }

    double statistic = 0;
    int freedom = 0;
    for (std::size_t at = 0; at < counts.size(); ++at) {
      const double n = std::accumulate(counts[at].begin(), counts[at].end(), 0.0);
      double rest_expected = 0, rest_seen = 0;  // bins too small for the approximation, together
      int bins = 0;
      for (int v = 0; v < kVocab; ++v) {
        const double mean = n * expected[at][v];
        if (expected[at][v] == 0) {
          EXPECT_EQ(counts[at][v], 0) << "a token of probability 0: " << v;
        }
        if (mean < 10) {
          rest_expected += mean;
          rest_seen += counts[at][v];
          continue;
        }
        statistic += (counts[at][v] - mean) * (counts[at][v] - mean) / mean;
        ++bins;
      }
      if (rest_expected >= 10) {
        statistic += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
        ++bins;
      }
      freedom += std::max(0, bins - 1);
    }
    EXPECT_GT(chi_square_p(statistic, freedom), 0.001)
        << statistic << " with " << freedom << " degrees of freedom";
    EXPECT_GT(freedom, 0);
  }
}

TEST(Sampling, WithTheTargetItselfAsDraftEveryFirstChildIsAccepted) {
  // p == q: min(1, p / q) = 1, up to rounding.
  std::mt19937 rng(9);
  constexpr int kVocab = 50, kTrials = 2000;
  int accepted = 0;
  for (int t = 0; t < kTrials; ++t) {
    Floats logits(2 * kVocab), draft(2 * kVocab);
    for (float& x : logits) x = std::normal_distribution<float>()(rng);
    const auto p64 = target_distribution(logits.data(), kVocab, 1, 0, 1);
    for (int v = 0; v < kVocab; ++v) draft[v] = static_cast<float>(p64[v]);
    const Floats row(draft.begin(), draft.begin() + kVocab);
    const Ints q_indptr{0, 2}, parents{-1, 0}, tokens{0, draw_from(row, rng)};
    const std::vector<uint64_t> seed{static_cast<uint64_t>(t)};
    AcceptProblem p;
    p.method = AcceptMethod::kIndependent;
    p.b = 1;
    p.total_q = 2;
    p.q_indptr = q_indptr.data();
    p.token_ids = tokens.data();
    p.parents = parents.data();
    p.logits = logits.data();
    p.vocab = kVocab;
    p.draft_probs = draft.data();
    p.seeds = seed.data();
    accepted += Accepted(p).num_accepted[0];
  }
  EXPECT_EQ(accepted, kTrials);
}

// One node with children 1 and 2 over three tokens, by explicit coins.
struct Coins {
  Ints q_indptr{0, 3}, tokens{0, 1, 2}, parents{-1, 0, 0};
  Floats logits = Floats(9, 0.0f), draft = Floats(9, 0.25f), coins = Floats(3, 0.0f), final_coins{0.0f};
  AcceptMethod method = AcceptMethod::kDeterministic;
  Floats temperature{1}, top_p{1};
  Ints top_k{0};
  AcceptProblem problem() const {
    AcceptProblem p;
    p.method = method;
    p.b = 1;
    p.total_q = 3;
    p.q_indptr = q_indptr.data();
    p.token_ids = tokens.data();
    p.parents = parents.data();
    p.logits = logits.data();
    p.vocab = 3;
    p.draft_probs = draft.data();
    p.coins = coins.data();
    p.final_coins = final_coins.data();
    p.temperature = temperature.data();
    p.top_p = top_p.data();
    p.top_k = top_k.data();
    return p;
  }
  Accepted run() const { return Accepted(problem(), 4); }
  std::string error() const {
    return error_of([&] { run(); });
  }
};

TEST(Sampling, CoinsDecideStrictly) {
  Coins c;
  c.logits[1] = -kInf;  // p = 1/2, 0, 1/2
  EXPECT_THAT(c.run().accept_index, ElementsAre(0, 2, -1, -1))
      << "a coin of 0 accepted a token of probability 0";
  c.coins[2] = 0.5f;
  Accepted a = c.run();
  EXPECT_THAT(a.accept_index, ElementsAre(0, -1, -1, -1)) << "p > coin is strict";
  EXPECT_THAT(a.bonus_token, ElementsAre(0)) << "only token 0 is left";
  c.coins[2] = std::nextafter(0.5f, 0.0f);
  EXPECT_THAT(c.run().accept_index, ElementsAre(0, 2, -1, -1));
  c.tokens = {0, 2, 2};  // the same token twice: nothing is left of it for the second
  c.coins = {0, 0.9f, 0};
  a = c.run();
  EXPECT_THAT(a.accept_index, ElementsAre(0, -1, -1, -1));
  EXPECT_THAT(a.bonus_token, ElementsAre(0));
  c.tokens = {0, -1, 7};  // padding, and a token that the vocabulary ends before
  c.coins = {0, 0, 0};
  EXPECT_THAT(c.run().num_accepted, ElementsAre(0));
}

TEST(Sampling, TemperatureTopKAndTopP) {
  Coins c;
  c.logits = {3, 2, 1, 0, 0, 0, 0, 0, 0};
  c.final_coins = {0.999f};
  c.tokens = {0, -1, -1};
  EXPECT_THAT(c.run().bonus_token, ElementsAre(2));
  c.top_k = {2};
  EXPECT_THAT(c.run().bonus_token, ElementsAre(1));
  c.top_k = {1};
  EXPECT_THAT(c.run().bonus_token, ElementsAre(0));
  c.top_k = {-1};
  c.top_p = {0.7f};  // p = 0.665, 0.245, 0.090
  EXPECT_THAT(c.run().bonus_token, ElementsAre(1));
  c.top_p = {0.6f};
  EXPECT_THAT(c.run().bonus_token, ElementsAre(0));
  for (const float none : {0.0f, -1.0f, kNaN}) {
    c.top_p = {none};
    EXPECT_THAT(c.run().bonus_token, ElementsAre(0));
  }
  c.top_p = {1};
  for (const float cold : {0.0f, 1e-38f, 0.001f}) {
    c.temperature = {cold};
    EXPECT_THAT(c.run().bonus_token, ElementsAre(0)) << cold;
  }
  c.temperature = {1e30f};
  EXPECT_THAT(c.run().bonus_token, ElementsAre(2));
}

TEST(Sampling, HostileNumbers) {
  const auto error_with = [](auto change) {
    Coins c;
    c.method = AcceptMethod::kIndependent;
    change(c);
    return c.error();
  };
  EXPECT_THAT(error_with([](Coins& c) { c.logits[1] = kNaN; }),
              HasSubstr("scores of request 0, row 0, hold NaN"));
  EXPECT_THAT(error_with([](Coins& c) { c.logits[2] = kInf; }), HasSubstr("hold +inf"));
  EXPECT_THAT(error_with([](Coins& c) { c.logits[0] = c.logits[1] = c.logits[2] = -kInf; }),
              HasSubstr("all -inf"));
  EXPECT_THAT(error_with([](Coins& c) { c.draft[1] = kNaN; }), HasSubstr("draft_probs of node 0"));
  EXPECT_THAT(error_with([](Coins& c) { c.draft[1] = -0.1f; }), HasSubstr("draft_probs of node 0"));
  EXPECT_THAT(error_with([](Coins& c) { c.coins[1] = 1; }), HasSubstr("the coin of node 1"));
  EXPECT_THAT(error_with([](Coins& c) { c.coins[1] = kNaN; }), HasSubstr("the coin of node 1"));
  EXPECT_THAT(error_with([](Coins& c) {
                c.final_coins[0] = -0.1f;
                c.tokens = {0, -1, -1};
              }),
              HasSubstr("the coin of node 0"));
  EXPECT_THAT(error_with([](Coins& c) { c.temperature[0] = -1; }), HasSubstr("temperature[0]"));
  EXPECT_THAT(error_with([](Coins& c) { c.temperature[0] = kInf; }), HasSubstr("temperature[0]"));
  // Rows that the walk doesn't reach may hold anything.
  Coins c;
  c.logits[3] = kNaN;
  c.coins = {0, 0.9f, 0};
  EXPECT_THAT(c.run().accept_index, ElementsAre(0, 2, -1, -1));
  // A draft of zeros: children are judged as deterministic ones.
  c.method = AcceptMethod::kWithoutReplacement;
  c.draft.assign(9, 0.0f);
  EXPECT_THAT(c.run().accept_index, ElementsAre(0, 2, -1, -1));
  // A draft that says its token could not have been drawn.
  c.draft = {1, 0, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_THAT(c.run().accept_index, ElementsAre(0, 2, -1, -1));
}

TEST(Sampling, AResultIsAFunctionOfItsSeedAndOffset) {
  constexpr int kBatch = 40, kNodes = 6, kVocab = 30;
  std::mt19937 rng(4);
  Ints q_indptr(kBatch + 1), tokens(kBatch * kNodes), parents(kBatch * kNodes);
  Floats logits(kBatch * kNodes * kVocab), draft(logits.size());
  std::vector<uint64_t> seeds(kBatch), offsets(kBatch);
  for (int r = 0; r <= kBatch; ++r) q_indptr[r] = r * kNodes;
  for (int i = 0; i < kBatch * kNodes; ++i) {
    parents[i] = i % kNodes == 0 ? -1 : static_cast<int>(rng() % static_cast<unsigned>(i % kNodes));
    tokens[i] = static_cast<int32_t>(rng() % kVocab);
  }
  for (float& x : logits) x = std::normal_distribution<float>()(rng);
  for (float& x : draft) x = 1.0f / kVocab;
  for (int r = 0; r < kBatch; ++r) seeds[r] = rng(), offsets[r] = static_cast<uint64_t>(rng()) << 20;
  AcceptProblem p;
  p.b = kBatch;
  p.total_q = kBatch * kNodes;
  p.q_indptr = q_indptr.data();
  p.token_ids = tokens.data();
  p.parents = parents.data();
  p.logits = logits.data();
  p.vocab = kVocab;
  p.draft_probs = draft.data();
  p.seeds = seeds.data();
  p.offsets = offsets.data();
  for (const AcceptMethod method :
       {AcceptMethod::kDeterministic, AcceptMethod::kIndependent, AcceptMethod::kWithoutReplacement}) {
    p.method = method;
    const Accepted all(p), again(p);
    EXPECT_EQ(all.predicts, again.predicts);
    EXPECT_EQ(all.bonus_token, again.bonus_token);
    for (const int r : {0, 17, 39}) {  // alone
      AcceptProblem one = p;
      const Ints alone_indptr{0, kNodes};
      one.b = 1;
      one.total_q = kNodes;
      one.q_indptr = alone_indptr.data();
      one.token_ids += r * kNodes;
      one.parents += r * kNodes;
      one.logits = logits.data() + r * kNodes * kVocab;
      one.draft_probs += r * kNodes * kVocab;
      one.seeds += r;
      one.offsets += r;
      const Accepted alone(one);
      EXPECT_EQ(alone.bonus_token[0], all.bonus_token[r]);
      EXPECT_EQ(alone.num_accepted[0], all.num_accepted[r]);
    }
    offsets[0] ^= uint64_t{1} << 40;
    std::vector<uint64_t> other_seeds = seeds;
    for (uint64_t& s : other_seeds) s += uint64_t{1} << 32;
    p.seeds = other_seeds.data();
    EXPECT_NE(Accepted(p).bonus_token, all.bonus_token);
    p.seeds = seeds.data();
  }
}

}  // namespace
}  // namespace treemla
