// check_problem and check_output: a valid problem passes, and each way of breaking it gives an error that
// names the argument, the position, the value and what is allowed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "treemla/error.hpp"
#include "treemla/problem.hpp"
#include "treemla/tree.hpp"

namespace treemla {
namespace {

using testing::HasSubstr;
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int kIntMax = std::numeric_limits<int>::max();

// Four requests on pages of 4: a tree of 3 nodes on 10 rows, padding without nodes, a tree of 2 on 5 rows,
// padding without rows. Everything that must not be looked at is garbage.
struct Fixture {
  std::vector<uint16_t> q = std::vector<uint16_t>(6 * 2 * 12), kv = std::vector<uint16_t>(64 * 4 * 12);
  std::vector<uint8_t> packed;
  std::vector<int32_t> q_indptr{0, 3, 3, 5, 6};
  std::vector<int32_t> kv_len{10, 7, 5, 0};
  std::vector<int32_t> page_indptr{0, 4, 5, 7, 8};
  std::vector<int32_t> entries{63, 1, 17, 2147480000, -9, 2, 3, 2147480000};
  std::vector<int64_t> wide_entries;
  std::vector<int32_t> parents{-1, 0, 0, -1, 0, -1};
  std::vector<uint32_t> bits{1, 3, 5, 1, 3, 1};
  VerifyProblem p;
  std::vector<float> out = std::vector<float>(6 * 2 * 8), lse = std::vector<float>(6 * 2);
  VerifyOutput o;

  Fixture() {
    p.shape = {2, 8, 4};
    p.b = 4;
    p.q = {.data = q.data(), .dtype = DType::kBF16, .total_q = 6};
    p.kv = {.data = kv.data(), .dtype = DType::kBF16, .num_pages = 64, .page_size = 4};
    p.pages = {.entries = entries.data(), .num_entries = 8, .indptr = page_indptr.data()};
    p.q_indptr = q_indptr.data();
    p.kv_len = kv_len.data();
    p.mask = {.kind = MaskKind::kTree, .parents = parents.data()};
    p.sm_scale = 0.1;
    o = {.out = out.data(), .lse = lse.data()};
  }
  Fixture(const Fixture&) = delete;

  void use_block_table() {  // 4 x 4, same entries
    entries = {63, 1, 17, -1, -9, -9, -9, -9, 2, 3, 2147480000, -1, 2147480000, -1, -1, -1};
    p.pages = {.entries = entries.data(), .num_entries = 16, .stride = 4};
  }
  void use_wide_entries() {
    wide_entries.assign(entries.begin(), entries.end());
    wide_entries[3] = int64_t{1} << 40;
    p.pages.entries = wide_entries.data();
    p.pages.index_type = IndexType::kI64;
  }
  void use_packed() {  // 128 + 4 + 8 = 140 bytes a row
    p.shape = {2, 128, 4};
    q.resize(6 * 2 * 132);
    p.q.data = q.data();
    packed.resize(64 * 4 * 140);
    p.kv.data = packed.data();
    p.kv.dtype = DType::kF8E4M3Packed;
    out.resize(6 * 2 * 128);
    o.out = out.data();
  }
  void use_q8() {  // 3 blocks of 34 bytes a row
    p.shape = {2, 64, 32};
    q.resize(6 * 2 * 96);
    p.q.data = q.data();
    packed.resize(64 * 4 * 102);
    p.kv.data = packed.data();
    p.kv.dtype = DType::kQ8;
    out.resize(6 * 2 * 64);
    o.out = out.data();
  }
  void use_bits() {
    p.mask.ancestor_bits = bits.data();
    p.mask.words_per_row = 1;
  }
};

struct Bad {
  const char* name;
  std::function<void(Fixture&)> spoil;
  const char* argument;
  std::vector<const char*> says;
  friend void PrintTo(const Bad& bad, std::ostream* os) { *os << bad.name; }
};
std::string bad_name(const testing::TestParamInfo<Bad>& tested) { return tested.param.name; }

template <typename Check>
void expect_error(const Bad& bad, const Check& check) {
  try {
    check();
    FAIL() << "no Error was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(e.argument(), bad.argument);
    EXPECT_THAT(e.what(), testing::Not(HasSubstr("\n")));
    for (const char* part : bad.says) EXPECT_THAT(e.what(), HasSubstr(part));
  }
}

// ---- what is valid

TEST(CheckProblem, ValidOnesPass) {
  for (bool block_table : {false, true}) {
    for (bool wide : {false, true}) {
      for (bool with_bits : {false, true}) {
        for (MaskKind kind : {MaskKind::kNone, MaskKind::kCausal, MaskKind::kTree}) {
          Fixture f;
          if (block_table) f.use_block_table();
          if (wide) f.use_wide_entries();
          if (with_bits) f.use_bits();
          f.p.mask.kind = kind;
          EXPECT_NO_THROW(check_problem(f.p));
          EXPECT_NO_THROW(check_output(f.p, f.o));
        }
      }
    }
  }
}

TEST(CheckProblem, Q8RowsPass) {
  Fixture f;
  f.use_q8();
  EXPECT_NO_THROW(check_problem(f.p));
  EXPECT_NO_THROW(check_output(f.p, f.o));
  f.packed.resize(64 * 4 * 104 + 2);
  f.p.kv.data = f.packed.data() + 2;
  for (int64_t stride : {102, 104}) {
    f.p.kv.row_stride = stride;
    EXPECT_NO_THROW(check_problem(f.p));
  }
  f.p.kv.scale = 0.37;
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, PackedRowsPass) {
  Fixture f;
  f.use_packed();
  EXPECT_NO_THROW(check_problem(f.p));
  EXPECT_NO_THROW(check_output(f.p, f.o));
  f.packed.resize(64 * 4 * 144);
  f.p.kv.data = f.packed.data();
  for (int64_t stride : {140, 144}) {
    f.p.kv.row_stride = stride;
    EXPECT_NO_THROW(check_problem(f.p)) << stride;
  }
}

TEST(CheckProblem, NoRequestsNeedNoPointers) {
  VerifyProblem p;
  p.shape = {1, 1, 0};
  p.sm_scale = 1;
  EXPECT_NO_THROW(check_problem(p));
  EXPECT_NO_THROW(check_output(p, {}));
  const int32_t zero = 0;
  p.q_indptr = &zero;
  p.pages.indptr = &zero;
  EXPECT_NO_THROW(check_problem(p));
  p.memory = Memory::kDevice;
  EXPECT_NO_THROW(check_problem(p));
}

TEST(CheckProblem, InertRequestsReadNothing) {
  Fixture f;
  f.kv_len = {0, 7, 0, 0};
  f.p.kv.data = nullptr;
  f.p.kv.num_pages = 0;
  f.p.pages.entries = nullptr;
  f.p.pages.num_entries = 0;
  f.page_indptr.assign(5, 0);
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, RootOnlyRequestsAndExactPages) {
  Fixture f;
  f.kv_len = {12, 0, 8, 1};  // full last pages; the tree alone, no prefix
  f.entries[7] = 0;
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, BitsWinOverParentsAndMayBeAnyPattern) {
  Fixture f;
  f.use_bits();
  f.parents.assign(6, 2147480000);
  f.bits.assign(6, 0xFFFFFFFF);  // bits past q_len are ignored by kernels
  EXPECT_NO_THROW(check_problem(f.p));
  f.bits.assign(6, 0);
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, MasksThatAreNotUsedAreNotChecked) {
  Fixture f;
  f.parents.assign(6, 99);
  f.p.mask.kind = MaskKind::kCausal;
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, StridesOfOneElementMeanNothing) {
  Fixture f;
  f.p.shape.h_q = 1;
  f.p.q.head_stride = 1;
  f.p.q.token_stride = 12;
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, ContentsOnTheDeviceAreNotRead) {
  Fixture f;
  f.p.memory = Memory::kDevice;
  // Aligned, and mapped nowhere.
  auto* const nowhere = reinterpret_cast<int32_t*>(std::uintptr_t{1} << 60);
  f.p.q.data = f.p.kv.data = f.p.pages.entries = nowhere;
  f.p.q_indptr = f.p.kv_len = f.p.pages.indptr = f.p.mask.parents = nowhere;
  EXPECT_NO_THROW(check_problem(f.p));
  f.p.mask.ancestor_bits = reinterpret_cast<uint32_t*>(nowhere);
  f.p.mask.words_per_row = 1;
  EXPECT_NO_THROW(check_problem(f.p));
  f.p.pages.indptr = nullptr;
  f.p.pages.stride = 2;
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, PoolsPastInt32PassWithTheirPages) {
  Fixture f;
  f.use_wide_entries();
  f.p.kv.num_pages = int64_t{1} << 33;
  f.wide_entries[1] = (int64_t{1} << 33) - 1;
  EXPECT_NO_THROW(check_problem(f.p));
}

TEST(CheckProblem, LimitsThemselvesPass) {
  Fixture f;
  f.p.memory = Memory::kDevice;
  f.p.shape = {1024, 1, 4095};
  EXPECT_NO_THROW(check_problem(f.p));
  f.p.shape = {1, 4096, 0};
  EXPECT_NO_THROW(check_problem(f.p));
  f.p.q.total_q = kIntMax;
  EXPECT_NO_THROW(check_problem(f.p));
}

// ---- what is not

const Bad kShapes[] = {
    {"no_heads", [](Fixture& f) { f.p.shape.h_q = 0; }, "shape.h_q", {"= 0", "[1, 1024]"}},
    {"many_heads", [](Fixture& f) { f.p.shape.h_q = 1025; }, "shape.h_q", {"= 1025"}},
    {"no_latent", [](Fixture& f) { f.p.shape.d_v = 0; }, "shape.d_v", {"= 0", "[1, 4096]"}},
    {"negative_rope", [](Fixture& f) { f.p.shape.d_rope = -1; }, "shape.d_rope", {"= -1", "[0, 4088]"}},
    {"wide_row", [](Fixture& f) { f.p.shape.d_rope = 4089; }, "shape.d_rope", {"= 4089", "4096"}},
    {"width_overflow",
     [](Fixture& f) {
       f.p.shape = {1, 8, kIntMax};
     },
     "shape.d_rope",
     {"2147483647"}},
    {"negative_b", [](Fixture& f) { f.p.b = -1; }, "b", {"b = -1", "[0, 2147483647)"}},
    {"largest_b", [](Fixture& f) { f.p.b = kIntMax; }, "b", {"b = 2147483647"}},
    {"zero_sm_scale", [](Fixture& f) { f.p.sm_scale = 0; }, "sm_scale", {"= 0", "greater than 0"}},
    {"nan_sm_scale", [](Fixture& f) { f.p.sm_scale = std::nan(""); }, "sm_scale", {"nan", "finite"}},
    {"infinite_sm_scale", [](Fixture& f) { f.p.sm_scale = INFINITY; }, "sm_scale", {"inf", "finite"}},
    {"negative_sm_scale", [](Fixture& f) { f.p.sm_scale = -0.5; }, "sm_scale", {"-0.5"}},
    {"bad_memory",
     [](Fixture& f) { f.p.memory = static_cast<Memory>(2); },
     "memory",
     {"= 2", "host, device"}},
    {"fp8_q", [](Fixture& f) { f.p.q.dtype = DType::kF8E4M3; }, "q.dtype", {"e4m3", "fp32, fp16, bf16"}},
    {"packed_q",
     [](Fixture& f) { f.p.q.dtype = DType::kF8E4M3Packed; },
     "q.dtype",
     {"e4m3_packed", "fp32, fp16, bf16"}},
    {"q8_q", [](Fixture& f) { f.p.q.dtype = DType::kQ8; }, "q.dtype", {"q8_0", "fp32, fp16, bf16"}},
    {"bad_q_dtype",
     [](Fixture& f) { f.p.q.dtype = static_cast<DType>(77); },
     "q.dtype",
     {"= 77", "fp32, fp16, bf16"}},
    {"negative_total_q", [](Fixture& f) { f.p.q.total_q = -2; }, "q.total_q", {"= -2", "[0, 2147483647]"}},
    {"large_total_q", [](Fixture& f) { f.p.q.total_q = int64_t{1} << 31; }, "q.total_q", {"= 2147483648"}},
    {"queries_of_nobody", [](Fixture& f) { f.p.b = 0; }, "q.total_q", {"= 6", "b = 0"}},
    {"small_head_stride", [](Fixture& f) { f.p.q.head_stride = 11; }, "q.head_stride", {"= 11", "12"}},
    {"negative_head_stride", [](Fixture& f) { f.p.q.head_stride = -12; }, "q.head_stride", {"= -12"}},
    {"small_token_stride", [](Fixture& f) { f.p.q.token_stride = 1; }, "q.token_stride", {"= 1", "12"}},
    {"huge_token_stride", [](Fixture& f) { f.p.q.token_stride = kInt64Max; }, "q", {"2 bytes", "64-bit"}},
    {"huge_head_stride", [](Fixture& f) { f.p.q.head_stride = kInt64Max; }, "q", {"2^63 or more"}},
    {"extent_in_bytes_overflows",
     [](Fixture& f) { f.p.q.token_stride = kInt64Max / 8; },
     "q",
     {"elements of 2 bytes"}},
    {"no_q", [](Fixture& f) { f.p.q.data = nullptr; }, "q.data", {"null"}},
    {"q_off_by_a_byte",
     [](Fixture& f) { f.p.q.data = reinterpret_cast<char*>(f.q.data()) + 1; },
     "q.data",
     {"aligned", "multiple of 2"}},
};

const Bad kPools[] = {
    {"bad_kv_dtype", [](Fixture& f) { f.p.kv.dtype = static_cast<DType>(-1); }, "kv.dtype", {"= -1", "e4m3"}},
    {"kv_dtype_past_the_last",
     [](Fixture& f) { f.p.kv.dtype = static_cast<DType>(6); },
     "kv.dtype",
     {"= 6", "e4m3_packed, q8_0"}},
    {"q8_narrow_latent",
     [](Fixture& f) { f.p.kv.dtype = DType::kQ8; },
     "shape.d_v",
     {"= 8", "multiple of 32", "q8_0"}},
    {"q8_narrow_rope",
     [](Fixture& f) { f.use_q8(), f.p.shape.d_rope = 48; },
     "shape.d_rope",
     {"= 48", "multiple of 32", "q8_0"}},
    {"q8_small_row_stride",
     [](Fixture& f) { f.use_q8(), f.p.kv.row_stride = 100; },
     "kv.row_stride",
     {"= 100", "102 (the bytes of a q8_0 row)"}},
    {"q8_odd_row_stride",
     [](Fixture& f) { f.use_q8(), f.p.kv.row_stride = 103; },
     "kv.row_stride",
     {"= 103", "multiple of 2", "q8_0"}},
    {"q8_kv_off_by_a_byte",
     [](Fixture& f) { f.use_q8(), f.p.kv.data = f.packed.data() + 1; },
     "kv.data",
     {"aligned", "multiple of 2"}},
    {"q8_interleaved",
     [](Fixture& f) { f.use_q8(), f.p.kv.layout = KvLayout::kInterleaved; },
     "kv.layout",
     {"interleaved", "bf16", "q8_0"}},
    {"q8_kv_scale", [](Fixture& f) { f.use_q8(), f.p.kv.scale = -1; }, "kv.scale", {"= -1"}},
    {"packed_narrow_latent",
     [](Fixture& f) { f.p.kv.dtype = DType::kF8E4M3Packed; },
     "shape.d_v",
     {"= 8", "multiple of 128", "e4m3_packed"}},
    {"packed_odd_rope",
     [](Fixture& f) { f.use_packed(), f.p.shape.d_rope = 3; },
     "shape.d_rope",
     {"= 3", "even", "e4m3_packed"}},
    {"packed_small_row_stride",
     [](Fixture& f) { f.use_packed(), f.p.kv.row_stride = 136; },
     "kv.row_stride",
     {"= 136", "140 (the bytes of a packed row)"}},
    {"packed_odd_row_stride",
     [](Fixture& f) { f.use_packed(), f.p.kv.row_stride = 142; },
     "kv.row_stride",
     {"= 142", "multiple of 4", "e4m3_packed"}},
    {"packed_kv_off_by_two_bytes",
     [](Fixture& f) { f.use_packed(), f.p.kv.data = f.packed.data() + 2; },
     "kv.data",
     {"aligned", "multiple of 4"}},
    {"packed_pool_overflows",
     [](Fixture& f) { f.use_packed(), f.p.kv.num_pages = kInt64Max / 500; },
     "kv",
     {"1 bytes", "64-bit"}},
    {"zero_kv_scale", [](Fixture& f) { f.p.kv.scale = 0; }, "kv.scale", {"= 0", "finite"}},
    {"nan_kv_scale", [](Fixture& f) { f.p.kv.scale = std::nan(""); }, "kv.scale", {"nan"}},
    {"negative_pages", [](Fixture& f) { f.p.kv.num_pages = -1; }, "kv.num_pages", {"= -1"}},
    {"zero_page_size", [](Fixture& f) { f.p.kv.page_size = 0; }, "kv.page_size", {"= 0", "at least 1"}},
    {"small_row_stride", [](Fixture& f) { f.p.kv.row_stride = 11; }, "kv.row_stride", {"= 11", "12"}},
    {"negative_row_stride", [](Fixture& f) { f.p.kv.row_stride = -12; }, "kv.row_stride", {"= -12"}},
    {"pool_overflows", [](Fixture& f) { f.p.kv.num_pages = kInt64Max / 8; }, "kv", {"2 bytes", "64-bit"}},
    {"stride_overflows", [](Fixture& f) { f.p.kv.row_stride = kInt64Max / 100; }, "kv", {"2^63 or more"}},
    {"no_kv", [](Fixture& f) { f.p.kv.data = nullptr; }, "kv.data", {"null"}},
    {"kv_off_by_a_byte",
     [](Fixture& f) { f.p.kv.data = reinterpret_cast<char*>(f.kv.data()) + 1; },
     "kv.data",
     {"aligned"}},
    {"no_kv_on_the_device",
     [](Fixture& f) {
       f.p.memory = Memory::kDevice;
       f.p.kv.data = nullptr;
     },
     "kv.data",
     {"null"}},
};

const Bad kLengths[] = {
    {"no_q_indptr", [](Fixture& f) { f.p.q_indptr = nullptr; }, "q_indptr", {"null"}},
    {"no_kv_len", [](Fixture& f) { f.p.kv_len = nullptr; }, "kv_len", {"null"}},
    {"odd_q_indptr",
     [](Fixture& f) {
       f.p.q_indptr = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(f.q_indptr.data()) + 2);
     },
     "q_indptr",
     {"aligned", "4 bytes"}},
    {"first_not_zero", [](Fixture& f) { f.q_indptr[0] = 1; }, "q_indptr", {"q_indptr[0] = 1", "must be 0"}},
    {"falling", [](Fixture& f) { f.q_indptr[2] = 2; }, "q_indptr", {"q_indptr[2] = 2", "[3, 6]"}},
    {"far_past_the_end",
     [](Fixture& f) { f.q_indptr[1] = kIntMax; },
     "q_indptr",
     {"q_indptr[1] = 2147483647", "[0, 6]"}},
    {"lowest", [](Fixture& f) { f.q_indptr[3] = -kIntMax - 1; }, "q_indptr", {"q_indptr[3] = -2147483648"}},
    {"last_not_total", [](Fixture& f) { f.q_indptr[4] = 5; }, "q_indptr", {"q_indptr[4] = 5", "total_q = 6"}},
    {"negative_kv_len", [](Fixture& f) { f.kv_len[2] = -5; }, "kv_len", {"kv_len[2] = -5", "negative"}},
    {"negative_kv_len_of_padding", [](Fixture& f) { f.kv_len[1] = -1; }, "kv_len", {"kv_len[1] = -1"}},
    {"kv_len_below_q_len",
     [](Fixture& f) { f.kv_len[0] = 2; },
     "kv_len",
     {"kv_len[0] = 2", "at least 3", "request 0"}},
};

const Bad kPages[] = {
    {"bad_index_type",
     [](Fixture& f) { f.p.pages.index_type = static_cast<IndexType>(2); },
     "pages.index_type",
     {"= 2", "int32, int64"}},
    {"negative_entries", [](Fixture& f) { f.p.pages.num_entries = -1; }, "pages.num_entries", {"= -1"}},
    {"entries_overflow",
     [](Fixture& f) { f.p.pages.num_entries = kInt64Max / 4; },
     "pages.entries",
     {"8 bytes"}},
    {"no_entries", [](Fixture& f) { f.p.pages.entries = nullptr; }, "pages.entries", {"null"}},
    {"odd_entries",
     [](Fixture& f) {
       f.use_wide_entries();
       f.p.pages.entries = reinterpret_cast<char*>(f.wide_entries.data()) + 4;
     },
     "pages.entries",
     {"aligned", "8 bytes"}},
    {"indptr_below_zero",
     [](Fixture& f) { f.page_indptr[0] = -1; },
     "pages.indptr",
     {"pages.indptr[0] = -1"}},
    {"indptr_falls",
     [](Fixture& f) { f.page_indptr[2] = 3; },
     "pages.indptr",
     {"pages.indptr[2] = 3", "[4, 8]"}},
    {"indptr_past_the_end",
     [](Fixture& f) { f.page_indptr[4] = 9; },
     "pages.indptr",
     {"pages.indptr[4] = 9", "8]"}},
    {"too_few_entries",
     [](Fixture& f) {
       f.page_indptr = {0, 2, 5, 7, 8};
     },
     "pages.indptr",
     {"pages.indptr[1] = 2", "2 entries", "request 0", "kv_len 10", "3 pages of 4"}},
    {"entry_too_large",
     [](Fixture& f) { f.entries[6] = 64; },
     "pages.entries",
     {"page entry 1 of request 2 (entries[6]) = 64 is outside [0, 64): the pool has 64 pages"}},
    {"entry_negative",
     [](Fixture& f) { f.entries[0] = -1; },
     "pages.entries",
     {"page entry 0 of request 0 (entries[0]) = -1"}},
    {"wide_entry_that_wraps",
     [](Fixture& f) {
       f.use_wide_entries();
       f.wide_entries[2] = (int64_t{1} << 32) + 1;  // 1 in 32 bits
     },
     "pages.entries",
     {"page entry 2 of request 0 (entries[2]) = 4294967297"}},
    {"read_garbage",
     [](Fixture& f) { f.kv_len[0] = 13; },  // one more token reads the garbage entry
     "pages.entries",
     {"page entry 3 of request 0 (entries[3]) = 2147480000"}},
    {"stride_too_small",
     [](Fixture& f) {
       f.use_block_table();
       f.p.pages.stride = 2;
     },
     "pages.stride",
     {"= 2", "at least 3", "kv_len[0] = 10"}},
    {"stride_negative",
     [](Fixture& f) {
       f.use_block_table();
       f.p.pages.stride = -1;
     },
     "pages.stride",
     {"= -1"}},
    {"stride_past_the_table",
     [](Fixture& f) {
       f.use_block_table();
       f.p.pages.stride = 5;
     },
     "pages.stride",
     {"= 5", "4 requests", "16 entries"}},
    {"stride_overflows",
     [](Fixture& f) {
       f.use_block_table();
       f.p.pages.stride = (kInt64Max / 4) + 5;
     },
     "pages.stride",
     {"16 entries"}},
    {"entry_of_a_block_table",
     [](Fixture& f) {
       f.use_block_table();
       f.entries[9] = 77;
     },
     "pages.entries",
     {"page entry 1 of request 2 (entries[9]) = 77"}},
};

const Bad kMasks[] = {
    {"bad_kind", [](Fixture& f) { f.p.mask.kind = static_cast<MaskKind>(3); }, "mask.kind", {"= 3", "tree"}},
    {"tree_without_mask",
     [](Fixture& f) { f.p.mask.parents = nullptr; },
     "mask",
     {"parents", "ancestor_bits", "null"}},
    {"tree_without_mask_on_the_device",
     [](Fixture& f) {
       f.p.memory = Memory::kDevice;
       f.p.mask.parents = nullptr;
     },
     "mask",
     {"null"}},
    {"odd_parents",
     [](Fixture& f) {
       f.p.mask.parents = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(f.parents.data()) + 1);
     },
     "mask.parents",
     {"aligned"}},
    {"no_root",
     [](Fixture& f) { f.parents[0] = 0; },
     "mask.parents",
     {"parent of node 0 of request 0 (parents[0]) = 0", "must be -1"}},
    {"two_roots",
     [](Fixture& f) { f.parents[4] = -1; },
     "mask.parents",
     {"parent of node 1 of request 2 (parents[4]) = -1", "[0, 1)", "one root"}},
    {"own_parent",
     [](Fixture& f) { f.parents[2] = 2; },
     "mask.parents",
     {"parent of node 2 of request 0 (parents[2]) = 2", "[0, 2)"}},
    {"parent_later", [](Fixture& f) { f.parents[1] = 2; }, "mask.parents", {"(parents[1]) = 2"}},
    {"batch_index_instead_of_tree_index",
     [](Fixture& f) { f.parents[4] = 3; },
     "mask.parents",
     {"node 1 of request 2 (parents[4]) = 3"}},
    {"garbage_parent", [](Fixture& f) { f.parents[2] = 2147480000; }, "mask.parents", {"2147480000"}},
    {"no_words",
     [](Fixture& f) {
       f.use_bits();
       f.p.mask.words_per_row = 0;
     },
     "mask.words_per_row",
     {"= 0", "at least 1"}},
    {"negative_words_on_the_device",
     [](Fixture& f) {
       f.use_bits();
       f.p.memory = Memory::kDevice;
       f.p.mask.words_per_row = -1;
     },
     "mask.words_per_row",
     {"= -1"}},
    {"odd_bits",
     [](Fixture& f) {
       f.use_bits();
       f.p.mask.ancestor_bits = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(f.bits.data()) + 2);
     },
     "mask.ancestor_bits",
     {"aligned"}},
};

class CheckShapes : public testing::TestWithParam<Bad> {};
TEST_P(CheckShapes, Throws) {
  Fixture f;
  GetParam().spoil(f);
  expect_error(GetParam(), [&] { check_problem(f.p); });
}
INSTANTIATE_TEST_SUITE_P(Shape, CheckShapes, testing::ValuesIn(kShapes), bad_name);
INSTANTIATE_TEST_SUITE_P(Pool, CheckShapes, testing::ValuesIn(kPools), bad_name);
INSTANTIATE_TEST_SUITE_P(Lengths, CheckShapes, testing::ValuesIn(kLengths), bad_name);
INSTANTIATE_TEST_SUITE_P(Pages, CheckShapes, testing::ValuesIn(kPages), bad_name);
INSTANTIATE_TEST_SUITE_P(Mask, CheckShapes, testing::ValuesIn(kMasks), bad_name);

TEST(CheckProblem, BitRowsMustHoldTheLargestTree) {
  std::vector<int32_t> q_indptr{0, 1, 34}, kv_len{1, 33}, entries(2, 0), parents(34, 0);
  std::vector<float> q(34), kv(64);
  std::vector<uint32_t> bits(34 * 2);
  VerifyProblem p;
  p.shape = {1, 1, 0};
  p.b = 2;
  p.q = {.data = q.data(), .dtype = DType::kF32, .total_q = 34};
  p.kv = {.data = kv.data(), .dtype = DType::kF32, .num_pages = 1, .page_size = 64};
  p.pages = {.entries = entries.data(), .num_entries = 2, .stride = 1};
  p.q_indptr = q_indptr.data();
  p.kv_len = kv_len.data();
  p.mask = {.kind = MaskKind::kTree, .ancestor_bits = bits.data(), .words_per_row = 1};
  p.sm_scale = 1;
  const Bad bad{"", nullptr, "mask.words_per_row", {"= 1", "at least 2", "33"}};
  expect_error(bad, [&] { check_problem(p); });
  p.mask.words_per_row = 2;
  EXPECT_NO_THROW(check_problem(p));
}

const Bad kOutputs[] = {
    {"no_out", [](Fixture& f) { f.o.out = nullptr; }, "out", {"null"}},
    {"odd_out",
     [](Fixture& f) { f.o.out = reinterpret_cast<char*>(f.out.data()) + 2; },
     "out",
     {"multiple of 4"}},
    {"odd_lse",
     [](Fixture& f) { f.o.lse = reinterpret_cast<float*>(reinterpret_cast<char*>(f.lse.data()) + 1); },
     "lse",
     {"aligned"}},
    {"fp8_out",
     [](Fixture& f) { f.o.out_dtype = DType::kF8E4M3; },
     "out_dtype",
     {"e4m3", "fp32, fp16, bf16"}},
    {"bad_out_dtype", [](Fixture& f) { f.o.out_dtype = static_cast<DType>(9); }, "out_dtype", {"= 9"}},
};
class CheckOutputs : public testing::TestWithParam<Bad> {};
TEST_P(CheckOutputs, Throws) {
  Fixture f;
  GetParam().spoil(f);
  expect_error(GetParam(), [&] { check_output(f.p, f.o); });
}
INSTANTIATE_TEST_SUITE_P(Output, CheckOutputs, testing::ValuesIn(kOutputs), bad_name);

TEST(CheckOutput, AlignmentIsThatOfTheDtype) {
  Fixture f;
  f.o.out = reinterpret_cast<char*>(f.out.data()) + 2;
  f.o.out_dtype = DType::kBF16;
  EXPECT_NO_THROW(check_output(f.p, f.o));
  f.o.lse = nullptr;
  EXPECT_NO_THROW(check_output(f.p, f.o));
}

// Kernels number a request's (node, head) rows with 32 bits.
TEST(CheckProblem, RowsOfARequestFitThirtyTwoBits) {
  Fixture f;
  f.p.b = 1;
  f.p.shape.h_q = 1024;
  f.p.q.token_stride = f.p.q.head_stride = 0;
  const int q_len = (1 << 21) + 1;
  const int32_t q_indptr[] = {0, q_len}, kv_len[] = {q_len};
  f.p.q.total_q = q_len;
  f.p.q_indptr = q_indptr;
  f.p.kv_len = kv_len;
  const Bad bad{"", nullptr, "q_indptr", {"request 0", "2097153 x shape.h_q 1024", "2147483647"}};
  expect_error(bad, [&] { check_problem(f.p); });
}

TEST(ParseDtype, NamesAndAliases) {
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kF8E4M3Packed, DType::kQ8})
    EXPECT_EQ(parse_dtype(dtype_name(t)), t);
  EXPECT_EQ(parse_dtype("float32"), DType::kF32);
  EXPECT_EQ(parse_dtype("float16"), DType::kF16);
  EXPECT_EQ(parse_dtype("bfloat16"), DType::kBF16);
  for (const char* name : {"", "FP32", "fp8", "int8", "bf16 "}) {
    const Bad bad{"", nullptr, "dtype", {name, "fp32, fp16, bf16, e4m3, e4m3_packed, q8_0"}};
    expect_error(bad, [&] { parse_dtype(name); });
  }
}

}  // namespace
}  // namespace treemla
