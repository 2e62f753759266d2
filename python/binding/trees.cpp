#include "binding/trees.hpp"

#include <nanobind/stl/string.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "binding/array.hpp"
#include "treemla/accept.hpp"
#include "treemla/build.hpp"
#include "treemla/compact.hpp"
#include "treemla/import_batch.hpp"
#include "treemla/tree.hpp"

namespace treemla::python {
namespace {

// The arrays of one step: all in one place, all kept alive. Steps take their arrays as dicts by argument name, so that what is
// absent needs no placeholder; what is in `outputs` must be writable.
class Step {
 public:
  Step(const nb::dict& inputs, const nb::dict& outputs, uintptr_t stream)
      : inputs_(inputs), outputs_(outputs), stream_(stream) {
    arrays_.reserve(inputs.size() + outputs.size() + 1);
  }

  const Array* find(const char* name) {
    for (const Array& a : arrays_)
      if (std::string_view(a.name) == name) return &a;
    const bool is_output = outputs_.contains(name);
    if (!is_output && !inputs_.contains(name)) return nullptr;
    Array array(is_output ? outputs_[name] : inputs_[name], name, stream_);
    if (is_output) array.need_writable();
    if (arrays_.empty()) {
      memory_ = array.memory;
      device_id_ = array.device_id;
    } else if (array.memory != memory_ || (memory_ == Memory::kDevice && array.device_id != device_id_)) {
      fail(name, std::string(name) + " is on " + array.place() + ": must be where " + arrays_.front().name +
                     " is, on " + arrays_.front().place());
    }
    return &arrays_.emplace_back(std::move(array));
  }
  const Array& need(const char* name) {
    const Array* a = find(name);
    if (!a) fail(name, std::string(name) + " is missing");
    return *a;
  }

  // Null if the array is absent.
  template <class T>
  T* typed(const char* name, Element e, std::initializer_list<int64_t> shape, const char* symbols) {
    const Array* a = find(name);
    return a ? a->typed<T>(e, shape, symbols) : nullptr;
  }
  int32_t* ints(const char* name, std::initializer_list<int64_t> shape, const char* symbols) {
    return typed<int32_t>(name, Element::kI32, shape, symbols);
  }
  float* floats(const char* name, std::initializer_list<int64_t> shape, const char* symbols) {
    return typed<float>(name, Element::kF32, shape, symbols);
  }
  // torch has few operations on uint64: int64 with the same bits will do.
  uint64_t* words(const char* name, int64_t b) {
    const Array* a = find(name);
    if (!a) return nullptr;
    a->need_element({Element::kI64, Element::kU64});
    a->need_shape({b}, "[b]");
    a->need_compact();
    return static_cast<uint64_t*>(a->data);
  }

  Memory memory() const { return memory_; }
  TreeRun run() {
    TreeRun r;
    r.stream = reinterpret_cast<void*>(stream_);
    if (const Array* a = find("workspace")) {
      a->need_element({Element::kU8});
      a->need_compact();
      r.workspace = a->data;
      r.workspace_bytes = static_cast<std::size_t>(a->size());
    }
    return r;
  }

  // Runs f(TreeRun) and, if asked, waits for the device's verdict. On the host f itself throws.
  template <class F>
  void finish(int b, bool check, F&& f) {
    const TreeRun r = run();
    if (memory_ == Memory::kHost) {
      nb::gil_scoped_release unlocked;
      f(r);
    } else {
      f(r);
      if (check) {
        nb::gil_scoped_release unlocked;
        check_tree_run(r, b);
      }
    }
  }

 private:
  const nb::dict& inputs_;
  const nb::dict& outputs_;
  uintptr_t stream_;
  Memory memory_ = Memory::kHost;
  int device_id_ = 0;
  std::vector<Array> arrays_;
};

int extent(const Array& a, int axis) {
  if (axis >= a.ndim)
    fail(a.name, std::string(a.name) + " has shape " + a.shape_text() + ": needs more axes");
  if (a.shape[axis] > std::numeric_limits<int32_t>::max())
    fail(a.name, std::string(a.name) + " has shape " + a.shape_text() + ": must fit in 32 bits");
  return static_cast<int>(a.shape[axis]);
}

// Rows of a vocabulary, as `rows_shape` + [vocab]; rows evenly spaced, contiguous within.
int64_t row_stride(const Array& a) {
  const int last = a.ndim - 1;
  const int64_t stride = last > 0 ? a.strides[last - 1] : a.shape[last];
  bool even = a.strides[last] == 1 || a.shape[last] <= 1;
  even = even && (last == 0 || a.shape[last - 1] <= 1 || stride >= a.shape[last]);
  for (int i = last - 2; i >= 0; --i)
    even = even && (a.shape[i] <= 1 || a.strides[i] == a.strides[i + 1] * a.shape[i + 1]);
  if (a.size() > 0 && !even)
    fail(a.name, std::string(a.name) + " of shape " + a.shape_text() +
                     " must have contiguous rows that are evenly spaced and don't overlap");
  return a.size() > 0 && last > 0 && a.shape[last - 1] > 1 ? stride : a.shape[last];
}

ScoreView view_scores(const Array& a, bool are_log_probs) {
  a.need_element({Element::kF32, Element::kBF16});
  ScoreView s;
  s.data = a.data;
  s.dtype = number_dtype(a);
  s.vocab = extent(a, a.ndim - 1);
  s.row_stride = row_stride(a);
  s.are_log_probs = are_log_probs;
  return s;
}

BuildProblem bind_build(Step& step, const std::string& method, int b, int budget, int pad_token,
                        bool are_log_probs) {
  BuildProblem p;
  p.b = b;
  p.budget = budget;
  p.pad_token = pad_token;
  if (method == "ddtree") {
    const Array& scores = step.need("scores");
    scores.need_shape({b, -1, -1}, "[b, num_depths, vocab]");
    p.method = BuildMethod::kDdtree;
    p.num_depths = extent(scores, 1);
    p.scores = view_scores(scores, are_log_probs);
  } else if (method == "candidates") {
    const Array& tokens = step.need("tokens");
    tokens.need_shape({b, -1}, "[b, num_candidates]");
    p.method = BuildMethod::kCandidates;
    p.num_candidates = extent(tokens, 1);
    p.candidate_tokens = step.ints("tokens", {b, p.num_candidates}, "[b, num_candidates]");
    p.candidate_parents = step.ints("parents", {b, p.num_candidates}, "[b, num_candidates]");
    p.candidate_log_probs = step.floats("log_probs", {b, p.num_candidates}, "[b, num_candidates]");
  } else if (method == "chain") {
    p.method = BuildMethod::kChain;
    p.tokens = step.ints("tokens", {b, budget}, "[b, budget]");
  } else {
    p.method = BuildMethod::kParents;
    p.parents = step.ints("parents", {b, int64_t{budget} + 1}, "[b, q_len]");
    p.tokens = step.ints("tokens", {b, int64_t{budget} + 1}, "[b, q_len]");
  }
  p.root_tokens = step.ints("root_tokens", {b}, "[b]");
  p.prefix_len = step.ints("prefix_len", {b}, "[b]");
  p.memory = step.memory();
  return p;
}

std::size_t build_bytes(const nb::dict& inputs, const std::string& method, int b, int budget,
                        bool are_log_probs, uintptr_t stream) {
  const nb::dict none;
  Step step(inputs, none, stream);
  return build_workspace_bytes(bind_build(step, method, b, budget, -1, are_log_probs));
}

void build(const nb::dict& inputs, const nb::dict& outputs, const std::string& method, int b, int budget,
           int pad_token, bool are_log_probs, bool check, uintptr_t stream) {
  Step step(inputs, outputs, stream);
  const BuildProblem p = bind_build(step, method, b, budget, pad_token, are_log_probs);
  const int64_t q_len = int64_t{budget} + 1;
  TreeOutput o;
  o.token_ids = step.ints("out_token_ids", {b, q_len}, "[b, q_len]");
  o.parents = step.ints("out_parents", {b, q_len}, "[b, q_len]");
  o.depth = step.ints("out_depth", {b, q_len}, "[b, q_len]");
  o.positions = step.ints("out_positions", {b, q_len}, "[b, q_len]");
  if (const Array* bits = step.find("out_ancestor_bits")) {
    bits->need_element({Element::kU32, Element::kI32});
    bits->need_shape({b, q_len, -1}, "[b, q_len, words]");
    bits->need_compact();
    o.ancestor_bits = static_cast<uint32_t*>(bits->data);
    o.words_per_row = extent(*bits, 2);
  }
  o.retrieve_next_token = step.ints("out_retrieve_next_token", {b, q_len}, "[b, q_len]");
  o.retrieve_next_sibling = step.ints("out_retrieve_next_sibling", {b, q_len}, "[b, q_len]");
  o.log_probs = step.floats("out_log_probs", {b, q_len}, "[b, q_len]");
  o.num_nodes = step.ints("out_num_nodes", {b}, "[b]");
  step.finish(b, check, [&](const TreeRun& run) { build_tree(p, o, run); });
}

BeamProblem bind_beam(Step& step, int top_k, bool are_log_probs) {
  const Array& scores = step.need("scores");
  scores.need_shape({-1, -1, -1}, "[b, rows, vocab]");
  BeamProblem p;
  p.b = extent(scores, 0);
  p.rows = extent(scores, 1);
  p.top_k = top_k;
  p.scores = view_scores(scores, are_log_probs);
  p.row_log_probs = step.floats("row_log_probs", {p.b, p.rows}, "[b, rows]");
  p.memory = step.memory();
  return p;
}

std::size_t beam_bytes(const nb::dict& inputs, int top_k, bool are_log_probs, uintptr_t stream) {
  const nb::dict none;
  Step step(inputs, none, stream);
  return beam_workspace_bytes(bind_beam(step, top_k, are_log_probs));
}

void beam(const nb::dict& inputs, const nb::dict& outputs, int top_k, bool are_log_probs, bool check,
          uintptr_t stream) {
  Step step(inputs, outputs, stream);
  const BeamProblem p = bind_beam(step, top_k, are_log_probs);
  BeamOutput o;
  o.token_ids = step.ints("out_token_ids", {p.b, p.rows, top_k}, "[b, rows, top_k]");
  o.log_probs = step.floats("out_log_probs", {p.b, p.rows, top_k}, "[b, rows, top_k]");
  o.beam = step.ints("out_beam", {p.b, top_k}, "[b, top_k]");
  step.finish(p.b, check, [&](const TreeRun& run) { expand_beam(p, o, run); });
}

AcceptProblem bind_accept(Step& step, const std::string& method) {
  AcceptProblem p;
  if (method == "greedy") {
    p.method = AcceptMethod::kGreedy;
  } else if (method == "deterministic") {
    p.method = AcceptMethod::kDeterministic;
  } else if (method == "independent") {
    p.method = AcceptMethod::kIndependent;
  } else if (method == "without_replacement") {
    p.method = AcceptMethod::kWithoutReplacement;
  } else {
    fail("method",
         "method = \"" + method + "\": must be greedy, deterministic, independent or without_replacement");
  }
  const Array& tokens = step.need("token_ids");
  tokens.need_shape({-1}, "[total_q]");
  p.total_q = tokens.shape[0];
  p.token_ids = step.ints("token_ids", {p.total_q}, "[total_q]");
  const Array& indptr = step.need("q_indptr");
  indptr.need_shape({-1}, "[b + 1]");
  if (indptr.shape[0] < 1) fail("q_indptr", "q_indptr is empty: must be [b + 1]");
  p.b = extent(indptr, 0) - 1;
  p.q_indptr = step.ints("q_indptr", {int64_t{p.b} + 1}, "[b + 1]");
  p.retrieve_next_token = step.ints("retrieve_next_token", {p.total_q}, "[total_q]");
  p.retrieve_next_sibling = step.ints("retrieve_next_sibling", {p.total_q}, "[total_q]");
  p.parents = step.ints("parents", {p.total_q}, "[total_q]");
  p.target_argmax = step.ints("target_argmax", {p.total_q}, "[total_q]");
  if (const Array* logits = step.find("logits")) {
    logits->need_element({Element::kF32, Element::kBF16});
    logits->need_shape({p.total_q, -1}, "[total_q, vocab]");
    p.logits = logits->data;
    p.logits_dtype = number_dtype(*logits);
    p.vocab = extent(*logits, 1);
    p.logits_stride = row_stride(*logits);
  }
  p.draft_probs = step.floats("draft_probs", {p.total_q, p.vocab}, "[total_q, vocab]");
  p.temperature = step.floats("temperature", {p.b}, "[b]");
  p.top_k = step.ints("top_k", {p.b}, "[b]");
  p.top_p = step.floats("top_p", {p.b}, "[b]");
  p.seeds = step.words("seeds", p.b);
  p.offsets = step.words("offsets", p.b);
  p.coins = step.floats("coins", {p.total_q}, "[total_q]");
  p.final_coins = step.floats("final_coins", {p.b}, "[b]");
  p.memory = step.memory();
  return p;
}

std::size_t accept_bytes(const nb::dict& inputs, const std::string& method, uintptr_t stream) {
  const nb::dict none;
  Step step(inputs, none, stream);
  return accept_workspace_bytes(bind_accept(step, method));
}

void accept(const nb::dict& inputs, const nb::dict& outputs, const std::string& method, bool check,
            uintptr_t stream) {
  Step step(inputs, outputs, stream);
  const AcceptProblem p = bind_accept(step, method);
  const Array& index = step.need("accept_index");
  index.need_shape({p.b, -1}, "[b, path_stride]");
  AcceptOutput o;
  o.path_stride = extent(index, 1);
  o.accept_index = step.ints("accept_index", {p.b, o.path_stride}, "[b, path_stride]");
  o.num_accepted = step.ints("num_accepted", {p.b}, "[b]");
  o.bonus_token = step.ints("bonus_token", {p.b}, "[b]");
  o.predicts = step.ints("predicts", {p.total_q}, "[total_q]");
  step.finish(p.b, check, [&](const TreeRun& run) { accept_path(p, o, run); });
}

// `layers`: arrays of [num_pages, page_size, ...] or [rows, ...] each, or one of [num_layers, ...] if `stacked`.
struct BoundCompact {
  CompactProblem problem;
  std::vector<Array> layers;
  std::vector<void*> pointers;
};

void bind_layer(BoundCompact& c, const Array& layer, bool stacked, int64_t page_size, const Array& beside) {
  const std::string n = layer.name;
  CompactProblem& p = c.problem;
  if (layer.place() != beside.place())
    fail(n, n + " is on " + layer.place() + ": must be where q_indptr is, on " + beside.place());
  layer.need_writable();
  if (layer.element == Element::kOther) fail(n, n + " is " + element_name(layer.element));
  const int first = stacked ? 1 : 0;
  // A row is the last axis; the axes before it are rows in order.
  const int last = layer.ndim - 1;
  if (last - first < 1)
    fail(n, n + " has shape " + layer.shape_text() + ": must be " +
                (stacked ? "[num_layers, ...]" : "[...]") + " of [num_pages, page_size, d] or [rows, d]");
  int64_t rows = 1;
  for (int i = first; i < last; ++i) rows *= layer.shape[i];
  const int bytes = element_bytes(layer.element);
  int64_t stride = layer.shape[last];
  bool even = layer.shape[last] <= 1 || layer.strides[last] == 1;
  int64_t expected = -1;
  for (int i = last - 1; i >= first; --i) {
    if (layer.shape[i] <= 1) continue;
    if (expected < 0) {
      stride = layer.strides[i];
      even = even && stride >= layer.shape[last];
    } else {
      even = even && layer.strides[i] == expected;
    }
    expected = layer.strides[i] * layer.shape[i];
  }
  if (layer.size() > 0 && !even)
    fail(n, n + " of shape " + layer.shape_text() +
                " must have contiguous rows that are evenly spaced and don't overlap");
  if (rows % page_size != 0)
    fail(n, n + " has " + std::to_string(rows) +
                " rows: must be a multiple of page_size = " + std::to_string(page_size));
  const int64_t row_bytes = layer.shape[last] * bytes, stride_bytes = stride * bytes;
  if (!c.pointers.empty() &&
      (row_bytes != p.row_bytes || stride_bytes != p.row_stride_bytes || rows / page_size != p.num_pages))
    fail(n, n + " has shape " + layer.shape_text() + ": all layers must have the same rows");
  p.row_bytes = row_bytes;
  p.row_stride_bytes = stride_bytes;
  p.num_pages = rows / page_size;
  if (stacked) {
    p.num_layers = extent(layer, 0);
    p.pool = layer.data;
    p.layer_stride_bytes = layer.shape[0] > 1 ? layer.strides[0] * bytes : rows * stride_bytes;
    if (p.layer_stride_bytes < 0) fail(n, n + " has layers in descending order: not allowed");
  }
  c.pointers.push_back(layer.data);
}

void bind_compact(BoundCompact& c, Step& step, const nb::list& layers, bool stacked, int64_t page_size,
                  uintptr_t stream) {
  CompactProblem& p = c.problem;
  const Array& indptr = step.need("q_indptr");
  indptr.need_shape({-1}, "[b + 1]");
  if (indptr.shape[0] < 1) fail("q_indptr", "q_indptr is empty: must be [b + 1]");
  p.b = extent(indptr, 0) - 1;
  p.q_indptr = step.ints("q_indptr", {int64_t{p.b} + 1}, "[b + 1]");
  p.memory = step.memory();
  p.kv_len = step.ints("kv_len", {p.b}, "[b]");
  const Array& index = step.need("accept_index");
  index.need_shape({p.b, -1}, "[b, path_stride]");
  p.path_stride = extent(index, 1);
  p.accept_index = step.ints("accept_index", {p.b, p.path_stride}, "[b, path_stride]");
  p.num_accepted = step.ints("num_accepted", {p.b}, "[b]");

  if (page_size < 1 || page_size > std::numeric_limits<int32_t>::max())
    fail("page_size", "page_size = " + std::to_string(page_size) + ": must be from 1 to 2147483647");
  p.page_size = static_cast<int>(page_size);
  c.layers.reserve(layers.size());
  for (nb::handle layer : layers) {
    const Array& a = c.layers.emplace_back(layer, "cache", stream);
    bind_layer(c, a, stacked, page_size, indptr);
  }
  if (!stacked) {
    p.num_layers = static_cast<int>(c.layers.size());
    if (p.num_layers == 1) {
      p.pool = c.pointers[0];
    } else {
      p.layers = c.pointers.data();
    }
  }
  const Array* table = step.find("page_table");
  const Array* entries = step.find("page_indices");
  if ((table == nullptr) == (entries == nullptr))
    fail("page_table", "page_table and page_indices: one of them must be given");
  const Array& pages = table ? *table : *entries;
  pages.need_element({Element::kI32, Element::kI64});
  if (table) {
    pages.need_shape({p.b, -1}, "[b, max_pages]");
    pages.need_compact();
    p.pages.stride = pages.shape[1];
  } else {
    pages.need_shape({-1}, "[n]");
    pages.need_compact();
    step.need("page_indptr");
    p.pages.indptr = step.ints("page_indptr", {int64_t{p.b} + 1}, "[b + 1]");
  }
  p.pages.entries = pages.data;
  p.pages.index_type = pages.element == Element::kI64 ? IndexType::kI64 : IndexType::kI32;
  p.pages.num_entries = pages.size();
}

std::size_t compact_bytes(const nb::dict& inputs, const nb::list& layers, bool stacked, int64_t page_size,
                          int64_t total_q, uintptr_t stream) {
  const nb::dict none;
  Step step(inputs, none, stream);
  BoundCompact c;
  bind_compact(c, step, layers, stacked, page_size, stream);
  c.problem.total_q = total_q;
  return compact_workspace_bytes(c.problem);
}

void compact(const nb::dict& inputs, const nb::dict& outputs, const nb::list& layers, bool stacked,
             int64_t page_size, int64_t total_q, bool check, uintptr_t stream) {
  Step step(inputs, outputs, stream);
  BoundCompact c;
  bind_compact(c, step, layers, stacked, page_size, stream);
  CompactProblem& p = c.problem;
  p.total_q = total_q;
  CompactOutput o;
  o.kv_len = step.ints("out_kv_len", {p.b}, "[b]");
  o.freed_pages = step.typed<int64_t>("out_freed_pages", Element::kI64, {total_q}, "[total_q]");
  o.num_freed = step.ints("out_num_freed", {p.b}, "[b]");
  step.finish(p.b, check, [&](const TreeRun& run) { compact_cache(p, o, run); });
}

IndexType index_type(const Array& a) {
  a.need_element({Element::kI32, Element::kI64});
  return a.element == Element::kI64 ? IndexType::kI64 : IndexType::kI32;
}

ImportProblem bind_import(Step& step, int q_len, const std::string& layout, bool seq_len_has_tree) {
  ImportProblem p;
  const Array& table = step.need("token_table");
  table.need_element({Element::kI32});
  table.need_shape({-1, -1}, "[num_rows, row_width]");
  if (table.shape[1] > 1 && table.strides[1] != 1)
    fail("token_table", "token_table of shape " + table.shape_text() + " must have contiguous rows");
  p.token_table = static_cast<const int32_t*>(table.data);
  p.num_rows = table.shape[0];
  p.row_width = table.shape[1];
  p.row_stride = table.shape[0] > 1 ? table.strides[0] : table.shape[1];
  const Array& index = step.need("row_index");
  index.need_shape({-1}, "[b]");
  index.need_compact();
  p.b = extent(index, 0);
  p.row_index = index.data;
  p.row_index_type = index_type(index);
  const Array& lengths = step.need("seq_len");
  lengths.need_shape({p.b}, "[b]");
  lengths.need_compact();
  p.seq_len = lengths.data;
  p.seq_len_type = index_type(lengths);
  p.seq_len_has_tree = seq_len_has_tree;
  p.q_len = q_len;
  if (const Array* mask = step.find("mask")) {
    mask->need_element({Element::kU8, Element::kBool});
    mask->need_compact();
    if (layout == "full") {
      p.mask_layout = MaskLayout::kFull;
    } else if (layout == "qlen_only") {
      p.mask_layout = MaskLayout::kQlenOnly;
    } else {
      fail("mask_layout", "mask_layout = \"" + layout + "\": must be full or qlen_only");
    }
    p.mask = static_cast<const uint8_t*>(mask->data);
    p.mask_len = mask->size();
  }
  p.memory = step.memory();
  return p;
}

std::size_t import_bytes(const nb::dict& inputs, int q_len, const std::string& layout, bool seq_len_has_tree,
                         uintptr_t stream) {
  const nb::dict none;
  Step step(inputs, none, stream);
  return import_workspace_bytes(bind_import(step, q_len, layout, seq_len_has_tree));
}

void import_arrays(const nb::dict& inputs, const nb::dict& outputs, int q_len, const std::string& layout,
                   bool seq_len_has_tree, bool check, uintptr_t stream) {
  Step step(inputs, outputs, stream);
  const ImportProblem p = bind_import(step, q_len, layout, seq_len_has_tree);
  ImportOutput o;
  o.kv_len = step.ints("out_kv_len", {p.b}, "[b]");
  if (const Array* pages = step.find("out_page_table")) {
    pages->need_element({Element::kI32});
    pages->need_shape({p.b, -1}, "[b, max_tokens]");
    if (pages->shape[1] > 1 && pages->strides[1] != 1)
      fail("out_page_table", "out_page_table of shape " + pages->shape_text() + " must have contiguous rows");
    o.page_table = static_cast<int32_t*>(pages->data);
    o.page_stride = p.b > 1 ? pages->strides[0] : pages->shape[1];
    if (o.page_stride < pages->shape[1])
      fail("out_page_table", "out_page_table of shape " + pages->shape_text() + " has rows that overlap");
  }
  if (const Array* bits = step.find("out_ancestor_bits")) {
    bits->need_element({Element::kU32, Element::kI32});
    bits->need_shape({int64_t{p.b} * q_len, -1}, "[b * q_len, words]");
    bits->need_compact();
    o.ancestor_bits = static_cast<uint32_t*>(bits->data);
    o.words_per_row = extent(*bits, 1);
  }
  step.finish(p.b, check, [&](const TreeRun& run) { import_batch(p, o, run); });
}

}  // namespace

void add_trees(nb::module_& m) {
  m.def("build_bytes", &build_bytes);
  m.def("build", &build);
  m.def("beam_bytes", &beam_bytes);
  m.def("beam", &beam);
  m.def("accept_bytes", &accept_bytes);
  m.def("accept", &accept);
  m.def("compact_bytes", &compact_bytes);
  m.def("compact", &compact);
  m.def("import_bytes", &import_bytes);
  m.def("import_batch", &import_arrays);
  // One request, on the host: [q_len, words] -> [q_len].
  m.def("parents_from_bits", [](nb::handle bits, nb::handle out, int request) {
    const Array from(bits, "ancestor_bits", 0), to(out, "parents", 0);
    from.need_element({Element::kU32, Element::kI32});
    from.need_shape({-1, -1}, "[q_len, words]");
    from.need_compact();
    if (from.memory != Memory::kHost || to.memory != Memory::kHost)
      fail("ancestor_bits", "ancestor_bits must be on the host");
    auto* data = to.typed<int32_t>(Element::kI32, {from.shape[0]}, "[q_len]");
    to.need_writable();
    const std::vector<int32_t> parents =
        parents_from_bits({static_cast<const uint32_t*>(from.data), static_cast<std::size_t>(from.size())},
                          extent(from, 0), extent(from, 1), request);
    std::copy(parents.begin(), parents.end(), data);
  });
}

}  // namespace treemla::python
