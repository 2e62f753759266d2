// A progress bar on standard error, drawn only where that is a terminal and erased when done.
//
//     [##########..............]  42%  eta 12 s  h_q 64, prefix 4096
#pragma once

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace treemla::cli {

class Progress {
 public:
  Progress() {
    const char* term = std::getenv("TERM");
    enabled_ = isatty(STDERR_FILENO) == 1 && !(term != nullptr && std::string_view(term) == "dumb");
  }
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `fraction` of the whole, 0..1. Redraws at most ten times a second unless the label changes.
  void show(double fraction, std::string_view label) {
    const auto now = Clock::now();
    if (!enabled_ || (drawn_ && label == label_ && now - last_ < std::chrono::milliseconds(100))) return;
    last_ = now;
    label_ = label;
    fraction = std::clamp(fraction, 0.0, 1.0);

    constexpr int kCells = 24;
    const int full = static_cast<int>(fraction * kCells);
    std::string line = fmt::format("[{:#<{}}{:.<{}}] {:3.0f}%", "", full, "", kCells - full, 100 * fraction);
    const double elapsed = std::chrono::duration<double>(now - start_).count();
    if (fraction > 0 && elapsed > 0.5)
      line += fmt::format("  eta {}", duration(elapsed * (1 - fraction) / fraction));
    line += fmt::format("  {}", label);
    line.resize(std::min(line.size(), width() - 1));  // a wrapped line could not be erased
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
    std::fflush(stderr);
    drawn_ = true;
  }

  // Call before anything else is printed to the terminal.
  void clear() {
    if (!drawn_) return;
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
    drawn_ = false;
  }

 private:
  using Clock = std::chrono::steady_clock;

  static std::string duration(double s) {
    return s < 90 ? fmt::format("{:.0f} s", s) : fmt::format("{:.0f} min", s / 60);
  }

  static std::size_t width() {
    winsize size{};
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
  }

  bool enabled_ = false, drawn_ = false;
  std::string label_;
  Clock::time_point start_ = Clock::now(), last_;
};

}  // namespace treemla::cli
