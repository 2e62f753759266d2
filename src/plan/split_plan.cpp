#include "plan/split_plan.hpp"

#include <algorithm>
#include <cstdint>

#include <fmt/format.h>

#include "treemla/error.hpp"

namespace treemla {
namespace {

// The items and the merge of pairs.
class PairList {
 public:
  explicit PairList(SplitPlan& plan) : plan_(plan) {}

  // On the line.
  void cut(int request, int kv_len, const RequestCost& c, int row_tile, int64_t start, int64_t payload,
           int unit_base, int gang) {
    const SplitParams& p = plan_.params;
    const Pair pair(*this, request, kv_len, c, row_tile,
                    partial_slots(p, c, row_tile, start, payload, unit_base, gang));
    const int w0 = worker_of_unit(c, row_tile, start, payload, 0);
    const int w1 = worker_of_unit(c, row_tile, start, payload, c.units - 1);
    int piece = 0;
    for (int w = w0; w <= w1; ++w) {
      const UnitRange owned = worker_units(c, row_tile, start, payload, w);
      if (p.fixed_tiles == 0) {
        pair.add(w * gang + row_tile % gang, owned, piece++);
        continue;
      }
      for (int u = owned.begin; u < owned.end; ++u) pair.add(w, {u, u + 1}, piece++);
    }
  }
  // In pieces.
  void cut(int request, int kv_len, const RequestCost& c, int row_tile, const PairLayout& layout,
           const PairPieces& pieces) {
    const Pair pair(*this, request, kv_len, c, row_tile, piece_slots(layout, pieces));
    for (int i = 0; i < pieces.count; ++i)
      pair.add(static_cast<int>((pieces.first + i) % plan_.params.num_workers), piece_units(c, pieces, i), i);
  }

 private:
  struct Pair {
    SplitPlan& plan;
    int request, kv_len, row_begin, row_end;
    int64_t unit_cost;
    PartialSlots slots;
    Pair(PairList& list, int r, int keys, const RequestCost& c, int row_tile, const PartialSlots& s)
        : plan(list.plan_),
          request(r),
          kv_len(keys),
          row_begin(row_tile * plan.params.tile.rows_per_tile),
          row_end(std::min(c.rows, row_begin + plan.params.tile.rows_per_tile)),
          unit_cost(c.unit_cost(row_tile)),
          slots(s) {
      if (slots.count > 1) plan.combines.push_back({request, row_begin, row_end, slots});
    }
    void add(int worker, UnitRange u, int piece) const {
      const SplitParams& p = plan.params;
      const int keys_per_unit = p.tile.keys_per_tile * std::max(1, p.fixed_tiles);
      // 64-bit on purpose: the last unit may end past 2^31 before it is cut to kv_len.
      const auto key_at = [&](int unit) {
        return static_cast<int>(std::min<int64_t>(kv_len, int64_t{unit} * keys_per_unit));
      };
      plan.items.push_back({worker, request, row_begin, row_end, key_at(u.begin), key_at(u.end),
                            slots.count == 1 ? -1 : slots.slot(piece),
                            (p.fixed_tiles > 0 ? 0 : p.tile.pair_cost) + (u.end - u.begin) * unit_cost});
    }
  };
  SplitPlan& plan_;
};

}  // namespace

SplitPlan make_split_plan(const SplitParams& params, std::span<const int32_t> q_len,
                          std::span<const int32_t> kv_len) {
  SplitPlan plan;
  plan.params = params;
  std::vector<RequestCost> costs;
  BatchCost batch;
  for (size_t r = 0; r < q_len.size(); ++r) {
    costs.push_back(request_cost(params, q_len[r], kv_len[r]));
    batch.add(costs.back());
  }
  const EvenPieces even = find_even_pieces(params, batch, [&](int units) {
    int64_t pieces = 0;
    for (const RequestCost& c : costs) pieces += c.row_tiles > 0 ? pieces_of(c, units) : 0;
    return pieces;
  });
  const GangLine line = find_gangs(params, batch, [&](int gang) {
    GangLine on = {gang, 0, 0};
    for (const RequestCost& c : costs) on.add(c);
    return on;
  });
  const PairLayout layout = choose_layout(params, batch, even, line).layout;
  plan.gang = layout.gang;
  plan.total_cost = layout.pieces > 0 ? layout.pieces : line.total;
  const int64_t payload = worker_payload(params, line.total, layout.gang);

  PairList list(plan);
  int64_t start = 0, unit_base = 0, pair = 0;
  for (size_t r = 0; r < q_len.size(); ++r) {
    const RequestCost& c = costs[r];
    const int request = static_cast<int>(r);
    if (c.rows == 0 && q_len[r] > 0) plan.inert.push_back(request);
    for (int t = 0; t < c.row_tiles; ++t) {
      if (layout.pieces > 0) {
        list.cut(request, kv_len[r], c, t, layout, pieces_of_pair(layout, c, start, pair + t, t));
        continue;
      }
      if (params.fixed_tiles > 0 && unit_base > INT32_MAX - c.units)
        throw Error(ErrorCode::kUnsupported, "split_keys",
                    fmt::format("split_keys gives more than {} splits: use longer splits", INT32_MAX));
      list.cut(request, kv_len[r], c, t, start + c.pair_start(t / layout.gang), payload,
               static_cast<int>(unit_base), layout.gang);
      if (params.fixed_tiles > 0) unit_base += c.units;
    }
    if (c.row_tiles > 0)
      start += layout.pieces == 0 ? c.gang_total(layout.gang)
               : layout.units > 0 ? pieces_of(c, layout.units)
                                  : c.row_tiles;
    pair += c.row_tiles;
  }

  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const WorkItem& a, const WorkItem& b) { return a.worker < b.worker; });
  plan.worker_indptr.assign(params.num_workers + 1, 0);
  std::vector<int64_t> worker_cost(params.num_workers, 0);
  for (const WorkItem& item : plan.items) {
    ++plan.worker_indptr[item.worker + 1];
    worker_cost[item.worker] += item.cost;
  }
  for (int w = 0; w < params.num_workers; ++w) {
    plan.worker_indptr[w + 1] += plan.worker_indptr[w];
    plan.max_worker_cost = std::max(plan.max_worker_cost, worker_cost[w]);
  }
  if (!plan.combines.empty())
    plan.num_partials = params.fixed_tiles > 0 ? static_cast<int>(unit_base) : 2 * params.num_workers;
  return plan;
}

double SplitPlan::balance() const {
  if (max_worker_cost == 0) return 1.0;
  int64_t sum = 0;
  for (const WorkItem& item : items) sum += item.cost;
  return static_cast<double>(sum) / (static_cast<double>(max_worker_cost) * params.num_workers);
}

int SplitPlan::busy_workers() const {
  int busy = 0;
  for (int w = 0; w < params.num_workers; ++w) busy += worker_indptr[w + 1] > worker_indptr[w];
  return busy;
}

std::string describe(const SplitPlan& plan) {
  const SplitParams& p = plan.params;
  int most = plan.items.empty() ? 0 : 1;
  int64_t partials = 0;
  for (const CombineItem& c : plan.combines) {
    most = std::max(most, c.partials.count);
    partials += c.partials.count;
  }
  std::string s;
  s += fmt::format("tile         {} rows x {} keys\n", p.tile.rows_per_tile, p.tile.keys_per_tile);
  s += p.fixed_tiles > 0
           ? fmt::format("splits       every {} keys (batch-invariant), at most {} a row\n",
                         p.fixed_tiles * p.tile.keys_per_tile, most)
           : fmt::format("splits       balanced{}, at most {} a row\n",
                         plan.gang > 1 ? fmt::format(" over gangs of {} workers", plan.gang) : "", most);
  s += fmt::format("work items   {} on {} of {} workers, {:.1f}% balanced\n", plan.items.size(),
                   plan.busy_workers(), p.num_workers, 100 * plan.balance());
  s += fmt::format("partials     {} of {} row tiles, merged by combine\n", partials, plan.combines.size());
  return s;
}

std::string list_items(const SplitPlan& plan, int max_items) {
  std::string s =
      fmt::format("{:>7}{:>9}{:>16}{:>20}{:>9}\n", "worker", "request", "rows", "keys", "partial");
  int n = 0;
  for (const WorkItem& i : plan.items) {
    if (n++ == max_items) {
      s += fmt::format("... {} more\n", plan.items.size() - max_items);
      break;
    }
    s += fmt::format("{:>7}{:>9}{:>16}{:>20}{:>9}\n", i.worker, i.request,
                     fmt::format("{}..{}", i.row_begin, i.row_end),
                     fmt::format("{}..{}", i.key_begin, i.key_end),
                     i.partial < 0 ? std::string("-") : fmt::format("{}", i.partial));
  }
  return s;
}

}  // namespace treemla
