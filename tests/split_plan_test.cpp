// The split planner: every key of every row has exactly one owner, work is balanced, invariant splits do not
// move.

#include <cmath>
#include <map>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plan/cuda_tiles.hpp"
#include "plan/device_model.hpp"
#include "plan/split_plan.hpp"
#include "plan/tiles.hpp"

namespace treemla {
namespace {

struct Batch {
  std::vector<int32_t> q_len, kv_len;
};

Batch random_batch(std::mt19937_64& rng, int max_b, int max_kv) {
  Batch batch;
  const int b = 1 + rng() % max_b;
  for (int r = 0; r < b; ++r) {
    const int q = rng() % 8 == 0 ? 0 : 1 + rng() % 70;
    batch.q_len.push_back(q);
    batch.kv_len.push_back(rng() % 8 == 0 ? 0 : q + rng() % max_kv);
  }
  return batch;
}

SplitParams random_params(std::mt19937_64& rng) {
  SplitParams p;
  p.h_q = 1 + rng() % 128;
  p.num_workers = 1 + rng() % 200;
  p.tile.rows_per_tile = 8 << (rng() % 6);
  p.tile.row_granularity = 1 << (rng() % 4);
  p.tile.keys_per_tile = 16 << (rng() % 4);
  p.tile.row_cost = rng() % 5;
  p.tile.load_cost = (p.tile.row_cost == 0) + rng() % 100;
  p.tile.pair_cost = rng() % 500;
  p.fixed_tiles = rng() % 2 ? 0 : 1 + rng() % 20;
  p.min_payload = rng() % 2 ? 0 : rng() % 5000;
  if (rng() % 2) p.tile.merge_cost = 1 + rng() % 20000;
  if (rng() % 2) p.tile.piece_cost = rng() % 200;
  if (rng() % 2) p.tile.switch_cost = rng() % 1000;
  if (rng() % 2) p.tile.reread_percent = rng() % 20;
  return p;
}

// Every (row, key) of every live request covered once; partials unique, in range, and merged in key order
// exactly once.
void check_coverage(const SplitPlan& plan, const Batch& batch) {
  const SplitParams& p = plan.params;
  std::map<std::pair<int, int>, std::map<int, const WorkItem*>>
      pieces;  // (request, row tile) -> key_begin -> item
  std::set<int> slots;
  int last_worker = 0;
  for (const WorkItem& i : plan.items) {
    ASSERT_GE(i.worker, last_worker);
    last_worker = i.worker;
    ASSERT_LT(i.worker, p.num_workers);
    ASSERT_EQ(i.row_begin % p.tile.rows_per_tile, 0);
    ASSERT_EQ(i.key_begin % p.tile.keys_per_tile, 0);
    ASSERT_LT(i.key_begin, i.key_end);
    ASSERT_TRUE(pieces[std::make_pair(i.request, i.row_begin)].emplace(i.key_begin, &i).second);
    if (i.partial >= 0) {
      ASSERT_LT(i.partial, plan.num_partials);
      ASSERT_TRUE(slots.insert(i.partial).second) << "slot " << i.partial << " used twice";
    }
  }
  std::map<std::pair<int, int>, const CombineItem*> combines;
  for (const CombineItem& c : plan.combines)
    ASSERT_TRUE(combines.emplace(std::make_pair(c.request, c.row_begin), &c).second);

  size_t pairs = 0;
  for (size_t r = 0; r < batch.q_len.size(); ++r) {
    const int rows = batch.q_len[r] * p.h_q, kv = batch.kv_len[r];
    if (rows == 0 || kv == 0) {
      EXPECT_EQ(std::count(plan.inert.begin(), plan.inert.end(), static_cast<int>(r)), rows > 0);
      continue;
    }
    for (int row = 0; row < rows; row += p.tile.rows_per_tile) {
      ++pairs;
      const auto key = std::make_pair(static_cast<int>(r), row);
      ASSERT_TRUE(pieces.count(key)) << "request " << r << " row " << row;
      int at = 0, n = 0;
      for (const auto& [begin, item] : pieces[key]) {
        ASSERT_EQ(begin, at);
        ASSERT_EQ(item->row_end, std::min(rows, row + p.tile.rows_per_tile));
        if (p.fixed_tiles > 0) {
          ASSERT_EQ(begin % (p.fixed_tiles * p.tile.keys_per_tile), 0);
        }
        if (item->partial >= 0) {
          ASSERT_TRUE(combines.count(key));
          ASSERT_EQ(item->partial, combines[key]->partials.slot(n));
        }
        at = item->key_end;
        ++n;
      }
      ASSERT_EQ(at, kv);
      ASSERT_EQ(combines.count(key), n > 1);
      if (n > 1) {
        ASSERT_EQ(combines[key]->partials.count, n);
      } else {
        ASSERT_EQ(pieces[key].begin()->second->partial, -1);
      }
    }
  }
  ASSERT_EQ(pieces.size(), pairs);
}

TEST(SplitPlanTest, EveryKeyOfEveryRowExactlyOnce) {
  std::mt19937_64 rng(11);
  for (int i = 0; i < 2000 && !testing::Test::HasFatalFailure(); ++i) {
    const Batch batch = random_batch(rng, 12, i % 10 == 0 ? 20000 : 500);
    const SplitParams p = random_params(rng);
    SCOPED_TRACE(testing::Message() << "case " << i);
    check_coverage(make_split_plan(p, batch.q_len, batch.kv_len), batch);
  }
}

TEST(SplitPlanTest, NoWorkerExceedsItsShareByMoreThanOneUnitAndItsPairs) {
  std::mt19937_64 rng(12);
  for (int i = 0; i < 500; ++i) {
    const Batch batch = random_batch(rng, 40, 5000);
    SplitParams p = random_params(rng);
    p.tile.merge_cost = 0;
    p.tile.pair_cost = 0;  // then cost on the line is exactly cost of the work
    const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
    const int64_t unit = tile_cost(p.tile, p.tile.rows_per_tile) * std::max(1, p.fixed_tiles);
    EXPECT_LE(plan.max_worker_cost, worker_payload(p, plan.total_cost) + unit);
  }
}

TEST(WgmmaChoice, OnAnH200) {
  const auto choose = [](int b, int nodes, int h_q, int prefix, bool batch_invariant = false) {
    return choose_wgmma(512, DType::kBF16, b, nodes * h_q, prefix + nodes, 132, batch_invariant);
  };
  EXPECT_TRUE(choose(8, 33, 64, 16384).tile->rows_are_m);  // hundreds of rows
  EXPECT_FALSE(choose(8, 1, 8, 65536).tile->rows_are_m);   // too few to fill a tile
  EXPECT_EQ(choose(8, 9, 64, 1024).cluster, 2);            // 64 row tiles, 66 workers of two
  EXPECT_EQ(choose(8, 33, 64, 16384).cluster, 1);
  // One form and no merging within a worker where a row's bits must not depend on the batch.
  for (const int b : {1, 8, 64})
    for (const int nodes : {1, 9, 33})
      for (const int h_q : {8, 16, 64, 128})
        for (const int prefix : {0, 256, 1024, 4096, 16384, 65536}) {
          const WgmmaChoice choice = choose(b, nodes, h_q, prefix, true);
          EXPECT_FALSE(choice.tile->rows_are_m);
          EXPECT_EQ(choice.cluster, 1);
        }
}

// Kernels whose row tiles all take as long, and that know what merging costs.
SplitParams even_params() {
  SplitParams p;
  p.h_q = 8;
  p.num_workers = 132;
  p.tile.rows_per_tile = p.tile.row_granularity = 72;
  p.tile.row_cost = 0;
  p.tile.load_cost = 240;
  p.tile.pair_cost = 900;
  p.tile.merge_cost = 300;
  p.tile.piece_cost = 4;
  p.tile.switch_cost = 1800;
  p.tile.reread_percent = 10;
  return p;
}

TEST(SplitPlanTest, EvenPiecesAreOneAWorker) {
  const SplitPlan plan =
      make_split_plan(even_params(), std::vector<int32_t>(8, 9), std::vector<int32_t>(8, 1033));
  EXPECT_EQ(plan.items.size(), 72);  // 17 key tiles a request: two of them at a time, on 9 workers
  EXPECT_EQ(plan.busy_workers(), 72);
  EXPECT_EQ(plan.max_worker_cost, 900 + 2 * 240);
}

TEST(SplitPlanTest, EvenPiecesAreTheShortestThatThereAreWorkersFor) {
  std::mt19937_64 rng(14);
  int even = 0;
  for (int i = 0; i < 500; ++i) {
    const Batch batch = random_batch(rng, 40, 5000);
    SplitParams p = even_params();
    p.tile.reread_percent = 0;  // no gangs
    BatchCost cost;
    for (size_t r = 0; r < batch.q_len.size(); ++r)
      cost.add(request_cost(p, batch.q_len[r], batch.kv_len[r]));
    const auto pieces = [&](int units) {
      int64_t n = 0;
      for (size_t r = 0; r < batch.q_len.size(); ++r) {
        const RequestCost c = request_cost(p, batch.q_len[r], batch.kv_len[r]);
        if (c.row_tiles > 0) n += pieces_of(c, units);
      }
      return n;
    };
    const EvenPieces found = find_even_pieces(p, cost, pieces);
    if (cost.pairs == 0 || cost.pairs > p.num_workers) {
      EXPECT_EQ(found.units, 0);
      continue;
    }
    int least = 1;
    while (pieces(least) > p.num_workers) ++least;
    ASSERT_EQ(found.units, least) << "case " << i;
    EXPECT_EQ(found.pieces, pieces(least));

    const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
    const PairLayout layout = choose_layout(p, cost, found, {1, cost.total, cost.pairs}).layout;
    if (layout.units == 0 || layout.first_pairs > 0) continue;
    ++even;
    EXPECT_EQ(plan.items.size(), static_cast<size_t>(found.pieces));
    EXPECT_EQ(plan.busy_workers(), found.pieces);
    EXPECT_LE(plan.max_worker_cost, p.tile.pair_cost + least * p.tile.load_cost);
  }
  EXPECT_GT(even, 100);
}

TEST(SplitPlanTest, PairsLeftOverAreCutEvenly) {
  // 144 row tiles of 257 key tiles on 132 workers: 132 of them whole, 12 in 11 pieces of 24 key tiles.
  const Batch batch = {std::vector<int32_t>(8, 162), std::vector<int32_t>(8, 257 * 64)};
  const SplitParams p = even_params();
  const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
  check_coverage(plan, batch);
  EXPECT_EQ(plan.items.size(), 132 + 12 * 11);
  EXPECT_EQ(plan.combines.size(), 12);
  EXPECT_EQ(plan.max_worker_cost, 900 + 257 * 240 + 900 + 24 * 240);
  // Everyone begins with a whole one.
  for (int w = 0; w < 132; ++w) EXPECT_EQ(plan.items[plan.worker_indptr[w]].partial, -1);
}

TEST(SplitPlanTest, FewerPairsThanWorkersAreCutInTwoKindsOfPieces) {
  // 72 row tiles of 257 key tiles on 132 workers: 66 in 2 pieces of 129, 6 in 22 of 12.
  const Batch batch = {std::vector<int32_t>(8, 81), std::vector<int32_t>(8, 257 * 64)};
  const SplitPlan plan = make_split_plan(even_params(), batch.q_len, batch.kv_len);
  check_coverage(plan, batch);
  EXPECT_EQ(plan.items.size(), 66 * 2 + 6 * 22);
  EXPECT_EQ(plan.max_worker_cost, 900 + 129 * 240 + 900 + 12 * 240);
}

// Batches whose pairs are all alike, which have layouts of their own.
TEST(SplitPlanTest, EveryKeyOfEveryRowExactlyOnceOfEqualPairs) {
  std::mt19937_64 rng(15);
  int two_kinds = 0;
  for (int i = 0; i < 2000 && !testing::Test::HasFatalFailure(); ++i) {
    SplitParams p = even_params();
    p.num_workers = 1 + rng() % 200;
    p.h_q = 1 + rng() % 16;
    const int b = 1 + rng() % 12, keys = 70 + rng() % 20000;
    Batch batch;
    BatchCost cost;
    for (int r = 0; r < b; ++r) {
      batch.q_len.push_back(1 + rng() % 70);
      batch.kv_len.push_back(keys);
      cost.add(request_cost(p, batch.q_len[r], keys));
    }
    EvenPieces even;
    if (cost.pairs <= p.num_workers) even = even_pieces_of_equal(p, cost.pairs, cost.most_units);
    const LayoutChoice choice = choose_layout(p, cost, even, {1, cost.total, cost.pairs});
    two_kinds += choice.layout.first_pairs > 0 && choice.layout.units > 0;
    const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
    SCOPED_TRACE(testing::Message() << "case " << i);
    check_coverage(plan, batch);
    if (choice.layout.pieces > 0) {
      EXPECT_EQ(plan.items.size(), static_cast<size_t>(choice.layout.pieces));
      EXPECT_LE(plan.max_worker_cost, choice.cost);
    }
  }
  EXPECT_GT(two_kinds, 100);
}

// 64 requests of 1 to 65536 keys in equal steps, and as many in equal ratios.
std::vector<Batch> uneven_batches(int nodes) {
  std::vector<Batch> batches(2);
  for (int r = 0; r < 64; ++r) {
    batches[0].kv_len.push_back(nodes + 1 + r * 65535 / 63);
    batches[1].kv_len.push_back(nodes + static_cast<int>(std::lround(std::pow(65536, r / 63.0))));
  }
  for (Batch& batch : batches) batch.q_len.assign(64, nodes);
  return batches;
}

TEST(SplitPlanTest, RowTilesOfUnevenRequestsGoTogether) {
  for (const int nodes : {9, 33, 41})
    for (const int h_q : {8, 64, 128})
      for (const Batch& batch : uneven_batches(nodes)) {
        SplitParams p = even_params();
        p.h_q = h_q;
        const int row_tiles = ceil_div(nodes * h_q, p.tile.rows_per_tile);
        const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
        SCOPED_TRACE(testing::Message() << nodes << " nodes, " << h_q << " heads, gangs of " << plan.gang);
        check_coverage(plan, batch);
        EXPECT_LE(plan.num_partials, 2 * p.num_workers);
        EXPECT_EQ(plan.gang > 1, row_tiles > 1);
        if (row_tiles > 1) {
          EXPECT_GT(plan.balance(), 0.9);
        }
        // A gang's workers have the same keys of the same requests, as far as those have row tiles for all.
        std::map<std::tuple<int, int, int, int>, int> at_once;  // gang, request, keys: workers
        for (const WorkItem& i : plan.items)
          ++at_once[std::tuple(i.worker / plan.gang, i.request, i.key_begin, i.key_end)];
        for (const auto& [place, workers] : at_once)
          EXPECT_GE(workers, row_tiles % plan.gang == 0 ? plan.gang : row_tiles % plan.gang);
      }
}

TEST(SplitPlanTest, EveryKeyOfEveryRowExactlyOnceByGangs) {
  std::mt19937_64 rng(16);
  int gangs = 0;
  for (int i = 0; i < 300 && !testing::Test::HasFatalFailure(); ++i) {
    SplitParams p = even_params();
    p.num_workers = 1 + rng() % 200;
    p.h_q = 1 + rng() % 32;
    p.tile.rows_per_tile = p.tile.row_granularity = 8 << rng() % 5;
    p.tile.reread_percent = rng() % 100;
    const Batch batch = random_batch(rng, 30, 20000);
    const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
    SCOPED_TRACE(testing::Message() << "case " << i);
    check_coverage(plan, batch);
    EXPECT_LE(plan.num_partials, 2 * p.num_workers);
    EXPECT_LE(plan.combines.size(), static_cast<size_t>(p.num_workers));
    gangs += plan.gang > 1;
  }
  EXPECT_GT(gangs, 50);
}

TEST(SplitPlanTest, UnevenLengthsAreBalanced) {
  // 64 requests of 1 to 65536 keys on the 132 multiprocessors of an H200.
  Batch batch;
  for (int r = 0; r < 64; ++r) {
    batch.q_len.push_back(9);
    batch.kv_len.push_back(9 + r * r * 16);
  }
  SplitParams p;
  p.h_q = 8;
  p.num_workers = find_device_model("h200").num_sms;
  p.tile = {72, 8, 64, 1, 0, 0};
  const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
  EXPECT_GT(plan.balance(), 0.97);
  EXPECT_EQ(plan.busy_workers(), p.num_workers);
  check_coverage(plan, batch);
}

TEST(SplitPlanTest, PairsStayWholeWhereMergingTakesLonger) {
  // 8 requests of 9 row tiles, 5 key tiles each, on 132 workers.
  SplitParams p;
  p.h_q = 64;
  p.num_workers = 132;
  p.tile = {64, 64, 64, 0, 205, 600, 300, 13};
  Batch batch;
  for (int r = 0; r < 8; ++r) {
    batch.q_len.push_back(9);
    batch.kv_len.push_back(9 + 256 - r);  // not quite equal
  }
  const SplitPlan whole = make_split_plan(p, batch.q_len, batch.kv_len);
  EXPECT_TRUE(whole.combines.empty());
  EXPECT_EQ(whole.busy_workers(), 72);
  check_coverage(whole, batch);
  // Twice as many pairs as workers: two each.
  p.num_workers = 36;
  EXPECT_EQ(make_split_plan(p, batch.q_len, batch.kv_len).busy_workers(), 36);
  EXPECT_TRUE(make_split_plan(p, batch.q_len, batch.kv_len).combines.empty());
  // One long request: cut.
  p.num_workers = 132;
  batch.kv_len[3] = 20000;
  const SplitPlan cut = make_split_plan(p, batch.q_len, batch.kv_len);
  EXPECT_FALSE(cut.combines.empty());
  EXPECT_GT(cut.balance(), 0.9);
  check_coverage(cut, batch);
}

TEST(SplitPlanTest, OneRequestOccupiesEveryWorker) {
  const Batch batch{{9}, {16393}};
  SplitParams p;
  p.h_q = 8;
  p.num_workers = 132;
  p.tile = {72, 8, 64, 1, 0, 0};
  EXPECT_GT(make_split_plan(p, batch.q_len, batch.kv_len).busy_workers(), 120);
  // Not worth it when each would get less than min_payload.
  p.min_payload = 32 * tile_cost(p.tile, 72);
  EXPECT_LE(make_split_plan(p, batch.q_len, batch.kv_len).busy_workers(), 9);
}

TEST(SplitPlanTest, InvariantSplitsDependOnTheRequestAlone) {
  std::mt19937_64 rng(13);
  for (int i = 0; i < 300; ++i) {
    const Batch batch = random_batch(rng, 10, 3000);
    SplitParams p = random_params(rng);
    p.fixed_tiles = 1 + rng() % 8;
    auto boundaries = [](const SplitPlan& plan, int request) {
      std::set<std::tuple<int, int, int>> s;
      for (const WorkItem& w : plan.items)
        if (w.request == request) s.emplace(w.row_begin, w.key_begin, w.key_end);
      return s;
    };
    const SplitPlan together = make_split_plan(p, batch.q_len, batch.kv_len);
    for (size_t r = 0; r < batch.q_len.size(); ++r) {
      SplitParams other = p;
      other.num_workers = 1 + rng() % 300;
      const SplitPlan alone =
          make_split_plan(other, std::span(&batch.q_len[r], 1), std::span(&batch.kv_len[r], 1));
      EXPECT_EQ(boundaries(together, static_cast<int>(r)), boundaries(alone, 0));
    }
  }
}

TEST(SplitPlanTest, BalancedPartialsFitTwoSlotsAWorkerWhateverTheLengths) {
  std::mt19937_64 rng(14);
  for (int i = 0; i < 500; ++i) {
    const Batch batch = random_batch(rng, 30, 3000);
    SplitParams p = random_params(rng);
    p.fixed_tiles = 0;
    EXPECT_LE(make_split_plan(p, batch.q_len, batch.kv_len).num_partials, 2 * p.num_workers);
  }
}

TEST(SplitPlanTest, LongestLengthsDoNotOverflow) {
  const Batch batch{{1025, 1}, {INT32_MAX, INT32_MAX}};
  SplitParams p;
  p.h_q = 128;
  p.num_workers = 132;
  p.tile = {64, 8, 64, 1, 0, 0};
  check_coverage(make_split_plan(p, batch.q_len, batch.kv_len), batch);
  p.fixed_tiles = 1 << 20;
  check_coverage(make_split_plan(p, batch.q_len, batch.kv_len), batch);
}

TEST(SplitPlanTest, EmptyBatchHasNoWork) {
  const SplitPlan plan = make_split_plan(SplitParams{}, {}, {});
  EXPECT_TRUE(plan.items.empty());
  EXPECT_EQ(plan.balance(), 1.0);
  EXPECT_THAT(describe(plan), testing::HasSubstr("work items   0"));
}

TEST(SplitPlanTest, PrintsItself) {
  SplitParams p;
  p.h_q = 64;
  p.num_workers = 2;
  p.tile = cpu_simd_tile(9 * 64);
  const Batch batch{{9}, {4105}};
  const SplitPlan plan = make_split_plan(p, batch.q_len, batch.kv_len);
  EXPECT_THAT(describe(plan), testing::AllOf(testing::HasSubstr("192 rows x 64 keys"),
                                             testing::HasSubstr("on 2 of 2 workers")));
  EXPECT_THAT(list_items(plan, 1), testing::HasSubstr("... "));
}

}  // namespace
}  // namespace treemla
