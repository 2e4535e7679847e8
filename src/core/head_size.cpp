#include "core/head_size.hpp"

namespace qattn {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

std::string found(const std::string& name, std::int64_t channels) {
  return name + ": head_dim " + text(channels);
}

int most_of(Role role) { return role == Role::v ? most_value_channels : most_key_channels; }

}  // namespace

std::string head_size_refusal(const std::string& name, Role role, std::int64_t channels) {
  if (channels >= 1 && channels <= most_of(role)) return {};
  return found(name, channels) + " is not from 1 to " + text(most_of(role)) +
         (channels < 1 ? "" : "; longer heads have no kernel here");
}

std::string device_head_size_refusal(const std::string& name, Role role, std::int64_t channels) {
  const bool fits = channels >= 8 && channels <= most_device_channels && channels % 8 == 0;
  if (fits) return {};
  const std::string rule = found(name, channels) + " is not a multiple of 8 from 8 to " +
                           text(most_device_channels) + ", as GPUs need it; ";
  if (channels < 1) return rule + "rows have no channels";
  if (channels > most_device_channels) {
    return rule + (channels <= most_of(role) ? "computes on CPUs: move the tensors there"
                                             : "longer heads have no kernel here");
  }
  const std::string zeros = " with zeros to " + text(filled(static_cast<int>(channels)));
  if (name == "x") return rule + "pad x" + zeros;
  return rule + (role == Role::v ? "pad v" + zeros + " and cut out"
                                 : "pad q and k" + zeros + " and give softmax_scale 1 / sqrt(" +
                                       text(channels) + ")");
}

Status check_device_head_sizes(const Problem& p) {
  std::string why = device_head_size_refusal("q", Role::q, p.d);
  if (why.empty()) why = device_head_size_refusal("v", Role::v, p.dv);
  return why.empty() ? Status() : Status(Code::unsupported, why);
}

}  // namespace qattn
