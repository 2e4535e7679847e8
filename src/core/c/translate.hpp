// What the files of the C interface share: errors, sized structs, tensors.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "core/guarded.hpp"
#include "qattn/qattn.h"
#include "qattn/qattn.hpp"

namespace qattn::c {

extern thread_local std::string last_error;

inline Status invalid(std::string message) {
  return Status(Code::invalid_argument, std::move(message));
}

/// f()'s Status as the C interface returns it; nothing escapes as an exception. The message is this
/// failure's or, where there is no memory for it, says that.
template <class Function>
qattn_status guarded(Function f) noexcept {
  const Status status = qattn::guarded<Status>(f);
  if (status.ok()) return QATTN_OK;
  try {
    last_error = status.message();
  } catch (const std::bad_alloc&) {
    last_error = reported(Code::out_of_memory, "no host memory").message();
    return QATTN_OUT_OF_MEMORY;
  }
  return static_cast<qattn_status>(status.code());
}

/// A copy of a sized struct: what an older caller does not have keeps its default.
template <class T>
Status read_struct(const char* name, const T* given, T& copy) {
  if (given == nullptr) return invalid(std::string(name) + ": is NULL");
  // No version of a struct ends inside a field: half a pointer would be worse than none.
  if (given->struct_size < sizeof given->struct_size || given->struct_size > sizeof(T) ||
      given->struct_size % alignof(T) != 0) {
    return invalid(std::string(name) + ": struct_size " + std::to_string(given->struct_size) +
                   " is not that of a known version (this library: " + std::to_string(sizeof(T)) +
                   "); call the struct's init function first");
  }
  std::memcpy(&copy, given, given->struct_size);
  return {};
}

/// Fills a sized struct of the caller's version.
template <class T>
Status write_struct(const char* name, T& full, T* given) {
  T check;
  if (Status s = read_struct(name, given, check); !s.ok()) return s;
  full.struct_size = given->struct_size;
  std::memcpy(given, &full, given->struct_size);
  return {};
}

/// T_defaults(): the caller's `size` bytes of `full`, zeros where the caller has more.
template <class T>
void fill(T* given, std::size_t size, T full = {}) {
  if (given == nullptr || size < sizeof full.struct_size) return;
  std::memset(given, 0, size);
  full.struct_size = size;
  std::memcpy(given, &full, std::min(size, sizeof full));
}

inline TensorView view(const qattn_tensor& t) {
  TensorView v;
  v.data = t.data;
  v.format = static_cast<Format>(t.format);
  v.rank = t.rank;
  std::copy(t.shape, t.shape + max_rank, v.shape.begin());
  std::copy(t.stride, t.stride + max_rank, v.stride.begin());
  v.device = {static_cast<DeviceType>(t.device_type), t.device_index};
  return v;
}

inline Status read_flag(const char* name, int32_t value) {
  if (value == 0 || value == 1) return {};
  return invalid(std::string(name) + ": " + std::to_string(value) + " is neither 0 nor 1");
}

}  // namespace qattn::c
