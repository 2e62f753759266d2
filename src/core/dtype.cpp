#include "treemla/dtype.hpp"

#include <fmt/format.h>

#include <utility>

#include "treemla/error.hpp"

namespace treemla {

DType parse_dtype(std::string_view name) {
  // The first six are dtype_name()'s spellings, the others what numpy and torch call the same types.
  static constexpr std::pair<std::string_view, DType> kNames[] = {
      {"fp32", DType::kF32},
      {"fp16", DType::kF16},
      {"bf16", DType::kBF16},
      {"e4m3", DType::kF8E4M3},
      {"e4m3_packed", DType::kF8E4M3Packed},
      {"q8_0", DType::kQ8},
      {"float32", DType::kF32},
      {"float16", DType::kF16},
      {"bfloat16", DType::kBF16},
  };
  for (const auto& [text, type] : kNames) {
    if (name == text) return type;
  }
  throw Error(ErrorCode::kInvalidArgument, "dtype",
              fmt::format("dtype = \"{}\" is unknown: allowed are fp32, fp16, bf16, e4m3, e4m3_packed, q8_0 "
                          "(and float32, float16, bfloat16)",
                          name));
}

}  // namespace treemla
