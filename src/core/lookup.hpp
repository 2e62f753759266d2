// Page lookup and mask tests shared by every CPU kernel.
#pragma once

#include <cstdint>

#include "treemla/problem.hpp"

namespace treemla {

// First entry of request r in pages.entries.
inline int64_t page_base(const PageTable& pages, int r) {
  return pages.indptr ? pages.indptr[r] : static_cast<int64_t>(r) * pages.stride;
}

inline int64_t page_entry(const PageTable& pages, int64_t i) {
  return pages.index_type == IndexType::kI32 ? static_cast<const int32_t*>(pages.entries)[i]
                                             : static_cast<const int64_t*>(pages.entries)[i];
}

// Pool row of token t of the request whose entries start at `base`.
inline int64_t pool_row(const PageTable& pages, int page_size, int64_t base, int64_t t) {
  return page_entry(pages, base + t / page_size) * page_size + t % page_size;
}

inline int64_t kv_row_stride(const VerifyProblem& p) {
  return p.kv.row_stride ? p.kv.row_stride : kv_row_elements(p.shape, p.kv.dtype);
}
// Row `row` of the pool.
inline const void* kv_row_at(const VerifyProblem& p, int64_t row) {
  return static_cast<const char*>(p.kv.data) +
         row * kv_row_stride(p) * static_cast<int64_t>(dtype_bytes(p.kv.dtype));
}
inline int64_t q_head_stride(const VerifyProblem& p) {
  return p.q.head_stride ? p.q.head_stride : p.shape.d_qk();
}
inline int64_t q_token_stride(const VerifyProblem& p) {
  return p.q.token_stride ? p.q.token_stride : p.shape.h_q * q_head_stride(p);
}

}  // namespace treemla
