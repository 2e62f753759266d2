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
// Both products run through one register-blocked micro-kernel (products-inl.hpp): MR broadcasts times NV vectors, MR * NV
// accumulators. Neither operand of the second product is moved: V is the first d_v columns of T, and P^T is
// read by broadcasts.
//
//   T 147 KB and a group's Q^T 147 KB and O 128 KB stream from L2; what the micro-kernel reuses stays in L1:
//   a 96-deep slice of Q^T (24 KB) in the first product, a 32-wide panel of T (8 KB) and P^T (16 KB) in the second,
//   whose panel of O (8 KB) lies in one piece.
//
// Where bf16 dot products are the faster instruction, and q and the cache are bf16, both products go to bf16_dot.cpp:
// T is not made, S^T comes from the cached rows themselves, V is the tile's rows two keys a word, and P^T is rounded
// to bf16. Mask, softmax and output are the same.
//
// With AMX both products and the softmax between them go to amx.cpp, with tiles of up to 256 keys and groups of 32 rows, few rows
// too: amx_worker-inl.hpp.
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
#include "backend/cpu/amx_worker-inl.hpp"
#include "backend/cpu/bf16_dot.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "backend/cpu/widen-inl.hpp"
#include "backend/cpu/worker-inl.hpp"
#include "core/host_device.hpp"
#include "core/kv_row.hpp"

HWY_BEFORE_NAMESPACE();
namespace treemla {
namespace HWY_NAMESPACE {
namespace {

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
  out_ld = round_up(shape.d_v, kSimdPanel);
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

SimdProducts simd_products(const MlaShape& shape, DType q_dtype, DType kv_dtype, DType out_dtype) {
  const bool fits =
      q_dtype == DType::kBF16 && kv_dtype == DType::kBF16 && shape.d_qk() % 32 == 0 && shape.d_v % 32 == 0;
  const bool coarse = out_dtype == DType::kBF16 || g_forced_products.load().has_value();
  return fits && coarse ? bf16_products() : SimdProducts::kFma;
}

std::string simd_target(const MlaShape& shape, DType q_dtype, DType kv_dtype) {
  const SimdProducts products = simd_products(shape, q_dtype, kv_dtype, DType::kBF16);
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
