#include "backend/cpu/thread_pool.hpp"

#include <map>

#if defined(__linux__)
#include <sched.h>
#endif

namespace treemla {

ThreadPool::ThreadPool(int num_workers) {
  threads_.reserve(num_workers - 1);
  try {
    for (int w = 1; w < num_workers; ++w) threads_.emplace_back([this, w] { loop(w); });
  } catch (...) {  // the system refused a thread: release those that did start
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    start_.notify_all();
    for (std::thread& t : threads_) t.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void ThreadPool::call(int worker) {
  try {
    (*fn_)(worker);
  } catch (...) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void ThreadPool::run(const std::function<void(int)>& fn) {
  std::lock_guard turn(turn_);
  {
    std::lock_guard lock(mutex_);
    fn_ = &fn;
    error_ = nullptr;
    running_ = static_cast<int>(threads_.size());
    ++epoch_;
  }
  start_.notify_all();
  call(0);
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
  fn_ = nullptr;
  if (error_) std::rethrow_exception(error_);
}

void ThreadPool::loop(int worker) {
  uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      start_.wait(lock, [&] { return stop_ || epoch_ != seen; });
      if (stop_) return;
      seen = epoch_;
    }
    call(worker);
    std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_one();
  }
}

int available_cores() {
#if defined(__linux__)
  cpu_set_t set;  // respects taskset and container limits
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

std::shared_ptr<ThreadPool> shared_pool(int num_threads) {
  static std::mutex mutex;
  static std::map<int, std::shared_ptr<ThreadPool>> pools;
  const int n = num_threads > 0 ? num_threads : available_cores();
  std::lock_guard lock(mutex);
  std::shared_ptr<ThreadPool>& pool = pools[n];
  if (!pool) pool = std::make_shared<ThreadPool>(n);
  return pool;
}

}  // namespace treemla
