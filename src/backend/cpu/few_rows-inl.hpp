// Both products of at most kFewRows rows. So few don't fill a vector of S^T, and a tile of keys widened to float32 for them
// would cost up to as much as the arithmetic: here columns lie along the vectors, and cached rows are widened in
// registers on their way into the products.
//
//   S[RR rows][KK keys]   += q[row][32 columns] * K[key][32 columns]    lanes summed at the end: a tree over four rows
//   O[RR rows][32 columns] = O * alpha + p[row] * V[key][32 columns]    a chain of FMAs over the tile's keys, as elsewhere
//
// Per block of 32 columns AVX-512 widens two vectors a key for 16 FMAs of eight rows: 4 instructions from rows in order, 2 from
// interleaved ones, which compete with the FMAs for two ports. So 80% and 89% of the FMA peak are what to expect from data in
// L1. q8_0 rows take 6, and some for the scale. Cached rows are read twice a tile, from L2.

#include <algorithm>
#include <type_traits>

#include "backend/cpu/simd_kernel.hpp"
#include "core/host_device.hpp"

#if defined(TREEMLA_BACKEND_CPU_FEW_ROWS_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEMLA_BACKEND_CPU_FEW_ROWS_INL_
#undef TREEMLA_BACKEND_CPU_FEW_ROWS_INL_
#else
#define TREEMLA_BACKEND_CPU_FEW_ROWS_INL_
#endif

#include "backend/cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace treemla {
namespace HWY_NAMESPACE {
namespace {

constexpr int kFewRows = 16;
constexpr int kFewBlock = kManyRegisters ? 8 : 4;  // rows that share a widened vector
constexpr int kColumnBlock = kInterleavedBlock, kHalfBlock = kColumnBlock / 2;

// Cached rows: the vectors of columns c and c + kHalfBlock of a key.
struct Float32Rows {
  const float* const* rows;
  HWY_INLINE void load(int key, int c, V& lower, V& upper) const {
    const D d;
    lower = hn::LoadU(d, rows[key] + c);
    upper = hn::LoadU(d, rows[key] + c + kHalfBlock);
  }
};
struct Bf16Rows {
  const uint16_t* const* rows;
  HWY_INLINE V widen(const uint16_t* from) const {
    const D d;
    const hn::Rebind<uint32_t, D> du32;
    const hn::Rebind<uint16_t, D> du16;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, from))));
  }
  HWY_INLINE void load(int key, int c, V& lower, V& upper) const {
    lower = widen(rows[key] + c);
    upper = widen(rows[key] + c + kHalfBlock);
  }
};
struct InterleavedRows {
  const uint16_t* const* rows;
  HWY_INLINE void load(int key, int c, V& lower, V& upper) const {
    widen_interleaved(rows[key], c, lower, upper);
  }
};
struct Fp16Rows {
  const uint16_t* const* rows;
  HWY_INLINE void load(int key, int c, V& lower, V& upper) const {
    const hn::Rebind<uint16_t, D> du16;
    lower = widen_f16(hn::LoadU(du16, rows[key] + c));
    upper = widen_f16(hn::LoadU(du16, rows[key] + c + kHalfBlock));
  }
};

struct Q8Rows {
  const uint16_t* const* rows;
  HWY_INLINE void load(int key, int c, V& lower, V& upper) const {
    const auto* block = reinterpret_cast<const int8_t*>(rows[key]) + c / kQ8Block * kQ8BlockBytes;
    const V scale = q8_scale_of(block);
    lower = widen_int8(block + 2 + c % kQ8Block, scale);
    upper = widen_int8(block + 2 + c % kQ8Block + kHalfBlock, scale);
  }
};

// to[i] = the sum of the lanes of v[i].
template <int N>
HWY_INLINE void sums_of_lanes(const V (&v)[N], float* to) {
  const D d;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (N % 4 == 0 && kLanes >= 4) {
    const hn::FixedTag<float, 4> d4;
    const hn::Repartition<double, D> pairs;
    alignas(64) float blocks[kLanes];
    HWY_UNROLL(2)
    for (int i = 0; i < N; i += 4) {  // every 128 bits: partial sums of v[i .. i + 3]
      const V a = hn::Add(hn::InterleaveLower(d, v[i], v[i + 1]), hn::InterleaveUpper(d, v[i], v[i + 1]));
      const V b =
          hn::Add(hn::InterleaveLower(d, v[i + 2], v[i + 3]), hn::InterleaveUpper(d, v[i + 2], v[i + 3]));
      const auto x = hn::BitCast(pairs, a), y = hn::BitCast(pairs, b);
      hn::Store(hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, x, y)),
                        hn::BitCast(d, hn::InterleaveUpper(pairs, x, y))),
                d, blocks);
      auto sum = hn::Load(d4, blocks);
      for (int k = 4; k < kLanes; k += 4) sum = hn::Add(sum, hn::Load(d4, blocks + k));
      hn::StoreU(sum, d4, to + i);
    }
    return;
  }
#endif
  HWY_UNROLL(4)
  for (int i = 0; i < N; ++i) to[i] = hn::GetLane(hn::SumOfLanes(d, v[i]));
}

// Scores of KK keys and RR rows; q: [RR, d_qk], to: [KK, kSimdRows].
template <int KK, int RR, class Keys>
HWY_INLINE void score_few_block(const Keys& keys, const int (&key)[KK], const float* HWY_RESTRICT q, int d_qk,
                                float* HWY_RESTRICT to) {
  const D d;
  V acc[KK][RR];
  HWY_UNROLL(16)
  for (int i = 0; i < KK; ++i) {
    HWY_UNROLL(16)
    for (int r = 0; r < RR; ++r) acc[i][r] = hn::Zero(d);
  }
  for (int block = 0; block < d_qk; block += kColumnBlock) {
    HWY_UNROLL(1)
    for (int c = block; c < block + kHalfBlock; c += kLanes) {
      V lower[KK], upper[KK];
      HWY_UNROLL(16)
      for (int i = 0; i < KK; ++i) keys.load(key[i], c, lower[i], upper[i]);
      HWY_UNROLL(16)
      for (int r = 0; r < RR; ++r) {
        const V ql = hn::LoadU(d, q + r * d_qk + c), qu = hn::LoadU(d, q + r * d_qk + c + kHalfBlock);
        HWY_UNROLL(16)
        for (int i = 0; i < KK; ++i) {
          acc[i][r] = hn::MulAdd(lower[i], ql, acc[i][r]);
          acc[i][r] = hn::MulAdd(upper[i], qu, acc[i][r]);
        }
      }
    }
  }
  HWY_UNROLL(16)
  for (int i = 0; i < KK; ++i) sums_of_lanes(acc[i], to + i * kSimdRows);
}

template <int RR, class Keys, class Ahead>
HWY_NOINLINE void score_few_keys(const Keys& keys, int num_keys, const float* q, int d_qk, float* scores,
                                 Ahead& ahead) {
  constexpr int KK = 2;
  for (int j = 0; j < num_keys; j += KK) {  // scores past num_keys are not looked at
    const int key[KK] = {j, std::min(j + 1, num_keys - 1)};
    ahead.step();
    score_few_block<KK, RR>(keys, key, q, d_qk, scores + j * kSimdRows);
  }
}

template <int RR, class Keys, class Ahead>
HWY_NOINLINE void accumulate_few_keys(const Keys& keys, int num_keys, const float* HWY_RESTRICT p, int d_v,
                                      const float* alpha, float* HWY_RESTRICT out, int64_t out_ld,
                                      Ahead& ahead) {
  const D d;
  for (int block = 0; block < d_v; block += kColumnBlock) {
    ahead.step();
    for (int c = block; c < block + kHalfBlock; c += kLanes) {
      V lower[RR], upper[RR];
      HWY_UNROLL(16)
      for (int r = 0; r < RR; ++r) lower[r] = upper[r] = hn::Zero(d);
      for (int j = 0; j < num_keys; ++j) {
        V vl, vu;
        keys.load(j, c, vl, vu);
        HWY_UNROLL(16)
        for (int r = 0; r < RR; ++r) {
          const V w = hn::Set(d, p[j * kSimdRows + r]);
          lower[r] = hn::MulAdd(w, vl, lower[r]);
          upper[r] = hn::MulAdd(w, vu, upper[r]);
        }
      }
      HWY_UNROLL(16)
      for (int r = 0; r < RR; ++r) {
        float *to_lower = out + r * out_ld + c, *to_upper = to_lower + kHalfBlock;
        if (alpha) {
          const V a = hn::Set(d, alpha[r]);
          lower[r] = hn::MulAdd(hn::Load(d, to_lower), a, lower[r]);
          upper[r] = hn::MulAdd(hn::Load(d, to_upper), a, upper[r]);
        }
        hn::Store(lower[r], d, to_lower);
        hn::Store(upper[r], d, to_upper);
      }
    }
  }
}

// fn(first row, number of rows as a constant) for blocks of 1, 2, 4 or, with registers for it, 8 rows. The last block has
// room for more rows than there are: theirs hold numbers that nobody looks at.
template <class Fn>
HWY_INLINE void few_row_blocks(int m, Fn fn) {
  for (int r = 0; r < m; r += kFewBlock) {
    const int left = m - r;
    if (left > 4 && kFewBlock > 4)
      fn(r, std::integral_constant<int, kFewBlock>{});
    else if (left > 2)
      fn(r, std::integral_constant<int, 4>{});
    else if (left == 2)
      fn(r, std::integral_constant<int, 2>{});
    else
      fn(r, std::integral_constant<int, 1>{});
  }
}
constexpr int num_few_blocks(int m) { return ceil_div(m, kFewBlock); }

// scores [kSimdKeys, kSimdRows] of m rows q [m rounded up to kFewRows, d_qk].
template <class Keys, class Ahead>
HWY_INLINE void score_few(const Keys& keys, int num_keys, const float* q, int m, int d_qk, float* scores,
                          Ahead& ahead) {
  few_row_blocks(m, [&](int r, auto size) HWY_ATTR {
    score_few_keys<decltype(size)::value>(keys, num_keys, q + r * d_qk, d_qk, scores + r, ahead);
  });
}

// out [m rounded up to kFewRows, out_ld] = out * alpha + p^T v; alpha null: p^T v.
template <class Keys, class Ahead>
HWY_INLINE void accumulate_few(const Keys& keys, int num_keys, const float* p, int m, int d_v,
                               const float* alpha, float* out, int64_t out_ld, Ahead& ahead) {
  few_row_blocks(m, [&](int r, auto size) HWY_ATTR {
    accumulate_few_keys<decltype(size)::value>(keys, num_keys, p + r, d_v, alpha ? alpha + r : nullptr,
                                               out + r * out_ld, out_ld, ahead);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace treemla
HWY_AFTER_NAMESPACE();

#endif  // TREEMLA_BACKEND_CPU_FEW_ROWS_INL_
