// Accepting paths on a device.
//
//   row_target_kernel     a block a row of logits: maximum and argmax; to sample also the cut of top-k and top-p, the sum of the
//                         weights and that of the draft's row. For top_k up to 512 a second reading gathers the tokens that may stay,
//                         and cut and sum come from these; otherwise a cut is found digit by digit, a reading each
//   greedy_walk_kernel    a warp a request, its tree in shared memory
//   sampled_walk_kernel   a block a request: the walk of trees/walk.hpp, all threads alike, sharing sums over the vocabulary

#include "backend/cuda/block_ops.cuh"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/tree_kernels.hpp"
#include "backend/cuda/tree_workspace.hpp"
#include "trees/walk.hpp"

namespace treemla {
namespace {

constexpr int kRowThreads = 512;
constexpr int kWalkThreads = 512;
constexpr int kWalkWarps = kWalkThreads / 32;
constexpr int kStagedNodes = 1056;  // trees up to here are walked in shared memory

// ---- requests ----

// One request's nodes as the array gives them, made safe: none, behind everybody's, and a fault if it lies.
struct RequestRows {
  int64_t begin = 0;
  int q_len = 0;
};
__device__ RequestRows request_rows(const AcceptProblem& p, int r, FaultWord& fault) {
  const int64_t begin = p.q_indptr[r], end = p.q_indptr[r + 1];
  if (begin < 0 || end < begin || end > p.total_q || (r == 0 && begin != 0)) {
    fault = make_fault(TreeFault::kQIndptr, r, r + 1);
    return {p.total_q, 0};
  }
  return {begin, static_cast<int>(end - begin)};
}

// Request that owns a row, or -1. Any contents end the search.
__device__ int owner_of(const AcceptProblem& p, int64_t row) {
  int low = 0, high = p.b;  // the last request whose rows begin at or before it
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.q_indptr[middle] <= row)
      low = middle + 1;
    else
      high = middle;
  }
  const int r = low - 1;
  return r >= 0 && p.q_indptr[r] >= 0 && row < p.q_indptr[r + 1] ? r : -1;
}

// ---- rows of logits ----

__device__ float load_logit(const AcceptProblem& p, int64_t row, int token) {
  const int64_t at = row * (p.logits_stride != 0 ? p.logits_stride : p.vocab) + token;
  if (p.logits_dtype == DType::kF32) return static_cast<const float*>(p.logits)[at];
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(p.logits)[at]) << 16);
}

// Calls visit(logit, token) for the thread's share of a row, tokens rising: 16-byte loads, kAtOnce of them on their way.
template <int kAtOnce, class T, class Visit>
__device__ void for_row(const T* row, int vocab, Visit visit) {
  constexpr int kEach = 16 / static_cast<int>(sizeof(T));
  const auto widen = [](uint32_t bits) { return __uint_as_float(sizeof(T) == 4 ? bits : bits << 16); };
  const auto value = [&](int token) {
    if constexpr (sizeof(T) == 4) return row[token];
    return widen(row[token]);
  };
  const int thread = threadIdx.x;
  // Up to the first 16-byte boundary; a row starts anywhere.
  const int head =
      min(vocab, static_cast<int>((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T)));
  const int loads = (vocab - head) / kEach;
  const uint4* body = reinterpret_cast<const uint4*>(row + head);
  if (thread < head) visit(value(thread), thread);
#pragma unroll 1
  for (int first = thread; first < loads; first += kAtOnce * kRowThreads) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (first + u * kRowThreads < loads) raw[u] = __ldg(body + first + u * kRowThreads);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int load = first + u * kRowThreads;
      if (load >= loads) break;
      const uint32_t words[4] = {raw[u].x, raw[u].y, raw[u].z, raw[u].w};
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const uint32_t bits = sizeof(T) == 4 ? words[j] : words[j / 2] >> 16 * (j % 2) & 0xFFFF;
        visit(widen(bits), head + load * kEach + j);
      }
    }
  }
  const int rest = head + loads * kEach + thread;
  if (rest < vocab) visit(value(rest), rest);
}

template <class T>
__device__ const T* logits_row(const AcceptProblem& p, int64_t row) {
  return static_cast<const T*>(p.logits) + row * (p.logits_stride != 0 ? p.logits_stride : p.vocab);
}

constexpr int kGathered = 2048;  // tokens that top-k and top-p can be worked out among

struct TargetShared {
  BlockScratch scratch;
  union {
    unsigned long long bins[2048];
    uint64_t gathered[kGathered];
  };
  uint64_t warp_sums[kRowThreads / 32];
  uint64_t above;  // what lies above the chosen bin
  uint32_t bounds[kRowThreads / 32];
  int bin;
  int num_gathered;
};

// The largest cut with at least `need` at or above it, among weights of at least `least`: tokens are counted, or their weights summed.
// Digit by digit from the top: a histogram of the tokens that share the digits found so far, then the bin that `need` falls into.
template <class T>
__device__ uint64_t find_cut(const T* row, int vocab, const RowTarget& target, uint64_t least, uint64_t need,
                             bool counts, TargetShared& shared) {
  uint64_t prefix = 0;  // digits found
  int low_bit = kWeightBits + 1;
  while (low_bit > 0) {
    const int digits = low_bit > 30 ? 11 : 10;  // 11 + 10 + 10 + 10 = 41
    low_bit -= digits;
    __syncthreads();
    for (int i = threadIdx.x; i < 2048; i += kRowThreads) shared.bins[i] = 0;
    __syncthreads();
    // Most weights of a large vocabulary share a bin: a thread adds up a run of equal digits before it goes there.
    int run_bin = -1;
    uint64_t run = 0;
    for_row<1>(row, vocab, [&](float x, int token) {
      const uint64_t w = uncut_weight(target, x, token);
      if (w < least || w >> (low_bit + digits) != prefix) return;
      const int bin = static_cast<int>(w >> low_bit) & ((1 << digits) - 1);
      if (bin != run_bin) {
        if (run_bin >= 0) atomicAdd(&shared.bins[run_bin], run);
        run_bin = bin;
        run = 0;
      }
      run += counts ? 1 : w;
    });
    if (run_bin >= 0) atomicAdd(&shared.bins[run_bin], run);
    __syncthreads();

    // From the top: each thread has four bins, and learns what lies above them.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int top_bin = 2047 - 4 * static_cast<int>(threadIdx.x);
    uint64_t mine = 0;
    for (int i = 0; i < 4; ++i) mine += shared.bins[top_bin - i];
    uint64_t inclusive = mine;
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (lane == 31) shared.warp_sums[warp] = inclusive;
    __syncthreads();
    uint64_t above = inclusive - mine;
    for (int w = 0; w < warp; ++w) above += shared.warp_sums[w];
    if (above < need && need <= above + mine) {
      int bin = top_bin;
      while (above + shared.bins[bin] < need) above += shared.bins[bin--];
      shared.bin = bin;
      shared.above = above;
    }
    __syncthreads();
    prefix = prefix << digits | static_cast<uint64_t>(shared.bin);
    need -= shared.above;
  }
  return prefix;
}

// The block's exclusive running sum of a number a thread; `all` is the sum.
__device__ uint64_t sum_before(uint64_t mine, TargetShared& shared, uint64_t& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t inclusive = mine;
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  uint64_t before = inclusive - mine;
  all = 0;
  for (int w = 0; w < kRowThreads / 32; ++w) {
    if (w == warp) before += all;
    all += shared.warp_sums[w];
  }
  return before;
}

// A logit that at least k tokens of the row reach, as order_of(): the least, over the warps, of the n-th largest of a warp's
// threads' maxima. k is at most kRowThreads.
__device__ uint32_t reached_by(uint32_t mine, int k, TargetShared& shared) {
  constexpr int kWarps = kRowThreads / 32;
  int n = (k + kWarps - 1) / kWarps;
  uint32_t most;
  for (;;) {
    most = __reduce_max_sync(~0u, mine);
    n -= __popc(__ballot_sync(~0u, mine == most));
    if (n <= 0 || most == 0) break;
    if (mine == most) mine = 0;
  }
  if (threadIdx.x % 32 == 0) shared.bounds[threadIdx.x / 32] = most;
  __syncthreads();
  uint32_t bound = shared.bounds[0];
  for (int w = 1; w < kWarps; ++w) bound = min(bound, shared.bounds[w]);
  return bound;
}

// Cut and total for top_k and top_p, from the weights that may stay: those not below the weight of a logit that top_k tokens
// reach. False if these are too many. top_p 1 and above cuts nothing.
template <class T>
__device__ bool cut_gathered(const T* row, int vocab, int top_k, float top_p, uint32_t reached,
                             RowTarget& target, TargetShared& shared) {
  // Weights rise with logits only up to exp_weight()'s error of 1e-7: k tokens have at least `least`.
  const float bound = float_of_order(reached);
  const float exponent = mul_rn(add_rn(bound, -target.max), target.inv_temperature);
  const uint64_t reached_weight = exp_weight(exponent), slack = (reached_weight >> 20) + 2;
  const uint64_t least = reached_weight > slack ? reached_weight - slack : 1;
  // Most tokens are so far below that their weight isn't needed: at e^-0.25 of the bound's.
  const float far_below = reached_weight >= 64 ? add_rn(exponent, -0.25f) : -INFINITY;
  if (threadIdx.x == 0) shared.num_gathered = 0;
  __syncthreads();
  for_row<2>(row, vocab, [&](float x, int token) {
    if (mul_rn(add_rn(x, -target.max), target.inv_temperature) < far_below) return;
    const uint64_t w = uncut_weight(target, x, token);
    if (w < least) return;
    const int at = atomicAdd(&shared.num_gathered, 1);
    if (at < kGathered) shared.gathered[at] = w;
  });
  __syncthreads();
  const int count = shared.num_gathered;
  if (count > kGathered) return false;

  // In order, the largest first; then a thread has four neighbours.
  int n = 4;
  while (n < count) n *= 2;
  uint64_t* weights = shared.gathered;
  for (int i = count + static_cast<int>(threadIdx.x); i < n; i += kRowThreads) weights[i] = 0;
  for (int size = 2; size <= n; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < n / 2; i += kRowThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const uint64_t a = weights[low], b = weights[high];
        if ((low & size) == 0 ? a < b : a > b) {
          weights[low] = b;
          weights[high] = a;
        }
      }
    }
  }
  __syncthreads();
  if (count >= top_k && weights[top_k - 1] > target.cut) target.cut = weights[top_k - 1];
  static_assert(4 * kRowThreads == kGathered);
  uint64_t own[4], total = 0;
  const auto sum_own = [&] {
    uint64_t sum = 0;
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * static_cast<int>(threadIdx.x) + i;
      own[i] = at < count && weights[at] >= target.cut ? weights[at] : 0;
      sum += own[i];
    }
    return sum;
  };
  uint64_t running = sum_before(sum_own(), shared, total);
  if (!(top_p >= 1)) {
    const uint64_t need = top_p_mass(top_p, total);
    for (int i = 0; i < 4; ++i) {  // one thread has the token that reaches it
      if (running < need && need <= running + own[i]) shared.above = own[i];
      running += own[i];
    }
    __syncthreads();
    target.cut = shared.above;
    sum_before(sum_own(), shared, total);
  }
  target.total = total;
  return true;
}

template <class T>
__device__ uint64_t sum_weights(const T* row, int vocab, const RowTarget& target, BlockScratch& scratch) {
  uint64_t mine = 0;
  for_row<2>(row, vocab, [&](float x, int token) { mine += target_weight(target, x, token); });
  return block_sum64(mine, scratch);
}

__device__ DraftRow sum_draft(const AcceptProblem& p, int64_t row, BlockScratch& scratch) {
  DraftRow draft;
  uint64_t mine = 0;
  int bad = 0;
  for (int token = threadIdx.x; token < p.vocab; token += kRowThreads) {
    const float prob = p.draft_probs[row * p.vocab + token];
    bad |= !draft_prob_is_valid(prob);
    mine += bad ? 0 : draft_weight(prob);
  }
  draft.total = block_sum64(mine, scratch);
  if (__syncthreads_or(bad)) draft.fault = TreeFault::kDraftProb;
  return draft;
}

template <class T, bool kSamples>
__global__ void __launch_bounds__(kRowThreads, 2)
    row_target_kernel(const __grid_constant__ AcceptProblem p, RowTarget* targets, DraftRow* drafts) {
  __shared__ TargetShared shared;
  const int64_t row = blockIdx.x;
  const int r = owner_of(p, row);
  if (r < 0) return;
  const T* logits = logits_row<T>(p, row);
  RowTarget target;
  uint64_t fault = 0;
  float most = -INFINITY;
  int most_token = 0;
  for_row<4>(logits, p.vocab, [&](float x, int token) {
    if (!(x < INFINITY))
      fault = static_cast<uint64_t>(x != x ? TreeFault::kScoreNaN : TreeFault::kScoreInfinite);
    if (x > most) {  // equal ones are later tokens
      most = x;
      most_token = token;
    }
  });
  const uint32_t most_order = order_of(most);
  const uint64_t best = block_max64(rank_key(most_order, most_token), shared.scratch);
  target.fault = static_cast<TreeFault>(block_max64(fault, shared.scratch));
  target.max = score_of_key(best);
  target.argmax = token_of_key(best);
  if (target.fault == TreeFault::kNone && best == 0) target.fault = TreeFault::kScoresEmpty;
  if constexpr (kSamples) {
    const float temperature = p.temperature != nullptr ? p.temperature[r] : 1.0f;
    if (!temperature_is_valid(temperature)) target.fault = TreeFault::kTemperature;
    if (target.fault == TreeFault::kNone) {
      target.inv_temperature = inverse_temperature(temperature);
      const int top_k = p.top_k != nullptr && p.top_k[r] < p.vocab ? p.top_k[r] : 0;
      const float top_p = p.top_p != nullptr ? p.top_p[r] : 1.0f;
      bool done = false;
      if (target.inv_temperature == 0) {  // the argmax is all there is, and stays
        target.total = kWeightOne;
        done = true;
      } else if (top_k > 0 && top_k <= kRowThreads) {
        const uint32_t reached = reached_by(most_order, top_k, shared);
        done = cut_gathered(logits, p.vocab, top_k, top_p, reached, target, shared);
      }
      if (!done) {
        if (top_k > 0) {
          const uint64_t cut =
              find_cut(logits, p.vocab, target, 0, static_cast<uint64_t>(top_k), true, shared);
          if (cut > target.cut) target.cut = cut;
        }
        target.total = sum_weights(logits, p.vocab, target, shared.scratch);
        if (!(top_p >= 1)) {
          target.cut =
              find_cut(logits, p.vocab, target, target.cut, top_p_mass(top_p, target.total), false, shared);
          target.total = sum_weights(logits, p.vocab, target, shared.scratch);
        }
      }
    }
    DraftRow draft;
    if (drafts != nullptr) draft = sum_draft(p, row, shared.scratch);
    if (drafts != nullptr && threadIdx.x == 0) drafts[row] = draft;
  }
  if (threadIdx.x == 0) targets[row] = target;
}

using RowTargetKernel = void(AcceptProblem, RowTarget*, DraftRow*);
RowTargetKernel* row_target_of(const AcceptProblem& p) {
  const bool samples = p.method != AcceptMethod::kGreedy;
  if (p.logits_dtype == DType::kF32)
    return samples ? row_target_kernel<float, true> : row_target_kernel<float, false>;
  return samples ? row_target_kernel<uint16_t, true> : row_target_kernel<uint16_t, false>;
}

// ---- trees ----

// Nodes in shared memory where there is room. The arrays that a tree doesn't have are left out.
struct StagedTree {
  int32_t tokens[kStagedNodes], first[kStagedNodes], second[kStagedNodes];
};
__device__ RequestTree stage_tree(const AcceptProblem& p, const RequestRows& rows, StagedTree& staged) {
  RequestTree tree;
  tree.q_len = rows.q_len;
  tree.token_ids = p.token_ids + rows.begin;
  const bool links = p.retrieve_next_token != nullptr;
  const int32_t* first = links ? p.retrieve_next_token + rows.begin : p.parents + rows.begin;
  const int32_t* second = links ? p.retrieve_next_sibling + rows.begin : nullptr;
  if (rows.q_len <= kStagedNodes) {
    for (int i = threadIdx.x; i < rows.q_len; i += blockDim.x) {
      staged.tokens[i] = tree.token_ids[i];
      staged.first[i] = first[i];
      if (links) staged.second[i] = second[i];
    }
    tree.token_ids = staged.tokens;
    first = staged.first;
    second = staged.second;
  }
  if (links) {
    tree.next_token = first;
    tree.next_sibling = second;
  } else {
    tree.parents = first;
  }
  return tree;
}

// Fills everything of the request with "nothing", so that the walk writes only what is there. The last request also has the padding.
__device__ void clear_outputs(const AcceptProblem& p, const AcceptOutput& out, int r,
                              const RequestRows& rows) {
  for (int i = threadIdx.x; i < out.path_stride; i += blockDim.x)
    out.accept_index[int64_t{r} * out.path_stride + i] = -1;
  if (out.predicts == nullptr) return;
  const int64_t end = r == p.b - 1 ? p.total_q : rows.begin + rows.q_len;
  for (int64_t i = rows.begin + threadIdx.x; i < end; i += blockDim.x) out.predicts[i] = -1;
}

// A fault takes the path back.
__device__ void write_result(const AcceptProblem& p, const AcceptOutput& out, int r, const RequestRows& rows,
                             const WalkResult& result, FaultWord* faults) {
  if (result.fault) {
    __syncthreads();
    clear_outputs(p, out, r, rows);
  }
  if (threadIdx.x != 0) return;
  out.num_accepted[r] = result.fault ? -1 : result.length > 0 ? result.length - 1 : 0;
  if (out.bonus_token != nullptr) out.bonus_token[r] = result.fault ? -1 : result.bonus;
  faults[r] = result.fault;
}

// ---- greedy ----

__global__ void __launch_bounds__(32)
    greedy_walk_kernel(const __grid_constant__ AcceptProblem p, const __grid_constant__ AcceptOutput out,
                       const RowTarget* targets, FaultWord* faults) {
  __shared__ StagedTree staged;
  __shared__ int32_t staged_argmax[kStagedNodes];
  const int r = blockIdx.x, lane = threadIdx.x;
  WalkResult result;
  const RequestRows rows = request_rows(p, r, result.fault);
  clear_outputs(p, out, r, rows);
  const RequestTree tree = stage_tree(p, rows, staged);
  const bool is_staged = rows.q_len <= kStagedNodes && targets == nullptr;
  for (int i = lane; is_staged && i < rows.q_len; i += 32) staged_argmax[i] = p.target_argmax[rows.begin + i];
  for (int i = lane; tree.parents != nullptr && i < rows.q_len; i += 32) {
    const int parent = tree.parents[i];
    if (i == 0 ? parent != -1 : parent < 0 || parent >= i)
      result.fault = make_fault(TreeFault::kParent, r, i);
  }
  __syncwarp();
  const unsigned bad = __ballot_sync(~0u, static_cast<bool>(result.fault));
  if (bad != 0) result.fault.word = __shfl_sync(~0u, result.fault.word, __ffs(bad) - 1);

  ChildCursor cursor(tree, r);
  int node = 0;
  while (!result.fault && rows.q_len > 0) {
    int token;
    if (targets != nullptr) {
      const RowTarget& target = targets[rows.begin + node];
      token = target.argmax;
      if (target.fault != TreeFault::kNone) result.fault = make_fault(target.fault, r, node);
    } else {
      token = is_staged ? staged_argmax[node] : p.target_argmax[rows.begin + node];
      if (token < 0) result.fault = make_fault(TreeFault::kArgmax, r, node);
    }
    if (result.fault) break;
    if (lane == 0) {
      out.accept_index[int64_t{r} * out.path_stride + result.length] =
          static_cast<int32_t>(rows.begin + node);
      if (out.predicts != nullptr) out.predicts[rows.begin + node] = token;
    }
    int child = -1;
    if (++result.length < out.path_stride) {
      if (tree.parents == nullptr) {  // links: one after the other
        child = cursor.first(node);
        while (child >= 0 && tree.token_ids[child] != token) child = cursor.next(node, child);
        result.fault = cursor.fault;
      } else {  // parents: 32 nodes at once
        for (int first = node + 1; first < rows.q_len && child < 0; first += 32) {
          const int i = first + lane;
          const bool match = i < rows.q_len && tree.parents[i] == node && tree.token_ids[i] == token;
          const unsigned found = __ballot_sync(~0u, match);
          if (found != 0) child = first + __ffs(found) - 1;
        }
      }
    }
    if (child < 0) {
      result.bonus = token;
      break;
    }
    node = child;
  }
  write_result(p, out, r, rows, result, faults);
}

// ---- sampling ----

struct WalkShared {
  StagedTree staged;
  BlockScratch scratch;
  uint64_t parts[kWalkWarps];
};

// The Rows of sample_path(), by a whole block.
class BlockRows {
 public:
  __device__ BlockRows(const AcceptProblem& p, const AcceptOutput& out, int r, int64_t begin,
                       const RowTarget* targets, const DraftRow* drafts, Rejection* rejections,
                       WalkShared& shared)
      : p_(p),
        out_(out),
        r_(r),
        begin_(begin),
        targets_(targets),
        drafts_(drafts),
        rejections_(rejections),
        shared_(shared) {}

  __device__ RowTarget target(int node) { return target_ = targets_[begin_ + node]; }
  __device__ DraftRow draft(int node) {
    DraftRow row;
    if (drafts_ != nullptr) row = drafts_[begin_ + node];
    has_draft_ = row.total > 0;
    return row;
  }
  __device__ uint64_t weight(int node, int token) const {
    return target_weight(target_, load_logit(p_, begin_ + node, token), token);
  }
  __device__ uint64_t draft_weight(int node, int token) const {
    return treemla::draft_weight(p_.draft_probs[(begin_ + node) * p_.vocab + token]);
  }
  __device__ void reject(int i, Rejection r) {
    __syncthreads();
    if (threadIdx.x == 0) rejections_[i] = r;
    __syncthreads();
  }
  __device__ const Rejection* rejections() const { return rejections_; }

  __device__ uint64_t sum(int node, int count) {
    uint64_t mine = 0;
    for (int token = threadIdx.x; token < p_.vocab; token += kWalkThreads) mine += left(node, token, count);
    return block_sum64(mine, shared_.scratch);
  }

  // Warps share the range out, each sums a part; the part in which the running sum passes is the next range.
  __device__ int draw(int node, int count, uint64_t target) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int begin = 0, end = p_.vocab;
    while (end - begin > 32) {
      const int part = ((end - begin + kWalkWarps - 1) / kWalkWarps + 31) / 32 * 32;
      const int stop = min(end, begin + (warp + 1) * part);
      uint64_t mine = 0;
      for (int token = begin + warp * part + lane; token < stop; token += 32)
        mine += left(node, token, count);
      mine = warp_sum64(mine);
      __syncthreads();
      if (lane == 0) shared_.parts[warp] = mine;
      __syncthreads();
      int chosen = 0;
      while (chosen < kWalkWarps - 1 && target >= shared_.parts[chosen]) target -= shared_.parts[chosen++];
      begin += chosen * part;
      end = min(end, begin + part);
    }
    uint64_t running = begin + lane < end ? left(node, begin + lane, count) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(~0u, running, step);
      if (lane >= step) running += other;
    }
    const unsigned passed = __ballot_sync(~0u, running > target);
    return passed != 0 ? begin + __ffs(passed) - 1 : -1;
  }

  __device__ void visit(int position, int node) {
    has_draft_ = false;
    if (threadIdx.x == 0)
      out_.accept_index[int64_t{r_} * out_.path_stride + position] = static_cast<int32_t>(begin_ + node);
  }
  __device__ void emit(int node, int token) {
    if (threadIdx.x == 0 && out_.predicts != nullptr) out_.predicts[begin_ + node] = token;
  }

 private:
  __device__ uint64_t left(int node, int token, int count) const {
    uint64_t q = has_draft_ && count > 0 ? draft_weight(node, token) : 0;
    return residual_weight(weight(node, token), q, token, p_.method != AcceptMethod::kWithoutReplacement,
                           rejections_, count);
  }

  const AcceptProblem& p_;
  const AcceptOutput& out_;
  int r_;
  int64_t begin_;
  const RowTarget* targets_;
  const DraftRow* drafts_;
  Rejection* rejections_;
  WalkShared& shared_;
  RowTarget target_;
  bool has_draft_ = false;
};

__global__ void __launch_bounds__(kWalkThreads, 1)
    sampled_walk_kernel(const __grid_constant__ AcceptProblem p, const __grid_constant__ AcceptOutput out,
                        const RowTarget* targets, const DraftRow* drafts, Rejection* rejections,
                        FaultWord* faults) {
  __shared__ WalkShared shared;
  const int r = blockIdx.x;
  WalkResult result;
  const RequestRows rows = request_rows(p, r, result.fault);
  clear_outputs(p, out, r, rows);
  const RequestTree tree = stage_tree(p, rows, shared.staged);
  __syncthreads();
  int bad_node = INT32_MAX;
  for (int i = threadIdx.x; tree.parents != nullptr && i < rows.q_len; i += kWalkThreads) {
    const int parent = tree.parents[i];
    if (bad_node == INT32_MAX && (i == 0 ? parent != -1 : parent < 0 || parent >= i)) bad_node = i;
  }
  const uint64_t worst =
      block_max64(bad_node == INT32_MAX ? 0 : INT32_MAX - static_cast<uint64_t>(bad_node), shared.scratch);
  if (worst != 0) result.fault = make_fault(TreeFault::kParent, r, INT32_MAX - static_cast<int>(worst));
  if (!result.fault && rows.q_len > 0) {
    CoinSource coins;
    if (p.seeds != nullptr) coins.seed = p.seeds[r];
    if (p.offsets != nullptr) coins.offset = p.offsets[r];
    if (p.coins != nullptr) {
      coins.coins = p.coins + rows.begin;
      coins.final_coin = p.final_coins[r];
    }
    BlockRows block_rows(p, out, r, rows.begin, targets, drafts, rejections + rows.begin, shared);
    result = sample_path(tree, coins, p.method, r, p.vocab, out.path_stride, block_rows);
  }
  write_result(p, out, r, rows, result, faults);
}

// ---- launches ----

struct AcceptArrays {
  RowTarget* targets = nullptr;     // [total_q] from logits
  DraftRow* drafts = nullptr;       // [total_q] with a draft
  Rejection* rejections = nullptr;  // [total_q] of the node that a request's walk is at
};
AcceptArrays take_arrays(TreeWorkspace& workspace, const AcceptProblem& p) {
  AcceptArrays a;
  const auto rows = static_cast<std::size_t>(p.total_q);
  if (p.method == AcceptMethod::kGreedy) {
    if (p.target_argmax == nullptr) a.targets = workspace.take<RowTarget>(rows);
    return a;
  }
  a.targets = workspace.take<RowTarget>(rows);
  a.rejections = workspace.take<Rejection>(rows);
  if (p.method != AcceptMethod::kDeterministic) a.drafts = workspace.take<DraftRow>(rows);
  return a;
}

}  // namespace

void accept_on_device(const AcceptProblem& p, const AcceptOutput& output, const TreeRun& run) {
  if (p.b == 0) return;
  const cudaStream_t stream = stream_of(run);
  TreeWorkspace workspace(run.workspace, p.b);
  const AcceptArrays a = take_arrays(workspace, p);
  if (a.targets != nullptr && p.total_q > 0) {
    row_target_of(p)<<<static_cast<unsigned>(p.total_q), kRowThreads, 0, stream>>>(p, a.targets, a.drafts);
    check_launch("row_target_kernel");
  }
  if (p.method == AcceptMethod::kGreedy) {
    greedy_walk_kernel<<<p.b, 32, 0, stream>>>(p, output, a.targets, workspace.faults());
    return check_launch("greedy_walk_kernel");
  }
  sampled_walk_kernel<<<p.b, kWalkThreads, 0, stream>>>(p, output, a.targets, a.drafts, a.rejections,
                                                        workspace.faults());
  check_launch("sampled_walk_kernel");
}

std::size_t device_accept_bytes(const AcceptProblem& p) {
  TreeWorkspace workspace(nullptr, p.b);
  take_arrays(workspace, p);
  if (p.method == AcceptMethod::kGreedy) {
    load_tree_kernel(greedy_walk_kernel);
  } else {
    load_tree_kernel(sampled_walk_kernel);
  }
  load_tree_kernel(row_target_of(p));
  return workspace.bytes();
}

}  // namespace treemla
