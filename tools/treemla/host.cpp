#include "host.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>

#if __has_include("treemla_build_info.hpp")  // written by the build system; a build without it still works
#include "treemla_build_info.hpp"
#endif

namespace treemla::cli {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The first number of a file such as memory.max; nothing for "max", garbage or no file.
std::optional<int64_t> read_number(const std::string& path) {
  const std::string text = read_text(path);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// A line "key  : value" of a file in /proc.
std::string proc_field(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const auto colon = line.find(':');
    const auto begin = colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

int64_t meminfo_bytes(std::string_view key) {
  const std::string kib = proc_field("/proc/meminfo", key);
  return std::atoll(kib.c_str()) * 1024;
}

struct MemoryLimit {
  int64_t limit = kUnlimited, left = kUnlimited;
};

// Control groups, version 2 then 1. Inside a container the root of the mount is the container's own group.
MemoryLimit container_limit() {
  static constexpr const char* kFiles[][2] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"}};
  for (const auto& [limit_file, usage_file] : kFiles) {
    const auto limit = read_number(limit_file), usage = read_number(usage_file);
    if (limit && usage) return {*limit, std::max<int64_t>(0, *limit - *usage)};
  }
  return {};
}

// Whole cores that a container's CPU quota allows.
int quota_cores() {
  std::istringstream text(read_text("/sys/fs/cgroup/cpu.max"));
  double quota = 0, period = 0;
  if (!(text >> quota >> period) || quota <= 0 || period <= 0) return std::numeric_limits<int>::max();
  return std::max(1, static_cast<int>(std::ceil(quota / period)));
}

}  // namespace

std::string cpu_name() {
  const std::string name = proc_field("/proc/cpuinfo", "model name");
  return name.empty() ? "unknown CPU" : name;
}

int num_cores() {
  cpu_set_t set;
  const int allowed = sched_getaffinity(0, sizeof set, &set) == 0
                          ? CPU_COUNT(&set)
                          : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(allowed, 1, quota_cores());
}

int64_t last_level_cache_bytes() {
  const std::string base = "/sys/devices/system/cpu/cpu0/cache/index";
  int64_t largest = 0;
  for (int i = 0; i < 8; ++i) {
    const std::string size = read_text(fmt::format("{}{}/size", base, i));  // "2048K"
    largest = std::max<int64_t>(largest, std::atoll(size.c_str()) * 1024);
  }
  return largest;
}

int64_t memory_total_bytes() { return std::min(meminfo_bytes("MemTotal"), container_limit().limit); }

int64_t memory_available_bytes() {
  const int64_t available = meminfo_bytes("MemAvailable");
  return std::min(available > 0 ? available : kUnlimited, container_limit().left);
}

std::string system_name() {
  utsname u{};
  return uname(&u) == 0 ? fmt::format("{} {} {}", u.sysname, u.release, u.machine) : "unknown";
}

std::string compiler_name() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown compiler";
#endif
}

std::string build_options() {
  std::string s;
#if defined(TREEMLA_BUILD_FLAGS)
  s = TREEMLA_BUILD_FLAGS;
#elif defined(__OPTIMIZE__)
  s = "optimised";
#else
  s = "not optimised";
#endif
#if !defined(NDEBUG)
  s += ", assertions on";
#endif
#if defined(__SANITIZE_ADDRESS__)
  s += ", sanitizers on";
#endif
#if defined(TREEMLA_HAS_CUDA)
  s += ", CUDA";
#else
  s += ", no CUDA";
#endif
  return s;
}

std::string revision() {
#if defined(TREEMLA_BUILD_REVISION)
  return TREEMLA_BUILD_REVISION;
#else
  return "unknown";
#endif
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

}  // namespace treemla::cli
