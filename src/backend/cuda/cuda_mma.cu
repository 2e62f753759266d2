// cuda_mma: attention on tensor cores by mma.sync, on every card from sm_80 to sm_120. Rows are (node, head) pairs, heads fastest.
//
//     S^T [16 keys, rows] = K Q^T      P = 2^(scale * S - m)      O^T [d_v, rows] = O^T * shrink + V^T P^T      V: the first d_v columns of K
//
// q, cache and weights bf16 or fp16; sums, and outputs on request, float32. d_v/d_rope 512/64, 512/0, 256/64, 256/32; any h_q, page
// size, mask. Keys and shapes as everywhere: src/plan/split.hpp cuts the work, tiles begin at multiples of 16 keys.
//
// Rows are the N of mma.m16n8k16, whose granularity is 8, and keys or columns its M: 72 rows, 8 heads x 9 nodes, leave no row idle. The
// accumulator of 72 rows x 512 columns is 36,864 floats, more than half of an SM's registers, and 99 KB of shared memory don't hold the
// queries of those rows beside a ring of keys: so they live in registers too, as the fragments that the first product wants, and only
// what registers can't take lies in shared memory, read by the lanes that wrote it.
//
// Groups of four warps, one warp of each on every scheduler: two, or three of 72 rows. A group has its share of the row tiles (8 rows each)
// and nothing in common with the others but the ring of keys, so that while one waits for its softmax the others keep the tensor cores
// busy. Within a group the warps share out columns:
//
//     warp q of a group scores latent columns q * d_v / 4 on and rope columns 16 q on, of all the group's rows      S^T: a quarter's part
//     row tile j belongs to warp j % 4: it adds the four parts up, masks, and turns scores into weights             P^T: to shared memory
//     warp q accumulates columns q * d_v / 4 on                                                                      O^T: in registers
//
//     wait for tile i | score, send parts | copy tile i + 2 | meet | softmax | meet | accumulate | release tile i
//
// The ring has two mbarriers a stage: full, for all threads whose copies have landed, and empty, for all warps that are done (8 rows: 128
// threads). Rows are copied by 16-byte cp.async, whatever the page size, two at a time. Of two groups each warp copies two rows of a tile; of 8
// rows, which one group attends, the second group copies all; of three groups, whose row tiles are three, the warp that has none copies
// while the others are at the softmax. A chunk of 16 bytes is put where its row's number says (Config::moved), so that fragments meet all
// banks and the 128 bytes of a line are one write: rows 16 bytes further apart than they are long cost 10 writes in place of 4. Page
// entries are fetched 4 to 16 tiles ahead, the next item's queries to L2 while an output is written.
//
// Weights are stored as the scores have them, key by key, 8 rows to 16 bytes, and transposed as they are read. So are queries, by way of
// shared memory.
//
// FP8 rows lie in the ring as they lie in the pool and are widened in registers, fragment by fragment. e4m3 is exact in fp16; so are the
// scores' products, for each query row is multiplied by a power of two that brings it below 2^15. Of 16 bytes of a key row, lane l finds
// columns 4 * (l % 4) to 4 * (l % 4) + 3, which serve as columns t, t + 1, t + 8, t + 9 of the piece: queries are laid out alike. Of V^T
// it finds two neighbouring columns of two keys, which become rows g and g + 8 of a fragment. A packed row's four scales meet its scores in
// float32, after the latents and before the rope; for its values they are multiplied into the weights, one copy a scale, in bf16, for
// fp16 has not the range.
//
// Shared memory, bytes                       72 rows    64 rows    32 rows
//     ring     [stages][16 keys][1,152]       55,296     55,296     73,728
//     of each group:                               3          2          2
//       q        fragments of 256              9,216      8,192      2,048     room for four or one piece a warp while they are made
//       parts    [row tiles][3][32][16]        4,608      6,144      3,072
//       weights  [row tiles][16 keys][16]        768      1,024        512
//       shrink, marks, maxima of 72 rows         224        160         96
//     barriers                                    48         48         64
//                                             99,792     86,384     85,248     sm_86, sm_89, sm_120: 101,376
//
// Registers: three groups have 168 a thread, of which 96 are sums and 36 queries. So the rows' maxima wait in shared memory, and what is
// needed at the ends of an item only, such as the thread's number, is worked out again.
//
// Budget, 64 rows x 16 keys of d_v 512, in cycles of an SM of the H200: tensor cores 68 mma a warp, 6 cycles each, two warps a
// scheduler: 816; shared memory (fragments of K twice, of V twice, parts, weights, copies) 1,050; so either would allow 490 TFLOP/s, and
// with what a warp waits for in turn a tile takes 1,680.
//
// Masks: tiles inside the prefix know none. In the others hidden scores become -inf, keys past the end are zeros, and values that are
// not finite are cleared, lest 0 * NaN reach a row that does not see them; whoever sees such a key has NaN among its weights. Such a key's
// score is not finite whatever the query, so that a tile whose scores all are needs no clearing.
//
// A row's bits depend on its keys alone: parts are added in pairs that don't depend on which warp adds, sums run over tiles of 16 keys
// in every instance, and a maximum is raised by the row's own scores.

#include <algorithm>
#include <string>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_backends.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/cuda_mma_kernels.hpp"
#include "core/lookup.hpp"

namespace treemla {
namespace {

// Compiled in four files, which takes a compiler long enough each.
const void* find_kernel(const MmaTile& tile, DType q_dtype) {
  const bool is_bf16 = q_dtype == DType::kBF16;
  switch (tile.cache) {
    case MmaCache::k16Bit:
      return is_bf16 ? mma_kernel_bf16(tile) : mma_kernel_fp16(tile);
    case MmaCache::kE4M3:
      return mma_kernel_e4m3(tile, is_bf16);
    default:
      return mma_kernel_packed(tile);
  }
}

const MmaTile* choose_tile(const VerifyProblem& p, const CudaDevice& device) {
  const int64_t nodes = p.b > 0 ? ceil_div<int64_t>(p.q.total_q, p.b) : 0;
  return choose_mma_tile(p.shape.d_v, mma_cache(p.kv.dtype), p.b, nodes * p.shape.h_q, kv_len_bound(p),
                         std::max(1, device.model.num_sms), device.model.smem_per_sm_bytes);
}

class CudaMma : public CudaBackend {
 public:
  CudaMma() : CudaBackend("cuda_mma", true) {}

 protected:
  Support supports_kernel(const VerifyProblem& p, const CudaDevice&) const override {
    if (const Support s = supports_ladder_shape(p); !s.ok) return s;
    if (p.kv.dtype == DType::kF32) return Support::no("fp32 caches: takes bf16, fp16, e4m3, e4m3_packed");
    if (p.kv.dtype == DType::kF8E4M3Packed) {
      if (p.shape.d_v != 512)
        return Support::no("e4m3_packed caches of d_v = " + std::to_string(p.shape.d_v) +
                           ": takes 512, whose rows are multiples of 16 bytes");
      if (p.q.dtype != DType::kBF16)
        return Support::no("q in " + std::string(dtype_name(p.q.dtype)) +
                           " and an e4m3_packed cache: takes q in bf16");
    } else if (p.kv.dtype == DType::kF8E4M3 ? p.q.dtype == DType::kF32 : p.q.dtype != p.kv.dtype) {
      return Support::no("q in " + std::string(dtype_name(p.q.dtype)) + " and a cache in " +
                         std::string(dtype_name(p.kv.dtype)) +
                         ": takes q in the cache's dtype, or bf16 and fp16 with an e4m3 cache");
    }
    if (const std::string reason = why_not_aligned(p, 16); !reason.empty()) return Support::no(reason);
    if (const std::string reason = why_pool_too_large(p); !reason.empty()) return Support::no(reason);
    return Support::yes();
  }

  CudaInstance instance(const VerifyProblem& p, const CudaDevice& device) const override {
    const MmaTile* tile = choose_tile(p, device);
    CudaInstance k;
    k.function = find_kernel(*tile, p.q.dtype);
    k.threads = tile->threads();
    k.smem_bytes = tile->smem_bytes();
    k.tile = tile->policy();
    k.narrow_partials = true;
    return k;
  }
};

}  // namespace

const Backend& cuda_mma_backend() {
  static const CudaMma backend;
  return backend;
}

}  // namespace treemla
