// The bf16 dot-product ceiling: 16 independent chains of vdpbf16ps in registers. Its latency is 6 to 10 cycles and at
// most two start in one.

#include "dot_ceiling.hpp"

#include <hwy/base.h>

#include "backend/cpu/bf16_dot.hpp"

#if HWY_ARCH_X86_64 && (HWY_COMPILER_GCC_ACTUAL >= 1000 || HWY_COMPILER_CLANG >= 900)
#include <immintrin.h>

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
namespace treemla::cli {
namespace {

double chains(int steps, float* sink) {
  constexpr int kChains = 16;
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3E80),
                 y = (__m512bh)_mm512_set1_epi16(0x3C00);  // 1/4, 1/128
  __m512 acc[kChains];
  HWY_UNROLL(16)
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(0.1f * static_cast<float>(i));
  for (int s = 0; s < steps; ++s) {
    HWY_UNROLL(16)
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_dpbf16_ps(acc[i], x, y);
  }
  HWY_UNROLL(16)
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  alignas(64) float sums[16];
  _mm512_store_ps(sums, acc[0]);
  *sink += sums[0];
  return 4.0 * 16 * kChains * steps;
}

}  // namespace
}  // namespace treemla::cli
HWY_POP_ATTRIBUTES

namespace treemla::cli {
double dot_loop(int steps, float* sink) { return bf16_dot_available() ? chains(steps, sink) : 0; }
}  // namespace treemla::cli

#else

namespace treemla::cli {
double dot_loop(int, float*) { return 0; }
}  // namespace treemla::cli

#endif
