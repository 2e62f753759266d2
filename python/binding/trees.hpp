// Building, accepting and compacting on arrays.
#pragma once

#include <nanobind/nanobind.h>

namespace treemla::python {
void add_trees(nanobind::module_& m);
}
