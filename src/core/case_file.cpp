// What the tensors and metadata of a `.kdtr` file mean. safetensors.cpp reads the container, file_io.cpp the
// file.
#include "treemla/case_file.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>

#include "core/file_io.hpp"
#include "core/kv_row.hpp"
#include "core/safetensors.hpp"
#include "treemla/error.hpp"

namespace treemla {
namespace {

static_assert(std::endian::native == std::endian::little, "case files are little-endian and used in place");

constexpr std::string_view kFormat = "kdtr";
constexpr std::string_view kVersion = "1";
constexpr std::string_view kLseBase = "e";
constexpr DType kPackedDtypes[] = {DType::kF8E4M3Packed, DType::kQ8};  // values of kv_layout, by their names
// The order in which new cases write them.
constexpr std::string_view kMetadataKeys[] = {"format",   "version",   "d_v",   "d_rope",
                                              "sm_scale", "page_size", "mask",  "lse_base",
                                              "kv_scale", "kv_layout", "source"};
// The limits of check_problem(), so that a bad number is reported as the metadata it stands in.
constexpr int kMaxWidth = 4096;
constexpr int kMaxHeads = 1024;

[[noreturn]] void fail(std::string_view field, const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, std::string(field), fmt::format("{}: {}", field, message));
}

std::string_view mask_name(MaskKind mask) {
  switch (mask) {
    case MaskKind::kNone:
      return "none";
    case MaskKind::kCausal:
      return "causal";
    case MaskKind::kTree:
      return "tree";
  }
  fail("mask", fmt::format("{} is no MaskKind", static_cast<int>(mask)));
}

std::string double_text(double value) {
  char text[32];
  return {
      text,
      std::to_chars(text, text + sizeof text, value).ptr};  // the shortest that reads back to the same value
}

std::optional<double> parse_double(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

// ---- metadata -> fields

class MetadataReader {
 public:
  explicit MetadataReader(const safetensors::Metadata& metadata) : metadata_(metadata) {}

  const std::string* find(std::string_view key) const {
    const auto it =
        std::find_if(metadata_.begin(), metadata_.end(), [&](const auto& kv) { return kv.first == key; });
    return it == metadata_.end() ? nullptr : &it->second;
  }
  const std::string& text(std::string_view key) const {
    const std::string* value = find(key);
    if (!value) fail(key, "missing in __metadata__");
    return *value;
  }
  void expect(std::string_view key, std::string_view wanted) const {
    if (text(key) != wanted) fail(key, fmt::format("{}, must be \"{}\"", in_quotes(text(key)), wanted));
  }
  // Digits only: no sign, blank, leading zero or anything behind.
  int integer(std::string_view key, int low, int high) const {
    const std::string& s = text(key);
    int value = 0;
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
    if (error != std::errc() || end != s.data() + s.size() || std::to_string(value) != s || value < low ||
        value > high) {
      fail(key, fmt::format("{}, must be a decimal integer {}..{}", in_quotes(s), low, high));
    }
    return value;
  }
  double real(std::string_view key) const {
    const std::optional<double> value = parse_double(text(key));
    if (!value) fail(key, fmt::format("{}, must be a finite decimal number", in_quotes(text(key))));
    return *value;
  }

 private:
  const safetensors::Metadata& metadata_;
};

void read_fields(Case& c, const safetensors::Metadata& metadata) {
  const MetadataReader reader(metadata);
  reader.expect("format", kFormat);
  reader.expect("version", kVersion);
  reader.expect("lse_base", kLseBase);
  c.shape.d_v = reader.integer("d_v", 1, kMaxWidth);
  c.shape.d_rope = reader.integer("d_rope", 0, kMaxWidth);
  c.sm_scale = reader.real("sm_scale");
  c.page_size = reader.integer("page_size", 1, std::numeric_limits<int>::max());
  const std::string& mask = reader.text("mask");
  bool known = false;
  for (const MaskKind kind : {MaskKind::kTree, MaskKind::kCausal, MaskKind::kNone}) {
    if (mask != mask_name(kind)) continue;
    c.mask = kind;
    known = true;
  }
  if (!known) fail("mask", fmt::format("{}, must be \"tree\", \"causal\" or \"none\"", in_quotes(mask)));
  c.kv_scale = reader.find("kv_scale") ? reader.real("kv_scale") : 1.0;
  c.kv_packed.reset();
  if (const std::string* layout = reader.find("kv_layout")) {
    for (const DType t : kPackedDtypes) {
      if (*layout == dtype_name(t)) c.kv_packed = t;
    }
    if (!c.kv_packed)
      fail("kv_layout", fmt::format("{}, must be \"e4m3_packed\" or \"q8_0\"", in_quotes(*layout)));
  }
  c.source = reader.find("source") ? *reader.find("source") : "";
}

// ---- fields -> metadata

std::string field_text(const Case& c, std::string_view key) {
  if (key == "format") return std::string(kFormat);
  if (key == "version") return std::string(kVersion);
  if (key == "d_v") return std::to_string(c.shape.d_v);
  if (key == "d_rope") return std::to_string(c.shape.d_rope);
  if (key == "sm_scale") return double_text(c.sm_scale);
  if (key == "page_size") return std::to_string(c.page_size);
  if (key == "mask") return std::string(mask_name(c.mask));
  if (key == "lse_base") return std::string(kLseBase);
  if (key == "kv_scale") return double_text(c.kv_scale);
  if (key == "kv_layout") return std::string(c.kv_packed ? dtype_name(*c.kv_packed) : "");
  return c.source;
}

// Is the field left out of new metadata?
bool is_default(const Case& c, std::string_view key) {
  return (key == "kv_scale" && c.kv_scale == 1.0) || (key == "kv_layout" && !c.kv_packed) ||
         (key == "source" && c.source.empty());
}

// The metadata as read, with the fields changed since put in. A number keeps its spelling while its value
// stays.
safetensors::Metadata updated_metadata(const Case& c, safetensors::Metadata metadata) {
  for (const std::string_view key : kMetadataKeys) {
    const std::string now = field_text(c, key);
    const auto it =
        std::find_if(metadata.begin(), metadata.end(), [&](const auto& kv) { return kv.first == key; });
    if (it != metadata.end() && key == "kv_layout" && is_default(c, key)) {
      metadata.erase(it);  // it has no text that says so
    } else if (it != metadata.end()) {
      const bool is_real = key == "sm_scale" || key == "kv_scale";
      if (it->second != now && !(is_real && parse_double(it->second) == parse_double(now))) it->second = now;
    } else if (!is_default(c, key)) {
      metadata.emplace_back(key, now);
    }
  }
  return metadata;
}

// ---- checks of fields and tensors; contents are check_problem()'s

void check_fields(const Case& c) {
  const auto range = [](std::string_view field, int value, int low, int high) {
    if (value < low || value > high) fail(field, fmt::format("{}, must be {}..{}", value, low, high));
  };
  range("d_v", c.shape.d_v, 1, kMaxWidth);
  range("d_rope", c.shape.d_rope, 0, kMaxWidth);
  range("page_size", c.page_size, 1, std::numeric_limits<int>::max());
  mask_name(c.mask);
  const auto positive = [](std::string_view field, double value) {
    if (!std::isfinite(value) || value <= 0)
      fail(field, fmt::format("{}, must be finite and above 0", value));
  };
  positive("sm_scale", c.sm_scale);
  positive("kv_scale", c.kv_scale);
  if (!c.kv_packed) return;
  if (!has_scales(*c.kv_packed))
    fail("kv_layout", fmt::format("{}, must be e4m3_packed or q8_0", dtype_name(*c.kv_packed)));
  check_kv_widths(c.shape, *c.kv_packed);
}

struct Dim {
  std::string_view name;
  int64_t extent;
};
constexpr int64_t kAny = -1;

// Null if the tensor is absent and may be.
const CaseTensor* check_tensor(const Case& c, const std::string& name, bool required,
                               std::initializer_list<std::string_view> dtypes,
                               std::initializer_list<Dim> dims) {
  const CaseTensor* t = c.find(name);
  if (!t) {
    if (required) fail(name, "tensor is missing");
    return nullptr;
  }
  if (std::find(dtypes.begin(), dtypes.end(), t->dtype) == dtypes.end()) {
    fail(name, fmt::format("dtype {}, must be {}", t->dtype, fmt::join(dtypes, " or ")));
  }
  bool same = t->shape.size() == dims.size();
  std::string names, extents;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const Dim& dim = dims.begin()[i];
    same = same && (dim.extent == kAny || dim.extent == t->shape[i]);
    names += fmt::format("{}{}", i ? ", " : "", dim.name);
    extents += fmt::format("{}{}", i ? ", " : "", dim.extent == kAny ? "any" : std::to_string(dim.extent));
  }
  if (!same) {
    fail(name,
         fmt::format("shape {}, must be [{}] = [{}]", safetensors::shape_text(t->shape), names, extents));
  }
  return t;
}

void check_tensors(const Case& c) {
  const int64_t d_qk = c.shape.d_qk();
  const CaseTensor* q =
      check_tensor(c, "q", true, {"F32", "F16", "BF16"}, {{"total_q", kAny}, {"h_q", kAny}, {"d_qk", d_qk}});
  const int64_t total_q = q->shape[0], h_q = q->shape[1];
  if (h_q < 1 || h_q > kMaxHeads) fail("q", fmt::format("h_q {}, must be 1..{}", h_q, kMaxHeads));
  if (h_q != c.shape.h_q) fail("q", fmt::format("{} heads, but the case's h_q is {}", h_q, c.shape.h_q));

  const CaseTensor* kv =
      c.kv_packed
          ? check_tensor(c, "kv", true, {"U8"},
                         {{"rows", kAny}, {"row_bytes", kv_row_elements(c.shape, *c.kv_packed)}})
          : check_tensor(c, "kv", true, {"F32", "F16", "BF16", "F8_E4M3"}, {{"rows", kAny}, {"d_qk", d_qk}});
  if (kv->shape[0] % c.page_size != 0) {
    fail("kv", fmt::format("{} rows, must be a multiple of page_size {}", kv->shape[0], c.page_size));
  }

  const CaseTensor* q_indptr = check_tensor(c, "q_indptr", true, {"I32"}, {{"b + 1", kAny}});
  const int64_t b = q_indptr->shape[0] - 1;
  if (b < 0 || b >= std::numeric_limits<int>::max()) {
    fail("q_indptr", fmt::format("{} entries, must be b + 1 for a batch of 0..{}", b + 1,
                                 std::numeric_limits<int>::max() - 1));
  }
  check_tensor(c, "kv_len", true, {"I32"}, {{"b", b}});
  check_tensor(c, "page_indptr", true, {"I32"}, {{"b + 1", b + 1}});
  check_tensor(c, "page_indices", true, {"I32"}, {{"n", kAny}});
  check_tensor(c, "parents", c.mask == MaskKind::kTree, {"I32"}, {{"total_q", total_q}});
  check_tensor(c, "positions", false, {"I32"}, {{"total_q", total_q}});
  check_tensor(c, "token_ids", false, {"I32"}, {{"total_q", total_q}});

  const CaseTensor* out = check_tensor(c, "expected_out", false, {"F32"},
                                       {{"total_q", total_q}, {"h_q", h_q}, {"d_v", c.shape.d_v}});
  const CaseTensor* lse =
      check_tensor(c, "expected_lse", false, {"F32"}, {{"total_q", total_q}, {"h_q", h_q}});
  if (!out != !lse)
    fail(out ? "expected_lse" : "expected_out", "missing: a case has both expected tensors or neither");
}

DType case_dtype(const std::string& dtype) {
  if (dtype == "F32") return DType::kF32;
  if (dtype == "F16") return DType::kF16;
  return dtype == "BF16" ? DType::kBF16 : DType::kF8E4M3;
}

template <typename T>
const T* data_of(const Case& c, const std::string& name) {
  const CaseTensor* t = c.find(name);
  return t ? reinterpret_cast<const T*>(t->data) : nullptr;
}

// check_problem() speaks of the struct it checks; people who look into a file want the name of the tensor or
// of the metadata.
std::string field_of(const std::string& argument) {
  constexpr std::pair<std::string_view, std::string_view> kFields[] = {{"pages.entries", "page_indices"},
                                                                       {"pages.indptr", "page_indptr"},
                                                                       {"mask.parents", "parents"},
                                                                       {"shape.d_v", "d_v"},
                                                                       {"shape.d_rope", "d_rope"}};
  for (const auto& [name, field] : kFields) {
    if (argument == name) return std::string(field);
  }
  return argument;
}

// What the address of a tensor must be a multiple of. The scales in rows of bytes are wider than those.
std::size_t alignment_of(const CaseTensor& t) {
  if (t.name == "kv" && t.dtype == "U8") return dtype_alignment(DType::kF8E4M3Packed);
  return static_cast<std::size_t>(safetensors::find_dtype(t.dtype)->bytes);
}

// Takes the private parts of `c` by reference because only read_case() and parse_case() are its friends.
void load(const FileBytes& file, const std::string& name, Case& c, std::vector<CaseTensor>& tensors,
          safetensors::Metadata& metadata, std::vector<std::shared_ptr<const void>>& owners) {
  safetensors::Header header = safetensors::parse({file.data.get(), file.size}, name);
  const std::byte* buffer = file.data.get() + safetensors::kLengthBytes + header.bytes;
  for (safetensors::Tensor& t : header.tensors) {
    CaseTensor tensor{std::move(t.name), std::move(t.dtype), std::move(t.shape), buffer + t.begin,
                      static_cast<std::size_t>(t.end - t.begin)};
    std::shared_ptr<const void> owner = file.data;
    if (reinterpret_cast<std::uintptr_t>(tensor.data) % alignment_of(tensor) != 0) {
      const std::shared_ptr<std::byte> block = allocate_bytes(tensor.bytes);
      std::copy_n(tensor.data, tensor.bytes, block.get());
      tensor.data = block.get();
      owner = block;
    }
    tensors.push_back(std::move(tensor));
    owners.push_back(std::move(owner));
  }
  metadata = std::move(header.metadata);
  try {
    if (!header.has_metadata) fail("__metadata__", "missing: a safetensors file, but no case");
    read_fields(c, metadata);
    const CaseTensor* q = c.find("q");
    if (q && q->shape.size() == 3) c.shape.h_q = static_cast<int>(std::min<int64_t>(q->shape[1], kMaxHeads));
    check_problem(c.problem());
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kInvalidArgument) throw;
    const std::string field = field_of(e.argument());
    const bool renamed = field != e.argument();
    throw Error(
        ErrorCode::kBadFile, field,
        fmt::format("{}: {}{}{}", one_line(name), renamed ? field : "", renamed ? ": " : "", e.what()));
  }
}

}  // namespace

const CaseTensor* Case::find(const std::string& name) const {
  const auto it =
      std::find_if(tensors_.begin(), tensors_.end(), [&](const CaseTensor& t) { return t.name == name; });
  return it == tensors_.end() ? nullptr : &*it;
}

// owners_[i] keeps tensors_[i].data alive, so that a replaced tensor frees its memory. New tensors go where
// safetensors writers would put them, which keeps every tensor aligned in the file.
void Case::set(const std::string& name, const std::string& dtype, std::vector<int64_t> extents,
               const void* data) {
  if (name == "__metadata__") fail("name", "\"__metadata__\" can't name a tensor");
  const auto bytes = static_cast<std::size_t>(safetensors::tensor_bytes(name, dtype, extents));
  if (!data && bytes) fail(name, fmt::format("data is null, must point to {} bytes", bytes));
  const std::shared_ptr<std::byte> block = allocate_bytes(bytes);
  if (bytes) std::memcpy(block.get(), data, bytes);
  CaseTensor tensor{name, dtype, std::move(extents), block.get(), bytes};

  const auto index_of = [&](auto matches) {
    return std::find_if(tensors_.begin(), tensors_.end(), matches) - tensors_.begin();
  };
  std::ptrdiff_t i = index_of([&](const CaseTensor& t) { return t.name == name; });
  if (i < std::ssize(tensors_)) {
    if (tensors_[static_cast<std::size_t>(i)].dtype == dtype) {
      tensors_[static_cast<std::size_t>(i)] = std::move(tensor);
      owners_[static_cast<std::size_t>(i)] = block;
      return;
    }
    tensors_.erase(tensors_.begin() + i);
    owners_.erase(owners_.begin() + i);
  }
  i = index_of([&](const CaseTensor& t) { return safetensors::before(name, dtype, t.name, t.dtype); });
  tensors_.insert(tensors_.begin() + i, std::move(tensor));
  owners_.insert(owners_.begin() + i, block);
}

int Case::b() const {
  const CaseTensor* t = find("q_indptr");
  return t && t->shape.size() == 1 && t->shape[0] > 0 ? static_cast<int>(t->shape[0] - 1) : 0;
}

int64_t Case::total_q() const {
  const CaseTensor* t = find("q");
  return t && !t->shape.empty() ? t->shape[0] : 0;
}

VerifyProblem Case::problem() const {
  check_fields(*this);
  check_tensors(*this);
  const CaseTensor& q = *find("q");
  const CaseTensor& kv_pool = *find("kv");
  VerifyProblem p;
  p.shape = shape;
  p.b = b();
  p.q = {.data = q.data, .dtype = case_dtype(q.dtype), .total_q = total_q()};
  p.kv = {.data = kv_pool.data,
          .dtype = kv_packed ? *kv_packed : case_dtype(kv_pool.dtype),
          .num_pages = kv_pool.shape[0] / page_size,
          .page_size = page_size,
          .scale = kv_scale};
  p.pages = {.entries = data_of<int32_t>(*this, "page_indices"),
             .index_type = IndexType::kI32,
             .num_entries = find("page_indices")->shape[0],
             .indptr = data_of<int32_t>(*this, "page_indptr")};
  p.q_indptr = data_of<int32_t>(*this, "q_indptr");
  p.kv_len = data_of<int32_t>(*this, "kv_len");
  p.mask.kind = mask;
  if (mask == MaskKind::kTree) p.mask.parents = data_of<int32_t>(*this, "parents");
  p.sm_scale = sm_scale;
  p.memory = Memory::kHost;
  return p;
}

const float* Case::expected_out() const { return data_of<float>(*this, "expected_out"); }
const float* Case::expected_lse() const { return data_of<float>(*this, "expected_lse"); }

Case read_case(const std::string& path) {
  Case c;
  load(read_file(path), path, c, c.tensors_, c.metadata_, c.owners_);
  return c;
}

Case parse_case(const void* data, std::size_t size, const std::string& name) {
  const std::shared_ptr<std::byte> block = allocate_bytes(size);
  if (size) std::memcpy(block.get(), data, size);
  Case c;
  load({block, size}, name, c, c.tensors_, c.metadata_, c.owners_);
  return c;
}

// Refuses what read_case() would refuse: no file that can't be read back is ever written.
std::vector<std::byte> serialize_case(const Case& c) {
  check_problem(c.problem());
  std::vector<safetensors::Tensor> layout;
  layout.reserve(c.tensors_.size());
  for (const CaseTensor& t : c.tensors_)
    layout.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
  const std::string header = safetensors::write_header(updated_metadata(c, c.metadata_), layout);
  const uint64_t buffer_bytes = layout.empty() ? 0 : layout.back().end;

  std::vector<std::byte> bytes;
  bytes.reserve(header.size() + static_cast<std::size_t>(buffer_bytes));
  const auto append = [&](const void* data, std::size_t size) {
    const auto* first = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), first, first + size);
  };
  append(header.data(), header.size());
  for (const CaseTensor& t : c.tensors_) append(t.data, t.bytes);
  return bytes;
}

void write_case(const Case& c, const std::string& path) { write_file(path, serialize_case(c)); }

}  // namespace treemla
