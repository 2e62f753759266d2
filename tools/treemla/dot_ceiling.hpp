// A loop at the CPU's bf16 dot-product rate.
#pragma once

namespace treemla::cli {

// Returns the operations done, two a product; 0 where the CPU has no such instruction.
double dot_loop(int steps, float* sink);

}  // namespace treemla::cli
