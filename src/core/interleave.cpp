#include "treemla/interleave.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/fail.hpp"
#include "core/kv_row.hpp"

namespace treemla {
namespace {

constexpr int64_t kElementBytes = 2;

// `alignment` in bytes. Every byte offset fits 64 bits.
void check_rows(const char* name, const char* stride_name, const void* data, int64_t rows, int64_t stride,
                int d_qk, int64_t alignment) {
  if (stride != 0 && rows > 1 && stride < d_qk)
    fail(stride_name, "{} = {} must be 0 (contiguous) or at least {} (d_qk)", stride_name, stride, d_qk);
  if (rows > 1 && stride % (alignment / kElementBytes) != 0)
    fail(stride_name, "{} = {} must be even: interleaved rows are words of two elements", stride_name,
         stride);
  if (saturating_mul(saturating_mul(rows, std::max<int64_t>(stride, d_qk)), kElementBytes) ==
      std::numeric_limits<int64_t>::max())
    fail(stride_name, "{} = {} for {} rows passes 64-bit offsets", stride_name, stride, rows);
  if (rows > 0 && !data) fail(name, "{} is null", name);
  if (reinterpret_cast<std::uintptr_t>(data) % alignment != 0)
    fail(name, "{} = {} must be aligned to {} bytes", name, data, alignment);
}

void check(const InterleaveProblem& p) {
  check_kv_layout(p.shape, DType::kBF16, KvLayout::kInterleaved);
  if (p.num_rows < 0) fail("num_rows", "num_rows = {} must not be negative", p.num_rows);
  if (p.pool_rows < 0) fail("pool_rows", "pool_rows = {} must not be negative", p.pool_rows);
  if (p.num_rows == 0) return;
  const int d_qk = p.shape.d_qk();
  check_rows("rows", "row_stride", p.rows, p.num_rows, p.row_stride, d_qk, kElementBytes);
  check_rows("pool", "pool_row_stride", p.pool, p.pool_rows, p.pool_row_stride, d_qk, 2 * kElementBytes);
  if (reinterpret_cast<std::uintptr_t>(p.slots) % alignof(int64_t) != 0)
    fail("slots", "slots = {} must be aligned to {} bytes", static_cast<const void*>(p.slots),
         alignof(int64_t));
  if (!p.slots && p.num_rows > p.pool_rows)
    fail("num_rows", "num_rows = {} is more than pool_rows = {}", p.num_rows, p.pool_rows);
  for (int64_t i = 0; p.slots && i < p.num_rows; ++i) {
    if (p.slots[i] < -1 || p.slots[i] >= p.pool_rows)
      fail("slots", "slots[{}] = {} is outside [-1, {})", i, p.slots[i], p.pool_rows);
  }
}

}  // namespace

void check_kv_layout(const MlaShape& s, DType dtype, KvLayout layout) {
  if (layout < KvLayout{} || layout > KvLayout::kInterleaved)
    fail("kv.layout", "kv.layout = {} is no valid value: allowed are row_major, interleaved",
         static_cast<int>(layout));
  if (layout == KvLayout::kRowMajor) return;
  if (dtype != DType::kBF16)
    fail("kv.layout", "kv.layout = interleaved is for bf16 caches, not {}", dtype_name(dtype));
  if (s.d_v < kInterleavedBlock || s.d_v % kInterleavedBlock != 0)
    fail("shape.d_v", "shape.d_v = {} must be a multiple of {} above 0: kv.layout is interleaved", s.d_v,
         kInterleavedBlock);
  if (s.d_rope < 0 || s.d_rope % kInterleavedBlock != 0)
    fail("shape.d_rope", "shape.d_rope = {} must be a multiple of {}: kv.layout is interleaved", s.d_rope,
         kInterleavedBlock);
}

void interleave_row(const uint16_t* from, int n, uint16_t* to) {
  constexpr int kHalf = kInterleavedBlock / 2;
  for (int block = 0; block < n; block += kInterleavedBlock) {
    for (int i = 0; i < kHalf; ++i) {
      to[block + 2 * i] = from[block + i];
      to[block + 2 * i + 1] = from[block + kHalf + i];
    }
  }
}

void interleave_rows(const InterleaveProblem& p) {
  check(p);
  const int d_qk = p.shape.d_qk();
  const int64_t from_stride = p.row_stride ? p.row_stride : d_qk,
                to_stride = p.pool_row_stride ? p.pool_row_stride : d_qk;
  const auto* from = static_cast<const uint16_t*>(p.rows);
  auto* to = static_cast<uint16_t*>(p.pool);
  for (int64_t i = 0; i < p.num_rows; ++i) {
    const int64_t slot = p.slots ? p.slots[i] : i;
    if (slot >= 0) interleave_row(from + i * from_stride, d_qk, to + slot * to_stride);
  }
}

}  // namespace treemla
