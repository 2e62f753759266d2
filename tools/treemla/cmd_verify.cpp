// treemla verify: recorded cases against the backends of this build.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "api/expected.hpp"
#include "api/hosted.hpp"
#include "backend/backend.hpp"
#include "commands.hpp"
#include "core/compare.hpp"
#include "core/convert.hpp"
#include "core/file_io.hpp"
#include "core/kv_row.hpp"
#include "core/lookup.hpp"
#include "host.hpp"
#include "host_output.hpp"
#include "options.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "table.hpp"
#include "text.hpp"
#include "treemla/treemla.hpp"

namespace treemla::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct VerifyOptions {
  std::vector<std::string> paths;
  std::string backend;  // empty: the available ones
  std::string precision = "auto";
  int64_t threads = 0;
  bool json = false;
};

// One case on one backend in one precision.
struct Check {
  Check(std::string name, std::string precision) : backend(std::move(name)), mode(std::move(precision)) {}

  std::string backend, mode;
  std::string skipped;  // the reason, or empty
  bool ok = false;
  std::string failure;
  Comparison comparison;
  double seconds = 0;
};

DType output_dtype(Precision p) {
  return p == Precision::kF32 ? DType::kF32 : p == Precision::kF16 ? DType::kF16 : DType::kBF16;
}

// q and the pool as float32: exact, so the expected values stay what they are, or for packed rows, rounded once,
// far within the float32 bounds.
class Widened {
 public:
  explicit Widened(const VerifyProblem& p) : problem_(p) {
    const int64_t d_qk = p.shape.d_qk(), q_count = p.q.total_q * p.shape.h_q * d_qk,
                  num_rows = p.kv.num_pages * p.kv.page_size;
    q_ = make_floats(q_count);
    for (int64_t i = 0; i < q_count; ++i) q_[i] = load_element(p.q.data, p.q.dtype, i);
    kv_ = make_floats(num_rows * d_qk);
    for (int64_t r = 0; r < num_rows; ++r)
      load_kv_row(kv_row_at(p, r), p.shape, p.kv.dtype, kv_.get() + r * d_qk);
    problem_.q.data = q_.get();
    problem_.kv.data = kv_.get();
    problem_.q.dtype = problem_.kv.dtype = DType::kF32;
  }
  const VerifyProblem& problem() const { return problem_; }

  // Why there is no memory for it, or nothing.
  static std::string why_not(const VerifyProblem& p) {
    const double elements = static_cast<double>(p.q.total_q) * p.shape.h_q * p.shape.d_qk() +
                            static_cast<double>(p.kv.num_pages) * p.kv.page_size * p.shape.d_qk();
    const double bytes = elements * sizeof(float), available = static_cast<double>(memory_available_bytes());
    if (bytes <= available) return "";
    return fmt::format("float32 inputs need {} of memory, {} available", bytes_text(bytes),
                       bytes_text(available));
  }

 private:
  static std::unique_ptr<float[]> make_floats(int64_t count) {
    return std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(count));
  }

  VerifyProblem problem_;
  std::unique_ptr<float[]> q_, kv_;
};

// `problem` lives on the host and is copied to wherever the backend works.
Check run_check(const Case& c, const VerifyProblem& problem, const std::string& name, Precision precision,
                int threads) {
  Check check{name, std::string(precision_name(precision))};
  check.skipped = why_unsupported_hosted(name, problem);
  if (!check.skipped.empty()) return check;
  try {
    const Backend& backend = *find_backend(name);
    HostOutput result(problem, output_dtype(precision));
    const HostedProblem there(backend, problem);
    HostedOutput output(backend, problem, result.view());
    Verifier verifier({.backend = name, .num_threads = threads});
    verifier.plan(there.problem());
    backend.space().synchronize(nullptr);
    const auto begin = std::chrono::steady_clock::now();
    verifier.run(there.problem(), output.output());
    backend.space().synchronize(nullptr);
    check.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    verifier.check_device();
    output.fetch();
    check.comparison = compare(c.shape, c.total_q(), result.out().data(), c.expected_out(),
                               result.lse().data(), c.expected_lse(), precision);
    check.ok = check.comparison.ok;
    check.failure = check.comparison.failure;
  } catch (const Error& e) {
    check.failure = e.what();  // a backend that says yes and then fails has failed
  }
  return check;
}

std::vector<Precision> precisions(const std::string& wanted, const std::string& backend, DType q_dtype) {
  if (wanted == "fp32") return {Precision::kF32};
  if (wanted == "bf16") return {Precision::kBF16};
  if (wanted == "fp16") return {Precision::kF16};
  std::vector<Precision> all = {Precision::kF32};
  // An oracle rounds its float64 result: its 16-bit output would only test the rounding.
  if (backend.ends_with("_oracle")) return all;
  if (q_dtype == DType::kBF16) all.push_back(Precision::kBF16);
  if (q_dtype == DType::kF16) all.push_back(Precision::kF16);
  return all;
}

// The case files that the arguments name, or nothing and a complaint for an argument that names none.
std::vector<std::string> case_files(const std::vector<std::string>& paths, int& code) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      files.push_back(path);  // read_case() says what is wrong with it
      continue;
    }
    std::vector<std::string> found;
    for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
      std::error_code ignored;
      if (it->path().extension() == ".kdtr" && !it->is_directory(ignored))
        found.push_back(it->path().string());
    }
    if (error || found.empty()) {
      complain(fmt::format("{}: {}", path, error ? error.message() : "holds no .kdtr file"));
      code = kUnusable;
    }
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

std::string case_name(const std::string& file) { return one_line(fs::path(file).stem().string()); }

int64_t total_keys(const VerifyProblem& p) {
  int64_t keys = 0;
  for (int r = 0; r < p.b; ++r) keys += p.kv_len[r];
  return keys;
}

Json to_json(const Check& check) {
  Json j = {{"backend", check.backend}, {"precision", check.mode}};
  if (!check.skipped.empty()) {
    j["skipped"] = check.skipped;
    return j;
  }
  j["ok"] = check.ok;
  j["rel_fro"] = check.comparison.rel_fro;
  j["max_abs"] = check.comparison.max_abs;
  j["max_out_of_bound"] = check.comparison.max_out;
  j["max_lse"] = check.comparison.max_lse;
  j["seconds"] = check.seconds;
  if (!check.failure.empty()) j["failure"] = check.failure;
  return j;
}

// Collects what the table, the lines below it and the JSON need.
class Report {
 public:
  Report(const std::vector<std::string>& files, bool json) : json_(json), table_(columns(files)) {
    root_ = {{"treemla", version()},
             {"revision", revision()},
             {"device", cpu_name()},
             {"cases", Json::array()},
             {"errors", Json::array()}};
  }

  void error(const std::string& file, const std::string& message) {
    root_["errors"].push_back({{"file", file}, {"message", message}});
  }

  void begin_case(const std::string& file, const Case& c, bool from_oracle) {
    const VerifyProblem p = c.problem();
    name_ = case_name(file);
    rows_ = fmt::to_string(p.q.total_q * p.shape.h_q);
    keys_ = fmt::to_string(total_keys(p));
    if (from_oracle)
      notes_ += fmt::format("{}: no expected values in the file; cpu_oracle computed them\n", name_);
    root_["cases"].push_back({{"file", file},
                              {"b", p.b},
                              {"total_q", p.q.total_q},
                              {"h_q", p.shape.h_q},
                              {"d_v", p.shape.d_v},
                              {"d_rope", p.shape.d_rope},
                              {"keys", total_keys(p)},
                              {"page_size", p.kv.page_size},
                              {"mask", mask_name(p.mask.kind)},
                              {"q_dtype", dtype_name(p.q.dtype)},
                              {"kv_dtype", dtype_name(p.kv.dtype)},
                              {"expected", from_oracle ? "cpu_oracle" : "file"},
                              {"checks", Json::array()}});
  }

  void add(const Check& check) {
    root_["cases"].back()["checks"].push_back(to_json(check));
    if (json_) return;
    if (!header_printed_) print(table_.header());
    header_printed_ = true;
    if (!check.skipped.empty()) {
      print(table_.line(
          {name_, check.backend, check.mode, rows_, keys_, "skipped: " + one_line(check.skipped)}));
      return;
    }
    const Comparison& c = check.comparison;
    print(table_.line({name_, check.backend, check.mode, rows_, keys_, fmt::format("{:.1e}", c.rel_fro),
                       fmt::format("{:.1e}", c.max_abs), fmt::format("{:.1e}", c.max_lse), percent(c.max_out),
                       time_text(check.seconds), check.ok ? "PASS" : "FAIL"}));
    ++(check.ok ? passed_ : failed_);
    if (!check.ok) note(fmt::format("FAIL {}, {}, {}: {}", name_, check.backend, check.mode, check.failure));
  }

  // A line below the table.
  void note(const std::string& text) { notes_ += one_line(text) + "\n"; }

  void finish(int code) {
    if (json_) {
      root_["exit_code"] = code;
      print(root_.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
      return;
    }
    if (!header_printed_) return;
    print(fmt::format("\n{}{} checks passed, {} failed\n", notes_, passed_, failed_));
  }

 private:
  static Table columns(const std::vector<std::string>& files) {
    std::size_t case_width = 0, backend_width = 0;
    for (const std::string& f : files)
      case_width = std::max(case_width, std::min<std::size_t>(40, case_name(f).size()));
    for (const std::string& b : backend_names({})) backend_width = std::max(backend_width, b.size());
    return Table({{"case", Align::kLeft, case_width},
                  {"backend", Align::kLeft, backend_width},
                  {"mode", Align::kLeft},
                  {"rows", Align::kRight, 6},
                  {"keys", Align::kRight, 6},
                  {"rel error", Align::kRight},
                  {"abs error", Align::kRight},
                  {"lse error", Align::kRight},
                  {"of bound", Align::kRight},
                  {"time", Align::kRight, 7},
                  {"result", Align::kLeft}});
  }

  static std::string percent(double ratio) {
    return std::isfinite(ratio) ? fmt::format("{:.1f}%", 100 * ratio) : "inf";
  }

  bool json_, header_printed_ = false;
  Table table_;
  Json root_;
  std::string name_, rows_, keys_, notes_;
  int passed_ = 0, failed_ = 0;
};

struct Wanted {
  std::vector<std::string> backends;
  bool named = false;  // by the user: refusals are then shown
};

Wanted wanted_backends(const std::string& name) {
  Wanted wanted;
  wanted.named = !name.empty();
  for (const BackendInfo& info : list_backends()) {
    if (name == info.name || name == "all" || (name.empty() && info.available))
      wanted.backends.push_back(info.name);
  }
  return wanted;
}

// Returns the exit code of this file.
int verify_file(const std::string& file, const VerifyOptions& options, const Wanted& wanted, Report& report,
                Progress& progress, double done, double share) {
  const std::string name = case_name(file);
  progress.show(done, name);
  Case c;
  bool from_oracle = false;
  try {
    c = read_case(file);
    if (c.expected_out() == nullptr) {
      progress.show(done, name + ": computing expected values");
      add_expected(c);
      from_oracle = true;
    }
  } catch (const Error& e) {
    progress.clear();
    complain(e.what());
    report.error(file, e.what());
    return kUnusable;
  }

  const VerifyProblem stored = c.problem();
  std::optional<Widened> widened;
  int code = kSuccess, num_run = 0;
  report.begin_case(file, c, from_oracle);
  // Refusals are shown when the backend was asked for.
  const auto add = [&](const Check& check) {
    if (!check.skipped.empty() && !wanted.named) return;
    progress.clear();
    report.add(check);
    if (!check.skipped.empty()) return;
    ++num_run;
    if (!check.ok) code = std::max(code, kCheckFailed);
  };
  for (std::size_t i = 0; i < wanted.backends.size(); ++i) {
    const std::string& backend = wanted.backends[i];
    progress.show(done + share * static_cast<double>(i) / static_cast<double>(wanted.backends.size()),
                  fmt::format("{} on {}", name, backend));
    if (const Support s = find_backend(backend)->available(); !s.ok) {
      Check check(backend, "-");
      check.skipped = s.reason;
      add(check);
      continue;
    }
    for (const Precision precision : precisions(options.precision, backend, stored.q.dtype)) {
      const bool widen =
          precision == Precision::kF32 && (stored.q.dtype != DType::kF32 || stored.kv.dtype != DType::kF32);
      if (widen && !widened) {
        if (const std::string reason = Widened::why_not(stored); !reason.empty()) {
          report.note(fmt::format("{}: not checked in fp32: {}", name, reason));
          continue;
        }
        widened.emplace(stored);
      }
      add(run_check(c, widen ? widened->problem() : stored, backend, precision,
                    static_cast<int>(options.threads)));
    }
  }
  if (num_run == 0) {
    const std::string message = fmt::format("{}: no backend asked for takes this case", file);
    progress.clear();
    complain(message);
    report.error(file, message);
    return kUnusable;
  }
  return code;
}

int run_verify(const VerifyOptions& options) {
  int code = kSuccess;
  const std::vector<std::string> files = case_files(options.paths, code);
  const Wanted wanted = wanted_backends(options.backend);
  Report report(files, options.json);
  Progress progress;
  const double share = 1.0 / static_cast<double>(std::max<std::size_t>(1, files.size()));
  for (std::size_t i = 0; i < files.size(); ++i) {
    int file_code = kUnusable;
    try {
      file_code =
          verify_file(files[i], options, wanted, report, progress, static_cast<double>(i) * share, share);
    } catch (const std::bad_alloc&) {
      const std::string message = fmt::format("{}: out of memory", files[i]);
      progress.clear();
      complain(message);
      report.error(files[i], message);
    }
    code = std::max(code, file_code);
  }
  progress.clear();
  report.finish(code);
  return code;
}

}  // namespace

Run add_verify(CLI::App& app) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* cmd = app.add_subcommand("verify", "Check case files on the backends of this build");
  cmd->add_option("files", options->paths, "case files, or folders of *.kdtr")
      ->required()
      ->type_name("FILE|DIR");
  add_choice(*cmd, "--backend", options->backend, backend_names({"all"}),
             "one that `treemla info` lists, or all; by default the usable ones", Listed::kNo);
  add_choice(*cmd, "--precision", options->precision, {"auto", "fp32", "bf16", "fp16"}, "what is judged");
  add_threads(*cmd, options->threads);
  cmd->add_flag("--json", options->json, "JSON on standard output instead of the table");
  cmd->footer(
      "fp32 widens q and the cache to float32 (exact; e4m3_packed is rounded once), writes float32 and "
      "judges "
      "by the\n"
      "float32 bounds; bf16 and fp16 run the tensors as stored, write that dtype and judge by its bounds; "
      "auto "
      "does\n"
      "fp32 and the case's own.\n"
      "Columns: relative Frobenius error, worst absolute errors of out and lse, the worst element of out as "
      "a share\n"
      "of its bound, time of one run.\n\n" +
      footer({"treemla verify cases/", "treemla verify case.kdtr --backend cpu_simd --precision bf16 --json"},
             "a check failed"));
  return [options] { return run_verify(*options); };
}

}  // namespace treemla::cli
