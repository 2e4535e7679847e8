// Three kinds of plot as inline SVG: text takes the page's colour, so both schemes work.
#pragma once

#include <string>
#include <vector>

namespace qattn::cli {

struct Series {
  std::string name;
  std::vector<double> values;  ///< one per category; what is not finite and positive is not drawn
};

/// One line a series over the categories, on a logarithmic axis, with a legend.
std::string log_lines(const std::string& label, const std::vector<std::string>& categories,
                      const std::vector<Series>& series);

struct Bar {
  std::string name;
  double value = 0;
  std::string text;  ///< beside the bar
};

/// Horizontal bars from 0, their texts in a column; `mark` draws a dashed line at that value (0:
/// none).
std::string bars(const std::string& label, const std::vector<Bar>& bars, double mark);

struct Point {
  std::string name;
  double x = 0, y = 0;  ///< what is not finite and positive is not drawn
};

struct Axis {
  std::string title;
  double mark = 0;  ///< a dashed line at that value; 0: none
};

/// Named points, x on a logarithmic axis, y from 0. Names stand beside their points, apart from
/// each other.
std::string scatter(const std::string& label, const Axis& x, const Axis& y,
                    const std::vector<Point>& points);

/// `text` with the five characters escaped that HTML gives a meaning.
std::string escape_html(const std::string& text);

}  // namespace qattn::cli
