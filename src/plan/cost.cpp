#include "plan/cost.hpp"

#include <fmt/format.h>

#include "treemla/error.hpp"

namespace treemla {

// In double: b * q * h * kv * d passes 2^63 for batches that are merely large.
Work count_work(const MlaShape& shape, std::span<const int32_t> q_len, std::span<const int32_t> kv_len,
                DType q_dtype, DType kv_dtype, DType out_dtype) {
  if (q_len.size() != kv_len.size()) {
    throw Error(ErrorCode::kInvalidArgument, "kv_len",
                fmt::format("kv_len has {} elements: it must have {}, one a request as q_len", kv_len.size(),
                            q_len.size()));
  }
  const double h_q = shape.h_q, d_v = shape.d_v, d_qk = shape.d_qk();
  const double row_io_bytes = d_qk * static_cast<double>(dtype_bytes(q_dtype)) +
                              d_v * static_cast<double>(dtype_bytes(out_dtype)) +
                              sizeof(float);  // q, out, lse
  const double row_bytes = kv_row_elements(shape, kv_dtype) * static_cast<double>(dtype_bytes(kv_dtype));
  Work work;
  for (std::size_t r = 0; r < q_len.size(); ++r) {
    if (q_len[r] <= 0 || kv_len[r] <= 0) continue;
    const double rows = q_len[r] * h_q, keys = kv_len[r];
    work.flops += 2 * rows * keys * (d_qk + d_v);
    work.kv_bytes += keys * row_bytes;
    work.io_bytes += rows * row_io_bytes;
  }
  return work;
}

// A rate of 0 is unknown: that resource then sets no floor.
Floor floor_time(const Work& work, const DeviceModel& model, bool tensor_cores) {
  const double flops_per_s = tensor_cores ? model.mma16_flops : model.fp32_flops;
  Floor floor;
  if (model.mem_bytes_per_s > 0) floor.memory_s = work.bytes() / model.mem_bytes_per_s;
  if (flops_per_s > 0) floor.compute_s = work.flops / flops_per_s;
  return floor;
}

}  // namespace treemla
