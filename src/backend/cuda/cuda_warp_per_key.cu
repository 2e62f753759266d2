// cuda_warp_per_key: the exact path. One (node, head) row a block, its keys split over blocks and over the 8 warps of each; a warp
// scores a key by a dot product whose terms lie on its lanes, and keeps a softmax of its own.
//
//     s = score_scale * sum over lanes of (q . kv[j])            d_qk / 32 terms a lane, then 5 shuffles
//     max, sum, acc[d_v / 32 a lane] updated online, key by key
//
// Each cached row is read once, by coalesced loads of 16 bytes a lane (512 contiguous bytes a warp) straight into registers, where
// the values already are when the score is known. The scalar instance loads an element at a time: the difference is what 16-byte
// loads are worth. Keys a node may not see are stepped over: their rows are never read, so nothing in them can reach the result.
//
// Shared memory                     bytes (512/64, float32, 16-byte loads)
//     q    [d_v + padded rope]       2,560   in lane order: see below
//     acc  [8 warps][d_v]           16,384   what each warp has folded away, and the merge at the end
//     rows [8 warps][32]             2,048   where the next keys of each warp lie in the pool
//     max, sum [8] each                 64
//                                   21,056 in all, so that shared memory never limits a SM: 256 threads of at most 64 registers do,
//                                          four blocks (three for wide 16-bit rows on sm_80)
//
// A row to lanes (width W elements a load, here float32 with W = 4):
//
//     element   0..3   4..7  ...  124..127 | 128..131 ...      ... 511 | 512..515 ... 572..575
//     lane       0      1    ...     31    |    0     ...           31 |    0     ...    15      16..31 idle
//               '------- load 0 -------'     '- load 1 -'    load 3      '------- load 4: rope ------'
//
// q and acc lie in shared memory as chunk[load, W / 4][lane][4], so that a warp's reads of 16 bytes a lane meet no bank twice.
// A block's keys to warps, 256 a stripe: lane i of warp w looks up the pool row of key 8 i + w; the warp then takes those the node sees in turn.
//
// Sums are short (lanes split the dot product, warps split the keys and fold their sums every 512), which is why near-uniform attention over 2,048
// keys comes out within 2-3e-8.
//
// Expected bound: the pipe to L1 and shared memory, 128 bytes a clock: a key is 4 d_qk bytes of q and d_qk * sizeof(T) of its row, 36
// clocks in float32, and rows share nothing. Halfway between that and the issue slots (about 75 instructions a key and warp) lies what is
// measured. Beyond 16K keys blocks that run apart miss L2, and 16-byte loads, which only make them faster, no longer help.

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_backends.hpp"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/work_cursor.cuh"
#include "plan/cuda_tiles.hpp"

namespace treemla {
namespace {

constexpr int kThreads = WarpPerKey::kThreads, kWarps = WarpPerKey::kWarps;
constexpr int kStripe = 32 * kWarps, kFoldStripes = 16;

template <class T, int kWidth, int kDv, int kDrope>
struct Config {
  using Element = T;
  static constexpr int width = kWidth, d_v = kDv, d_qk = kDv + kDrope;
  static constexpr int value_loads = kDv / (32 * kWidth);
  static constexpr int rope_loads = ceil_div(kDrope, 32 * kWidth);
  static constexpr int loads = value_loads + rope_loads;
  static_assert(value_loads * 32 * kWidth == kDv && kDrope % kWidth == 0);
};

template <class C>
struct alignas(16) Shared {
  float q[C::loads * 32 * C::width];
  float acc[kWarps][C::d_v];
  int64_t rows[kWarps][32];
  float max[kWarps], sum[kWarps];
};
static_assert(sizeof(Shared<Config<float, 4, 512, 64>>) == 21056, "the map above");
static_assert(sizeof(Shared<Config<float, 4, 512, 64>>) == WarpPerKey::smem_bytes(512, 64, 4));
static_assert(sizeof(Shared<Config<__half, 8, 256, 32>>) == WarpPerKey::smem_bytes(256, 32, 8));
static_assert(sizeof(Shared<Config<float, 1, 512, 0>>) == WarpPerKey::smem_bytes(512, 0, 1));

// Where element d of a row lies in q and acc, and back.
template <int kWidth>
__host__ __device__ constexpr int to_position(int d) {
  if (kWidth == 1) return d;
  constexpr int kChunks = ceil_div(kWidth, 4);
  const int load = d / (32 * kWidth), lane = d / kWidth % 32, e = d % kWidth;
  return ((load * kChunks + e / 4) * 32 + lane) * 4 + e % 4;
}
template <int kWidth>
__host__ __device__ constexpr int to_element(int position) {
  if (kWidth == 1) return position;
  constexpr int kChunks = ceil_div(kWidth, 4);
  const int chunk = position / 128, lane = position / 4 % 32;
  return (chunk / kChunks * 32 + lane) * kWidth + chunk % kChunks * 4 + position % 4;
}
static_assert(to_element<8>(to_position<8>(397)) == 397 && to_element<4>(to_position<4>(397)) == 397);

// A warp's softmax over the keys it has seen since the last fold().
template <class C>
struct State {
  float max = -INFINITY, sum = 0;
  float acc[C::value_loads][C::width] = {};
};

// ---- stages ----

template <class C>
__device__ void load_query(const KernelArgs& args, const CudaWorkItem& item, Shared<C>& smem) {
  const int64_t node = item.q_begin + item.row_begin / args.h_q;
  const int64_t from = node * args.q_token_stride + item.row_begin % args.h_q * args.q_head_stride;
  for (int d = threadIdx.x; d < C::loads * 32 * C::width; d += kThreads)
    smem.q[to_position<C::width>(d)] = d < C::d_qk ? load_any(args.q, args.q_dtype, from + d) : 0.0f;
  if (threadIdx.x < kWarps) {
    smem.max[threadIdx.x] = -INFINITY;
    smem.sum[threadIdx.x] = 0;
  }
}

// This lane's key of the stripe: the offset of its row in the pool, or -1 if there is no such key or the node may not see it.
__device__ int64_t find_row(const KernelArgs& args, const CudaWorkItem& item, int stripe) {
  const int64_t key =
      item.key_begin + static_cast<int64_t>(stripe) * kStripe + threadIdx.x % 32 * kWarps + threadIdx.x / 32;
  if (key >= item.key_end) return -1;
  const int k = static_cast<int>(key), node = item.row_begin / args.h_q;
  if (k >= item.prefix_len && !sees(args.mask, item.q_begin, node, k - item.prefix_len)) return -1;
  return pool_row(args, item.page_base, item.request, k) * args.kv_row_stride;
}

// The visible keys of this warp's part of a stripe, in order; returns how many.
__device__ int list_rows(const KernelArgs& args, const CudaWorkItem& item, int stripe, int64_t* rows) {
  const int64_t mine = find_row(args, item, stripe);
  const unsigned visible = __ballot_sync(~0u, mine >= 0), before = visible & ((1u << threadIdx.x % 32) - 1);
  __syncwarp();  // the last list is used up
  if (mine >= 0) rows[__popc(before)] = mine;
  __syncwarp();
  return __popc(visible);
}

// What one lane holds of a row, as stored: widened where it is used, for 16-bit elements take half the registers.
template <class C>
struct alignas(C::width * sizeof(typename C::Element)) Piece {
  typename C::Element x[C::width];
};

template <class C>
__device__ void load_row(const typename C::Element* row, Piece<C> (&to)[C::loads]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < C::loads; ++i) {
    const int d = (i * 32 + lane) * C::width;
    if (i < C::value_loads || d < C::d_qk)
      to[i] = *reinterpret_cast<const Piece<C>*>(row + d);
    else
      to[i] = Piece<C>{};
  }
}

// Four floats of shared memory. Volatile: the compiler would lift the reads of q out of the loop over keys, and spill.
__device__ float4 read_each_time(const float* p) {
  float4 v;
  asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(p))));
  return v;
}

// This lane's part of the dot product.
template <class C>
__device__ float multiply(const Shared<C>& smem, const Piece<C> (&key)[C::loads]) {
  const int lane = threadIdx.x % 32;
  float dot = 0;
#pragma unroll
  for (int i = 0; i < C::loads; ++i) {
    if constexpr (C::width == 1) {
      dot = fmaf(*const_cast<const volatile float*>(&smem.q[i * 32 + lane]), to_float(key[i].x[0]), dot);
    } else {
#pragma unroll
      for (int c = 0; c < C::width / 4; ++c) {
        const float4 q = read_each_time(&smem.q[((i * (C::width / 4) + c) * 32 + lane) * 4]);
        dot = fmaf(q.x, to_float(key[i].x[4 * c]), dot);
        dot = fmaf(q.y, to_float(key[i].x[4 * c + 1]), dot);
        dot = fmaf(q.z, to_float(key[i].x[4 * c + 2]), dot);
        dot = fmaf(q.w, to_float(key[i].x[4 * c + 3]), dot);
      }
    }
  }
  return dot;
}

// Online softmax (Milakov and Gimelshein, 2018). The maximum rarely moves, and all lanes agree on when.
template <class C>
__device__ void update(State<C>& state, float s, const Piece<C> (&key)[C::loads]) {
  if (s > state.max) {
    const float alpha = weight(state.max, s);
    state.max = s;
    state.sum *= alpha;
#pragma unroll
    for (int i = 0; i < C::value_loads; ++i)
#pragma unroll
      for (int e = 0; e < C::width; ++e) state.acc[i][e] *= alpha;
  }
  const float p = weight(s, state.max);
  state.sum += p;
#pragma unroll
  for (int i = 0; i < C::value_loads; ++i)
#pragma unroll
    for (int e = 0; e < C::width; ++e) state.acc[i][e] = fmaf(p, to_float(key[i].x[e]), state.acc[i][e]);
}

// Adds what the warp has summed up to its share in shared memory and begins anew. Long sums lose digits, and a key that weighs less
// than half of the sum's last digit is lost whole: folded every 512 keys, 64K keys keep what one sum of all of them would lose (2e-5).
template <class C>
__device__ void fold(State<C>& state, Shared<C>& smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (state.max == -INFINITY && state.sum == 0) return;  // no key since the last time
  const float old_max = smem.max[warp], new_max = fmaxf(old_max, state.max);
  const float keep = weight(old_max, new_max), take = weight(state.max, new_max);
  __syncwarp();  // every lane has read the old maximum
  if (lane == 0) {
    smem.max[warp] = new_max;
    smem.sum[warp] = fmaf(smem.sum[warp], keep, state.sum * take);
  }
  constexpr int kPiece = C::width < 4 ? C::width : 4;
  struct alignas(4 * kPiece) Floats {
    float x[kPiece];
  };
#pragma unroll
  for (int i = 0; i < C::value_loads; ++i)
#pragma unroll
    for (int c = 0; c < C::width / kPiece; ++c) {
      Floats& acc =
          *reinterpret_cast<Floats*>(&smem.acc[warp][((i * (C::width / kPiece) + c) * 32 + lane) * kPiece]);
      const Floats old = keep == 0 ? Floats{} : acc;  // nothing is there the first time
      Floats sum;
#pragma unroll
      for (int e = 0; e < kPiece; ++e) sum.x[e] = fmaf(state.acc[i][kPiece * c + e], take, old.x[e] * keep);
      acc = sum;
    }
  state = State<C>{};
}

// The visible keys of this warp, one after another. Hidden keys and keys past the end leave no trace, not even in rounding.
template <class C>
__device__ void attend(const KernelArgs& args, const CudaWorkItem& item, Shared<C>& smem) {
  State<C> state;
  const auto* kv = static_cast<const typename C::Element*>(args.kv);
  int64_t* rows = smem.rows[threadIdx.x / 32];
  const int stripes = ceil_div(item.key_end - item.key_begin, kStripe);
  for (int stripe = 0; stripe < stripes; ++stripe) {
    const int count = list_rows(args, item, stripe, rows);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      Piece<C> key[C::loads];
      load_row<C>(kv + rows[i], key);
      update(state, warp_sum(multiply(smem, key)) * args.score_scale, key);
    }
    if (stripe % kFoldStripes == kFoldStripes - 1) fold(state, smem);
  }
  fold(state, smem);
}

// Merges the warps and writes the row: to the output, or to the item's partial.
template <class C>
__device__ void write_row(const KernelArgs& args, const CudaWorkItem& item, const Shared<C>& smem) {
  float m = -INFINITY, sum = 0;
  for (int w = 0; w < kWarps; ++w) m = fmaxf(m, smem.max[w]);
  for (int w = 0; w < kWarps; ++w) sum = fmaf(smem.sum[w], weight(smem.max[w], m), sum);
  const bool is_partial = item.partial >= 0;
  const int64_t row =
      is_partial ? item.partial : static_cast<int64_t>(item.q_begin) * args.h_q + item.row_begin;
  void* out = is_partial ? args.partial_out : args.out;
  const DType dtype = is_partial ? DType::kF32 : args.out_dtype;
  float* lse = is_partial ? args.partial_lse : args.lse;
  for (int position = threadIdx.x; position < C::d_v; position += kThreads) {
    float x = 0;
    for (int w = 0; w < kWarps; ++w)
      if (const float share = weight(smem.max[w], m); share != 0)
        x = fmaf(smem.acc[w][position], share, x);  // else nothing is there
    store_any(out, dtype, row * C::d_v + to_element<C::width>(position),
              sum == 0 ? 0.0f : x / sum * args.value_scale);
  }
  if (lse && threadIdx.x == 0) lse[row] = sum == 0 ? -INFINITY : m + logf(sum);
}

// ---- kernel ----

// Four blocks an SM are 64 registers a thread. The wide 16-bit instances of sm_80 don't quite fit them.
template <class C>
constexpr int blocks_per_sm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (sizeof(typename C::Element) == 2 && C::width == 8 && C::d_v == 512) return 3;
#endif
  return 4;
}

template <class C>
__global__ void __launch_bounds__(kThreads, blocks_per_sm<C>())
    warp_per_key_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ float4 dynamic_smem[];
  Shared<C>& smem = *reinterpret_cast<Shared<C>*>(dynamic_smem);
  __shared__ SharedWork work;
  work.begin(args.plan, static_cast<int>(blockIdx.x));
  while (work.next()) {
    load_query(args, work.item(), smem);
    __syncthreads();
    attend(args, work.item(), smem);
    __syncthreads();
    write_row(args, work.item(), smem);
  }
}

// ---- instances: the widths of the models in use, for each cache dtype; loads of 16 bytes, and of one element ----

struct Instance {
  DType kv;
  int width, d_v, d_rope;
  void (*function)(KernelArgs);
};
template <DType kv, class T, int width, int d_v, int d_rope>
constexpr Instance make_instance() {
  return {kv, width, d_v, d_rope, warp_per_key_kernel<Config<T, width, d_v, d_rope>>};
}
constexpr Instance kInstances[] = {
    // Kimi K2.x, DeepSeek V2 / V3 / R1, GLM-4.7-Flash
    make_instance<DType::kF32, float, 4, 512, 64>(),
    make_instance<DType::kBF16, __nv_bfloat16, 8, 512, 64>(),
    make_instance<DType::kF16, __half, 8, 512, 64>(),
    // Mistral-Small-4
    make_instance<DType::kF32, float, 4, 256, 64>(),
    make_instance<DType::kBF16, __nv_bfloat16, 8, 256, 64>(),
    make_instance<DType::kF16, __half, 8, 256, 64>(),
    // MiniCPM3
    make_instance<DType::kF32, float, 4, 256, 32>(),
    make_instance<DType::kBF16, __nv_bfloat16, 8, 256, 32>(),
    make_instance<DType::kF16, __half, 8, 256, 32>(),
    // GLM-5.3-Flash
    make_instance<DType::kF32, float, 4, 512, 0>(),
    make_instance<DType::kBF16, __nv_bfloat16, 8, 512, 0>(),
    make_instance<DType::kF16, __half, 8, 512, 0>(),
    // The scalar rung
    make_instance<DType::kF32, float, 1, 512, 64>(),
    make_instance<DType::kBF16, __nv_bfloat16, 1, 512, 64>(),
    make_instance<DType::kF16, __half, 1, 512, 64>(),
    make_instance<DType::kF32, float, 1, 256, 64>(),
    make_instance<DType::kBF16, __nv_bfloat16, 1, 256, 64>(),
    make_instance<DType::kF16, __half, 1, 256, 64>(),
    make_instance<DType::kF32, float, 1, 256, 32>(),
    make_instance<DType::kBF16, __nv_bfloat16, 1, 256, 32>(),
    make_instance<DType::kF16, __half, 1, 256, 32>(),
    make_instance<DType::kF32, float, 1, 512, 0>(),
    make_instance<DType::kBF16, __nv_bfloat16, 1, 512, 0>(),
    make_instance<DType::kF16, __half, 1, 512, 0>(),
};

class CudaWarpPerKey : public CudaBackend {
 public:
  explicit CudaWarpPerKey(bool vector)
      : CudaBackend(vector ? "cuda_warp_per_key" : "cuda_warp_per_key_scalar"), vector_(vector) {}

 protected:
  Support supports_kernel(const VerifyProblem& p, const CudaDevice&) const override {
    if (const Support s = supports_ladder_shape(p); !s.ok || !vector_) return s;
    const std::string reason = why_not_aligned(p, 16);
    return reason.empty() ? Support::yes() : Support::no(reason);
  }

  CudaInstance instance(const VerifyProblem& p, const CudaDevice&) const override {
    const int width = vector_ ? WarpPerKey::vector_width(static_cast<int>(dtype_bytes(p.kv.dtype))) : 1;
    CudaInstance k;
    for (const Instance& i : kInstances)
      if (i.kv == p.kv.dtype && i.width == width && i.d_v == p.shape.d_v && i.d_rope == p.shape.d_rope)
        k.function = reinterpret_cast<const void*>(i.function);
    k.threads = kThreads;
    k.smem_bytes = WarpPerKey::smem_bytes(p.shape.d_v, p.shape.d_rope, width);
    k.tile = WarpPerKey::policy();
    k.min_payload = 2 * tile_cost(k.tile, 1);
    k.label = vector_ ? "16-byte loads" : "one element a load";
    return k;
  }

 private:
  bool vector_;
};

}  // namespace

const Backend& cuda_warp_per_key_backend() {
  static const CudaWarpPerKey backend(true);
  return backend;
}

const Backend& cuda_warp_per_key_scalar_backend() {
  static const CudaWarpPerKey backend(false);
  return backend;
}

}  // namespace treemla
