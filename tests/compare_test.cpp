// The comparison that judges every backend: each bound of DESIGN section 5 from both sides, and the
// texts of failures.

#include "core/compare.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "treemla/error.hpp"

namespace treemla {
namespace {

using testing::HasSubstr;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// 3 nodes, 2 heads, 64 columns. One large row keeps the Frobenius bound away from errors of single elements.
struct Data {
  MlaShape shape{2, 64, 0};
  int64_t total_q = 3;
  std::vector<float> expected, out, expected_lse, lse;
  Data() : expected(3 * 2 * 64), expected_lse(3 * 2, 5.0f) {
    for (std::size_t i = 0; i < expected.size(); ++i)
      expected[i] = 0.5f * static_cast<float>(std::sin(double(i)));
    for (std::size_t i = 0; i < 64; ++i) expected[i] = 1000;
    out = expected;
    lse = expected_lse;
  }
  Comparison run(Precision p) const {
    return compare(shape, total_q, out.data(), expected.data(), lse.data(), expected_lse.data(), p);
  }
};
constexpr std::size_t kAt = (2 * 2 + 1) * 64 + 17;  // node 2, head 1, column 17
constexpr std::size_t kRow = 2 * 2 + 1;
constexpr Precision kAll[] = {Precision::kF32, Precision::kBF16, Precision::kF16};

TEST(Compare, EqualDataPass) {
  for (Precision p : kAll) {
    const Comparison c = Data().run(p);
    EXPECT_TRUE(c.ok);
    EXPECT_EQ(c.failure, "");
    EXPECT_EQ(c.max_abs, 0);
    EXPECT_EQ(c.max_out, 0);
    EXPECT_EQ(c.max_lse, 0);
    EXPECT_EQ(c.rel_fro, 0);
  }
}

TEST(Compare, Names) {
  EXPECT_EQ(precision_name(Precision::kF32), "fp32");
  EXPECT_EQ(precision_name(Precision::kBF16), "bf16");
  EXPECT_EQ(precision_name(Precision::kF16), "fp16");
}

struct ElementBound {
  Precision precision;
  float expected, lse;
  double bound;  // by the table
};
TEST(Compare, EveryElementBoundFromBothSides) {
  const ElementBound kBounds[] = {
      {Precision::kF32, 0.5f, 5, 3e-5},        {Precision::kF32, 4, 5, 3e-5 * 4},
      {Precision::kF32, 0.5f, 320, 3e-5 * 10}, {Precision::kF32, -4, -320, 3e-5 * 40},
      {Precision::kBF16, 0, 5, 1e-2},          {Precision::kBF16, -3, 5, 4e-2},
      {Precision::kBF16, 3, 320, 4e-2},  // the 16-bit bounds of out do not grow with lse
      {Precision::kF16, 0, 5, 1.5e-3},         {Precision::kF16, 3, 320, 6e-3},
  };
  for (const ElementBound& e : kBounds) {
    Data d;
    d.expected[kAt] = e.expected;
    d.lse[kRow] = d.expected_lse[kRow] = e.lse;
    for (double side : {-1.0, 1.0}) {
      d.out[kAt] = static_cast<float>(e.expected + side * 0.98 * e.bound);
      const Comparison good = d.run(e.precision);
      EXPECT_TRUE(good.ok) << good.failure;
      EXPECT_NEAR(good.max_out, 0.98, 0.01);
      EXPECT_NEAR(good.max_abs, 0.98 * e.bound, 0.01 * e.bound);
      d.out[kAt] = static_cast<float>(e.expected + side * 1.02 * e.bound);
      const Comparison bad = d.run(e.precision);
      EXPECT_FALSE(bad.ok) << precision_name(e.precision) << " " << e.expected << " " << e.lse;
      EXPECT_NEAR(bad.max_out, 1.02, 0.01);
      EXPECT_THAT(bad.failure, HasSubstr("node 2, head 1, column 17"));
    }
  }
}

TEST(Compare, EveryLseBoundFromBothSides) {
  const struct {
    Precision precision;
    float lse;
    double bound;
  } kBounds[] = {{Precision::kF32, 1, 2e-5},   {Precision::kF32, -64, 4e-5},  {Precision::kF32, 320, 2e-4},
                 {Precision::kBF16, 1, 5e-5},  {Precision::kBF16, 320, 5e-4}, {Precision::kF16, 1, 5e-5},
                 {Precision::kF16, -320, 5e-4}};
  for (const auto& e : kBounds) {
    Data d;
    d.expected_lse[kRow] = e.lse;
    d.lse[kRow] = static_cast<float>(e.lse + 0.8 * e.bound);
    EXPECT_TRUE(d.run(e.precision).ok) << e.lse;
    d.lse[kRow] = static_cast<float>(e.lse + 1.2 * e.bound);
    const Comparison bad = d.run(e.precision);
    EXPECT_FALSE(bad.ok) << e.lse;
    EXPECT_NEAR(bad.max_lse, 1.2 * e.bound, 0.2 * e.bound);
    EXPECT_THAT(bad.failure, HasSubstr("lse of node 2, head 1"));
  }
}

TEST(Compare, FrobeniusBoundFromBothSides) {
  const struct {
    Precision precision;
    double bound;
  } kBounds[] = {{Precision::kF32, 5e-6}, {Precision::kBF16, 4e-3}, {Precision::kF16, 6e-4}};
  for (const auto& e : kBounds) {
    for (double factor : {0.9, 1.1}) {
      Data d;
      for (std::size_t i = 0; i < d.out.size(); ++i) d.out[i] = d.expected[i] = i % 2 ? 2.0f : -2.0f;
      for (float& x : d.out)
        x = static_cast<float>(x * (1 + factor * e.bound));  // inside every element's bound
      const Comparison c = d.run(e.precision);
      EXPECT_NEAR(c.rel_fro, factor * e.bound, 0.03 * e.bound);
      EXPECT_LE(c.max_out, 1);
      EXPECT_EQ(c.ok, factor < 1);
      EXPECT_THAT(c.failure, HasSubstr(factor < 1 ? "" : "Frobenius"));
    }
  }
}

TEST(Compare, FailureNamesPlaceValuesErrorAndBound) {
  Data d;
  d.expected[kAt] = 0.25f;
  d.out[kAt] = 0.75f;
  d.out[kAt + 1] += 0.1f;  // smaller: the worst element is named
  const Comparison c = d.run(Precision::kF32);
  for (const char* part : {"out of node 2, head 1, column 17", "0.75 where 0.25", "error 0.5", "bound 3e-05",
                           "fp32", "2 of 384 elements"}) {
    EXPECT_THAT(c.failure, HasSubstr(part));
  }
}

TEST(Compare, NanAndInfinityPositionsComeFirst) {
  for (Precision p : kAll) {
    for (float got : {kNan, kInf, -kInf}) {
      Data d;
      d.out[0] += 1e6f;  // a plain error as well
      d.out[kAt] = got;
      const Comparison c = d.run(p);
      EXPECT_FALSE(c.ok);
      EXPECT_THAT(c.failure, HasSubstr("out of node 2, head 1, column 17"));
      EXPECT_GT(c.max_out, 1);
      EXPECT_FALSE(std::isnan(c.max_out) || std::isnan(c.max_abs) || std::isnan(c.rel_fro));
    }
    for (float want : {kNan, kInf, -kInf}) {
      Data d;
      d.expected[kAt] = want;
      EXPECT_FALSE(d.run(p).ok) << want;
      d.out[kAt] = want;
      EXPECT_TRUE(d.run(p).ok) << want;
    }
    Data d;
    d.expected[kAt] = kInf;
    d.out[kAt] = -kInf;
    EXPECT_FALSE(d.run(p).ok);
    d.out[kAt] = kNan;
    EXPECT_FALSE(d.run(p).ok);
  }
}

TEST(Compare, RowsThatSeeNoKey) {
  Data d;
  d.expected_lse[kRow] = d.lse[kRow] = -kInf;
  for (std::size_t i = kRow * 64; i < (kRow + 1) * 64; ++i) d.expected[i] = d.out[i] = 0;
  EXPECT_TRUE(d.run(Precision::kF32).ok);

  d.out[kAt] = 1;  // an infinite lse gives no slack
  EXPECT_FALSE(d.run(Precision::kF32).ok);
  d.out[kAt] = 0;
  for (float lse : {kInf, 0.0f, -1e30f, kNan}) {
    d.lse[kRow] = lse;
    const Comparison c = d.run(Precision::kF32);
    EXPECT_FALSE(c.ok) << lse;
    EXPECT_THAT(c.failure, HasSubstr("lse of node 2, head 1"));
    EXPECT_THAT(c.failure, HasSubstr("-inf is expected"));
  }
}

TEST(Compare, AllZeroExpectation) {
  Data d;
  d.expected.assign(d.expected.size(), 0.0f);
  d.out = d.expected;
  EXPECT_TRUE(d.run(Precision::kF32).ok);
  d.out[kAt] = 1e-6f;  // within the element's bound, but there is nothing to be relative to
  EXPECT_FALSE(d.run(Precision::kF32).ok);
}

TEST(Compare, LseIsOptional) {
  Data d;
  d.expected[kAt] = 0.5f;
  d.expected_lse[kRow] = 320;
  d.out[kAt] = 0.5f + 2e-4f;  // needs the growth that the expected lse grants
  const auto run = [&] {
    return compare(d.shape, d.total_q, d.out.data(), d.expected.data(), nullptr, d.expected_lse.data(),
                   Precision::kF32);
  };
  EXPECT_TRUE(run().ok);
  d.expected_lse[kRow] = 5;
  EXPECT_FALSE(run().ok);
}

TEST(Compare, NullArguments) {
  const Data d;
  const auto run = [&](const float* out, const float* expected, const float* lse) {
    try {
      compare(d.shape, d.total_q, out, expected, d.lse.data(), lse, Precision::kF32);
    } catch (const Error& e) {
      return e.argument();
    }
    return std::string();
  };
  EXPECT_EQ(run(nullptr, d.expected.data(), d.lse.data()), "out");
  EXPECT_EQ(run(d.out.data(), nullptr, d.lse.data()), "expected_out");
  EXPECT_EQ(run(d.out.data(), d.expected.data(), nullptr), "expected_lse");
  EXPECT_TRUE(compare(d.shape, 0, nullptr, nullptr, nullptr, nullptr, Precision::kF32).ok);
}

}  // namespace
}  // namespace treemla
