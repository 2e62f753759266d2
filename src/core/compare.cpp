#include "core/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "treemla/error.hpp"

namespace treemla {
namespace {

// The table of DESIGN section 5, calibrated on recorded cases: about four times what a plain evaluation in
// that precision gives. Scores past 32 cost float32 digits of s_j - lse, hence the growth with abs(lse).
struct Bounds {
  double rel_fro;
  double element;
  double lse;
};
constexpr Bounds bounds_of(Precision p) {
  switch (p) {
    case Precision::kF32:
      return {5e-6, 3e-5, 2e-5};
    case Precision::kBF16:
      return {4e-3, 1e-2, 5e-5};
    case Precision::kF16:
      return {6e-4, 1.5e-3, 5e-5};
  }
  return {0, 0, 0};
}

// 1 for a row that sees no key (lse = -inf): its out is exactly 0 and gets no slack from an infinite bound.
double lse_growth(double lse) { return std::isfinite(lse) ? std::max(1.0, std::fabs(lse) / 32) : 1.0; }

double element_bound(Precision p, double expected, double lse) {
  const double base = bounds_of(p).element;
  if (p == Precision::kF32) return base * lse_growth(lse) * std::max(1.0, std::fabs(expected));
  return base * (1 + std::fabs(expected));
}

bool same_if_not_finite(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b;
}

// The element whose error is the largest fraction of its bound.
struct Worst {
  double ratio = -1;
  double error = 0, bound = 0;
  int64_t index = -1;
  int64_t num_failed = 0;

  void see(int64_t i, double err, double limit) {
    num_failed += err > limit;
    if (err / limit > ratio) *this = {err / limit, err, limit, i, num_failed};
  }
};

}  // namespace

std::string_view precision_name(Precision p) {
  switch (p) {
    case Precision::kF32:
      return "fp32";
    case Precision::kBF16:
      return "bf16";
    case Precision::kF16:
      return "fp16";
  }
  return "?";
}

Comparison compare(const MlaShape& shape, int64_t total_q, const float* out, const float* expected_out,
                   const float* lse, const float* expected_lse, Precision precision) {
  if (total_q > 0 && (out == nullptr || expected_out == nullptr || expected_lse == nullptr)) {
    const char* argument = out == nullptr ? "out" : expected_out == nullptr ? "expected_out" : "expected_lse";
    throw Error(ErrorCode::kInvalidArgument, argument,
                fmt::format("{} is null: it is needed to compare", argument));
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Bounds bounds = bounds_of(precision);
  const int64_t h_q = shape.h_q, d_v = shape.d_v;
  const auto name_row = [&](int64_t row) { return fmt::format("node {}, head {}", row / h_q, row % h_q); };
  const auto name_out = [&](int64_t i) { return fmt::format("{}, column {}", name_row(i / d_v), i % d_v); };

  Comparison c;
  const auto fail = [&](std::string text) {
    if (c.failure.empty()) c.failure = std::move(text);
    c.ok = false;
  };

  Worst worst_out, worst_lse;
  double error_sq = 0, expected_sq = 0;
  for (int64_t row = 0; row < total_q * h_q; ++row) {
    const float want_lse = expected_lse[row];
    if (lse != nullptr) {
      if (std::isfinite(lse[row]) && std::isfinite(want_lse)) {
        const double error = std::fabs(static_cast<double>(lse[row]) - want_lse);
        c.max_lse = std::max(c.max_lse, error);
        worst_lse.see(row, error, bounds.lse * lse_growth(want_lse));
      } else if (!same_if_not_finite(lse[row], want_lse)) {
        c.max_lse = kInfinity;
        fail(fmt::format("lse of {}: {} where {} is expected", name_row(row), lse[row], want_lse));
      }
    }
    for (int64_t i = row * d_v; i < (row + 1) * d_v; ++i) {
      const double got = out[i], want = expected_out[i];
      if (std::isfinite(got) && std::isfinite(want)) {
        const double error = std::fabs(got - want);
        error_sq += error * error;
        expected_sq += want * want;
        c.max_abs = std::max(c.max_abs, error);
        worst_out.see(i, error, element_bound(precision, want, want_lse));
      } else if (!same_if_not_finite(out[i], expected_out[i])) {
        c.max_abs = c.max_out = c.rel_fro = kInfinity;
        fail(fmt::format("out of {}: {} where {} is expected", name_out(i), got, want));
      }
    }
  }
  c.max_out = std::max(c.max_out, std::max(worst_out.ratio, 0.0));
  const double rel_fro = error_sq == 0 ? 0 : expected_sq == 0 ? kInfinity : std::sqrt(error_sq / expected_sq);
  c.rel_fro = std::max(c.rel_fro, rel_fro);

  if (worst_out.num_failed > 0) {
    const int64_t i = worst_out.index;
    fail(fmt::format(
        "out of {}: {} where {} is expected, error {:.3g} > bound {:.3g} ({}); {} of {} elements fail",
        name_out(i), out[i], expected_out[i], worst_out.error, worst_out.bound, precision_name(precision),
        worst_out.num_failed, total_q * h_q * d_v));
  }
  if (worst_lse.num_failed > 0) {
    const int64_t row = worst_lse.index;
    fail(fmt::format(
        "lse of {}: {} where {} is expected, error {:.3g} > bound {:.3g} ({}); {} of {} rows fail",
        name_row(row), lse[row], expected_lse[row], worst_lse.error, worst_lse.bound,
        precision_name(precision), worst_lse.num_failed, total_q * h_q));
  }
  if (c.rel_fro > bounds.rel_fro && c.ok) {
    const int64_t i = worst_out.index;
    fail(fmt::format(
        "relative Frobenius error of out {:.3g} > bound {:.3g} ({}); worst element: {}: {} where {} is "
        "expected, error {:.3g}, its bound {:.3g}",
        c.rel_fro, bounds.rel_fro, precision_name(precision), name_out(i), out[i], expected_out[i],
        worst_out.error, worst_out.bound));
  }
  return c;
}

}  // namespace treemla
