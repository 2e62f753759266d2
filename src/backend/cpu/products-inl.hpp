// The register-blocked products of simd_kernel.cpp in float32, and the exponential between them.

#include <algorithm>
#include <cstdint>

#include "backend/cpu/fetch_ahead.hpp"
#include "backend/cpu/simd_kernel.hpp"

#if defined(TREEMLA_BACKEND_CPU_PRODUCTS_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEMLA_BACKEND_CPU_PRODUCTS_INL_
#undef TREEMLA_BACKEND_CPU_PRODUCTS_INL_
#else
#define TREEMLA_BACKEND_CPU_PRODUCTS_INL_
#endif

#include "backend/cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace treemla {
namespace HWY_NAMESPACE {
namespace {

constexpr int kVecs = kManyRegisters || kLanes == 1 ? 4 : 2;
// Rows of a block whose accumulators fit the register file, next to `vecs` vectors and a broadcast.
constexpr int rows_in_registers(int vecs) { return ((kManyRegisters ? 32 : 16) - 1) / vecs - 1; }
constexpr int kPanel = kVecs * kLanes;  // rows (or columns) that one micro-kernel call spans
// The second product's panels are narrower and its blocks higher: what a panel of V takes in L1 then leaves room for P and O, wherever
// in the pool its rows happen to lie.
constexpr int kOutVecs = 2;
static_assert(kSimdPanel % (kOutVecs * kLanes) == 0);
constexpr int kDepth = 96;  // terms of a chain of FMAs in the first product
constexpr int kTurn = 4;    // terms a turn of the inner loop; few turns, so that their end is foreseen
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
  static constexpr int kMostRows = 14;  // of a block: 64 rows are four of them and one of 8
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
  int64_t k = 1;
  for (const int64_t end = depth - (depth - 1) / kTurn * kTurn; k < end; ++k) term(k, std::false_type());
  for (; k < depth; k += kTurn) {
    HWY_UNROLL(16)
    for (int i = 0; i < kTurn; ++i) term(k + i, std::false_type());
  }
  HWY_UNROLL(16)
  for (int i = 0; i < MR; ++i) done(i, acc[i]);
}

// What a product is added to: nothing, c, or c * alpha[i].
enum class Onto { kNothing, kSum, kScaledSum };

// Rows of c are kLd floats apart.
template <int MR, int NV, Onto kOnto, int kLd, class A, class B>
HWY_INLINE void product_block(const A& a, const B& b, int depth, float* c, const float* alpha) {
  const D d;
  micro_kernel<MR, NV>(a, b, depth, [&](int i, const V(&acc)[NV]) HWY_ATTR {
    float* to = c + i * kLd;
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

// For m rows, in blocks.
template <int NV, Onto kOnto, int kLd, class A, class B>
HWY_NOINLINE void product_rows(int m, const A& a, const B& b, int depth, float* c, const float* alpha,
                               FetchAhead& ahead) {
  constexpr int kBlock = std::min(A::kMostRows, rows_in_registers(NV));
  int i = 0;
  auto block = [&](auto size) HWY_ATTR {
    constexpr int MR = decltype(size)::value;
    for (; m - i >= MR; i += MR) {
      ahead.step();
      product_block<MR, NV, kOnto, kLd>(a.from(i), b, depth, c + i * kLd, alpha ? alpha + i : nullptr);
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
template <int kMost, Onto kOnto, int kLd, class A, class B>
void product(int vecs, int m, const A& a, const B& b, int depth, float* c, const float* alpha,
             FetchAhead& ahead) {
  if (vecs == 1) return product_rows<1, kOnto, kLd>(m, a, b, depth, c, alpha, ahead);
  if (vecs == 2) return product_rows<2, kOnto, kLd>(m, a, b, depth, c, alpha, ahead);
  if constexpr (kMost == 4) {
    if (vecs == 3) product_rows<3, kOnto, kLd>(m, a, b, depth, c, alpha, ahead);
    if (vecs == 4) product_rows<4, kOnto, kLd>(m, a, b, depth, c, alpha, ahead);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace treemla
HWY_AFTER_NAMESPACE();

#endif  // TREEMLA_BACKEND_CPU_PRODUCTS_INL_
