#include "bench_timer.hpp"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "backend/cpu/thread_pool.hpp"
#include "core/file_io.hpp"
#include "host.hpp"

namespace treemla::cli {
namespace {

constexpr std::size_t kLine = 64;  // bytes
constexpr int kMaxSamples = 1000;

double seconds_of(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double thread_seconds_of(const std::function<void()>& run) {
  const double begin = thread_seconds();
  run();
  return thread_seconds() - begin;
}

// Nearest rank.
double quantile(const std::vector<double>& sorted, double q) {
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<std::size_t>(std::lround(q * last))];
}

struct Summary {
  double median = 0, noise = 0;
};

Summary summarize(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const double median = quantile(samples, 0.5);
  return {median, median > 0 ? (quantile(samples, 0.9) - quantile(samples, 0.1)) / median : 0};
}

Timing to_timing(const std::vector<double>& warm, const std::vector<double>& cold) {
  const Summary w = summarize(warm), c = summarize(cold);
  return {w.median, c.median, std::max(w.noise, c.noise), static_cast<int>(warm.size()),
          static_cast<int>(cold.size())};
}

}  // namespace

CacheFlusher::CacheFlusher(int threads) : threads_(threads) {
  double bytes = 2.0 * static_cast<double>(last_level_cache_bytes());
  if (bytes == 0) bytes = kMaxBytes;
  bytes = std::min({bytes, kMaxBytes, static_cast<double>(memory_available_bytes()) / 4});
  bytes_ = std::max(static_cast<std::size_t>(bytes) / kLine, std::size_t{1}) * kLine;
  buffer_ = allocate_bytes(bytes_);
  std::memset(buffer_.get(), 1, bytes_);
}

// Reads only: dirty lines would be written back during the sample that follows. Every worker reads a slice,
// so that the private caches of its core are flushed as well as the shared one.
void CacheFlusher::flush() {
  const int workers = num_threads_of(threads_);
  const std::size_t lines = bytes_ / kLine;
  static std::atomic<unsigned> sink;
  run_shares(workers, workers, [&](int w) {
    unsigned sum = 0;
    for (std::size_t i = lines * w / workers; i < lines * (w + 1) / workers; ++i)
      sum += std::to_integer<unsigned>(buffer_.get()[i * kLine]);
    sink += sum;
  });
}

Timing measure(const std::function<void()>& run, CacheFlusher& flusher, double seconds, bool thread_time,
               const std::function<void(double part)>& tick) {
  using Clock = std::chrono::steady_clock;
  tick(0);
  const double first = seconds_of(run);  // pages touched, threads awake; not a sample
  const int least = first > seconds / 2 ? 1 : 3;
  const auto collect = [&](bool cold) {
    std::vector<double> samples;
    const auto begin = Clock::now();
    const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
    while (static_cast<int>(samples.size()) < least ||
           (spent() < seconds / 2 && static_cast<int>(samples.size()) < kMaxSamples)) {
      tick((cold ? 0.5 : 0) + std::min(0.5, spent() / seconds));
      if (cold) flusher.flush();
      samples.push_back(thread_time ? thread_seconds_of(run) : seconds_of(run));
    }
    return samples;
  };
  const std::vector<double> warm = collect(false), cold = collect(true);
  return to_timing(warm, cold);
}

Timing measure_on_device(const MemorySpace& space, void* stream, const std::function<void()>& enqueue,
                         double seconds) {
  const double once = summarize(space.measure(stream, enqueue, 5, false)).median;
  const int samples =
      static_cast<int>(std::clamp(seconds / 2 / std::max(once, 1e-6), 5.0, double{kMaxSamples}));
  const std::vector<double> warm = space.measure(stream, enqueue, samples, false);
  return to_timing(warm, space.measure(stream, enqueue, samples, true));
}

}  // namespace treemla::cli
