// How the steps around verification run: import (import_batch.hpp), build (build.hpp), accept (accept.hpp) and compact
// (compact.hpp).
//
// Each step takes a batch whose tensors all live in one memory. On the host a step is synchronous and a malformed tree, a NaN
// or a broken table throws Error(kInvalidArgument); what was written by then is unspecified. On a device a step only enqueues
// kernels on `stream`: launch shapes follow from the fields of its struct and nothing is read back, so it may be captured into a
// graph that serves every later content of the arrays. What the host can't see, the kernels check: a request with a fault
// comes out inert (each step says what that is), and check_tree_run() tells which request and why.
//
// Results are the same on the host and on every device, bit for bit: weights and path log-probabilities are integers, whose
// sums do not depend on order (docs/TREES.md).
#pragma once

#include <cstddef>

namespace treemla {

struct TreeRun {
  void* stream = nullptr;  // cudaStream_t; null is the default stream. Ignored on the host
  // Device memory of at least the step's *_workspace_bytes(), aligned to 256 bytes; null on the host. Contents need no set-up.
  // Ask for the bytes before capturing a graph: this also loads the step's kernels onto the device, which a capture may not.
  // It may be shared by steps of one stream.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

// Waits for `run.stream` and throws Error(kInvalidArgument) for the first request of `b` that the last step run with this
// workspace found fault with. Returns at once on the host, where the step itself has thrown.
void check_tree_run(const TreeRun& run, int b);

}  // namespace treemla
