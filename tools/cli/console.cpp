#include "console.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace qattn::cli {

std::string Table::text() const {
  std::vector<std::size_t> width;
  for (const auto& row : rows_) {
    width.resize(std::max(width.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += i == 0 ? fmt::format("{:<{}}", row[i], width[i])
                     : fmt::format("  {:>{}}", row[i], width[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

Progress::Progress(double total) : total_(total), visible_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (visible_) fmt::print(stderr, "\r\x1b[K");
}

void Progress::show(double done, std::string_view label) {
  if (!visible_) return;
  constexpr int width = 30;
  const double part = total_ > 0 ? std::clamp(done / total_, 0.0, 1.0) : 0.0;
  const int filled = static_cast<int>(part * width);
  fmt::print(stderr, "\r\x1b[K[{:#<{}}{:.<{}}] {:3.0f} %  {}", "", filled, "", width - filled,
             part * 100, label);
  std::fflush(stderr);
}

namespace {
bool found_nan = false;
}

void say(const std::string& message) { fmt::print(stderr, "qattn: {}\n", printable(message)); }

void warn_of_nan(const std::string& message) {
  say(message);
  found_nan = true;
}
bool nan_was_found() { return found_nan; }

void print(std::string_view text) { fmt::print("{}", text); }

void print_json(const Json& json) {
  // Replacing invalid UTF-8 (a path may hold any bytes) keeps the output valid JSON.
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

Status usage_error(const std::string& message) { return {Code::invalid_argument, message}; }

std::string printable(std::string_view text) {
  std::string clean(text);
  for (char& c : clean) {
    const auto code = static_cast<unsigned char>(c);
    if ((code < 32 && c != '\n') || code == 127) c = '?';
  }
  return clean;
}

std::string scientific(double value) { return fmt::format("{:.2e}", value); }

std::string fixed(double value, int digits) { return fmt::format("{:.{}f}", value, digits); }

}  // namespace qattn::cli
