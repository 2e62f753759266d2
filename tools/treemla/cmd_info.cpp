// treemla info: what this build is, what this machine has, which backends work here.

#include <fmt/format.h>

#include <string>

#include "backend/cpu/simd_kernel.hpp"
#include "commands.hpp"
#include "host.hpp"
#include "options.hpp"
#include "output.hpp"
#include "table.hpp"
#include "text.hpp"
#include "treemla/treemla.hpp"

namespace treemla::cli {
namespace {

int run_info() {
  std::string s = fmt::format("treemla      {}, revision {}\n", version(), revision());
  s += fmt::format("build        {}, {}\n", compiler_name(), build_options());
  s += fmt::format("system       {}\n", system_name());
  s += fmt::format("cpu          {}, {} core{} usable\n", cpu_name(), num_cores(),
                   num_cores() == 1 ? "" : "s");
  s += fmt::format("simd         {}, the first is in use\n", fmt::join(simd_targets(), ", "));
  const auto cache = static_cast<double>(last_level_cache_bytes());
  s += fmt::format("cache        {}\n", cache > 0 ? "last level " + bytes_text(cache) : "unknown");
  s += fmt::format("memory       {}, {} available\n\n", bytes_text(static_cast<double>(memory_total_bytes())),
                   bytes_text(static_cast<double>(memory_available_bytes())));

  Table table(
      {{"backend", Align::kLeft}, {"memory", Align::kLeft}, {"usable", Align::kLeft}, {"why", Align::kLeft}});
  std::vector<std::vector<std::string>> rows;
  for (const BackendInfo& b : list_backends()) {
    rows.push_back(
        {b.name, b.memory == Memory::kHost ? "host" : "device", b.available ? "yes" : "no", b.reason});
    table.fit(rows.back());
  }
  s += table.header();
  for (const auto& row : rows) s += table.line(row);
  print(s);
  return kSuccess;
}

}  // namespace

Run add_info(CLI::App& app) {
  CLI::App* cmd = app.add_subcommand("info", "Show the build, the machine and its backends");
  cmd->footer(footer({"treemla info"}, ""));
  return [] { return run_info(); };
}

}  // namespace treemla::cli
