// The best k tokens of rows of V scores, exactly and in order, reading each score once.
//
// A block keeps a chunk of 8,192 scores in registers, 16 a thread, as integers that order like them. A score that is among the
// chunk's best k is at least the k-th largest of the threads' own maxima: so that value, found bit by bit with one counting
// barrier a bit, lets through the best k and, on scores in random order, few others. These are ranked in shared memory against each
// other. Where too many pass (many equal scores) or k is large, the exact k-th largest score is searched bit by bit over all
// registers, then the last token that still counts among those equal to it.

#include "backend/cuda/block_ops.cuh"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/score_top.cuh"

namespace treemla {
namespace {

constexpr int kThreads = 512;
constexpr int kPerThread = kScoreChunk / kThreads;
constexpr int kMostPassed = 1024;    // room for the scores let through; no k is larger
constexpr int kMostByThreads = 256;  // k up to which the threads' maxima bound well
constexpr int kMergeThreads = 256;
constexpr int kMergeKeys = 2048;
static_assert(kMaxTreeBudget <= kMostPassed && kMaxBeamWidth <= kMostPassed && kMostPassed < kMergeKeys);

__device__ float widen(float x) { return x; }
__device__ float widen(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

// Element j of a load of 16 bytes.
template <class T>
__device__ float element(const uint4& load, int j) {
  const uint32_t words[4] = {load.x, load.y, load.z, load.w};
  if constexpr (sizeof(T) == 4) return __uint_as_float(words[j]);
  return __uint_as_float(j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xFFFF0000u);
}

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements a load

// Token, within the chunk, of a thread's element i: neighbours in a thread's loads of 16 bytes.
template <class T>
__device__ int token_of(int i) {
  constexpr int v = kVector<T>;
  return (i / v * kThreads + static_cast<int>(threadIdx.x)) * v + i % v;
}

// The thread's scores as order_of(); 0 for -inf and past the end. Sets `fault` at NaN and +inf.
template <class T>
__device__ void load_chunk(const T* chunk, int count, uint32_t (&order)[kPerThread], TreeFault& fault) {
  constexpr int v = kVector<T>;
  const bool whole = count == kScoreChunk && reinterpret_cast<uintptr_t>(chunk) % 16 == 0;
  if (whole) {
#pragma unroll
    for (int i = 0; i < kPerThread / v; ++i) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(chunk) + i * kThreads + threadIdx.x);
#pragma unroll
      for (int j = 0; j < v; ++j) {
        const float x = element<T>(raw, j);
        if (!(x < INFINITY)) fault = x != x ? TreeFault::kScoreNaN : TreeFault::kScoreInfinite;
        order[i * v + j] = order_of(x);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = token_of<T>(i);
    const float x = token < count ? widen(chunk[token]) : -INFINITY;
    if (!(x < INFINITY)) fault = x != x ? TreeFault::kScoreNaN : TreeFault::kScoreInfinite;
    order[i] = order_of(x);
  }
}

struct ChunkShared {
  BlockScratch scratch;
  uint64_t passed[kMostPassed];
  int counts[kThreads / 32];
  int num_passed;
};

// How many of the block's elements satisfy the predicate.
template <class Predicate>
__device__ int count_elements(ChunkShared& shared, Predicate predicate) {
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) mine += predicate(i);
  mine = __reduce_add_sync(~0u, mine);
  __syncthreads();  // readers of the last count are done
  if (threadIdx.x % 32 == 0) shared.counts[threadIdx.x / 32] = mine;
  __syncthreads();
  int sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += shared.counts[w];
  return sum;
}

// Lets through scores above `bound`, and of those equal to it the chunk's tokens up to `last`.
struct Bar {
  uint32_t bound;
  int last;
};

// A superset of the best k that is small on most data. `mine` is the thread's own maximum.
__device__ Bar bar_by_threads(uint32_t mine, int k) {
  uint32_t least = 0;  // the k-th largest of the maxima
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = least | 1u << bit;
    if (__syncthreads_count(mine >= candidate) >= k) least = candidate;
  }
  return {least > 0 ? least - 1 : 0, -1};
}

// The best k exactly, or all that have a probability if these are fewer.
template <class T>
__device__ Bar exact_bar(ChunkShared& shared, const uint32_t (&order)[kPerThread], int k) {
  uint32_t bound = 0;  // the k-th largest
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = bound | 1u << bit;
    if (count_elements(shared, [&](int i) { return order[i] >= candidate; }) >= k) bound = candidate;
  }
  if (bound == 0) return {0, -1};
  const int need = k - count_elements(shared, [&](int i) { return order[i] > bound; });
  int last = kScoreChunk - 1;  // the need-th token of those equal to it
#pragma unroll 1
  for (int step = kScoreChunk / 2; step > 0; step /= 2) {
    const int candidate = last - step;
    if (count_elements(shared, [&](int i) { return order[i] == bound && token_of<T>(i) <= candidate; }) >=
        need)
      last = candidate;
  }
  return {bound, last};
}

// Puts what the bar lets through into shared.passed, as far as there is room; returns how many there are.
template <class T>
__device__ int collect(ChunkShared& shared, const uint32_t (&order)[kPerThread], int first_token, Bar bar) {
  __syncthreads();
  if (threadIdx.x == 0) shared.num_passed = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = token_of<T>(i);
    if (order[i] < bar.bound || (order[i] == bar.bound && token > bar.last)) continue;
    const int at = atomicAdd(&shared.num_passed, 1);
    if (at < kMostPassed) shared.passed[at] = rank_key(order[i], first_token + token);
  }
  __syncthreads();
  return shared.num_passed;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    score_chunk_kernel(const T* scores, int64_t row_stride, int vocab, const __grid_constant__ ScoreTop top) {
  __shared__ ChunkShared shared;
  const int64_t row = blockIdx.y, at = row * top.chunks + blockIdx.x;
  const int first_token = static_cast<int>(blockIdx.x) * kScoreChunk;
  uint32_t order[kPerThread];
  TreeFault fault = TreeFault::kNone;
  load_chunk(scores + row * row_stride + first_token, min(kScoreChunk, vocab - first_token), order, fault);

  const auto worst = static_cast<TreeFault>(block_max64(static_cast<uint64_t>(fault), shared.scratch));
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) mine = max(mine, order[i]);
  const float max = float_of_order(static_cast<uint32_t>(block_max64(mine, shared.scratch)));
  uint64_t total = 0;
  if (!top.are_log_probs) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) total += exp_weight(add_rn(float_of_order(order[i]), -max));
    total = block_sum64(total, shared.scratch);
  }
  if (threadIdx.x == 0) {
    top.chunk_max[at] = max;
    top.chunk_total[at] = total;
    top.chunk_fault[at] = worst;
  }

  int passed = 0;
#pragma unroll 1
  for (bool exact = top.k > kMostByThreads;; exact = true) {
    passed = collect<T>(shared, order, first_token,
                        exact ? exact_bar<T>(shared, order, top.k) : bar_by_threads(mine, top.k));
    if (passed <= kMostPassed) break;
  }
  uint64_t* out = top.chunk_keys + at * top.k;
  for (int i = threadIdx.x; i < passed; i += kThreads) {
    const uint64_t key = shared.passed[i];
    int rank = 0;
    for (int j = 0; j < passed; ++j) rank += shared.passed[j] > key;
    if (rank < top.k) out[rank] = key;
  }
  for (int i = passed + threadIdx.x; i < top.k; i += kThreads) out[i] = 0;
}

// Descending, n a power of two.
__device__ void bitonic_sort(uint64_t* keys, int n) {
  for (int size = 2; size <= n; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < n / 2; i += kMergeThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const uint64_t a = keys[low], b = keys[high];
        const bool descending = (low & size) == 0;
        if (descending ? a < b : a > b) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// The chunks' keys are a stream; each round takes in as many as there is room for beside the best k so far.
__global__ void __launch_bounds__(kMergeThreads) score_merge_kernel(const __grid_constant__ ScoreTop top) {
  __shared__ uint64_t keys[kMergeKeys];
  const int64_t row = blockIdx.x;
  const int count = top.chunks * top.k;
  const uint64_t* stream = top.chunk_keys + row * count;
  int kept = 0;
  for (int begin = 0; begin < count;) {
    const int taken = min(count - begin, kMergeKeys - kept);
    int n = 2;
    while (n < kept + taken) n *= 2;
    for (int i = threadIdx.x; i < n - kept; i += kMergeThreads)
      keys[kept + i] = i < taken ? stream[begin + i] : 0;
    bitonic_sort(keys, n);
    begin += taken;
    kept = min(top.k, kept + taken);
  }
  for (int i = threadIdx.x; i < top.k; i += kMergeThreads) top.keys[row * top.k + i] = i < kept ? keys[i] : 0;
}

}  // namespace

ScoreTop take_score_top(TreeWorkspace& workspace, const ScoreView& scores, int64_t rows, int k) {
  ScoreTop top;
  top.rows = static_cast<int>(rows);
  top.chunks = ceil_div(scores.vocab, kScoreChunk);
  top.k = k;
  top.are_log_probs = scores.are_log_probs;
  const std::size_t chunks = static_cast<std::size_t>(rows) * static_cast<std::size_t>(top.chunks);
  top.keys = workspace.take<uint64_t>(static_cast<std::size_t>(rows) * k);
  top.chunk_keys = workspace.take<uint64_t>(chunks * k);
  top.chunk_max = workspace.take<float>(chunks);
  top.chunk_total = workspace.take<uint64_t>(chunks);
  top.chunk_fault = workspace.take<TreeFault>(chunks);
  return top;
}

void launch_score_top(const ScoreView& scores, const ScoreTop& top, cudaStream_t stream) {
  const int64_t stride = scores.row_stride ? scores.row_stride : scores.vocab;
  constexpr int kMostRows = 65535;  // of a grid's second dimension
  for (int first = 0; first < top.rows; first += kMostRows) {
    ScoreTop part = top;
    part.rows = min(kMostRows, top.rows - first);
    const int64_t chunks = static_cast<int64_t>(first) * top.chunks;
    part.chunk_keys += chunks * top.k;
    part.chunk_max += chunks;
    part.chunk_total += chunks;
    part.chunk_fault += chunks;
    const dim3 grid(top.chunks, part.rows);
    if (scores.dtype == DType::kF32) {
      score_chunk_kernel<<<grid, kThreads, 0, stream>>>(
          static_cast<const float*>(scores.data) + first * stride, stride, scores.vocab, part);
    } else {
      score_chunk_kernel<<<grid, kThreads, 0, stream>>>(
          static_cast<const uint16_t*>(scores.data) + first * stride, stride, scores.vocab, part);
    }
    check_launch("score_chunk_kernel");
  }
  score_merge_kernel<<<top.rows, kMergeThreads, 0, stream>>>(top);
  check_launch("score_merge_kernel");
}

void load_score_top(const ScoreView& scores) {
  if (scores.dtype == DType::kF32) {
    load_tree_kernel(score_chunk_kernel<float>);
  } else {
    load_tree_kernel(score_chunk_kernel<uint16_t>);
  }
  load_tree_kernel(score_merge_kernel);
}

}  // namespace treemla
