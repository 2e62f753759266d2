// cpu_simd: flash-style attention on CPU threads. Plans with the split planner (a worker is a thread), runs
// the kernel of simd_kernel.cpp on each work item, then merges the partials.
//
// Inputs fp32, bf16, fp16, e4m3, q8_0, widened exactly, and e4m3_packed, whose latents are rounded once to float32;
// every product and sum in float32; outputs rounded once. Where AMX or bf16 dot products are the faster instructions, bf16
// queries and caches with a bf16 output go through them: exact products, sums in float32, attention weights rounded to bf16.

#include <algorithm>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "backend/cpu/cpu_backends.hpp"
#include "backend/cpu/host_plan.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "backend/cpu/thread_pool.hpp"
#include "core/convert.hpp"
#include "core/lookup.hpp"
#include "plan/split_plan.hpp"
#include "plan/tiles.hpp"

namespace treemla {
namespace {

// Default length of a batch-invariant split: long enough that partials stay a small part of the work.
constexpr int kDefaultSplitKeys = 4096;

SplitParams split_params(const VerifyProblem& p, const HostPlan& host, const RunOptions& options) {
  SplitParams s;
  s.h_q = p.shape.h_q;
  s.num_workers = num_threads_of(options.num_threads);
  const int max_q = host.q_len.empty() ? 0 : *std::max_element(host.q_len.begin(), host.q_len.end());
  const bool amx = simd_products(p.shape, p.q.dtype, p.kv.dtype, DType::kBF16) == SimdProducts::kAmx;
  s.tile = amx ? cpu_simd_amx_tile(max_q * s.h_q) : cpu_simd_tile(max_q * s.h_q);
  // About 0.1 ms. A helper that is asleep takes half of that to come; if it comes too late, the caller has done its share.
  s.min_payload = (amx ? 11 : 2) * tile_cost(s.tile, kSimdRows);
  if (options.batch_invariant)
    s.fixed_tiles =
        ceil_div(options.split_keys > 0 ? options.split_keys : kDefaultSplitKeys, s.tile.keys_per_tile);
  return s;
}

struct SimdPlan : BackendPlan {
  SimdPlan(const VerifyProblem& p, const RunOptions& options)
      : host(p),
        split(make_split_plan(split_params(p, host, options), host.q_len, host.kv_len)),
        of_bf16(p.shape, split.params.tile.rows_per_tile,
                simd_products(p.shape, p.q.dtype, p.kv.dtype, DType::kBF16)),
        of_finer(p.shape, split.params.tile.rows_per_tile,
                 simd_products(p.shape, p.q.dtype, p.kv.dtype, DType::kF32)),
        d_v(p.shape.d_v),
        vectors(simd_target(p.shape, p.q.dtype, p.kv.dtype)) {}

  // Workspace, in floats: partial outputs, their lse, then a scratch for each worker.
  std::size_t slot_rows() const {
    return static_cast<std::size_t>(split.num_partials) * split.params.tile.rows_per_tile;
  }
  // Workers up to the last that has work.
  int num_busy() const {
    int n = split.params.num_workers;
    while (n > 0 && split.worker_indptr[n - 1] == split.worker_indptr[n]) --n;
    return n;
  }
  // Merges of some microseconds are not worth another thread.
  int merge_pieces() const {
    constexpr int64_t kLeast = 1 << 16;  // floats read
    int64_t read = 0;
    for (const CombineItem& c : split.combines)
      read += int64_t{c.row_end - c.row_begin} * c.partials.count * d_v;
    return static_cast<int>(std::clamp<int64_t>(read / kLeast, 1, split.params.num_workers));
  }
  std::size_t lse_offset() const { return round_up<std::size_t>(slot_rows() * d_v, 16); }
  // Scratch begins on a page, and no two workers share one: it comes to lie on the NUMA node of the thread that uses it.
  static constexpr std::size_t kPage = 4096 / sizeof(float);
  std::size_t scratch_offset() const { return round_up<std::size_t>(lse_offset() + slot_rows(), kPage); }
  std::size_t scratch_of(int worker) const {
    return scratch_offset() +
           round_up<std::size_t>(std::max(of_bf16.floats, of_finer.floats), kPage) * worker;
  }
  std::size_t workspace_bytes() const override {
    return sizeof(float) * scratch_of(split.params.num_workers);
  }
  std::string describe() const override {
    return fmt::format("vectors      {}\n", vectors) + treemla::describe(split);
  }

  HostPlan host;
  SplitPlan split;
  SimdScratch of_bf16, of_finer;  // by the output's dtype, which the plan doesn't know
  int d_v;
  std::string vectors;
};

class CpuSimd : public Backend {
 public:
  std::string_view name() const override { return "cpu_simd"; }
  Memory memory() const override { return Memory::kHost; }
  Support available() const override {
    const std::vector<std::string> targets = simd_targets();
    return Support::yes(
        fmt::format("{}, {} threads", targets.empty() ? "no vectors" : targets.front(), available_cores()));
  }
  Support supports(const VerifyProblem&) const override { return Support::yes(); }

  std::unique_ptr<BackendPlan> plan(const VerifyProblem& problem, const RunOptions& options) const override {
    return std::make_unique<SimdPlan>(problem, options);
  }

  void run(const BackendPlan& base, const VerifyProblem& p, const VerifyOutput& o, void* workspace,
           const RunOptions&) const override {
    const SimdPlan& plan = static_cast<const SimdPlan&>(base);
    float* parts = static_cast<float*>(workspace);
    float* part_lse = parts + plan.lse_offset();
    const int num_threads = plan.split.params.num_workers;
    const SimdScratch& layout = o.out_dtype == DType::kBF16 ? plan.of_bf16 : plan.of_finer;

    write_inert(plan, p, o);
    run_shares(plan.num_busy(), num_threads, [&](int worker) {
      for (int i = plan.split.worker_indptr[worker]; i < plan.split.worker_indptr[worker + 1]; ++i)
        simd_attend(make_item(plan, plan.split.items[i], p, o, parts, part_lse), layout,
                    parts + plan.scratch_of(worker));
    });
    if (plan.split.combines.empty()) return;
    const int pieces = plan.merge_pieces();
    run_shares(pieces, num_threads, [&](int piece) {
      combine(plan, piece, pieces, p, o, parts, part_lse, parts + plan.scratch_of(piece));
    });
  }

 private:
  // First row of the request's rows [row, ...) in out and lse.
  static int64_t output_row(const SimdPlan& plan, const VerifyProblem& p, int request, int row) {
    return static_cast<int64_t>(plan.host.q_begin[request]) * p.shape.h_q + row;
  }
  static void* output_at(const VerifyProblem& p, const VerifyOutput& o, int64_t row) {
    return static_cast<char*>(o.out) + row * p.shape.d_v * static_cast<int64_t>(dtype_bytes(o.out_dtype));
  }

  // Requests without keys: out 0, lse -inf.
  static void write_inert(const SimdPlan& plan, const VerifyProblem& p, const VerifyOutput& o) {
    for (int r : plan.split.inert) {
      const int64_t row = output_row(plan, p, r, 0),
                    n = static_cast<int64_t>(plan.host.q_len[r]) * p.shape.h_q;
      std::memset(output_at(p, o, row), 0, n * p.shape.d_v * dtype_bytes(o.out_dtype));
      if (o.lse) std::fill_n(o.lse + row, n, -std::numeric_limits<float>::infinity());
    }
  }

  static SimdItem make_item(const SimdPlan& plan, const WorkItem& w, const VerifyProblem& p,
                            const VerifyOutput& o, float* parts, float* part_lse) {
    const HostPlan& host = plan.host;
    SimdItem item;
    item.shape = p.shape;
    item.q = static_cast<const char*>(p.q.data) +
             host.q_begin[w.request] * q_token_stride(p) * static_cast<int64_t>(dtype_bytes(p.q.dtype));
    item.q_dtype = p.q.dtype;
    item.q_token_stride = q_token_stride(p);
    item.q_head_stride = q_head_stride(p);
    item.kv = p.kv.data;
    item.kv_dtype = p.kv.dtype;
    item.kv_layout = p.kv.layout;
    item.kv_row_stride = kv_row_stride(p);
    item.pool_rows = host.pool_rows.data() + host.kv_begin[w.request];
    item.words = host.words;
    item.bits = host.bits.data() + static_cast<int64_t>(host.q_begin[w.request]) * host.words;
    item.row_begin = w.row_begin;
    item.row_end = w.row_end;
    item.key_begin = w.key_begin;
    item.key_end = w.key_end;
    item.prefix_len = host.kv_len[w.request] - host.q_len[w.request];
    item.score_scale = static_cast<float>(p.sm_scale * p.kv.scale);
    item.fixed_order = plan.split.params.fixed_tiles > 0;
    item.value_scale = static_cast<float>(p.kv.scale);
    if (w.partial >= 0) {
      const std::size_t row = static_cast<std::size_t>(w.partial) * plan.split.params.tile.rows_per_tile;
      item.out = parts + row * p.shape.d_v;
      item.out_dtype = DType::kF32;
      item.lse = part_lse + row;
      item.partial = true;
    } else {
      const int64_t row = output_row(plan, p, w.request, w.row_begin);
      item.out = output_at(p, o, row);
      item.out_dtype = o.out_dtype;
      item.lse = o.lse ? o.lse + row : nullptr;
    }
    return item;
  }

  // A share of the merges: every row tile is cut into as many pieces, so that one long request occupies all threads.
  static void combine(const SimdPlan& plan, int piece, int pieces, const VerifyProblem& p,
                      const VerifyOutput& o, const float* parts, const float* part_lse, float* scratch) {
    std::vector<int> slots;
    for (const CombineItem& c : plan.split.combines) {
      slots.resize(c.partials.count);
      for (int j = 0; j < c.partials.count; ++j) slots[j] = c.partials.slot(j);
      const int64_t rows = c.row_end - c.row_begin;
      const int begin = static_cast<int>(rows * piece / pieces),
                end = static_cast<int>(rows * (piece + 1) / pieces);
      const int64_t row = output_row(plan, p, c.request, c.row_begin + begin);
      simd_combine(parts + static_cast<int64_t>(begin) * p.shape.d_v, part_lse + begin, slots.data(),
                   c.partials.count, plan.split.params.tile.rows_per_tile, end - begin, p.shape.d_v,
                   output_at(p, o, row), o.out_dtype, o.lse ? o.lse + row : nullptr, scratch);
    }
  }
};

}  // namespace

const Backend& cpu_simd_backend() {
  static const CpuSimd backend;
  return backend;
}

}  // namespace treemla
