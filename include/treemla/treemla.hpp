// Everything of the C++ API.
#pragma once

#include "treemla/accept.hpp"
#include "treemla/build.hpp"
#include "treemla/case_file.hpp"
#include "treemla/compact.hpp"
#include "treemla/dtype.hpp"
#include "treemla/error.hpp"
#include "treemla/import_batch.hpp"
#include "treemla/interleave.hpp"
#include "treemla/problem.hpp"
#include "treemla/tree.hpp"
#include "treemla/tree_run.hpp"
#include "treemla/verify.hpp"
#include "treemla/version.hpp"
