// The CPU flash kernel. Symbols as in treemla/problem.hpp; a row is a (node, head) pair.
//
//   for each tile of 64 keys:
//     T[64][d_qk]      <- the cached rows, widened to float32, once for all rows of the item; float32 rows that lie on
//                         whole vectors are read in place. The next tile's rows are prefetched meanwhile
//     for each group of 64 rows:
//       S^T[64 keys][64 rows]  = T Q^T          rows along vectors: the softmax needs no horizontal step
//       m, l, P^T              = online softmax of S^T
//       O[64 rows][d_v]        = O * alpha + P T[:, 0:d_v]
//
// Both products run through one register-blocked micro-kernel: MR broadcasts times NV vectors, MR * NV
// accumulators. Neither operand of the second product is moved: V is the first d_v columns of T, and P^T is
// read by broadcasts.
//
//   T 147 KB and a group's Q^T 147 KB and O 128 KB stream from L2; what the micro-kernel reuses stays in L1:
//   a 96-deep slice of Q^T (24 KB) in the first product, a 32-wide panel of T (8 KB) and P^T (16 KB) in the second.
//
// Where bf16 dot products are the faster instruction, and q and the cache are bf16, both products go to bf16_dot.cpp:
// T is not made, S^T comes from the cached rows themselves, V is the tile's rows two keys a word, and P^T is rounded
// to bf16. Mask, softmax and output are the same.
//
// With AMX both products and the softmax between them go to amx.cpp, with tiles of up to 256 keys and groups of 32 rows, few rows
// too: AmxWorker.
//
// A group of at most 16 rows goes to few_rows-inl.hpp, with the columns along the vectors. If it is alone and the cache has 16
// bits, or is q8_0 and the rows are one block, T is not made either: cached rows are widened in registers.
//
// Otherwise a row's arithmetic does not depend on its neighbours, on MR or on NV: every accumulator is one chain of
// FMAs over k, restarted every kDepth terms. So any tiling of rows gives equal bits.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/simd_kernel.cpp"
// AVX3_DL adds nothing that this code uses, SSSE3 little: fewer copies, shorter builds.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#include <hwy/foreach_target.h>  // IWYU pragma: keep
// clang-format off: must come after foreach_target
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/bf16_dot.hpp"
#include "backend/cpu/fetch_ahead.hpp"
#include "backend/cpu/few_rows-inl.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "backend/cpu/widen-inl.hpp"
#include "core/host_device.hpp"
#include "core/kv_row.hpp"

HWY_BEFORE_NAMESPACE();
namespace treemla {
namespace HWY_NAMESPACE {
namespace {

// Accumulators that fit the register file next to the operands: 24 of 32, or 12 of 16.
constexpr int kVecs = kManyRegisters || kLanes == 1 ? 4 : 2, kAccs = kManyRegisters ? 24 : 12;
constexpr int kPanel = kVecs * kLanes;  // rows (or columns) that one micro-kernel call spans
// The second product's panels are narrower and its blocks higher: what a panel of V takes in L1 then leaves room for P and O, wherever
// in the pool its rows happen to lie.
constexpr int kOutVecs = 2;
constexpr int kDepth = 96;                                  // terms of a chain of FMAs in the first product
static_assert(kSimdRows % kPanel == 0 && kPanel % 4 == 0);  // load_q() moves four rows of a panel at a time

// e^x for x <= 0, within 2 ulp: 2^n e^r with |r| <= ln(2) / 2, the polynomial that of Cephes' expf. Adding 1.5 * 2^23
// rounds x / ln(2) to n and leaves n in the low bits, from where it moves to the exponent. 0 where the result would be
// subnormal; NaN stays.
HWY_INLINE V exp_to_one(V x) {
  const D d;
  const hn::RebindToSigned<D> di;
  const V magic = hn::Set(d, 0x1.8p23f);
  const V shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic), n = hn::Sub(shifted, magic);
  const V r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x));
  V y = hn::MulAdd(hn::Set(d, 1.9875691500e-4f), r, hn::Set(d, 1.3981999507e-3f));
  y = hn::MulAdd(y, r, hn::Set(d, 8.3334519073e-3f));
  y = hn::MulAdd(y, r, hn::Set(d, 4.1665795894e-2f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.6666665459e-1f));
  y = hn::MulAdd(y, r, hn::Set(d, 5.0000001201e-1f));
  y = hn::Add(hn::MulAdd(y, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  y = hn::BitCast(d, hn::Add(hn::BitCast(di, y), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
  y = hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.3365f)), hn::Zero(d), y);
  return hn::IfThenElse(hn::IsNaN(x), x, y);  // whose payload may have got into the exponent
}

// An operand of the products: row i, term k at p[i + k * kTerm].
template <int kTerm>
struct Strided {
  static constexpr int kMostRows = 12;  // of a block
  const float* p;
  HWY_INLINE Strided from(int i) const { return {p + i}; }
  template <int MR>
  HWY_INLINE const Strided& block() const {
    return *this;
  }
  HWY_INLINE float at(int i, int64_t k) const { return p[i + k * kTerm]; }
  HWY_INLINE const float* vectors(int64_t k) const { return p + k * kTerm; }
};

// One whose rows lie anywhere: row i, term k at rows[i][first + k]. As the right-hand operand, a row is a term.
struct Gathered {
  static constexpr int kMostRows = 8;  // more would need more pointers than there are registers
  const float* const* rows;
  int64_t first;
  HWY_INLINE Gathered from(int i) const { return {rows + i, first}; }
  template <int MR>
  struct Block {  // its pointers in registers
    const float* row[MR];
    HWY_INLINE float at(int i, int64_t k) const { return row[i][k]; }
  };
  template <int MR>
  HWY_INLINE Block<MR> block() const {
    Block<MR> b;
    HWY_UNROLL(16)
    for (int i = 0; i < MR; ++i) b.row[i] = rows[i] + first;
    return b;
  }
  HWY_INLINE const float* vectors(int64_t k) const { return rows[k] + first; }
};

// acc[i][v] = sum_k a(i, k) * b(k)[v * kLanes], then `done(i, acc[i])`.
template <int MR, int NV, class A, class B, class Done>
HWY_INLINE void micro_kernel(const A& operand, const B& b, int depth, Done done) {
  const D d;
  const auto a = operand.template block<MR>();
  V acc[MR][NV];
  // The first term starts the sums: zeros would be moved into every accumulator, by the ports that multiply.
  const auto term = [&](int64_t k, auto first) HWY_ATTR {
    V bv[NV];
    HWY_UNROLL(16)
    for (int v = 0; v < NV; ++v) bv[v] = hn::LoadU(d, b.vectors(k) + v * kLanes);
    HWY_UNROLL(16)
    for (int i = 0; i < MR; ++i) {
      const V av = hn::Set(d, a.at(i, k));
      HWY_UNROLL(16)
      for (int v = 0; v < NV; ++v)
        acc[i][v] = decltype(first)::value ? hn::Mul(av, bv[v]) : hn::MulAdd(av, bv[v], acc[i][v]);
    }
  };
  term(0, std::true_type());
  for (int64_t k = 1; k < depth; ++k) term(k, std::false_type());
  HWY_UNROLL(16)
  for (int i = 0; i < MR; ++i) done(i, acc[i]);
}

// What a product is added to: nothing, c, or c * alpha[i].
enum class Onto { kNothing, kSum, kScaledSum };

template <int MR, int NV, Onto kOnto, class A, class B>
HWY_INLINE void product_block(const A& a, const B& b, int depth, float* c, int64_t ldc, const float* alpha) {
  const D d;
  micro_kernel<MR, NV>(a, b, depth, [&](int i, const V(&acc)[NV]) HWY_ATTR {
    float* to = c + i * ldc;
    const V scale = hn::Set(d, kOnto == Onto::kScaledSum ? alpha[i] : 1.0f);
    HWY_UNROLL(16)
    for (int v = 0; v < NV; ++v) {
      V sum = acc[v];
      if constexpr (kOnto == Onto::kSum) sum = hn::Add(hn::Load(d, to + v * kLanes), sum);
      if constexpr (kOnto == Onto::kScaledSum) sum = hn::MulAdd(hn::Load(d, to + v * kLanes), scale, sum);
      hn::Store(sum, d, to + v * kLanes);
    }
  });
}

// For m rows in blocks of at most kAccs / NV.
template <int NV, Onto kOnto, class A, class B>
HWY_NOINLINE void product_rows(int m, const A& a, const B& b, int depth, float* c, int64_t ldc,
                               const float* alpha, FetchAhead& ahead) {
  constexpr int kBlock = std::min(A::kMostRows, kAccs / NV);
  int i = 0;
  auto block = [&](auto size) HWY_ATTR {
    constexpr int MR = decltype(size)::value;
    for (; m - i >= MR; i += MR) {
      ahead.step();
      product_block<MR, NV, kOnto>(a.from(i), b, depth, c + i * ldc, ldc, alpha ? alpha + i : nullptr);
    }
  };
  block(std::integral_constant<int, kBlock>{});
  if constexpr (kBlock > 8) block(std::integral_constant<int, 8>{});
  if constexpr (kBlock > 6) block(std::integral_constant<int, 6>{});
  if constexpr (kBlock > 4) block(std::integral_constant<int, 4>{});
  if constexpr (kBlock > 2) block(std::integral_constant<int, 2>{});
  block(std::integral_constant<int, 1>{});
}

// One panel of `vecs` vectors, kMost at most.
template <int kMost, Onto kOnto, class A, class B>
void product(int vecs, int m, const A& a, const B& b, int depth, float* c, int64_t ldc, const float* alpha,
             FetchAhead& ahead) {
  if (vecs == 1) return product_rows<1, kOnto>(m, a, b, depth, c, ldc, alpha, ahead);
  if (vecs == 2) return product_rows<2, kOnto>(m, a, b, depth, c, ldc, alpha, ahead);
  if constexpr (kMost == 4) {
    if (vecs == 3) product_rows<3, kOnto>(m, a, b, depth, c, ldc, alpha, ahead);
    if (vecs == 4) product_rows<4, kOnto>(m, a, b, depth, c, ldc, alpha, ahead);
  }
}

struct Worker {
  const SimdItem& item;
  const SimdScratch& layout;
  float* tile;    // [kSimdKeys, tile_ld]
  float* spare;   // [tile_ld] a cached row
  float* q;       // [groups, kSimdRows / kPanel, d_qk, kPanel]
  float* acc;     // [rows, out_ld]
  float* scores;  // [kSimdKeys, kSimdRows] S^T, then P^T
  float* max;     // [rows] m
  float* sum;     // [rows] l
  float* alpha;   // [kSimdRows]
  float* row;     // [out_ld] a finished row
  int rows, d_v, d_qk;
  int odd[kSimdKeys];  // keys of the tile that hold NaN or infinity and that only some rows see
  int num_odd = 0;
  FetchAhead ahead;
  bool direct;                     // are the tile's rows read where they lie?
  const float* floats[kSimdKeys];  // the tile's rows

  // Instead of the tile, with bf16 products and where widens_as_it_reads():
  bool dot, narrow;
  const uint16_t* keys[kSimdKeys];  // the tile's cached rows, as they lie
  uint16_t* zeros;                  // [d_qk] a key that adds nothing
  // With dot products, in the place of the tile:
  uint32_t* values;                     // [d_v / 64, kSimdKeys / 2, 64] words
  uint32_t* weights;                    // [kSimdKeys / 2, kSimdRows] words
  const uint16_t* few_dot_q[kFewRows];  // the rows of a last, small group

  Worker(const SimdItem& it, const SimdScratch& lay, float* s)
      : item(it),
        layout(lay),
        tile(s + lay.tile),
        spare(s + lay.spare),
        q(s + lay.q),
        acc(s + lay.acc),
        scores(s + lay.scores),
        max(s + lay.max),
        sum(s + lay.sum),
        alpha(s + lay.alpha),
        row(s + lay.row),
        rows(it.row_end - it.row_begin),
        d_v(it.shape.d_v),
        d_qk(it.shape.d_qk()),
        ahead(it),
        direct(in_place()),
        dot(lay.products == SimdProducts::kDot),
        narrow(!dot && few(0) && widens_as_it_reads()),
        zeros(reinterpret_cast<uint16_t*>(s + lay.zeros)),
        values(reinterpret_cast<uint32_t*>(tile)),
        weights(reinterpret_cast<uint32_t*>(s + lay.weights)) {}

  int group_rows(int g) const { return std::min(kSimdRows, rows - g * kSimdRows); }
  bool few(int g) const {
    return group_rows(g) <= kFewRows && !item.fixed_order && d_qk % kColumnBlock == 0 &&
           d_v % kColumnBlock == 0;
  }
  // Cached rows that cost no more to widen on their way into the products, again and again, than to write widened and read.
  bool widens_as_it_reads() const {
    return item.kv_dtype == DType::kBF16 || item.kv_dtype == DType::kF16 ||
           (item.kv_dtype == DType::kQ8 && num_few_blocks(rows) == 1);
  }
  bool interleaved() const { return item.kv_layout == KvLayout::kInterleaved; }
  float* group_q(int g) { return q + static_cast<int64_t>(g) * kSimdRows * d_qk; }
  uint32_t* dot_q(int g) { return reinterpret_cast<uint32_t*>(group_q(g)); }
  const void* query(int local_row) const {
    const int packed = item.row_begin + local_row, node = packed / item.shape.h_q,
              head = packed % item.shape.h_q;
    const int64_t offset = node * item.q_token_stride + head * item.q_head_stride;
    return static_cast<const char*>(item.q) + offset * static_cast<int64_t>(dtype_bytes(item.q_dtype));
  }
  const uint32_t* mask_row(int local_row) const {
    return item.bits + static_cast<int64_t>((item.row_begin + local_row) / item.shape.h_q) * item.words;
  }
  bool sees(int local_row, int key) const {
    const int j = key - item.prefix_len;
    return j < 0 || ((mask_row(local_row)[j >> 5] >> (j & 31)) & 1);
  }

  // Few rows lie one after another: element (row, k) at [row][k], zeros up to kFewRows rows.
  HWY_INLINE void load_few_q(int g) {
    const int m = group_rows(g);
    for (int r = 0; r < m; ++r)
      widen_row(query(g * kSimdRows + r), item.q_dtype, d_qk, group_q(g) + r * d_qk);
    std::fill_n(group_q(g) + m * d_qk, (kFewRows - m) * d_qk, 0.0f);
  }

  // Q^T in panels: element (row, k) of a group at [row / kPanel][k][row % kPanel]. Four rows at a time
  // through 4x4 transposes; rows past the end are zero.
  HWY_INLINE void load_q() {
    float* wide = tile;  // the tile is not in use yet: four widened rows
    for (int r = 0; r < round_up(rows, kSimdRows); r += 4) {
      if (few(r / kSimdRows)) {
        load_few_q(r / kSimdRows);
        break;  // only the last group can be that small
      }
      for (int i = 0; i < 4; ++i) {
        float* to = wide + i * layout.tile_ld;
        if (r + i >= rows) {
          std::memset(to, 0, sizeof(float) * layout.tile_ld);
          continue;
        }
        widen_row(query(r + i), item.q_dtype, d_qk, to);
      }
      float* to = group_q(r / kSimdRows) + (r % kSimdRows) / kPanel * d_qk * kPanel + r % kPanel;
      int k = 0;
#if HWY_TARGET != HWY_SCALAR
      const hn::FixedTag<float, 4> d4;
      for (; k + 4 <= d_qk; k += 4) {
        const auto r0 = hn::LoadU(d4, wide + k), r1 = hn::LoadU(d4, wide + layout.tile_ld + k);
        const auto r2 = hn::LoadU(d4, wide + 2 * layout.tile_ld + k),
                   r3 = hn::LoadU(d4, wide + 3 * layout.tile_ld + k);
        const auto a = hn::InterleaveLower(d4, r0, r2), b = hn::InterleaveLower(d4, r1, r3);
        const auto e = hn::InterleaveUpper(d4, r0, r2), f = hn::InterleaveUpper(d4, r1, r3);
        hn::StoreU(hn::InterleaveLower(d4, a, b), d4, to + k * kPanel);
        hn::StoreU(hn::InterleaveUpper(d4, a, b), d4, to + (k + 1) * kPanel);
        hn::StoreU(hn::InterleaveLower(d4, e, f), d4, to + (k + 2) * kPanel);
        hn::StoreU(hn::InterleaveUpper(d4, e, f), d4, to + (k + 3) * kPanel);
      }
#endif
      for (; k < d_qk; ++k)
        for (int i = 0; i < 4; ++i) to[k * kPanel + i] = wide[i * layout.tile_ld + k];
    }
  }

  // Query rows as dot products take them, columns in the cache's order; `room` [kSimdRows, d_qk] if they have to be moved.
  void dot_rows(int g, uint16_t* room, const uint16_t** to) const {
    for (int r = 0; r < group_rows(g); ++r) {
      to[r] = static_cast<const uint16_t*>(query(g * kSimdRows + r));
      if (!interleaved()) continue;
      interleave_row(to[r], d_qk, room + r * d_qk);
      to[r] = room + r * d_qk;
    }
  }

  void load_dot_q() {
    for (int g = 0; g * kSimdRows < rows; ++g) {
      // Few rows are read again for every tile, wherever they are.
      if (few(g)) return dot_rows(g, reinterpret_cast<uint16_t*>(group_q(g)), few_dot_q);
      const uint16_t* from[kSimdRows];
      dot_rows(g, reinterpret_cast<uint16_t*>(tile), from);  // the tile is not in use yet
      bf16_dot_pack_q(from, group_rows(g), d_qk, dot_q(g));
    }
  }

  const void* cached_row(int key) const {
    return static_cast<const char*>(item.kv) +
           item.pool_rows[key] * item.kv_row_stride * static_cast<int64_t>(dtype_bytes(item.kv_dtype));
  }

  HWY_INLINE void load_key(int key, float* to) {
    const void* from = cached_row(key);
    if (item.kv_dtype == DType::kF8E4M3Packed)
      widen_packed_row(from, item.shape, to);
    else if (item.kv_dtype == DType::kQ8)
      widen_q8_row(from, d_qk, to);
    else if (interleaved())
      widen_interleaved_row(from, d_qk, to);
    else
      widen_row(from, item.kv_dtype, d_qk, to);
  }

  HWY_INLINE bool finite(const float* r) const {
    const D d;
    auto bad = hn::Zero(d);  // x * 0 is NaN for NaN and infinity; r is zero past d_qk
    for (int k = 0; k < d_qk; k += kLanes) bad = hn::MulAdd(hn::LoadU(d, r + k), hn::Zero(d), bad);
    return hn::AllFalse(d, hn::IsNaN(bad));
  }

  // Steps of FetchAhead that a whole tile's products take.
  int steps_of_tile() const {
    int steps = 0;
    for (int g = 0; g * kSimdRows < rows; ++g) {
      if (dot) {
        steps += ceil_div(d_v, kBf16DotPanel);
        continue;
      }
      const int m = group_rows(g), vecs = ceil_div(m, kLanes);
      if (few(g)) {
        steps += num_few_blocks(m) * (kSimdKeys / 2 + d_v / kColumnBlock);
        continue;
      }
      const int score_rows = std::min(Gathered::kMostRows, kAccs / std::min(vecs, kVecs)),
                out_rows = std::min(Strided<1>::kMostRows, kAccs / kOutVecs);
      steps += ceil_div(vecs, kVecs) * ceil_div(kSimdKeys, score_rows) * ceil_div(d_qk, kDepth);
      steps += ceil_div(d_v, kOutVecs * kLanes) * ceil_div(m, out_rows);
    }
    return steps;
  }

  // Can the products read cached rows where they lie? Their vectors must be whole and not straddle cache lines.
  bool in_place() const {
    const auto whole = [](int64_t n) { return n % kLanes == 0; };
    return item.kv_dtype == DType::kF32 && whole(d_v) && whole(d_qk) && whole(item.kv_row_stride) &&
           reinterpret_cast<uintptr_t>(item.kv) % (sizeof(float) * kLanes) == 0;
  }

  // Keys [key, key + n) as float32 rows.
  HWY_INLINE void load_tile(int key, int n) {
    num_odd = 0;
    for (int j = 0; j < n; ++j) {
      float* to = tile + j * layout.tile_ld;
      if (direct) {
        floats[j] = static_cast<const float*>(cached_row(key + j));
      } else {
        load_key(key + j, to);
        floats[j] = to;
      }
      // A tree row may be hidden from some rows, and 0 * NaN must not reach those: such a key is taken out of
      // the products.
      if (key + j >= item.prefix_len && !finite(floats[j])) {
        std::memset(to, 0, sizeof(float) * d_qk);
        floats[j] = to;
        odd[num_odd++] = j;
      }
    }
  }

  // The same keys where they lie: one taken out is a row of zeros.
  HWY_INLINE void load_narrow_tile(int key, int n) {
    num_odd = 0;
    for (int j = 0; j < n; ++j) {
      keys[j] = static_cast<const uint16_t*>(cached_row(key + j));
      if (key + j < item.prefix_len) continue;
      load_key(key + j, spare);
      if (finite(spare)) continue;
      keys[j] = zeros;
      odd[num_odd++] = j;
    }
  }

  // For dot products, the second of a last odd pair is a row of zeros too.
  void load_dot_tile(int key, int n) {
    load_narrow_tile(key, n);
    if (n % 2 != 0) keys[n] = zeros;
    if (few(0)) return;  // read where they lie
    (interleaved() ? bf16_dot_pack_interleaved_v : bf16_dot_pack_v)(keys, round_up(n, 2), d_v, values);
  }

  // fn(the tile's rows as few rows read them).
  template <class Fn>
  HWY_INLINE void with_few_keys(Fn fn) {
    if (!narrow) return fn(Float32Rows{floats});
    if (item.kv_dtype == DType::kF16) return fn(Fp16Rows{keys});
    if (item.kv_dtype == DType::kQ8) return fn(Q8Rows{keys});
    if (interleaved()) return fn(InterleavedRows{keys});
    fn(Bf16Rows{keys});
  }

  void score_few(int g, int n_keys) {
    const int m = group_rows(g);
    if (dot) return bf16_dot_score_few(keys, n_keys, few_dot_q, m, d_qk, scores);
    with_few_keys([&](const auto& rows_of_tile) HWY_ATTR {
      HWY_NAMESPACE::score_few(rows_of_tile, n_keys, group_q(g), m, d_qk, scores, ahead);
    });
  }

  // The first n keys of the tile.
  HWY_INLINE void score(int g, int n_keys) {
    if (few(g)) return score_few(g, n_keys);
    if (dot) return bf16_dot_score(keys, n_keys, dot_q(g), group_rows(g), d_qk, scores);
    const float* qt = group_q(g);
    const int vecs = ceil_div(group_rows(g), kLanes);
    for (int k = 0; k < d_qk; k += kDepth) {
      const int depth = std::min(kDepth, d_qk - k);
      for (int v = 0; v < vecs; v += kVecs) {
        const float* panel = qt + v / kVecs * d_qk * kPanel + k * kPanel;
        float* to = scores + v * kLanes;
        const int n = std::min(kVecs, vecs - v);
        const Gathered left{floats, k};
        const Strided<kPanel> right{panel};
        if (k == 0)
          product<kVecs, Onto::kNothing>(n, n_keys, left, right, depth, to, kSimdRows, nullptr, ahead);
        else
          product<kVecs, Onto::kSum>(n, n_keys, left, right, depth, to, kSimdRows, nullptr, ahead);
      }
    }
  }

  // Scores of keys that a row must not see become -inf. Only tiles that reach past the prefix come here.
  HWY_INLINE void mask(int g, int key, int n) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    const int count = group_rows(g);
    if (n % 2 != 0) std::fill_n(scores + n * kSimdRows, kSimdRows, kHidden);
    for (int j = std::max(0, item.prefix_len - key); j < n; ++j)
      for (int r = 0; r < count; ++r)
        if (!sees(g * kSimdRows + r, key + j)) scores[j * kSimdRows + r] = kHidden;
    for (int o = 0; o < num_odd; ++o) std::fill_n(scores + odd[o] * kSimdRows, kSimdRows, kHidden);
  }

  // Online softmax: m, l and alpha of the group, P^T over S^T.
  HWY_INLINE void softmax(int g, int n, bool first) {
    constexpr int kPair = kManyRegisters ? 2 : 1;  // vectors at a time: one alone waits for latencies
    int v = 0;
    for (; v + (kPair - 1) * kLanes < group_rows(g); v += kPair * kLanes) softmax_of<kPair>(g, v, n, first);
    if (v < group_rows(g)) softmax_of<1>(g, v, n, first);
  }

  // Of kNum vectors of rows from v on.
  template <int kNum>
  HWY_INLINE void softmax_of(int g, int v, int n, bool first) {
    const D d;
    const V scale = hn::Set(d, item.score_scale), none = hn::Set(d, -std::numeric_limits<float>::infinity());
    float* s = scores + v;
    float* m_at = max + g * kSimdRows + v;
    float* l_at = sum + g * kSimdRows + v;
    V top[kNum], base[kNum], l[kNum], a[kNum];
    HWY_UNROLL(2)
    for (int i = 0; i < kNum; ++i) top[i] = hn::Load(d, s + i * kLanes);
    for (int j = 1; j < n; ++j) {
      HWY_UNROLL(2)
      for (int i = 0; i < kNum; ++i) top[i] = hn::Max(top[i], hn::Load(d, s + j * kSimdRows + i * kLanes));
    }
    HWY_UNROLL(2)
    for (int i = 0; i < kNum; ++i) {
      const V m_old = first ? none : hn::Load(d, m_at + i * kLanes);
      const V m = hn::Max(m_old, hn::Mul(top[i], scale));
      // All keys hidden so far: subtract 0 instead of -inf, every weight is exp(-inf) = 0.
      base[i] = hn::IfThenElse(hn::Eq(m, none), hn::Zero(d), m);
      a[i] = exp_to_one(hn::Sub(m_old, base[i]));
      l[i] = hn::Zero(d);
      hn::Store(a[i], d, alpha + v + i * kLanes);
      hn::Store(m, d, m_at + i * kLanes);
    }
    for (int j = 0; j < n; ++j) {
      HWY_UNROLL(2)
      for (int i = 0; i < kNum; ++i) {
        float* at = s + j * kSimdRows + i * kLanes;
        const V p = exp_to_one(hn::MulSub(hn::Load(d, at), scale, base[i]));
        l[i] = hn::Add(l[i], p);
        hn::Store(p, d, at);
      }
    }
    HWY_UNROLL(2)
    for (int i = 0; i < kNum; ++i)
      hn::Store(first ? l[i] : hn::MulAdd(hn::Load(d, l_at + i * kLanes), a[i], l[i]), d, l_at + i * kLanes);
  }

  HWY_INLINE void accumulate(int g, int n_keys, bool first) {
    float* o = acc + static_cast<int64_t>(g) * kSimdRows * layout.out_ld;
    const int vecs = ceil_div(d_v, kLanes), m = group_rows(g);
    if (dot) {
      const int n = round_up(n_keys, 2);
      bf16_dot_pack_p(scores, n, m, weights);
      const float* shrink = first ? nullptr : alpha;
      for (int c = 0; c < d_v; c += kBf16DotPanel) {
        const int width = std::min(kBf16DotPanel, d_v - c);
        if (few(0))
          bf16_dot_accumulate_few(weights, keys, interleaved(), n, m, c, c + width, shrink, o, layout.out_ld);
        else
          bf16_dot_accumulate(weights, values + c * (kSimdKeys / 2), n, m, width, shrink, o + c,
                              layout.out_ld);
        ahead.step();
      }
      return;
    }
    if (few(g)) {
      return with_few_keys([&](const auto& rows_of_tile) HWY_ATTR {
        accumulate_few(rows_of_tile, n_keys, scores, m, d_v, first ? nullptr : alpha, o, layout.out_ld,
                       ahead);
      });
    }
    for (int v = 0; v < vecs; v += kOutVecs) {
      const int n = std::min(kOutVecs, vecs - v);
      float* to = o + v * kLanes;
      const Strided<kSimdRows> left{scores};
      const Gathered right{floats, v * kLanes};
      if (first)
        product<kOutVecs, Onto::kNothing>(n, m, left, right, n_keys, to, layout.out_ld, nullptr, ahead);
      else
        product<kOutVecs, Onto::kScaledSum>(n, m, left, right, n_keys, to, layout.out_ld, alpha, ahead);
    }
  }

  // One key with NaN or infinity in it, for the rows that do see it. Rare, so plain code.
  void add_odd_key(int key) {
    float* kv = spare;
    load_key(key, kv);
    for (int r = 0; r < rows; ++r) {
      if (!sees(r, key)) continue;
      const void* q_row = query(r);
      double product = 0;
      for (int k = 0; k < d_qk; ++k)
        product += static_cast<double>(load_element(q_row, item.q_dtype, k)) * kv[k];
      const float s = static_cast<float>(product * item.score_scale);
      float* o = acc + static_cast<int64_t>(r) * layout.out_ld;
      if (s == -std::numeric_limits<float>::infinity() && max[r] == s) {
        // Still no key with a weight. If one comes, here or in another split, this key's weight is 0: 0 * inf is NaN.
        for (int k = 0; k < d_v; ++k)
          if (!std::isfinite(kv[k])) o[k] = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      const float m = std::max(max[r], s);
      const float a = std::exp(max[r] - m), p = std::exp(s - m);
      for (int k = 0; k < d_v; ++k) o[k] = o[k] * a + p * kv[k];
      sum[r] = sum[r] * a + p;
      max[r] = m;
    }
  }

  HWY_INLINE void write() {
    const D d;
    const int64_t out_bytes = static_cast<int64_t>(d_v) * dtype_bytes(item.out_dtype);
    for (int r = 0; r < rows; ++r) {
      const float l = sum[r];
      const bool none = l == 0;  // no visible key, or none with a weight
      const V scale = hn::Set(d, none ? 0.0f : item.value_scale / l);
      const float* o = acc + static_cast<int64_t>(r) * layout.out_ld;
      // Nothing is 0, but a partial keeps its NaN for the merge with keys that have a weight.
      for (int k = 0; k < d_v; k += kLanes)
        hn::Store(none && !item.partial ? hn::Zero(d) : hn::Mul(hn::Load(d, o + k), scale), d, row + k);
      narrow_row(row, d_v, item.out_dtype, static_cast<char*>(item.out) + r * out_bytes);
      if (item.lse)
        item.lse[r] = none ? -std::numeric_limits<float>::infinity()
                           : static_cast<float>(max[r] + std::log(static_cast<double>(l)));
    }
  }

  // What every tile needs.
  void begin() {
    if (dot)
      load_dot_q();
    else
      load_q();
    if (dot || narrow) std::fill_n(zeros, d_qk, uint16_t{0});
    // The softmax takes whole vectors, of few rows too.
    std::fill_n(scores, kSimdKeys * kSimdRows, 0.0f);
    // The micro-kernel and finite() read whole vectors: columns past d_qk must be numbers.
    for (int j = 0; j < kSimdKeys && !narrow; ++j)
      std::fill(tile + j * layout.tile_ld + d_qk, tile + (j + 1) * layout.tile_ld, 0.0f);
    std::fill(spare + d_qk, spare + layout.tile_ld, 0.0f);
  }

  void load(int key, int n) {
    if (dot)
      load_dot_tile(key, n);
    else if (narrow)
      load_narrow_tile(key, n);
    else
      load_tile(key, n);
  }

  void attend() {
    begin();
    const int groups = ceil_div(rows, kSimdRows);
    const int steps = steps_of_tile();
    for (int key = item.key_begin; key < item.key_end; key += kSimdKeys) {
      const int n = std::min(kSimdKeys, item.key_end - key);
      const bool first = key == item.key_begin;
      load(key, n);
      ahead.start(key + n, std::min(key + n + kSimdKeys, item.key_end), steps);
      for (int g = 0; g < groups; ++g) {
        score(g, n);
        if (n % 2 != 0 || key + n > item.prefix_len) mask(g, key, n);
        softmax(g, round_up(n, 2), first);
        accumulate(g, n, first);
      }
      for (int o = 0; o < num_odd; ++o) add_odd_key(key + odd[o]);
    }
    write();
  }

  // A stage of the first tile, of all its rows, again and again.
  void repeat(SimdStage stage, int times) {
    const int n = std::min(kSimdKeys, item.key_end - item.key_begin);
    const auto run = [&](SimdStage s, bool first) {
      if (s == SimdStage::kLoad) return load(item.key_begin, n);
      for (int g = 0; g * kSimdRows < rows; ++g) {
        if (s == SimdStage::kScore) score(g, n);
        if (s == SimdStage::kSoftmax) softmax(g, round_up(n, 2), first);
        if (s == SimdStage::kAccumulate) accumulate(g, n, first);
      }
    };
    begin();
    for (const SimdStage s :
         {SimdStage::kLoad, SimdStage::kScore, SimdStage::kSoftmax, SimdStage::kAccumulate})
      run(s, true);
    for (int i = 0; i < times; ++i) run(stage, false);
  }
};

// The same work in the stages of amx.hpp.
struct AmxWorker : Worker {
  uint16_t* keys;  // operands as amx.hpp has them
  uint32_t *q, *values, *weights;
  const uint16_t* cached[kAmxKeys];  // the tile's cached rows, zeros past the last
  int odd[kAmxKeys];
  int num_odd = 0;

  AmxWorker(const SimdItem& it, const SimdScratch& lay, float* s)
      : Worker(it, lay, s),
        keys(reinterpret_cast<uint16_t*>(s + lay.tile)),
        q(reinterpret_cast<uint32_t*>(s + lay.q)),
        values(reinterpret_cast<uint32_t*>(s + lay.values)),
        weights(reinterpret_cast<uint32_t*>(s + lay.weights)) {}

  int num_groups() const { return ceil_div(rows, kAmxRows); }
  int group_rows(int g) const { return std::min(kAmxRows, rows - g * kAmxRows); }
  uint32_t* group_q(int g) const { return q + static_cast<int64_t>(g) * kAmxRows * d_qk / 2; }

  // Keys a tile: even parts, unless bits must not depend on how many keys there are.
  int tile_keys() const {
    const int n = item.key_end - item.key_begin;
    return item.fixed_order ? kAmxKeys : round_up(ceil_div(n, ceil_div(n, kAmxKeys)), kAmxStep);
  }

  void begin() {
    std::fill_n(zeros, d_qk, uint16_t{0});
    std::fill(spare + d_qk, spare + layout.tile_ld, 0.0f);
    for (int g = 0; g < num_groups(); ++g) {
      const uint16_t* from[kAmxRows];
      for (int r = 0; r < group_rows(g); ++r) {
        from[r] = static_cast<const uint16_t*>(query(g * kAmxRows + r));
        if (!interleaved()) continue;
        interleave_row(from[r], d_qk, keys + r * d_qk);  // not in use yet
        from[r] = keys + r * d_qk;
      }
      amx_pack_q(from, group_rows(g), d_qk, group_q(g));
    }
  }

  void load(int key, int n) {
    num_odd = 0;
    for (int j = 0; j < n; ++j) {
      cached[j] = static_cast<const uint16_t*>(cached_row(key + j));
      if (key + j < item.prefix_len) continue;
      load_key(key + j, spare);
      if (finite(spare)) continue;
      cached[j] = zeros;
      odd[num_odd++] = j;
    }
    const int padded = round_up(n, kAmxStep);
    std::fill(cached + n, cached + padded, zeros);
    amx_load_keys(cached, padded, interleaved(), d_qk, d_v, keys, values);
  }

  // Two groups have scores at a time.
  float* group_scores(int g) const { return scores + g % 2 * (kAmxKeys * kAmxRows); }

  // With the weights of the group before, if given, on the way.
  void score(int g, int n, const AmxWeights* meanwhile) {
    amx_score(keys, round_up(n, kAmxStep), group_q(g), group_rows(g), d_qk, group_scores(g), meanwhile,
              ahead);
  }

  void mask(int g, int key, int n) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    float* s = group_scores(g);
    std::fill(s + n * kAmxRows, s + round_up(n, kAmxStep) * kAmxRows, kHidden);
    const int begin = std::max(0, item.prefix_len - key);
    if (begin < n) {
      const uint32_t* bits[kAmxRows];
      for (int r = 0; r < group_rows(g); ++r) bits[r] = mask_row(g * kAmxRows + r);
      amx_mask(s, begin, n, key + begin - item.prefix_len, bits, group_rows(g));
    }
    for (int o = 0; o < num_odd; ++o) std::fill_n(s + odd[o] * kAmxRows, kAmxRows, kHidden);
  }

  // Does any row's accumulator have to be multiplied?
  bool maxima(int g, int n, bool first) {
    return amx_maxima(group_scores(g), round_up(n, kAmxStep), group_rows(g), item.score_scale, first,
                      max + g * kAmxRows, alpha);
  }

  AmxWeights weights_of(int g, int n, bool first) const {
    return {.scores = group_scores(g),
            .num_keys = round_up(n, kAmxStep),
            .num_rows = group_rows(g),
            .scale = item.score_scale,
            .first = first,
            .max = max + g * kAmxRows,
            .alpha = alpha,
            .sum = sum + g * kAmxRows,
            .weights = weights};
  }

  void accumulate(int g, int n, bool first, bool raised) {
    amx_accumulate(weights, values, round_up(n, kAmxStep), group_rows(g), d_v, first,
                   raised && !first ? alpha : nullptr,
                   acc + static_cast<int64_t>(g) * kAmxRows * layout.out_ld, layout.out_ld, ahead);
  }

  int steps_of_tile(int n) const {
    int steps = 0;
    for (int g = 0; g < num_groups(); ++g)
      steps += amx_score_steps(n, group_rows(g), d_qk) + amx_accumulate_steps(n, group_rows(g), d_v);
    return steps;
  }

  void attend() {
    const AmxRegisters registers;
    begin();
    const int size = tile_keys(), steps = steps_of_tile(size);
    for (int key = item.key_begin; key < item.key_end; key += size) {
      const int n = std::min(size, item.key_end - key);
      const bool first = key == item.key_begin;
      load(key, n);
      ahead.start(key + n, std::min(key + n + size, item.key_end), steps);
      bool raised = false;
      for (int g = 0; g <= num_groups(); ++g) {
        // Scores of a group and weights of the one before at the same time, which then goes on.
        if (g < num_groups() && g > 0) {
          const AmxWeights before = weights_of(g - 1, n, first);
          score(g, n, &before);
        } else if (g == 0) {
          score(g, n, nullptr);
        } else {
          amx_weights(weights_of(g - 1, n, first));
        }
        if (g > 0) accumulate(g - 1, n, first, raised);
        if (g == num_groups()) break;
        if (n % kAmxStep != 0 || key + n > item.prefix_len) mask(g, key, n);
        raised = maxima(g, n, first);
      }
      for (int o = 0; o < num_odd; ++o) add_odd_key(key + odd[o]);
    }
    write();
  }

  void repeat(SimdStage stage, int times) {
    const AmxRegisters registers;
    const int n = std::min(kAmxKeys, item.key_end - item.key_begin);
    const auto run = [&](SimdStage s, bool first) {
      if (s == SimdStage::kLoad) return load(item.key_begin, n);
      for (int g = 0; g < num_groups(); ++g) {
        if (s == SimdStage::kScore) score(g, n, nullptr);
        if (s == SimdStage::kSoftmax) {
          maxima(g, n, first);
          amx_weights(weights_of(g, n, first));
        }
        if (s == SimdStage::kAccumulate) accumulate(g, n, first, false);
      }
    };
    begin();
    for (const SimdStage s :
         {SimdStage::kLoad, SimdStage::kScore, SimdStage::kSoftmax, SimdStage::kAccumulate})
      run(s, true);
    for (int i = 0; i < times; ++i) run(stage, false);
  }
};

void attend(const SimdItem& item, const SimdScratch& layout, float* scratch) {
  if (layout.products == SimdProducts::kAmx) return AmxWorker(item, layout, scratch).attend();
  Worker(item, layout, scratch).attend();
}

void repeat(SimdStage stage, int times, const SimdItem& item, const SimdScratch& layout, float* scratch) {
  if (layout.products == SimdProducts::kAmx) return AmxWorker(item, layout, scratch).repeat(stage, times);
  Worker(item, layout, scratch).repeat(stage, times);
}

void combine(const float* parts, const float* part_lse, const int* slots, int count, int rows_per_slot,
             int rows, int d_v, void* out, DType out_dtype, float* lse, float* scratch) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  for (int r = 0; r < rows; ++r) {
    auto lse_of = [&](int j) { return part_lse[static_cast<int64_t>(slots[j]) * rows_per_slot + r]; };
    float m = kNone;
    for (int j = 0; j < count; ++j) m = std::max(m, lse_of(j));
    double total = 0;
    // Partials without a key are left out by choice, not by a zero weight: their rows hold zeros, but habits
    // matter.
    for (int j = 0; j < count; ++j)
      if (lse_of(j) != kNone) total += std::exp(static_cast<double>(lse_of(j)) - m);
    std::fill_n(scratch, d_v, 0.0f);
    bool first = true;  // assigned, not added to 0: a row with one partial keeps its bits, -0 included
    for (int j = 0; j < count; ++j) {
      if (lse_of(j) == kNone) continue;
      const float w = static_cast<float>(std::exp(static_cast<double>(lse_of(j)) - m) / total);
      const float* part = parts + (static_cast<int64_t>(slots[j]) * rows_per_slot + r) * d_v;
      for (int k = 0; k < d_v; ++k) scratch[k] = first ? w * part[k] : scratch[k] + w * part[k];
      first = false;
    }
    for (int j = 0; j < count && !first; ++j) {  // a partial without a weight: zeros, or NaN of 0 * infinity
      if (lse_of(j) != kNone) continue;
      const float* part = parts + (static_cast<int64_t>(slots[j]) * rows_per_slot + r) * d_v;
      for (int k = 0; k < d_v; ++k)
        if (std::isnan(part[k])) scratch[k] = part[k];
    }
    narrow_row(scratch, d_v, out_dtype,
               static_cast<char*>(out) + r * static_cast<int64_t>(d_v) * dtype_bytes(out_dtype));
    if (lse) lse[r] = total == 0 ? kNone : static_cast<float>(m + std::log(total));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace treemla
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace treemla {
namespace {
HWY_EXPORT(attend);
HWY_EXPORT(combine);
HWY_EXPORT(repeat);

// What bf16 queries and caches run on: nothing forced is the fastest.
std::atomic<std::optional<SimdProducts>> g_forced_products{};

SimdProducts bf16_products() {
  if (const std::optional<SimdProducts> forced = g_forced_products) return *forced;
  if (amx_available()) return SimdProducts::kAmx;
  return bf16_dot_preferred() ? SimdProducts::kDot : SimdProducts::kFma;
}

// Floats that hold `elements` of 16 bits.
std::size_t floats_of_16_bits(std::size_t elements) { return ceil_div<std::size_t>(elements, 2); }
}  // namespace

SimdScratch::SimdScratch(const MlaShape& shape, int rows_per_tile, SimdProducts what) : products(what) {
  constexpr int kLine = 16;  // floats a cache line, and the widest vector
  const bool amx = products == SimdProducts::kAmx;
  out_ld = round_up(shape.d_v, kLine);
  // Tile registers are loaded from 16 rows at once: an odd number of lines spreads them over the sets of an L1 cache.
  if (amx && out_ld / kLine % 2 == 0) out_ld += kLine;
  // A row stride of 4 lines modulo 8 spreads a panel of 64 rows evenly over the sets of an L1 cache.
  tile_ld = round_up(std::max(shape.d_qk(), out_ld), kLine);
  while (tile_ld / kLine % 8 != 4) tile_ld += kLine;
  const int padded = round_up(rows_per_tile, kSimdRows);
  auto take = [this](std::size_t n) {
    const std::size_t at = floats;
    floats += round_up<std::size_t>(n, kLine);
    return at;
  };
  const std::size_t d_qk = shape.d_qk();
  const int keys = amx ? kAmxKeys : kSimdKeys, rows = amx ? kAmxRows : kSimdRows;
  tile = take(amx ? floats_of_16_bits(kAmxKeys * d_qk) : std::size_t{kSimdKeys} * tile_ld);
  spare = take(tile_ld);
  q = take(amx ? floats_of_16_bits(padded * d_qk) : padded * d_qk);
  acc = take(static_cast<std::size_t>(padded) * out_ld);
  scores = take((amx ? 2 : 1) * keys * rows);
  max = take(padded);
  sum = take(padded);
  alpha = take(rows);
  row = take(out_ld);
  weights = take(floats_of_16_bits(keys * rows));
  zeros = take(d_qk);
  if (amx) values = take(static_cast<std::size_t>(shape.d_v) / kAmxTile * kAmxValuesStride);
}

void simd_attend(const SimdItem& item, const SimdScratch& layout, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attend)(item, layout, scratch);
}

void simd_repeat(SimdStage stage, int times, const SimdItem& item, const SimdScratch& layout,
                 float* scratch) {
  HWY_DYNAMIC_DISPATCH(repeat)(stage, times, item, layout, scratch);
}

void simd_combine(const float* parts, const float* part_lse, const int* slots, int count, int rows_per_slot,
                  int rows, int d_v, void* out, DType out_dtype, float* lse, float* scratch) {
  HWY_DYNAMIC_DISPATCH(combine)
  (parts, part_lse, slots, count, rows_per_slot, rows, d_v, out, out_dtype, lse, scratch);
}

SimdProducts simd_products(const MlaShape& shape, DType q_dtype, DType kv_dtype) {
  const bool fits =
      q_dtype == DType::kBF16 && kv_dtype == DType::kBF16 && shape.d_qk() % 32 == 0 && shape.d_v % 32 == 0;
  return fits ? bf16_products() : SimdProducts::kFma;
}

std::string simd_target(const MlaShape& shape, DType q_dtype, DType kv_dtype) {
  const SimdProducts products = simd_products(shape, q_dtype, kv_dtype);
  if (products != SimdProducts::kFma) return products == SimdProducts::kAmx ? kAmxTarget : kBf16DotTarget;
  for (const std::string& name : simd_targets())
    if (name != kBf16DotTarget && name != kAmxTarget) return name;
  return "none";
}

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  const std::optional<SimdProducts> forced = g_forced_products;
  if (forced == SimdProducts::kAmx) return {kAmxTarget};
  if (forced == SimdProducts::kDot) return {kBf16DotTarget};
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) names.emplace_back(hwy::TargetName(target));
  if (forced) return names;
  if (bf16_dot_available())
    names.insert(names.begin() + (bf16_dot_preferred() || names.empty() ? 0 : 1), kBf16DotTarget);
  if (amx_available()) names.insert(names.begin(), kAmxTarget);
  return names;
}

bool simd_force_target(const std::string& name) {
  std::optional<SimdProducts> forced;
  if (name == kBf16DotTarget) {
    if (!bf16_dot_available()) return false;
    forced = SimdProducts::kDot;
  } else if (name == kAmxTarget) {
    if (!amx_available()) return false;
    forced = SimdProducts::kAmx;
  } else if (!name.empty()) {
    forced = SimdProducts::kFma;
  }
  hwy::SetSupportedTargetsForTest(0);
  int64_t wanted = hwy::SupportedTargets();
  g_forced_products = std::nullopt;
  if (forced == SimdProducts::kFma) {
    wanted = 0;
    for (int64_t target : hwy::SupportedAndGeneratedTargets())
      if (hwy::TargetName(target) == name) wanted = target;
    if (wanted == 0) return false;
    hwy::SetSupportedTargetsForTest(wanted);
  }
  g_forced_products = forced;
  hwy::GetChosenTarget().Update(wanted);
  return true;
}

}  // namespace treemla
#endif  // HWY_ONCE
