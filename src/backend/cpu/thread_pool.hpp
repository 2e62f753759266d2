// A fork-join pool: run(fn) calls fn(worker) once on each worker, the caller being worker 0.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace treemla {

class ThreadPool {
 public:
  explicit ThreadPool(int num_workers);
  ~ThreadPool();
  int num_workers() const { return static_cast<int>(threads_.size()) + 1; }

  // Returns when every worker is done; rethrows the first exception of any. Callers on several threads take
  // turns.
  void run(const std::function<void(int)>& fn);

 private:
  void loop(int worker);
  void call(int worker);

  std::mutex turn_;  // one run at a time
  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* fn_ = nullptr;
  std::exception_ptr error_;
  uint64_t epoch_ = 0;
  int running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

// The process's pool of that size, made on first use and kept. num_threads 0: one worker per available core.
std::shared_ptr<ThreadPool> shared_pool(int num_threads);
// Cores this process may run on.
int available_cores();

}  // namespace treemla
