// Planning on the device, so that one captured graph serves any lengths: block 0 puts the requests on the line of plan/split.hpp,
// the other blocks turn parents into ancestor bits.
//
//     lengths, page_indptr --> checked, inert ones dropped --> prefix sums of cost and units --> requests, total, payload
//
// A second kernel spells out what every layer would else have to find again: each worker's items, the row tiles whose keys were
// split, and the nodes that no request attends.
//
// Nothing here trusts what it reads: a request whose lengths or tables lie comes out inert, and the header says which.

#include <memory>

#include "backend/cuda/block_ops.cuh"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device_plan.hpp"
#include "backend/cuda/work_cursor.cuh"
#include "backend/cuda/work_list.cuh"

namespace treemla {
namespace {

constexpr int kPlanThreads = 256;
constexpr int kWarps = kPlanThreads / 32;

__device__ void report(uint64_t* word, DeviceFault fault, int request, int position) {
  atomicMin(reinterpret_cast<unsigned long long*>(word),
            static_cast<unsigned long long>(pack_fault(fault, request, position)));
}

// ---- lengths ----

// One request as the arrays give it, made safe: kv_len 0 if it is inert or anything about it is wrong.
__device__ DeviceRequest read_request(const PlanArgs& args, int r, uint64_t* fault) {
  DeviceRequest d;
  d.request = r;
  const int64_t begin = args.q_indptr[r], end = args.q_indptr[r + 1];
  if (begin < 0 || end < begin || end > args.total_q || (r == 0 && begin != 0)) {
    report(fault, DeviceFault::kQIndptr, r, static_cast<int>(begin < 0 || r == 0 ? r : r + 1));
    return d;
  }
  d.q_begin = static_cast<int>(begin);
  d.q_len = static_cast<int>(end - begin);
  const int kv_len = args.kv_len[r];
  if (kv_len < 0 || (kv_len > 0 && kv_len < d.q_len)) {
    report(fault, DeviceFault::kKvLen, r, r);
    return d;
  }
  if (d.q_len == 0 || kv_len == 0) return d;
  if (d.q_len > args.max_q_len) {
    report(fault, DeviceFault::kMaxQLen, r, d.q_len);
    return d;
  }
  if (kv_len > args.max_kv_len) {
    report(fault, DeviceFault::kMaxKvLen, r, kv_len);
    return d;
  }
  if (args.words > 0 && d.q_len > 32ll * args.words) {
    report(fault, DeviceFault::kWordsPerRow, r, d.q_len);
    return d;
  }
  const int64_t pages = args.page_size.quotient(kv_len - 1) + 1;
  if (args.page_indptr != nullptr) {
    const int64_t first = args.page_indptr[r], last = args.page_indptr[r + 1];
    if (first < 0 || last < first || last > args.num_entries || last - first < pages) {
      report(fault, DeviceFault::kPageIndptr, r, first < 0 ? r : r + 1);
      return d;
    }
    d.page_base = first;
  } else {
    if (args.page_stride < pages) {
      report(fault, DeviceFault::kPageStride, r, kv_len);
      return d;
    }
    d.page_base = r * args.page_stride;
  }
  if (args.num_pages == 0) {
    report(fault, DeviceFault::kPageEntry, r, 0);
    return d;
  }
  d.kv_len = kv_len;
  return d;
}

// ---- prefix sums over a block ----

struct Sums {
  int64_t cost;
  int units, tiles, active;
};

__device__ Sums operator+(const Sums& a, const Sums& b) {
  return {a.cost + b.cost, a.units + b.units, a.tiles + b.tiles, a.active + b.active};
}

__device__ Sums shuffle_up(const Sums& s, int step) {
  return {__shfl_up_sync(~0u, s.cost, step), __shfl_up_sync(~0u, s.units, step),
          __shfl_up_sync(~0u, s.tiles, step), __shfl_up_sync(~0u, s.active, step)};
}

// Sums of the threads before this one; `total` becomes that of all. `warp_sums` has kWarps elements.
__device__ Sums exclusive_scan(const Sums& mine, Sums* warp_sums, Sums& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sums inclusive = mine;
  for (int step = 1; step < 32; step *= 2) {
    const Sums other = shuffle_up(inclusive, step);
    if (lane >= step) inclusive = inclusive + other;
  }
  __syncthreads();  // the last round's readers are done
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  Sums before = {0, 0, 0, 0};
  total = {0, 0, 0, 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = total;
    total = total + warp_sums[w];
  }
  return {before.cost + inclusive.cost - mine.cost, before.units + inclusive.units - mine.units,
          before.tiles + inclusive.tiles - mine.tiles, before.active + inclusive.active - mine.active};
}

// For all threads of the block.
__device__ PairLayout choose_pair_layout(const PlanArgs& args, uint64_t* fault) {
  __shared__ BlockScratch scratch;
  const SplitParams& params = args.plan.params;
  if (params.tile.merge_cost == 0) return {};
  BatchCost batch;
  for (int r = threadIdx.x; r < args.b; r += kPlanThreads) {
    const DeviceRequest d = read_request(args, r, fault);
    batch.add(request_cost(params, d.q_len, d.kv_len));
  }
  const auto sum = [&](int64_t x) {
    return static_cast<int64_t>(block_sum64(static_cast<uint64_t>(x), scratch));
  };
  const auto most = [&](int64_t x) {
    return static_cast<int64_t>(block_max64(static_cast<uint64_t>(x), scratch));
  };
  batch.total = sum(batch.total);
  batch.pairs = sum(batch.pairs);
  batch.units = sum(batch.units);
  batch.distinct_units = sum(batch.distinct_units);
  batch.largest = most(batch.largest);
  batch.most_units = static_cast<int>(most(batch.most_units));
  batch.most_row_tiles = static_cast<int>(most(batch.most_row_tiles));
  const auto for_each_cost = [&](const auto& use) {
    for (int r = threadIdx.x; r < args.b; r += kPlanThreads) {
      const DeviceRequest d = read_request(args, r, fault);
      const RequestCost cost = request_cost(params, d.q_len, d.kv_len);
      if (cost.row_tiles > 0) use(cost);
    }
  };
  const EvenPieces even = find_even_pieces(params, batch, [&](int units) {
    int64_t pieces = 0;
    for_each_cost([&](const RequestCost& cost) { pieces += pieces_of(cost, units); });
    return sum(pieces);
  });
  const GangLine line = find_gangs(params, batch, [&](int gang) {
    GangLine on = {gang, 0, 0};
    for_each_cost([&](const RequestCost& cost) { on.add(cost); });
    return GangLine{gang, sum(on.total), sum(on.pairs)};
  });
  return choose_layout(params, batch, even, line).layout;
}

__device__ void lay_out_requests(const PlanArgs& args, uint64_t* fault) {
  __shared__ Sums warp_sums[kWarps];
  const PairLayout layout = choose_pair_layout(args, fault);
  Sums base = {0, 0, 0, 0};
  for (int first = 0; first < args.b; first += kPlanThreads) {
    const int r = first + threadIdx.x;
    DeviceRequest d;
    RequestCost cost;
    if (r < args.b) {
      d = read_request(args, r, fault);
      cost = request_cost(args.plan.params, d.q_len, d.kv_len);
    }
    const bool active = cost.row_tiles > 0;
    const int64_t length = layout.pieces == 0           ? cost.gang_total(layout.gang)
                           : active && layout.units > 0 ? pieces_of(cost, layout.units)
                                                        : cost.row_tiles;
    Sums total;
    const Sums before =
        base + exclusive_scan({length, cost.row_tiles * cost.units,
                               layout.pieces == 0 ? cost.gang_pairs(layout.gang) : cost.row_tiles, active},
                              warp_sums, total);
    if (active) {
      d.start =
          layout.pieces == 0 ? before.cost : pieces_of_pair(layout, cost, before.cost, before.tiles, 0).first;
      d.unit_base = before.units;
      d.tile_base = before.tiles;
      args.plan.requests[before.active] = d;
    }
    base = base + total;
  }
  if (threadIdx.x == 0) {
    args.plan.header->total_cost = layout.pieces > 0 ? layout.pieces : base.cost;
    args.plan.header->payload = worker_payload(args.plan.params, base.cost, layout.gang);
    args.plan.header->member_items = base.tiles + args.plan.params.num_workers / layout.gang;
    args.plan.header->layout = layout;
    args.plan.header->num_active = base.active;
    args.plan.header->num_merges = args.plan.header->num_inert = 0;
  }
}

// ---- ancestor bits ----

// Request that owns query node `node` by the raw array, or -1. Any contents end the search.
__device__ int owner_of(const PlanArgs& args, int node) {
  int low = 0, high = args.b;  // the last request whose rows begin at or before the node
  while (low < high) {
    const int middle = (low + high) / 2;
    if (args.q_indptr[middle] <= node)
      low = middle + 1;
    else
      high = middle;
  }
  const int r = low - 1;
  return r >= 0 && args.q_indptr[r] >= 0 && node < args.q_indptr[r + 1] ? r : -1;
}

// Row `node` of the bits: itself and its ancestors, found by walking up. Indices fall on the way, so the words are written once
// each, from the last to the first, and the walk ends whatever the array holds.
__device__ void write_bits(const PlanArgs& args, int node, uint64_t* fault) {
  uint32_t* row = args.bits + static_cast<int64_t>(node) * args.words;
  const int r = owner_of(args, node);
  int word = args.words - 1;
  uint32_t bits = 0;
  if (r >= 0) {
    const int begin = args.q_indptr[r], i = node - begin;
    for (int j = i; j >= 0;) {
      if (j < 32ll * args.words) {
        for (; word > j / 32; --word, bits = 0) row[word] = bits;
        bits |= 1u << (j % 32);
      }
      const int parent = args.parents[begin + j];
      if (parent >= j || parent < -1 || (parent == -1) != (j == 0)) {
        report(fault, DeviceFault::kParent, r, j);
        break;
      }
      j = parent;
    }
  }
  for (; word >= 0; --word, bits = 0) row[word] = bits;
}

// ---- kernels ----

// The fault word is cleared by a memset before: every block may set it.
__global__ void __launch_bounds__(kPlanThreads) device_plan_kernel(const __grid_constant__ PlanArgs args) {
  if (blockIdx.x == 0) {
    lay_out_requests(args, &args.plan.header->fault);
    return;
  }
  const int64_t node = static_cast<int64_t>(blockIdx.x - 1) * kPlanThreads + threadIdx.x;
  if (node < args.total_q) write_bits(args, static_cast<int>(node), &args.plan.header->fault);
}

__device__ void list_items(const DevicePlanView& plan, int worker) {
  WorkCursor cursor(plan, worker);
  WorkerItems w = {};
  for (CudaWorkItem item; cursor.next(item); ++w.count) {
    if (cursor.place() >= plan.max_items) break;  // only lengths that lie come here
    if (w.count == 0) {
      w.item = item;
      w.first = cursor.place();
    }
    plan.items[cursor.place()] = item;
  }
  plan.workers[worker] = w;
}

// Blocks of three kinds: for workers, for nodes, and one for each request.
constexpr int kWorkThreads = 64;
__global__ void __launch_bounds__(kWorkThreads)
    device_work_kernel(const __grid_constant__ DevicePlanView plan, int worker_blocks, int node_blocks,
                       int total_q) {
  int block = static_cast<int>(blockIdx.x);
  if (block < worker_blocks) {
    const int worker = block * kWorkThreads + static_cast<int>(threadIdx.x);
    if (worker < plan.params.num_workers) list_items(plan, worker);
    return;
  }
  block -= worker_blocks;
  if (block < node_blocks) {
    const int node = block * kWorkThreads + static_cast<int>(threadIdx.x);
    if (node < total_q && find_request(plan, node) < 0)
      plan.inert_nodes[atomicAdd(&plan.header->num_inert, 1)] = node;
    return;
  }
  block -= node_blocks;
  if (block >= plan.header->num_active) return;
  const SplitParams& p = plan.params;
  const DeviceRequest request = plan.requests[block];
  const PairLayout layout = plan.header->layout;
  const RequestCost cost = request_cost(p, request.q_len, request.kv_len);
  for (int tile = static_cast<int>(threadIdx.x); tile < cost.row_tiles; tile += kWorkThreads) {
    MergeTile m;
    m.slots =
        layout.pieces > 0
            ? piece_slots(layout, pieces_of_pair(layout, cost, request.start, request.tile_base + tile, tile))
            : partial_slots(p, cost, tile, request.start + cost.pair_start(tile / layout.gang),
                            plan.header->payload, request.unit_base + tile * cost.units, layout.gang);
    if (m.slots.count == 1 || m.slots.slot(m.slots.count - 1) >= plan.num_slots) continue;
    const int first = tile * p.tile.rows_per_tile;
    m.row = static_cast<int64_t>(request.q_begin) * p.h_q + first;
    m.rows = cost.rows - first < p.tile.rows_per_tile ? cost.rows - first : p.tile.rows_per_tile;
    const int i = atomicAdd(&plan.header->num_merges, 1);
    if (i < plan.max_merges) plan.merges[i] = m;  // only lengths that lie pass it
  }
}

__global__ void list_items_kernel(const __grid_constant__ DevicePlanView plan, int max_items, WorkItem* items,
                                  int* counts) {
  WorkList list(plan, blockIdx.x);
  int n = 0;
  for (CudaWorkItem item; n < max_items && list.next(item); ++n) {
    WorkItem& w = items[static_cast<int64_t>(blockIdx.x) * max_items + n];
    w.worker = blockIdx.x;
    w.request = item.request;
    w.row_begin = item.row_begin;
    w.row_end = item.row_end;
    w.key_begin = item.key_begin;
    w.key_end = item.key_end;
    w.partial = item.partial;
    w.cost = 0;
  }
  counts[blockIdx.x] = n;
}

// A block a request (stepping): lengths by thread 0, then page entries and parents by all.
__global__ void __launch_bounds__(kPlanThreads)
    check_kernel(const __grid_constant__ PlanArgs args, uint64_t* fault) {
  for (int r = blockIdx.x; r < args.b; r += gridDim.x) {
    const DeviceRequest d = read_request(args, r, fault);  // every thread alike
    const int pages = d.kv_len > 0 ? args.page_size.quotient(d.kv_len - 1) + 1 : 0;
    for (int i = threadIdx.x; i < pages; i += kPlanThreads) {
      const int64_t entry = args.entries_are_int64
                                ? static_cast<const int64_t*>(args.entries)[d.page_base + i]
                                : static_cast<const int32_t*>(args.entries)[d.page_base + i];
      if (entry < 0 || entry >= args.num_pages) report(fault, DeviceFault::kPageEntry, r, i);
    }
    if (args.parents == nullptr) continue;
    for (int i = threadIdx.x; i < d.q_len; i += kPlanThreads) {
      const int parent = args.parents[d.q_begin + i];
      if (parent >= i || parent < -1 || (parent == -1) != (i == 0)) report(fault, DeviceFault::kParent, r, i);
    }
  }
}

template <class T>
struct DeviceArray {
  explicit DeviceArray(std::size_t n) { check_cuda(cudaMalloc(&data, n * sizeof(T)), "cudaMalloc"); }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* data = nullptr;
};

}  // namespace

void launch_device_plan(const PlanArgs& args, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(&args.plan.header->fault, 0xFF, sizeof(uint64_t), stream), "cudaMemsetAsync");
  const bool converts = args.parents != nullptr && args.bits != nullptr;
  const int blocks = 1 + (converts ? static_cast<int>(ceil_div<int64_t>(args.total_q, kPlanThreads)) : 0);
  device_plan_kernel<<<blocks, kPlanThreads, 0, stream>>>(args);
  check_launch("device_plan_kernel");
  if (args.plan.workers == nullptr) return;
  const int worker_blocks = ceil_div(args.plan.params.num_workers, kWorkThreads),
            node_blocks = static_cast<int>(ceil_div<int64_t>(args.total_q, kWorkThreads));
  device_work_kernel<<<worker_blocks + node_blocks + args.b, kWorkThreads, 0, stream>>>(
      args.plan, worker_blocks, node_blocks, args.total_q);
  check_launch("device_work_kernel");
}

void load_plan_kernels() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, device_plan_kernel),
             "cudaFuncGetAttributes of device_plan_kernel");
  check_cuda(cudaFuncGetAttributes(&attributes, device_work_kernel),
             "cudaFuncGetAttributes of device_work_kernel");
}

std::vector<WorkItem> list_device_items(const DevicePlanView& plan, int max_items, cudaStream_t stream) {
  const int workers = plan.params.num_workers;
  DeviceArray<WorkItem> items(static_cast<std::size_t>(workers) * max_items);
  DeviceArray<int> counts(workers);
  list_items_kernel<<<workers, 1, 0, stream>>>(plan, max_items, items.data, counts.data);
  check_launch("list_items_kernel");
  std::vector<WorkItem> all(static_cast<std::size_t>(workers) * max_items), list;
  std::vector<int> n(workers);
  check_cuda(
      cudaMemcpyAsync(all.data(), items.data, all.size() * sizeof(WorkItem), cudaMemcpyDeviceToHost, stream),
      "copying items");
  check_cuda(cudaMemcpyAsync(n.data(), counts.data, n.size() * sizeof(int), cudaMemcpyDeviceToHost, stream),
             "copying counts");
  check_cuda(cudaStreamSynchronize(stream), "list_items_kernel");
  for (int w = 0; w < workers; ++w)
    list.insert(list.end(), all.begin() + static_cast<int64_t>(w) * max_items,
                all.begin() + static_cast<int64_t>(w) * max_items + n[w]);
  return list;
}

uint64_t find_device_fault(const PlanArgs& args, cudaStream_t stream) {
  if (args.b == 0) return kNoFault;
  DeviceArray<uint64_t> fault(1);
  check_cuda(cudaMemsetAsync(fault.data, 0xFF, sizeof(uint64_t), stream), "cudaMemsetAsync");
  const int blocks = args.b < 1024 ? args.b : 1024;
  check_kernel<<<blocks, kPlanThreads, 0, stream>>>(args, fault.data);
  check_launch("check_kernel");
  uint64_t word = kNoFault;
  check_cuda(cudaMemcpyAsync(&word, fault.data, sizeof word, cudaMemcpyDeviceToHost, stream),
             "copying the fault word");
  check_cuda(cudaStreamSynchronize(stream), "check_kernel");
  return word;
}

}  // namespace treemla
