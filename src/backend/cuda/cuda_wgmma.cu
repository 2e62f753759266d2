// cuda_wgmma: attention on Hopper's tensor cores, whose products take a warpgroup and read shared memory. Rows are (node, head) pairs,
// heads fastest.
//
//     S^T [64 keys, rows] = K Q^T      P = 2^(scale * S - m)      O^T [d_v, rows] = O^T * shrink + V^T P^T      V: the first d_v columns of K
//
// q, cache and weights bf16 or fp16; FP8 caches are widened on their way (cuda_wgmma_fp8.cuh); sums, and outputs on request, float32.
// d_v/d_rope 512/64, 512/0, 256/64, 256/32, packed rows with d_v 512; any h_q, page size, mask. Keys and shapes as everywhere:
// src/plan/split.hpp cuts the work, tiles begin at multiples of 64 keys.
//
// Hundreds of rows a request over 16-bit caches have a form of their own: cuda_wgmma_rows.cuh. Of the others this is said:
//
// Rows are the N of wgmma.m64nNk16, whose granularity is 8, and keys or columns its M: 72 rows, 8 heads x 9 nodes, leave no row idle.
// Both products have the same keys in shared memory as their A: as they lie for the first, transposed for the second.
//
// Four warpgroups of 128 threads, each with a task, that meet at mbarriers:
//
//     copy         keys, by 16-byte cp.async whatever the page size, 8 threads a row; page entries a tile ahead; queries
//     score        S^T, mask, softmax; P^T to shared memory as the B of the second product
//     accumulate   O^T, every other chunk of 128 columns: at 72 rows and d_v 512, 144 registers of it
//     accumulate   the others
//
//     copy         | tile i + 2, as chunks come free      |
//     score        | S(i + 1)            | softmax(i + 1) | S(i + 2)
//     accumulate   | V(i)^T P(i)^T       |                | V(i + 1)^T P(i + 1)^T
//
// They share out an SM's registers: 64 a thread for copying, 128 for scores, 160 for outputs; at 72 rows 48, 112, 176. With FP8 caches
// 96, 96, 160; at 72 rows 72, 88, 176; at 16 and fewer 96, 128, 144.
//
// Keys lie in panels of 64 columns, 64 rows of 128 bytes each, swizzled; two panels, a chunk, are handed over at once, so that the places of
// tile i are filled again while tile i + 1 is at work. Rope columns are done with after the scores and have places of their own.
//
// Shared memory, bytes                              72 rows    64 rows     8 rows
//     latents   [stages][d_v / 64][64][128]         131,072    131,072    196,608
//     rope      [rope stages][64][128]                8,192     16,384     24,576
//     queries   [d_v / 64 + 1][rows][128]            82,944     73,728      9,216
//     weights   [rows][128]                           9,216      8,192      1,024     between tiles, and at the end: masks, maxima, sums
//     factors, maxima, a mark, barriers                 808        760        392
//                                                   232,232    230,136    231,816     sm_90: 232,448
//
// Budget, 72 rows x 64 keys of d_v 512, in cycles of an SM of the H200: tensor cores 68 products of 36, 2,448; softmax about 500, in which
// the other warpgroups have products; a tile's 73,728 bytes from memory 3,800. docs/PERFORMANCE.md has what it takes and why.
//
// A worker is a CTA, or where that ends sooner a cluster of two that share out the key tiles of each item. At its end each sends the other
// its rows' maxima and sums, which go to the place of the rope columns while the last values are multiplied, and its sums of half of the
// columns, which go to the place of the latents; each writes the half that it got. What would be partial results in memory, to be read
// by another kernel, then are not.
//
// Masks: tiles inside the prefix know none. In the others hidden scores become -inf, keys past the end are zeros, and values that are
// not finite are cleared, lest 0 * NaN reach a row that does not see them; whoever sees such a key has NaN among its weights.
//
// A row's bits depend on its keys alone: products, sums and maxima are taken over tiles of 64 keys in every instance, and a maximum is
// raised by the row's own scores. The form with rows as M adds weights in another order, and is not taken where bits must not depend on the
// batch.

#include <algorithm>
#include <string>

#include "backend/cuda/cuda_backend.hpp"
#include "backend/cuda/cuda_backends.hpp"
#include "backend/cuda/cuda_wgmma_kernels.hpp"
#include "core/lookup.hpp"

namespace treemla {
namespace {

// Compiled in five files, which takes a compiler long enough each.
const void* find_kernel(const WgmmaTile& tile, DType q_dtype, DType kv_dtype) {
  const bool is_bf16 = q_dtype == DType::kBF16;
  switch (kv_dtype) {
    case DType::kF8E4M3:
      return wgmma_kernel_e4m3(tile, is_bf16);
    case DType::kF8E4M3Packed:
      return wgmma_kernel_packed(tile);
    default:
      if (tile.rows_are_m) return wgmma_rows_kernel(tile, is_bf16);
      return is_bf16 ? wgmma_kernel_bf16(tile) : wgmma_kernel_fp16(tile);
  }
}

WgmmaChoice choose(const VerifyProblem& p, const CudaDevice& device, bool batch_invariant = false) {
  const int64_t nodes = p.b > 0 ? ceil_div<int64_t>(p.q.total_q, p.b) : 0;
  return choose_wgmma(p.shape.d_v, p.kv.dtype, p.b, nodes * p.shape.h_q, kv_len_bound(p),
                      std::max(1, device.model.num_sms), batch_invariant);
}

class CudaWgmma : public CudaBackend {
 public:
  CudaWgmma() : CudaBackend("cuda_wgmma", true) {}
  bool prefers(const VerifyProblem& p) const override {
    return prefers_wgmma(*choose(p, current_cuda_device()).tile, p.kv.dtype, kv_len_bound(p));
  }

 protected:
  Support supports_kernel(const VerifyProblem& p, const CudaDevice& device) const override {
#ifndef TREEMLA_HAS_SM90A
    return Support::no("this build has no code for sm_90a");
#endif
    if (device.cc != 0 && device.cc != 90)
      return Support::no("compute capability " + std::to_string(device.cc) + ": takes 90 (H100, H200)");
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
    if (const std::string reason = why_q_not_aligned(p, 16); !reason.empty()) return Support::no(reason);
    if (const std::string reason = why_pool_too_large(p); !reason.empty()) return Support::no(reason);
    return Support::yes();
  }

  CudaInstance instance(const VerifyProblem& p, const CudaDevice& device) const override {
    return instance_of(choose(p, device), p);
  }
  CudaInstance invariant_instance(const VerifyProblem& p, const CudaDevice& device) const override {
    return instance_of(choose(p, device, true), p);
  }

 private:
  static CudaInstance instance_of(const WgmmaChoice& choice, const VerifyProblem& p) {
    CudaInstance k;
    k.function = find_kernel(*choice.tile, p.q.dtype, p.kv.dtype);
    k.threads = choice.tile->threads();
    k.smem_bytes = choice.tile->smem_bytes();
    k.cluster = choice.cluster;
    k.tile = choice.tile->policy(p.kv.dtype);
    k.narrow_partials = choice.tile->rows >= 32;  // of few rows they are written faster wide
    if (choice.tile->rows_are_m) k.label = "rows as M";
    return k;
  }
};

}  // namespace

const Backend& cuda_wgmma_backend() {
  static const CudaWgmma backend;
  return backend;
}

}  // namespace treemla
