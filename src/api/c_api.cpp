// The C ABI over the C++ API, but for the tree steps: those are in c_api_trees.cpp.

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/c_abi.hpp"
#include "treemla/case_file.hpp"
#include "treemla/error.hpp"
#include "treemla/interleave.hpp"
#include "treemla/problem.hpp"
#include "treemla/tree.hpp"
#include "treemla/treemla.h"
#include "treemla/verify.hpp"
#include "treemla/version.hpp"

using namespace treemla;
using namespace treemla::c_abi;

// The enums of both worlds are cast into each other.
static_assert(static_cast<int>(ErrorCode::kInvalidArgument) == TREEMLA_INVALID_ARGUMENT);
static_assert(static_cast<int>(ErrorCode::kUnsupported) == TREEMLA_UNSUPPORTED);
static_assert(static_cast<int>(ErrorCode::kBadFile) == TREEMLA_BAD_FILE);
static_assert(static_cast<int>(ErrorCode::kIo) == TREEMLA_IO_ERROR);
static_assert(static_cast<int>(ErrorCode::kOutOfMemory) == TREEMLA_OUT_OF_MEMORY);
static_assert(static_cast<int>(ErrorCode::kDevice) == TREEMLA_DEVICE_ERROR);
static_assert(static_cast<int>(ErrorCode::kInternal) == TREEMLA_INTERNAL_ERROR);
static_assert(static_cast<int>(DType::kF32) == TREEMLA_F32 && static_cast<int>(DType::kF16) == TREEMLA_F16);
static_assert(static_cast<int>(DType::kBF16) == TREEMLA_BF16);
static_assert(static_cast<int>(DType::kF8E4M3) == TREEMLA_F8E4M3);
static_assert(static_cast<int>(DType::kF8E4M3Packed) == TREEMLA_F8E4M3_PACKED);
static_assert(static_cast<int>(DType::kQ8) == TREEMLA_Q8);
static_assert(static_cast<int>(KvLayout::kRowMajor) == TREEMLA_KV_ROW_MAJOR);
static_assert(static_cast<int>(KvLayout::kInterleaved) == TREEMLA_KV_INTERLEAVED);
static_assert(static_cast<int>(IndexType::kI32) == TREEMLA_I32);
static_assert(static_cast<int>(IndexType::kI64) == TREEMLA_I64);
static_assert(static_cast<int>(Memory::kHost) == TREEMLA_MEMORY_HOST);
static_assert(static_cast<int>(Memory::kDevice) == TREEMLA_MEMORY_DEVICE);
static_assert(static_cast<int>(MaskKind::kNone) == TREEMLA_MASK_NONE);
static_assert(static_cast<int>(MaskKind::kCausal) == TREEMLA_MASK_CAUSAL);
static_assert(static_cast<int>(MaskKind::kTree) == TREEMLA_MASK_TREE);

struct treemla_plan {
  Verifier verifier;
  std::string description;
};

struct treemla_case {
  Case value;
};

namespace {

// ---- errors ----

// Fixed buffers, so that reporting that memory ran out needs none.
struct LastError {
  char message[4096] = "";
  char argument[256] = "";
};
thread_local LastError last_error;

template <std::size_t N>
void store(char (&to)[N], std::string_view text) noexcept {
  const std::size_t n = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), n);
  to[n] = '\0';
}

}  // namespace

treemla_status treemla::c_abi::record(ErrorCode code, std::string_view argument,
                                      std::string_view message) noexcept {
  store(last_error.message, message);
  store(last_error.argument, argument);
  return static_cast<treemla_status>(code);
}

namespace {

VerifyProblem to_cpp(const treemla_problem* problem) {
  const treemla_problem c = read_struct("problem", problem);
  VerifyProblem p;
  p.shape = {c.h_q, c.d_v, c.d_rope};
  p.b = c.b;
  p.q = {c.q, static_cast<DType>(c.q_dtype), c.total_q, c.q_token_stride, c.q_head_stride};
  p.kv = {c.kv,       static_cast<DType>(c.kv_dtype),    c.num_pages, c.page_size, c.kv_row_stride,
          c.kv_scale, static_cast<KvLayout>(c.kv_layout)};
  p.pages = {c.page_entries, static_cast<IndexType>(c.page_index_type), c.num_page_entries, c.page_indptr,
             c.page_stride};
  p.q_indptr = c.q_indptr;
  p.kv_len = c.kv_len;
  p.mask = {static_cast<MaskKind>(c.mask), c.parents, c.ancestor_bits, c.words_per_row};
  p.sm_scale = c.sm_scale;
  p.memory = static_cast<Memory>(c.memory);
  p.max_q_len = c.max_q_len;
  p.max_kv_len = c.max_kv_len;
  return p;
}

treemla_problem to_c(const VerifyProblem& p) {
  treemla_problem c = {};
  c.h_q = p.shape.h_q;
  c.d_v = p.shape.d_v;
  c.d_rope = p.shape.d_rope;
  c.b = p.b;
  c.q = p.q.data;
  c.total_q = p.q.total_q;
  c.q_token_stride = p.q.token_stride;
  c.q_head_stride = p.q.head_stride;
  c.q_dtype = static_cast<int32_t>(p.q.dtype);
  c.kv_dtype = static_cast<int32_t>(p.kv.dtype);
  c.kv = p.kv.data;
  c.num_pages = p.kv.num_pages;
  c.kv_row_stride = p.kv.row_stride;
  c.kv_scale = p.kv.scale;
  c.kv_layout = static_cast<int32_t>(p.kv.layout);
  c.page_size = p.kv.page_size;
  c.page_index_type = static_cast<int32_t>(p.pages.index_type);
  c.page_entries = p.pages.entries;
  c.num_page_entries = p.pages.num_entries;
  c.page_indptr = p.pages.indptr;
  c.page_stride = p.pages.stride;
  c.q_indptr = p.q_indptr;
  c.kv_len = p.kv_len;
  c.parents = p.mask.parents;
  c.ancestor_bits = p.mask.ancestor_bits;
  c.words_per_row = p.mask.words_per_row;
  c.mask = static_cast<int32_t>(p.mask.kind);
  c.sm_scale = p.sm_scale;
  c.memory = static_cast<int32_t>(p.memory);
  c.max_q_len = p.max_q_len;
  c.max_kv_len = p.max_kv_len;
  return c;
}

VerifyOutput to_cpp(const treemla_output* output) {
  const treemla_output c = read_struct("output", output);
  check_reserved("output", c.reserved);
  return {c.out, static_cast<DType>(c.out_dtype), c.lse};
}

RunOptions to_cpp(const treemla_options* options) {
  RunOptions o;
  if (!options) return o;
  const treemla_options c = read_struct("options", options);
  check_reserved("options", c.reserved);
  if (c.backend) o.backend = c.backend;
  o.num_threads = c.num_threads;
  o.batch_invariant = c.batch_invariant != 0;
  o.split_keys = c.split_keys;
  o.stream = c.stream;
  return o;
}

// Made once: the strings that treemla_backend_at hands out live here.
const std::vector<BackendInfo>& backend_list() {
  static const std::vector<BackendInfo> list = list_backends();
  return list;
}

// ---- arrays of the tree functions ----

template <typename T>
std::span<const T> input(const char* argument, const T* data, int64_t count) {
  if (count > 0) check_not_null(argument, data);
  return {data, data ? static_cast<std::size_t>(count) : 0};
}

std::span<const int32_t> input_tree(const int32_t* parents, int32_t q_len) {
  if (q_len < 0) fail("q_len", "q_len = {} must not be negative", q_len);
  return input("parents", parents, q_len);
}

// Elements of a [q_len, columns] array. Both factors stay below 2^32, so the product fits in 64 bits.
int64_t matrix_size(int32_t q_len, int64_t columns) {
  if (q_len < 0) fail("q_len", "q_len = {} must not be negative", q_len);
  return q_len * columns;
}

// Words 0 means "pick" only in C++: here the caller's buffer has the width it has.
int checked_words(int32_t q_len, int32_t words) {
  if (words < words_per_row(q_len)) {
    fail("words", "words = {} must be at least {}: q_len is {}", words, words_per_row(q_len), q_len);
  }
  return words;
}

int64_t bits_size(int32_t q_len, int32_t words) { return matrix_size(q_len, checked_words(q_len, words)); }

int64_t full_mask_size(int32_t q_len, int64_t prefix_len) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  if (prefix_len < 0 || prefix_len > kLimit) {
    fail("prefix_len", "prefix_len = {} is outside [0, {}]", prefix_len, kLimit);
  }
  return matrix_size(q_len, prefix_len + q_len);
}

template <typename T>
void copy_out(const char* argument, const std::vector<T>& from, T* to) {
  if (from.empty()) return;
  check_not_null(argument, to);
  std::copy(from.begin(), from.end(), to);
}

}  // namespace

// ---- status and errors ----

const char* treemla_version(void) noexcept { return version(); }

const char* treemla_status_name(treemla_status status) noexcept {
  switch (status) {
    case TREEMLA_OK:
      return "ok";
    case TREEMLA_INVALID_ARGUMENT:
      return "invalid argument";
    case TREEMLA_UNSUPPORTED:
      return "unsupported";
    case TREEMLA_BAD_FILE:
      return "bad file";
    case TREEMLA_IO_ERROR:
      return "input/output error";
    case TREEMLA_OUT_OF_MEMORY:
      return "out of memory";
    case TREEMLA_DEVICE_ERROR:
      return "device error";
    case TREEMLA_INTERNAL_ERROR:
      return "internal error";
  }
  return "unknown status";
}

const char* treemla_last_error(void) noexcept { return last_error.message; }
const char* treemla_last_error_argument(void) noexcept { return last_error.argument; }

// ---- structs ----

void treemla_problem_init(treemla_problem* problem, size_t size) noexcept {
  init_struct(problem, size, to_c(VerifyProblem{}));
}

void treemla_output_init(treemla_output* output, size_t size) noexcept {
  treemla_output c = {};
  c.out_dtype = TREEMLA_F32;
  init_struct(output, size, c);
}

void treemla_options_init(treemla_options* options, size_t size) noexcept {
  init_struct(options, size, treemla_options{});
}

// ---- running ----

treemla_status treemla_check(const treemla_problem* problem, const treemla_output* output) noexcept {
  return guarded([&] {
    const VerifyProblem p = to_cpp(problem);
    check_problem(p);
    if (output) check_output(p, to_cpp(output));
  });
}

treemla_status treemla_check_device_problem(const treemla_problem* problem, void* stream) noexcept {
  return guarded([&] { check_device_problem(to_cpp(problem), stream); });
}

treemla_status treemla_verify(const treemla_problem* problem, const treemla_output* output,
                              const treemla_options* options) noexcept {
  return guarded([&] { verify(to_cpp(problem), to_cpp(output), to_cpp(options)); });
}

void treemla_interleave_init(treemla_interleave* interleave, size_t size) noexcept {
  init_struct(interleave, size, treemla_interleave{});
}

treemla_status treemla_interleave_rows(const treemla_interleave* interleave) noexcept {
  return guarded([&] {
    const treemla_interleave c = read_struct("interleave", interleave);
    interleave_rows({{1, c.d_v, c.d_rope},
                     c.rows,
                     c.num_rows,
                     c.row_stride,
                     c.pool,
                     c.pool_rows,
                     c.pool_row_stride,
                     c.slots});
  });
}

treemla_status treemla_plan_create(const treemla_problem* problem, const treemla_options* options,
                                   treemla_plan** plan) noexcept {
  if (plan) *plan = nullptr;
  return guarded([&] {
    check_not_null("plan", plan);
    const VerifyProblem p = to_cpp(problem);
    auto made = std::make_unique<treemla_plan>(treemla_plan{Verifier(to_cpp(options)), ""});
    made->verifier.plan(p);
    made->description = made->verifier.describe();
    *plan = made.release();
  });
}

treemla_status treemla_plan_run(treemla_plan* plan, const treemla_problem* problem,
                                const treemla_output* output) noexcept {
  return guarded([&] {
    check_not_null("plan", plan);
    plan->verifier.run(to_cpp(problem), to_cpp(output));
  });
}

treemla_status treemla_plan_update(treemla_plan* plan, const treemla_problem* problem) noexcept {
  return guarded([&] {
    check_not_null("plan", plan);
    const VerifyProblem p = to_cpp(problem);
    plan->verifier.update(p);
    // On a device the work is cut there, and the description stays as it was.
    if (p.memory == Memory::kHost) plan->description = plan->verifier.describe();
  });
}

treemla_status treemla_plan_check_device(const treemla_plan* plan) noexcept {
  return guarded([&] {
    check_not_null("plan", plan);
    plan->verifier.check_device();
  });
}

void treemla_plan_destroy(treemla_plan* plan) noexcept { delete plan; }

const char* treemla_plan_backend(const treemla_plan* plan) noexcept {
  return plan ? plan->verifier.backend().c_str() : "";
}

const char* treemla_plan_describe(const treemla_plan* plan) noexcept {
  return plan ? plan->description.c_str() : "";
}

size_t treemla_plan_workspace_bytes(const treemla_plan* plan) noexcept {
  size_t bytes = 0;
  if (plan) guarded([&] { bytes = plan->verifier.workspace_bytes(); });
  return bytes;
}

int32_t treemla_backend_count(void) noexcept {
  int32_t count = 0;
  guarded([&] { count = static_cast<int32_t>(backend_list().size()); });
  return count;
}

treemla_status treemla_backend_at(int32_t index, treemla_backend_info* info) noexcept {
  return guarded([&] {
    check_size("info", info);
    const auto& list = backend_list();
    if (index < 0 || static_cast<std::size_t>(index) >= list.size()) {
      fail("index", "index = {} is outside [0, {}): that many backends are built in", index, list.size());
    }
    const BackendInfo& b = list[static_cast<std::size_t>(index)];
    treemla_backend_info c = {};
    c.name = b.name.c_str();
    c.reason = b.reason.c_str();
    c.memory = static_cast<int32_t>(b.memory);
    c.available = b.available;
    write_struct(info, info->size, c);
  });
}

treemla_status treemla_backend_supports(const char* backend, const treemla_problem* problem) noexcept {
  return guarded([&] {
    check_not_null("backend", backend);
    const VerifyProblem p = to_cpp(problem);
    check_problem(p);
    const std::string reason = why_unsupported(backend, p);
    if (!reason.empty()) {
      throw Error(ErrorCode::kUnsupported, "backend", fmt::format("{} can't run this: {}", backend, reason));
    }
  });
}

// ---- draft trees ----

int32_t treemla_words_per_row(int32_t q_len) noexcept { return q_len > 0 ? words_per_row(q_len) : 0; }

treemla_status treemla_check_parents(const int32_t* parents, int32_t q_len) noexcept {
  return guarded([&] { check_parents(input_tree(parents, q_len)); });
}

treemla_status treemla_tree_depths(const int32_t* parents, int32_t q_len, int32_t* depths) noexcept {
  return guarded([&] { copy_out("depths", tree_depths(input_tree(parents, q_len)), depths); });
}

treemla_status treemla_tree_positions(const int32_t* parents, int32_t q_len, int64_t prefix_len,
                                      int32_t* positions) noexcept {
  return guarded(
      [&] { copy_out("positions", tree_positions(input_tree(parents, q_len), prefix_len), positions); });
}

treemla_status treemla_bits_from_parents(const int32_t* parents, int32_t q_len, int32_t words,
                                         uint32_t* bits) noexcept {
  return guarded([&] {
    const auto tree = input_tree(parents, q_len);
    copy_out("bits", bits_from_parents(tree, checked_words(q_len, words)), bits);
  });
}

treemla_status treemla_dense_from_parents(const int32_t* parents, int32_t q_len, uint8_t* dense) noexcept {
  return guarded([&] { copy_out("dense", dense_from_parents(input_tree(parents, q_len)), dense); });
}

treemla_status treemla_full_mask_from_parents(const int32_t* parents, int32_t q_len, int64_t prefix_len,
                                              uint8_t* full_mask) noexcept {
  return guarded([&] {
    copy_out("full_mask", full_mask_from_parents(input_tree(parents, q_len), prefix_len), full_mask);
  });
}

treemla_status treemla_bits_from_dense(const uint8_t* dense, int32_t q_len, int32_t words,
                                       uint32_t* bits) noexcept {
  return guarded([&] {
    const auto mask = input("dense", dense, matrix_size(q_len, q_len));
    copy_out("bits", bits_from_dense(mask, q_len, checked_words(q_len, words)), bits);
  });
}

treemla_status treemla_dense_from_bits(const uint32_t* bits, int32_t q_len, int32_t words,
                                       uint8_t* dense) noexcept {
  return guarded([&] {
    const auto rows = input("bits", bits, bits_size(q_len, words));
    copy_out("dense", dense_from_bits(rows, q_len, words), dense);
  });
}

treemla_status treemla_bits_from_full_mask(const uint8_t* full_mask, int32_t q_len, int64_t prefix_len,
                                           int32_t words, uint32_t* bits) noexcept {
  return guarded([&] {
    const auto mask = input("full_mask", full_mask, full_mask_size(q_len, prefix_len));
    copy_out("bits", bits_from_full_mask(mask, q_len, prefix_len, checked_words(q_len, words)), bits);
  });
}

treemla_status treemla_parents_from_bits(const uint32_t* bits, int32_t q_len, int32_t words,
                                         int32_t* parents) noexcept {
  return guarded([&] {
    const auto rows = input("bits", bits, bits_size(q_len, words));
    copy_out("parents", parents_from_bits(rows, q_len, words), parents);
  });
}

treemla_status treemla_parents_from_dense(const uint8_t* dense, int32_t q_len, int32_t* parents) noexcept {
  return guarded([&] {
    const auto mask = input("dense", dense, matrix_size(q_len, q_len));
    copy_out("parents", parents_from_dense(mask, q_len), parents);
  });
}

treemla_status treemla_parents_from_full_mask(const uint8_t* full_mask, int32_t q_len, int64_t prefix_len,
                                              int32_t* parents) noexcept {
  return guarded([&] {
    const auto mask = input("full_mask", full_mask, full_mask_size(q_len, prefix_len));
    copy_out("parents", parents_from_full_mask(mask, q_len, prefix_len), parents);
  });
}

treemla_status treemla_links_from_parents(const int32_t* parents, int32_t q_len, int32_t* next_token,
                                          int32_t* next_sibling) noexcept {
  return guarded([&] {
    const RetrieveLinks links = links_from_parents(input_tree(parents, q_len));
    if (q_len > 0) check_not_null("next_sibling", next_sibling);
    copy_out("next_token", links.next_token, next_token);
    copy_out("next_sibling", links.next_sibling, next_sibling);
  });
}

treemla_status treemla_parents_from_links(const int32_t* next_token, const int32_t* next_sibling,
                                          int32_t q_len, int32_t* parents) noexcept {
  return guarded([&] {
    const int64_t size = matrix_size(q_len, 1);
    copy_out(
        "parents",
        parents_from_links(input("next_token", next_token, size), input("next_sibling", next_sibling, size)),
        parents);
  });
}

treemla_status treemla_batch_bits_from_parents(const int32_t* parents, const int32_t* q_indptr, int32_t b,
                                               int32_t words, uint32_t* bits) noexcept {
  return guarded([&] {
    if (b < 0) fail("b", "b = {} must not be negative", b);
    const auto indptr = input("q_indptr", q_indptr, int64_t{b} + 1);
    if (indptr.back() < 0) fail("q_indptr", "q_indptr[{}] = {} must not be negative", b, indptr.back());
    const BatchBits batch = batch_bits_from_parents(input("parents", parents, indptr.back()), indptr);
    if (words < batch.words) {
      fail("words", "words = {} must be at least {}, for the largest q_len", words, batch.words);
    }
    if (batch.bits.empty()) return;
    check_not_null("bits", bits);
    for (int64_t i = 0; i < indptr.back(); ++i) {  // rows of the caller may be wider
      uint32_t* row = bits + i * words;
      const auto from = batch.bits.begin() + i * batch.words;
      std::fill(std::copy(from, from + batch.words, row), row + words, 0u);
    }
  });
}

// ---- case files ----

treemla_status treemla_case_read(const char* path, treemla_case** c) noexcept {
  if (c) *c = nullptr;
  return guarded([&] {
    check_not_null("c", c);
    check_not_null("path", path);
    *c = new treemla_case{read_case(path)};
  });
}

treemla_status treemla_case_parse(const void* data, size_t bytes, treemla_case** c) noexcept {
  if (c) *c = nullptr;
  return guarded([&] {
    check_not_null("c", c);
    if (bytes > 0) check_not_null("data", data);
    *c = new treemla_case{parse_case(data, bytes)};
  });
}

treemla_status treemla_case_problem(const treemla_case* c, treemla_problem* problem) noexcept {
  return guarded([&] {
    check_not_null("c", c);
    check_size("problem", problem);
    write_struct(problem, problem->size, to_c(c->value.problem()));
  });
}

const float* treemla_case_expected_out(const treemla_case* c) noexcept {
  const float* data = nullptr;
  if (c) guarded([&] { data = c->value.expected_out(); });
  return data;
}

const float* treemla_case_expected_lse(const treemla_case* c) noexcept {
  const float* data = nullptr;
  if (c) guarded([&] { data = c->value.expected_lse(); });
  return data;
}

void treemla_case_free(treemla_case* c) noexcept { delete c; }
