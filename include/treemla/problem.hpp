// One verification problem: ragged queries over a paged latent cache, with a mask over the tree.
//
// Absorbed Multi-head Latent Attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Every cached token is ONE row
// of d_qk = d_v + d_rope numbers shared by all heads: the latent part ckv (d_v), then the rope part kpe (d_rope).
// For request r, tree node i, head h, over the keys j that node i may see:
//
//     s_j = sm_scale * dot(q[i,h,:], kv[j,:])      lse = log(sum_j exp(s_j))      (natural log)
//     out = sum_j exp(s_j - lse) * kv[j, 0:d_v]
//
// Keys visible to node i: the whole prefix, and of the request's own tree rows those the mask names. A row that sees
// no key gives out = 0 and lse = -inf. Requests with kv_len 0 or q_len 0 are inert: padding of a captured graph.
//
// The structs are views: nothing is copied or owned, and the pointers must outlive the call that takes them.
#pragma once

#include <cstdint>

#include "treemla/dtype.hpp"

namespace treemla {

struct MlaShape {
  int h_q = 0;     // query heads on this rank, 1..1024
  int d_v = 0;     // latent width, also the width of a value and of an output row
  int d_rope = 0;  // rope width, may be 0
  constexpr int d_qk() const { return d_v + d_rope; }
};

// Absorbed queries, latent part first: q[node][head][0:d_qk].
struct QueryView {
  const void* data = nullptr;  // [total_q, h_q, d_qk]
  DType dtype = DType::kBF16;  // fp32, fp16 or bf16
  int64_t total_q = 0;
  int64_t token_stride = 0;  // elements between nodes; 0 means h_q * d_qk
  int64_t head_stride = 0;   // elements between heads; 0 means d_qk
};

// A row of DType::kF8E4M3Packed, in bytes. Each scale belongs to kPackedGroup latents, and any positive one is allowed, not only
// powers of two:
//
//     0                   d_v                           d_v + d_v / 32        d_v + d_v / 32 + 2 * d_rope
//     | d_v e4m3 latents  | d_v / 128 float32 scales    | d_rope bf16         |
//
// 512/64: 512 + 16 + 128 = 656 bytes. Real latent i = e4m3[i] * scale[i / 128] * KvPool::scale, real rope = bf16 * KvPool::scale.
// d_v must be a multiple of 128 and d_rope even, so that rows are whole numbers of float32.
inline constexpr int kPackedGroup = 128;

constexpr int packed_rope_offset(const MlaShape& shape) { return shape.d_v + shape.d_v / kPackedGroup * 4; }

// A row of DType::kQ8, in bytes: blocks of kQ8Block columns in order, those of the latents, then those of the rope. Each is an fp16
// scale, any, and the columns' int8, as in llama.cpp's block_q8_0:
//
//     0         2                34        36               68      d_qk / 32 * 34
//     | scale 0 | columns 0..31  | scale 1 | columns 32..63 |  ...  |
//
// 512/64: 18 blocks of 34 = 612 bytes. Real column c = int8[c] * scale[c / 32] * KvPool::scale. d_v and d_rope must be multiples of
// 32, so that no block is of both; rows begin at even addresses.
inline constexpr int kQ8Block = 32;
inline constexpr int kQ8BlockBytes = 2 + kQ8Block;

// Elements of a cached row, and so the default stride of rows: d_qk numbers, or the bytes of a row with scales.
constexpr int kv_row_elements(const MlaShape& shape, DType dtype) {
  if (dtype == DType::kF8E4M3Packed) return packed_rope_offset(shape) + 2 * shape.d_rope;
  return dtype == DType::kQ8 ? shape.d_qk() / kQ8Block * kQ8BlockBytes : shape.d_qk();
}

// How the columns of a cached row lie in it.
//
// kInterleaved is for serving engines that own their cache and run on CPUs, where it makes verifying few rows faster: a row of the
// same size whose every 32 columns are 16 words of columns 16 apart, so that one load gives two vectors of float32. Rows are
// written by interleave_rows() (treemla/interleave.hpp), once. bf16 only; d_v and d_rope must be multiples of 32.
//
//     element   0   1 |  2   3 | ... | 30  31 | 32  33 | ...
//     column    0  16 |  1  17 | ... | 15  31 | 32  48 | ...
enum class KvLayout : int { kRowMajor = 0, kInterleaved = 1 };
inline constexpr int kInterleavedBlock = 32;

// The element of an interleaved row that holds column c.
constexpr int interleaved_element(int c) {
  constexpr int kHalf = kInterleavedBlock / 2;
  const int at = c % kInterleavedBlock;
  return c - at + (at < kHalf ? 2 * at : 2 * (at - kHalf) + 1);
}

// The pool of cached rows. Rows that no request names are never read into a result; they may hold NaN.
struct KvPool {
  const void* data = nullptr;  // [num_pages, page_size, kv_row_elements]
  DType dtype = DType::kBF16;
  int64_t num_pages = 0;
  int page_size = 1;  // tokens a page, any value >= 1
  // Elements between rows; 0 means kv_row_elements. A page is page_size * row_stride elements.
  int64_t row_stride = 0;
  double scale = 1.0;  // real row = stored row * scale (FP8 and q8_0 caches)
  KvLayout layout = KvLayout::kRowMajor;
};

// Token t of request r lives in pool row  entry(r, t / page_size) * page_size + t % page_size.
//   CSR:          indptr != nullptr, entry(r, p) = entries[indptr[r] + p]
//   block table:  indptr == nullptr, entry(r, p) = entries[r * stride + p]
// Only the first ceil(kv_len / page_size) entries of a request are read: the rest may hold anything.
struct PageTable {
  const void* entries = nullptr;  // [num_entries], IndexType
  IndexType index_type = IndexType::kI32;
  int64_t num_entries = 0;
  const int32_t* indptr = nullptr;  // [b + 1], or null for a block table
  int64_t stride = 0;               // block table: entries a request
};

enum class MaskKind : int {
  kNone = 0,    // every node sees every node of its request
  kCausal = 1,  // node i sees nodes 0..i: a chain
  kTree = 2,    // node i sees itself and its ancestors
};

// Give one of `parents` and `ancestor_bits` with kTree (bits win when both are given). treemla/tree.hpp converts the other
// encodings in use (dense, SGLang FULL_MASK and QLEN_ONLY, retrieve links).
struct TreeMask {
  MaskKind kind = MaskKind::kNone;
  // [total_q] index inside the request's tree, -1 for its root; parents come first
  const int32_t* parents = nullptr;
  // [total_q, words_per_row]; bit j of row i: node i sees node j of its request
  const uint32_t* ancestor_bits = nullptr;
  int words_per_row = 0;  // >= ceil(max q_len / 32)
};

struct VerifyProblem {
  MlaShape shape;
  int b = 0;  // requests
  QueryView q;
  KvPool kv;
  PageTable pages;
  const int32_t* q_indptr = nullptr;  // [b + 1]; request r owns query rows q_indptr[r] .. q_indptr[r + 1]
  // [b] cached rows of a request, its q_len tree rows included: they are the last q_len
  const int32_t* kv_len = nullptr;
  TreeMask mask;
  double sm_scale = 0;  // (d_nope + d_rope)^-0.5 times YaRN's m^2: not derivable from d_qk, so always given
  Memory memory = Memory::kHost;  // of every pointer above and of the output
  // Bounds for lengths that live on the device, where the host can't see them; 0 = what total_q and the page table allow.
  // They size workspaces, and let a backend know what it will meet. A request past them comes out inert.
  int64_t max_q_len = 0;   // most tree nodes of a request
  int64_t max_kv_len = 0;  // most cached rows of a request
};

struct VerifyOutput {
  void* out = nullptr;            // [total_q, h_q, d_v], contiguous, every element is written
  DType out_dtype = DType::kF32;  // fp32, fp16 or bf16
  float* lse = nullptr;           // [total_q, h_q] natural log, or null if not wanted
};

// Every check of the arguments, contents included where they live on the host: pointers, dtypes, strides and sizes that
// overflow, monotonic indptr, kv_len >= q_len (or 0), page entries in [0, num_pages), parents that form one tree a request.
// Throws Error(kInvalidArgument) naming the argument, its position, its value and what is allowed.
void check_problem(const VerifyProblem& problem);
void check_output(const VerifyProblem& problem, const VerifyOutput& output);

}  // namespace treemla
