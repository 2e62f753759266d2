// Quantities for people: three or four digits and a unit.
#pragma once

#include <fmt/format.h>

#include <string>

namespace treemla::cli {

inline std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 6; ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 || bytes >= 100 ? 0 : 1, kUnits[unit]);
}

inline std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.3g} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.{}f} s", seconds, seconds < 10 ? 2 : seconds < 100 ? 1 : 0);
}

// 3.5e9 with unit "FLOP" is "3.50 GFLOP".
inline std::string metric_text(double x, const char* unit) {
  static constexpr const char* kPrefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  int i = 0;
  for (; x >= 1000 && i < 6; ++i) x /= 1000;
  return fmt::format("{:.{}f} {}{}", x, i == 0 ? 0 : x < 10 ? 2 : x < 100 ? 1 : 0, kPrefixes[i], unit);
}

// A share as a percentage; "-" where there is nothing to hold it against.
inline std::string percent_text(double share) {
  return share > 0 ? fmt::format("{:.1f}%", 100 * share) : "-";
}

}  // namespace treemla::cli
