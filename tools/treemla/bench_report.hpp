// What a benchmark writes: a table as the rows come, a CSV file, a JSON file.
#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench_timer.hpp"
#include "cpu_ceilings.hpp"
#include "plan/cost.hpp"
#include "table.hpp"
#include "treemla/problem.hpp"

namespace treemla::cli {

struct BenchRow {
  int64_t b = 1, s_q = 1, h_q = 1, prefix = 0, page_size = 1;
  DType dtype = DType::kBF16;  // of the cache
  std::string device, backend, mask, tree;
  bool on_cpu = true;   // the ceilings are this CPU's
  std::string not_run;  // the reason, or empty
  Timing timing;
  Work work;
  std::string checked = "no";  // "yes": against the oracle; "FAIL"
};

// What all rows share.
struct BenchContext {
  std::string command, revision, date, clock = "wall";
  std::vector<std::string> devices;
  int threads = 1;
  // Of the CPU; zero where only other devices are measured.
  CpuCeilings ceilings;
  double flush_bytes = 0;
  bool any_on_cpu() const { return ceilings.fma_flops_per_s > 0; }
};

class BenchReport {
 public:
  // Opens the files now, so that a bad path is known before the measuring. Throws Error(kIo). "" = no file.
  BenchReport(const std::string& csv_path, const std::string& json_path);

  void begin(BenchContext context);
  void add(const BenchRow& row);
  void finish(double seconds);
  bool to_files() const { return csv_.is_open() || json_.is_open(); }

 private:
  std::string csv_path_, json_path_;
  std::ofstream csv_, json_;
  BenchContext context_;
  std::optional<Table> table_;
  std::string notes_;
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
};

}  // namespace treemla::cli
