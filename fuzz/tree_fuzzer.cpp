// Tree encodings from arbitrary arrays: refused or converted without a stray access, and back to the same
// tree.
#include "entries.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  treemla::fuzz::run_tree({data, size});
  return 0;
}
