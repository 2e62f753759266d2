// cpu_simd on bf16 dot products and on AMX, forced where the CPU has them: what must hold beside the bounds that
// simd_targets_test checks. A row of NaN or infinity stays where it is seen, and batch-invariant rows keep their bits.

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/bf16_dot.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "conformance.hpp"
#include "core/convert.hpp"
#include "core/kv_row.hpp"
#include "core/lookup.hpp"

namespace treemla::test {
namespace {

using Floats = std::vector<float>;

class Bf16Products : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const bool available = GetParam() == kAmxTarget ? amx_available() : bf16_dot_available();
    if (!available) GTEST_SKIP() << "no " << GetParam() << " on this CPU, or not granted to this process";
    ASSERT_TRUE(simd_force_target(GetParam()));
  }
  void TearDown() override { simd_force_target(""); }
};
INSTANTIATE_TEST_SUITE_P(All, Bf16Products, testing::Values(kBf16DotTarget, kAmxTarget),
                         [](const auto& target) { return target.param; });

Case make(std::vector<RequestSpec> requests, int h_q, TreeKind tree = TreeKind::kRandom) {
  CaseSpec s;
  s.requests = std::move(requests);
  s.shape = {h_q, 512, 64};
  s.tree = tree;
  s.seed = 11;
  s.q_dtype = s.kv_dtype = DType::kBF16;
  return generate_case(s);
}

struct Result {
  Floats out, lse;
};

Result run(const VerifyProblem& p, const RunOptions& options) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Result r{Floats(p.q.total_q * p.shape.h_q * p.shape.d_v, nan), Floats(p.q.total_q * p.shape.h_q, nan)};
  verify(p, {r.out.data(), DType::kF32, r.lse.data()}, options);
  return r;
}

Comparison compare_with_oracle(const VerifyProblem& p, const Result& r) {
  const Result expected = run(p, {.backend = "cpu_oracle"});
  return compare(p.shape, p.q.total_q, r.out.data(), expected.out.data(), r.lse.data(), expected.lse.data(),
                 Precision::kBF16);
}

// Rows [begin, end) of nodes.
bool same_nodes(const VerifyProblem& p, const Result& a, int a_begin, const Result& b, int b_begin, int n) {
  const auto part = [&](const Floats& f, int begin, int64_t width) {
    return Floats(f.begin() + begin * width, f.begin() + (begin + n) * width);
  };
  const int64_t h = p.shape.h_q, w = h * p.shape.d_v;
  return same_bits(part(a.out, a_begin, w), part(b.out, b_begin, w)) &&
         same_bits(part(a.lse, a_begin, h), part(b.lse, b_begin, h));
}

// Request r of a batch with CSR pages and parents, on the batch's own tensors; q_indptr is {0, nodes}.
VerifyProblem only(VerifyProblem p, int r, const int32_t* q_indptr) {
  const int64_t first = p.q_indptr[r];
  p.q.data = static_cast<const uint16_t*>(p.q.data) + first * p.shape.h_q * p.shape.d_qk();
  p.q.total_q = q_indptr[1];
  p.b = 1;
  p.q_indptr = q_indptr;
  p.kv_len += r;
  p.pages.indptr += r;
  p.mask.parents += first;
  return p;
}

TEST_P(Bf16Products, IsForBf16QueriesAndCachesOfWholeVectors) {
  const MlaShape mla{8, 512, 64};
  EXPECT_EQ(simd_products(mla, DType::kBF16, DType::kBF16, DType::kBF16),
            GetParam() == kAmxTarget ? SimdProducts::kAmx : SimdProducts::kDot);
  EXPECT_EQ(simd_target(mla, DType::kBF16, DType::kBF16), GetParam());
  EXPECT_EQ(simd_products(mla, DType::kBF16, DType::kF8E4M3, DType::kBF16), SimdProducts::kFma);
  EXPECT_EQ(simd_products(mla, DType::kBF16, DType::kQ8, DType::kBF16), SimdProducts::kFma);
  EXPECT_EQ(simd_products(mla, DType::kF32, DType::kBF16, DType::kBF16), SimdProducts::kFma);
  EXPECT_EQ(simd_products({8, 512, 8}, DType::kBF16, DType::kBF16, DType::kBF16), SimdProducts::kFma);
  // Whatever this CPU prefers, a finer output gets float32's products.
  ASSERT_TRUE(simd_force_target(""));
  EXPECT_EQ(simd_products(mla, DType::kBF16, DType::kBF16, DType::kF32), SimdProducts::kFma);
  EXPECT_EQ(simd_products(mla, DType::kBF16, DType::kBF16, DType::kF16), SimdProducts::kFma);
  ASSERT_TRUE(simd_force_target("AVX3"));
  EXPECT_EQ(simd_products(mla, DType::kBF16, DType::kBF16, DType::kBF16), SimdProducts::kFma);
}

// Every number of rows and keys around the sizes of blocks.
TEST_P(Bf16Products, AllNumbersOfRowsAndKeys) {
  for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 16, 17, 31, 33, 48, 49, 63, 64, 65, 71, 72, 73}) {
    for (int prefix : {0, 1, 2, 3, 4, 5, 6, 7, 63, 64, 66, 130, 255, 256, 300, 540}) {
      const Case c = make({{prefix, 1}}, rows);
      const VerifyProblem p = c.problem();
      const Comparison result =
          compare_with_oracle(p, run(p, {.backend = "cpu_simd", .batch_invariant = rows % 2 == 0}));
      EXPECT_TRUE(result.ok) << rows << " rows, prefix " << prefix << ": " << result.failure;
    }
  }
}

// Values packed first, or read from the keys where they lie, in either layout: the same sums in the same order.
TEST(Bf16Dot, FewRowsWithoutPackedValuesHaveTheSameBits) {
  if (!bf16_dot_available()) GTEST_SKIP() << "no bf16 dot products on this CPU";
  constexpr int kWidth = 96, kLd = kWidth;  // a panel and a half
  std::mt19937 rng(3);
  std::vector<uint16_t> in_order(kSimdKeys * kWidth), interleaved(in_order.size());
  for (uint16_t& x : in_order) x = float_to_bf16(static_cast<float>(rng() % 2001) / 1000 - 1);
  const uint16_t *keys[kSimdKeys], *interleaved_keys[kSimdKeys];
  for (int j = 0; j < kSimdKeys; ++j) {
    interleave_row(in_order.data() + j * kWidth, kWidth, interleaved.data() + j * kWidth);
    keys[j] = in_order.data() + j * kWidth;
    interleaved_keys[j] = interleaved.data() + j * kWidth;
  }
  std::vector<float> weights(kSimdKeys * kSimdRows), alpha(kSimdRows), before(16 * kLd);
  for (std::vector<float>* v : {&weights, &alpha, &before})
    for (float& x : *v) x = static_cast<float>(rng() % 1001) / 1000;
  std::vector<uint32_t> p(kSimdKeys / 2 * kSimdRows);
  bf16_dot_pack_p(weights.data(), kSimdKeys, kSimdRows, p.data());

  std::vector<uint32_t> v(2 * kSimdKeys / 2 * kBf16DotPanel);
  for (int num_keys : {2, 10, 64}) {
    for (int rows = 1; rows <= 16; ++rows) {
      for (const float* shrink :
           {static_cast<const float*>(nullptr), static_cast<const float*>(alpha.data())}) {
        std::vector<float> expected = before;
        bf16_dot_pack_v(keys, num_keys, kWidth, v.data());
        bf16_dot_accumulate(p.data(), v.data(), num_keys, rows, kWidth, shrink, expected.data(), kLd);
        std::vector<float> packed = before;
        bf16_dot_pack_interleaved_v(interleaved_keys, num_keys, kWidth, v.data());
        bf16_dot_accumulate(p.data(), v.data(), num_keys, rows, kWidth, shrink, packed.data(), kLd);
        EXPECT_TRUE(same_bits(packed, expected)) << rows << " rows, " << num_keys << " interleaved keys";
        for (bool layout : {false, true}) {
          std::vector<float> got = before;
          for (int c = 0; c < kWidth; c += 32)
            bf16_dot_accumulate_few(p.data(), layout ? interleaved_keys : keys, layout, num_keys, rows, c,
                                    c + 32, shrink, got.data(), kLd);
          EXPECT_TRUE(same_bits(got, expected))
              << rows << " rows, " << num_keys << " keys, " << (layout ? "interleaved" : "in order");
        }
      }
    }
  }
}

TEST_P(Bf16Products, NanAndInfinityReachTheRowsThatSeeThem) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const int prefix = 100, n = 9;
  const RunOptions options{.backend = "cpu_simd"};
  for (int h_q : {1, 8}) {
    const Case c = make({{prefix, n}}, h_q);
    VerifyProblem p = c.problem();
    const Result clean = run(p, options);
    const int64_t d_qk = p.shape.d_qk(), count = p.kv.num_pages * p.kv.page_size * d_qk;
    const uint16_t* kv = static_cast<const uint16_t*>(p.kv.data);
    for (int token : {7, prefix, prefix + 1, prefix + 5, prefix + 8}) {
      for (auto [column, value] :
           std::vector<std::pair<int, float>>{{0, nan}, {511, nan}, {575, nan}, {3, inf}, {570, -inf}}) {
        std::vector<uint16_t> bad(kv, kv + count);
        const int64_t row = pool_row(p.pages, p.kv.page_size, page_base(p.pages, 0), token);
        store_element(bad.data(), DType::kBF16, row * d_qk + column, value);
        p.kv.data = bad.data();
        const Result r = run(p, options);
        const Comparison result = compare_with_oracle(p, r);
        EXPECT_TRUE(result.ok) << "token " << token << " column " << column << " = " << value << ": "
                               << result.failure;
        for (int i = 0; i < n; ++i) {
          int node = i;
          while (node >= 0 && prefix + node != token) node = p.mask.parents[node];
          if (token < prefix || node >= 0) continue;  // sees it
          EXPECT_TRUE(same_nodes(p, clean, i, r, i, 1)) << "node " << i << " does not see token " << token;
        }
      }
    }
  }
}

TEST_P(Bf16Products, BatchInvariantRowsAreBitEqualAloneAndOnAnyNumberOfThreads) {
  for (int h_q : {1, 3, 8}) {
    const Case c = make({{1000, 9}, {64, 33}, {300, 1}, {127, 1}}, h_q);
    const VerifyProblem p = c.problem();
    RunOptions options{
        .backend = "cpu_simd", .num_threads = 3, .batch_invariant = true, .split_keys = h_q == 1 ? 640 : 128};
    const Result batch = run(p, options);
    for (int threads : {1, 2, 7}) {
      options.num_threads = threads;
      EXPECT_TRUE(same_nodes(p, batch, 0, run(p, options), 0, static_cast<int>(p.q.total_q)))
          << threads << " threads";
    }
    for (int r = 0; r < p.b; ++r) {
      const int32_t q_indptr[] = {0, p.q_indptr[r + 1] - p.q_indptr[r]};
      const VerifyProblem alone = only(p, r, q_indptr);
      EXPECT_TRUE(same_nodes(p, run(alone, options), 0, batch, p.q_indptr[r], q_indptr[1]))
          << "request " << r;
    }
  }
}

// A row whose later keys score far above its first ones, tile after tile, and one where they fall.
TEST_P(Bf16Products, RisingAndFallingScores) {
  const int prefix = 700;
  const Case c = make({{prefix, 2}}, 9);
  VerifyProblem p = c.problem();
  const int64_t d_qk = p.shape.d_qk(), count = p.kv.num_pages * p.kv.page_size * d_qk;
  const uint16_t* kv = static_cast<const uint16_t*>(p.kv.data);
  for (float slope : {0.05f, -0.05f}) {
    std::vector<uint16_t> ramp(kv, kv + count);
    std::vector<uint16_t> q(p.q.total_q * p.shape.h_q * d_qk, float_to_bf16(0.25f));
    for (int t = 0; t < prefix + 2; ++t) {
      const int64_t row = pool_row(p.pages, p.kv.page_size, page_base(p.pages, 0), t);
      for (int k = 512; k < d_qk; ++k) ramp[row * d_qk + k] = float_to_bf16(slope * static_cast<float>(t));
    }
    p.kv.data = ramp.data();
    p.q.data = q.data();
    const Comparison result = compare_with_oracle(p, run(p, {.backend = "cpu_simd"}));
    EXPECT_TRUE(result.ok) << "slope " << slope << ": " << result.failure;
  }
}

// The first nodes of a chain, verified without the later ones, have the bits they have among all: rows of one call differ
// in number, in their groups and in the last key tile.
TEST_P(Bf16Products, BatchInvariantChainAtOnceEqualsItsBeginnings) {
  const int prefix = 120, n = 70;
  const Case c = make({{prefix, n}}, 4, TreeKind::kChain);
  const VerifyProblem p = c.problem();
  const RunOptions options{.backend = "cpu_simd", .batch_invariant = true, .split_keys = 128};
  const Result at_once = run(p, options);
  for (int m : {1, 2, 3, 7, 8, 9, 16, 69}) {
    const int32_t q_indptr[] = {0, m}, kv_len[] = {prefix + m};
    VerifyProblem some = only(p, 0, q_indptr);
    some.kv_len = kv_len;
    EXPECT_TRUE(same_nodes(p, run(some, options), 0, at_once, 0, m)) << m << " nodes";
  }
}

}  // namespace
}  // namespace treemla::test
