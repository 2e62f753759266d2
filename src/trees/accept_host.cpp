// Accepting on the host: the walk of walk.hpp over rows whose weights are computed once a visited node.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "core/convert.hpp"
#include "treemla/tree.hpp"
#include "trees/steps.hpp"
#include "trees/walk.hpp"

namespace treemla {
namespace {

int64_t logits_stride(const AcceptProblem& p) { return p.logits_stride ? p.logits_stride : p.vocab; }

void load_row(const AcceptProblem& p, int64_t row, std::vector<float>& to) {
  to.resize(static_cast<std::size_t>(p.vocab));
  const int64_t first = row * logits_stride(p);
  for (int i = 0; i < p.vocab; ++i) to[i] = load_element(p.logits, p.logits_dtype, first + i);
}

// Sets max and argmax, or the fault.
void find_argmax(const std::vector<float>& logits, RowTarget& row) {
  row.max = -INFINITY;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float x = logits[i];
    if (!(x < INFINITY)) {
      row.fault = std::isnan(x) ? TreeFault::kScoreNaN : TreeFault::kScoreInfinite;
      return;
    }
    if (x > row.max) {
      row.max = x;
      row.argmax = static_cast<int32_t>(i);
    }
  }
  if (row.max == -INFINITY) row.fault = TreeFault::kScoresEmpty;
}

// ---- one request ----

class HostRows {
 public:
  HostRows(const AcceptProblem& p, const AcceptOutput& out, int r)
      : p_(p), out_(out), r_(r), q_begin_(p.q_indptr[r]) {}

  RowTarget target(int node) {
    load_row(p_, q_begin_ + node, logits_);
    RowTarget row;
    find_argmax(logits_, row);
    const float temperature = p_.temperature ? p_.temperature[r_] : 1.0f;
    if (!temperature_is_valid(temperature)) row.fault = TreeFault::kTemperature;
    if (row.fault != TreeFault::kNone) return row;
    row.inv_temperature = inverse_temperature(temperature);
    weights_.resize(logits_.size());
    for (std::size_t i = 0; i < logits_.size(); ++i)
      weights_[i] = uncut_weight(row, logits_[i], static_cast<int>(i));
    if (p_.top_k && p_.top_k[r_] > 0 && p_.top_k[r_] < p_.vocab) cut_to_top_k(p_.top_k[r_], row);
    if (p_.top_p && !(p_.top_p[r_] >= 1)) cut_to_top_p(p_.top_p[r_], row);
    for (uint64_t& w : weights_) {
      if (w < row.cut) w = 0;
      row.total += w;
    }
    return row;
  }

  DraftRow draft(int node) {
    if (!p_.draft_probs || p_.method == AcceptMethod::kDeterministic) return {};
    const float* probs = p_.draft_probs + (q_begin_ + node) * p_.vocab;
    draft_.resize(static_cast<std::size_t>(p_.vocab));
    DraftRow row;
    for (int i = 0; i < p_.vocab; ++i) {
      if (!draft_prob_is_valid(probs[i])) return {TreeFault::kDraftProb, 0};
      draft_[i] = treemla::draft_weight(probs[i]);
      row.total += draft_[i];
    }
    if (row.total == 0) draft_.clear();
    return row;
  }

  uint64_t weight(int, int token) const { return weights_[token]; }
  uint64_t draft_weight(int, int token) const { return draft_[token]; }

  void reject(int i, Rejection r) {
    rejections_.resize(static_cast<std::size_t>(i));
    rejections_.push_back(r);
  }
  const Rejection* rejections() const { return rejections_.data(); }

  uint64_t sum(int, int count) const {
    uint64_t total = 0;
    for (int i = 0; i < p_.vocab; ++i) total += left(i, count);
    return total;
  }
  int draw(int, int count, uint64_t target) const {
    uint64_t running = 0;
    for (int i = 0; i < p_.vocab; ++i) {
      running += left(i, count);
      if (running > target) return i;
    }
    return -1;
  }

  void visit(int position, int node) {
    out_.accept_index[int64_t{r_} * out_.path_stride + position] = static_cast<int32_t>(q_begin_ + node);
    draft_.clear();
  }
  void emit(int node, int token) {
    if (out_.predicts) out_.predicts[q_begin_ + node] = token;
  }

 private:
  uint64_t left(int token, int count) const {
    uint64_t q = draft_.empty() ? 0 : draft_[token];
    return residual_weight(weights_[token], q, token, p_.method != AcceptMethod::kWithoutReplacement,
                           rejections_.data(), count);
  }

  void cut_to_top_k(int k, RowTarget& row) {
    sorted_ = weights_;
    std::nth_element(sorted_.begin(), sorted_.begin() + k - 1, sorted_.end(), std::greater<>());
    row.cut = std::max(row.cut, sorted_[k - 1]);
  }
  void cut_to_top_p(float top_p, RowTarget& row) {
    sorted_.clear();
    uint64_t total = 0;
    for (const uint64_t w : weights_) {
      if (w < row.cut) continue;
      sorted_.push_back(w);
      total += w;
    }
    std::sort(sorted_.begin(), sorted_.end(), std::greater<>());
    const uint64_t need = top_p_mass(top_p, total);
    uint64_t mass = 0;
    for (const uint64_t w : sorted_) {
      row.cut = w;
      if ((mass += w) >= need) break;
    }
  }

  const AcceptProblem& p_;
  const AcceptOutput& out_;
  int r_;
  int64_t q_begin_;
  std::vector<float> logits_;
  std::vector<uint64_t> weights_, draft_, sorted_;
  std::vector<Rejection> rejections_;
};

RequestTree tree_of(const AcceptProblem& p, int r) {
  const int64_t begin = p.q_indptr[r];
  RequestTree tree;
  tree.q_len = static_cast<int>(p.q_indptr[r + 1] - begin);
  tree.token_ids = p.token_ids + begin;
  if (p.retrieve_next_token) {
    tree.next_token = p.retrieve_next_token + begin;
    tree.next_sibling = p.retrieve_next_sibling + begin;
  } else {
    tree.parents = p.parents + begin;
    check_parents({tree.parents, static_cast<std::size_t>(tree.q_len)}, r);
  }
  return tree;
}

// The target's token at a node, greedily.
int greedy_token(const AcceptProblem& p, int r, int node, std::vector<float>& logits) {
  const int64_t row = p.q_indptr[r] + node;
  if (p.target_argmax) {
    if (p.target_argmax[row] < 0) throw_if_fault(make_fault(TreeFault::kArgmax, r, node));
    return p.target_argmax[row];
  }
  RowTarget target;
  load_row(p, row, logits);
  find_argmax(logits, target);
  if (target.fault != TreeFault::kNone) throw_if_fault(make_fault(target.fault, r, node));
  return target.argmax;
}

WalkResult greedy_path(const AcceptProblem& p, const AcceptOutput& out, int r, const RequestTree& tree) {
  const int64_t begin = p.q_indptr[r];
  std::vector<float> logits;
  WalkResult result;
  ChildCursor cursor(tree, r);
  int node = 0;
  for (;;) {
    out.accept_index[int64_t{r} * out.path_stride + result.length++] = static_cast<int32_t>(begin + node);
    const int token = greedy_token(p, r, node, logits);
    if (out.predicts) out.predicts[begin + node] = token;
    int child = result.length < out.path_stride ? cursor.first(node) : -1;
    while (child >= 0 && tree.token_ids[child] != token) child = cursor.next(node, child);
    throw_if_fault(cursor.fault);
    if (child < 0) {
      result.bonus = token;
      return result;
    }
    node = child;
  }
}

WalkResult sampled_path(const AcceptProblem& p, const AcceptOutput& out, int r, const RequestTree& tree) {
  CoinSource coins;
  if (p.seeds) coins.seed = p.seeds[r];
  if (p.offsets) coins.offset = p.offsets[r];
  if (p.coins) {
    coins.coins = p.coins + p.q_indptr[r];
    coins.final_coin = p.final_coins[r];
  }
  HostRows rows(p, out, r);
  return sample_path(tree, coins, p.method, r, p.vocab, out.path_stride, rows);
}

}  // namespace

void accept_on_host(const AcceptProblem& p, const AcceptOutput& out) {
  std::fill_n(out.accept_index, int64_t{p.b} * out.path_stride, -1);
  if (out.predicts) std::fill_n(out.predicts, p.total_q, -1);
  for (int r = 0; r < p.b; ++r) {
    const RequestTree tree = tree_of(p, r);
    out.num_accepted[r] = 0;
    if (out.bonus_token) out.bonus_token[r] = -1;
    if (tree.q_len == 0) continue;
    const WalkResult result =
        p.method == AcceptMethod::kGreedy ? greedy_path(p, out, r, tree) : sampled_path(p, out, r, tree);
    throw_if_fault(result.fault);
    out.num_accepted[r] = result.length - 1;
    if (out.bonus_token) out.bonus_token[r] = result.bonus;
  }
}

}  // namespace treemla
