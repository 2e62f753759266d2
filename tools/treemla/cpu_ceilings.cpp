// Loops, compiled for every instruction set by Highway and chosen at run time like the kernels' own.
//
//   FMA    12 independent chains of acc = acc * x + y in registers: two FMA ports with a latency of 4 or 5
//   cycles
//          need 8 to 10 in flight, and 12 with two operands still fit the 16 registers of AVX2
//   dot    bf16 dot products: dot_ceiling.cpp
//   amx    bf16 on tile registers: amx_chains()
//   read   4 vectors a step summed over a slice of the buffer, in address order: the hardware prefetchers do
//   the rest

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "../tools/treemla/cpu_ceilings.cpp"  // from src/, which is on the include path
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "cpu_ceilings.hpp"

HWY_BEFORE_NAMESPACE();
namespace treemla::cli {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kChains = 12;

// Returns the floating-point operations done.
double fma_loop(int steps, float* sink) {
  const hn::ScalableTag<float> d;
  const auto x = hn::Set(d, 0.999f), y = hn::Set(d, 0.001f);
  auto a0 = hn::Set(d, 0.10f), a1 = hn::Set(d, 0.11f), a2 = hn::Set(d, 0.12f), a3 = hn::Set(d, 0.13f);
  auto a4 = hn::Set(d, 0.14f), a5 = hn::Set(d, 0.15f), a6 = hn::Set(d, 0.16f), a7 = hn::Set(d, 0.17f);
  auto a8 = hn::Set(d, 0.18f), a9 = hn::Set(d, 0.19f), a10 = hn::Set(d, 0.20f), a11 = hn::Set(d, 0.21f);
  for (int i = 0; i < steps; ++i) {
    a0 = hn::MulAdd(a0, x, y);
    a1 = hn::MulAdd(a1, x, y);
    a2 = hn::MulAdd(a2, x, y);
    a3 = hn::MulAdd(a3, x, y);
    a4 = hn::MulAdd(a4, x, y);
    a5 = hn::MulAdd(a5, x, y);
    a6 = hn::MulAdd(a6, x, y);
    a7 = hn::MulAdd(a7, x, y);
    a8 = hn::MulAdd(a8, x, y);
    a9 = hn::MulAdd(a9, x, y);
    a10 = hn::MulAdd(a10, x, y);
    a11 = hn::MulAdd(a11, x, y);
  }
  const auto s0 = hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), s1 = hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)),
             s2 = hn::Add(hn::Add(a8, a9), hn::Add(a10, a11));
  *sink += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), s2)));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * steps;
}

// `count` is a multiple of 1024.
void read_loop(const float* data, size_t count, float* sink) {
  const hn::ScalableTag<float> d;
  const size_t n = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (size_t i = 0; i < count; i += 4 * n) {
    s0 = hn::Add(s0, hn::LoadU(d, data + i));
    s1 = hn::Add(s1, hn::LoadU(d, data + i + n));
    s2 = hn::Add(s2, hn::LoadU(d, data + i + 2 * n));
    s3 = hn::Add(s3, hn::LoadU(d, data + i + 3 * n));
  }
  *sink += hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

}  // namespace HWY_NAMESPACE
}  // namespace treemla::cli
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/bf16_dot.hpp"
#include "dot_ceiling.hpp"
#include "host.hpp"

namespace treemla::cli {
namespace {

HWY_EXPORT(fma_loop);
HWY_EXPORT(read_loop);

constexpr double kBufferBytes = double{1 << 30};

// Seconds of the quickest of `runs`, each from the moment all threads are ready until the last one is done. A
// ceiling is what the machine can do when nobody disturbs it, and short runs find such moments on a shared
// one. Stops early when `runs` would take many seconds, as with more threads than cores.
double best_seconds(int threads, int runs, const std::function<void(int thread, int run)>& work) {
  using Clock = std::chrono::steady_clock;
  constexpr double kLimit = 5;
  double best = std::numeric_limits<double>::infinity(), total = 0;
  bool stop = false;  // written between the barriers' phases, when nobody reads it
  Clock::time_point begin;
  std::barrier start(threads, [&]() noexcept { begin = Clock::now(); });
  std::barrier finish(threads, [&]() noexcept {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::min(best, seconds);
    total += seconds;
    stop = total > kLimit;
  });
  const auto body = [&](int t) {
    for (int run = 0; run < runs && !stop; ++run) {
      start.arrive_and_wait();
      work(t, run);
      finish.arrive_and_wait();
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(body, t);
  body(0);
  for (std::thread& t : others) t.join();
  return best;
}

// Keeps the loops' results alive without sharing a cache line.
struct alignas(128) Sink {
  float value = 0;
};

// Of a loop that takes a number of steps and a sink, and returns the operations it did.
template <class Loop>
double loop_flops_per_s(int threads, Loop run) {
  std::vector<Sink> sinks(threads);
  std::vector<double> flops(threads);
  int steps = 1 << 20;
  const auto loop = [&](int t, int) { flops[t] = run(steps, &sinks[t].value); };
  // The first runs wake the vector units up and set the length of the others, about 2 ms.
  steps = static_cast<int>(std::clamp(steps * 0.002 / best_seconds(threads, 10, loop), 1024.0, 1e9));
  const double seconds = best_seconds(threads, 300, loop);
  return std::accumulate(flops.begin(), flops.end(), 0.0) / seconds;
}

// Windows of the buffer one after another, so that a window is read again only after all the others: none is
// cached.
double read_bytes_per_s(int threads, double buffer_bytes) {
  constexpr size_t kWindow = size_t{2} << 20;  // floats of a thread, milliseconds of reading
  const int windows = static_cast<int>(buffer_bytes / sizeof(float) / threads / kWindow);
  if (windows == 0) return 0;
  const size_t count = windows * kWindow;  // floats of a thread
  const std::unique_ptr<float, decltype(&std::free)> buffer(
      static_cast<float*>(std::aligned_alloc(4096, count * threads * sizeof(float))), &std::free);
  if (!buffer) return 0;
  std::vector<Sink> sinks(threads);
  // Each thread touches its own slice first, so that the pages are real and near it.
  best_seconds(threads, 1, [&](int t, int) { std::fill_n(buffer.get() + t * count, count, 1.0f); });
  const double seconds = best_seconds(threads, 3 * windows, [&](int t, int run) {
    read_sum(buffer.get() + t * count + run % windows * kWindow, kWindow, &sinks[t].value);
  });
  return static_cast<double>(kWindow) * threads * sizeof(float) / seconds;
}

}  // namespace

double fma_chains(int steps, float* sink) { return HWY_DYNAMIC_DISPATCH(fma_loop)(steps, sink); }

void read_sum(const float* data, std::size_t count, float* sink) {
  HWY_DYNAMIC_DISPATCH(read_loop)(data, count, sink);
}

CpuCeilings measure_cpu_ceilings(int threads) {
  CpuCeilings c;
  c.threads = threads;
  c.fma_flops_per_s = loop_flops_per_s(threads, fma_chains);
  if (bf16_dot_available()) c.dot_flops_per_s = loop_flops_per_s(threads, dot_loop);
  if (amx_available()) c.amx_flops_per_s = loop_flops_per_s(threads, amx_chains);
  const double wanted = std::max(kBufferBytes, 4.0 * static_cast<double>(last_level_cache_bytes()));
  c.buffer_bytes = std::min(wanted, static_cast<double>(memory_available_bytes()) / 4);
  c.read_bytes_per_s = read_bytes_per_s(threads, c.buffer_bytes);
  return c;
}

}  // namespace treemla::cli

#endif  // HWY_ONCE
