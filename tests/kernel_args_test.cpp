// Host side of what the CUDA kernels are given; compiles and runs without CUDA.

#include <gtest/gtest.h>

#include <random>

#include "backend/cuda/kernel_args.hpp"

namespace treemla::test {
namespace {

TEST(FastDiv, DividesLikeTheProcessor) {
  std::mt19937_64 rng(3);
  std::vector<int> divisors = {
      1,        2, 3, 5, 7, 16, 63, 64, 65, 1000, 65535, 65536, 65537, 1 << 30, (1 << 30) + 1, INT32_MAX - 1,
      INT32_MAX};
  for (int i = 0; i < 200; ++i) divisors.push_back(static_cast<int>(rng() % INT32_MAX) + 1);
  for (const int d : divisors) {
    const FastDiv div(d);
    const auto check = [&](int64_t n) {
      if (n < 0 || n > INT32_MAX) return;
      ASSERT_EQ(div.quotient(static_cast<int>(n)), n / d) << n << " / " << d;
    };
    for (int64_t n : {0, 1, INT32_MAX - 1, INT32_MAX}) check(n);
    for (int64_t k : {1, 2, 3, 1000, INT32_MAX / d}) {
      check(k * d - 1);
      check(k * d);
      check(k * d + 1);
    }
    for (int i = 0; i < 1000; ++i) check(static_cast<int64_t>(rng() % INT32_MAX));
  }
}

TEST(Faults, TheFirstIsTheSmallest) {
  EXPECT_LT(pack_fault(DeviceFault::kQIndptr, 5, 5), pack_fault(DeviceFault::kKvLen, 0, 0));
  EXPECT_LT(pack_fault(DeviceFault::kKvLen, 1, 900), pack_fault(DeviceFault::kKvLen, 2, 0));
  EXPECT_LT(pack_fault(DeviceFault::kPageEntry, 2, 7), pack_fault(DeviceFault::kPageEntry, 2, 8));
  EXPECT_LT(pack_fault(DeviceFault::kWordsPerRow, 0x0FFFFFFF, -1), kNoFault);
}

}  // namespace
}  // namespace treemla::test
