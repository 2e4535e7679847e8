#include <tuple>

#include "core/problem/checks.hpp"
#include "core/problem/maker.hpp"

namespace qattn {

using namespace checks;

Status ProblemMaker::operand_scales(Role role) {
  const Operand x = operand_of(p_, role);
  const auto& [name, codes, scale, global, mean] =
      std::tie(x.name, x.codes, x.scale, x.global, x.mean);
  const auto [target, asked, smooth] = operand_recipe(o_.recipe, role);
  const std::string scale_name = std::string(name) + "_scale";
  if (codes && x.tokens.format != target) {
    return invalid(std::string(name) + ": format " + std::string(info(x.tokens.format).name) +
                   " differs from the recipe's " + std::string(info(target).name));
  }
  if (codes && !scale.present())
    return invalid(scale_name + ": is missing, and " + name + " holds codes");
  if (codes && role == Role::v && info(target).group > 0 && !global.present() &&
      target == Format::nvfp4) {
    return invalid("v_global: is missing, and v holds nvfp4 codes");
  }
  if (!codes && scale.present() && (!is_codes(target) || info(target).group > 0)) {
    return invalid(scale_name + ": is given, but " + name + " in format " +
                   std::string(info(target).name) + " takes no static scale");
  }
  const std::int64_t outer = x.paged ? p_.pages : p_.batch;
  if (global.present() != (codes && target == Format::nvfp4)) {
    return invalid(std::string(name) + "_global: " +
                   (global.present()
                        ? "belongs to nvfp4 codes only"
                        : "is missing, and " + std::string(name) + " holds nvfp4 codes"));
  }
  if (Status s = check_small((std::string(name) + "_global").c_str(), global, {outer, x.heads},
                             {Format::f32});
      !s.ok()) {
    return s;
  }
  if (mean.present() && !codes) {
    if (Status s = mean_of_numbers(x, target, smooth); !s.ok()) return s;
  }
  if (Status s = check_small((std::string(name) + "_mean").c_str(), mean,
                             {p_.batch, x.heads, x.channels}, {Format::f32});
      !s.ok()) {
    return s;
  }
  if (!scale.present()) return {};
  const Scaling scaling = resolve_scaling(asked, role, target);
  if (Status s = check_scaling(name, scaling, role, target); !s.ok()) return s;
  if (Status s = check_format(scale_name.c_str(), scale, {info(target).scale}); !s.ok()) return s;
  const std::int64_t tokens = x.paged ? p_.page_size : x.longest;
  ScaleShape want = ScaleMap{scaling, role, info(target).group, x.paged}.shape(outer, x.heads,
                                                                               tokens, x.channels);
  // Packed sequences: the longest one is known from the contents only; check_contents() looks.
  if (x.varlen && want.rank >= 3 && scale.rank == want.rank) want.extent[2] = scale.shape[2];
  if (x.varlen && scaling.granularity == Granularity::per_channel) want.extent[2] = x.channels;
  return check_shape(scale_name.c_str(), scale, want.extent.data(), want.rank);
}

Status ProblemMaker::mean_of_numbers(const Operand& x, Format target, Toggle smooth) const {
  const std::string name = std::string(x.name) + "_mean: ";
  if (x.role != Role::k) {
    return invalid(name + "belongs to quantised " + x.name + " only");
  }
  if (target == Format::none) return invalid(name + "needs a named recipe, not auto");
  if (!is_codes(target)) {
    return invalid(name + "is given, but k in format " + std::string(info(target).name) +
                   " keeps its mean");
  }
  if (smooth == Toggle::off) return invalid(name + "is given, but smooth_k is off");
  return {};
}

Status ProblemMaker::scales() {
  const Recipe& r = o_.recipe;
  for (const Role role : all_roles) {
    const Operand x = operand_of(p_, role);
    if (r.qk == Format::none && (x.codes || x.scale.present())) {
      return invalid(std::string(x.name) + ": codes and static scales need a named recipe, not " +
                     "auto");
    }
  }
  if (o_.scales_for) {
    const bool any = t_.q_scale.present() || t_.k_scale.present() || t_.v_scale.present();
    Status s = check_made_for_something(any, "q_scale, k_scale or v_scale");
    if (!s.ok()) return s;
  }
  for (const Role role : all_roles) {
    const Operand x = operand_of(p_, role);
    if (!o_.scales_for || x.codes || !x.scale.present()) continue;
    Status s = check_made_for(std::string(x.name) + "_scale", role, *o_.scales_for, r);
    if (!s.ok()) return s;
  }
  for (const Role role : all_roles) {
    if (Status s = operand_scales(role); !s.ok()) return s;
  }
  return {};
}

Status ProblemMaker::recipe() {
  const Recipe& r = o_.recipe;
  if (Status s = check_toggles("recipe", r); !s.ok()) return s;
  if (o_.scales_for) {
    if (Status s = check_toggles("scales_for", *o_.scales_for); !s.ok()) return s;
  }
  if (r.qk == Format::none && (r.p != Format::none || r.v != Format::none)) {
    return invalid("recipe: formats of P or V need a format of Q and K");
  }
  const struct {
    const char* name;
    Toggle toggle;
    bool codes;
  } smooth[] = {{"smooth_k", r.smooth_k, p_.k_codes},
                {"smooth_q", r.smooth_q, p_.q_codes || p_.k_codes},
                {"smooth_v", r.smooth_v, p_.v_codes},
                {"rotate", r.rotate, p_.q_codes || p_.k_codes},
                {"balance_k", r.balance_k, p_.q_codes || p_.k_codes}};
  for (const auto& item : smooth) {
    if (item.toggle == Toggle::on && item.codes) {
      return invalid(std::string(item.name) + ": cannot be applied to codes; ask quantize()");
    }
  }
  if (r.balance_k == Toggle::on && !p_.scales_own_rows()) {
    return invalid("balance_k: changes rows that static scales of q or k were made for");
  }
  const struct {
    const char* name;
    const Scaling* scaling;
    Role role;
    Format format;
  } scalings[] = {{"q", &r.q_scale, Role::q, r.qk},
                  {"k", &r.k_scale, Role::k, r.qk},
                  {"v", &r.v_scale, Role::v, r.v}};
  for (const auto& item : scalings) {
    if (item.format == Format::none) {
      if (*item.scaling == Scaling{}) continue;
      return invalid(std::string(item.name) + "_scale: granularity " +
                     std::string(name(item.scaling->granularity)) + " is given, but " +
                     (r.qk == Format::none ? "recipe auto chooses its own"
                                           : "a 16-bit operand has no scales"));
    }
    if (Status s = check_scaling(item.name, *item.scaling, item.role, item.format); !s.ok()) {
      return s;
    }
  }
  return {};
}

}  // namespace qattn
