// cuda_wgmma with rows as M, for hundreds of rows a request: 16-bit caches, d_v 512, tiles of 64 rows x 64 keys.
//
//     S [64 rows, 64 keys] = Q K^T      P = 2^(scale * S - m)      O [64 rows, d_v] = O * shrink + P V      V: the first d_v columns of K
//
// cuda_wgmma.cuh has rows as N, whose products read keys and rows from shared memory: 278 KB a tile, more than it has in the time that tensor
// cores need. Here values are multiplied with 256 columns as N and weights from registers: 213 KB.
//
// Three warpgroups of 128 threads, which meet at mbarriers:
//
//     copy      keys, as in cuda_wgmma_copy.cuh, and queries but for their rope columns
//     attend 0  scores and weights of tiles 0, 2, ...; all tiles' values over columns 0 to 255
//     attend 1  of tiles 1, 3, ...; over columns 256 to 511
//
// Each has its own weights in registers, as its scores' sums lie, and gets the other's through shared memory, with the maxima that they are in
// units of. Tile i, its own:
//
//     S(i), half of d_qk | O += P(i - 1) V(i - 1) | S(i), the rest | softmax, P(i) to shared memory | O += P(i) V(i)
//
// so that the other has products of the tile before or after while this one weighs. Of each tile a warpgroup reads one half of the columns last:
// the place of tile i is filled again by halves as they come free, while tile i + 1 is scored, and S(i + 2) begins with the first that
// was. P(i - 1) is ready by about then: waited for ahead of S(i) a tile takes 18% longer, after all of it 9% (docs/PERFORMANCE.md). Warp w of
// either has rows 16 w to 16 w + 15, so maxima pass from warp to warp.
//
// Lane l, g = l / 4, t = 2 * (l % 4): rows g and g + 8 of the warp's, columns 8 j + t, 8 j + t + 1 of keys or of the half of d_v.
//
// Registers of a thread: 56 for copying, 224 for the others: 128 of O, 32 of S, 16 of P, 16 of queries' rope columns.
//
// Shared memory, bytes
//     latents   [2][d_v / 64][64][128]     131,072
//     rope      [2][64][128]                16,384     done with after the scores
//     queries   [d_v / 64][64][128]         65,536
//     weights   [2][64][128]                16,384     of even and of odd tiles
//     notes     [2][64][2]                   1,024     the maximum of a row after that tile, and what sums so far are to be multiplied by
//     sums      [2][2][64]                   1,024     of weights, each warpgroup's tiles; of even and of odd items
//     barriers                                 248
//                                          231,672     sm_90: 232,448
//
// Budget, 64 rows x 64 keys, in cycles of an SM of the H200: tensor cores 2,176, shared memory 2,300. A tile takes 1.61 us, at 1.98 GHz
// 3,190 cycles: docs/PERFORMANCE.md.
//
// A row's bits depend on its keys alone, but are not those of the form with rows as N: sums of weights are added in another order.
#pragma once

#include <iterator>
#include <type_traits>

#include "backend/cuda/cuda_wgmma_copy.cuh"
#include "backend/cuda/cuda_wgmma_masks.cuh"
#include "backend/cuda/fragment_output.cuh"

namespace treemla::wgmma {

template <class T_, int kTileDv, int kTileRows>
struct RowsConfig {
  using T = T_;
  static constexpr WgmmaTile kTile = find_wgmma_tile(kTileDv, kTileRows, true);
  static constexpr int kThreads = kTile.threads();
  static constexpr int kDv = kTile.d_v, kRows = kTile.rows, kKeys = WgmmaTile::kKeys;
  static constexpr int kQRopePanels = 0;  // in registers
  static constexpr int kPanels = kTile.panels(), kChunkPanels = WgmmaTile::kChunkPanels,
                       kChunks = kTile.chunks(), kHalfPanels = kPanels / 2, kHalfChunks = kChunks / 2;
  static constexpr int kStages = kTile.stages, kRopeStages = kTile.rope_stages;
  static constexpr bool kClusters = false;
  static_assert(kDv == 512 && kRows == 64 && kStages == 2 && kRopeStages == 2,
                "two tiles, halves of 256 columns");

  // Registers of a thread, by warpgroup: as many as there are at launch, no warpgroup gets what the CTA did not have then.
  static constexpr int kRegistersAtLaunch = 168, kAttendRegisters = 224,
                       kCopyRegisters = 3 * kRegistersAtLaunch - 2 * kAttendRegisters;

  // Shared memory, in bytes; barriers as in cuda_wgmma_config.cuh.
  static constexpr int kPanelBytes = WgmmaTile::kPanelBytes, kQPanelBytes = 128 * kRows;
  static constexpr int kRopeAt = kStages * kPanels * kPanelBytes;
  static constexpr int kQAt = kTile.q_at(), kWeightsAt = kTile.weights_at();
  static constexpr int kNotesAt = kTile.factors_at(), kSumsAt = kNotesAt + 16 * kRows;
  static constexpr int kFullArrivals = 128;
  static constexpr int kFullAt = kTile.barriers_at();
  static constexpr int kRopeFullAt = kFullAt + 8 * kStages * kChunks;
  static constexpr int kEmptyAt = kRopeFullAt + 8 * kRopeStages;
  static constexpr int kRopeEmptyAt = kEmptyAt + 8 * kStages * kChunks;
  static constexpr int kQFullAt = kRopeEmptyAt + 8 * kRopeStages, kQEmptyAt = kQFullAt + 8;
  static constexpr int kWeightsFullAt = kQEmptyAt + 8;  // of even and of odd tiles
  static constexpr int kSumsFullAt = kWeightsFullAt + 16;
  static constexpr int kSmemBytes = kTile.smem_bytes();
  static_assert(kQAt % 1024 == 0 && kWeightsAt % 1024 == 0, "swizzled rows");
  static_assert(kSumsAt + 16 * kRows <= kFullAt && kSumsFullAt + 8 <= kSmemBytes && kSmemBytes <= 227 * 1024);
};

template <class C>
struct RowsMap : SharedMap<C> {
  using SharedMap<C>::base;
  __device__ __forceinline__ uint32_t weights(int parity) const {
    return base + C::kWeightsAt + parity * C::kQPanelBytes;
  }
  __device__ __forceinline__ uint32_t notes(int parity) const {
    return base + C::kNotesAt + parity * 8 * C::kRows;
  }
  __device__ __forceinline__ uint32_t sums(uint32_t item_parity, int half) const {
    return base + C::kSumsAt + (2 * item_parity + half) * 4 * C::kRows;
  }
  __device__ __forceinline__ uint32_t weights_full(int parity) const {
    return base + C::kWeightsFullAt + 8 * parity;
  }
  __device__ __forceinline__ uint32_t sums_full() const { return base + C::kSumsFullAt; }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < C::kStages * C::kChunks; ++i) {
      init_barrier(base + C::kFullAt + 8 * i, C::kFullArrivals);
      init_barrier(base + C::kEmptyAt + 8 * i, 4);
    }
    for (int i = 0; i < C::kRopeStages; ++i) {
      init_barrier(this->rope_full(i), C::kFullArrivals);
      init_barrier(this->rope_empty(i), 4);
      init_barrier(weights_full(i), 4);
    }
    init_barrier(this->q_full(), 128);
    init_barrier(this->q_empty(), 8);
    init_barrier(sums_full(), 8);
  }
};

// Every item begins at stage 0. A tile is copied in the order that its place comes free in, and is scored in: rope columns, the half of the
// warpgroup that scores it, the other.
template <class C>
struct RowsCopier : Copier<C> {
  using Base = Copier<C>;
  using Base::args, Base::map, Base::first_row, Base::chunk, Base::rows;
  uint32_t rounds = 0;  // parities of uses of the stages
  __device__ __forceinline__ RowsCopier(const KernelArgs& a, const SharedMap<C>& m, int thread)
      : Base(a, m, thread) {}

  // A tile of which the item has so many keys.
  __device__ __forceinline__ void copy_keys(int stage, int num_keys) {
    num_keys -= first_row;
    const uint32_t round = (rounds >> stage & 1) ^ 1;
    rounds ^= 1u << stage;
    const bool has_rope = 8 * chunk < args.d_rope;
    wait_barrier(map.rope_empty(stage), round);
#pragma unroll
    for (int i = 0; i < Base::kKeyRows; ++i)
      copy16(map.rope(stage) + swizzled(first_row, chunk) + 2048 * i,
             rows[i] + (has_rope ? 128 * C::kPanels : 0), has_rope && 16 * i < num_keys);
    arrive_after_copies(map.rope_full(stage));
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const int half = h ^ stage;
      const uint32_t to = map.panel(stage, half * C::kHalfPanels) + swizzled(first_row, chunk);
      const int from = half * 128 * C::kHalfPanels;
#pragma unroll
      for (int c = 0; c < C::kHalfChunks; ++c) {
        wait_barrier(map.empty(stage, half * C::kHalfChunks + c), round);
#pragma unroll
        for (int i = 0; i < Base::kKeyRows; ++i)
#pragma unroll
          for (int p = C::kChunkPanels * c; p < C::kChunkPanels * (c + 1); ++p)
            copy16(to + p * C::kPanelBytes + 2048 * i, rows[i] + from + 128 * p, 16 * i < num_keys);
        arrive_after_copies(map.full(stage, half * C::kHalfChunks + c));
      }
    }
  }
  __device__ __forceinline__ void run() {
    WorkList list(args.plan, worker<C>());
    while (const CudaWorkItem* item = list.next()) {
      const int key_begin = item->key_begin, key_end = item->key_end;
      this->fetch_entries(*item, key_begin);
      int stage = 0;
#pragma unroll 1
      for (int key = key_begin; key < key_end; key += C::kKeys) {
        this->find_rows(*item, key);
        this->fetch_entries(*item, key + C::kKeys);
        copy_keys(stage, key_end - key);
        if (key == key_begin) this->copy_queries(*item);
        stage ^= 1;
      }
    }
    wait_copies<0>();
  }
};

// Scores and weights of every other tile; half of the columns of the output.
template <class C>
struct Attender {
  using T = typename C::T;
  static constexpr int kSums = C::kKeys / 2, kOutSums = C::kDv / 4, kSteps = C::kKeys / 16;
  const KernelArgs& args;
  const RowsMap<C>& map;
  int half, thread;
  // Parities. Bit 0: of own tiles; 1: of the other's; 2: of items with keys, for queries; 3: of items.
  uint32_t rounds = 0;
  // Of rows g and g + 8: sum of this thread's weights; the largest score of all tiles so far, about, in base-2 logarithms, or more.
  float sum[2], top[2];
  uint32_t q_rope[C::kTile.kRope / 16][4];
  float out[kOutSums];

  __device__ __forceinline__ Attender(const KernelArgs& a, const RowsMap<C>& m, int h, int t)
      : args(a), map(m), half(h), thread(t) {}

  __device__ __forceinline__ float scale() const { return args.score_scale * 1.44269504088896340736f; }
  __device__ __forceinline__ void sync() const {
    if (half == 0)
      sync_group(1);
    else
      sync_group(2);
  }
  __device__ __forceinline__ bool sync_or(bool x) const {
    return half == 0 ? sync_group_or(1, x) : sync_group_or(2, x);
  }
  // Of rows g and g + 8, the first.
  __device__ __forceinline__ int own_row() const { return 16 * (thread / 32) + (thread >> 2 & 7); }

  // Rope columns of the queries, as an A in registers.
  __device__ __forceinline__ void load_rope(const CudaWorkItem& item) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int packed = item.row_begin + own_row() + 8 * r;
      const int t = 2 * (thread & 3);
      const bool ok = packed < item.row_end;
      const uint32_t* from = static_cast<const uint32_t*>(args.q);
      if (ok) from += (query_at(args, item, packed) + C::kDv + t) / 2;
#pragma unroll
      for (int k = 0; k < C::kTile.kRope / 16; ++k)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          q_rope[k][2 * h + r] = ok && 16 * k < args.d_rope ? __ldg(from + 8 * k + 4 * h) : 0;
    }
  }

  // ---- scores: a tile of this warpgroup's, which lies at stage `half` ----

  __device__ __forceinline__ void multiply_panel(float (&x)[kSums], uint32_t queries, uint32_t keys) const {
    const uint64_t a = matrix_at(queries), b = matrix_at(keys);
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply<T, false>(x, matrix_after(a, 32 * k), matrix_after(b, 32 * k), true);
  }
  // Over rope columns and the columns of the own half, or over the others.
  template <bool kOthers>
  __device__ __forceinline__ void begin_scores(float (&x)[kSums]) const {
    const uint32_t round = rounds & 1;
    const int from = kOthers ? half ^ 1 : half;
    if (!kOthers) wait_barrier(map.rope_full(half), round);
#pragma unroll
    for (int c = 0; c < C::kHalfChunks; ++c) {
      const int chunk = from * C::kHalfChunks + c;
      wait_barrier(map.full(half, chunk), round);
      fence_async_reads();
      begin_products();
      if (!kOthers && c == 0) {
        const uint64_t b = matrix_at(map.rope(half));
#pragma unroll
        for (int k = 0; k < C::kTile.kRope / 16; ++k)
          multiply<T, false>(x, q_rope[k], matrix_after(b, 32 * k), k > 0);
      }
#pragma unroll
      for (int p = 0; p < C::kChunkPanels; ++p) {
        const int panel = C::kChunkPanels * chunk + p;
        multiply_panel(x, map.q_panel(panel), map.panel(half, panel));
      }
    }
    commit_products();
  }
  // Each second lane knows what one of the two rows sees.
  __device__ __forceinline__ void hide(float (&x)[kSums], const CudaWorkItem& item, int tile_key,
                                       const MaskWords& mask) const {
    const int lane = thread & 31;
    const uint64_t one = mask.seen(args, item, tile_key);
    const uint64_t seen = __shfl_sync(~0u, one, lane & ~1) >> 2 * (lane & 3),
                   seen_8 = __shfl_sync(~0u, one, lane | 1) >> 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      if (!((i % 4 < 2 ? seen : seen_8) >> (i / 4 * 8 + i % 2) & 1)) x[i] = -INFINITY;
  }

  // ---- softmax: as in cuda_wgmma_score.cuh, by the four lanes that have a row ----

  // Sums in units of the last tile's maxima to those of this one's; `any` of the warp's rows has another.
  __device__ __forceinline__ void shrink(const float (&by)[2], bool any) {
    if (!any) return;
    wait_products<0>();  // of scores: the compiler would else, with a warning
    sum[0] *= by[0], sum[1] *= by[1];
#pragma unroll
    for (int i = 0; i < kOutSums; ++i) out[i] *= by[i % 4 / 2];
  }
  __device__ __forceinline__ void raise_tops(const float (&x)[kSums]) {
    // Of both rows at a time, and by a tree: a step waits for the one before.
    float largest[2][kSums / 4];
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      largest[0][j] = fmaxf(x[4 * j], x[4 * j + 1]);
      largest[1][j] = fmaxf(x[4 * j + 2], x[4 * j + 3]);
    }
#pragma unroll
    for (int n = kSums / 8; n > 0; n /= 2)
#pragma unroll
      for (int j = 0; j < n; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) largest[r][j] = fmaxf(largest[r][j], largest[r][j + n]);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float others[2] = {__shfl_xor_sync(~0u, largest[0][0], step),
                               __shfl_xor_sync(~0u, largest[1][0], step)};
      largest[0][0] = fmaxf(largest[0][0], others[0]), largest[1][0] = fmaxf(largest[1][0], others[1]);
    }
    const bool raises[2] = {largest[0][0] > top[0] + kSlack, largest[1][0] > top[1] + kSlack};
    const bool any = __any_sync(~0u, raises[0] || raises[1]);
    float by[2] = {1, 1};
    if (any) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!raises[r]) continue;
        const float raised = largest[r][0] + kMargin;
        by[r] = exp2_fast(top[r] - raised);
        top[r] = raised;
      }
    }
    if ((thread & 3) == 0) {
      store_shared(map.notes(half) + 8 * own_row(), float2{top[0], by[0]});
      store_shared(map.notes(half) + 8 * own_row() + 64, float2{top[1], by[1]});
    }
    shrink(by, any);
  }
  __device__ __forceinline__ void weigh(uint32_t (&w)[kSteps][4], const float (&x)[kSums]) {
    // Nothing seen yet: never -inf + inf.
    const float from[2] = {top[0] == -INFINITY ? 0 : top[0], top[1] == -INFINITY ? 0 : top[1]};
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float y0 = exp2_fast(x[8 * k + 2 * i] - from[i % 2]),
                    y1 = exp2_fast(x[8 * k + 2 * i + 1] - from[i % 2]);
        sum[i % 2] += y0 + y1;
        w[k][i] = narrow_pair<T>(y0, y1);
      }
  }
  __device__ __forceinline__ void store_weights(const uint32_t (&w)[kSteps][4]) const {
    // Lane l: row l % 8 of the first or the last 8 of the warp's (l / 8 % 2), the first or the last 8 of 16 keys (l / 16).
    const int lane = thread & 31, warp = thread / 32;
    const uint32_t to = map.weights(half) + swizzled(16 * warp + (lane & 15), lane >> 4);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) store_matrices(to ^ 32 * k, w[k]);
  }

  // ---- values: of a tile at that stage, over this warpgroup's columns ----

  __device__ __forceinline__ uint64_t values(int stage) const {
    return wide_matrix_at(map.panel(stage, half * C::kHalfPanels), C::kPanelBytes);
  }
  __device__ __forceinline__ void free_values(int stage) const {
#pragma unroll
    for (int c = 0; c < C::kHalfChunks; ++c) arrive_warp(map.empty(stage, half * C::kHalfChunks + c));
  }

  // A tile of the other warpgroup's.
  __device__ __forceinline__ void begin_other() {
    const int other = half ^ 1;
    wait_barrier(map.weights_full(other), rounds >> 1 & 1);
    rounds ^= 2;
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 note = load_shared<float2>(map.notes(other) + 8 * (own_row() + 8 * r));
      top[r] = note.x;
      by[r] = note.y;
    }
    shrink(by, __any_sync(~0u, by[0] != 1 || by[1] != 1));
    fence_async_reads();  // of the copies: the other saw them land
    pin(out);
    begin_products();
    const uint64_t a = matrix_at(map.weights(other)), b = values(other);
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      multiply<T, false, true>(out, matrix_after(a, 32 * k), matrix_after(b, 2048 * k), true);
    commit_products();
  }
  __device__ __forceinline__ void end_other() {
    wait_products<0>();
    pin(out);
    free_values(half ^ 1);
  }
  // Tile i of an item, one of this warpgroup's, and values of the tile before.
  __device__ __forceinline__ void add_own(const CudaWorkItem& item, int i, int key, bool is_last,
                                          bool masks) {
    float x[kSums];
    pin(x);
    MaskWords mask = {};
    if (masks) mask.fetch(args, item, key, own_row() + 8 * (thread & 1));
    begin_scores<false>(x);
    if (i > 0) begin_other();
    begin_scores<true>(x);
    wait_products<1>();
    if (i > 0) free_values(half ^ 1);
    wait_products<0>();
    pin(x);
    pin(out);
    rounds ^= 1;
    arrive_warp(map.rope_empty(half));
    if (is_last) arrive_warp(map.q_empty());
#pragma unroll
    for (int j = 0; j < kSums; ++j) x[j] *= scale();
    if (masks) {
      if (sync_or(any_nonfinite(x))) {
        clear_nonfinite<C>(map.panel(half, 0), item, key);
        fence_async_reads();
        sync();
      }
      hide(x, item, key, mask);
    }
    raise_tops(x);
    uint32_t w[kSteps][4];
    weigh(w, x);
    store_weights(w);
    fence_async_reads();
    arrive_warp(map.weights_full(half));
    pin(out);
    begin_products();
    const uint64_t b = values(half);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) multiply<T, true>(out, w[k], matrix_after(b, 2048 * k), true);
    commit_products();
    wait_products<0>();
    pin(out);
    free_values(half);
  }

  // ---- the end of an item ----

  // Each row's lse; gives what its sums are to be multiplied by.
  __device__ __forceinline__ void finish(float (&by)[2], const CudaWorkItem& item) {
    const bool leads = (thread & 3) == 0;
    const uint32_t round = rounds >> 3 & 1;
    rounds ^= 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
      if (leads) store_shared(map.sums(round, half) + 4 * (own_row() + 8 * r), sum[r]);
    }
    arrive_warp(map.sums_full());
    wait_barrier(map.sums_full(), round);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_row() + 8 * r, packed = item.row_begin + row;
      const float total = sum[r] + load_shared<float>(map.sums(round, half ^ 1) + 4 * row);
      by[r] = total == 0 ? kNoKey : args.value_scale / total;
      if (half != 0 || !leads || packed >= item.row_end) continue;
      const float lse = total == 0 ? -INFINITY : (top[r] + log2f(total)) * 0.693147180559945309417f;
      if (item.partial >= 0)
        args.partial_lse[static_cast<int64_t>(item.partial) * C::kRows + row] = lse;
      else if (args.lse)
        args.lse[static_cast<int64_t>(item.q_begin) * args.h_q + packed] = lse;
    }
  }
  // `to`: this thread's first column of row 0. It has columns 8 j, 8 j + 1 from there of rows g and g + 8.
  template <class To>
  __device__ __forceinline__ void write(To* to, const float (&by)[2], int num_rows) const {
    const bool aligned = reinterpret_cast<uintptr_t>(to) % 8 == 0;  // pairs of float32
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_row() + 8 * r;
      To* at = to + static_cast<int64_t>(row) * C::kDv;
#pragma unroll
      for (int j = 0; j < kOutSums / 4; ++j) {
        const float x0 = finished(out[4 * j + 2 * r], by[r]), x1 = finished(out[4 * j + 2 * r + 1], by[r]);
        if (row >= num_rows) continue;
        if constexpr (std::is_same_v<To, float>) {
          if (aligned) {
            *reinterpret_cast<float2*>(at + 8 * j) = {x0, x1};
          } else {
            at[8 * j] = x0, at[8 * j + 1] = x1;
          }
        } else {
          at[8 * j] = __builtin_bit_cast(To, narrow<To>(x0));
          at[8 * j + 1] = __builtin_bit_cast(To, narrow<To>(x1));
        }
      }
    }
  }
  // 16-bit numbers, aligned to 8 bytes: of two times eight columns neighbours swap, and a lane stores four columns.
  template <class To>
  __device__ __forceinline__ void write_quads(To* to, const float (&by)[2], int num_rows) const {
    const int odd = thread & 1;
    if (odd) to += 6;  // columns 8 j + 8 + t - 2 on
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = own_row() + 8 * r;
      To* at = to + static_cast<int64_t>(row) * C::kDv;
#pragma unroll
      for (int j = 0; j < kOutSums / 4; j += 2) {
        uint32_t x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          x[h] = narrow<To>(finished(out[4 * (j + h) + 2 * r], by[r])) |
                 static_cast<uint32_t>(narrow<To>(finished(out[4 * (j + h) + 2 * r + 1], by[r]))) << 16;
        const uint32_t other = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
        if (row < num_rows)
          *reinterpret_cast<uint2*>(at + 8 * j) = odd ? uint2{other, x[1]} : uint2{x[0], other};
      }
    }
  }
  template <class To>
  __device__ __forceinline__ void write_to(To* rows, const float (&by)[2], int num_rows) const {
    To* to = rows + half * (C::kDv / 2) + 2 * (thread & 3);
    if constexpr (std::is_same_v<To, float>) {
      write(to, by, num_rows);
    } else {
      if (reinterpret_cast<uintptr_t>(rows) % 8 == 0)
        write_quads(to, by, num_rows);
      else
        write(to, by, num_rows);
    }
  }

  __device__ __forceinline__ void run() {
    if (half == 1) copy_first_queries<C>(args, map, thread);
    WorkList list(args.plan, worker<C>());
    while (const CudaWorkItem* item = list.next()) {
      const int key_begin = item->key_begin, tiles = ceil_div(item->key_end - key_begin, C::kKeys);
      load_rope(*item);
      sum[0] = sum[1] = 0;
      top[0] = top[1] = -INFINITY;
#pragma unroll
      for (int i = 0; i < kOutSums; ++i) out[i] = 0;
      if (tiles > 0) {
        wait_barrier(map.q_full(), rounds >> 2 & 1);
        rounds ^= 4;
        if (half >= tiles) arrive_warp(map.q_empty());
      }
      const int plain_end = min(item->prefix_len, item->key_end);
      int i = half;
#pragma unroll 1
      for (; i < tiles; i += 2) {
        const int key = key_begin + i * C::kKeys;
        add_own(*item, i, key, i + 2 >= tiles, key + C::kKeys > plain_end);
      }
      if (tiles > 0 && i == tiles) {  // the last tile is the other's
        begin_other();
        end_other();
      }
      float by[2];
      finish(by, *item);
      const int num_rows = item->row_end - item->row_begin;
      const DType dtype = dtype_of_rows(args, *item);
      if (dtype == DType::kF32)
        write_to(place_of_rows<float>(args, *item, C::kRows, C::kDv), by, num_rows);
      else if (dtype == DType::kBF16)
        write_to(place_of_rows<__nv_bfloat16>(args, *item, C::kRows, C::kDv), by, num_rows);
      else
        write_to(place_of_rows<__half>(args, *item, C::kRows, C::kDv), by, num_rows);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_rows_kernel(const __grid_constant__ KernelArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const RowsMap<C> map{{static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory))}};
  if (threadIdx.x == 0) map.init_barriers();
  allow_dependent_launch();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0),
            thread = static_cast<int>(threadIdx.x) % 128;
  if (group == 0) {
    set_registers<C::kCopyRegisters, C::kRegistersAtLaunch>();
    RowsCopier<C>(args, map, thread).run();
  } else {
    set_registers<C::kAttendRegisters, C::kRegistersAtLaunch>();
    Attender<C>(args, map, group - 1, thread).run();
  }
#endif
}

// The kernel of a tile with rows as M for queries and caches of type T.
template <class T, int i = 0>
const void* find_rows_kernel(const WgmmaTile& tile) {
  if constexpr (i == static_cast<int>(std::size(kWgmmaTiles))) {
    return nullptr;
  } else {
    constexpr const WgmmaTile& kTile = kWgmmaTiles[i];
    if constexpr (!kTile.rows_are_m) {
      return find_rows_kernel<T, i + 1>(tile);
    } else {
      if (tile.d_v != kTile.d_v || tile.rows != kTile.rows) return find_rows_kernel<T, i + 1>(tile);
      return reinterpret_cast<const void*>(&wgmma_rows_kernel<RowsConfig<T, kTile.d_v, kTile.rows>>);
    }
  }
}

}  // namespace treemla::wgmma
