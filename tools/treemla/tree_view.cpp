#include "tree_view.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "treemla/tree.hpp"

namespace treemla::cli {
namespace {

std::vector<std::vector<int32_t>> children_of(const std::vector<int32_t>& parents) {
  std::vector<std::vector<int32_t>> children(parents.size());
  for (std::size_t i = 1; i < parents.size(); ++i)
    children[static_cast<std::size_t>(parents[i])].push_back(static_cast<int32_t>(i));
  return children;
}

// Leaves side by side, parents above the middle of their children. Columns of each node.
std::vector<double> layout(const std::vector<int32_t>& parents) {
  const auto children = children_of(parents);
  std::vector<double> column(parents.size(), 0);
  // Leaves in the order in which a walk from the root meets them; no recursion, since chains may be long.
  std::vector<int32_t> stack{0};
  double next = 0;
  while (!stack.empty()) {
    const auto node = static_cast<std::size_t>(stack.back());
    stack.pop_back();
    if (children[node].empty()) column[node] = next++;
    stack.insert(stack.end(), children[node].rbegin(), children[node].rend());
  }
  for (std::size_t i = parents.size(); i-- > 0;)
    if (!children[i].empty())
      column[i] = (column[static_cast<std::size_t>(children[i].front())] +
                   column[static_cast<std::size_t>(children[i].back())]) /
                  2;
  return column;
}

}  // namespace

bool TreeView::on_path(int node) const { return std::find(path.begin(), path.end(), node) != path.end(); }

std::string TreeView::label(int node) const {
  const auto i = static_cast<std::size_t>(node);
  std::string text = std::to_string(node);
  if (!tokens.empty() && tokens[i] >= 0) text += fmt::format(": token {}", tokens[i]);
  if (!log_probs.empty() && node > 0)
    text += std::isinf(log_probs[i]) ? ", padding" : fmt::format(", p {:.3g}", std::exp(log_probs[i]));
  return text;
}

std::string tree_text(const TreeView& tree) {
  if (tree.parents.empty()) return "a request without nodes\n";
  const auto depth = tree_depths(tree.parents);
  const auto children = children_of(tree.parents);
  std::string out = fmt::format("{} nodes, {} deep, at positions {} to {}\n", tree.parents.size(),
                                *std::max_element(depth.begin(), depth.end()), tree.prefix_len,
                                tree.prefix_len + *std::max_element(depth.begin(), depth.end()));
  struct Line {
    int32_t node;
    std::string indent;
    bool last;
  };
  std::vector<Line> stack{{0, "", true}};
  while (!stack.empty()) {
    const Line line = stack.back();
    stack.pop_back();
    const bool root = line.node == 0;
    out += fmt::format("{}{}{}{}\n", line.indent,
                       root        ? ""
                       : line.last ? "`- "
                                   : "|- ",
                       tree.label(line.node), tree.on_path(line.node) ? "  *" : "");
    const std::string indent = root ? "" : line.indent + (line.last ? "   " : "|  ");
    const auto& below = children[static_cast<std::size_t>(line.node)];
    for (std::size_t c = below.size(); c-- > 0;) stack.push_back({below[c], indent, c + 1 == below.size()});
  }
  return out;
}

std::string tree_dot(const TreeView& tree) {
  std::string out = "digraph tree {\n  node [shape=box, fontname=\"sans-serif\"];\n";
  for (std::size_t i = 0; i < tree.parents.size(); ++i) {
    const int node = static_cast<int>(i);
    out += fmt::format("  n{} [label=\"{}\"{}];\n", node, tree.label(node),
                       tree.on_path(node) ? ", style=filled, fillcolor=\"#cfe8cf\"" : "");
  }
  for (std::size_t i = 1; i < tree.parents.size(); ++i) {
    const bool marked = tree.on_path(static_cast<int>(i)) && tree.on_path(tree.parents[i]);
    out += fmt::format("  n{} -> n{}{};\n", tree.parents[i], i, marked ? " [penwidth=3]" : "");
  }
  return out + "}\n";
}

std::string tree_svg(const TreeView& tree) {
  if (tree.parents.empty()) return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1\" height=\"1\"/>\n";
  constexpr double kWidth = 110, kHeight = 64, kBox = 98, kBoxHeight = 34;
  const auto depth = tree_depths(tree.parents);
  const auto column = layout(tree.parents);
  const auto x = [&](std::size_t i) { return (column[i] + 0.5) * kWidth; };
  const auto y = [&](std::size_t i) { return depth[i] * kHeight + 0.5 * kHeight; };
  const double width = (*std::max_element(column.begin(), column.end()) + 1) * kWidth;
  const double height = (*std::max_element(depth.begin(), depth.end()) + 1) * kHeight;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 {0:.0f} "
      "{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"11\" text-anchor=\"middle\">\n<rect width=\"100%\" "
      "height=\"100%\" "
      "fill=\"white\"/>\n",
      width, height);
  for (std::size_t i = 1; i < tree.parents.size(); ++i) {
    const auto parent = static_cast<std::size_t>(tree.parents[i]);
    const bool marked = tree.on_path(static_cast<int>(i)) && tree.on_path(tree.parents[i]);
    out += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n",
                       x(parent), y(parent), x(i), y(i), marked ? "#2a7a2a\" stroke-width=\"4" : "#888");
  }
  for (std::size_t i = 0; i < tree.parents.size(); ++i) {
    const std::string label = tree.label(static_cast<int>(i));
    const std::size_t comma = label.find(", ");  // the second line of a box
    out += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.0f}\" height=\"{:.0f}\" rx=\"6\" fill=\"{}\" "
        "stroke=\"#444\"/>\n",
        x(i) - kBox / 2, y(i) - kBoxHeight / 2, kBox, kBoxHeight,
        tree.on_path(static_cast<int>(i)) ? "#cfe8cf" : "#f4f4f4");
    out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x(i),
                       y(i) - (comma == label.npos ? -4 : 2), label.substr(0, comma));
    if (comma != label.npos)
      out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x(i), y(i) + 12,
                         label.substr(comma + 2));
  }
  return out + "</svg>\n";
}

std::string mask_text(const TreeView& tree) {
  const int q_len = static_cast<int>(tree.parents.size()), words = words_per_row(q_len);
  const auto bits = bits_from_parents(tree.parents);
  std::string out = fmt::format(
      "every node sees the {} tokens of the prefix; of the tree, node (row) sees node (column):\n",
      tree.prefix_len);
  for (int i = 0; i < q_len; ++i) {
    out += fmt::format("{:>5} ", i);
    for (int j = 0; j < q_len; ++j)
      out += bits[static_cast<std::size_t>(i * words + j / 32)] >> (j % 32) & 1 ? '#' : '.';
    out += '\n';
  }
  return out;
}

}  // namespace treemla::cli
