// Work counts and floors against the figures that docs/MATH.md quotes.

#include "plan/cost.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <vector>

#include "treemla/error.hpp"

namespace treemla {
namespace {

constexpr DType kBF16 = DType::kBF16;

Work uniform_work(int b, int q, int h, int keys, DType q_dtype = kBF16, DType kv_dtype = kBF16,
                  DType out_dtype = kBF16) {
  const std::vector<int32_t> q_len(b, q), kv_len(b, keys);
  return count_work({h, 512, 64}, q_len, kv_len, q_dtype, kv_dtype, out_dtype);
}

TEST(Cost, IntensityOfNineNodes) {
  const Work h8 = uniform_work(1, 9, 8, 4096);
  EXPECT_DOUBLE_EQ(h8.flops, 2.0 * 9 * 8 * 4096 * 1088);
  EXPECT_DOUBLE_EQ(h8.kv_bytes, 4096 * 1152.0);
  EXPECT_DOUBLE_EQ(h8.flops / h8.kv_bytes, 136);  // memory side of every GPU's balance
  const Work h64 = uniform_work(1, 9, 64, 4096);
  EXPECT_DOUBLE_EQ(h64.flops / h64.kv_bytes, 1088);  // compute side
}

TEST(Cost, QueriesAndOutputsByDtype) {
  EXPECT_DOUBLE_EQ(uniform_work(1, 9, 8, 100).io_bytes, 72 * (576 * 2 + 512 * 2 + 4.0));
  EXPECT_DOUBLE_EQ(uniform_work(1, 9, 8, 100, kBF16, kBF16, DType::kF32).io_bytes,
                   72 * (576 * 2 + 512 * 4 + 4.0));
  EXPECT_DOUBLE_EQ(uniform_work(1, 9, 8, 100, DType::kF32, DType::kF32, DType::kF32).kv_bytes,
                   100 * 576 * 4.0);
  EXPECT_DOUBLE_EQ(uniform_work(1, 9, 8, 100, kBF16, DType::kF8E4M3).kv_bytes, 100 * 576.0);
  const Work packed = uniform_work(1, 9, 8, 100, kBF16, DType::kF8E4M3Packed);
  EXPECT_DOUBLE_EQ(packed.kv_bytes, 100 * 656.0);
  EXPECT_DOUBLE_EQ(packed.flops, uniform_work(1, 9, 8, 100).flops);
  EXPECT_DOUBLE_EQ(uniform_work(1, 9, 8, 100, kBF16, DType::kQ8).kv_bytes, 100 * 612.0);
}

TEST(Cost, SumsOverRaggedRequests) {
  const std::vector<int32_t> q_len{9, 1}, kv_len{309, 64};
  const Work all = count_work({8, 512, 64}, q_len, kv_len, kBF16, kBF16, kBF16);
  const Work a = uniform_work(1, 9, 8, 309), b = uniform_work(1, 1, 8, 64);
  EXPECT_DOUBLE_EQ(all.flops, a.flops + b.flops);
  EXPECT_DOUBLE_EQ(all.kv_bytes, a.kv_bytes + b.kv_bytes);
  EXPECT_DOUBLE_EQ(all.bytes(), a.bytes() + b.bytes());
}

TEST(Cost, InertRequestsAreFree) {
  const std::vector<int32_t> q_len{0, 9, 0}, kv_len{100, 0, 0};
  const Work work = count_work({8, 512, 64}, q_len, kv_len, kBF16, kBF16, kBF16);
  EXPECT_EQ(work.flops, 0);
  EXPECT_EQ(work.bytes(), 0);
  EXPECT_EQ(count_work({8, 512, 64}, {}, {}, kBF16, kBF16, kBF16).bytes(), 0);
}

TEST(Cost, LargeBatchesDoNotOverflow) {
  const Work work = uniform_work(4096, 1025, 1024, 1 << 30);
  EXPECT_DOUBLE_EQ(work.flops, 2.0 * 4096 * 1025 * 1024 * (1 << 30) * 1088);
}

TEST(Cost, LengthsMustPair) {
  const std::vector<int32_t> q_len{9, 1}, kv_len{309};
  try {
    count_work({8, 512, 64}, q_len, kv_len, kBF16, kBF16, kBF16);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(e.what(), "kv_len has 1 elements: it must have 2, one a request as q_len");
  }
}

// Floors of an H200 for shapes its peers are measured on, in microseconds as people quote them.
struct FloorCase {
  int b, q, h, prefix;
  double us, tolerance;
  const char* bound;
  friend std::ostream& operator<<(std::ostream& os, const FloorCase& c) {
    return os << "b " << c.b << " q " << c.q << " h " << c.h << " prefix " << c.prefix;
  }
};

class H200Floor : public testing::TestWithParam<FloorCase> {};

TEST_P(H200Floor, MatchesTheQuotedFigure) {
  const FloorCase& c = GetParam();
  const Floor floor = floor_time(uniform_work(c.b, c.q, c.h, c.prefix), find_device_model("h200"), true);
  EXPECT_NEAR(floor.seconds() * 1e6, c.us, c.tolerance);
  EXPECT_STREQ(floor.bound(), c.bound);
}

INSTANTIATE_TEST_SUITE_P(Shapes, H200Floor,
                         testing::Values(FloorCase{1, 9, 8, 4096, 1.1, 0.05, "memory"},
                                         FloorCase{1, 9, 8, 16384, 4.2, 0.05, "memory"},
                                         FloorCase{8, 9, 8, 65536, 133, 0.5, "memory"},
                                         FloorCase{1, 9, 64, 16384, 29, 0.5, "compute"},
                                         FloorCase{8, 33, 8, 65536, 430, 0.5, "compute"},
                                         FloorCase{8, 33, 64, 65536, 3443, 1.0, "compute"}));

TEST(Floor, Float32TakesTheFmaRate) {
  const DeviceModel& h200 = find_device_model("h200");
  const Work work = uniform_work(1, 9, 64, 16384, DType::kF32, DType::kF32, DType::kF32);
  EXPECT_DOUBLE_EQ(floor_time(work, h200, false).compute_s, work.flops / h200.fp32_flops);
  EXPECT_DOUBLE_EQ(floor_time(work, h200, true).compute_s, work.flops / h200.mma16_flops);
}

TEST(Floor, UnknownRatesSetNone) {
  const Floor floor = floor_time(uniform_work(1, 9, 8, 4096), find_device_model("cpu"), false);
  EXPECT_EQ(floor.seconds(), 0);
}

}  // namespace
}  // namespace treemla
