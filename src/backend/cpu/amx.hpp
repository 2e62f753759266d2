// Both products of the CPU flash kernel on AMX (tdpbf16ps): a tile register holds 16 rows of 64 bytes, and one instruction adds
// the product of 16 x 32 and 32 x 16 numbers of bf16 to 16 x 16 of float32. A group is kAmxRows rows, a tile of keys at most
// kAmxKeys keys.
//
// Operands lie in memory as the registers take them, tile after tile of 1 KB, so that a tile is 16 whole lines in a row:
//
//   keys     [key / 16][step of 32 columns][16 keys][32 columns]          left operand: cached rows, copied
//   q        [row / 16][step of 32 columns][16 words][16 rows]            right operand: a word is two columns of a row
//   weights  [row / 16][key / 32][16 rows][32 keys]                       left operand
//   values   [column / 16][key / 2][16 columns]                           right operand: a word is two keys of a column
//
// Widths are multiples of 32 elements, numbers of keys too: what is missing are rows of zeros whose scores are hidden.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace treemla {

class FetchAhead;

inline constexpr const char* kAmxTarget = "AMX_BF16";  // its name among simd_targets()

inline constexpr int kAmxTile = 16;  // rows of a tile register, and words of one
inline constexpr int kAmxStep = 32;  // terms that an instruction sums
inline constexpr int kAmxTileWords = kAmxTile * kAmxTile;
inline constexpr int kAmxKeys = 256;
inline constexpr int kAmxRows = 32;
// Words between columns 16 apart of `values`: a line more than they take, so that a key's columns don't meet in one set of L1.
inline constexpr int kAmxValuesStride = kAmxKeys / 2 * kAmxTile + kAmxTile;

// Does this CPU have the instructions, and did the kernel grant the process their registers? Asked once.
bool amx_available();

// The calling thread's tile registers, for as long as this lives.
class AmxRegisters {
 public:
  AmxRegisters();
  ~AmxRegisters();
  AmxRegisters(const AmxRegisters&) = delete;
  AmxRegisters& operator=(const AmxRegisters&) = delete;
};

// rows[r]: [width] of num_rows rows -> q of round_up(num_rows, 16) rows, zeros where there is none.
void amx_pack_q(const uint16_t* const* rows, int num_rows, int width, uint32_t* q);

// num_keys keys, a multiple of 32, into `keys` and, their first d_v columns, `values`; rows[j]: [d_qk], interleaved (KvLayout) if
// so said.
void amx_load_keys(const uint16_t* const* rows, int num_keys, bool interleaved, int d_qk, int d_v,
                   uint16_t* keys, uint32_t* values);

// The second half of a group's softmax: weights [num_rows rounded up to 16, num_keys] in bf16, and their sums.
struct AmxWeights {
  const float* scores = nullptr;  // [num_keys, kAmxRows]
  int num_keys = 0, num_rows = 0;
  float scale = 1;               // of scores
  bool first = false;            // nothing before
  const float* max = nullptr;    // of rows, as amx_maxima() left it, and
  const float* alpha = nullptr;  // what the sums so far are multiplied by
  float* sum = nullptr;
  uint32_t* weights = nullptr;
};

// scores [num_keys, kAmxRows] = keys q^T, for num_keys keys, a multiple of 32, and num_rows rows rounded up to 16. Between its
// products the weights of another group, if any, of kAmxRows rows.
void amx_score(const uint16_t* keys, int num_keys, const uint32_t* q, int num_rows, int d_qk, float* scores,
               const AmxWeights* meanwhile, FetchAhead& ahead);
int amx_score_steps(int num_keys, int num_rows, int d_qk);  // of `ahead`

// Scores [begin, end) of keys that row r does not see become -inf: bit tree_begin + j - begin of bits[r] is key j's.
void amx_mask(float* scores, int begin, int end, int tree_begin, const uint32_t* const* bits, int num_rows);

// The first half of the softmax: max [num_rows rounded up to 16], and what a row's sum and accumulator are to be multiplied by,
// alpha [kAmxRows]. Returns whether any alpha is not 1. `first`: nothing before.
bool amx_maxima(const float* scores, int num_keys, int num_rows, float scale, bool first, float* max,
                float* alpha);
void amx_weights(const AmxWeights& work);

// out[r] = out[r] * alpha[r] + weights v for num_rows rows rounded up to 16, of out_ld floats; `first`: weights v. alpha null: 1.
void amx_accumulate(const uint32_t* weights, const uint32_t* values, int num_keys, int num_rows, int d_v,
                    bool first, const float* alpha, float* out, int64_t out_ld, FetchAhead& ahead);
int amx_accumulate_steps(int num_keys, int num_rows, int d_v);  // of `ahead`

// For measurements: the instruction alone, six independent chains of it in registers. Returns the operations done.
double amx_chains(int steps, float* sink);

}  // namespace treemla
