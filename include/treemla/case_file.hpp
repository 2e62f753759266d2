// `.kdtr` case files, version 1: one verification call with its expected result. docs/KDTR.md has the format.
//
// A case file is a safetensors file (8-byte little-endian header length, JSON header, one row-major little-endian buffer)
// whose __metadata__ says that it is a case, so any safetensors reader opens it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "treemla/problem.hpp"

namespace treemla {

// A tensor of a case file. `data` points into the mapped file or into storage that the Case owns.
struct CaseTensor {
  std::string name;
  std::string dtype;           // safetensors spelling: F32, F16, BF16, F8_E4M3, U8, I32
  std::vector<int64_t> shape;  // row-major
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

// A case in memory. Copies share the (immutable) tensor storage.
class Case {
 public:
  MlaShape shape;
  double sm_scale = 0;
  int page_size = 1;
  MaskKind mask = MaskKind::kTree;
  double kv_scale = 1.0;
  // A dtype that has_scales(): `kv` is U8 [rows, bytes of a row] and holds rows of it. None: the tensor's own says what it holds.
  std::optional<DType> kv_packed;
  std::string source;  // free text: how the case was produced

  // Tensors by name; null when the case has none of that name.
  const CaseTensor* find(const std::string& name) const;
  const std::vector<CaseTensor>& tensors() const { return tensors_; }

  // Adds or replaces a tensor, copying `data`. `dtype` is the safetensors spelling.
  void set(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, const void* data);

  int b() const;
  int64_t total_q() const;
  // A view of the tensors as a problem on the host; valid as long as this Case or a copy of it lives.
  VerifyProblem problem() const;
  const float* expected_out() const;  // [total_q, h_q, d_v], or null
  const float* expected_lse() const;  // [total_q, h_q], or null

 private:
  friend Case read_case(const std::string& path);
  friend Case parse_case(const void* data, std::size_t size, const std::string& name);
  friend std::vector<std::byte> serialize_case(const Case&);
  std::vector<CaseTensor> tensors_;                            // in file order
  std::vector<std::pair<std::string, std::string>> metadata_;  // in file order, unknown keys kept
  std::vector<std::shared_ptr<const void>> owners_;            // mapping or heap blocks behind the tensors
};

// Reads (maps) a case and validates it whole: header, dtypes, shapes, offsets without gap or overlap, and then everything
// check_problem() checks. Throws Error(kBadFile) naming the file, the field, its value or offset; Error(kIo) when it can't
// be opened.
Case read_case(const std::string& path);
// The same for bytes in memory (copied); `name` stands in for the path in messages.
Case parse_case(const void* data, std::size_t size, const std::string& name = "case");

// Writes atomically (a temporary file in the same folder, then rename): a failure leaves an existing file as it was.
// write_case(read_case(f)) reproduces f byte for byte if f was written by this function or by the safetensors package:
// docs/KDTR.md says what that takes.
void write_case(const Case& c, const std::string& path);
std::vector<std::byte> serialize_case(const Case& c);

}  // namespace treemla
