#include "binding/verify.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "treemla/case_file.hpp"
#include "treemla/tree.hpp"
#include "treemla/verify.hpp"
#include "treemla/version.hpp"

namespace treemla::python {
namespace {

int to_int32(const char* name, int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
    fail(name, std::string(name) + " = " + std::to_string(value) + " does not fit in 32 bits");
  return static_cast<int>(value);
}

// q [total_q, h_q, d_qk], the last axis contiguous.
QueryView view_queries(const Array& q) {
  q.need_element({Element::kF32, Element::kF16, Element::kBF16});
  q.need_shape({-1, -1, -1}, "[total_q, h_q, d_qk]");
  if (q.size() > 0 && (q.strides[2] != 1 || q.strides[1] < q.shape[2] || q.strides[0] < q.shape[2]))
    fail("q", "q has strides [" + std::to_string(q.strides[0]) + ", " + std::to_string(q.strides[1]) + ", " +
                  std::to_string(q.strides[2]) +
                  "] elements: heads must be rows of contiguous numbers that don't overlap");
  return {q.data, number_dtype(q), q.shape[0], q.shape[0] > 1 ? q.strides[0] : 0,
          q.shape[1] > 1 ? q.strides[1] : 0};
}

// What rows of bytes hold; none: "", a kv whose own dtype says it.
std::optional<DType> packed_dtype(const std::string& kv_packed) {
  if (kv_packed.empty()) return std::nullopt;
  for (const DType dtype : {DType::kF8E4M3Packed, DType::kQ8}) {
    if (kv_packed == dtype_name(dtype)) return dtype;
  }
  fail("kv_packed",
       "kv_packed = \"" + kv_packed + "\": must be False, \"e4m3_packed\" (or True) or \"q8_0\"");
}

// kv [num_pages, page_size, d] or [rows, d] or either with an axis of 1 before the last, rows evenly spaced.
KvPool view_pool(const Array& kv, int64_t page_size, const std::string& kv_packed, double scale,
                 const MlaShape& shape_of_rows) {
  const std::optional<DType> packed = packed_dtype(kv_packed);
  int64_t shape[3], strides[3];
  int ndim = 0;
  for (int i = 0; i < kv.ndim; ++i) {
    // [num_pages, page_size, 1, d]: the one latent head. In [rows, 1, d] it is also a page of one row: kept.
    if (kv.ndim == 4 && i == 2 && kv.shape[2] == 1) continue;
    if (ndim < 3) {
      shape[ndim] = kv.shape[i];
      strides[ndim] = kv.strides[i];
    }
    ++ndim;
  }
  if (ndim != 2 && ndim != 3)
    fail("kv", "kv has shape " + kv.shape_text() + ": must be [num_pages, page_size, d_qk] or [rows, d_qk]");
  if (packed) {
    kv.need_element({Element::kU8});
  } else if (kv.element == Element::kU8) {
    fail("kv",
         "kv is uint8: must be float32, float16, bfloat16 or float8_e4m3fn, or give kv_packed=True for "
         "e4m3_packed rows, \"q8_0\" for q8_0 rows");
  }
  KvPool pool;
  pool.data = kv.data;
  pool.dtype = packed ? *packed : number_dtype(kv);
  const int row_elements = kv_row_elements(shape_of_rows, pool.dtype);
  pool.scale = scale;
  const int64_t columns = shape[ndim - 1];
  if (columns != row_elements)
    fail("kv", "kv has rows of " + std::to_string(columns) + ": must be " + std::to_string(row_elements) +
                   (packed ? " bytes: " + kv_packed + " rows of this d_v and d_qk" : ", the d_qk of q"));
  int64_t row_stride = strides[ndim - 2];
  if (ndim == 3 && shape[1] > 1 && page_size != 0 && page_size != shape[1])
    fail("page_size",
         "page_size = " + std::to_string(page_size) + ": must be that of kv, " + std::to_string(shape[1]));
  if (ndim == 3 && shape[1] == 1) {  // [slots, 1, d]: rows, of whatever page size
    row_stride = strides[0];
    pool.page_size = to_int32("page_size", page_size == 0 ? 1 : page_size);
  } else if (ndim == 3) {
    pool.page_size = to_int32("page_size", shape[1]);
    pool.num_pages = shape[0];
    if (shape[0] > 1 && strides[0] != shape[1] * row_stride)
      fail("kv", "kv has pages " + std::to_string(strides[0]) +
                     " elements apart: must be page_size times the " + std::to_string(row_stride) +
                     " between rows");
  } else {
    pool.page_size = to_int32("page_size", page_size == 0 ? 1 : page_size);
  }
  if (pool.page_size < 1)
    fail("page_size", "page_size = " + std::to_string(pool.page_size) + ": must be at least 1");
  if (ndim == 2 || shape[1] == 1) {
    if (shape[0] % pool.page_size != 0)
      fail("kv", "kv has " + std::to_string(shape[0]) +
                     " rows: must be a multiple of page_size = " + std::to_string(pool.page_size));
    pool.num_pages = shape[0] / pool.page_size;
  }
  if (kv.size() > 0 && (strides[ndim - 1] != 1 || row_stride < columns))
    fail("kv", "kv has strides of " + std::to_string(row_stride) + " between rows and " +
                   std::to_string(strides[ndim - 1]) +
                   " between their elements: rows must be contiguous and must not overlap");
  pool.row_stride = pool.num_pages * pool.page_size > 1 ? row_stride : 0;
  return pool;
}

void need_place(const Array& a, Memory memory, int device_id) {
  if (a.memory == memory && (memory == Memory::kHost || a.device_id == device_id)) return;
  const std::string n = a.name;
  fail(n, n + " is on " + a.place() + ": must be where q is, on " +
              (memory == Memory::kHost ? "cpu" : "cuda:" + std::to_string(device_id)));
}

}  // namespace

Array& BoundProblem::hold(nb::handle object, const char* name, uintptr_t stream) {
  Array array(object, name, stream);
  if (!arrays_.empty()) need_place(array, problem_.memory, device_id_);
  return arrays_.emplace_back(std::move(array));
}

BoundProblem::BoundProblem(const ProblemArguments& a, uintptr_t stream) {
  arrays_.reserve(8);  // references into it stay good
  VerifyProblem& p = problem_;
  const Array& q = hold(a.q, "q", stream);
  p.memory = q.memory;
  device_id_ = q.device_id;
  p.q = view_queries(q);
  const int64_t d_qk = q.shape[2];
  int64_t d_v = a.d_v;
  if (d_v == 0) {
    if (d_qk != 576 && d_qk != 512)
      fail("d_v",
           "d_v is missing: it is 512 for rows of 576 or 512, but q has rows of " + std::to_string(d_qk));
    d_v = 512;
  }
  if (d_v < 1 || d_v > d_qk)
    fail("d_v",
         "d_v = " + std::to_string(d_v) + ": must be from 1 to the d_qk of q, " + std::to_string(d_qk));
  p.shape = {to_int32("h_q", q.shape[1]), to_int32("d_v", d_v), to_int32("d_rope", d_qk - d_v)};
  p.kv = view_pool(hold(a.kv, "kv", stream), a.page_size, a.kv_packed, a.kv_scale, p.shape);
  p.sm_scale = a.sm_scale;

  const Array& indptr = hold(a.q_indptr, "q_indptr", stream);
  p.q_indptr = indptr.typed<const int32_t>(Element::kI32, {-1}, "[b + 1]");
  if (indptr.shape[0] < 1) fail("q_indptr", "q_indptr is empty: must be [b + 1]");
  p.b = to_int32("b", indptr.shape[0] - 1);
  p.kv_len = hold(a.kv_len, "kv_len", stream).typed<const int32_t>(Element::kI32, {p.b}, "[b]");

  if (a.page_table.is_none() == a.page_indices.is_none())
    fail("page_table", "page_table and page_indices: one of them must be given");
  if (a.page_indices.is_none() != a.page_indptr.is_none())
    fail("page_indptr", "page_indptr must be given with page_indices, and only then");
  if (!a.page_table.is_none()) {
    const Array& table = hold(a.page_table, "page_table", stream);
    table.need_element({Element::kI32, Element::kI64});
    table.need_shape({p.b, -1}, "[b, max_pages]");
    if (table.size() > 0 && (table.strides[1] != 1 || table.strides[0] < table.shape[1]))
      fail("page_table", "page_table has strides [" + std::to_string(table.strides[0]) + ", " +
                             std::to_string(table.strides[1]) +
                             "] elements: its rows must be contiguous and must not overlap");
    p.pages.entries = table.data;
    p.pages.index_type = table.element == Element::kI64 ? IndexType::kI64 : IndexType::kI32;
    p.pages.stride = p.b > 1 ? table.strides[0] : table.shape[1];
    p.pages.num_entries = p.b * p.pages.stride;
    if (p.pages.stride > table.shape[1]) bound_by_view(table.shape[1]);
  } else {
    const Array& entries = hold(a.page_indices, "page_indices", stream);
    entries.need_element({Element::kI32, Element::kI64});
    entries.need_shape({-1}, "[n]");
    entries.need_compact();
    p.pages.entries = entries.data;
    p.pages.index_type = entries.element == Element::kI64 ? IndexType::kI64 : IndexType::kI32;
    p.pages.num_entries = entries.shape[0];
    p.pages.indptr =
        hold(a.page_indptr, "page_indptr", stream).typed<const int32_t>(Element::kI32, {p.b + 1}, "[b + 1]");
  }
  for (auto [name, value] : {std::pair{"max_q_len", a.max_q_len}, std::pair{"max_kv_len", a.max_kv_len}})
    if (value < 0)
      fail(name, std::string(name) + " = " + std::to_string(value) + ": must be 0 (no bound) or more");
  p.max_q_len = a.max_q_len;
  if (a.max_kv_len > 0) p.max_kv_len = p.max_kv_len > 0 ? std::min(p.max_kv_len, a.max_kv_len) : a.max_kv_len;
  set_tree(a.tree, stream);
}

// A view of a wider page table: what lies between its rows, and after the last one, is not the caller's to give. So no request
// may be longer than its row in the view, which the library, seeing strides, wouldn't know.
void BoundProblem::bound_by_view(int64_t columns) {
  VerifyProblem& p = problem_;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t most = columns > kMost / p.kv.page_size ? kMost : columns * p.kv.page_size;
  if (p.memory == Memory::kDevice) {
    if (most == 0) fail("page_table", "page_table is an empty view of a wider table: must have a column");
    p.max_kv_len = most;  // a longer request comes out inert
    return;
  }
  for (int r = 0; r < p.b; ++r)
    if (p.kv_len[r] > most)
      fail("kv_len", "kv_len[" + std::to_string(r) + "] = " + std::to_string(p.kv_len[r]) +
                         " does not fit in page_table, which holds " + std::to_string(most) +
                         " tokens a request");
}

void BoundProblem::set_tree(nb::handle tree, uintptr_t stream) {
  VerifyProblem& p = problem_;
  constexpr const char* kAllowed =
      "must be \"causal\", \"none\", parents int32 [total_q], ancestor bits uint32 or int32 [total_q, "
      "words], or a dense "
      "bool mask";
  if (nb::isinstance<nb::str>(tree)) {
    const std::string text = nb::cast<std::string>(tree);
    if (text != "causal" && text != "none") fail("tree", "tree = \"" + text + "\": " + kAllowed);
    p.mask.kind = text == "causal" ? MaskKind::kCausal : MaskKind::kNone;
    return;
  }
  if (tree.is_none()) fail("tree", std::string("tree is None: ") + kAllowed);
  p.mask.kind = MaskKind::kTree;
  const Array& t = hold(tree, "tree", stream);
  switch (t.element) {
    case Element::kBool:
    case Element::kU8:
      return set_dense_tree(t);
    case Element::kU32:
    case Element::kI32:
      break;
    default:
      fail("tree", std::string("tree is an array of ") + element_name(t.element) + ": " + kAllowed);
  }
  t.need_compact();
  if (t.ndim == 2) {
    t.need_shape({p.q.total_q, -1}, "[total_q, words]");
    p.mask.words_per_row = to_int32("tree", t.shape[1]);
    p.mask.ancestor_bits = static_cast<const uint32_t*>(t.data);
    return;
  }
  t.need_element({Element::kI32});
  t.need_shape({p.q.total_q}, "[total_q] (parents), or [total_q, words] (ancestor bits)");
  p.mask.parents = static_cast<const int32_t*>(t.data);
}

// [sum of q_len^2], or [b, q_len, q_len] where all are alike, or [q_len, q_len] of one request.
void BoundProblem::set_dense_tree(const Array& mask) {
  VerifyProblem& p = problem_;
  if (mask.memory != Memory::kHost)
    fail("tree", "tree is a dense mask on " + mask.place() +
                     ": must be on the host; on a device give parents or ancestor bits");
  mask.need_compact();
  int64_t widest = 0, cells = 0;
  if (p.q_indptr[0] != 0) fail("q_indptr", "q_indptr[0] = " + std::to_string(p.q_indptr[0]) + ": must be 0");
  for (int r = 0; r < p.b; ++r) {
    const int64_t q_len = static_cast<int64_t>(p.q_indptr[r + 1]) - p.q_indptr[r];
    if (q_len < 0 || p.q_indptr[r + 1] > p.q.total_q)
      fail("q_indptr", "q_indptr[" + std::to_string(r + 1) + "] = " + std::to_string(p.q_indptr[r + 1]) +
                           ": must not fall, nor pass total_q = " + std::to_string(p.q.total_q));
    widest = std::max(widest, q_len);
    cells += q_len * q_len;
  }
  bool same = mask.ndim >= 1 && mask.ndim <= 3 && mask.size() == cells;
  for (int i = 1; i < mask.ndim; ++i) same = same && mask.shape[mask.ndim - i] == widest;
  if (!same)
    fail("tree", "tree is a dense mask of shape " + mask.shape_text() + ": must be [sum of q_len^2] = [" +
                     std::to_string(cells) + "], or [b, q_len, q_len], or [q_len, q_len] of one request");
  const int words = words_per_row(widest);
  bits_.assign(static_cast<std::size_t>(p.q.total_q) * words, 0);
  const auto* from = static_cast<const uint8_t*>(mask.data);
  for (int r = 0; r < p.b; ++r) {
    const int q_len = p.q_indptr[r + 1] - p.q_indptr[r];
    const std::vector<uint32_t> request =
        bits_from_dense({from, static_cast<std::size_t>(q_len) * q_len}, q_len, words);
    std::copy(request.begin(), request.end(), bits_.begin() + static_cast<int64_t>(p.q_indptr[r]) * words);
    from += static_cast<int64_t>(q_len) * q_len;
  }
  p.mask.ancestor_bits = bits_.data();
  p.mask.words_per_row = words;
}

VerifyProblem BoundProblem::layer(nb::handle q, nb::handle kv, uintptr_t stream,
                                  std::vector<Array>& keep) const {
  VerifyProblem p = problem_;
  const Array& new_q = keep.emplace_back(q, "q", stream);
  need_place(new_q, p.memory, device_id_);
  p.q = view_queries(new_q);
  if (new_q.shape[1] != p.shape.h_q || new_q.shape[2] != p.shape.d_qk())
    fail("q", "q has shape " + new_q.shape_text() + ": must be [total_q, h_q, d_qk] = [" +
                  std::to_string(problem_.q.total_q) + ", " + std::to_string(p.shape.h_q) + ", " +
                  std::to_string(p.shape.d_qk()) + "], as planned");
  const Array& new_kv = keep.emplace_back(kv, "kv", stream);
  need_place(new_kv, p.memory, device_id_);
  p.kv = view_pool(new_kv, p.kv.page_size, has_scales(p.kv.dtype) ? std::string(dtype_name(p.kv.dtype)) : "",
                   p.kv.scale, p.shape);
  return p;
}

VerifyOutput bind_output(const VerifyProblem& p, int device_id, nb::handle out, nb::handle lse,
                         uintptr_t stream, std::vector<Array>& keep) {
  VerifyOutput o;
  if (out.is_none()) fail("out", "out is missing: an array like q can't be made here, so give one");
  const Array& a = keep.emplace_back(out, "out", stream);
  a.need_element({Element::kF32, Element::kF16, Element::kBF16});
  a.need_shape({p.q.total_q, p.shape.h_q, p.shape.d_v}, "[total_q, h_q, d_v]");
  a.need_compact();
  a.need_writable();
  need_place(a, p.memory, device_id);
  o.out = a.data;
  o.out_dtype = number_dtype(a);
  if (!lse.is_none()) {
    const Array& l = keep.emplace_back(lse, "lse", stream);
    o.lse = l.typed<float>(Element::kF32, {p.q.total_q, p.shape.h_q}, "[total_q, h_q]");
    l.need_writable();
    need_place(l, p.memory, device_id);
  }
  return o;
}

namespace {

RunOptions make_options(const std::string& backend, int num_threads, bool batch_invariant, int split_keys,
                        uintptr_t stream) {
  RunOptions o;
  o.backend = backend;
  o.num_threads = num_threads;
  o.batch_invariant = batch_invariant;
  o.split_keys = split_keys;
  o.stream = reinterpret_cast<void*>(stream);
  return o;
}

// On the host the call takes as long as the attention does: other Python threads run meanwhile.
template <class F>
void run_unlocked(Memory memory, F&& f) {
  if (memory == Memory::kDevice) return f();
  nb::gil_scoped_release unlocked;
  f();
}

ProblemArguments arguments(const nb::tuple& a) {
  return {a[0],
          a[1],
          a[2],
          a[3],
          a[4],
          a[5],
          a[6],
          a[7],
          nb::cast<int64_t>(a[8]),
          nb::cast<int64_t>(a[9]),
          nb::cast<double>(a[10]),
          nb::cast<double>(a[11]),
          nb::cast<std::string>(a[12]),
          nb::cast<int64_t>(a[13]),
          nb::cast<int64_t>(a[14])};
}

// A Verifier with the arrays of its plan.
class Planner {
 public:
  Planner(const std::string& backend, int num_threads, bool batch_invariant, int split_keys)
      : verifier_(make_options(backend, num_threads, batch_invariant, split_keys, 0)) {}

  void plan(const nb::tuple& a, uintptr_t stream) {
    bound_.reset();
    arguments_ = arguments(a);
    const auto bound = std::make_shared<const BoundProblem>(arguments_, stream);
    run_alone(*bound, stream, [&] { verifier_.plan(bound->problem()); });
    bound_ = bound;
  }

  // From the arrays of the plan, whose contents have changed.
  void update(uintptr_t stream) {
    auto bound = planned("update");
    // What is checked or converted here on the host depends on contents.
    if (bound->problem().memory == Memory::kHost)
      bound = std::make_shared<const BoundProblem>(arguments_, stream);
    run_alone(*bound, stream, [&] { verifier_.update(bound->problem()); });
    bound_ = bound;
  }

  void run(nb::handle q, nb::handle kv, nb::handle out, nb::handle lse, uintptr_t stream) {
    const auto bound = planned("run");
    std::vector<Array> keep;
    keep.reserve(4);
    const VerifyProblem p = bound->layer(q, kv, stream, keep);
    if (p.q.total_q != bound->problem().q.total_q)
      fail("q", "q has " + std::to_string(p.q.total_q) + " nodes: must be " +
                    std::to_string(bound->problem().q.total_q) + ", as planned");
    const VerifyOutput o = bind_output(p, bound->device_id(), out, lse, stream, keep);
    run_alone(*bound, stream, [&] { verifier_.run(p, o); });
  }

  void check(uintptr_t stream) {
    const auto bound = planned("check");
    verifier_.set_stream(reinterpret_cast<void*>(stream));
    nb::gil_scoped_release unlocked;
    verifier_.check_device();
  }

  std::string backend() const {
    const std::lock_guard lock(mutex_);
    return verifier_.backend();
  }
  std::string describe() const {
    const std::lock_guard lock(mutex_);
    return verifier_.describe();
  }
  std::size_t workspace_bytes() const {
    const std::lock_guard lock(mutex_);
    return verifier_.workspace_bytes();
  }
  nb::tuple out_shape() const {  // total_q, h_q, d_v
    const VerifyProblem& p = planned("out_shape")->problem();
    return nb::make_tuple(p.q.total_q, p.shape.h_q, p.shape.d_v);
  }

 private:
  using Bound = std::shared_ptr<const BoundProblem>;  // held by calls too: another thread may plan meanwhile

  Bound planned(const char* call) const {
    if (!bound_) fail("plan", std::string(call) + "() needs a plan: call plan() first");
    return bound_;
  }

  // A Verifier serves one thread at a time; on the host, where the interpreter's lock is released, this lock sees to that.
  template <class F>
  void run_alone(const BoundProblem& bound, uintptr_t stream, F&& f) {
    run_unlocked(bound.problem().memory, [&] {
      const std::lock_guard lock(mutex_);
      verifier_.set_stream(reinterpret_cast<void*>(stream));
      f();
    });
  }

  mutable std::mutex mutex_;
  Verifier verifier_;
  ProblemArguments arguments_;
  Bound bound_;  // null without a plan
};

void verify_arrays(const nb::tuple& a, nb::handle out, nb::handle lse, const std::string& backend,
                   int num_threads, bool batch_invariant, int split_keys, uintptr_t stream) {
  const BoundProblem bound(arguments(a), stream);
  std::vector<Array> keep;
  keep.reserve(2);
  const VerifyOutput o = bind_output(bound.problem(), bound.device_id(), out, lse, stream, keep);
  const RunOptions options = make_options(backend, num_threads, batch_invariant, split_keys, stream);
  run_unlocked(bound.problem().memory, [&] { verify(bound.problem(), o, options); });
}

// Arrays in host memory, by name, become a case file; `numbers` are the safetensors names of the dtypes that arrays of uint8 and
// uint16 stand for. `expected`: the float64 oracle's result is added. What isn't a case is refused by write_case().
void write_case_file(const std::string& path, const nb::dict& tensors, const nb::dict& dtypes, int d_v,
                     int d_rope, double sm_scale, int page_size, const std::string& mask, double kv_scale,
                     const std::string& kv_packed, const std::string& source, bool expected) {
  Case c;
  c.shape.d_v = d_v;
  c.shape.d_rope = d_rope;
  c.sm_scale = sm_scale;
  c.page_size = page_size;
  c.mask = mask == "tree" ? MaskKind::kTree : mask == "causal" ? MaskKind::kCausal : MaskKind::kNone;
  c.kv_scale = kv_scale;
  c.kv_packed = packed_dtype(kv_packed);
  c.source = source;
  for (auto [key, value] : tensors) {
    const std::string name = nb::cast<std::string>(key);
    const Array a(value, name.c_str(), 0);
    if (a.memory != Memory::kHost) fail(name, name + " is on " + a.place() + ": must be on the host");
    a.need_compact();
    const std::string dtype = nb::cast<std::string>(dtypes[key]);
    const int bytes = dtype == "F32" || dtype == "I32" ? 4 : dtype == "F16" || dtype == "BF16" ? 2 : 1;
    if (element_bytes(a.element) != bytes) fail(name, name + " has not the width of " + dtype);
    if (name == "q" && a.ndim == 3) c.shape.h_q = static_cast<int>(a.shape[1]);
    c.set(name, dtype, std::vector<int64_t>(a.shape, a.shape + a.ndim), a.data);
  }
  nb::gil_scoped_release unlocked;
  if (expected) {
    const VerifyProblem p = c.problem();
    std::vector<float> out(static_cast<std::size_t>(p.q.total_q) * p.shape.h_q * p.shape.d_v);
    std::vector<float> lse(static_cast<std::size_t>(p.q.total_q) * p.shape.h_q);
    RunOptions oracle;
    oracle.backend = "cpu_oracle";
    verify(p, {out.data(), DType::kF32, lse.data()}, oracle);
    c.set("expected_out", "F32", {p.q.total_q, p.shape.h_q, p.shape.d_v}, out.data());
    c.set("expected_lse", "F32", {p.q.total_q, p.shape.h_q}, lse.data());
  }
  write_case(c, path);
}

}  // namespace

void add_verify(nb::module_& m) {
  m.attr("__version__") = version();
  m.def("verify", &verify_arrays, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg());
  m.def("write_case", &write_case_file);
  m.def("list_backends", [] {
    nb::list all;
    for (const BackendInfo& b : list_backends())
      all.append(nb::make_tuple(b.name, b.memory == Memory::kHost ? "cpu" : "cuda", b.available, b.reason));
    return all;
  });
  m.def("why_unsupported", [](const std::string& backend, const nb::tuple& a, uintptr_t stream) {
    return why_unsupported(backend, BoundProblem(arguments(a), stream).problem());
  });
  nb::class_<Planner>(m, "Planner")
      .def(nb::init<const std::string&, int, bool, int>())
      .def("plan", &Planner::plan)
      .def("update", &Planner::update)
      .def("run", &Planner::run, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
           nb::arg())
      .def("check", &Planner::check)
      .def("describe", &Planner::describe)
      .def_prop_ro("backend", &Planner::backend)
      .def_prop_ro("workspace_bytes", &Planner::workspace_bytes)
      .def_prop_ro("out_shape", &Planner::out_shape);
}

}  // namespace treemla::python
