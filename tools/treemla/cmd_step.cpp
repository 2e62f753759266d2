// treemla step: one step of speculative decoding on a case: build, verify, accept, compact, each stage shown.
//
// A case holds no language model. Its tree is taken as built; what stands in for the target's head is a random projection of the
// verified output onto a small vocabulary, and drafted tokens are drawn so that a node's first child is, with probability --agree,
// the token that this head likes best. Everything else is what a serving engine does with the same functions.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "commands.hpp"
#include "core/generate.hpp"
#include "core/lookup.hpp"
#include "host_output.hpp"
#include "options.hpp"
#include "output.hpp"
#include "text.hpp"
#include "tree_view.hpp"
#include "treemla/treemla.hpp"
#include "trees/philox.hpp"

namespace treemla::cli {
namespace {

struct StepOptions {
  std::string file, backend = "best", method = "greedy";
  int64_t vocab = 32, seed = 1, threads = 0;
  double agree = 0.8, temperature = 1;
};

constexpr int kShownRequests = 4, kShownNodes = 24;

double uniform(uint64_t seed, uint64_t stream, int64_t i) {
  return static_cast<double>(philox_coin(seed, stream, static_cast<int>(i), CoinPurpose::kJudge)) * 0x1p-64;
}

// One request's slice of the batch's arrays.
struct Requests {
  const VerifyProblem& p;
  int q_len(int r) const { return p.q_indptr[r + 1] - p.q_indptr[r]; }
  int64_t prefix_len(int r) const { return p.kv_len[r] > 0 ? p.kv_len[r] - q_len(r) : 0; }
};

// ---- build: the case's own trees, with everything that the later stages need ----

struct Trees {
  std::vector<int32_t> parents, tokens, next_token, next_sibling;  // [total_q]
};
Trees build(const VerifyProblem& p) {
  const Requests requests{p};
  const auto rows = static_cast<std::size_t>(p.q.total_q);
  Trees t{std::vector<int32_t>(rows), std::vector<int32_t>(rows, -1), std::vector<int32_t>(rows, -1),
          std::vector<int32_t>(rows, -1)};
  for (int r = 0; r < p.b; ++r) {
    const int q_len = requests.q_len(r), begin = p.q_indptr[r];
    std::vector<int32_t> parents =
        p.mask.parents ? std::vector<int32_t>(p.mask.parents + begin, p.mask.parents + begin + q_len)
                       : make_tree(TreeKind::kChain, q_len, 0);
    const RetrieveLinks links = links_from_parents(parents, r);
    std::copy(parents.begin(), parents.end(), t.parents.begin() + begin);
    std::copy(links.next_token.begin(), links.next_token.end(), t.next_token.begin() + begin);
    std::copy(links.next_sibling.begin(), links.next_sibling.end(), t.next_sibling.begin() + begin);
  }
  return t;
}

// ---- the stand-in for the target's head ----

// [total_q, vocab] logits of unit spread times 3: each token's is a random signed sum over the node's output.
std::vector<float> project(const std::vector<float>& out, int64_t nodes, const StepOptions& o) {
  std::vector<float> logits(static_cast<std::size_t>(nodes * o.vocab), 0.0f);
  const int64_t width = nodes > 0 ? std::ssize(out) / nodes : 0;
  for (int64_t i = 0; i < nodes; ++i) {
    const float* row = out.data() + i * width;
    double norm = 0;
    for (int64_t k = 0; k < width; ++k) norm += static_cast<double>(row[k]) * row[k];
    const auto scale = static_cast<float>(3 / std::sqrt(std::max(norm, 1e-30)));
    for (int64_t v = 0; v < o.vocab; ++v) {
      float sum = 0;
      for (int64_t k = 0; k < width; k += 64) {  // 64 signs of one hash
        uint64_t signs = philox_coin(static_cast<uint64_t>(o.seed), static_cast<uint64_t>(v),
                                     static_cast<int>(k), CoinPurpose::kDraw);
        for (int64_t j = k; j < std::min(k + 64, width); ++j, signs >>= 1)
          sum += signs & 1 ? row[j] : -row[j];
      }
      logits[static_cast<std::size_t>(i * o.vocab + v)] = scale * sum;
    }
  }
  return logits;
}

void draft_tokens(const VerifyProblem& p, const std::vector<float>& logits, const StepOptions& o, Trees& t) {
  const auto vocab = static_cast<int>(o.vocab);
  const auto argmax = [&](int64_t row) {
    const auto begin = logits.begin() + row * vocab;
    return static_cast<int32_t>(std::max_element(begin, begin + vocab) - begin);
  };
  for (int r = 0; r < p.b; ++r) {
    const int begin = p.q_indptr[r], end = p.q_indptr[r + 1];
    for (int i = begin; i < end; ++i) {
      if (i == begin)
        t.tokens[static_cast<std::size_t>(i)] = static_cast<int32_t>(uniform(o.seed, 1, i) * vocab);
      int32_t next = argmax(i);
      const bool agrees = uniform(o.seed, 2, i) < o.agree;
      if (!agrees) next = static_cast<int32_t>(uniform(o.seed, 3, i) * vocab);
      for (int c = t.next_token[static_cast<std::size_t>(i)]; c >= 0;
           c = t.next_sibling[static_cast<std::size_t>(begin + c)]) {
        t.tokens[static_cast<std::size_t>(begin + c)] = next;
        next = (next + 1) % vocab;  // siblings differ
      }
    }
  }
}

// ---- accept ----

struct Path {
  std::vector<int32_t> accept_index, num_accepted, bonus;
  int stride = 0;
};
Path accept(const VerifyProblem& p, const Trees& t, const std::vector<float>& logits, const StepOptions& o) {
  Path path;
  const auto b = static_cast<std::size_t>(p.b);
  int longest = 1;
  for (int r = 0; r < p.b; ++r) longest = std::max(longest, Requests{p}.q_len(r));
  path.stride = std::min(longest, 1024);
  path.accept_index.resize(b * static_cast<std::size_t>(path.stride));
  path.num_accepted.resize(b);
  path.bonus.resize(b);
  const std::vector<float> temperature(b, static_cast<float>(o.temperature));
  std::vector<uint64_t> seeds(b);
  std::iota(seeds.begin(), seeds.end(), static_cast<uint64_t>(o.seed));
  AcceptProblem a;
  a.method = o.method == "greedy" ? AcceptMethod::kGreedy : AcceptMethod::kDeterministic;
  a.b = p.b;
  a.total_q = p.q.total_q;
  a.q_indptr = p.q_indptr;
  a.token_ids = t.tokens.data();
  a.retrieve_next_token = t.next_token.data();
  a.retrieve_next_sibling = t.next_sibling.data();
  a.logits = logits.data();
  a.vocab = static_cast<int>(o.vocab);
  a.temperature = temperature.data();
  a.seeds = seeds.data();
  accept_path(a,
              {path.accept_index.data(), path.stride, path.num_accepted.data(), path.bonus.data(), nullptr});
  return path;
}

// ---- compact ----

struct Compacted {
  std::vector<int32_t> kv_len, num_freed;
  int64_t num_moved = 0, num_wrong = 0;
};
Compacted compact(const VerifyProblem& p, const Path& path) {
  const std::size_t row_stride = static_cast<std::size_t>(kv_row_stride(p)) * dtype_bytes(p.kv.dtype);
  const std::size_t row_bytes =
      static_cast<std::size_t>(kv_row_elements(p.shape, p.kv.dtype)) * dtype_bytes(p.kv.dtype);
  const auto* before = static_cast<const std::byte*>(p.kv.data);
  std::vector<std::byte> pool(
      before, before + static_cast<std::size_t>(p.kv.num_pages * p.kv.page_size) * row_stride);
  Compacted result;
  result.kv_len.resize(static_cast<std::size_t>(p.b));
  result.num_freed.resize(static_cast<std::size_t>(p.b));
  CompactProblem c;
  c.b = p.b;
  c.pool = pool.data();
  c.row_bytes = static_cast<int64_t>(row_bytes);
  c.row_stride_bytes = static_cast<int64_t>(row_stride);
  c.num_pages = p.kv.num_pages;
  c.page_size = p.kv.page_size;
  c.pages = p.pages;
  c.q_indptr = p.q_indptr;
  c.total_q = p.q.total_q;
  c.kv_len = p.kv_len;
  c.accept_index = path.accept_index.data();
  c.path_stride = path.stride;
  c.num_accepted = path.num_accepted.data();
  compact_cache(c, {result.kv_len.data(), nullptr, result.num_freed.data()});

  // Each kept row must now be where the next step looks for it, with the bytes that it had.
  for (int r = 0; r < p.b; ++r) {
    const int q_len = Requests{p}.q_len(r);
    if (q_len == 0 || p.kv_len[r] == 0) continue;
    for (int j = 0; j <= path.num_accepted[static_cast<std::size_t>(r)]; ++j) {
      const int64_t node =
          path.accept_index[static_cast<std::size_t>(r) * static_cast<std::size_t>(path.stride) +
                            static_cast<std::size_t>(j)] -
          p.q_indptr[r];
      const int64_t prefix = Requests{p}.prefix_len(r), base = page_base(p.pages, r);
      const auto row = [&](int64_t t) {
        return static_cast<std::size_t>(pool_row(p.pages, p.kv.page_size, base, t)) * row_stride;
      };
      result.num_moved += node != j;
      result.num_wrong +=
          std::memcmp(pool.data() + row(prefix + j), before + row(prefix + node), row_bytes) != 0;
    }
  }
  return result;
}

// ---- the stages on paper ----

int run_step(const StepOptions& o) {
  const Case c = read_case(o.file);
  const VerifyProblem p = c.problem();
  const Requests requests{p};
  if (p.mask.kind == MaskKind::kNone)
    throw Error(ErrorCode::kInvalidArgument, "mask", "the case has no trees: mask is none");

  Trees trees = build(p);
  HostOutput output(p, DType::kF32);
  RunOptions options;
  options.backend = o.backend;
  options.num_threads = static_cast<int>(o.threads);
  Verifier verifier(options);
  const auto begin = std::chrono::steady_clock::now();
  verifier.plan(p);
  verifier.run(p, output.view());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const std::vector<float> logits = project(output.out(), p.q.total_q, o);
  draft_tokens(p, logits, o, trees);
  const Path path = accept(p, trees, logits, o);
  const Compacted compacted = compact(p, path);

  print(fmt::format("build    {} requests, {} nodes\n", p.b, p.q.total_q));
  for (int r = 0; r < std::min(p.b, kShownRequests); ++r) {
    const int q_begin = p.q_indptr[r], q_len = requests.q_len(r);
    if (q_len > kShownNodes) {
      print(fmt::format("  request {}: {} nodes (`treemla tree` shows them)\n", r, q_len));
      continue;
    }
    TreeView view;
    view.prefix_len = requests.prefix_len(r);
    view.parents.assign(trees.parents.begin() + q_begin, trees.parents.begin() + q_begin + q_len);
    view.tokens.assign(trees.tokens.begin() + q_begin, trees.tokens.begin() + q_begin + q_len);
    for (int j = 0; j <= path.num_accepted[static_cast<std::size_t>(r)] && q_len > 0; ++j)
      view.path.push_back(path.accept_index[static_cast<std::size_t>(r * path.stride + j)] - q_begin);
    print(fmt::format("  request {}: {}", r, tree_text(view)));
  }
  print(fmt::format("verify   {} query rows with {} in {}, lse of the first root {:.4f}\n",
                    p.q.total_q * p.shape.h_q, verifier.backend(), time_text(seconds),
                    output.lse().empty() ? 0.0f : output.lse().front()));
  for (int r = 0; r < std::min(p.b, kShownRequests); ++r) {
    const auto i = static_cast<std::size_t>(r);
    std::vector<int32_t> tokens;
    for (int j = 1; j <= path.num_accepted[i]; ++j)
      tokens.push_back(trees.tokens[static_cast<std::size_t>(
          path.accept_index[static_cast<std::size_t>(r * path.stride + j)])]);
    tokens.push_back(path.bonus[i]);
    print(fmt::format("accept   request {}: {} of {} drafted tokens ({}); emitted {}\n", r,
                      path.num_accepted[i], std::max(0, requests.q_len(r) - 1), o.method,
                      fmt::join(tokens, " ")));
  }
  for (int r = 0; r < std::min(p.b, kShownRequests); ++r) {
    const auto i = static_cast<std::size_t>(r);
    print(fmt::format("compact  request {}: {} cached rows, were {}; {} pages freed, page_size {}\n", r,
                      compacted.kv_len[i], p.kv_len[r], compacted.num_freed[i], p.kv.page_size));
  }
  if (p.b > kShownRequests) print(fmt::format("         and {} more requests\n", p.b - kShownRequests));
  print(fmt::format("checked  {} rows moved, {} are not where the next step looks for them\n",
                    compacted.num_moved, compacted.num_wrong));
  return compacted.num_wrong > 0 ? kCheckFailed : kSuccess;
}

}  // namespace

Run add_step(CLI::App& app) {
  auto o = std::make_shared<StepOptions>();
  CLI::App* cmd = app.add_subcommand("step", "Build, verify, accept and compact on a case, stage by stage");
  cmd->add_option("case", o->file, "a case with trees")->required()->type_name("FILE");
  add_choice(*cmd, "--backend", o->backend, backend_names({"best"}), "of the verification", Listed::kNo);
  add_choice(*cmd, "--method", o->method, {"greedy", "sample"}, "of accepting");
  add_int(*cmd, "--vocab", o->vocab, 2, 4096, "tokens of the stand-in head");
  add_real(*cmd, "--agree", o->agree, 0, 1, "how often a first child is the head's favourite");
  add_real(*cmd, "--temperature", o->temperature, 0, 1e6, "of sampling");
  add_int(*cmd, "--seed", o->seed, 0, INT64_MAX, "of head, drafted tokens and coins");
  add_threads(*cmd, o->threads);
  cmd->footer(
      "A case holds no language model: a random projection of the verified output onto --vocab tokens stands "
      "in for "
      "the\ntarget's head, and drafted tokens agree with it as often as --agree says.\n\n" +
      footer({"treemla step cases/h8_p0_b8.kdtr",
              "treemla step cases/h20_ragged_b3.kdtr --method sample --seed 7"},
             "a row is not where the next step looks for it"));
  return [o] { return run_step(*o); };
}

}  // namespace treemla::cli
