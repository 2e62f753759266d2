// Both products of the CPU flash kernel on bf16 dot products (AVX512-BF16's vdpbf16ps): 32 products of bf16 an
// instruction, summed in pairs into 16 float32 lanes. A WORD holds such a pair, the lower half first.
//
// Widths are multiples of 32 elements; a group is kSimdRows rows, a tile kSimdKeys keys (simd_kernel.hpp).
#pragma once

#include <cstdint>

namespace treemla {

inline constexpr const char* kBf16DotTarget = "AVX3_BF16";  // its name among simd_targets()

inline constexpr int kBf16DotPanel = 64;  // columns of V that lie together

// Does this CPU have the instruction (and was it compiled in)?
bool bf16_dot_available();
// Is it faster than float32 FMA here?
bool bf16_dot_preferred();

// rows[r]: [width] of a group's first `num_rows` rows -> words [width / 2][kSimdRows], zeros up to a
// multiple of 16 rows.
void bf16_dot_pack_q(const uint16_t* const* rows, int num_rows, int width, uint32_t* to);

// keys[j]: [d_v or more] of num_keys keys, an even number -> words [d_v / 64][kSimdKeys / 2][64], two keys a
// word.
void bf16_dot_pack_v(const uint16_t* const* keys, int num_keys, int d_v, uint32_t* to);
// The same from interleaved keys (KvLayout). The other products take these as they take rows in order, if q's columns are
// interleaved too.
void bf16_dot_pack_interleaved_v(const uint16_t* const* keys, int num_keys, int d_v, uint32_t* to);

// scores [kSimdKeys, kSimdRows] = keys q^T, for num_keys keys and num_rows rows (rounded up to 16).
void bf16_dot_score(const uint16_t* const* keys, int num_keys, const uint32_t* q, int num_rows, int d_qk,
                    float* scores);

// The same for a few rows, rows[r]: [d_qk]: columns along the vectors, so that no lane is empty, in another order of sums.
// Writes scores up to num_keys and num_rows rounded up to 4.
void bf16_dot_score_few(const uint16_t* const* keys, int num_keys, const uint16_t* const* rows, int num_rows,
                        int d_qk, float* scores);

// weights [kSimdKeys, kSimdRows], float32 -> words [kSimdKeys / 2][kSimdRows], rounded to bf16, two keys a word.
void bf16_dot_pack_p(const float* weights, int num_keys, int num_rows, uint32_t* to);

// out[r] = out[r] * alpha[r] + p^T[r] v, rows of out_ld floats; alpha null: out[r] = p^T[r] v. For the first d_v columns
// from `v` on, which starts a panel.
void bf16_dot_accumulate(const uint32_t* p, const uint32_t* v, int num_keys, int num_rows, int d_v,
                         const float* alpha, float* out, int64_t out_ld);

// The same for a few rows and straight from the keys of bf16_dot_pack_v or bf16_dot_pack_interleaved_v: what that writes would be
// read only once or twice. Columns [begin, end) of out. The same bits.
void bf16_dot_accumulate_few(const uint32_t* p, const uint16_t* const* keys, bool interleaved, int num_keys,
                             int num_rows, int begin, int end, const float* alpha, float* out,
                             int64_t out_ld);

}  // namespace treemla
