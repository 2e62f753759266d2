// The one interface behind which every kernel family stands, and the list of those built in.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "treemla/problem.hpp"
#include "treemla/verify.hpp"

namespace treemla {

// Yes, or no with a reason a user can act on.
struct Support {
  bool ok = true;
  std::string reason;
  static Support yes(std::string note = "") { return {true, std::move(note)}; }
  static Support no(std::string reason) { return {false, std::move(reason)}; }
};

// What a backend decided for one set of lengths, page tables and masks; reusable for every layer of a step.
class BackendPlan {
 public:
  virtual ~BackendPlan() = default;
  // Memory, of the backend's kind, that run() needs besides its arguments.
  virtual std::size_t workspace_bytes() const = 0;
  virtual std::string describe() const = 0;
};

// The memory in which a backend's problems live. Addresses are aligned to 256 bytes at least.
class MemorySpace {
 public:
  virtual ~MemorySpace() = default;
  virtual void* allocate(std::size_t bytes) const = 0;  // throws Error(kOutOfMemory)
  virtual void release(void* p) const noexcept = 0;
  // Ordered on `stream`; host memory given to them must stay as it is until synchronize().
  virtual void upload(void* to, const void* from_host, std::size_t bytes, void* stream) const = 0;
  virtual void download(void* to_host, const void* from, std::size_t bytes, void* stream) const = 0;
  virtual void synchronize(void* stream) const = 0;
  // A stream other than the default one, for work that is captured into graphs; null where there are none.
  virtual void* make_stream() const = 0;
  virtual void release_stream(void* stream) const noexcept = 0;
  // Seconds of each of `samples` runs of what `enqueue` puts on `stream`, after a warm-up. A device replays it as a graph; cold:
  // with the last-level cache flushed before each sample.
  virtual std::vector<double> measure(void* stream, const std::function<void()>& enqueue, int samples,
                                      bool cold) const = 0;
};

// Plain memory of this process.
const MemorySpace& host_memory();

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual Memory memory() const = 0;
  virtual const MemorySpace& space() const { return host_memory(); }
  // Usable on this machine?
  virtual Support available() const = 0;
  // Would it run this (already checked) problem?
  virtual Support supports(const VerifyProblem& problem) const = 0;
  // No: one further down the list is faster at this problem, which it takes, and stands back for it when the best is asked for.
  virtual bool prefers(const VerifyProblem&) const { return true; }
  virtual std::unique_ptr<BackendPlan> plan(const VerifyProblem& problem,
                                            const RunOptions& options) const = 0;
  // Once before run(), and again whenever lengths, page tables or mask of a device problem change: enqueues what the device
  // itself computes of the plan into `workspace`. Allocates nothing, so it may be captured into a graph.
  virtual void prepare(const BackendPlan&, const VerifyProblem&, void* /*workspace*/,
                       const RunOptions&) const {}
  // What check_problem() can't see of a problem in this backend's memory: see check_device_problem().
  virtual void check_contents(const VerifyProblem&, void* /*stream*/) const {}
  // Waits for the device and throws Error(kInvalidArgument) if prepare() or run() met lengths, page entries or parents that
  // are out of range.
  virtual void check_prepared(const BackendPlan&, const void* /*workspace*/, const RunOptions&) const {}
  // `problem` may point at other q, kv and output than the planned one; lengths, tables and mask are the planned ones.
  // `workspace` holds plan.workspace_bytes() bytes, aligned to 256.
  virtual void run(const BackendPlan& plan, const VerifyProblem& problem, const VerifyOutput& output,
                   void* workspace, const RunOptions& options) const = 0;
};

// Every backend of this build, in order of preference; oracles last.
const std::vector<const Backend*>& backends();
// Null when there is none of that name.
const Backend* find_backend(std::string_view name);
// options.backend resolved for a checked problem. Throws Error(kInvalidArgument) for an unknown name, Error(kUnsupported)
// with the reasons when nothing takes it.
const Backend& choose_backend(const VerifyProblem& problem, const std::string& name);

}  // namespace treemla
