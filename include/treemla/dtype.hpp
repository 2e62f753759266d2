// Element types of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace treemla {

enum class DType : int {
  kF32 = 0,
  kF16 = 1,     // IEEE binary16
  kBF16 = 2,    // the upper half of an F32
  kF8E4M3 = 3,  // OCP e4m3 "fn": no infinity, 0x7F and 0xFF are NaN, largest value 448; cache only
  // Rows of e4m3 latents, float32 scales and bf16 rope: DeepSeek's packed form, drawn in problem.hpp; cache only. What counts as
  // an element of such a pool is a byte.
  kF8E4M3Packed = 4,
  // Rows of int8 with an fp16 scale every 32 columns: llama.cpp's q8_0, drawn in problem.hpp; cache only, on CPUs. An element of such
  // a pool is a byte too.
  kQ8 = 5,
};

// Width of the entries of a page table.
enum class IndexType : int { kI32 = 0, kI64 = 1 };

// Where the memory behind the pointers of a problem lives.
enum class Memory : int { kHost = 0, kDevice = 1 };

constexpr bool is_fp8(DType t) { return t == DType::kF8E4M3 || t == DType::kF8E4M3Packed; }

// The dtypes of caches alone: queries and outputs are wider.
constexpr bool is_cache_only(DType t) { return is_fp8(t) || t == DType::kQ8; }

// Rows of bytes, with scales among their numbers.
constexpr bool has_scales(DType t) { return t == DType::kF8E4M3Packed || t == DType::kQ8; }

constexpr std::size_t dtype_bytes(DType t) { return t == DType::kF32 ? 4 : is_cache_only(t) ? 1 : 2; }

// What addresses must be multiples of, in bytes: rows of bytes are read as float32 or fp16 scales too.
constexpr std::size_t dtype_alignment(DType t) {
  return t == DType::kF8E4M3Packed ? 4 : t == DType::kQ8 ? 2 : dtype_bytes(t);
}

// "fp32", "fp16", "bf16", "e4m3", "e4m3_packed", "q8_0".
constexpr std::string_view dtype_name(DType t) {
  switch (t) {
    case DType::kF32:
      return "fp32";
    case DType::kF16:
      return "fp16";
    case DType::kBF16:
      return "bf16";
    case DType::kF8E4M3:
      return "e4m3";
    case DType::kF8E4M3Packed:
      return "e4m3_packed";
    case DType::kQ8:
      return "q8_0";
  }
  return "?";
}

// The inverse of dtype_name. Throws Error(kInvalidArgument) for any other text.
DType parse_dtype(std::string_view name);

}  // namespace treemla
