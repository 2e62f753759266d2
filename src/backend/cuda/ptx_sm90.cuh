// Instructions of sm_90a that CUDA C++ has no word for: products of a warpgroup (four warps) on operands in shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace treemla {

// ---- registers: a warpgroup gives back what it does not need, or takes more; all of its warps together ----

// Of `kAtLaunch` registers a thread. Whoever takes waits until others have given back.
template <int kRegisters, int kAtLaunch = 128>
__device__ __forceinline__ void set_registers() {
  if constexpr (kRegisters < kAtLaunch)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  else if constexpr (kRegisters > kAtLaunch)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- order ----

// What this thread wrote to shared memory, or saw written, comes before what products read later: those go another way to it.
__device__ __forceinline__ void fence_async_reads() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Before a warpgroup's first product, and after its sums were written by anything else.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The products so far become a group; wait until at most kPending of the youngest groups are under way.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving sums across this place: it does not know that products write them meanwhile.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// ---- clusters: CTAs that run at the same time and reach each other's shared memory ----

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ int cluster_size() {
  int size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// Of all threads of all of its CTAs.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
// The same place in the shared memory of the other CTA of a cluster of two, for the functions below.
__device__ __forceinline__ uint32_t in_other_cta(uint32_t shared) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(cluster_rank() ^ 1));
  return remote;
}
// Stores that a barrier of the same CTA counts in bytes: whoever waits for all of them there sees them.
__device__ __forceinline__ void store_remote(uint32_t to, uint32_t barrier, const float2& x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
      "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t to, const float4& x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}
// What this thread wrote, or saw written, comes before its next arrival for who waits there for the cluster.
__device__ __forceinline__ void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\tagain:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, "
      "[%0], "
      "%1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// An arrival at a barrier of this CTA, whose phase then ends after so many bytes as well.
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// At a barrier of any CTA. Says only that this thread has come so far: nothing that it wrote need be seen.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// ---- operands ----

// Rows of 128 bytes, 8 rows after one another in 1,024 (whose address is a multiple of that), the 16-byte chunk c of row r at place
// c ^ r % 8: what the hardware calls a swizzle of 128 bytes.
//
// As the descriptor of 16-bit matrices: [8 n rows][64], row by row, columns in the inner products' direction ("K-major"); a step of 16
// columns is 32 bytes on. Or the transposed of [8 n rows][64] ("M-major"): then a step is 16 rows, 2,048 bytes.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kGroupBytes = uint64_t{1024 / 16} << 32,
                     kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kGroupBytes | kUnused | (address & 0x3FFFF) >> 4;
}
// The transposed of [8 n rows][64 m] in panels of 64 columns, so many bytes apart.
__device__ __forceinline__ uint64_t wide_matrix_at(uint32_t address, int panel_bytes) {
  return matrix_at(address) + (static_cast<uint64_t>(panel_bytes / 16 - 1) << 16);
}
__device__ __forceinline__ uint64_t matrix_after(uint64_t matrix, int bytes) {
  return matrix + static_cast<uint64_t>(bytes / 16);
}
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
}

// ---- products ----

// D [64, kRows] = A [64, 16] B [16, kRows] + (adds ? D : 0), float32 sums, A K-major or (kTransposed) M-major, B K-major, B^T [kRows][16],
// or (kTransposedB) the other way.
// Warp w of the four has rows 16 w to 16 w + 15; lane l, with g = l / 4 and t = 2 * (l % 4), holds
//     d[4 j], d[4 j + 1]      columns 8 j + t, 8 j + t + 1 of row g
//     d[4 j + 2], d[4 j + 3]  the same of row g + 8
#define TREEMLA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TREEMLA_D8(d, i) TREEMLA_D4(d, i), TREEMLA_D4(d, i + 4)
#define TREEMLA_D16(d, i) TREEMLA_D8(d, i), TREEMLA_D8(d, i + 8)
#define TREEMLA_D32(d, i) TREEMLA_D16(d, i), TREEMLA_D16(d, i + 16)
#define TREEMLA_R4 "%0, %1, %2, %3"
#define TREEMLA_R8 TREEMLA_R4 ", %4, %5, %6, %7"
#define TREEMLA_R16 TREEMLA_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TREEMLA_R32 \
  TREEMLA_R16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TREEMLA_R36 TREEMLA_R32 ", %32, %33, %34, %35"
#define TREEMLA_R64                                                                                        \
  TREEMLA_R36                                                                                              \
  ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define TREEMLA_R128                                                                                         \
  TREEMLA_R64                                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "   \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "   \
  "%121, %122, %123, %124, %125, %126, %127"
#define TREEMLA_WGMMA(rows, type, registers, a_operand, b_operand, adds_operand, transposed_operand, ...) \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " adds_operand                                       \
               ", 0;\n\t"                                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" rows "k16.f32." type "." type " {" registers           \
               "}, " a_operand ", " b_operand ", p, 1, 1, " transposed_operand ";\n\t}"                   \
               : __VA_ARGS__                                                                              \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(kTransposed ? 1 : 0),                   \
                 "n"(kTransposedB ? 1 : 0))
template <class T, bool kTransposed, bool kTransposedB = false, int kSums>
__device__ __forceinline__ void multiply(float (&d)[kSums], uint64_t a, uint64_t b, bool adds) {
  constexpr int kRows = 2 * kSums;
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static_assert(kIsHalf || std::is_same_v<T, __nv_bfloat16>);
  static_assert(kRows == 8 || kRows == 16 || kRows == 32 || kRows == 64 || kRows == 72 || kRows == 256);
#define TREEMLA_EITHER(rows, registers, a_operand, b_operand, adds_operand, transposed_operand, ...) \
  if constexpr (kIsHalf)                                                                             \
    TREEMLA_WGMMA(rows, "f16", registers, a_operand, b_operand, adds_operand, transposed_operand,    \
                  __VA_ARGS__);                                                                      \
  else                                                                                               \
    TREEMLA_WGMMA(rows, "bf16", registers, a_operand, b_operand, adds_operand, transposed_operand,   \
                  __VA_ARGS__)
  if constexpr (kRows == 8) {
    TREEMLA_EITHER("8", TREEMLA_R4, "%4", "%5", "%6", "%7, %8", TREEMLA_D4(d, 0));
  } else if constexpr (kRows == 16) {
    TREEMLA_EITHER("16", TREEMLA_R8, "%8", "%9", "%10", "%11, %12", TREEMLA_D8(d, 0));
  } else if constexpr (kRows == 32) {
    TREEMLA_EITHER("32", TREEMLA_R16, "%16", "%17", "%18", "%19, %20", TREEMLA_D16(d, 0));
  } else if constexpr (kRows == 64) {
    TREEMLA_EITHER("64", TREEMLA_R32, "%32", "%33", "%34", "%35, %36", TREEMLA_D32(d, 0));
  } else if constexpr (kRows == 256) {
    TREEMLA_EITHER("256", TREEMLA_R128, "%128", "%129", "%130", "%131, %132", TREEMLA_D32(d, 0),
                   TREEMLA_D32(d, 32), TREEMLA_D32(d, 64), TREEMLA_D32(d, 96));
  } else {
    TREEMLA_EITHER("72", TREEMLA_R36, "%36", "%37", "%38", "%39, %40", TREEMLA_D32(d, 0), TREEMLA_D4(d, 32));
  }
#undef TREEMLA_EITHER
}
#undef TREEMLA_WGMMA

// The same with A in registers: of k columns 16, rows g (a[0], a[2]) and g + 8 (a[1], a[3]) of columns t, t + 1 (0, 1) and t + 8, t + 9. So sums
// 8 i to 8 i + 7 of an earlier product, narrowed in pairs, are columns 16 i to 16 i + 15.
#define TREEMLA_WGMMA(rows, type, registers, a_operands, b_operand, adds_operand, transposed_operand, ...) \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " adds_operand                                        \
               ", 0;\n\t"                                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" rows "k16.f32." type "." type " {" registers            \
               "}, {" a_operands "}, " b_operand ", p, 1, 1, " transposed_operand ";\n\t}"                 \
               : __VA_ARGS__                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)),          \
                 "n"(kTransposedB ? 1 : 0))
template <class T, bool kTransposedB, int kSums>
__device__ __forceinline__ void multiply(float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool adds) {
  constexpr int kRows = 2 * kSums;
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static_assert(kIsHalf || std::is_same_v<T, __nv_bfloat16>);
  static_assert(kRows == 64 || kRows == 256);
  if constexpr (kRows == 64 && kIsHalf)
    TREEMLA_WGMMA("64", "f16", TREEMLA_R32, "%32, %33, %34, %35", "%36", "%37", "%38", TREEMLA_D32(d, 0));
  else if constexpr (kRows == 64)
    TREEMLA_WGMMA("64", "bf16", TREEMLA_R32, "%32, %33, %34, %35", "%36", "%37", "%38", TREEMLA_D32(d, 0));
  else if constexpr (kIsHalf)
    TREEMLA_WGMMA("256", "f16", TREEMLA_R128, "%128, %129, %130, %131", "%132", "%133", "%134",
                  TREEMLA_D32(d, 0), TREEMLA_D32(d, 32), TREEMLA_D32(d, 64), TREEMLA_D32(d, 96));
  else
    TREEMLA_WGMMA("256", "bf16", TREEMLA_R128, "%128, %129, %130, %131", "%132", "%133", "%134",
                  TREEMLA_D32(d, 0), TREEMLA_D32(d, 32), TREEMLA_D32(d, 64), TREEMLA_D32(d, 96));
}
#undef TREEMLA_WGMMA
#undef TREEMLA_R128
#undef TREEMLA_R64
#undef TREEMLA_R36
#undef TREEMLA_R32
#undef TREEMLA_R16
#undef TREEMLA_R8
#undef TREEMLA_R4
#undef TREEMLA_D32
#undef TREEMLA_D16
#undef TREEMLA_D8
#undef TREEMLA_D4

// ---- fragments to shared memory ----

// Four 8 x 8 matrices of 16-bit elements, held as the sums above hold them: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
// Four (two) 8 x 8 matrices of 16-bit elements, held as the sums above hold them, stored transposed: lane l gives the address of
// column l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void store_matrices_transposed(uint32_t column, uint32_t x0, uint32_t x1,
                                                          uint32_t x2, uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t column, uint32_t x0, uint32_t x1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(column), "r"(x0),
               "r"(x1)
               : "memory");
}

}  // namespace treemla
