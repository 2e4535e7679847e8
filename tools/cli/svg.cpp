#include "svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace qattn::cli {

namespace {

/// Middle lightness, told apart on white and on black.
constexpr std::array<const char*, 12> palette = {"#4477cc", "#cc6633", "#339966", "#b04a9a",
                                                 "#8a7a22", "#2b9bb0", "#cc4455", "#7a66cc",
                                                 "#6b8f2b", "#a0673c", "#777777", "#d08a00"};

const char* colour(std::size_t i) { return palette[i % palette.size()]; }

bool drawable(double value) { return std::isfinite(value) && value > 0; }

std::string open(const std::string& label, double width, double height) {
  return fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", width, height,
                     escape_html(label));
}

std::string text(double x, double y, const char* anchor, const std::string& content) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     escape_html(content));
}

std::string line(double x1, double y1, double x2, double y2, const char* style) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" class=\"{}\"/>\n", x1, y1, x2,
      y2, style);
}

/// Whole decades around every drawable value.
struct Decades {
  int low = 0, high = 1;

  explicit Decades(const std::vector<Series>& series) {
    double least = INFINITY, most = 0;
    for (const Series& s : series) {
      for (const double value : s.values) {
        if (!drawable(value)) continue;
        least = std::min(least, value);
        most = std::max(most, value);
      }
    }
    if (most == 0) return;
    low = static_cast<int>(std::floor(std::log10(least)));
    high = std::max(low + 1, static_cast<int>(std::ceil(std::log10(most))));
  }
  double fraction(double value) const { return (std::log10(value) - low) / (high - low); }
};

}  // namespace

std::string escape_html(const std::string& plain) {
  std::string escaped;
  for (const char c : plain) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string log_lines(const std::string& label, const std::vector<std::string>& categories,
                      const std::vector<Series>& series) {
  constexpr double left = 56, right = 560, top = 16, bottom = 300, legend = 590;
  const Decades decades(series);
  const double step = (right - left) / static_cast<double>(std::max<std::size_t>(
                                           1, categories.size() > 1 ? categories.size() - 1 : 1));
  const auto x = [&](std::size_t i) { return left + step * static_cast<double>(i); };
  const auto y = [&](double value) { return bottom - (bottom - top) * decades.fraction(value); };

  std::string svg = open(label, 720, 340);
  for (int decade = decades.low; decade <= decades.high; ++decade) {
    const double at = y(std::pow(10.0, decade));
    svg += line(left, at, right, at, "grid") +
           text(left - 6, at + 4, "end", fmt::format("1e{}", decade));
  }
  for (std::size_t i = 0; i < categories.size(); ++i) {
    svg += text(x(i), bottom + 20, "middle", categories[i]);
  }
  for (std::size_t s = 0; s < series.size(); ++s) {
    std::string points, dots;
    for (std::size_t i = 0; i < series[s].values.size(); ++i) {
      const double value = series[s].values[i];
      if (!drawable(value)) continue;
      points += fmt::format("{:.1f},{:.1f} ", x(i), y(value));
      dots += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>{} {}: {:.2e}</title>"
          "</circle>\n",
          x(i), y(value), escape_html(series[s].name), escape_html(categories[i]), value);
    }
    const double row = top + 8 + 20 * static_cast<double>(s);
    svg +=
        fmt::format("<g fill=\"{0}\" stroke=\"{0}\">\n<polyline points=\"{1}\" fill=\"none\"/>\n",
                    colour(s), points);
    svg += dots + line(legend, row, legend + 18, row, "key") + "</g>\n" +
           text(legend + 24, row + 4, "start", series[s].name);
  }
  return svg + "</svg>\n";
}

std::string bars(const std::string& label, const std::vector<Bar>& rows, double mark) {
  constexpr double left = 110, right = 570, height = 24;
  double most = mark;
  for (const Bar& bar : rows) {
    if (drawable(bar.value)) most = std::max(most, bar.value);
  }
  const double scale = most > 0 ? (right - left) / most : 0;
  const double total = height * static_cast<double>(rows.size());
  std::string svg = open(label, 720, total + 8);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double top = height * static_cast<double>(i);
    const double width = drawable(rows[i].value) ? rows[i].value * scale : 0;
    svg += text(left - 8, top + 17, "end", rows[i].name);
    svg += fmt::format("<rect x=\"{}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"/>\n",
                       left, top + 4, width, height - 8, colour(i));
    svg += text(left + width + 6, top + 17, "start", rows[i].text);
  }
  if (mark > 0) svg += line(left + mark * scale, 0, left + mark * scale, total, "mark");
  return svg + "</svg>\n";
}

}  // namespace qattn::cli
