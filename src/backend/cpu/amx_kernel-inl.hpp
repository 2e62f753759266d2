// The stages of amx.hpp in AVX-512 around a set of eight tile registers, `Tiles`: the CPU's own (amx.cpp) or emulated ones, so
// that tests run them where there is no AMX. To be included where functions are compiled for AVX-512.
//
//   S^T[32 keys][32 rows]    += K[32 keys][32 columns] Q^T[32 columns][32 rows]     18 steps of 2 x 2 registers
//   O[32 rows][32 columns]   += P[32 rows][32 keys] V[32 keys][32 columns]          up to 8 steps, O in registers
//
// A step is 4 loads for 4 products of 16 cycles. Of 16 rows or fewer a step has 4 x 1 or 1 x 4 registers. Q^T of a group (36 KB) and
// P (16 KB) stay in L1; K and V come from L2 and are loaded by an instruction that leaves L1 as it is (`stream`). O comes from L2
// and goes back once a tile of kAmxKeys keys: 8 KB for 32 products.
//
// The softmax has rows along the vectors, as S^T comes: no horizontal step. Its weights, two keys a word, are transposed in
// registers to be the left operand of the second product. A row's maximum is raised only once a score exceeds it by kSlack
// (e^8 loses nothing in bf16 or float32), so that O is rarely multiplied: a row's bits don't depend on its neighbours for that.
// A group's exponentials stand between the steps of the next group's scores: 4 products take 64 cycles, of which the vector
// units have nearly all to themselves.

#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/amx_layout.hpp"
#include "backend/cpu/avx512_transpose-inl.hpp"

namespace treemla {
namespace {

constexpr float kSlack = 8, kLog2E = 1.44269504f;

// 2^x within 3e-6, for x <= 127: 2^n 2^r with |r| <= 1/2. Adding 1.5 * 2^23 rounds x to n and leaves n in the low bits, from where
// it moves to the exponent. 0 below 2^-126; NaN stays, since NaN from bf16 has no low bits.
TREEMLA_AMX_INLINE __m512 exp2_of(__m512 x) {
  const __m512 magic = _mm512_set1_ps(0x1.8p23f), shifted = _mm512_add_ps(x, magic),
               r = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(9.5701020e-3f), r, _mm512_set1_ps(5.5917860e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.4024745e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9312181e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.9999926e-1f));
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(kept, _mm512_castps_si512(y),
                                                    _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// What is subtracted from a row's exponents of 2. All keys hidden so far: 0 instead of -inf, every weight is 2^-inf = 0.
TREEMLA_AMX_INLINE __m512 exponent_base(__m512 max) {
  const __mmask16 some =
      _mm512_cmp_ps_mask(max, _mm512_set1_ps(-std::numeric_limits<float>::infinity()), _CMP_NEQ_UQ);
  return _mm512_maskz_mul_ps(some, max, _mm512_set1_ps(kLog2E));
}

// Words of two keys, the first in the lower half, rounded to bf16 (halves up).
TREEMLA_AMX_INLINE __m512i bf16_words(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16),
                b = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_ternarylogic_epi32(a, b, upper, 0xF8);  // a | (b & upper)
}

// Maxima of 16 rows.
TREEMLA_AMX_INLINE bool maxima_16(const float* scores, int num_keys, float scale, bool first, float* max,
                                  float* alpha) {
  const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 top[4];
  HWY_UNROLL(4)
  for (int i = 0; i < 4; ++i) top[i] = none;
  for (int j = 0; j < num_keys; j += 4) {
    HWY_UNROLL(4)
    for (int i = 0; i < 4; ++i) top[i] = _mm512_max_ps(top[i], _mm512_loadu_ps(scores + (j + i) * kAmxRows));
  }
  const __m512 highest = _mm512_mul_ps(
      _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])), _mm512_set1_ps(scale));
  const __m512 m_old = first ? none : _mm512_loadu_ps(max);
  const __mmask16 raise =
      _mm512_cmp_ps_mask(highest, _mm512_add_ps(m_old, _mm512_set1_ps(kSlack)), _CMP_GT_OQ);
  const __m512 m = _mm512_mask_mov_ps(m_old, raise, highest);
  const __m512 shrink = exp2_of(_mm512_fmsub_ps(m_old, _mm512_set1_ps(kLog2E), exponent_base(m)));
  _mm512_storeu_ps(alpha, _mm512_mask_mov_ps(_mm512_set1_ps(1), raise, shrink));
  _mm512_storeu_ps(max, m);
  return raise != 0;
}

TREEMLA_AMX_INLINE bool maxima_rows(const float* scores, int num_keys, int num_rows, float scale, bool first,
                                    float* max, float* alpha) {
  bool any = false;
  for (int r = 0; r < num_rows; r += kAmxTile)
    any |= maxima_16(scores + r, num_keys, scale, first, max + r, alpha + r);
  return any;
}

// Weights of 16 * kVectors rows, in steps small enough to stand between products: a pair of keys, and after 16 of those the
// transposes of their words. Whatever stands between, a row's sum is in the order of its keys.
template <int kVectors>
class WeightSteps {
 public:
  TREEMLA_AMX_INLINE explicit WeightSteps(const AmxWeights& work)
      : work_(work),
        scale_(_mm512_set1_ps(work.scale * kLog2E)),
        scores_(work.scores),
        to_(work.weights),
        left_(work.num_keys / kAmxStep * kUnits) {
    HWY_UNROLL(2)
    for (int v = 0; v < kVectors; ++v) {
      base_[v] = exponent_base(_mm512_loadu_ps(work.max + v * kAmxTile));
      even_[v] = odd_[v] = _mm512_setzero_ps();
    }
  }

  TREEMLA_AMX_INLINE void step() {
    if (left_ == 0) return;
    --left_;
    if (unit_ < kAmxTile) {
      HWY_UNROLL(2)
      for (int v = 0; v < kVectors; ++v) {
        const float* s = scores_ + v * kAmxTile;
        const __m512 even = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(s), scale_, base_[v])),
                     odd = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(s + kAmxRows), scale_, base_[v]));
        even_[v] = _mm512_add_ps(even_[v], even);
        odd_[v] = _mm512_add_ps(odd_[v], odd);
        _mm512_store_si512(words_[v][unit_], bf16_words(even, odd));
      }
      scores_ += 2 * kAmxRows;
      ++unit_;
      return;
    }
    const int v = unit_ - kAmxTile;
    __m512i words[16];
    HWY_UNROLL(16)
    for (int i = 0; i < 16; ++i) words[i] = _mm512_load_si512(words_[v][i]);
    transpose_words(words, to_ + amx_weight_offset(v * kAmxTile, 0), kAmxTile);
    if (++unit_ < kUnits) return;
    unit_ = 0;
    to_ += kAmxTileWords;
  }

  TREEMLA_AMX_INLINE void finish() {
    while (left_ > 0) step();
    HWY_UNROLL(2)
    for (int v = 0; v < kVectors; ++v) {
      __m512 total = _mm512_add_ps(even_[v], odd_[v]);
      float* sum = work_.sum + v * kAmxTile;
      if (!work_.first)
        total = _mm512_fmadd_ps(_mm512_loadu_ps(sum), _mm512_loadu_ps(work_.alpha + v * kAmxTile), total);
      _mm512_storeu_ps(sum, total);
    }
  }

 private:
  static constexpr int kUnits = kAmxTile + kVectors;  // steps of kAmxStep keys
  const AmxWeights& work_;
  const __m512 scale_;
  __m512 base_[kVectors], even_[kVectors], odd_[kVectors];
  const float* scores_;
  uint32_t* to_;
  int left_, unit_ = 0;
  alignas(64) uint32_t words_[kVectors][kAmxTile][kAmxTile];
};

TREEMLA_AMX_INLINE void weights_alone(const AmxWeights& work) {
  if (work.num_rows > kAmxTile)
    WeightSteps<2>(work).finish();
  else
    WeightSteps<1>(work).finish();
}

// Nothing between products.
struct NoSteps {
  void step() {}
  void finish() {}
};

// Registers 0 to 3 accumulate, 4 and 5 hold left operands, 6 and 7 right ones.
template <class Tiles>
TREEMLA_AMX_INLINE void zero_accumulators() {
  Tiles::template zero<0>();
  Tiles::template zero<1>();
  Tiles::template zero<2>();
  Tiles::template zero<3>();
}

// 32 keys, 32 rows. The operands of the second 16 keys and rows are `key_block` and `row_block` words further on.
template <class Tiles, class Between, class Ahead>
TREEMLA_AMX_INLINE void score_2x2(const uint32_t* keys, const uint32_t* q, int steps, float* scores,
                                  Between& between, Ahead& ahead) {
  const int64_t block = int64_t{steps} * kAmxTileWords;
  zero_accumulators<Tiles>();
  for (int s = 0; s < steps; ++s, keys += kAmxTileWords, q += kAmxTileWords) {
    Tiles::template stream<4>(keys);
    Tiles::template load<6>(q);
    Tiles::template load<7>(q + block);
    Tiles::template dot<0, 4, 6>();
    Tiles::template stream<5>(keys + block);
    Tiles::template dot<1, 4, 7>();
    Tiles::template dot<2, 5, 6>();
    Tiles::template dot<3, 5, 7>();
    between.step();
    ahead.step();
  }
  constexpr int kDown = kAmxTile * kAmxRows;
  Tiles::template store<0>(scores, kAmxRows);
  Tiles::template store<1>(scores + kAmxTile, kAmxRows);
  Tiles::template store<2>(scores + kDown, kAmxRows);
  Tiles::template store<3>(scores + kDown + kAmxTile, kAmxRows);
}

// 16 rows, kBlocks (2 or 4) times 16 keys.
template <int kBlocks, class Tiles, class Between, class Ahead>
TREEMLA_AMX_INLINE void score_down(const uint32_t* keys, const uint32_t* q, int steps, float* scores,
                                   Between& between, Ahead& ahead) {
  const int64_t block = int64_t{steps} * kAmxTileWords;
  zero_accumulators<Tiles>();
  for (int s = 0; s < steps; ++s, keys += kAmxTileWords, q += kAmxTileWords) {
    Tiles::template load<6>(q);
    Tiles::template stream<4>(keys);
    Tiles::template dot<0, 4, 6>();
    Tiles::template stream<5>(keys + block);
    Tiles::template dot<1, 5, 6>();
    if constexpr (kBlocks == 4) {
      Tiles::template stream<4>(keys + 2 * block);
      Tiles::template dot<2, 4, 6>();
      Tiles::template stream<5>(keys + 3 * block);
      Tiles::template dot<3, 5, 6>();
      between.step();
    }
    between.step();
    ahead.step();
  }
  constexpr int kDown = kAmxTile * kAmxRows;
  Tiles::template store<0>(scores, kAmxRows);
  Tiles::template store<1>(scores + kDown, kAmxRows);
  if constexpr (kBlocks == 4) {
    Tiles::template store<2>(scores + 2 * kDown, kAmxRows);
    Tiles::template store<3>(scores + 3 * kDown, kAmxRows);
  }
}

template <class Tiles, class Between, class Ahead>
TREEMLA_AMX_INLINE void score_tiles(const uint16_t* key_tiles, int num_keys, const uint32_t* q, int num_rows,
                                    int d_qk, float* scores, Between& between, Ahead& ahead) {
  const int steps = d_qk / kAmxStep;
  const auto* keys = reinterpret_cast<const uint32_t*>(key_tiles);
  const auto at = [&](int key) { return keys + int64_t{key / kAmxTile} * steps * kAmxTileWords; };
  Tiles::fence();
  int j = 0;
  if (num_rows > kAmxTile) {
    for (; j < num_keys; j += 32) score_2x2<Tiles>(at(j), q, steps, scores + j * kAmxRows, between, ahead);
  } else {
    for (; j + 64 <= num_keys; j += 64)
      score_down<4, Tiles>(at(j), q, steps, scores + j * kAmxRows, between, ahead);
    if (j < num_keys) score_down<2, Tiles>(at(j), q, steps, scores + j * kAmxRows, between, ahead);
  }
  between.finish();
}

// 4 rows, 32 columns of out on their way to L1, which the next block will want.
TREEMLA_AMX_INLINE void fetch_out(const float* out, int64_t out_ld) {
  HWY_UNROLL(4)
  for (int r = 0; r < 4; ++r) {
    __builtin_prefetch(out + r * out_ld, 1, 3);
    __builtin_prefetch(out + r * out_ld + kAmxTile, 1, 3);
  }
}

// 32 rows, 32 columns of out.
template <class Tiles, class Ahead>
TREEMLA_AMX_INLINE void accumulate_2x2(const uint32_t* weights, const uint32_t* values, int steps, bool first,
                                       float* out, int64_t out_ld, Ahead& ahead) {
  constexpr int kNextRows = kAmxKeys / kAmxStep * kAmxTileWords;
  float* below = out + kAmxTile * out_ld;
  if (first) {
    zero_accumulators<Tiles>();
  } else {
    Tiles::template load<0>(out, out_ld);
    Tiles::template load<1>(out + kAmxTile, out_ld);
    Tiles::template load<2>(below, out_ld);
    Tiles::template load<3>(below + kAmxTile, out_ld);
  }
  for (int s = 0; s < steps; ++s, weights += kAmxTileWords, values += kAmxTileWords) {
    Tiles::template load<4>(weights);
    Tiles::template stream<6>(values);
    Tiles::template stream<7>(values + kAmxValuesStride);
    Tiles::template dot<0, 4, 6>();
    Tiles::template load<5>(weights + kNextRows);
    Tiles::template dot<1, 4, 7>();
    Tiles::template dot<2, 5, 6>();
    Tiles::template dot<3, 5, 7>();
    if (s < kAmxRows / 4) fetch_out(out + s * 4 * out_ld + 2 * kAmxTile, out_ld);
    ahead.step();
  }
  Tiles::template store<0>(out, out_ld);
  Tiles::template store<1>(out + kAmxTile, out_ld);
  Tiles::template store<2>(below, out_ld);
  Tiles::template store<3>(below + kAmxTile, out_ld);
}

// 16 rows, kBlocks (2 or 4) times 16 columns of out.
template <int kBlocks, class Tiles, class Ahead>
TREEMLA_AMX_INLINE void accumulate_across(const uint32_t* weights, const uint32_t* values, int steps,
                                          bool first, float* out, int64_t out_ld, Ahead& ahead) {
  if (first) {
    zero_accumulators<Tiles>();
  } else {
    Tiles::template load<0>(out, out_ld);
    Tiles::template load<1>(out + kAmxTile, out_ld);
    if constexpr (kBlocks == 4) {
      Tiles::template load<2>(out + 2 * kAmxTile, out_ld);
      Tiles::template load<3>(out + 3 * kAmxTile, out_ld);
    }
  }
  for (int s = 0; s < steps; ++s, weights += kAmxTileWords, values += kAmxTileWords) {
    Tiles::template load<4>(weights);
    Tiles::template stream<6>(values);
    Tiles::template dot<0, 4, 6>();
    Tiles::template stream<7>(values + kAmxValuesStride);
    Tiles::template dot<1, 4, 7>();
    if constexpr (kBlocks == 4) {
      Tiles::template stream<6>(values + 2 * kAmxValuesStride);
      Tiles::template dot<2, 4, 6>();
      Tiles::template stream<7>(values + 3 * kAmxValuesStride);
      Tiles::template dot<3, 4, 7>();
    }
    ahead.step();
  }
  Tiles::template store<0>(out, out_ld);
  Tiles::template store<1>(out + kAmxTile, out_ld);
  if constexpr (kBlocks == 4) {
    Tiles::template store<2>(out + 2 * kAmxTile, out_ld);
    Tiles::template store<3>(out + 3 * kAmxTile, out_ld);
  }
}

template <class Tiles, class Ahead>
TREEMLA_AMX_INLINE void accumulate_tiles(const uint32_t* weights, const uint32_t* values, int num_keys,
                                         int num_rows, int d_v, bool first, const float* alpha, float* out,
                                         int64_t out_ld, Ahead& ahead) {
  const int steps = num_keys / kAmxStep;
  if (alpha) {
    for (int r = 0; r < num_rows; ++r) {
      if (alpha[r] == 1.0f) continue;
      const __m512 a = _mm512_set1_ps(alpha[r]);
      float* row = out + r * out_ld;
      for (int c = 0; c < d_v; c += 16) _mm512_storeu_ps(row + c, _mm512_mul_ps(_mm512_loadu_ps(row + c), a));
    }
  }
  Tiles::fence();
  const auto at = [&](int column) { return values + int64_t{column / kAmxTile} * kAmxValuesStride; };
  int c = 0;
  if (num_rows > kAmxTile) {
    for (; c < d_v; c += 32) accumulate_2x2<Tiles>(weights, at(c), steps, first, out + c, out_ld, ahead);
    return;
  }
  for (; c + 64 <= d_v; c += 64)
    accumulate_across<4, Tiles>(weights, at(c), steps, first, out + c, out_ld, ahead);
  if (c < d_v) accumulate_across<2, Tiles>(weights, at(c), steps, first, out + c, out_ld, ahead);
}

TREEMLA_AMX_INLINE void mask_rows(float* scores, int begin, int end, int tree_begin,
                                  const uint32_t* const* bits, int num_rows) {
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int r = 0; r < num_rows; r += kAmxTile) {
    for (int j = begin; j < end;) {
      const int t = tree_begin + j - begin;
      alignas(64) uint32_t word[kAmxTile];
      for (int i = 0; i < kAmxTile; ++i) word[i] = bits[std::min(r + i, num_rows - 1)][t / 32];
      const __m512i words = _mm512_load_si512(word);
      for (int bit = t % 32; bit < 32 && j < end; ++bit, ++j) {
        const __mmask16 hide = _mm512_testn_epi32_mask(words, _mm512_set1_epi32(static_cast<int>(1u << bit)));
        _mm512_mask_storeu_ps(scores + j * kAmxRows + r, hide, hidden);
      }
    }
  }
}

TREEMLA_AMX_INLINE void pack_q_tiles(const uint16_t* const* rows, int num_rows, int width, uint32_t* q) {
  for (int r = 0; r < num_rows; r += kAmxTile) {
    for (int word = 0; word < width / 2; word += kAmxTile) {
      __m512i from[16];
      HWY_UNROLL(16)
      for (int i = 0; i < 16; ++i)
        from[i] = r + i < num_rows ? _mm512_loadu_si512(rows[r + i] + 2 * word) : _mm512_setzero_si512();
      transpose_words(from, q + amx_q_offset(r, word, width), kAmxTile);
    }
  }
}

// Two vectors of value words from 32 columns of a pair of keys.
template <bool kInterleaved>
TREEMLA_AMX_INLINE void value_words(__m512i even, __m512i odd, __m512i& lower, __m512i& upper) {
  if constexpr (kInterleaved) {  // a word already holds columns of both vectors
    constexpr __mmask32 kUpperHalves = 0xAAAAAAAA;
    lower = _mm512_mask_blend_epi16(kUpperHalves, even, _mm512_slli_epi32(odd, 16));
    upper = _mm512_mask_blend_epi16(kUpperHalves, _mm512_srli_epi32(even, 16), odd);
  } else {
    const auto join = [](__m256i a, __m256i b) {
      return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
    };
    lower = join(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd));
    upper = join(_mm512_extracti64x4_epi64(even, 1), _mm512_extracti64x4_epi64(odd, 1));
  }
}

// Keys j and j + 1 in one pass. It is bound by lines on their way to L2: 68 written a pair.
template <bool kInterleaved>
TREEMLA_AMX_INLINE void load_pair(const uint16_t* even, const uint16_t* odd, int j, int d_qk, int d_v,
                                  uint16_t* keys, uint32_t* values) {
  uint16_t* key_to = keys + amx_key_offset(j, 0, d_qk);
  uint32_t* value_to = values + amx_value_offset(j / 2, 0);
  for (int k = 0; k < d_qk; k += kAmxStep) {
    const __m512i a = _mm512_loadu_si512(even + k), b = _mm512_loadu_si512(odd + k);
    _mm512_storeu_si512(key_to, a);
    _mm512_storeu_si512(key_to + kAmxStep, b);
    key_to += 2 * kAmxTileWords;
    if (k >= d_v) continue;
    __m512i lower, upper;
    value_words<kInterleaved>(a, b, lower, upper);
    _mm512_storeu_si512(value_to, lower);
    _mm512_storeu_si512(value_to + kAmxValuesStride, upper);
    value_to += 2 * kAmxValuesStride;
  }
}

TREEMLA_AMX_INLINE void load_key_tiles(const uint16_t* const* rows, int num_keys, bool interleaved, int d_qk,
                                       int d_v, uint16_t* keys, uint32_t* values) {
  for (int j = 0; j < num_keys; j += 2) {
    if (interleaved)
      load_pair<true>(rows[j], rows[j + 1], j, d_qk, d_v, keys, values);
    else
      load_pair<false>(rows[j], rows[j + 1], j, d_qk, d_v, keys, values);
  }
}

}  // namespace
}  // namespace treemla
