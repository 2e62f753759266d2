#include "api/expected.hpp"

#include <limits>
#include <vector>

#include "treemla/verify.hpp"

namespace treemla {

void add_expected(Case& c) {
  const VerifyProblem p = c.problem();
  const int64_t rows = p.q.total_q * p.shape.h_q;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> out(rows * p.shape.d_v, nan), lse(rows, nan);
  RunOptions options;
  options.backend = "cpu_oracle";
  verify(p, {out.data(), DType::kF32, lse.data()}, options);
  c.set("expected_out", "F32", {p.q.total_q, p.shape.h_q, p.shape.d_v}, out.data());
  c.set("expected_lse", "F32", {p.q.total_q, p.shape.h_q}, lse.data());
}

}  // namespace treemla
