// Every CUDA backend against the float64 oracle, and the laws of the device-side plan. Skips, and passes, where there is no GPU.

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "api/expected.hpp"
#include "api/hosted.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/cuda_memory.hpp"
#include "backend/cuda/device_plan.hpp"
#include "backend/cuda/device_properties.hpp"
#include "conformance.hpp"
#include "core/convert.hpp"
#include "core/lookup.hpp"
#include "plan/cuda_tiles.hpp"
#include "treemla/error.hpp"

namespace treemla::test {
namespace {

using Floats = std::vector<float>;

// The recorded cases: where the build saw them, or wherever they were carried to.
std::string cases_dir() {
  const char* dir = std::getenv("TREEMLA_CASES_DIR");
  return dir ? dir : TREEMLA_CASES_DIR;
}

std::vector<std::string> cuda_backends() {
  std::vector<std::string> names;
  for (const Backend* b : backends())
    if (b->memory() == Memory::kDevice) names.emplace_back(b->name());
  return names;
}

// Tensor cores round weights to 16 bits: such backends take 16-bit caches only, and are judged by those bounds.
bool is_16_bit(const std::string& backend) {
  CaseSpec spec;
  spec.requests = {{1, 1}};
  spec.shape = {1, 512, 64};
  spec.q_dtype = spec.kv_dtype = DType::kF32;
  return !why_unsupported_hosted(backend, generate_case(spec).problem()).empty();
}
DType native_dtype(const std::string& backend) { return is_16_bit(backend) ? DType::kBF16 : DType::kF32; }
DType query_dtype(DType cache) { return is_fp8(cache) ? DType::kBF16 : cache; }
// Every cache dtype that the backend takes with queries of one of its own; at least two.
std::vector<DType> cache_dtypes(const std::string& backend) {
  std::vector<DType> dtypes;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3, DType::kF8E4M3Packed}) {
    CaseSpec spec;
    spec.requests = {{1, 1}};
    spec.shape = {1, 512, 64};
    spec.kv_dtype = dtype;
    spec.q_dtype = query_dtype(dtype);
    if (why_unsupported_hosted(backend, generate_case(spec).problem()).empty()) dtypes.push_back(dtype);
  }
  EXPECT_GE(dtypes.size(), 2u) << backend;
  return dtypes;
}
Comparison judge(Instance& instance, const std::string& backend) {
  return instance.judge(is_16_bit(backend) ? precision_of(instance.problem().q.dtype) : Precision::kF32);
}

// Cases and expected values once for all backends: the oracle is what takes the time.
struct Suite {
  std::vector<CaseParam> params;
  std::vector<std::unique_ptr<Instance>> instances;
  explicit Suite(std::vector<CaseParam> list) : params(std::move(list)) {
    for (const CaseParam& p : params) instances.push_back(std::make_unique<Instance>(p));
  }
};
Suite& smoke() {
  static Suite suite(smoke_cases());
  return suite;
}
Suite& corner() {
  static Suite suite(corner_cases());
  return suite;
}
Suite& random_suite() {
  static Suite suite(random_cases(60, 20260801));
  return suite;
}

// Hundreds of rows a request, of ragged lengths.
std::vector<CaseParam> many_rows_cases() {
  CaseSpec spec;
  spec.requests = {{400, 9}, {0, 5}, {0, 0}, {64, 33}, {130, 12}, {7, 1}};
  spec.shape = {100, 512, 64};
  std::vector<CaseParam> list = {{spec, {.out_dtype = DType::kBF16}, {}}};
  spec.q_dtype = spec.kv_dtype = DType::kF16;
  spec.page_size = 7;
  list.push_back({spec, {.block_table = true, .index_type = IndexType::kI64, .out_dtype = DType::kF16}, {}});
  spec.q_dtype = spec.kv_dtype = DType::kBF16;
  spec.gain = 30;  // maxima rise
  list.push_back({spec, {.ancestor_bits = true}, {}});
  spec.mask = MaskKind::kCausal;
  spec.shape.d_rope = 0;
  list.push_back({spec, {.strided = true}, {}});
  spec.mask = MaskKind::kNone;
  spec.gain = 0.01;
  list.push_back({spec, {}, {}});
  return list;
}
Suite& many_rows() {
  static Suite suite(many_rows_cases());
  return suite;
}
// A decoded token of 8 heads, with so many keys that every worker goes round its ring of tiles, of each kind of cache.
std::vector<CaseParam> many_keys_cases() {
  std::vector<CaseParam> list;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF8E4M3, DType::kF8E4M3Packed}) {
    CaseSpec spec;
    spec.requests.assign(20, {4000, 1});
    spec.shape = {8, 512, 64};
    spec.kv_dtype = dtype;
    spec.q_dtype = query_dtype(dtype);
    list.push_back({spec, {}, {}});
  }
  return list;
}
Suite& many_keys() {
  static Suite suite(many_keys_cases());
  return suite;
}
// How a backend plans a problem of host memory.
std::string description(const VerifyProblem& p, const RunOptions& options) {
  HostedProblem there(*find_backend(options.backend), p);
  Verifier verifier(options);
  verifier.plan(there.problem());
  return verifier.describe();
}
// Tests name shapes that instances of cuda_wgmma are chosen for by what they take on a card of so many multiprocessors.
bool chooses_as_on_h200(const std::string& backend) {
  return backend == "cuda_wgmma" && current_cuda_device().model.num_sms == 132;
}

struct Serving;
class CudaBackends : public testing::TestWithParam<std::string> {
 protected:
  void replay_one_graph(Serving s, int sets, DType out_dtype);
  void poison_tree_rows(DType dtype, int prefix, int nodes, int h_q);
  void run_suite(Suite& suite) {
    int run = 0, refused = 0;
    for (std::size_t i = 0; i < suite.params.size(); ++i) {
      Instance& instance = *suite.instances[i];
      SCOPED_TRACE(testing::Message() << suite.params[i]);
      RunOptions options = suite.params[i].options;
      options.backend = GetParam();
      const VerifyProblem p = instance.problem();
      if (!why_unsupported_hosted(GetParam(), p).empty()) {
        ++refused;
        continue;
      }
      ++run;
      instance.poison_output();
      ASSERT_NO_THROW(verify_hosted(p, instance.output(), options));
      const Comparison c = judge(instance, GetParam());
      EXPECT_TRUE(c.ok) << c.failure;
      const std::vector<unsigned char> first = instance.raw_out();
      const Floats first_lse = instance.lse();
      instance.poison_output();
      verify_hosted(p, instance.output(), options);
      EXPECT_EQ(first, instance.raw_out()) << "two runs differ";
      EXPECT_TRUE(same_bits(first_lse, instance.lse())) << "two runs differ in lse";
    }
    fmt::print("    {}: {} cases run, {} refused\n", GetParam(), run, refused);
    EXPECT_GT(run, 0);
  }
};
INSTANTIATE_TEST_SUITE_P(All, CudaBackends, testing::ValuesIn(cuda_backends()),
                         [](const auto& i) { return i.param; });

TEST_P(CudaBackends, Smoke) { run_suite(smoke()); }
TEST_P(CudaBackends, Corner) { run_suite(corner()); }
TEST_P(CudaBackends, Random) { run_suite(random_suite()); }

TEST_P(CudaBackends, ManyKeys) { run_suite(many_keys()); }

TEST_P(CudaBackends, HundredsOfRows) {
  if (chooses_as_on_h200(GetParam()))
    for (const auto& instance : many_rows().instances)
      for (const bool batch_invariant : {false, true}) {
        const std::string plan =
            description(instance->problem(), {.backend = GetParam(), .batch_invariant = batch_invariant});
        EXPECT_EQ(plan.find("rows as M") == std::string::npos, batch_invariant) << plan;
      }
  run_suite(many_rows());
}

TEST_P(CudaBackends, RefusesInterleavedCaches) {
  CaseSpec spec;
  spec.requests = {{1, 1}};
  spec.shape = {1, 512, 64};
  spec.q_dtype = spec.kv_dtype = DType::kBF16;
  const Case c = generate_case(spec);
  VerifyProblem p = c.problem();
  p.kv.layout = KvLayout::kInterleaved;
  const std::string why = why_unsupported_hosted(GetParam(), p);
  EXPECT_NE(why.find("kv.layout = interleaved"), std::string::npos) << why;
}

TEST_P(CudaBackends, RefusesQ8Caches) {
  CaseSpec spec;
  spec.requests = {{1, 1}};
  spec.shape = {1, 512, 64};
  spec.q_dtype = DType::kBF16;
  spec.kv_dtype = DType::kQ8;
  const std::string why = why_unsupported_hosted(GetParam(), generate_case(spec).problem());
  EXPECT_NE(why.find("q8_0 caches"), std::string::npos) << why;
}

TEST_P(CudaBackends, RecordedCases) {
  for (const auto& entry : std::filesystem::directory_iterator(cases_dir())) {
    if (entry.path().extension() != ".kdtr") continue;
    const Case c = read_case(entry.path().string());
    for (DType out : {DType::kF32, DType::kBF16}) {
      Instance instance(c, {.out_dtype = out});
      verify_hosted(instance.problem(), instance.output(), {.backend = GetParam()});
      const Comparison result = judge(instance, GetParam());
      EXPECT_TRUE(result.ok) << entry.path() << ": " << result.failure;
      fmt::print("    {} {} {}: rel {:.2e}, abs {:.2e}, lse {:.2e}, {:.0f}% of the bound\n",
                 entry.path().stem().string(), GetParam(), dtype_name(out), result.rel_fro, result.max_abs,
                 result.max_lse, 100 * result.max_out);
    }
  }
}

// Scores below 1 and rows scaled so that outputs are about 0.02, as they are by themselves at prefix 2048: every digit shows.
TEST_P(CudaBackends, NearUniform) {
  if (is_16_bit(GetParam())) GTEST_SKIP() << "weights of 16 bits";
  struct Shape {
    int h_q;
    std::vector<RequestSpec> requests;
  };
  const Shape shapes[] = {{64, {{512, 9}}},
                          {8, {{0, 9}}},
                          {16, {{2048, 17}}},
                          {64, {{2048, 9}}},
                          {64, {{128, 33}}},
                          {8, {{4096, 33}}},
                          {20, {{300, 4}, {63, 4}, {17, 4}}}};
  for (const Shape& s : shapes) {
    CaseSpec spec;
    spec.requests = s.requests;
    spec.shape = {s.h_q, 512, 64};
    spec.q_dtype = spec.kv_dtype = DType::kF32;
    const int64_t fewest = s.requests.back().prefix_len + 1;
    const double size = std::min(1.0, 0.02 * std::sqrt(static_cast<double>(fewest)));
    spec.kv_scale = 1 / size;  // stored rows are N(0, 1) * size ...
    spec.gain = 0.25 / size;
    Case generated = generate_case(spec);
    generated.kv_scale = 1;  // ... and are taken as they are
    add_expected(generated);
    Instance instance(generated, {});
    verify_hosted(instance.problem(), instance.output(), {.backend = GetParam()});
    const Comparison c = judge(instance, GetParam());
    EXPECT_TRUE(c.ok) << c.failure;
    fmt::print("    {} h_q {} prefix {}: worst error {:.2e}\n", GetParam(), s.h_q, s.requests[0].prefix_len,
               c.max_abs);
    EXPECT_LE(c.max_abs, 5e-8);
  }
}

// Sums over many keys keep their digits.
TEST_P(CudaBackends, LongPrefix) {
  static std::map<DType, std::unique_ptr<Instance>> instances;
  std::unique_ptr<Instance>& instance = instances[native_dtype(GetParam())];
  if (!instance) {
    CaseParam param;
    param.spec.requests = {{57000, 3}, {30000, 2}};
    param.spec.shape = {2, 512, 64};
    param.spec.q_dtype = param.spec.kv_dtype = native_dtype(GetParam());
    instance = std::make_unique<Instance>(param);
  }
  for (const bool batch_invariant : {false, true}) {
    instance->poison_output();
    verify_hosted(instance->problem(), instance->output(),
                  {.backend = GetParam(),
                   .batch_invariant = batch_invariant,
                   .split_keys = batch_invariant ? 1 << 20 : 0});
    const Comparison c = judge(*instance, GetParam());
    EXPECT_TRUE(c.ok) << c.failure;
    fmt::print("    {} {}: rel {:.2e}, abs {:.2e}, lse {:.2e}\n", GetParam(),
               batch_invariant ? "in one piece" : "split", c.rel_fro, c.max_abs, c.max_lse);
  }
}

// ---- the plan ----

// Device arrays of one lifetime.
class Arrays {
 public:
  template <class T>
  T* upload(const std::vector<T>& v) {
    T* p = static_cast<T*>(space_.allocate(v.size() * sizeof(T) + 1));
    blocks_.emplace_back(p, [](void* q) { cuda_memory().release(q); });
    space_.upload(p, v.data(), v.size() * sizeof(T), nullptr);
    space_.synchronize(nullptr);
    return p;
  }
  void* room(std::size_t bytes) { return upload(std::vector<char>(bytes, static_cast<char>(0xFF))); }

 private:
  const MemorySpace& space_ = cuda_memory();
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;
};

auto key(const WorkItem& i) {
  return std::tuple(i.worker, i.request, i.row_begin, i.row_end, i.key_begin, i.key_end, i.partial);
}

TEST(DevicePlan, EqualsTheHostPlanItemByItem) {
  std::mt19937_64 rng(1);
  int gangs = 0;  // plans of them
  const auto upto = [&](int64_t n) { return static_cast<int>(rng() % (n + 1)); };
  for (int round = 0; round < 300; ++round) {
    SplitParams s;
    s.tile.rows_per_tile = 1 + upto(upto(1) ? 3 : 100);
    s.tile.keys_per_tile = 1 + upto(upto(1) ? 3 : 100);
    s.tile.row_granularity = 1 + upto(15);
    s.tile.row_cost = upto(1) ? 0 : 1 + upto(5);
    s.tile.load_cost = (s.tile.row_cost == 0) + upto(50);
    s.tile.pair_cost = upto(200);
    s.h_q = 1 + upto(64);
    s.num_workers = 1 + upto(upto(1) ? 5 : 700);
    s.fixed_tiles = upto(2) ? 0 : 1 + upto(10);
    s.min_payload = upto(1) ? 0 : upto(5000);
    s.tile.merge_cost = upto(1) ? 0 : upto(20000);
    s.tile.piece_cost = upto(1) ? 0 : upto(100);
    s.tile.reread_percent = upto(1) ? 0 : upto(80);
    const bool many = round % 3 == 0;  // row tiles, of batches that gangs are for
    if (many) {
      s.tile.row_cost = s.fixed_tiles = 0;
      s.tile.load_cost = 1 + upto(50);
      s.tile.keys_per_tile = 16 + upto(48);
      s.tile.merge_cost = 1 + upto(1000);
      s.tile.reread_percent = 10 + upto(80);
      s.h_q = 64 + upto(64);
      s.tile.rows_per_tile = 16 + upto(100);
      s.num_workers = 1 + upto(300);
    }
    const int b = many ? 20 + upto(100) : upto(upto(1) ? 4 : 600);
    std::vector<int32_t> q_indptr{0}, q_len, kv_len;
    for (int r = 0; r < b; ++r) {
      const int q = upto(2) ? 1 + upto(20) : 0;
      q_len.push_back(q);
      q_indptr.push_back(q_indptr.back() + q);
      kv_len.push_back(upto(3) ? q + upto(upto(1) ? 10 : 5000) : 0);
    }
    const SplitPlan host = make_split_plan(s, q_len, kv_len);
    gangs += host.gang > 1;

    Arrays arrays;
    PlanArgs a;
    DevicePlanView& view = a.plan;
    view.params = s;
    view.num_slots = std::numeric_limits<int32_t>::max();
    a.b = b;
    a.total_q = q_indptr.back();
    a.q_indptr = arrays.upload(q_indptr);
    a.kv_len = arrays.upload(kv_len);
    a.page_stride = 10000;
    a.num_entries = 10000 * static_cast<int64_t>(b);
    a.num_pages = 1;
    a.max_q_len = a.max_kv_len = std::numeric_limits<int32_t>::max();
    view.header = static_cast<DevicePlanHeader*>(arrays.room(sizeof(DevicePlanHeader)));
    view.requests = static_cast<DeviceRequest*>(arrays.room(sizeof(DeviceRequest) * (b + 1)));
    view.workers = static_cast<WorkerItems*>(arrays.room(sizeof(WorkerItems) * s.num_workers));
    view.max_items = static_cast<int>(host.items.size());
    if (s.fixed_tiles == 0) {  // with gaps
      view.max_items = s.num_workers;
      for (int r = 0; r < b; ++r)
        view.max_items += kMostGangTiles * request_cost(s, q_len[r], kv_len[r]).row_tiles;
    }
    view.items = static_cast<CudaWorkItem*>(arrays.room(sizeof(CudaWorkItem) * (view.max_items + 1)));
    // Pieces of a row tile, by its first output row.
    std::map<int64_t, std::vector<int>> split;
    for (const WorkItem& item : host.items)
      if (item.partial >= 0)
        split[int64_t{q_indptr[item.request]} * s.h_q + item.row_begin].push_back(item.partial);
    view.max_merges = s.fixed_tiles > 0 ? static_cast<int>(split.size()) : s.num_workers;
    view.merges = static_cast<MergeTile*>(arrays.room(sizeof(MergeTile) * (view.max_merges + 1)));
    view.inert_nodes = static_cast<int*>(arrays.room(sizeof(int) * (a.total_q + 1)));
    launch_device_plan(a, nullptr);
    DevicePlanHeader header;
    check_cuda(cudaMemcpy(&header, view.header, sizeof header, cudaMemcpyDeviceToHost), "header");
    EXPECT_EQ(header.total_cost, host.total_cost);
    EXPECT_EQ(header.fault, kNoFault);

    ASSERT_EQ(header.num_merges, static_cast<int>(split.size())) << "round " << round;
    std::vector<MergeTile> merges(split.size());
    check_cuda(
        cudaMemcpy(merges.data(), view.merges, sizeof(MergeTile) * merges.size(), cudaMemcpyDeviceToHost),
        "merges");
    for (const MergeTile& m : merges) {
      const auto found = split.find(m.row);
      ASSERT_NE(found, split.end()) << "round " << round << " row " << m.row;
      std::vector<int> slots;
      for (int j = 0; j < m.slots.count; ++j) slots.push_back(m.slots.slot(j));
      std::sort(found->second.begin(), found->second.end());
      std::sort(slots.begin(), slots.end());
      ASSERT_EQ(slots, found->second) << "round " << round << " row " << m.row;
      split.erase(found);
    }
    std::vector<int> inert(header.num_inert), expected_inert;
    check_cuda(cudaMemcpy(inert.data(), view.inert_nodes, sizeof(int) * inert.size(), cudaMemcpyDeviceToHost),
               "inert nodes");
    std::sort(inert.begin(), inert.end());
    for (int r = 0; r < b; ++r)
      for (int node = q_indptr[r]; kv_len[r] == 0 && node < q_indptr[r + 1]; ++node)
        expected_inert.push_back(node);
    ASSERT_EQ(inert, expected_inert) << "round " << round;

    std::size_t most = 1;
    for (int w = 0; w < s.num_workers; ++w)
      most = std::max<std::size_t>(most, host.worker_indptr[w + 1] - host.worker_indptr[w]);
    const std::vector<WorkItem> items = list_device_items(view, static_cast<int>(most) + 1, nullptr);
    ASSERT_EQ(items.size(), host.items.size()) << "round " << round;
    for (std::size_t i = 0; i < items.size(); ++i)
      ASSERT_EQ(key(items[i]), key(host.items[i])) << "round " << round << " item " << i;
  }
  EXPECT_GT(gangs, 10);
}

// ---- captured graphs ----

// A batch with room for any lengths: fixed total_q, b and block table; lengths drawn anew each time.
struct Serving {
  static constexpr int kRequests = 6, kTotalQ = 60, kStride = 700, kPool = 4096;
  MlaShape shape;
  DType dtype;
  std::vector<unsigned char> q, kv;
  std::vector<int32_t> q_indptr = std::vector<int32_t>(kRequests + 1),
                       kv_len = std::vector<int32_t>(kRequests), parents, entries;

  Serving(uint64_t seed, DType type, int h_q = 5)
      : shape{h_q, 512, 64}, dtype(type), entries(kRequests * kStride, 2147480000) {
    q.resize(static_cast<std::size_t>(kTotalQ) * shape.h_q * shape.d_qk() * dtype_bytes(query_dtype(dtype)));
    for (int64_t i = 0; i < int64_t{kTotalQ} * shape.h_q * shape.d_qk(); ++i)
      store_element(q.data(), query_dtype(dtype), i, counter_normal(seed, static_cast<uint64_t>(i)));
    CaseSpec spec;  // its pool serves as ours
    spec.requests = {{kPool, 1}};
    spec.shape = {1, shape.d_v, shape.d_rope};
    spec.kv_dtype = dtype;
    spec.q_dtype = query_dtype(dtype);
    spec.seed = seed + 1;
    const Case c = generate_case(spec);
    const VerifyProblem p = c.problem();
    const int64_t row_bytes = kv_row_stride(p) * static_cast<int64_t>(dtype_bytes(dtype));
    for (int t = 0; t < kPool; ++t) {
      const char* row = static_cast<const char*>(p.kv.data) +
                        pool_row(p.pages, p.kv.page_size, page_base(p.pages, 0), t) * row_bytes;
      kv.insert(kv.end(), row, row + row_bytes);
    }
    draw(seed);
  }

  void draw(uint64_t seed) {
    std::mt19937_64 rng(seed);
    parents.assign(kTotalQ, 12345);  // what nobody owns is garbage
    std::fill(entries.begin(), entries.end(), 2147480000);
    for (int r = 0; r < kRequests; ++r) {
      const int room = std::min(33, kTotalQ - q_indptr[r]);
      const int q_len = rng() % 4 == 0 ? 0 : static_cast<int>(rng() % (room + 1));
      q_indptr[r + 1] = q_indptr[r] + q_len;
      kv_len[r] = rng() % 5 == 0 ? 0 : q_len + static_cast<int>(rng() % 600);
      const auto tree = make_tree(TreeKind::kRandom, q_len, rng());
      std::copy(tree.begin(), tree.end(), parents.begin() + q_indptr[r]);
      for (int t = 0; t < kv_len[r]; ++t) entries[r * kStride + t] = static_cast<int32_t>(rng() % kPool);
    }
  }

  VerifyProblem problem(int64_t total_q) const {
    VerifyProblem p;
    p.shape = shape;
    p.b = kRequests;
    p.q = {q.data(), query_dtype(dtype), total_q, 0, 0};
    p.kv = {kv.data(), dtype, kPool, 1, 0, 1.0};
    p.pages = {entries.data(), IndexType::kI32, static_cast<int64_t>(entries.size()), nullptr, kStride};
    p.q_indptr = q_indptr.data();
    p.kv_len = kv_len.data();
    p.mask.kind = MaskKind::kTree;
    p.mask.parents = parents.data();
    p.sm_scale = 0.1447;
    p.max_q_len = 33;
    p.max_kv_len = 640;
    return p;
  }
};

TEST_P(CudaBackends, OneGraphServesManyLengths) {
  for (const DType dtype : cache_dtypes(GetParam())) {
    SCOPED_TRACE(dtype_name(dtype));
    replay_one_graph(Serving(100, dtype), 50, DType::kF32);
  }
}
// Sizes at which cuda_wgmma takes two CTAs a worker on a card of 132 SMs; other backends have 66 row tiles of 79 heads all the same.
TEST_P(CudaBackends, OneGraphServesManyLengthsOfManyHeads) {
  const DType dtype = native_dtype(GetParam());
  const Serving s(100, dtype, 79);
  if (chooses_as_on_h200(GetParam())) {
    const std::string plan = description(s.problem(Serving::kTotalQ), {.backend = GetParam()});
    EXPECT_NE(plan.find("66 workers of 2 blocks"), std::string::npos) << plan;
  }
  replay_one_graph(s, 4, dtype);
}
// And at which it has rows as M.
TEST_P(CudaBackends, OneGraphServesManyLengthsOfHundredsOfRows) {
  const DType dtype = native_dtype(GetParam());
  const Serving s(200, dtype, 100);
  if (chooses_as_on_h200(GetParam())) {
    const std::string plan = description(s.problem(Serving::kTotalQ), {.backend = GetParam()});
    EXPECT_NE(plan.find("rows as M"), std::string::npos) << plan;
  }
  replay_one_graph(s, 4, dtype);
}
// With outputs of out_dtype.
void CudaBackends::replay_one_graph(Serving s, int sets, DType out_dtype) {
  const Backend& backend = *find_backend(GetParam());
  const MemorySpace& space = cuda_memory();
  cudaStream_t stream = static_cast<cudaStream_t>(space.make_stream());
  for (const bool batch_invariant : {false, true}) {
    s.q_indptr[0] = 0;
    HostedProblem there(backend, s.problem(Serving::kTotalQ));
    const std::size_t rows = static_cast<std::size_t>(Serving::kTotalQ) * s.shape.h_q;
    Floats out(rows * s.shape.d_v), lse(rows);
    std::vector<unsigned char> raw_out(out.size() * dtype_bytes(out_dtype));
    const auto poison = [&] {
      std::fill(raw_out.begin(), raw_out.end(), 0xFF);  // NaN in every dtype
      std::fill(lse.begin(), lse.end(), std::nanf(""));
    };
    poison();
    HostedOutput output(backend, there.problem(), {raw_out.data(), out_dtype, lse.data()});
    Verifier verifier({.backend = GetParam(),
                       .batch_invariant = batch_invariant,
                       .split_keys = batch_invariant ? 128 : 0,
                       .stream = stream});
    verifier.plan(there.problem());
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    verifier.update(there.problem());
    verifier.run(there.problem(), output.output());
    check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    for (int set = 0; set < sets; ++set) {
      s.draw(1000 + set);
      there.refresh(s.problem(Serving::kTotalQ), stream);
      poison();
      output.fill(stream);
      check_cuda(cudaGraphLaunch(exec, stream), "replay");
      output.fetch(stream);
      ASSERT_NO_THROW(verifier.check_device()) << "set " << set;
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = load_element(raw_out.data(), out_dtype, static_cast<int64_t>(i));

      const int used = s.q_indptr.back();
      Floats expected(static_cast<std::size_t>(used) * s.shape.h_q * s.shape.d_v),
          expected_lse(static_cast<std::size_t>(used) * s.shape.h_q);
      verify(s.problem(used), {expected.data(), DType::kF32, expected_lse.data()}, {.backend = "cpu_oracle"});
      const Comparison c =
          compare(s.shape, used, out.data(), expected.data(), lse.data(), expected_lse.data(),
                  is_16_bit(GetParam()) ? precision_of(query_dtype(s.dtype)) : Precision::kF32);
      ASSERT_TRUE(c.ok) << "set " << set << ": " << c.failure;
      for (std::size_t i = expected.size(); i < out.size(); ++i)
        ASSERT_EQ(out[i], 0.0f) << "set " << set << ": a padded row";
      for (std::size_t i = expected_lse.size(); i < lse.size(); ++i)
        ASSERT_EQ(lse[i], -std::numeric_limits<float>::infinity());
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  space.release_stream(stream);
}

// ---- packed rows ----

// A group of zeros is often given a scale of 0; none may reach another group, nor any other row.
TEST_P(CudaBackends, PackedScalesMayBeZeroOrFarApart) {
  const DType dtype = DType::kF8E4M3Packed;
  for (const int h_q : {1, 8, 5, 16}) {
    Serving s(300 + h_q, dtype, h_q);
    if (!why_unsupported_hosted(GetParam(), s.problem(s.q_indptr.back())).empty()) GTEST_SKIP();
    std::mt19937_64 rng(7);
    const std::size_t row_bytes = s.kv.size() / Serving::kPool;
    for (int row = 0; row < Serving::kPool; ++row)
      for (int g = 0; g < 4; ++g) {
        float* scale = reinterpret_cast<float*>(s.kv.data() + row * row_bytes + s.shape.d_v) + g;
        const auto kind = rng() % 6;
        if (kind < 3) *scale = kind == 0 ? 0.0f : kind == 1 ? *scale * 1e-30f : *scale * 1e-6f;
      }
    const int used = s.q_indptr.back();
    const std::size_t rows = static_cast<std::size_t>(used) * s.shape.h_q;
    Floats out(rows * s.shape.d_v, std::nanf("")), lse(rows, std::nanf("")), expected(out.size()),
        expected_lse(rows);
    verify_hosted(s.problem(used), {out.data(), DType::kF32, lse.data()}, {.backend = GetParam()});
    verify(s.problem(used), {expected.data(), DType::kF32, expected_lse.data()}, {.backend = "cpu_oracle"});
    const Comparison c = compare(s.shape, used, out.data(), expected.data(), lse.data(), expected_lse.data(),
                                 is_16_bit(GetParam()) ? Precision::kBF16 : Precision::kF32);
    EXPECT_TRUE(c.ok) << "h_q " << h_q << ": " << c.failure;
  }
}

// ---- scores of -inf ----

// Keys that are seen, but have no weight: the output is 0, though they hold infinity, and lse -inf.
TEST_P(CudaBackends, KeysWithoutWeightLeaveZero) {
  for (const int h_q : {8, 128}) {
    CaseSpec spec;
    spec.requests = {{300, 1}, {40, 9}, {700, 9}};
    spec.shape = {h_q, 512, 64};
    spec.q_dtype = spec.kv_dtype = native_dtype(GetParam());
    const Case c = generate_case(spec);
    VerifyProblem p = c.problem();
    if (!why_unsupported_hosted(GetParam(), p).empty()) GTEST_SKIP();
    const auto bytes = [](const void* from, int64_t elements, DType dtype) {
      const auto* b = static_cast<const unsigned char*>(from);
      return std::vector<unsigned char>(b, b + elements * static_cast<int64_t>(dtype_bytes(dtype)));
    };
    const int64_t q_rows = p.q.total_q * h_q, keys = p.kv.num_pages * p.kv.page_size;
    std::vector<unsigned char> q = bytes(p.q.data, q_rows * p.shape.d_qk(), p.q.dtype),
                               kv = bytes(p.kv.data, keys * kv_row_stride(p), p.kv.dtype);
    for (int64_t row = 0; row < q_rows; ++row)
      store_element(q.data(), p.q.dtype, row * p.shape.d_qk() + 300, -1);
    for (int64_t row = 0; row < keys; ++row)
      store_element(kv.data(), p.kv.dtype, row * kv_row_stride(p) + 300,
                    std::numeric_limits<float>::infinity());
    p.q.data = q.data();
    p.kv.data = kv.data();
    Floats out(static_cast<std::size_t>(q_rows * p.shape.d_v), std::nanf("")),
        lse(static_cast<std::size_t>(q_rows), std::nanf(""));
    verify_hosted(p, {out.data(), DType::kF32, lse.data()}, {.backend = GetParam()});
    EXPECT_EQ(std::count(out.begin(), out.end(), 0.0f), static_cast<int64_t>(out.size())) << "h_q " << h_q;
    EXPECT_EQ(std::count(lse.begin(), lse.end(), -std::numeric_limits<float>::infinity()), q_rows);
  }
}

// ---- batch invariance ----

// Rows of a request of a generated case, alone.
struct Alone {
  std::vector<int32_t> q_indptr, kv_len, parents, entries, indptr;
  VerifyProblem problem;
  Alone(const VerifyProblem& p, int r, int first, int count, MaskKind kind) : problem(p) {
    const int q_begin = p.q_indptr[r], q_len = p.q_indptr[r + 1] - q_begin, prefix = p.kv_len[r] - q_len;
    q_indptr = {0, count};
    kv_len = {prefix + first + count};
    for (int t = 0; t < kv_len[0]; ++t)
      entries.push_back(static_cast<int32_t>(pool_row(p.pages, p.kv.page_size, page_base(p.pages, r), t)));
    indptr = {0, kv_len[0]};
    if (kind == MaskKind::kTree) parents.assign(p.mask.parents + q_begin, p.mask.parents + q_begin + count);
    problem.b = 1;
    problem.q.data = static_cast<const char*>(p.q.data) +
                     (q_begin + first) * q_token_stride(p) * static_cast<int64_t>(dtype_bytes(p.q.dtype));
    problem.q.total_q = count;
    problem.kv.num_pages = p.kv.num_pages * p.kv.page_size;
    problem.kv.page_size = 1;
    problem.pages = {entries.data(), IndexType::kI32, static_cast<int64_t>(entries.size()), indptr.data(), 0};
    problem.q_indptr = q_indptr.data();
    problem.kv_len = kv_len.data();
    problem.mask = {};
    problem.mask.kind = kind;
    problem.mask.parents = kind == MaskKind::kTree ? parents.data() : nullptr;
  }
};

struct Rows {
  Floats out, lse;
  Rows(const VerifyProblem& p, const RunOptions& options)
      : out(p.q.total_q * p.shape.h_q * p.shape.d_v), lse(p.q.total_q * p.shape.h_q) {
    verify_hosted(p, {out.data(), DType::kF32, lse.data()}, options);
  }
  // Of `count` nodes from `first` on.
  Floats nodes(const MlaShape& s, int first, int count) const {
    Floats f(out.begin() + static_cast<int64_t>(first) * s.h_q * s.d_v,
             out.begin() + static_cast<int64_t>(first + count) * s.h_q * s.d_v);
    f.insert(f.end(), lse.begin() + static_cast<int64_t>(first) * s.h_q,
             lse.begin() + static_cast<int64_t>(first + count) * s.h_q);
    return f;
  }
};

TEST_P(CudaBackends, BatchInvariant) {
  for (const int split : {96, 256, 1024}) {
    RunOptions options{.backend = GetParam(), .batch_invariant = true, .split_keys = split};
    for (const TreeKind tree : {TreeKind::kRandom, TreeKind::kChain}) {
      CaseSpec spec;
      spec.requests = {{900, 9}, {0, 0}, {77, 33}, {2000, 5}, {0, 7}};
      spec.shape = {6, 512, 64};
      spec.page_size = 4;
      spec.tree = tree;
      const Case c = generate_case(spec);
      const VerifyProblem p = c.problem();
      const Rows batch(p, options);
      for (int r = 0; r < p.b; ++r) {
        const int begin = p.q_indptr[r], q_len = p.q_indptr[r + 1] - begin;
        if (q_len == 0) continue;
        const Alone alone(p, r, 0, q_len, MaskKind::kTree);
        EXPECT_TRUE(same_bits(Rows(alone.problem, options).nodes(p.shape, 0, q_len),
                              batch.nodes(p.shape, begin, q_len)))
            << "request " << r << " alone, split " << split;
        if (tree != TreeKind::kChain) continue;
        for (int i = 0; i < q_len; ++i) {
          const Alone one(p, r, i, 1, MaskKind::kCausal);
          ASSERT_TRUE(
              same_bits(Rows(one.problem, options).nodes(p.shape, 0, 1), batch.nodes(p.shape, begin + i, 1)))
              << "request " << r << " token " << i << " by itself, split " << split;
        }
      }
    }
  }
}

// ---- poison and lies ----

void CudaBackends::poison_tree_rows(DType dtype, int prefix, int nodes, int h_q) {
  SCOPED_TRACE(dtype_name(dtype));
  CaseSpec spec;
  spec.requests = {{prefix, nodes}};
  spec.shape = {h_q, 512, 64};
  spec.kv_dtype = dtype;
  spec.q_dtype = query_dtype(dtype);
  const Case c = generate_case(spec);
  VerifyProblem p = c.problem();
  const Rows clean(p, {.backend = GetParam()});
  const int64_t row_bytes = kv_row_stride(p) * static_cast<int64_t>(dtype_bytes(p.kv.dtype));
  std::vector<unsigned char> kv(static_cast<std::size_t>(p.kv.num_pages * p.kv.page_size * row_bytes));
  std::memcpy(kv.data(), p.kv.data, kv.size());
  p.kv.data = kv.data();
  for (const int poisoned : {3, 11, 20}) {
    const int64_t row = pool_row(p.pages, p.kv.page_size, page_base(p.pages, 0), prefix + poisoned);
    unsigned char* const at = kv.data() + row * row_bytes;
    const std::vector<unsigned char> saved(at, at + row_bytes);
    for (const bool whole : {true, false}) {
      if (whole)
        std::memset(at, 0xFF, static_cast<std::size_t>(row_bytes));  // NaN in every dtype
      else if (is_fp8(dtype))
        at[300] = 0x7F;
      else
        store_element(at, dtype, 300, std::numeric_limits<float>::infinity());
      const Rows dirty(p, {.backend = GetParam()});
      for (int i = 0; i < nodes; ++i) {
        bool descends = false;
        for (int j = i; j >= 0; j = p.mask.parents[j]) descends |= j == poisoned;
        if (!descends) {
          EXPECT_TRUE(same_bits(clean.nodes(p.shape, i, 1), dirty.nodes(p.shape, i, 1)))
              << "node " << i << " does not see node " << poisoned << (whole ? "" : ", one number of it");
        } else if (whole) {
          EXPECT_TRUE(std::isnan(dirty.nodes(p.shape, i, 1)[0])) << "node " << i << " sees node " << poisoned;
        }
      }
      std::copy(saved.begin(), saved.end(), at);
    }
  }
}
TEST_P(CudaBackends, NanOfATreeRowReachesOnlyItsDescendants) {
  for (const DType dtype : cache_dtypes(GetParam())) poison_tree_rows(dtype, 130, 21, 9);
}
// Of hundreds of rows a request, which cuda_wgmma has as M.
TEST_P(CudaBackends, NanOfATreeRowReachesOnlyItsDescendantsOfManyHeads) {
  poison_tree_rows(native_dtype(GetParam()), 530, 40, 128);
}

// Slots near the end of a pool of more than 2^31 elements, everything else NaN, against the same rows in a small pool.
TEST_P(CudaBackends, PoolBeyond2To31Elements) {
  for (const DType dtype : cache_dtypes(GetParam())) {
    SCOPED_TRACE(dtype_name(dtype));
    CaseSpec spec;
    spec.requests = {{600, 9}};
    spec.shape = {8, 512, 64};
    spec.kv_dtype = dtype;
    spec.q_dtype = query_dtype(dtype);
    const Case c = generate_case(spec);
    const VerifyProblem small = c.problem();
    const Rows expected(small, {.backend = GetParam()});

    const int64_t row_bytes = kv_row_stride(small) * static_cast<int64_t>(dtype_bytes(dtype)),
                  rows = (int64_t{1} << 31) / kv_row_stride(small) + 5000;
    std::size_t available = 0, total = 0;
    check_cuda(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    if (available < static_cast<std::size_t>(rows * row_bytes) + (std::size_t{1} << 28))
      GTEST_SKIP() << "too little device memory";
    void* pool = nullptr;
    check_cuda(cudaMalloc(&pool, static_cast<std::size_t>(rows * row_bytes)), "cudaMalloc");
    check_cuda(cudaMemset(pool, 0xFF, static_cast<std::size_t>(rows * row_bytes)), "cudaMemset");
    std::vector<int32_t> entries(static_cast<std::size_t>(small.kv_len[0]));
    for (std::size_t t = 0; t < entries.size(); ++t) {
      entries[t] = static_cast<int32_t>(rows - 1 - 7 * static_cast<int64_t>(t));
      const int64_t from =
          pool_row(small.pages, small.kv.page_size, page_base(small.pages, 0), static_cast<int>(t));
      check_cuda(cudaMemcpy(static_cast<char*>(pool) + entries[t] * row_bytes,
                            static_cast<const char*>(small.kv.data) + from * row_bytes,
                            static_cast<std::size_t>(row_bytes), cudaMemcpyHostToDevice),
                 "cudaMemcpy");
    }
    VerifyProblem large = small;
    large.kv.num_pages = small.kv.num_pages * small.kv.page_size;
    large.kv.page_size = 1;
    const std::vector<int32_t> indptr = {0, small.kv_len[0]};
    std::vector<int32_t> placeholder(entries.size(), 0);
    large.pages = {placeholder.data(), IndexType::kI32, static_cast<int64_t>(entries.size()), indptr.data(),
                   0};
    HostedProblem there(*find_backend(GetParam()), large);
    VerifyProblem p = there.problem();
    Arrays arrays;
    p.kv.data = pool;
    p.kv.num_pages = rows;
    p.pages.entries = arrays.upload(entries);
    Floats out(expected.out.size(), std::nanf("")), lse(expected.lse.size(), std::nanf(""));
    HostedOutput output(*find_backend(GetParam()), p, {out.data(), DType::kF32, lse.data()});
    verify(p, output.output(), {.backend = GetParam()});
    output.fetch();
    EXPECT_TRUE(same_bits(out, expected.out));
    EXPECT_TRUE(same_bits(lse, expected.lse));
    check_cuda(cudaFree(pool), "cudaFree");
  }
}

// Lengths, tables and parents full of garbage: nothing crashes or is read out of bounds (run this under compute-sanitizer), every row
// is written, and check_device() says what was wrong.
TEST_P(CudaBackends, GarbageIsHarmless) {
  Serving s(7, native_dtype(GetParam()));
  const Backend& backend = *find_backend(GetParam());
  std::mt19937_64 rng(5);
  const int32_t wild[] = {-1, -2147483647 - 1, 2147483647, 61, 1 << 20, -77, 100000, 0};
  for (const bool batch_invariant : {false, true}) {
    for (int round = 0; round < 40; ++round) {
      s.q_indptr[0] = 0;
      s.draw(rng());
      HostedProblem there(backend, s.problem(Serving::kTotalQ));
      Serving bad = s;
      const auto spoil = [&](std::vector<int32_t>& v, int times) {
        for (int i = 0; i < times; ++i) v[rng() % v.size()] = wild[rng() % std::size(wild)];
      };
      switch (round % 4) {
        case 0:
          spoil(bad.q_indptr, 3);
          break;
        case 1:
          spoil(bad.kv_len, 3);
          break;
        case 2:
          spoil(bad.parents, 20);
          break;
        case 3:
          spoil(bad.entries, 2000);
          break;
      }
      there.refresh(bad.problem(Serving::kTotalQ));
      const std::size_t rows = static_cast<std::size_t>(Serving::kTotalQ) * s.shape.h_q;
      Floats out(rows * s.shape.d_v, std::nanf("")), lse(rows, 777.0f);
      HostedOutput output(backend, there.problem(), {out.data(), DType::kF32, lse.data()});
      Verifier verifier({.backend = GetParam(),
                         .batch_invariant = batch_invariant,
                         .split_keys = batch_invariant ? 128 : 0});
      verifier.plan(there.problem());
      verifier.run(there.problem(), output.output());
      output.fetch();
      try {
        verifier.check_device();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument) << e.what();
      }
    }
  }
}

TEST(DeviceCheck, NamesWhatIsWrong) {
  Serving s(21, native_dtype(cuda_backends().front()));
  s.q_indptr = {0, 9, 9, 20, 30, 40, 60};
  s.kv_len = {100, 0, 64, 300, 10, 20};
  for (int r = 0; r < Serving::kRequests; ++r) {
    const auto tree = make_tree(TreeKind::kRandom, s.q_indptr[r + 1] - s.q_indptr[r], 3);
    std::copy(tree.begin(), tree.end(), s.parents.begin() + s.q_indptr[r]);
    for (int t = 0; t < s.kv_len[r]; ++t) s.entries[r * Serving::kStride + t] = t;
  }
  const Backend& backend = *find_backend(cuda_backends().front());
  HostedProblem there(backend, s.problem(Serving::kTotalQ));
  EXPECT_NO_THROW(check_device_problem(there.problem()));
  const auto expect = [&](const std::string& argument, const std::string& words, const auto& spoil) {
    Serving bad = s;
    spoil(bad);
    there.refresh(bad.problem(Serving::kTotalQ));
    try {
      check_device_problem(there.problem());
      ADD_FAILURE() << argument << ": accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.argument(), argument) << e.what();
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  expect("q_indptr", "q_indptr[3]", [](Serving& b) { b.q_indptr[3] = 61; });
  expect("q_indptr", "q_indptr[0]", [](Serving& b) { b.q_indptr[0] = 1; });
  expect("kv_len", "kv_len[4]", [](Serving& b) { b.kv_len[4] = 9; });
  expect("kv_len", "kv_len[0]", [](Serving& b) { b.kv_len[0] = -5; });
  expect("max_kv_len", "kv_len[3] = 641", [](Serving& b) { b.kv_len[3] = 641; });
  expect("pages.entries", "entry 7 of request 2",
         [](Serving& b) { b.entries[2 * Serving::kStride + 7] = Serving::kPool; });
  expect("pages.entries", "entry 0 of request 5", [](Serving& b) { b.entries[5 * Serving::kStride] = -1; });
  expect("mask.parents", "node 3 of request 4", [](Serving& b) { b.parents[33] = 3; });
  expect("mask.parents", "node 0 of request 2", [](Serving& b) { b.parents[9] = 0; });
}

}  // namespace
}  // namespace treemla::test

int main(int argc, char** argv) {
  const treemla::CudaDevice& device = treemla::current_cuda_device();
  if (!device.usable) {
    fmt::print("skipped: {}\n", device.reason);
    return 0;
  }
  fmt::print("{}\n", device.reason);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
