// What "right" means: bounds of docs/MATH.md, and a comparison that names the worst element.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "treemla/problem.hpp"

namespace treemla {

// Precision of the path that is judged. FP8 caches are judged by the 16-bit or float32 bounds against the oracle on the
// dequantised cache.
enum class Precision { kF32, kBF16, kF16 };
// kF32 when the output is float32 and every product was taken in float32; else that of the output dtype.
std::string_view precision_name(Precision p);

struct Comparison {
  bool ok = true;
  double rel_fro = 0;   // ||out - expected|| / ||expected||
  double max_abs = 0;   // worst abs(out - expected)
  double max_out = 0;   // worst abs(out - expected) over its bound: > 1 fails
  double max_lse = 0;   // worst abs(lse - expected_lse)
  std::string failure;  // empty, or which element failed, both values and the bound
};

// out, expected_out [total_q, h_q, d_v]; lse, expected_lse [total_q, h_q]; lse may be null (not compared, and the bound
// of out then takes abs(lse) from expected_lse, which must not be null).
// NaN and infinity positions are compared before any tolerance.
Comparison compare(const MlaShape& shape, int64_t total_q, const float* out, const float* expected_out,
                   const float* lse, const float* expected_lse, Precision precision);

}  // namespace treemla
