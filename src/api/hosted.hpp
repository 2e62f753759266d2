// Problems and outputs on the host, run by a backend wherever its memory is: for tests and benchmarks.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.hpp"
#include "treemla/problem.hpp"
#include "treemla/verify.hpp"

namespace treemla {

// The tensors of a host problem in the memory of a backend: copies, or for host backends the host's own. Arrays keep their
// layout, strides and unused entries. Lengths bound what problem() says of max_q_len and max_kv_len, unless the host problem says
// it itself.
class HostedProblem {
 public:
  HostedProblem(const Backend& backend, const VerifyProblem& host);
  const VerifyProblem& problem() const { return problem_; }
  // Copies lengths, page table and mask of another host problem of the same sizes over the present ones; waits for `stream`.
  void refresh(const VerifyProblem& host, void* stream = nullptr);

 private:
  struct Release {
    const MemorySpace* space;
    void operator()(void* p) const { space->release(p); }
  };
  template <class T>
  void place(const T*& pointer, std::size_t bytes);

  const Backend& backend_;
  VerifyProblem problem_;
  std::vector<std::unique_ptr<void, Release>> blocks_;
};

// Room for an output in the memory of a backend, filled from the host output (poison included), and back.
class HostedOutput {
 public:
  HostedOutput(const Backend& backend, const VerifyProblem& problem, const VerifyOutput& host);
  const VerifyOutput& output() const { return output_; }
  void fill(void* stream = nullptr);   // with what the host output holds now
  void fetch(void* stream = nullptr);  // into the host output; waits

 private:
  const Backend& backend_;
  VerifyOutput host_, output_;
  std::size_t out_bytes_, lse_bytes_;
  std::shared_ptr<void> out_, lse_;
};

// verify() of a host problem by any backend, options.backend "best" included (which is the best for host problems). Synchronous.
void verify_hosted(const VerifyProblem& host, const VerifyOutput& output, const RunOptions& options);
// why_unsupported() for a host problem, as if its tensors were where the backend wants them.
std::string why_unsupported_hosted(const std::string& backend, const VerifyProblem& host);

}  // namespace treemla
