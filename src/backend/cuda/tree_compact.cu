// Compacting the cache on a device, all layers and requests in one launch.
//
// A row is units of up to 16 bytes. A thread takes a unit of one layer and moves it for all rows of the path, in order: a[j] rises
// faster than j, so what it overwrites it has read before, and nobody
// else touches its bytes. No two threads need to wait for each
// other, whatever overlaps. Eight loads are in flight before the first is stored.
//
//     blockIdx.y  request        blockIdx.x * 256 + threadIdx.x, and on by a grid's width  unit: layer * units a row + place in the row
//
// Every block looks up and checks all of its request's rows first (few: it is the accepted path), so that a bad table moves nothing.
// Bound: each moved row is read and written once.

#include <algorithm>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device_properties.hpp"
#include "backend/cuda/tree_kernels.hpp"
#include "backend/cuda/tree_workspace.hpp"
#include "trees/compact_plan.hpp"
#include "trees/steps.hpp"

namespace treemla {
namespace {

constexpr int kThreads = 256;
constexpr int kRound = 512;   // moves looked up at a time
constexpr int kInFlight = 8;  // loads of a thread
constexpr int kBlocksPerSm = 3;

struct CompactShared {
  int64_t from[kRound], to[kRound];  // byte offsets within a layer
  uint64_t fault;                    // the smallest fault word; ~0: none
  int first_moved;                   // rows before stay where they are
};

__device__ void report(CompactShared& shared, FaultWord fault) {
  if (fault)
    atomicMin(reinterpret_cast<unsigned long long*>(&shared.fault),
              static_cast<unsigned long long>(fault.word));
}

// Rows of places [begin, begin + kRound) of the path.
__device__ void look_up(const CompactProblem& p, const CompactRequest& c, int r, int begin, int64_t stride,
                        CompactShared& shared) {
  for (int j = begin + threadIdx.x; j < min(c.num_kept, begin + kRound); j += kThreads) {
    FaultWord fault{};
    const int node = path_node(p, c, r, j, fault);
    int64_t from = 0, to = 0;
    if (!fault && node != j) {
      atomicMin(&shared.first_moved, j);
      from = row_of_token(p, c, r, c.prefix_len() + node, fault);
      if (!fault) to = row_of_token(p, c, r, c.prefix_len() + j, fault);
    }
    report(shared, fault);
    shared.from[j - begin] = from * stride;
    shared.to[j - begin] = to * stride;
  }
}

__device__ char* layer_base(const CompactProblem& p, int layer) {
  return p.layers != nullptr ? static_cast<char*>(p.layers[layer])
                             : static_cast<char*>(p.pool) + layer * p.layer_stride_bytes;
}

template <class Unit>
__device__ bool is_usable(const char* base) {
  return base != nullptr && reinterpret_cast<uintptr_t>(base) % sizeof(Unit) == 0;
}

template <class Unit>
__device__ void move_units(char* base, const CompactShared& shared, int first, int count) {
  for (int j = first; j < count; j += kInFlight) {
    Unit held[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (j + i < count) held[i] = *reinterpret_cast<const Unit*>(base + shared.from[j + i]);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (j + i < count) *reinterpret_cast<Unit*>(base + shared.to[j + i]) = held[i];
  }
}

// Lengths and freed pages, by the request's first block.
__device__ void write_lengths(const CompactProblem& p, const CompactOutput& out, const CompactRequest& c,
                              int r) {
  const bool active = c.num_kept > 0;
  const FreedPages pages = active ? freed_pages(p, c) : FreedPages{};
  FaultWord ignored{};  // checked before
  if (out.freed_pages != nullptr)
    for (int i = pages.first + threadIdx.x; i < pages.end; i += kThreads)
      out.freed_pages[c.q_begin + i - pages.first] =
          page_of_token(p, c, r, static_cast<int64_t>(i) * p.page_size, ignored);
  if (threadIdx.x != 0) return;
  if (out.kv_len != nullptr) out.kv_len[r] = active ? c.prefix_len() + c.num_kept : p.kv_len[r];
  if (out.num_freed != nullptr) out.num_freed[r] = pages.end - pages.first;
}

template <class Unit>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    compact_kernel(const __grid_constant__ CompactProblem p, const __grid_constant__ CompactOutput out,
                   int first_request, FaultWord* faults) {
  __shared__ CompactShared shared;
  const int r = first_request + static_cast<int>(blockIdx.y);
  const int64_t stride = p.row_stride_bytes != 0 ? p.row_stride_bytes : p.row_bytes;
  if (threadIdx.x == 0) {
    shared.fault = ~uint64_t{0};
    shared.first_moved = INT32_MAX;
  }
  __syncthreads();
  FaultWord fault{};
  CompactRequest c = read_compact_request(p, r, fault);  // every thread alike
  report(shared, fault);
  for (int begin = 0; begin < c.num_kept; begin += kRound) {
    look_up(p, c, r, begin, stride, shared);
  }
  if (c.num_kept > 0 && (out.freed_pages != nullptr || out.num_freed != nullptr)) {
    const FreedPages pages = freed_pages(p, c);
    for (int i = pages.first + threadIdx.x; i < pages.end; i += kThreads) {
      FaultWord bad{};
      page_of_token(p, c, r, static_cast<int64_t>(i) * p.page_size, bad);
      report(shared, bad);
    }
  }
  __syncthreads();
  const bool faulty = shared.fault != ~uint64_t{0};
  const int first_moved = shared.first_moved;
  if (faulty) c.num_kept = 0;
  if (blockIdx.x == 0) {
    write_lengths(p, out, c, r);
    __syncthreads();  // everyone knows whether the request itself is at fault
    for (int layer = threadIdx.x; layer < p.num_layers; layer += kThreads)
      if (!is_usable<Unit>(layer_base(p, layer)))
        report(shared, make_fault(TreeFault::kLayerPointer, r, layer));
    __syncthreads();
    if (threadIdx.x == 0) faults[r].word = shared.fault != ~uint64_t{0} ? shared.fault : 0;
  }
  if (first_moved >= c.num_kept) return;

  const int units = static_cast<int>(p.row_bytes / static_cast<int64_t>(sizeof(Unit)));
  const int64_t num_units = static_cast<int64_t>(p.num_layers) * units;
  // One round, the one that is looked up already, on all but absurd paths.
  const bool one_round = c.num_kept <= kRound;
  for (int begin = first_moved / kRound * kRound; begin < c.num_kept; begin += kRound) {
    if (!one_round) {
      __syncthreads();
      look_up(p, c, r, begin, stride, shared);
      __syncthreads();
    }
    for (int64_t unit = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; unit < num_units;
         unit += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int layer = static_cast<int>(unit / units);
      char* base = layer_base(p, layer);
      if (!is_usable<Unit>(base)) continue;
      base += (unit - static_cast<int64_t>(layer) * units) * static_cast<int64_t>(sizeof(Unit));
      move_units<Unit>(base, shared, max(0, first_moved - begin), min(kRound, c.num_kept - begin));
    }
  }
}

template <class Unit>
void launch(const CompactProblem& p, const CompactOutput& output, FaultWord* faults, cudaStream_t stream) {
  const int64_t units = p.num_layers * (p.row_bytes / static_cast<int64_t>(sizeof(Unit)));
  const int64_t places = int64_t{kBlocksPerSm} * std::max(1, current_cuda_device().model.num_sms);
  constexpr int kMostRequests = 65535;  // of a grid's second dimension
  for (int first = 0; first < p.b; first += kMostRequests) {
    const int requests = std::min(p.b - first, kMostRequests);
    // All blocks at once: a later one would wait, and look up the rows once more.
    const int64_t blocks =
        std::clamp<int64_t>(ceil_div<int64_t>(units, kThreads), 1, std::max<int64_t>(1, places / requests));
    compact_kernel<Unit>
        <<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(requests)), kThreads, 0, stream>>>(
            p, output, first, faults);
    check_launch("compact_kernel");
  }
}

}  // namespace

void compact_on_device(const CompactProblem& p, const CompactOutput& output, const TreeRun& run) {
  if (p.b == 0) return;
  TreeWorkspace workspace(run.workspace, p.b);
  FaultWord* faults = workspace.faults();
  switch (compact_unit(p)) {
    case 16:
      return launch<uint4>(p, output, faults, stream_of(run));
    case 8:
      return launch<uint2>(p, output, faults, stream_of(run));
    case 4:
      return launch<uint32_t>(p, output, faults, stream_of(run));
    case 2:
      return launch<uint16_t>(p, output, faults, stream_of(run));
    default:
      return launch<uint8_t>(p, output, faults, stream_of(run));
  }
}

std::size_t device_compact_bytes(const CompactProblem& p) {
  load_tree_kernel(compact_kernel<uint4>);
  load_tree_kernel(compact_kernel<uint2>);
  load_tree_kernel(compact_kernel<uint32_t>);
  load_tree_kernel(compact_kernel<uint16_t>);
  load_tree_kernel(compact_kernel<uint8_t>);
  return TreeWorkspace(nullptr, p.b).bytes();
}

}  // namespace treemla
