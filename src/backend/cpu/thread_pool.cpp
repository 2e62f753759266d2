#include "backend/cpu/thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#include <hwy/cache_control.h>

#include "core/fail.hpp"

namespace treemla {
namespace {

// How long a thread that waits keeps its core before it sleeps. Waking one costs as much (50 us on a virtual machine), and a
// call has two joins some microseconds apart.
constexpr std::chrono::microseconds kSpin{50};

template <class Done>
bool spin_until(Done done) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      hwy::Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Does this thread run a share? Then what it calls stays on it.
thread_local bool inside_share = false;

struct Job {
  Job(int n, const std::function<void(int)>& f)
      : num_shares(n), share(f), claimed(new std::atomic<bool>[n]()) {}

  // Thread `first` of the call: that share, then all that nobody else has taken.
  void work(int first) {
    inside_share = true;
    for (int i = 0; i < num_shares; ++i) {
      const int at = (first + i) % num_shares;
      if (claimed[at].exchange(true, std::memory_order_relaxed)) continue;
      try {
        share(at);
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
    inside_share = false;
  }

  const int num_shares;
  const std::function<void(int)>& share;
  const std::unique_ptr<std::atomic<bool>[]> claimed;
  std::mutex error_mutex;
  std::exception_ptr error;
  std::atomic<int> helpers = 0;  // that hold this job; the caller goes on at 0
};

struct Helper {
  int number = 0;  // in order of start
  std::atomic<Job*> job =
      nullptr;       // what to do next: taken back by the caller if it is done before the helper wakes
  int first = 0;     // share to begin with; written before `job`
  std::mutex mutex;  // of `wake`
  std::condition_variable wake;
  std::thread thread;
};

class Pool {
 public:
  static Pool& get() {
    static Pool pool;
    return pool;
  }

  ~Pool() {
    stop_ = true;
    for (const std::unique_ptr<Helper>& h : helpers_) {
      if (forked()) {
        h->thread.detach();  // it exists in the parent alone
        continue;
      }
      wake(*h);
      h->thread.join();
    }
    if (forked())
      for (std::unique_ptr<Helper>& h : helpers_)
        (void)h.release();  // whose mutex the fork may have found locked
  }

  void run(int num_shares, int num_threads, const std::function<void(int)>& share) {
    Job job(num_shares, share);
    if (inside_share) {
      job.work(0);
      inside_share = true;
    } else {
      const std::vector<Helper*> mine = engage(job, std::min(num_shares, num_threads) - 1, num_threads);
      job.work(0);
      dismiss(job, mine);
    }
    if (job.error) std::rethrow_exception(job.error);
  }

  int num_helpers() {
    std::lock_guard lock(mutex_);
    return static_cast<int>(helpers_.size());
  }

 private:
  // Up to `wanted` idle helpers get the job, as many as leave num_threads or fewer threads running.
  std::vector<Helper*> engage(Job& job, int wanted, int num_threads) {
    std::vector<Helper*> mine;
    mine.reserve(std::max(wanted, 0));
    {
      std::lock_guard lock(mutex_);
      ++running_;
      for (wanted = std::min(wanted, num_threads - running_); wanted > 0; --wanted) {
        if (idle_.empty() && !start_one()) break;
        mine.push_back(idle_.back());
        idle_.pop_back();
        ++running_;
      }
      job.helpers = static_cast<int>(mine.size());
    }
    for (std::size_t i = 0; i < mine.size(); ++i) {
      mine[i]->first = static_cast<int>(i) + 1;
      mine[i]->job = &job;
      wake(*mine[i]);
    }
    return mine;
  }

  // Every share is taken: those who haven't begun need not come, the others are waited for.
  void dismiss(Job& job, const std::vector<Helper*>& mine) {
    for (Helper* h : mine) {
      Job* mine_still = &job;
      if (!h->job.compare_exchange_strong(mine_still, nullptr)) continue;
      leave(h);
      --job.helpers;
    }
    const auto done = [&] { return job.helpers.load() == 0; };
    if (!spin_until(done)) {
      std::unique_lock lock(mutex_);
      done_.wait(lock, done);
    }
    std::lock_guard lock(mutex_);
    --running_;
  }

  void leave(Helper* h) {
    std::lock_guard lock(mutex_);
    --running_;
    const auto earlier = [](const Helper* a, const Helper* b) { return a->number > b->number; };
    idle_.insert(std::upper_bound(idle_.begin(), idle_.end(), h, earlier), h);
  }

  // With mutex_ held. False if the system refuses another thread: the call does with fewer.
  bool start_one() {
    const std::size_t before = helpers_.size();
    try {
      idle_.reserve(before + 1);  // so that leave() never allocates
      helpers_.push_back(std::make_unique<Helper>());
      Helper* h = helpers_.back().get();
      h->number = static_cast<int>(before);
      h->thread = std::thread([this, h] { loop(*h); });
      idle_.push_back(h);
      return true;
    } catch (const std::exception&) {
      helpers_.resize(before);
      return false;
    }
  }

  static void wake(Helper& h) {
    { std::lock_guard lock(h.mutex); }  // it sleeps, or will look again before it does
    h.wake.notify_one();
  }

  void loop(Helper& h) {
    const auto called = [&] { return h.job.load() != nullptr || stop_.load(); };
    for (;;) {
      if (!spin_until(called)) {
        std::unique_lock lock(h.mutex);
        h.wake.wait(lock, called);
      }
      if (stop_) return;
      Job* job = h.job.exchange(nullptr);
      if (!job) continue;  // taken back
      job->work(h.first);
      leave(&h);
      if (job->helpers.fetch_sub(1) == 1) {  // from here on the job may be gone
        { std::lock_guard lock(mutex_); }
        done_.notify_all();
      }
    }
  }

#if defined(__unix__) || defined(__APPLE__)
  bool forked() const { return getpid() != pid_; }
  const pid_t pid_ = getpid();
#else
  bool forked() const { return false; }
#endif
  std::mutex mutex_;  // of all below but stop_
  std::condition_variable done_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::vector<Helper*>
      idle_;         // the first started last: a lone caller's share k is begun by the same helper every time
  int running_ = 0;  // threads in calls: callers and their helpers
  std::atomic<bool> stop_ = false;
};

}  // namespace

void run_shares(int num_shares, int num_threads, const std::function<void(int)>& share) {
  if (num_shares > 0) Pool::get().run(num_shares, num_threads, share);
}

int num_threads_of(int num_threads) {
  if (num_threads > 0) return num_threads;
  const char* text = std::getenv("TREEMLA_NUM_THREADS");
  if (!text || !*text) return available_cores();
  int n = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, n);
  if (error != std::errc() || stop != end || n < 1 || n > kMaxThreads)
    fail("TREEMLA_NUM_THREADS", "TREEMLA_NUM_THREADS = {} in the environment must be 1 to {}", text,
         kMaxThreads);
  return n;
}

int available_cores() {
#if defined(__linux__)
  cpu_set_t set;  // respects taskset and container limits
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

int num_helpers() { return Pool::get().num_helpers(); }

}  // namespace treemla
