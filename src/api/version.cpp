#include "treemla/version.hpp"

namespace treemla {

const char* version() { return TREEMLA_VERSION; }

}  // namespace treemla
