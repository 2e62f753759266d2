// 16 x 16 words transposed in registers. To be included where functions are compiled for AVX-512.
#pragma once

#include <hwy/base.h>
#include <immintrin.h>

#include <cstdint>

namespace treemla {
namespace {

// Row i of `from` becomes column i, rows of `ld` words.
HWY_INLINE void transpose_words(const __m512i (&from)[16], uint32_t* to, int64_t ld) {
  __m512i a[16], b[16];
  HWY_UNROLL(16)
  for (int i = 0; i < 16; i += 2) {  // pairs of rows
    a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
  }
  HWY_UNROLL(16)
  for (int i = 0; i < 16; i += 4) {  // fours: b[i + c] has column c of every 128-bit lane
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  HWY_UNROLL(16)
  for (int c = 0; c < 4; ++c) {  // lanes of four vectors: a 4 x 4 transpose of 128-bit blocks
    const __m512i lo = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88),
                  hi = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xDD);
    const __m512i lo2 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88),
                  hi2 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xDD);
    _mm512_storeu_si512(to + c * ld, _mm512_shuffle_i32x4(lo, lo2, 0x88));
    _mm512_storeu_si512(to + (4 + c) * ld, _mm512_shuffle_i32x4(hi, hi2, 0x88));
    _mm512_storeu_si512(to + (8 + c) * ld, _mm512_shuffle_i32x4(lo, lo2, 0xDD));
    _mm512_storeu_si512(to + (12 + c) * ld, _mm512_shuffle_i32x4(hi, hi2, 0xDD));
  }
}

}  // namespace
}  // namespace treemla
