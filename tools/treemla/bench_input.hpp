// Inputs of benchmark rows: random pools made once and shared by every row that reads the same cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/generate.hpp"
#include "treemla/problem.hpp"

namespace treemla::cli {

constexpr MlaShape kBenchLatent{0, 512, 64};  // h_q varies, the widths are those of nearly every MLA model
constexpr double kBenchScale = 0.1447;        // with N(0, 1) queries and rows: scores spread over about 3.5

// The cached rows of `b` requests of `prefix` + `max_q` tokens each, on pages in random order among the
// requests. Page 0 is never used and holds NaN.
struct BenchPool {
  DType dtype = DType::kBF16;
  int b = 1, page_size = 1;
  int64_t pages_per_request = 0, num_pages = 0;
  std::shared_ptr<std::byte> rows;        // [num_pages, page_size, kv_row_elements]
  std::vector<int32_t> page_order;        // [b * pages_per_request] a permutation of 1 .. num_pages - 1
  KvLayout layout = KvLayout::kRowMajor;  // random rows are as good in any

  std::size_t bytes() const;  // of rows
  static double estimate_bytes(DType dtype, int64_t b, int64_t prefix, int64_t max_q, int64_t page_size);
  BenchPool(DType dtype, int64_t b, int64_t prefix, int64_t max_q, int64_t page_size, int threads);
};

// One row: queries, lengths, page table and trees, and the problem that points at them, in this process's
// memory.
class BenchInput {
 public:
  static double estimate_bytes(int64_t b, int64_t s_q, int64_t h_q, DType q_dtype);
  BenchInput(const BenchPool& pool, int64_t s_q, int64_t h_q, int64_t prefix, MaskKind mask, TreeKind tree,
             int threads);

  const VerifyProblem& problem() const { return problem_; }

  // Compares one head of the last request of a result with the float64 oracle, as many of its nodes as
  // `max_flops` allow. Returns what is wrong, or nothing; `compared` says whether a comparison was
  // affordable. out [total_q, h_q, d_v], lse [total_q, h_q].
  std::string check_sample(const std::vector<float>& out, const std::vector<float>& lse, double max_flops,
                           int threads, bool& compared) const;

 private:
  VerifyProblem problem_;
  std::vector<int32_t> q_indptr_, kv_len_, page_indptr_, page_entries_, parents_;
  std::shared_ptr<std::byte> q_;
};

// Caches of 8 bits go with bf16 queries, the others with queries and outputs of their own type.
constexpr DType bench_q_dtype(DType kv_dtype) { return is_cache_only(kv_dtype) ? DType::kBF16 : kv_dtype; }

}  // namespace treemla::cli
