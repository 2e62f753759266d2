// combine: merges the partial results of rows whose keys were split, and writes the rows that no request attends (out 0, lse -inf). The
// plan lists both, so that a batch with nothing to merge costs a launch.
//
//     lse = log sum_j exp(lse_j)      out = sum_j exp(lse_j - lse) * out_j       over the partials j of the row
//
// A warp has 128 columns of a row, 4 a lane, or with many rows all of them: enough loads on their way either way. With few rows the eight
// warps of a block share out the partials of a row, for then it is latency that counts:
//
//     one row   blockIdx.y: 128 columns     warp w: partials w, w + 8, ...     shared: acc [8][32][4], sum [8]     4,128 B
//     eight     blockIdx.y: 128 columns     warp w: row w
//     eight     warp w: row w, all columns
//
// Bound: memory; each partial is read once, d_v numbers of 2 or 4 B and one of 4 a row. A partial without weight is left out, never multiplied by zero: its
// numbers may be NaN or stale.

#include <algorithm>
#include <array>
#include <type_traits>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device_plan.hpp"
#include "backend/cuda/device_properties.hpp"
#include "backend/cuda/half_types.cuh"
#include "backend/cuda/kernel_io.cuh"

namespace treemla {
namespace {

constexpr int kWarps = 8;
constexpr int kWarpColumns = 128;

__device__ void write_inert_rows(const KernelArgs& args) {
  const int64_t rows = static_cast<int64_t>(args.plan.header->num_inert) * args.h_q;
  if (blockIdx.y > 0) return;
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const int64_t row = static_cast<int64_t>(args.plan.inert_nodes[i / args.h_q]) * args.h_q + i % args.h_q;
    for (int d = threadIdx.x; d < args.d_v; d += blockDim.x)
      store_any(args.out, args.out_dtype, row * args.d_v + d, 0.0f);
    if (args.lse && threadIdx.x == 0) args.lse[row] = -INFINITY;
  }
}

// Four columns from `first` on of a row. sum 0: no partial of the row saw a key.
__device__ void store_columns(const KernelArgs& args, int64_t row, int first, const float4& acc, float sum) {
  const float by = sum == 0 ? 0.0f : 1 / sum;
  const float x[4] = {sum == 0 ? 0 : acc.x * by, sum == 0 ? 0 : acc.y * by, sum == 0 ? 0 : acc.z * by,
                      sum == 0 ? 0 : acc.w * by};
  const int64_t at = row * args.d_v + first;
  const auto address = reinterpret_cast<uintptr_t>(args.out);
  if (args.out_dtype == DType::kF32 && address % 16 == 0) {
    *reinterpret_cast<float4*>(static_cast<float*>(args.out) + at) = make_float4(x[0], x[1], x[2], x[3]);
  } else if (args.out_dtype == DType::kBF16 && address % 8 == 0) {
    __nv_bfloat162 two[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.out) + at) =
        *reinterpret_cast<const uint2*>(two);
  } else {
    for (int c = 0; c < 4; ++c) store_any(args.out, args.out_dtype, at + c, x[c]);
  }
}

// Four consecutive numbers of a partial, as they lie in memory.
template <class T>
using Four = std::conditional_t<std::is_same_v<T, float>, float4, uint2>;
template <class T>
__device__ __forceinline__ float4 widen_four(const Four<T>& x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    const float2 a = widen_two<T>(x.x), b = widen_two<T>(x.y);
    return {a.x, a.y, b.x, b.y};
  }
}

// kShared: warps of a block that share a row. kColumns: times 128 columns of a row that a warp has. T: of the partials.
template <int kShared, int kColumns, class T>
__global__ void __launch_bounds__(32 * kWarps, kShared > 1 ? 2 : 3)
    combine_kernel(const __grid_constant__ KernelArgs args) {
  __shared__ float4 accs[kShared > 1 ? kShared : 1][32];
  __shared__ float sums[kShared];
  constexpr int kRows = kWarps / kShared;  // of a block at a time
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            group = warp % kShared;
  const int rows_per_tile = args.plan.params.tile.rows_per_tile;
  const uint32_t tiles = static_cast<uint32_t>(min(args.plan.header->num_merges, args.plan.max_merges)),
                 rows = tiles * static_cast<uint32_t>(rows_per_tile);
  const int first = (static_cast<int>(blockIdx.y) * kWarpColumns * kColumns) + 4 * lane;
  const int64_t slot_size = static_cast<int64_t>(rows_per_tile) * args.d_v;
  wait_for_kernel_before();
  write_inert_rows(args);
  for (uint32_t base = blockIdx.x * kRows; base < rows; base += gridDim.x * kRows) {
    const uint32_t row = base + static_cast<uint32_t>(warp / kShared),
                   tile = row / static_cast<uint32_t>(rows_per_tile);
    const int in_tile = static_cast<int>(row - tile * static_cast<uint32_t>(rows_per_tile));
    MergeTile m = {};
    if (tile < tiles) m = args.plan.merges[tile];
    const bool is_row = in_tile < m.rows;
    if (kShared == 1 && !is_row) continue;
    // This warp's partials are numbers group, group + kShared, ...
    const int count = is_row ? m.slots.count : 0, n = (count - group + kShared - 1) / kShared;
    const auto slot = [&](int i) { return static_cast<int64_t>(m.slots.slot(group + kShared * i)); };
    const T* from =
        static_cast<const T*>(args.partial_out) + static_cast<int64_t>(in_tile) * args.d_v + first;
    constexpr int kInFlight = kColumns == 1 ? 8 : 2;
    Four<T> part[kInFlight][kColumns];
    const auto fetch = [&](int i) {
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
#pragma unroll
        for (int c = 0; c < kColumns; ++c)
          if (i + k < n && first + c * kWarpColumns < args.d_v)
            part[k][c] = *reinterpret_cast<const Four<T>*>(from + slot(i + k) * slot_size + c * kWarpColumns);
    };
    fetch(0);  // ahead of the weights, which would else be waited for first
    const float* lse = args.partial_lse + in_tile;
    // Lane l has the lse of the warp's number l of 32.
    const auto lse_of = [&](int i) { return i < n ? lse[slot(i) * rows_per_tile] : -INFINITY; };
    float own_lse = lse_of(lane), top = own_lse;
    if (kShared == 1)
      for (int i = 32 + lane; i < n; i += 32) top = fmaxf(top, lse_of(i));
    else
      for (int j = lane; j < count; j += 32)
        top = fmaxf(top, lse[static_cast<int64_t>(m.slots.slot(j)) * rows_per_tile]);
    top = warp_max(top);

    float sum = 0, weights = weight(own_lse, top);
    float4 acc[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) acc[c] = make_float4(0, 0, 0, 0);
    for (int i = 0; i < n; i += kInFlight) {
      if (i > 0) fetch(i);
      if (i > 0 && i % 32 == 0) weights = weight(lse_of(i + lane), top);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const float w = __shfl_sync(~0u, weights, (i + k) & 31);
        if (i + k >= n || w == 0) continue;
        sum += w;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float4 x = widen_four<T>(part[k][c]);
          acc[c] = make_float4(fmaf(w, x.x, acc[c].x), fmaf(w, x.y, acc[c].y), fmaf(w, x.z, acc[c].z),
                               fmaf(w, x.w, acc[c].w));
        }
      }
    }
    if constexpr (kShared > 1) {
      __syncthreads();  // the last row's readers are done
      accs[group][lane] = acc[0];
      if (lane == 0) sums[group] = sum;
      __syncthreads();
      if (group > 0) continue;
      for (int g = 1; g < kShared; ++g) {
        const float4 other = accs[g][lane];
        acc[0] = make_float4(acc[0].x + other.x, acc[0].y + other.y, acc[0].z + other.z, acc[0].w + other.w);
        sum += sums[g];
      }
    }
    if (!is_row) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (first + c * kWarpColumns < args.d_v)
        store_columns(args, m.row + in_tile, first + c * kWarpColumns, acc[c], sum);
    if (args.lse && first == 0) args.lse[m.row + in_tile] = sum == 0 ? -INFINITY : top + logf(sum);
  }
}

using CombineKernel = void (*)(KernelArgs);

// In the order of launch_combine().
template <class T>
constexpr std::array<CombineKernel, 3> kKernels = {combine_kernel<1, 1, T>, combine_kernel<kWarps, 1, T>,
                                                   combine_kernel<1, 4, T>};
const std::array<CombineKernel, 3>& kernels_of(DType partials) {
  return partials == DType::kF32   ? kKernels<float>
         : partials == DType::kF16 ? kKernels<__half>
                                   : kKernels<__nv_bfloat16>;
}

}  // namespace

void launch_combine(const KernelArgs& args, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(args.total_q) * args.h_q;
  if (rows == 0) return;
  // Started as the kernel before it ends, where cards can: the launch then costs no time of its own.
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = current_cuda_device().cc >= 90 ? 1 : 0;
  // From here on a warp a row, or a quarter of one, fills the device. Warps share no row where bits must not depend on the batch: they add
  // up in another order.
  constexpr int64_t kSomeRows = 256, kManyRows = 2048;
  int form = 0;
  int rows_per_block = kWarps, columns = kWarpColumns;
  if (rows <= kSomeRows && args.plan.params.fixed_tiles == 0) {
    form = 1;
    rows_per_block = 1;
  } else if (rows >= kManyRows) {
    form = 2;
    columns = 4 * kWarpColumns;
  }
  const int rounds = ceil_div(args.d_v, columns);
  // Blocks that the device holds at once; they go on to further rows.
  const int64_t most = std::max(1, 4 * current_cuda_device().model.num_sms / rounds);
  config.gridDim = dim3(static_cast<unsigned>(std::min(ceil_div<int64_t>(rows, rows_per_block), most)),
                        static_cast<unsigned>(rounds));
  check_cuda(cudaLaunchKernelEx(&config, kernels_of(args.partial_dtype)[form], args),
             "launching combine_kernel");
}

void load_combine_kernel() {
  cudaFuncAttributes attributes;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16})
    for (const CombineKernel kernel : kernels_of(t))
      check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes of combine_kernel");
}

}  // namespace treemla
