// A draft tree for people: as text, as DOT (Graphviz) and as SVG, with the accepted path marked; and its mask.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace treemla::cli {

struct TreeView {
  std::vector<int32_t> parents;  // [q_len], checked
  std::vector<int32_t> tokens;   // [q_len], or empty: not shown
  std::vector<float> log_probs;  // [q_len] of the path, or empty: not shown
  std::vector<int32_t> path;     // accepted nodes from the root on, or empty
  int64_t prefix_len = 0;

  bool on_path(int node) const;
  std::string label(int node) const;  // "3: token 17, p 0.25"
};

std::string tree_text(const TreeView& tree);
std::string tree_dot(const TreeView& tree);
std::string tree_svg(const TreeView& tree);
// A row a node: '#' where it sees the column's node. The prefix, which all see, is told in words.
std::string mask_text(const TreeView& tree);

}  // namespace treemla::cli
