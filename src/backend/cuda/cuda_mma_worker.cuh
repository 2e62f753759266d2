// cuda_mma: what a thread knows and where things lie. Its steps are a file each.
#pragma once

#include "backend/cuda/cuda_mma_config.cuh"
#include "backend/cuda/half_types.cuh"
#include "backend/cuda/kernel_args.hpp"
#include "backend/cuda/ptx_sm80.cuh"
#include "backend/cuda/work_list.cuh"

namespace treemla::mma {

// What a group of four warps does: with one row tile the first attends and the second copies.
enum class Part { kAll, kAttend, kCopy };

// A thread's part of one work item, in the group of four warps that has kTiles row tiles. Fragments, with g = lane / 4 and
// t = 2 * (lane % 4):
//
//     S^T [16 keys, 8 rows]     keys g, g + 8 x rows t, t + 1
//     O^T [16 columns, 8 rows]  columns g, g + 8 x rows t, t + 1
template <class C, Part kPart>
struct Worker {
  using T = typename C::T;
  static constexpr int kTiles = kPart == Part::kCopy ? 0 : C::kGroupTiles;
  // Pieces of keys and values that are fetched before they are needed, as far as registers go.
  static constexpr int kAhead = C::kGroups > 2 ? 0 : 1;
  // Fragments of queries, one a piece of 16 columns and row tile: the first are in registers, the others in shared memory.
  static constexpr int kQ = C::kSteps * kTiles, kSharedQ = kTiles > 0 ? C::kSharedQ : 0,
                       kOwnQ = kQ - kSharedQ;
  static_assert(kTiles <= 4 && kOwnQ >= 0);
  // Shared memory of the group, in bytes from `own` on.
  static constexpr int kPartsAt = C::kQBytes, kWeightsAt = kPartsAt + kTiles * 3 * 512,
                       kWeightsBytes = kTiles * C::kTileWeights,
                       kShrinkAt = kWeightsAt + C::kWeightCopies * kWeightsBytes,
                       kTopsAt = kShrinkAt + 32 * kTiles,
                       kRowScalesAt = kTopsAt + (C::kSharedTops ? 32 * kTiles : 0),
                       kRaisedAt = kRowScalesAt + (C::kIsFp8 ? 32 * kTiles : 0);
  static_assert(kTiles == 0 || round_up(kRaisedAt + 4 * kTiles, 32) == C::kGroupBytes);

  const KernelArgs& args;
  const CudaWorkItem& item;
  Ring& ring;
  uint32_t smem, own;          // shared addresses: of the map, of what is the group's in it
  int lane, quarter;           // of the columns: the warp's
  int which;                   // group
  int key_end, last_unmasked;  // keys of this item; tiles that begin after last_unmasked need the mask
  uint32_t keys;  // address of this lane's row of a matrix of K in the ring: key l % 16, chunk l / 16
  // Lane l has the pool row of row l % kCopied that this warp copies, in tile l / kCopied of the window that is being copied, and what the
  // page table says of the same row of the next window, of a 64-bit entry the lower half: unread, so that nobody waits for it.
  uint32_t rows, next_entry;
  uint32_t q[kOwnQ > 0 ? kOwnQ : 1][2];
  float out[C::kColumnTiles][kTiles > 0 ? kTiles : 1][4];
  // Of row tile `quarter` of the group: the largest scores, about, and sums over this lane's keys. Three groups leave no registers for the
  // former between two tiles: they wait in shared memory.
  float tops[2], sums[2];

  __device__ __forceinline__ Worker(const KernelArgs& a, const CudaWorkItem& i, uint32_t s, Ring& r)
      : args(a), item(i), ring(r), smem(s) {
    lane = thread_index() % 32;
    const int warp = warp_index();
    quarter = warp % 4;
    which = warp / 4;
    // By comparisons: a product would be worked out again at every use.
    own = smem + C::kGroupsAt;
    if (group() == 1) own = smem + C::kGroupsAt + C::kGroupBytes;
    if (C::kGroups > 2 && group() == 2) own = smem + C::kGroupsAt + 2 * C::kGroupBytes;
    key_end = item.key_end;
    last_unmasked = (item.prefix_len < key_end ? item.prefix_len : key_end) - C::kKeys;
    keys = chunk_at(lane & 15, lane >> 4);
    // Kept in registers: else they are worked out again at every use, which takes longer.
    asm("" : "+r"(smem), "+r"(own), "+r"(lane), "+r"(keys), "+r"(key_end), "+r"(last_unmasked));
  }

  // Known to be the same in all lanes.
  __device__ __forceinline__ static int warp_index() { return __shfl_sync(~0u, thread_index() / 32, 0); }
  __device__ __forceinline__ int group() const { return kPart == Part::kAll ? which : 0; }
  // Of the group's row tiles, the warp's j-th. Of four its own is the first, else it would be chosen from all by `quarter` at every tile.
  static constexpr bool kOwnFirst = kTiles == 4;
  __device__ __forceinline__ int tile(int j) const { return kOwnFirst ? j ^ quarter : j; }
  // The group's row tile j begins at this row of the item.
  __device__ __forceinline__ int tile_row(int j) const { return 8 * (kTiles * group() + j); }

  // Of the group's four warps. By constants: a number would be worked out again, or spilled.
  __device__ __forceinline__ void sync_own() const {
    if (group() == 0)
      sync_group(1);
    else if (C::kGroups == 2 || group() == 1)
      sync_group(2);
    else
      sync_group(3);
  }

  // ---- copy, cuda_mma_copy.cuh: 16 lanes a row, 16 bytes a lane ----

  // The warps that copy take turns with the pairs of rows of a tile: all warps of the group that does nothing else; the fourth of each of three
  // groups, which has no row tile of its own and copies while the others are at the softmax; else all there are.
  static constexpr int kCopiers = C::kCopyingThreads / 32, kPairs = ceil_div(C::kKeys / 2, kCopiers);
  static constexpr bool kLastPairMayLack = kPairs * kCopiers > C::kKeys / 2;
  __device__ __forceinline__ bool copies() const { return !C::kIdleCopies || quarter == 3; }
  __device__ __forceinline__ int copier() const { return C::kIdleCopies ? group() : 4 * group() + quarter; }
  // The warp's pair of rows `pair` begins at this row of the tile.
  __device__ __forceinline__ int copied_row(int pair) const { return 2 * (copier() + kCopiers * pair); }
  // Lanes for each tile of a window: a row's each, and one of three pairs' to spare.
  static constexpr int kCopied = kPart == Part::kAttend ? 0 : kPairs == 3 ? 8 : 2 * kPairs;
  // Windows begin at multiples of their length.
  static constexpr int kWindowTiles = kCopied == 0 ? 1 : 32 / kCopied;
  static constexpr int kWindow = kWindowTiles * C::kKeys;
  // The key of this lane's row, or the item's end if it has none.
  __device__ __forceinline__ int window_key(int window) const {
    const int row = copied_row(lane % kCopied / 2) + lane % 2;
    if (kLastPairMayLack && row >= C::kKeys) return key_end;
    return window + lane / kCopied * C::kKeys + row;
  }
  __device__ __forceinline__ int64_t entry_index(int key) const {
    return item.page_base + args.pages.page_size.quotient(key);
  }
  __device__ __forceinline__ void fetch_entries(int window);
  __device__ __forceinline__ void find_rows(int window);
  __device__ __forceinline__ void enter_window(int first_key);
  __device__ __forceinline__ void copy(int first_key, int ahead);
  __device__ __forceinline__ void clear_rope() const;
  __device__ __forceinline__ void clear_nonfinite() const;
  // A row is chunks of 16 bytes, here as in the pool: the latents, a packed row's scales, the rope columns. 16 lanes copy as many at a time.
  static constexpr int kWholeCopies = C::kElementBytes * C::kDv / 256;
  __device__ __forceinline__ int rest_chunks() const {
    return (C::kRopeAt - 256 * kWholeCopies) / 16 + static_cast<unsigned>(args.d_rope) * C::kRopeBytes / 16;
  }

  // Of the four groups of 128 latents of a packed row.
  __device__ __forceinline__ uint32_t scales_at(int stage, int key) const {
    return smem + stage * C::kStageBytes + key * C::kKeyStride + C::kDv;
  }

  __device__ __forceinline__ const char* row_at(const char* from, uint32_t row) const;
  // Where stage 0 has a chunk of a row, counted from a multiple of 128 bytes (e4m3: 64) in it.
  __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) const {
    return smem + row * C::kKeyStride + 16 * (chunk ^ C::moved(row));
  }
  // From an even chunk that is at `from` to the one 2 * i later, of a row that begins with such a chunk.
  __device__ __forceinline__ static uint32_t chunks_later(uint32_t from, int i) {
    return (from ^ 32 * (i % C::kMovedPairs)) + 32 * (i - i % C::kMovedPairs);
  }
  __device__ __forceinline__ void wait_tile() const {
    wait_barrier(smem + C::kBarriersAt + 8 * ring.stage, ring.round);
  }
  __device__ __forceinline__ void release_tile() {
    uint32_t empty = smem + C::kBarriersAt + 8 * (C::kStages + ring.stage);
    // Plus 0, out of a sum that takes a while: the compiler would put this ahead of the last products, which then wait for the tile's last
    // fragments to come. With three row tiles it may: copies want the place early.
    if constexpr (kTiles == 4) empty += __float_as_uint(out[C::kColumnTiles - 3][3][0]) & args.d_rope >> 31;
    if constexpr (C::kOneCopies) {
      if constexpr (kTiles > 0) arrive(empty);
    } else {
      __syncwarp();
      if (lane == 0) arrive(empty);
    }
    const bool wraps = ring.stage + 1 == C::kStages;
    ring.stage = wraps ? 0 : ring.stage + 1;
    ring.round ^= wraps;
  }

  // ---- load, cuda_mma_queries.cuh: queries, as the fragments that score() multiplies by ----

  __device__ __forceinline__ uint32_t shared_q(int fragment) const {
    return own + C::kQBytes / 4 * quarter + 256 * (fragment - kOwnQ) + 8 * lane;
  }
  __device__ __forceinline__ const T* q_row(const CudaWorkItem& of, int packed) const {
    const int node = args.heads.quotient(packed), head = packed - node * args.h_q;
    return static_cast<const T*>(args.q) + (static_cast<int64_t>(of.q_begin) + node) * args.q_token_stride +
           head * args.q_head_stride;
  }
  // Row `row` of the warp's row tile j, or null.
  __device__ __forceinline__ const T* q_row(int j, int row) const {
    const int packed = item.row_begin + tile_row(tile(j)) + row;
    return j < kTiles && packed < item.row_end ? q_row(item, packed) : nullptr;
  }
  __device__ __forceinline__ void keep_q(int j, int step, uint32_t x0, uint32_t x1) {
    const int i = step * kTiles + j;
    if (i < kOwnQ)
      q[i][0] = x0, q[i][1] = x1;
    else
      store_shared(shared_q(i), uint2{x0, x1});
  }
  // Queries on their way. Lane l has columns 8 * (l % 4) on of each piece of 32 columns of row l / 4, of rope columns of the piece of 16.
  struct QueryLoads {
    static constexpr int kPieces = C::kLatentSteps / 2 + 1;
    uint4 x[kTiles > 0 ? kTiles : 1][kPieces];
  };
  template <bool kAligned>
  __device__ __forceinline__ void fetch_q(QueryLoads& loads) const;
  __device__ __forceinline__ void keep_q(const QueryLoads& loads);
  __device__ __forceinline__ void load_scaled_q(bool aligned);
  __device__ __forceinline__ void prefetch_queries(const CudaWorkItem* next) const;
  __device__ __forceinline__ static uint4 eight_of(const T* from);
  __device__ __forceinline__ static uint32_t load_two(const T* from, bool aligned);
  __device__ __forceinline__ float score_scale() const {
    return args.score_scale * 1.44269504088896340736f;  // log2 e
  }
  // Of rows 2 * pair and the next of row tile j: what their scores must be multiplied by. FP8 caches only.
  __device__ __forceinline__ uint32_t row_scale_at(int j, int pair) const {
    return own + kRowScalesAt + 4 * (8 * j + 2 * pair);
  }
  // Of a row, the largest query of each quarter: where weights will be.
  __device__ __forceinline__ uint32_t largest_at(int j, int row) const {
    return own + kWeightsAt + 16 * (8 * j + row);
  }

  // ---- score, cuda_mma_score.cuh: S^T over this warp's quarter of the columns. Row tile j of a group belongs to quarter j, which keeps its
  // own part; the others' go to shared memory ----

  using Fragment = float[4];
  // `part` is the quarter that it comes from, exclusive or the one that it goes to: 1, 2 or 3.
  __device__ __forceinline__ uint32_t part_at(int j, int part) const {
    return own + kPartsAt + (j * 3 + part - 1) * 512 + 16 * lane;
  }
  struct KeyReader;
  __device__ __forceinline__ bool score(Fragment& own) const;

  // ---- mask and softmax, cuda_mma_softmax.cuh ----

  __device__ __forceinline__ unsigned hidden_bits(int j, int first_key) const;
  __device__ __forceinline__ void gather_scores(Fragment& x, int j, int first_key, unsigned hidden) const;
  __device__ __forceinline__ uint32_t shrink_at(int j, int pair) const {
    return own + kShrinkAt + 4 * (8 * j + 2 * pair);
  }
  // Their warp alone reads and writes them.
  __device__ __forceinline__ uint32_t top_at(int j, int pair) const {
    return own + kTopsAt + 4 * (8 * j + 2 * pair);
  }
  __device__ __forceinline__ void load_tops(int pair);
  // Which tile, by its first key, last raised a maximum of the row tile.
  __device__ __forceinline__ uint32_t raised_at(int j) const { return own + kRaisedAt + 4 * j; }
  __device__ __forceinline__ bool raise_tops(const Fragment& x, int j, int first_key);
  __device__ __forceinline__ void store_weights(const Fragment& x, int j);
  __device__ __forceinline__ static float scaled(float weight, float scale);
  __device__ __forceinline__ static void store_pair(uint32_t at, float w0, float w1);
  __device__ __forceinline__ bool softmax(Fragment& own, int first_key, unsigned hidden);

  // ---- accumulate, cuda_mma_accumulate.cuh: O^T = O^T * shrink + V^T P^T over this warp's quarter of the columns ----

  __device__ __forceinline__ void shrink_out(int first_key);
  struct ValueReader;
  __device__ __forceinline__ void accumulate(ValueReader& v, int first_key, bool shrinks);

  // ---- write, cuda_mma_output.cuh ----

  __device__ __forceinline__ void finish_rows(int j);
  __device__ __forceinline__ void clear_weightless();
  template <class To>
  __device__ __forceinline__ void write_rows(To* to) const;
  __device__ __forceinline__ void write_pairs(float* to) const;
  template <class To>
  __device__ __forceinline__ void write_quads(To* to) const;
  template <class To>
  __device__ __forceinline__ void write_to(To* to) const;
  __device__ __forceinline__ void write();

  // ---- a work item, cuda_mma.cuh ----

  __device__ __forceinline__ void begin(SharedWork<C::kThreads>& work);

  __device__ __forceinline__ void attend(SharedWork<C::kThreads>& work);
  __device__ __forceinline__ void attend_keys(int barrier);
};

}  // namespace treemla::mma
