// The device code of cuda_mma; cuda_mma.cu says what it computes, with the shared-memory map and the layouts.
#pragma once

#include "backend/cuda/cuda_mma_config.cuh"
#include "backend/cuda/half_types.cuh"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/ptx_sm80.cuh"
#include "backend/cuda/work_list.cuh"
#include "plan/cuda_tiles.hpp"

#include <iterator>
#include <type_traits>

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

  // ---- copy: 16 lanes a row, 16 bytes a lane ----

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
  __device__ __forceinline__ void fetch_entries(int window) {
    const int key = window_key(window);
    if (key < key_end)
      next_entry =
          __ldg(static_cast<const uint32_t*>(args.pages.entries) + (entry_index(key) << args.pages.is_int64));
  }
  // Pool rows fit 32 bits: supports_kernel() looks. As in pool_row(), an entry outside the pool counts as 0.
  __device__ __forceinline__ void find_rows(int window) {
    const int key = window_key(window);
    rows = 0;
    if (key >= key_end) return;
    const int size = args.pages.page_size.divisor, page = args.pages.page_size.quotient(key);
    const int32_t high =
        args.pages.is_int64
            ? __ldg(static_cast<const int32_t*>(args.pages.entries) + 2 * entry_index(key) + 1)
            : static_cast<int32_t>(next_entry) >> 31;
    uint64_t entry = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | next_entry;
    if (entry >= static_cast<uint64_t>(args.pages.num_pages)) {
      report_fault(args.plan, DeviceFault::kPageEntry, item.request, page);
      entry = 0;
    }
    rows = static_cast<uint32_t>(entry) * size + (key - page * size);
  }
  // The window that the tile belongs to must be there; first_key goes up by a tile from call to call.
  __device__ __forceinline__ void enter_window(int first_key) {
    if ((first_key & (kWindow - 1)) != 0 || first_key == item.key_begin) return;
    find_rows(first_key);
    fetch_entries(first_key + kWindow);
  }
  // The tile whose first key is first_key, `ahead` tiles after the one in use, into the ring. Past the item's end it is zeros that are
  // copied.
  __device__ __forceinline__ void copy(int first_key, int ahead) {
    if (first_key >= key_end) return;
    const bool wraps = ring.stage + ahead >= C::kStages;
    const int stage = ring.stage + ahead - (wraps ? C::kStages : 0);
    enter_window(first_key);
    const uint32_t full = smem + C::kBarriersAt + 8 * stage, empty = full + 8 * C::kStages;
    const char* from[kPairs];  // ahead of the wait, where it costs nothing
#pragma unroll
    for (int p = 0; p < kPairs; ++p)
      from[p] = row_at(static_cast<const char*>(args.kv) + 16 * (lane & 15),
                       __shfl_sync(~0u, rows,
                                   static_cast<unsigned>(first_key) / C::kKeys % kWindowTiles * kCopied +
                                       2 * p + (lane >> 4)));
    // Until the groups are done with what was there, a round earlier. Before the first round that is so at once.
    wait_barrier(empty, ring.round ^ !wraps);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if (kLastPairMayLack && p + 1 == kPairs && copied_row(p) >= C::kKeys) break;
      const bool ok = first_key + copied_row(p) + (lane >> 4) < key_end;
      const uint32_t to = chunk_at(copied_row(p) + (lane >> 4), lane & 15) + stage * C::kStageBytes;
#pragma unroll
      for (int i = 0; i < kWholeCopies; ++i) copy16(to + 256 * i, from[p] + 256 * i, ok);
      copy16_if((lane & 15) < rest_chunks(), to + 256 * kWholeCopies, from[p] + 256 * kWholeCopies, ok);
    }
    arrive_after_copies(full);
  }
  // A row is chunks of 16 bytes, here as in the pool: the latents, a packed row's scales, the rope columns. 16 lanes copy as many at a time.
  static constexpr int kWholeCopies = C::kElementBytes * C::kDv / 256;
  __device__ __forceinline__ int rest_chunks() const {
    return (C::kRopeAt - 256 * kWholeCopies) / 16 + static_cast<unsigned>(args.d_rope) * C::kRopeBytes / 16;
  }

  // Of the four groups of 128 latents of a packed row.
  __device__ __forceinline__ uint32_t scales_at(int stage, int key) const {
    return smem + stage * C::kStageBytes + key * C::kKeyStride + C::kDv;
  }

  // Rows and the bytes between them fit 32 bits each: supports_kernel() looks.
  __device__ __forceinline__ const char* row_at(const char* from, uint32_t row) const {
    uint64_t at;
    asm("mad.wide.u32 %0, %1, %2, %3;"
        : "=l"(at)
        : "r"(row), "r"(C::kElementBytes * static_cast<uint32_t>(args.kv_row_stride)), "l"(from));
    return reinterpret_cast<const char*>(at);
  }
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

  // ---- load: queries, as the fragments that score() multiplies by ----

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
  __device__ __forceinline__ void fetch_q(QueryLoads& loads) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const T* row = q_row(j, lane >> 2);
      if (row != nullptr) row += 8 * (lane & 3);
#pragma unroll
      for (int i = 0; i < QueryLoads::kPieces; ++i) {
        const bool is_rope = i + 1 == QueryLoads::kPieces;
        loads.x[j][i] = {0, 0, 0, 0};
        if (row == nullptr || (is_rope && ((lane & 3) >= 2 || 16 * quarter >= args.d_rope))) continue;
        const T* from = row + (is_rope ? C::kDv + 16 * quarter : C::kDv / 4 * quarter + 32 * i);
        if constexpr (kAligned)
          loads.x[j][i] = __ldg(reinterpret_cast<const uint4*>(from));
        else
          loads.x[j][i] = eight_of(from);
      }
    }
  }
  // Fragments of two steps out of a piece, by way of the shared memory where the warp will keep its own. A row's four chunks of 16 bytes change
  // places, so that 8 rows of one meet 32 banks.
  __device__ __forceinline__ void keep_q(const QueryLoads& loads) {
    constexpr int kSlots = C::kQBytes / 4 / 512, kAll = kTiles * QueryLoads::kPieces;
    const uint32_t place = own + C::kQBytes / 4 * quarter,
                   to = place + 16 * ((lane & ~3) + (lane & 3 ^ lane >> 3 & 3)),
                   from = place + 16 * (4 * (lane & 7) + (lane >> 3 ^ lane >> 1 & 3));
    uint32_t kept[kAll > 0 ? kAll : 1][4];
#pragma unroll
    for (int first = 0; first < kAll; first += kSlots) {
#pragma unroll
      for (int f = first; f < kAll && f < first + kSlots; ++f)
        store_shared(to + (f - first) * 512, loads.x[f % kTiles][f / kTiles]);
      __syncwarp();
#pragma unroll
      for (int f = first; f < kAll && f < first + kSlots; ++f)
        load_matrices(kept[f], from + (f - first) * 512);
      __syncwarp();
    }
#pragma unroll
    for (int f = 0; f < kAll; ++f) {
      const int j = f % kTiles, i = f / kTiles;
      keep_q(j, 2 * i, kept[f][0], kept[f][1]);
      if (2 * i + 1 < C::kSteps) keep_q(j, 2 * i + 1, kept[f][2], kept[f][3]);
    }
  }
  // For FP8 caches: in fp16, each row times the power of two that brings its largest number below 2^15. A lane has columns 4 * (l % 4) to
  // 4 * (l % 4) + 3 of a piece of 16, as score() finds them in a cached row.
  __device__ __forceinline__ void load_scaled_q(bool aligned) {
    uint2 x[kTiles > 0 ? kTiles : 1][C::kSteps];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const T* row = q_row(j, lane >> 2);
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        const bool is_rope = i >= C::kLatentSteps;
        const int column = (is_rope ? C::kDv + 16 * quarter : C::kDv / 4 * quarter + 16 * i) +
                           (is_rope && C::kIsPacked ? 2 : 4) * (lane & 3);
        x[j][i] = {0, 0};
        if (row == nullptr || (is_rope && 16 * quarter >= args.d_rope)) continue;
        if (is_rope && C::kIsPacked)
          x[j][i] = {load_two(row + column, aligned), load_two(row + column + 8, aligned)};
        else if (aligned)
          x[j][i] = __ldg(reinterpret_cast<const uint2*>(row + column));
        else
          x[j][i] = {load_two(row + column, false), load_two(row + column + 2, false)};
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      float largest = 0;
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i)
        largest = fmaxf(largest, fmaxf(largest_of<T>(x[j][i].x), largest_of<T>(x[j][i].y)));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      if ((lane & 3) == 0) store_shared(largest_at(tile(j), lane >> 2) + 4 * quarter, largest);
    }
    sync_own();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float4 l = load_shared<float4>(largest_at(tile(j), lane >> 2));
      const int exponent =
          static_cast<int>(__float_as_uint(fmaxf(fmaxf(l.x, l.y), fmaxf(l.z, l.w))) >> 23) - 127;
      const int up = min(max(14 - exponent, -113), 100);
      const float by = __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
      if (quarter == 0 && (lane & 3) == 0)
        store_shared(row_scale_at(tile(j), 0) + 4 * (lane >> 2),
                     __uint_as_float(static_cast<uint32_t>(127 - up) << 23) * score_scale());
#pragma unroll
      for (int i = 0; i < C::kSteps; ++i) {
        using To = std::conditional_t<C::kIsPacked, __nv_bfloat16, __half>;
        if (i < C::kLatentSteps)
          keep_q(j, i, scale_two<T, __half>(x[j][i].x, by), scale_two<T, __half>(x[j][i].y, by));
        else
          keep_q(j, i, scale_two<T, To>(x[j][i].x, by), scale_two<T, To>(x[j][i].y, by));
      }
    }
  }
  __device__ __forceinline__ static uint4 eight_of(const T* from) {
    return {load_two(from, false), load_two(from + 2, false), load_two(from + 4, false),
            load_two(from + 6, false)};
  }
  __device__ __forceinline__ static uint32_t load_two(const T* from, bool aligned) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
    return aligned ? *reinterpret_cast<const uint32_t*>(x) : x[0] | static_cast<uint32_t>(x[1]) << 16;
  }
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
  // ---- score: S^T over this warp's quarter of the columns. Row tile j of a group belongs to quarter j, which keeps its own part; the
  // others' go to shared memory ----

  using Fragment = float[4];
  // `part` is the quarter that it comes from, exclusive or the one that it goes to: 1, 2 or 3.
  __device__ __forceinline__ uint32_t part_at(int j, int part) const {
    return own + kPartsAt + (j * 3 + part - 1) * 512 + 16 * lane;
  }
  // Fragments of the keys' columns, piece by piece, fetched as far ahead as registers go.
  struct KeyReader {
    uint32_t latent, rope;
    uint32_t x[1 + kAhead][4];
    __device__ __forceinline__ explicit KeyReader(const Worker& w) {
      const uint32_t row = w.keys + w.ring.stage * C::kStageBytes;
      latent = row + C::kElementBytes * C::kDv / 4 * w.quarter;
      rope = C::kIsPacked ? row + C::kRopeAt + 32 * w.quarter
                          : (row ^ 16 * C::kRopeBytes * w.quarter) + C::kRopeAt;
      if (kAhead == 1) fetch(0);
    }
    // Of FP8 rows two pieces of latents at once, for steps 2 * i and the next.
    static constexpr int kFetches = C::kIsFp8 ? C::kLatentSteps / 2 + 1 : C::kSteps;
    __device__ __forceinline__ void fetch(int i) {
      if (i < kFetches) load_matrices(x[i % (1 + kAhead)], i + 1 < kFetches ? chunks_later(latent, i) : rope);
    }
    __device__ __forceinline__ void read(uint32_t (&a)[4], int step) {
      const int i = C::kIsFp8 ? step / 2 : step;
      if (!C::kIsFp8 || step % 2 == 0) fetch(i + kAhead);
      const auto& y = x[i % (1 + kAhead)];
      if constexpr (!C::kIsFp8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = y[e];
      } else if (C::kIsPacked && step >= C::kLatentSteps) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = y[e];
      } else {
        // Bytes 0 and 1 of a lane's four are its columns t, t + 1 of the piece, bytes 2 and 3 its columns t + 8, t + 9.
        const int second = step < C::kLatentSteps && step % 2 == 1 ? 2 : 0;
        const uint2 lo = widen_quad(y[second]), hi = widen_quad(y[second + 1]);
        a[0] = lo.x, a[1] = hi.x, a[2] = lo.y, a[3] = hi.y;
      }
    }
  };
  // Returns whether a key may hold NaN or infinity: whatever the query, its score then does.
  __device__ __forceinline__ bool score(Fragment& own) const {
    float s[kTiles][4] = {};
    KeyReader k(*this);
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      uint32_t a[4];
      k.read(a, i);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int f = i * kTiles + j;
        const uint2 b = f < kOwnQ ? uint2{q[f][0], q[f][1]} : load_shared<uint2>(shared_q(f));
        if (i < C::kLatentSteps)
          multiply_add<typename C::Latent>(s[j], a, b.x, b.y);
        else
          multiply_add<typename C::Rope>(s[j], a, b.x, b.y);
      }
      if (C::kIsPacked && i + 1 == C::kLatentSteps) {  // a quarter of a packed row has one scale
        const float scale0 = load_shared<float>(scales_at(ring.stage, lane >> 2) + 4 * quarter),
                    scale8 = load_shared<float>(scales_at(ring.stage, (lane >> 2) + 8) + 4 * quarter);
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          s[j][0] *= scale0, s[j][1] *= scale0, s[j][2] *= scale8, s[j][3] *= scale8;
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      // Read ahead of the branch, where the compiler would index s by `quarter`, in memory.
      const float4 x = {s[j][0], s[j][1], s[j][2], s[j][3]};
      if (kOwnFirst ? j > 0 : quarter != j)
        store_shared(part_at(tile(j), kOwnFirst ? j : quarter ^ j), x);
      else
        own[0] = x.x, own[1] = x.y, own[2] = x.z, own[3] = x.w;
    }
    return !(fabsf(s[0][0]) < INFINITY && fabsf(s[0][2]) < INFINITY);
  }

  // ---- mask and softmax ----

  // Bit e: hidden from row e % 2 is key e / 2 * 8 of this lane. Rows that are padding: as from the last one. Of both rows at a time, since each
  // waits for words of the mask.
  __device__ __forceinline__ unsigned hidden_bits(int j, int first_key) const {
    const int first = first_key - item.prefix_len, from = max(first, 0),
              before = max(-first, 0);  // tree key of bit 0 of `tree`; keys of the prefix
    unsigned bits = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int packed = item.row_begin + tile_row(j) + 2 * (lane & 3) + r,
                node = args.heads.quotient(min(packed, item.row_end - 1));
      uint32_t tree = ~0u;
      if (args.mask.kind == MaskKind::kCausal) {
        const int seen = node + 1 - from;
        tree = seen >= 32 ? ~0u : (1u << max(seen, 0)) - 1;
      } else if (args.mask.kind == MaskKind::kTree) {
        const uint32_t* words =
            args.mask.bits + (static_cast<int64_t>(item.q_begin) + node) * args.mask.words;
        const int w = from >> 5;
        const uint32_t low = w < args.mask.words ? __ldg(words + w) : 0,
                       high = w + 1 < args.mask.words ? __ldg(words + w + 1) : 0;
        tree = __funnelshift_r(low, high, from);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = (lane >> 2) + 8 * h;
        const bool hidden = first_key + i >= key_end || (i >= before && (tree >> (i - before) & 1) == 0);
        bits |= static_cast<unsigned>(hidden) << (2 * h + r);
      }
    }
    return bits;
  }
  // Online softmax (Milakov and Gimelshein, 2018), in three steps: m is about the largest score so far, the weights are 2^(s - m), and
  // shrink = 2^(m_old - m) is what the sums so far must be multiplied by.
  // Adds the others' parts to this warp's. In pairs, so that the sum is the same whoever makes it: a row's bits don't depend on its place.
  __device__ __forceinline__ void gather_scores(Fragment& x, int j, int first_key, unsigned hidden) const {
    const float4 v1 = load_shared<float4>(part_at(j, 1)), v2 = load_shared<float4>(part_at(j, 2)),
                 v3 = load_shared<float4>(part_at(j, 3));
    float2 scale;
    if constexpr (C::kIsFp8)
      scale = load_shared<float2>(row_scale_at(j, lane & 3));
    else
      scale.x = scale.y = score_scale();
    x[0] = ((x[0] + v1.x) + (v2.x + v3.x)) * scale.x;
    x[1] = ((x[1] + v1.y) + (v2.y + v3.y)) * scale.y;
    x[2] = ((x[2] + v1.z) + (v2.z + v3.z)) * scale.x;
    x[3] = ((x[3] + v1.w) + (v2.w + v3.w)) * scale.y;
    if (first_key <= last_unmasked) return;
    if constexpr (!C::kEarlyMask) hidden = hidden_bits(j, first_key);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (hidden >> e & 1) x[e] = -INFINITY;
  }
  __device__ __forceinline__ uint32_t shrink_at(int j, int pair) const {
    return own + kShrinkAt + 4 * (8 * j + 2 * pair);
  }
  // Their warp alone reads and writes them.
  __device__ __forceinline__ uint32_t top_at(int j, int pair) const {
    return own + kTopsAt + 4 * (8 * j + 2 * pair);
  }
  __device__ __forceinline__ void load_tops(int pair) {
    const float2 x = load_shared<float2>(top_at(quarter, pair));
    tops[0] = x.x, tops[1] = x.y;
  }
  // Which tile, by its first key, last raised a maximum of the row tile.
  __device__ __forceinline__ uint32_t raised_at(int j) const { return own + kRaisedAt + 4 * j; }
  // True if this one does.
  __device__ __forceinline__ bool raise_tops(const Fragment& x, int j, int first_key) {
    float largest[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};
    const bool raise = __any_sync(~0u, largest[0] > tops[0] + kSlack || largest[1] > tops[1] + kSlack);
    if (raise) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          largest[e] = fmaxf(largest[e], __shfl_xor_sync(~0u, largest[e], step));
        float shrink = 1;
        if (largest[e] > tops[e] + kSlack) {
          shrink = exp2_fast(tops[e] - largest[e]);
          tops[e] = largest[e];
        }
        sums[e] *= shrink;
        if (lane >= 4) continue;
        store_shared(shrink_at(j, lane) + 4 * e, shrink);
        if constexpr (C::kSharedTops) store_shared(top_at(j, lane) + 4 * e, tops[e]);
      }
      if (lane == 0) store_shared(raised_at(j), first_key);
    }
    return raise;
  }
  // Weights of a row tile lie as they are found, [16 keys][8 rows], and are transposed as they are read.
  __device__ __forceinline__ void store_weights(const Fragment& x, int j) {
    float w[2][2];  // [key / 8][row]
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float base = tops[e] == -INFINITY ? 0.0f : tops[e];  // nothing seen yet: never -inf + inf
      w[0][e] = exp2_fast(x[e] - base), w[1][e] = exp2_fast(x[e + 2] - base);
      sums[e] += w[0][e] + w[1][e];
    }
    const uint32_t at = own + kWeightsAt + C::kTileWeights * j + 4 * lane;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (C::kIsPacked) {
        // Each quarter of the columns has its own scale. None for hidden keys: it may be NaN.
        const float4 scales = load_shared<float4>(scales_at(ring.stage, (lane >> 2) + 8 * h));
        store_pair(at + 128 * h, scaled(w[h][0], scales.x), scaled(w[h][1], scales.x));
        store_pair(at + 128 * h + kWeightsBytes, scaled(w[h][0], scales.y), scaled(w[h][1], scales.y));
        store_pair(at + 128 * h + 2 * kWeightsBytes, scaled(w[h][0], scales.z), scaled(w[h][1], scales.z));
        store_pair(at + 128 * h + 3 * kWeightsBytes, scaled(w[h][0], scales.w), scaled(w[h][1], scales.w));
      } else {
        store_pair(at + 128 * h, w[h][0], w[h][1]);
      }
    }
  }
  __device__ __forceinline__ static float scaled(float weight, float scale) {
    return weight == 0 ? 0.0f : weight * scale;
  }
  __device__ __forceinline__ static void store_pair(uint32_t at, float w0, float w1) {
    store_shared(at, narrow_pair<typename C::Value>(w0, w1));
  }
  // Of this warp's row tile.
  __device__ __forceinline__ bool softmax(Fragment& own, int first_key, unsigned hidden) {
    gather_scores(own, quarter, first_key, hidden);
    if constexpr (C::kSharedTops) load_tops(lane & 3);
    const bool raised = raise_tops(own, quarter, first_key);
    store_weights(own, quarter);
    return raised;
  }

  // A hidden row may hold NaN or infinity, and a weight of 0 would not keep it out of a product: zeros instead. Whoever sees the row has
  // NaN in its weights.
  __device__ __forceinline__ void clear_nonfinite() const {
    const auto clear = [](uint32_t& x) {
      if constexpr (C::kIsFp8) {
        x &= ~(((x & 0x7F7F7F7F) + 0x01010101 >> 7 & 0x01010101) * 0xFF);
      } else {
        clear_nonfinite_pair<T>(x);
      }
    };
    constexpr int kWarps = kPart == Part::kCopy ? 4 : 8;  // a third group has no rows left to clear
    if (C::kGroups > 2 && group() == 2) return;
    const uint32_t at =
        chunk_at(2 * (4 * group() + quarter) + (lane >> 4), lane & 15) + ring.stage * C::kStageBytes;
#pragma unroll
    for (int r = 0; r < C::kKeys; r += 2 * kWarps)
#pragma unroll 1
      for (uint32_t i = at + r * C::kKeyStride; i < at + r * C::kKeyStride + 256 * kWholeCopies; i += 256) {
        uint4 x = load_shared<uint4>(i);
        clear(x.x), clear(x.y), clear(x.z), clear(x.w);
        store_shared(i, x);
      }
  }

  // ---- accumulate: O^T = O^T * shrink + V^T P^T over this warp's quarter of the columns ----

  __device__ __forceinline__ void shrink_out(int first_key) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (load_shared<int>(raised_at(tile(j))) != first_key) continue;
      const float2 shrink = load_shared<float2>(shrink_at(tile(j), lane & 3));
#pragma unroll
      for (int c = 0; c < C::kColumnTiles; ++c) {
        out[c][j][0] *= shrink.x, out[c][j][1] *= shrink.y;
        out[c][j][2] *= shrink.x, out[c][j][3] *= shrink.y;
      }
    }
  }
  // Fragments of V^T, 16 columns after the other. FP8: rows of fragments are columns 2 * g and 2 * g + 1 where they are g and g + 8 of
  // 16-bit caches.
  struct ValueReader {
    uint32_t at;
    uint32_t x[1 + kAhead][4];
    __device__ __forceinline__ explicit ValueReader(const Worker& w) {
      // Lane l has key l % 8 + 8 * (l / 16), columns 8 * (l / 8 % 2) on; of FP8 rows key l % 16, columns 16 * (l / 16) on.
      const int key = C::kIsFp8 ? w.lane & 15 : (w.lane & 7) + (w.lane >> 4) * 8,
                half = C::kIsFp8 ? w.lane >> 4 : w.lane >> 3 & 1;
      at = w.chunk_at(key, half) + w.ring.stage * C::kStageBytes + C::kElementBytes * C::kDv / 4 * w.quarter;
      fetch(0);
    }
    static constexpr int kFetches = C::kIsFp8 ? C::kColumnTiles / 2 : C::kColumnTiles;
    __device__ __forceinline__ void fetch(int i) {
      if (i < kFetches) load_matrices_transposed(x[i % (1 + kAhead)], chunks_later(at, i));
    }
    __device__ __forceinline__ void read(uint32_t (&a)[4], int c) {
      const int i = C::kIsFp8 ? c / 2 : c;
      if ((!C::kIsFp8 || c % 2 == 0) && i + kAhead > 0) fetch(i + kAhead);
      const auto& y = x[i % (1 + kAhead)];
      if constexpr (!C::kIsFp8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = y[e];
      } else {
        // A lane's bytes: columns 2 * g, 2 * g + 1 of key t, then of key t + 1.
        const int first = c % 2 * 2;
        const uint2 lo = widen_columns<typename C::Value>(y[first]),
                    hi = widen_columns<typename C::Value>(y[first + 1]);
        a[0] = lo.x, a[1] = lo.y, a[2] = hi.x, a[3] = hi.y;
      }
    }
  };
  __device__ __forceinline__ void accumulate(ValueReader& v, int first_key, bool shrinks) {
    uint32_t p[kTiles][2];
    // Lane l has key l % 16 of row tile l / 16.
    const uint32_t weights = own + kWeightsAt + (C::kIsPacked ? quarter * kWeightsBytes : 0) +
                             C::kTileWeights * tile(lane >> 4) + 16 * (lane & 15);
#pragma unroll
    for (int j = 0; j + 1 < kTiles; j += 2) {
      uint32_t x[4];
      // From the first pair's row tiles to the second's: tile(j) ^ 2.
      const int pair = kOwnFirst && j == 2 && (quarter & 2) ? -2 : j;
      load_matrices_transposed(x, weights + C::kTileWeights * pair);
      p[j][0] = x[0], p[j][1] = x[1], p[j + 1][0] = x[2], p[j + 1][1] = x[3];
    }
    if constexpr (kTiles % 2 == 1) {
      constexpr int j = kTiles - 1;  // only lanes 0-15 say where
      load_matrices_transposed(p[j][0], p[j][1], weights + C::kTileWeights * j);
    }
    if (shrinks) shrink_out(first_key);
#pragma unroll
    for (int c = 0; c < C::kColumnTiles; ++c) {
      uint32_t a[4];
      v.read(a, c);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) multiply_add<typename C::Value>(out[c][j], a, p[j][0], p[j][1]);
    }
  }

  // ---- write ----

  // Each row's lse, in place of shrink what its sums are to be multiplied by, and in place of the mark which rows saw no key with a weight.
  __device__ __forceinline__ void finish_rows(int j) {
    if constexpr (C::kSharedTops) load_tops(lane & 3);
    unsigned weightless = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float total = sums[e];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
      const bool none = total == 0;
      weightless |= (__ballot_sync(~0u, none) & 15) << 4 * e;
      if (lane >= 4) continue;
      store_shared(shrink_at(j, lane) + 4 * e, none ? 0.0f : args.value_scale / total);
      const int row = tile_row(j) + 2 * lane + e, packed = item.row_begin + row;
      if (packed >= item.row_end) continue;
      const float lse = none ? -INFINITY : (tops[e] + log2f(total)) * 0.693147180559945309417f;
      if (item.partial >= 0)
        args.partial_lse[static_cast<int64_t>(item.partial) * C::kRows + row] = lse;
      else if (args.lse)
        args.lse[static_cast<int64_t>(item.q_begin) * args.h_q + packed] = lse;
    }
    if (lane == 0) store_shared(raised_at(j), weightless);
  }
  // Keys whose scores are -inf may have left NaN in the sums of such a row: 0 * inf. It is 0.
  __device__ __forceinline__ void clear_weightless() {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const unsigned weightless = load_shared<unsigned>(raised_at(tile(j))) >> (lane & 3);
      if (weightless == 0) continue;
#pragma unroll
      for (int c = 0; c < C::kColumnTiles; ++c) {
        if (weightless & 1) out[c][j][0] = out[c][j][2] = 0;
        if (weightless & 16) out[c][j][1] = out[c][j][3] = 0;
      }
    }
  }
  template <class To>
  __device__ __forceinline__ void write_rows(To* to) const {
    to += 16 * C::kColumnTiles * quarter + (C::kIsFp8 ? 2 : 1) * (lane >> 2);
    const int num_rows = item.row_end - item.row_begin;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 by = load_shared<float2>(shrink_at(tile(j), lane & 3));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = tile_row(tile(j)) + 2 * (lane & 3) + e;
        if (row >= num_rows) continue;
        To* at = to + static_cast<int64_t>(row) * C::kDv;
#pragma unroll
        for (int c = 0; c < C::kColumnTiles; ++c)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float x = out[c][j][2 * h + e] * (e == 0 ? by.x : by.y);
            To& y = at[16 * c + (C::kIsFp8 ? 1 : 8) * h];
            if constexpr (std::is_same_v<To, float>)
              y = x;
            else
              y = __builtin_bit_cast(To, narrow<To>(x));
          }
      }
    }
  }
  // float32 rows aligned to 8 bytes, two columns at a time. Lanes 4 apart have neighbouring columns of the same two rows: each takes a row.
  // FP8: a lane has both columns.
  __device__ __forceinline__ void write_pairs(float* to) const {
    const int odd = C::kIsFp8 ? 0 : lane >> 2 & 1, num_rows = item.row_end - item.row_begin;
    to += 16 * C::kColumnTiles * quarter + (C::kIsFp8 ? 2 * (lane >> 2) : lane >> 2 & 6);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 by = load_shared<float2>(shrink_at(tile(j), lane & 3));
      const int row = tile_row(tile(j)) + 2 * (lane & 3) + odd;
      float* at = to + static_cast<int64_t>(row) * C::kDv;
#pragma unroll
      for (int c = 0; c < C::kColumnTiles; ++c) {
        const float x[4] = {out[c][j][0] * by.x, out[c][j][1] * by.y, out[c][j][2] * by.x,
                            out[c][j][3] * by.y};
        if constexpr (C::kIsFp8) {
          if (row < num_rows) *reinterpret_cast<float2*>(at + 16 * c) = {x[0], x[2]};
          if (row + 1 < num_rows) *reinterpret_cast<float2*>(at + 16 * c + C::kDv) = {x[1], x[3]};
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float other = __shfl_xor_sync(~0u, odd ? x[2 * h] : x[2 * h + 1], 4);
            if (row < num_rows)
              *reinterpret_cast<float2*>(at + 16 * c + 8 * h) =
                  odd ? float2{other, x[2 * h + 1]} : float2{x[2 * h], other};
          }
        }
      }
    }
  }
  // 16-bit outputs whose rows are aligned to 8 bytes. Fragments are transposed, so that a lane has columns t, t + 1 of row g and of the
  // eight columns after; neighbours swap halves, and a lane stores four columns. FP8: it has every other of four columns, and the others.
  template <class To>
  __device__ __forceinline__ void write_quads(To* to) const {
    const int odd = lane & 1, row = lane >> 2, num_rows = item.row_end - item.row_begin;
    to += 16 * C::kColumnTiles * quarter + (C::kIsFp8 ? 4 * (lane & 3)
                                            : odd     ? 8 + 2 * ((lane & 3) - 1)
                                                      : 2 * (lane & 3));
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 by = load_shared<float2>(shrink_at(tile(j), lane & 3));
      const bool there = tile_row(tile(j)) + row < num_rows;
      To* at = to + static_cast<int64_t>(tile_row(tile(j)) + row) * C::kDv;
#pragma unroll
      for (int c = 0; c < C::kColumnTiles; ++c) {
        uint32_t x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          x[h] = transposed(narrow_pair<To>(out[c][j][2 * h] * by.x, out[c][j][2 * h + 1] * by.y));
        uint2 four;
        if constexpr (C::kIsFp8) {
          four = {__byte_perm(x[0], x[1], 0x5410), __byte_perm(x[0], x[1], 0x7632)};
        } else {
          const uint32_t other = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
          four = odd ? uint2{other, x[1]} : uint2{x[0], other};
        }
        if (there) *reinterpret_cast<uint2*>(at + 16 * c) = four;
      }
    }
  }
  template <class To>
  __device__ __forceinline__ void write_to(To* to) const {
    if (reinterpret_cast<uintptr_t>(to) % 8 != 0)
      write_rows(to);
    else if constexpr (std::is_same_v<To, float>)
      write_pairs(to);
    else
      write_quads(to);
  }
  __device__ __forceinline__ void write() {
    quarter = warp_index() % 4;  // again, rather than kept for it
    asm volatile("" : "+r"(lane), "+r"(quarter));
    sync_own();  // the last tile's shrink is used
    if (kTiles == 4 || quarter < kTiles) finish_rows(quarter);
    sync_own();
    clear_weightless();
    const DType dtype = dtype_of_rows(args, item);
    if (dtype == DType::kF32)
      write_to(place_of_rows<float>(args, item, C::kRows, C::kDv));
    else if (dtype == DType::kBF16)
      write_to(place_of_rows<__nv_bfloat16>(args, item, C::kRows, C::kDv));
    else
      write_to(place_of_rows<__half>(args, item, C::kRows, C::kDv));
  }

  // Rope columns that the cache lacks are zeros, which no copy touches. For the copying warps, whose arrival the readers wait for.
  __device__ __forceinline__ void clear_rope() const {
    if (args.d_rope == MmaTile::kRope) return;
    constexpr int kChunks = MmaTile::kRope * C::kRopeBytes / 16;
    for (int i = 32 * copier() + lane; i < C::kStages * C::kKeys * kChunks; i += 32 * kCopiers) {
      const int row = i / kChunks, chunk = i % kChunks;
      if (chunk >= args.d_rope * C::kRopeBytes / 16)
        store_shared(chunk_at(row % C::kKeys, chunk) + row / C::kKeys * C::kStageBytes + C::kRopeAt,
                     uint4{0, 0, 0, 0});
    }
  }

  // ---- a work item ----

  __device__ __forceinline__ void begin(SharedWork<C::kThreads>& work) {
    const int window = item.key_begin & -kWindow;
    if constexpr (kCopied > 0)
      if (copies()) fetch_entries(window);
    const bool aligned =
        reinterpret_cast<uintptr_t>(args.q) % 16 == 0 && (args.q_token_stride | args.q_head_stride) % 8 == 0;
    [[maybe_unused]] QueryLoads queries;
    if constexpr (!C::kIsFp8) {
      if (aligned)
        fetch_q<true>(queries);
      else
        fetch_q<false>(queries);
    }
    if constexpr (kCopied > 0)
      if (copies()) {
        clear_rope();
        find_rows(window);
        fetch_entries(window + kWindow);
#pragma unroll
        for (int i = 0; i + 1 < C::kStages; ++i) copy(item.key_begin + i * C::kKeys, i);
      }
    work.look_ahead();
    if constexpr (kTiles > 0 && C::kIsFp8)  // it meets the group, which one that only copies must not
      load_scaled_q(aligned);
    else
      keep_q(queries);
#pragma unroll
    for (int c = 0; c < C::kColumnTiles; ++c)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[c][j][e] = 0;
    sums[0] = sums[1] = 0;
    tops[0] = tops[1] = -INFINITY;
    if (C::kSharedTops && lane < 4 && quarter < kTiles)
      store_shared(top_at(quarter, lane), float2{tops[0], tops[1]});
    if (lane < kTiles) store_shared(raised_at(lane), -1);  // whoever raises first does so after sync_own()
  }

  // The next item's queries to L2 while this one's output is on its way, by the first group, which read that item: two threads a row.
  __device__ __forceinline__ void prefetch_queries(const CudaWorkItem* next) const {
    if (next == nullptr) return;
    // Three groups have no register left to keep `quarter` in until here; two would spill another.
    const int thread = C::kGroups > 2 ? static_cast<int>(thread_index()) : 32 * quarter + lane,
              num_rows = next->row_end - next->row_begin;
#pragma unroll 1
    for (int row = thread / 2; row < num_rows; row += 64) {
      const T* from = q_row(*next, next->row_begin + row);
#pragma unroll
      for (int column = thread % 2 * 64; column < C::kDv + MmaTile::kRope; column += 128)
        if (column < C::kDv + args.d_rope) prefetch_l2(from + column);
    }
  }

  __device__ __forceinline__ void attend(SharedWork<C::kThreads>& work) {
    begin(work);
    if (C::kGroups == 3)
      attend_keys(1 + group());
    else if (group() == 0)
      attend_keys(1);
    else
      attend_keys(2);
    if constexpr (kTiles > 0) {
      if (group() == 0) prefetch_queries(work.after());
      write();
    }
  }
  // The groups have the ring of keys in common and nothing else: while one waits for its softmax the others keep the tensor cores busy. Two
  // groups have the loop each, with its barrier a constant, without which it takes 8% longer; three share it, for three of it are more
  // than the instruction caches hold and take 4% longer.
  __device__ __forceinline__ void attend_keys(int barrier) {
#pragma unroll 1
    for (int key = item.key_begin; key < key_end; key += C::kKeys) {
      wait_tile();
      Fragment own = {};
      bool is_suspect = false;
      if constexpr (kTiles > 0) is_suspect = score(own);
      if constexpr (kCopied > 0 && !C::kIdleCopies) copy(key + (C::kStages - 1) * C::kKeys, C::kStages - 1);
      unsigned hidden = 0;
      if (key > last_unmasked) {
        if (C::kEarlyMask && (kTiles == 4 || quarter < kTiles)) hidden = hidden_bits(quarter, key);
        if (__syncthreads_or(is_suspect)) {  // everyone has scored
          if constexpr (kCopied > 0) clear_nonfinite();
          __syncthreads();
        }
      } else if constexpr (kTiles > 0) {
        sync_group(barrier);  // the parts are there
      }
      if constexpr (kTiles > 0) {
        bool raised = false;
        if (kTiles == 4 || quarter < kTiles)
          raised = softmax(own, key, hidden);
        else if constexpr (C::kIdleCopies)
          copy(key + (C::kStages - 1) * C::kKeys, C::kStages - 1);
        ValueReader v(*this);  // its first fragments come while others are at the softmax
        const bool shrinks = sync_group_or(barrier, raised);
        accumulate(v, key, shrinks);
      }
      release_tile();
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kTile.blocks)
    mma_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  __shared__ SharedWork<C::kThreads> work;
  const uint32_t smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  if (threadIdx.x < C::kStages) {
    init_barrier(smem + C::kBarriersAt + 8 * threadIdx.x, C::kCopyingThreads);
    init_barrier(smem + C::kBarriersAt + 8 * (C::kStages + threadIdx.x),
                 C::kOneCopies ? C::kThreads / 2 : C::kThreads / 32);
  }
  allow_dependent_launch();
  Ring ring;
  for (bool more = work.begin(args.plan, static_cast<int>(blockIdx.x)); more; more = work.next()) {
    if constexpr (!C::kOneCopies)
      Worker<C, Part::kAll>(args, work.item(), smem, ring).attend(work);
    else if (threadIdx.x < C::kThreads / 2)
      Worker<C, Part::kAttend>(args, work.item(), smem, ring).attend(work);
    else
      Worker<C, Part::kCopy>(args, work.item(), smem, ring).attend(work);
  }
}

// The kernel of a tile for caches of kCache and queries of type T.
template <class T, MmaCache kCache, int i = 0>
const void* find_kernel(const MmaTile& tile) {
  if constexpr (i == static_cast<int>(std::size(kMmaTiles))) {
    return nullptr;
  } else if constexpr (kMmaTiles[i].cache != kCache) {
    return find_kernel<T, kCache, i + 1>(tile);
  } else {
    constexpr const MmaTile& kTile = kMmaTiles[i];
    if (tile.d_v != kTile.d_v || tile.row_tiles != kTile.row_tiles)
      return find_kernel<T, kCache, i + 1>(tile);
    return reinterpret_cast<const void*>(
        &mma_kernel<Config<T, kTile.d_v, kTile.rows(), static_cast<int>(kCache)>>);
  }
}

}  // namespace treemla::mma
