// The truth: float64, straight from the definition in treemla/problem.hpp. Two passes over the visible keys,
// no tiling, no online softmax, no split. Slow on purpose; threads over (request, node).

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "backend/cpu/cpu_backends.hpp"
#include "backend/cpu/host_plan.hpp"
#include "backend/cpu/thread_pool.hpp"
#include "core/kv_row.hpp"
#include "core/lookup.hpp"

namespace treemla {
namespace {

struct OraclePlan : BackendPlan {
  explicit OraclePlan(const VerifyProblem& p) : host(p) {}
  std::size_t workspace_bytes() const override { return 0; }
  std::string describe() const override {
    return fmt::format("float64, one node at a time, {} requests\n", host.b);
  }
  HostPlan host;
};

// Eight running sums, so that the compiler may use vectors and rounding errors stay small.
double dot(const double* a, const double* b, int n) {
  double sum[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) sum[j] += a[i + j] * b[i + j];
  for (; i < n; ++i) sum[0] += a[i] * b[i];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// All heads of node i of request r.
void attend_node(const HostPlan& plan, const VerifyProblem& p, const VerifyOutput& o, int r, int i) {
  const int h_q = p.shape.h_q, d_v = p.shape.d_v, d_qk = p.shape.d_qk();
  const int prefix = plan.kv_len[r] - plan.q_len[r];
  const int64_t q_row = static_cast<int64_t>(plan.q_begin[r]) + i;

  std::vector<int64_t> rows;  // pool rows of the visible keys
  for (int t = 0; t < plan.kv_len[r]; ++t)
    if (t < prefix || plan.sees(r, i, t - prefix)) rows.push_back(plan.pool_rows[plan.kv_begin[r] + t]);
  const int n = static_cast<int>(rows.size());

  std::vector<double> q(static_cast<size_t>(h_q) * d_qk), key(d_qk), s(static_cast<size_t>(h_q) * n);
  for (int h = 0; h < h_q; ++h)
    for (int d = 0; d < d_qk; ++d)
      q[h * d_qk + d] =
          load_element(p.q.data, p.q.dtype, q_row * q_token_stride(p) + h * q_head_stride(p) + d);
  auto load_key = [&](int j) {
    load_kv_row(kv_row_at(p, rows[j]), p.shape, p.kv.dtype, key.data(), p.kv.layout);
    for (double& x : key) x *= p.kv.scale;
  };

  for (int j = 0; j < n; ++j) {
    load_key(j);
    for (int h = 0; h < h_q; ++h)
      s[static_cast<size_t>(h) * n + j] = p.sm_scale * dot(&q[h * d_qk], key.data(), d_qk);
  }
  std::vector<double> lse(h_q);
  for (int h = 0; h < h_q; ++h) {
    const double* row = s.data() + static_cast<size_t>(h) * n;
    double m = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int j = 0; j < n; ++j) m = std::max(m, row[j]);
    // m = -inf: no key, or none with a weight. Then sum stays 0 and lse becomes -inf, not NaN.
    for (int j = 0; j < n; ++j) sum += std::isinf(m) && row[j] == m && m < 0 ? 0.0 : std::exp(row[j] - m);
    lse[h] = sum == 0 ? -std::numeric_limits<double>::infinity() : m + std::log(sum);
  }

  std::vector<double> out(static_cast<size_t>(h_q) * d_v, 0.0);
  for (int j = 0; j < n; ++j) {
    load_key(j);
    for (int h = 0; h < h_q; ++h) {
      if (lse[h] == -std::numeric_limits<double>::infinity()) continue;
      const double w = std::exp(s[static_cast<size_t>(h) * n + j] - lse[h]);
      for (int d = 0; d < d_v; ++d) out[h * d_v + d] += w * key[d];
    }
  }
  for (int h = 0; h < h_q; ++h) {
    const int64_t row = q_row * h_q + h;
    for (int d = 0; d < d_v; ++d)
      store_element(o.out, o.out_dtype, row * d_v + d, static_cast<float>(out[h * d_v + d]));
    if (o.lse) o.lse[row] = static_cast<float>(lse[h]);
  }
}

class CpuOracle : public Backend {
 public:
  std::string_view name() const override { return "cpu_oracle"; }
  Memory memory() const override { return Memory::kHost; }
  Support available() const override { return Support::yes("float64, exact and slow"); }
  Support supports(const VerifyProblem&) const override { return Support::yes(); }

  std::unique_ptr<BackendPlan> plan(const VerifyProblem& problem, const RunOptions&) const override {
    return std::make_unique<OraclePlan>(problem);
  }

  void run(const BackendPlan& plan, const VerifyProblem& problem, const VerifyOutput& output, void*,
           const RunOptions& options) const override {
    const HostPlan& host = static_cast<const OraclePlan&>(plan).host;
    std::vector<std::pair<int, int>> nodes;
    for (int r = 0; r < host.b; ++r)
      for (int i = 0; i < host.q_len[r]; ++i) nodes.emplace_back(r, i);
    std::atomic<size_t> next{0};
    const int threads = num_threads_of(options.num_threads);
    run_shares(threads, threads, [&](int) {
      for (size_t k; (k = next++) < nodes.size();)
        attend_node(host, problem, output, nodes[k].first, nodes[k].second);
    });
  }
};

}  // namespace

const Backend& cpu_oracle_backend() {
  static const CpuOracle backend;
  return backend;
}

}  // namespace treemla
