// Importing a batch on a device, in one launch.
//
//     blockIdx.y  request        blockIdx.x  a share of its slots and of its mask's rows
//
// Every block finds its request's lengths itself; in FULL_MASK that takes the lengths of all requests before it, a few loads a
// thread. A warp makes a word of ancestor bits by a ballot over 32 cells. Bound: each slot is read and written once.

#include <algorithm>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/tree_kernels.hpp"
#include "backend/cuda/tree_workspace.hpp"
#include "trees/import_plan.hpp"

namespace treemla {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSlotsPerThread = 8;

// The sum of full_mask_width() of the requests before r, to every thread.
__device__ int64_t widths_before(const ImportProblem& p, int r) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (int s = threadIdx.x; s < r; s += kThreads)
    mine += static_cast<unsigned long long>(full_mask_width(p, s));
  if (mine != 0) atomicAdd(&total, mine);
  __syncthreads();
  return static_cast<int64_t>(total);
}

__global__ void __launch_bounds__(kThreads)
    import_kernel(const __grid_constant__ ImportProblem p, const __grid_constant__ ImportOutput out,
                  int first_request, FaultWord* faults) {
  const int r = first_request + static_cast<int>(blockIdx.y);
  const int64_t before = p.mask_layout == MaskLayout::kFull ? widths_before(p, r) : 0;
  FaultWord fault{};
  const ImportRequest c = read_import_request(p, out, r, before, fault);  // every thread alike
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    faults[r] = fault;
    if (out.kv_len != nullptr) out.kv_len[r] = c.kv_len;
  }
  if (out.page_table != nullptr) {
    const int32_t* from = p.token_table + c.row * (p.row_stride != 0 ? p.row_stride : p.row_width);
    int32_t* to = out.page_table + r * out.page_stride;
    const int step = static_cast<int>(gridDim.x) * kThreads;
#pragma unroll 4
    for (int t = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); t < c.kv_len;
         t += step)
      to[t] = from[t];
  }
  if (out.ancestor_bits == nullptr) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32; i < p.q_len;
       i += static_cast<int>(gridDim.x) * kWarps) {
    uint32_t* row = out.ancestor_bits + (static_cast<int64_t>(r) * p.q_len + i) * out.words_per_row;
    for (int word = 0; word < out.words_per_row; ++word) {
      const int j = word * 32 + lane;
      const uint32_t bits = __ballot_sync(~0u, c.kv_len > 0 && j < p.q_len && import_cell(p, c, i, j));
      if (lane == 0) row[word] = bits;
    }
  }
}

}  // namespace

void import_on_device(const ImportProblem& p, const ImportOutput& output, const TreeRun& run) {
  TreeWorkspace workspace(run.workspace, p.b);
  constexpr int kMostRequests = 65535;  // of a grid's second dimension
  const int64_t room = std::max<int64_t>(output.page_table ? output.page_stride : 0,
                                         output.ancestor_bits ? int64_t{p.q_len} * 32 : 0);
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div<int64_t>(room, int64_t{kThreads} * kSlotsPerThread), 1, 64));
  for (int first = 0; first < p.b; first += kMostRequests) {
    const auto requests = static_cast<unsigned>(std::min(p.b - first, kMostRequests));
    import_kernel<<<dim3(blocks, requests), kThreads, 0, stream_of(run)>>>(p, output, first,
                                                                           workspace.faults());
    check_launch("import_kernel");
  }
}

std::size_t device_import_bytes(const ImportProblem& p) {
  load_tree_kernel(import_kernel);
  return TreeWorkspace(nullptr, p.b).bytes();
}

}  // namespace treemla
