// What the program prints: tables and JSON on standard output, progress on standard error.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn::cli {

using Json = nlohmann::ordered_json;

/// Columns as wide as their widest cell; the first is left-aligned, numbers to its right are not.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;
  const std::vector<std::vector<std::string>>& rows() const { return rows_; }

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// A bar on standard error, drawn only where that is a terminal and erased at the end.
class Progress {
 public:
  explicit Progress(double total);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  /// `done` of `total` steps; `label` says what runs now.
  void show(double done, std::string_view label);

 private:
  double total_;
  bool visible_;
};

/// Says something on standard error.
void say(const std::string& message);

/// Says on standard error that results hold NaN or Inf; the program will end with status 4.
void warn_of_nan(const std::string& message);
bool nan_was_found();

void print(std::string_view text);
void print_json(const Json& json);

/// "--shape 1,2: six positive integers are needed" and the like.
Status usage_error(const std::string& message);

/// `text` without control characters, which a hostile file could put into a message.
std::string printable(std::string_view text);

/// "1.23e-03"; "nan" where there is none.
std::string scientific(double value);
std::string fixed(double value, int digits);

}  // namespace qattn::cli
