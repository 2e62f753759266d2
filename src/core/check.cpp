// Every check of a problem's arguments, before anything is launched or read through a table.
//
// Order matters: shapes and strides first, so that later sizes cannot overflow; then lengths, which say what
// the page table and the mask must hold; contents only where they live on the host.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "core/fail.hpp"
#include "core/kv_row.hpp"
#include "core/lookup.hpp"
#include "treemla/problem.hpp"
#include "treemla/tree.hpp"

namespace treemla {
namespace {

constexpr int kMaxHeads = 1024;
constexpr int kMaxWidth = 4096;
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

void check_bytes(const char* argument, int64_t elements, int64_t element_bytes) {
  if (saturating_mul(elements, element_bytes) == kInt64Max) {
    fail(argument, "{}: its {} elements of {} bytes are more than 64-bit offsets can address", argument,
         elements == kInt64Max ? "2^63 or more" : fmt::to_string(elements), element_bytes);
  }
}

// Null is allowed only for what is never read.
void check_pointer(const char* argument, const void* pointer, std::size_t alignment, bool is_read) {
  if (pointer == nullptr) {
    if (is_read)
      fail(argument, "{} is null: it may be null only when it has no element that is read", argument);
    return;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % alignment != 0) {
    fail(argument, "{} = {:#x} is not aligned: it must be a multiple of {} bytes", argument, address,
         alignment);
  }
}

// Enums may arrive as any integer through the C ABI.
template <typename E>
void check_enum(const char* argument, E value, E last, std::string_view allowed) {
  if (value < E{} || value > last) {
    fail(argument, "{} = {} is no valid value: allowed are {}", argument, static_cast<int>(value), allowed);
  }
}

void check_wide_dtype(const char* argument, DType dtype) {
  check_enum(argument, dtype, DType::kQ8, "fp32, fp16, bf16");
  if (is_cache_only(dtype)) {
    fail(argument, "{} = {} is for caches only: allowed are fp32, fp16, bf16", argument, dtype_name(dtype));
  }
}

void check_scale(const char* argument, double value) {
  if (!std::isfinite(value) || value <= 0) {
    fail(argument, "{} = {} must be finite and greater than 0", argument, value);
  }
}

void check_not_negative(const char* argument, int64_t value) {
  if (value < 0) fail(argument, "{} = {} must not be negative", argument, value);
}

// The stride of a dimension of one element is never used, and array libraries put anything there.
void check_stride(const char* argument, int64_t stride, int64_t count, int width, const char* width_name) {
  check_not_negative(argument, stride);
  if (stride != 0 && count > 1 && stride < width) {
    fail(argument, "{} = {} must be 0 (contiguous) or at least {} ({})", argument, stride, width, width_name);
  }
}

void check_shape(const MlaShape& s) {
  if (s.h_q < 1 || s.h_q > kMaxHeads) {
    fail("shape.h_q", "shape.h_q = {} is outside [1, {}]", s.h_q, kMaxHeads);
  }
  if (s.d_v < 1 || s.d_v > kMaxWidth)
    fail("shape.d_v", "shape.d_v = {} is outside [1, {}]", s.d_v, kMaxWidth);
  if (s.d_rope < 0 || s.d_rope > kMaxWidth - s.d_v) {
    fail("shape.d_rope", "shape.d_rope = {} is outside [0, {}]: d_qk = d_v + d_rope is at most {}", s.d_rope,
         kMaxWidth - s.d_v, kMaxWidth);
  }
}

void check_query(const VerifyProblem& p) {
  const int d_qk = p.shape.d_qk();
  check_wide_dtype("q.dtype", p.q.dtype);
  if (p.q.total_q < 0 || p.q.total_q > kInt32Max) {
    fail("q.total_q", "q.total_q = {} is outside [0, {}]: q_indptr holds 32-bit numbers", p.q.total_q,
         kInt32Max);
  }
  check_stride("q.head_stride", p.q.head_stride, p.shape.h_q, d_qk, "d_qk");
  check_stride("q.token_stride", p.q.token_stride, p.q.total_q, d_qk, "d_qk");
  const int64_t head_stride = q_head_stride(p);
  const int64_t token_stride = p.q.token_stride ? p.q.token_stride : saturating_mul(head_stride, p.shape.h_q);
  const int64_t last_head = saturating_mul(head_stride, p.shape.h_q - 1);
  const int64_t last_token = saturating_mul(token_stride, std::max<int64_t>(p.q.total_q - 1, 0));
  check_bytes("q", saturating_add(saturating_add(last_token, last_head), d_qk),
              static_cast<int64_t>(dtype_bytes(p.q.dtype)));
  // out and workspaces of kernels are dense, whatever the strides of q are.
  check_bytes("q", saturating_mul(saturating_mul(p.q.total_q, p.shape.h_q), d_qk), sizeof(double));
  check_pointer("q.data", p.q.data, dtype_bytes(p.q.dtype), p.q.total_q > 0);
}

void check_pool(const VerifyProblem& p) {
  check_enum("kv.dtype", p.kv.dtype, DType::kQ8, "fp32, fp16, bf16, e4m3, e4m3_packed, q8_0");
  check_kv_widths(p.shape, p.kv.dtype);
  check_kv_layout(p.shape, p.kv.dtype, p.kv.layout);
  check_scale("kv.scale", p.kv.scale);
  check_not_negative("kv.num_pages", p.kv.num_pages);
  if (p.kv.page_size < 1) fail("kv.page_size", "kv.page_size = {} must be at least 1", p.kv.page_size);
  const int64_t num_rows = saturating_mul(p.kv.num_pages, p.kv.page_size);
  const bool packed = p.kv.dtype == DType::kF8E4M3Packed, q8 = p.kv.dtype == DType::kQ8;
  check_stride("kv.row_stride", p.kv.row_stride, num_rows, kv_row_elements(p.shape, p.kv.dtype),
               packed ? "the bytes of a packed row"
               : q8   ? "the bytes of a q8_0 row"
                      : "d_qk");
  const int64_t row_alignment = kv_alignment(p.kv) / static_cast<int64_t>(dtype_bytes(p.kv.dtype));
  if (num_rows > 1 && p.kv.row_stride % row_alignment != 0) {
    fail("kv.row_stride", "kv.row_stride = {} must be a multiple of {}: {}", p.kv.row_stride, row_alignment,
         packed ? "e4m3_packed rows hold float32 scales"
         : q8   ? "q8_0 rows hold fp16 scales"
                : "interleaved rows are words of two elements");
  }
  check_bytes("kv", saturating_mul(num_rows, kv_row_stride(p)),
              static_cast<int64_t>(dtype_bytes(p.kv.dtype)));
}

struct Lengths {
  int max_q_len = 0;
  bool any_active = false;  // some request has query rows and cached rows
};

// A request with no query rows or no cached rows is inert: padding, whose pages are never looked at.
bool is_active(const VerifyProblem& p, int r) { return p.q_indptr[r + 1] > p.q_indptr[r] && p.kv_len[r] > 0; }

Lengths check_lengths(const VerifyProblem& p) {
  Lengths lengths;
  if (p.q_indptr[0] != 0) fail("q_indptr", "q_indptr[0] = {} must be 0", p.q_indptr[0]);
  for (int r = 0; r < p.b; ++r) {
    const int64_t begin = p.q_indptr[r], end = p.q_indptr[r + 1];
    if (end < begin || end > p.q.total_q) {
      fail("q_indptr", "q_indptr[{}] = {} is outside [{}, {}]: it must not fall, nor pass total_q", r + 1,
           end, begin, p.q.total_q);
    }
    const int64_t q_len = end - begin, kv_len = p.kv_len[r];
    if (kv_len < 0) fail("kv_len", "kv_len[{}] = {} must not be negative", r, kv_len);
    if (kv_len > 0 && kv_len < q_len) {
      fail("kv_len",
           "kv_len[{}] = {} must be 0 or at least {}, the q_len of request {}: tree rows are cached too", r,
           kv_len, q_len, r);
    }
    if (saturating_mul(q_len, p.shape.h_q) > kInt32Max) {
      fail("q_indptr", "request {} has q_len {} x shape.h_q {} rows: at most {}", r, q_len, p.shape.h_q,
           kInt32Max);
    }
    lengths.max_q_len = std::max(lengths.max_q_len, static_cast<int>(q_len));
    lengths.any_active |= is_active(p, r);
  }
  if (p.q_indptr[p.b] != p.q.total_q) {
    fail("q_indptr", "q_indptr[{}] = {} must equal q.total_q = {}", p.b, p.q_indptr[p.b], p.q.total_q);
  }
  return lengths;
}

void check_page_table(const VerifyProblem& p) {
  const PageTable& t = p.pages;
  check_enum("pages.index_type", t.index_type, IndexType::kI64, "int32, int64");
  check_not_negative("pages.num_entries", t.num_entries);
  check_bytes("pages.entries", t.num_entries, sizeof(int64_t));
  check_pointer("pages.indptr", t.indptr, alignof(int32_t), false);
  if (t.indptr == nullptr) {
    check_not_negative("pages.stride", t.stride);
    if (saturating_mul(p.b, t.stride) > t.num_entries) {
      fail("pages.stride",
           "pages.stride = {} for {} requests passes the {} entries of the table (pages.num_entries)",
           t.stride, p.b, t.num_entries);
    }
  }
}

void check_page_contents(const VerifyProblem& p) {
  const PageTable& t = p.pages;
  if (t.indptr != nullptr && t.indptr[0] < 0)
    fail("pages.indptr", "pages.indptr[0] = {} must not be negative", t.indptr[0]);
  for (int r = 0; r < p.b; ++r) {
    const int64_t needed = is_active(p, r) ? ceil_div(p.kv_len[r], p.kv.page_size) : 0;
    const int64_t base = page_base(t, r);
    if (t.indptr != nullptr) {
      const int64_t end = t.indptr[r + 1];
      if (end < base || end > t.num_entries) {
        fail("pages.indptr",
             "pages.indptr[{}] = {} is outside [{}, {}]: it must not fall, nor pass num_entries", r + 1, end,
             base, t.num_entries);
      }
      if (end - base < needed) {
        fail("pages.indptr",
             "pages.indptr[{}] = {} leaves {} entries to request {}: its kv_len {} needs at least {} pages "
             "of {}",
             r + 1, end, end - base, r, p.kv_len[r], needed, p.kv.page_size);
      }
    } else if (t.stride < needed) {
      fail("pages.stride", "pages.stride = {} must be at least {}: kv_len[{}] = {} needs {} pages of {}",
           t.stride, needed, r, p.kv_len[r], needed, p.kv.page_size);
    }
    for (int64_t i = 0; i < needed; ++i) {
      const int64_t entry = page_entry(t, base + i);
      if (entry < 0 || entry >= p.kv.num_pages) {
        fail("pages.entries",
             "page entry {} of request {} (entries[{}]) = {} is outside [0, {}): the pool has {} pages", i, r,
             base + i, entry, p.kv.num_pages, p.kv.num_pages);
      }
    }
  }
}

// The same rules as check_parents(), but positions are those in the caller's array of the whole batch.
void check_batch_parents(const VerifyProblem& p) {
  for (int r = 0; r < p.b; ++r) {
    const int64_t first = p.q_indptr[r], q_len = p.q_indptr[r + 1] - first;
    for (int64_t i = 0; i < q_len; ++i) {
      const int32_t parent = p.mask.parents[first + i];
      if (i == 0 && parent != -1) {
        fail("mask.parents",
             "parent of node 0 of request {} (parents[{}]) = {} must be -1: node 0 is the root", r, first,
             parent);
      }
      if (i > 0 && (parent < 0 || parent >= i)) {
        fail("mask.parents", "parent of node {} of request {} (parents[{}]) = {} is outside [0, {}): {}", i,
             r, first + i, parent, i,
             parent == -1 ? "a request has one root" : "parents come before their children");
      }
    }
  }
}

void check_mask(const VerifyProblem& p, const Lengths* lengths) {
  const TreeMask& m = p.mask;
  check_enum("mask.kind", m.kind, MaskKind::kTree, "none, causal, tree");
  if (m.kind != MaskKind::kTree) return;
  check_pointer("mask.parents", m.parents, alignof(int32_t), false);
  check_pointer("mask.ancestor_bits", m.ancestor_bits, alignof(uint32_t), false);
  if (p.q.total_q == 0) return;
  if (m.parents == nullptr && m.ancestor_bits == nullptr) {
    fail("mask", "mask.parents and mask.ancestor_bits are both null: a tree mask needs one of them");
  }
  if (m.ancestor_bits != nullptr) {  // any pattern is a valid mask; bits past q_len are ignored
    const int needed = lengths ? words_per_row(lengths->max_q_len) : 1;
    if (m.words_per_row < needed) {
      fail("mask.words_per_row", "mask.words_per_row = {} must be at least {}: the largest q_len is {}",
           m.words_per_row, needed, lengths ? fmt::to_string(lengths->max_q_len) : "at least 1");
    }
    check_bytes("mask.ancestor_bits", saturating_mul(p.q.total_q, m.words_per_row), sizeof(uint32_t));
  } else if (lengths) {
    check_batch_parents(p);
  }
}

}  // namespace

void check_problem(const VerifyProblem& p) {
  check_enum("memory", p.memory, Memory::kDevice, "host, device");
  check_shape(p.shape);
  check_scale("sm_scale", p.sm_scale);
  if (p.b < 0 || p.b == kInt32Max) fail("b", "b = {} is outside [0, {})", p.b, kInt32Max);
  check_query(p);
  if (p.b == 0 && p.q.total_q != 0)
    fail("q.total_q", "q.total_q = {} must be 0: there are no requests (b = 0)", p.q.total_q);
  check_pool(p);
  check_page_table(p);
  check_not_negative("max_q_len", p.max_q_len);
  check_not_negative("max_kv_len", p.max_kv_len);
  check_pointer("q_indptr", p.q_indptr, alignof(int32_t), p.b > 0);
  check_pointer("kv_len", p.kv_len, alignof(int32_t), p.b > 0);

  const bool on_host = p.memory == Memory::kHost;
  const bool see_contents = on_host && p.q_indptr != nullptr;  // it is null only when b = 0
  Lengths lengths;
  if (see_contents) lengths = check_lengths(p);
  // Lengths on the device are unknown here: what exists might be read.
  const bool maybe_active = p.b > 0 && p.q.total_q > 0 && !on_host;
  const bool reads_kv = lengths.any_active || (maybe_active && p.kv.num_pages > 0);
  const bool reads_entries = lengths.any_active || (maybe_active && p.pages.num_entries > 0);
  check_pointer("kv.data", p.kv.data, static_cast<std::size_t>(kv_alignment(p.kv)), reads_kv);
  check_pointer("pages.entries", p.pages.entries, p.pages.index_type == IndexType::kI32 ? 4 : 8,
                reads_entries);
  if (see_contents) check_page_contents(p);
  check_mask(p, see_contents ? &lengths : nullptr);
}

void check_output(const VerifyProblem& p, const VerifyOutput& o) {
  check_shape(p.shape);
  check_not_negative("q.total_q", p.q.total_q);
  check_wide_dtype("out_dtype", o.out_dtype);
  check_bytes("out", saturating_mul(saturating_mul(p.q.total_q, p.shape.h_q), p.shape.d_v),
              static_cast<int64_t>(dtype_bytes(o.out_dtype)));
  check_pointer("out", o.out, dtype_bytes(o.out_dtype), p.q.total_q > 0);
  check_pointer("lse", o.lse, alignof(float), false);
}

}  // namespace treemla
