#include "output.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "core/file_io.hpp"

namespace treemla::cli {
namespace {

int write_error = 0;  // errno of the first failed write to standard output

}  // namespace

void init_output() { std::signal(SIGPIPE, SIG_IGN); }

void print(std::string_view text) {
  if (write_error != 0) return;
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    write_error = errno != 0 ? errno : EIO;
}

bool reader_gone() { return write_error == EPIPE; }

void complain(std::string_view message) { fmt::print(stderr, "treemla: {}\n", one_line(message)); }

int finish_output(int code) {
  if (write_error == 0 || write_error == EPIPE) return code;
  complain(fmt::format("can't write to standard output: {}", std::strerror(write_error)));
  return std::max(code, 2);
}

}  // namespace treemla::cli
