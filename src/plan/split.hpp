// Split-KV arithmetic: which worker (CTA or thread) attends which keys of which rows.
//
// Query rows of a request are its (node, head) pairs, heads fastest, cut into row tiles; its keys are cut into key tiles.
// A PAIR is one row tile of one request with all of that request's key tiles. All pairs lie one after another on a line
// whose length is cost, and the line is cut into equal pieces, one a worker:
//
//     pair 0                    pair 1          pair 2
//     |o|t0|t1|t2|t3|t4|t5|t6|  |o|t0|t1|t2|    |o|t0|t1|t2|t3|     o: fixed cost of a pair, ti: key tile i
//     '--- worker 0 ---''---- worker 1 ----''---- worker 2 ----'
//
// A unit (key tile) belongs to the worker that holds its first coordinate, so every key of every row has one owner
// whatever the lengths are, and no worker exceeds its piece by more than one unit. Pairs that span workers leave partial
// results that `combine` merges. With fixed_tiles > 0 the units are instead chunks of fixed_tiles key tiles counted from
// key 0, each with a partial of its own: the bits of a row then do not depend on what else is in the batch.
//
// Cutting costs as well: partial results are written, read and merged, and a worker that ends one pair and begins another does both. So a
// batch may be cut in pieces instead, of whole pairs or of as many units each, which go round the workers in their order, whichever ends
// soonest (PairLayout). Those at work at the same time then are neighbours: row tiles of a request, at the same keys.
//
// Uneven lengths fit no such rounds. They stay on the line, but it may be one of gangs: so many workers share a place on it, and what lies
// there are as many row tiles of a request, one for each of them. A gang's workers then have the same keys at the same time.
//
// The functions here are host and device code: a GPU derives its work from the same arithmetic inside a captured graph.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace treemla {

// How a kernel tiles, and what its steps cost in units that only matter relative to each other.
struct TilePolicy {
  int rows_per_tile = 64;   // (node, head) rows that share the loaded keys
  int row_granularity = 1;  // rows are padded to this inside a tile
  int keys_per_tile = 64;
  int row_cost = 1;   // cost of one (padded) row over one key tile
  int load_cost = 0;  // cost of loading one key tile, whatever the rows
  int pair_cost = 0;  // cost of beginning and ending a row tile in a worker: q load, output or partial write
  // Cost of merging, and of each piece more; 0: not known, pairs are cut wherever that balances.
  int merge_cost = 0, piece_cost = 0;
  // Of ending one pair and beginning another, beyond what that costs on the line.
  int switch_cost = 0;
  // What cutting costs, in percent, where row tiles of the same keys then read them at different times from more than a cache can hold. Of
  // gangs of n, an n-th.
  int reread_percent = 0;
  int cluster_cost = 0;  // of merging within a worker of several CTAs
};

// The policy of a worker of so many CTAs, which share out the keys of each tile that they are given, and merge.
constexpr TilePolicy clustered(TilePolicy tile, int ctas) {
  tile.keys_per_tile *= ctas;
  if (ctas > 1) tile.pair_cost += tile.cluster_cost;
  return tile;
}

struct SplitParams {
  TilePolicy tile;
  int h_q = 1;
  int num_workers = 1;
  int fixed_tiles = 0;      // key tiles a split, or 0: balanced
  int64_t min_payload = 0;  // least cost worth a worker of its own (balanced mode)
};

// How a batch is cut: pieces 0, none, is wherever that balances on the line.
struct PairLayout {
  int64_t pieces = 0;       // of the batch; number i is worker i % num_workers's
  int64_t first_pairs = 0;  // the first so many pairs have pieces of
  int first_units = 0;      // so many units, or with 0 are a piece each
  int units = 0;            // of a piece of the others, or less of a pair's last
  int gang = 1;             // on the line: workers that share a place on it, with a row tile each
  TREEMLA_HD int first_count(int pair_units) const {
    return first_units > 0 ? ceil_div(pair_units, first_units) : 1;
  }
};

// One request on the line.
struct RequestCost {
  int rows = 0;  // q_len * h_q, or 0 if the request is inert
  int row_tiles = 0;
  int key_tiles = 0;
  int units = 0;          // per pair: key tiles, or chunks of them
  int64_t full_unit = 0;  // cost of a unit of a full row tile
  int64_t last_unit = 0;  // of the last row tile, which may be narrower
  int64_t offset = 0;     // cost of a pair before its first unit
  TREEMLA_HD int64_t unit_cost(int row_tile) const {
    return row_tile + 1 < row_tiles ? full_unit : last_unit;
  }
  TREEMLA_HD int64_t full_pair() const { return offset + units * full_unit; }
  TREEMLA_HD int64_t pair_start(int row_tile) const { return row_tile * full_pair(); }
  TREEMLA_HD int64_t total() const {
    if (row_tiles == 0) return 0;
    return pair_start(row_tiles - 1) + offset + units * last_unit;
  }
  // What lies on a line of gangs: pairs of so many row tiles, the last one's perhaps missing some.
  TREEMLA_HD int gang_pairs(int gang) const { return ceil_div(row_tiles, gang); }
  TREEMLA_HD int64_t gang_total(int gang) const {
    return gang == 1 ? total() : gang_pairs(gang) * full_pair();
  }
};

TREEMLA_HD inline int64_t tile_cost(const TilePolicy& t, int rows) {
  return t.load_cost + static_cast<int64_t>(round_up(rows, t.row_granularity)) * t.row_cost;
}

TREEMLA_HD inline RequestCost request_cost(const SplitParams& p, int q_len, int kv_len) {
  RequestCost c;
  if (q_len <= 0 || kv_len <= 0) return c;
  c.rows = q_len * p.h_q;
  c.row_tiles = ceil_div(c.rows, p.tile.rows_per_tile);
  c.key_tiles =
      kv_len / p.tile.keys_per_tile + (kv_len % p.tile.keys_per_tile != 0);  // no sum that could overflow
  const int last_rows = c.rows - (c.row_tiles - 1) * p.tile.rows_per_tile;
  c.full_unit = tile_cost(p.tile, p.tile.rows_per_tile);
  c.last_unit = tile_cost(p.tile, last_rows);
  c.offset = p.tile.pair_cost;
  c.units = c.key_tiles;
  if (p.fixed_tiles > 0) {
    c.units = ceil_div(c.key_tiles, p.fixed_tiles);
    c.full_unit = p.tile.pair_cost + c.full_unit * p.fixed_tiles;
    c.last_unit = p.tile.pair_cost + c.last_unit * p.fixed_tiles;
    c.offset = 0;
  }
  return c;
}

// Cost a worker, or a gang of them, takes on of `total` on the line. Never below the largest unit, so that the workers of a pair are
// consecutive with none left out.
TREEMLA_HD inline int64_t worker_payload(const SplitParams& p, int64_t total, int gang = 1) {
  int64_t unit = tile_cost(p.tile, p.tile.rows_per_tile);
  if (p.fixed_tiles > 0) unit = p.tile.pair_cost + unit * p.fixed_tiles;
  int64_t payload = ceil_div<int64_t>(total, p.num_workers / gang);
  if (p.fixed_tiles == 0 && payload < p.min_payload) payload = p.min_payload;
  return payload < unit ? unit : payload;
}

// What a layout is chosen by.
struct BatchCost {
  int64_t total = 0, pairs = 0, units = 0;  // of all pairs
  int64_t distinct_units = 0;               // of all requests, whose row tiles have the same keys
  int64_t largest = 0;                      // a pair's cost
  int most_units = 0;                       // of a pair
  int most_row_tiles = 0;                   // of a request
  TREEMLA_HD void add(const RequestCost& c) {
    if (c.row_tiles == 0) return;
    total += c.total();
    pairs += c.row_tiles;
    units += int64_t{c.row_tiles} * c.units;
    distinct_units += c.units;
    if (c.full_pair() > largest) largest = c.full_pair();
    if (c.units > most_units) most_units = c.units;
    if (c.row_tiles > most_row_tiles) most_row_tiles = c.row_tiles;
  }
  TREEMLA_HD bool is_equal() const { return total == pairs * largest; }
};

// A line of gangs, and what lies on it.
struct GangLine {
  int gang = 1;  // workers
  int64_t total = 0, pairs = 0;
  TREEMLA_HD void add(const RequestCost& c) {
    total += c.gang_total(gang);
    pairs += c.gang_pairs(gang);
  }
};

// Do row tiles of the same keys read more of them than a cache can hold, unless they do at the same time?
TREEMLA_HD inline bool rereads(const SplitParams& p, const BatchCost& batch) {
  constexpr int64_t kCachedKeys = 32768;
  return batch.units > batch.distinct_units && batch.distinct_units * p.tile.keys_per_tile > kCachedKeys;
}
// When the last worker is done, cut wherever that balances.
TREEMLA_HD inline int64_t cut_cost(const SplitParams& p, const BatchCost& batch, const GangLine& line) {
  const int64_t payload = worker_payload(p, line.total, line.gang),
                unit = tile_cost(p.tile, p.tile.rows_per_tile);
  const int64_t rereading =
      rereads(p, batch) ? quotient64(payload * p.tile.reread_percent, int64_t{100} * line.gang) : 0;
  return ceil_div(payload, unit) * unit + rereading + p.tile.pair_cost + p.tile.merge_cost +
         quotient64(p.tile.switch_cost * line.pairs * line.gang, p.num_workers) +
         ceil_div(line.total, payload) * line.gang * p.tile.piece_cost;
}
TREEMLA_HD inline int64_t whole_cost(const SplitParams& p, const BatchCost& batch) {
  return ceil_div<int64_t>(batch.pairs, p.num_workers) * batch.largest;
}
// All of the workers end, and write, at the same time: measured as half a unit.
TREEMLA_HD inline int64_t even_cost(const SplitParams& p, int units, int64_t pieces) {
  const int64_t unit = tile_cost(p.tile, p.tile.rows_per_tile);
  return p.tile.pair_cost + units * unit + unit / 2 + p.tile.merge_cost + pieces * p.tile.piece_cost;
}
TREEMLA_HD inline int64_t pieces_of(const RequestCost& c, int units) {
  return int64_t{c.row_tiles} * ceil_div(c.units, units);
}

// Even pieces of the fewest units that there are workers for. 0: there are more pairs than workers, or kernels whose row tiles differ.
struct EvenPieces {
  int units = 0;
  int64_t pieces = 0;
};
TREEMLA_HD inline bool can_cut_evenly(const SplitParams& p, const BatchCost& batch) {
  return p.fixed_tiles == 0 && p.tile.row_cost == 0 && p.tile.merge_cost > 0 && batch.pairs > 0;
}
// pieces_of(units) says how many pieces of so many units the batch has.
template <class PiecesOf>
TREEMLA_HD inline EvenPieces find_even_pieces(const SplitParams& p, const BatchCost& batch,
                                              const PiecesOf& pieces_of) {
  if (!can_cut_evenly(p, batch) || batch.pairs > p.num_workers) return {};
  // A pair has less than one piece more than its share.
  const int64_t spare = p.num_workers - batch.pairs;
  int low = static_cast<int>(ceil_div<int64_t>(batch.units, p.num_workers)), high = batch.most_units;
  if (spare > 0 && batch.units / spare + 1 < high) high = static_cast<int>(batch.units / spare + 1);
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (pieces_of(middle) <= p.num_workers)
      high = middle;
    else
      low = middle + 1;
  }
  return {low, pieces_of(low)};
}

// Gangs are tried that need up to so many rounds for the request of most row tiles, and refused if that makes row tiles, with those missing,
// so many times as many.
constexpr int kMostGangRounds = 16, kMostGangTiles = 2;

// The line that should end first. line_of(gang) says what lies on one of gangs of so many workers.
template <class LineOf>
TREEMLA_HD inline GangLine find_gangs(const SplitParams& p, const BatchCost& batch, const LineOf& line_of) {
  GangLine best = {1, batch.total, batch.pairs};
  if (!can_cut_evenly(p, batch) || batch.is_equal() || p.tile.reread_percent == 0 || !rereads(p, batch))
    return best;
  int64_t best_cost = cut_cost(p, batch, best);
  int gang = 1;
  const int most_rounds =
      batch.most_row_tiles <= kMostGangRounds ? batch.most_row_tiles - 1 : kMostGangRounds;
  for (int rounds = 1; rounds <= most_rounds; ++rounds) {
    const int other = ceil_div(batch.most_row_tiles, rounds);
    if (other == gang || other > p.num_workers) continue;
    gang = other;
    const GangLine line = line_of(gang);
    const int64_t cost = cut_cost(p, batch, line);
    if (cost >= best_cost || line.pairs * gang > kMostGangTiles * batch.pairs) continue;
    best = line;
    best_cost = cost;
  }
  return best;
}
// Of `pairs` pairs that all have as many units.
TREEMLA_HD inline EvenPieces even_pieces_of_equal(const SplitParams& p, int64_t pairs, int pair_units) {
  const int units = ceil_div(pair_units, static_cast<int>(p.num_workers / pairs));
  return {units, pairs * ceil_div(pair_units, units)};
}

// Requests of as many rows and keys each: pairs that are all alike.
inline BatchCost equal_batch(const SplitParams& p, int64_t requests, int64_t rows, int64_t keys) {
  BatchCost batch;
  const int64_t units = ceil_div<int64_t>(keys, p.tile.keys_per_tile);
  batch.pairs = requests * ceil_div<int64_t>(rows, p.tile.rows_per_tile);
  batch.units = batch.pairs * units;
  batch.distinct_units = requests * units;
  batch.most_units = static_cast<int>(units);
  batch.largest = p.tile.pair_cost + units * tile_cost(p.tile, p.tile.rows_per_tile);
  batch.total = batch.pairs * batch.largest;
  return batch;
}
struct LayoutChoice {
  PairLayout layout;
  int64_t cost = 0;  // when the last worker is done
  TREEMLA_HD void consider(const PairLayout& other, int64_t other_cost) {
    if (other_cost > cost) return;
    layout = other;
    cost = other_cost;
  }
  // Pairs that are all alike: as many as fill all workers, whole or in one piece more than there are workers for, and the rest evenly.
  TREEMLA_HD void consider_two_kinds(const SplitParams& p, const BatchCost& batch) {
    const int64_t rounds = batch.pairs / p.num_workers,
                  count = rounds > 0 ? 1 : p.num_workers / batch.pairs + 1,
                  first = rounds > 0 ? rounds * p.num_workers : p.num_workers / count,
                  rest = batch.pairs - first;
    if (rest == 0 || first == 0 || count > batch.most_units) return;
    const EvenPieces last = even_pieces_of_equal(p, rest, batch.most_units);
    if (rounds > 0) {
      consider({first + last.pieces, first, 0, last.units},
               rounds * batch.largest + even_cost(p, last.units, last.pieces));
      return;
    }
    const int units = ceil_div(batch.most_units, static_cast<int>(count));
    const int64_t pieces = first * ceil_div(batch.most_units, units);
    consider({pieces + last.pieces, first, units, last.units},
             p.tile.pair_cost + units * tile_cost(p.tile, p.tile.rows_per_tile) +
                 even_cost(p, last.units, pieces + last.pieces));
  }
};
// even, line: what find_even_pieces() and find_gangs() found.
TREEMLA_HD inline LayoutChoice choose_layout(const SplitParams& p, const BatchCost& batch,
                                             const EvenPieces& even, const GangLine& line) {
  LayoutChoice choice;
  if (batch.pairs == 0) return choice;
  choice.layout.gang = line.gang;
  choice.cost = cut_cost(p, batch, line);
  if (p.fixed_tiles > 0 || p.tile.merge_cost == 0) return choice;
  if (even.units > 0) choice.consider({even.pieces, 0, 0, even.units}, even_cost(p, even.units, even.pieces));
  if (can_cut_evenly(p, batch) && batch.is_equal()) choice.consider_two_kinds(p, batch);
  choice.consider({batch.pairs, batch.pairs, 0, 0}, whole_cost(p, batch));
  return choice;
}
// When the last worker is done with pairs that are all alike.
inline int64_t equal_batch_cost(const SplitParams& p, const BatchCost& batch) {
  if (batch.units == 0) return 0;
  EvenPieces even;
  if (can_cut_evenly(p, batch) && batch.pairs <= p.num_workers)
    even = even_pieces_of_equal(p, batch.pairs, batch.most_units);
  return choose_layout(p, batch, even, {1, batch.total, batch.pairs}).cost;
}

// ---- a batch in pieces ----

// A pair's pieces, of `units` or what is left of them.
struct PairPieces {
  int64_t first = 0;  // number of the first
  int count = 1;
  int units = 0;
};
// `before`: pieces of the requests before; `pair`: the pair's number in the batch, of which it is row tile `row_tile` of its request.
TREEMLA_HD inline PairPieces pieces_of_pair(const PairLayout& layout, const RequestCost& c, int64_t before,
                                            int64_t pair, int row_tile) {
  const int first_count = layout.first_count(c.units);
  if (pair < layout.first_pairs) return {pair * first_count, first_count, layout.first_units};
  const int count = layout.units > 0 ? ceil_div(c.units, layout.units) : 1;
  if (layout.first_pairs == 0) return {before + int64_t{row_tile} * count, count, layout.units};
  return {layout.first_pairs * first_count + (pair - layout.first_pairs) * count, count, layout.units};
}
// Where piece number `piece` is, of the request whose first piece is number `start` and first pair number `pair`.
TREEMLA_HD inline int row_tile_of_piece(const PairLayout& layout, const RequestCost& c, int64_t start,
                                        int64_t pair, int64_t piece) {
  const int first_count = layout.first_count(c.units);
  const int64_t first_pieces = layout.first_pairs * first_count;
  if (piece < first_pieces) return static_cast<int>(quotient64(piece, first_count) - pair);
  const int64_t count = layout.units > 0 ? ceil_div(c.units, layout.units) : 1;
  return static_cast<int>(pair < layout.first_pairs
                              ? layout.first_pairs - pair + quotient64(piece - first_pieces, count)
                              : quotient64(piece - start, count));
}

struct UnitRange {
  int begin = 0, end = 0;
};

// Units of the pair that starts at coordinate `start` which worker, or gang, number `worker` owns.
TREEMLA_HD inline UnitRange worker_units(const RequestCost& c, int row_tile, int64_t start, int64_t payload,
                                         int worker) {
  const int64_t unit = c.unit_cost(row_tile), first = start + c.offset;
  const int64_t lo = worker * payload - first, hi = lo + payload;
  const int64_t begin = lo <= 0 ? 0 : quotient64(lo + unit - 1, unit),
                end = hi <= 0 ? 0 : quotient64(hi + unit - 1, unit);
  return {static_cast<int>(begin < c.units ? begin : c.units),
          static_cast<int>(end < c.units ? end : c.units)};
}

TREEMLA_HD inline int worker_of_unit(const RequestCost& c, int row_tile, int64_t start, int64_t payload,
                                     int unit) {
  return static_cast<int>(quotient64(start + c.offset + unit * c.unit_cost(row_tile), payload));
}

// Where a pair's partial results lie: slot(0) = first, slot(j) = second + (j - 1) * step. count 1: no partial, the worker
// writes the output itself.
struct PartialSlots {
  int count = 0;
  int first = 0, second = 0, step = 1;
  TREEMLA_HD int slot(int j) const { return j == 0 ? first : second + (j - 1) * step; }
};

// Of a batch in pieces, of which cut pairs have at most two a worker. Whole pairs need none.
TREEMLA_HD inline PartialSlots piece_slots(const PairLayout& layout, const PairPieces& p) {
  const int first = static_cast<int>(p.first - (layout.first_units == 0 ? layout.first_pairs : 0));
  return {p.count, first, first + 1, 1};
}
TREEMLA_HD inline UnitRange piece_units(const RequestCost& c, const PairPieces& p, int piece) {
  if (p.count == 1) return {0, c.units};
  const int begin = piece * p.units, end = begin + p.units;
  return {begin, end < c.units ? end : c.units};
}

// Balanced mode: a worker has at most two partials, of a pair begun before it (slot 2w) and of one that goes on after it
// (slot 2w + 1), so 2 * num_workers slots are enough for any lengths. Fixed mode: slots are numbered along the line;
// `unit_base` is the number of units before this pair. Of gangs, worker number m of each has the row tiles that are m modulo their size.
TREEMLA_HD inline PartialSlots partial_slots(const SplitParams& p, const RequestCost& c, int row_tile,
                                             int64_t start, int64_t payload, int unit_base, int gang = 1) {
  if (p.fixed_tiles > 0) return {c.units, unit_base, unit_base + 1, 1};
  const int w0 = worker_of_unit(c, row_tile, start, payload, 0);
  const int w1 = worker_of_unit(c, row_tile, start, payload, c.units - 1);
  const int member = row_tile % gang;
  return {w1 - w0 + 1, 2 * (w0 * gang + member) + 1, 2 * ((w0 + 1) * gang + member), 2 * gang};
}

}  // namespace treemla
