#include "svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace qattn::cli {

namespace {

/// Twelve that lie as far apart as twelve can in OKLab (0.19), of those that have a contrast of 2.6
/// with white and with nearly black.
constexpr std::array<const char*, 12> palette = {"#0033ff", "#cc8800", "#116600", "#ff0044",
                                                 "#11aacc", "#aa0088", "#994411", "#9933ff",
                                                 "#22aa00", "#cc88cc", "#226699", "#ff11ff"};

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

  explicit Decades(const std::vector<double>& values) {
    double least = INFINITY, most = 0;
    for (const double value : values) {
      if (!drawable(value)) continue;
      least = std::min(least, value);
      most = std::max(most, value);
    }
    if (most == 0) return;
    low = static_cast<int>(std::floor(std::log10(least)));
    high = std::max(low + 1, static_cast<int>(std::ceil(std::log10(most))));
  }
  double fraction(double value) const { return (std::log10(value) - low) / (high - low); }
};

/// A rectangle that a name or a point takes up.
struct Box {
  double left, top, right, bottom;
  bool meets(const Box& o) const {
    return left < o.right && o.left < right && top < o.bottom && o.top < bottom;
  }
};

/// Where a name is written: SVG's x, y and text-anchor.
struct Place {
  double x, y;
  const char* anchor;
};

/// The first place around (cx, cy) where the name meets nothing that is taken; it is taken then.
Place free_place(double cx, double cy, const std::string& name, const Box& frame,
                 std::vector<Box>& taken) {
  constexpr double letter = 7, height = 13, gap = 8;
  const double width = letter * static_cast<double>(name.size());
  for (int ring = 0; ring < 8; ++ring) {
    const double away = gap + ring * height / 2;
    const Place places[] = {
        {cx + away, cy + 4, "start"},        {cx - away, cy + 4, "end"},
        {cx, cy - away, "middle"},           {cx, cy + away + 9, "middle"},
        {cx + away, cy - away + 2, "start"}, {cx + away, cy + away + 6, "start"},
        {cx - away, cy - away + 2, "end"},   {cx - away, cy + away + 6, "end"}};
    for (const Place& place : places) {
      const char kind = place.anchor[0];
      const double left = kind == 's' ? place.x : kind == 'e' ? place.x - width : cx - width / 2;
      const Box box{left, place.y - height + 3, left + width, place.y + 3};
      const bool inside = box.left >= frame.left && box.right <= frame.right &&
                          box.top >= frame.top && box.bottom <= frame.bottom;
      const auto meets = [&](const Box& other) { return other.meets(box); };
      if (inside && std::none_of(taken.begin(), taken.end(), meets)) {
        taken.push_back(box);
        return place;
      }
    }
  }
  return {cx + gap, cy + 4, "start"};
}

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
  std::vector<double> values;
  for (const Series& s : series) values.insert(values.end(), s.values.begin(), s.values.end());
  const Decades decades(values);
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
  constexpr double left = 110, right = 560, height = 24;
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
    svg += text(right + 10, top + 17, "start", rows[i].text);
  }
  if (mark > 0) svg += line(left + mark * scale, 0, left + mark * scale, total, "mark");
  return svg + "</svg>\n";
}

std::string scatter(const std::string& label, const Axis& x, const Axis& y,
                    const std::vector<Point>& points) {
  constexpr double left = 56, right = 700, top = 24, bottom = 340, radius = 5;
  std::vector<double> xs;
  double most = y.mark;
  for (const Point& p : points) {
    if (!drawable(p.x) || !drawable(p.y)) continue;
    xs.push_back(p.x);
    most = std::max(most, p.y);
  }
  const Decades decades(xs);
  const double step = most > 8 ? 2 : most > 4 ? 1 : 0.5;
  const double ceiling = step * (std::floor(most / step) + 1);
  const auto at_x = [&](double value) { return left + (right - left) * decades.fraction(value); };
  const auto at_y = [&](double value) { return bottom - (bottom - top) * value / ceiling; };

  std::string svg = open(label, 720, 390);
  for (int decade = decades.low; decade <= decades.high; ++decade) {
    const double at = at_x(std::pow(10.0, decade));
    svg += line(at, top, at, bottom, "grid") +
           text(at, bottom + 18, "middle", fmt::format("1e{}", decade));
  }
  for (double value = 0; value <= ceiling; value += step) {
    svg += line(left, at_y(value), right, at_y(value), "grid") +
           text(left - 6, at_y(value) + 4, "end", fmt::format("{:g}", value));
  }
  if (y.mark > 0) svg += line(left, at_y(y.mark), right, at_y(y.mark), "mark");
  svg += text((left + right) / 2, bottom + 40, "middle", x.title) +
         text(left - 40, top - 10, "start", y.title);

  std::vector<Box> taken;
  for (const Point& p : points) {
    if (!drawable(p.x) || !drawable(p.y)) continue;
    const double cx = at_x(p.x), cy = at_y(p.y);
    taken.push_back({cx - radius, cy - radius, cx + radius, cy + radius});
  }
  for (std::size_t i = 0; i < points.size(); ++i) {
    const Point& p = points[i];
    if (!drawable(p.x) || !drawable(p.y)) continue;
    const double cx = at_x(p.x), cy = at_y(p.y);
    svg += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\"><title>{}: {:.2e}, {:.2f}"
        "</title></circle>\n",
        cx, cy, radius, colour(i), escape_html(p.name), p.x, p.y);
    const Place place = free_place(cx, cy, p.name, {left, top, right + 16, bottom}, taken);
    svg += text(place.x, place.y, place.anchor, p.name);
  }
  return svg + "</svg>\n";
}

}  // namespace qattn::cli
