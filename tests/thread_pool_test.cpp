// The threads of CPU backends: shares are done once, by no more threads than asked for, and callers of several threads of
// their own don't multiply them. Counts of threads that are in shares at the same time, never times.

#include "backend/cpu/thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "conformance.hpp"
#include "error_of.hpp"

namespace treemla::test {
namespace {

// Threads inside a share now, at most at once, and all that there were.
class Census {
 public:
  void enter() {
    const int now = ++inside_;
    for (int most = most_; now > most && !most_.compare_exchange_weak(most, now);) {
    }
    std::lock_guard lock(mutex_);
    threads_.insert(std::this_thread::get_id());
  }
  void leave() { --inside_; }
  int inside() const { return inside_; }
  int most() const { return most_; }
  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  std::atomic<int> inside_ = 0, most_ = 0;
  std::mutex mutex_;
  std::set<std::thread::id> threads_;
};

// Waits for others, but not for ever where they can't come.
template <class Done>
bool wait_for(Done done) {
  for (int i = 0; i < 5000 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return done();
}

TEST(RunShares, EachShareOnceWhateverTheNumbers) {
  for (int shares : {0, 1, 2, 3, 8, 100}) {
    for (int threads : {1, 2, 5}) {
      std::vector<std::atomic<int>> count(std::max(shares, 1));
      run_shares(shares, threads, [&](int i) { ++count[i]; });
      for (int i = 0; i < shares; ++i) EXPECT_EQ(count[i], 1) << "share " << i << " of " << shares;
    }
  }
}

// Four shares that wait for each other: four threads, though the machine may have fewer cores.
TEST(RunShares, UsesAsManyThreadsAsAskedFor) {
  std::atomic<int> arrived = 0;
  Census census;
  run_shares(4, 4, [&](int) {
    census.enter();
    ++arrived;
    EXPECT_TRUE(wait_for([&] { return arrived == 4; })) << "a share had no thread of its own";
    census.leave();
  });
  EXPECT_EQ(census.most(), 4);
}

TEST(RunShares, NoMoreThreadsThanAskedFor) {
  for (int threads : {1, 2, 3}) {
    for (int round = 0; round < 20; ++round) {
      Census census;
      run_shares(16, threads, [&](int) {
        census.enter();
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        census.leave();
      });
      EXPECT_LE(census.most(), threads);
      EXPECT_LE(census.threads(), threads);
    }
  }
}

// C callers at once, each asking for n threads: C + n - 1 at most, not C * n.
TEST(RunShares, ThreadsOfSeveralCallersAddUpAndDoNotMultiply) {
  constexpr int kCallers = 6, kThreads = 4;
  Census census;
  std::barrier start(kCallers);
  std::vector<std::thread> callers;
  std::atomic<int> done = 0;
  for (int c = 0; c < kCallers; ++c) {
    callers.emplace_back([&] {
      start.arrive_and_wait();
      for (int round = 0; round < 20; ++round) {
        run_shares(kThreads, kThreads, [&](int) {
          census.enter();
          std::this_thread::sleep_for(std::chrono::microseconds(300));
          census.leave();
          ++done;
        });
      }
    });
  }
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(done, kCallers * 20 * kThreads);
  EXPECT_GE(census.most(), kCallers);
  EXPECT_LE(census.most(), kCallers + kThreads - 1);
}

// As many callers inside as threads are asked for: another call stays on its own thread.
TEST(RunShares, ACallAmongAsManyCallersTakesNoHelpers) {
  constexpr int kThreads = 3;
  std::atomic<int> inside = 0;
  std::atomic<bool> go_on = false;
  std::vector<std::thread> others;
  for (int c = 0; c < kThreads; ++c) {
    others.emplace_back([&] {
      run_shares(1, kThreads, [&](int) {
        ++inside;
        wait_for([&] { return go_on.load(); });
      });
    });
  }
  ASSERT_TRUE(wait_for([&] { return inside == kThreads; }));
  Census census;
  run_shares(8, kThreads, [&](int) {
    census.enter();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    census.leave();
  });
  go_on = true;
  for (std::thread& t : others) t.join();
  EXPECT_EQ(census.threads(), 1);
}

TEST(RunShares, ACallInsideAShareStaysOnItsThread) {
  std::atomic<int> inner = 0;
  run_shares(3, 3, [&](int) {
    const std::thread::id me = std::this_thread::get_id();
    run_shares(4, 4, [&](int) {
      EXPECT_EQ(std::this_thread::get_id(), me);
      ++inner;
    });
  });
  EXPECT_EQ(inner, 12);
  // Not for ever: the next call from here has helpers again.
  std::atomic<int> arrived = 0;
  run_shares(2, 2, [&](int) {
    ++arrived;
    EXPECT_TRUE(wait_for([&] { return arrived == 2; }));
  });
}

TEST(RunShares, ThreadsAreKeptAndShared) {
  const auto meet = [](int n) {
    std::atomic<int> arrived = 0;
    run_shares(n, n, [&](int) {
      ++arrived;
      EXPECT_TRUE(wait_for([&] { return arrived == n; }));
    });
  };
  meet(5);
  const int helpers = num_helpers();
  EXPECT_GE(helpers, 4);
  for (int n : {5, 2, 3, 4, 5}) meet(n);  // sizes have no threads of their own
  EXPECT_EQ(num_helpers(), helpers);
}

// Memory that a share touched first is near the thread that does that share in later calls.
TEST(RunShares, ALoneCallersSharesKeepTheirThreads) {
  constexpr int kThreads = 4;
  const auto meet = [](std::vector<std::thread::id>& who) {
    std::atomic<int> arrived = 0;
    run_shares(kThreads, kThreads, [&](int i) {
      who[i] = std::this_thread::get_id();
      ++arrived;
      EXPECT_TRUE(wait_for([&] { return arrived == kThreads; }));
      if (i == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the first helper leaves last
    });
  };
  std::vector<std::thread::id> first(kThreads), again(kThreads);
  meet(first);
  EXPECT_EQ(first[0], std::this_thread::get_id());
  for (int round = 0; round < 5; ++round) {
    meet(again);
    EXPECT_EQ(again, first);
  }
}

TEST(RunShares, TheFirstExceptionComesOutAndTheOtherSharesAreDone) {
  for (int threads : {1, 3}) {
    std::atomic<int> done = 0;
    try {
      run_shares(9, threads, [&](int i) {
        if (i == 4) throw std::runtime_error("share 4");
        ++done;
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "share 4");
    }
    EXPECT_EQ(done, 8);
  }
}

#if defined(__unix__)
// A child has none of the threads that the pool knows: its calls run on the caller.
TEST(RunShares, WorksInAForkedChild) {
  run_shares(3, 3, [](int) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::atomic<int> done = 0;
    for (int round = 0; round < 10; ++round) run_shares(3, 3, [&](int) { ++done; });
    _exit(done == 30 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}
#endif

// The variable for the length of a test, as it was after it.
class Environment {
 public:
  explicit Environment(const char* value) {
    if (const char* old = std::getenv(kName)) old_ = old;
    value ? setenv(kName, value, 1) : unsetenv(kName);
  }
  ~Environment() { old_ ? setenv(kName, old_->c_str(), 1) : unsetenv(kName); }

 private:
  static constexpr const char* kName = "TREEMLA_NUM_THREADS";
  std::optional<std::string> old_;
};

TEST(NumThreads, TheCallThenTheEnvironmentThenTheCores) {
  {
    const Environment unset(nullptr);
    EXPECT_EQ(num_threads_of(0), available_cores());
    EXPECT_EQ(num_threads_of(3), 3);
  }
  const Environment five("5");
  EXPECT_EQ(num_threads_of(0), 5);
  EXPECT_EQ(num_threads_of(3), 3);
  const Environment empty("");
  EXPECT_EQ(num_threads_of(0), available_cores());
}

TEST(NumThreads, ABadVariableIsNamed) {
  for (const char* bad : {"0", "-1", "4097", "two", "2x", " 2", "99999999999"}) {
    const Environment environment(bad);
    EXPECT_THAT(error_of([] { num_threads_of(0); }),
                testing::AllOf(testing::StartsWith("TREEMLA_NUM_THREADS: "), testing::HasSubstr(bad),
                               testing::HasSubstr("1 to 4096")));
  }
}

// The library itself: verify() from several threads of a caller's pool gives the bits of one call, and the helpers of all are
// those of one.
TEST(NumThreads, VerifyFromManyThreadsAtOnce) {
  CaseSpec spec;
  spec.requests = {{3000, 9}};
  spec.shape = {8, 512, 64};
  const Case c = generate_case(spec);
  const VerifyProblem p = c.problem();
  const auto run = [&] {
    std::vector<float> out(p.q.total_q * p.shape.h_q * p.shape.d_v, 0.5f);
    verify(p, {.out = out.data()}, {.backend = "cpu_simd", .num_threads = 3});
    return out;
  };
  const std::vector<float> alone = run();
  const int helpers = num_helpers();
  std::vector<std::thread> callers;
  std::atomic<int> same = 0;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int round = 0; round < 5; ++round) same += same_bits(run(), alone);
    });
  }
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(same, 20);
  EXPECT_LE(num_helpers(), std::max(helpers, 2));
}

}  // namespace
}  // namespace treemla::test
