// The products on vdpbf16ps. One register block serves both: MR broadcast words times NV vectors of words,
// MR * NV accumulators, 24 at most of 32 registers.
//
//   S^T[key][16 rows]  += K[key][word k] * Q^T[word k][16 rows]        K is read where it lies: a cached row
//                                                                       already is words of column pairs
//   O[row][16 columns] += P[row][word j] * V[word j][16 columns]       word j: keys 2j and 2j + 1
//
// Per step of k, 6 x 4 blocks load 4 vectors and broadcast 6 words for 24 instructions, so that a CPU that does
// one a cycle is never short of loads. In L1: a slice of Q^T of kDepth words (18 KB), or of V the 64 columns of a
// panel (8 KB) and of P a group's words (8 KB). A tile's V (64 KB), a group's Q^T (74 KB) and O (128 KB) stream
// from L2.
//
// Of a few rows the first product has columns along the vectors instead: no lane is empty, and 16 chains end in one
// tree of 45 instructions.
//
// Every accumulator is one chain over k, restarted every kDepth words: a row's bits depend neither on its
// neighbours nor on MR and NV, few rows apart. The instruction rounds each product and sum to nearest and takes subnormals as 0.

#include "backend/cpu/bf16_dot.hpp"

#include <hwy/base.h>

// Intrinsics inside functions that are compiled for more than the rest of the program.
#if HWY_ARCH_X86_64 && (HWY_COMPILER_GCC_ACTUAL >= 1000 || HWY_COMPILER_CLANG >= 900)
#define TREEMLA_BF16_DOT 1
#include <cpuid.h>
#include <immintrin.h>
#if HWY_COMPILER_GCC_ACTUAL && !HWY_COMPILER_CLANG
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC 12: of _mm512_undefined_epi32() in its own header
#endif
#else
#define TREEMLA_BF16_DOT 0
#endif

#include <algorithm>
#include <cstring>

#include "backend/cpu/simd_kernel.hpp"
#include "core/host_device.hpp"

#if TREEMLA_BF16_DOT

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#include "backend/cpu/avx512_transpose-inl.hpp"

namespace treemla {
namespace {

constexpr int kLanes = 16;  // floats or words a vector
constexpr int kDepth = 72;  // words of a chain in the first product: a quarter of 576 columns
constexpr int kPanel = kBf16DotPanel;
constexpr int kPairs = kSimdKeys / 2;  // words a column of V or a row of P has
static_assert(kSimdRows == 4 * kLanes && kSimdKeys % 2 == 0);

// Broadcast operands of a block: word k of its row i.
template <int MR>
struct KeyWords {
  const uint16_t* row[MR];
  HWY_INLINE __m512i at(int i, int k) const {
    int32_t word;
    std::memcpy(&word, row[i] + 2 * k, sizeof word);
    return _mm512_set1_epi32(word);
  }
};
struct WeightWords {
  const uint32_t* p;
  HWY_INLINE __m512i at(int i, int k) const {
    return _mm512_set1_epi32(static_cast<int32_t>(p[k * kSimdRows + i]));
  }
};

// acc[i][v] = sum over k < depth of a(i, k) . b[k * ldb + v * kLanes]
template <int MR, int NV, class A>
HWY_INLINE void dot_block(const A& a, const uint32_t* HWY_RESTRICT b, int64_t ldb, int depth,
                          __m512 (&acc)[MR][NV]) {
  HWY_UNROLL(16)
  for (int i = 0; i < MR; ++i) {
    HWY_UNROLL(16)
    for (int v = 0; v < NV; ++v) acc[i][v] = _mm512_setzero_ps();
  }
  for (int k = 0; k < depth; ++k) {
    __m512i bv[NV];
    HWY_UNROLL(16)
    for (int v = 0; v < NV; ++v) bv[v] = _mm512_loadu_si512(b + v * kLanes);
    HWY_UNROLL(16)
    for (int i = 0; i < MR; ++i) {
      const __m512i av = a.at(i, k);
      HWY_UNROLL(16)
      for (int v = 0; v < NV; ++v) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], (__m512bh)av, (__m512bh)bv[v]);
    }
    b += ldb;
  }
}

template <int MR, int NV>
HWY_INLINE void score_block(const uint16_t* const* keys, int word, const uint32_t* q, int depth,
                            float* scores) {
  KeyWords<MR> a;
  HWY_UNROLL(16)
  for (int i = 0; i < MR; ++i) a.row[i] = keys[i] + 2 * word;
  __m512 acc[MR][NV];
  dot_block(a, q, kSimdRows, depth, acc);
  HWY_UNROLL(16)
  for (int i = 0; i < MR; ++i) {
    HWY_UNROLL(16)
    for (int v = 0; v < NV; ++v) {
      float* to = scores + i * kSimdRows + v * kLanes;
      _mm512_storeu_ps(to, word == 0 ? acc[i][v] : _mm512_add_ps(_mm512_loadu_ps(to), acc[i][v]));
    }
  }
}

// The block of MR or, at the end of the keys, fewer.
template <int MR, int NV>
HWY_INLINE void score_at_most(int n, const uint16_t* const* keys, int word, const uint32_t* q, int depth,
                              float* scores) {
  if constexpr (MR > 1) {
    if (n < MR) return score_at_most<MR - 1, NV>(n, keys, word, q, depth, scores);
  }
  score_block<MR, NV>(keys, word, q, depth, scores);
}

template <int MR, int NV>
HWY_NOINLINE void score_rows(const uint16_t* const* keys, int num_keys, const uint32_t* q, int d_qk,
                             float* scores) {
  const int words = d_qk / 2;
  for (int word = 0; word < words; word += kDepth) {
    const int depth = std::min(kDepth, words - word);
    for (int j = 0; j < num_keys; j += MR)
      score_at_most<MR, NV>(num_keys - j, keys + j, word, q + word * kSimdRows, depth,
                            scores + j * kSimdRows);
  }
}

template <int MR, int NV>
HWY_INLINE void accumulate_block(const uint32_t* p, const uint32_t* v, int pairs, const float* alpha,
                                 float* out, int64_t out_ld) {
  __m512 acc[MR][NV];
  dot_block(WeightWords{p}, v, kPanel, pairs, acc);
  HWY_UNROLL(16)
  for (int i = 0; i < MR; ++i) {
    HWY_UNROLL(16)
    for (int c = 0; c < NV; ++c) {
      float* to = out + i * out_ld + c * kLanes;
      _mm512_storeu_ps(
          to, alpha ? _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(alpha[i]), acc[i][c]) : acc[i][c]);
    }
  }
}

template <int MR, int NV>
HWY_INLINE void accumulate_at_most(int n, const uint32_t* p, const uint32_t* v, int pairs, const float* alpha,
                                   float* out, int64_t out_ld) {
  if constexpr (MR > 1) {
    if (n < MR) return accumulate_at_most<MR - 1, NV>(n, p, v, pairs, alpha, out, out_ld);
  }
  accumulate_block<MR, NV>(p, v, pairs, alpha, out, out_ld);
}

template <int MR, int NV>
HWY_NOINLINE void accumulate_panel(const uint32_t* p, const uint32_t* v, int pairs, int num_rows,
                                   const float* alpha, float* out, int64_t out_ld) {
  // Blocks of equal size: 8 rows are 4 and 4, since 6 and 2 would wait for the latency of 8 accumulators.
  const int step = ceil_div(num_rows, ceil_div(num_rows, MR));
  for (int r = 0; r < num_rows; r += step)
    accumulate_at_most<MR, NV>(std::min(step, num_rows - r), p + r, v, pairs, alpha ? alpha + r : nullptr,
                               out + r * out_ld, out_ld);
}

// Lanes 0, n, 1, n + 1, ... from `first` on, of vectors with n lanes of 16 bits.
HWY_INLINE __m512i interleave_index(int first, int n) {
  alignas(64) uint16_t index[32];
  for (int i = 0; i < 16; ++i) {
    index[2 * i] = static_cast<uint16_t>(first + i);
    index[2 * i + 1] = static_cast<uint16_t>(first + i + n);
  }
  return _mm512_load_si512(index);
}

void pack_q(const uint16_t* const* rows, int num_rows, int width, uint32_t* to) {
  for (int r = 0; r < round_up(num_rows, kLanes); r += kLanes) {
    for (int word = 0; word < width / 2; word += kLanes) {
      __m512i from[16];
      HWY_UNROLL(16)
      for (int i = 0; i < 16; ++i)
        from[i] = r + i < num_rows ? _mm512_loadu_si512(rows[r + i] + 2 * word) : _mm512_setzero_si512();
      transpose_words(from, to + static_cast<int64_t>(word) * kSimdRows + r, kSimdRows);
    }
  }
}

void score(const uint16_t* const* keys, int num_keys, const uint32_t* q, int num_rows, int d_qk,
           float* scores) {
  switch (ceil_div(num_rows, kLanes)) {
    case 1:
      return score_rows<8, 1>(keys, num_keys, q, d_qk, scores);
    case 2:
      return score_rows<8, 2>(keys, num_keys, q, d_qk, scores);
    case 3:
      return score_rows<8, 3>(keys, num_keys, q, d_qk, scores);
    default:
      return score_rows<6, 4>(keys, num_keys, q, d_qk, scores);
  }
}

// Lane 4 * g + i of the result: the sum of the lanes of acc[g][i].
HWY_INLINE __m512 sums_of_lanes(const __m512 (&acc)[4][4]) {
  __m512 four[4];  // four[g]: partial sums of acc[g][0..3] in every 128 bits
  HWY_UNROLL(16)
  for (int g = 0; g < 4; ++g) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(acc[g][0], acc[g][1]),
                                   _mm512_unpackhi_ps(acc[g][0], acc[g][1])),
                 b = _mm512_add_ps(_mm512_unpacklo_ps(acc[g][2], acc[g][3]),
                                   _mm512_unpackhi_ps(acc[g][2], acc[g][3]));
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    four[g] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x88),
                                 _mm512_shuffle_f32x4(four[0], four[1], 0xDD)),
               b = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x88),
                                 _mm512_shuffle_f32x4(four[2], four[3], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

void score_few(const uint16_t* const* keys, int num_keys, const uint16_t* const* rows, int num_rows, int d_qk,
               float* scores) {
  for (int j = 0; j < num_keys; j += 4) {  // four keys meet all rows while they are in L1
    const uint16_t* key[4];                // the last one again past the end
    for (int i = 0; i < 4; ++i) key[i] = keys[std::min(j + i, num_keys - 1)];
    for (int r = 0; r < num_rows; r += 4) {
      const uint16_t* q[4];
      for (int i = 0; i < 4; ++i) q[i] = rows[std::min(r + i, num_rows - 1)];
      __m512 acc[4][4];
      HWY_UNROLL(16)
      for (int i = 0; i < 4; ++i) {
        HWY_UNROLL(16)
        for (int v = 0; v < 4; ++v) acc[i][v] = _mm512_setzero_ps();
      }
      for (int k = 0; k < d_qk; k += 2 * kLanes) {
        __m512i qv[4];
        HWY_UNROLL(16)
        for (int v = 0; v < 4; ++v) qv[v] = _mm512_loadu_si512(q[v] + k);
        HWY_UNROLL(16)
        for (int i = 0; i < 4; ++i) {
          const __m512i kv = _mm512_loadu_si512(key[i] + k);
          HWY_UNROLL(16)
          for (int v = 0; v < 4; ++v) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], (__m512bh)kv, (__m512bh)qv[v]);
        }
      }
      const __m512 sums = sums_of_lanes(acc);
      float* to = scores + j * kSimdRows + r;
      _mm_storeu_ps(to, _mm512_castps512_ps128(sums));
      _mm_storeu_ps(to + kSimdRows, _mm512_extractf32x4_ps(sums, 1));
      _mm_storeu_ps(to + 2 * kSimdRows, _mm512_extractf32x4_ps(sums, 2));
      _mm_storeu_ps(to + 3 * kSimdRows, _mm512_extractf32x4_ps(sums, 3));
    }
  }
}

void pack_p(const float* weights, int num_keys, int num_rows, uint32_t* to) {
  const __m512i pairs = interleave_index(0, 16);
  for (int j = 0; j < num_keys / 2; ++j) {
    for (int r = 0; r < num_rows; r += kLanes) {
      const float* from = weights + 2 * j * kSimdRows + r;
      const __m512i both =
          (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + kSimdRows), _mm512_loadu_ps(from));
      _mm512_storeu_si512(to + j * kSimdRows + r, _mm512_permutexvar_epi16(pairs, both));
    }
  }
}

// Two vectors of value words of a pair of keys: columns c .. c + 15 and c + 16 .. c + 31.
struct InOrder {
  __m512i lower_index, upper_index;
  // Spelt out: a constructor of the compiler's own is not compiled for these instructions.
  HWY_INLINE InOrder() : lower_index(interleave_index(0, 32)), upper_index(interleave_index(16, 32)) {}
  HWY_INLINE void values(__m512i even, __m512i odd, __m512i& lower, __m512i& upper) const {
    lower = _mm512_permutex2var_epi16(even, lower_index, odd);
    upper = _mm512_permutex2var_epi16(even, upper_index, odd);
  }
};
// A word of an interleaved row already holds columns of both: no permutation, two cheap instructions a vector.
struct Interleaved {
  HWY_INLINE void values(__m512i even, __m512i odd, __m512i& lower, __m512i& upper) const {
    constexpr __mmask32 kUpperHalves = 0xAAAAAAAA;
    lower = _mm512_mask_blend_epi16(kUpperHalves, even, _mm512_slli_epi32(odd, 16));
    upper = _mm512_mask_blend_epi16(kUpperHalves, _mm512_srli_epi32(even, 16), odd);
  }
};

template <class Order>
void pack_v(const uint16_t* const* keys, int num_keys, int d_v, uint32_t* to) {
  const Order order;
  for (int j = 0; j < num_keys / 2; ++j) {
    const uint16_t *even = keys[2 * j], *odd = keys[2 * j + 1];
    for (int c = 0; c < d_v; c += 2 * kLanes) {
      __m512i lower, upper;
      order.values(_mm512_loadu_si512(even + c), _mm512_loadu_si512(odd + c), lower, upper);
      uint32_t* at = to + c / kPanel * (kPairs * kPanel) + j * kPanel + c % kPanel;
      _mm512_storeu_si512(at, lower);
      _mm512_storeu_si512(at + kLanes, upper);
    }
  }
}

template <int MR, class Order>
HWY_INLINE void accumulate_few_rows(const Order& order, const uint32_t* p, const uint16_t* const* keys,
                                    int pairs, int begin, int end, const float* alpha, float* out,
                                    int64_t out_ld) {
  for (int c = begin; c < end; c += 2 * kLanes) {
    __m512 acc[MR][2];
    HWY_UNROLL(16)
    for (int r = 0; r < MR; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (int j = 0; j < pairs; ++j) {
      __m512i v[2];
      order.values(_mm512_loadu_si512(keys[2 * j] + c), _mm512_loadu_si512(keys[2 * j + 1] + c), v[0], v[1]);
      HWY_UNROLL(16)
      for (int r = 0; r < MR; ++r) {
        const __m512i w = WeightWords{p}.at(r, j);
        acc[r][0] = _mm512_dpbf16_ps(acc[r][0], (__m512bh)w, (__m512bh)v[0]);
        acc[r][1] = _mm512_dpbf16_ps(acc[r][1], (__m512bh)w, (__m512bh)v[1]);
      }
    }
    HWY_UNROLL(16)
    for (int r = 0; r < MR; ++r) {
      HWY_UNROLL(2)
      for (int i = 0; i < 2; ++i) {
        float* to = out + r * out_ld + c + i * kLanes;
        _mm512_storeu_ps(to, alpha ? _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(alpha[r]), acc[r][i])
                                   : acc[r][i]);
      }
    }
  }
}

// MR rows or, at the end, fewer.
template <int MR, class Order>
HWY_NOINLINE void accumulate_few_at_most(int n, const Order& order, const uint32_t* p,
                                         const uint16_t* const* keys, int pairs, int begin, int end,
                                         const float* alpha, float* out, int64_t out_ld) {
  if constexpr (MR > 1) {
    if (n < MR)
      return accumulate_few_at_most<MR - 1>(n, order, p, keys, pairs, begin, end, alpha, out, out_ld);
  }
  accumulate_few_rows<MR>(order, p, keys, pairs, begin, end, alpha, out, out_ld);
}

template <class Order>
void accumulate_few(const uint32_t* p, const uint16_t* const* keys, int num_keys, int num_rows, int begin,
                    int end, const float* alpha, float* out, int64_t out_ld) {
  constexpr int kMost = 8;  // 16 accumulators hide the latency and 32 registers hold the rest
  const Order order;
  for (int r = 0; r < num_rows; r += kMost)
    accumulate_few_at_most<kMost>(std::min(kMost, num_rows - r), order, p + r, keys, num_keys / 2, begin, end,
                                  alpha ? alpha + r : nullptr, out + r * out_ld, out_ld);
}

void accumulate(const uint32_t* p, const uint32_t* v, int num_keys, int num_rows, int d_v, const float* alpha,
                float* out, int64_t out_ld) {
  for (int c = 0; c < d_v; c += kPanel) {
    const uint32_t* panel = v + c / kPanel * (kPairs * kPanel);
    if (d_v - c >= kPanel)
      accumulate_panel<6, 4>(p, panel, num_keys / 2, num_rows, alpha, out + c, out_ld);
    else  // 32 columns
      accumulate_panel<6, 2>(p, panel, num_keys / 2, num_rows, alpha, out + c, out_ld);
  }
}

}  // namespace
}  // namespace treemla
HWY_POP_ATTRIBUTES

#endif  // TREEMLA_BF16_DOT

namespace treemla {

#if TREEMLA_BF16_DOT

bool bf16_dot_available() {
  // Its own bit, and the operating system's consent to 512-bit registers, which Highway's AVX3 stands for.
  static const bool available = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1) && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }();
  return available;
}

// AMD's cores (Zen 4 on) start as many vdpbf16ps a cycle as FMAs, so that it does twice the work, as measured. Intel's split it
// into many steps: on a Xeon of family 6 model 207 it does half of the work of FMA (88 against 178 GFLOP/s a core),
// and float32 is the faster way.
bool bf16_dot_preferred() {
  static const bool amd = __builtin_cpu_is("amd");
  return bf16_dot_available() && amd;
}

void bf16_dot_pack_q(const uint16_t* const* rows, int num_rows, int width, uint32_t* to) {
  pack_q(rows, num_rows, width, to);
}
void bf16_dot_pack_v(const uint16_t* const* keys, int num_keys, int d_v, uint32_t* to) {
  pack_v<InOrder>(keys, num_keys, d_v, to);
}
void bf16_dot_pack_interleaved_v(const uint16_t* const* keys, int num_keys, int d_v, uint32_t* to) {
  pack_v<Interleaved>(keys, num_keys, d_v, to);
}
void bf16_dot_score(const uint16_t* const* keys, int num_keys, const uint32_t* q, int num_rows, int d_qk,
                    float* scores) {
  score(keys, num_keys, q, num_rows, d_qk, scores);
}
void bf16_dot_score_few(const uint16_t* const* keys, int num_keys, const uint16_t* const* rows, int num_rows,
                        int d_qk, float* scores) {
  score_few(keys, num_keys, rows, num_rows, d_qk, scores);
}
void bf16_dot_pack_p(const float* weights, int num_keys, int num_rows, uint32_t* to) {
  pack_p(weights, num_keys, num_rows, to);
}
void bf16_dot_accumulate(const uint32_t* p, const uint32_t* v, int num_keys, int num_rows, int d_v,
                         const float* alpha, float* out, int64_t out_ld) {
  accumulate(p, v, num_keys, num_rows, d_v, alpha, out, out_ld);
}

void bf16_dot_accumulate_few(const uint32_t* p, const uint16_t* const* keys, bool interleaved, int num_keys,
                             int num_rows, int begin, int end, const float* alpha, float* out,
                             int64_t out_ld) {
  (interleaved ? accumulate_few<Interleaved> : accumulate_few<InOrder>)(p, keys, num_keys, num_rows, begin,
                                                                        end, alpha, out, out_ld);
}

#else

bool bf16_dot_available() { return false; }
bool bf16_dot_preferred() { return false; }
void bf16_dot_pack_q(const uint16_t* const*, int, int, uint32_t*) {}
void bf16_dot_pack_v(const uint16_t* const*, int, int, uint32_t*) {}
void bf16_dot_pack_interleaved_v(const uint16_t* const*, int, int, uint32_t*) {}
void bf16_dot_score(const uint16_t* const*, int, const uint32_t*, int, int, float*) {}
void bf16_dot_score_few(const uint16_t* const*, int, const uint16_t* const*, int, int, float*) {}
void bf16_dot_pack_p(const float*, int, int, uint32_t*) {}
void bf16_dot_accumulate(const uint32_t*, const uint32_t*, int, int, int, const float*, float*, int64_t) {}
void bf16_dot_accumulate_few(const uint32_t*, const uint16_t* const*, bool, int, int, int, int, const float*,
                             float*, int64_t) {}

#endif

}  // namespace treemla
