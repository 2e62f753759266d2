// cuda_naive: the first kernel anyone would write, kept as the GPU's oracle and as the baseline of the ladder.
//
// A block computes one (node, head) row of one request: every score, their softmax, then the weighted sum of the values.
//
//     s_j = score_scale * dot(q, kv[j])      a thread a key, serially over the d_qk terms
//     out = sum_j exp(s_j - lse) kv[j, :d_v] a thread every kThreads-th column, serially over the keys
//
// Takes any d_v, d_rope, head count, page size and mask; fp32, bf16, fp16 widened on load. Refuses requests whose scores don't fit
// the shared memory of a block: about 58,000 keys where that is 227 KB, 25,000 where it is 99 KB.
//
// Shared memory            bytes (d_qk 576, 16,384 keys)
//     q       [d_qk]        2,304   as float32
//     scratch [256]         1,024   block-wide maximum and sum
//     scores  [kv_len]     65,536   s_j, then exp(s_j - max), or kHidden
//
// Threads to data, scores and values:
//
//     scores: thread t -> keys t, t + 256, ...   each walks its own row, so that a warp's load touches 32 rows: 32 sectors for
//                                                 32 elements. This is what the next rungs repair.
//     values: thread t -> columns t, t + 256     neighbours read neighbours
//
// Expected bound: L1 wavefronts, 32 a warp-wide load of the score loop. No key is shared between rows: the cache is read from L2
// q_len * h_q times, twice each.

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_backends.hpp"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/work_list.cuh"
#include "plan/cuda_tiles.hpp"

namespace treemla {
namespace {

constexpr int kThreads = NaiveTile::kThreads;
constexpr float kHidden = -INFINITY;

struct Shared {
  float* q;        // [d_qk], padded to 4
  float* scratch;  // [kThreads]
  float* scores;   // [smem_keys]
  __device__ Shared(float* base, int d_qk)
      : q(base), scratch(q + round_up(d_qk, 4)), scores(scratch + kThreads) {}
};
static_assert(NaiveTile::fixed_bytes(576) == 2304 + 1024, "the map above");
static_assert(NaiveTile::smem_bytes(576, 16384) == 2304 + 1024 + 65536, "the map above");

struct Row {
  int node;  // in the request
  int64_t q_row, out_row;
  DeviceRequest request;
};

// ---- stages ----

__device__ void load_query(const KernelArgs& args, int64_t node, int head, int d_qk, float* q) {
  const int64_t from = node * args.q_token_stride + head * args.q_head_stride;
  for (int d = threadIdx.x; d < d_qk; d += kThreads) q[d] = load_any(args.q, args.q_dtype, from + d);
}

// Four running sums keep the rounding errors of a 576-term sum small.
template <class T>
__device__ float score(const KernelArgs& args, const float* q, const T* row, int d_qk) {
  float sum[4] = {};
  int d = 0;
  for (; d + 4 <= d_qk; d += 4)
    for (int i = 0; i < 4; ++i) sum[i] = fmaf(q[d + i], to_float(row[d + i]), sum[i]);
  for (; d < d_qk; ++d) sum[0] = fmaf(q[d], to_float(row[d]), sum[0]);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) * args.score_scale;
}

template <class T>
__device__ const T* key_row(const KernelArgs& args, const DeviceRequest& r, int key) {
  return static_cast<const T*>(args.kv) + pool_row(args, r.page_base, r.request, key) * args.kv_row_stride;
}

template <class T>
__device__ void score_keys(const KernelArgs& args, const DeviceRequest& r, int node, int d_qk,
                           const Shared& smem) {
  const int prefix_len = r.kv_len - r.q_len;
  for (int key = threadIdx.x; key < r.kv_len; key += kThreads) {
    const bool visible = key < prefix_len || sees(args.mask, r.q_begin, node, key - prefix_len);
    smem.scores[key] = visible ? score(args, smem.q, key_row<T>(args, r, key), d_qk) : kHidden;
  }
}

template <class Combine>
__device__ float reduce(float x, float* scratch, Combine combine) {
  __syncthreads();
  scratch[threadIdx.x] = x;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) scratch[threadIdx.x] = combine(scratch[threadIdx.x], scratch[threadIdx.x + half]);
  }
  __syncthreads();
  return scratch[0];
}

// Scores become weights exp(s_j - max), hidden ones stay marked; returns their maximum and sum.
struct MaxSum {
  float max, sum;
};
__device__ MaxSum softmax(int keys, const Shared& smem) {
  float m = -INFINITY, sum = 0;
  for (int key = threadIdx.x; key < keys; key += kThreads) m = fmaxf(m, smem.scores[key]);
  m = reduce(m, smem.scratch, [](float a, float b) { return fmaxf(a, b); });
  for (int key = threadIdx.x; key < keys; key += kThreads) {
    const float s = smem.scores[key];
    if (s == kHidden) continue;
    smem.scores[key] = expf(s - m);
    sum += smem.scores[key];
  }
  return {m, reduce(sum, smem.scratch, [](float a, float b) { return a + b; })};
}

// Sums of 32 keys are taken apart and added up: one running sum over thousands of keys would lose the last digits.
template <class T>
__device__ void accumulate(const KernelArgs& args, const DeviceRequest& r, float sum, int64_t out_row,
                           const Shared& smem) {
  for (int d = threadIdx.x; d < args.d_v; d += kThreads) {
    float total = 0;
    for (int first = 0; first < r.kv_len; first += 32) {
      const int end = first + 32 < r.kv_len ? first + 32 : r.kv_len;
      float part = 0;
#pragma unroll 8
      for (int key = first; key < end; ++key) {
        const float w = smem.scores[key], v = to_float(key_row<T>(args, r, key)[d]);
        part = w == kHidden ? part : fmaf(w, v, part);  // a hidden row may hold NaN: 0 times it would be NaN
      }
      total += part;
    }
    store_any(args.out, args.out_dtype, out_row * args.d_v + d,
              sum == 0 ? 0.0f : total / sum * args.value_scale);
  }
}

// ---- kernel ----

__device__ void write_row_without_keys(const KernelArgs& args, int64_t row, float value, float lse) {
  for (int d = threadIdx.x; d < args.d_v; d += kThreads)
    store_any(args.out, args.out_dtype, row * args.d_v + d, value);
  if (args.lse && threadIdx.x == 0) args.lse[row] = lse;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) naive_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ float4 dynamic_smem[];
  const int row = static_cast<int>(blockIdx.x), node = row / args.h_q, head = row % args.h_q;
  const int index = find_request(args.plan, node);
  if (index < 0) return write_row_without_keys(args, row, 0, -INFINITY);
  const DeviceRequest r = args.plan.requests[index];
  if (r.kv_len >
      args.smem_keys) {  // the bounds that the caller gave were wrong: NaN is harder to miss than half a result
    report_fault(args.plan, DeviceFault::kMaxKvLen, r.request, r.kv_len);
    return write_row_without_keys(args, row, NAN, NAN);
  }
  const int d_qk = args.d_v + args.d_rope;
  const Shared smem(reinterpret_cast<float*>(dynamic_smem), d_qk);

  load_query(args, node, head, d_qk, smem.q);
  __syncthreads();
  score_keys<T>(args, r, node - r.q_begin, d_qk, smem);
  const MaxSum s = softmax(r.kv_len, smem);
  accumulate<T>(args, r, s.sum, row, smem);
  if (args.lse && threadIdx.x == 0) args.lse[row] = s.sum == 0 ? -INFINITY : s.max + logf(s.sum);
}

// ---- instances: one a cache dtype; widths are run-time numbers, so that any model has an oracle ----

constexpr struct {
  DType kv;
  void (*function)(KernelArgs);
} kInstances[] = {
    {DType::kF32, naive_kernel<float>},
    {DType::kBF16, naive_kernel<__nv_bfloat16>},
    {DType::kF16, naive_kernel<__half>},
};

class CudaNaive : public CudaBackend {
 public:
  CudaNaive() : CudaBackend("cuda_naive") {}

 protected:
  // A device problem's lengths can't be seen: max_kv_len, or the page table, says how long they may get.
  Support supports_kernel(const VerifyProblem& p, const CudaDevice& device) const override {
    return supports_kv_len(kv_len_bound(p), most_keys(p, device));
  }

  CudaInstance instance(const VerifyProblem& p, const CudaDevice& device) const override {
    CudaInstance k;
    for (const auto& i : kInstances)
      if (i.kv == p.kv.dtype) k.function = reinterpret_cast<const void*>(i.function);
    k.threads = kThreads;
    k.smem_keys =
        static_cast<int>(kv_len_bound(p) < most_keys(p, device) ? kv_len_bound(p) : most_keys(p, device));
    k.smem_bytes = NaiveTile::smem_bytes(p.shape.d_qk(), k.smem_keys);
    k.tile.rows_per_tile = 1;
    k.splits = false;
    return k;
  }

 private:
  static int64_t most_keys(const VerifyProblem& p, const CudaDevice& device) {
    const int smem = device.usable ? device.model.smem_per_block_bytes : 227 * 1024;
    return (smem - NaiveTile::fixed_bytes(p.shape.d_qk())) / NaiveTile::kBytesPerKey / 4 * 4;
  }
};

}  // namespace

const Backend& cuda_naive_backend() {
  static const CudaNaive backend;
  return backend;
}

}  // namespace treemla
