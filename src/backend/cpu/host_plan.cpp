#include "backend/cpu/host_plan.hpp"

#include <algorithm>
#include <span>

#include "core/lookup.hpp"
#include "treemla/tree.hpp"

namespace treemla {
namespace {

// Bits 0..n-1 of a row.
void set_low_bits(uint32_t* row, int n) {
  for (int w = 0; n > 0; ++w, n -= 32) row[w] = n >= 32 ? ~0u : (1u << n) - 1;
}

}  // namespace

HostPlan::HostPlan(const VerifyProblem& p) : b(p.b) {
  int max_q = 0;
  int64_t total_kv = 0;
  for (int r = 0; r < b; ++r) {
    q_begin.push_back(p.q_indptr[r]);
    q_len.push_back(p.q_indptr[r + 1] - p.q_indptr[r]);
    // Only rows with queries are ever looked at, so a request without any contributes no keys.
    kv_len.push_back(q_len[r] > 0 ? p.kv_len[r] : 0);
    kv_begin.push_back(total_kv);
    total_kv += kv_len[r];
    max_q = std::max(max_q, q_len[r]);
  }

  pool_rows.resize(total_kv);
  for (int r = 0; r < b; ++r) {
    const int64_t base = page_base(p.pages, r);
    for (int64_t t = 0; t < kv_len[r]; ++t)
      pool_rows[kv_begin[r] + t] = pool_row(p.pages, p.kv.page_size, base, t);
  }

  if (p.mask.kind == MaskKind::kTree && !p.mask.ancestor_bits) {
    BatchBits built = batch_bits_from_parents({p.mask.parents, static_cast<size_t>(p.q.total_q)},
                                              {p.q_indptr, static_cast<size_t>(b) + 1});
    bits = std::move(built.bits);
    words = built.words;
    return;
  }
  words = p.mask.kind == MaskKind::kTree ? p.mask.words_per_row : words_per_row(max_q);
  bits.assign(p.q.total_q * words, 0);
  for (int r = 0; r < b; ++r) {
    for (int i = 0; i < q_len[r]; ++i) {
      uint32_t* row = bits.data() + (static_cast<int64_t>(q_begin[r]) + i) * words;
      switch (p.mask.kind) {
        case MaskKind::kNone:
          set_low_bits(row, q_len[r]);
          break;
        case MaskKind::kCausal:
          set_low_bits(row, i + 1);
          break;
        case MaskKind::kTree:
          std::copy_n(p.mask.ancestor_bits + (row - bits.data()), words, row);
          break;
      }
    }
  }
}

}  // namespace treemla
