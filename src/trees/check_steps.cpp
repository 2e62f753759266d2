// What the host can check of the arguments of build, accept, compact and import, wherever their arrays live; q_indptr, the one array that
// says how far the others reach, also by contents where it is on the host. Other contents are checked where they are used.

#include <bit>
#include <cstdint>
#include <limits>

#include "core/fail.hpp"
#include "treemla/tree.hpp"
#include "trees/steps.hpp"

namespace treemla {
namespace {

constexpr int kMaxRequests = 1 << 24;  // what a fault word can name
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

void check_range(const char* argument, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) fail(argument, "{} = {} is outside [{}, {}]", argument, value, low, high);
}

template <typename E>
void check_enum(const char* argument, E value, E last) {
  check_range(argument, static_cast<int>(value), 0, static_cast<int>(last));
}

// `needed`: there are elements to read or write.
template <typename T>
void check_pointer(const char* argument, const T* pointer, bool needed) {
  if (!pointer && needed) fail(argument, "{} is null", argument);
  if (reinterpret_cast<std::uintptr_t>(pointer) % alignof(T) != 0)
    fail(argument, "{} = {} must be aligned to {} bytes", argument, static_cast<const void*>(pointer),
         alignof(T));
}

// Rows of `width` elements `stride` apart: all must lie within 64-bit byte offsets.
void check_stride(const char* argument, int64_t stride, int64_t rows, int64_t width, int64_t element_bytes) {
  if (stride != 0 && stride < width)
    fail(argument, "{} = {} must be 0 or at least {}", argument, stride, width);
  if (saturating_mul(saturating_mul(rows, stride ? stride : width), element_bytes) ==
      std::numeric_limits<int64_t>::max())
    fail(argument, "{} = {} for {} rows passes 64-bit offsets", argument, stride, rows);
}

void check_batch(int b, Memory memory) {
  check_range("b", b, 0, kMaxRequests - 1);
  check_enum("memory", memory, Memory::kDevice);
}

void check_score_dtype(const char* argument, DType dtype) {
  if (dtype != DType::kF32 && dtype != DType::kBF16)
    fail(argument, "{} = {} must be fp32 or bf16", argument, dtype_name(dtype));
}

void check_scores(const ScoreView& s, int64_t rows) {
  check_score_dtype("scores.dtype", s.dtype);
  check_range("scores.vocab", s.vocab, 1, kMaxVocab);
  const auto bytes = static_cast<int64_t>(dtype_bytes(s.dtype));
  check_stride("scores.row_stride", s.row_stride, rows, s.vocab, bytes);
  if (!s.data && rows > 0) fail("scores.data", "scores.data is null");
  if (reinterpret_cast<std::uintptr_t>(s.data) % static_cast<std::uintptr_t>(bytes) != 0)
    fail("scores.data", "scores.data = {} must be aligned to {} bytes", s.data, bytes);
}

void check_q_indptr(const int32_t* q_indptr, int b, int64_t total_q, Memory memory) {
  check_range("total_q", total_q, 0, kInt32Max);
  check_pointer("q_indptr", q_indptr, true);
  if (memory != Memory::kHost) return;
  for (int r = 0; r <= b; ++r) {
    const int64_t least = r == 0 ? 0 : q_indptr[r - 1];
    if (q_indptr[r] < least || q_indptr[r] > total_q || (r == 0 && q_indptr[r] != 0))
      fail("q_indptr",
           "q_indptr[{}] = {} is outside [{}, {}]: it starts at 0, must not fall, nor pass total_q", r,
           q_indptr[r], least, r == 0 ? 0 : total_q);
  }
}

}  // namespace

void check_build(const BuildProblem& p, const TreeOutput& out) {
  check_enum("method", p.method, BuildMethod::kParents);
  check_batch(p.b, p.memory);
  check_range("budget", p.budget, 1, kMaxTreeBudget);
  const bool any = p.b > 0;
  check_pointer("root_tokens", p.root_tokens, false);
  check_pointer("prefix_len", p.prefix_len, false);
  switch (p.method) {
    case BuildMethod::kDdtree:
      check_range("num_depths", p.num_depths, 1, kMaxTreeDepths);
      check_scores(p.scores, int64_t{p.b} * p.num_depths);
      break;
    case BuildMethod::kCandidates:
      check_range("num_candidates", p.num_candidates, 1, kMaxTreeCandidates);
      check_pointer("candidate_tokens", p.candidate_tokens, any);
      check_pointer("candidate_parents", p.candidate_parents, any);
      check_pointer("candidate_log_probs", p.candidate_log_probs, any);
      break;
    case BuildMethod::kChain:
      check_pointer("tokens", p.tokens, any);
      break;
    case BuildMethod::kParents:
      check_pointer("tokens", p.tokens, false);
      check_pointer("parents", p.parents, any);
      break;
  }
  check_pointer("output.token_ids", out.token_ids, false);
  check_pointer("output.parents", out.parents, false);
  check_pointer("output.depth", out.depth, false);
  check_pointer("output.positions", out.positions, false);
  check_pointer("output.ancestor_bits", out.ancestor_bits, false);
  check_pointer("output.retrieve_next_token", out.retrieve_next_token, false);
  check_pointer("output.retrieve_next_sibling", out.retrieve_next_sibling, false);
  check_pointer("output.log_probs", out.log_probs, false);
  check_pointer("output.num_nodes", out.num_nodes, false);
  if (out.ancestor_bits)
    check_range("output.words_per_row", out.words_per_row, words_per_row(p.budget + 1), 1 << 20);
}

void check_beam(const BeamProblem& p, const BeamOutput& out) {
  check_batch(p.b, p.memory);
  check_range("rows", p.rows, 1, kMaxBeamWidth);
  check_range("top_k", p.top_k, 1, kMaxBeamWidth);
  check_scores(p.scores, int64_t{p.b} * p.rows);
  check_pointer("row_log_probs", p.row_log_probs, false);
  check_pointer("output.token_ids", out.token_ids, p.b > 0);
  check_pointer("output.log_probs", out.log_probs, p.b > 0);
  check_pointer("output.beam", out.beam, false);
}

void check_accept(const AcceptProblem& p, const AcceptOutput& out) {
  check_enum("method", p.method, AcceptMethod::kWithoutReplacement);
  check_batch(p.b, p.memory);
  check_q_indptr(p.q_indptr, p.b, p.total_q, p.memory);
  const bool any = p.b > 0 && p.total_q > 0;
  check_pointer("token_ids", p.token_ids, any);
  const bool has_links = p.retrieve_next_token || p.retrieve_next_sibling;
  check_pointer("retrieve_next_token", p.retrieve_next_token, has_links);
  check_pointer("retrieve_next_sibling", p.retrieve_next_sibling, has_links);
  check_pointer("parents", p.parents, any && !has_links);
  check_pointer("target_argmax", p.target_argmax, false);
  if (any && (p.method != AcceptMethod::kGreedy || !p.target_argmax)) {
    if (!p.logits)
      fail("logits", "logits is null: {}",
           p.method == AcceptMethod::kGreedy ? "greedy acceptance takes these or target_argmax"
                                             : "sampling takes its distributions from them");
    check_score_dtype("logits_dtype", p.logits_dtype);
    check_range("vocab", p.vocab, 1, kMaxVocab);
    const auto bytes = static_cast<int64_t>(dtype_bytes(p.logits_dtype));
    check_stride("logits_stride", p.logits_stride, p.total_q, p.vocab, bytes);
    if (reinterpret_cast<std::uintptr_t>(p.logits) % static_cast<std::uintptr_t>(bytes) != 0)
      fail("logits", "logits = {} must be aligned to {} bytes", p.logits, bytes);
  }
  check_pointer(
      "draft_probs", p.draft_probs,
      any && (p.method == AcceptMethod::kIndependent || p.method == AcceptMethod::kWithoutReplacement));
  check_pointer("temperature", p.temperature, false);
  check_pointer("top_k", p.top_k, false);
  check_pointer("top_p", p.top_p, false);
  check_pointer("seeds", p.seeds, false);
  check_pointer("offsets", p.offsets, false);
  check_pointer("coins", p.coins, p.final_coins != nullptr);
  check_pointer("final_coins", p.final_coins, p.coins != nullptr);
  check_pointer("output.accept_index", out.accept_index, p.b > 0);
  check_range("output.path_stride", out.path_stride, 1, kInt32Max);
  check_pointer("output.num_accepted", out.num_accepted, p.b > 0);
  check_pointer("output.bonus_token", out.bonus_token, false);
  check_pointer("output.predicts", out.predicts, false);
}

int compact_unit(const CompactProblem& p) {
  uint64_t all = 16 | static_cast<uint64_t>(p.row_bytes) | static_cast<uint64_t>(p.row_stride_bytes);
  if (!p.layers)
    all |= static_cast<uint64_t>(p.layer_stride_bytes) | reinterpret_cast<std::uintptr_t>(p.pool);
  return 1 << std::countr_zero(all);
}

void check_compact(const CompactProblem& p, const CompactOutput& out) {
  check_batch(p.b, p.memory);
  check_range("num_layers", p.num_layers, 0, 1 << 16);
  check_range("page_size", p.page_size, 1, kInt32Max);
  check_range("num_pages", p.num_pages, 0, std::numeric_limits<int64_t>::max() / p.page_size);
  const bool moves = p.b > 0 && p.num_layers > 0;
  if (p.num_layers > 0) {
    check_range("row_bytes", p.row_bytes, 1, 1 << 20);
    check_stride("row_stride_bytes", p.row_stride_bytes, p.num_pages * p.page_size, p.row_bytes, 1);
    if (!p.layers && !p.pool && moves) fail("layers", "layers and pool are null: give one of them");
    check_pointer("layers", p.layers, false);
    if (!p.layers)
      check_stride("layer_stride_bytes", p.layer_stride_bytes, p.num_layers,
                   p.num_layers > 1 ? p.row_bytes : 0, 1);
    if (!p.layers && p.num_layers > 1 && p.layer_stride_bytes == 0)
      fail("layer_stride_bytes", "layer_stride_bytes = 0 must not be 0 with a pool of {} layers",
           p.num_layers);
  }
  check_q_indptr(p.q_indptr, p.b, p.total_q, p.memory);
  check_pointer("kv_len", p.kv_len, p.b > 0);
  check_pointer("accept_index", p.accept_index, p.b > 0);
  check_range("path_stride", p.path_stride, 1, kInt32Max);
  check_pointer("num_accepted", p.num_accepted, p.b > 0);
  check_enum("pages.index_type", p.pages.index_type, IndexType::kI64);
  check_range("pages.num_entries", p.pages.num_entries, 0, std::numeric_limits<int64_t>::max() / 8);
  check_range("pages.stride", p.pages.stride, 0, std::numeric_limits<int64_t>::max() / (p.b + 1));
  if (!p.pages.entries && p.pages.num_entries > 0) fail("pages.entries", "pages.entries is null");
  const std::uintptr_t entry_bytes = p.pages.index_type == IndexType::kI64 ? 8 : 4;
  if (reinterpret_cast<std::uintptr_t>(p.pages.entries) % entry_bytes != 0)
    fail("pages.entries", "pages.entries = {} must be aligned to {} bytes", p.pages.entries, entry_bytes);
  check_pointer("pages.indptr", p.pages.indptr, false);
  check_pointer("output.kv_len", out.kv_len, false);
  if (out.kv_len && out.kv_len == p.kv_len)
    fail("output.kv_len", "output.kv_len must not be the input array");
  check_pointer("output.freed_pages", out.freed_pages, false);
  check_pointer("output.num_freed", out.num_freed, false);
  if (p.memory == Memory::kHost && p.layers) {
    for (int layer = 0; layer < p.num_layers && moves; ++layer)
      if (!p.layers[layer]) fail("layers", "layers[{}] is null", layer);
  }
}

void check_import(const ImportProblem& p, const ImportOutput& out) {
  check_batch(p.b, p.memory);
  check_range("q_len", p.q_len, 1, 1 << 20);
  check_range("b * q_len", int64_t{p.b} * p.q_len, 0, kInt32Max);
  check_range("num_rows", p.num_rows, 0, kInt32Max);
  check_range("row_width", p.row_width, 0, kInt32Max);
  check_stride("row_stride", p.row_stride, p.num_rows, p.row_width, 4);
  check_enum("row_index_type", p.row_index_type, IndexType::kI64);
  check_enum("seq_len_type", p.seq_len_type, IndexType::kI64);
  check_enum("mask_layout", p.mask_layout, MaskLayout::kQlenOnly);
  check_range("mask_len", p.mask_len, 0, std::numeric_limits<int64_t>::max() / 2);
  check_pointer("token_table", p.token_table, p.b > 0 && out.page_table && p.num_rows > 0);
  const auto check_index = [&](const char* argument, const void* pointer, IndexType type) {
    if (type == IndexType::kI64)
      return check_pointer(argument, static_cast<const int64_t*>(pointer), p.b > 0);
    check_pointer(argument, static_cast<const int32_t*>(pointer), p.b > 0);
  };
  check_index("row_index", p.row_index, p.row_index_type);
  check_index("seq_len", p.seq_len, p.seq_len_type);
  check_pointer("mask", p.mask, p.mask_layout != MaskLayout::kNone && p.mask_len > 0);
  check_pointer("output.kv_len", out.kv_len, false);
  if (out.kv_len && out.kv_len == p.seq_len)
    fail("output.kv_len", "output.kv_len must not be the array seq_len");
  check_pointer("output.page_table", out.page_table, false);
  check_stride("output.page_stride", out.page_table ? out.page_stride : 0, p.b, 0, 4);
  check_range("output.page_stride", out.page_stride, 0, kInt32Max);
  check_pointer("output.ancestor_bits", out.ancestor_bits, false);
  if (out.ancestor_bits)
    check_range("output.words_per_row", out.words_per_row, words_per_row(p.q_len), 1 << 20);
}

}  // namespace treemla
