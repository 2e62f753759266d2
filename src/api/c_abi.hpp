// What every part of the C ABI shares: errors as statuses, and structs that grow.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>
#include <type_traits>

#include "core/fail.hpp"
#include "treemla/error.hpp"
#include "treemla/treemla.h"
#include "treemla/version.hpp"

namespace treemla::c_abi {

// ---- errors ----

// Keeps the message for treemla_last_error() of this thread; returns the status of `code`.
treemla_status record(ErrorCode code, std::string_view argument, std::string_view message) noexcept;

// No exception crosses the ABI: every body that can throw runs in here.
template <typename F>
treemla_status guarded(F&& body) noexcept {
  try {
    body();
    return TREEMLA_OK;
  } catch (const Error& e) {
    return record(e.code(), e.argument(), e.what());
  } catch (const std::bad_alloc&) {
    return record(ErrorCode::kOutOfMemory, "", "out of memory");
  } catch (const std::exception& e) {
    return record(ErrorCode::kInternal, "", e.what());
  } catch (...) {
    return record(ErrorCode::kInternal, "", "an exception of unknown type");
  }
}

inline void check_not_null(const char* argument, const void* pointer) {
  if (!pointer) fail(argument, "{} is null", argument);
}

// ---- structs that grow: `size` is the first field, new fields come at the end ----

// Where a struct of another version differs in size from ours, by this much at most: past it `size` was never set.
constexpr std::size_t kMaxGrowth = 4096;

template <typename T>
void check_size(const char* argument, const T* s) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, size) == 0);
  check_not_null(argument, s);
  // The first version of each struct is the current one. When one grows, its first size stays the lower limit.
  if (s->size < sizeof(T) || s->size > sizeof(T) + kMaxGrowth) {
    fail(argument,
         "{}.size = {} must be sizeof the struct ({} in this library): start from its _init function",
         argument, s->size, sizeof(T));
  }
}

// The caller's struct as this library knows it. A newer caller may set fields that are unknown here only to 0.
template <typename T>
T read_struct(const char* argument, const T* s) {
  check_size(argument, s);
  const auto* bytes = reinterpret_cast<const unsigned char*>(s);
  if (std::any_of(bytes + sizeof(T), bytes + s->size, [](unsigned char x) { return x != 0; })) {
    fail(argument, "{} has fields set past its first {} bytes, which version {} of the library does not know",
         argument, sizeof(T), version());
  }
  return *s;
}

// Writes the first size bytes of `value`, and zeros where the caller's struct is longer.
template <typename T>
void write_struct(T* to, std::size_t size, T value) noexcept {
  value.size = size;
  std::memset(static_cast<void*>(to), 0, size);
  std::memcpy(static_cast<void*>(to), &value, std::min(size, sizeof(T)));
}

template <typename T>
void init_struct(T* to, std::size_t size, const T& value) noexcept {
  if (to && size >= sizeof(to->size)) write_struct(to, size, value);
}

inline void check_reserved(const char* argument, int32_t reserved) {
  if (reserved != 0) fail(argument, "{}.reserved = {} must be 0", argument, reserved);
}

}  // namespace treemla::c_abi
