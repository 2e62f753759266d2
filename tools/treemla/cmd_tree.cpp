// treemla tree: shows a draft tree, of a case, of given parents, generated, or built from a drafter's scores.

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "commands.hpp"
#include "core/file_io.hpp"
#include "core/generate.hpp"
#include "options.hpp"
#include "output.hpp"
#include "scores_file.hpp"
#include "tree_view.hpp"
#include "treemla/treemla.hpp"

namespace treemla::cli {
namespace {

struct TreeOptions {
  std::string case_file, scores_file, tree = "ddtree", method = "ddtree", format = "text";
  std::vector<int64_t> parents, path;
  int64_t budget = 8, request = 0, seed = 1, top_k = 4;
};

[[noreturn]] void refuse(const char* option, int64_t value, int64_t end) {
  throw Error(ErrorCode::kInvalidArgument, option,
              fmt::format("{} {}: must be below {}", option, value, end));
}

TreeView from_case(const TreeOptions& o) {
  const Case c = read_case(o.case_file);
  const VerifyProblem p = c.problem();
  if (o.request >= p.b) refuse("--request", o.request, p.b);
  const auto r = static_cast<std::size_t>(o.request);
  const int32_t begin = p.q_indptr[r], end = p.q_indptr[r + 1];
  TreeView view;
  view.prefix_len = p.kv_len[r] > 0 ? p.kv_len[r] - (end - begin) : 0;
  if (p.mask.parents) {
    view.parents.assign(p.mask.parents + begin, p.mask.parents + end);
  } else if (p.mask.kind == MaskKind::kCausal) {
    view.parents = make_tree(TreeKind::kChain, end - begin, 0);
  } else {
    throw Error(ErrorCode::kInvalidArgument, "mask",
                fmt::format("{}: has no trees: mask is {}", one_line(o.case_file), mask_name(p.mask.kind)));
  }
  if (const CaseTensor* tokens = c.find("token_ids");
      tokens && tokens->dtype == "I32" && tokens->shape.size() == 1 && tokens->shape[0] == p.q.total_q) {
    const auto* ids = reinterpret_cast<const int32_t*>(tokens->data);
    view.tokens.assign(ids + begin, ids + end);
  }
  return view;
}

// Beams over scores that depend on the depth alone: every node of the beam has the same row.
struct Candidates {
  std::vector<int32_t> tokens, parents;
  std::vector<float> log_probs;
};
Candidates search_beam(const ScoresFile& file, int64_t request, int top_k) {
  Candidates all;
  std::vector<int32_t> beam{-1};  // candidates that the beam is at
  std::vector<float> paths{0};
  const auto row_bytes = static_cast<std::size_t>(file.scores.vocab) * dtype_bytes(file.scores.dtype);
  for (int d = 0; d < file.num_depths; ++d) {
    const auto rows = static_cast<int>(beam.size());
    const std::size_t count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(top_k);
    const auto* row = static_cast<const std::byte*>(file.scores.data) +
                      static_cast<std::size_t>(request * file.num_depths + d) * row_bytes;
    std::vector<std::byte> repeated;
    for (int i = 0; i < rows; ++i) repeated.insert(repeated.end(), row, row + row_bytes);
    std::vector<int32_t> tokens(count), next(static_cast<std::size_t>(top_k));
    std::vector<float> log_probs(count);
    BeamProblem p;
    p.b = 1;
    p.rows = rows;
    p.top_k = top_k;
    p.scores = file.scores;
    p.scores.data = repeated.data();
    p.row_log_probs = paths.data();
    expand_beam(p, {tokens.data(), log_probs.data(), next.data()});
    const auto first = static_cast<int32_t>(all.tokens.size());
    if (first + static_cast<int64_t>(count) > kMaxTreeCandidates) break;
    all.tokens.insert(all.tokens.end(), tokens.begin(), tokens.end());
    all.log_probs.insert(all.log_probs.end(), log_probs.begin(), log_probs.end());
    for (std::size_t i = 0; i < count; ++i) all.parents.push_back(beam[i / static_cast<std::size_t>(top_k)]);
    beam.clear();
    paths.clear();
    for (const int32_t i : next) {
      if (i < 0) continue;
      beam.push_back(first + i);
      paths.push_back(log_probs[static_cast<std::size_t>(i)]);
    }
    if (beam.empty()) break;
  }
  return all;
}

TreeView from_scores(const TreeOptions& o) {
  const ScoresFile file = read_scores(o.scores_file);
  if (o.request >= file.b) refuse("--request", o.request, file.b);
  TreeView view;
  const auto q_len = static_cast<std::size_t>(o.budget + 1);
  view.parents.resize(q_len);
  view.tokens.resize(q_len);
  view.log_probs.resize(q_len);
  TreeOutput out;
  out.parents = view.parents.data();
  out.token_ids = view.tokens.data();
  out.log_probs = view.log_probs.data();
  int32_t num_nodes = 0;
  out.num_nodes = &num_nodes;
  BuildProblem p;
  p.b = 1;
  p.budget = static_cast<int>(o.budget);
  Candidates candidates;
  if (o.method == "eagle") {
    candidates = search_beam(file, o.request, static_cast<int>(o.top_k));
    p.method = BuildMethod::kCandidates;
    p.num_candidates = static_cast<int>(candidates.tokens.size());
    p.candidate_tokens = candidates.tokens.data();
    p.candidate_parents = candidates.parents.data();
    p.candidate_log_probs = candidates.log_probs.data();
  } else {
    p.num_depths = file.num_depths;
    p.scores = file.scores;
    p.scores.data = static_cast<const std::byte*>(file.scores.data) +
                    static_cast<std::size_t>(o.request * file.num_depths) *
                        static_cast<std::size_t>(file.scores.vocab) * dtype_bytes(file.scores.dtype);
  }
  build_tree(p, out);
  view.parents.resize(static_cast<std::size_t>(num_nodes));  // without padding
  view.tokens.resize(static_cast<std::size_t>(num_nodes));
  view.log_probs.resize(static_cast<std::size_t>(num_nodes));
  return view;
}

int run_tree(const TreeOptions& o) {
  TreeView view;
  if (!o.case_file.empty()) {
    view = from_case(o);
  } else if (!o.scores_file.empty()) {
    view = from_scores(o);
  } else if (!o.parents.empty()) {
    view.parents.assign(o.parents.begin(), o.parents.end());
    check_parents(view.parents);
  } else {
    view.parents =
        make_tree(parse_tree_kind(o.tree), static_cast<int>(o.budget + 1), static_cast<uint64_t>(o.seed));
  }
  for (const int64_t node : o.path) {
    if (node >= std::ssize(view.parents)) refuse("--path", node, std::ssize(view.parents));
    view.path.push_back(static_cast<int32_t>(node));
  }
  print(o.format == "dot"    ? tree_dot(view)
        : o.format == "svg"  ? tree_svg(view)
        : o.format == "mask" ? mask_text(view)
                             : tree_text(view));
  return kSuccess;
}

}  // namespace

Run add_tree_command(CLI::App& app) {
  auto o = std::make_shared<TreeOptions>();
  CLI::App* cmd = app.add_subcommand("tree", "Show a draft tree, or build one from a drafter's scores");
  CLI::Option* file = cmd->add_option("case", o->case_file, "a case, whose tree is shown")->type_name("FILE");
  CLI::Option* scores = add_file(*cmd, "--scores", o->scores_file,
                                 "safetensors file with \"logits\" or \"log_probs\", [L, V] or [b, L, V]");
  CLI::Option* parents =
      add_int_list(*cmd, "--parents", o->parents, -1, kMaxNodes, "parent of each node, -1 for the root");
  CLI::Option* tree = add_tree(*cmd, o->tree);
  add_choice(*cmd, "--method", o->method, {"ddtree", "eagle"}, "how to build from scores");
  add_int(*cmd, "--top_k", o->top_k, 1, kMaxBeamWidth, "width of the beam of eagle");
  add_int(*cmd, "--budget", o->budget, 1, kMaxTreeBudget, "draft nodes besides the root");
  add_int(*cmd, "--request", o->request, 0, INT32_MAX, "which request of the file");
  add_int(*cmd, "--seed", o->seed, 0, INT64_MAX, "of a generated tree");
  add_int_list(*cmd, "--path", o->path, 0, kMaxNodes, "nodes to mark: an accepted path");
  add_choice(*cmd, "--format", o->format, {"text", "dot", "svg", "mask"}, "what is printed");
  cmd->footer(footer({"treemla tree cases/h8_p0_b8.kdtr", "treemla tree --parents -1,0,0,1 --format mask",
                      "treemla tree --tree ddtree --budget 12 --path 0,1,2 --format svg"},
                     ""));
  return [o, file, scores, parents, tree] {
    check_excludes(scores, {file, parents, tree});
    check_excludes(parents, {file, tree});
    check_excludes(file, {tree});
    return run_tree(*o);
  };
}

}  // namespace treemla::cli
