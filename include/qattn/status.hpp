// How qattn reports failure: a Status names the tensor, the value and the rule. Nothing throws,
// prints or aborts; a refused call leaves every output untouched.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace qattn {

enum class Code : int {
  ok = 0,
  invalid_argument = 1,  ///< the call itself is wrong: shape, stride, format, option, content
  unsupported = 2,       ///< the call is right but this device or build cannot do it
  out_of_memory = 3,     ///< the workspace is too small or an allocation failed
  internal = 4,          ///< a defect of qattn
};

std::string_view name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

/// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  const T& operator*() const { return *value_; }
  T& operator*() { return *value_; }
  const T* operator->() const { return &*value_; }
  T* operator->() { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace qattn
