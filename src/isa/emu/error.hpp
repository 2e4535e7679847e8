// What the emulator reports: a sentence that names the word, the threads and the source lines.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>
#include <typeinfo>

namespace qattn::emu {

/// The place of a call in the kernel's source.
using Where = std::source_location;

struct Error : std::runtime_error {
  using runtime_error::runtime_error;
};

/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...);

/// A kernel's type as people write it, without the namespaces of this project.
std::string kernel_name(const std::type_info* kernel);

/// "kernel.hpp:42"
std::string describe(const Where& where);

}  // namespace qattn::emu
