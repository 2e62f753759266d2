// Aligned columns of plain text, two spaces apart.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace treemla::cli {

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kRight;
  std::size_t width = 0;  // at least; never below the title's
};

// For tables printed as their rows come, give widths that will do; for others call fit() with every row
// first.
class Table {
 public:
  explicit Table(std::vector<Column> columns);
  void fit(const std::vector<std::string>& cells);

  std::string header() const;  // the titles and a rule below them
  // A missing cell is empty. One that is too long pushes the rest of its line to the right.
  std::string line(const std::vector<std::string>& cells) const;

 private:
  std::vector<Column> columns_;
};

}  // namespace treemla::cli
