// The tree steps by memory: the host's own, or the device's if this build has any.

#include <fmt/format.h>

#include "treemla/error.hpp"
#include "trees/steps.hpp"
#ifdef TREEMLA_HAS_CUDA
#include "backend/cuda/tree_kernels.hpp"
#endif

namespace treemla {
namespace {

[[maybe_unused]] void check_workspace(const TreeRun& run, std::size_t needed) {
  if (needed > 0 && (!run.workspace || run.workspace_bytes < needed))
    throw Error(ErrorCode::kInvalidArgument, "workspace",
                fmt::format("workspace = {} with workspace_bytes = {}: {} bytes of device memory are needed",
                            run.workspace, run.workspace_bytes, needed));
  if (reinterpret_cast<std::uintptr_t>(run.workspace) % 256 != 0)
    throw Error(ErrorCode::kInvalidArgument, "workspace",
                fmt::format("workspace = {} must be aligned to 256 bytes", run.workspace));
}

#ifndef TREEMLA_HAS_CUDA
[[noreturn]] void no_device() {
  throw Error(ErrorCode::kUnsupported, "memory", "memory = device: this build has no device backend");
}
#endif

}  // namespace

void build_tree(const BuildProblem& problem, const TreeOutput& output, const TreeRun& run) {
  check_build(problem, output);
  if (problem.memory == Memory::kHost) return build_on_host(problem, output);
#ifdef TREEMLA_HAS_CUDA
  check_workspace(run, build_workspace_bytes(problem));
  build_on_device(problem, output, run);
#else
  (void)run;
  no_device();
#endif
}

void expand_beam(const BeamProblem& problem, const BeamOutput& output, const TreeRun& run) {
  check_beam(problem, output);
  if (problem.memory == Memory::kHost) return expand_on_host(problem, output);
#ifdef TREEMLA_HAS_CUDA
  check_workspace(run, beam_workspace_bytes(problem));
  expand_on_device(problem, output, run);
#else
  (void)run;
  no_device();
#endif
}

void accept_path(const AcceptProblem& problem, const AcceptOutput& output, const TreeRun& run) {
  check_accept(problem, output);
  if (problem.memory == Memory::kHost) return accept_on_host(problem, output);
#ifdef TREEMLA_HAS_CUDA
  check_workspace(run, accept_workspace_bytes(problem));
  accept_on_device(problem, output, run);
#else
  (void)run;
  no_device();
#endif
}

void compact_cache(const CompactProblem& problem, const CompactOutput& output, const TreeRun& run) {
  check_compact(problem, output);
  if (problem.memory == Memory::kHost) return compact_on_host(problem, output);
#ifdef TREEMLA_HAS_CUDA
  check_workspace(run, compact_workspace_bytes(problem));
  compact_on_device(problem, output, run);
#else
  (void)run;
  no_device();
#endif
}

void import_batch(const ImportProblem& problem, const ImportOutput& output, const TreeRun& run) {
  check_import(problem, output);
  if (problem.memory == Memory::kHost) return import_on_host(problem, output);
#ifdef TREEMLA_HAS_CUDA
  check_workspace(run, import_workspace_bytes(problem));
  import_on_device(problem, output, run);
#else
  (void)run;
  no_device();
#endif
}

#ifdef TREEMLA_HAS_CUDA
std::size_t build_workspace_bytes(const BuildProblem& problem) {
  return problem.memory == Memory::kHost ? 0 : device_build_bytes(problem);
}
std::size_t beam_workspace_bytes(const BeamProblem& problem) {
  return problem.memory == Memory::kHost ? 0 : device_beam_bytes(problem);
}
std::size_t accept_workspace_bytes(const AcceptProblem& problem) {
  return problem.memory == Memory::kHost ? 0 : device_accept_bytes(problem);
}
std::size_t compact_workspace_bytes(const CompactProblem& problem) {
  return problem.memory == Memory::kHost ? 0 : device_compact_bytes(problem);
}
std::size_t import_workspace_bytes(const ImportProblem& problem) {
  return problem.memory == Memory::kHost ? 0 : device_import_bytes(problem);
}
void check_tree_run(const TreeRun& run, int b) {
  if (run.workspace) throw_device_tree_fault(run, b);
}
#else
std::size_t build_workspace_bytes(const BuildProblem&) { return 0; }
std::size_t beam_workspace_bytes(const BeamProblem&) { return 0; }
std::size_t accept_workspace_bytes(const AcceptProblem&) { return 0; }
std::size_t compact_workspace_bytes(const CompactProblem&) { return 0; }
std::size_t import_workspace_bytes(const ImportProblem&) { return 0; }
void check_tree_run(const TreeRun&, int) {}
#endif

}  // namespace treemla
