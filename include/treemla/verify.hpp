// Running a verification: check -> plan -> run -> combine.
//
//     treemla::verify(problem, output);            // one call
//
//     treemla::Verifier verifier(options);          // the same, planned once per step and run once per layer
//     verifier.plan(problem);
//     for (layer ...) verifier.run(layer_problem, layer_output);
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "treemla/problem.hpp"

namespace treemla {

struct RunOptions {
  // A name of list_backends(), or "best": the fastest one that takes the problem.
  std::string backend = "best";
  // CPU backends: threads to use; 0 = what the environment's TREEMLA_NUM_THREADS says, or one per core. Calls from several
  // threads share the library's: C at once have at most C + num_threads - 1 running, and one inside a thread pool that keeps
  // as many callers busy stays on its caller.
  int num_threads = 0;
  // Split boundaries depend on absolute key position only: the rows of a request come out bit-equal alone, in any batch
  // and on any number of cores; a chain verified at once equals its tokens verified one by one.
  bool batch_invariant = false;
  // Keys a split when batch_invariant; 0 = the backend's default. Rounded up to whole key tiles.
  int split_keys = 0;
  void* stream = nullptr;  // cudaStream_t of device backends; work is enqueued, never synchronised
};

struct BackendInfo {
  std::string name;
  Memory memory = Memory::kHost;  // where its problems live
  bool available = false;         // on this machine, in this build
  std::string reason;             // why not, or a line about what it will use
};
// In order of preference of "best" among those of the same memory, oracles last.
std::vector<BackendInfo> list_backends();

// Would `backend` run this problem? Returns "" or the reason for the refusal.
// Throws Error(kInvalidArgument) for a name that list_backends() does not have.
std::string why_unsupported(const std::string& backend, const VerifyProblem& problem);

// check_problem, check_output, then the attention of every row. Synchronous for problems on the host.
// Throws Error: kInvalidArgument for bad arguments, kUnsupported (with every backend's reason) when none takes the problem.
void verify(const VerifyProblem& problem, const VerifyOutput& output, const RunOptions& options = {});

// The contents of a device problem, which check_problem() cannot see, by the same rules and in the same words: indptr, kv_len,
// page tables, parents. Rows past q_indptr[b] are allowed: they are padding. Waits for `stream` (a cudaStream_t).
void check_device_problem(const VerifyProblem& problem, void* stream = nullptr);

class Verifier {
 public:
  explicit Verifier(RunOptions options = {});
  ~Verifier();
  Verifier(Verifier&&) noexcept;
  Verifier& operator=(Verifier&&) noexcept;

  // Checks the problem, chooses the backend and splits the work; allocates the workspace.
  void plan(const VerifyProblem& problem);
  // Runs with the lengths, page tables and mask that plan() saw; q, kv data and the output may differ (another layer).
  // Throws Error(kInvalidArgument) if the shape, dtypes, b or total_q differ from the planned ones.
  // Device problems: plan() and run() only enqueue work on options.stream. One captured graph of update() and run()s serves
  // every later content of the lengths, page tables and mask, padded requests included: launch shapes depend only on b,
  // total_q, the shape, the bounds and the options.
  void run(const VerifyProblem& problem, const VerifyOutput& output);

  // Plans again for other lengths, page tables or mask of a problem of the planned sizes. Device problems: enqueued on
  // options.stream, allocates nothing, may be captured.
  void update(const VerifyProblem& problem);

  // Later calls enqueue on this stream in place of options.stream: the one that is being captured, say. Order between the
  // streams is the caller's to keep.
  void set_stream(void* stream);

  // Device problems: waits for the stream and throws Error(kInvalidArgument) if the last plan() or update(), or a run() since,
  // met lengths, page entries or parents that are out of range. Such requests came out inert, or wrong; nothing was read or
  // written out of bounds.
  void check_device() const;

  const std::string& backend() const;  // the chosen one; empty before plan()
  std::string describe() const;        // the plan, for people
  std::size_t workspace_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treemla
