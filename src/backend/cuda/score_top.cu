// The best k tokens of rows of V scores, exactly and in order, reading each score once.
//
// A block takes a run of chunks of 8,192 scores one after the other: 16 a thread in registers, the next chunk on its way to shared
// memory. It keeps the keys of what has come over a bar. The bar begins at a score that at least k of the first chunk reach: each
// warp finds the k/16-th largest of its threads' maxima, and the least of these will do. On scores in random order it lets through
// about 2k. Whenever more than 2k have gathered, the best k of them stay and the last of these is the new bar, so of the n-th
// chunk only about k/n come over it. Where there is no room for what passes (many equal scores), or k is large, the chunk's k-th
// largest score is searched bit by bit over all registers, then the last token that still counts among those equal to it.

#include <cuda_pipeline_primitives.h>

#include "backend/cuda/block_ops.cuh"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/score_top.cuh"

namespace treemla {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kPerThread = kScoreChunk / kThreads;
constexpr int kRoom = 2048;          // keys a block holds, a power of two
constexpr int kMostByThreads = 256;  // k up to which the threads' maxima bound well
constexpr int kMostRanked = 256;     // keys up to which counting who is better beats sorting
constexpr int kBlocksWanted = 264;   // two on each of 132 multiprocessors
constexpr int kMostChunksEach = 10;  // so that many rows still share the GPU evenly
constexpr int kMergeThreads = 256;
constexpr int kMergeKeys = 2048;
static_assert(2 * kMaxTreeBudget <= kRoom && 2 * kMaxBeamWidth <= kRoom && kMaxTreeBudget < kMergeKeys);
static_assert(kMostRanked <= kThreads && kMostRanked <= kMergeThreads);

__device__ float widen(float x) { return x; }
__device__ float widen(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements a load
template <class T>
constexpr int kLoads = kPerThread / kVector<T>;

// A thread's scores of a chunk as they lie in memory.
template <class T>
struct Raw {
  uint4 loads[kLoads<T>];

  __device__ float operator[](int i) const {
    const uint4& load = loads[i / kVector<T>];
    const int j = i % kVector<T>;
    const uint32_t words[4] = {load.x, load.y, load.z, load.w};
    if constexpr (sizeof(T) == 4) return __uint_as_float(words[j]);
    return __uint_as_float(j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xFFFF0000u);
  }
};

// Token, within the chunk, of a thread's element i: neighbours in a thread's loads of 16 bytes.
template <class T>
__device__ int token_of(int i) {
  constexpr int v = kVector<T>;
  return (i / v * kThreads + static_cast<int>(threadIdx.x)) * v + i % v;
}

// Sends a chunk on its way to shared memory, -inf past the end. A thread's loads go where only it reads them.
template <class T>
__device__ void stage_chunk(uint4* stage, const T* chunk, int count) {
  stage += threadIdx.x;
  if (count >= kScoreChunk && reinterpret_cast<uintptr_t>(chunk) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kLoads<T>; ++i)
      __pipeline_memcpy_async(stage + i * kThreads,
                              reinterpret_cast<const uint4*>(chunk) + i * kThreads + threadIdx.x, 16);
  } else {
#pragma unroll 1
    for (int i = 0; i < kLoads<T>; ++i) {
      uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < kVector<T>; ++j) {
        const int token = token_of<T>(i * kVector<T> + j);
        const uint32_t bits = __float_as_uint(token < count ? widen(chunk[token]) : -INFINITY);
        if constexpr (sizeof(T) == 4) {
          words[j] = bits;
        } else {
          words[j / 2] |= j % 2 == 0 ? bits >> 16 : bits & 0xFFFF0000u;
        }
      }
      stage[i * kThreads] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  __pipeline_commit();
}
template <class T>
__device__ Raw<T> take_staged(const uint4* stage) {
  __pipeline_wait_prior(0);
  Raw<T> raw;
#pragma unroll
  for (int i = 0; i < kLoads<T>; ++i) raw.loads[i] = stage[i * kThreads + threadIdx.x];
  return raw;
}

struct alignas(16) ChunkShared {
  uint64_t keys[kRoom];
  uint64_t sums[kWarps];
  uint32_t maxima[kWarps], bars[kWarps];
  int counts[kWarps];
  int num_keys;  // may exceed kRoom while a chunk is collected
  BlockScratch scratch;
};

// Scores are compared as floats where order_of() would give the same answer: always but for NaN, which never passes. The least
// order that isn't -inf's:
constexpr uint32_t kLeastOrder = 0x00800000u;
__device__ float bar_of(uint32_t order) { return float_of_order(max(order, kLeastOrder)); }

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
  for (int w = 0; w < kWarps; ++w) sum += shared.counts[w];
  return sum;
}

// The n-th largest of a warp's values, or 0.
__device__ uint32_t nth_of_warp(uint32_t mine, int n) {
  uint32_t most;
#pragma unroll 1
  for (;;) {
    most = __reduce_max_sync(~0u, mine);
    const bool is_most = mine == most;
    n -= __popc(__ballot_sync(~0u, is_most));
    if (n <= 0 || most == 0) return most;
    if (is_most) mine = 0;
  }
}

// Lets through scores above `bound`, and of those equal to it the chunk's tokens up to `last`.
struct Bar {
  uint32_t bound;
  int last;
};

// The chunk's best k exactly, or all that have a probability if these are fewer.
template <class T>
__device__ Bar exact_bar(ChunkShared& shared, const Raw<T>& raw, int k) {
  uint32_t bound = 0;  // the k-th largest
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = bound | 1u << bit;
    const float least = bar_of(candidate);
    if (count_elements(shared, [&](int i) { return raw[i] >= least; }) >= k) bound = candidate;
  }
  if (bound < kLeastOrder) return {kLeastOrder, kScoreChunk};
  const float value = bar_of(bound);
  const int need = k - count_elements(shared, [&](int i) { return raw[i] > value; });
  int last = kScoreChunk - 1;  // the need-th token of those equal to it
#pragma unroll 1
  for (int step = kScoreChunk / 2; step > 0; step /= 2) {
    const int candidate = last - step;
    if (count_elements(shared, [&](int i) { return raw[i] == value && token_of<T>(i) <= candidate; }) >= need)
      last = candidate;
  }
  return {bound, last};
}

// Appends what the bar lets through to shared.keys, as far as there is room.
template <class T>
__device__ void collect(ChunkShared& shared, const Raw<T>& raw, int first_token, Bar bar) {
  const float value = bar_of(bar.bound);
  unsigned passes = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) passes |= raw[i] >= value ? 1u << i : 0;
  if (passes == 0) return;
  if (bar.last < kScoreChunk) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      if (raw[i] == value && token_of<T>(i) > bar.last) passes &= ~(1u << i);
  }
  int at = atomicAdd(&shared.num_keys, __popc(passes));
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if ((passes >> i & 1) == 0) continue;
    if (at < kRoom) shared.keys[at] = rank_key(order_of(raw[i]), first_token + token_of<T>(i));
    ++at;
  }
}

// Descending, n a power of two.
template <int kBlock>
__device__ void bitonic_sort(uint64_t* keys, int n) {
  for (int size = 2; size <= n; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < n / 2; i += kBlock) {
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

// The best k of `count` keys, distinct where not 0, in order, to the front. A barrier has to lie before; one lies behind. There must
// be room for a power of two.
template <int kBlock>
__device__ void keep_best(uint64_t* keys, int count, int k) {
  if (count > kMostRanked) {
    int n = kMostRanked;
    while (n < count) n *= 2;
    for (int i = count + static_cast<int>(threadIdx.x); i < n; i += kBlock) keys[i] = 0;
    bitonic_sort<kBlock>(keys, n);
    return;
  }
  const int i = threadIdx.x;
  uint64_t key = 0;
  int rank = k;
  if (i < count) {
    key = keys[i];
    rank = 0;
    int j = 0;
#pragma unroll 4
    for (; j + 1 < count; j += 2) {
      const ulonglong2 pair = *reinterpret_cast<const ulonglong2*>(keys + j);
      rank += (pair.x > key) + (pair.y > key);
    }
    if (j < count) rank += keys[j] > key;
  }
  const int real = __syncthreads_count(key != 0);
  if (key != 0 && rank < k) keys[rank] = key;
  if (i >= real && i < count) keys[i] = 0;
  __syncthreads();
}

// What is wrong with the first token that is NaN or +inf; all threads get it.
template <class T>
__device__ TreeFault first_fault(const Raw<T>& raw, BlockScratch& scratch) {
  uint64_t first = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const float x = raw[i];
    if (x < INFINITY) continue;
    const TreeFault fault = x != x ? TreeFault::kScoreNaN : TreeFault::kScoreInfinite;
    const uint64_t word =
        static_cast<uint64_t>(kScoreChunk - token_of<T>(i)) << 8 | static_cast<uint64_t>(fault);
    if (word > first) first = word;
  }
  return static_cast<TreeFault>(block_max64(first, scratch) & 0xFF);
}

template <class T>
constexpr std::size_t kChunkBytes = sizeof(ChunkShared) + kScoreChunk * sizeof(T);

template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    score_chunk_kernel(const T* scores, int64_t row_stride, int vocab, const __grid_constant__ ScoreTop top) {
  extern __shared__ __align__(16) unsigned char smem[];
  ChunkShared& shared = *reinterpret_cast<ChunkShared*>(smem);
  auto* stage = reinterpret_cast<uint4*>(smem + sizeof(ChunkShared));
  const int64_t row = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k = top.k;
  const int first_chunk = static_cast<int>(blockIdx.x) * top.chunks_each;
  const int end_chunk = min(top.chunks, first_chunk + top.chunks_each);
  const int gathers = min(max(2 * k, 64), kRoom - k);  // keys above which only the best stay
  scores += row * row_stride;
  if (threadIdx.x == 0) shared.num_keys = 0;
  uint32_t bar = 0;
  int held = 0;  // shared.num_keys before the chunk
  stage_chunk(stage, scores + first_chunk * kScoreChunk, vocab - first_chunk * kScoreChunk);
#pragma unroll 1
  for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
    const Raw<T> raw = take_staged<T>(stage);
    const int64_t at = row * top.chunks + chunk;
    const int first_token = chunk * kScoreChunk;
    bool is_odd = false;
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      is_odd |= !(raw[i] < INFINITY);
      most = fmaxf(most, raw[i]);
    }
    const bool by_threads = chunk == first_chunk && k <= kMostByThreads;
    if (by_threads || !top.are_log_probs) {
      const uint32_t mine = order_of(most), warps_most = __reduce_max_sync(~0u, mine);
      if (lane == 0) shared.maxima[warp] = warps_most;
      if (by_threads) {
        const uint32_t nth = nth_of_warp(mine, (k + kWarps - 1) / kWarps);
        if (lane == 0) shared.bars[warp] = nth;
      }
    }
    TreeFault fault = TreeFault::kNone;
    if (__syncthreads_or(is_odd)) fault = first_fault(raw, shared.scratch);
    // All threads have their scores in registers now.
    if (chunk + 1 < end_chunk)
      stage_chunk(stage, scores + first_token + kScoreChunk, vocab - first_token - kScoreChunk);
    if (threadIdx.x == 0) top.chunk_fault[at] = fault;
    if (by_threads) {
      bar = shared.bars[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) bar = min(bar, shared.bars[w]);
    }
    float max = 0;
    if (!top.are_log_probs) {
      uint32_t order = shared.maxima[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) order = ::max(order, shared.maxima[w]);
      max = float_of_order(order);
      uint64_t total = 0;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) total += exp_weight(add_rn(raw[i], -max));
      total = warp_sum64(total);
      if (lane == 0) shared.sums[warp] = total;
    }
    Bar passes{bar, kScoreChunk};
    if (chunk == first_chunk && k > kMostByThreads) passes = exact_bar(shared, raw, k);
    collect(shared, raw, first_token, passes);
    __syncthreads();
    if (threadIdx.x == 0 && !top.are_log_probs) {
      uint64_t total = 0;
      for (int w = 0; w < kWarps; ++w) total += shared.sums[w];
      top.chunk_max[at] = max;
      top.chunk_total[at] = total;
    }
    int count = shared.num_keys;
    if (count > kRoom) {
      if (held > k) {
        keep_best<kThreads>(shared.keys, held, k);
        held = k;
      }
      __syncthreads();
      if (threadIdx.x == 0) shared.num_keys = held;
      passes = exact_bar(shared, raw, k);
      collect(shared, raw, first_token, passes);
      __syncthreads();
      count = shared.num_keys;
    }
    // k tokens reach the bound, so whatever only equals it and comes in a later chunk is too late, but does no harm.
    bar = ::max(bar, passes.bound);
    if (count > gathers || chunk + 1 == end_chunk) {
      keep_best<kThreads>(shared.keys, count, k);
      if (count >= k) bar = static_cast<uint32_t>(shared.keys[k - 1] >> 32) + 1;
      count = min(count, k);
      if (threadIdx.x == 0) shared.num_keys = count;
    }
    held = count;
  }
  uint64_t* out = top.part_keys + (row * top.parts + blockIdx.x) * k;
  for (int i = threadIdx.x; i < k; i += kThreads) out[i] = i < held ? shared.keys[i] : 0;
}

// By one warp; lane 0 has the result.
struct RowNorm {
  float max = 0;
  int64_t log_total = 0;
  TreeFault fault = TreeFault::kNone;
};
__device__ RowNorm row_norm(const ScoreTop& top, int64_t row) {
  RowNorm norm;
  const int lane = threadIdx.x % 32;
  const int64_t first = row * top.chunks;
  for (int base = 0; base < top.chunks; base += 32) {  // the first fault
    const auto fault = base + lane < top.chunks ? top.chunk_fault[first + base + lane] : TreeFault::kNone;
    const unsigned found = __ballot_sync(~0u, fault != TreeFault::kNone);
    if (found == 0) continue;
    norm.fault = static_cast<TreeFault>(__shfl_sync(~0u, static_cast<int>(fault), __ffs(found) - 1));
    return norm;
  }
  if (top.are_log_probs) return norm;
  uint32_t most = 0;
  for (int c = lane; c < top.chunks; c += 32) most = max(most, order_of(top.chunk_max[first + c]));
  most = __reduce_max_sync(~0u, most);
  if (most == 0) {
    norm.fault = TreeFault::kScoresEmpty;
    return norm;
  }
  norm.max = float_of_order(most);
  uint64_t total = 0;
  for (int c = lane; c < top.chunks; c += 32)
    total += rescale_weight(top.chunk_total[first + c], top.chunk_max[first + c], norm.max);
  norm.log_total = fixed_log(warp_sum64(total));
  return norm;
}

// The parts' keys are a stream; each round takes in as many as there is room for beside the best k so far. Meanwhile the last warp,
// which often has no key to rank, brings the chunks' weights together.
__global__ void __launch_bounds__(kMergeThreads) score_merge_kernel(const __grid_constant__ ScoreTop top) {
  __shared__ __align__(16) uint64_t keys[kMergeKeys];
  __shared__ float row_max;
  __shared__ int64_t log_total;
  const int64_t row = blockIdx.x;
  const int count = top.parts * top.k;
  const uint64_t* stream = top.part_keys + row * count;
  int kept = 0;
  for (int begin = 0; begin < count;) {
    const int taken = min(count - begin, kMergeKeys - kept);
    for (int i = threadIdx.x; i < taken; i += kMergeThreads) keys[kept + i] = stream[begin + i];
    if (begin == 0 && threadIdx.x >= kMergeThreads - 32) {
      const RowNorm norm = row_norm(top, row);
      if (threadIdx.x == kMergeThreads - 32) {
        row_max = norm.max;
        log_total = norm.log_total;
        top.faults[row] = norm.fault;
      }
    }
    __syncthreads();
    keep_best<kMergeThreads>(keys, kept + taken, top.k);
    begin += taken;
    kept = min(top.k, kept + taken);
  }
  for (int i = threadIdx.x; i < top.k; i += kMergeThreads) {
    const uint64_t key = keys[i];
    top.keys[row * top.k + i] = key;
    top.log_probs[row * top.k + i] =
        key == 0 ? kNoLogProb : token_log_prob(score_of_key(key), row_max, log_total);
  }
}

}  // namespace

ScoreTop take_score_top(TreeWorkspace& workspace, const ScoreView& scores, int64_t rows, int k) {
  ScoreTop top;
  top.rows = static_cast<int>(rows);
  top.chunks = ceil_div(scores.vocab, kScoreChunk);
  const int64_t each = ceil_div(rows * top.chunks, int64_t{kBlocksWanted});
  top.parts = ceil_div(top.chunks, each < 1                 ? 1
                                   : each > kMostChunksEach ? kMostChunksEach
                                                            : static_cast<int>(each));
  top.chunks_each = ceil_div(top.chunks, top.parts);
  top.k = k;
  top.are_log_probs = scores.are_log_probs;
  const std::size_t chunks = static_cast<std::size_t>(rows) * static_cast<std::size_t>(top.chunks);
  const std::size_t kept = static_cast<std::size_t>(rows) * static_cast<std::size_t>(k);
  top.keys = workspace.take<uint64_t>(kept);
  top.log_probs = workspace.take<int64_t>(kept);
  top.faults = workspace.take<TreeFault>(static_cast<std::size_t>(rows));
  top.part_keys = workspace.take<uint64_t>(kept * static_cast<std::size_t>(top.parts));
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
    part.part_keys += static_cast<int64_t>(first) * top.parts * top.k;
    part.chunk_max += chunks;
    part.chunk_total += chunks;
    part.chunk_fault += chunks;
    const dim3 grid(top.parts, part.rows);
    if (scores.dtype == DType::kF32) {
      score_chunk_kernel<<<grid, kThreads, kChunkBytes<float>, stream>>>(
          static_cast<const float*>(scores.data) + first * stride, stride, scores.vocab, part);
    } else {
      score_chunk_kernel<<<grid, kThreads, kChunkBytes<uint16_t>, stream>>>(
          static_cast<const uint16_t*>(scores.data) + first * stride, stride, scores.vocab, part);
    }
    check_launch("score_chunk_kernel");
  }
  score_merge_kernel<<<top.rows, kMergeThreads, 0, stream>>>(top);
  check_launch("score_merge_kernel");
}

void load_score_top(const ScoreView& scores) {
  if (scores.dtype == DType::kF32) {
    load_tree_kernel(score_chunk_kernel<float>, kChunkBytes<float>);
  } else {
    load_tree_kernel(score_chunk_kernel<uint16_t>, kChunkBytes<uint16_t>);
  }
  load_tree_kernel(score_merge_kernel);
}

}  // namespace treemla
