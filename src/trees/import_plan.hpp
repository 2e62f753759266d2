// What importing does to one request, found before anything is written: for the host and for a thread block of a GPU.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "treemla/import_batch.hpp"
#include "trees/tree_fault.hpp"

namespace treemla {

TREEMLA_HD inline int64_t read_index(const void* array, IndexType type, int r) {
  return type == IndexType::kI64 ? static_cast<const int64_t*>(array)[r]
                                 : static_cast<const int32_t*>(array)[r];
}

// To the nearest int, which arithmetic in 64 bits can't overflow with, nor a fault's word.
TREEMLA_HD inline int to_int(int64_t x) {
  return static_cast<int>(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x);
}

// Rows of request r's mask in the layout kFull, lengths that no request can have as the nearest.
TREEMLA_HD inline int64_t full_mask_width(const ImportProblem& p, int r) {
  const int64_t n = to_int(read_index(p.seq_len, p.seq_len_type, r));
  return (n > 0 ? n : 0) + (p.seq_len_has_tree ? 0 : p.q_len);
}

struct ImportRequest {
  int kv_len = 0;        // 0: inert
  int64_t row = 0;       // of the token table
  int64_t mask_at = 0;   // cell of node 0 on itself
  int64_t mask_row = 0;  // cells between rows
};

// `widths_before`: the sum of full_mask_width() of the requests before r; of no account in other layouts.
TREEMLA_HD inline ImportRequest read_import_request(const ImportProblem& p, const ImportOutput& out, int r,
                                                    int64_t widths_before, FaultWord& fault) {
  ImportRequest c;
  const int seq_len = to_int(read_index(p.seq_len, p.seq_len_type, r));
  const int64_t kv_len = int64_t{seq_len} + (p.seq_len_has_tree ? 0 : p.q_len);
  const bool copies = out.page_table != nullptr;
  if (seq_len < 0 || seq_len == INT32_MAX || kv_len > INT32_MAX ||
      (copies && (kv_len > p.row_width || kv_len > out.page_stride))) {
    fault = make_fault(TreeFault::kSeqLen, r, seq_len);
    return c;
  }
  if (kv_len < p.q_len) return c;
  c.row = read_index(p.row_index, p.row_index_type, r);
  if (copies && (c.row < 0 || c.row >= p.num_rows)) {
    fault = make_fault(TreeFault::kRowIndex, r, to_int(c.row));
    c.row = 0;
    return c;
  }
  if (p.mask_layout == MaskLayout::kFull) {
    if (widths_before > p.mask_len / p.q_len) return c;  // before a product that might overflow
    c.mask_row = kv_len;
    c.mask_at = p.q_len * widths_before + (kv_len - p.q_len);
  } else if (p.mask_layout == MaskLayout::kQlenOnly) {
    c.mask_row = p.q_len;
    c.mask_at = static_cast<int64_t>(r) * p.q_len * p.q_len;
  }
  if (p.mask_layout != MaskLayout::kNone && c.mask_at + (p.q_len - 1) * c.mask_row + p.q_len > p.mask_len)
    return c;
  c.kv_len = static_cast<int>(kv_len);
  return c;
}

// Does node i see node j?
TREEMLA_HD inline bool import_cell(const ImportProblem& p, const ImportRequest& c, int i, int j) {
  return p.mask_layout == MaskLayout::kNone ? j <= i : p.mask[c.mask_at + i * c.mask_row + j] != 0;
}

}  // namespace treemla
