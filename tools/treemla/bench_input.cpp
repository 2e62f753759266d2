#include "bench_input.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "backend/cpu/thread_pool.hpp"
#include "core/compare.hpp"
#include "core/convert.hpp"
#include "core/file_io.hpp"
#include "core/kv_row.hpp"
#include "treemla/verify.hpp"

namespace treemla::cli {
namespace {

uint64_t hash(uint64_t i) {  // splitmix64
  uint64_t z = i * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Elements are drawn from 4,096 normal numbers: gigabytes a second, and as good as fresh ones for a
// benchmark.
constexpr int kDraws = 4096, kDrawBits = 12, kDrawsPerHash = 64 / kDrawBits;

template <typename T>
void fill_row(T* row, int count, const std::vector<std::byte>& table, uint64_t seed) {
  const T* draws = reinterpret_cast<const T*>(table.data());
  for (int i = 0; i < count;) {
    uint64_t h = hash(seed++);
    for (int j = 0; j < kDrawsPerHash && i < count; ++j, h >>= kDrawBits) row[i++] = draws[h % kDraws];
  }
}

// Consecutive elements of every row: `mean` plus `spread` times normal numbers. Of kQ8, the int8.
struct Field {
  DType dtype;
  int count;
  float mean = 0, spread = 1;
};

void fill_rows(std::byte* data, const std::vector<Field>& fields, int64_t num_rows, uint64_t stream,
               int threads) {
  std::vector<std::vector<std::byte>> tables;
  std::size_t row_bytes = 0;
  uint64_t hashes_per_row = 0;
  for (const Field& f : fields) {
    std::vector<std::byte>& table = tables.emplace_back(kDraws * dtype_bytes(f.dtype));
    for (int i = 0; i < kDraws; ++i) {
      const float x = f.mean + f.spread * counter_normal(stream, i);
      if (f.dtype == DType::kQ8)
        table[i] = static_cast<std::byte>(static_cast<int8_t>(std::lrint(x)));
      else
        store_element(table.data(), f.dtype, i, x);
    }
    row_bytes += static_cast<std::size_t>(f.count) * dtype_bytes(f.dtype);
    hashes_per_row += static_cast<uint64_t>(f.count / kDrawsPerHash + 1);
  }

  const int workers = num_threads_of(threads);
  run_shares(workers, workers, [&](int w) {
    for (int64_t r = num_rows * w / workers; r < num_rows * (w + 1) / workers; ++r) {
      std::byte* to = data + static_cast<std::size_t>(r) * row_bytes;
      uint64_t seed = (stream << 56) + static_cast<uint64_t>(r) * hashes_per_row;
      for (std::size_t i = 0; i < fields.size(); ++i) {
        const int count = fields[i].count;
        const std::size_t element = dtype_bytes(fields[i].dtype);
        if (element == 1) fill_row(reinterpret_cast<uint8_t*>(to), count, tables[i], seed);
        if (element == 2) fill_row(reinterpret_cast<uint16_t*>(to), count, tables[i], seed);
        if (element == 4) fill_row(reinterpret_cast<uint32_t*>(to), count, tables[i], seed);
        to += static_cast<std::size_t>(count) * element;
        seed += static_cast<uint64_t>(count / kDrawsPerHash + 1);
      }
    }
  });
}

// Cached rows of N(0, 1). e4m3 latents and int8 fill their ranges, and scales are no powers of two.
std::vector<Field> row_fields(DType dtype) {
  if (dtype == DType::kQ8) {
    constexpr float kUnit = 36;  // the largest of the normal numbers, 3.46, then is 125 of 127
    std::vector<Field> fields;
    for (int c = 0; c < kBenchLatent.d_qk(); c += kQ8Block) {
      fields.push_back({DType::kF16, 1, 1 / kUnit, 0.1f / kUnit});
      fields.push_back({DType::kQ8, kQ8Block, 0, kUnit});
    }
    return fields;
  }
  if (dtype != DType::kF8E4M3Packed) return {{dtype, kBenchLatent.d_qk()}};
  constexpr float kUnit = 128;  // 443 of 448
  return {{DType::kF8E4M3, kBenchLatent.d_v, 0, kUnit},
          {DType::kF32, kBenchLatent.d_v / kPackedGroup, 1 / kUnit, 0.1f / kUnit},
          {DType::kBF16, kBenchLatent.d_rope}};
}

int64_t pages_for(int64_t tokens, int64_t page_size) { return (tokens + page_size - 1) / page_size; }

int64_t row_bytes(DType dtype) {
  return kv_row_elements(kBenchLatent, dtype) * static_cast<int64_t>(dtype_bytes(dtype));
}

}  // namespace

double BenchPool::estimate_bytes(DType dtype, int64_t b, int64_t prefix, int64_t max_q, int64_t page_size) {
  const double pages = static_cast<double>(b) * static_cast<double>(pages_for(prefix + max_q, page_size)) + 1;
  return pages * (static_cast<double>(page_size) * static_cast<double>(row_bytes(dtype)) + sizeof(int32_t));
}

BenchPool::BenchPool(DType type, int64_t requests, int64_t prefix, int64_t max_q, int64_t tokens_per_page,
                     int threads)
    : dtype(type), b(static_cast<int>(requests)), page_size(static_cast<int>(tokens_per_page)) {
  pages_per_request = pages_for(prefix + max_q, page_size);
  num_pages = 1 + b * pages_per_request;
  rows = allocate_bytes(bytes());
  fill_rows(rows.get(), row_fields(dtype), num_pages * page_size, 1, threads);
  fill_nan(rows.get(), dtype, int64_t{page_size} * kv_row_elements(kBenchLatent, dtype));

  page_order.resize(static_cast<std::size_t>(num_pages - 1));
  std::iota(page_order.begin(), page_order.end(), 1);
  for (std::size_t i = page_order.size(); i > 1; --i)
    std::swap(page_order[i - 1], page_order[hash((uint64_t{2} << 56) + i) % i]);
}

std::size_t BenchPool::bytes() const {
  return static_cast<std::size_t>(num_pages * page_size * row_bytes(dtype));
}

double BenchInput::estimate_bytes(int64_t b, int64_t s_q, int64_t h_q, DType q_dtype) {
  const double nodes = static_cast<double>(b) * static_cast<double>(s_q);
  const double tensors =
      nodes * static_cast<double>(h_q) *
      ((kBenchLatent.d_qk() + 2 * kBenchLatent.d_v) * static_cast<double>(dtype_bytes(q_dtype)) +
       (kBenchLatent.d_v + 2) * sizeof(float));  // out on both sides and widened
  const double mask_bits = nodes * static_cast<double>((s_q + 31) / 32) * 4;
  return tensors + 2 * mask_bits;
}

BenchInput::BenchInput(const BenchPool& pool, int64_t s_q, int64_t h_q, int64_t prefix, MaskKind mask,
                       TreeKind tree, int threads) {
  const int64_t total_q = pool.b * s_q, num_pages = pages_for(prefix + s_q, pool.page_size);
  q_indptr_ = page_indptr_ = {0};
  for (int r = 0; r < pool.b; ++r) {
    q_indptr_.push_back(static_cast<int32_t>((r + 1) * s_q));
    kv_len_.push_back(static_cast<int32_t>(prefix + s_q));
    page_indptr_.push_back(static_cast<int32_t>((r + 1) * num_pages));
    const int32_t* pages = pool.page_order.data() + r * pool.pages_per_request;
    page_entries_.insert(page_entries_.end(), pages, pages + num_pages);
    const std::vector<int32_t> parents = make_tree(tree, static_cast<int>(s_q), static_cast<uint64_t>(r) + 1);
    parents_.insert(parents_.end(), parents.begin(), parents.end());
  }

  VerifyProblem& p = problem_;
  p.shape = kBenchLatent;
  p.shape.h_q = static_cast<int>(h_q);
  const DType q_dtype = bench_q_dtype(pool.dtype);
  const auto rows = static_cast<std::size_t>(total_q * h_q);
  q_ = allocate_bytes(rows * p.shape.d_qk() * dtype_bytes(q_dtype));
  fill_rows(q_.get(), {{q_dtype, p.shape.d_qk()}}, total_q * h_q, 3, threads);

  p.b = pool.b;
  p.q = {.data = q_.get(), .dtype = q_dtype, .total_q = total_q};
  p.kv = {.data = pool.rows.get(),
          .dtype = pool.dtype,
          .num_pages = pool.num_pages,
          .page_size = pool.page_size,
          .layout = pool.layout};
  p.pages = {.entries = page_entries_.data(),
             .index_type = IndexType::kI32,
             .num_entries = std::ssize(page_entries_),
             .indptr = page_indptr_.data()};
  p.q_indptr = q_indptr_.data();
  p.kv_len = kv_len_.data();
  p.mask.kind = mask;
  if (mask == MaskKind::kTree) p.mask.parents = parents_.data();
  p.sm_scale = kBenchScale;
}

std::string BenchInput::check_sample(const std::vector<float>& out, const std::vector<float>& lse,
                                     double max_flops, int threads, bool& compared) const {
  const VerifyProblem& p = problem_;
  const int r = p.b - 1, head = p.shape.h_q / 2;
  const int32_t s_q = q_indptr_[r + 1] - q_indptr_[r];
  // Parents come first, so the first nodes of a tree are a tree whose rows have the same results; not so
  // without a mask, where every node sees the last ones.
  const double node_flops = 2.0 * kv_len_[r] * (p.shape.d_qk() + p.shape.d_v);
  const auto affordable = static_cast<int32_t>(std::min<double>(max_flops / node_flops, s_q));
  compared = affordable > 0 && (p.mask.kind != MaskKind::kNone || affordable == s_q);
  if (!compared) return "";

  VerifyProblem sample = p;
  const int32_t q_indptr[] = {0, affordable}, kv_len[] = {kv_len_[r] - s_q + affordable};
  const int32_t page_indptr[] = {page_indptr_[r], page_indptr_[r + 1]};
  sample.b = 1;
  sample.shape.h_q = 1;
  sample.q.total_q = affordable;
  sample.q.head_stride = p.shape.d_qk();
  sample.q.token_stride = int64_t{p.shape.h_q} * p.shape.d_qk();
  sample.q.data =
      q_.get() + static_cast<std::size_t>(q_indptr_[r] * sample.q.token_stride + head * p.shape.d_qk()) *
                     dtype_bytes(p.q.dtype);
  sample.q_indptr = q_indptr;
  sample.kv_len = kv_len;
  sample.pages.indptr = page_indptr;
  if (p.mask.parents != nullptr) sample.mask.parents = parents_.data() + q_indptr_[r];

  const std::size_t d_v = static_cast<std::size_t>(p.shape.d_v), rows = static_cast<std::size_t>(affordable);
  std::vector<float> want(rows * d_v), want_lse(rows), got(rows * d_v), got_lse(rows);
  verify(sample, {want.data(), DType::kF32, want_lse.data()},
         {.backend = "cpu_oracle", .num_threads = threads});
  for (std::size_t i = 0; i < rows; ++i) {
    const std::size_t row = (q_indptr_[r] + i) * p.shape.h_q + head;
    got_lse[i] = lse[row];
    std::copy_n(out.begin() + static_cast<int64_t>(row * d_v), d_v,
                got.begin() + static_cast<int64_t>(i * d_v));
  }
  const Precision precision = p.q.dtype == DType::kF32   ? Precision::kF32
                              : p.q.dtype == DType::kF16 ? Precision::kF16
                                                         : Precision::kBF16;
  return compare(sample.shape, affordable, got.data(), want.data(), got_lse.data(), want_lse.data(),
                 precision)
      .failure;
}

}  // namespace treemla::cli
