#include "bench_report.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/file_io.hpp"
#include "host.hpp"
#include "output.hpp"
#include "text.hpp"
#include "treemla/error.hpp"
#include "treemla/version.hpp"

namespace treemla::cli {
namespace {

using Json = nlohmann::ordered_json;

void open(std::ofstream& file, const std::string& path, const char* option) {
  if (path.empty()) return;
  errno = 0;
  file.open(path, std::ios::binary | std::ios::trunc);
  if (!file)
    throw Error(ErrorCode::kIo, option,
                fmt::format("{} {}: can't write: {}", option, path, std::strerror(errno)));
}

void close(std::ofstream& file, const std::string& path, const char* option) {
  if (!file.is_open()) return;
  errno = 0;
  file.close();
  if (!file)
    throw Error(ErrorCode::kIo, option,
                fmt::format("{} {}: can't write: {}", option, path, std::strerror(errno)));
}

// Rates of a row. Bytes come from memory only when the caches are cold; arithmetic is at its best when they
// are warm. A share of 0: no ceiling to hold the rate against.
struct RowRates {
  RowRates(const BenchRow& r, const CpuCeilings& c)
      : bytes_per_s(r.work.bytes() / r.timing.cold_s),
        flops_per_s(r.work.flops / r.timing.warm_s),
        of_read(r.on_cpu && c.read_bytes_per_s > 0 ? bytes_per_s / c.read_bytes_per_s : 0),
        of_fma(r.on_cpu && c.fma_flops_per_s > 0 ? flops_per_s / c.fma_flops_per_s : 0),
        of_dot(of_bf16(r, c.dot_flops_per_s)),
        of_amx(of_bf16(r, c.amx_flops_per_s)) {}
  double of_bf16(const BenchRow& r, double ceiling) const {
    return r.on_cpu && r.dtype == DType::kBF16 && ceiling > 0 ? flops_per_s / ceiling : 0;
  }
  double bytes_per_s, flops_per_s, of_read, of_fma, of_dot, of_amx;
};

std::string csv_share(double share) { return share > 0 ? fmt::format("{:.4f}", share) : ""; }

std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

constexpr const char* kCsvHeader =
    "device,backend,dtype,page_size,mask,tree,b,s_q,h_q,prefix,warm_us,cold_us,noise,gb_per_s,tflop_per_s,of_"
    "read,"
    "of_fma,of_dot,of_amx,checked,threads,revision,date,not_run\n";

// A row that was not run has empty figures.
std::string csv_line(const BenchRow& r, const BenchContext& c) {
  std::string figures = ",,,,,,,,";
  if (r.not_run.empty()) {
    const RowRates rates(r, c.ceilings);
    figures = fmt::format("{:.3f},{:.3f},{:.4f},{:.3f},{:.5f},{},{},{},{}", r.timing.warm_s * 1e6,
                          r.timing.cold_s * 1e6, r.timing.noise, rates.bytes_per_s / 1e9,
                          rates.flops_per_s / 1e12, csv_share(rates.of_read), csv_share(rates.of_fma),
                          csv_share(rates.of_dot), csv_share(rates.of_amx));
  }
  return fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", csv_field(r.device), r.backend,
                     dtype_name(r.dtype), r.page_size, r.mask, r.tree, r.b, r.s_q, r.h_q, r.prefix, figures,
                     r.checked, c.threads, c.revision, c.date, csv_field(r.not_run));
}

Json json_row(const BenchRow& r, const BenchContext& c) {
  Json j = {{"device", r.device},
            {"backend", r.backend},
            {"dtype", dtype_name(r.dtype)},
            {"page_size", r.page_size},
            {"mask", r.mask},
            {"tree", r.tree},
            {"b", r.b},
            {"s_q", r.s_q},
            {"h_q", r.h_q},
            {"prefix", r.prefix}};
  if (!r.not_run.empty()) {
    j["not_run"] = r.not_run;
    return j;
  }
  const RowRates rates(r, c.ceilings);
  j["warm_us"] = r.timing.warm_s * 1e6;
  j["cold_us"] = r.timing.cold_s * 1e6;
  j["noise"] = r.timing.noise;
  j["warm_samples"] = r.timing.warm_samples;
  j["cold_samples"] = r.timing.cold_samples;
  j["bytes"] = r.work.bytes();
  j["flops"] = r.work.flops;
  j["gb_per_s"] = rates.bytes_per_s / 1e9;
  j["tflop_per_s"] = rates.flops_per_s / 1e12;
  j["of_read"] = rates.of_read;
  j["of_fma"] = rates.of_fma;
  j["of_dot"] = rates.of_dot;
  j["of_amx"] = rates.of_amx;
  j["checked"] = r.checked;
  return j;
}

Json json_context(const BenchContext& c) {
  return {{"treemla", version()},
          {"revision", c.revision},
          {"date", c.date},
          {"command", c.command},
          {"devices", c.devices},
          {"threads", c.threads},
          {"clock", c.clock},
          {"system", system_name()},
          {"compiler", compiler_name()},
          {"build", build_options()},
          {"memory_bytes", memory_total_bytes()},
          {"cache_bytes", last_level_cache_bytes()},
          {"flush_bytes", c.flush_bytes},
          {"ceilings",
           {{"fma_flops_per_s", c.ceilings.fma_flops_per_s},
            {"dot_flops_per_s", c.ceilings.dot_flops_per_s},
            {"amx_flops_per_s", c.ceilings.amx_flops_per_s},
            {"read_bytes_per_s", c.ceilings.read_bytes_per_s},
            {"read_buffer_bytes", c.ceilings.buffer_bytes}}}};
}

Table make_table(const char* flops_title) {
  return Table({{"backend", Align::kLeft, 10},
                {"dtype", Align::kLeft, 11},
                {"page", Align::kRight},
                {"mask", Align::kLeft, 6},
                {"b", Align::kRight, 3},
                {"s_q", Align::kRight, 4},
                {"h_q", Align::kRight, 4},
                {"prefix", Align::kRight, 7},
                {"warm_us", Align::kRight, 10},
                {"cold_us", Align::kRight, 10},
                {"noise", Align::kRight, 6},
                {"GB/s", Align::kRight, 6},
                {"of read", Align::kRight},
                {flops_title, Align::kRight, 7},
                {"of FMA", Align::kRight},
                {"of dot", Align::kRight},
                {"of AMX", Align::kRight},
                {"checked", Align::kLeft}});
}

}  // namespace

BenchReport::BenchReport(const std::string& csv_path, const std::string& json_path)
    : csv_path_(csv_path), json_path_(json_path) {
  open(csv_, csv_path, "--csv");
  open(json_, json_path, "--json");
}

void BenchReport::begin(BenchContext context) {
  context_ = std::move(context);
  const CpuCeilings& c = context_.ceilings;
  std::string text;
  for (const std::string& device : context_.devices) text += fmt::format("device       {}\n", device);
  if (context_.any_on_cpu()) {
    text += fmt::format("ceilings     float32 FMA {:.1f} GFLOP/s, ", c.fma_flops_per_s / 1e9);
    if (c.dot_flops_per_s > 0) text += fmt::format("bf16 dot {:.1f} GFLOP/s, ", c.dot_flops_per_s / 1e9);
    if (c.amx_flops_per_s > 0) text += fmt::format("AMX {:.1f} GFLOP/s, ", c.amx_flops_per_s / 1e9);
    text += c.read_bytes_per_s > 0 ? fmt::format("read {:.1f} GB/s (a {} buffer)", c.read_bytes_per_s / 1e9,
                                                 bytes_text(c.buffer_bytes))
                                   : "read not measured: too little memory";
    text +=
        fmt::format("; measured now on {} thread{}\n", context_.threads, context_.threads == 1 ? "" : "s");
  }
  text += "times        medians of run(), planned once; warm back to back, cold with the caches flushed";
  if (context_.any_on_cpu()) text += fmt::format(" by reading {}", bytes_text(context_.flush_bytes));
  text += "\nrates        GB/s of cold_us, FLOP/s of warm_us";
  text += context_.clock == "cpu" ? "; clock: processor time of the thread\n\n" : "\n\n";
  table_ = make_table(context_.any_on_cpu() ? "GFLOP/s" : "TFLOP/s");
  print(text + table_->header());
  if (csv_.is_open()) csv_ << kCsvHeader << std::flush;
}

void BenchReport::add(const BenchRow& r) {
  std::vector<std::string> cells = {r.backend,
                                    std::string(dtype_name(r.dtype)),
                                    std::to_string(r.page_size),
                                    r.mask,
                                    std::to_string(r.b),
                                    std::to_string(r.s_q),
                                    std::to_string(r.h_q),
                                    std::to_string(r.prefix)};
  if (r.not_run.empty()) {
    const RowRates rates(r, context_.ceilings);
    cells.insert(cells.end(),
                 {fmt::format("{:.1f}", r.timing.warm_s * 1e6), fmt::format("{:.1f}", r.timing.cold_s * 1e6),
                  percent_text(r.timing.noise), fmt::format("{:.2f}", rates.bytes_per_s / 1e9),
                  percent_text(rates.of_read),
                  fmt::format("{:.1f}", rates.flops_per_s / (context_.any_on_cpu() ? 1e9 : 1e12)),
                  percent_text(rates.of_fma), rates.of_dot > 0 ? percent_text(rates.of_dot) : "",
                  rates.of_amx > 0 ? percent_text(rates.of_amx) : "", r.checked});
  } else {
    cells.insert(cells.end(), {"n/a", "n/a"});
    notes_ += fmt::format("n/a: {} b {} s_q {} h_q {} prefix {} {} page {}: {}\n", r.backend, r.b, r.s_q,
                          r.h_q, r.prefix, dtype_name(r.dtype), r.page_size, one_line(r.not_run));
  }
  print(table_->line(cells));
  if (csv_.is_open()) csv_ << csv_line(r, context_) << std::flush;
  rows_.push_back(json_row(r, context_));
}

void BenchReport::finish(double seconds) {
  print(fmt::format("\n{}{} rows in {}\n", notes_, rows_.size(), time_text(seconds)));
  if (json_.is_open()) {
    Json root = json_context(context_);
    root["rows"] = std::move(rows_);
    json_ << root.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
  }
  close(csv_, csv_path_, "--csv");
  close(json_, json_path_, "--json");
}

}  // namespace treemla::cli
