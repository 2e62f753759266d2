// Case files from arbitrary bytes. The mutator knows the container: a mutation of the header that left its
// length wrong, or of a shape that left data_offsets wrong, would die at the first check and never reach the
// ones behind it.
#include <nlohmann/json.hpp>
#include <random>

#include "entries.hpp"

extern "C" std::size_t LLVMFuzzerMutate(uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  treemla::fuzz::run_case_file({data, size});
  return 0;
}

namespace {

using Json = nlohmann::ordered_json;
using Bytes = std::vector<uint8_t>;
using Random = std::minstd_rand;

constexpr std::size_t kLengthBytes = 8;

struct Container {
  std::string header;
  Bytes buffer;
};

bool split(const uint8_t* data, std::size_t size, Container& c) {
  uint64_t length = 0;
  if (size < kLengthBytes) return false;
  std::memcpy(&length, data, kLengthBytes);
  if (length > size - kLengthBytes) return false;
  const uint8_t* header = data + kLengthBytes;
  c.header.assign(header, header + length);
  c.buffer.assign(header + length, data + size);
  return true;
}

// 0 if it doesn't fit.
std::size_t join(const Container& c, uint8_t* data, std::size_t max_size) {
  const uint64_t length = c.header.size();
  if (kLengthBytes + length + c.buffer.size() > max_size) return 0;
  std::memcpy(data, &length, kLengthBytes);
  std::copy(c.header.begin(), c.header.end(), data + kLengthBytes);
  std::copy(c.buffer.begin(), c.buffer.end(), data + kLengthBytes + length);
  return kLengthBytes + length + c.buffer.size();
}

template <typename T>
T pick(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

Bytes mutate_bytes(Bytes bytes, std::size_t max_size) {
  const std::size_t size = bytes.size();
  bytes.resize(std::max(size, max_size));
  if (!bytes.empty()) bytes.resize(LLVMFuzzerMutate(bytes.data(), size, bytes.size()));
  return bytes;
}

int64_t dtype_bytes(const std::string& dtype) {
  return dtype.ends_with("64") ? 8 : dtype.ends_with("32") ? 4 : dtype.ends_with("16") ? 2 : 1;
}

// One change of a number, name or dtype in the parsed header.
void edit(Json& header, Random& random) {
  auto entry = header.begin();
  std::advance(entry, random() % header.size());
  if (entry.key() == "__metadata__") {
    if (!entry->is_object() || entry->empty()) return;
    auto field = entry->begin();
    std::advance(field, random() % entry->size());
    *field = pick<const char*>(random, {"1",    "0",     "2",          "4",          "-1",   "1.0",  "1e999",
                                        "nan",  "0x1p3", " 1",         "1 ",         "kdtr", "tree", "causal",
                                        "none", "e",     "2147483647", "2147483648", "0.5",  "4096", ""});
    if (random() % 8 == 0) entry->erase(entry->begin().key());
    if (random() % 8 == 0) (*entry)["kv_scale"] = "0.25";
    if (random() % 8 == 0) (*entry)["kv_layout"] = pick<const char*>(random, {"e4m3_packed", "q8_0"});
    return;
  }
  if (!entry->is_object() || !entry->contains("shape") || !entry->contains("dtype")) return;
  Json& shape = (*entry)["shape"];
  switch (random() % 6) {
    case 0:
      (*entry)["dtype"] =
          pick<const char*>(random, {"F32", "F16", "BF16", "F8_E4M3", "I32", "I64", "BOOL", "U8", "F4"});
      break;
    case 1:
      if (shape.is_array()) shape.push_back(random() % 4);
      break;
    case 2:
      if (shape.is_array() && !shape.empty()) shape.erase(shape.size() - 1);
      break;
    case 3:
      header.erase(entry.key());
      break;
    case 4: {
      const Json copy = *entry;
      header[pick<const char*>(
          random, {"extra", "parents", "positions", "token_ids", "expected_out", "kv", ""})] = copy;
      break;
    }
    default:
      if (shape.is_array() && !shape.empty()) {
        Json& extent = shape[random() % shape.size()];
        const uint64_t now = extent.is_number_integer() ? extent.get<uint64_t>() : 0;  // wraps, as it should
        extent = static_cast<int64_t>(
            pick<uint64_t>(random, {now + 1, now - 1, 0, 1, 2 * now, uint64_t{1} << 32, INT64_MAX}));
      }
  }
}

// Offsets and buffer follow the shapes; tensors keep their bytes as far as those go.
void lay_out(Json& header, Bytes& buffer) {
  constexpr int64_t kLimit = 1 << 16;
  Bytes next;
  for (auto& [name, entry] : header.items()) {
    if (name == "__metadata__" || !entry.is_object() || !entry.contains("dtype") || !entry.contains("shape"))
      continue;
    if (!entry["dtype"].is_string() || !entry["shape"].is_array()) continue;
    int64_t bytes = dtype_bytes(entry["dtype"].get<std::string>());
    for (const Json& extent : entry["shape"]) {
      if (!extent.is_number_integer()) return;
      if (__builtin_mul_overflow(bytes, extent.get<int64_t>(), &bytes) || bytes < 0 || bytes > kLimit) return;
    }
    std::size_t from = buffer.size();
    if (const auto it = entry.find("data_offsets"); it != entry.end() && it->is_array() && !it->empty()) {
      if (it->front().is_number_unsigned()) from = std::min<uint64_t>(from, it->front().get<uint64_t>());
    }
    const std::size_t begin = next.size();
    const std::size_t available =
        std::min<std::size_t>(buffer.size() - from, static_cast<std::size_t>(bytes));
    next.insert(next.end(), buffer.begin() + static_cast<std::ptrdiff_t>(from),
                buffer.begin() + static_cast<std::ptrdiff_t>(from + available));
    next.resize(begin + static_cast<std::size_t>(bytes));
    entry["data_offsets"] = {begin, next.size()};
  }
  buffer = std::move(next);
}

}  // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  Random random(seed);
  Container c;
  if (random() % 16 == 0 || !split(data, size, c)) return LLVMFuzzerMutate(data, size, max_size);
  const std::size_t room = max_size - std::min(max_size, size);
  switch (random() % 4) {
    case 0: {  // header text, its length kept true
      Bytes text = mutate_bytes(Bytes(c.header.begin(), c.header.end()), c.header.size() + room);
      c.header.assign(text.begin(), text.end());
      break;
    }
    case 1:  // one number of an index tensor: they are where contents are checked
      if (c.buffer.size() >= 4) {
        const std::size_t at = random() % (c.buffer.size() / 4) * 4;
        const int32_t value = pick<int32_t>(random, {-1, 0, 1, 2, 3, 4, 8, 2147480000, INT32_MAX, INT32_MIN});
        std::memcpy(c.buffer.data() + at, &value, 4);
      }
      break;
    case 2:
      c.buffer = mutate_bytes(c.buffer, c.buffer.size() + (random() % 4 ? 0 : room));
      break;
    default: {  // structure
      Json header = Json::parse(c.header, nullptr, /*allow_exceptions=*/false);
      if (!header.is_object() || header.empty()) return LLVMFuzzerMutate(data, size, max_size);
      for (unsigned edits = 1 + random() % 2; edits > 0 && !header.empty(); --edits) edit(header, random);
      if (random() % 8) lay_out(header, c.buffer);
      c.header = header.dump(-1, ' ', false, Json::error_handler_t::replace);
      if (random() % 4) c.header.resize((c.header.size() + 7) / 8 * 8, ' ');
    }
  }
  const std::size_t joined = join(c, data, max_size);
  return joined ? joined : LLVMFuzzerMutate(data, size, max_size);
}
