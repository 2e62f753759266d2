// Case files: round trips, the recorded cases, and every kind of file that lies.
#include "treemla/case_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "../fuzz/entries.hpp"
#include "core/file_io.hpp"
#include "core/safetensors.hpp"
#include "treemla/error.hpp"

namespace treemla {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

using Bytes = std::vector<std::byte>;

const fs::path kCases = TREEMLA_CASES_DIR;
const fs::path kCorpus = kCases / "../fuzz/corpus";

// A folder of its own, removed afterwards.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "treemla-case-XXXXXX").string();
    if (!::mkdtemp(pattern.data())) throw std::runtime_error("mkdtemp");
    path_ = pattern;
  }
  ~Folder() { fs::remove_all(path_); }
  fs::path operator/(const std::string& name) const { return path_ / name; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path_)) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  fs::path path_;
};

Bytes slurp(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

void spit(const fs::path& path, const Bytes& bytes) {
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
}

// Two requests: a 3-node tree after 2 cached tokens, and a root alone.
Case small_case(const std::string& dtype = "F32") {
  Case c;
  c.shape = {.h_q = 2, .d_v = 4, .d_rope = 2};
  c.sm_scale = 0.1;
  c.page_size = 2;
  c.mask = MaskKind::kTree;
  c.source = "small_case()";
  std::vector<float> numbers(512);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i % 13) - 6;
  const auto ints = [&](const char* name, std::vector<int32_t> v) {
    c.set(name, "I32", {std::ssize(v)}, v.data());
  };
  c.set("q", dtype == "F8_E4M3" ? "BF16" : dtype, {4, 2, 6}, numbers.data());
  c.set("kv", dtype, {10, 6}, numbers.data());
  ints("q_indptr", {0, 3, 4});
  ints("kv_len", {5, 1});
  ints("page_indptr", {0, 3, 4});
  ints("page_indices", {4, 1, 3, 2});
  ints("parents", {-1, 0, 0, -1});
  c.set("expected_out", "F32", {4, 2, 4}, numbers.data());
  c.set("expected_lse", "F32", {4, 2}, numbers.data());
  return c;
}

// The same requests on rows of bytes.
Case byte_case(DType dtype, int d_v, int d_rope) {
  Case c = small_case("BF16");
  c.shape = {.h_q = 2, .d_v = d_v, .d_rope = d_rope};
  c.kv_packed = dtype;
  const int row_bytes = kv_row_elements(c.shape, dtype);
  const std::vector<uint16_t> q(4 * 2 * c.shape.d_qk(), 0x3F80);
  std::vector<uint8_t> kv(10 * row_bytes);
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = static_cast<uint8_t>(i * 37);
  const std::vector<float> out(4 * 2 * d_v);
  c.set("q", "BF16", {4, 2, c.shape.d_qk()}, q.data());
  c.set("kv", "U8", {10, row_bytes}, kv.data());
  c.set("expected_out", "F32", {4, 2, d_v}, out.data());
  return c;
}
// Of 128 + 4 + 4 bytes.
Case packed_case() { return byte_case(DType::kF8E4M3Packed, 128, 2); }
// Of 3 blocks of 34 bytes.
Case q8_case() { return byte_case(DType::kQ8, 64, 32); }

struct Parts {
  std::string header;  // without padding
  std::string buffer;
};

Parts split(const Bytes& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const auto* text = reinterpret_cast<const char*>(file.data());
  std::string header(text + 8, length);
  header.erase(header.find_last_not_of(' ') + 1);
  return {header, std::string(text + 8 + length, file.size() - 8 - length)};
}

Bytes join(const Parts& parts) {
  const uint64_t length = parts.header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  file += parts.header + parts.buffer;
  const auto* first = reinterpret_cast<const std::byte*>(file.data());
  return {first, first + file.size()};
}

// The small case with `from` in its header replaced; the rest stays as it was.
Bytes edited(const std::string& from, const std::string& to, const Case& c = small_case()) {
  Parts parts = split(serialize_case(c));
  const std::size_t at = parts.header.find(from);
  EXPECT_NE(at, std::string::npos) << from << " is not in " << parts.header;
  parts.header.replace(at, from.size(), to);
  return join(parts);
}

// The message; "" if `f` throws nothing.
std::string message_of(const std::function<void()>& f, ErrorCode code = ErrorCode::kBadFile) {
  try {
    f();
  } catch (const Error& e) {
    const std::string what = e.what();
    EXPECT_EQ(e.code(), code) << what;
    EXPECT_FALSE(e.argument().empty()) << what;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    return what;
  }
  return "";
}
std::string parse_message(const Bytes& file) {
  return message_of([&] { parse_case(file.data(), file.size(), "x.kdtr"); });
}

bool same_tensors(const Case& a, const Case& b) {
  return std::equal(a.tensors().begin(), a.tensors().end(), b.tensors().begin(), b.tensors().end(),
                    [](const CaseTensor& x, const CaseTensor& y) {
                      return x.name == y.name && x.dtype == y.dtype && x.shape == y.shape &&
                             x.bytes == y.bytes && std::equal(x.data, x.data + x.bytes, y.data);
                    });
}

// ---- the recorded cases

struct Recorded {
  std::string file;
  int b, h_q, page_size;
  int64_t total_q, kv_rows;
};
void PrintTo(const Recorded& r, std::ostream* os) { *os << r.file; }

class RecordedCase : public testing::TestWithParam<Recorded> {};

TEST_P(RecordedCase, ReadsAndWritesBackByteForByte) {
  const Recorded& want = GetParam();
  const fs::path path = kCases / (want.file + ".kdtr");
  const Case c = read_case(path);
  EXPECT_EQ(c.b(), want.b);
  EXPECT_EQ(c.total_q(), want.total_q);
  EXPECT_EQ(c.shape.h_q, want.h_q);
  EXPECT_EQ(c.shape.d_v, 512);
  EXPECT_EQ(c.shape.d_rope, 64);
  EXPECT_EQ(c.sm_scale, 0.14467962580268923);
  EXPECT_EQ(c.page_size, want.page_size);
  EXPECT_EQ(c.mask, MaskKind::kTree);
  EXPECT_EQ(c.kv_scale, 1.0);
  EXPECT_THAT(c.source, StartsWith("Hugging Face DeepseekV3Attention"));
  EXPECT_NE(c.expected_out(), nullptr);
  EXPECT_NE(c.expected_lse(), nullptr);

  const VerifyProblem p = c.problem();
  EXPECT_EQ(p.kv.num_pages * p.kv.page_size, want.kv_rows);
  EXPECT_EQ(p.q.dtype, DType::kBF16);
  EXPECT_EQ(p.kv.dtype, DType::kBF16);
  EXPECT_EQ(p.memory, Memory::kHost);
  EXPECT_NO_THROW(check_problem(p));

  const Bytes original = slurp(path);
  EXPECT_TRUE(serialize_case(c) == original);
  EXPECT_TRUE(serialize_case(parse_case(original.data(), original.size())) == original);
  const Folder folder;
  write_case(c, folder / "copy.kdtr");
  EXPECT_TRUE(slurp(folder / "copy.kdtr") == original);
}

INSTANTIATE_TEST_SUITE_P(Cases, RecordedCase,
                         testing::Values(Recorded{"h8_p0_b8", 1, 8, 1, 9, 10},
                                         Recorded{"h64_p512_b8", 1, 64, 1, 9, 586},
                                         Recorded{"h16_p2048_b16", 1, 16, 1, 17, 2323},
                                         Recorded{"h64_p128_b32", 1, 64, 1, 33, 181},
                                         Recorded{"h8_p4096_b32", 1, 8, 64, 33, 4672},
                                         Recorded{"h20_ragged_b3", 3, 20, 16, 18, 448}),
                         [](const auto& i) { return i.param.file; });

// ---- round trips of new cases

TEST(CaseFile, NewCaseIsWrittenInCanonicalOrder) {
  Case c = small_case("BF16");
  const int64_t wide[] = {1, 2};
  const bool flags[] = {true, false, true};
  c.set("flags", "BOOL", {3}, flags);
  c.set("wide", "I64", {2}, wide);
  c.kv_scale = 0.5;
  const Bytes file = serialize_case(c);
  const std::string header = split(file).header;
  EXPECT_THAT(
      header,
      StartsWith(
          "{\"__metadata__\":{\"format\":\"kdtr\",\"version\":\"1\",\"d_v\":\"4\",\"d_rope\":\"2\","
          "\"sm_scale\":\"0.1\",\"page_size\":\"2\",\"mask\":\"tree\",\"lse_base\":\"e\","
          "\"kv_scale\":\"0.5\",\"source\":\"small_case()\"},\"wide\":{\"dtype\":\"I64\",\"shape\":[2],"
          "\"data_offsets\":[0,16]},"));
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  std::vector<std::string> names;
  for (const CaseTensor& t : c.tensors()) names.push_back(t.name);
  EXPECT_THAT(names, testing::ElementsAre("wide", "expected_lse", "expected_out", "kv_len", "page_indices",
                                          "page_indptr", "parents", "q_indptr", "kv", "q", "flags"));
  EXPECT_TRUE(same_tensors(parse_case(file.data(), file.size()), c));
}

TEST(CaseFile, EveryDTypeMaskAndOptionalTensorSurvives) {
  for (const char* dtype : {"F32", "F16", "BF16", "F8_E4M3"}) {
    for (const MaskKind mask : {MaskKind::kTree, MaskKind::kCausal, MaskKind::kNone}) {
      Case c = small_case(dtype);
      c.mask = mask;
      const int32_t ids[] = {5, 6, 7, 8};
      c.set("positions", "I32", {4}, ids);
      c.set("token_ids", "I32", {4}, ids);
      const Bytes file = serialize_case(c);
      const Case again = parse_case(file.data(), file.size());
      EXPECT_TRUE(same_tensors(again, c)) << dtype;
      EXPECT_EQ(again.mask, mask);
      EXPECT_TRUE(serialize_case(again) == file) << dtype;
      EXPECT_EQ(again.problem().mask.parents != nullptr, mask == MaskKind::kTree);
    }
  }
}

TEST(CaseFile, PackedRowsSurvive) {
  const Case c = packed_case();
  const Bytes file = serialize_case(c);
  EXPECT_THAT(split(file).header,
              AllOf(HasSubstr("\"lse_base\":\"e\",\"kv_layout\":\"e4m3_packed\",\"source\""),
                    HasSubstr("\"kv\":{\"dtype\":\"U8\",\"shape\":[10,136]")));
  Case again = parse_case(file.data(), file.size());
  EXPECT_EQ(again.kv_packed, DType::kF8E4M3Packed);
  EXPECT_TRUE(same_tensors(again, c));
  EXPECT_TRUE(serialize_case(again) == file);
  const VerifyProblem p = again.problem();
  EXPECT_EQ(p.kv.dtype, DType::kF8E4M3Packed);
  EXPECT_EQ(p.kv.data, again.find("kv")->data);
  EXPECT_EQ(p.kv.row_stride, 0);
  EXPECT_EQ(p.kv.num_pages, 5);

  // Turned into a case of plain rows, it says nothing of a layout.
  const std::vector<uint16_t> plain(10 * 130);
  again.set("kv", "BF16", {10, 130}, plain.data());
  again.kv_packed.reset();
  EXPECT_THAT(split(serialize_case(again)).header, testing::Not(HasSubstr("kv_layout")));
}

TEST(CaseFile, Q8RowsSurvive) {
  const Case c = q8_case();
  const Bytes file = serialize_case(c);
  EXPECT_THAT(split(file).header, AllOf(HasSubstr("\"lse_base\":\"e\",\"kv_layout\":\"q8_0\",\"source\""),
                                        HasSubstr("\"kv\":{\"dtype\":\"U8\",\"shape\":[10,102]")));
  const Case again = parse_case(file.data(), file.size());
  EXPECT_EQ(again.kv_packed, DType::kQ8);
  EXPECT_TRUE(same_tensors(again, c));
  EXPECT_TRUE(serialize_case(again) == file);
  const VerifyProblem p = again.problem();
  EXPECT_EQ(p.kv.dtype, DType::kQ8);
  EXPECT_EQ(p.kv.data, again.find("kv")->data);
  EXPECT_EQ(p.kv.num_pages, 5);
}

TEST(CaseFile, Q8RowsThatLieAreNamed) {
  const auto lie = [](const std::string& from, const std::string& to) {
    return parse_message(edited(from, to, q8_case()));
  };
  EXPECT_THAT(lie("[10,102]", "[6,170]"),
              HasSubstr("x.kdtr: kv: shape [6, 170], must be [rows, row_bytes] = [any, 102]"));
  EXPECT_THAT(lie("q8_0", "q4_0"),
              HasSubstr("x.kdtr: kv_layout: \"q4_0\", must be \"e4m3_packed\" or \"q8_0\""));
  EXPECT_THAT(lie("q8_0", "e4m3_packed"), HasSubstr("x.kdtr: d_v: shape.d_v = 64 must be a multiple of 128"));
  EXPECT_THAT(lie("\"d_rope\":\"32\"", "\"d_rope\":\"33\""),
              HasSubstr("x.kdtr: d_rope: shape.d_rope = 33 must be a multiple of 32"));
  Case c = q8_case();
  c.kv_packed = DType::kBF16;
  EXPECT_THAT(message_of([&] { serialize_case(c); }, ErrorCode::kInvalidArgument),
              HasSubstr("bf16, must be e4m3_packed or q8_0"));
}

TEST(CaseFile, PackedRowsThatLieAreNamed) {
  const auto lie = [](const std::string& from, const std::string& to) {
    return parse_message(edited(from, to, packed_case()));
  };
  const std::string layout = "\"kv_layout\":\"e4m3_packed\",";
  EXPECT_THAT(lie(layout, ""), HasSubstr("x.kdtr: kv: dtype U8, must be F32 or F16 or BF16 or F8_E4M3"));
  EXPECT_THAT(lie("e4m3_packed", "packed"),
              HasSubstr("x.kdtr: kv_layout: \"packed\", must be \"e4m3_packed\""));
  EXPECT_THAT(lie("[10,136]", "[8,170]"),
              HasSubstr("x.kdtr: kv: shape [8, 170], must be [rows, row_bytes] = [any, 136]"));
  EXPECT_THAT(lie("\"dtype\":\"U8\"", "\"dtype\":\"I8\""), HasSubstr("x.kdtr: kv: dtype I8, must be U8"));
  EXPECT_THAT(lie("\"d_v\":\"128\"", "\"d_v\":\"127\""),
              HasSubstr("x.kdtr: d_v: shape.d_v = 127 must be a multiple of 128"));
  EXPECT_THAT(lie("\"d_rope\":\"2\"", "\"d_rope\":\"3\""),
              HasSubstr("x.kdtr: d_rope: shape.d_rope = 3 must be even"));
  EXPECT_THAT(parse_message(edited("\"lse_base\"", layout + "\"lse_base\"")),
              HasSubstr("x.kdtr: d_v: shape.d_v = 4 must be a multiple of 128"));
}

// The scales are float32, whatever the file calls the bytes that they are stored as.
TEST(CaseFile, MisalignedPackedRowsAreCopied) {
  Case c = packed_case();
  for (int extra = 1; extra < 4; ++extra) {
    const std::vector<uint8_t> bytes(extra, 7);
    c.set("a_pad", "U8", {extra}, bytes.data());  // before kv by its name
    const Bytes file = serialize_case(c);
    const Case again = parse_case(file.data(), file.size());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(again.find("kv")->data) % 4, 0u);
    EXPECT_TRUE(same_tensors(again, c));
    EXPECT_TRUE(serialize_case(again) == file);
  }
}

TEST(CaseFile, ScalesRoundTripToTheSameBits) {
  for (const double scale :
       {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, 0.14467962580268923, 1e22, 123456789.0}) {
    Case c = small_case();
    c.sm_scale = c.kv_scale = scale;
    const Bytes file = serialize_case(c);
    const Case again = parse_case(file.data(), file.size());
    EXPECT_EQ(again.sm_scale, scale);
    EXPECT_EQ(again.kv_scale, scale);
  }
}

TEST(CaseFile, UnchangedFieldsKeepTheirTextAndChangedOnesAreWritten) {
  const Bytes file =
      edited("\"sm_scale\":\"0.1\"", "\"sm_scale\":\"1.0e-1\",\"note\":\"\xC3\xA9 \\\"kept\\\"\\n\"");
  Case c = parse_case(file.data(), file.size());
  EXPECT_EQ(c.sm_scale, 0.1);
  EXPECT_EQ(split(serialize_case(c)).header, split(file).header);

  c.source = "changed";
  c.page_size = 1;  // the same pages of half the size: the indices stay within the pool
  const int32_t len[] = {3, 1};
  c.set("kv_len", "I32", {2}, len);
  c.kv_scale = 2;
  const std::string header = split(serialize_case(c)).header;
  EXPECT_THAT(header, AllOf(HasSubstr("\"sm_scale\":\"1.0e-1\",\"note\":\"\xC3\xA9 \\\"kept\\\"\\n\""),
                            HasSubstr("\"source\":\"changed\""), HasSubstr("\"page_size\":\"1\""),
                            HasSubstr("\"kv_scale\":\"2\"}")));
  c.sm_scale = 0.25;
  EXPECT_THAT(split(serialize_case(c)).header, HasSubstr("\"sm_scale\":\"0.25\",\"note\""));
}

TEST(CaseFile, SetReplacesAndCopiesShareStorage) {
  Case c = small_case();
  const Case copy = c;
  EXPECT_EQ(copy.find("q")->data, c.find("q")->data);
  const std::vector<float> zeros(48);
  c.set("q", "F32", {4, 2, 6}, zeros.data());
  EXPECT_NE(copy.find("q")->data, c.find("q")->data);
  EXPECT_EQ(c.find("q")->bytes, 192u);
  const std::vector<uint16_t> halves(48);
  c.set("q", "F16", {4, 2, 6}, halves.data());
  EXPECT_EQ(c.tensors().back().name, "q");  // narrower dtypes go behind wider ones
  EXPECT_EQ(
      std::count_if(c.tensors().begin(), c.tensors().end(), [](const auto& t) { return t.name == "q"; }), 1);
  EXPECT_NO_THROW(serialize_case(c));
  EXPECT_EQ(c.find("nothing"), nullptr);
}

TEST(CaseFile, SetRefusesWhatNoFileCanHold) {
  Case c;
  const auto refused = [&](const std::function<void()>& f) {
    return message_of(f, ErrorCode::kInvalidArgument);
  };
  const float x[] = {1, 2};
  EXPECT_THAT(refused([&] { c.set("q", "F31", {2}, x); }), HasSubstr("unknown dtype \"F31\""));
  EXPECT_THAT(refused([&] { c.set("q", "F32", {-2}, x); }), HasSubstr("[-2]: negative extent"));
  EXPECT_THAT(refused([&] { c.set("q", "F32", {INT64_MAX, 2}, x); }), HasSubstr("more than 2^63 - 1 bytes"));
  EXPECT_THAT(refused([&] { c.set("q", "F32", {2}, nullptr); }), HasSubstr("data is null"));
  EXPECT_THAT(refused([&] { c.set("__metadata__", "F32", {2}, x); }), HasSubstr("can't name a tensor"));
  EXPECT_NO_THROW(c.set("empty", "F32", {0, 5}, nullptr));
  EXPECT_EQ(c.tensors().size(), 1u);
}

TEST(CaseFile, WritingRefusesWhatReadingWould) {
  const auto refused = [&](const Case& c) {
    return message_of([&] { serialize_case(c); }, ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(refused(Case{}), HasSubstr("d_v: 0, must be 1..4096"));
  Case c = small_case();
  c.page_size = 3;
  EXPECT_THAT(refused(c), HasSubstr("kv: 10 rows, must be a multiple of page_size 3"));
  c = small_case();
  c.shape.h_q = 3;
  EXPECT_THAT(refused(c), HasSubstr("q: 2 heads, but the case's h_q is 3"));
  c = small_case();
  c.kv_scale = 0;
  EXPECT_THAT(refused(c), HasSubstr("kv_scale: 0, must be finite and above 0"));
  c = small_case();
  c.source = "not UTF-8: \xFF";
  EXPECT_THAT(refused(c), HasSubstr("source: \"not UTF-8: \xEF\xBF\xBD\" is not UTF-8"));
  c.source = std::string(safetensors::kMaxHeaderBytes, 'x');
  EXPECT_THAT(refused(c), HasSubstr("at most 1048576 allowed"));
}

TEST(CaseFile, ProblemIsAViewOfTheTensors) {
  const Case c = small_case("F8_E4M3");
  const VerifyProblem p = c.problem();
  EXPECT_EQ(p.b, 2);
  EXPECT_EQ(p.q.total_q, 4);
  EXPECT_EQ(p.q.data, c.find("q")->data);
  EXPECT_EQ(p.q.dtype, DType::kBF16);
  EXPECT_EQ(p.kv.dtype, DType::kF8E4M3);
  EXPECT_EQ(p.kv.num_pages, 5);
  EXPECT_EQ(p.kv.page_size, 2);
  EXPECT_EQ(p.pages.num_entries, 4);
  EXPECT_EQ(p.pages.indptr[2], 4);
  EXPECT_EQ(p.kv_len[0], 5);
  EXPECT_EQ(p.mask.parents[3], -1);
  EXPECT_EQ(p.sm_scale, 0.1);
}

// ---- files that lie

struct Lie {
  const char* name;
  std::string from, to;  // in the header of small_case()
  std::string message;
};
void PrintTo(const Lie& lie, std::ostream* os) { *os << lie.name; }

class LyingHeader : public testing::TestWithParam<Lie> {};

TEST_P(LyingHeader, IsNamed) {
  const Lie& lie = GetParam();
  EXPECT_THAT(parse_message(edited(lie.from, lie.to)), AllOf(StartsWith("x.kdtr: "), HasSubstr(lie.message)));
}

const Lie kLies[] = {
    // JSON
    {"BadValue", "\"shape\":[4,2,6]", "\"shape\":[4,2,x]", "header: not JSON at byte "},
    {"NestedArrays", "[4,2,6]", std::string(100000, '[') + std::string(100000, ']'),
     "tensor \"q\" shape: is an array, must be an integer"},
    {"NestedObjects", "\"tree\"", "{\"a\":{\"b\":1}}",
     "__metadata__ \"mask\": is an object, must be a string"},
    {"NoObject", "{\"__metadata__\"", "[{\"__metadata__\"", "must start with '{'"},
    {"ByteOrderMark", "{\"__metadata__\"", "\xEF\xBB\xBF{\"__metadata__\"", "must start with '{'"},
    {"InvalidUtf8", "small_case()", "\xC3(", "invalid string: ill-formed UTF-8 byte"},
    {"LoneSurrogate", "small_case()", "\\ud800", "not JSON at byte"},
    {"DuplicateTensor", "\"kv_len\"", "\"kv\"", "header: duplicate key \"kv\""},
    {"DuplicateMetadata", "\"d_rope\"", "\"d_v\"", "__metadata__: duplicate key \"d_v\""},
    {"DuplicateMetadataObject", "\"kv_len\"", "\"__metadata__\"", "header: duplicate key \"__metadata__\""},
    {"DuplicateField", "\"shape\":[4,2,6]", "\"shape\":[4,2,6],\"shape\":[4,2,6]",
     "tensor \"q\": duplicate key \"shape\""},
    {"UnknownField", "\"shape\":[4,2,6]", "\"shape\":[4,2,6],\"stride\":[1]", "unknown field \"stride\""},
    {"MissingField", "\"shape\":[4,2,6],", "", "tensor \"q\": field \"shape\" is missing"},
    {"ControlCharacters", "\"kv_len\"", "\"kv_len\\n\\u0000\"", "kv_len: tensor is missing"},
    // field types
    {"NumberInMetadata", "\"d_v\":\"4\"", "\"d_v\":4",
     "__metadata__ \"d_v\": is the number 4, must be a string"},
    {"NullInMetadata", "\"d_v\":\"4\"", "\"d_v\":null", "__metadata__ \"d_v\": is null, must be a string"},
    {"ArrayInMetadata", "\"d_v\":\"4\"", "\"d_v\":[4]",
     "__metadata__ \"d_v\": is an array, must be a string"},
    {"DTypeNumber", "\"dtype\":\"I32\"", "\"dtype\":32", "dtype: is the number 32, must be a string"},
    {"DTypeArray", "\"dtype\":\"I32\"", "\"dtype\":[\"I32\"]", "dtype: is an array, must be a string"},
    {"ShapeString", "\"shape\":[4,2,6]", "\"shape\":\"4\"",
     "tensor \"q\" shape: is a string, must be an array"},
    {"ShapeNumber", "\"shape\":[4,2,6]", "\"shape\":48",
     "tensor \"q\" shape: is the number 48, must be an array"},
    {"ShapeOfStrings", "[4,2,6]", "[\"4\",2,6]", "tensor \"q\" shape: is a string, must be an integer"},
    {"ShapeOfBooleans", "[4,2,6]", "[true,2,6]", "tensor \"q\" shape: is a boolean, must be an integer"},
    {"TensorIsArray", "{\"dtype\":\"F32\",\"shape\":[4,2,6]", "[{\"dtype\":\"F32\",\"shape\":[4,2,6]",
     "\"q\": is an array, must be an object"},
    // shapes and dtypes
    {"UnknownDType", "\"dtype\":\"F32\",\"shape\":[4,2,6]", "\"dtype\":\"F4\",\"shape\":[4,2,6]",
     "tensor \"q\" dtype: unknown dtype \"F4\""},
    {"NegativeExtent", "[4,2,6]", "[-4,2,6]",
     "tensor \"q\" shape: is the number -4, must be an integer, 0 or more"},
    {"RealExtent", "[4,2,6]", "[4.0,2,6]",
     "tensor \"q\" shape: is the number 4.0, must be an integer, 0 or more"},
    {"ExtentPast63Bits", "[4,2,6]", "[9223372036854775808,2,6]",
     "9223372036854775808 is larger than 2^63 - 1"},
    {"ExtentPast64Bits", "[4,2,6]", "[99999999999999999999,2,6]", "is the number 99999999999999999999"},
    {"ProductOverflows", "[4,2,6]", "[4294967296,4294967296,6]", "more than 2^63 - 1 bytes"},
    {"ProductWrapsToTheRightSize", "[4,2,6]", "[4611686018427387952,4,1]", "more than 2^63 - 1 bytes"},
    {"ZeroTimesOverflow", "[4,2,6]", "[9223372036854775807,9223372036854775807,0]",
     "more than 2^63 - 1 bytes"},
    {"WrongBytes", "[4,2,6]", "[4,2,5]", "192 bytes, but F32 [4, 2, 5] takes 160"},
    {"WrongRank", "[4,2,6]", "[8,6]", "q: shape [8, 6], must be [total_q, h_q, d_qk] = [any, any, 6]"},
    {"WrongWidth", "[10,6]", "[6,10]", "kv: shape [6, 10], must be [rows, d_qk] = [any, 6]"},
    {"WrongKnownDType", "\"kv_len\":{\"dtype\":\"I32\"", "\"kv_len\":{\"dtype\":\"F32\"",
     "kv_len: dtype F32, must be I32"},
    {"UnsignedIndices", "\"parents\":{\"dtype\":\"I32\"", "\"parents\":{\"dtype\":\"U32\"",
     "parents: dtype U32, must be I32"},
    {"OutNotF32", "\"expected_lse\":{\"dtype\":\"F32\"", "\"expected_lse\":{\"dtype\":\"I32\"",
     "expected_lse: dtype I32, must be F32"},
    {"OtherTotalQ", "[4,2,6]", "[8,1,6]", "parents: shape [4], must be [total_q] = [8]"},
    {"ScalarQIndptr", "\"q_indptr\":{\"dtype\":\"I32\",\"shape\":[3]",
     "\"q_indptr\":{\"dtype\":\"I32\",\"shape\":[3,1]", "q_indptr: shape [3, 1], must be [b + 1]"},
    // offsets
    {"OneOffset", "\"data_offsets\":[0,32]", "\"data_offsets\":[32]",
     "data_offsets: 1 numbers, must be [begin, end]"},
    {"ThreeOffsets", "\"data_offsets\":[0,32]", "\"data_offsets\":[0,16,32]",
     "3 numbers, must be [begin, end]"},
    {"BeginPastEnd", "\"data_offsets\":[0,32]", "\"data_offsets\":[32,0]",
     "data_offsets [32, 0]: begin is past end"},
    {"EndPastBuffer", "\"data_offsets\":[0,32]", "\"data_offsets\":[0,99999]",
     "tensor \"expected_lse\" data_offsets [0, 99999]: end is past the buffer of "},
    {"HugeOffsets", "\"data_offsets\":[0,32]", "\"data_offsets\":[9223372036854775775,9223372036854775807]",
     "end is past the buffer of "},
    {"Overlap", "\"data_offsets\":[32,160]", "\"data_offsets\":[28,156]",
     "tensor \"expected_out\": overlaps tensor \"expected_lse\" in bytes 28 to 32"},
    {"Gap", "\"data_offsets\":[32,160]", "\"data_offsets\":[36,164]",
     "tensor \"expected_out\": gap in the buffer, bytes 32 to 36 belong to no tensor"},
    // metadata
    {"NoCase", "\"__metadata__\":{", "\"__metadata_\":{", "tensor \"__metadata_\": unknown field \"format\""},
    {"OtherFormat", "\"kdtr\"", "\"pt\"", "format: \"pt\", must be \"kdtr\""},
    {"OtherVersion", "\"version\":\"1\"", "\"version\":\"2\"", "version: \"2\", must be \"1\""},
    {"NoVersion", "\"version\":\"1\",", "", "version: missing in __metadata__"},
    {"OtherBase", "\"lse_base\":\"e\"", "\"lse_base\":\"2\"", "lse_base: \"2\", must be \"e\""},
    {"OtherMask", "\"mask\":\"tree\"", "\"mask\":\"Tree\"",
     "mask: \"Tree\", must be \"tree\", \"causal\" or \"none\""},
    {"IntegerJunk", "\"d_v\":\"4\"", "\"d_v\":\"4 \"", "d_v: \"4 \", must be a decimal integer 1..4096"},
    {"IntegerSign", "\"d_v\":\"4\"", "\"d_v\":\"+4\"", "d_v: \"+4\""},
    {"IntegerZeros", "\"d_v\":\"4\"", "\"d_v\":\"04\"", "d_v: \"04\""},
    {"IntegerHex", "\"d_v\":\"4\"", "\"d_v\":\"0x4\"", "d_v: \"0x4\""},
    {"IntegerReal", "\"d_v\":\"4\"", "\"d_v\":\"4.0\"", "d_v: \"4.0\""},
    {"IntegerEmpty", "\"d_v\":\"4\"", "\"d_v\":\"\"", "d_v: \"\""},
    {"IntegerZero", "\"d_v\":\"4\"", "\"d_v\":\"0\"", "d_v: \"0\""},
    {"IntegerHuge", "\"d_v\":\"4\"", "\"d_v\":\"18446744073709551620\"", "d_v: \"18446744073709551620\""},
    {"MinusZero", "\"d_rope\":\"2\"", "\"d_rope\":\"-0\"",
     "d_rope: \"-0\", must be a decimal integer 0..4096"},
    {"PageSizeZero", "\"page_size\":\"2\"", "\"page_size\":\"0\"",
     "page_size: \"0\", must be a decimal integer 1..2147483647"},
    {"PageSizeUneven", "\"page_size\":\"2\"", "\"page_size\":\"3\"",
     "kv: 10 rows, must be a multiple of page_size 3"},
    {"RealNan", "\"0.1\"", "\"nan\"", "sm_scale: \"nan\", must be a finite decimal number"},
    {"RealInfinity", "\"0.1\"", "\"inf\"", "sm_scale: \"inf\""},
    {"RealOverflow", "\"0.1\"", "\"1e999\"", "sm_scale: \"1e999\""},
    {"RealJunk", "\"0.1\"", "\"0.1f\"", "sm_scale: \"0.1f\""},
    {"RealBlank", "\"0.1\"", "\" 0.1\"", "sm_scale: \" 0.1\""},
    {"RealComma", "\"0.1\"", "\"0,1\"", "sm_scale: \"0,1\""},
    {"RealNegative", "\"0.1\"", "\"-0.1\"", "sm_scale: -0.1, must be finite and above 0"},
    {"KvScaleZero", "\"lse_base\"", "\"kv_scale\":\"0\",\"lse_base\"",
     "kv_scale: 0, must be finite and above 0"},
    {"LongValue", "\"mask\":\"tree\"", "\"mask\":\"" + std::string(500, 'x') + "\"",
     std::string(80, 'x') + "\"..., must be"},
    // tensors that aren't there
    {"NoQ", "\"q\":{", "\"q2\":{", "q: tensor is missing"},
    {"NoKv", "\"kv\":{", "\"kv2\":{", "kv: tensor is missing"},
    {"NoParents", "\"parents\":{", "\"parents2\":{", "parents: tensor is missing"},
    {"NoPages", "\"page_indices\":{", "\"page_indices2\":{", "page_indices: tensor is missing"},
    {"LseWithoutOut", "\"expected_out\":{", "\"expected_out2\":{", "expected_out: missing: a case has both"},
};
INSTANTIATE_TEST_SUITE_P(CaseFile, LyingHeader, testing::ValuesIn(kLies),
                         [](const auto& i) { return i.param.name; });

TEST(CaseFile, LyingContentsAreNamed) {
  const auto message = [](const char* name, std::vector<int32_t> v) {
    Case c = small_case();
    Parts parts = split(serialize_case(c));
    // Written past serialize_case(), which refuses them too.
    std::size_t at = 0;
    for (const CaseTensor& t : c.tensors()) {
      if (t.name == name) break;
      at += t.bytes;
    }
    std::memcpy(parts.buffer.data() + at, v.data(), v.size() * 4);
    c.set(name, "I32", c.find(name)->shape, v.data());
    EXPECT_THROW(serialize_case(c), Error);
    return parse_message(join(parts));
  };
  EXPECT_THAT(message("page_indices", {4, 1, 2147480000, 2}),
              HasSubstr("page_indices: page entry 2 of request 0"));
  EXPECT_THAT(message("page_indices", {-1, 1, 3, 2}), HasSubstr("= -1 is outside [0, 5)"));
  EXPECT_THAT(message("page_indptr", {0, 2, 4}), HasSubstr("page_indptr: "));
  EXPECT_THAT(message("page_indptr", {0, 3, 5}), HasSubstr("page_indptr: "));
  EXPECT_THAT(message("kv_len", {2, 1}), HasSubstr("kv_len[0] = 2"));
  EXPECT_THAT(message("kv_len", {INT32_MAX, 1}), HasSubstr("page_indptr: "));
  EXPECT_THAT(message("kv_len", {5, -1}), HasSubstr("kv_len[1] = -1"));
  EXPECT_THAT(message("q_indptr", {0, 4, 3}), HasSubstr("q_indptr[2] = 3"));
  EXPECT_THAT(message("q_indptr", {0, 3, 3}), HasSubstr("q_indptr[2] = 3"));
  EXPECT_THAT(message("parents", {-1, 2, 1, -1}), HasSubstr("parents: parent of node 1 of request 0"));
  EXPECT_THAT(message("parents", {-1, 0, 0, 0}), HasSubstr("parents: parent of node 0 of request 1"));
}

TEST(CaseFile, LyingSizesAreNamed) {
  const Bytes good = serialize_case(small_case());
  const auto with_length = [&](uint64_t length) {
    Bytes file = good;
    std::memcpy(file.data(), &length, 8);
    return parse_message(file);
  };
  EXPECT_THAT(with_length(UINT64_MAX),
              HasSubstr("header length 18446744073709551615 (bytes 0 to 8): at most 1048576"));
  EXPECT_THAT(with_length(safetensors::kMaxHeaderBytes + 1), HasSubstr("at most 1048576 allowed"));
  EXPECT_THAT(with_length(good.size() - 7), HasSubstr("the file is truncated"));
  EXPECT_THAT(with_length(0), HasSubstr("header: must start with '{'"));
  EXPECT_THAT(with_length(20), HasSubstr("header: not JSON at byte 28 of the file"));
  Bytes longer = good;
  longer.resize(good.size() + 3);
  EXPECT_THAT(parse_message(longer), HasSubstr("the last 3 of its "));
  EXPECT_THAT(parse_message({}), HasSubstr("the file has 0 bytes"));
  Parts twice = split(good);
  twice.header += "{}";
  EXPECT_THAT(parse_message(join(twice)), HasSubstr("header: not JSON at byte "));
  EXPECT_THAT(parse_message(Bytes(7)), HasSubstr("the file has 7 bytes"));
  EXPECT_THAT(parse_message(join({"{}", ""})),
              HasSubstr("__metadata__: missing: a safetensors file, but no case"));
}

TEST(CaseFile, MessagesStayOnOneLine) {
  const Bytes file = join({"{\"__metadata__\":{\"a\\nb\":1}}", ""});
  EXPECT_EQ(message_of([&] { parse_case(file.data(), file.size(), "dir\n/x\xFF.kdtr"); }),
            "dir\\n/x\xEF\xBF\xBD.kdtr: __metadata__ \"a\\nb\": is the number 1, must be a string");
}

TEST(CaseFile, EveryTruncationIsRefused) {
  const Bytes good = serialize_case(small_case());
  const std::size_t data_start = good.size() - split(good).buffer.size();
  for (std::size_t size = 0; size < good.size(); size += size < data_start + 40 ? 1 : 13) {
    const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_THAT(parse_message(cut), StartsWith("x.kdtr: ")) << "first " << size << " bytes";
  }
}

TEST(CaseFile, EveryBitFlipOfTheHeaderIsParsedOrRefused) {
  Bytes file = serialize_case(small_case());
  const std::size_t data_start = file.size() - split(file).buffer.size();
  int parsed = 0;
  for (std::size_t at = 0; at < data_start; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      const std::byte mask{static_cast<unsigned char>(1 << bit)};
      file[at] ^= mask;
      // Everything that parses is also written and read again.
      EXPECT_NO_THROW(parsed +=
                      fuzz::run_case_file({reinterpret_cast<const uint8_t*>(file.data()), file.size()}))
          << "byte " << at << " bit " << bit;
      file[at] ^= mask;
    }
  }
  EXPECT_GT(parsed, 0);  // flips inside `source` do no harm
}

TEST(CaseFile, MisalignedTensorsAreCopied) {
  Case c = small_case();
  const uint8_t byte = 7;
  c.set("pad", "U8", {1}, &byte);
  Parts parts = split(serialize_case(c));
  // The odd byte goes first, everything else moves up by one.
  std::vector<safetensors::Tensor> tensors{{.name = "pad", .dtype = "U8", .shape = {1}}};
  std::string buffer = "\7";
  for (const CaseTensor& t : c.tensors()) {
    if (t.name == "pad") continue;
    tensors.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
    buffer.append(reinterpret_cast<const char*>(t.data), t.bytes);
  }
  safetensors::Metadata metadata{{"format", "kdtr"}, {"version", "1"},    {"d_v", "4"},
                                 {"d_rope", "2"},    {"sm_scale", "0.1"}, {"page_size", "2"},
                                 {"mask", "tree"},   {"lse_base", "e"}};
  const std::string header = safetensors::write_header(metadata, tensors).substr(8);
  for (const char* pad : {"", " ", "   "}) {  // a header of any length misaligns the whole buffer
    const Bytes file = join({header + pad, buffer});
    const Case again = parse_case(file.data(), file.size());
    for (const CaseTensor& t : again.tensors()) {
      const auto width = static_cast<std::uintptr_t>(safetensors::find_dtype(t.dtype)->bytes);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data) % width, 0u) << t.name;
      const CaseTensor* original = c.find(t.name);
      EXPECT_TRUE(std::equal(t.data, t.data + t.bytes, original->data)) << t.name;
    }
    EXPECT_EQ(again.tensors()[0].name, "pad");
    EXPECT_TRUE(serialize_case(again) == join({header, buffer}));
  }
}

TEST(CaseFile, EmptyBatchAndInertRequests) {
  Case c = small_case();
  const int32_t zeros[3] = {};
  c.set("q", "F32", {0, 2, 6}, nullptr);
  c.set("parents", "I32", {0}, nullptr);
  c.set("expected_out", "F32", {0, 2, 4}, nullptr);
  c.set("expected_lse", "F32", {0, 2}, nullptr);
  c.set("q_indptr", "I32", {3}, zeros);
  c.set("kv_len", "I32", {2}, zeros);
  Bytes file = serialize_case(c);
  EXPECT_EQ(parse_case(file.data(), file.size()).b(), 2);

  c.set("q_indptr", "I32", {1}, zeros);
  c.set("page_indptr", "I32", {1}, zeros);
  c.set("kv_len", "I32", {0}, nullptr);
  c.set("page_indices", "I32", {0}, nullptr);
  c.set("kv", "F32", {0, 6}, nullptr);
  file = serialize_case(c);
  const Case again = parse_case(file.data(), file.size());
  EXPECT_EQ(again.b(), 0);
  EXPECT_EQ(again.total_q(), 0);
  EXPECT_TRUE(serialize_case(again) == file);
}

// ---- the file system

TEST(CaseFile, ReadingRefusesWhatIsNoFile) {
  const Folder folder;
  const auto message = [](const fs::path& path, ErrorCode code = ErrorCode::kIo) {
    return message_of([&] { read_case(path); }, code);
  };
  EXPECT_THAT(message("/dev/zero"), HasSubstr("/dev/zero: is a device, must be a regular file"));
  EXPECT_THAT(message("/dev/null"), HasSubstr("is a device"));
  EXPECT_THAT(message(folder / ""), HasSubstr("is a directory, must be a regular file"));
  EXPECT_THAT(message(folder / "none"), HasSubstr("can't open: No such file or directory"));
  EXPECT_THAT(message(""), HasSubstr("can't open"));
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(message(folder / "fifo"), HasSubstr("is a fifo"));
  fs::create_symlink(folder / "loop", folder / "loop");
  EXPECT_THAT(message(folder / "loop"), HasSubstr("can't open"));
  spit(folder / "empty", {});
  EXPECT_THAT(message(folder / "empty", ErrorCode::kBadFile), HasSubstr("the file is empty"));
  spit(folder / "short", Bytes(5));
  EXPECT_THAT(message(folder / "short", ErrorCode::kBadFile),
              AllOf(HasSubstr("short: "), HasSubstr("5 bytes")));
  spit(folder / "secret", serialize_case(small_case()));
  fs::permissions(folder / "secret", fs::perms::none);
  if (::geteuid() != 0) {
    EXPECT_THAT(message(folder / "secret"), HasSubstr("Permission denied"));
  }
}

TEST(CaseFile, LargeFilesAreMapped) {
  // Sparse: the pool is a hole that takes no room on disk.
  Case c = small_case();
  const int64_t rows = static_cast<int64_t>(kMapBytes / (6 * 4) / 2 * 2 + 2);
  std::vector<safetensors::Tensor> tensors;
  std::string front;
  for (const CaseTensor& t : c.tensors()) {
    if (t.name == "kv") continue;
    tensors.push_back({.name = t.name, .dtype = t.dtype, .shape = t.shape});
    front.append(reinterpret_cast<const char*>(t.data), t.bytes);
  }
  tensors.push_back({.name = "kv", .dtype = "F32", .shape = {rows, 6}});
  safetensors::Metadata metadata{{"format", "kdtr"}, {"version", "1"},    {"d_v", "4"},
                                 {"d_rope", "2"},    {"sm_scale", "0.1"}, {"page_size", "2"},
                                 {"mask", "tree"},   {"lse_base", "e"}};
  const std::string header = safetensors::write_header(metadata, tensors);
  const Folder folder;
  const fs::path path = folder / "large.kdtr";
  std::ofstream(path, std::ios::binary) << header << front;
  fs::resize_file(path, header.size() + tensors.back().end);

  const Case read = read_case(path);
  EXPECT_EQ(read.find("kv")->shape[0], rows);
  EXPECT_TRUE(std::equal(c.find("q")->data, c.find("q")->data + c.find("q")->bytes, read.find("q")->data));
  fs::remove(path);  // the mapping outlives the name
  const auto* last = reinterpret_cast<const float*>(read.find("kv")->data) + rows * 6 - 1;
  EXPECT_EQ(*last, 0.0f);
}

TEST(CaseFile, WritingReplacesAtomicallyAndKeepsTheMode) {
  const Folder folder;
  const fs::path path = folder / "a.kdtr";
  write_case(small_case(), path);
  fs::permissions(path, fs::perms(0640));
  Case other = small_case();
  other.source = "second";
  write_case(other, path);
  EXPECT_EQ(read_case(path).source, "second");
  EXPECT_EQ(fs::status(path).permissions(), fs::perms(0640));
  EXPECT_THAT(folder.names(), testing::ElementsAre("a.kdtr"));

  // Through a link the file is replaced, not the link.
  fs::create_symlink("a.kdtr", folder / "link");
  write_case(small_case(), folder / "link");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(read_case(path).source, "small_case()");

  // As long as names can be.
  const std::string longest(255, 'n');
  EXPECT_NO_THROW(write_case(small_case(), folder / longest));
}

TEST(CaseFile, FailedWritesLeaveTheOldFileAndNothingElse) {
  const Folder folder;
  const fs::path path = folder / "a.kdtr";
  write_case(small_case(), path);
  const Bytes old = slurp(path);
  const auto io_message = [&](const fs::path& target) {
    return message_of([&] { write_case(small_case("BF16"), target); }, ErrorCode::kIo);
  };

  // The disk is full: stands for any write that fails half way.
  {
    struct sigaction ignore {
    }, previous{};
    ignore.sa_handler = SIG_IGN;
    ::sigaction(SIGXFSZ, &ignore, &previous);
    rlimit limit{}, small{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    small = limit;
    small.rlim_cur = 100;
    ::setrlimit(RLIMIT_FSIZE, &small);
    const std::string message = io_message(path);
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::sigaction(SIGXFSZ, &previous, nullptr);
    EXPECT_THAT(message, AllOf(HasSubstr("a.kdtr: can't write byte 100 of "), HasSubstr("File too large")));
  }
  EXPECT_TRUE(slurp(path) == old);
  EXPECT_THAT(folder.names(), testing::ElementsAre("a.kdtr"));

  // A case that can't be written never touches the disk.
  Case bad = small_case();
  bad.sm_scale = -1;
  EXPECT_THROW(write_case(bad, path), Error);
  EXPECT_TRUE(slurp(path) == old);

  fs::create_directory(folder / "dir");
  EXPECT_THAT(io_message(folder / "dir"), HasSubstr("is a directory, can only replace a regular file"));
  EXPECT_THAT(io_message(folder / "none/a.kdtr"), HasSubstr("No such file or directory"));
  EXPECT_THAT(io_message("/dev/null"), HasSubstr("is a device"));
  EXPECT_THAT(io_message("/proc/none.kdtr"), HasSubstr("can't create a temporary file beside it"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_THAT(folder.names(), testing::ElementsAre("a.kdtr", "dir"));
}

// ---- the fuzzers' seeds and findings, without a fuzzer

std::vector<fs::path> corpus(const std::string& name) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(kCorpus / name)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

TEST(Corpus, CaseFiles) {
  int good = 0, bad = 0;
  for (const fs::path& path : corpus("case_file")) {
    SCOPED_TRACE(path.filename());
    const Bytes file = slurp(path);
    bool is_case = false;
    EXPECT_NO_THROW(is_case =
                        fuzz::run_case_file({reinterpret_cast<const uint8_t*>(file.data()), file.size()}));
    // The seeds are named for what they are; findings are not.
    const std::string name = path.filename();
    if (!name.starts_with("finding_")) {
      EXPECT_EQ(is_case, !name.starts_with("bad_"));
    }
    ++(is_case ? good : bad);
  }
  EXPECT_GE(good, 16);
  EXPECT_GE(bad, 39);
}

TEST(Corpus, Trees) {
  const auto files = corpus("tree");
  EXPECT_GE(files.size(), 30u);
  for (const fs::path& path : files) {
    SCOPED_TRACE(path.filename());
    const Bytes file = slurp(path);
    EXPECT_NO_THROW(fuzz::run_tree({reinterpret_cast<const uint8_t*>(file.data()), file.size()}));
  }
}

}  // namespace
}  // namespace treemla
