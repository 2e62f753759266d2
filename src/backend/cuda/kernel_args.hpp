// What every CUDA kernel is given: one struct by value, filled by cuda_backend.cpp from the checked problem. Plain data, so that
// host code may include it; the device functions that read it are in kernel_io.cuh and work_list.cuh.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "plan/split.hpp"
#include "treemla/dtype.hpp"
#include "treemla/problem.hpp"

namespace treemla {

// n / d and n % d by one multiplication, for 0 <= n < 2^31, d >= 1: with s = ceil(log2 d) and m = ceil(2^(31+s) / d),
// n * m / 2^(31+s) exceeds n / d by less than 1 / d (Granlund and Montgomery, 1994).
struct FastDiv {
  int divisor = 1;
  uint32_t multiplier = 1u << 31;
  int shift = 31;

  FastDiv() = default;
  explicit FastDiv(int d) : divisor(d) {
    int s = 0;
    while ((int64_t{1} << s) < d) ++s;
    shift = 31 + s;
    const uint64_t power = uint64_t{1} << shift;
    multiplier = static_cast<uint32_t>((power + static_cast<uint64_t>(d) - 1) / static_cast<uint64_t>(d));
  }
  TREEMLA_HD int quotient(int n) const {
    return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier) >> shift);
  }
};

// What the device found wrong with contents that the host couldn't check. Smallest code, request and position first.
enum class DeviceFault : int {
  kNone = 0,
  kQIndptr = 1,      // falls, is negative or passes total_q
  kKvLen = 2,        // negative, or positive and below q_len
  kPageIndptr = 3,   // falls, is negative, passes num_entries or is too short for kv_len
  kPageStride = 4,   // too short for kv_len
  kPageEntry = 5,    // outside [0, num_pages)
  kParent = 6,       // not before its child, or a second root
  kMaxQLen = 7,      // q_len passes the bound that the workspace was made for
  kMaxKvLen = 8,     // kv_len passes it
  kWordsPerRow = 9,  // q_len passes the bits of a mask row
};
constexpr uint64_t kNoFault = ~uint64_t{0};
TREEMLA_HD inline uint64_t pack_fault(DeviceFault f, int request, int position) {
  return static_cast<uint64_t>(f) << 60 | static_cast<uint64_t>(request & 0x0FFFFFFF) << 32 |
         static_cast<uint32_t>(position);
}

// ---- the plan, as the device computes it: device_plan.cu ----

// A request with rows and keys; inert ones are left out, so that no kernel has to step over them.
struct DeviceRequest {
  int64_t start = 0;  // cost coordinate of its first pair, or number of its first piece: see plan/split.hpp
  int64_t page_base = 0;  // of its first page entry
  int q_begin = 0;        // first query node
  int q_len = 0;
  int kv_len = 0;
  int unit_base = 0;  // units before it
  int request = 0;    // number in the batch
  int tile_base = 0;  // row tiles before it, or on the line pairs
};

// Rows [row_begin, row_end) of a request (packed (node, head) pairs, heads fastest) against its keys [key_begin, key_end).
struct CudaWorkItem {
  int request;             // number in the batch
  int q_begin;             // node of row 0
  int row_begin, row_end;  // at most rows_per_tile of them
  int key_begin, key_end;
  int kv_len, prefix_len;  // keys from prefix_len on are tree rows: those and only those need the mask
  int64_t page_base;       // for pool_row()
  int partial;  // slot of the partial result, or -1: the item covers all keys and writes the output
};

// A worker's items are items[first] to items[first + count - 1]. The first is here as well: reading it is what a kernel begins with.
// Finding items takes longer than reading them, and one plan serves every layer.
struct WorkerItems {
  CudaWorkItem item;
  int first = 0, count = 0;
};

// A row tile whose keys were split.
struct MergeTile {
  int64_t row;  // of the output: (node, head), heads fastest
  int rows;
  PartialSlots slots;
};

struct DevicePlanHeader {
  int64_t total_cost = 0;  // length of the line, or number of pieces
  int64_t payload = 1;
  PairLayout layout;
  uint64_t fault = kNoFault;
  int num_active = 0;
  int member_items = 0;  // on the line: room in the list of items for those of one worker of each gang
  int num_merges = 0, num_inert = 0;
};

struct DevicePlanView {
  SplitParams params;
  int num_slots = 0;  // partial slots there are: no kernel writes past them whatever the lengths say
  int max_items = 0, max_merges = 0;  // that there is room for
  DevicePlanHeader* header = nullptr;
  DeviceRequest* requests = nullptr;  // [b], header->num_active of them, in batch order
  // Kernels that split keys only:
  WorkerItems* workers = nullptr;  // [num_workers]
  CudaWorkItem* items = nullptr;   // [max_items], with gaps
  MergeTile* merges = nullptr;     // [max_merges], header->num_merges of them, in no order
  int* inert_nodes = nullptr;      // [total_q], header->num_inert nodes that no request attends
};

// ---- tensors ----

struct PageLookup {
  const void* entries = nullptr;
  bool is_int64 = false;
  FastDiv page_size;
  int64_t num_pages = 1;
};

struct MaskView {
  MaskKind kind = MaskKind::kNone;
  const uint32_t* bits = nullptr;  // [total_q, words] with kTree
  int words = 0;
};

struct KernelArgs {
  const void* q = nullptr;  // [total_q, h_q, d_qk]
  DType q_dtype = DType::kF32;
  int64_t q_token_stride = 0, q_head_stride = 0;
  DType kv_dtype = DType::kF32;  // for kernels that are not compiled for one
  const void* kv = nullptr;      // rows of d_qk elements, kv_row_stride apart
  int64_t kv_row_stride = 0;
  PageLookup pages;
  MaskView mask;
  int total_q = 0, h_q = 0, d_v = 0, d_rope = 0;
  FastDiv heads;          // h_q: the node of a (node, head) row is its quotient
  float score_scale = 1;  // sm_scale * kv_scale
  float value_scale = 1;  // kv_scale
  void* out = nullptr;    // [total_q, h_q, d_v]
  DType out_dtype = DType::kF32;
  float* lse = nullptr;          // [total_q, h_q], or null
  void* partial_out = nullptr;   // [num_slots, rows_per_tile, d_v], normalised
  float* partial_lse = nullptr;  // [num_slots, rows_per_tile]
  DType partial_dtype = DType::kF32;
  int smem_keys = 0;  // cuda_naive: keys its shared memory has room for
  DevicePlanView plan;
};
static_assert(sizeof(KernelArgs) <= 4096, "kernel parameters");

}  // namespace treemla
