// cpu_simd on every instruction set that this CPU has, not only on its best.

#include <cmath>
#include <cstring>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cpu/simd_kernel.hpp"
#include "conformance.hpp"
#include "core/lookup.hpp"

namespace treemla::test {
namespace {

class SimdTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(simd_force_target(GetParam())); }
  void TearDown() override { simd_force_target(""); }
};

// Made once for all targets: the oracle takes longer than what is tested.
std::vector<std::pair<CaseParam, Instance>>& cases() {
  static std::vector<std::pair<CaseParam, Instance>> list = [] {
    std::vector<std::pair<CaseParam, Instance>> made;
    for (const std::vector<CaseParam>& params :
         {smoke_cases(), interleaved_cases(), q8_cases(), random_cases(kRandomCasesPerTarget, 99)})
      for (const CaseParam& p : params) made.emplace_back(p, Instance(p));
    return made;
  }();
  return list;
}

TEST_P(SimdTarget, MatchesTheOracle) {
  ASSERT_THAT(simd_targets(), testing::ElementsAre(GetParam()));
  for (auto& [param, instance] : cases()) {
    instance.poison_output();
    RunOptions options = param.options;
    options.backend = "cpu_simd";
    verify(instance.problem(), instance.output(), options);
    const Comparison c =
        instance.judge(host_arithmetic("cpu_simd", instance.problem(), instance.output().out_dtype));
    EXPECT_TRUE(c.ok) << param << ": " << c.failure;
  }
}

// float32 rows that lie on whole vectors are read in place, others through a copy: the same bits, and a row of NaN
// reaches the nodes that see it and no others either way.
TEST_P(SimdTarget, WhereFloat32RowsLieChangesNoBit) {
  for (const MlaShape& shape : {MlaShape{1, 512, 64}, MlaShape{8, 512, 64}, MlaShape{20, 64, 32}}) {
    for (int prefix : {0, 1, 63, 130}) {
      CaseSpec spec;
      spec.requests = {{prefix, 5}};
      spec.shape = shape;
      spec.seed = 23 + prefix;
      spec.q_dtype = spec.kv_dtype = DType::kF32;
      const Case c = generate_case(spec);
      VerifyProblem p = c.problem();
      const int64_t d_qk = shape.d_qk(), rows = p.kv.num_pages * p.kv.page_size;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      std::vector<float> kv(static_cast<const float*>(p.kv.data),
                            static_cast<const float*>(p.kv.data) + rows * d_qk);
      const int64_t hidden = pool_row(p.pages, p.kv.page_size, page_base(p.pages, 0), prefix + 4);
      std::fill_n(kv.begin() + hidden * d_qk, d_qk, nan);

      // Rows from `shift` floats past a cache line on, with NaN between and around them.
      const auto run = [&](int shift, int stride, const char* backend) {
        std::vector<float> room(rows * stride + shift + 16, nan);
        float* at = room.data();
        while (reinterpret_cast<uintptr_t>(at) % 64 != 0) ++at;
        at += shift;
        for (int64_t r = 0; r < rows; ++r) std::copy_n(kv.data() + r * d_qk, d_qk, at + r * stride);
        p.kv.data = at;
        p.kv.row_stride = stride;
        std::vector<float> out(p.q.total_q * shape.h_q * shape.d_v, nan);
        verify(p, {out.data(), DType::kF32, nullptr}, {.backend = backend, .num_threads = 1});
        return out;
      };
      const int wide = static_cast<int>(d_qk) + 16;
      const std::vector<float> in_place = run(0, d_qk, "cpu_simd"), expected = run(0, d_qk, "cpu_oracle");
      EXPECT_TRUE(same_bits(in_place, run(0, wide, "cpu_simd"))) << shape.h_q << " heads, prefix " << prefix;
      EXPECT_TRUE(same_bits(in_place, run(1, d_qk, "cpu_simd"))) << shape.h_q << " heads, prefix " << prefix;
      EXPECT_TRUE(same_bits(in_place, run(3, wide + 1, "cpu_simd")))
          << shape.h_q << " heads, prefix " << prefix;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(std::isnan(in_place[i]), std::isnan(expected[i])) << "element " << i;
        if (!std::isnan(expected[i])) {
          ASSERT_NEAR(in_place[i], expected[i], 3e-5 * std::max(1.0f, std::abs(expected[i])))
              << "element " << i;
        }
      }
    }
  }
}

// NaN and infinity in fp16, of columns and of scales, in the prefix and in a tree row that not all nodes see, widened in registers and as a tile.
TEST_P(SimdTarget, GarbageInFp16ComesOutWhereTheOracleHasIt) {
  for (DType dtype : {DType::kF16, DType::kQ8}) {
    for (int h_q : {1, 20}) {
      for (int token : {3, 67}) {
        for (uint16_t bits : {uint16_t{0x7F80}, uint16_t{0x7C00}, uint16_t{0x7E01}, uint16_t{0xFFFF}}) {
          CaseSpec spec;
          spec.requests = {{66, 5}};
          spec.shape = {h_q, 64, 32};
          spec.q_dtype = DType::kF32;
          spec.kv_dtype = dtype;
          const Case c = generate_case(spec);
          VerifyProblem p = c.problem();
          const CaseTensor& kv = *c.find("kv");
          std::vector<std::byte> pool(kv.data, kv.data + kv.bytes);
          p.kv.data = pool.data();
          const int64_t row = pool_row(p.pages, 1, page_base(p.pages, 0), token),
                        row_bytes = static_cast<int64_t>(kv.bytes) / kv.shape[0];
          // Of q8_0 a scale: the second. Of the others a column there.
          std::memcpy(pool.data() + row * row_bytes + 34, &bits, 2);

          std::vector<float> out(5 * h_q * 64), lse(5 * h_q), expected(out), expected_lse(lse);
          verify(p, {out.data(), DType::kF32, lse.data()}, {.backend = "cpu_simd", .num_threads = 1});
          verify(p, {expected.data(), DType::kF32, expected_lse.data()}, {.backend = "cpu_oracle"});
          const Comparison got = compare(p.shape, 5, out.data(), expected.data(), lse.data(),
                                         expected_lse.data(), Precision::kF32);
          EXPECT_TRUE(got.ok) << dtype_name(dtype) << ", " << h_q << " heads, token " << token << ", bits "
                              << bits << ": " << got.failure;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SimdTarget, testing::ValuesIn(simd_targets()),
                         [](const auto& target) { return target.param; });

TEST(SimdTargets, UnknownNamesAreRefused) {
  const std::vector<std::string> before = simd_targets();
  EXPECT_FALSE(simd_force_target("AVX9"));
  EXPECT_EQ(simd_targets(), before);
}

}  // namespace
}  // namespace treemla::test
