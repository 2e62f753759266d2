// Building trees on a device: a block a request grows the tree in shared memory, then all its threads write it out.
//
//   ddtree       a warp keeps the frontier. Up to budget 32 a lane holds an entry in registers, and beside it what its successors
//                need; a round is two reductions over the warp that find the best, and shuffles from the lane that has it. Beyond, a
//                lane holds the best of every 32nd slot, and the warp looks together for the next best of the one chosen
//   candidates   effective scores by walking up, the budget best by counting who is better, numbers by a scan
//   chain, parents   copied and checked
//
// Shared memory at budget 1,024: nodes 31 KB, frontier 16 KB, log-probabilities up to 48 KB (more stay in global memory).

#include "backend/cuda/block_ops.cuh"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/score_top.cuh"
#include "backend/cuda/tree_kernels.hpp"
#include "trees/frontier.hpp"

namespace treemla {
namespace {

constexpr int kThreads = 128;
constexpr int kScanThreads = 256;  // candidates and beams
constexpr int kTableBytes = 48 * 1024;
constexpr int kMostNodes = kMaxTreeBudget + 1;

// ---- a tree in shared memory ----

struct SharedTree {
  int32_t* parents;  // [q_len]
  int32_t* tokens;
  int32_t* depths;
  int32_t* heads;      // links: the first child met so far
  int64_t* log_probs;  // of the path; null where there are none
  int q_len;
};

// Splits dynamic shared memory; 8-byte arrays first.
__device__ SharedTree carve_tree(unsigned char*& at, int q_len) {
  SharedTree tree;
  tree.q_len = q_len;
  tree.log_probs = reinterpret_cast<int64_t*>(at);
  at += sizeof(int64_t) * q_len;
  tree.parents = reinterpret_cast<int32_t*>(at);
  tree.tokens = tree.parents + q_len;
  tree.depths = tree.tokens + q_len;
  tree.heads = tree.depths + q_len;
  at += (4 * sizeof(int32_t) * q_len + 15) / 16 * 16;
  return tree;
}
constexpr std::size_t tree_bytes(int q_len) {
  return sizeof(int64_t) * static_cast<std::size_t>(q_len) +
         (4 * sizeof(int32_t) * static_cast<std::size_t>(q_len) + 15) / 16 * 16;
}

__device__ void report(FaultWord* shared_fault, FaultWord fault) {
  // The smallest code wins; 0 means none, so words are compared less one.
  unsigned long long* word = reinterpret_cast<unsigned long long*>(&shared_fault->word);
  unsigned long long seen = *word;
  while (seen - 1 > fault.word - 1) {
    const unsigned long long before = atomicCAS(word, seen, fault.word);
    if (before == seen) break;
    seen = before;
  }
}

__device__ int32_t root_token(const BuildProblem& p, int r) {
  if (p.root_tokens != nullptr) return p.root_tokens[r];
  if (p.method == BuildMethod::kParents && p.tokens != nullptr) return p.tokens[int64_t{r} * (p.budget + 1)];
  return -1;
}

// Retrieve links, by a warp: 32 nodes at once, from the last to the first. A node's next sibling is the next lane with the same
// parent, else the first child of it met before.
__device__ void write_links(const TreeOutput& out, int64_t base, const SharedTree& tree) {
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < tree.q_len; i += 32) tree.heads[i] = -1;
  __syncwarp();
  for (int first = (tree.q_len - 1) / 32 * 32; first >= 0; first -= 32) {
    const int i = first + lane;
    const int parent = i < tree.q_len ? tree.parents[i] : -1;
    const unsigned peers = __match_any_sync(~0u, parent);
    const unsigned after = peers & ~((2u << lane) - 1), before = peers & ((1u << lane) - 1);
    const int head = parent >= 0 ? tree.heads[parent] : -1;
    __syncwarp();
    if (parent >= 0 && before == 0) tree.heads[parent] = i;
    if (i < tree.q_len && out.retrieve_next_sibling != nullptr)
      out.retrieve_next_sibling[base + i] = parent >= 0 && after != 0 ? first + __ffs(after) - 1 : head;
    __syncwarp();
  }
  for (int i = lane; i < tree.q_len && out.retrieve_next_token != nullptr; i += 32)
    out.retrieve_next_token[base + i] = tree.heads[i];
}

// By the whole block: nodes [1, num_nodes) are in shared memory, and a fault in `fault` if there is one. Adds root and padding,
// checks positions and writes what is wanted.
__device__ void finish_tree(const BuildProblem& p, const TreeOutput& out, SharedTree tree, int num_nodes,
                            FaultWord* fault, FaultWord* fault_out) {
  const int r = blockIdx.x, q_len = tree.q_len, threads = blockDim.x;
  const int64_t base = int64_t{r} * q_len;
  const int64_t prefix_len = p.prefix_len != nullptr ? p.prefix_len[r] : 0;
  __syncthreads();
  if (*fault) num_nodes = 1;
  __syncthreads();
  for (int i = threadIdx.x; i < q_len; i += threads) {
    if (i == 0) {
      tree.parents[0] = -1;
      tree.tokens[0] = root_token(p, r);
    } else if (i >= num_nodes) {
      tree.parents[i] = 0;
      tree.tokens[i] = p.pad_token;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < q_len; i += threads) {
    int depth = 0;
    for (int j = tree.parents[i]; j >= 0; j = tree.parents[j]) ++depth;
    tree.depths[i] = depth;
    if (prefix_len < 0 || prefix_len + depth > INT32_MAX)
      report(fault, make_fault(TreeFault::kPrefixLen, r, static_cast<int>(prefix_len)));
  }
  __syncthreads();
  const bool bad_prefix = static_cast<TreeFault>(fault->word >> 56) == TreeFault::kPrefixLen;
  if (bad_prefix) num_nodes = 1;
  for (int i = threadIdx.x; i < q_len && bad_prefix; i += threads) {
    tree.parents[i] = i == 0 ? -1 : 0;
    tree.depths[i] = i == 0 ? 0 : 1;
    if (i > 0) tree.tokens[i] = p.pad_token;
  }
  __syncthreads();

  if (static_cast<int>(threadIdx.x) >= threads - 32) write_links(out, base, tree);
  for (int i = threadIdx.x; i < q_len; i += threads) {
    if (out.token_ids != nullptr) out.token_ids[base + i] = tree.tokens[i];
    if (out.parents != nullptr) out.parents[base + i] = tree.parents[i];
    if (out.depth != nullptr) out.depth[base + i] = tree.depths[i];
    if (out.positions != nullptr)
      out.positions[base + i] =
          static_cast<int32_t>(bad_prefix ? tree.depths[i] : prefix_len + tree.depths[i]);
    if (out.log_probs != nullptr)
      out.log_probs[base + i] = i >= num_nodes                        ? -INFINITY
                                : tree.log_probs == nullptr || i == 0 ? 0.0f
                                                                      : nats_of(tree.log_probs[i]);
    if (out.ancestor_bits != nullptr) {  // itself and its ancestors, from the last word to the first
      uint32_t* row = out.ancestor_bits + (base + i) * out.words_per_row;
      int word = out.words_per_row - 1;
      uint32_t bits = 0;
      for (int j = i; j >= 0; j = tree.parents[j]) {
        for (; word > j / 32; --word, bits = 0) row[word] = bits;
        bits |= 1u << (j % 32);
      }
      for (; word >= 0; --word, bits = 0) row[word] = bits;
    }
  }
  if (threadIdx.x == 0) {
    if (out.num_nodes != nullptr) out.num_nodes[r] = num_nodes;
    fault_out[r] = *fault;
  }
}

// ---- DDTree ----

// An entry's place in one number: parent, depth, rank.
constexpr int kDepthShift = 11, kRankShift = 18;
static_assert(kMostNodes < 1 << kDepthShift && kMaxTreeDepths < 1 << (kRankShift - kDepthShift) &&
              kMaxTreeBudget < 1 << (31 - kRankShift));

struct Grower {
  int num_depths, k;
  const int64_t* table;  // [num_depths, k] log-probabilities
  SharedTree tree;
  int16_t* ranks;           // [q_len]
  FrontierEntry* frontier;  // [q_len] for budgets above 32

  // By one warp. Returns the number of nodes.
  __device__ int grow(int budget) {
    const int lane = threadIdx.x;
    if (lane == 0) {
      tree.parents[0] = -1;
      tree.log_probs[0] = 0;
      ranks[0] = 0;
    }
    Best best;  // of the lane's slots
    if (lane == 0) best.key = log_prob(0, 0);
    look_ahead(best);
    __syncwarp();
    int node = 1;
    for (; node <= budget; ++node) {
      const int owner = choose(best.key, best.place);
      if (owner < 0) break;
      const uint32_t place = __shfl_sync(~0u, best.place, owner);
      const int64_t path = __shfl_sync(~0u, best.key, owner);
      const int64_t child_own = __shfl_sync(~0u, best.child_own, owner);
      if (lane == 0) {
        tree.parents[node] = parent_of(place);
        tree.depths[node] = depth_of(place) + 1;
        tree.log_probs[node] = path;
        ranks[node] = static_cast<int16_t>(rank_of(place));
      }
      const int home = node % 32;  // of the first child, in slot `node`
      const Best child{
          child_own == kNoLogProb ? kNoLogProb : path + child_own,
          static_cast<uint32_t>(node) | static_cast<uint32_t>(depth_of(place) + 1) << kDepthShift, node};
      if (lane == owner) {
        best.key = best.sibling_own == kNoLogProb ? kNoLogProb : best.key - best.own + best.sibling_own;
        best.place += 1u << kRankShift;
      }
      if (budget <= 32) {
        if (lane == home) best = child;  // the last may take a place, but is never chosen
      } else {
        if (lane == owner) frontier[best.slot] = entry_of(best);
        if (lane == home) frontier[node] = entry_of(child);
        __syncwarp();
        refill(best, owner, node);
        if (lane == home && home != owner && child.key != kNoLogProb &&
            (best.key == kNoLogProb || child.key > best.key ||
             (child.key == best.key && before(child.place, best.place))))
          best = child;
      }
      if (lane == owner || lane == home) look_ahead(best);
      __syncwarp();
    }
    return node;
  }

 private:
  struct Best {
    int64_t key = kNoLogProb;
    uint32_t place = 0;
    int slot = 0;
    // Log-probabilities of its last token, of its next sibling's and of its first child's: read when the entry becomes the lane's
    // best, so that they are there when it is chosen.
    int64_t own = 0, sibling_own = 0, child_own = 0;
  };

  __device__ static int parent_of(uint32_t place) { return place & ((1u << kDepthShift) - 1); }
  __device__ static int depth_of(uint32_t place) {
    return place >> kDepthShift & ((1u << (kRankShift - kDepthShift)) - 1);
  }
  __device__ static int rank_of(uint32_t place) { return place >> kRankShift; }
  __device__ static FrontierEntry entry_at(int64_t key, uint32_t place) {
    FrontierEntry e;
    e.key = key;
    e.parent = parent_of(place);
    e.depth = static_cast<int16_t>(depth_of(place));
    e.rank = static_cast<int16_t>(rank_of(place));
    return e;
  }
  __device__ static FrontierEntry entry_of(const Best& b) { return entry_at(b.key, b.place); }

  __device__ int64_t log_prob(int depth, int rank) const {
    return depth < num_depths && rank < k ? table[depth * k + rank] : kNoLogProb;
  }
  __device__ void look_ahead(Best& b) const {
    const int depth = depth_of(b.place), rank = rank_of(b.place);
    b.own = log_prob(depth, rank);
    b.sibling_own = log_prob(depth, rank + 1);
    b.child_own = log_prob(depth + 1, 0);
  }
  // Of equal keys.
  __device__ bool before(uint32_t a, uint32_t b) const {
    return path_before(entry_at(0, a), entry_at(0, b), tree.parents, ranks);
  }

  // The lane with the best entry, the same in all lanes; -1 if there is none.
  __device__ int choose(int64_t key, uint32_t place) const {
    const int high = static_cast<int>(key >> 32);
    const uint32_t low = static_cast<uint32_t>(key);
    const int most_high = __reduce_max_sync(~0u, high);
    const uint32_t most_low = __reduce_max_sync(~0u, high == most_high ? low : 0);
    unsigned tied = __ballot_sync(~0u, high == most_high && low == most_low);
    if (most_high == static_cast<int>(kNoLogProb >> 32) && most_low == static_cast<uint32_t>(kNoLogProb))
      return -1;
    int chosen = __ffs(tied) - 1;
    for (tied &= tied - 1; tied != 0; tied &= tied - 1) {
      const int other = __ffs(tied) - 1;
      if (before(__shfl_sync(~0u, place, other), __shfl_sync(~0u, place, chosen))) chosen = other;
    }
    return chosen;
  }

  // The best of the owner's slots up to `last`, found by all lanes, becomes its best.
  __device__ void refill(Best& best, int owner, int last) const {
    const int slot = owner + 32 * static_cast<int>(threadIdx.x);
    FrontierEntry e;
    if (slot <= last) e = frontier[slot];
    const uint32_t place = static_cast<uint32_t>(e.parent) | static_cast<uint32_t>(e.depth) << kDepthShift |
                           static_cast<uint32_t>(e.rank) << kRankShift;
    const int chosen = choose(e.key, place);
    const int from = chosen < 0 ? 0 : chosen;
    const int64_t key = __shfl_sync(~0u, e.key, from);
    const uint32_t chosen_place = __shfl_sync(~0u, place, from);
    if (static_cast<int>(threadIdx.x) != owner) return;
    best.key = key;
    best.place = chosen_place;
    best.slot = owner + 32 * from;
  }
};

constexpr std::size_t ddtree_bytes(int q_len, std::size_t table_bytes) {
  return tree_bytes(q_len) + static_cast<std::size_t>(q_len) * (sizeof(FrontierEntry) + sizeof(int16_t)) +
         table_bytes;
}
// What any launch may ask for, so that loading a kernel for one problem doesn't take from another.
constexpr std::size_t kMostDdtreeBytes = ddtree_bytes(kMostNodes, kTableBytes);
constexpr std::size_t kMostCandidateBytes = tree_bytes(kMostNodes) + 8 * kMaxTreeCandidates;
static_assert(kMostDdtreeBytes <= 96 * 1024 && kMostCandidateBytes <= 96 * 1024);

// Without a bound the compiler spills two registers on sm_80, though there is room.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kDdtreeBlocks = 1;
#else
constexpr int kDdtreeBlocks = 0;  // none
#endif
__global__ void __launch_bounds__(kThreads, kDdtreeBlocks)
    ddtree_kernel(const __grid_constant__ BuildProblem p, const __grid_constant__ TreeOutput out,
                  const __grid_constant__ ScoreTop top, bool has_table, FaultWord* faults) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ FaultWord fault;
  __shared__ int num_nodes;
  const int r = blockIdx.x, q_len = p.budget + 1;
  const int64_t first_row = int64_t{r} * p.num_depths;
  unsigned char* at = smem;
  const SharedTree tree = carve_tree(at, q_len);
  auto* frontier = reinterpret_cast<FrontierEntry*>(at);
  at += sizeof(FrontierEntry) * q_len;
  auto* table = reinterpret_cast<int64_t*>(at);
  if (has_table) at += sizeof(int64_t) * p.num_depths * top.k;
  auto* ranks = reinterpret_cast<int16_t*>(at);

  if (threadIdx.x == 0) fault = {};
  __syncthreads();
  for (int d = threadIdx.x; d < p.num_depths; d += kThreads) {
    const TreeFault found = top.faults[first_row + d];
    if (found != TreeFault::kNone) report(&fault, make_fault(found, r, d));
  }
  const int64_t* log_probs = top.log_probs + first_row * top.k;
  for (int i = threadIdx.x; has_table && i < p.num_depths * top.k; i += kThreads) table[i] = log_probs[i];
  __syncthreads();
  if (threadIdx.x < 32) {
    Grower grower{p.num_depths, top.k, has_table ? table : log_probs, tree, ranks, frontier};
    const int n = fault ? 1 : grower.grow(p.budget);
    if (threadIdx.x == 0) num_nodes = n;
  }
  __syncthreads();
  for (int i = 1 + threadIdx.x; i < num_nodes; i += kThreads)
    tree.tokens[i] = token_of_key(top.keys[(first_row + tree.depths[i] - 1) * top.k + ranks[i]]);
  finish_tree(p, out, tree, num_nodes, &fault, faults);
}

// ---- chains and given parents ----

__global__ void __launch_bounds__(kThreads)
    given_tree_kernel(const __grid_constant__ BuildProblem p, const __grid_constant__ TreeOutput out,
                      FaultWord* faults) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ FaultWord fault;
  __shared__ int num_nodes;
  const int r = blockIdx.x, q_len = p.budget + 1;
  unsigned char* at = smem;
  SharedTree tree = carve_tree(at, q_len);
  tree.log_probs = nullptr;
  if (threadIdx.x == 0) {
    fault = {};
    num_nodes = q_len;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < q_len; i += kThreads) {
    if (p.method == BuildMethod::kChain) {
      tree.parents[i] = i - 1;
      const int32_t token = i > 0 ? p.tokens[int64_t{r} * p.budget + i - 1] : 0;
      tree.tokens[i] = token;
      if (token < 0) atomicMin(&num_nodes, i);
    } else {
      const int32_t parent = p.parents[int64_t{r} * q_len + i];
      if (i == 0 ? parent != -1 : parent < 0 || parent >= i)
        report(&fault, make_fault(TreeFault::kParent, r, i));
      tree.parents[i] = parent;
      tree.tokens[i] = p.tokens != nullptr ? p.tokens[int64_t{r} * q_len + i] : -1;
    }
  }
  __syncthreads();
  finish_tree(p, out, tree, num_nodes, &fault, faults);
}

// ---- candidates ----

// Exclusive sums over the block's threads.
__device__ int block_scan(int mine, int* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  return before + inclusive - mine;
}

__global__ void __launch_bounds__(kScanThreads)
    candidate_kernel(const __grid_constant__ BuildProblem p, const __grid_constant__ TreeOutput out,
                     FaultWord* faults) {
  extern __shared__ __align__(16) unsigned char smem[];
  __shared__ FaultWord fault;
  __shared__ int warp_sums[kScanThreads / 32], num_nodes;
  const int r = blockIdx.x, count = p.num_candidates;
  const int64_t base = int64_t{r} * count;
  unsigned char* at = smem;
  const SharedTree tree = carve_tree(at, p.budget + 1);
  auto* scores = reinterpret_cast<float*>(at);                 // [count]
  auto* node_of = reinterpret_cast<int32_t*>(scores + count);  // [count] 0: not chosen
  if (threadIdx.x == 0) {
    fault = {};
    num_nodes = 1;
  }
  __syncthreads();
  for (int c = threadIdx.x; c < count; c += kScanThreads) {
    const int parent = p.candidate_parents[base + c];
    const float own = p.candidate_log_probs[base + c];
    if (parent < -1 || parent >= c) report(&fault, make_fault(TreeFault::kCandidateParent, r, c));
    if (own != own) report(&fault, make_fault(TreeFault::kCandidateNaN, r, c));
  }
  __syncthreads();
  if (!fault) {  // so walking up ends
    for (int c = threadIdx.x; c < count; c += kScanThreads) {
      float score = p.candidate_log_probs[base + c];
      for (int a = p.candidate_parents[base + c]; a >= 0; a = p.candidate_parents[base + a])
        score = fminf(score, p.candidate_log_probs[base + a]);
      scores[c] = score;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < count; c += kScanThreads) {
      const float score = scores[c];
      int better = 0;
      for (int o = 0; o < count; ++o) better += scores[o] > score || (scores[o] == score && o < c);
      node_of[c] = score > -INFINITY && better < p.budget;
    }
    __syncthreads();
    const int per_thread = (count + kScanThreads - 1) / kScanThreads;
    const int begin = min(count, static_cast<int>(threadIdx.x) * per_thread),
              end = min(count, begin + per_thread);
    int mine = 0;
    for (int c = begin; c < end; ++c) mine += node_of[c];
    int node = 1 + block_scan(mine, warp_sums);
    for (int c = begin; c < end; ++c)
      if (node_of[c]) node_of[c] = node++;
    atomicMax(&num_nodes, mine > 0 ? node : 1);
    __syncthreads();
    for (int c = threadIdx.x; c < count; c += kScanThreads) {
      const int n = node_of[c];
      if (n == 0) continue;
      const int parent = p.candidate_parents[base + c];
      tree.parents[n] = parent < 0 ? 0 : node_of[parent];
      tree.tokens[n] = p.candidate_tokens[base + c];
      tree.log_probs[n] = fixed_of(scores[c]);
    }
  }
  __syncthreads();
  finish_tree(p, out, tree, num_nodes, &fault, faults);
}

// ---- beams ----

__global__ void __launch_bounds__(kScanThreads)
    beam_kernel(const __grid_constant__ BeamProblem p, const __grid_constant__ BeamOutput out,
                const __grid_constant__ ScoreTop top, FaultWord* faults) {
  __shared__ float scores[kMaxBeamWidth * kMaxBeamWidth];
  __shared__ FaultWord fault;
  const int r = blockIdx.x, count = p.rows * p.top_k;
  const int64_t first_row = int64_t{r} * p.rows;
  if (threadIdx.x == 0) fault = {};
  __syncthreads();
  for (int i = threadIdx.x; i < p.rows; i += kScanThreads) {
    const TreeFault found = top.faults[first_row + i];
    if (found != TreeFault::kNone) report(&fault, make_fault(found, r, i));
    if (p.row_log_probs != nullptr && !(p.row_log_probs[first_row + i] < INFINITY))
      report(&fault, make_fault(TreeFault::kBeamNaN, r, i));
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kScanThreads) {
    const int row = i / p.top_k;
    const float path = p.row_log_probs != nullptr ? p.row_log_probs[first_row + row] : 0.0f;
    const int64_t at = (first_row + row) * top.k + i % p.top_k;
    const bool exists = i % p.top_k < top.k;
    const uint64_t key = exists ? top.keys[at] : 0;
    float score = add_rn(path, nats_of(exists ? top.log_probs[at] : kNoLogProb));
    if (fault) score = -INFINITY;
    scores[i] = score;
    out.token_ids[first_row * p.top_k + i] = score == -INFINITY ? -1 : token_of_key(key);
    out.log_probs[first_row * p.top_k + i] = score;
  }
  __syncthreads();
  if (out.beam != nullptr) {
    int32_t* beam = out.beam + int64_t{r} * p.top_k;
    for (int i = threadIdx.x; i < p.top_k; i += kScanThreads)
      if (i >= count) beam[i] = -1;
    for (int i = threadIdx.x; i < count; i += kScanThreads) {
      int better = 0;
      for (int o = 0; o < count; ++o) better += scores[o] > scores[i] || (scores[o] == scores[i] && o < i);
      if (better < p.top_k) beam[better] = scores[i] > -INFINITY ? i : -1;
    }
  }
  if (threadIdx.x == 0) faults[r] = fault;
}

int kept_tokens(const BuildProblem& p) { return p.budget < p.scores.vocab ? p.budget : p.scores.vocab; }
std::size_t candidate_smem(const BuildProblem& p) {
  return tree_bytes(p.budget + 1) + 8 * static_cast<std::size_t>(p.num_candidates);
}

}  // namespace

void build_on_device(const BuildProblem& p, const TreeOutput& output, const TreeRun& run) {
  if (p.b == 0) return;
  const cudaStream_t stream = stream_of(run);
  TreeWorkspace workspace(run.workspace, p.b);
  switch (p.method) {
    case BuildMethod::kDdtree: {
      const ScoreTop top = take_score_top(workspace, p.scores, int64_t{p.b} * p.num_depths, kept_tokens(p));
      launch_score_top(p.scores, top, stream);
      const std::size_t table_bytes = sizeof(int64_t) * static_cast<std::size_t>(p.num_depths * top.k);
      const bool has_table = table_bytes <= kTableBytes;
      load_tree_kernel(ddtree_kernel, kMostDdtreeBytes);
      ddtree_kernel<<<p.b, kThreads, ddtree_bytes(p.budget + 1, has_table ? table_bytes : 0), stream>>>(
          p, output, top, has_table, workspace.faults());
      return check_launch("ddtree_kernel");
    }
    case BuildMethod::kCandidates:
      load_tree_kernel(candidate_kernel, kMostCandidateBytes);
      candidate_kernel<<<p.b, kScanThreads, candidate_smem(p), stream>>>(p, output, workspace.faults());
      return check_launch("candidate_kernel");
    case BuildMethod::kChain:
    case BuildMethod::kParents:
      given_tree_kernel<<<p.b, kThreads, tree_bytes(p.budget + 1), stream>>>(p, output, workspace.faults());
      return check_launch("given_tree_kernel");
  }
}

std::size_t device_build_bytes(const BuildProblem& p) {
  TreeWorkspace workspace(nullptr, p.b);
  switch (p.method) {
    case BuildMethod::kDdtree:
      take_score_top(workspace, p.scores, int64_t{p.b} * p.num_depths, kept_tokens(p));
      load_score_top(p.scores);
      load_tree_kernel(ddtree_kernel, kMostDdtreeBytes);
      break;
    case BuildMethod::kCandidates:
      load_tree_kernel(candidate_kernel, kMostCandidateBytes);
      break;
    case BuildMethod::kChain:
    case BuildMethod::kParents:
      load_tree_kernel(given_tree_kernel, tree_bytes(kMostNodes));
      break;
  }
  return workspace.bytes();
}

void expand_on_device(const BeamProblem& p, const BeamOutput& output, const TreeRun& run) {
  if (p.b == 0) return;
  TreeWorkspace workspace(run.workspace, p.b);
  const int k = p.top_k < p.scores.vocab ? p.top_k : p.scores.vocab;
  const ScoreTop top = take_score_top(workspace, p.scores, int64_t{p.b} * p.rows, k);
  launch_score_top(p.scores, top, stream_of(run));
  beam_kernel<<<p.b, kScanThreads, 0, stream_of(run)>>>(p, output, top, workspace.faults());
  check_launch("beam_kernel");
}

std::size_t device_beam_bytes(const BeamProblem& p) {
  TreeWorkspace workspace(nullptr, p.b);
  take_score_top(workspace, p.scores, int64_t{p.b} * p.rows,
                 p.top_k < p.scores.vocab ? p.top_k : p.scores.vocab);
  load_score_top(p.scores);
  load_tree_kernel(beam_kernel);
  return workspace.bytes();
}

}  // namespace treemla
