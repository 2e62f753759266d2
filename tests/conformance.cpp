#include "conformance.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <random>

#include <fmt/format.h>

#include "api/expected.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "core/convert.hpp"
#include "core/kv_row.hpp"
#include "core/lookup.hpp"
#include "treemla/interleave.hpp"
#include "treemla/tree.hpp"

namespace treemla::test {
namespace {

// Entries of a page table that nobody may follow.
constexpr int64_t kPoisonEntry = 2147480000;

CaseSpec make_spec(std::vector<RequestSpec> requests, int h_q, TreeKind tree = TreeKind::kRandom) {
  CaseSpec s;
  s.requests = std::move(requests);
  s.shape = {h_q, 512, 64};
  s.tree = tree;
  return s;
}

// Copies rows of `width` elements to rows of `stride` elements, NaN between them.
std::vector<unsigned char> spread(const void* from, DType dtype, int64_t rows, int64_t width,
                                  int64_t stride) {
  const int64_t size = static_cast<int64_t>(dtype_bytes(dtype));
  std::vector<unsigned char> to(std::max<int64_t>(1, rows * stride * size));
  fill_nan(to.data(), dtype, rows * stride);
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(to.data() + r * stride * size, static_cast<const char*>(from) + r * width * size,
                width * size);
  return to;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const CaseParam& p) {
  return out << describe(p.spec)
             << fmt::format(" {}{}{}{}{} out={}{}{}", p.form.block_table ? "block-table" : "csr",
                            p.form.index_type == IndexType::kI64 ? " int64" : "",
                            p.form.ancestor_bits ? " bits" : "", p.form.strided ? " strided" : "",
                            p.form.interleaved ? " interleaved" : "", dtype_name(p.form.out_dtype),
                            p.options.batch_invariant ? fmt::format(" split={}", p.options.split_keys) : "",
                            p.options.num_threads ? fmt::format(" threads={}", p.options.num_threads) : "");
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

std::vector<CaseParam> smoke_cases() {
  std::vector<CaseParam> list;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3, DType::kF8E4M3Packed}) {
    CaseParam p{make_spec({{300, 9}}, 8), {}, {}};
    p.spec.kv_dtype = dtype;
    p.spec.q_dtype = is_fp8(dtype) ? DType::kBF16 : dtype;
    list.push_back(p);
    if (dtype == DType::kF32) continue;
    p.form.out_dtype = p.spec.q_dtype;  // rounded output
    p.spec.seed = 2;
    list.push_back(p);
  }
  for (MaskKind mask : {MaskKind::kNone, MaskKind::kCausal, MaskKind::kTree}) {
    CaseParam p{make_spec({{130, 17}, {0, 5}, {63, 33}}, 16), {}, {}};
    p.spec.mask = mask;
    p.spec.page_size = 16;
    list.push_back(p);
    p.form = {.block_table = true,
              .index_type = IndexType::kI64,
              .ancestor_bits = mask == MaskKind::kTree,
              .strided = true};
    list.push_back(p);
  }
  for (TreeKind tree : {TreeKind::kChain, TreeKind::kStar, TreeKind::kBinary, TreeKind::kDdtree})
    list.push_back({make_spec({{100, 33}}, 4, tree), {}, {}});
  return list;
}

std::vector<CaseParam> corner_cases() {
  std::vector<CaseParam> list;
  auto add = [&](CaseSpec spec, Form form = {}, RunOptions options = {}) {
    list.push_back({std::move(spec), form, options});
  };
  // Lengths: the prefix ends on, before and after a tile; no prefix; one key; tile counts around the number
  // of workers.
  for (int64_t prefix : {0, 1, 31, 54, 55, 56, 63, 64, 65, 127, 128, 129}) add(make_spec({{prefix, 9}}, 3));
  add(make_spec({{0, 1}}, 1));
  add(make_spec({{1, 1}}, 128));
  // Words of the mask: 32 nodes fill one, 33 need two.
  for (int q : {31, 32, 33, 64, 65, 129}) add(make_spec({{70, q}}, 2));
  add(make_spec({{40, 257}}, 1));
  add(make_spec({{5, 1025}}, 1));
  // Padded requests between real ones.
  add(make_spec({{0, 0}, {200, 5}, {0, 0}, {3, 7}, {0, 0}}, 6));
  add(make_spec({{0, 0}}, 4));
  // Head counts of every tensor-parallel split, and rows past one row tile.
  for (int h : {5, 7, 10, 12, 20, 40, 96, 126}) add(make_spec({{90, 4}}, h));
  add(make_spec({{80, 33}}, 64));
  // Widths of other models, and odd ones that no vector divides.
  for (MlaShape shape : {MlaShape{16, 256, 64}, MlaShape{8, 256, 32}, MlaShape{8, 512, 0}, MlaShape{5, 37, 3},
                         MlaShape{2, 1, 0}}) {
    CaseSpec s = make_spec({{140, 6}, {20, 3}}, shape.h_q);
    s.shape = shape;
    add(s);
    add(s, {.strided = true, .out_dtype = DType::kBF16});
  }
  // Scores: nearly uniform, very sharp, and so low that exp without the maximum gives zeros.
  for (double gain : {0.01, 0.5, 30.0, 400.0, 2e4}) {
    CaseSpec s = make_spec({{500, 9}}, 4);
    s.gain = gain;
    s.q_dtype = s.kv_dtype = DType::kF32;
    add(s);
  }
  // Page sizes that lengths do not divide.
  for (int page : {2, 7, 16, 64, 1000}) {
    CaseSpec s = make_spec({{333, 5}, {64, 9}, {1, 2}}, 4);
    s.page_size = page;
    add(s);
    add(s, {.block_table = true});
  }
  for (DType dtype : {DType::kF8E4M3, DType::kF8E4M3Packed}) {
    CaseSpec s = make_spec({{300, 9}}, 8);
    s.kv_dtype = dtype;
    s.kv_scale = 0.37;  // no power of two
    add(s);
    s.q_dtype = DType::kF32;
    add(s);
  }
  // Packed rows of other models, in pages, with padding between them; one group of latents; scores so spread out
  // that a scale in the wrong place shows.
  for (MlaShape shape :
       {MlaShape{16, 256, 64}, MlaShape{8, 256, 32}, MlaShape{8, 512, 0}, MlaShape{3, 128, 2}}) {
    CaseSpec s = make_spec({{140, 6}, {20, 3}}, shape.h_q);
    s.shape = shape;
    s.kv_dtype = DType::kF8E4M3Packed;
    s.page_size = 16;
    s.gain = 8;
    add(s);
    add(s, {.block_table = true, .strided = true, .out_dtype = DType::kBF16});
  }
  // Splits: more workers than tiles, batch-invariant splits shorter and longer than a request.
  for (int threads : {1, 2, 3, 7}) add(make_spec({{1000, 9}, {3, 2}}, 8), {}, {.num_threads = threads});
  for (int keys : {1, 64, 100, 256, 1 << 20})
    add(make_spec({{1000, 9}, {3, 2}}, 8), {},
        {.num_threads = 3, .batch_invariant = true, .split_keys = keys});
  return list;
}

std::vector<CaseParam> random_cases(int count, uint64_t seed) {
  std::mt19937_64 rng(seed);
  auto upto = [&](int64_t n) { return static_cast<int64_t>(rng() % (n + 1)); };
  std::vector<CaseParam> list;
  for (int i = 0; i < count; ++i) {
    CaseParam p;
    CaseSpec& s = p.spec;
    const int b = 1 + upto(4);
    for (int r = 0; r < b; ++r)
      s.requests.push_back(upto(9) == 0 ? RequestSpec{0, 0}
                                        : RequestSpec{upto(3) ? upto(400) : upto(2),
                                                      static_cast<int>(1 + (upto(3) ? upto(12) : upto(70)))});
    const MlaShape shapes[] = {{0, 512, 64}, {0, 512, 64}, {0, 256, 64}, {0, 256, 32}, {0, 512, 0}};
    s.shape = shapes[upto(4)];
    const int heads[] = {1, 2, 3, 8, 10, 16, 20, 33};
    s.shape.h_q = heads[upto(7)];
    s.tree = static_cast<TreeKind>(upto(4));
    s.mask = upto(3) ? MaskKind::kTree : upto(1) ? MaskKind::kCausal : MaskKind::kNone;
    s.kv_dtype = static_cast<DType>(upto(4));
    s.q_dtype = is_fp8(s.kv_dtype) ? static_cast<DType>(upto(2)) : s.kv_dtype;
    const int pages[] = {1, 1, 3, 16, 64};
    s.page_size = pages[upto(4)];
    const double gains[] = {0.1, 1, 4, 10};
    s.gain = gains[upto(3)];
    s.seed = rng();
    p.form.block_table = upto(1);
    p.form.index_type = upto(1) ? IndexType::kI64 : IndexType::kI32;
    p.form.ancestor_bits = s.mask == MaskKind::kTree && upto(1);
    p.form.strided = upto(3) == 0;
    p.form.out_dtype = s.q_dtype != DType::kF32 && upto(1) ? s.q_dtype : DType::kF32;
    p.options.num_threads = static_cast<int>(upto(4));
    p.options.batch_invariant = upto(3) == 0;
    p.options.split_keys = p.options.batch_invariant ? 64 * static_cast<int>(upto(4)) : 0;
    list.push_back(p);
  }
  return list;
}

std::vector<CaseParam> interleaved_cases() {
  std::vector<CaseParam> list;
  for (int h : {1, 8, 16, 24, 72}) {  // few rows and many, and both in one request
    CaseParam p{make_spec({{130, 1}, {61, 3}}, h), {.interleaved = true}, {}};
    p.spec.q_dtype = p.spec.kv_dtype = DType::kBF16;
    p.spec.page_size = h;  // any
    list.push_back(p);
    p.form.strided = true;
    p.spec.q_dtype = DType::kF32;
    list.push_back(p);
  }
  for (CaseParam p : random_cases(kRandomCases / 3, 20260930)) {
    p.spec.kv_dtype = DType::kBF16;
    p.form.interleaved = true;
    list.push_back(p);
  }
  return list;
}

std::vector<CaseParam> q8_cases() {
  std::vector<CaseParam> list;
  for (DType q_dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int h : {1, 4, 8, 16, 24, 72}) {  // few rows and many, and both in one request
      CaseParam p{make_spec({{130, 1}, {61, 3}}, h), {.out_dtype = q_dtype}, {}};
      p.spec.q_dtype = q_dtype;
      p.spec.kv_dtype = DType::kQ8;
      p.spec.kv_scale = 0.37;  // no power of two
      p.spec.page_size = h;    // any
      p.spec.gain = 8;         // a scale in the wrong place shows
      list.push_back(p);
    }
  }
  for (MlaShape shape :
       {MlaShape{16, 256, 64}, MlaShape{8, 256, 32}, MlaShape{8, 512, 0}, MlaShape{3, 32, 0}}) {
    CaseParam p{make_spec({{140, 6}, {20, 3}}, shape.h_q), {.block_table = true, .strided = true}, {}};
    p.spec.shape = shape;
    p.spec.kv_dtype = DType::kQ8;
    list.push_back(p);
  }
  for (CaseParam p : random_cases(kRandomCases / 3, 20261130)) {
    p.spec.kv_dtype = DType::kQ8;
    list.push_back(p);
  }
  return list;
}

Instance::Instance(const CaseParam& param) : case_(generate_case(param.spec)), form_(param.form) {
  add_expected(case_);
  reshape(param.form);
}

Instance::Instance(const Case& recorded, const Form& form) : case_(recorded), form_(form) { reshape(form); }

void Instance::reshape(const Form& form) {
  problem_ = case_.problem();
  VerifyProblem& p = problem_;
  const int d_qk = p.shape.d_qk();
  if (form.strided) {
    const int64_t head = d_qk + 8, token = p.shape.h_q * head + 24,
                  row_elements = kv_row_elements(p.shape, p.kv.dtype), row = row_elements + 16;
    q_ = spread(p.q.data, p.q.dtype, p.q.total_q * p.shape.h_q, d_qk, head);
    q_ = spread(q_.data(), p.q.dtype, p.q.total_q, p.shape.h_q * head, token);
    kv_ = spread(p.kv.data, p.kv.dtype, p.kv.num_pages * p.kv.page_size, row_elements, row);
    p.q.data = q_.data();
    p.q.head_stride = head;
    p.q.token_stride = token;
    p.kv.data = kv_.data();
    p.kv.row_stride = row;
  }

  if (form.interleaved && p.kv.dtype == DType::kBF16 && p.shape.d_v % kInterleavedBlock == 0 &&
      p.shape.d_rope % kInterleavedBlock == 0) {
    const int64_t rows = p.kv.num_pages * p.kv.page_size, stride = kv_row_stride(p);
    std::vector<unsigned char> moved(std::max<int64_t>(1, rows * stride) * 2);
    fill_nan(moved.data(), DType::kBF16, rows * stride);
    interleave_rows({.shape = p.shape,
                     .rows = p.kv.data,
                     .num_rows = rows,
                     .row_stride = stride,
                     .pool = moved.data(),
                     .pool_rows = rows,
                     .pool_row_stride = stride});
    kv_ = std::move(moved);
    p.kv.data = kv_.data();
    p.kv.layout = KvLayout::kInterleaved;
  }

  // The used entries of each request, in the layout asked for; everything else poisoned.
  const PageTable csr = p.pages;
  auto pages_of = [&](int r) {
    return (static_cast<int64_t>(p.kv_len[r]) + p.kv.page_size - 1) / p.kv.page_size;
  };
  int64_t most = 0;
  for (int r = 0; r < p.b; ++r) most = std::max(most, pages_of(r));
  if (form.block_table || form.index_type == IndexType::kI64) {
    const int64_t stride = most + 3, count = form.block_table ? p.b * stride : csr.num_entries;
    entries64_.assign(std::max<int64_t>(1, count), kPoisonEntry);
    for (int r = 0; r < p.b; ++r)
      for (int64_t i = 0; i < pages_of(r); ++i)
        entries64_[(form.block_table ? r * stride : csr.indptr[r]) + i] = page_entry(csr, csr.indptr[r] + i);
    entries32_.assign(entries64_.begin(), entries64_.end());
    p.pages.index_type = form.index_type;
    if (form.index_type == IndexType::kI64)
      p.pages.entries = entries64_.data();
    else
      p.pages.entries = entries32_.data();
    p.pages.num_entries = count;
    if (form.block_table) {
      p.pages.indptr = nullptr;
      p.pages.stride = stride;
    }
  }
  if (form.ancestor_bits && p.mask.kind == MaskKind::kTree) {
    BatchBits built = batch_bits_from_parents({p.mask.parents, static_cast<size_t>(p.q.total_q)},
                                              {p.q_indptr, static_cast<size_t>(p.b) + 1});
    bits_ = std::move(built.bits);
    p.mask.parents = nullptr;
    p.mask.ancestor_bits = bits_.data();
    p.mask.words_per_row = built.words;
  }
  poison_output();
}

void Instance::poison_output() {
  const int64_t rows = problem_.q.total_q * problem_.shape.h_q, n = rows * problem_.shape.d_v;
  out_.assign(std::max<int64_t>(1, n * static_cast<int64_t>(dtype_bytes(form_.out_dtype))),
              0xFF);  // NaN in every dtype
  lse_.assign(rows, std::numeric_limits<float>::quiet_NaN());
}

VerifyProblem Instance::problem() const { return problem_; }
VerifyOutput Instance::output() { return {out_.data(), form_.out_dtype, lse_.data()}; }

std::vector<float> Instance::out() const {
  std::vector<float> out(problem_.q.total_q * problem_.shape.h_q * problem_.shape.d_v);
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = load_element(out_.data(), form_.out_dtype, static_cast<int64_t>(i));
  return out;
}

Precision precision_of(DType dtype) {
  return dtype == DType::kF32 ? Precision::kF32 : dtype == DType::kF16 ? Precision::kF16 : Precision::kBF16;
}

Precision host_arithmetic(const std::string& backend, const VerifyProblem& p, DType out_dtype) {
  const bool bf16 =
      backend == "cpu_simd" && simd_products(p.shape, p.q.dtype, p.kv.dtype, out_dtype) != SimdProducts::kFma;
  return bf16 ? Precision::kBF16 : Precision::kF32;
}

Comparison Instance::judge(Precision arithmetic) const {
  // The looser of what was computed with and what was rounded to.
  const Precision rounded = precision_of(form_.out_dtype);
  const Precision precision =
      arithmetic == Precision::kBF16 || rounded == Precision::kF32 ? arithmetic : rounded;
  return compare(problem_.shape, problem_.q.total_q, out().data(), case_.expected_out(), lse_.data(),
                 case_.expected_lse(), precision);
}

}  // namespace treemla::test
