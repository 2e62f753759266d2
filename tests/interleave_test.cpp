// interleave_rows() and caches of KvLayout::kInterleaved: where columns go, what is refused, and that the layout changes no bit
// of float32 arithmetic. The conformance tests hold its results against the oracle.

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/bf16_dot.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "conformance.hpp"
#include "core/lookup.hpp"
#include "error_of.hpp"
#include "treemla/interleave.hpp"

namespace treemla::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;
constexpr MlaShape kShape = {1, 64, 32};
constexpr int kWidth = 96;

std::vector<uint16_t> counting(int n) {
  std::vector<uint16_t> v(n);
  std::iota(v.begin(), v.end(), uint16_t{0});
  return v;
}

TEST(Interleave, ColumnsGoWhereTheHeaderSays) {
  const std::vector<uint16_t> row = counting(kWidth);
  std::vector<uint16_t> pool(kWidth, 0xFFFF);
  interleave_rows({.shape = kShape, .rows = row.data(), .num_rows = 1, .pool = pool.data(), .pool_rows = 1});
  EXPECT_THAT(std::vector<uint16_t>(pool.begin(), pool.begin() + 6), ElementsAre(0, 16, 1, 17, 2, 18));
  EXPECT_EQ(pool[31], 31);
  EXPECT_EQ(pool[32], 32);
  EXPECT_EQ(pool[33], 48);
  for (int c = 0; c < kWidth; ++c) EXPECT_EQ(pool[interleaved_element(c)], row[c]) << "column " << c;
}

TEST(Interleave, RowsGoToTheirSlotsAndNothingElseIsWritten) {
  constexpr int kRowStride = kWidth + 3, kPoolStride = kWidth + 6, kPoolRows = 5;
  const std::vector<uint16_t> rows = counting(4 * kRowStride);
  std::vector<uint16_t> pool(kPoolRows * kPoolStride, 0xFFFF);
  const std::vector<int64_t> slots = {4, -1, 0, 4};  // the last of two at slot 4 stays
  interleave_rows({.shape = kShape,
                   .rows = rows.data(),
                   .num_rows = 4,
                   .row_stride = kRowStride,
                   .pool = pool.data(),
                   .pool_rows = kPoolRows,
                   .pool_row_stride = kPoolStride,
                   .slots = slots.data()});
  std::vector<uint16_t> expected(pool.size(), 0xFFFF);
  for (auto [row, slot] : {std::pair{2, 0}, std::pair{3, 4}})
    for (int c = 0; c < kWidth; ++c)
      expected[slot * kPoolStride + interleaved_element(c)] = rows[row * kRowStride + c];
  EXPECT_EQ(pool, expected);
}

TEST(Interleave, BadArgumentsAreNamed) {
  const std::vector<uint16_t> rows(4 * kWidth);
  std::vector<uint16_t> pool(4 * kWidth, 7);
  const std::vector<int64_t> slots = {0, 1, 4, 2};
  const InterleaveProblem good = {
      .shape = kShape, .rows = rows.data(), .num_rows = 4, .pool = pool.data(), .pool_rows = 4};
  const auto expect = [&](const InterleaveProblem& p, const char* argument, const char* says) {
    EXPECT_THAT(error_of([&] { interleave_rows(p); }),
                AllOf(StartsWith(std::string(argument) + ": "), HasSubstr(says)));
  };
  const auto with = [&](auto change) {
    InterleaveProblem p = good;
    change(p);
    return p;
  };
  expect(with([](auto& p) { p.shape.d_v = 48; }), "shape.d_v", "48");
  expect(with([](auto& p) { p.shape.d_v = 0; }), "shape.d_v", "0");
  expect(with([](auto& p) { p.shape.d_rope = 8; }), "shape.d_rope", "8");
  expect(with([](auto& p) { p.num_rows = -1; }), "num_rows", "-1");
  expect(with([](auto& p) { p.num_rows = 5; }), "num_rows", "pool_rows = 4");
  expect(with([](auto& p) { p.pool_rows = -2; }), "pool_rows", "-2");
  expect(with([](auto& p) { p.rows = nullptr; }), "rows", "null");
  expect(with([](auto& p) { p.pool = nullptr; }), "pool", "null");
  expect(with([](auto& p) { p.pool = static_cast<uint16_t*>(p.pool) + 1; }), "pool", "4 bytes");
  expect(with([](auto& p) { p.row_stride = 95; }), "row_stride", "95");
  expect(with([](auto& p) { p.pool_row_stride = 97; }), "pool_row_stride", "even");
  expect(with([](auto& p) { p.pool_row_stride = int64_t{1} << 62; }), "pool_row_stride", "64-bit");
  expect(with([&](auto& p) { p.slots = slots.data(); }), "slots", "slots[2] = 4");
  EXPECT_EQ(pool, std::vector<uint16_t>(4 * kWidth, 7)) << "written before the fault was found";
}

// A case and its cache again, interleaved.
struct Both {
  explicit Both(const CaseSpec& spec)
      : c(generate_case(spec)), row_major(c.problem()), interleaved(row_major) {
    const int64_t rows = row_major.kv.num_pages * row_major.kv.page_size;
    pool.resize(static_cast<std::size_t>(rows * row_major.shape.d_qk()));
    interleave_rows({.shape = row_major.shape,
                     .rows = row_major.kv.data,
                     .num_rows = rows,
                     .pool = pool.data(),
                     .pool_rows = rows});
    interleaved.kv.data = pool.data();
    interleaved.kv.layout = KvLayout::kInterleaved;
  }
  Case c;
  std::vector<uint16_t> pool;
  VerifyProblem row_major, interleaved;
};

CaseSpec bf16_spec(int prefix, int q, int h_q) {
  CaseSpec s;
  s.requests = {{prefix, q}};
  s.shape = {h_q, 512, 64};
  s.seed = 5;
  s.q_dtype = s.kv_dtype = DType::kBF16;
  return s;
}

std::vector<float> result(const VerifyProblem& p, const RunOptions& options) {
  std::vector<float> out(p.q.total_q * p.shape.h_q * p.shape.d_v + p.q.total_q * p.shape.h_q, 0.5f);
  verify(p, {out.data(), DType::kF32, out.data() + p.q.total_q * p.shape.h_q * p.shape.d_v}, options);
  return out;
}

TEST(Interleave, ChangesNoBitOfFloat32Arithmetic) {
  for (const std::string& target : simd_targets()) {
    if (target == kBf16DotTarget || target == kAmxTarget) continue;  // sum other pairs of columns first
    ASSERT_TRUE(simd_force_target(target));
    for (int h_q : {1, 2, 3, 7, 8, 9, 16, 17, 72}) {
      for (int prefix : {0, 1, 63, 200}) {
        const Both both(bf16_spec(prefix, 2, h_q));
        for (bool invariant : {false, true}) {
          const RunOptions options{.backend = "cpu_simd", .batch_invariant = invariant};
          EXPECT_TRUE(same_bits(result(both.row_major, options), result(both.interleaved, options)))
              << target << " h_q " << h_q << " prefix " << prefix << " invariant " << invariant;
        }
      }
    }
  }
  simd_force_target("");
}

TEST(Interleave, OracleReadsIt) {
  const Both both(bf16_spec(100, 5, 4));
  EXPECT_TRUE(same_bits(result(both.row_major, {.backend = "cpu_oracle"}),
                        result(both.interleaved, {.backend = "cpu_oracle"})));
}

TEST(Interleave, AProblemThatCannotBeIsRefused) {
  const Both both(bf16_spec(10, 2, 2));
  const auto expect = [&](auto change, const char* argument, const char* says) {
    VerifyProblem p = both.interleaved;
    change(p);
    EXPECT_THAT(error_of([&] { check_problem(p); }),
                AllOf(StartsWith(std::string(argument) + ": "), HasSubstr(says)));
  };
  expect([](auto& p) { p.kv.layout = static_cast<KvLayout>(2); }, "kv.layout", "row_major, interleaved");
  expect([](auto& p) { p.kv.dtype = DType::kF16; }, "kv.layout", "fp16");
  expect([](auto& p) { p.shape.d_v = 500; }, "shape.d_v", "500");
  expect([](auto& p) { p.shape.d_rope = 60; }, "shape.d_rope", "60");
  expect([](auto& p) { p.kv.row_stride = 577; }, "kv.row_stride", "577");
  expect([](auto& p) { p.kv.data = static_cast<const uint16_t*>(p.kv.data) + 1; }, "kv.data", "4 bytes");
}

TEST(Interleave, APlanIsForOneLayout) {
  const Both both(bf16_spec(10, 2, 2));
  std::vector<float> out(both.row_major.q.total_q * 2 * 512);
  Verifier verifier({.backend = "cpu_simd"});
  verifier.plan(both.row_major);
  EXPECT_THAT(error_of([&] { verifier.run(both.interleaved, {.out = out.data()}); }),
              StartsWith("kv.layout: "));
}

}  // namespace
}  // namespace treemla::test
