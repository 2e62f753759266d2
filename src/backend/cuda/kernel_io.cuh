// Loads, page lookup, mask test and stores that every CUDA kernel shares.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/kernel_args.hpp"

namespace treemla {

// ---- elements: all widening is exact ----

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(__bfloat16_as_ushort(x)) << 16);
}

// Element i of an array whose dtype is known at run time: for q, which is read once a work item.
__device__ inline float load_any(const void* data, DType t, int64_t i) {
  switch (t) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF16:
      return to_float(static_cast<const __half*>(data)[i]);
    default:
      return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
  }
}

__device__ inline void store_any(void* data, DType t, int64_t i, float x) {
  switch (t) {
    case DType::kF32:
      static_cast<float*>(data)[i] = x;
      break;
    case DType::kF16:
      static_cast<__half*>(data)[i] = __float2half_rn(x);
      break;
    default:
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
      break;
  }
}

// Where an item's rows of d_v elements go, to the output or to its partial, and of what dtype they are there.
__device__ __forceinline__ DType dtype_of_rows(const KernelArgs& args, const CudaWorkItem& item) {
  return item.partial >= 0 ? args.partial_dtype : args.out_dtype;
}
template <class To>
__device__ __forceinline__ To* place_of_rows(const KernelArgs& args, const CudaWorkItem& item,
                                             int rows_per_tile, int d_v) {
  if (item.partial >= 0)
    return static_cast<To*>(args.partial_out) + static_cast<int64_t>(item.partial) * rows_per_tile * d_v;
  return static_cast<To*>(args.out) + (static_cast<int64_t>(item.q_begin) * args.h_q + item.row_begin) * d_v;
}

// kWidth consecutive elements of T, fetched by one load of up to 16 bytes (the address must be a multiple of its size).
template <class T, int kWidth>
__device__ inline void load_vector(const T* from, float (&to)[kWidth]) {
  constexpr int kBytes = kWidth * sizeof(T);
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kWidth == 1) {
    to[0] = to_float(*from);
  } else {
    union {
      uint4 v16;
      uint2 v8;
      uint32_t v4;
      T elements[kWidth];
    } u;
    if constexpr (kBytes == 16)
      u.v16 = *reinterpret_cast<const uint4*>(from);
    else if constexpr (kBytes == 8)
      u.v8 = *reinterpret_cast<const uint2*>(from);
    else
      u.v4 = *reinterpret_cast<const uint32_t*>(from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = to_float(u.elements[i]);
  }
}

// ---- pages ----

// One of the faults that threads meet survives: a plain store costs fewer registers than an atomic one.
__device__ inline void report_fault(const DevicePlanView& plan, DeviceFault fault, int request,
                                    int position) {
  *const_cast<volatile uint64_t*>(&plan.header->fault) = pack_fault(fault, request, position);
}

// Pool row of token t of the request whose entries start at page_base. An entry outside the pool is never followed: it counts as
// page 0 (the result is then garbage, but nothing is read out of bounds) and is reported.
__device__ inline int64_t pool_row(const KernelArgs& args, int64_t page_base, int request, int t) {
  const int page = args.pages.page_size.quotient(t);
  const int64_t i = page_base + page;
  int64_t entry = args.pages.is_int64 ? static_cast<const int64_t*>(args.pages.entries)[i]
                                      : static_cast<const int32_t*>(args.pages.entries)[i];
  if (static_cast<uint64_t>(entry) >= static_cast<uint64_t>(args.pages.num_pages)) {
    report_fault(args.plan, DeviceFault::kPageEntry, request, page);
    entry = 0;
  }
  return entry * args.pages.page_size.divisor + (t - page * args.pages.page_size.divisor);
}

// ---- mask ----

// May node i of the request whose node 0 is query node q_begin see node j of it? Both below q_len.
__device__ inline bool sees(const MaskView& mask, int q_begin, int i, int j) {
  switch (mask.kind) {
    case MaskKind::kNone:
      return true;
    case MaskKind::kCausal:
      return j <= i;
    default:
      return (mask.bits[(static_cast<int64_t>(q_begin) + i) * mask.words + (j >> 5)] >> (j & 31)) & 1;
  }
}

// ---- dependent launches: the next kernel of the stream may start while this one ends ----

// Lets it; what it waits for with wait_for_kernel_before() is the end all the same.
__device__ inline void allow_dependent_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- warps ----

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// exp(a - b) for weights: b is a running maximum, and -inf means that there is nothing to weigh (never exp(-inf + inf)).
__device__ inline float weight(float a, float b) { return a == -INFINITY ? 0.0f : expf(a - b); }

}  // namespace treemla
