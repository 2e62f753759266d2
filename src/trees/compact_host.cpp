// Compacting on the host: everything is looked up and checked first, then rows move, layer by layer, in the order of the path.

#include <algorithm>
#include <cstring>
#include <vector>

#include "trees/compact_plan.hpp"
#include "trees/steps.hpp"

namespace treemla {
namespace {

struct Move {
  int64_t from, to;  // pool rows
};

}  // namespace

void compact_on_host(const CompactProblem& p, const CompactOutput& out) {
  std::vector<CompactRequest> requests;
  std::vector<Move> moves;
  std::vector<std::vector<int64_t>> freed(static_cast<std::size_t>(p.b));
  for (int r = 0; r < p.b; ++r) {
    FaultWord fault{};
    const CompactRequest c = read_compact_request(p, r, fault);
    throw_if_fault(fault);
    for (int j = 0; j < c.num_kept; ++j) {
      const int node = path_node(p, c, r, j, fault);
      throw_if_fault(fault);
      if (node == j) continue;
      const int64_t from = row_of_token(p, c, r, c.prefix_len() + node, fault);
      const int64_t to = row_of_token(p, c, r, c.prefix_len() + j, fault);
      throw_if_fault(fault);
      moves.push_back({from, to});
    }
    if (c.num_kept > 0 && (out.freed_pages || out.num_freed)) {
      const FreedPages pages = freed_pages(p, c);
      for (int64_t page = pages.first; page < pages.end; ++page) {
        freed[r].push_back(page_of_token(p, c, r, page * p.page_size, fault));
        throw_if_fault(fault);
      }
    }
    requests.push_back(c);
  }

  const int64_t stride = p.row_stride_bytes ? p.row_stride_bytes : p.row_bytes;
  for (int layer = 0; layer < p.num_layers; ++layer) {
    auto* base = static_cast<char*>(p.layers ? p.layers[layer] : p.pool);
    if (!p.layers) base += layer * p.layer_stride_bytes;
    for (const Move& m : moves)
      std::memmove(base + m.to * stride, base + m.from * stride, static_cast<std::size_t>(p.row_bytes));
  }
  for (int r = 0; r < p.b; ++r) {
    const CompactRequest& c = requests[r];
    if (out.kv_len) out.kv_len[r] = c.num_kept > 0 ? c.prefix_len() + c.num_kept : c.kv_len;
    if (out.num_freed) out.num_freed[r] = static_cast<int32_t>(freed[r].size());
    if (out.freed_pages) std::copy(freed[r].begin(), freed[r].end(), out.freed_pages + c.q_begin);
  }
}

}  // namespace treemla
