// The rim of the C++ interface: nothing escapes as an exception.
#pragma once

#include <exception>
#include <new>

#include "qattn/status.hpp"

namespace qattn {

/// f(), whose failures become a Status; Value is Status or a Result.
template <class Value, class Function>
Value guarded(Function f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "host memory: an allocation failed");
  } catch (const std::exception& e) {
    return Status(Code::internal, e.what());
  }
}

}  // namespace qattn
