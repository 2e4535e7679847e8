// What all parts of the validator check tensors with.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "core/problem.hpp"

namespace qattn::checks {

inline std::string text(std::int64_t value) { return std::to_string(value); }
inline Status invalid(std::string message) {
  return Status(Code::invalid_argument, std::move(message));
}
inline bool is_codes(Format format) { return info(format).scale != Format::none; }

Status check_format(const char* name, const TensorView& view,
                    std::initializer_list<Format> allowed);
Status check_shape(const char* name, const TensorView& view, const std::int64_t* extent, int rank);
Status check_shape(const char* name, const TensorView& view,
                   std::initializer_list<std::int64_t> extent);
/// A small dense operand, if there is one: format and shape.
Status check_small(const char* name, const TensorView& view,
                   std::initializer_list<std::int64_t> extent,
                   std::initializer_list<Format> allowed);

}  // namespace qattn::checks
