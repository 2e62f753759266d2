// The CPU flash kernel behind cpu_simd: one work item, with the widest vectors the CPU has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "treemla/problem.hpp"

namespace treemla {

inline constexpr int kSimdKeys = 64;   // keys a tile
inline constexpr int kSimdRows = 64;   // rows a group; a row tile is a few groups
inline constexpr int kSimdPanel = 32;  // columns of float32's accumulator that lie together

// What multiplies: float32 FMA, or bf16 where queries, cache and output are bf16, by dot products (bf16_dot.hpp) or AMX (amx.hpp).
enum class SimdProducts { kFma, kDot, kAmx };

// Scratch of one worker, in floats. Everything is written before it is read.
struct SimdScratch {
  SimdScratch(const MlaShape& shape, int rows_per_tile, SimdProducts products);
  SimdProducts products;
  int tile_ld = 0;  // row stride of the key tile
  int out_ld = 0;   // columns of the accumulator, whole panels
  std::size_t tile = 0, spare = 0, q = 0, acc = 0, scores = 0, max = 0, sum = 0, alpha = 0, row = 0,
              weights = 0, zeros = 0, values = 0;  // offsets
  std::size_t floats = 0;                          // in all
};

// Rows [row_begin, row_end) of a request, (node, head) pairs with heads fastest, against its keys [key_begin,
// key_end).
struct SimdItem {
  MlaShape shape;
  const void* q = nullptr;  // the request's node 0
  DType q_dtype = DType::kF32;
  int64_t q_token_stride = 0, q_head_stride = 0;
  const void* kv = nullptr;  // row 0 of the pool
  DType kv_dtype = DType::kF32;
  KvLayout kv_layout = KvLayout::kRowMajor;
  int64_t kv_row_stride = 0;
  const int64_t* pool_rows = nullptr;  // [kv_len] pool row of each token
  const uint32_t* bits = nullptr;      // [q_len, words] mask of the tree rows
  int words = 0;
  int row_begin = 0, row_end = 0, key_begin = 0, key_end = 0;
  int prefix_len = 0;       // keys from here on are tree rows
  float score_scale = 1.0;  // sm_scale * kv_scale
  float value_scale = 1.0;  // kv_scale
  // The bits of a row may not depend on how many rows come with it: no way of their own for few rows.
  bool fixed_order = false;
  // Normalised result of the item: [rows, d_v] and [rows]; lse may be null.
  void* out = nullptr;
  DType out_dtype = DType::kF32;
  float* lse = nullptr;
  bool partial = false;  // out and lse go to simd_combine()
};

// `scratch` holds SimdScratch::floats floats, aligned to 64 bytes.
void simd_attend(const SimdItem& item, const SimdScratch& layout, float* scratch);

// What is done to a tile of keys, in this order.
enum class SimdStage {
  kLoad,        // cached rows become what the products read: widened, packed, or pointers alone
  kScore,       // S^T
  kSoftmax,     // P^T, m and l
  kAccumulate,  // O
};
// For measurements: all stages of the item's first tile, then one of them `times` more times. Writes no output.
void simd_repeat(SimdStage stage, int times, const SimdItem& item, const SimdScratch& layout, float* scratch);

// Merges `count` partials of `rows` rows. Partial j: out at parts + slots[j] * rows_per_slot * d_v, lse at
// part_lse + slots[j] * rows_per_slot. Writes out [rows, d_v] and lse [rows] (may be null). `scratch` holds
// d_v floats.
void simd_combine(const float* parts, const float* part_lse, const int* slots, int count, int rows_per_slot,
                  int rows, int d_v, void* out, DType out_dtype, float* lse, float* scratch);

// Instruction sets compiled in and usable here, best first; the first is the one in use. AVX3_BF16 and AMX_BF16 are AVX3 with
// bf16 dot products or AMX where q, the cache and the output are bf16.
std::vector<std::string> simd_targets();
// Uses that instruction set from now on, in the whole process; "" goes back to the best. For tests and measurements.
// False if there is none of that name here.
bool simd_force_target(const std::string& name);
// The products of such a call. Weights in bf16 are not what a finer output asks for: it gets float32's, unless the target is forced.
SimdProducts simd_products(const MlaShape& shape, DType q_dtype, DType kv_dtype, DType out_dtype);
// The instruction set of such a call with a bf16 output.
std::string simd_target(const MlaShape& shape, DType q_dtype, DType kv_dtype);

}  // namespace treemla
