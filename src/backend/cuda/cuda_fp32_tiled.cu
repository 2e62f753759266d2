// cuda_fp32_tiled: exact float32 attention by register-tiled FMAs. Rows are (node, head) pairs, heads fastest.
//
//     S [rows, 32] = Q [rows, d_qk] K [32, d_qk]^T      P = exp(score_scale * S - m)      O [rows, d_v] = O * shrink + P K[:, :d_v]
//
// float32 queries, cache and output, or 16-bit ones widened on load. d_v/d_rope 512/64, 512/0, 256/64, 256/32; any h_q, page size, mask.
// Any card from sm_80 on. Keys and shapes as everywhere: src/plan/split.hpp cuts the work, tiles begin at multiples of their length.
//
// The budget, for 40 rows x 32 keys of d_v 512 on an SM of the H200 (128 FMA and 128 B of shared memory a cycle, 64 K registers):
//
//     FMA                40 * 32 * (576 + 512) / 128                                           10,880 cycles
//     O                  40 x 512 floats in registers: 80 of a thread's 255, twice while a tile is summed on its own
//     shared memory      S: a thread's 10 x 4 scores read 14 floats for 40 FMA; O: 10 x 8 sums read 18 for 80. A 16-byte load whose
//                        lanes share addresses takes 2 cycles: 6,400 cycles in all, and 1,500 for the exchange of scores
//     K and V            32 * 2,304 B once from L2 for both products: 7 B a cycle and SM, 1.6 TB/s of the card
//
// So FMAs bind. A tile must be wide in rows and yet leave room for 36 keys: Q and K take 2,304 B a row each, and 227 KB hold 100 of them.
//
// Columns, not rows or keys, are what the 8 warps share out: warp w owns value columns 64w .. 64w + 63 and rope columns 8w .. 8w + 7,
// of Q, of K, and (the same columns) of V and O.
//
//                    warp 0         warp 1        ...      warp 7         0    1   ...  7
//     row of K     | 64 values    | 64 values    |      | 64 values    | 8r | 8r |   | 8r |
//
// Its part of Q and its ring of keys are then its own: it copies, waits, scores and accumulates with no other warp in the way. Warps meet
// twice a tile, around the softmax, which adds up the eight partial scores:
//
//     wait for keys -> S over own columns -> write partial scores | barrier | sum, mask, softmax, write P and shrink | barrier |
//     O over own columns, refilling each four keys of the ring as soon as they are used up
//
// Shared memory, bytes               40 x 32, 36 slots   24 x 32, 36 slots   16 x 16, 20 slots
//     q        [8 warps][72][rows]        92,160              55,296              36,864     transposed: 16 bytes are 4 rows of a column
//     ring     [8 warps][slots][72]       82,944              82,944              46,080     float32 rows
//     parts    [8 warps][keys][stride]    45,056              24,576              10,240     partial scores
//     weights  [keys][stride]              5,632               3,072               1,280     P
//     shrink   [rows]                        160                  96                  64
//                                        225,952             165,984              94,528     sm_90: 232,448; sm_80: 166,912; others: 101,376
//
// 16-bit rows land in the upper half of their slots and are widened in place by the warp that owns them.
//
// Threads to data. A lane is (row group, column group): bits 4 and 0 of its number are the row group, bits 1-3 the column group, so
// that lanes of equal address are neighbours, which lets the hardware serve half a warp at once.
//
//     rows     of row group g: quads 0, 4, 2, 6 (g = 0..3), the quads after them, and 2 (or 1, or 0) of the rows past 32
//     S        keys c, c + 8, c + 16, c + 24 of column group c: 10 x 4 scores of 10 + 4 operands
//     O        columns 4c .. 4c + 3 and 32 + 4c .. 35 + 4c: 10 x 8 sums
//     softmax  a lane a key; warp w has thread row w of all row groups and one more row. m by one integer reduction; each lane sums
//              the weights of its own keys, added up at the end
//
//     banks    K: slots are 18 chunks of 16 bytes apart, so 8 keys would meet 4 places twice; chunks are swapped in pairs in every other
//              group of 4 keys. V: 8 lanes read 128 bytes of one key. Q, P: 4 row groups read 64 of 128 bytes. Partial scores are stored
//              [key][thread row][row group], 32 lanes in 32 banks.
//
// Masks: tiles inside the prefix know none. In the others, ancestor bits (32 keys x 5 rows a warp) turn hidden keys into weight -0,
// which O leaves out rather than multiplies, since the row may hold NaN; keys past the end count as hidden, and are never read.
//
// A row's bits depend on the key tiles alone: its sums run over columns and keys in the same order in every instance of equal `keys`.
//
// Bound: FMAs, 51 TFLOP/s by a large matmul on the H200, 62.5 by FMAs on registers alone. Reached, float32, page_size 1, random tree:
//     h_q 64, q 33, b 1: prefix 4096 504 us, 37.6 TFLOP/s, 74%; prefix 16384 1,923 us, 39.2, 77%      (32 x 32; a bf16 cache: 34.1, 67%)
//     h_q 8, q 9, b 8, prefix 16384: 589 us, 34.9 TFLOP/s, 68% (36 x 32)      h_q 8, q 1, b 8: 146 us, 2.07 TB/s (8 x 32)
//     h_q 8, q 9, b 1, prefix 16384: 87 us without the merge of its partials, against 50 (36 x 32)
// Where the rest goes, by the profiler: a fifth of the cycles to FMAs whose three operands come from two register banks, which only reuse
// of an operand avoids and the compiler orders for poorly in S; a tenth to the softmax between the barriers; a quarter of the issue slots
// to loads, addresses and copies.

#include <algorithm>
#include <array>
#include <utility>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_backends.hpp"
#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/cuda_fp32_tiled.cuh"
#include "core/lookup.hpp"

namespace treemla {
namespace {

template <int... i>
constexpr auto make_kernels(std::integer_sequence<int, i...>) {
  using namespace fp32_tiled;
  return std::array{
      &fp32_tiled_kernel<Config<kFp32Tiles[i].d_v, kFp32Tiles[i].rows(), kFp32Tiles[i].keys>>...};
}
// Of kFp32Tiles, in its order; why each exists stands there.
constexpr auto kKernels =
    make_kernels(std::make_integer_sequence<int, static_cast<int>(std::size(kFp32Tiles))>());

// Shared memory that a block may have, on this device and with the code that was loaded for it: code made for a smaller card and
// translated for this one has the wide instances empty.
int64_t usable_smem(const CudaDevice& device) {
  if (device.cc == 0) return fp32_tiled::most_smem_bytes(900);  // no device: what the largest card would take
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kKernels.back()), "cudaFuncGetAttributes of cuda_fp32_tiled");
  return std::min<int64_t>(device.model.smem_per_block_bytes,
                           fp32_tiled::most_smem_bytes(10 * attributes.ptxVersion));
}

const Fp32Tile* choose_tile(const VerifyProblem& p, const CudaDevice& device) {
  const int64_t nodes = p.b > 0 ? ceil_div<int64_t>(p.q.total_q, p.b) : 0;
  return choose_fp32_tile(p.shape.d_v, p.b, nodes * p.shape.h_q, kv_len_bound(p),
                          std::max(1, device.model.num_sms), usable_smem(device));
}

class CudaFp32Tiled : public CudaBackend {
 public:
  CudaFp32Tiled() : CudaBackend("cuda_fp32_tiled") {}

 protected:
  Support supports_kernel(const VerifyProblem& p, const CudaDevice& device) const override {
    if (const Support s = supports_ladder_shape(p); !s.ok) return s;
    if (const std::string reason = why_not_aligned(p, 16); !reason.empty()) return Support::no(reason);
    if (const std::string reason = why_pool_too_large(p); !reason.empty()) return Support::no(reason);
    if (choose_tile(p, device) == nullptr)
      return Support::no("this card's shared memory: takes 99 KB a block and more");
    return Support::yes();
  }

  CudaInstance instance(const VerifyProblem& p, const CudaDevice& device) const override {
    const Fp32Tile* tile = choose_tile(p, device);
    CudaInstance k;
    k.function = reinterpret_cast<const void*>(kKernels[static_cast<std::size_t>(tile - kFp32Tiles)]);
    k.threads = Fp32Tile::kThreads;
    k.smem_bytes = tile->smem_bytes();
    k.tile = tile->policy();
    return k;
  }
};

}  // namespace

const Backend& cuda_fp32_tiled_backend() {
  static const CudaFp32Tiled backend;
  return backend;
}

}  // namespace treemla
