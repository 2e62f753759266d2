// bench_trees: times of the steps around verification on a GPU.
//
// Each row is a graph of one step, replayed; median microseconds. warm: the graph holds the step 16 times and the time is a
// sixteenth; cold: once, with L2 flushed before. Copy bandwidth is measured in the same run.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "backend/cuda/cuda_memory.hpp"
#include "backend/cuda/device_properties.hpp"
#include "block.hpp"
#include "core/generate.hpp"
#include "device_data.hpp"
#include "treemla/treemla.hpp"

namespace treemla::bench {
namespace {

using Json = nlohmann::ordered_json;
using Blocks = std::vector<std::unique_ptr<Block>>;

struct Options {
  int samples = 50;
  std::string json;
  std::string step;  // one alone
};

struct Times {
  double warm_s, cold_s;
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

Times measure(const Options& o, void* stream, const std::function<void()>& enqueue) {
  constexpr int kTimes = 16;
  const double warm = median(cuda_memory().measure(
      stream,
      [&] {
        for (int i = 0; i < kTimes; ++i) enqueue();
      },
      o.samples, false));
  return {warm / kTimes, median(cuda_memory().measure(stream, enqueue, o.samples, true))};
}

class Report {
 public:
  explicit Report(const Ceilings& c) : copy_(c.copy_bytes_per_s), read_(c.read_bytes_per_s) {
    root_ = {{"device", current_cuda_device().reason},
             {"copy_bytes_per_s", copy_},
             {"read_bytes_per_s", read_},
             {"rows", Json::array()}};
    fmt::print("{:<10} {:<52} {:>9} {:>9} {:>8} {:>8}\n", "step", "shape", "warm us", "cold us", "GB/s",
               "of peak");
  }
  // bytes 0: bandwidth says nothing about this row. `peak`: what the cold bandwidth is held against.
  void add(const char* step, const std::string& shape, Times t, double bytes, bool copies) {
    const double rate = bytes / t.cold_s, peak = copies ? copy_ : read_;
    fmt::print("{:<10} {:<52} {:>9.2f} {:>9.2f}", step, shape, 1e6 * t.warm_s, 1e6 * t.cold_s);
    fmt::print("{}\n", bytes > 0 ? fmt::format(" {:>8.0f} {:>7.1f}%", rate / 1e9, 100 * rate / peak) : "");
    std::fflush(stdout);
    root_["rows"].push_back({{"step", step},
                             {"shape", shape},
                             {"warm_us", 1e6 * t.warm_s},
                             {"cold_us", 1e6 * t.cold_s},
                             {"bytes", bytes},
                             {"of_peak", bytes > 0 ? rate / peak : 0}});
  }
  const Json& json() const { return root_; }

 private:
  double copy_, read_;
  Json root_;
};

// Fixed-size device arrays of zeros and of given values.
struct Arena {
  Blocks blocks;
  template <class T>
  T* place(const std::vector<T>& values) {
    blocks.push_back(Block::of(values));
    return static_cast<T*>(blocks.back()->get());
  }
  template <class T>
  T* room(std::size_t n) {
    blocks.push_back(std::make_unique<Block>(n * sizeof(T)));
    return static_cast<T*>(blocks.back()->get());
  }
  TreeRun run(std::size_t bytes, void* stream) { return {stream, room<char>(bytes + 1), bytes}; }
};

TreeOutput tree_output(Arena& arena, int b, int q_len) {
  const std::size_t n = static_cast<std::size_t>(b) * static_cast<std::size_t>(q_len);
  TreeOutput out;
  out.words_per_row = words_per_row(q_len);
  for (int32_t** a : {&out.token_ids, &out.parents, &out.depth, &out.positions, &out.retrieve_next_token,
                      &out.retrieve_next_sibling, &out.num_nodes})
    *a = arena.room<int32_t>(n);
  out.ancestor_bits = arena.room<uint32_t>(n * static_cast<std::size_t>(out.words_per_row));
  out.log_probs = arena.room<float>(n);
  return out;
}

void bench_build(const Options& o, void* stream, Report& report) {
  constexpr int kVocab = 163840, kDepths = 15;
  const Block scores(std::size_t{64} * kDepths * kVocab * 4);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    fill_normal(scores.get(), dtype, int64_t{64} * kDepths * kVocab, 4, 3, stream);
    for (const bool are_log_probs : {true, false}) {
      for (const auto [b, budget] :
           {std::pair{1, 8}, {1, 32}, {8, 32}, {8, 64}, {64, 32}, {64, 64}, {8, 256}, {8, 1024}}) {
        Arena arena;
        BuildProblem p;
        p.b = b;
        p.budget = budget;
        p.num_depths = kDepths;
        p.scores = {scores.get(), dtype, kVocab, 0, are_log_probs};
        p.memory = Memory::kDevice;
        const TreeOutput out = tree_output(arena, b, budget + 1);
        const TreeRun run = arena.run(build_workspace_bytes(p), stream);
        const Times t = measure(o, stream, [&] { build_tree(p, out, run); });
        check_tree_run(run, b);
        report.add("build",
                   fmt::format("ddtree b {}, L {}, V {}, budget {}, {} {}", b, kDepths, kVocab, budget,
                               dtype_name(dtype), are_log_probs ? "log-probs" : "logits"),
                   t, static_cast<double>(b) * kDepths * kVocab * static_cast<double>(dtype_bytes(dtype)),
                   false);
      }
    }
  }
}

// Trees whose argmaxes lead down a path, as a good drafter's would.
void bench_accept(const Options& o, void* stream, Report& report) {
  constexpr int kVocab = 163840;
  const Block logits(std::size_t{64} * 33 * kVocab * 2);
  fill_normal(logits.get(), DType::kBF16, int64_t{64} * 33 * kVocab, 3, 5, stream);
  for (const auto [b, q_len] : {std::pair{1, 9}, {64, 9}, {64, 33}, {8, 257}, {8, 1025}}) {
    Arena arena;
    std::mt19937 rng(9);
    std::vector<int32_t> q_indptr{0}, tokens, parents, next_token, next_sibling, argmax;
    for (int r = 0; r < b; ++r) {
      q_indptr.push_back(q_indptr.back() + q_len);
      const auto tree = make_tree(TreeKind::kDdtree, q_len, 100 + static_cast<uint64_t>(r));
      const RetrieveLinks links = links_from_parents(tree);
      parents.insert(parents.end(), tree.begin(), tree.end());
      next_token.insert(next_token.end(), links.next_token.begin(), links.next_token.end());
      next_sibling.insert(next_sibling.end(), links.next_sibling.begin(), links.next_sibling.end());
      for (int i = 0; i < q_len; ++i) {
        tokens.push_back(i);  // a node's token is its number, and the target goes to its last child
        int child = -1;
        for (int c = i + 1; c < q_len; ++c)
          if (tree[static_cast<std::size_t>(c)] == i) child = c;
        argmax.push_back(child < 0 ? 100000 : child);
      }
    }
    AcceptProblem p;
    p.b = b;
    p.total_q = q_indptr.back();
    p.q_indptr = arena.place(q_indptr);
    p.token_ids = arena.place(tokens);
    p.target_argmax = arena.place(argmax);
    p.memory = Memory::kDevice;
    const auto rows = static_cast<std::size_t>(p.total_q);
    AcceptOutput out;
    out.path_stride = 16;
    out.accept_index = arena.room<int32_t>(static_cast<std::size_t>(b) * 16);
    out.num_accepted = arena.room<int32_t>(static_cast<std::size_t>(b));
    out.bonus_token = arena.room<int32_t>(static_cast<std::size_t>(b));
    out.predicts = arena.room<int32_t>(rows);
    p.retrieve_next_token = arena.place(next_token);
    p.retrieve_next_sibling = arena.place(next_sibling);
    const int32_t* device_parents = arena.place(parents);
    const auto time = [&](const std::string& what, double bytes) {
      const TreeRun run = arena.run(accept_workspace_bytes(p), stream);
      const Times t = measure(o, stream, [&] { accept_path(p, out, run); });
      check_tree_run(run, b);
      report.add("accept", fmt::format("b {}, q {}: {}", b, q_len, what), t, bytes, false);
    };
    time("greedy, argmax, links", 0);
    p.retrieve_next_token = p.retrieve_next_sibling = nullptr;
    p.parents = device_parents;
    time("greedy, argmax, parents", 0);
    if (q_len > 33) continue;
    p.target_argmax = nullptr;
    p.logits = logits.get();
    p.logits_dtype = DType::kBF16;
    p.vocab = kVocab;
    const double bytes = static_cast<double>(p.total_q) * kVocab * 2;
    time("greedy, bf16 logits", bytes);
    p.method = AcceptMethod::kDeterministic;
    time("sampled, deterministic", bytes);
    p.top_k = arena.place(std::vector<int32_t>(static_cast<std::size_t>(b), 50));
    p.top_p = arena.place(std::vector<float>(static_cast<std::size_t>(b), 0.9f));
    time("sampled, deterministic, top_k 50, top_p 0.9", bytes);
  }
}

void bench_compact(const Options& o, void* stream, Report& report) {
  constexpr int kLayers = 61, kBatch = 64, kQ = 33;
  for (const int prefix : {1000}) {
    for (const auto [page_size, row_bytes] : {std::pair{1, 1152}, {1, 656}, {64, 1152}, {1, 576}}) {
      const int64_t pages_each = (prefix + kQ + page_size - 1) / page_size,
                    num_pages = pages_each * kBatch + 1;
      const int64_t layer_bytes = num_pages * page_size * row_bytes;
      const Block pool(static_cast<std::size_t>(kLayers * layer_bytes));
      fill_normal(pool.get(), DType::kF32, kLayers * layer_bytes / 4, 1, 5, stream);
      for (const int accepted : {1, 4, 8, 16, 31}) {
        Arena arena;
        std::mt19937 rng(3);
        std::vector<int32_t> q_indptr{0}, kv_len, path, counts,
            entries(static_cast<std::size_t>(num_pages - 1));
        std::iota(entries.begin(), entries.end(), 1);
        std::shuffle(entries.begin(), entries.end(), rng);
        for (int r = 0; r < kBatch; ++r) {
          q_indptr.push_back(q_indptr.back() + kQ);
          kv_len.push_back(prefix + kQ);
          counts.push_back(accepted);
          std::vector<int32_t> nodes(kQ - 2);
          std::iota(nodes.begin(), nodes.end(), 2);  // never node 1, so that every accepted row moves
          std::shuffle(nodes.begin(), nodes.end(), rng);
          nodes.resize(static_cast<std::size_t>(accepted));
          std::sort(nodes.begin(), nodes.end());
          path.push_back(r * kQ);
          for (int j = 1; j < kQ; ++j)
            path.push_back(j <= accepted ? r * kQ + nodes[static_cast<std::size_t>(j - 1)] : -1);
        }
        CompactProblem p;
        p.b = kBatch;
        p.num_layers = kLayers;
        p.pool = pool.get();
        p.layer_stride_bytes = layer_bytes;
        p.row_bytes = row_bytes;
        p.num_pages = num_pages;
        p.page_size = page_size;
        p.pages = {arena.place(entries), IndexType::kI32, num_pages - 1, nullptr, pages_each};
        p.q_indptr = arena.place(q_indptr);
        p.total_q = q_indptr.back();
        p.kv_len = arena.place(kv_len);
        p.accept_index = arena.place(path);
        p.path_stride = kQ;
        p.num_accepted = arena.place(counts);
        p.memory = Memory::kDevice;
        const CompactOutput out{arena.room<int32_t>(kBatch), arena.room<int64_t>(kBatch * kQ),
                                arena.room<int32_t>(kBatch)};
        const TreeRun run = arena.run(compact_workspace_bytes(p), stream);
        const Times t = measure(o, stream, [&] { compact_cache(p, out, run); });
        check_tree_run(run, kBatch);
        report.add("compact",
                   fmt::format("{} layers, b {}, {} rows of {} B each, page {}", kLayers, kBatch, accepted,
                               row_bytes, page_size),
                   t, 2.0 * kLayers * kBatch * accepted * row_bytes, true);
      }
    }
  }
}

int bench(const Options& o) {
  if (!current_cuda_device().usable) {
    fmt::print(stderr, "bench_trees: {}\n", current_cuda_device().reason);
    return 2;
  }
  void* stream = cuda_memory().make_stream();
  const Ceilings c = measure_ceilings(stream);
  fmt::print("device   {}\nceilings copy {:.2f} TB/s, read {:.2f} TB/s, measured now\n\n",
             current_cuda_device().reason, c.copy_bytes_per_s / 1e12, c.read_bytes_per_s / 1e12);
  Report report(c);
  if (o.step.empty() || o.step == "accept") bench_accept(o, stream, report);
  if (o.step.empty() || o.step == "compact") bench_compact(o, stream, report);
  if (o.step.empty() || o.step == "build") bench_build(o, stream, report);
  if (!o.json.empty()) std::ofstream(o.json) << report.json().dump(2) << "\n";
  cuda_memory().release_stream(stream);
  return 0;
}

}  // namespace
}  // namespace treemla::bench

int main(int argc, char** argv) {
  using namespace treemla::bench;
  Options o;
  CLI::App app{"Times building, accepting and compacting on a GPU.", "bench_trees"};
  app.add_option("--samples", o.samples, "of a measurement")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--json", o.json, "write a record");
  app.add_option("--step", o.step, "one step alone")->check(CLI::IsMember({"accept", "compact", "build"}));
  CLI11_PARSE(app, argc, argv);
  try {
    return bench(o);
  } catch (const treemla::Error& e) {
    fmt::print(stderr, "bench_trees: {}\n", e.what());
    return 2;
  }
}
