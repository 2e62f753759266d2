// Cases and judging shared by the conformance tests of every backend.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "core/compare.hpp"
#include "core/generate.hpp"
#include "treemla/case_file.hpp"
#include "treemla/verify.hpp"

namespace treemla::test {

// Programs with sanitizers run an order of magnitude slower: they draw fewer random cases.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int kRandomCases = 20, kRandomCasesPerTarget = 2;
#else
inline constexpr int kRandomCases = 60, kRandomCasesPerTarget = 8;
#endif

// How the tensors of a generated case are handed over. The numbers stay the same.
struct Form {
  bool block_table = false;  // else CSR
  IndexType index_type = IndexType::kI32;
  bool ancestor_bits = false;  // else parents
  bool strided = false;        // padding (NaN) between heads, nodes and cached rows
  bool interleaved = false;    // KvLayout; ignored where rows can't be
  DType out_dtype = DType::kF32;
};

struct CaseParam {
  CaseSpec spec;
  Form form;
  RunOptions options;
};
std::ostream& operator<<(std::ostream& out, const CaseParam& param);  // enough to make the case again

// A few that touch every path; the edges of FIELD's fault list; many drawn at random from a fixed seed.
std::vector<CaseParam> smoke_cases();
std::vector<CaseParam> corner_cases();
std::vector<CaseParam> random_cases(int count, uint64_t seed);

// Caches of KvLayout::kInterleaved, which devices refuse.
std::vector<CaseParam> interleaved_cases();

// Caches of DType::kQ8, which devices refuse too.
std::vector<CaseParam> q8_cases();

// Equal as bits: NaN equals itself, 0 differs from -0.
bool same_bits(const std::vector<float>& a, const std::vector<float>& b);

// The bounds for arithmetic in a dtype.
Precision precision_of(DType dtype);
// The arithmetic of a host backend on such a problem, here and now.
Precision host_arithmetic(const std::string& backend, const VerifyProblem& problem, DType out_dtype);

// A generated case in the form asked for, with expected values, poison in everything unreachable and an
// output of NaN.
class Instance {
 public:
  explicit Instance(const CaseParam& param);
  // As above for a recorded case, tensors as stored.
  Instance(const Case& recorded, const Form& form);
  Instance(Instance&&) = default;  // no copies: the problem points into the storage
  Instance& operator=(Instance&&) = default;
  VerifyProblem problem() const;
  VerifyOutput output();
  void poison_output();
  // out and lse as float32.
  std::vector<float> out() const;
  const std::vector<float>& lse() const { return lse_; }
  const std::vector<unsigned char>& raw_out() const { return out_; }
  // Judges what the output holds now, by the bounds of the arithmetic or of the output's dtype, whichever are wider.
  Comparison judge(Precision arithmetic = Precision::kF32) const;

 private:
  void reshape(const Form& form);
  Case case_;
  Form form_;
  std::vector<unsigned char> q_, kv_, out_;
  std::vector<int64_t> entries64_;
  std::vector<int32_t> entries32_;
  std::vector<uint32_t> bits_;
  std::vector<float> lse_;
  VerifyProblem problem_;
};

}  // namespace treemla::test
