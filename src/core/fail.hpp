// Throwing an Error about an argument, and sizes that can't overflow on the way to one.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "treemla/error.hpp"

namespace treemla {

// `format` must itself name the argument, its value and what is allowed.
template <typename... Args>
[[noreturn]] void fail(const char* argument, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument, argument, fmt::format(format, std::forward<Args>(args)...));
}

// Saturating arithmetic on numbers >= 0: a size that overflows stays at the largest, which no limit allows.
inline int64_t saturating_mul(int64_t a, int64_t b) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return b != 0 && a > kMax / b ? kMax : a * b;
}
inline int64_t saturating_add(int64_t a, int64_t b) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return a > kMax - b ? kMax : a + b;
}

}  // namespace treemla
