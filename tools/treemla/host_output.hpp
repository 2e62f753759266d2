// An output in this process's memory, filled with NaN: an element that a backend forgets to write cannot
// pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/convert.hpp"
#include "treemla/problem.hpp"

namespace treemla::cli {

class HostOutput {
 public:
  HostOutput(const VerifyProblem& p, DType dtype) : dtype_(dtype) {
    constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
    const auto rows = static_cast<std::size_t>(p.q.total_q * p.shape.h_q);
    lse_.assign(rows, kNaN);
    out_.resize(rows * static_cast<std::size_t>(p.shape.d_v) * dtype_bytes(dtype));
    for (int64_t i = 0; i < num_elements(); ++i) store_element(out_.data(), dtype, i, kNaN);
  }

  VerifyOutput view() { return {out_.data(), dtype_, lse_.data()}; }

  // [total_q, h_q, d_v], widened.
  std::vector<float> out() const {
    std::vector<float> values(static_cast<std::size_t>(num_elements()));
    for (int64_t i = 0; i < num_elements(); ++i) values[i] = load_element(out_.data(), dtype_, i);
    return values;
  }
  const std::vector<float>& lse() const { return lse_; }  // [total_q, h_q]

 private:
  int64_t num_elements() const { return static_cast<int64_t>(out_.size() / dtype_bytes(dtype_)); }

  DType dtype_;
  std::vector<std::byte> out_;
  std::vector<float> lse_;
};

}  // namespace treemla::cli
