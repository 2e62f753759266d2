// cpu_simd on every instruction set that this CPU has, not only on its best.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/cpu/simd_kernel.hpp"
#include "conformance.hpp"

namespace treemla::test {
namespace {

class SimdTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(simd_force_target(GetParam())); }
  void TearDown() override { simd_force_target(""); }
};

TEST_P(SimdTarget, MatchesTheOracle) {
  ASSERT_THAT(simd_targets(), testing::ElementsAre(GetParam()));
  std::vector<CaseParam> cases = smoke_cases();
  for (const CaseParam& p : random_cases(20, 99)) cases.push_back(p);
  for (CaseParam& p : cases) {
    Instance instance(p);
    p.options.backend = "cpu_simd";
    verify(instance.problem(), instance.output(), p.options);
    const Comparison c = instance.judge();
    EXPECT_TRUE(c.ok) << p << ": " << c.failure;
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
