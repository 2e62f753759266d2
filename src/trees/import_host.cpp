// Importing on the host: every request is checked first, then written.

#include <algorithm>
#include <vector>

#include "trees/import_plan.hpp"
#include "trees/steps.hpp"

namespace treemla {

void import_on_host(const ImportProblem& p, const ImportOutput& out) {
  std::vector<ImportRequest> requests;
  int64_t widths = 0;
  for (int r = 0; r < p.b; ++r) {
    FaultWord fault{};
    requests.push_back(read_import_request(p, out, r, widths, fault));
    throw_if_fault(fault);
    widths += full_mask_width(p, r);
  }
  const int64_t stride = p.row_stride ? p.row_stride : p.row_width;
  for (int r = 0; r < p.b; ++r) {
    const ImportRequest& c = requests[r];
    if (out.kv_len) out.kv_len[r] = c.kv_len;
    if (out.page_table)
      std::copy_n(p.token_table + c.row * stride, c.kv_len, out.page_table + r * out.page_stride);
    if (!out.ancestor_bits) continue;
    uint32_t* bits = out.ancestor_bits + static_cast<int64_t>(r) * p.q_len * out.words_per_row;
    std::fill_n(bits, static_cast<int64_t>(p.q_len) * out.words_per_row, 0u);
    if (c.kv_len == 0) continue;
    for (int i = 0; i < p.q_len; ++i, bits += out.words_per_row)
      for (int j = 0; j < p.q_len; ++j)
        if (import_cell(p, c, i, j)) bits[j / 32] |= 1u << (j % 32);
  }
}

}  // namespace treemla
