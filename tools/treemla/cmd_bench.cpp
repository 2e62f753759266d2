// treemla bench: times a grid of shapes and holds each row against ceilings measured in the same run.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/hosted.hpp"
#include "backend/backend.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "bench_input.hpp"
#include "bench_report.hpp"
#include "bench_timer.hpp"
#include "commands.hpp"
#include "cpu_ceilings.hpp"
#include "host.hpp"
#include "host_output.hpp"
#include "options.hpp"
#include "output.hpp"
#include "plan/cost.hpp"
#include "progress.hpp"
#include "text.hpp"
#include "treemla/treemla.hpp"

namespace treemla::cli {
namespace {

using List = std::vector<int64_t>;

struct Grid {
  List b, s_q, h_q, prefix;
};
const Grid kDefaultGrid = {{1}, {1, 9, 33}, {8, 64}, {256, 4096, 16384}};
// The shapes that other kernels are recorded on.
const Grid kPeersGrid = {{1, 8}, {1, 9, 33}, {8, 16, 64, 128}, {256, 1024, 4096, 16384, 65536}};

struct BenchOptions {
  std::string grid_name = "default", mask = "tree", tree = "random", csv, json, simd, clock = "wall",
              kv_layout = "row_major", command_line;
  Grid grid = kDefaultGrid;
  List page_size = {1};
  std::vector<std::string> dtype = {"bf16"}, backend = {"best"};
  int64_t threads = 0;
  double seconds = 1;
};

// Oracle work spent on checking a row, a thread: about a third of a second.
constexpr double kCheckFlops = 2.5e8;

// Rows that read the same cache.
struct Group {
  DType dtype;
  int64_t page_size, b, prefix;
};

std::vector<Group> groups_of(const BenchOptions& o) {
  std::vector<Group> groups;
  for (const std::string& dtype : o.dtype)
    for (const int64_t page_size : o.page_size)
      for (const int64_t b : o.grid.b)
        for (const int64_t prefix : o.grid.prefix)
          groups.push_back({parse_dtype(dtype), page_size, b, prefix});
  return groups;
}

// What was asked for, and a backend in whose memory its problems lie.
struct Contestant {
  std::string name;  // or "best"
  const Backend* backend = nullptr;
  std::string unavailable = {};  // why, or empty
  bool on_cpu() const { return backend->memory() == Memory::kHost; }
};

std::vector<Contestant> contestants(const BenchOptions& o) {
  std::vector<Contestant> all;
  for (const std::string& name : o.backend) {
    if (name != "best" && name != "all") {
      const Backend* b = find_backend(name);
      const Support s = b->available();
      all.push_back({name, b, s.ok ? "" : s.reason});
      continue;
    }
    for (const Backend* b : backends()) {
      if (!b->available().ok) continue;
      all.push_back({name == "best" ? name : std::string(b->name()), b});
      if (name == "best") break;
    }
  }
  return all;
}

Work row_work(const BenchRow& row) {
  const std::vector<int32_t> q_len(static_cast<std::size_t>(row.b), static_cast<int32_t>(row.s_q));
  const std::vector<int32_t> kv_len(static_cast<std::size_t>(row.b),
                                    static_cast<int32_t>(row.prefix + row.s_q));
  MlaShape shape = kBenchLatent;
  shape.h_q = static_cast<int>(row.h_q);
  return count_work(shape, q_len, kv_len, bench_q_dtype(row.dtype), row.dtype, bench_q_dtype(row.dtype));
}

// Checked before allocating: systems that overcommit memory kill instead of refusing.
std::string why_no_memory(double bytes) {
  constexpr double kSlack = 256.0 * (1 << 20);  // workspaces of the backends
  const auto available = static_cast<double>(memory_available_bytes());
  if (bytes + kSlack <= available) return "";
  return fmt::format("needs {} of memory, {} available", bytes_text(bytes + kSlack), bytes_text(available));
}

std::string why_no_pool(const Group& g, int64_t max_q) {
  const double pages =
      static_cast<double>(g.b) * static_cast<double>((g.prefix + max_q) / g.page_size + 1) + 1;
  if (pages > INT32_MAX)
    return fmt::format("needs {:.3g} pages, page tables here hold at most {}", pages, INT32_MAX);
  return why_no_memory(BenchPool::estimate_bytes(g.dtype, g.b, g.prefix, max_q, g.page_size));
}

std::string why_no_input(const BenchRow& row) {
  if (row.b * row.s_q > INT32_MAX)
    return fmt::format("has {} nodes, batches hold at most {}", row.b * row.s_q, INT32_MAX);
  return why_no_memory(BenchInput::estimate_bytes(row.b, row.s_q, row.h_q, bench_q_dtype(row.dtype)));
}

// A stream of a memory space.
class Stream {
 public:
  explicit Stream(const MemorySpace& space) : space_(space), stream_(space.make_stream()) {}
  ~Stream() { space_.release_stream(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return stream_; }

 private:
  const MemorySpace& space_;
  void* stream_;
};

class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : o_(options),
        threads_(o_.threads > 0 ? static_cast<int>(o_.threads) : num_cores()),
        contestants_(contestants(o_)),
        max_q_(*std::max_element(o_.grid.s_q.begin(), o_.grid.s_q.end())),
        report_(o_.csv, o_.json) {}

  int run() {
    const auto begin = std::chrono::steady_clock::now();
    report_.begin(make_context());
    const std::vector<Group> groups = groups_of(o_);
    for (const Group& g : groups) total_ += group_weight(g);
    for (const Group& g : groups) {
      if (reader_gone() && !report_.to_files()) break;
      run_group(g);
    }
    progress_.clear();
    report_.finish(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    if (failed_) return kCheckFailed;
    return num_run_ > 0 || reader_gone() ? kSuccess : kUnusable;
  }

 private:
  BenchContext make_context() {
    BenchContext context;
    context.command = o_.command_line;
    context.revision = revision();
    context.date = utc_now();
    context.threads = threads_;
    context.clock = o_.clock;
    for (const Contestant& c : contestants_) {
      if (!c.unavailable.empty()) continue;
      const std::string device = device_name(c);
      if (std::find(context.devices.begin(), context.devices.end(), device) == context.devices.end())
        context.devices.push_back(device);
    }
    if (std::any_of(contestants_.begin(), contestants_.end(),
                    [](const Contestant& c) { return c.on_cpu(); })) {
      progress_.show(0, "measuring the ceilings");
      context.ceilings = measure_cpu_ceilings(threads_);
      flusher_.emplace(threads_);
      context.flush_bytes = static_cast<double>(flusher_->bytes());
      fma_flops_per_s_ = context.ceilings.fma_flops_per_s;
      progress_.clear();
    }
    return context;
  }

  // Of an available backend the reason is a line about what it uses: the name of the card.
  static std::string device_name(const Contestant& c) {
    if (!c.unavailable.empty()) return "none";
    return c.on_cpu() ? cpu_name() : c.backend->available().reason;
  }

  static std::string label_of(const BenchRow& r) {
    return fmt::format("{} b {} s_q {} h_q {} prefix {}", r.backend, r.b, r.s_q, r.h_q, r.prefix);
  }

  BenchRow make_row(const Group& g, int64_t s_q, int64_t h_q, const Contestant& c) const {
    BenchRow row;
    row.b = g.b;
    row.s_q = s_q;
    row.h_q = h_q;
    row.prefix = g.prefix;
    row.page_size = g.page_size;
    row.dtype = g.dtype;
    row.device = device_name(c);
    row.backend = c.name;
    row.on_cpu = c.on_cpu();
    row.mask = o_.mask;
    row.tree = o_.tree;
    row.work = row_work(row);
    return row;
  }

  // Seconds, for the progress bar alone: the time budget, or seven runs at 70% of the CPU's peak if that is
  // more.
  double weight(const BenchRow& row) const {
    return std::max(o_.seconds, row.on_cpu ? 10 * row.work.flops / fma_flops_per_s_ : 0);
  }
  double group_weight(const Group& g) const {
    double sum = 0;
    for (const int64_t s_q : o_.grid.s_q)
      for (const int64_t h_q : o_.grid.h_q)
        for (const Contestant& c : contestants_) sum += weight(make_row(g, s_q, h_q, c));
    return sum;
  }

  void run_group(const Group& g) {
    const std::string no_pool = why_no_pool(g, max_q_);
    std::optional<BenchPool> pool;
    if (no_pool.empty()) {
      progress_.show(done_ / total_, "drawing the inputs");
      pool.emplace(g.dtype, g.b, g.prefix, max_q_, g.page_size, threads_);
      if (o_.kv_layout == "interleaved") pool->layout = KvLayout::kInterleaved;
    }
    for (const int64_t s_q : o_.grid.s_q) {
      for (const int64_t h_q : o_.grid.h_q) {
        for (const Contestant& c : contestants_) {
          if (reader_gone() && !report_.to_files()) return;
          BenchRow row = make_row(g, s_q, h_q, c);
          row.not_run = !c.unavailable.empty() ? c.unavailable
                        : no_pool.empty()      ? why_no_input(row)
                                               : no_pool;
          if (row.not_run.empty()) run_row(*pool, c, row);
          done_ += weight(row);
          progress_.clear();
          report_.add(row);
          num_run_ += row.not_run.empty();
        }
      }
    }
  }

  void run_row(const BenchPool& pool, const Contestant& c, BenchRow& row) {
    const std::string label = label_of(row);
    progress_.show(done_ / total_, label);
    try {
      const BenchInput input(pool, row.s_q, row.h_q, row.prefix, parse_mask(row.mask),
                             parse_tree_kind(row.tree), threads_);
      HostOutput result(input.problem(), input.problem().q.dtype);
      const HostedProblem there(*c.backend, input.problem());
      HostedOutput output(*c.backend, input.problem(), result.view());
      const MemorySpace& space = c.backend->space();
      const Stream stream(space);
      Verifier verifier({.backend = c.name, .num_threads = threads_, .stream = stream.get()});
      verifier.plan(there.problem());
      row.backend = verifier.backend();
      const auto run_once = [&] { verifier.run(there.problem(), output.output()); };
      if (c.on_cpu()) {
        row.timing = measure(run_once, *flusher_, o_.seconds, o_.clock == "cpu", [&](double part) {
          progress_.show((done_ + part * weight(row)) / total_, label);
        });
      } else {
        row.timing = measure_on_device(space, stream.get(), run_once, o_.seconds);
        verifier.check_device();
      }
      output.fetch();
      check(input, result, row);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported && e.code() != ErrorCode::kOutOfMemory) throw;
      row.not_run = e.what();
    }
  }

  void check(const BenchInput& input, const HostOutput& result, BenchRow& row) {
    const std::vector<float> out = result.out();
    const auto has_nan = [](const std::vector<float>& v) {
      return std::any_of(v.begin(), v.end(), [](float x) { return std::isnan(x); });
    };
    std::string failure;
    bool compared = true;
    if (has_nan(out) || has_nan(result.lse())) {
      failure = "the output holds NaN";
    } else {
      failure = input.check_sample(out, result.lse(), kCheckFlops * threads_, threads_, compared);
    }
    row.checked = !failure.empty() ? "FAIL" : compared ? "yes" : "no";
    if (failure.empty()) return;
    failed_ = true;
    progress_.clear();
    complain(fmt::format("{}: {}", label_of(row), failure));
  }

  const BenchOptions& o_;
  int threads_;
  std::vector<Contestant> contestants_;
  int64_t max_q_;
  BenchReport report_;
  Progress progress_;
  std::optional<CacheFlusher> flusher_;
  double fma_flops_per_s_ = 1, total_ = 0, done_ = 0;
  int num_run_ = 0;
  bool failed_ = false;
};

}  // namespace

Run add_bench(CLI::App& app, const std::string& command_line) {
  auto o = std::make_shared<BenchOptions>();
  o->command_line = command_line;
  CLI::App* cmd = app.add_subcommand("bench", "Time a grid of shapes");
  CLI::Option* grid =
      add_choice(*cmd, "--grid", o->grid_name, {"default", "peers"}, "lists for the four below");
  CLI::Option* b = add_int_list(*cmd, "--b", o->grid.b, 1, kMaxRequests, "requests");
  CLI::Option* s_q = add_int_list(*cmd, "--s_q", o->grid.s_q, 1, kMaxNodes, "tree nodes, root included");
  CLI::Option* h_q = add_int_list(*cmd, "--h_q", o->grid.h_q, 1, kMaxHeads, "query heads");
  CLI::Option* prefix =
      add_int_list(*cmd, "--prefix", o->grid.prefix, 0, kMaxPrefix, "cached tokens before the tree");
  add_choice_list(*cmd, "--dtype", o->dtype, cache_dtypes(), "of the cache (8 bits: bf16 queries)");
  add_choice(*cmd, "--kv_layout", o->kv_layout, {"row_major", "interleaved"},
             "of the cache's columns (interleaved: bf16 on CPUs)");
  add_int_list(*cmd, "--page_size", o->page_size, 1, kMaxPageSize, "tokens a page");
  add_choice_list(*cmd, "--backend", o->backend, backend_names({"best", "all"}),
                  "best, all (the usable ones), or names that `treemla info` lists", Listed::kNo);
  add_mask(*cmd, o->mask);
  add_tree(*cmd, o->tree);
  add_threads(*cmd, o->threads);
  add_choice(*cmd, "--simd", o->simd, simd_targets(), "instructions of cpu_simd");
  CLI::Option* clock =
      add_choice(*cmd, "--clock", o->clock, {"wall", "cpu"}, "or processor time, of one thread");
  add_real(*cmd, "--seconds", o->seconds, 0.001, 3600, "time a row, more if three runs take longer");
  add_file(*cmd, "--csv", o->csv, "also write the rows to FILE");
  add_file(*cmd, "--json", o->json, "also write rows, ceilings and the facts of this machine to FILE");
  cmd->footer(
      "Every row plans once and times run(): warm back to back, cold after reading a buffer of twice the "
      "last-level\n"
      "cache, capped at 256 MiB. noise is (p90 - p10) / median. --clock cpu counts the processor time of the "
      "one thread,\n"
      "for machines that others use too. Ceilings are measured first: float32 FMA rate and memory read rate "
      "of all the\n"
      "threads, and bf16 dot products and AMX where the CPU has them. checked: outputs free of NaN, and one "
      "head of "
      "one request\n"
      "compared with the float64 oracle (`no`: too large to compare). Rows that do not fit in memory are "
      "n/a.\n"
      "--grid peers is " +
      fmt::format("--b {} --s_q {} --h_q {} --prefix {}.\n\n", fmt::join(kPeersGrid.b, ","),
                  fmt::join(kPeersGrid.s_q, ","), fmt::join(kPeersGrid.h_q, ","),
                  fmt::join(kPeersGrid.prefix, ",")) +
      footer(
          {"treemla bench", "treemla bench --h_q 64 --s_q 9 --prefix 4096 --dtype bf16,fp32 --csv rows.csv"},
          "a row's output was wrong"));
  return [o, grid, clock, b, s_q, h_q, prefix] {
    if (grid->count() > 0 && o->grid_name == "peers") {
      if (b->count() == 0) o->grid.b = kPeersGrid.b;
      if (s_q->count() == 0) o->grid.s_q = kPeersGrid.s_q;
      if (h_q->count() == 0) o->grid.h_q = kPeersGrid.h_q;
      if (prefix->count() == 0) o->grid.prefix = kPeersGrid.prefix;
    }
    if (clock->count() > 0 && o->clock == "cpu" && o->threads != 1)
      throw Error(ErrorCode::kInvalidArgument, "clock", "--clock cpu: works with --threads 1 only");
    simd_force_target(o->simd);
    return Bench(*o).run();
  };
}

}  // namespace treemla::cli
