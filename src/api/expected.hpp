// Expected values of a case, from the float64 oracle.
#pragma once

#include "treemla/case_file.hpp"

namespace treemla {

// Adds (or replaces) expected_out and expected_lse.
void add_expected(Case& c);

}  // namespace treemla
