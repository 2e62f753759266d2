// Arithmetic that the host and every GPU do alike, bit for bit: each floating point operation rounds by itself (the compiler must
// not contract a product and a sum into an FMA), and whatever is summed is an integer first, so the order of a sum is free.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/host_device.hpp"

namespace treemla {

// ---- single operations, each correctly rounded ----

TREEMLA_HD inline float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;  // src/trees/ is compiled with -ffp-contract=off
#endif
}

TREEMLA_HD inline float add_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

TREEMLA_HD inline float div_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

TREEMLA_HD inline double mul_rn(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

TREEMLA_HD inline uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return std::bit_cast<uint32_t>(x);
#endif
}

TREEMLA_HD inline float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return std::bit_cast<float>(bits);
#endif
}

// Upper 64 bits of the product.
TREEMLA_HD inline uint64_t mul_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(a) * b >> 64);
#endif
}

// ---- order ----

// Larger for larger floats, 0 for -inf alone; -0 is 0. NaN must be dealt with before.
TREEMLA_HD inline uint32_t order_of(float x) {
  if (x == -INFINITY) return 0;
  const uint32_t u = bits_of(x == 0 ? 0.0f : x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

TREEMLA_HD inline float float_of_order(uint32_t order) {
  if (order == 0) return -INFINITY;
  return float_of(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
}

// One number by which scores are ranked: best first, equal scores by the smaller token. 0: never chosen.
TREEMLA_HD inline uint64_t rank_key(uint32_t order, int token) {
  return order == 0 ? 0 : static_cast<uint64_t>(order) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(token));
}
TREEMLA_HD inline int token_of_key(uint64_t key) {
  return key == 0 ? -1 : static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(key));
}
TREEMLA_HD inline float score_of_key(uint64_t key) {
  return float_of_order(static_cast<uint32_t>(key >> 32));
}

// ---- weights: exp in units of 2^-40 ----

constexpr int kWeightBits = 40;
constexpr uint64_t kWeightOne = uint64_t{1} << kWeightBits;

// floor(2^40 * e^d) for d <= 0, within 1e-7 of it relatively. Cody and Waite's reduction and the polynomial of Cephes' expf.
TREEMLA_HD inline uint64_t exp_weight(float d) {
  if (!(d > -28.5f)) return 0;
  const int n = static_cast<int>(add_rn(mul_rn(d, 1.44269504f), -0.5f));  // nearest, for d <= 0
  const float m = static_cast<float>(n);
  const float r = add_rn(add_rn(d, mul_rn(m, -0.693359375f)), mul_rn(m, 2.12194440e-4f));  // d - n ln 2
  float p = 1.9875691500e-4f;
  p = add_rn(mul_rn(p, r), 1.3981999507e-3f);
  p = add_rn(mul_rn(p, r), 8.3334519073e-3f);
  p = add_rn(mul_rn(p, r), 4.1665795894e-2f);
  p = add_rn(mul_rn(p, r), 1.6666665459e-1f);
  p = add_rn(mul_rn(p, r), 5.0000001201e-1f);
  const float y = add_rn(add_rn(mul_rn(p, mul_rn(r, r)), r), 1.0f);
  const float scale = float_of(static_cast<uint32_t>(127 + kWeightBits + n) << 23);
  return static_cast<uint64_t>(mul_rn(y, scale));
}

// ---- log-probabilities: units of 2^-32 nats ----

constexpr int64_t kNoLogProb = INT64_MIN;  // of a token of probability 0

TREEMLA_HD inline int64_t fixed_of(float nats) {
  constexpr float kLimit = 1048576.0f;
  const float x = nats < -kLimit ? -kLimit : nats > kLimit ? kLimit : nats;
  return static_cast<int64_t>(mul_rn(x, 4294967296.0f));
}
TREEMLA_HD inline float nats_of(int64_t fixed) {
  return fixed == kNoLogProb ? -INFINITY : static_cast<float>(mul_rn(static_cast<double>(fixed), 0x1p-32));
}

// ln(total / 2^40), total > 0: log2 bit by bit, by squaring.
TREEMLA_HD inline int64_t fixed_log(uint64_t total) {
  int exponent = 63;
  uint64_t m = total;  // shifted until bit 63 is set: m / 2^63 in [1, 2)
  while ((m >> 63) == 0) {
    m <<= 1;
    --exponent;
  }
  int64_t log2 = 0;  // of the fraction, units of 2^-40
  for (int bit = 0; bit < 40; ++bit) {
    m = mul_high(m, m);  // in units of 2^-62: [1, 4)
    log2 *= 2;
    if (m >> 63) {
      log2 += 1;
    } else {
      m <<= 1;
    }
  }
  constexpr uint64_t kLn2 = 0xB17217F7D1CF79ABull;  // ln 2 in units of 2^-64
  const int64_t whole = (static_cast<int64_t>(exponent - kWeightBits) << 40) + log2;
  const uint64_t size = static_cast<uint64_t>(whole < 0 ? -whole : whole);
  const int64_t ln = static_cast<int64_t>(mul_high(size, kLn2) >> 8);
  return whole < 0 ? -ln : ln;
}

// A row's weights are summed over chunks of this many tokens, each relative to its own largest score, so that one pass over
// the row is enough; the chunks are then brought to the row's.
constexpr int kScoreChunk = 8192;

// total * 2^-40 * exp_weight(chunk_max - row_max).
TREEMLA_HD inline uint64_t rescale_weight(uint64_t total, float chunk_max, float row_max) {
  const uint64_t factor = exp_weight(add_rn(chunk_max, -row_max));
  return mul_high(total, factor) << (64 - kWeightBits) | (total * factor) >> kWeightBits;
}

// Log-probability of a token with this score, of a row with this largest score and fixed_log of its weights' sum.
TREEMLA_HD inline int64_t token_log_prob(float score, float row_max, int64_t log_total) {
  return score == -INFINITY ? kNoLogProb : fixed_of(add_rn(score, -row_max)) - log_total;
}

}  // namespace treemla
