// combine: merges the partial results of rows whose keys were split, and writes the rows that no request attends (out 0, lse -inf).
//
//     lse = log sum_j exp(lse_j)      out = sum_j exp(lse_j - lse) * out_j       over the partials j of the row
//
// A block a (node, head) row, or a warp a row if they are many. 128 threads have 4 columns each at a time; with few rows in the batch
// four such groups share out the partials of a row, for then it is latency that counts. Weights are worked out once, 128 at a time:
//
//     shared: weights [128]                                 512 B
//             acc [3 groups][128 threads][4], sum [3]     6,156 B, only with four groups
//
// Bound: memory; each partial is read once, (d_v + 1) * 4 B. A partial without weight is left out, never multiplied by zero: its
// numbers may be NaN or stale. Rows that a kernel wrote itself cost a block, or a warp, that looks up its
// request and leaves.

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device_plan.hpp"
#include "backend/cuda/device_properties.hpp"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/work_cursor.cuh"

namespace treemla {
namespace {

constexpr int kThreads = 128;  // of a group

__device__ void write_inert_row(const KernelArgs& args, int64_t row) {
  for (int d = threadIdx.x; d < args.d_v; d += blockDim.x)
    store_any(args.out, args.out_dtype, row * args.d_v + d, 0.0f);
  if (args.lse && threadIdx.x == 0) args.lse[row] = -INFINITY;
}

// Largest partial lse of the row: every warp works out the same.
__device__ float largest_lse(const float* lse, const PartialSlots& slots, int rows_per_tile, int in_tile) {
  float m = -INFINITY;
  for (int j = threadIdx.x % 32; j < slots.count; j += 32)
    m = fmaxf(m, lse[static_cast<int64_t>(slots.slot(j)) * rows_per_tile + in_tile]);
  return warp_max(m);
}

// Where a row's partial results are.
struct RowPartials {
  PartialSlots slots;
  int in_tile;  // row of the tile

  __device__ RowPartials(const KernelArgs& args, int index, int row) {
    const SplitParams& p = args.plan.params;
    const DeviceRequest request = args.plan.requests[index];
    const RequestCost cost = request_cost(p, request.q_len, request.kv_len);
    const int row_in_request = row - request.q_begin * args.h_q, tile = row_in_request / p.tile.rows_per_tile;
    in_tile = row_in_request - tile * p.tile.rows_per_tile;
    slots = partial_slots(p, cost, tile, request.start + cost.pair_start(tile), args.plan.header->payload,
                          request.unit_base + tile * cost.units);
  }
};

// Four columns of a row, and with the first its lse. sum 0: no partial of the row saw a key.
__device__ void store_columns(const KernelArgs& args, int row, int first, const float4& acc, float sum,
                              float m) {
  const float columns[4] = {acc.x, acc.y, acc.z, acc.w};
  for (int c = 0; c < 4; ++c)
    store_any(args.out, args.out_dtype, static_cast<int64_t>(row) * args.d_v + first + c,
              sum == 0 ? 0.0f : columns[c] / sum);
  if (args.lse && first == 0) args.lse[row] = sum == 0 ? -INFINITY : m + logf(sum);
}

template <int kGroups>
__global__ void __launch_bounds__(kThreads* kGroups) combine_kernel(const __grid_constant__ KernelArgs args) {
  __shared__ float weights[kThreads];
  __shared__ float4 group_acc[kGroups > 1 ? kGroups - 1 : 1][kThreads];
  __shared__ float group_sum[kGroups];
  wait_for_kernel_before();
  const int thread = threadIdx.x % kThreads, group = threadIdx.x / kThreads;
  const int row = static_cast<int>(blockIdx.x), node = row / args.h_q;
  const int index = find_request(args.plan, node);
  if (index < 0) return write_inert_row(args, row);

  const SplitParams& p = args.plan.params;
  const RowPartials partials(args, index, row);
  const PartialSlots& slots = partials.slots;
  const int in_tile = partials.in_tile;
  if (slots.count == 1) return;
  if (slots.slot(slots.count - 1) >= args.plan.num_slots) return;  // only lengths that lie come here

  const float m = largest_lse(args.partial_lse, slots, p.tile.rows_per_tile, in_tile);
  const int64_t slot_size = static_cast<int64_t>(p.tile.rows_per_tile) * args.d_v;
  // Rounds of 4 columns a thread: one for d_v <= 512.
  for (int round = 0; round < args.d_v; round += 4 * kThreads) {
    const int first = round + 4 * thread;
    const bool has_columns = first < args.d_v;
    float sum = 0;
    float4 acc = make_float4(0, 0, 0, 0);
    for (int j0 = 0; j0 < slots.count; j0 += kThreads) {
      __syncthreads();
      if (group == 0 && j0 + thread < slots.count)
        weights[thread] = weight(
            args.partial_lse[static_cast<int64_t>(slots.slot(j0 + thread)) * p.tile.rows_per_tile + in_tile],
            m);
      __syncthreads();
      const int n = slots.count - j0 < kThreads ? slots.count - j0 : kThreads;
      if (!has_columns) continue;
      const float* from = args.partial_out + static_cast<int64_t>(in_tile) * args.d_v + first;
      // Loads first, so that many are on their way at once: one request alone leaves a partial a worker, and what it waits for is
      // latency. A partial without weight is left out afterwards, for it may hold NaN.
      constexpr int kInFlight = kGroups > 1 ? 9 : 16;
      for (int j = group; j < n; j += kGroups * kInFlight) {
        float4 part[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
          if (j + i * kGroups < n)
            part[i] = *reinterpret_cast<const float4*>(from + slots.slot(j0 + j + i * kGroups) * slot_size);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const float w = j + i * kGroups < n ? weights[j + i * kGroups] : 0.0f;
          if (w == 0) continue;
          sum += w;
          acc = make_float4(fmaf(w, part[i].x, acc.x), fmaf(w, part[i].y, acc.y), fmaf(w, part[i].z, acc.z),
                            fmaf(w, part[i].w, acc.w));
        }
      }
    }
    if constexpr (kGroups > 1) {
      __syncthreads();  // the last round's readers are done
      if (group > 0) group_acc[group - 1][thread] = acc;
      if (thread == 0) group_sum[group] = sum;
      __syncthreads();
      if (group > 0) continue;
      for (int g = 1; g < kGroups; ++g) {
        const float4 other = group_acc[g - 1][thread];
        acc = make_float4(acc.x + other.x, acc.y + other.y, acc.z + other.z, acc.w + other.w);
        sum += group_sum[g];
      }
    }
    if (has_columns) store_columns(args, row, first, acc, sum, m);
  }
}

// The same sums in the same order, a warp a row: with many rows most have nothing to merge, and what counts is to find that out in few
// waves of blocks.
constexpr int kRowWarps = 8;
__global__ void __launch_bounds__(32 * kRowWarps)
    combine_rows_kernel(const __grid_constant__ KernelArgs args) {
  wait_for_kernel_before();
  const int row = static_cast<int>(blockIdx.x) * kRowWarps + static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, node = row / args.h_q;
  if (node >= args.total_q) return;
  const int index = find_request(args.plan, node);
  if (index < 0) {
    for (int d = lane; d < args.d_v; d += 32)
      store_any(args.out, args.out_dtype, static_cast<int64_t>(row) * args.d_v + d, 0.0f);
    if (args.lse && lane == 0) args.lse[row] = -INFINITY;
    return;
  }
  const RowPartials partials(args, index, row);
  if (partials.slots.count == 1 || partials.slots.slot(partials.slots.count - 1) >= args.plan.num_slots)
    return;

  const PartialSlots& slots = partials.slots;
  const int rows_per_tile = args.plan.params.tile.rows_per_tile;
  const float m = largest_lse(args.partial_lse, slots, rows_per_tile, partials.in_tile);
  const int64_t slot_size = static_cast<int64_t>(rows_per_tile) * args.d_v;
  for (int first = 4 * lane; first < args.d_v; first += 128) {
    float sum = 0;
    float4 acc = make_float4(0, 0, 0, 0);
    const float* from = args.partial_out + static_cast<int64_t>(partials.in_tile) * args.d_v + first;
#pragma unroll 4
    for (int j = 0; j < slots.count; ++j) {
      const float w =
          weight(args.partial_lse[static_cast<int64_t>(slots.slot(j)) * rows_per_tile + partials.in_tile], m);
      const float4 part = *reinterpret_cast<const float4*>(from + slots.slot(j) * slot_size);
      if (w == 0) continue;
      sum += w;
      acc = make_float4(fmaf(w, part.x, acc.x), fmaf(w, part.y, acc.y), fmaf(w, part.z, acc.z),
                        fmaf(w, part.w, acc.w));
    }
    store_columns(args, row, first, acc, sum, m);
  }
}

// Few rows leave the device idle while each waits for its partials in turn. Not where bits must not depend on the batch: the groups
// add up in another order.
bool shares_out(const KernelArgs& args, int64_t rows) {
  return rows <= 256 && args.plan.params.fixed_tiles == 0;
}

// From here on blocks of a row each would come in several waves.
constexpr int64_t kManyRows = 2048;

}  // namespace

void launch_combine(const KernelArgs& args, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(args.total_q) * args.h_q;
  if (rows == 0) return;
  // Started as the kernel before it ends, where cards can: the launch then costs no time of its own.
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows));
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = current_cuda_device().cc >= 90 ? 1 : 0;
  auto* kernel = combine_kernel<1>;
  config.blockDim = dim3(kThreads);
  if (shares_out(args, rows)) {
    kernel = combine_kernel<4>;
    config.blockDim = dim3(4 * kThreads);
  } else if (rows >= kManyRows) {
    kernel = combine_rows_kernel;
    config.gridDim = dim3(static_cast<unsigned>(ceil_div<int64_t>(rows, kRowWarps)));
    config.blockDim = dim3(32 * kRowWarps);
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, args), "launching combine_kernel");
}

void load_combine_kernel() {
  cudaFuncAttributes attributes;
  for (auto* kernel : {combine_kernel<1>, combine_kernel<4>, combine_rows_kernel})
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes of combine_kernel");
}

}  // namespace treemla
