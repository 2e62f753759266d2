// The device code of cuda_fp32_tiled; cuda_fp32_tiled.cu says what it computes, with the shared-memory map and the layouts.
#pragma once

#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/ptx_sm80.cuh"
#include "backend/cuda/work_list.cuh"
#include "plan/cuda_tiles.hpp"

namespace treemla::fp32_tiled {

// Largest of the 32 lanes by one integer reduction: floats order as their bits do, those of negative ones flipped.
__device__ __forceinline__ float reduce_max(float x) {
  int i = __float_as_int(x);
  i ^= (i >> 31) & 0x7FFFFFFF;
  i = __reduce_max_sync(~0u, i);
  return __int_as_float(i ^ ((i >> 31) & 0x7FFFFFFF));
}

// Four bf16 or fp16 elements.
__device__ __forceinline__ float4 widen4(uint2 x, DType type) {
  if (type == DType::kBF16)
    return {__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xFFFF0000), __uint_as_float(x.y << 16),
            __uint_as_float(x.y & 0xFFFF0000)};
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&x.x)),
               b = __half22float2(*reinterpret_cast<const __half2*>(&x.y));
  return {a.x, a.y, b.x, b.y};
}

__device__ __forceinline__ void store4(float* to, const float (&x)[4], bool aligned) {
  if (aligned)
    *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
  else
    to[0] = x[0], to[1] = x[1], to[2] = x[2], to[3] = x[3];
}
template <class T, class T2>
__device__ __forceinline__ void store4(T* to, T2 a, T2 b, bool aligned) {
  if (aligned)
    *reinterpret_cast<uint2*>(to) = {*reinterpret_cast<const uint32_t*>(&a),
                                     *reinterpret_cast<const uint32_t*>(&b)};
  else
    to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
}
__device__ __forceinline__ void store4(__nv_bfloat16* to, const float (&x)[4], bool aligned) {
  store4(to, __floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3]), aligned);
}
__device__ __forceinline__ void store4(__half* to, const float (&x)[4], bool aligned) {
  store4(to, __floats2half2_rn(x[0], x[1]), __floats2half2_rn(x[2], x[3]), aligned);
}

// ---- the tile, with what follows from it ----

// By three numbers that tell a tile: kernels can't be templates over a value of class type.
template <int kTileDv, int kTileRows, int kTileKeys>
struct Config {
  static constexpr Fp32Tile kTile = find_fp32_tile(kTileDv, kTileRows, kTileKeys);
  static constexpr int kWarps = Fp32Tile::kWarps, kThreads = Fp32Tile::kThreads;
  static constexpr int kDv = kTile.d_v, kKeys = kTile.keys, kUnroll = kTile.unroll;
  static constexpr int kRows = kTile.rows(), kStride = kTile.stride(), kSlice = kTile.slice();
  static constexpr int kCols = kDv / kWarps;  // value columns of a warp: 64 or 32
  // What a thread holds: rows x keys of S, rows x columns of O.
  static constexpr int kThreadRows = kTile.thread_rows, kThreadKeys = kKeys / 8, kThreadCols = kCols / 8;
  // A thread's rows are quads of neighbours and up to two more.
  static constexpr int kQuads = kThreadRows >= 8 ? 2 : kThreadRows / 4, kExtra = kThreadRows - 4 * kQuads;
  // Rows whose softmax a warp does.
  static constexpr int kOwnRows = kRows > 32 ? 5 : 4;
  // The ring of a warp: groups of four keys.
  static constexpr int kSlotBytes = 4 * kSlice, kGroupBytes = 4 * kSlotBytes;
  static constexpr int kGroups = kTile.slots / 4, kTileGroups = kKeys / 4, kSpare = kGroups - kTileGroups;
  // Steps in which a warp copies a group's value columns, 16 bytes a lane.
  static constexpr int kF32Chunks = kCols / 4, kHalfChunks = kCols / 8, kSteps = 4 * kF32Chunks / 32;

  // Shared memory, in bytes.
  static constexpr int kQAt = 0;
  static constexpr int kRingAt = kQAt + kTile.q_bytes();
  static constexpr int kPartsAt = kRingAt + kTile.ring_bytes(), kPartBytes = kTile.scores_bytes();
  static constexpr int kWeightsAt = kPartsAt + kWarps * kPartBytes;
  static constexpr int kShrinkAt = kWeightsAt + kPartBytes;
  static constexpr int kSmemBytes = kShrinkAt + 4 * kRows;
  static_assert(kSmemBytes == kTile.smem_bytes());
  static_assert(kRows <= 40 && kExtra <= 2 && kKeys <= 32 && kTileGroups % 2 == 0);
  static_assert(kTile.slots % 4 == 0 && kSpare >= 1 && kTile.slots <= 2 * kKeys);
  static_assert(kRingAt % 32 == 0 && kSlotBytes % 32 == 0, "addresses take their swizzle by xor");
};

constexpr uint32_t kNoRow = ~0u;        // in place of a pool row: the key is past the item's end
constexpr uint32_t kHidden = 1u << 31;  // weight of a key that the row must not see: -0, which no exp() gives

// A thread's part of one work item.
template <class C>
struct Worker {
  const KernelArgs& args;
  const CudaWorkItem& item;
  unsigned char* smem;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row_group, col_group;        // of 4 and of 8
  int quad_at, extra_at;           // bytes from the start of an [.., rows] array to this thread's rows
  const unsigned char* copy_from;  // this lane's columns of pool row 0
  uint32_t copy_to;                // where they go in ring group 0, as a shared address
  uint32_t row_bytes;              // from pool row to pool row
  uint32_t next_rows = kNoRow;     // pool row of key `lane` of the window to be loaded next
  int ring = 0;                    // ring group of the tile's first keys
  float out[C::kThreadRows][C::kThreadCols];
  float top[C::kOwnRows], sum[C::kOwnRows];  // sum: of this lane's keys

  __device__ __forceinline__ Worker(const KernelArgs& a, const CudaWorkItem& i, unsigned char* s)
      : args(a), item(i), smem(s) {
    row_group = (lane & 1) | (lane >> 4) << 1;
    col_group = (lane >> 1) & 7;
    quad_at = 16 * quad_of(row_group);
    extra_at = 4 * (16 * C::kQuads + row_group * C::kExtra);
    row_bytes = static_cast<uint32_t>(args.kv_row_stride) * (is_f32() ? 4 : 2);
    const int chunk = lane % (is_f32() ? C::kF32Chunks : C::kHalfChunks),
              key = lane / (is_f32() ? C::kF32Chunks : C::kHalfChunks);
    copy_from =
        static_cast<const unsigned char*>(args.kv) + C::kCols * warp * (is_f32() ? 4 : 2) + 16 * chunk;
    copy_to =
        shared(group_at(0)) + (key & 3) * C::kSlotBytes + 16 * chunk + (is_f32() ? 0 : C::kSlotBytes / 2);
    // Kept in registers, not worked out again at every use.
    asm("" : "+l"(copy_from));
    asm("" : "+r"(copy_to));
  }

  __device__ __forceinline__ bool is_f32() const { return args.kv_dtype == DType::kF32; }
  __device__ __forceinline__ uint32_t shared(int at) const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(smem)) + at;
  }
  template <class T>
  __device__ __forceinline__ T& shared_at(int at) const {
    return *reinterpret_cast<T*>(smem + at);
  }

  // ---- this thread's rows: quads 2 apart so that the row groups of a store meet different banks, then the extra ones ----

  __device__ __forceinline__ static int quad_of(int group) {
    return C::kQuads == 2 ? (group & 1) * 4 + (group >> 1) * 2 : group;
  }
  __device__ __forceinline__ static int row_of(int group, int r) {
    return r < 4 * C::kQuads ? 4 * quad_of(group) + r
                             : 16 * C::kQuads + group * C::kExtra + r - 4 * C::kQuads;
  }
  using Rows = float[C::kThreadRows];
  __device__ __forceinline__ void load_rows(int at, Rows& x) const {
#pragma unroll
    for (int a = 0; a < C::kQuads; ++a) {
      const float4 v = shared_at<float4>(at + quad_at + 16 * a);
      x[4 * a] = v.x, x[4 * a + 1] = v.y, x[4 * a + 2] = v.z, x[4 * a + 3] = v.w;
    }
    if constexpr (C::kExtra == 2) {
      const float2 v = shared_at<float2>(at + extra_at);
      x[4 * C::kQuads] = v.x, x[4 * C::kQuads + 1] = v.y;
    } else if constexpr (C::kExtra == 1) {
      x[4 * C::kQuads] = shared_at<float>(at + extra_at);
    }
  }

  // ---- load: keys ----

  __device__ __forceinline__ static int wrap(int group) {
    return group >= C::kGroups ? group - C::kGroups : group;
  }
  __device__ __forceinline__ int group_at(int group) const {
    return C::kRingAt + (warp * C::kGroups + group) * C::kGroupBytes;
  }

  // Pool rows of keys first .. first + n - 1, a lane a key. They fit 32 bits: supports_kernel() looks.
  __device__ __forceinline__ uint32_t find_rows(int first, int n) const {
    const int key = first + lane;
    return lane < n && key < item.key_end
               ? static_cast<uint32_t>(pool_row(args, item.page_base, item.request, key))
               : kNoRow;
  }
  __device__ __forceinline__ const unsigned char* row_at(const unsigned char* from, uint32_t row) const {
    uint64_t at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(row_bytes), "l"(from));
    return reinterpret_cast<const unsigned char*>(at);
  }

  // kFast: float32 rows, none of them kNoRow.
  struct GroupRows {
    uint32_t row[C::kSteps];
  };
  // The pool rows that this lane copies from, of keys 4j .. 4j + 3 of the window whose rows the lanes hold.
  template <bool kFast>
  __device__ __forceinline__ GroupRows group_rows(uint32_t rows, int j) const {
    GroupRows g;
    if (kFast || is_f32()) {
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u)
        g.row[u] = __shfl_sync(~0u, rows, 4 * j + u * (32 / C::kF32Chunks) + lane / C::kF32Chunks);
    } else {
      g.row[0] = __shfl_sync(~0u, rows, 4 * j + (lane / C::kHalfChunks & 3));
    }
    return g;
  }
  // Copies their value columns into the ring group that lies `at` bytes after the warp's first.
  template <bool kFast>
  __device__ __forceinline__ void load_group(const GroupRows& g, int at, int odd) const {
    if (kFast || is_f32()) {
      const uint32_t to = (copy_to ^ 16 * odd) + at;
#pragma unroll
      for (int u = 0; u < C::kSteps; ++u) {
        const bool ok = kFast || g.row[u] != kNoRow;
        copy16(to + u * (32 / C::kF32Chunks) * C::kSlotBytes, row_at(copy_from, ok ? g.row[u] : 0), ok);
      }
    } else if (lane < 4 * C::kHalfChunks) {
      const bool ok = g.row[0] != kNoRow;
      copy16(copy_to + at, row_at(copy_from, ok ? g.row[0] : 0), ok);
    }
  }
  // Copies the rope columns of the window's first n keys; the first four go to ring group `to`, whose parity is `odd`.
  __device__ __forceinline__ void load_rope(uint32_t rows, int n, int to, int odd) const {
    if (args.d_rope == 0 || lane >= n) return;
    const int j = lane / 4, own = args.d_rope / C::kWarps;  // 8 or 4 columns
    const uint32_t slot = shared(group_at(wrap(to + j))) + (lane & 3) * C::kSlotBytes;
    const bool ok = rows != kNoRow;
    const unsigned char* from =
        row_at(static_cast<const unsigned char*>(args.kv) + (C::kDv + own * warp) * (is_f32() ? 4 : 2),
               ok ? rows : 0);
    if (is_f32()) {
      const uint32_t first = slot + 4 * C::kCols + 16 * ((odd + j) & 1);
      copy16(first, from, ok);
      if (own == 8) copy16(first ^ 16, from + 16, ok);
    } else if (own == 8) {
      copy16(slot + C::kSlotBytes / 2 + 2 * C::kCols, from, ok);
    } else {
      copy8(slot + C::kSlotBytes / 2 + 2 * C::kCols, from, ok);
    }
  }
  // 16-bit rows of the tile to float32 in place, a lane a key: from the slot's upper half to all of it, front to back, which never
  // overtakes what is still to be read.
  __device__ __forceinline__ void widen_tile() const {
    if (lane < C::kKeys) {
      const int slot = group_at(wrap(ring + lane / 4)) + (lane & 3) * C::kSlotBytes, odd = (lane / 4) & 1;
#pragma unroll 1
      for (int i = 0; i < C::kSlice / 8; ++i) {
        const uint4 x = shared_at<uint4>(slot + C::kSlotBytes / 2 + 16 * i);
        shared_at<float4>(slot + 32 * i + 16 * odd) = widen4({x.x, x.y}, args.kv_dtype);
        shared_at<float4>(slot + 32 * i + 16 - 16 * odd) = widen4({x.z, x.w}, args.kv_dtype);
      }
    }
    __syncwarp();
  }

  // ---- load: queries, this warp's columns, transposed; two lanes a row, four columns a step ----

  static constexpr int kQRounds = (C::kRows + 15) / 16, kQSteps = C::kSlice / 8;
  static constexpr int kQAhead =
      kQRounds < 2 ? kQRounds : 2;  // more rounds at once would not fit the registers

  // Calls f(round, step, is it there, element of q, where in shared memory) for this lane's share.
  template <int kFrom, int kTo, class F>
  __device__ __forceinline__ void for_q(F f) const {
    const int own = args.d_rope / C::kWarps, odd = lane & 1;
#pragma unroll
    for (int i = kFrom; i < kTo; ++i) {
      const int row = lane / 2 + 16 * i, packed = item.row_begin + row;
      if (row >= C::kRows) continue;
      const int node = packed / args.h_q, head = packed - node * args.h_q;
      const int64_t from =
          (static_cast<int64_t>(item.q_begin) + node) * args.q_token_stride + head * args.q_head_stride;
      const int64_t values = from + C::kCols * warp + 4 * odd, rope = from + C::kDv + own * warp + 4 * odd;
      const int at = C::kQAt + 4 * ((warp * C::kSlice + 4 * odd) * C::kRows + row);
      const bool there = packed < item.row_end;
#pragma unroll
      for (int j = 0; j < C::kCols / 8; ++j) f(i, j, there, values + 8 * j, at + 32 * j * C::kRows);
      f(i, C::kCols / 8, there && 4 * odd < own, rope, at + 4 * C::kCols * C::kRows);
    }
  }
  __device__ __forceinline__ void store_q(int at, float4 x) const {
    shared_at<float>(at) = x.x, shared_at<float>(at + 4 * C::kRows) = x.y;
    shared_at<float>(at + 8 * C::kRows) = x.z, shared_at<float>(at + 12 * C::kRows) = x.w;
  }
  __device__ __forceinline__ bool q_is_aligned(int bytes) const {
    return (reinterpret_cast<int64_t>(args.q) | (args.q_token_stride | args.q_head_stride) * bytes) %
               (4 * bytes) ==
           0;
  }
  // One load of V for four elements: two rounds on their way, then `meanwhile`, then into shared memory.
  template <class V, class Meanwhile, class Widen>
  __device__ __forceinline__ void load_q(Meanwhile meanwhile, Widen widen) const {
    load_q_rounds<0, kQAhead, V>(meanwhile, widen);
    if constexpr (kQAhead < kQRounds) load_q_rounds<kQAhead, kQRounds, V>([] {}, widen);
  }
  template <int kFrom, int kTo, class V, class Meanwhile, class Widen>
  __device__ __forceinline__ void load_q_rounds(Meanwhile meanwhile, Widen widen) const {
    V x[kTo - kFrom][kQSteps];
    const char* q = static_cast<const char*>(args.q);
    for_q<kFrom, kTo>([&](int i, int j, bool there, int64_t from, int) {
      x[i - kFrom][j] =
          there ? __ldg(reinterpret_cast<const V*>(q + from * static_cast<int>(sizeof(V) / 4))) : V{};
    });
    meanwhile();
    for_q<kFrom, kTo>([&](int i, int j, bool, int64_t, int at) { store_q(at, widen(x[i - kFrom][j])); });
  }
  __device__ __forceinline__ void load_unaligned_q() const {
    for_q<0, kQRounds>([&](int, int, bool there, int64_t from, int at) {
#pragma unroll 1
      for (int c = 0; c < 4; ++c)
        shared_at<float>(at + 4 * c * C::kRows) = there ? load_any(args.q, args.q_dtype, from + c) : 0;
    });
  }

  // ---- score: S over this warp's columns ----

  using Keys = float[C::kThreadKeys][4];
  using Scores = float[C::kThreadRows][C::kThreadKeys];

  __device__ __forceinline__ void load_keys(const int (&at)[C::kThreadKeys], int offset, Keys& k) const {
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      const float4 v = shared_at<float4>(at[j] + offset);
      k[j][0] = v.x, k[j][1] = v.y, k[j][2] = v.z, k[j][3] = v.w;
    }
  }
  // Four columns. Operands come a step early: q[0] is there, the next chunk's queries (next_q_at) end up in q[0], its keys in `next`.
  __device__ __forceinline__ void score_chunk(Scores& s, int q_at, int next_q_at, Rows (&q)[2], const Keys& k,
                                              const int (&next_at)[C::kThreadKeys], int next_offset,
                                              Keys& next) const {
    load_keys(next_at, next_offset, next);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_rows(i < 3 ? q_at + 4 * (i + 1) * C::kRows : next_q_at, q[(i + 1) & 1]);
#pragma unroll
      for (int j = 0; j < C::kThreadKeys; ++j)
#pragma unroll
        for (int r = 0; r < C::kThreadRows; ++r) s[r][j] = fmaf(q[i & 1][r], k[j][i], s[r][j]);
    }
  }
  __device__ __forceinline__ void score() const {
    Scores s = {};
    // Keys col_group + 8j. Chunks of 16 bytes lie swapped in pairs in every other group of four keys: here those of col_group / 4.
    int even[C::kThreadKeys], odd[C::kThreadKeys];
    const int half = col_group / 4;
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      const int slot = group_at(wrap(ring + 2 * j + half)) + (col_group & 3) * C::kSlotBytes;
      even[j] = slot + 16 * half;
      odd[j] = slot + 16 - 16 * half;
    }
    const int chunks = (C::kCols + args.d_rope / C::kWarps) / 4;
    int q_at = C::kQAt + 4 * warp * C::kSlice * C::kRows;
    Rows q[2];
    Keys k[2];
    load_keys(even, 0, k[0]);
    load_rows(q_at, q[0]);
#pragma unroll 1
    for (int c = 0; c + 2 <= chunks; c += 2) {
      // After the last chunk comes, unused, some chunk that is there.
      const bool more = c + 2 < chunks;
      const int q_odd = q_at + 16 * C::kRows, q_next = more ? q_at + 32 * C::kRows : q_odd;
      score_chunk(s, q_at, q_odd, q, k[0], odd, 16 * c, k[1]);
      score_chunk(s, q_odd, q_next, q, k[1], even, more ? 16 * c + 32 : 16 * c, k[0]);
      q_at = q_next;
    }
    if constexpr (C::kDv == 256)
      if (chunks % 2 == 1) score_chunk(s, q_at, q_at, q, k[0], even, 0, k[1]);
        // Partial scores lie [key][thread row][row group]: the 32 lanes of a store then meet 32 banks.
#pragma unroll
    for (int j = 0; j < C::kThreadKeys; ++j) {
      const int to = C::kPartsAt + warp * C::kPartBytes + 4 * ((col_group + 8 * j) * C::kStride + row_group);
#pragma unroll
      for (int r = 0; r < C::kThreadRows; ++r) shared_at<float>(to + 16 * r) = s[r][j];
    }
  }

  // ---- mask and softmax: a lane a key, up to five rows a warp ----

  // The rows of a warp: thread row `warp` of all four row groups, then one of thread rows 8 and 9.
  __device__ __forceinline__ bool owns(int i) const {
    return i < 4 ? warp < C::kThreadRows : 32 + warp < C::kRows;
  }
  __device__ __forceinline__ int own_row(int i) const {
    return i < 4 ? row_of(i, warp) : row_of(warp & 3, 8 + warp / 4);
  }

  __device__ __forceinline__ bool is_hidden(int row, int key) const {
    const int packed = item.row_begin + row;
    if (key >= item.key_end || packed >= item.row_end) return true;
    return key >= item.prefix_len && !sees(args.mask, item.q_begin, packed / args.h_q, key - item.prefix_len);
  }

  // Online softmax (Milakov and Gimelshein, 2018). m is the largest score so far, the weights are exp(s - m), and shrink = exp(m_old - m)
  // is what the sums so far must be multiplied by.
  __device__ __forceinline__ void softmax(int first_key, bool masked) {
    if (!owns(0)) return;
    const int at = (lane % C::kKeys) * 4 * C::kStride;
    const bool has_key = C::kKeys == 32 || lane < C::kKeys;
    unsigned hidden = has_key ? 0 : ~0u;  // bit i: row i must not see this lane's key
    if (masked) {
#pragma unroll 1
      for (int i = 0; i < C::kOwnRows; ++i)
        if (owns(i) && is_hidden(own_row(i), first_key + lane)) hidden |= 1u << i;
    }
    float s[C::kOwnRows] = {};
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      const int from = C::kPartsAt + w * C::kPartBytes + at;
      const float4 v = shared_at<float4>(from + 16 * warp);
      s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      if constexpr (C::kOwnRows == 5)
        if (C::kRows == 40 || owns(4)) s[4] += shared_at<float>(from + 128 + 4 * warp);
    }
    float m[C::kOwnRows];
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i)
      m[i] = reduce_max(hidden >> i & 1 ? -INFINITY : s[i] * args.score_scale);
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) {
      m[i] = fmaxf(top[i], m[i]);
      const float base = m[i] == -INFINITY ? 0.0f : m[i];  // nothing seen yet: never -inf + inf
      const float weight =
          hidden >> i & 1 ? __uint_as_float(kHidden) : expf(fmaf(s[i], args.score_scale, -base));
      const float shrink = expf(top[i] - base);
      sum[i] = fmaf(sum[i], shrink, weight);
      top[i] = m[i];
      if (!owns(i)) continue;
      const int row = own_row(i);
      if (has_key) shared_at<float>(C::kWeightsAt + at + 4 * row) = weight;
      if (lane == 0) shared_at<float>(C::kShrinkAt + 4 * row) = shrink;
    }
  }

  // ---- accumulate ----

  using Columns = float[C::kThreadCols];
  using Sums = float[C::kThreadRows][C::kThreadCols];

  __device__ __forceinline__ void load_columns(int at, Columns& v) const {
#pragma unroll
    for (int h = 0; h < C::kThreadCols / 4; ++h) {
      const float4 x = shared_at<float4>(at + 128 * h);
      v[4 * h] = x.x, v[4 * h + 1] = x.y, v[4 * h + 2] = x.z, v[4 * h + 3] = x.w;
    }
  }
  template <bool kMasked>
  __device__ __forceinline__ static void add_key(Sums& t, const Rows& w, const Columns& v) {
#pragma unroll
    for (int r = 0; r < C::kThreadRows; ++r) {
      if (kMasked && __float_as_uint(w[r]) == kHidden)
        continue;  // left out, not multiplied by 0: v may be NaN
#pragma unroll
      for (int c = 0; c < C::kThreadCols; ++c) t[r][c] = fmaf(w[r], v[c], t[r][c]);
    }
  }

  // out = out * shrink + P V. The tile is summed on its own and added once, which keeps long sums accurate. As soon as a ring group is used
  // up, the window `rows` is copied over it, keys `slots` further on.
  template <bool kMasked, bool kFast>
  __device__ __forceinline__ void accumulate(uint32_t rows, bool refill) {
    Sums t = {};
    if (kFast || refill) load_rope(rows, C::kKeys, ring, C::kGroups & 1);
    // In a register of each thread on purpose: the uniform instructions that the compiler would choose for the ring's wrap take longer.
    int at = ring * C::kGroupBytes, w_at = C::kWeightsAt;
    asm("" : "+r"(at));
    const int columns_at = group_at(0) + 16 * col_group;
    Rows w[2];
    Columns v[2];
    load_rows(w_at, w[0]);
    load_columns(columns_at + at, v[0]);
#pragma unroll 1
    for (int g = 0; g < C::kTileGroups; g += C::kUnroll) {
#pragma unroll
      for (int u = 0; u < C::kUnroll; ++u) {
        const int odd = C::kUnroll == 1 ? g & 1 : u & 1;
        const int v_at = (columns_at ^ 16 * odd) + at;
        const int next = at + C::kGroupBytes == C::kGroups * C::kGroupBytes ? 0 : at + C::kGroupBytes;
        // After the last key comes, unused, some key that is there.
        const bool more = u + 1 < C::kUnroll || g + C::kUnroll < C::kTileGroups;
        const int next_at = more ? (columns_at ^ 16 * (odd ^ 1)) + next : v_at;
        const GroupRows copied = group_rows<kFast>(rows, g + u);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          load_rows(w_at + (k + 1) * 4 * C::kStride, w[(k + 1) & 1]);  // past the weights: shrink, unused
          load_columns(k < 3 ? v_at + (k + 1) * C::kSlotBytes : next_at, v[(k + 1) & 1]);
          add_key<kMasked>(t, w[k & 1], v[k & 1]);
        }
        w_at += 16 * C::kStride;
        __syncwarp();
        if (kFast || refill) load_group<kFast>(copied, at, (odd + C::kGroups) & 1);
        commit_copies();
        at = next;
      }
    }
    Rows shrink;
    load_rows(C::kShrinkAt, shrink);
#pragma unroll
    for (int r = 0; r < C::kThreadRows; ++r)
#pragma unroll
      for (int c = 0; c < C::kThreadCols; ++c) out[r][c] = fmaf(out[r][c], shrink[r], t[r][c]);
  }

  // ---- write ----

  // Each row's lse, and in place of shrink what its sums are to be multiplied by: -1 if it saw no key.
  __device__ __forceinline__ void finish_rows() const {
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) {
      if (!owns(i)) continue;
      const float total = warp_sum(sum[i]);
      if (lane != 0) continue;
      const int row = own_row(i), packed = item.row_begin + row;
      const bool none = total == 0;
      shared_at<float>(C::kShrinkAt + 4 * row) = none ? -1.0f : args.value_scale / total;
      if (packed >= item.row_end) continue;
      const float lse = none ? -INFINITY : top[i] + logf(total);
      if (item.partial >= 0)
        args.partial_lse[static_cast<int64_t>(item.partial) * C::kRows + row] = lse;
      else if (args.lse)
        args.lse[static_cast<int64_t>(item.q_begin) * args.h_q + packed] = lse;
    }
  }
  // The item's rows, d_v elements each, from `to` on.
  template <class T>
  __device__ __forceinline__ void write_rows(T* to, bool aligned) const {
    Rows scale;
    load_rows(C::kShrinkAt, scale);
    to += C::kCols * warp + 4 * col_group;
    const int rows = item.row_end - item.row_begin;
#pragma unroll
    for (int r = 0; r < C::kThreadRows; ++r) {
      const int row = row_of(row_group, r);
      if (row >= rows) continue;
#pragma unroll
      for (int h = 0; h < C::kThreadCols / 4; ++h) {
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = scale[r] == -1.0f ? 0.0f : out[r][4 * h + c] * scale[r];
        store4(to + row * C::kDv + 32 * h, x, aligned);
      }
    }
  }
  __device__ __forceinline__ void write() const {
    wait_copies<0>();
    __syncthreads();  // the last tile's shrink is used
    finish_rows();
    __syncthreads();
    const int64_t first = (static_cast<int64_t>(item.q_begin) * args.h_q + item.row_begin) * C::kDv;
    const bool aligned = reinterpret_cast<int64_t>(args.out) % 16 == 0;
    if (item.partial >= 0)
      write_rows(
          static_cast<float*>(args.partial_out) + static_cast<int64_t>(item.partial) * C::kRows * C::kDv,
          true);
    else if (args.out_dtype == DType::kF32)
      write_rows(static_cast<float*>(args.out) + first, aligned);
    else if (args.out_dtype == DType::kBF16)
      write_rows(static_cast<__nv_bfloat16*>(args.out) + first, aligned);
    else
      write_rows(static_cast<__half*>(args.out) + first, aligned);
    __syncthreads();  // shared memory is free for the next item
  }

  // ---- a work item ----

  // As many keys as the ring holds.
  __device__ __forceinline__ void fill_ring(uint32_t first, uint32_t spare) const {
    load_rope(first, C::kKeys, 0, 0);
#pragma unroll 1
    for (int j = 0; j < C::kTileGroups; ++j)
      load_group<false>(group_rows<false>(first, j), j * C::kGroupBytes, j & 1);
    commit_copies();
    load_rope(spare, 4 * C::kSpare, C::kTileGroups, 0);
#pragma unroll 1
    for (int j = 0; j < C::kSpare; ++j) {
      load_group<false>(group_rows<false>(spare, j), (C::kTileGroups + j) * C::kGroupBytes, j & 1);
      commit_copies();
    }
  }
  // The page entries and the queries are fetched together, then the keys.
  __device__ __forceinline__ void begin() {
    const uint32_t first = find_rows(item.key_begin, C::kKeys),
                   spare = find_rows(item.key_begin + C::kKeys, 4 * C::kSpare);
    next_rows = find_rows(item.key_begin + 4 * C::kGroups, C::kKeys);
    const auto fill = [&] { fill_ring(first, spare); };
    if (args.q_dtype == DType::kF32 && q_is_aligned(4)) {
      load_q<float4>(fill, [](float4 x) { return x; });
    } else if (args.q_dtype != DType::kF32 && q_is_aligned(2)) {
      load_q<uint2>(fill, [&](uint2 x) { return widen4(x, args.q_dtype); });
    } else {
      fill();
      load_unaligned_q();
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < C::kThreadRows; ++r)
#pragma unroll
      for (int c = 0; c < C::kThreadCols; ++c) out[r][c] = 0;
#pragma unroll
    for (int i = 0; i < C::kOwnRows; ++i) top[i] = -INFINITY, sum[i] = 0;
  }

  __device__ __forceinline__ void attend() {
    begin();
    const int end =
        round_up(item.key_end, C::kKeys);  // what the last tile has past key_end is filled with zeros
#pragma unroll 1
    for (int key = item.key_begin; key < item.key_end; key += C::kKeys) {
      wait_copies<C::kSpare>();  // all but the spare groups: the tile is there
      __syncwarp();
      if (!is_f32()) widen_tile();
      const int window = key + 4 * C::kGroups;  // its first key
      const uint32_t rows = next_rows;
      next_rows = find_rows(window + C::kKeys, C::kKeys);
      score();
      __syncthreads();
      const bool masked = key + C::kKeys > item.prefix_len || key + C::kKeys > item.key_end;
      softmax(key, masked);
      __syncthreads();
      if (masked)
        accumulate<true, false>(rows, window < end);
      else if (is_f32() && window + C::kKeys <= item.key_end)
        accumulate<false, true>(rows, true);
      else
        accumulate<false, false>(rows, window < end);
      ring = wrap(ring + C::kTileGroups);
    }
    write();
  }
};

// What a block can have at most on the cards that code for `arch` (__CUDA_ARCH__) runs on. Code for sm_80 also serves sm_86 and sm_89.
TREEMLA_HD constexpr int most_smem_bytes(int arch) {
  if (arch < 800) return 0;
  if (arch < 860) return 163 * 1024;
  if (arch >= 900 && arch < 1200) return 227 * 1024;
  return 99 * 1024;
}

// Instances that no such card can hold are left empty, and the launcher knows.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) fp32_tiled_kernel(const __grid_constant__ KernelArgs args) {
#if defined(__CUDA_ARCH__)
  if constexpr (C::kSmemBytes <= most_smem_bytes(__CUDA_ARCH__)) {
    extern __shared__ __align__(128) unsigned char smem[];
    WorkList list(args.plan, blockIdx.x);
    for (CudaWorkItem item; list.next(item);) Worker<C>(args, item, smem).attend();
  }
#endif
}

}  // namespace treemla::fp32_tiled
