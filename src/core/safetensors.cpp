#include "core/safetensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "core/file_io.hpp"
#include "treemla/error.hpp"

namespace treemla::safetensors {
namespace {

using Json = nlohmann::json;

// In the order of the reference implementation, by which its writers sort. It also has dtypes of 4 and 6
// bits; no case holds any, so they count as unknown.
constexpr DTypeInfo kDTypes[] = {
    {"BOOL", 1},    {"U8", 1},          {"I8", 1},          {"F8_E5M2", 1}, {"F8_E4M3", 1},
    {"F8_E8M0", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}, {"I16", 2},     {"U16", 2},
    {"F16", 2},     {"BF16", 2},        {"I32", 4},         {"U32", 4},     {"F32", 4},
    {"C64", 8},     {"F64", 8},         {"I64", 8},         {"U64", 8},
};

// A header is at most {name: {field: [numbers]}}, so the events of the JSON parser are taken as they come: no
// document is built, no nesting beyond that is entered, and duplicate keys can't hide each other.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(Header& header, const std::string& file) : header_(header), file_(file) {}

  [[noreturn]] void fail(const std::string& field, const std::string& message) const {
    throw Error(ErrorCode::kBadFile, field, fmt::format("{}: {}", file_, message));
  }

  bool null() override { wrong_type("null"); }
  bool boolean(bool) override { wrong_type("a boolean"); }
  bool number_integer(number_integer_t value) override { wrong_type(fmt::format("the number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override {
    wrong_type(fmt::format("the number {}", one_line(text, 40)));
  }
  bool binary(binary_t&) override { wrong_type("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) wrong_type(fmt::format("the number {}", value));
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      fail(field(), fmt::format("{}: {} is larger than 2^63 - 1", path(), value));
    }
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata.emplace_back(std::move(key_), std::move(value));
      key_.clear();
    } else if (place_ == Place::kTensor && key_ == "dtype") {
      if (!find_dtype(value))
        fail(field(), fmt::format("{}: unknown dtype {}", path(), in_quotes(value, 20)));
      tensor_.dtype = std::move(value);
    } else {
      wrong_type("a string");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop) {
      place_ = name_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
      header_.has_metadata |= place_ == Place::kMetadata;
      tensor_ = {};
      tensor_.name = name_;
      seen_fields_ = 0;
    } else {
      wrong_type("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::kTop) {
      if (!names_.insert(value).second)
        fail(value, fmt::format("header: duplicate key {}", in_quotes(value)));
      name_ = std::move(value);
    } else if (place_ == Place::kMetadata) {
      if (!metadata_keys_.insert(value).second) {
        fail(value, fmt::format("__metadata__: duplicate key {}", in_quotes(value)));
      }
      key_ = std::move(value);
    } else {
      key_ = std::move(value);
      const int bit = key_ == "dtype"          ? kDTypeBit
                      : key_ == "shape"        ? kShapeBit
                      : key_ == "data_offsets" ? kOffsetsBit
                                               : 0;
      if (!bit) {
        fail(tensor_.name, fmt::format("tensor {}: unknown field {}, must be dtype, shape or data_offsets",
                                       in_quotes(tensor_.name), in_quotes(key_)));
      }
      if (seen_fields_ & bit) {
        fail(tensor_.name,
             fmt::format("tensor {}: duplicate key {}", in_quotes(tensor_.name), in_quotes(key_)));
      }
      seen_fields_ |= bit;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      const char* missing = !(seen_fields_ & kDTypeBit)     ? "dtype"
                            : !(seen_fields_ & kShapeBit)   ? "shape"
                            : !(seen_fields_ & kOffsetsBit) ? "data_offsets"
                                                            : nullptr;
      if (missing) {
        fail(tensor_.name,
             fmt::format("tensor {}: field \"{}\" is missing", in_quotes(tensor_.name), missing));
      }
      header_.tensors.push_back(std::move(tensor_));
    }
    place_ = place_ == Place::kTop ? Place::kOutside : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype") wrong_type("an array");
    place_ = key_ == "shape" ? Place::kShape : Place::kOffsets;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kShape) {
      tensor_.shape = numbers_;
    } else {
      if (numbers_.size() != 2) {
        fail(field(), fmt::format("{}: {} numbers, must be [begin, end]", path(), numbers_.size()));
      }
      tensor_.begin = static_cast<uint64_t>(numbers_[0]);
      tensor_.end = static_cast<uint64_t>(numbers_[1]);
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while ..."
    std::string_view text = error.what();
    if (const std::size_t colon = text.find(": "); colon != std::string_view::npos)
      text.remove_prefix(colon + 2);
    fail("header", fmt::format("header: not JSON at byte {} of the file: {}",
                               kLengthBytes + std::max<std::size_t>(position, 1) - 1, one_line(text, 160)));
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor, kShape, kOffsets };
  enum : int { kDTypeBit = 1, kShapeBit = 2, kOffsetsBit = 4 };

  // The name alone, for Error::argument().
  const std::string& field() const {
    static const std::string kHeader = "header";
    return place_ == Place::kOutside ? kHeader : place_ == Place::kMetadata ? key_ : name_;
  }

  std::string path() const {
    switch (place_) {
      case Place::kOutside:
        return "header";
      case Place::kTop:
        return in_quotes(name_);
      case Place::kMetadata:
        return fmt::format("__metadata__ {}", in_quotes(key_));
      default:
        return fmt::format("tensor {} {}", in_quotes(name_), key_);
    }
  }

  [[noreturn]] void wrong_type(const std::string& found) const {
    const char* wanted = place_ == Place::kOutside    ? "an object"
                         : place_ == Place::kTop      ? "an object"
                         : place_ == Place::kMetadata ? "a string"
                         : place_ != Place::kTensor   ? "an integer, 0 or more"
                         : key_ == "dtype"            ? "a string"
                                                      : "an array";
    fail(field(), fmt::format("{}: is {}, must be {}", path(), found, wanted));
  }

  Header& header_;
  const std::string& file_;
  Place place_ = Place::kOutside;
  std::string name_;  // key of the top object
  std::string key_;   // key inside __metadata__ or a tensor
  Tensor tensor_;
  int seen_fields_ = 0;
  std::vector<int64_t> numbers_;
  std::unordered_set<std::string> names_, metadata_keys_;
};

// Every byte of the buffer belongs to exactly one tensor: no two names share storage, nothing hides between
// them.
void check_offsets(std::vector<Tensor>& tensors, uint64_t buffer_bytes, const HeaderReader& reader) {
  for (const Tensor& t : tensors) {
    const auto fail = [&](const std::string& message) {
      reader.fail(t.name, fmt::format("tensor {} data_offsets [{}, {}]: {}", in_quotes(t.name), t.begin,
                                      t.end, message));
    };
    if (t.begin > t.end) fail("begin is past end");
    if (t.end > buffer_bytes) fail(fmt::format("end is past the buffer of {} bytes", buffer_bytes));
    uint64_t bytes = 0;
    try {
      bytes = tensor_bytes(t.name, t.dtype, t.shape);
    } catch (const Error& e) {
      reader.fail(t.name, e.what());
    }
    if (t.end - t.begin != bytes) {
      fail(fmt::format("{} bytes, but {} {} takes {}", t.end - t.begin, t.dtype, shape_text(t.shape), bytes));
    }
  }
  // Stable: tensors without elements keep their place in the header.
  std::stable_sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  std::string_view previous;
  for (const Tensor& t : tensors) {
    if (t.begin != covered) {
      reader.fail(
          t.name,
          t.begin > covered
              ? fmt::format("tensor {}: gap in the buffer, bytes {} to {} belong to no tensor",
                            in_quotes(t.name), covered, t.begin)
              : fmt::format("tensor {}: overlaps tensor {} in bytes {} to {} of the buffer",
                            in_quotes(t.name), in_quotes(previous), t.begin, std::min(covered, t.end)));
    }
    covered = t.end;
    previous = t.name;
  }
  if (covered != buffer_bytes) {
    reader.fail("file", fmt::format("buffer: the last {} of its {} bytes, from byte {}, belong to no tensor",
                                    buffer_bytes - covered, buffer_bytes, covered));
  }
}

std::string json_string(const std::string& text, const std::string& field) {
  try {
    return Json(text).dump();
  } catch (const Json::exception&) {
    throw Error(ErrorCode::kInvalidArgument, field,
                fmt::format("{}: {} is not UTF-8", field, in_quotes(text)));
  }
}

}  // namespace

const DTypeInfo* find_dtype(std::string_view name) {
  const auto* it =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& d) { return d.name == name; });
  return it == std::end(kDTypes) ? nullptr : it;
}

bool before(std::string_view name_a, std::string_view dtype_a, std::string_view name_b,
            std::string_view dtype_b) {
  const DTypeInfo* a = find_dtype(dtype_a);
  const DTypeInfo* b = find_dtype(dtype_b);
  return a != b ? a > b : name_a < name_b;
}

std::string shape_text(std::span<const int64_t> shape) {
  // A hostile header may list any number of extents.
  constexpr std::size_t kShown = 8;
  if (shape.size() <= kShown) return fmt::format("[{}]", fmt::join(shape, ", "));
  return fmt::format("[{}, ... {} extents]", fmt::join(shape.first(kShown), ", "), shape.size());
}

uint64_t tensor_bytes(const std::string& name, std::string_view dtype, std::span<const int64_t> shape) {
  const auto fail = [&](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, name, fmt::format("tensor {}: {}", in_quotes(name), message));
  };
  const DTypeInfo* info = find_dtype(dtype);
  if (!info) fail(fmt::format("unknown dtype {}", in_quotes(dtype, 20)));
  int64_t bytes = info->bytes;
  for (const int64_t extent : shape) {
    if (extent < 0) fail(fmt::format("shape {}: negative extent", shape_text(shape)));
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      fail(fmt::format("shape {}: more than 2^63 - 1 bytes", shape_text(shape)));
    }
  }
  return static_cast<uint64_t>(bytes);
}

Header parse(std::span<const std::byte> file, const std::string& name) {
  Header header;
  const std::string shown = one_line(name);
  HeaderReader reader(header, shown);
  if (file.size() < kLengthBytes) {
    reader.fail("file", fmt::format("the file has {} bytes, a case starts with {} bytes of header length",
                                    file.size(), kLengthBytes));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    reader.fail(
        "header",
        fmt::format("header length {} (bytes 0 to 8): at most {} allowed; is this a safetensors file?",
                    header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    reader.fail("header",
                fmt::format("header length {} (bytes 0 to 8): only {} bytes follow, the file is truncated",
                            header_bytes, file.size() - kLengthBytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                              static_cast<std::size_t>(header_bytes));
  // The format asks for it, and it keeps out the byte order mark that the JSON parser would skip.
  if (text.empty() || text[0] != '{')
    reader.fail("header", "header: must start with '{' at byte 8 of the file");
  Json::sax_parse(text.begin(), text.end(), static_cast<nlohmann::json_sax<Json>*>(&reader));
  header.bytes = text.size();
  check_offsets(header.tensors, file.size() - kLengthBytes - text.size(), reader);
  return header;
}

std::string write_header(const Metadata& metadata, std::span<Tensor> tensors) {
  std::string json = "{\"__metadata__\":{";
  for (const auto& [key, value] : metadata) {
    fmt::format_to(std::back_inserter(json), "{}{}:{}", &metadata.front().first == &key ? "" : ",",
                   json_string(key, "metadata key"), json_string(value, key));
  }
  json += '}';
  uint64_t offset = 0;
  for (Tensor& t : tensors) {
    t.begin = offset;
    t.end = offset += tensor_bytes(t.name, t.dtype, t.shape);
    fmt::format_to(std::back_inserter(json),
                   ",{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                   json_string(t.name, "tensor name"), t.dtype, fmt::join(t.shape, ","), t.begin, t.end);
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > kMaxHeaderBytes) {
    throw Error(ErrorCode::kInvalidArgument, "metadata",
                fmt::format("the header takes {} bytes, at most {} allowed", json.size(), kMaxHeaderBytes));
  }
  const uint64_t length = json.size();
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, kLengthBytes);
  return bytes + json;
}

}  // namespace treemla::safetensors
