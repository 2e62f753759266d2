// bench_kernels: the float32 ladder against itself, or any backends over the grid that other libraries were measured on.
//
//     bs q_len prefix naive_us flash_us speedup         flash is cuda_warp_per_key; --ladder has a column for every rung
//     --grid: the backends of --backend (default cuda_wgmma, cuda_mma) over b, q_len, h_q, prefix, bf16, each checked against cuda_fp32_tiled
//
// Random data made on the device, pages of one token in random order, random trees. Times are medians of CUDA-graph replays of run():
// planned once, as an engine does for all the layers of a step. warm: back to back; cold: L2 flushed before each sample.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "backend/backend.hpp"
#include "backend/cuda/cuda_memory.hpp"
#include "backend/cuda/device_properties.hpp"
#include "block.hpp"
#include "core/compare.hpp"
#include "core/convert.hpp"
#include "core/generate.hpp"
#include "device_data.hpp"
#include "plan/cost.hpp"
#include "treemla/error.hpp"
#include "treemla/verify.hpp"

namespace treemla::bench {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::vector<int> bs = {1}, q_len = {9, 33}, prefix = {256, 1024, 4096, 16384, 65536};
  std::vector<int> h_q = {64};
  int page_size = 1, samples = 0;
  std::string dtype = "fp32", csv, json;
  std::vector<std::string> backends;  // beside the two of the table; with --grid: instead of them
  bool ladder = false, no_cold = false, grid = false;
  double seconds = 0.25;  // a measurement
  std::string spread = "even";
};

// Prefixes of bs requests: all the same, or from 1 to the longest in equal steps or ratios.
std::vector<int> spread_prefixes(const std::string& spread, int bs, int longest) {
  std::vector<int> prefixes;
  for (int r = 0; r < bs; ++r) {
    const double t = bs > 1 ? 1.0 * r / (bs - 1) : 1;
    prefixes.push_back(spread == "even"     ? longest
                       : spread == "linear" ? static_cast<int>(std::lround(1 + t * (longest - 1)))
                                            : static_cast<int>(std::lround(std::pow(longest, t))));
  }
  return prefixes;
}

constexpr double kSmScale = 0.1447;
constexpr MlaShape kWidths{0, 512, 64};

// One shape's problem on the device. The pool is shared by the rows of a prefix.
struct Row {
  int bs, q_len, h_q, prefix;
  VerifyProblem problem;
  std::vector<int32_t> q_indptr, kv_len;
  std::vector<std::unique_ptr<Block>> blocks;

  Row(const Options& o, const std::vector<int>& prefixes, int q_len_, int h_q_, const void* pool,
      int64_t num_pages)
      : bs(static_cast<int>(prefixes.size())),
        q_len(q_len_),
        h_q(h_q_),
        prefix(*std::max_element(prefixes.begin(), prefixes.end())) {
    VerifyProblem& p = problem;
    p.shape = kWidths;
    p.shape.h_q = h_q;
    p.b = bs;
    p.sm_scale = kSmScale;
    p.memory = Memory::kDevice;
    std::vector<int32_t> order(static_cast<std::size_t>(num_pages - 1)), indptr{0}, parents;
    std::iota(order.begin(), order.end(), 1);  // page 0 is nobody's
    std::shuffle(order.begin(), order.end(), std::mt19937_64(7));
    q_indptr.push_back(0);
    for (int r = 0; r < bs; ++r) {
      q_indptr.push_back(q_indptr.back() + q_len);
      kv_len.push_back(prefixes[r] + q_len);
      indptr.push_back(indptr.back() + (kv_len.back() + o.page_size - 1) / o.page_size);
      const auto tree = make_tree(TreeKind::kRandom, q_len, 11 + static_cast<uint64_t>(r));
      parents.insert(parents.end(), tree.begin(), tree.end());
    }
    order.resize(static_cast<std::size_t>(indptr.back()));
    const auto place = [&](const auto& v) { return (blocks.push_back(Block::of(v)), blocks.back()->get()); };
    const DType dtype = parse_dtype(o.dtype);
    p.q.dtype = p.kv.dtype = dtype;
    p.q.total_q = bs * q_len;
    const int64_t q_count = p.q.total_q * h_q * p.shape.d_qk();
    blocks.push_back(std::make_unique<Block>(q_count * dtype_bytes(dtype)));
    p.q.data = blocks.back()->get();
    // Scores of standard deviation 4.
    fill_normal(blocks.back()->get(), dtype, q_count,
                static_cast<float>(4 / (kSmScale * std::sqrt(1.0 * p.shape.d_qk()))), 3, nullptr);
    p.kv.data = pool;
    p.kv.num_pages = num_pages;
    p.kv.page_size = o.page_size;
    p.pages.entries = place(order);
    p.pages.num_entries = static_cast<int64_t>(order.size());
    p.pages.indptr = static_cast<const int32_t*>(place(indptr));
    p.q_indptr = static_cast<const int32_t*>(place(q_indptr));
    p.kv_len = static_cast<const int32_t*>(place(kv_len));
    p.mask.kind = MaskKind::kTree;
    p.mask.parents = static_cast<const int32_t*>(place(parents));
    p.max_q_len = q_len;
    p.max_kv_len = prefix + q_len;
  }

  Work work() const {
    const std::vector<int32_t> q(static_cast<std::size_t>(bs), q_len);
    return count_work(problem.shape, q, kv_len, problem.q.dtype, problem.kv.dtype, problem.q.dtype);
  }
};

struct Result {
  std::string not_run;
  double warm_s = 0, cold_s = 0, noise = 0;
  std::vector<float> out, lse;
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}
// Half the distance between the quartiles, as a share of the median.
double spread(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return (v[v.size() * 3 / 4] - v[v.size() / 4]) / 2 / v[v.size() / 2];
}

template <class F>
void measure(const Options& o, Result& r, void* stream, const F& enqueue) {
  const MemorySpace& space = cuda_memory();
  const double once = median(space.measure(stream, enqueue, 3, false));
  const int samples = o.samples > 0 ? o.samples : static_cast<int>(std::clamp(o.seconds / once, 5.0, 200.0));
  const std::vector<double> warm = space.measure(stream, enqueue, samples, false);
  r.warm_s = median(warm);
  r.noise = spread(warm);
  if (!o.no_cold) r.cold_s = median(space.measure(stream, enqueue, std::min(samples, 50), true));
}

// Outputs in the dtype of the queries, as an engine takes them. timed false: one run, for the results alone.
Result run(const Options& o, const Row& row, const std::string& backend, void* stream, bool timed = true) {
  Result r;
  r.not_run = why_unsupported(backend, row.problem);
  if (!r.not_run.empty()) return r;
  const VerifyProblem& p = row.problem;
  const auto rows = static_cast<std::size_t>(p.q.total_q * p.shape.h_q),
             elements = rows * static_cast<std::size_t>(p.shape.d_v);
  r.out.resize(elements);
  r.lse.assign(rows, std::nanf(""));
  std::vector<unsigned char> raw(elements * dtype_bytes(p.q.dtype), 0xFF);  // NaN in every dtype
  const auto out = Block::of(raw), lse = Block::of(r.lse);
  Verifier verifier({.backend = backend, .stream = stream});
  verifier.plan(p);
  const auto enqueue = [&] { verifier.run(p, {out->get(), p.q.dtype, static_cast<float*>(lse->get())}); };
  const MemorySpace& space = cuda_memory();
  if (timed)
    measure(o, r, stream, enqueue);
  else
    enqueue();
  verifier.check_device();
  space.download(raw.data(), out->get(), raw.size(), stream);
  space.download(r.lse.data(), lse->get(), rows * sizeof(float), stream);
  space.synchronize(stream);
  for (std::size_t i = 0; i < elements; ++i)
    r.out[i] = load_element(raw.data(), p.q.dtype, static_cast<int64_t>(i));
  return r;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

std::string csv_field(const std::string& s) {
  if (s.find_first_of(",\"\n") == std::string::npos) return s;
  std::string quoted = "\"";
  for (const char c : s) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

// The columns of `treemla bench --csv`.
class Records {
 public:
  Records(const Options& o, const Ceilings& ceilings, const std::string& device, const std::string& command)
      : o_(o), ceilings_(ceilings), device_(device) {
    const char* revision = std::getenv("TREEMLA_REVISION");
    revision_ = revision ? revision : "unknown";
    date_ = utc_now();
    json_ = {{"device", device},
             {"revision", revision_},
             {"date", date_},
             {"command", command},
             {"ceilings",
              {{"copy_bytes_per_s", ceilings.copy_bytes_per_s},
               {"read_bytes_per_s", ceilings.read_bytes_per_s},
               {"l2_bytes_per_s", ceilings.l2_bytes_per_s},
               {"fma_flops_per_s", ceilings.fma_flops_per_s}}},
             {"rows", Json::array()}};
    if (!o.csv.empty()) {
      csv_.open(o.csv);
      if (!csv_) throw Error(ErrorCode::kIo, "--csv", fmt::format("--csv {}: can't write", o.csv));
      csv_ << "device,backend,dtype,page_size,mask,tree,b,s_q,h_q,prefix,warm_us,cold_us,noise,gb_per_s,"
              "tflop_per_s,of_read,of_fma,"
              "checked,threads,revision,date,not_run\n";
    }
  }

  void add(const Row& row, const std::string& backend, const Result& r, const std::string& checked) {
    const Work work = row.work();
    const double timed = r.cold_s > 0 ? r.cold_s : r.warm_s;
    const double bytes_per_s = r.not_run.empty() ? work.bytes() / timed : 0,
                 flops_per_s = r.not_run.empty() ? work.flops / r.warm_s : 0;
    if (csv_) {
      csv_ << fmt::format("{},{},{},{},tree,random,{},{},{},{},", csv_field(device_), backend, o_.dtype,
                          o_.page_size, row.bs, row.q_len, row.h_q, row.prefix);
      if (r.not_run.empty())
        csv_ << fmt::format("{:.3f},{:.3f},{:.4f},{:.3f},{:.5f},{:.4f},{:.4f}", 1e6 * r.warm_s,
                            1e6 * r.cold_s, r.noise, bytes_per_s / 1e9, flops_per_s / 1e12,
                            bytes_per_s / ceilings_.read_bytes_per_s,
                            flops_per_s / ceilings_.fma_flops_per_s);
      else
        csv_ << ",,,,,,";
      csv_ << fmt::format(",{},,{},{},{}\n", checked, revision_, date_, csv_field(r.not_run)) << std::flush;
    }
    Json j = {{"backend", backend}, {"dtype", o_.dtype}, {"page_size", o_.page_size}, {"b", row.bs},
              {"s_q", row.q_len},   {"h_q", row.h_q},    {"prefix", row.prefix}};
    if (r.not_run.empty()) {
      j.update({{"warm_us", 1e6 * r.warm_s},
                {"cold_us", 1e6 * r.cold_s},
                {"noise", r.noise},
                {"bytes", work.bytes()},
                {"flops", work.flops},
                {"gb_per_s", bytes_per_s / 1e9},
                {"tflop_per_s", flops_per_s / 1e12},
                {"checked", checked}});
    } else {
      j["not_run"] = r.not_run;
    }
    json_["rows"].push_back(std::move(j));
  }

  void finish() {
    if (o_.json.empty()) return;
    std::ofstream file(o_.json);
    file << json_.dump(2) << "\n";
    if (!file.flush()) throw Error(ErrorCode::kIo, "--json", fmt::format("--json {}: can't write", o_.json));
  }

 private:
  const Options& o_;
  Ceilings ceilings_;
  std::string device_, revision_, date_;
  std::ofstream csv_;
  Json json_;
};

std::string us_text(double seconds) { return seconds > 0 ? fmt::format("{:.1f}", 1e6 * seconds) : "n/a"; }

constexpr const char* kNaive = "cuda_naive";
constexpr const char* kFlash = "cuda_warp_per_key";

std::vector<std::string> ladder() {
  std::vector<std::string> known = {kNaive, "cuda_head_tile", "cuda_warp_per_key_scalar", kFlash,
                                    "cuda_fp32_tiled"},
                           there;
  for (const std::string& name : known)
    if (find_backend(name)) there.push_back(name);
  return there;
}

constexpr const char* kReference = "cuda_fp32_tiled";

// A row a shape; the last column is the faster of the card's memory and its matrix rate by data sheet, over cold_us.
bool bench_grid(const Options& o, const Ceilings& c, Records& records, void* stream) {
  const std::vector<std::string> backends =
      o.backends.empty() ? std::vector<std::string>{"cuda_wgmma", "cuda_mma"} : o.backends;
  const DType dtype = parse_dtype(o.dtype);
  const int max_q = *std::max_element(o.q_len.begin(), o.q_len.end());
  bool failed = false;
  fmt::print("{:>3} {:>5} {:>4} {:>6} {:>20} {:>10} {:>10} {:>6} {:>8} {:>8} {:>8} checked\n", "b", "s_q",
             "h_q", "prefix", "backend", "warm_us", "cold_us", "noise", "TB/s", "of read", "TFLOP/s");
  for (const int prefix : o.prefix) {
    const int most_bs = *std::max_element(o.bs.begin(), o.bs.end());
    const int64_t num_pages =
        1 + static_cast<int64_t>(most_bs) * ((prefix + max_q + o.page_size - 1) / o.page_size);
    const int64_t count = num_pages * o.page_size * kWidths.d_qk();
    const Block pool(static_cast<std::size_t>(count) * dtype_bytes(dtype));
    fill_normal(pool.get(), dtype, count, 1, 5, nullptr);
    cuda_memory().synchronize(nullptr);
    const auto bench_row = [&](const std::vector<int>& prefixes, int q_len, int h_q) {
      const Row row(o, prefixes, q_len, h_q, pool.get(), num_pages);
      cuda_memory().synchronize(nullptr);
      const Result reference = run(o, row, kReference, stream, false);
      for (const std::string& name : backends) {
        const Result r = run(o, row, name, stream);
        std::string checked = "no";
        if (r.not_run.empty() && reference.not_run.empty()) {
          const Comparison cmp = compare(row.problem.shape, row.problem.q.total_q, r.out.data(),
                                         reference.out.data(), r.lse.data(), reference.lse.data(),
                                         dtype == DType::kF32   ? Precision::kF32
                                         : dtype == DType::kF16 ? Precision::kF16
                                                                : Precision::kBF16);
          checked = cmp.ok ? "yes" : "FAIL";
          failed |= !cmp.ok;
          if (!cmp.ok)
            fmt::print(stderr, "bench_kernels: {} against {}: {}\n", name, kReference, cmp.failure);
        }
        records.add(row, name, r, checked);
        if (!r.not_run.empty()) {
          fmt::print("{:>3} {:>5} {:>4} {:>6} {:>20} n/a: {}\n", row.bs, q_len, h_q, row.prefix, name,
                     r.not_run);
          continue;
        }
        const Work work = row.work();
        const double timed = r.cold_s > 0 ? r.cold_s : r.warm_s;
        fmt::print(
            "{:>3} {:>5} {:>4} {:>6} {:>20} {:>10.1f} {:>10} {:>5.1f}% {:>8.3f} {:>7.1f}% {:>8.1f} {}\n",
            row.bs, q_len, h_q, row.prefix, name, 1e6 * r.warm_s, us_text(r.cold_s), 100 * r.noise,
            work.kv_bytes / timed / 1e12, 100 * work.bytes() / timed / c.read_bytes_per_s,
            work.flops / timed / 1e12, checked);
        std::fflush(stdout);
      }
    };
    for (const int bs : o.bs)
      for (const int q_len : o.q_len)
        for (const int h_q : o.h_q) {
          const std::vector<int> prefixes = spread_prefixes(o.spread, bs, prefix);
          bench_row(prefixes, q_len, h_q);
          if (o.spread == "even") continue;
          const int64_t sum = std::accumulate(prefixes.begin(), prefixes.end(), int64_t{0});
          bench_row(std::vector<int>(static_cast<std::size_t>(bs), static_cast<int>(sum / bs)), q_len, h_q);
        }
  }
  return failed;
}

int bench(const Options& o, const std::string& command) {
  const CudaDevice& device = current_cuda_device();
  if (!device.usable) {
    fmt::print(stderr, "bench_kernels: {}\n", device.reason);
    return 2;
  }
  void* stream = cuda_memory().make_stream();
  const Ceilings c = measure_ceilings(stream);
  fmt::print("device       {}\n", device.reason);
  fmt::print(
      "ceilings     copy {:.2f} TB/s, read {:.2f} TB/s, L2 read {:.2f} TB/s, float32 FMA {:.1f} TFLOP/s; "
      "measured now\n",
      c.copy_bytes_per_s / 1e12, c.read_bytes_per_s / 1e12, c.l2_bytes_per_s / 1e12,
      c.fma_flops_per_s / 1e12);
  fmt::print("problem      {} heads, d_v 512, d_rope 64, {}, page_size {} in random order, random trees\n",
             fmt::join(o.h_q, ", "), o.dtype, o.page_size);
  fmt::print(
      "times        medians of graph replays of run(), microseconds; cold: L2 flushed before each; n/a: the "
      "kernel refuses the shape\n\n");

  Records records(o, c, device.model.name, command);
  if (o.grid) {
    const bool grid_failed = bench_grid(o, c, records, stream);
    records.finish();
    cuda_memory().release_stream(stream);
    return grid_failed ? 1 : 0;
  }

  std::vector<std::string> rungs = o.ladder ? ladder() : std::vector<std::string>{kNaive, kFlash};
  for (const std::string& name : o.backends)
    if (std::find(rungs.begin(), rungs.end(), name) == rungs.end()) rungs.push_back(name);
  fmt::print("{:>3} {:>5} {:>6}", "bs", "q_len", "prefix");
  if (o.ladder || rungs.size() > 2) {
    for (const std::string& name : rungs)
      fmt::print(" {:>{}}", name.substr(name.rfind("cuda_", 0) == 0 ? 5 : 0),
                 std::max<std::size_t>(10, name.size() - 5));
    fmt::print(" {:>9} {:>8}\n", "best_cold", "of_fma");
  } else {
    fmt::print(" {:>10} {:>10} {:>8} {:>10} {:>10}\n", "naive_us", "flash_us", "speedup", "naive_cold",
               "flash_cold");
  }

  const DType dtype = parse_dtype(o.dtype);
  const int max_q = *std::max_element(o.q_len.begin(), o.q_len.end());
  bool failed = false;
  for (const int bs : o.bs) {
    std::map<int, std::pair<std::unique_ptr<Block>, int64_t>> pools;
    for (const int q_len : o.q_len) {
      for (const int prefix : o.prefix) {
        auto& [pool, num_pages] = pools[prefix];
        if (!pool) {
          num_pages = 1 + static_cast<int64_t>(bs) * ((prefix + max_q + o.page_size - 1) / o.page_size);
          const int64_t count = num_pages * o.page_size * kWidths.d_qk();
          pool = std::make_unique<Block>(static_cast<std::size_t>(count) * dtype_bytes(dtype));
          fill_normal(pool->get(), dtype, count, 1, 5, nullptr);
          cuda_memory().synchronize(nullptr);
        }
        const Row row(o, std::vector<int>(static_cast<std::size_t>(bs), prefix), q_len, o.h_q.front(),
                      pool->get(), num_pages);
        cuda_memory().synchronize(nullptr);
        std::vector<Result> results;
        for (const std::string& name : rungs) results.push_back(run(o, row, name, stream));
        // Every rung against the last that ran: they share no code but the loads.
        std::size_t reference = results.size();
        while (reference-- > 0 && !results[reference].not_run.empty()) {
        }
        for (std::size_t i = 0; i < results.size(); ++i) {
          std::string checked = "no";
          if (results[i].not_run.empty() && i != reference && reference < results.size()) {
            const Comparison cmp = compare(row.problem.shape, row.problem.q.total_q, results[i].out.data(),
                                           results[reference].out.data(), results[i].lse.data(),
                                           results[reference].lse.data(), Precision::kF32);
            checked = cmp.ok ? "yes" : "FAIL";
            if (!cmp.ok) {
              failed = true;
              fmt::print(stderr, "bench_kernels: {} against {}: {}\n", rungs[i], rungs[reference],
                         cmp.failure);
            }
          } else if (i == reference) {
            checked = std::any_of(results[i].out.begin(), results[i].out.end(),
                                  [](float x) { return !std::isfinite(x); })
                          ? "FAIL"
                          : "yes";
            failed |= checked == "FAIL";
          }
          records.add(row, rungs[i], results[i], checked);
        }
        fmt::print("{:>3} {:>5} {:>6}", bs, q_len, prefix);
        if (o.ladder || rungs.size() > 2) {
          double best = 0, best_cold = 0;
          for (std::size_t i = 0; i < results.size(); ++i) {
            fmt::print(" {:>{}}", us_text(results[i].warm_s), std::max<std::size_t>(10, rungs[i].size() - 5));
            if (results[i].warm_s > 0 && (best == 0 || results[i].warm_s < best))
              best = results[i].warm_s, best_cold = results[i].cold_s;
          }
          fmt::print(" {:>9} {:>7.1f}%\n", us_text(best_cold),
                     best > 0 ? 100 * row.work().flops / best / c.fma_flops_per_s : 0);
        } else {
          const Result &naive = results[0], &flash = results[1];
          fmt::print(" {:>10} {:>10} {:>8} {:>10} {:>10}\n", us_text(naive.warm_s), us_text(flash.warm_s),
                     naive.warm_s > 0 && flash.warm_s > 0
                         ? fmt::format("{:.2f}x", naive.warm_s / flash.warm_s)
                         : "n/a",
                     us_text(naive.cold_s), us_text(flash.cold_s));
        }
        std::fflush(stdout);
      }
    }
  }
  records.finish();
  cuda_memory().release_stream(stream);
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace treemla::bench

int main(int argc, char** argv) {
  using namespace treemla::bench;
  Options o;
  CLI::App app{"Times the float32 ladder: cuda_naive against cuda_warp_per_key, or with --ladder every rung.",
               "bench_kernels"};
  app.add_option("--bs,--b", o.bs, "requests")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--q_len", o.q_len, "tree nodes, root included")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--prefix", o.prefix, "cached tokens before the tree")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--h_q", o.h_q, "query heads; several with --grid")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app.add_option("--dtype", o.dtype, "of q and cache; the arithmetic is float32")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->capture_default_str();
  app.add_option("--page_size", o.page_size)->check(CLI::Range(1, 1 << 16))->capture_default_str();
  app.add_option("--backend", o.backends, "more columns")->delimiter(',');
  app.add_option("--samples", o.samples, "a measurement; 0: as many as --seconds allow")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  app.add_option("--seconds", o.seconds, "a measurement")
      ->check(CLI::Range(0.001, 60.0))
      ->capture_default_str();
  app.add_flag("--ladder", o.ladder, "a column for every float32 rung");
  app.add_flag("--grid", o.grid,
               "b 1,8 x s_q 1,9,33 x h_q 8,16,64,128 in bf16, unless said otherwise, for --backend");
  app.add_option("--spread", o.spread,
                 "prefixes of a batch, with --grid: even; or from 1 to --prefix in steps (linear) or ratios "
                 "(geometric), each followed by a row of as many tokens spread evenly")
      ->check(CLI::IsMember({"even", "linear", "geometric"}))
      ->capture_default_str();
  app.add_flag("--no-cold", o.no_cold, "leave out the runs with L2 flushed");
  app.add_option("--csv", o.csv, "write a record");
  app.add_option("--json", o.json, "write a record");
  CLI11_PARSE(app, argc, argv);
  if (o.grid) {
    if (app.count("--bs") == 0) o.bs = {1, 8};
    if (app.count("--q_len") == 0) o.q_len = {1, 9, 33};
    if (app.count("--h_q") == 0) o.h_q = {8, 16, 64, 128};
    if (app.count("--dtype") == 0) o.dtype = "bf16";
  } else if (o.h_q.size() > 1) {
    fmt::print(stderr, "bench_kernels: --h_q: one value, unless with --grid\n");
    return 2;
  }
  std::string command = "bench_kernels";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  try {
    return bench(o, command);
  } catch (const treemla::Error& e) {
    fmt::print(stderr, "bench_kernels: {}\n", e.what());
    return 2;
  }
}
