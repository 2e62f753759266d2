// Prefetches of cached rows that are needed soon.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/simd_kernel.hpp"
#include "core/host_device.hpp"
#include "core/kv_row.hpp"

namespace treemla {

// The rows of the next tile on their way to L2, a few lines between the blocks of this one's products: they lie anywhere
// in the pool, where no hardware prefetcher finds them, and many at once would stall for want of fill buffers.
class FetchAhead {
 public:
  explicit FetchAhead(const SimdItem& item)
      : item_(item),
        element_bytes_(static_cast<int64_t>(dtype_bytes(item.kv_dtype))),
        row_bytes_(kv_row_elements(item.shape, item.kv_dtype) * element_bytes_) {}

  // Keys [key, end), in about `steps` steps.
  void start(int key, int end, int steps) {
    key_ = key;
    end_ = end;
    at_ = 0;
    lines_ = static_cast<int>(ceil_div((end - key) * row_bytes_, kLine * steps));
  }
  inline __attribute__((always_inline)) void step() {
    for (int64_t left = lines_ * kLine; left > 0 && key_ < end_;) {
      const char* row =
          static_cast<const char*>(item_.kv) + item_.pool_rows[key_] * item_.kv_row_stride * element_bytes_;
      const int64_t begin = at_, end = std::min(row_bytes_, begin + left);
      for (int64_t at = begin; at < end; at += kLine) __builtin_prefetch(row + at, 0, 2);
      left -= end - begin;
      at_ = end;
      if (end < row_bytes_) continue;
      at_ = 0;
      ++key_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  const SimdItem& item_;
  int64_t element_bytes_, row_bytes_, at_ = 0;
  int key_ = 0, end_ = 0, lines_ = 0;
};

}  // namespace treemla
