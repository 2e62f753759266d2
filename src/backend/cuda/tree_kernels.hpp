// The tree steps on a device: what src/api/trees.cpp calls for checked problems in device memory. Each *_bytes() also loads the
// step's kernels onto the current device, which a graph capture may not.
#pragma once

#include <cstddef>

#include "treemla/accept.hpp"
#include "treemla/build.hpp"
#include "treemla/compact.hpp"
#include "treemla/import_batch.hpp"

namespace treemla {

void build_on_device(const BuildProblem& problem, const TreeOutput& output, const TreeRun& run);
std::size_t device_build_bytes(const BuildProblem& problem);

void expand_on_device(const BeamProblem& problem, const BeamOutput& output, const TreeRun& run);
std::size_t device_beam_bytes(const BeamProblem& problem);

void accept_on_device(const AcceptProblem& problem, const AcceptOutput& output, const TreeRun& run);
std::size_t device_accept_bytes(const AcceptProblem& problem);

void compact_on_device(const CompactProblem& problem, const CompactOutput& output, const TreeRun& run);
std::size_t device_compact_bytes(const CompactProblem& problem);

void import_on_device(const ImportProblem& problem, const ImportOutput& output, const TreeRun& run);
std::size_t device_import_bytes(const ImportProblem& problem);

// Waits for the stream and throws the first request's fault, if any.
void throw_device_tree_fault(const TreeRun& run, int b);

}  // namespace treemla
