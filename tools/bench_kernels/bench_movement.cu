// bench_movement: what short calls on Hopper could move differently, as movement alone, with no products: the figures behind choices of
// cuda_wgmma in docs/PERFORMANCE.md. Median microseconds of graph replays, warm, launch included.
//
//     copies    tiles of 64 cached rows to shared memory: cp.async of any rows, of pages of 64, and TMA boxes of those
//     exchange  a row tile of 72 rows whose keys 128 CTAs share out: each writes a partial, merged by a dependent kernel; or clusters that
//               exchange weights, where a CTA copies its slice of the columns of the others' keys and writes that slice of one partial
//     merge     by the CTA of a row tile that arrives last, or by a dependent kernel

#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/cuda_memory.hpp"
#include "backend/cuda/device_properties.hpp"
#include "backend/cuda/kernel_io.cuh"
#include "backend/cuda/ptx_sm80.cuh"
#include "backend/cuda/ptx_sm90.cuh"
#include "treemla/error.hpp"

namespace treemla::bench {
namespace {

constexpr int kRowBytes = 1152, kTileRows = 64, kTileBytes = kTileRows * kRowBytes;
constexpr int kRows = 72, kPartialBytes = kRows * 1024;
[[maybe_unused]] constexpr int kWeightBytes = kRows * 128;
constexpr int kStages = 3;

[[maybe_unused]] __device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint4 sum_of(const uint4& a, const uint4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// ---- copies ----

// 128 threads copy, 8 a row, addresses a tile ahead; the other 128 only give places back. kBoxes: one thread asks for 9 boxes of 64 x 64.
template <bool kBoxes>
__global__ void __launch_bounds__(256, 1)
    copy_kernel(const char* pool, const int* rows, int tiles, const __grid_constant__ CUtensorMap map) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared_memory[];
  __shared__ uint64_t barriers[2 * kStages];
  const uint32_t place = (shared_address(shared_memory) + 1023) & ~1023u;
  const auto full = [&](int stage) { return shared_address(barriers + stage); };
  const auto empty = [&](int stage) { return shared_address(barriers + kStages + stage); };
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full(i), kBoxes ? 1 : 128);
      init_barrier(empty(i), 128);
    }
  fence_async_reads();
  __syncthreads();
  int stage = 0;
  uint32_t round = threadIdx.x < 128 ? 1 : 0;
  const auto step = [&] {
    if (++stage == kStages) stage = 0, round ^= 1;
  };
  const int first = static_cast<int>(threadIdx.x) / 8, chunk = static_cast<int>(threadIdx.x) % 8,
            step_tiles = static_cast<int>(gridDim.x);
  if (threadIdx.x >= 128) {
    for (int t = static_cast<int>(blockIdx.x); t < tiles; t += step_tiles, step()) {
      wait_barrier(full(stage), round);
      arrive(empty(stage));
    }
  } else if constexpr (kBoxes) {
    if (threadIdx.x > 0) return;
    for (int t = static_cast<int>(blockIdx.x); t < tiles; t += step_tiles, step()) {
      const int row = __ldg(rows + kTileRows * t);
      wait_barrier(empty(stage), round);
      arrive_and_expect(full(stage), kTileBytes);
#pragma unroll
      for (int p = 0; p < 9; ++p)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
            "%3}], [%4];" ::"r"(place + stage * kTileBytes + p * 8192),
            "l"(&map), "r"(64 * p), "r"(row), "r"(full(stage))
            : "memory");
    }
  } else {
    int next[4];
    const auto fetch = [&](int t) {
      if (t < tiles)
        for (int k = 0; k < 4; ++k) next[k] = __ldg(rows + kTileRows * t + first + 16 * k);
    };
    fetch(static_cast<int>(blockIdx.x));
    for (int t = static_cast<int>(blockIdx.x); t < tiles; t += step_tiles, step()) {
      const char* from[4];
      for (int k = 0; k < 4; ++k) from[k] = pool + static_cast<int64_t>(next[k]) * kRowBytes + 16 * chunk;
      fetch(t + step_tiles);
      wait_barrier(empty(stage), round);
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int p = 0; p < 9; ++p)
          copy16(
              place + stage * kTileBytes + p * 8192 + (first + 16 * k) * 128 + ((chunk ^ (first & 7)) << 4),
              from[k] + 128 * p, true);
      arrive_after_copies(full(stage));
    }
    wait_copies<0>();
  }
#endif
}

// ---- exchange ----

// Each CTA has `own` tiles; kCtas of them are a cluster.
template <int kCtas>
__global__ void __launch_bounds__(512, 1)
    exchange_kernel(const char* pool, const int* rows, int own, char* partials) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char shared_memory[];
  const int thread = static_cast<int>(threadIdx.x), cta = static_cast<int>(blockIdx.x),
            rank = kCtas > 1 ? cluster_rank() : 0, first = cta - rank;
  const uint32_t place = shared_address(shared_memory), slices = place + 2 * kTileBytes,
                 weights = slices + (kCtas - 1) * (kTileRows * 1024 / kCtas);
  const auto row_at = [&](int of, int tile, int row) {
    return pool + static_cast<int64_t>(__ldg(rows + kTileRows * (of * own + tile) + row)) * kRowBytes;
  };
  allow_dependent_launch();
  for (int tile = 0; tile < own; ++tile) {
    constexpr int kChunks = kRowBytes / 16, kSlice = 64 / kCtas;
    for (int i = thread; i < kTileRows * kChunks; i += 512)
      copy16(place + (tile & 1) * kTileBytes + 16 * i, row_at(cta, tile, i / kChunks) + 16 * (i % kChunks),
             true);
    for (int o = 1; o < kCtas; ++o)
      for (int i = thread; i < kTileRows * kSlice; i += 512)
        copy16(slices + 16 * ((o - 1) * kTileRows * kSlice + i),
               row_at(first + (rank + o) % kCtas, tile, i / kSlice) + 16 * (rank * kSlice + i % kSlice),
               true);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    if constexpr (kCtas > 1) {
      for (int o = 1; o < kCtas; ++o) {
        uint32_t remote;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(remote)
                     : "r"(weights + (o - 1) * kWeightBytes), "r"((rank + o) % kCtas));
        for (int i = thread; i < kWeightBytes / 16; i += 512)
          asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(remote + 16 * i), "r"(i)
                       : "memory");
      }
      sync_cluster();
    }
  }
  auto* to = reinterpret_cast<uint4*>(partials + static_cast<int64_t>(cta) * (kPartialBytes / kCtas));
  for (int i = thread; i < kPartialBytes / kCtas / 16; i += 512)
    to[i] = uint4{1, 2, 3, static_cast<uint32_t>(i)};
  if constexpr (kCtas > 1) sync_cluster();
#endif
}

// 72 rows in two halves, a block each, whose eight warps share out `count` partials.
__global__ void __launch_bounds__(256, 2) merge_shared_kernel(const char* partials, int count, uint4* out) {
  __shared__ uint4 parts[8][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  wait_for_kernel_before();
  uint4 sum = {};
  for (int i = warp; i < count; i += 8)
    sum = sum_of(sum,
                 __ldcg(reinterpret_cast<const uint4*>(partials + static_cast<int64_t>(i) * kPartialBytes) +
                        32 * blockIdx.x + lane));
  parts[warp][lane] = sum;
  __syncthreads();
  if (warp > 0) return;
  for (int w = 1; w < 8; ++w) sum = sum_of(sum, parts[w][lane]);
  out[32 * blockIdx.x + lane] = sum;
}

// ---- merge ----

// A partial of so many rows a CTA, `count` of them a row tile.
template <bool kLastMerges>
__global__ void __launch_bounds__(512, 1)
    partial_kernel(uint4* partials, int rows, int count, int* arrivals, uint4* out) {
  __shared__ int is_last;
  allow_dependent_launch();
  const int words = rows * 64, tile = static_cast<int>(blockIdx.x) / count;
  for (int i = threadIdx.x; i < words; i += 512)
    partials[static_cast<int64_t>(blockIdx.x) * words + i] = uint4{1, 2, 3, static_cast<uint32_t>(i)};
  if constexpr (kLastMerges) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(arrivals + tile, 1) == count - 1;
      if (is_last) arrivals[tile] = 0;
      __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    for (int i = threadIdx.x; i < words; i += 512) {
      uint4 sum = {};
#pragma unroll 8
      for (int j = 0; j < count; ++j)
        sum = sum_of(sum, __ldcg(partials + static_cast<int64_t>(tile * count + j) * words + i));
      out[static_cast<int64_t>(tile) * words + i] = sum;
    }
  }
}
// A warp has half of a row.
__global__ void __launch_bounds__(256, 2)
    merge_kernel(const uint4* partials, int rows, int count, int tiles, uint4* out) {
  wait_for_kernel_before();
  const int lane = static_cast<int>(threadIdx.x) % 32,
            warp = static_cast<int>(blockIdx.x) * 8 + static_cast<int>(threadIdx.x) / 32, words = rows * 64;
  if (warp >= tiles * rows * 2) return;
  const int tile = warp / (rows * 2), at = warp % (rows * 2) * 32 + lane;
  uint4 sum = {};
#pragma unroll 8
  for (int j = 0; j < count; ++j)
    sum = sum_of(sum, __ldcg(partials + static_cast<int64_t>(tile * count + j) * words + at));
  out[static_cast<int64_t>(tile) * words + at] = sum;
}

// ---- host ----

template <class T>
T* allocate(std::size_t count) {
  return static_cast<T*>(cuda_memory().allocate(count * sizeof(T)));
}

template <class... Args>
void launch(cudaStream_t stream, void (*kernel)(Args...), int grid, int threads, int smem, int cluster,
            bool dependent, std::type_identity_t<Args>... args) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem),
             "raising the shared memory of a kernel");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = dependent;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(smem);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "launching a kernel");
}

double median_us(cudaStream_t stream, const std::function<void()>& enqueue) {
  std::vector<double> s = cuda_memory().measure(stream, enqueue, 100, false);
  std::nth_element(s.begin(), s.begin() + 50, s.end());
  return 1e6 * s[50];
}

// Boxes of 64 elements x 64 rows of a pool of bf16 rows, swizzled as cuda_wgmma has them.
CUtensorMap boxes_of(void* pool, int rows) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  check_cuda(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
      "cudaGetDriverEntryPointByVersion");
  const cuuint64_t size[2] = {kRowBytes / 2, static_cast<cuuint64_t>(rows)}, stride[1] = {kRowBytes};
  const cuuint32_t box[2] = {64, kTileRows}, steps[2] = {1, 1};
  CUtensorMap map;
  if (encode == nullptr ||
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
          &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, pool, size, stride, box, steps,
          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    throw Error(ErrorCode::kInternal, "", "cuTensorMapEncodeTiled failed");
  return map;
}

void run() {
  const CudaDevice& device = current_cuda_device();
  if (!device.usable || device.cc != 90)
    throw Error(ErrorCode::kUnsupported, "",
                "bench_movement needs a GPU of compute capability 9.0: " + device.reason);
  const auto stream = static_cast<cudaStream_t>(cuda_memory().make_stream());
  constexpr int kPoolRows = 1 << 20, kSmem = 230000, kCopySmem = kStages * kTileBytes + 1024;
  const int sms = device.model.num_sms;
  std::mt19937 rng(1);
  char* pool = allocate<char>(static_cast<std::size_t>(kPoolRows) * kRowBytes);
  check_cuda(cudaMemset(pool, 0, static_cast<std::size_t>(kPoolRows) * kRowBytes), "cudaMemset");
  int* rows = allocate<int>(kPoolRows);
  const auto upload = [&](const std::vector<int>& r) {
    check_cuda(cudaMemcpy(rows, r.data(), r.size() * sizeof(int), cudaMemcpyHostToDevice), "cudaMemcpy");
  };
  auto* partials = allocate<uint4>(std::size_t{4} << 20);
  auto* out = allocate<uint4>(std::size_t{1} << 20);
  int* arrivals = allocate<int>(1024);
  check_cuda(cudaMemset(arrivals, 0, 1024 * sizeof(int)), "cudaMemset");

  std::printf("copies, us (TB/s)%24s%22s%22s\n", "random rows", "pages of 64", "pages of 64 by TMA");
  const CUtensorMap map = boxes_of(pool, kPoolRows);
  for (const int keys : {8448, 524288}) {
    const int distinct = keys < 100000 ? 16384 : kPoolRows;  // from L2, or from memory
    std::vector<int> any(keys), paged(keys), pages(distinct / kTileRows);
    for (int& r : any) r = static_cast<int>(rng() % distinct);
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int>(i);
    std::shuffle(pages.begin(), pages.end(), rng);
    for (int i = 0; i < keys; ++i) paged[i] = pages[i / kTileRows] * kTileRows + i % kTileRows;
    const auto time = [&](auto kernel) {
      return median_us(stream, [&] {
        launch(stream, kernel, sms, 256, kCopySmem, 1, false, pool, rows, keys / kTileRows, map);
      });
    };
    upload(any);
    double us[3] = {time(copy_kernel<false>)};
    upload(paged);
    us[1] = time(copy_kernel<false>);
    us[2] = time(copy_kernel<true>);
    std::printf("%7d rows %s", keys, keys < 100000 ? "of L2" : "     ");
    for (const double t : us) std::printf("%14.1f (%5.2f)", t, 1e-6 * keys * kRowBytes / t);
    std::printf("\n");
  }

  std::printf("\nexchange, us (with merge)%16s%18s%18s\n", "no cluster", "clusters of 2", "of 4");
  std::vector<int> any(128 * 4 * kTileRows);
  for (int& r : any) r = static_cast<int>(rng() % 16384);
  upload(any);
  for (const int own : {1, 2, 4}) {
    std::printf("%d tile%s a CTA      ", own, own > 1 ? "s" : " ");
    const auto time = [&](auto kernel, int ctas) {
      const auto move = [&] {
        launch(stream, kernel, 128, 512, kSmem, ctas, false, pool, rows, own,
               reinterpret_cast<char*>(partials));
      };
      const double alone = median_us(stream, move);
      std::printf("%10.1f (%5.1f)", alone, median_us(stream, [&] {
                    move();
                    launch(stream, merge_shared_kernel, 2 * kRows, 256, 0, 1, true,
                           reinterpret_cast<char*>(partials), 128 / ctas, out);
                  }));
    };
    time(exchange_kernel<1>, 1);
    time(exchange_kernel<2>, 2);
    time(exchange_kernel<4>, 4);
    std::printf("\n");
  }

  std::printf("\nmerge, us: last to arrive / dependent kernel / nothing merged\n  rows");
  for (const int count : {2, 4, 8, 16}) std::printf("%13d partials", count);
  std::printf("\n");
  for (const int height : {8, 32, 72}) {
    std::printf("%6d", height);
    for (const int count : {2, 4, 8, 16}) {
      const int tiles = sms / count, grid = tiles * count;
      const auto write = [&](auto kernel) {
        launch(stream, kernel, grid, 512, kSmem, 1, false, partials, height, count, arrivals, out);
      };
      const double last = median_us(stream, [&] { write(partial_kernel<true>); }),
                   alone = median_us(stream, [&] { write(partial_kernel<false>); }),
                   dependent = median_us(stream, [&] {
                     write(partial_kernel<false>);
                     launch(stream, merge_kernel, (tiles * height * 2 + 7) / 8, 256, 0, 1, true, partials,
                            height, count, tiles, out);
                   });
      std::printf("   %5.1f / %4.1f / %3.1f", last, dependent, alone);
    }
    std::printf("\n");
  }
  check_cuda(cudaStreamSynchronize(stream), "bench_movement");
}

}  // namespace
}  // namespace treemla::bench

int main() {
  try {
    treemla::bench::run();
    return 0;
  } catch (const treemla::Error& e) {
    std::fprintf(stderr, "bench_movement: %s\n", e.what());
    return 2;
  }
}
