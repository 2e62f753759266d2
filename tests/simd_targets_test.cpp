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

// Made once for all targets: the oracle takes longer than what is tested.
std::vector<std::pair<CaseParam, Instance>>& cases() {
  static std::vector<std::pair<CaseParam, Instance>> list = [] {
    std::vector<std::pair<CaseParam, Instance>> made;
    for (const std::vector<CaseParam>& params : {smoke_cases(), random_cases(kRandomCasesPerTarget, 99)})
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
    const Comparison c = instance.judge(host_arithmetic("cpu_simd", instance.problem()));
    EXPECT_TRUE(c.ok) << param << ": " << c.failure;
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
