// What compaction does to one request, found and checked before anything moves: for the host and for a thread block of a GPU.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "treemla/compact.hpp"
#include "trees/tree_fault.hpp"

namespace treemla {

struct CompactRequest {
  int q_begin = 0, q_len = 0;
  int kv_len = 0;
  int num_kept = 0;       // rows kept of the tree, root included; 0: inert
  int64_t page_base = 0;  // of its first page entry
  TREEMLA_HD int prefix_len() const { return kv_len - q_len; }
};

// Lengths of request r. Inert if padded or after a fault of accept_path(); a fault of its own is set.
TREEMLA_HD inline CompactRequest read_compact_request(const CompactProblem& p, int r, FaultWord& fault) {
  CompactRequest c;
  const int64_t begin = p.q_indptr[r], end = p.q_indptr[r + 1];
  if (begin < 0 || end < begin || end > p.total_q) {
    fault = make_fault(TreeFault::kQIndptr, r, r + 1);
    return c;
  }
  c.q_begin = static_cast<int>(begin);
  c.q_len = static_cast<int>(end - begin);
  const int kv_len = p.kv_len[r], num_accepted = p.num_accepted[r];
  if (kv_len < 0 || (kv_len > 0 && kv_len < c.q_len)) {
    fault = make_fault(TreeFault::kKvLen, r, kv_len);
    return c;
  }
  c.kv_len = kv_len;
  if (c.q_len == 0 || kv_len == 0 || num_accepted < 0) return c;
  if (num_accepted >= p.path_stride || num_accepted >= c.q_len) {
    fault = make_fault(TreeFault::kNumAccepted, r, num_accepted);
    return c;
  }
  const int64_t pages = ceil_div<int64_t>(kv_len, p.page_size);
  c.page_base = p.pages.indptr != nullptr ? p.pages.indptr[r] : r * p.pages.stride;
  const int64_t room = p.pages.indptr != nullptr ? p.pages.indptr[r + 1] - c.page_base : p.pages.stride;
  if (c.page_base < 0 || room < pages || c.page_base > p.pages.num_entries - pages) {
    fault = make_fault(TreeFault::kPageTable, r, kv_len);
    return c;
  }
  c.num_kept = num_accepted + 1;
  return c;
}

// Node at place j of the path; -1 and a fault if the path doesn't rise from the root.
TREEMLA_HD inline int path_node(const CompactProblem& p, const CompactRequest& c, int r, int j,
                                FaultWord& fault) {
  const int32_t* path = p.accept_index + static_cast<int64_t>(r) * p.path_stride;
  const int64_t node = static_cast<int64_t>(path[j]) - c.q_begin;
  const int64_t least = j == 0 ? 0 : static_cast<int64_t>(path[j - 1]) - c.q_begin + 1;
  if (node < least || node >= c.q_len || (j == 0 && node != 0)) {
    fault = make_fault(TreeFault::kAcceptIndex, r, j);
    return -1;
  }
  return static_cast<int>(node);
}

// The page with the request's token t; -1 and a fault if the table names none.
TREEMLA_HD inline int64_t page_of_token(const CompactProblem& p, const CompactRequest& c, int r, int64_t t,
                                        FaultWord& fault) {
  const int64_t at = c.page_base + t / p.page_size;
  const int64_t entry = p.pages.index_type == IndexType::kI64
                            ? static_cast<const int64_t*>(p.pages.entries)[at]
                            : static_cast<const int32_t*>(p.pages.entries)[at];
  if (entry < 0 || entry >= p.num_pages) {
    fault = make_fault(TreeFault::kPageEntry, r, static_cast<int>(t / p.page_size));
    return -1;
  }
  return entry;
}
TREEMLA_HD inline int64_t row_of_token(const CompactProblem& p, const CompactRequest& c, int r, int64_t t,
                                       FaultWord& fault) {
  const int64_t page = page_of_token(p, c, r, t, fault);
  return page < 0 ? -1 : page * p.page_size + t % p.page_size;
}

// Pages [first, end) of the request hold only rows that are dropped.
struct FreedPages {
  int first = 0, end = 0;
};
TREEMLA_HD inline FreedPages freed_pages(const CompactProblem& p, const CompactRequest& c) {
  const int new_len = c.prefix_len() + c.num_kept;
  return {static_cast<int>(ceil_div<int64_t>(new_len, p.page_size)),
          static_cast<int>(ceil_div<int64_t>(c.kv_len, p.page_size))};
}

}  // namespace treemla
