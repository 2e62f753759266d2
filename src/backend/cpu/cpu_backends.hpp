// The CPU kernel families.
#pragma once

#include "backend/backend.hpp"

namespace treemla {

const Backend& cpu_oracle_backend();
const Backend& cpu_simd_backend();

}  // namespace treemla
