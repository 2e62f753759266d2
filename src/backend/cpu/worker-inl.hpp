// A work item of simd_kernel.cpp: tiles of 64 keys against groups of 64 rows.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/bf16_dot.hpp"
#include "backend/cpu/fetch_ahead.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "core/host_device.hpp"
#include "core/kv_row.hpp"

#if defined(TREEMLA_BACKEND_CPU_WORKER_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEMLA_BACKEND_CPU_WORKER_INL_
#undef TREEMLA_BACKEND_CPU_WORKER_INL_
#else
#define TREEMLA_BACKEND_CPU_WORKER_INL_
#endif

#include "backend/cpu/few_rows-inl.hpp"
#include "backend/cpu/products-inl.hpp"
#include "backend/cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace treemla {
namespace HWY_NAMESPACE {
namespace {

struct Worker {
  const SimdItem& item;
  const SimdScratch& layout;
  float* tile;    // [kSimdKeys, tile_ld]
  float* spare;   // [tile_ld] a cached row
  float* q;       // [groups, kSimdRows / kPanel, d_qk, kPanel]
  float* acc;     // [rows, out_ld] in panels: out_at()
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
  // The accumulator's group of rows lies in panels of so many columns, one after another. Where float32 multiplies, a panel
  // is what its blocks write: rows of 2 KB would be on a page of their own each, and in the same few sets of L1.
  int out_panel(int g) const {
    return layout.products != SimdProducts::kFma || few(g) ? layout.out_ld : kSimdPanel;
  }
  // Element (row, column), and the columns after it up to the end of their panel.
  float* out_at(int r, int c) const {
    const int g = r / kSimdRows, panel = out_panel(g);
    return acc + static_cast<int64_t>(g) * kSimdRows * layout.out_ld + c / panel * panel * kSimdRows +
           r % kSimdRows * panel + c % panel;
  }
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

  // Q^T in panels: element (row, k) of a group at [row / kPanel][k][row % kPanel]. A slice of the columns at a time, whose
  // lines stay in L1 until all rows of the panel are in them.
  HWY_INLINE void load_q() {
    for (int g = 0; g * kSimdRows < rows; ++g) {
      if (few(g)) return load_few_q(g);  // only the last group can be that small
      for (int k = 0; k < d_qk; k += kDepth)
        for (int r = 0; r < kSimdRows; r += 4) load_four_q(g, r, k, std::min(kDepth, d_qk - k));
    }
  }

  // Columns [begin, begin + n) of rows r .. r + 3 of a group, through 4x4 transposes; rows past the end are zero.
  HWY_INLINE void load_four_q(int g, int r, int begin, int n) {
    float* wide = tile;  // the tile is not in use yet
    for (int i = 0; i < 4; ++i) {
      float* to = wide + i * kDepth;
      if (g * kSimdRows + r + i >= rows) {
        std::fill_n(to, kDepth, 0.0f);
        continue;
      }
      const auto bytes = static_cast<int64_t>(dtype_bytes(item.q_dtype));
      widen_row(static_cast<const char*>(query(g * kSimdRows + r + i)) + begin * bytes, item.q_dtype, n, to);
    }
    float* to = group_q(g) + r / kPanel * d_qk * kPanel + begin * kPanel + r % kPanel;
    int k = 0;
#if HWY_TARGET != HWY_SCALAR
    const hn::FixedTag<float, 4> d4;
    for (; k + 4 <= n; k += 4) {
      const auto r0 = hn::LoadU(d4, wide + k), r1 = hn::LoadU(d4, wide + kDepth + k);
      const auto r2 = hn::LoadU(d4, wide + 2 * kDepth + k), r3 = hn::LoadU(d4, wide + 3 * kDepth + k);
      const auto a = hn::InterleaveLower(d4, r0, r2), b = hn::InterleaveLower(d4, r1, r3);
      const auto e = hn::InterleaveUpper(d4, r0, r2), f = hn::InterleaveUpper(d4, r1, r3);
      hn::StoreU(hn::InterleaveLower(d4, a, b), d4, to + k * kPanel);
      hn::StoreU(hn::InterleaveUpper(d4, a, b), d4, to + (k + 1) * kPanel);
      hn::StoreU(hn::InterleaveLower(d4, e, f), d4, to + (k + 2) * kPanel);
      hn::StoreU(hn::InterleaveUpper(d4, e, f), d4, to + (k + 3) * kPanel);
    }
#endif
    for (; k < n; ++k)
      for (int i = 0; i < 4; ++i) to[k * kPanel + i] = wide[i * kDepth + k];
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
      const int score_rows = std::min(Gathered::kMostRows, rows_in_registers(std::min(vecs, kVecs))),
                out_rows = std::min(Strided<1>::kMostRows, rows_in_registers(kOutVecs));
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
          product<kVecs, Onto::kNothing, kSimdRows>(n, n_keys, left, right, depth, to, nullptr, ahead);
        else
          product<kVecs, Onto::kSum, kSimdRows>(n, n_keys, left, right, depth, to, nullptr, ahead);
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
    float* o = out_at(g * kSimdRows, 0);
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
      const int n = std::min(kOutVecs, vecs - v), c = v * kLanes;
      float* to = out_at(g * kSimdRows, c);
      const Strided<kSimdRows> left{scores};
      const Gathered right{floats, c};
      if (first)
        product<kOutVecs, Onto::kNothing, kSimdPanel>(n, m, left, right, n_keys, to, nullptr, ahead);
      else
        product<kOutVecs, Onto::kScaledSum, kSimdPanel>(n, m, left, right, n_keys, to, alpha, ahead);
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
      const auto o = [&](int k) -> float& { return *out_at(r, k); };
      if (s == -std::numeric_limits<float>::infinity() && max[r] == s) {
        // Still no key with a weight. If one comes, here or in another split, this key's weight is 0: 0 * inf is NaN.
        for (int k = 0; k < d_v; ++k)
          if (!std::isfinite(kv[k])) o(k) = std::numeric_limits<float>::quiet_NaN();
        continue;
      }
      const float m = std::max(max[r], s);
      const float a = std::exp(max[r] - m), p = std::exp(s - m);
      for (int k = 0; k < d_v; ++k) o(k) = o(k) * a + p * kv[k];
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
      const int panel = out_panel(r / kSimdRows);
      // Nothing is 0, but a partial keeps its NaN for the merge with keys that have a weight.
      for (int c = 0; c < d_v; c += panel) {
        const float* o = out_at(r, c);
        for (int k = 0; k < std::min(panel, d_v - c); k += kLanes)
          hn::Store(none && !item.partial ? hn::Zero(d) : hn::Mul(hn::Load(d, o + k), scale), d, row + c + k);
      }
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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace treemla
HWY_AFTER_NAMESPACE();

#endif  // TREEMLA_BACKEND_CPU_WORKER_INL_
