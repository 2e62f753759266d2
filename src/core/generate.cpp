// Random cases. Every number is a function of (seed, stream, index) alone, so the result does not depend on
// the number of threads, and a cached row depends only on its request and token: the same spec with another
// page size holds the same rows, only elsewhere.

#include "core/generate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <queue>
#include <system_error>
#include <thread>
#include <utility>

#include "core/convert.hpp"
#include "core/fail.hpp"
#include "core/kv_row.hpp"
#include "treemla/tree.hpp"

namespace treemla {
namespace {

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int kMaxNodes = 65536;         // of one tree
constexpr int kMaxWidth = 4096;          // d_qk, as check_problem() allows
constexpr double kNormalLimit = 3.4642;  // no counter_normal() is larger: 2 * sqrt(3)

// Independent streams of one seed.
enum Stream : uint64_t { kQueries = 1, kCache = 2, kPages = 3, kTrees = 4 };

int64_t num_pages_for(int64_t kv_len, int64_t page_size) { return (kv_len + page_size - 1) / page_size; }

// splitmix64 (Steele, Lea, Flood 2014): output i of a generator whose state starts at `key`.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
inline uint64_t hash_at(uint64_t key, uint64_t i) {
  uint64_t z = key + (i + 1) * kGolden;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}
inline uint64_t mix(uint64_t seed, uint64_t stream) { return hash_at(hash_at(seed, 0) ^ stream, stream); }

// The sum of four 16-bit uniforms of one hash, scaled to unit variance: near enough to a normal for scores,
// which sum hundreds of products, and several times faster than Box-Muller. No number passes 2 * sqrt(3).
inline float normal_from_hash(uint64_t h) {
  constexpr uint64_t kEven = 0x0000FFFF0000FFFF;
  const uint64_t pairs = (h & kEven) + ((h >> 16) & kEven);
  const auto sum = static_cast<int32_t>((pairs & 0xFFFFFFFF) + (pairs >> 32));
  constexpr float kScale = 2.6428993e-5f;  // 1 / sqrt(4 * (2^32 - 1) / 12)
  return static_cast<float>(sum - 2 * 65535) * kScale;
}

// Uniform in [0, n), n < 2^32.
uint32_t below(uint64_t hash, uint64_t n) { return static_cast<uint32_t>(((hash >> 32) * n) >> 32); }

// Of the numbers that a dtype can stand for. Those of e4m3_packed rows end with the bf16 of their rope.
double largest(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kF8E4M3Packed:
      return 3.3e38;
    case DType::kF16:
      return 65504;
    case DType::kF8E4M3:
      return 448;
    case DType::kQ8:
      return 127 * 65504.0;
  }
  return 0;
}

double smallest_normal(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kBF16:
      return 0x1p-126;
    case DType::kF16:
      return 0x1p-14;
    case DType::kF8E4M3:
      return 0x1p-6;
    case DType::kF8E4M3Packed:
      return 0x1p-117;  // 512 times that of float32: a scale is a group's largest latent / 448
    case DType::kQ8:
      return 0x1p-7;  // the same of fp16: a scale is a block's largest column / 127
  }
  return 0;
}

const char* tensor_dtype(DType t) {
  switch (t) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBF16:
      return "BF16";
    case DType::kF8E4M3:
      return "F8_E4M3";
    case DType::kF8E4M3Packed:
    case DType::kQ8:
      return "U8";
  }
  return "?";
}

// Elements first .. first + n of the stream `key`, times `scale`, to dst. No rows with scales: fill_row().
void fill_normal(std::byte* dst, DType t, uint64_t key, uint64_t first, int64_t n, float scale) {
  const auto fill = [&](auto* to, auto convert) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = convert(normal_from_hash(hash_at(key, first + static_cast<uint64_t>(i))) * scale);
    }
  };
  switch (t) {
    case DType::kF32:
      fill(reinterpret_cast<float*>(dst), [](float x) { return x; });
      break;
    case DType::kF16:
      fill(reinterpret_cast<uint16_t*>(dst), float_to_f16);
      break;
    case DType::kBF16:
      fill(reinterpret_cast<uint16_t*>(dst), float_to_bf16);
      break;
    case DType::kF8E4M3:
      fill(reinterpret_cast<uint8_t*>(dst), float_to_e4m3);
      break;
    case DType::kF8E4M3Packed:
    case DType::kQ8:
      break;
  }
}

// Row i of the cache: the numbers i * d_qk and on of the stream `key`.
void fill_row(std::byte* dst, const MlaShape& shape, DType t, uint64_t key, int64_t i, float scale) {
  const int d_qk = shape.d_qk();
  const auto first = static_cast<uint64_t>(i) * static_cast<uint64_t>(d_qk);
  if (!has_scales(t)) return fill_normal(dst, t, key, first, d_qk, scale);
  std::vector<float> row(static_cast<std::size_t>(d_qk));
  fill_normal(reinterpret_cast<std::byte*>(row.data()), DType::kF32, key, first, d_qk, scale);
  (t == DType::kQ8 ? store_q8_row : store_packed_row)(row.data(), shape, dst);
}

// body(begin, end) over chunks of [0, n), on every core when there is enough to do.
template <typename Body>
void parallel_chunks(int64_t n, int64_t chunk, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t begin; (begin = next.fetch_add(chunk)) < n;) body(begin, std::min(n, begin + chunk));
  };
  const int64_t num_threads =
      std::min<int64_t>({std::thread::hardware_concurrency(), (n + chunk - 1) / chunk, 32});
  std::vector<std::jthread> helpers;  // joined on every way out
  try {
    for (int64_t i = 1; i < num_threads; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads: the ones there are do the work
  }
  work();
}

// Not zeroed: pools reach gigabytes, and every byte is written soon.
std::unique_ptr<std::byte[]> make_bytes(const char* argument, int64_t bytes) {
  try {
    return std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, argument,
                fmt::format("no memory for the {} bytes of {}", bytes, argument));
  }
}

void check_nodes(const char* argument, int64_t q_len) {
  if (q_len < 0 || q_len > kMaxNodes)
    fail(argument, "{} = {} is outside [0, {}]", argument, q_len, kMaxNodes);
}

// Best-first growth over per-depth log-probabilities (arXiv 2604.12989, algorithm 1; FIELD.md section 3): one
// draft pass of a block-diffusion model gives a distribution per future depth, independent of the path.
std::vector<int32_t> make_ddtree(int q_len, uint64_t seed) {
  constexpr int kDepths = 16;           // a usual draft block
  constexpr double kLogitSpread = 3.0;  // peaked enough for paths, flat enough for branches
  const int budget = q_len - 1;
  std::vector<int32_t> parents(q_len, -1);
  if (budget <= 0) return parents;

  // log_probs[d][r], best first. budget candidates a depth are enough: even a star then fits.
  std::vector<std::vector<double>> log_probs(kDepths, std::vector<double>(budget));
  for (int d = 0; d < kDepths; ++d) {
    auto& row = log_probs[d];
    for (int r = 0; r < budget; ++r) row[r] = kLogitSpread * counter_normal(mix(seed, d), r);
    std::sort(row.begin(), row.end(), std::greater<>());
    double sum = 0;
    for (double x : row) sum += std::exp(x - row[0]);
    const double log_sum = row[0] + std::log(sum);
    for (double& x : row) x -= log_sum;
  }

  std::vector<int32_t> ranks(q_len, 0);  // rank of a node among its siblings
  struct Entry {
    double key;      // log-probability of the path
    int32_t parent;  // node
    int32_t depth;   // 0 for children of the root
    int32_t rank;
  };
  const auto rank_path = [&](const Entry& e) {
    std::vector<int32_t> path{e.rank};
    for (int32_t n = e.parent; n > 0; n = parents[n]) path.push_back(ranks[n]);
    std::reverse(path.begin(), path.end());
    return path;
  };
  const auto worse = [&](const Entry& a, const Entry& b) {
    if (a.key != b.key) return a.key < b.key;
    return rank_path(a) > rank_path(b);
  };
  std::priority_queue<Entry, std::vector<Entry>, decltype(worse)> heap(worse);
  heap.push({log_probs[0][0], 0, 0, 0});
  for (int32_t node = 1; node < q_len; ++node) {
    const Entry e = heap.top();
    heap.pop();
    parents[node] = e.parent;
    ranks[node] = e.rank;
    const auto& row = log_probs[e.depth];
    if (e.rank + 1 < budget)
      heap.push({e.key - row[e.rank] + row[e.rank + 1], e.parent, e.depth, e.rank + 1});
    if (e.depth + 1 < kDepths) heap.push({e.key + log_probs[e.depth + 1][0], node, e.depth + 1, 0});
  }
  return parents;
}

struct Sizes {
  int64_t total_q = 0;
  int64_t num_used_pages = 0;
  int64_t num_pages = 0;
  float q_scale = 0;   // standard deviation of an element of q
  float kv_scale = 0;  // of a stored element of kv
};

Sizes check_spec(const CaseSpec& s) {
  const auto check_positive = [](const char* argument, double x) {
    if (!std::isfinite(x) || x <= 0) fail(argument, "{} = {} must be finite and greater than 0", argument, x);
  };
  if (s.shape.h_q < 1 || s.shape.h_q > 1024)
    fail("shape.h_q", "shape.h_q = {} is outside [1, 1024]", s.shape.h_q);
  if (s.shape.d_v < 1 || s.shape.d_v > kMaxWidth) {
    fail("shape.d_v", "shape.d_v = {} is outside [1, {}]", s.shape.d_v, kMaxWidth);
  }
  if (s.shape.d_rope < 0 || s.shape.d_rope > kMaxWidth - s.shape.d_v) {
    fail("shape.d_rope", "shape.d_rope = {} is outside [0, {}]: d_qk is at most {}", s.shape.d_rope,
         kMaxWidth - s.shape.d_v, kMaxWidth);
  }
  if (is_cache_only(s.q_dtype)) {
    fail("q_dtype", "q_dtype = {} is for caches only: allowed are fp32, fp16, bf16", dtype_name(s.q_dtype));
  }
  check_kv_widths(s.shape, s.kv_dtype);
  if (s.page_size < 1) fail("page_size", "page_size = {} must be at least 1", s.page_size);
  check_positive("sm_scale", s.sm_scale);
  check_positive("kv_scale", s.kv_scale);
  if (!std::isfinite(s.gain) || s.gain < 0) fail("gain", "gain = {} must be finite and not negative", s.gain);

  // A score is sm_scale times d_qk products of independent numbers: its deviation is sm_scale * sqrt(d_qk)
  // times that of q.
  const double q_sd = s.gain / (s.sm_scale * std::sqrt(static_cast<double>(s.shape.d_qk())));
  if (q_sd * kNormalLimit > largest(s.q_dtype)) {
    fail("gain", "gain = {} with sm_scale = {} makes q as large as {:.3g}: {} ends at {:.6g}", s.gain,
         s.sm_scale, q_sd * kNormalLimit, dtype_name(s.q_dtype), largest(s.q_dtype));
  }
  const double kv_min = kNormalLimit / largest(s.kv_dtype), kv_max = 1 / smallest_normal(s.kv_dtype);
  if (s.kv_scale < kv_min || s.kv_scale > kv_max) {
    fail("kv_scale", "kv_scale = {} is outside [{:.3g}, {:.3g}]: stored rows are N(0, 1) / kv_scale in {}",
         s.kv_scale, kv_min, kv_max, dtype_name(s.kv_dtype));
  }

  Sizes sizes;
  sizes.q_scale = static_cast<float>(q_sd);
  sizes.kv_scale = static_cast<float>(1 / s.kv_scale);
  if (s.requests.size() >= static_cast<std::size_t>(kInt32Max)) {
    fail("requests", "requests has {} elements: allowed are fewer than {}", s.requests.size(), kInt32Max);
  }
  for (std::size_t r = 0; r < s.requests.size(); ++r) {
    const RequestSpec& request = s.requests[r];
    check_nodes(fmt::format("requests[{}].q_len", r).c_str(), request.q_len);
    if (request.prefix_len < 0 || request.prefix_len > kInt32Max - request.q_len) {
      fail("requests", "requests[{}].prefix_len = {} is outside [0, {}]: kv_len is a 32-bit number", r,
           request.prefix_len, kInt32Max - request.q_len);
    }
    sizes.total_q += request.q_len;
    sizes.num_used_pages += num_pages_for(request.prefix_len + request.q_len, s.page_size);
  }
  // Page 0 stays unused (engines keep a dummy slot there) and so does about one page in nine of the others.
  sizes.num_pages = 1 + sizes.num_used_pages + num_pages_for(sizes.num_used_pages, 8);
  if (sizes.total_q > kInt32Max) {
    fail("requests", "requests have {} tree nodes in all: q_indptr ends at {}", sizes.total_q, kInt32Max);
  }
  if (sizes.num_pages > kInt32Max) {
    fail("requests", "requests need {} pages of {}: page_indices end at {}", sizes.num_pages, s.page_size,
         kInt32Max);
  }
  if (saturating_mul(saturating_mul(saturating_mul(sizes.num_pages, s.page_size), s.shape.d_qk()),
                     sizeof(float)) == kInt64Max) {
    fail("requests", "requests need {} pages of {} rows of {} elements: more than 64-bit offsets can address",
         sizes.num_pages, s.page_size, s.shape.d_qk());
  }
  return sizes;
}

std::string_view mask_name(MaskKind kind) {
  return kind == MaskKind::kTree ? "tree" : kind == MaskKind::kCausal ? "causal" : "none";
}

}  // namespace

TreeKind parse_tree_kind(std::string_view name) {
  for (TreeKind kind :
       {TreeKind::kChain, TreeKind::kStar, TreeKind::kBinary, TreeKind::kRandom, TreeKind::kDdtree}) {
    if (name == tree_kind_name(kind)) return kind;
  }
  fail("tree", "tree = \"{}\" is unknown: allowed are chain, star, binary, random, ddtree", name);
}

std::string_view tree_kind_name(TreeKind kind) {
  switch (kind) {
    case TreeKind::kChain:
      return "chain";
    case TreeKind::kStar:
      return "star";
    case TreeKind::kBinary:
      return "binary";
    case TreeKind::kRandom:
      return "random";
    case TreeKind::kDdtree:
      return "ddtree";
  }
  return "?";
}

float counter_normal(uint64_t seed, uint64_t i) { return normal_from_hash(hash_at(hash_at(seed, 0), i)); }

std::vector<int32_t> make_tree(TreeKind kind, int q_len, uint64_t seed) {
  check_nodes("q_len", q_len);
  if (kind == TreeKind::kDdtree) return make_ddtree(q_len, seed);
  std::vector<int32_t> parents(q_len, -1);
  for (int i = 1; i < q_len; ++i) {
    switch (kind) {
      case TreeKind::kChain:
        parents[i] = i - 1;
        break;
      case TreeKind::kStar:
        parents[i] = 0;
        break;
      case TreeKind::kBinary:
        parents[i] = (i - 1) / 2;
        break;
      case TreeKind::kRandom:
        parents[i] = static_cast<int32_t>(below(hash_at(mix(seed, 0), i), i));
        break;
      case TreeKind::kDdtree:
        break;  // above
    }
  }
  return parents;
}

std::string describe(const CaseSpec& s) {
  // Runs of equal requests as COUNTxPREFIX+Q.
  std::string requests;
  for (std::size_t r = 0, end; r < s.requests.size(); r = end) {
    const RequestSpec& request = s.requests[r];
    for (end = r + 1; end < s.requests.size() && s.requests[end].prefix_len == request.prefix_len &&
                      s.requests[end].q_len == request.q_len;) {
      ++end;
    }
    requests += fmt::format("{}{}x{}+{}", r ? "," : "", end - r, request.prefix_len, request.q_len);
  }
  return fmt::format(
      "requests={} h_q={} d_v={} d_rope={} tree={} mask={} q={} kv={} page_size={} sm_scale={} gain={} "
      "kv_scale={} seed={}",
      requests, s.shape.h_q, s.shape.d_v, s.shape.d_rope, tree_kind_name(s.tree), mask_name(s.mask),
      dtype_name(s.q_dtype), dtype_name(s.kv_dtype), s.page_size, s.sm_scale, s.gain, s.kv_scale, s.seed);
}

Case generate_case(const CaseSpec& s) {
  const Sizes sizes = check_spec(s);
  const int d_qk = s.shape.d_qk();
  const auto b = static_cast<int64_t>(s.requests.size());

  std::vector<int32_t> q_indptr{0}, kv_len, page_indptr{0}, parents, positions;
  for (int64_t r = 0; r < b; ++r) {
    const auto [prefix_len, q_len] = s.requests[r];
    // Without a tree mask nodes are consecutive tokens.
    const TreeKind kind = s.mask == MaskKind::kTree ? s.tree : TreeKind::kChain;
    const auto tree = make_tree(kind, q_len, mix(mix(s.seed, kTrees), r));
    const auto tree_pos = tree_positions(tree, prefix_len, static_cast<int>(r));
    parents.insert(parents.end(), tree.begin(), tree.end());
    positions.insert(positions.end(), tree_pos.begin(), tree_pos.end());
    q_indptr.push_back(q_indptr.back() + q_len);
    kv_len.push_back(static_cast<int32_t>(prefix_len + q_len));
    page_indptr.push_back(page_indptr.back() +
                          static_cast<int32_t>(num_pages_for(kv_len.back(), s.page_size)));
  }

  // The first num_used_pages of a permutation of pages 1 .. num_pages - 1, dealt out in request order: each
  // request's pages are out of order and lie between those of the others.
  std::vector<int32_t> page_indices(sizes.num_pages - 1);
  std::iota(page_indices.begin(), page_indices.end(), 1);
  const uint64_t page_key = mix(s.seed, kPages);
  for (int64_t i = 0; i < sizes.num_used_pages; ++i) {
    std::swap(page_indices[i], page_indices[i + below(hash_at(page_key, i), page_indices.size() - i)]);
  }
  page_indices.resize(sizes.num_used_pages);

  // What each page of the pool holds.
  struct PageContent {
    int64_t first_token = 0;  // counted through all requests
    int num_rows = 0;         // the rows after these are poison
  };
  std::vector<PageContent> pages(sizes.num_pages);
  int64_t first_token = 0;
  for (int64_t r = 0; r < b; ++r) {
    for (int64_t t = 0; t < kv_len[r]; t += s.page_size) {
      const auto num_rows = static_cast<int>(std::min<int64_t>(s.page_size, kv_len[r] - t));
      pages[page_indices[page_indptr[r] + t / s.page_size]] = {first_token + t, num_rows};
    }
    first_token += kv_len[r];
  }

  Case c;
  c.shape = s.shape;
  c.sm_scale = s.sm_scale;
  c.page_size = s.page_size;
  c.mask = s.mask;
  c.kv_scale = s.kv_scale;
  if (has_scales(s.kv_dtype)) c.kv_packed = s.kv_dtype;
  c.source = "treemla generator: " + describe(s);

  {
    const int64_t row = static_cast<int64_t>(s.shape.h_q) * d_qk;
    const auto row_bytes = row * static_cast<int64_t>(dtype_bytes(s.q_dtype));
    auto q = make_bytes("q", sizes.total_q * row_bytes);
    const uint64_t key = mix(s.seed, kQueries);
    parallel_chunks(sizes.total_q, 8, [&](int64_t begin, int64_t end) {
      fill_normal(q.get() + begin * row_bytes, s.q_dtype, key, begin * row, (end - begin) * row,
                  sizes.q_scale);
    });
    c.set("q", tensor_dtype(s.q_dtype), {sizes.total_q, s.shape.h_q, d_qk}, q.get());
  }
  {
    const int64_t row_elements = kv_row_elements(s.shape, s.kv_dtype);
    const auto row_bytes = row_elements * static_cast<int64_t>(dtype_bytes(s.kv_dtype));
    const int64_t num_rows = sizes.num_pages * s.page_size;
    auto kv = make_bytes("kv", num_rows * row_bytes);
    const uint64_t key = mix(s.seed, kCache);
    parallel_chunks(num_rows, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const PageContent& page = pages[i / s.page_size];
        const int64_t slot = i % s.page_size;
        if (slot < page.num_rows) {
          fill_row(kv.get() + i * row_bytes, s.shape, s.kv_dtype, key, page.first_token + slot,
                   sizes.kv_scale);
        } else {
          fill_nan(kv.get() + i * row_bytes, s.kv_dtype, row_elements);
        }
      }
    });
    c.set("kv", tensor_dtype(s.kv_dtype), {num_rows, row_elements}, kv.get());
  }
  const auto set_ints = [&](const char* name, const std::vector<int32_t>& v) {
    c.set(name, "I32", {static_cast<int64_t>(v.size())}, v.data());
  };
  set_ints("q_indptr", q_indptr);
  set_ints("kv_len", kv_len);
  set_ints("page_indptr", page_indptr);
  set_ints("page_indices", page_indices);
  if (s.mask == MaskKind::kTree) set_ints("parents", parents);
  set_ints("positions", positions);
  return c;
}

}  // namespace treemla
