// cuda_head_tile: 8 (node, head) rows share each tile of 24 keys through shared memory: an eighth of the naive kernel's bytes.
//
//     S [8, 24] = score_scale * Q [8, d_qk] K [24, d_qk]^T      O [8, d_v] = softmax(S) K[:, :d_v]       tile after tile, online
//
// Why it stays in the ladder: an eighth of the bytes of the other rungs does not make it eight times as fast, nor always faster. Its
// 73 KB let an SM hold three blocks of 4 warps (one block on sm_120), too few to hide the four barriers and the loads that every tile
// waits for. On the H200 it takes twice the time of cuda_warp_per_key where work is short (h_q 8, q 9, prefix 256) and two thirds of
// it where the cache no longer fits L2 (h_q 64, prefix 16,384), and never passes a fifth of the FMA rate.
//
// Shared memory                 bytes (d_qk 576)
//     q      [8][d_qk + 16]      18,944   float32 queries
//     keys   [24][d_qk]          55,296   float32 rows, widened on load; the values are their first d_v columns
//     p      [24][8]                768   scores, then weights; kHidden where the row may not see the key
//     max, sum, alpha [8] each       96
//                                75,104 in all
//
// Threads to data, 128 in 4 warps:
//
//     score   warp w scores keys w, w + 4, ... (6 each) for all 8 rows. Lane = 4 * row + quarter takes floats 4 * quarter .. + 3 of every
//             16: a phase of 8 lanes reads rows 2k and 2k + 1, which (d_qk + 16) % 32 = 16 puts on different banks:
//                 lane       0    1    2    3  |  4    5    6    7
//                 q banks   0-3  4-7  8-11 12-15|16-19 ...       28-31       keys: 4 addresses, broadcast to both rows
//             Two shuffles add the quarters.
//     softmax warp w owns rows 2w and 2w + 1, a lane a key.
//     values  thread t owns 4 columns of all 8 rows (d_v 512) or of 4 rows (d_v 256): one 16-byte read of K for 32 or 16 FMAs.
//
// Expected bound: latency. A tile is 24 * d_qk * 4 B from L2 for 8 * 24 * (d_qk + d_v) FMAs with no load in flight meanwhile.
// Measured, H200, h_q 64, q 9, prefix 4,096: 20% of the FMA rate.

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_backends.hpp"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/work_list.cuh"
#include "plan/cuda_tiles.hpp"

namespace treemla {
namespace {

constexpr int kThreads = HeadTile::kThreads, kWarps = kThreads / 32;
constexpr int kRows = HeadTile::kRows, kKeys = HeadTile::kKeys;
constexpr float kHidden = -1.0f;  // no weight is negative

template <class T, int kDv, int kDrope>
struct Config {
  using Element = T;
  static constexpr int d_v = kDv, d_qk = kDv + kDrope;
  static constexpr int q_stride = d_qk + HeadTile::kPad;
  static constexpr int threads_per_row_group = d_v / 4;                // 4 columns a thread
  static constexpr int row_groups = kThreads / threads_per_row_group;  // 1 or 2
  static constexpr int rows_per_thread = kRows / row_groups;           // 8 or 4
  static_assert(q_stride % 32 == 16, "the bank drawing above");
};

template <class C>
struct alignas(16) Shared {
  float q[kRows][C::q_stride];
  float keys[kKeys][C::d_qk];
  float p[kKeys][kRows];
  float max[kRows], sum[kRows], alpha[kRows];
};
static_assert(sizeof(Shared<Config<float, 512, 64>>) == HeadTile::smem_bytes(576));
static_assert(sizeof(Shared<Config<float, 512, 64>>) == 75104, "the map above");
static_assert(sizeof(Shared<Config<float, 256, 32>>) == HeadTile::smem_bytes(288));

// ---- stages ----

// Rows past the item's end repeat its last one: they are scored, but never written.
template <class C>
__device__ void load_queries(const KernelArgs& args, const CudaWorkItem& item, Shared<C>& smem) {
  for (int i = threadIdx.x; i < kRows * C::d_qk; i += kThreads) {
    const int r = i / C::d_qk, d = i % C::d_qk;
    const int row = item.row_begin + r < item.row_end ? item.row_begin + r : item.row_end - 1;
    const int64_t node = item.q_begin + row / args.h_q;
    smem.q[r][d] =
        load_any(args.q, args.q_dtype, node * args.q_token_stride + row % args.h_q * args.q_head_stride + d);
  }
  if (threadIdx.x < kRows) {
    smem.max[threadIdx.x] = -INFINITY;
    smem.sum[threadIdx.x] = 0;
  }
}

// Keys [first, first + kKeys): a warp a row, 4 elements a lane. Rows past `end` are zeros.
template <class C>
__device__ void load_keys(const KernelArgs& args, const CudaWorkItem& item, int first, Shared<C>& smem) {
  using T = typename C::Element;
  const int lane = threadIdx.x % 32;
  for (int k = threadIdx.x / 32; k < kKeys; k += kWarps) {
    const int key = first + k;
    const bool there = key < item.key_end;
    const T* row = static_cast<const T*>(args.kv) +
                   (there ? pool_row(args, item.page_base, item.request, key) * args.kv_row_stride : 0);
    for (int d = 4 * lane; d < C::d_qk; d += 4 * 32) {
      float x[4] = {};
      if (there) load_vector<T, 4>(row + d, x);
      *reinterpret_cast<float4*>(&smem.keys[k][d]) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
}

// Scores of the tile; a key that row r may not see gets -inf. kMasked: some key is a tree row, or past the end.
template <class C, bool kMasked>
__device__ void score(const KernelArgs& args, const CudaWorkItem& item, int first, Shared<C>& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, quarter = lane % 4;
  constexpr int kMine = kKeys / kWarps;
  float s[kMine] = {};
  for (int d = 4 * quarter; d < C::d_qk; d += 16) {
    const float4 q = *reinterpret_cast<const float4*>(&smem.q[r][d]);
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const float4 x = *reinterpret_cast<const float4*>(&smem.keys[warp + k * kWarps][d]);
      s[k] +=
          fmaf(q.w, x.w,
               fmaf(q.z, x.z, fmaf(q.y, x.y, q.x * x.x)));  // a running sum of 4 * 36 terms would lose digits
    }
  }
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    s[k] += __shfl_xor_sync(~0u, s[k], 1);
    s[k] += __shfl_xor_sync(~0u, s[k], 2);
    if (quarter != 0) continue;
    const int key = first + warp + k * kWarps;
    bool visible = true;
    if constexpr (kMasked) {
      const int row = item.row_begin + r < item.row_end ? item.row_begin + r : item.row_end - 1;
      visible = key < item.key_end && (key < item.prefix_len ||
                                       sees(args.mask, item.q_begin, row / args.h_q, key - item.prefix_len));
    }
    smem.p[warp + k * kWarps][r] = visible ? s[k] * args.score_scale : -INFINITY;
  }
}

// Online softmax (Milakov and Gimelshein, 2018): scores become weights against the new maximum, alpha rescales what was summed so far.
template <class C>
__device__ void softmax(Shared<C>& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int r = 2 * warp; r < 2 * warp + 2; ++r) {
    const float s = lane < kKeys ? smem.p[lane][r] : -INFINITY;
    const float old_max = smem.max[r], new_max = fmaxf(old_max, warp_max(s));
    const float p = weight(s, new_max), sum = warp_sum(p);
    __syncwarp();  // every lane has read the old maximum
    if (lane < kKeys) smem.p[lane][r] = s == -INFINITY ? kHidden : p;
    if (lane == 0) {
      const float alpha = weight(old_max, new_max);
      smem.max[r] = new_max;
      smem.sum[r] = fmaf(smem.sum[r], alpha, sum);
      smem.alpha[r] = alpha;
    }
  }
}

// The tile's own sums are taken apart and added once, which keeps long sums accurate. A hidden key's row may hold NaN: its FMA is
// left out, not multiplied by 0.
template <class C, bool kMasked>
__device__ void accumulate(const Shared<C>& smem, float (&acc)[C::rows_per_thread][4]) {
  const int column = 4 * (threadIdx.x % C::threads_per_row_group),
            row0 = threadIdx.x / C::threads_per_row_group * C::rows_per_thread;
  float part[C::rows_per_thread][4] = {};
#pragma unroll 4
  for (int k = 0; k < kKeys; ++k) {
    const float4 v = *reinterpret_cast<const float4*>(&smem.keys[k][column]);
#pragma unroll
    for (int r = 0; r < C::rows_per_thread; ++r) {
      const float p = smem.p[k][row0 + r];
      if (kMasked && p < 0) continue;
      part[r][0] = fmaf(p, v.x, part[r][0]);
      part[r][1] = fmaf(p, v.y, part[r][1]);
      part[r][2] = fmaf(p, v.z, part[r][2]);
      part[r][3] = fmaf(p, v.w, part[r][3]);
    }
  }
#pragma unroll
  for (int r = 0; r < C::rows_per_thread; ++r)
#pragma unroll
    for (int c = 0; c < 4; ++c) acc[r][c] = fmaf(acc[r][c], smem.alpha[row0 + r], part[r][c]);
}

template <class C, bool kMasked>
__device__ void attend_tile(const KernelArgs& args, const CudaWorkItem& item, int first, Shared<C>& smem,
                            float (&acc)[C::rows_per_thread][4]) {
  __syncthreads();  // the last tile is used up
  load_keys(args, item, first, smem);
  __syncthreads();
  score<C, kMasked>(args, item, first, smem);
  __syncthreads();
  softmax(smem);
  __syncthreads();
  accumulate<C, kMasked>(smem, acc);
}

// To the output, or normalised to the item's partial.
template <class C>
__device__ void write_rows(const KernelArgs& args, const CudaWorkItem& item, const Shared<C>& smem,
                           const float (&acc)[C::rows_per_thread][4]) {
  const int column = 4 * (threadIdx.x % C::threads_per_row_group),
            row0 = threadIdx.x / C::threads_per_row_group * C::rows_per_thread;
  const bool is_partial = item.partial >= 0;
  const int64_t first_row = is_partial ? static_cast<int64_t>(item.partial) * kRows
                                       : static_cast<int64_t>(item.q_begin) * args.h_q + item.row_begin;
  void* out = is_partial ? args.partial_out : args.out;
  const DType dtype = is_partial ? DType::kF32 : args.out_dtype;
  float* lse = is_partial ? args.partial_lse : args.lse;
  const int rows = item.row_end - item.row_begin;
#pragma unroll
  for (int r = 0; r < C::rows_per_thread; ++r) {
    if (row0 + r >= rows) continue;
    const float sum = smem.sum[row0 + r];
    for (int c = 0; c < 4; ++c)
      store_any(out, dtype, (first_row + row0 + r) * C::d_v + column + c,
                sum == 0 ? 0.0f : acc[r][c] / sum * args.value_scale);
  }
  if (lse && threadIdx.x < rows) {
    const float sum = smem.sum[threadIdx.x];
    lse[first_row + threadIdx.x] = sum == 0 ? -INFINITY : smem.max[threadIdx.x] + logf(sum);
  }
}

// ---- kernel ----

template <class C>
__global__ void __launch_bounds__(kThreads, 3) head_tile_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ float4 dynamic_smem[];
  Shared<C>& smem = *reinterpret_cast<Shared<C>*>(dynamic_smem);
  WorkList list(args.plan, blockIdx.x);
  for (CudaWorkItem item; list.next(item);) {
    float acc[C::rows_per_thread][4] = {};
    __syncthreads();  // the last item is written
    load_queries(args, item, smem);
    int first = item.key_begin;
    for (const int unmasked = min(item.key_end, item.prefix_len); first + kKeys <= unmasked; first += kKeys)
      attend_tile<C, false>(args, item, first, smem, acc);
    for (; first < item.key_end; first += kKeys) attend_tile<C, true>(args, item, first, smem, acc);
    write_rows(args, item, smem, acc);
  }
}

// ---- instances: the widths of the models in use, for each cache dtype ----

struct Instance {
  DType kv;
  int d_v, d_rope;
  void (*function)(KernelArgs);
};
template <DType kv, class T, int d_v, int d_rope>
constexpr Instance make_instance() {
  return {kv, d_v, d_rope, head_tile_kernel<Config<T, d_v, d_rope>>};
}
constexpr Instance kInstances[] = {
    // Kimi K2.x, DeepSeek V2 / V3 / R1, GLM-4.7-Flash
    make_instance<DType::kF32, float, 512, 64>(),
    make_instance<DType::kBF16, __nv_bfloat16, 512, 64>(),
    make_instance<DType::kF16, __half, 512, 64>(),
    // Mistral-Small-4
    make_instance<DType::kF32, float, 256, 64>(),
    make_instance<DType::kBF16, __nv_bfloat16, 256, 64>(),
    make_instance<DType::kF16, __half, 256, 64>(),
    // MiniCPM3
    make_instance<DType::kF32, float, 256, 32>(),
    make_instance<DType::kBF16, __nv_bfloat16, 256, 32>(),
    make_instance<DType::kF16, __half, 256, 32>(),
    // GLM-5.3-Flash
    make_instance<DType::kF32, float, 512, 0>(),
    make_instance<DType::kBF16, __nv_bfloat16, 512, 0>(),
    make_instance<DType::kF16, __half, 512, 0>(),
};

class CudaHeadTile : public CudaBackend {
 public:
  CudaHeadTile() : CudaBackend("cuda_head_tile") {}

 protected:
  Support supports_kernel(const VerifyProblem& p, const CudaDevice&) const override {
    if (const Support s = supports_ladder_shape(p); !s.ok) return s;
    const std::string reason =
        why_not_aligned(p, static_cast<int>(4 * dtype_bytes(p.kv.dtype)));  // 4 elements a load
    return reason.empty() ? Support::yes() : Support::no(reason);
  }

  CudaInstance instance(const VerifyProblem& p, const CudaDevice&) const override {
    CudaInstance k;
    for (const Instance& i : kInstances)
      if (i.kv == p.kv.dtype && i.d_v == p.shape.d_v && i.d_rope == p.shape.d_rope)
        k.function = reinterpret_cast<const void*>(i.function);
    k.threads = kThreads;
    k.smem_bytes = HeadTile::smem_bytes(p.shape.d_qk());
    k.tile = HeadTile::policy();
    k.min_payload = 4 * tile_cost(k.tile, kRows);
    return k;
  }
};

}  // namespace

const Backend& cuda_head_tile_backend() {
  static const CudaHeadTile backend;
  return backend;
}

}  // namespace treemla
