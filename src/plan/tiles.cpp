#include "plan/tiles.hpp"

#include <algorithm>
#include <string>
#include <string_view>

#include "plan/cuda_tiles.hpp"

namespace treemla {

TilePolicy cpu_simd_tile(int rows) {
  constexpr int kGroup = 64;     // rows of one softmax group of the kernel
  constexpr int kMaxRows = 256;  // accumulator, queries and key tile of a row tile stay inside a 2 MB L2
  TilePolicy t;
  const int tiles = std::max(1, ceil_div(rows, kMaxRows));
  t.rows_per_tile = std::max(1, tiles == 1 ? rows : round_up(ceil_div(rows, tiles), kGroup));
  t.keys_per_tile = 64;
  t.row_granularity = 16;
  // In quarters of the time of one row over one key tile (64 * 1088 multiply-adds): widening the tile costs
  // about two rows, moving a row's queries in and its output out about a quarter of one.
  t.row_cost = 4;
  t.load_cost = 8;
  t.pair_cost = t.rows_per_tile;
  return t;
}

TilePolicy cpu_simd_amx_tile(int rows) {
  TilePolicy t = cpu_simd_tile(rows);
  // In quarters of the time of one row over 64 keys, softmax included (80 ns): copying and packing the keys costs as much as 46
  // rows, moving a row in and out as much as 1.5.
  t.load_cost = 184;
  t.pair_cost = 6 * t.rows_per_tile;
  return t;
}

namespace {

struct KernelRegisters {
  std::string_view backend, arch;
  DType kv_dtype;
  int d_v, d_rope;  // d_v 0: any widths; d_rope -1: any rope
  int registers;
};
constexpr KernelRegisters kRegisters[] = {
#include "plan/kernel_registers.inc"
};

int arch_number(std::string_view arch) {
  int n = 0;
  for (const char c : arch)
    if (c >= '0' && c <= '9') n = 10 * n + (c - '0');
  return n;
}

// Of the device's own architecture, or of the newest one before it whose code it runs (sm_86 and sm_89 run
// sm_80's). 0: unknown.
int registers_of(std::string_view backend, const DeviceModel& device, const MlaShape& shape, DType kv_dtype) {
  int best = 0, registers = 0;
  for (const KernelRegisters& k : kRegisters) {
    const int arch = arch_number(k.arch);
    if (k.backend != backend || k.kv_dtype != kv_dtype) continue;
    if (k.d_v != 0 && (k.d_v != shape.d_v || (k.d_rope >= 0 && k.d_rope != shape.d_rope))) continue;
    if (arch < best || arch > arch_number(device.arch)) continue;
    best = arch;
    registers = k.registers;
  }
  return registers;
}

}  // namespace

std::vector<KernelModel> kernel_models(const DeviceModel& device, const MlaShape& shape, DType kv_dtype,
                                       int requests, int rows, int64_t keys, bool batch_invariant) {
  if (device.arch == "cpu") return {{"cpu_simd", cpu_simd_tile(rows), 1, 0, 0, false}};
  std::vector<KernelModel> models;
  if (kv_dtype == DType::kQ8) return models;  // caches for CPUs
  const auto add = [&](const char* backend, const TilePolicy& tile, int threads, int64_t smem_bytes,
                       int registers = 0, bool tensor_cores = false) {
    if (registers == 0) registers = registers_of(backend, device, shape, kv_dtype);
    if (registers > 0 && smem_bytes <= device.smem_per_block_bytes)
      models.push_back({backend, tile, threads, registers, static_cast<int>(smem_bytes), tensor_cores});
  };
  const int element_bytes = static_cast<int>(dtype_bytes(kv_dtype)),
            vector_width = WarpPerKey::vector_width(element_bytes);
  add("cuda_naive", NaiveTile::policy(keys), NaiveTile::kThreads, NaiveTile::smem_bytes(shape.d_qk(), keys));
  add("cuda_head_tile", HeadTile::policy(), HeadTile::kThreads, HeadTile::smem_bytes(shape.d_qk()));
  add("cuda_warp_per_key_scalar", WarpPerKey::policy(), WarpPerKey::kThreads,
      WarpPerKey::smem_bytes(shape.d_v, shape.d_rope, 1));
  add("cuda_warp_per_key", WarpPerKey::policy(), WarpPerKey::kThreads,
      WarpPerKey::smem_bytes(shape.d_v, shape.d_rope, vector_width));
  const Fp32Tile* tiled =
      choose_fp32_tile(shape.d_v, requests, rows, keys, device.num_sms, device.smem_per_block_bytes);
  if (tiled && !is_fp8(kv_dtype)) {
    const std::string instance =
        "cuda_fp32_tiled " + std::to_string(tiled->rows()) + "x" + std::to_string(tiled->keys);
    const int registers = registers_of(instance, device, shape, DType::kF32);
    if (registers > 0)
      add("cuda_fp32_tiled", tiled->policy(), Fp32Tile::kThreads, tiled->smem_bytes(), registers);
  }
  const auto add_wgmma = [&](bool if_preferred) {
    if (device.arch != "sm_90a" || kv_dtype == DType::kF32) return;
    const WgmmaChoice wgmma =
        choose_wgmma(shape.d_v, kv_dtype, requests, rows, keys, device.num_sms, batch_invariant);
    if (!wgmma.tile || prefers_wgmma(*wgmma.tile, kv_dtype, keys) != if_preferred) return;
    const int registers = registers_of(
        (wgmma.tile->rows_are_m ? "cuda_wgmma_rows " : "cuda_wgmma ") + std::to_string(wgmma.tile->rows),
        device, shape, kv_dtype);
    if (registers == 0) return;
    add("cuda_wgmma", wgmma.tile->policy(kv_dtype), wgmma.tile->threads(), wgmma.tile->smem_bytes(),
        registers, true);
    models.back().cluster = wgmma.cluster;
  };
  add_wgmma(true);
  const MmaTile* mma = nullptr;
  if (kv_dtype != DType::kF32 && (kv_dtype != DType::kF8E4M3Packed || shape.d_v == 512))
    mma = choose_mma_tile(shape.d_v, mma_cache(kv_dtype), requests, rows, keys, device.num_sms,
                          device.smem_per_sm_bytes);
  if (mma) {
    const int registers = registers_of("cuda_mma " + std::to_string(mma->rows()), device, shape, kv_dtype);
    if (registers > 0) add("cuda_mma", mma->policy(), mma->threads(), mma->smem_bytes(), registers, true);
  }
  add_wgmma(false);
  return models;
}

}  // namespace treemla
