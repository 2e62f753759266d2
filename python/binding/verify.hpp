// From arrays to a VerifyProblem, with every shape, dtype and place checked before a pointer is taken.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "binding/array.hpp"
#include "treemla/problem.hpp"

namespace treemla::python {

// What the Python functions were given; None where an argument is absent.
struct ProblemArguments {
  nb::object q, kv, q_indptr, kv_len, page_table, page_indptr, page_indices, tree;
  int64_t page_size = 0;  // 0: kv's own, or 1
  int64_t d_v = 0;        // 0: by d_qk
  double sm_scale = 0, kv_scale = 1;
  std::string kv_packed;  // dtype of the rows of bytes that a kv of uint8 holds; "": kv's own
  int64_t max_q_len = 0, max_kv_len = 0;
};

// A problem whose arrays are kept alive.
class BoundProblem {
 public:
  BoundProblem() = default;
  BoundProblem(const ProblemArguments& arguments, uintptr_t stream);
  const VerifyProblem& problem() const { return problem_; }
  int device_id() const { return device_id_; }

  // The same with another layer's q and kv, which `keep` then holds.
  VerifyProblem layer(nb::handle q, nb::handle kv, uintptr_t stream, std::vector<Array>& keep) const;

 private:
  Array& hold(nb::handle object, const char* name, uintptr_t stream);
  void bound_by_view(int64_t columns);
  void set_tree(nb::handle tree, uintptr_t stream);
  void set_dense_tree(const Array& mask);

  VerifyProblem problem_;
  int device_id_ = 0;
  std::vector<Array> arrays_;
  std::vector<uint32_t> bits_;  // made from a dense mask
};

// None for an unwanted lse.
VerifyOutput bind_output(const VerifyProblem& problem, int device_id, nb::handle out, nb::handle lse,
                         uintptr_t stream, std::vector<Array>& keep);

void add_verify(nb::module_& m);

}  // namespace treemla::python
