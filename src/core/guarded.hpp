// The rim of the C++ interface: nothing escapes as an exception.
#pragma once

#include <exception>
#include <new>

#include "qattn/status.hpp"

namespace qattn {

/// A failure that must be reported without fail: where its message has no room, a text that
/// std::string holds without memory of its own (15 characters).
inline Status reported(Code code, const char* message) noexcept {
  try {
    return Status(code, message);
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "no host memory");
  }
}

/// f(), whose failures become a Status; Value is Status or a Result.
template <class Value, class Function>
Value guarded(Function f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return reported(Code::out_of_memory, "host memory: an allocation failed");
  } catch (const std::exception& e) {
    return reported(Code::internal, e.what());
  }
}

}  // namespace qattn
