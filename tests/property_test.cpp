// What must hold whatever the numbers are: laws of attention over trees, of splits and of the planned
// interface.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/backend.hpp"
#include "conformance.hpp"
#include "core/convert.hpp"
#include "core/lookup.hpp"
#include "treemla/error.hpp"

namespace treemla::test {
namespace {

using Floats = std::vector<float>;

// A problem in plain arrays that tests can take apart: fp32, page size 1, cached token t of request r in row
// rows[r][t].
struct Loose {
  MlaShape shape{4, 512, 64};
  MaskKind mask = MaskKind::kTree;
  Floats q, kv;
  std::vector<int32_t> q_indptr{0}, kv_len, indptr{0}, entries, parents;

  explicit Loose(const Case& c) {
    VerifyProblem p = c.problem();
    shape = p.shape;
    mask = p.mask.kind;
    auto widen = [&](const void* data, DType t, int64_t n) {
      Floats f(n);
      for (int64_t i = 0; i < n; ++i) f[i] = load_element(data, t, i);
      return f;
    };
    q = widen(p.q.data, p.q.dtype, p.q.total_q * shape.h_q * shape.d_qk());
    kv = widen(p.kv.data, p.kv.dtype, p.kv.num_pages * p.kv.page_size * shape.d_qk());
    q_indptr.assign(p.q_indptr, p.q_indptr + p.b + 1);
    kv_len.assign(p.kv_len, p.kv_len + p.b);
    indptr.clear();
    for (int r = 0; r < p.b; ++r) {
      indptr.push_back(static_cast<int32_t>(entries.size()));
      for (int t = 0; t < p.kv_len[r]; ++t)
        entries.push_back(static_cast<int32_t>(pool_row(p.pages, p.kv.page_size, page_base(p.pages, r), t)));
    }
    indptr.push_back(static_cast<int32_t>(entries.size()));
    if (p.mask.parents) parents.assign(p.mask.parents, p.mask.parents + p.q.total_q);
  }

  int b() const { return static_cast<int>(kv_len.size()); }
  int q_len(int r) const { return q_indptr[r + 1] - q_indptr[r]; }
  int row_width() const { return shape.h_q * shape.d_qk(); }

  VerifyProblem problem() const {
    VerifyProblem p;
    p.shape = shape;
    p.b = b();
    p.q = {q.data(), DType::kF32, q_indptr.back(), 0, 0};
    p.kv = {kv.data(), DType::kF32, static_cast<int64_t>(kv.size()) / shape.d_qk(), 1, 0, 1.0};
    p.pages = {entries.data(), IndexType::kI32, static_cast<int64_t>(entries.size()), indptr.data(), 0};
    p.q_indptr = q_indptr.data();
    p.kv_len = kv_len.data();
    p.mask.kind = mask;
    p.mask.parents = parents.data();
    p.sm_scale = 0.1447;
    return p;
  }

  // Request r's nodes `nodes` alone, as a batch of one; its cache is the prefix and the listed nodes' rows,
  // in that order.
  Loose only(int r, const std::vector<int>& nodes, std::vector<int32_t> new_parents,
             MaskKind new_mask) const {
    Loose one = *this;
    one.mask = new_mask;
    one.parents = std::move(new_parents);
    one.q.clear();
    one.entries.assign(entries.begin() + indptr[r], entries.begin() + indptr[r] + kv_len[r] - q_len(r));
    for (int i : nodes) {
      const auto row = q.begin() + static_cast<int64_t>(q_indptr[r] + i) * row_width();
      one.q.insert(one.q.end(), row, row + row_width());
      one.entries.push_back(entries[indptr[r] + kv_len[r] - q_len(r) + i]);
    }
    one.q_indptr = {0, static_cast<int32_t>(nodes.size())};
    one.kv_len = {static_cast<int32_t>(one.entries.size())};
    one.indptr = {0, one.kv_len[0]};
    return one;
  }
};

struct Result {
  Floats out, lse;
  // All heads of one node.
  Floats node(const Loose& l, int row) const {
    const int64_t n = static_cast<int64_t>(l.shape.h_q) * l.shape.d_v;
    Floats f(out.begin() + row * n, out.begin() + (row + 1) * n);
    f.insert(f.end(), lse.begin() + static_cast<int64_t>(row) * l.shape.h_q,
             lse.begin() + static_cast<int64_t>(row + 1) * l.shape.h_q);
    return f;
  }
};

Result run(const VerifyProblem& p, const RunOptions& options = {}) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Result r{Floats(p.q.total_q * p.shape.h_q * p.shape.d_v, nan), Floats(p.q.total_q * p.shape.h_q, nan)};
  verify(p, {r.out.data(), DType::kF32, r.lse.data()}, options);
  return r;
}

double worst(const Floats& a, const Floats& b) {
  double w = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double e = std::fabs(static_cast<double>(a[i]) - b[i]);
    w = e <= w ? w : e;  // NaN ends up in w
  }
  return w;
}

Case make(std::vector<RequestSpec> requests, TreeKind tree = TreeKind::kRandom, uint64_t seed = 7) {
  CaseSpec s;
  s.requests = std::move(requests);
  s.shape = {4, 512, 64};
  s.tree = tree;
  s.seed = seed;
  return generate_case(s);
}

std::vector<int32_t> chain(int n) {
  std::vector<int32_t> parents(n);
  std::iota(parents.begin(), parents.end(), -1);
  return parents;
}

// Path from the root to node i.
std::vector<int> path_to(const std::vector<int32_t>& parents, int i) {
  std::vector<int> path;
  for (; i >= 0; i = parents[i]) path.push_back(i);
  std::reverse(path.begin(), path.end());
  return path;
}

constexpr double kSameWithin = 2e-5;  // two float32 evaluations in another order; outputs are of size 1

TEST(Trees, ChainEqualsCausal) {
  Loose l(make({{150, 33}, {0, 9}}, TreeKind::kChain));
  const Result tree = run(l.problem());
  l.mask = MaskKind::kCausal;
  const Result causal = run(l.problem());
  EXPECT_TRUE(same_bits(tree.out, causal.out));
  EXPECT_TRUE(same_bits(tree.lse, causal.lse));
}

TEST(Trees, EveryPathRunAsAChainEqualsItsNodesRow) {
  const Loose l(make({{77, 40}}));
  const Result tree = run(l.problem());
  for (int i = 0; i < 40; ++i) {
    const std::vector<int> path = path_to(l.parents, i);
    const int n = static_cast<int>(path.size());
    const Loose alone = l.only(0, path, chain(n), MaskKind::kTree);
    EXPECT_LE(worst(run(alone.problem()).node(alone, n - 1), tree.node(l, i)), kSameWithin) << "node " << i;
  }
}

TEST(Trees, RenumberingNodesPermutesRows) {
  const int n = 33;
  const Loose l(make({{100, n}}));
  // Breadth-first numbering: parents still come first.
  std::vector<int> order(n), depth(n, 0), to(n);
  for (int i = 1; i < n; ++i) depth[i] = depth[l.parents[i]] + 1;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return depth[a] != depth[b] ? depth[a] < depth[b] : a > b; });
  for (int i = 0; i < n; ++i) to[order[i]] = i;
  std::vector<int32_t> parents(n);
  for (int i = 0; i < n; ++i) parents[i] = order[i] == 0 ? -1 : to[l.parents[order[i]]];
  ASSERT_NE(parents, l.parents);
  const Loose moved = l.only(0, order, parents, MaskKind::kTree);
  const Result a = run(l.problem()), b = run(moved.problem());
  for (int i = 0; i < n; ++i)
    EXPECT_LE(worst(a.node(l, order[i]), b.node(moved, i)), kSameWithin) << "node " << order[i];
}

TEST(Trees, MaskIsNotIgnored) {
  Loose l(make({{20, 33}}, TreeKind::kStar));
  const Result star = run(l.problem());
  l.mask = MaskKind::kCausal;
  EXPECT_GT(worst(star.out, run(l.problem()).out), 1e-2);
}

// A node that saw nothing: bits that are no tree are allowed, and with no prefix the row has no key at all.
TEST(Trees, RowWithoutAnyKeyGivesZeroAndMinusInfinity) {
  const Loose l(make({{0, 3}}));
  VerifyProblem p = l.problem();
  const uint32_t bits[] = {1, 0, 7};
  p.mask.ancestor_bits = bits;
  p.mask.words_per_row = 1;
  for (const char* backend : {"cpu_oracle", "cpu_simd"}) {
    const Result r = run(p, {.backend = backend});
    const Floats node = r.node(l, 1);
    for (int h = 0; h < l.shape.h_q; ++h)
      EXPECT_EQ(r.lse[l.shape.h_q + h], -std::numeric_limits<float>::infinity());
    for (int i = 0; i < l.shape.h_q * l.shape.d_v; ++i) ASSERT_EQ(node[i], 0.0f);
    EXPECT_TRUE(std::isfinite(r.out[0]));
  }
}

// NaN or infinity in one tree row reaches the nodes that see it and no others, also where it is a split's only key of a
// node: split at 128, node 28 and later.
TEST(Trees, GarbageInAHiddenTreeRowStaysThere) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const int n = 33;
  Loose clean(make({{100, n}, {5, 4}}));
  for (const RunOptions& options :
       {RunOptions{.backend = "cpu_simd"},
        RunOptions{.backend = "cpu_simd", .batch_invariant = true, .split_keys = 64}}) {
    for (int bad : {1, 5, 32}) {
      for (auto [column, value] :
           std::vector<std::pair<int, float>>{{0, nan}, {511, nan}, {575, nan}, {3, inf}, {570, -inf}}) {
        Loose l = clean;
        l.kv[static_cast<int64_t>(l.entries[100 + bad]) * l.shape.d_qk() + column] = value;
        const Result expected = run(l.problem(), {.backend = "cpu_oracle"}), r = run(l.problem(), options);
        const Comparison c = compare(l.shape, n + 4, r.out.data(), expected.out.data(), r.lse.data(),
                                     expected.lse.data(), Precision::kF32);
        EXPECT_TRUE(c.ok) << "node " << bad << " column " << column << " = " << value << ": " << c.failure;
        const Result before = run(clean.problem(), options);
        for (int i = 0; i < n; ++i) {
          const std::vector<int> path = path_to(l.parents, i);
          if (std::find(path.begin(), path.end(), bad) != path.end()) continue;
          EXPECT_TRUE(same_bits(before.node(l, i), r.node(l, i)))
              << "node " << i << " does not see node " << bad;
        }
      }
    }
  }
}

// NaN and infinity in the prefix or in q are seen by whole rows, and must come out where the oracle has them.
TEST(Garbage, InVisibleDataComesOutWhereTheOracleHasIt) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const Loose clean(make({{200, 9}, {70, 5}}));
  for (float value : {nan, inf, -inf}) {
    for (bool in_q : {false, true}) {
      Loose l = clean;
      if (in_q)
        l.q[3 * l.row_width() + l.shape.d_qk() + 17] = value;  // node 3, head 1
      else
        l.kv[static_cast<int64_t>(l.entries[66]) * l.shape.d_qk() + 530] = value;
      const Result expected = run(l.problem(), {.backend = "cpu_oracle"}),
                   r = run(l.problem(), {.backend = "cpu_simd"});
      const Comparison c = compare(l.shape, 14, r.out.data(), expected.out.data(), r.lse.data(),
                                   expected.lse.data(), Precision::kF32);
      EXPECT_TRUE(c.ok) << value << (in_q ? " in q: " : " in kv: ") << c.failure;
    }
  }
}

TEST(Splits, ChangeNothingBeyondTolerance) {
  const Loose l(make({{3000, 9}, {100, 5}}));
  const Result one = run(l.problem(), {.num_threads = 1});
  for (int threads : {2, 3, 5, 16})
    EXPECT_LE(worst(run(l.problem(), {.num_threads = threads}).out, one.out), kSameWithin);
  for (int keys : {64, 640})
    EXPECT_LE(worst(run(l.problem(), {.batch_invariant = true, .split_keys = keys}).out, one.out),
              kSameWithin);
}

TEST(BatchInvariant, RowsAreBitEqualAloneInAnyBatchOnAnyNumberOfThreads) {
  const Loose l(make({{1000, 9}, {64, 33}, {0, 0}, {5000, 3}, {127, 1}}));
  for (int keys : {0, 128, 1000}) {
    RunOptions options{.num_threads = 3, .batch_invariant = true, .split_keys = keys};
    const Result batch = run(l.problem(), options);
    for (int threads : {1, 2, 7}) {
      options.num_threads = threads;
      const Result again = run(l.problem(), options);
      EXPECT_TRUE(same_bits(batch.out, again.out) && same_bits(batch.lse, again.lse))
          << threads << " threads";
    }
    for (int r = 0; r < l.b(); ++r) {
      if (l.q_len(r) == 0) continue;
      std::vector<int> nodes(l.q_len(r));
      std::iota(nodes.begin(), nodes.end(), 0);
      const Loose alone = l.only(
          r, nodes, {l.parents.begin() + l.q_indptr[r], l.parents.begin() + l.q_indptr[r + 1]}, l.mask);
      const Result one = run(alone.problem(), options);
      for (int i = 0; i < l.q_len(r); ++i)
        EXPECT_TRUE(same_bits(one.node(alone, i), batch.node(l, l.q_indptr[r] + i)))
            << "request " << r << " node " << i;
    }
  }
}

TEST(BatchInvariant, ChainAtOnceEqualsTokenByToken) {
  const int n = 70;  // crosses a key tile and, with 128-key splits, a split
  const Loose l(make({{120, n}}, TreeKind::kChain));
  const RunOptions options{.batch_invariant = true, .split_keys = 128};
  const Result at_once = run(l.problem(), options);
  for (int i = 0; i < n; ++i) {
    Loose step = l;
    step.q.assign(l.q.begin() + static_cast<int64_t>(i) * l.row_width(),
                  l.q.begin() + static_cast<int64_t>(i + 1) * l.row_width());
    step.q_indptr = {0, 1};
    step.kv_len = {120 + i + 1};
    step.indptr = {0, step.kv_len[0]};
    step.parents = {-1};
    EXPECT_TRUE(same_bits(run(step.problem(), options).node(step, 0), at_once.node(l, i))) << "token " << i;
  }
}

TEST(VerifierTest, OnePlanServesManyLayers) {
  const Loose a(make({{500, 9}, {20, 3}}, TreeKind::kRandom, 1));
  Loose other = a;
  for (float& x : other.q) x = -x;
  Verifier v;
  v.plan(a.problem());
  EXPECT_EQ(v.backend(), "cpu_simd");
  EXPECT_THAT(v.describe(), testing::HasSubstr("work items"));
  for (const Loose* layer : std::initializer_list<const Loose*>{&a, &other, &a}) {
    const Result direct = run(layer->problem());
    Result r{Floats(direct.out.size(), NAN), Floats(direct.lse.size(), NAN)};
    v.run(layer->problem(), {r.out.data(), DType::kF32, r.lse.data()});
    EXPECT_TRUE(same_bits(direct.out, r.out));
    EXPECT_TRUE(same_bits(direct.lse, r.lse));
  }
}

// Memory beyond inputs and outputs is scratch of a worker and partials: far below 64 MB a thread.
TEST(VerifierTest, WorkspaceIsSmall) {
  CaseSpec spec;
  spec.requests = {{4096, 9}};
  const Case c = generate_case(spec);
  for (int threads : {1, 2, 8}) {
    Verifier v({.backend = "cpu_simd", .num_threads = threads});
    v.plan(c.problem());
    EXPECT_GT(v.workspace_bytes(), 0u);
    EXPECT_LT(v.workspace_bytes(), threads * (std::size_t{4} << 20));
  }
}

TEST(VerifierTest, LseIsOptional) {
  const Loose l(make({{3000, 9}}));
  const Result with = run(l.problem());
  Floats out(with.out.size(), NAN);
  verify(l.problem(), {out.data(), DType::kF32, nullptr});
  EXPECT_TRUE(same_bits(with.out, out));
}

TEST(VerifierTest, CallersOnSeveralThreadsDoNotDisturbEachOther) {
  const Loose l(make({{800, 9}}));
  const Result expected = run(l.problem());
  std::vector<std::thread> threads;
  std::vector<int> good(6, 0);
  for (int t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) good[t] += same_bits(run(l.problem()).out, expected.out);
    });
  for (std::thread& t : threads) t.join();
  EXPECT_THAT(good, testing::Each(5));
}

// The message of the Error that `f` throws; empty if none.
template <class F>
std::string error_of(F f, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return "";
}

TEST(VerifierTest, ErrorsNameArgumentValueAndWhatIsAllowed) {
  using testing::HasSubstr;
  const Loose l(make({{50, 3}}));
  Floats out(3 * 4 * 512), lse(12);
  const VerifyOutput o{out.data(), DType::kF32, lse.data()};
  EXPECT_THAT(error_of([&] { verify(l.problem(), o, {.backend = "cpu_simdd"}); }),
              testing::AllOf(HasSubstr("cpu_simdd"), HasSubstr("best"), HasSubstr("cpu_oracle")));
  EXPECT_THAT(error_of([&] { verify(l.problem(), o, {.num_threads = -1}); }), HasSubstr("num_threads = -1"));
  EXPECT_THAT(error_of([&] { verify(l.problem(), o, {.batch_invariant = true, .split_keys = -64}); }),
              HasSubstr("split_keys = -64"));
  EXPECT_THAT(error_of([&] { verify(l.problem(), o, {.split_keys = 64}); }), HasSubstr("batch_invariant"));
  EXPECT_THAT(error_of([&] { verify(l.problem(), {nullptr, DType::kF32, nullptr}); }), HasSubstr("out"));
  EXPECT_THAT(error_of([&] { Verifier().run(l.problem(), o); }), HasSubstr("plan()"));
  Verifier v;
  v.plan(l.problem());
  VerifyProblem other = l.problem();
  other.shape.h_q = 2;
  EXPECT_THAT(error_of([&] { v.run(other, o); }), HasSubstr("shape.h_q = 2"));
  other = l.problem();
  other.kv.data = nullptr;
  EXPECT_THAT(error_of([&] { v.run(other, o); }), HasSubstr("kv.data"));
  other = l.problem();
  other.sm_scale = NAN;
  EXPECT_THAT(error_of([&] { v.run(other, o); }), HasSubstr("sm_scale"));
  // A plan that failed is no plan.
  other = l.problem();
  other.b = -1;
  EXPECT_THAT(error_of([&] { v.plan(other); }), HasSubstr("b = -1"));
  EXPECT_THAT(error_of([&] { v.run(l.problem(), o); }), HasSubstr("plan()"));
}

}  // namespace
}  // namespace treemla::test
