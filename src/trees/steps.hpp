// The steps of build.hpp, accept.hpp, compact.hpp and import_batch.hpp on the host, and the checks of their arguments for any memory.
#pragma once

#include "treemla/accept.hpp"
#include "treemla/build.hpp"
#include "treemla/compact.hpp"
#include "treemla/import_batch.hpp"

namespace treemla {

// What the host sees of a problem in any memory: sizes, dtypes, pointers. Throws Error(kInvalidArgument).
void check_build(const BuildProblem& problem, const TreeOutput& output);
void check_beam(const BeamProblem& problem, const BeamOutput& output);
void check_accept(const AcceptProblem& problem, const AcceptOutput& output);
void check_compact(const CompactProblem& problem, const CompactOutput& output);
void check_import(const ImportProblem& problem, const ImportOutput& output);

// Checked problems whose memory is the host.
void build_on_host(const BuildProblem& problem, const TreeOutput& output);
void expand_on_host(const BeamProblem& problem, const BeamOutput& output);
void accept_on_host(const AcceptProblem& problem, const AcceptOutput& output);
void compact_on_host(const CompactProblem& problem, const CompactOutput& output);
void import_on_host(const ImportProblem& problem, const ImportOutput& output);

// Bytes that a row moves at a time: a power of two up to 16 that divides its size, its stride and, where the host knows it, its
// address.
int compact_unit(const CompactProblem& problem);

}  // namespace treemla
