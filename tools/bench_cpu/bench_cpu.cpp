// cpu_simd under Google Benchmark: whole calls, the stages of a tile, and the ceilings that both are held against.
//
//     bench_cpu --benchmark_filter=verify/bf16/.*/prefix:4096
//
//   ceiling/...   one thread's loops in registers (fma, dot) and over memory (read): what the rest is a share of
//   tile/...      one stage of one tile of 64 keys (AMX: 256), again and again on data that stays in the caches, one thread: load
//                 (widening, packing), score, softmax, accumulate; `dot` and `amx` are those on bf16 dot products and on AMX
//   pack/...      moving bf16 rows for dot products, and writing an interleaved cache
//   verify/...    Verifier::run() on rows in random order, warm, TREEMLA_NUM_THREADS threads or one a core; the result is checked
//                 against the oracle
//
// Unlike `treemla bench`, which times whole calls, cold ones too, for people and records, this is for a change of a loop: each
// stage alone, with Google Benchmark's repetitions and its compare.py.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/bf16_dot.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "backend/cpu/thread_pool.hpp"
#include "bench_input.hpp"
#include "core/file_io.hpp"
#include "cpu_ceilings.hpp"
#include "dot_ceiling.hpp"
#include "host_output.hpp"
#include "plan/cost.hpp"
#include "treemla/interleave.hpp"
#include "treemla/verify.hpp"

namespace treemla::cli {
namespace {

using benchmark::Counter;
using benchmark::State;

constexpr int kDqk = 576, kDv = 512;
static_assert(kBenchLatent.d_qk() == kDqk && kBenchLatent.d_v == kDv);

void set_rate(State& state, const char* name, double a_iteration) {
  state.counters[name] = Counter(a_iteration, Counter::kIsIterationInvariantRate, Counter::kIs1000);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Aligned = std::unique_ptr<T[], Free>;
template <class T>
Aligned<T> aligned(std::size_t n) {
  const std::size_t bytes = (n * sizeof(T) + 4095) / 4096 * 4096;
  Aligned<T> p(static_cast<T*>(std::aligned_alloc(4096, bytes)));
  if (!p) throw std::bad_alloc();
  std::fill_n(p.get(), n, T{});
  return p;
}

// ---- ceilings

void ceiling_loop(State& state, double (*loop)(int, float*)) {
  constexpr int kSteps = 1 << 14;
  float sink = 0;
  double flops = 0;
  for (auto _ : state) flops = loop(kSteps, &sink);
  benchmark::DoNotOptimize(sink);
  set_rate(state, "FLOP/s", flops);
}

void ceiling_read(State& state) {
  const auto n = static_cast<std::size_t>(state.range(0)) / sizeof(float);
  const Aligned<float> data = aligned<float>(n);
  float sink = 0;
  for (auto _ : state) read_sum(data.get(), n, &sink);
  benchmark::DoNotOptimize(sink);
  set_rate(state, "B/s", static_cast<double>(state.range(0)));
}

// ---- stages of a tile

struct Cache {
  const char* name;
  DType dtype;
  KvLayout layout;
};
constexpr Cache kCaches[] = {
    {"bf16", DType::kBF16, KvLayout::kRowMajor},   {"interleaved", DType::kBF16, KvLayout::kInterleaved},
    {"fp32", DType::kF32, KvLayout::kRowMajor},    {"fp16", DType::kF16, KvLayout::kRowMajor},
    {"e4m3", DType::kF8E4M3, KvLayout::kRowMajor}, {"e4m3_packed", DType::kF8E4M3Packed, KvLayout::kRowMajor},
    {"q8_0", DType::kQ8, KvLayout::kRowMajor}};

// Of `target`, from here to the end of the scope.
class Target {
 public:
  explicit Target(const std::string& target) { simd_force_target(target); }
  ~Target() { simd_force_target(""); }
};

void tile_stage(State& state, SimdStage stage, const Cache& cache, const std::string& target, int rows) {
  const Target forced(target);
  const int keys = target == kAmxTarget ? kAmxKeys : kSimdKeys;
  BenchPool pool(cache.dtype, 1, keys, 1, 1, 1);
  pool.layout = cache.layout;
  const BenchInput input(pool, 1, rows, keys, MaskKind::kNone, TreeKind::kChain, 1);
  const VerifyProblem& p = input.problem();
  std::vector<int64_t> pool_rows(pool.page_order.begin(), pool.page_order.end());
  const std::vector<uint32_t> bits = {1};
  const SimdScratch layout(p.shape, rows, simd_products(p.shape, p.q.dtype, cache.dtype, DType::kBF16));
  const Aligned<float> scratch = aligned<float>(layout.floats);

  SimdItem item;
  item.shape = p.shape;
  item.q = p.q.data;
  item.q_dtype = p.q.dtype;
  item.q_token_stride = int64_t{rows} * kDqk;
  item.q_head_stride = kDqk;
  item.kv = p.kv.data;
  item.kv_dtype = cache.dtype;
  item.kv_layout = cache.layout;
  item.kv_row_stride = kv_row_elements(p.shape, cache.dtype);
  item.pool_rows = pool_rows.data();
  item.bits = bits.data();
  item.words = 1;
  item.row_end = rows;
  item.key_end = item.prefix_len = keys;
  item.score_scale = static_cast<float>(p.sm_scale);

  constexpr int kTimes = 64;
  for (auto _ : state) simd_repeat(stage, kTimes, item, layout, scratch.get());
  const double products = 2.0 * kTimes * rows * keys;
  if (stage == SimdStage::kScore) set_rate(state, "FLOP/s", products * kDqk);
  if (stage == SimdStage::kAccumulate) set_rate(state, "FLOP/s", products * kDv);
  set_rate(state, "tiles/s", kTimes);
}

void register_stages() {
  struct Stage {
    const char* name;
    SimdStage stage;
  };
  constexpr Stage kStages[] = {{"load", SimdStage::kLoad},
                               {"score", SimdStage::kScore},
                               {"softmax", SimdStage::kSoftmax},
                               {"accumulate", SimdStage::kAccumulate}};
  const std::vector<std::string> targets = simd_targets();
  for (const std::string& target : targets) {
    const bool bf16 = target == kBf16DotTarget || target == kAmxTarget;
    const char* prefix = target == kAmxTarget ? "amx_" : bf16 ? "dot_" : "";
    if (!bf16 && target != simd_target({1, kDv, 64}, DType::kF32, DType::kF32))
      continue;  // the best of float32
    for (const Cache& cache : kCaches) {
      if (bf16 && cache.dtype != DType::kBF16) continue;
      for (const Stage& s : kStages) {
        for (const int rows : {1, 8, 16, 32, 72, 256}) {
          const std::string name = fmt::format("tile/{}/{}{}/rows:{}", s.name, prefix, cache.name, rows);
          benchmark::RegisterBenchmark(
              name.c_str(), [=](State& state) { tile_stage(state, s.stage, cache, target, rows); });
        }
      }
    }
  }
}

// ---- moving bf16 rows

struct Rows {
  Rows() : data(aligned<uint16_t>(kSimdKeys * kDqk)), to(aligned<uint32_t>(kSimdKeys * kDqk)) {
    for (int i = 0; i < kSimdKeys * kDqk; ++i) data[i] = static_cast<uint16_t>(0x3C00 + i * 37 % 1024);
    for (int i = 0; i < kSimdKeys; ++i) at[i] = data.get() + i * kDqk;
  }
  Aligned<uint16_t> data;
  Aligned<uint32_t> to;
  const uint16_t* at[kSimdKeys];
};

void pack(State& state, const std::function<void(const Rows&)>& run) {
  const Rows rows;
  for (auto _ : state) {
    run(rows);
    benchmark::ClobberMemory();
  }
  set_rate(state, "rows/s", kSimdKeys);
}

void register_packs() {
  const auto add = [](const char* name, const std::function<void(const Rows&)>& run) {
    benchmark::RegisterBenchmark(name, [=](State& state) { pack(state, run); });
  };
  add("pack/interleave_rows", [](const Rows& r) {
    interleave_rows({.shape = kBenchLatent,
                     .rows = r.data.get(),
                     .num_rows = kSimdKeys,
                     .pool = r.to.get(),
                     .pool_rows = kSimdKeys});
  });
  if (!bf16_dot_available()) return;
  add("pack/dot_q", [](const Rows& r) { bf16_dot_pack_q(r.at, kSimdRows, kDqk, r.to.get()); });
  add("pack/dot_v", [](const Rows& r) { bf16_dot_pack_v(r.at, kSimdKeys, kDv, r.to.get()); });
  add("pack/dot_v_interleaved",
      [](const Rows& r) { bf16_dot_pack_interleaved_v(r.at, kSimdKeys, kDv, r.to.get()); });
}

// ---- whole calls

// Measured when the first call wants it: two seconds.
const CpuCeilings& ceilings(int threads) {
  static const CpuCeilings c = measure_cpu_ceilings(threads);
  return c;
}

void verify_call(State& state, const Cache& cache, int h_q, int s_q, int prefix) {
  const int threads = num_threads_of(0);
  BenchPool pool(cache.dtype, 1, prefix, s_q, 1, threads);
  pool.layout = cache.layout;
  const BenchInput input(pool, s_q, h_q, prefix, MaskKind::kTree, TreeKind::kRandom, threads);
  const VerifyProblem& p = input.problem();
  HostOutput result(p, p.q.dtype);
  Verifier verifier({.backend = "cpu_simd", .num_threads = threads});
  verifier.plan(p);
  const VerifyOutput out = result.view();
  for (auto _ : state) verifier.run(p, out);

  bool compared = false;
  const std::string failure = input.check_sample(result.out(), result.lse(), 5e8, threads, compared);
  if (!failure.empty()) return state.SkipWithError(failure.c_str());
  const std::vector<int32_t> q_len = {s_q}, kv_len = {prefix + s_q};
  const Work work = count_work(p.shape, q_len, kv_len, p.q.dtype, p.kv.dtype, p.q.dtype);
  const CpuCeilings& c = ceilings(threads);
  set_rate(state, "FLOP/s", work.flops);
  set_rate(state, "of_fma", work.flops / c.fma_flops_per_s);
  if (c.dot_flops_per_s > 0) set_rate(state, "of_dot", work.flops / c.dot_flops_per_s);
  if (c.amx_flops_per_s > 0) set_rate(state, "of_amx", work.flops / c.amx_flops_per_s);
  if (c.read_bytes_per_s > 0) set_rate(state, "of_read", work.kv_bytes / c.read_bytes_per_s);
}

void register_calls() {
  for (const Cache& cache : kCaches) {
    for (const int h_q : {8, 16, 64, 128}) {
      for (const int s_q : {1, 9, 33}) {
        for (const int prefix : {256, 1024, 4096, 16384}) {
          const std::string name =
              fmt::format("verify/{}/h_q:{}/q:{}/prefix:{}", cache.name, h_q, s_q, prefix);
          benchmark::RegisterBenchmark(name.c_str(),
                                       [=](State& state) { verify_call(state, cache, h_q, s_q, prefix); })
              ->UseRealTime()
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
}

}  // namespace
}  // namespace treemla::cli

int main(int argc, char** argv) {
  using namespace treemla::cli;
  benchmark::RegisterBenchmark("ceiling/fma", ceiling_loop, fma_chains);
  if (treemla::bf16_dot_available()) benchmark::RegisterBenchmark("ceiling/dot", ceiling_loop, dot_loop);
  if (treemla::amx_available())
    benchmark::RegisterBenchmark("ceiling/amx", ceiling_loop, treemla::amx_chains);
  benchmark::RegisterBenchmark("ceiling/read", ceiling_read)
      ->ArgName("bytes")
      ->Arg(16 << 10)
      ->Arg(1 << 20)
      ->Arg(int64_t{1} << 29);
  register_stages();
  register_packs();
  register_calls();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  try {
    benchmark::RunSpecifiedBenchmarks();
  } catch (const std::exception& e) {
    fmt::print(stderr, "bench_cpu: {}\n", e.what());
    return 1;
  }
  benchmark::Shutdown();
}
