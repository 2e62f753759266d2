// Every host backend against the float64 oracle.

#include <filesystem>

#include <gtest/gtest.h>

#include "backend/backend.hpp"
#include "conformance.hpp"

namespace treemla::test {
namespace {

std::vector<std::string> host_backends() {
  std::vector<std::string> names;
  for (const Backend* b : backends())
    if (b->memory() == Memory::kHost && b->available().ok) names.emplace_back(b->name());
  return names;
}

using Param = std::tuple<std::string, CaseParam>;

class Conformance : public testing::TestWithParam<Param> {};

TEST_P(Conformance, MatchesTheOracleTwice) {
  const auto& [backend, param] = GetParam();
  Instance instance(param);
  RunOptions options = param.options;
  options.backend = backend;
  verify(instance.problem(), instance.output(), options);
  const Comparison c =
      instance.judge(host_arithmetic(backend, instance.problem(), instance.output().out_dtype));
  EXPECT_TRUE(c.ok) << c.failure;

  const std::vector<unsigned char> first = instance.raw_out();
  const std::vector<float> first_lse = instance.lse();
  instance.poison_output();
  verify(instance.problem(), instance.output(), options);
  EXPECT_EQ(first, instance.raw_out()) << "two runs differ";
  EXPECT_TRUE(same_bits(first_lse, instance.lse())) << "two runs differ in lse";
}

INSTANTIATE_TEST_SUITE_P(Smoke, Conformance,
                         testing::Combine(testing::ValuesIn(host_backends()),
                                          testing::ValuesIn(smoke_cases())));
INSTANTIATE_TEST_SUITE_P(Corner, Conformance,
                         testing::Combine(testing::ValuesIn(host_backends()),
                                          testing::ValuesIn(corner_cases())));
INSTANTIATE_TEST_SUITE_P(Random, Conformance,
                         testing::Combine(testing::ValuesIn(host_backends()),
                                          testing::ValuesIn(random_cases(kRandomCases, 20260801))));

INSTANTIATE_TEST_SUITE_P(Interleaved, Conformance,
                         testing::Combine(testing::ValuesIn(host_backends()),
                                          testing::ValuesIn(interleaved_cases())));

INSTANTIATE_TEST_SUITE_P(Q8, Conformance,
                         testing::Combine(testing::ValuesIn(host_backends()), testing::ValuesIn(q8_cases())));

// The recorded cases were computed elsewhere, by another implementation: they judge the oracle too.
TEST(RecordedCases, EveryHostBackendPasses) {
  int seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TREEMLA_CASES_DIR)) {
    if (entry.path().extension() != ".kdtr") continue;
    ++seen;
    const Case c = read_case(entry.path().string());
    for (const std::string& backend : host_backends()) {
      for (DType out : {DType::kF32, DType::kBF16}) {
        Instance instance(c, {.out_dtype = out});
        verify(instance.problem(), instance.output(), {.backend = backend});
        const Comparison result =
            instance.judge(host_arithmetic(backend, instance.problem(), instance.output().out_dtype));
        EXPECT_TRUE(result.ok) << entry.path() << " " << backend << ": " << result.failure;
      }
    }
  }
  EXPECT_EQ(seen, 6);
}

}  // namespace
}  // namespace treemla::test
