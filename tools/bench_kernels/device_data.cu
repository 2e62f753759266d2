#include "device_data.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <vector>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device_properties.hpp"

namespace treemla::bench {
namespace {

constexpr int kThreads = 256;

// splitmix64 (Steele, Lea, Flood 2014).
__device__ uint64_t hash_at(uint64_t key, uint64_t i) {
  uint64_t z = key + (i + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

__device__ void store(float* to, float x) { *to = x; }
__device__ void store(__half* to, float x) { *to = __float2half_rn(x); }
__device__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

template <class T>
__global__ void fill_kernel(T* to, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const uint64_t h = hash_at(seed, static_cast<uint64_t>(i));
    const int sum =
        static_cast<int>((h & 0xFFFF) + (h >> 16 & 0xFFFF) + (h >> 32 & 0xFFFF) + (h >> 48)) - 2 * 65535;
    store(to + i, static_cast<float>(sum) * 2.6428993e-5f * scale);
  }
}

// ---- ceilings ----

// Eight loads in flight a thread.
__global__ void __launch_bounds__(512) read_kernel(const uint4* from, int64_t count, uint4* sink) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  uint4 sum = {};
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      sum.x ^= v[k].x;
      sum.y ^= v[k].y;
      sum.z ^= v[k].z;
      sum.w ^= v[k].w;
    }
  }
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678) *sink = sum;  // keeps the loads
}

__global__ void __launch_bounds__(512) copy_kernel(const uint4* from, uint4* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < 4; ++k) to[i + k * step] = v[k];
  }
}

constexpr int kChains = 16, kFmaSteps = 4096;
__global__ void __launch_bounds__(256) fma_kernel(float a, float b, float* sink) {
  float x[kChains];
#pragma unroll
  for (int k = 0; k < kChains; ++k) x[k] = static_cast<float>(threadIdx.x + k);
  for (int step = 0; step < kFmaSteps / 8; ++step)
#pragma unroll
    for (int unrolled = 0; unrolled < 8; ++unrolled)
#pragma unroll
      for (int k = 0; k < kChains; ++k) x[k] = fmaf(x[k], a, b);
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kChains; ++k) sum += x[k];
  if (sum == 123.0f) *sink = sum;
}

template <class Launch>
double median_seconds(cudaStream_t stream, int samples, const Launch& launch) {
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> ms(static_cast<std::size_t>(samples));
  launch();
  for (float& t : ms) {
    check_cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
    launch();
    check_cuda(cudaEventRecord(end, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "a ceiling's kernel");
    check_cuda(cudaEventElapsedTime(&t, begin, end), "cudaEventElapsedTime");
  }
  check_launch("a ceiling's kernel");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(ms.begin(), ms.begin() + samples / 2, ms.end());
  return 1e-3 * ms[static_cast<std::size_t>(samples / 2)];
}

}  // namespace

void fill_normal(void* to, DType dtype, int64_t count, float scale, uint64_t seed, void* stream) {
  const int blocks = 16 * current_cuda_device().model.num_sms;
  const auto s = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case DType::kF32:
      fill_kernel<<<blocks, kThreads, 0, s>>>(static_cast<float*>(to), count, scale, seed);
      break;
    case DType::kF16:
      fill_kernel<<<blocks, kThreads, 0, s>>>(static_cast<__half*>(to), count, scale, seed);
      break;
    default:
      fill_kernel<<<blocks, kThreads, 0, s>>>(static_cast<__nv_bfloat16*>(to), count, scale, seed);
      break;
  }
  check_launch("fill_kernel");
}

Ceilings measure_ceilings(void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const DeviceModel& model = current_cuda_device().model;
  constexpr int64_t kBytes = int64_t{2} << 30;
  char *a = nullptr, *b = nullptr;
  check_cuda(cudaMalloc(&a, kBytes), "cudaMalloc of 2 GiB");
  check_cuda(cudaMalloc(&b, kBytes), "cudaMalloc of 2 GiB");
  fill_normal(a, DType::kF32, kBytes / 4, 1, 1, stream);
  fill_normal(b, DType::kF32, kBytes / 4, 1, 2, stream);
  const int64_t count = kBytes / 16, l2_count = model.l2_bytes / 3 / 16 / 4096 * 4096;
  const int blocks = 4 * model.num_sms;
  auto *from = reinterpret_cast<uint4*>(a), *to = reinterpret_cast<uint4*>(b);
  Ceilings c;
  c.copy_bytes_per_s =
      2.0 * kBytes / median_seconds(s, 9, [&] { copy_kernel<<<blocks, 512, 0, s>>>(from, to, count); });
  c.read_bytes_per_s =
      1.0 * kBytes / median_seconds(s, 9, [&] { read_kernel<<<blocks, 512, 0, s>>>(from, count, to); });
  // The same 16-byte words 64 times over: launch costs vanish.
  constexpr int kTimes = 64;
  c.l2_bytes_per_s = kTimes * 16.0 * static_cast<double>(l2_count) / median_seconds(s, 9, [&] {
                       for (int i = 0; i < kTimes; ++i)
                         read_kernel<<<blocks, 512, 0, s>>>(from, l2_count, to);
                     });
  const int fma_blocks = 8 * model.num_sms;
  c.fma_flops_per_s = 2.0 * kChains * kFmaSteps * 256 * fma_blocks / median_seconds(s, 9, [&] {
                        fma_kernel<<<fma_blocks, 256, 0, s>>>(0.999f, 0.001f, reinterpret_cast<float*>(b));
                      });
  cudaFree(a);
  cudaFree(b);
  return c;
}

}  // namespace treemla::bench
