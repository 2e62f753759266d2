// Timing of one row: warm and cold samples, their medians and spread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "backend/backend.hpp"

namespace treemla::cli {

// Evicts what the caches hold by streaming over a buffer of its own.
class CacheFlusher {
 public:
  static constexpr double kMaxBytes = 256.0 * (1 << 20);  // larger caches are flushed in part only

  // Twice the last-level cache, at most kMaxBytes and a quarter of the memory there is.
  explicit CacheFlusher(int threads);
  void flush();
  std::size_t bytes() const { return bytes_; }

 private:
  int threads_;
  std::size_t bytes_;
  std::shared_ptr<std::byte> buffer_;
};

struct Timing {
  double warm_s = 0, cold_s = 0;  // medians
  double noise = 0;  // (p90 - p10) / median, the larger of both; 0 where there was time for one sample
  int warm_samples = 0, cold_samples = 0;
};

// With thread_time a sample is the processor time of the calling thread: what one thread takes on a machine that others
// use too. Half of `seconds` for each column, but at least three samples, or one where a single run takes longer than
// that. `tick` is called between samples and may show progress.
Timing measure(const std::function<void()>& run, CacheFlusher& flusher, double seconds, bool thread_time,
               const std::function<void(double part)>& tick);

// The same for what `enqueue` puts on a stream of a device. Its memory space replays a graph and flushes its
// own cache.
Timing measure_on_device(const MemorySpace& space, void* stream, const std::function<void()>& enqueue,
                         double seconds);

}  // namespace treemla::cli
