#include "table.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace treemla::cli {

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (Column& c : columns_) c.width = std::max(c.width, c.title.size());
}

void Table::fit(const std::vector<std::string>& cells) {
  for (std::size_t i = 0; i < std::min(cells.size(), columns_.size()); ++i)
    columns_[i].width = std::max(columns_[i].width, cells[i].size());
}

std::string Table::header() const {
  std::vector<std::string> titles, rules;
  for (const Column& c : columns_) {
    titles.push_back(c.title);
    rules.emplace_back(c.width, '-');
  }
  return line(titles) + line(rules);
}

std::string Table::line(const std::vector<std::string>& cells) const {
  std::string s;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const std::string_view cell = i < cells.size() ? std::string_view(cells[i]) : std::string_view();
    if (i > 0) s += "  ";
    s += columns_[i].align == Align::kLeft ? fmt::format("{:<{}}", cell, columns_[i].width)
                                           : fmt::format("{:>{}}", cell, columns_[i].width);
  }
  s.erase(s.find_last_not_of(' ') + 1);
  return s + "\n";
}

}  // namespace treemla::cli
