// The tree steps on a GPU: the same numbers as on the host, bit for bit; faults found; one graph for changing contents. Skips, and
// passes, where there is no GPU.

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/cuda_memory.hpp"
#include "backend/cuda/device_properties.hpp"
#include "core/convert.hpp"
#include "error_of.hpp"
#include "treemla/treemla.hpp"

namespace treemla {
namespace {

using testing::HasSubstr;
using Ints = std::vector<int32_t>;
using Floats = std::vector<float>;

constexpr float kInf = std::numeric_limits<float>::infinity();

// An array on both sides. `host` is what tests fill and read.
template <class T>
struct Both {
  std::vector<T> host;
  T* device = nullptr;

  Both() = default;
  explicit Both(std::vector<T> values) : host(std::move(values)) { upload(); }
  Both(std::size_t n, T value) : Both(std::vector<T>(n, value)) {}
  ~Both() { cudaFree(device); }
  Both(const Both&) = delete;
  Both& operator=(const Both&) = delete;
  void upload() {
    if (!device) {
      void* p = nullptr;
      check_cuda(cudaMalloc(&p, std::max<std::size_t>(1, host.size()) * sizeof(T)), "cudaMalloc");
      device = static_cast<T*>(p);
    }
    check_cuda(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  std::vector<T> download() const {
    std::vector<T> copy(host.size());
    check_cuda(cudaMemcpy(copy.data(), device, copy.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return copy;
  }
};

struct Workspace {
  TreeRun run;
  explicit Workspace(std::size_t bytes, void* stream = nullptr) {
    check_cuda(cudaMalloc(&run.workspace, bytes + 1), "cudaMalloc");
    check_cuda(cudaMemset(run.workspace, 0xAB, bytes), "cudaMemset");  // contents need no set-up
    run.workspace_bytes = bytes;
    run.stream = stream;
  }
  ~Workspace() { cudaFree(run.workspace); }
};

#define SKIP_WITHOUT_GPU() \
  if (!current_cuda_device().usable) GTEST_SKIP() << current_cuda_device().reason

template <typename T>
::testing::AssertionResult same(const char* what, const std::vector<T>& got, const std::vector<T>& want) {
  for (std::size_t i = 0; i < want.size(); ++i)
    if (!(got[i] == want[i]))
      return ::testing::AssertionFailure()
             << what << "[" << i << "] is " << got[i] << " on the GPU, " << want[i] << " on the host";
  return ::testing::AssertionSuccess();
}

// ---- build ----

struct TreeArrays {
  Both<int32_t> token_ids, parents, depth, positions, next_token, next_sibling, num_nodes;
  Both<uint32_t> bits;
  Both<float> log_probs;
  int words;

  TreeArrays(int b, int q_len) : words(words_per_row(q_len) + 1) {
    const std::size_t n = static_cast<std::size_t>(b) * static_cast<std::size_t>(q_len);
    for (Both<int32_t>* a : {&token_ids, &parents, &depth, &positions, &next_token, &next_sibling})
      fill(*a, n, -77);
    fill(num_nodes, static_cast<std::size_t>(b), -77);
    fill(bits, n * static_cast<std::size_t>(words), 0xDEADBEEFu);
    fill(log_probs, n, -77.0f);
  }
  template <class T>
  static void fill(Both<T>& a, std::size_t n, T value) {
    a.host.assign(n, value);
    a.upload();
  }
  TreeOutput host() {
    return {token_ids.host.data(),  parents.host.data(),      depth.host.data(),
            positions.host.data(),  bits.host.data(),         words,
            next_token.host.data(), next_sibling.host.data(), log_probs.host.data(),
            num_nodes.host.data()};
  }
  TreeOutput device() {
    return {token_ids.device,  parents.device,      depth.device,     positions.device, bits.device, words,
            next_token.device, next_sibling.device, log_probs.device, num_nodes.device};
  }
  void expect_same() {
    EXPECT_TRUE(same("num_nodes", num_nodes.download(), num_nodes.host));
    EXPECT_TRUE(same("parents", parents.download(), parents.host));
    EXPECT_TRUE(same("token_ids", token_ids.download(), token_ids.host));
    EXPECT_TRUE(same("depth", depth.download(), depth.host));
    EXPECT_TRUE(same("positions", positions.download(), positions.host));
    EXPECT_TRUE(same("ancestor_bits", bits.download(), bits.host));
    EXPECT_TRUE(same("retrieve_next_token", next_token.download(), next_token.host));
    EXPECT_TRUE(same("retrieve_next_sibling", next_sibling.download(), next_sibling.host));
    EXPECT_TRUE(same("log_probs", log_probs.download(), log_probs.host));
  }
};

// Builds `host` here and `device` there and compares everything.
void expect_same_tree(const BuildProblem& host, BuildProblem device) {
  device.memory = Memory::kDevice;
  TreeArrays arrays(host.b, host.budget + 1);
  build_tree(host, arrays.host());
  const Workspace workspace(build_workspace_bytes(device));
  build_tree(device, arrays.device(), workspace.run);
  ASSERT_NO_THROW(check_tree_run(workspace.run, host.b));
  arrays.expect_same();
}

uint64_t hash(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Roughly normal scores, in parallel: the large case has 157 million.
template <class T>
std::vector<T> random_scores(std::size_t n, uint64_t seed, float spread) {
  std::vector<T> scores(n);
  const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::jthread> threads;
  for (unsigned w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      for (std::size_t i = n * w / workers; i < n * (w + 1) / workers; ++i) {
        const uint64_t h = hash(seed * 0x9E3779B97F4A7C15 + i);
        float sum = 0;
        for (int part = 0; part < 4; ++part)
          sum += static_cast<float>(h >> (16 * part) & 0xFFFF) / 65536 - 0.5f;
        if constexpr (sizeof(T) == 2) {
          scores[i] = float_to_bf16(spread * sum);
        } else {
          scores[i] = spread * sum;
        }
      }
    });
  }
  return scores;
}

struct DdtreeCase {
  int b, num_depths, vocab, budget;
  DType dtype;
  bool are_log_probs;
  float spread;   // 0: every score alike; below 0: they rise through the row, up to 0
  int extra = 0;  // elements between rows
};
void PrintTo(const DdtreeCase& c, std::ostream* out) {
  *out << "b " << c.b << ", L " << c.num_depths << ", V " << c.vocab << ", budget " << c.budget << ", "
       << dtype_name(c.dtype) << (c.are_log_probs ? ", log-probs" : ", logits") << ", spread " << c.spread
       << ", +" << c.extra;
}
class GpuDdtree : public testing::TestWithParam<DdtreeCase> {};
INSTANTIATE_TEST_SUITE_P(
    Cases, GpuDdtree,
    testing::Values(
        DdtreeCase{1, 1, 1, 1, DType::kF32, false, 1}, DdtreeCase{3, 2, 5, 8, DType::kF32, false, 4},
        DdtreeCase{2, 4, 33, 17, DType::kBF16, true, 4}, DdtreeCase{5, 15, 1000, 64, DType::kF32, false, 20},
        DdtreeCase{2, 3, 8191, 40, DType::kF32, false, 9}, DdtreeCase{2, 3, 8192, 40, DType::kBF16, false, 9},
        DdtreeCase{2, 3, 8193, 256, DType::kF32, false, 9, 3},
        DdtreeCase{2, 3, 50001, 257, DType::kBF16, false, 9, 7},
        DdtreeCase{1, 15, 163840, 1024, DType::kF32, false, 30},
        DdtreeCase{2, 64, 3000, 1024, DType::kBF16, true, 1},
        DdtreeCase{2, 4, 20000, 100, DType::kF32, false, 0},  // everything ties
        DdtreeCase{1, 16, 40, 1000, DType::kF32, true, 0},    // and so deep
        DdtreeCase{1, 2, 20000, 1024, DType::kF32, true, 0},
        // Several chunks a block: ties, and every chunk better than those before.
        DdtreeCase{20, 15, 30001, 100, DType::kF32, false, 0},
        DdtreeCase{20, 15, 30001, 32, DType::kF32, false, -30},
        DdtreeCase{20, 15, 30001, 1024, DType::kF32, true, -30, 1},
        DdtreeCase{20, 15, 30001, 1024, DType::kBF16, true, 30},
        DdtreeCase{8, 15, 163840, 32, DType::kF32, true, 30},
        DdtreeCase{64, 15, 163840, 64, DType::kBF16, false, 30}));

TEST_P(GpuDdtree, EqualsTheHost) {
  SKIP_WITHOUT_GPU();
  const DdtreeCase& c = GetParam();
  BuildProblem host;
  host.b = c.b;
  host.budget = c.budget;
  host.num_depths = c.num_depths;
  host.scores = {nullptr, c.dtype, c.vocab, c.vocab + c.extra, c.are_log_probs};
  Both<int32_t> prefix(static_cast<std::size_t>(c.b), 7), roots(static_cast<std::size_t>(c.b), 11);
  host.prefix_len = prefix.host.data();
  host.root_tokens = roots.host.data();
  BuildProblem device = host;
  device.prefix_len = prefix.device;
  device.root_tokens = roots.device;
  const std::size_t n = static_cast<std::size_t>(c.b) * static_cast<std::size_t>(c.num_depths) *
                        static_cast<std::size_t>(c.vocab + c.extra);
  const auto run = [&](auto scores) {
    const Both<typename decltype(scores)::value_type> both(std::move(scores));
    host.scores.data = both.host.data();
    device.scores.data = both.device;
    expect_same_tree(host, device);
  };
  if (c.dtype == DType::kF32) {
    Floats scores = random_scores<float>(n, 3, c.spread);
    const std::size_t row = static_cast<std::size_t>(c.vocab + c.extra);
    for (std::size_t i = 0; c.spread < 0 && i < n; ++i)
      scores[i] = c.spread * static_cast<float>(row - i % row) / static_cast<float>(row);
    for (std::size_t i = 0; i < n; i += 97) scores[i] = -kInf;
    for (std::size_t i = 0; i < n; i += row) scores[i] = c.spread != 0 ? 1.0f : 0.0f;
    if (c.are_log_probs)
      for (float& x : scores) x = std::min(0.0f, x);
    run(std::move(scores));
  } else {
    run(random_scores<uint16_t>(n, 4, c.spread));
  }
}

TEST(GpuBuild, CandidatesChainsAndParents) {
  SKIP_WITHOUT_GPU();
  std::mt19937 rng(5);
  for (const int count : {1, 40, 700, 4096}) {
    for (const int budget : {1, 16, 63, 1024}) {
      SCOPED_TRACE(testing::Message() << count << " candidates, budget " << budget);
      constexpr int kBatch = 3;
      const int q_len = budget + 1;
      Both<int32_t> tokens, parents, chain, given, given_tokens;
      Both<float> log_probs;
      for (int r = 0; r < kBatch; ++r) {
        for (int i = 0; i < count; ++i) {
          tokens.host.push_back(static_cast<int32_t>(rng() % 5000));
          parents.host.push_back(static_cast<int32_t>(rng() % static_cast<unsigned>(i + 1)) - 1);
          log_probs.host.push_back(rng() % 30 == 0 ? -kInf : -static_cast<float>(rng() % 64) / 8);
        }
        for (int i = 0; i < budget; ++i)
          chain.host.push_back(rng() % 40 == 0 ? -1 : static_cast<int32_t>(rng() % 99));
        for (int i = 0; i < q_len; ++i) {
          given.host.push_back(i == 0 ? -1 : static_cast<int32_t>(rng() % static_cast<unsigned>(i)));
          given_tokens.host.push_back(i);
        }
      }
      for (auto* a : {&tokens, &parents, &chain, &given, &given_tokens}) a->upload();
      log_probs.upload();
      BuildProblem host;
      host.b = kBatch;
      host.budget = budget;
      host.method = BuildMethod::kCandidates;
      host.num_candidates = count;
      BuildProblem device = host;
      host.candidate_tokens = tokens.host.data(), device.candidate_tokens = tokens.device;
      host.candidate_parents = parents.host.data(), device.candidate_parents = parents.device;
      host.candidate_log_probs = log_probs.host.data(), device.candidate_log_probs = log_probs.device;
      expect_same_tree(host, device);
      host.method = device.method = BuildMethod::kChain;
      host.tokens = chain.host.data(), device.tokens = chain.device;
      expect_same_tree(host, device);
      host.method = device.method = BuildMethod::kParents;
      host.tokens = given_tokens.host.data(), device.tokens = given_tokens.device;
      host.parents = given.host.data(), device.parents = given.device;
      expect_same_tree(host, device);
    }
  }
}

TEST(GpuBuild, Beams) {
  SKIP_WITHOUT_GPU();
  for (const int vocab : {3, 1000, 50000}) {
    for (const int top_k : {1, 8, 64}) {
      SCOPED_TRACE(testing::Message() << "V " << vocab << ", top_k " << top_k);
      constexpr int kBatch = 3, kRows = 10;
      const Both<float> scores(random_scores<float>(static_cast<std::size_t>(kBatch * kRows * vocab), 8, 20));
      const Both<float> paths(random_scores<float>(kBatch * kRows, 9, 5));
      Both<int32_t> tokens(static_cast<std::size_t>(kBatch * kRows * top_k), -9),
          beam(static_cast<std::size_t>(kBatch * top_k), -9);
      Both<float> log_probs(tokens.host.size(), -9);
      BeamProblem host;
      host.b = kBatch;
      host.rows = kRows;
      host.top_k = top_k;
      host.scores = {scores.host.data(), DType::kF32, vocab};
      host.row_log_probs = paths.host.data();
      expand_beam(host, {tokens.host.data(), log_probs.host.data(), beam.host.data()});
      BeamProblem device = host;
      device.memory = Memory::kDevice;
      device.scores.data = scores.device;
      device.row_log_probs = paths.device;
      const Workspace workspace(beam_workspace_bytes(device));
      expand_beam(device, {tokens.device, log_probs.device, beam.device}, workspace.run);
      ASSERT_NO_THROW(check_tree_run(workspace.run, kBatch));
      EXPECT_TRUE(same("token_ids", tokens.download(), tokens.host));
      EXPECT_TRUE(same("log_probs", log_probs.download(), log_probs.host));
      EXPECT_TRUE(same("beam", beam.download(), beam.host));
    }
  }
}

TEST(GpuBuild, FaultsMakeARequestARootWithPadding) {
  SKIP_WITHOUT_GPU();
  Both<float> scores(random_scores<float>(3 * 2 * 100, 1, 3));
  scores.host[250] = std::nanf("");  // request 1, row 0
  scores.upload();
  Both<int32_t> prefix(Ints{0, 0, -4});
  BuildProblem p;
  p.b = 3;
  p.budget = 4;
  p.num_depths = 2;
  p.scores = {scores.device, DType::kF32, 100};
  p.prefix_len = prefix.device;
  p.memory = Memory::kDevice;
  TreeArrays arrays(3, 5);
  const Workspace workspace(build_workspace_bytes(p));
  build_tree(p, arrays.device(), workspace.run);
  EXPECT_THAT(error_of([&] { check_tree_run(workspace.run, 3); }),
              HasSubstr("scores of request 1, row 0, hold NaN"));
  EXPECT_THAT(arrays.num_nodes.download(), testing::ElementsAre(5, 1, 1));
  const Ints parents = arrays.parents.download();
  EXPECT_EQ(Ints(parents.begin() + 5, parents.begin() + 10), (Ints{-1, 0, 0, 0, 0}));
  scores.host[250] = 0;
  scores.upload();
  build_tree(p, arrays.device(), workspace.run);
  EXPECT_THAT(error_of([&] { check_tree_run(workspace.run, 3); }), HasSubstr("prefix_len[2] = -4"));
  EXPECT_THAT(error_of([&] { build_tree(p, arrays.device()); }), HasSubstr("workspace"));
}

// ---- accept ----

struct AcceptArrays {
  Both<int32_t> accept_index, num_accepted, bonus_token, predicts;
  int path_stride;
  AcceptArrays(int b, int64_t total_q, int stride)
      : accept_index(static_cast<std::size_t>(b) * static_cast<std::size_t>(stride), -77),
        num_accepted(static_cast<std::size_t>(b), -77),
        bonus_token(static_cast<std::size_t>(b), -77),
        predicts(static_cast<std::size_t>(total_q), -77),
        path_stride(stride) {}
  AcceptOutput host() {
    return {accept_index.host.data(), path_stride, num_accepted.host.data(), bonus_token.host.data(),
            predicts.host.data()};
  }
  AcceptOutput device() const {
    return {accept_index.device, path_stride, num_accepted.device, bonus_token.device, predicts.device};
  }
  void expect_same() const {
    EXPECT_TRUE(same("num_accepted", num_accepted.download(), num_accepted.host));
    EXPECT_TRUE(same("bonus_token", bonus_token.download(), bonus_token.host));
    EXPECT_TRUE(same("accept_index", accept_index.download(), accept_index.host));
    EXPECT_TRUE(same("predicts", predicts.download(), predicts.host));
  }
};

// A random batch of trees with logits near enough to the draft for paths of some length.
struct AcceptBatch {
  Both<int32_t> q_indptr, tokens, parents, next_token, next_sibling, argmax, top_k;
  Both<float> logits, draft, temperature, top_p, coins, final_coins;
  Both<uint16_t> halves;
  Both<uint64_t> seeds, offsets;
  int b, vocab;
  int64_t total_q;

  AcceptBatch(int b_, int most_nodes, int vocab_, uint32_t seed, bool small_alphabet) : b(b_), vocab(vocab_) {
    std::mt19937 rng(seed);
    const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    q_indptr.host = {0};
    for (int r = 0; r < b; ++r) {
      const int q_len = below(9) == 0 ? 0 : 1 + below(most_nodes);
      q_indptr.host.push_back(q_indptr.host.back() + q_len);
      Ints tree;
      for (int i = 0; i < q_len; ++i) tree.push_back(i == 0 ? -1 : below(std::min(i, 1 + i / 2)));
      const RetrieveLinks links = links_from_parents(tree);
      parents.host.insert(parents.host.end(), tree.begin(), tree.end());
      next_token.host.insert(next_token.host.end(), links.next_token.begin(), links.next_token.end());
      next_sibling.host.insert(next_sibling.host.end(), links.next_sibling.begin(), links.next_sibling.end());
      for (int i = 0; i < q_len; ++i) {
        tokens.host.push_back(below(small_alphabet ? 4 : vocab));
        argmax.host.push_back(below(small_alphabet ? 4 : vocab));
      }
      temperature.host.push_back(below(6) == 0 ? 0.0f : 0.25f * static_cast<float>(1 + below(6)));
      top_k.host.push_back(below(2) ? 0 : 1 + below(below(2) ? std::min(vocab, 70) : vocab + 3));
      top_p.host.push_back(below(2) ? 1.0f : 0.1f * static_cast<float>(1 + below(9)));
      seeds.host.push_back(hash(static_cast<uint64_t>(r) + 77));
      offsets.host.push_back(hash(static_cast<uint64_t>(r) + 99));
      final_coins.host.push_back(static_cast<float>(below(1 << 20)) / (1 << 20));
    }
    for (int padding = 0; padding < 3; ++padding)
      for (Both<int32_t>* a : {&tokens, &parents, &next_token, &next_sibling, &argmax})
        a->host.push_back(2147480000);
    total_q = static_cast<int64_t>(tokens.host.size());
    const std::size_t n = static_cast<std::size_t>(total_q) * static_cast<std::size_t>(vocab);
    logits.host = random_scores<float>(n, seed, 6);
    if (small_alphabet)
      for (std::size_t i = 0; i < n; ++i) logits.host[i] += static_cast<int>(i) % vocab < 4 ? 3.0f : 0.0f;
    draft.host.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      logits.host[i] = bf16_to_float(float_to_bf16(logits.host[i]));
      if (i % 31 == 0) logits.host[i] = -kInf;
      draft.host[i] =
          i % 13 == 0 ? 0.0f : std::exp(0.7f * std::max(logits.host[i], -9.0f)) / static_cast<float>(vocab);
      draft.host[i] = std::min(draft.host[i], 1.0f);
      halves.host.push_back(float_to_bf16(logits.host[i]));
    }
    for (int64_t i = 0; i < total_q; ++i) {
      logits.host[static_cast<std::size_t>(i * vocab + vocab / 2)] = 1;
      halves.host[static_cast<std::size_t>(i * vocab + vocab / 2)] = float_to_bf16(1);
      coins.host.push_back(static_cast<float>(below(1 << 20)) / (1 << 20));
    }
    for (auto* a : {&q_indptr, &tokens, &parents, &next_token, &next_sibling, &argmax, &top_k}) a->upload();
    for (auto* a : {&logits, &draft, &temperature, &top_p, &coins, &final_coins}) a->upload();
    halves.upload();
    seeds.upload();
    offsets.upload();
  }

  AcceptProblem problem(bool on_device, AcceptMethod method, bool links, bool from_logits, bool half,
                        bool by_coins) const {
    const auto at = [&](const auto& both) { return on_device ? both.device : both.host.data(); };
    AcceptProblem p;
    p.method = method;
    p.b = b;
    p.total_q = total_q;
    p.q_indptr = at(q_indptr);
    p.token_ids = at(tokens);
    if (links) {
      p.retrieve_next_token = at(next_token);
      p.retrieve_next_sibling = at(next_sibling);
    } else {
      p.parents = at(parents);
    }
    if (!from_logits) p.target_argmax = at(argmax);
    p.vocab = vocab;
    p.logits_dtype = half ? DType::kBF16 : DType::kF32;
    p.logits = half ? static_cast<const void*>(at(halves)) : at(logits);
    p.draft_probs = at(draft);
    p.temperature = at(temperature);
    p.top_k = at(top_k);
    p.top_p = at(top_p);
    p.seeds = at(seeds);
    p.offsets = at(offsets);
    if (by_coins) {
      p.coins = at(coins);
      p.final_coins = at(final_coins);
    }
    p.memory = on_device ? Memory::kDevice : Memory::kHost;
    return p;
  }

  void expect_same(AcceptMethod method, bool links, bool from_logits, bool half, bool by_coins,
                   int stride) const {
    SCOPED_TRACE(testing::Message() << "method " << static_cast<int>(method) << ", links " << links
                                    << ", logits " << from_logits << ", bf16 " << half << ", coins "
                                    << by_coins << ", stride " << stride);
    AcceptArrays arrays(b, total_q, stride);
    accept_path(problem(false, method, links, from_logits, half, by_coins), arrays.host());
    const AcceptProblem device = problem(true, method, links, from_logits, half, by_coins);
    const Workspace workspace(accept_workspace_bytes(device));
    accept_path(device, arrays.device(), workspace.run);
    ASSERT_NO_THROW(check_tree_run(workspace.run, b));
    arrays.expect_same();
  }
};

struct AcceptCase {
  int b, most_nodes, vocab;
};
void PrintTo(const AcceptCase& c, std::ostream* out) {
  *out << "b " << c.b << ", up to " << c.most_nodes << " nodes, V " << c.vocab;
}
class GpuAcceptSizes : public testing::TestWithParam<AcceptCase> {};
INSTANTIATE_TEST_SUITE_P(Cases, GpuAcceptSizes,
                         testing::Values(AcceptCase{1, 6, 10}, AcceptCase{64, 33, 40},
                                         AcceptCase{3000, 12, 9}, AcceptCase{7, 1025, 50},
                                         AcceptCase{2, 1500, 5}, AcceptCase{16, 20, 5000},
                                         AcceptCase{2, 9, 163840}));

TEST_P(GpuAcceptSizes, EqualsTheHost) {
  SKIP_WITHOUT_GPU();
  const AcceptCase& c = GetParam();
  const AcceptBatch batch(c.b, c.most_nodes, c.vocab, 17, true);
  for (const bool links : {true, false}) {
    batch.expect_same(AcceptMethod::kGreedy, links, false, false, false, 9);
    batch.expect_same(AcceptMethod::kGreedy, links, true, links, false, 1 + 3 * links);
    for (const AcceptMethod method :
         {AcceptMethod::kDeterministic, AcceptMethod::kIndependent, AcceptMethod::kWithoutReplacement}) {
      batch.expect_same(method, links, true, !links, false, 9);
      batch.expect_same(method, links, true, links, true, 3);
    }
  }
}

TEST(GpuAccept, TheGoldenVector) {
  SKIP_WITHOUT_GPU();
  const Both<int32_t> q_indptr(Ints{0, 6, 12}), tokens(Ints{0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12});
  const Both<int32_t> next_token(Ints{1, 2, -1, 4, 5, -1, 4, 2, 3, -1, 5, -1});
  const Both<int32_t> next_sibling(Ints{-1, 3, -1, -1, -1, -1, -1, -1, -1, -1, 1, -1});
  const Both<int32_t> argmax(Ints{3, 18, 18, 4, 5, 18, 11, 18, 18, 18, 12, 18});
  AcceptProblem p;
  p.b = 2;
  p.total_q = 12;
  p.q_indptr = q_indptr.device;
  p.token_ids = tokens.device;
  p.retrieve_next_token = next_token.device;
  p.retrieve_next_sibling = next_sibling.device;
  p.target_argmax = argmax.device;
  p.memory = Memory::kDevice;
  const AcceptArrays a(2, 12, 4);
  const Workspace workspace(accept_workspace_bytes(p));
  accept_path(p, a.device(), workspace.run);
  check_tree_run(workspace.run, 2);
  EXPECT_EQ(a.accept_index.download(), (Ints{0, 3, 4, 5, 6, 10, 11, -1}));
  EXPECT_EQ(a.num_accepted.download(), (Ints{3, 2}));
  EXPECT_EQ(a.predicts.download(), (Ints{3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18}));
}

TEST(GpuAccept, FaultsEndTheWalk) {
  SKIP_WITHOUT_GPU();
  const auto error_with = [](auto change, AcceptMethod method) {
    AcceptBatch batch(3, 12, 20, 21, true);
    for (uint32_t seed = 22; batch.q_indptr.host[1] < 4; ++seed) {
      batch.~AcceptBatch();
      new (&batch) AcceptBatch(3, 12, 20, seed, true);
    }
    change(batch);
    for (auto* a : {&batch.q_indptr, &batch.tokens, &batch.next_token, &batch.next_sibling, &batch.argmax})
      a->upload();
    batch.logits.upload();
    batch.draft.upload();
    batch.coins.upload();
    batch.temperature.upload();
    const AcceptProblem p = batch.problem(true, method, true, method != AcceptMethod::kGreedy, false, true);
    const AcceptArrays a(3, batch.total_q, 6);
    const Workspace workspace(accept_workspace_bytes(p));
    accept_path(p, a.device(), workspace.run);
    const std::string error = error_of([&] { check_tree_run(workspace.run, 3); });
    EXPECT_THAT(a.num_accepted.download(), testing::Contains(-1));
    return error;
  };
  const auto all = [](Both<int32_t>& a, int32_t value) { std::fill(a.host.begin(), a.host.end(), value); };
  constexpr AcceptMethod kGreedy = AcceptMethod::kGreedy, kIndependent = AcceptMethod::kIndependent;
  for (const AcceptMethod m : {kGreedy, kIndependent}) {
    EXPECT_THAT(error_with([&](AcceptBatch& b) { all(b.next_token, 2147480000); }, m),
                HasSubstr("a link of node 0"));
    EXPECT_THAT(error_with([&](AcceptBatch& b) { all(b.next_token, 0); }, m), HasSubstr("a link of node 0"));
    EXPECT_THAT(error_with(
                    [&](AcceptBatch& b) {  // node 1 is its own sibling, and never taken
                      all(b.next_token, 1);
                      all(b.next_sibling, 1);
                      all(b.tokens, -5);
                    },
                    m),
                HasSubstr("more children than there are nodes"));
    EXPECT_THAT(error_with([&](AcceptBatch& b) { b.q_indptr.host[1] = 2147480000; }, m),
                HasSubstr("q_indptr[1]"));
    EXPECT_THAT(error_with([&](AcceptBatch& b) { b.q_indptr.host[2] = -3; }, m), HasSubstr("q_indptr["));
  }
  EXPECT_THAT(error_with([&](AcceptBatch& b) { all(b.argmax, -1); }, kGreedy),
              HasSubstr("target_argmax of node 0"));
  EXPECT_THAT(error_with([](AcceptBatch& b) { b.logits.host[3] = std::nanf(""); }, kIndependent),
              HasSubstr("hold NaN"));
  EXPECT_THAT(error_with([](AcceptBatch& b) { b.draft.host[3] = -1; }, kIndependent),
              HasSubstr("draft_probs"));
  EXPECT_THAT(error_with([](AcceptBatch& b) { b.temperature.host.assign(3, kInf); }, kIndependent),
              HasSubstr("temperature["));
}

// ---- import ----

struct ImportBatchOf {
  int b, q_len, words;
  Both<int32_t> table, row_index, kv_len, pages;
  Both<int64_t> seq_len;
  Both<uint8_t> mask;
  Both<uint32_t> bits;
  ImportProblem host, device;

  ImportBatchOf(int b_, int q_len_, int64_t max_len, MaskLayout layout, uint32_t seed)
      : b(b_), q_len(q_len_), words(words_per_row(q_len_)) {
    std::mt19937 rng(seed);
    const int64_t width = max_len + q_len, rows = b + 3;
    for (int64_t i = 0; i < rows * width; ++i) table.host.push_back(static_cast<int32_t>(rng() >> 4));
    for (int r = 0; r < b; ++r) {
      row_index.host.push_back(static_cast<int32_t>(rng() % static_cast<unsigned>(rows)));
      seq_len.host.push_back(r < 2 ? r : static_cast<int64_t>(rng() % static_cast<unsigned>(max_len + 1)));
      const int64_t row = layout == MaskLayout::kFull ? seq_len.host.back() + q_len : q_len;
      for (int64_t i = 0; i < row * q_len; ++i)
        mask.host.push_back(rng() % 2 ? static_cast<uint8_t>(rng() | 1) : 0);
    }
    kv_len.host.assign(b, -9);
    pages.host.assign(b * width, -9);
    bits.host.assign(static_cast<std::size_t>(b) * q_len * words, 0xABu);
    for (auto* a : {&table, &row_index, &kv_len, &pages}) a->upload();
    seq_len.upload();
    mask.upload();
    bits.upload();
    host.b = b;
    host.q_len = q_len;
    host.num_rows = rows;
    host.row_width = width;
    host.seq_len_type = IndexType::kI64;
    host.mask_layout = layout;
    host.mask_len = static_cast<int64_t>(mask.host.size());
    device = host;
    device.memory = Memory::kDevice;
    host.token_table = table.host.data(), device.token_table = table.device;
    host.row_index = row_index.host.data(), device.row_index = row_index.device;
    host.seq_len = seq_len.host.data(), device.seq_len = seq_len.device;
    host.mask = mask.host.data(), device.mask = mask.device;
  }
  void run_both() {
    const Workspace workspace(import_workspace_bytes(device));
    import_batch(device, {kv_len.device, pages.device, host.row_width, bits.device, words}, workspace.run);
    ASSERT_NO_THROW(check_tree_run(workspace.run, b));
    import_batch(host, {kv_len.host.data(), pages.host.data(), host.row_width, bits.host.data(), words});
    EXPECT_TRUE(same("kv_len", kv_len.download(), kv_len.host));
    EXPECT_TRUE(same("page_table", pages.download(), pages.host));
    EXPECT_TRUE(same("ancestor_bits", bits.download(), bits.host));
  }
};

TEST(GpuImport, EqualsTheHost) {
  SKIP_WITHOUT_GPU();
  uint32_t seed = 1;
  for (const int b : {1, 5, 300}) {
    for (const int q_len : {1, 2, 9, 33, 64, 257}) {
      for (const MaskLayout layout : {MaskLayout::kNone, MaskLayout::kFull, MaskLayout::kQlenOnly}) {
        SCOPED_TRACE(testing::Message() << "seed " << seed << ", b " << b << ", q_len " << q_len
                                        << ", layout " << static_cast<int>(layout));
        ImportBatchOf batch(b, q_len, b > 5 ? 200 : 5000, layout, seed++);
        batch.run_both();
        batch.host.mask_len = batch.device.mask_len =
            batch.host.mask_len * 2 / 3;  // the last requests become padding
        batch.host.seq_len_has_tree = batch.device.seq_len_has_tree =
            seed % 2 == 0 && layout != MaskLayout::kFull;
        batch.run_both();
      }
    }
  }
}

TEST(GpuImport, FaultsLeaveARequestInert) {
  SKIP_WITHOUT_GPU();
  const auto error_with = [](auto change) {
    ImportBatchOf c(3, 9, 100, MaskLayout::kQlenOnly, 7);
    change(c);
    c.row_index.upload();
    c.seq_len.upload();
    const Workspace workspace(import_workspace_bytes(c.device));
    import_batch(c.device, {c.kv_len.device, c.pages.device, c.host.row_width, c.bits.device, c.words},
                 workspace.run);
    const std::string error = error_of([&] { check_tree_run(workspace.run, 3); });
    EXPECT_EQ(c.kv_len.download()[1], 0);
    EXPECT_EQ(c.kv_len.download()[0], 9);
    EXPECT_EQ(c.bits.download()[9], 0u);
    return error;
  };
  using C = ImportBatchOf;
  EXPECT_THAT(error_with([](C& c) { c.row_index.host[1] = 6; }), HasSubstr("row_index[1] = 6"));
  EXPECT_THAT(error_with([](C& c) { c.row_index.host[1] = -1; }), HasSubstr("row_index[1] = -1"));
  EXPECT_THAT(error_with([](C& c) { c.seq_len.host[1] = -5; }), HasSubstr("seq_len[1] = -5"));
  EXPECT_THAT(error_with([](C& c) { c.seq_len.host[1] = 101; }), HasSubstr("seq_len[1] = 101"));
  // In a full mask, whose requests lie where the lengths before them say.
  for (const int64_t length : {int64_t{1} << 59, std::numeric_limits<int64_t>::max(), int64_t{-1} << 62}) {
    ImportBatchOf c(3, 16, 100, MaskLayout::kFull, 8);
    c.seq_len.host[0] = length;
    c.seq_len.upload();
    const Workspace workspace(import_workspace_bytes(c.device));
    import_batch(c.device, {c.kv_len.device, c.pages.device, c.host.row_width, c.bits.device, c.words},
                 workspace.run);
    EXPECT_THAT(error_of([&] { check_tree_run(workspace.run, 3); }), HasSubstr("seq_len[0]"));
    EXPECT_EQ(c.kv_len.download()[0], 0);
  }
}

// ---- compact ----

struct CompactBatch {
  Both<unsigned char> pool;
  Both<int32_t> q_indptr, kv_len, accept_index, num_accepted, page_indptr, new_len, num_freed;
  Both<int64_t> entries, freed;
  std::vector<void*> device_layers;
  Both<void*> layers;
  CompactProblem host, device;

  CompactBatch(int b, int num_layers, int page_size, int64_t row_bytes, int most_nodes, uint32_t seed,
               bool by_pointers) {
    std::mt19937 rng(seed);
    const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    const int path_stride = 1 + below(most_nodes);
    q_indptr.host = page_indptr.host = {0};
    for (int r = 0; r < b; ++r) {
      const int q_len = below(9) == 0 ? 0 : 1 + below(most_nodes);
      const int len = below(9) == 0 ? 0 : q_len + below(60);
      q_indptr.host.push_back(q_indptr.host.back() + q_len);
      kv_len.host.push_back(len);
      page_indptr.host.push_back(page_indptr.host.back() + (len + page_size - 1) / page_size);
      Ints nodes(static_cast<std::size_t>(q_len));
      std::iota(nodes.begin(), nodes.end(), 0);
      if (q_len > 1) std::shuffle(nodes.begin() + 1, nodes.end(), rng);
      nodes.resize(static_cast<std::size_t>(std::min(q_len, 1 + below(path_stride))));
      std::sort(nodes.begin(), nodes.end());
      num_accepted.host.push_back(q_len == 0 ? 0 : static_cast<int>(nodes.size()) - 1);
      for (std::size_t j = 0; j < static_cast<std::size_t>(path_stride); ++j)
        accept_index.host.push_back(j < nodes.size() ? q_indptr.host[static_cast<std::size_t>(r)] + nodes[j]
                                                     : -1);
    }
    const int64_t pages = page_indptr.host.back(), num_pages = pages + 2;
    std::vector<int64_t> order(static_cast<std::size_t>(num_pages));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    entries.host.assign(order.begin(), order.begin() + pages);
    const int64_t layer_bytes = (num_pages * page_size * row_bytes + 255) / 256 * 256;
    pool.host.resize(static_cast<std::size_t>(num_layers * layer_bytes));
    for (auto& x : pool.host) x = static_cast<unsigned char>(rng());
    new_len.host.assign(static_cast<std::size_t>(b), -9);
    num_freed.host.assign(static_cast<std::size_t>(b), -9);
    freed.host.assign(static_cast<std::size_t>(q_indptr.host.back()), -9);
    for (auto* a : {&q_indptr, &kv_len, &accept_index, &num_accepted, &page_indptr, &new_len, &num_freed})
      a->upload();
    entries.upload();
    freed.upload();
    pool.upload();
    host.b = b;
    host.num_layers = num_layers;
    host.layer_stride_bytes = layer_bytes;
    host.row_bytes = row_bytes;
    host.num_pages = num_pages;
    host.page_size = page_size;
    host.total_q = q_indptr.host.back();
    host.path_stride = path_stride;
    host.pages = {entries.host.data(), IndexType::kI64, pages, page_indptr.host.data(), 0};
    device = host;
    device.memory = Memory::kDevice;
    device.pages.entries = entries.device;
    device.pages.indptr = page_indptr.device;
    host.pool = pool.host.data();
    host.q_indptr = q_indptr.host.data(), device.q_indptr = q_indptr.device;
    host.kv_len = kv_len.host.data(), device.kv_len = kv_len.device;
    host.accept_index = accept_index.host.data(), device.accept_index = accept_index.device;
    host.num_accepted = num_accepted.host.data(), device.num_accepted = num_accepted.device;
    if (by_pointers) {
      for (int layer = 0; layer < num_layers; ++layer)
        layers.host.push_back(pool.device + layer * layer_bytes);
      layers.upload();
      device.layers = layers.device;
    } else {
      device.pool = pool.device;
    }
  }
};

TEST(GpuCompact, EqualsTheHost) {
  SKIP_WITHOUT_GPU();
  uint32_t seed = 1;
  for (const int page_size : {1, 16, 64}) {
    for (const int64_t row_bytes : {1152, 656, 576, 2304, 36, 6, 7}) {
      for (const int most_nodes : {9, 65, 1025}) {
        for (const bool by_pointers : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << "seed " << seed << ", page_size " << page_size << ", row_bytes " << row_bytes
                       << ", nodes " << most_nodes << ", pointers " << by_pointers);
          CompactBatch c(6, 3, page_size, row_bytes, most_nodes, seed++, by_pointers);
          const Workspace workspace(compact_workspace_bytes(c.device));
          compact_cache(c.device, {c.new_len.device, c.freed.device, c.num_freed.device}, workspace.run);
          ASSERT_NO_THROW(check_tree_run(workspace.run, c.host.b));
          compact_cache(c.host, {c.new_len.host.data(), c.freed.host.data(), c.num_freed.host.data()});
          EXPECT_TRUE(c.pool.download() == c.pool.host);
          EXPECT_TRUE(same("kv_len", c.new_len.download(), c.new_len.host));
          EXPECT_TRUE(same("num_freed", c.num_freed.download(), c.num_freed.host));
          EXPECT_TRUE(same("freed_pages", c.freed.download(), c.freed.host));
        }
      }
    }
  }
}

TEST(GpuCompact, FaultsLeaveARequestAsItIs) {
  SKIP_WITHOUT_GPU();
  const auto error_with = [](auto change) {
    CompactBatch c(1, 3, 2, 64, 30, 4, true);
    for (uint32_t seed = 5;
         c.num_accepted.host[0] < 3 || c.kv_len.host[0] == 0 || c.accept_index.host[3] == 3; ++seed) {
      c.~CompactBatch();
      new (&c) CompactBatch(1, 3, 2, 64, 30, seed, true);
    }
    const auto before = c.pool.host;
    change(c);
    for (auto* a : {&c.q_indptr, &c.kv_len, &c.accept_index, &c.num_accepted, &c.page_indptr}) a->upload();
    c.entries.upload();
    c.layers.upload();
    const Workspace workspace(compact_workspace_bytes(c.device));
    compact_cache(c.device, {c.new_len.device, c.freed.device, c.num_freed.device}, workspace.run);
    const std::string error = error_of([&] { check_tree_run(workspace.run, 1); });
    if (error.find("layers[") == std::string::npos) {
      EXPECT_TRUE(c.pool.download() == before);
      EXPECT_EQ(c.num_freed.download()[0], 0);
    }
    return error;
  };
  using C = CompactBatch;
  EXPECT_THAT(error_with([](C& c) { c.accept_index.host[1] = c.accept_index.host[2]; }),
              HasSubstr("accept_index[0, 2]"));
  EXPECT_THAT(error_with([](C& c) { c.accept_index.host[2] = 2147483647; }), HasSubstr("accept_index[0, "));
  EXPECT_THAT(error_with([](C& c) { c.num_accepted.host[0] = 1000; }), HasSubstr("num_accepted[0] = 1000"));
  EXPECT_THAT(error_with([](C& c) { c.kv_len.host[0] = 1; }), HasSubstr("kv_len[0] = 1"));
  EXPECT_THAT(error_with([](C& c) { c.kv_len.host[0] = 100000; }), HasSubstr("page table of request 0"));
  EXPECT_THAT(error_with([](C& c) { c.page_indptr.host[0] = -1000; }), HasSubstr("page table of request 0"));
  EXPECT_THAT(error_with([](C& c) { c.entries.host.assign(c.entries.host.size(), 2147480000); }),
              HasSubstr("pages.entries"));
  EXPECT_THAT(error_with([](C& c) { c.layers.host[1] = nullptr; }), HasSubstr("layers[1]"));
  EXPECT_THAT(error_with([](C& c) { c.layers.host[2] = static_cast<char*>(c.layers.host[2]) + 8; }),
              HasSubstr("layers[2]"));
}

// ---- one graph for all contents ----

TEST(GpuTrees, OneGraphServesChangingContents) {
  SKIP_WITHOUT_GPU();
  AcceptBatch batch(16, 20, 300, 31, true);
  CompactBatch cache(16, 4, 1, 1152, 20, 32, false);
  constexpr int kDepths = 5, kVocab = 9000, kBudget = 19;
  Both<float> scores(random_scores<float>(16 * kDepths * kVocab, 1, 20));
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  BuildProblem build;
  build.b = 16;
  build.budget = kBudget;
  build.num_depths = kDepths;
  build.scores = {scores.device, DType::kF32, kVocab};
  build.memory = Memory::kDevice;
  const AcceptProblem accept = batch.problem(true, AcceptMethod::kIndependent, true, true, false, false);
  TreeArrays tree(16, kBudget + 1);
  AcceptArrays path(16, batch.total_q, 8);
  const Workspace w1(build_workspace_bytes(build), stream), w2(accept_workspace_bytes(accept), stream),
      w3(compact_workspace_bytes(cache.device), stream);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  build_tree(build, tree.device(), w1.run);
  accept_path(accept, path.device(), w2.run);
  compact_cache(cache.device, {cache.new_len.device, cache.freed.device, cache.num_freed.device}, w3.run);
  check_cuda(cudaStreamEndCapture(stream, &graph), "end capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (int round = 0; round < 3; ++round) {
    scores.host = random_scores<float>(scores.host.size(), 50 + static_cast<uint64_t>(round), 20);
    scores.upload();
    for (auto& s : batch.seeds.host) s = hash(s);
    batch.seeds.upload();
    check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    for (const Workspace* w : {&w1, &w2, &w3}) ASSERT_NO_THROW(check_tree_run(w->run, 16));
    BuildProblem host_build = build;
    host_build.memory = Memory::kHost;
    host_build.scores.data = scores.host.data();
    build_tree(host_build, tree.host());
    tree.expect_same();
    accept_path(batch.problem(false, AcceptMethod::kIndependent, true, true, false, false), path.host());
    path.expect_same();
    compact_cache(cache.host,
                  {cache.new_len.host.data(), cache.freed.host.data(), cache.num_freed.host.data()});
    EXPECT_TRUE(cache.pool.download() == cache.pool.host);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace treemla

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
