// A backend's library as another version of qattn would have built it: only its first field counts.
#include <string>

namespace {
struct Other {
  const char* refusal;
  const char* no_name_nor_kernels[2];
};
std::string text;
Other other{};
}  // namespace

extern "C" __attribute__((visibility("default"))) const void* qattn_backend(const char* version) {
  text = std::string("was built for libqattn 0.0.0, and this one is ") + version;
  other.refusal = text.c_str();
  return &other;
}
