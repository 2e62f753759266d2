// What AMX multiplies, without AMX: the layouts of its operands and a scalar emulation of tdpbf16ps give the products, on any CPU.
// Then the kernel's own packing on AVX-512, and its products where the CPU has them, each against that, bit for bit.
// bf16_dot_test has whole calls.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/amx_layout.hpp"
#include "backend/cpu/fetch_ahead.hpp"
#include "conformance.hpp"
#include "core/convert.hpp"
#include "core/host_device.hpp"
#include "core/kv_row.hpp"

namespace treemla::test {
namespace {

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

// Operands of random numbers, in rows and packed by plain code.
struct Operands {
  Operands(int num_rows, int num_keys, int width_of_values, int width)
      : rows(num_rows), keys(num_keys), d_v(width_of_values), d_qk(width) {
    std::mt19937 rng(7);
    const auto draw = [&](std::size_t n) {
      std::vector<uint16_t> v(n);
      for (uint16_t& x : v) x = float_to_bf16(static_cast<float>(rng() % 2001) / 1000 - 1);
      return v;
    };
    q = draw(static_cast<std::size_t>(rows) * d_qk);
    kv = draw(static_cast<std::size_t>(keys) * d_qk);
    p = draw(static_cast<std::size_t>(padded_rows()) * keys);
    for (int r = 0; r < rows; ++r) q_rows.push_back(q.data() + r * d_qk);
    for (int j = 0; j < keys; ++j) kv_rows.push_back(kv.data() + j * d_qk);

    q_tiles.resize(static_cast<std::size_t>(padded_rows()) * d_qk / 2);
    for (int r = 0; r < padded_rows(); ++r)
      amx_pack_query(r < rows ? q_rows[r] : nullptr, r, d_qk, q_tiles.data());
    key_tiles.resize(static_cast<std::size_t>(keys) * d_qk);
    value_tiles.resize(static_cast<std::size_t>(d_v) / kAmxTile * kAmxValuesStride);
    for (int j = 0; j < keys; j += 2)
      amx_load_pair<false>(kv_rows[j], kv_rows[j + 1], j, d_qk, d_v, key_tiles.data(), value_tiles.data());
    weight_tiles.resize(amx_weight_offset(kAmxRows, 0));
    for (int r = 0; r < padded_rows(); ++r)
      for (int word = 0; word < keys / 2; ++word)
        weight_tiles[amx_weight_offset(r, word)] =
            p[r * keys + 2 * word] | static_cast<uint32_t>(p[r * keys + 2 * word + 1]) << 16;
  }
  int padded_rows() const { return round_up(rows, kAmxTile); }

  // S^T, as [keys, kAmxRows].
  std::vector<float> emulated_scores() const {
    std::vector<float> s(static_cast<std::size_t>(keys) * kAmxRows);
    const auto* k = reinterpret_cast<const uint32_t*>(key_tiles.data());
    for (int j = 0; j < keys; j += kAmxTile) {
      for (int r = 0; r < padded_rows(); r += kAmxTile) {
        float c[kAmxTileWords] = {};
        for (int step = 0; step < d_qk / kAmxStep; ++step)
          amx_emulate_dot(c, k + amx_key_offset(j, step, d_qk) / 2,
                          q_tiles.data() + amx_q_offset(r, step * kAmxTile, d_qk));
        for (int i = 0; i < kAmxTile; ++i)
          std::copy_n(c + i * kAmxTile, kAmxTile, s.data() + (j + i) * kAmxRows + r);
      }
    }
    return s;
  }
  // `before` + P V, rows of d_v.
  std::vector<float> emulated_out(const std::vector<float>& before) const {
    std::vector<float> out = before;
    for (int r = 0; r < padded_rows(); r += kAmxTile) {
      for (int column = 0; column < d_v; column += kAmxTile) {
        float c[kAmxTileWords];
        for (int i = 0; i < kAmxTile; ++i)
          std::copy_n(out.data() + (r + i) * d_v + column, kAmxTile, c + i * kAmxTile);
        for (int step = 0; step < keys / kAmxStep; ++step)
          amx_emulate_dot(c, weight_tiles.data() + amx_weight_offset(r, step * kAmxTile),
                          value_tiles.data() + amx_value_offset(step * kAmxTile, column));
        for (int i = 0; i < kAmxTile; ++i)
          std::copy_n(c + i * kAmxTile, kAmxTile, out.data() + (r + i) * d_v + column);
      }
    }
    return out;
  }

  int rows, keys, d_v, d_qk;
  std::vector<uint16_t> q, kv, p;  // [rows, d_qk], [keys, d_qk], [padded rows, keys]
  std::vector<const uint16_t*> q_rows, kv_rows;
  std::vector<uint32_t> q_tiles, value_tiles, weight_tiles;
  std::vector<uint16_t> key_tiles;
};

struct Size {
  int rows, keys, d_v, d_qk;
};
constexpr Size kSizes[] = {{1, 32, 32, 32},     {8, 96, 512, 576},   {16, 64, 64, 96}, {17, 32, 96, 128},
                           {32, 256, 512, 576}, {31, 160, 256, 288}, {9, 224, 96, 96}};

std::string name_of(const Size& s) {
  return std::to_string(s.rows) + " rows, " + std::to_string(s.keys) + " keys, widths " +
         std::to_string(s.d_v) + " and " + std::to_string(s.d_qk);
}

TEST(Amx, LayoutsAndEmulationGiveTheProducts) {
  for (const Size& s : kSizes) {
    const Operands o(s.rows, s.keys, s.d_v, s.d_qk);
    const std::vector<float> scores = o.emulated_scores();
    for (int r = 0; r < o.rows; ++r) {
      for (int j = 0; j < o.keys; ++j) {
        double sum = 0;
        for (int k = 0; k < o.d_qk; ++k)
          sum += static_cast<double>(bf16_to_float(o.q_rows[r][k])) * bf16_to_float(o.kv_rows[j][k]);
        ASSERT_NEAR(scores[j * kAmxRows + r], sum, 1e-4) << name_of(s) << ": row " << r << ", key " << j;
      }
    }
    const std::vector<float> out =
        o.emulated_out(std::vector<float>(static_cast<std::size_t>(o.padded_rows()) * o.d_v, 1.0f));
    for (int r = 0; r < o.rows; ++r) {
      for (int c = 0; c < o.d_v; ++c) {
        double sum = 1;
        for (int j = 0; j < o.keys; ++j)
          sum += static_cast<double>(bf16_to_float(o.p[r * o.keys + j])) * bf16_to_float(o.kv_rows[j][c]);
        ASSERT_NEAR(out[r * o.d_v + c], sum, 1e-4) << name_of(s) << ": row " << r << ", column " << c;
      }
    }
  }
}

TEST(Amx, InterleavedRowsGiveTheSameValues) {
  const Operands o(1, 32, 96, 160);
  std::vector<uint16_t> interleaved(o.kv.size());
  for (int j = 0; j < o.keys; ++j) interleave_row(o.kv_rows[j], o.d_qk, interleaved.data() + j * o.d_qk);
  std::vector<uint32_t> values(o.value_tiles.size());
  std::vector<uint16_t> keys(o.key_tiles.size());
  for (int j = 0; j < o.keys; j += 2)
    amx_load_pair<true>(interleaved.data() + j * o.d_qk, interleaved.data() + (j + 1) * o.d_qk, j, o.d_qk,
                        o.d_v, keys.data(), values.data());
  EXPECT_EQ(values, o.value_tiles);
}

TEST(Amx, VectorsPackWhatPlainCodePacks) {
  if (!has_avx512()) GTEST_SKIP() << "no AVX-512 on this CPU";
  for (const Size& s : kSizes) {
    const Operands o(s.rows, s.keys, s.d_v, s.d_qk);
    std::vector<uint32_t> q(o.q_tiles.size(), 1), values(o.value_tiles.size());
    std::vector<uint16_t> keys(o.key_tiles.size());
    amx_pack_q(o.q_rows.data(), o.rows, o.d_qk, q.data());
    amx_load_keys(o.kv_rows.data(), o.keys, false, o.d_qk, o.d_v, keys.data(), values.data());
    EXPECT_EQ(q, o.q_tiles) << name_of(s);
    EXPECT_EQ(keys, o.key_tiles) << name_of(s);
    EXPECT_EQ(values, o.value_tiles) << name_of(s);
  }
}

// Against float64: maxima raised only by more than the slack, hidden keys, rows that see nothing, sums, weights as bf16.
TEST(Amx, Softmax) {
  if (!has_avx512()) GTEST_SKIP() << "no AVX-512 on this CPU";
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr int kKeys = 96, kBlind = 5;
  const float scale = 0.7f;
  std::mt19937 rng(5);
  std::vector<std::vector<double>> seen(kAmxRows);  // scaled scores of each row, all tiles
  std::vector<float> max(kAmxRows), sum(kAmxRows), alpha(kAmxRows);
  std::vector<uint32_t> weights(amx_weight_offset(kAmxRows, 0));
  for (int tile = 0; tile < 5; ++tile) {
    std::vector<float> scores(kKeys * kAmxRows);
    for (int j = 0; j < kKeys; ++j) {
      for (int r = 0; r < kAmxRows; ++r) {
        const float s = static_cast<float>(rng() % 4000) / 100 - 20 + static_cast<float>(r * tile);
        const bool hidden = r == kBlind ? tile < 2 : rng() % 7 == 0;
        scores[j * kAmxRows + r] = hidden ? -kInf : s;
        if (!hidden) seen[r].push_back(static_cast<double>(s) * scale);
      }
    }
    const std::vector<float> before = max;
    const bool raised =
        amx_maxima(scores.data(), kKeys, kAmxRows, scale, tile == 0, max.data(), alpha.data());
    amx_weights({.scores = scores.data(),
                 .num_keys = kKeys,
                 .num_rows = kAmxRows,
                 .scale = scale,
                 .first = tile == 0,
                 .max = max.data(),
                 .alpha = alpha.data(),
                 .sum = sum.data(),
                 .weights = weights.data()});
    EXPECT_EQ(raised, std::any_of(alpha.begin(), alpha.end(), [](float a) { return a != 1; }));
    for (int r = 0; r < kAmxRows; ++r) {
      if (seen[r].empty()) {
        EXPECT_EQ(max[r], -kInf);
        EXPECT_EQ(sum[r], 0);
        continue;
      }
      const double top = *std::max_element(seen[r].begin(), seen[r].end());
      EXPECT_LE(top, max[r] + 8.001) << "row " << r;
      EXPECT_GE(top, max[r] - 0.001) << "row " << r;
      if (tile > 0 && before[r] > -kInf) {
        EXPECT_NEAR(alpha[r], std::exp(static_cast<double>(before[r]) - max[r]), 1e-5) << "row " << r;
      }
      double expected = 0;
      for (const double s : seen[r]) expected += std::exp(s - max[r]);
      EXPECT_NEAR(sum[r], expected, 1e-5 * expected) << "row " << r;
      for (int j = 0; j < kKeys; ++j) {
        const uint32_t word = weights[amx_weight_offset(r, j / 2)];
        const float p = bf16_to_float(static_cast<uint16_t>(j % 2 == 0 ? word : word >> 16));
        const double w = std::exp(static_cast<double>(scores[j * kAmxRows + r]) * scale - max[r]);
        ASSERT_NEAR(p, w, w / 250) << "row " << r << ", key " << j;
        if (scores[j * kAmxRows + r] == -kInf) {
          ASSERT_EQ(p, 0) << "row " << r << ", key " << j;
        }
      }
    }
  }
}

TEST(Amx, MaskHidesByBits) {
  if (!has_avx512()) GTEST_SKIP() << "no AVX-512 on this CPU";
  constexpr int kWords = 9, kTreeBegin = 29, kBegin = 3, kEnd = 250;
  std::mt19937 rng(9);
  for (int rows : {1, 16, 17, 31, 32}) {
    std::vector<uint32_t> bits(static_cast<std::size_t>(rows) * kWords);
    for (uint32_t& w : bits) w = static_cast<uint32_t>(rng());
    const uint32_t* of_row[kAmxRows] = {};
    for (int r = 0; r < rows; ++r) of_row[r] = bits.data() + r * kWords;
    std::vector<float> scores(kAmxKeys * kAmxRows, 1.0f);
    amx_mask(scores.data(), kBegin, kEnd, kTreeBegin, of_row, rows);
    for (int j = 0; j < kAmxKeys; ++j) {
      for (int r = 0; r < rows; ++r) {
        const int t = kTreeBegin + j - kBegin;
        const bool sees = j < kBegin || j >= kEnd || (of_row[r][t / 32] >> (t % 32) & 1);
        ASSERT_EQ(scores[j * kAmxRows + r], sees ? 1.0f : -std::numeric_limits<float>::infinity())
            << rows << " rows: row " << r << ", key " << j;
      }
    }
  }
}

TEST(Amx, RegistersMultiplyAsEmulated) {
  if (!amx_available()) GTEST_SKIP() << "no AMX on this CPU, or not granted to this process";
  const SimdItem nothing_ahead;
  FetchAhead ahead(nothing_ahead);
  for (const Size& s : kSizes) {
    const Operands o(s.rows, s.keys, s.d_v, s.d_qk);
    const AmxRegisters registers;
    std::vector<float> scores(static_cast<std::size_t>(o.keys) * kAmxRows);
    amx_score(o.key_tiles.data(), o.keys, o.q_tiles.data(), o.rows, o.d_qk, scores.data(), nullptr, ahead);
    EXPECT_TRUE(same_bits(scores, o.emulated_scores())) << name_of(s);

    const std::size_t n = static_cast<std::size_t>(o.padded_rows()) * o.d_v;
    const std::vector<float> alpha = {0.5f, 1.0f, 2.0f};
    std::vector<float> factors(kAmxRows), before(n), shrunk(n), out(n, 1.0f);
    for (int r = 0; r < kAmxRows; ++r) factors[r] = alpha[r % 3];
    for (std::size_t i = 0; i < n; ++i) {
      before[i] = static_cast<float>(i % 101) / 100;
      shrunk[i] = before[i] * factors[i / o.d_v];
    }
    // Rows past the last are multiplied by nothing.
    for (std::size_t i = static_cast<std::size_t>(o.rows) * o.d_v; i < n; ++i) shrunk[i] = before[i];
    amx_accumulate(o.weight_tiles.data(), o.value_tiles.data(), o.keys, o.rows, o.d_v, true, nullptr,
                   out.data(), o.d_v, ahead);
    EXPECT_TRUE(same_bits(out, o.emulated_out(std::vector<float>(n)))) << name_of(s);
    for (const float* factor :
         {static_cast<const float*>(nullptr), static_cast<const float*>(factors.data())}) {
      out = before;
      amx_accumulate(o.weight_tiles.data(), o.value_tiles.data(), o.keys, o.rows, o.d_v, false, factor,
                     out.data(), o.d_v, ahead);
      EXPECT_TRUE(same_bits(out, o.emulated_out(factor ? shrunk : before))) << name_of(s);
    }
  }
}

// Between the products of other scores or alone.
TEST(Amx, WeightsHaveTheSameBitsBetweenProducts) {
  if (!amx_available()) GTEST_SKIP() << "no AMX on this CPU, or not granted to this process";
  const SimdItem nothing_ahead;
  FetchAhead ahead(nothing_ahead);
  for (const Size& s : {Size{32, 256, 512, 576}, Size{8, 96, 512, 576}, Size{20, 160, 32, 64}}) {
    const Operands o(s.rows, s.keys, s.d_v, s.d_qk);
    std::mt19937 rng(3);
    std::vector<float> scores(static_cast<std::size_t>(o.keys) * kAmxRows), max(kAmxRows), alpha(kAmxRows);
    for (float& x : scores) x = static_cast<float>(rng() % 1000) / 100;
    amx_maxima(scores.data(), o.keys, kAmxRows, 1, true, max.data(), alpha.data());
    struct {
      std::vector<float> sum = std::vector<float>(kAmxRows);
      std::vector<uint32_t> weights = std::vector<uint32_t>(amx_weight_offset(kAmxRows, 0));
    } alone, between;
    AmxWeights work{.scores = scores.data(),
                    .num_keys = o.keys,
                    .num_rows = kAmxRows,
                    .scale = 1,
                    .first = true,
                    .max = max.data(),
                    .alpha = alpha.data(),
                    .sum = alone.sum.data(),
                    .weights = alone.weights.data()};
    amx_weights(work);
    work.sum = between.sum.data();
    work.weights = between.weights.data();
    const AmxRegisters registers;
    std::vector<float> other(scores.size());
    amx_score(o.key_tiles.data(), o.keys, o.q_tiles.data(), o.rows, o.d_qk, other.data(), &work, ahead);
    EXPECT_TRUE(same_bits(other, o.emulated_scores())) << name_of(s);
    EXPECT_TRUE(same_bits(between.sum, alone.sum)) << name_of(s);
    EXPECT_EQ(between.weights, alone.weights) << name_of(s);
  }
}

}  // namespace
}  // namespace treemla::test
