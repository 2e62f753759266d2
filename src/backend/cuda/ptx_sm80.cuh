// Instructions of sm_80 that CUDA C++ has no word for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace treemla {

// ---- copies in the background ----

// 16 or 8 bytes from global to shared memory, past L1; zeros if !ok, and then nothing is read.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(ok ? 16 : 0)
               : "memory");
}
// The same if `wanted`, without a branch.
__device__ __forceinline__ void copy16_if(bool wanted, uint32_t to, const void* from, bool ok) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\t@p cp.async.cg.shared.global [%0], [%1], 16, "
      "%2;\n\t}" ::"r"(to),
      "l"(from), "r"(ok ? 16 : 0), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void copy8(uint32_t to, const void* from, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(ok ? 8 : 0)
               : "memory");
}
// The line of 128 bytes around it, on its way to L2.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
// This thread's copies so far become a group; wait until at most kPending of its youngest groups are on their way.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// threadIdx.x, read again at every use: the compiler would keep it, in a register or in local memory.
__device__ __forceinline__ unsigned thread_index() {
  unsigned i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}

// ---- barriers in shared memory, 8 bytes ----

// A phase ends after so many arrivals.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(barrier)
               : "memory");
}
// Arrives once this thread's copies so far have landed.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Until the phase of this parity has ended; the phase before the first has parity 1.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
#define TREEMLA_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define TREEMLA_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile("{\n\t.reg .pred done;\n\tagain:\n\t" TREEMLA_WAIT
               " done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
               "r"(parity)
               : "memory");
#undef TREEMLA_WAIT
}

// ---- barriers of a warpgroup: four warps, by number ----

__device__ __forceinline__ void sync_group(int barrier) {
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}
// The same; is x true in any of its threads?
__device__ __forceinline__ bool sync_group_or(int barrier, bool x) {
  int any;
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %1, 0;\n\tbar.red.or.pred p, %2, 128, p;\n\tselp.s32 %0, 1, 0, "
      "p;\n\t}"
      : "=r"(any)
      : "r"(static_cast<int>(x)), "r"(barrier)
      : "memory");
  return any != 0;
}

// ---- shared memory by address ----

// A pointer's base would be worked out again at every use, from a special register: too slow between two barriers.
template <class T>
__device__ __forceinline__ T load_shared(uint32_t from) {
  if constexpr (sizeof(T) == 16) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return __builtin_bit_cast(T, x);
  } else if constexpr (sizeof(T) == 8) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return __builtin_bit_cast(T, x);
  } else {
    static_assert(sizeof(T) == 4);
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return __builtin_bit_cast(T, x);
  }
}
template <class T>
__device__ __forceinline__ void store_shared(uint32_t to, T value) {
  if constexpr (sizeof(T) == 16) {
    const uint4 x = __builtin_bit_cast(uint4, value);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  } else if constexpr (sizeof(T) == 8) {
    const uint2 x = __builtin_bit_cast(uint2, value);
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(x.x), "r"(x.y) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(__builtin_bit_cast(uint32_t, value)) : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(__builtin_bit_cast(uint16_t, value)) : "memory");
  } else {
    static_assert(sizeof(T) == 1);
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(static_cast<uint32_t>(value)) : "memory");
  }
}

// ---- tensor cores ----

// Four (two) 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes; it gets elements
// 2 * (l % 4) and the next of row l / 4 of each (transposed: of column l / 4).
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t& x0, uint32_t& x1, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(x0), "=r"(x1)
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row)
               : "memory");
}

// An 8 x 8 matrix of 16-bit elements, two a lane as above, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// D [16, 8] += A [16, 16] B [16, 8], float32 sums. Lane l, with g = l / 4 and t = 2 * (l % 4), holds
//     A  rows g, g + 8 x columns t, t + 1 (registers 0, 1), then the same of columns t + 8, t + 9 (2, 3)
//     B  rows t, t + 1 (0), t + 8, t + 9 (1) of column g
//     D  columns t, t + 1 of row g (0, 1) and of row g + 8 (2, 3)
template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                            uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x to 2 ulp; 0 for -inf, NaN for NaN.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace treemla
