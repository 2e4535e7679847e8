#include "qattn/status.hpp"

namespace qattn {

std::string_view name(Code code) {
  switch (code) {
    case Code::ok:
      return "ok";
    case Code::invalid_argument:
      return "invalid_argument";
    case Code::unsupported:
      return "unsupported";
    case Code::out_of_memory:
      return "out_of_memory";
    case Code::internal:
      return "internal";
  }
  return "unknown";
}

}  // namespace qattn
