// Scalar conversions, exhaustively: every pattern is widened, and around every pair of neighbours of a narrow
// type the tie and the float32 numbers next to it are narrowed.

#include "core/convert.hpp"

#include "core/generate.hpp"
#include "core/kv_row.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace treemla {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The value of a pattern, straight from the definition of the format; NaN and infinity are the caller's.
double decode(uint32_t x, int exponent_bits, int mantissa_bits, int bias) {
  const uint32_t man = x & ((1u << mantissa_bits) - 1),
                 exp = (x >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const double value =
      exp == 0 ? std::ldexp(man, 1 - bias - mantissa_bits)
               : std::ldexp(man + (1u << mantissa_bits), static_cast<int>(exp) - bias - mantissa_bits);
  return (x >> (exponent_bits + mantissa_bits)) & 1 ? -value : value;
}

// A narrow format with its conversions. Positive patterns 0 .. largest are finite and ordered by value.
struct Format {
  const char* name;
  float (*widen)(uint32_t);
  uint32_t (*narrow)(float);
  int exponent_bits, mantissa_bits, bias;
  uint32_t largest;
  uint32_t sign;
  friend void PrintTo(const Format& f, std::ostream* os) { *os << f.name; }
};
const Format kFormats[] = {
    {"bf16", [](uint32_t x) { return bf16_to_float(static_cast<uint16_t>(x)); },
     [](float x) -> uint32_t { return float_to_bf16(x); }, 8, 7, 127, 0x7F7F, 0x8000},
    {"fp16", [](uint32_t x) { return f16_to_float(static_cast<uint16_t>(x)); },
     [](float x) -> uint32_t { return float_to_f16(x); }, 5, 10, 15, 0x7BFF, 0x8000},
    {"e4m3", [](uint32_t x) { return e4m3_to_float(static_cast<uint8_t>(x)); },
     [](float x) -> uint32_t { return float_to_e4m3(x); }, 4, 3, 7, 0x7E, 0x80},
};

class EveryFormat : public testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Convert, EveryFormat, testing::ValuesIn(kFormats),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(EveryFormat, WidensEveryFinitePatternExactly) {
  const Format& f = GetParam();
  for (uint32_t x = 0; x <= f.largest; ++x) {
    for (uint32_t p : {x, x | f.sign}) {
      const float got = f.widen(p);
      const double want = decode(p, f.exponent_bits, f.mantissa_bits, f.bias);
      ASSERT_EQ(got, want) << std::hex << p;
      ASSERT_EQ(std::signbit(got), p != x) << std::hex << p;
    }
  }
}

TEST_P(EveryFormat, NarrowingInvertsWidening) {
  const Format& f = GetParam();
  for (uint32_t x = 0; x <= f.largest; ++x) {
    ASSERT_EQ(f.narrow(f.widen(x)), x) << std::hex << x;
    ASSERT_EQ(f.narrow(f.widen(x | f.sign)), x | f.sign) << std::hex << x;
  }
}

TEST_P(EveryFormat, RoundsToNearestTiesToEven) {
  const Format& f = GetParam();
  for (uint32_t x = 0; x < f.largest; ++x) {
    const float low = f.widen(x), high = f.widen(x + 1);
    const auto tie = static_cast<float>((static_cast<double>(low) + high) / 2);  // exact: one more bit
    const uint32_t even = x % 2 == 0 ? x : x + 1;
    for (float sign : {1.0f, -1.0f}) {
      const uint32_t s = sign < 0 ? f.sign : 0;
      ASSERT_EQ(f.narrow(sign * tie), s | even) << "tie above " << std::hex << x;
      ASSERT_EQ(f.narrow(sign * std::nextafter(tie, 0.0f)), s | x) << "below the tie above " << std::hex << x;
      ASSERT_EQ(f.narrow(sign * std::nextafter(tie, kInf)), s | (x + 1))
          << "past the tie above " << std::hex << x;
      ASSERT_EQ(f.narrow(sign * std::nextafter(low, kInf)), s | x) << "just past " << std::hex << x;
      ASSERT_EQ(f.narrow(sign * std::nextafter(high, 0.0f)), s | (x + 1))
          << "just below " << std::hex << x + 1;
    }
  }
}

TEST_P(EveryFormat, KeepsNanAndItsSign) {
  const Format& f = GetParam();
  // Payloads in the high bits only, in the low bits only, and full.
  for (uint32_t u : {0x7FC00000u, 0x7F800001u, 0x7F808000u, 0x7FFFFFFFu}) {
    for (uint32_t s : {0u, 0x80000000u}) {
      const uint32_t got = f.narrow(std::bit_cast<float>(u | s));
      EXPECT_TRUE(std::isnan(f.widen(got))) << std::hex << (u | s) << " -> " << got;
      EXPECT_EQ((got & f.sign) != 0, s != 0) << std::hex << (u | s);
    }
  }
}

TEST(Convert, InfinityAndNanPatterns) {
  for (uint32_t x = 0; x < 0x10000; ++x) {
    const auto h = static_cast<uint16_t>(x);
    if ((x & 0x7C00) == 0x7C00) {
      if (x & 0x3FF) {
        ASSERT_TRUE(std::isnan(f16_to_float(h))) << std::hex << x;
      } else {
        ASSERT_EQ(f16_to_float(h), x & 0x8000 ? -kInf : kInf);
      }
    }
    if ((x & 0x7F80) == 0x7F80) {
      if (x & 0x7F) {
        ASSERT_TRUE(std::isnan(bf16_to_float(h))) << std::hex << x;
      } else {
        ASSERT_EQ(bf16_to_float(h), x & 0x8000 ? -kInf : kInf);
      }
    }
  }
  int num_nan = 0;
  for (int x = 0; x < 256; ++x) {
    const float v = e4m3_to_float(static_cast<uint8_t>(x));
    num_nan += std::isnan(v);
    EXPECT_FALSE(std::isinf(v)) << x;
  }
  EXPECT_EQ(num_nan, 2);
  EXPECT_TRUE(std::isnan(e4m3_to_float(0x7F)));
  EXPECT_TRUE(std::isnan(e4m3_to_float(0xFF)));
}

TEST(Convert, OverflowOfBf16GoesToInfinity) {
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7F7F7FFFu)), 0x7F7F);  // just below half way
  EXPECT_EQ(float_to_bf16(std::bit_cast<float>(0x7F7F8000u)), 0x7F80);
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(float_to_bf16(-std::numeric_limits<float>::max()), 0xFF80);
  EXPECT_EQ(float_to_bf16(kInf), 0x7F80);
  EXPECT_EQ(float_to_bf16(-kInf), 0xFF80);
}

TEST(Convert, OverflowOfFp16GoesToInfinity) {
  EXPECT_EQ(float_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7BFF);
  EXPECT_EQ(float_to_f16(65520.0f), 0x7C00);
  EXPECT_EQ(float_to_f16(-65520.0f), 0xFC00);
  EXPECT_EQ(float_to_f16(1e30f), 0x7C00);
  EXPECT_EQ(float_to_f16(-kInf), 0xFC00);
}

TEST(Convert, OverflowOfE4m3Saturates) {
  for (float x : {448.0f, 449.0f, 464.0f, 1e30f, kInf}) {
    EXPECT_EQ(float_to_e4m3(x), 0x7E) << x;
    EXPECT_EQ(float_to_e4m3(-x), 0xFE) << x;
  }
}

TEST(Convert, TinyNumbersKeepTheirSign) {
  for (const Format& f : kFormats) {
    if (std::string(f.name) == "bf16") continue;  // has float32's exponents: the smallest float32 is its tie
    EXPECT_EQ(f.narrow(std::numeric_limits<float>::denorm_min()), 0u) << f.name;
    EXPECT_EQ(f.narrow(-std::numeric_limits<float>::denorm_min()), f.sign) << f.name;
  }
}

// ---- cached rows

TEST(KvRow, Sizes) {
  constexpr DType kPacked = DType::kF8E4M3Packed;
  static_assert(kv_row_elements({8, 512, 64}, kPacked) == 656);
  static_assert(kv_row_elements({8, 512, 0}, kPacked) == 528);
  static_assert(kv_row_elements({8, 256, 64}, kPacked) == 256 + 8 + 128);
  static_assert(packed_rope_offset({8, 512, 64}) == 528);
  static_assert(kv_row_elements({8, 512, 64}, DType::kQ8) == 612);
  static_assert(kv_row_elements({8, 512, 0}, DType::kQ8) == 544);
  static_assert(kv_row_elements({8, 256, 32}, DType::kQ8) == 306);
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3})
    EXPECT_EQ(kv_row_elements({8, 512, 64}, t), 576) << dtype_name(t);
}

// Every product of an e4m3 number and a scale: exact in double, rounded once in float.
TEST(KvRow, PackedLatentsTimesTheirScales) {
  constexpr MlaShape kShape{1, 256, 4};
  std::vector<unsigned char> row(kv_row_elements(kShape, DType::kF8E4M3Packed));
  const float rope[] = {1.5f, -0.0f, 3e38f, -2.0f};
  std::vector<double> exact(260);
  std::vector<float> rounded(260);
  for (const float low : {1.0f, 0.1f, 1e-30f, 1e30f, 3.0f / 448}) {
    for (int i = 0; i < 256; ++i) row[i] = static_cast<unsigned char>(i);
    const float scales[] = {low, low * 7};
    std::memcpy(row.data() + 256, scales, sizeof scales);
    for (int i = 0; i < 4; ++i) store_element(row.data() + 264, DType::kBF16, i, rope[i]);
    load_kv_row(row.data(), kShape, DType::kF8E4M3Packed, exact.data());
    load_kv_row(row.data(), kShape, DType::kF8E4M3Packed, rounded.data());
    for (int i = 0; i < 256; ++i) {
      const float latent = e4m3_to_float(static_cast<uint8_t>(i)), scale = scales[i / 128];
      if (std::isnan(latent)) {
        EXPECT_TRUE(std::isnan(exact[i]) && std::isnan(rounded[i])) << i;
        continue;
      }
      ASSERT_EQ(exact[i], static_cast<double>(latent) * scale) << i;
      ASSERT_EQ(rounded[i], static_cast<float>(exact[i])) << i;
    }
    for (int i = 0; i < 4; ++i)
      EXPECT_EQ(exact[256 + i], bf16_to_float(float_to_bf16(rope[i]))) << "rope " << i;
  }
}

TEST(KvRow, QuantisingKeepsWhatE4m3CanHold) {
  constexpr MlaShape kShape{1, 384, 2};
  std::vector<float> from(386), to(386);
  for (int i = 0; i < 128; ++i) from[i] = e4m3_to_float(static_cast<uint8_t>(i % 127)) / 448 * 0.75f;
  for (int i = 256; i < 384; ++i) from[i] = 1e-42f;  // a scale can't be so small: rounded to 0
  from[384] = -1.25f;
  from[385] = 1 + 0x1p-9f;
  std::vector<unsigned char> row(kv_row_elements(kShape, DType::kF8E4M3Packed));
  store_packed_row(from.data(), kShape, row.data());
  load_kv_row(row.data(), kShape, DType::kF8E4M3Packed, to.data());
  EXPECT_FLOAT_EQ(packed_scale(row.data(), kShape, 0), 0.75f / 448);
  for (int g = 0; g < 3; ++g) EXPECT_GT(packed_scale(row.data(), kShape, g), 0) << g;
  for (int i = 0; i < 128; ++i) EXPECT_FLOAT_EQ(to[i], from[i]) << i;
  for (int i = 128; i < 384; ++i) EXPECT_EQ(to[i], 0) << i;
  EXPECT_EQ(to[384], -1.25f);
  EXPECT_EQ(to[385], 1);
}

// Every int8 times fp16 scales of every size: exact in float too.
TEST(KvRow, Q8ColumnsTimesTheScalesOfTheirBlocks) {
  constexpr MlaShape kShape{1, 224, 32};
  const float scales[] = {1.0f, 0.1f, 0x1p-24f, 0x1.4p-17f, 65504.0f, -0.3f, 0.0f, 3.0f / 127};
  std::vector<unsigned char> row(kv_row_elements(kShape, DType::kQ8));
  for (int c = 0; c < 256; ++c) row[c / 32 * 34 + 2 + c % 32] = static_cast<unsigned char>(c);
  std::vector<double> exact(256);
  std::vector<float> same(256);
  for (int shift = 0; shift < 8; ++shift) {
    for (int block = 0; block < 8; ++block)
      store_element(row.data() + 34 * block, DType::kF16, 0, scales[(block + shift) % 8]);
    load_kv_row(row.data(), kShape, DType::kQ8, exact.data());
    load_kv_row(row.data(), kShape, DType::kQ8, same.data());
    for (int c = 0; c < 256; ++c) {
      const float scale = f16_to_float(float_to_f16(scales[(c / 32 + shift) % 8]));
      EXPECT_EQ(q8_scale(row.data(), c / 32), scale);
      ASSERT_EQ(exact[c], static_cast<int8_t>(c) * static_cast<double>(scale)) << c;
      ASSERT_EQ(same[c], exact[c]) << c;
    }
  }
}

// One block, quantised.
struct Q8Block {
  explicit Q8Block(std::vector<float> from) {
    from.resize(32);
    store_q8_row(from.data(), {1, 32, 0}, bytes);
    load_kv_row(bytes, {1, 32, 0}, DType::kQ8, read.data());
  }
  int operator[](int i) const { return static_cast<int8_t>(bytes[2 + i]); }
  float scale() const { return q8_scale(bytes, 0); }
  unsigned char bytes[34];
  std::vector<float> read = std::vector<float>(32);
};

TEST(KvRow, QuantisingToQ8RoundsTiesToEven) {
  const float after = std::nextafter(0.5f, 1.0f);  // a tie but for a bit
  const Q8Block q({127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 126.5f, -126.5f, after, -after, 0.25f, -127});
  EXPECT_EQ(q.scale(), 1);
  const int expected[] = {127, 0, 2, 2, 0, -2, 126, -126, 1, -1, 0, -127};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(q[i], expected[i]) << i;
}

// The nearest integer whatever the scale became in fp16; what is an integer already comes back.
TEST(KvRow, QuantisingToQ8IsNearest) {
  for (int exponent = -30; exponent <= 20; ++exponent) {
    std::vector<float> from(32);
    for (int i = 0; i < 32; ++i)
      from[i] = std::ldexp(counter_normal(static_cast<uint64_t>(exponent + 99), i), exponent);
    const Q8Block q(from);
    float largest = 0;
    for (float x : from) largest = std::max(largest, std::fabs(x));
    EXPECT_EQ(q.scale(), f16_to_float(float_to_f16(largest / 127)));
    for (int i = 0; i < 32; ++i) {
      const double error = std::fabs(from[i] - static_cast<double>(q[i]) * q.scale()), half = 0.5 * q.scale();
      if (std::abs(q[i]) < 127 && q.scale() > 0) {
        EXPECT_TRUE(error < half || (error == half && q[i] % 2 == 0)) << from[i] << " * 2^" << exponent;
      }
    }
    if (exponent >= -6) {  // the scale is no subnormal, and close to what it should be
      EXPECT_NEAR(q.scale() * 127, largest, largest / 2000);
      const Q8Block again(q.read);
      if (again.scale() == q.scale()) {
        EXPECT_EQ(again.read, q.read);
      }
    }
  }
}

TEST(KvRow, QuantisingToQ8AtTheEndsOfFp16) {
  const Q8Block zeros({});
  EXPECT_EQ(zeros.scale(), 0);
  for (float x : zeros.read) EXPECT_EQ(x, 0);
  const Q8Block tiny({1e-9f, -1e-6f});  // 1e-6 / 127 is less than half of the smallest fp16
  EXPECT_EQ(tiny.scale(), 0);
  for (float x : tiny.read) EXPECT_EQ(x, 0);
  // A scale rounded down by a third: what passes 127 then stays there.
  const Q8Block subnormal({127 * 0x1.7p-24f});
  EXPECT_EQ(subnormal.scale(), 0x1p-24f);
  EXPECT_EQ(subnormal[0], 127);
  const Q8Block huge({1e30f, -1e30f, 65504, 1});
  EXPECT_EQ(huge.scale(), 65504);
  EXPECT_EQ(huge[0], 127);
  EXPECT_EQ(huge[1], -127);
  EXPECT_EQ(huge[2], 1);
  EXPECT_EQ(huge[3], 0);
}

TEST(KvRow, QuantisingToQ8KeepsNanToItsBlock) {
  constexpr MlaShape kShape{1, 64, 32};
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf}) {
    std::vector<float> from(96, 0.5f), to(96);
    from[40] = bad;
    std::vector<unsigned char> row(kv_row_elements(kShape, DType::kQ8));
    store_q8_row(from.data(), kShape, row.data());
    load_kv_row(row.data(), kShape, DType::kQ8, to.data());
    for (int c = 0; c < 96; ++c) EXPECT_EQ(std::isnan(to[c]), c / 32 == 1) << c << " by " << bad;
  }
}

TEST(KvRow, NanInEveryPartOfARow) {
  constexpr MlaShape kShape{1, 128, 32};
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E4M3Packed, DType::kQ8}) {
    std::vector<unsigned char> row(kv_row_elements(kShape, t) * dtype_bytes(t));
    std::vector<float> numbers(160);
    fill_nan(row.data(), t, kv_row_elements(kShape, t));
    load_kv_row(row.data(), kShape, t, numbers.data());
    for (float x : numbers) EXPECT_TRUE(std::isnan(x)) << dtype_name(t);
    if (t != DType::kF8E4M3Packed) continue;
    EXPECT_TRUE(std::isnan(packed_scale(row.data(), kShape, 0)));
    for (int i = 0; i < 128; ++i) EXPECT_TRUE(std::isnan(load_element(row.data(), DType::kF8E4M3, i)));
  }
}

TEST(Convert, ElementsOfEveryDtype) {
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
    std::vector<unsigned char> bytes(7 * dtype_bytes(t) + 1, 0xAB);
    unsigned char* data = bytes.data() + 1;  // no alignment is needed
    for (int i = 0; i < 7; ++i) store_element(data, t, i, static_cast<float>(i) - 3.5f);
    for (int i = 0; i < 7; ++i)
      EXPECT_EQ(load_element(data, t, i), static_cast<float>(i) - 3.5f) << dtype_name(t);
    EXPECT_EQ(bytes[0], 0xAB);
  }
}

}  // namespace
}  // namespace treemla
