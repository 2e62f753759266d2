// The version of the headers; treemla::version() is that of the library linked in.
#pragma once

#define TREEMLA_VERSION_MAJOR 0
#define TREEMLA_VERSION_MINOR 1
#define TREEMLA_VERSION_PATCH 0
#define TREEMLA_VERSION "0.1.0"

namespace treemla {
const char* version();
}
