// Building trees on the host: one request after the other, each as the definition in build.hpp has it.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>
#include <vector>

#include "treemla/tree.hpp"
#include "trees/exact.hpp"
#include "trees/frontier.hpp"
#include "trees/row_top.hpp"
#include "trees/steps.hpp"
#include "trees/tree_fault.hpp"

namespace treemla {
namespace {

// A request's tree while it grows; padded to q_len at the end.
struct Tree {
  std::vector<int32_t> parents{-1}, tokens;
  std::vector<int64_t> log_probs{0};  // of the path

  void add(int32_t parent, int32_t token, int64_t log_prob) {
    parents.push_back(parent);
    tokens.push_back(token);
    log_probs.push_back(log_prob);
  }
  int size() const { return static_cast<int>(parents.size()); }
};

void grow_ddtree(const BuildProblem& p, int r, Tree& tree) {
  const int k = std::min(p.budget, p.scores.vocab);
  std::vector<RowTop> tops(static_cast<std::size_t>(p.num_depths));
  for (int d = 0; d < p.num_depths; ++d) {
    tops[d] = top_of_row(p.scores, int64_t{r} * p.num_depths + d, k);
    throw_if_fault(tops[d].fault == TreeFault::kNone ? FaultWord{} : make_fault(tops[d].fault, r, d));
  }
  std::vector<int16_t> ranks{0};
  const auto worse = [&](const FrontierEntry& a, const FrontierEntry& b) {
    if (a.key != b.key) return a.key < b.key;
    return path_before(b, a, tree.parents.data(), ranks.data());
  };
  std::priority_queue<FrontierEntry, std::vector<FrontierEntry>, decltype(worse)> frontier(worse);
  const auto offer = [&](int64_t path, int parent, int depth, int rank) {
    if (depth >= p.num_depths || rank >= tops[depth].size()) return;
    frontier.push(
        {path + tops[depth].log_prob(rank), parent, static_cast<int16_t>(depth), static_cast<int16_t>(rank)});
  };
  offer(0, 0, 0, 0);
  while (!frontier.empty() && tree.size() <= p.budget) {
    const FrontierEntry e = frontier.top();
    frontier.pop();
    const int node = tree.size();
    tree.add(e.parent, tops[e.depth].token(e.rank), e.key);
    ranks.push_back(e.rank);
    offer(tree.log_probs[e.parent], e.parent, e.depth, e.rank + 1);
    offer(e.key, node, e.depth + 1, 0);
  }
}

void choose_candidates(const BuildProblem& p, int r, Tree& tree) {
  const int64_t base = int64_t{r} * p.num_candidates;
  std::vector<float> scores(static_cast<std::size_t>(p.num_candidates));
  for (int c = 0; c < p.num_candidates; ++c) {
    const int parent = p.candidate_parents[base + c];
    if (parent < -1 || parent >= c) throw_if_fault(make_fault(TreeFault::kCandidateParent, r, c));
    const float own = p.candidate_log_probs[base + c];
    if (std::isnan(own)) throw_if_fault(make_fault(TreeFault::kCandidateNaN, r, c));
    scores[c] = parent < 0 ? own : std::min(own, scores[parent]);
  }
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](int c) { return scores[c] == -INFINITY; });
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
  order.resize(std::min<std::size_t>(order.size(), p.budget));
  std::sort(order.begin(), order.end());
  std::vector<int32_t> node_of(scores.size(), 0);
  for (const int c : order) {
    const int parent = p.candidate_parents[base + c];
    node_of[c] = tree.size();
    tree.add(parent < 0 ? 0 : node_of[parent], p.candidate_tokens[base + c], fixed_of(scores[c]));
  }
}

void take_chain(const BuildProblem& p, int r, Tree& tree) {
  for (int i = 0; i < p.budget; ++i) {
    const int32_t token = p.tokens[int64_t{r} * p.budget + i];
    if (token < 0) return;
    tree.add(i, token, 0);
  }
}

void take_parents(const BuildProblem& p, int r, Tree& tree) {
  const int64_t base = int64_t{r} * (p.budget + 1);
  for (int i = 0; i <= p.budget; ++i) {
    const int32_t parent = p.parents[base + i];
    if (i == 0 ? parent != -1 : parent < 0 || parent >= i)
      throw_if_fault(make_fault(TreeFault::kParent, r, i));
    if (i > 0) tree.add(parent, p.tokens ? p.tokens[base + i] : -1, 0);
  }
}

int32_t root_token(const BuildProblem& p, int r) {
  if (p.root_tokens) return p.root_tokens[r];
  if (p.method == BuildMethod::kParents && p.tokens) return p.tokens[int64_t{r} * (p.budget + 1)];
  return -1;
}

template <typename T>
void write_row(T* to, int64_t row, const std::vector<T>& values) {
  if (to) std::copy(values.begin(), values.end(), to + row * static_cast<int64_t>(values.size()));
}

void write_tree(const BuildProblem& p, const TreeOutput& out, int r, Tree& tree) {
  const int q_len = p.budget + 1, num_nodes = tree.size();
  tree.tokens.insert(tree.tokens.begin(), root_token(p, r));
  tree.parents.resize(q_len, 0);
  tree.tokens.resize(q_len, p.pad_token);
  const int64_t prefix_len = p.prefix_len ? p.prefix_len[r] : 0;
  std::vector<int32_t> depth = tree_depths(tree.parents, r), positions(depth.size());
  const int deepest = *std::max_element(depth.begin(), depth.end());
  if (prefix_len < 0 || prefix_len + deepest > std::numeric_limits<int32_t>::max())
    throw_if_fault(make_fault(TreeFault::kPrefixLen, r, static_cast<int>(prefix_len)));
  for (int i = 0; i < q_len; ++i) positions[i] = static_cast<int32_t>(prefix_len) + depth[i];
  write_row(out.token_ids, r, tree.tokens);
  write_row(out.parents, r, tree.parents);
  write_row(out.depth, r, depth);
  write_row(out.positions, r, positions);
  if (out.ancestor_bits)
    write_row(out.ancestor_bits, r, bits_from_parents(tree.parents, out.words_per_row, r));
  if (out.retrieve_next_token || out.retrieve_next_sibling) {
    const RetrieveLinks links = links_from_parents(tree.parents, r);
    write_row(out.retrieve_next_token, r, links.next_token);
    write_row(out.retrieve_next_sibling, r, links.next_sibling);
  }
  if (out.log_probs) {
    for (int i = 0; i < q_len; ++i)
      out.log_probs[int64_t{r} * q_len + i] = i < num_nodes ? nats_of(tree.log_probs[i]) : -INFINITY;
  }
  if (out.num_nodes) out.num_nodes[r] = num_nodes;
}

}  // namespace

void build_on_host(const BuildProblem& p, const TreeOutput& output) {
  for (int r = 0; r < p.b; ++r) {
    Tree tree;
    switch (p.method) {
      case BuildMethod::kDdtree:
        grow_ddtree(p, r, tree);
        break;
      case BuildMethod::kCandidates:
        choose_candidates(p, r, tree);
        break;
      case BuildMethod::kChain:
        take_chain(p, r, tree);
        break;
      case BuildMethod::kParents:
        take_parents(p, r, tree);
        break;
    }
    write_tree(p, output, r, tree);
  }
}

void expand_on_host(const BeamProblem& p, const BeamOutput& out) {
  const int per_request = p.rows * p.top_k;
  std::vector<float> scores(static_cast<std::size_t>(per_request));
  std::vector<int> order(scores.size());
  for (int r = 0; r < p.b; ++r) {
    for (int i = 0; i < p.rows; ++i) {
      const int64_t row = int64_t{r} * p.rows + i;
      const float path = p.row_log_probs ? p.row_log_probs[row] : 0.0f;
      if (!(path < INFINITY)) throw_if_fault(make_fault(TreeFault::kBeamNaN, r, i));
      const RowTop top = top_of_row(p.scores, row, p.top_k);
      if (top.fault != TreeFault::kNone) throw_if_fault(make_fault(top.fault, r, i));
      for (int k = 0; k < p.top_k; ++k) {
        const float score = add_rn(path, nats_of(top.log_prob(k)));
        scores[i * p.top_k + k] = score;
        out.token_ids[row * p.top_k + k] = score == -INFINITY ? -1 : top.token(k);
        out.log_probs[row * p.top_k + k] = score;
      }
    }
    if (!out.beam) continue;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
    for (int k = 0; k < p.top_k; ++k) {
      const bool exists = k < per_request && scores[order[k]] > -INFINITY;
      out.beam[int64_t{r} * p.top_k + k] = exists ? order[k] : -1;
    }
  }
}

}  // namespace treemla
