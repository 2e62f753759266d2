// Random cases and trees: the generator behind `treemla gen`, the benchmarks and the tests.
//
// Everything a kernel must not read is poisoned: pool rows that no request owns hold NaN, pages are in random,
// interleaved order, and slot 0 is never used.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "treemla/case_file.hpp"

namespace treemla {

enum class TreeKind { kChain, kStar, kBinary, kRandom, kDdtree };
TreeKind parse_tree_kind(std::string_view name);
std::string_view tree_kind_name(TreeKind kind);

// parents of a q_len-node tree. kRandom draws a parent uniformly among the nodes so far; kDdtree grows best-first over random
// per-depth log-probabilities (arXiv 2604.12989).
std::vector<int32_t> make_tree(TreeKind kind, int q_len, uint64_t seed);

struct RequestSpec {
  int64_t prefix_len = 0;
  int q_len = 1;  // tree nodes, root included; 0 makes a padded request
};

struct CaseSpec {
  std::vector<RequestSpec> requests;
  MlaShape shape{64, 512, 64};
  TreeKind tree = TreeKind::kRandom;
  MaskKind mask = MaskKind::kTree;
  DType q_dtype = DType::kBF16;  // fp32, fp16, bf16
  DType kv_dtype = DType::kBF16;
  int page_size = 1;
  double sm_scale = 0.1447;
  double gain = 4.0;  // standard deviation of the scores s_j; below 1 gives near-uniform attention
  double kv_scale = 1.0;
  uint64_t seed = 1;
};
// One line that reproduces the case.
std::string describe(const CaseSpec& spec);

// A case without expected values (src/api/expected.hpp adds them). Throws Error(kInvalidArgument) for specs that can't be.
Case generate_case(const CaseSpec& spec);

// Standard normal numbers from a counter: element i of stream `seed` is the same whatever was drawn before.
float counter_normal(uint64_t seed, uint64_t i);

}  // namespace treemla
