// Everything of the C++ API.
#pragma once

#include "treemla/case_file.hpp"
#include "treemla/dtype.hpp"
#include "treemla/error.hpp"
#include "treemla/problem.hpp"
#include "treemla/tree.hpp"
#include "treemla/verify.hpp"
#include "treemla/version.hpp"
