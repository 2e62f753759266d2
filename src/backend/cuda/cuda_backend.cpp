#include "backend/cuda/cuda_backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/cuda_memory.hpp"
#include "backend/cuda/device_plan.hpp"
#include "core/lookup.hpp"
#include "treemla/error.hpp"
#include "treemla/tree.hpp"

namespace treemla {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxRequests = int64_t{1} << 28;  // a fault word has 28 bits for the request
// Ancestor bits made from parents take total_q * max_q_len / 8 bytes: past this a caller had better say what max_q_len is.
constexpr int64_t kMaxBitsBytes = int64_t{1} << 30;
// Default length of a batch-invariant split.
constexpr int kDefaultSplitKeys = 1024;

int64_t q_len_bound(const VerifyProblem& p) {
  return p.max_q_len > 0 ? std::min(p.max_q_len, p.q.total_q) : p.q.total_q;
}
int64_t rows_of(const VerifyProblem& p) { return p.q.total_q * p.shape.h_q; }

bool needs_bits(const VerifyProblem& p) {
  return p.mask.kind == MaskKind::kTree && p.mask.ancestor_bits == nullptr;
}
int bits_words(const VerifyProblem& p) {
  if (p.mask.kind != MaskKind::kTree) return 0;
  return p.mask.ancestor_bits ? p.mask.words_per_row : words_per_row(q_len_bound(p));
}

// Parts of a workspace, each aligned to 256 bytes.
class Layout {
 public:
  std::size_t add(std::size_t bytes) {
    const std::size_t at = size_;
    size_ += round_up<std::size_t>(bytes, 256);
    return at;
  }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
};

template <class T>
T* at(void* workspace, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

// How an instance is launched for so many workers.
struct Launch {
  cudaLaunchAttribute cluster = {};
  cudaLaunchConfig_t config = {};
  Launch(const CudaInstance& k, unsigned workers, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(k.cluster), 1, 1};
    config.gridDim = dim3(workers * static_cast<unsigned>(k.cluster));
    config.blockDim = dim3(static_cast<unsigned>(k.threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(k.smem_bytes);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = k.cluster > 1 ? 1 : 0;
  }
  Launch(const Launch&) = delete;
};

// Partials are means of cached values: is q's dtype sure to hold those?
bool partials_fit(const VerifyProblem& p) {
  constexpr double kMostE4M3 = 448, kMostF16 = 65504;
  return p.q.dtype != DType::kF16 || p.kv.dtype == DType::kF16 ||
         (p.kv.dtype == DType::kF8E4M3 && std::abs(p.kv.scale) * kMostE4M3 <= kMostF16);
}

// Clusters that the device holds at once.
int max_clusters(const CudaInstance& k, const std::string& name) {
  Launch launch(k, 1, nullptr);
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, k.function, &launch.config),
             "cudaOccupancyMaxActiveClusters of " + name);
  return std::max(1, clusters);
}

struct CudaPlan : BackendPlan {
  CudaInstance kernel;
  SplitParams params;
  int num_slots = 0, max_items = 0, max_merges = 0;
  int64_t max_q_len = 0, max_kv_len = 0;
  int words = 0;
  int blocks_per_sm = 0, regs = 0;
  // Places in the workspace.
  std::size_t header = 0, requests = 0, workers = 0, items = 0, merges = 0, inert_nodes = 0, bits = 0,
              partial_out = 0, partial_lse = 0, bytes = 0;
  std::string device;

  std::size_t workspace_bytes() const override { return bytes; }

  DevicePlanView view(void* workspace) const {
    DevicePlanView v;
    v.params = params;
    v.num_slots = num_slots;
    v.max_items = max_items;
    v.max_merges = max_merges;
    v.header = at<DevicePlanHeader>(workspace, header);
    v.requests = at<DeviceRequest>(workspace, requests);
    if (!kernel.splits) return v;
    v.workers = at<WorkerItems>(workspace, workers);
    v.items = at<CudaWorkItem>(workspace, items);
    v.merges = at<MergeTile>(workspace, merges);
    v.inert_nodes = at<int>(workspace, inert_nodes);
    return v;
  }

  std::string describe() const override {
    std::string s = fmt::format("device       {}\n", device);
    s += fmt::format("block        {} threads, {} registers a thread, {} B shared memory, {} a SM{}{}\n",
                     kernel.threads, regs, kernel.smem_bytes, blocks_per_sm, *kernel.label ? ", " : "",
                     kernel.label);
    if (!kernel.splits) return s + "grid         a block a (node, head) row, no split\n";
    s +=
        fmt::format("tile         {} rows x {} keys\n", kernel.tile.rows_per_tile, kernel.tile.keys_per_tile);
    s += params.fixed_tiles > 0
             ? fmt::format("splits       every {} keys (batch-invariant), planned on the device\n",
                           params.fixed_tiles * params.tile.keys_per_tile)
             : fmt::format("splits       balanced over {} workers{}, planned on the device\n",
                           params.num_workers,
                           kernel.cluster > 1 ? fmt::format(" of {} blocks", kernel.cluster) : "");
    s += fmt::format("partials     {} slots; workspace {} bytes\n", num_slots, bytes);
    return s;
  }
};

PlanArgs plan_args(const VerifyProblem& p) {
  PlanArgs a;
  a.b = p.b;
  a.total_q = static_cast<int>(p.q.total_q);
  a.q_indptr = p.q_indptr;
  a.kv_len = p.kv_len;
  a.page_indptr = p.pages.indptr;
  a.page_stride = p.pages.stride;
  a.num_entries = p.pages.num_entries;
  a.num_pages = p.kv.num_pages;
  a.entries = p.pages.entries;
  a.entries_are_int64 = p.pages.index_type == IndexType::kI64;
  a.page_size = FastDiv(p.kv.page_size);
  a.max_q_len = static_cast<int>(q_len_bound(p));
  a.max_kv_len = static_cast<int>(kv_len_bound(p));
  a.mask = p.mask.kind;
  a.words = bits_words(p);
  if (needs_bits(p)) a.parents = p.mask.parents;
  return a;
}

}  // namespace

int64_t kv_len_bound(const VerifyProblem& p) {
  const int64_t entries = p.pages.indptr ? p.pages.num_entries : p.pages.stride;
  const int64_t bound = entries > kInt32Max / p.kv.page_size ? kInt32Max : entries * p.kv.page_size;
  return p.max_kv_len > 0 ? std::min(bound, p.max_kv_len) : bound;
}

Support supports_ladder_shape(const VerifyProblem& p) {
  constexpr struct { int d_v, d_rope; } kShapes[] = {{512, 64}, {256, 64}, {256, 32}, {512, 0}};
  if (std::none_of(std::begin(kShapes), std::end(kShapes),
                   [&](auto s) { return s.d_v == p.shape.d_v && s.d_rope == p.shape.d_rope; }))
    return Support::no(
        fmt::format("d_v/d_rope = {}/{}: takes 512/64, 256/64, 256/32, 512/0", p.shape.d_v, p.shape.d_rope));
  return Support::yes();
}

Support supports_kv_len(int64_t bound, int64_t most) {
  if (bound <= most) return Support::yes();
  return Support::no(
      fmt::format("requests of up to {} cached rows (by max_kv_len, or the page table): the shared memory of "
                  "a block holds the "
                  "scores of {}",
                  bound, most));
}

std::string why_not_aligned(const VerifyProblem& p, int bytes) {
  const auto row_bytes = kv_row_stride(p) * static_cast<int64_t>(dtype_bytes(p.kv.dtype));
  if (reinterpret_cast<std::uintptr_t>(p.kv.data) % bytes == 0 && row_bytes % bytes == 0) return "";
  return fmt::format("kv.data = {} with rows of {} bytes: reads of {} bytes need both to be multiples of {}",
                     p.kv.data, row_bytes, bytes, bytes);
}

std::string why_q_not_aligned(const VerifyProblem& p, int bytes) {
  const auto element_bytes = static_cast<int64_t>(dtype_bytes(p.q.dtype));
  if (reinterpret_cast<std::uintptr_t>(p.q.data) % bytes == 0 &&
      (q_token_stride(p) * element_bytes | q_head_stride(p) * element_bytes) % bytes == 0)
    return "";
  return fmt::format(
      "q.data = {} with strides of {} (token) and {} (head) elements: reads of {} bytes need all to be "
      "multiples of that",
      p.q.data, q_token_stride(p), q_head_stride(p), bytes);
}

std::string why_pool_too_large(const VerifyProblem& p) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  if (p.kv.num_pages > (kMost - 1) / p.kv.page_size)
    return fmt::format("kv.num_pages = {} of {} rows: takes fewer than 2^32 rows", p.kv.num_pages,
                       p.kv.page_size);
  const int64_t row_bytes = kv_row_stride(p) * static_cast<int64_t>(dtype_bytes(p.kv.dtype));
  if (row_bytes > kMost) return fmt::format("kv.row_stride of {} bytes: takes less than 2^32", row_bytes);
  return "";
}

const MemorySpace& CudaBackend::space() const { return cuda_memory(); }

Support CudaBackend::available() const {
  const CudaDevice& device = current_cuda_device();
  return device.usable ? Support::yes(device.reason) : Support::no(device.reason);
}

Support CudaBackend::supports(const VerifyProblem& p) const {
  if (rows_of(p) > kInt32Max)
    return Support::no(fmt::format("total_q * h_q = {} rows: takes up to {}", rows_of(p), kInt32Max));
  if (p.b >= kMaxRequests)
    return Support::no(fmt::format("b = {}: takes up to {} requests", p.b, kMaxRequests - 1));
  if (p.kv.layout != KvLayout::kRowMajor)
    return Support::no("kv.layout = interleaved: takes row_major, interleaved caches are for CPUs");
  if (p.kv.dtype == DType::kQ8) return Support::no("q8_0 caches: only cpu_simd and cpu_oracle take them");
  if (is_fp8(p.kv.dtype) && !takes_fp8_)
    return Support::no(fmt::format("{} caches: takes fp32, bf16, fp16", dtype_name(p.kv.dtype)));
  if (needs_bits(p) && p.q.total_q * 4 * words_per_row(q_len_bound(p)) > kMaxBitsBytes)
    return Support::no(fmt::format(
        "parents of {} nodes with max_q_len = {}: their ancestor bits need over {} bytes; give max_q_len",
        p.q.total_q, p.max_q_len, kMaxBitsBytes));
  return supports_kernel(p, current_cuda_device());
}

std::unique_ptr<BackendPlan> CudaBackend::plan(const VerifyProblem& p, const RunOptions& options) const {
  const CudaDevice& device = current_cuda_device();
  auto plan = std::make_unique<CudaPlan>();
  plan->device = device.reason;
  plan->kernel = options.batch_invariant ? invariant_instance(p, device) : instance(p, device);
  const CudaInstance& k = plan->kernel;

  const std::string name(name_);
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, k.function), "cudaFuncGetAttributes of " + name);
  plan->regs = attributes.numRegs;
  check_cuda(cudaFuncSetAttribute(k.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(k.smem_bytes)),
             fmt::format("raising the shared memory of {} to {} bytes", name, k.smem_bytes));
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&plan->blocks_per_sm, k.function, k.threads,
                                                           static_cast<std::size_t>(k.smem_bytes)),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor of " + name);
  load_plan_kernels();
  load_combine_kernel();

  plan->max_q_len = q_len_bound(p);
  plan->max_kv_len = kv_len_bound(p);
  plan->words = bits_words(p);
  SplitParams& s = plan->params;
  s.tile = clustered(k.tile, k.cluster);
  s.h_q = p.shape.h_q;
  s.num_workers = k.cluster > 1
                      ? max_clusters(k, name_)
                      : device.model.num_sms * (k.single_wave ? std::max(1, plan->blocks_per_sm) : 1);
  s.min_payload = k.min_payload;
  Layout layout;
  plan->header = layout.add(sizeof(DevicePlanHeader));
  plan->requests = layout.add(sizeof(DeviceRequest) * static_cast<std::size_t>(p.b));
  if (needs_bits(p))
    plan->bits = layout.add(sizeof(uint32_t) * static_cast<std::size_t>(plan->words * p.q.total_q));
  if (k.splits) {
    const int64_t row_tiles = rows_of(p) / s.tile.rows_per_tile + std::min<int64_t>(p.b, p.q.total_q);
    int64_t slots = 2 * static_cast<int64_t>(s.num_workers), merges = s.num_workers,
            items = kMostGangTiles * row_tiles + 2 * static_cast<int64_t>(s.num_workers);
    if (options.batch_invariant) {
      s.fixed_tiles =
          ceil_div(options.split_keys > 0 ? options.split_keys : kDefaultSplitKeys, s.tile.keys_per_tile);
      const int64_t units =
          ceil_div(plan->max_kv_len, static_cast<int64_t>(s.fixed_tiles) * s.tile.keys_per_tile);
      if (units > 0 && row_tiles > kInt32Max / units)
        throw Error(
            ErrorCode::kUnsupported, "split_keys",
            fmt::format(
                "split_keys = {} gives {} row tiles {} splits each: use longer splits, or give max_kv_len",
                options.split_keys, row_tiles, units));
      items = slots = row_tiles * units;
      merges = row_tiles;
    }
    plan->num_slots = static_cast<int>(slots);
    plan->max_items = static_cast<int>(items);
    plan->max_merges = static_cast<int>(merges);
    plan->workers = layout.add(sizeof(WorkerItems) * static_cast<std::size_t>(s.num_workers));
    plan->items = layout.add(sizeof(CudaWorkItem) * static_cast<std::size_t>(items));
    plan->merges = layout.add(sizeof(MergeTile) * static_cast<std::size_t>(merges));
    plan->inert_nodes = layout.add(sizeof(int) * static_cast<std::size_t>(p.q.total_q));
    const std::size_t rows = static_cast<std::size_t>(slots) * s.tile.rows_per_tile;
    plan->partial_out = layout.add(rows * p.shape.d_v * sizeof(float));
    plan->partial_lse = layout.add(rows * sizeof(float));
  }
  plan->bytes = layout.size();
  return plan;
}

void CudaBackend::prepare(const BackendPlan& base, const VerifyProblem& p, void* workspace,
                          const RunOptions& options) const {
  const CudaPlan& plan = static_cast<const CudaPlan&>(base);
  PlanArgs a = plan_args(p);
  if (needs_bits(p)) a.bits = at<uint32_t>(workspace, plan.bits);
  a.plan = plan.view(workspace);
  launch_device_plan(a, static_cast<cudaStream_t>(options.stream));
}

void CudaBackend::run(const BackendPlan& base, const VerifyProblem& p, const VerifyOutput& o, void* workspace,
                      const RunOptions& options) const {
  const CudaPlan& plan = static_cast<const CudaPlan&>(base);
  const auto stream = static_cast<cudaStream_t>(options.stream);
  if (rows_of(p) == 0) return;
  KernelArgs a;
  a.q = p.q.data;
  a.q_dtype = p.q.dtype;
  a.q_token_stride = q_token_stride(p);
  a.q_head_stride = q_head_stride(p);
  a.kv_dtype = p.kv.dtype;
  a.kv = p.kv.data;
  a.kv_row_stride = kv_row_stride(p);
  a.pages.entries = p.pages.entries;
  a.pages.is_int64 = p.pages.index_type == IndexType::kI64;
  a.pages.page_size = FastDiv(p.kv.page_size);
  a.pages.num_pages = p.kv.num_pages;
  a.mask.kind = p.mask.kind;
  a.mask.bits = needs_bits(p) ? at<uint32_t>(workspace, plan.bits) : p.mask.ancestor_bits;
  a.mask.words = plan.words;
  a.total_q = static_cast<int>(p.q.total_q);
  a.h_q = p.shape.h_q;
  a.heads = FastDiv(p.shape.h_q);
  a.d_v = p.shape.d_v;
  a.d_rope = p.shape.d_rope;
  a.score_scale = static_cast<float>(p.sm_scale * p.kv.scale);
  a.value_scale = static_cast<float>(p.kv.scale);
  a.out = o.out;
  a.out_dtype = o.out_dtype;
  a.lse = o.lse;
  a.partial_out = at<void>(workspace, plan.partial_out);
  if (plan.kernel.narrow_partials && dtype_bytes(o.out_dtype) == 2 && partials_fit(p))
    a.partial_dtype = p.q.dtype;
  a.partial_lse = at<float>(workspace, plan.partial_lse);
  a.smem_keys = plan.kernel.smem_keys;
  a.plan = plan.view(workspace);

  void* parameters[] = {&a};
  const unsigned grid = static_cast<unsigned>(plan.kernel.splits ? plan.params.num_workers : rows_of(p));
  Launch launch(plan.kernel, grid, stream);
  check_cuda(cudaLaunchKernelExC(&launch.config, plan.kernel.function, parameters), "launching " + name_);
  if (plan.kernel.splits) launch_combine(a, stream);
}

// ---- faults found on the device ----

namespace {

[[noreturn]] void fail(const char* argument, const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, argument, message);
}

// The words of core/check.cpp, as far as they need no value that only the device has.
void throw_fault(uint64_t word) {
  const auto fault = static_cast<DeviceFault>(word >> 60);
  const int request = static_cast<int>(word >> 32 & 0x0FFFFFFF),
            position = static_cast<int>(word & 0xFFFFFFFF);
  switch (fault) {
    case DeviceFault::kQIndptr:
      fail("q_indptr",
           fmt::format("q_indptr[{}] must start at 0, must not fall, nor pass total_q (request {})", position,
                       request));
    case DeviceFault::kKvLen:
      fail("kv_len",
           fmt::format("kv_len[{}] must be 0 or at least the q_len of request {}: tree rows are cached too",
                       position, request));
    case DeviceFault::kPageIndptr:
      fail("pages.indptr", fmt::format("pages.indptr[{}] must not fall, nor pass num_entries, and must leave "
                                       "request {} a page for every "
                                       "page_size of its kv_len",
                                       position, request));
    case DeviceFault::kPageStride:
      fail("pages.stride", fmt::format("pages.stride is too short for kv_len[{}] = {}", request, position));
    case DeviceFault::kPageEntry:
      fail("pages.entries",
           fmt::format("page entry {} of request {} is outside [0, num_pages)", position, request));
    case DeviceFault::kParent:
      fail("mask.parents",
           fmt::format(
               "parent of node {} of request {} must be -1 for node 0 and an earlier node for the others",
               position, request));
    case DeviceFault::kMaxQLen:
      fail("max_q_len",
           fmt::format("q_len {} of request {} passes max_q_len, or total_q", position, request));
    case DeviceFault::kMaxKvLen:
      fail("max_kv_len",
           fmt::format("kv_len[{}] = {} passes max_kv_len, or what the page table holds", request, position));
    case DeviceFault::kWordsPerRow:
      fail("mask.words_per_row",
           fmt::format("mask.words_per_row is too small for the q_len {} of request {}", position, request));
    case DeviceFault::kNone:
      break;
  }
  throw Error(ErrorCode::kInternal, "", fmt::format("fault word {:#x}", word));
}

}  // namespace

void CudaBackend::check_prepared(const BackendPlan& base, const void* workspace,
                                 const RunOptions& options) const {
  const CudaPlan& plan = static_cast<const CudaPlan&>(base);
  DevicePlanHeader header;
  const auto stream = static_cast<cudaStream_t>(options.stream);
  check_cuda(cudaMemcpyAsync(&header, static_cast<const char*>(workspace) + plan.header, sizeof header,
                             cudaMemcpyDeviceToHost, stream),
             "copying the plan's header");
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  if (header.fault != kNoFault) throw_fault(header.fault);
}

void CudaBackend::check_contents(const VerifyProblem& p, void* stream) const {
  const PlanArgs a = plan_args(p);
  const uint64_t fault = find_device_fault(a, static_cast<cudaStream_t>(stream));
  if (fault != kNoFault) throw_fault(fault);
}

}  // namespace treemla
