// combine: merges the partial results of rows whose keys were split, and writes the rows that no request attends (out 0, lse -inf). The
// plan lists both, so that a batch with nothing to merge costs a launch.
//
//     lse = log sum_j exp(lse_j)      out = sum_j exp(lse_j - lse) * out_j       over the partials j of the row
//
// A lane has 16 bytes of a partial, a warp 256 columns of a row, or 128 of a float32 one. With few rows two, four or eight warps of a block share
// out a row's partials, for then it is latency that counts:
//
//     warp w: partials w % n, w % n + n, ... of the block's columns w / n       shared: acc [8][8][32], sum [8]     8,224 B
//
// What the plan says is read before the kernel that computes partials has ended: the plan is older than that. Only partials are waited for.
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

// Columns of a lane, as they lie in memory: 16 bytes.
template <class T>
constexpr int kLaneColumns = 16 / static_cast<int>(sizeof(T));
template <class T>
constexpr int kWarpColumns = 32 * kLaneColumns<T>;

__device__ void write_inert_rows(const KernelArgs& args, int nodes) {
  const int64_t rows = static_cast<int64_t>(nodes) * args.h_q;
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const int64_t row = static_cast<int64_t>(args.plan.inert_nodes[i / args.h_q]) * args.h_q + i % args.h_q;
    for (int d = threadIdx.x; d < args.d_v; d += blockDim.x)
      store_any(args.out, args.out_dtype, row * args.d_v + d, 0.0f);
    if (args.lse && threadIdx.x == 0) args.lse[row] = -INFINITY;
  }
}

template <class T>
__device__ __forceinline__ void widen(float (&x)[kLaneColumns<T>], const uint4& from) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 two = widen_two<T>(words[i]);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
}

// kCount columns from element `at` of the output on. Any alignment.
template <int kCount>
__device__ __forceinline__ void store_columns(const KernelArgs& args, int64_t at, const float (&x)[kCount]) {
  const int bytes = args.out_dtype == DType::kF32 ? 4 : 2;
  char* const to = static_cast<char*>(args.out) + at * bytes;
  if (reinterpret_cast<uintptr_t>(to) % 8 != 0) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) store_any(args.out, args.out_dtype, at + c, x[c]);
  } else if (args.out_dtype == DType::kF32) {
#pragma unroll
    for (int c = 0; c < kCount; c += 2) *reinterpret_cast<float2*>(to + 4 * c) = float2{x[c], x[c + 1]};
  } else {
    const bool is_bf16 = args.out_dtype == DType::kBF16;
#pragma unroll
    for (int c = 0; c < kCount; c += 4) {
      const auto pair = [&](int i) {
        return is_bf16 ? narrow_pair<__nv_bfloat16>(x[i], x[i + 1]) : narrow_pair<__half>(x[i], x[i + 1]);
      };
      *reinterpret_cast<uint2*>(to + 2 * c) = uint2{pair(c), pair(c + 2)};
    }
  }
}

// kShared: warps of a block that share a row's columns. kInFlight: loads of a warp. T: of the partials.
template <int kShared, int kInFlight, class T>
__global__ void __launch_bounds__(32 * kWarps, kInFlight > 4 ? 2 : 4)
    combine_kernel(const __grid_constant__ KernelArgs args) {
  constexpr int kColumns = kLaneColumns<T>;
  __shared__ float accs[kShared > 1 ? kWarps : 1][kColumns][32];
  __shared__ float sums[kWarps];
  constexpr uint32_t kUnits = kWarps / kShared;  // of a block at a time: columns of a row
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
            group = warp % kShared;
  const auto rows_per_tile = static_cast<uint32_t>(args.plan.params.tile.rows_per_tile);
  const uint32_t tiles = static_cast<uint32_t>(min(args.plan.header->num_merges, args.plan.max_merges)),
                 warps_per_row = static_cast<uint32_t>(ceil_div(args.d_v, kWarpColumns<T>)),
                 units = tiles * rows_per_tile * warps_per_row;
  const int num_inert = args.plan.header->num_inert;
  const int64_t slot_size = static_cast<int64_t>(rows_per_tile) * args.d_v;
  bool has_waited = false;
  const auto wait_once = [&] {
    if (!has_waited) wait_for_kernel_before();
    has_waited = true;
  };
  for (uint32_t base = blockIdx.x * kUnits; base < units; base += gridDim.x * kUnits) {
    const uint32_t unit = base + static_cast<uint32_t>(warp / kShared), row = unit / warps_per_row,
                   tile = row / rows_per_tile;
    const int in_tile = static_cast<int>(row - tile * rows_per_tile),
              first = static_cast<int>(unit - row * warps_per_row) * kWarpColumns<T> + kColumns * lane;
    MergeTile m = {};
    if (tile < tiles) m = args.plan.merges[tile];
    const bool is_row = in_tile < m.rows, has_columns = first < args.d_v;
    wait_once();
    if (kShared == 1 && !is_row) continue;
    // This warp's partials are numbers group, group + kShared, ...
    const int count = is_row ? m.slots.count : 0, n = (count - group + kShared - 1) / kShared;
    const auto slot = [&](int i) { return static_cast<int64_t>(m.slots.slot(group + kShared * i)); };
    const T* from =
        static_cast<const T*>(args.partial_out) + static_cast<int64_t>(in_tile) * args.d_v + first;
    uint4 part[kInFlight];
    const auto fetch = [&](int i) {
#pragma unroll
      for (int k = 0; k < kInFlight; ++k)
        if (i + k < n && has_columns)
          part[k] = __ldcg(reinterpret_cast<const uint4*>(from + slot(i + k) * slot_size));
    };
    fetch(0);  // ahead of the weights, which would else be waited for first
    const float* lse = args.partial_lse + in_tile;
    // Lane l has the lse of the warp's number l of 32.
    const auto lse_of = [&](int i) { return i < n ? __ldcg(lse + slot(i) * rows_per_tile) : -INFINITY; };
    const float own_lse = lse_of(lane);
    float top = own_lse;
    if (kShared == 1)
      for (int i = 32 + lane; i < n; i += 32) top = fmaxf(top, lse_of(i));
    else
      for (int j = lane; j < count; j += 32)
        top = fmaxf(top, __ldcg(lse + static_cast<int64_t>(m.slots.slot(j)) * rows_per_tile));
    top = warp_max(top);

    float sum = 0, weights = weight(own_lse, top), acc[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) acc[c] = 0;
    for (int i = 0; i < n; i += kInFlight) {
      if (i > 0) fetch(i);
      if (i > 0 && i % 32 == 0) weights = weight(lse_of(i + lane), top);
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const float w = __shfl_sync(~0u, weights, (i + k) & 31);
        if (i + k >= n || w == 0) continue;
        sum += w;
        float x[kColumns];
        widen<T>(x, part[k]);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) acc[c] = fmaf(w, x[c], acc[c]);
      }
    }
    if constexpr (kShared > 1) {
      __syncthreads();  // the last unit's readers are done
#pragma unroll
      for (int c = 0; c < kColumns; ++c) accs[warp][c][lane] = acc[c];
      if (lane == 0) sums[warp] = sum;
      __syncthreads();
      if (group > 0) continue;
      for (int g = 1; g < kShared; ++g) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) acc[c] += accs[warp + g][c][lane];
        sum += sums[warp + g];
      }
    }
    if (!is_row) continue;
    // sum 0: no partial of the row saw a key.
    const float by = sum == 0 ? 0.0f : 1 / sum;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) acc[c] = sum == 0 ? 0 : acc[c] * by;
    if (has_columns) store_columns(args, (m.row + in_tile) * args.d_v + first, acc);
    if (args.lse && first == 0) args.lse[m.row + in_tile] = sum == 0 ? -INFINITY : top + logf(sum);
  }
  wait_once();  // who has nothing to do ends no sooner than the kernel before: others count on that
  write_inert_rows(args, num_inert);
}

using CombineKernel = void (*)(KernelArgs);

// Of 2^i warps that share a row's columns; the last one of rows so many that few loads of each fill the device.
template <class T>
constexpr std::array<CombineKernel, 5> kKernels = {combine_kernel<1, 8, T>, combine_kernel<2, 8, T>,
                                                   combine_kernel<4, 8, T>, combine_kernel<kWarps, 8, T>,
                                                   combine_kernel<1, 4, T>};
const std::array<CombineKernel, 5>& kernels_of(DType partials) {
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
  const int64_t num_sms = std::max(1, current_cuda_device().model.num_sms),
                height = args.plan.params.tile.rows_per_tile,
                warps_per_row = ceil_div(
                    args.d_v, args.partial_dtype == DType::kF32 ? kWarpColumns<float> : kWarpColumns<__half>);
  // As many warps as the device holds, sharing rows if there are too few. Not where bits must not depend on the batch: they add up in
  // another order.
  constexpr int64_t kWarpsPerSm = 2 * kWarps, kManyRows = 2048;
  int form = 0;
  if (args.plan.params.fixed_tiles == 0)
    while (form < 3 && (rows * warps_per_row << (form + 1)) <= kWarpsPerSm * num_sms) ++form;
  const int64_t shared = int64_t{1} << form;
  const bool many = rows >= kManyRows;
  if (many) form = 4;
  // Row tiles are padded to their full height, and each request has its own.
  const int64_t padded = std::min(args.plan.max_merges * height, 2 * round_up<int64_t>(rows, height)),
                blocks = ceil_div<int64_t>(padded * warps_per_row * shared, kWarps);
  // Blocks that the device holds at once; they go on to further rows.
  config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, (many ? 4 : 2) * num_sms)));
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
