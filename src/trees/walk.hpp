// The lossless walk of accept.hpp, written once for the host and for a thread block of a GPU, whose threads all take the same way.
//
// At a node the target's distribution is integer weights w over the vocabulary with sum `total`. Children are judged in order;
// what each rejection leaves is again integer weights, which nobody stores: they follow from w, the draft's weights q and
// the list of rejections.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "treemla/accept.hpp"
#include "trees/exact.hpp"
#include "trees/philox.hpp"
#include "trees/tree_fault.hpp"

namespace treemla {

// The target at a node, after temperature, top-k and top-p.
struct RowTarget {
  float max = 0;              // largest logit
  float inv_temperature = 1;  // 0: the argmax alone
  int32_t argmax = 0;
  TreeFault fault = TreeFault::kNone;
  uint64_t cut = 1;    // least weight that stays
  uint64_t total = 0;  // of the weights that stay
};

// Temperatures below this are 0: their inverse would overflow.
constexpr float kLeastTemperature = 1e-30f;
TREEMLA_HD inline bool temperature_is_valid(float t) { return t >= 0 && t < INFINITY; }
TREEMLA_HD inline float inverse_temperature(float t) {
  return t < kLeastTemperature ? 0.0f : div_rn(1.0f, t);
}

TREEMLA_HD inline uint64_t uncut_weight(const RowTarget& row, float logit, int token) {
  if (row.inv_temperature == 0) return token == row.argmax ? kWeightOne : 0;
  return exp_weight(mul_rn(add_rn(logit, -row.max), row.inv_temperature));
}
TREEMLA_HD inline uint64_t target_weight(const RowTarget& row, float logit, int token) {
  const uint64_t w = uncut_weight(row, logit, token);
  return w >= row.cut ? w : 0;
}
// How much the largest weights must make up to stay under top_p.
TREEMLA_HD inline uint64_t top_p_mass(float top_p, uint64_t total) {
  const uint64_t need =
      top_p > 0 ? static_cast<uint64_t>(mul_rn(static_cast<double>(top_p), static_cast<double>(total))) : 0;
  return need > 0 ? need : 1;
}

TREEMLA_HD inline bool draft_prob_is_valid(float p) { return p >= 0 && p <= 2; }
TREEMLA_HD inline uint64_t draft_weight(float p) {
  return static_cast<uint64_t>(mul_rn(p, static_cast<float>(kWeightOne)));
}

// What a rejected child took from the distribution.
struct Rejection {
  // Above 0: w <- max(w - q * ratio, 0), ratio = total / draft_total. 0: w <- 0 for the token alone. Below 0: nothing, since
  // rounding would have left nothing of the distribution.
  double ratio = 0;
  int32_t token = -1;
};

TREEMLA_HD inline uint64_t scaled_draft(uint64_t q, double ratio) {
  return static_cast<uint64_t>(mul_rn(static_cast<double>(q), ratio));
}

// Weight of `token` after the first `count` rejections; q becomes the draft's weight then.
TREEMLA_HD inline uint64_t residual_weight(uint64_t w, uint64_t& q, int token, bool replaces,
                                           const Rejection* rejections, int count) {
  for (int i = 0; i < count; ++i) {
    const Rejection& r = rejections[i];
    if (r.ratio > 0) {
      const uint64_t taken = scaled_draft(q, r.ratio);
      w = w > taken ? w - taken : 0;
    }
    if (token == r.token) {
      if (r.ratio == 0) w = 0;
      if (!replaces) q = 0;
    }
  }
  return w;
}

// ---- trees ----

// One request's nodes. Nothing is trusted: indices are checked as they are met.
struct RequestTree {
  int q_len = 0;
  const int32_t* token_ids = nullptr;     // [q_len]
  const int32_t* next_token = nullptr;    // [q_len], or null: parents
  const int32_t* next_sibling = nullptr;  // [q_len]
  const int32_t* parents = nullptr;       // [q_len]

  TREEMLA_HD int first_child(int node) const {
    return next_token != nullptr ? next_token[node] : child_from(node, node + 1);
  }
  TREEMLA_HD int next_child(int node, int child) const {
    return next_token != nullptr ? next_sibling[child] : child_from(node, child + 1);
  }

 private:
  TREEMLA_HD int child_from(int node, int i) const {
    for (; i < q_len; ++i)
      if (parents[i] == node) return i;
    return -1;
  }
};

// Steps over children, counting them, so that links with cycles end.
struct ChildCursor {
  const RequestTree& tree;
  int request;
  int num_seen = 0;  // children met on the whole walk
  FaultWord fault = {};

  TREEMLA_HD ChildCursor(const RequestTree& t, int r) : tree(t), request(r) {}
  TREEMLA_HD int first(int node) { return check(node, node, tree.first_child(node)); }
  TREEMLA_HD int next(int node, int child) { return check(node, child, tree.next_child(node, child)); }

 private:
  // -1 at the end and after a fault.
  TREEMLA_HD int check(int node, int from, int child) {
    if (child == -1) return -1;
    if (child <= node || child >= tree.q_len) {
      fault = make_fault(TreeFault::kLink, request, from);
      return -1;
    }
    if (++num_seen >= tree.q_len) {  // the root is nobody's child
      fault = make_fault(TreeFault::kLinkCycle, request, child);
      return -1;
    }
    return child;
  }
};

// ---- coins ----

struct CoinSource {
  uint64_t seed = 0, offset = 0;
  const float* coins = nullptr;  // [q_len], or null: Philox
  float final_coin = 0;

  TREEMLA_HD bool judge(int node, uint64_t& coin) const {
    if (coins != nullptr) return from_float(coins[node], coin);
    coin = philox_coin(seed, offset, node, CoinPurpose::kJudge);
    return true;
  }
  TREEMLA_HD bool draw(int node, uint64_t& coin) const {
    if (coins != nullptr) return from_float(final_coin, coin);
    coin = philox_coin(seed, offset, node, CoinPurpose::kDraw);
    return true;
  }

 private:
  TREEMLA_HD static bool from_float(float x, uint64_t& coin) {
    if (!(x >= 0 && x < 1)) return false;
    coin = static_cast<uint64_t>(mul_rn(x, 18446744073709551616.0f));
    return true;
  }
};

// ---- the walk ----

struct WalkResult {
  int length = 0;  // nodes on the path
  int bonus = -1;
  FaultWord fault = {};
};

// Rows gives the rows of logits and draft probabilities of the request, and keeps the rejections and the result:
//   RowTarget target(node)                 DraftRow draft(node)        {fault, total}; total 0 where there is no draft
//   uint64_t weight(node, token)           of the target               uint64_t draft_weight(node, token)
//   void reject(i, Rejection)              const Rejection* rejections()
//   uint64_t sum(node, count)              weights left after `count` rejections
//   int draw(node, count, target)          first token at which the running sum of the weights left passes `target`
//   void visit(position, node)             void emit(node, token)
struct DraftRow {
  TreeFault fault = TreeFault::kNone;
  uint64_t total = 0;
};

template <class Rows>
TREEMLA_HD WalkResult sample_path(const RequestTree& tree, const CoinSource& coins, AcceptMethod method,
                                  int request, int vocab, int path_stride, Rows& rows) {
  const bool replaces = method != AcceptMethod::kWithoutReplacement;
  WalkResult result;
  ChildCursor cursor(tree, request);
  int node = 0;
  rows.visit(0, 0);
  for (result.length = 1;; ++result.length) {
    const RowTarget target = rows.target(node);
    if (target.fault != TreeFault::kNone) {
      result.fault = make_fault(target.fault, request, node);
      return result;
    }
    uint64_t total = target.total, coin = 0;
    uint64_t draft_total = 0;
    int count = 0, accepted = -1;
    int child = result.length < path_stride ? cursor.first(node) : -1;
    if (child >= 0) {
      const DraftRow draft = rows.draft(node);
      if (draft.fault != TreeFault::kNone) {
        result.fault = make_fault(draft.fault, request, node);
        return result;
      }
      draft_total = draft.total;
    }
    for (; child >= 0; child = cursor.next(node, child)) {
      const int token = tree.token_ids[child];
      if (token < 0 || token >= vocab) continue;  // padding: no distribution emits it
      if (!coins.judge(child, coin)) {
        result.fault = make_fault(TreeFault::kCoin, request, child);
        return result;
      }
      uint64_t q = draft_total > 0 ? rows.draft_weight(node, token) : 0;
      const uint64_t w =
          residual_weight(rows.weight(node, token), q, token, replaces, rows.rejections(), count);
      const double ratio = q > 0 ? static_cast<double>(total) / static_cast<double>(draft_total) : 0;
      if (mul_high(coin, q > 0 ? scaled_draft(q, ratio) : total) < w) {
        accepted = child;
        break;
      }
      rows.reject(count, {ratio, token});
      if (q > 0) {
        const uint64_t left = rows.sum(node, count + 1);
        if (left > 0) {
          total = left;
        } else {
          rows.reject(count, {-1, token});
        }
        if (!replaces) draft_total -= q;
      } else {
        total -= w;
      }
      ++count;
    }
    if (cursor.fault) {
      result.fault = cursor.fault;
      return result;
    }
    if (accepted < 0) {
      if (!coins.draw(node, coin)) {
        result.fault = make_fault(TreeFault::kCoin, request, node);
        return result;
      }
      result.bonus = rows.draw(node, count, mul_high(coin, total));
      rows.emit(node, result.bonus);
      return result;
    }
    rows.emit(node, tree.token_ids[accepted]);
    node = accepted;
    rows.visit(result.length, node);
  }
}

}  // namespace treemla
