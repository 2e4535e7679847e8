#include "core/operand.hpp"

#include <string>

namespace qattn {

Operand operand_of(const Problem& p, Role role) {
  static const TensorView none;
  const AttentionTensors& t = p.tensors;
  switch (role) {
    case Role::q:
      return {
          role,        "q",        p.q,   p.q_codes, t.q_scale, t.q_global, none, t.cu_seqlens_q,
          t.seqused_q, p.varlen_q, false, p.heads_q, p.max_q,   p.tokens_q, p.d};
    case Role::k:
      return {role,        "k",        p.k,      p.k_codes,
              t.k_scale,   t.k_global, t.k_mean, t.cu_seqlens_k,
              t.seqused_k, p.varlen_k, p.paged,  p.heads_kv,
              p.max_k,     p.tokens_k, p.d};
    default:
      return {role,        "v",        p.v,      p.v_codes,
              t.v_scale,   t.v_global, t.v_mean, t.cu_seqlens_k,
              t.seqused_k, p.varlen_k, p.paged,  p.heads_kv,
              p.max_k,     p.tokens_k, p.dv};
  }
}

OperandRecipe operand_recipe(const Recipe& r, Role role) {
  switch (role) {
    case Role::q:
      return {r.qk, r.q_scale, r.smooth_q};
    case Role::k:
      return {r.qk, r.k_scale, r.smooth_k};
    default:
      return {r.v, r.v_scale, r.smooth_v};
  }
}

Status check_made_for(const std::string& name, Role role, const Recipe& made_for,
                      const Recipe& call) {
  const auto who = [](const Recipe& r) { return r.name.empty() ? "" : "recipe " + r.name; };
  const std::string operand(qattn::name(role)), made = who(made_for), here = who(call);
  const auto refusal = [&](const std::string& of, const std::string& caller,
                           const std::string& has) {
    return Status(Code::invalid_argument, name + ": was made for " + made +
                                              (made.empty() ? "" : ", ") + operand + " " + of +
                                              "; " + (caller.empty() ? "the call" : caller) +
                                              " has " + operand + " " + has);
  };
  const OperandRecipe own = operand_recipe(call, role), other = operand_recipe(made_for, role);
  if (own.format != other.format) {
    const auto text = [](Format f) { return "in " + std::string(info(f).name); };
    return refusal(text(other.format), here, text(own.format));
  }
  // As resolve_recipe() chooses for an operand of numbers with a static scale.
  const auto less_mean = [&](Toggle smooth) {
    return role == Role::k ? smooth != Toggle::off : smooth == Toggle::on;
  };
  const auto is_on = [&](Toggle t) { return role != Role::v && t == Toggle::on; };
  const struct {
    bool own, other;
    const char *on, *off;
  } rows[] = {
      {less_mean(own.smooth), less_mean(other.smooth), "less its mean", "with its mean"},
      {is_on(call.rotate), is_on(made_for.rotate), "rotated", "not rotated"},
      {is_on(call.balance_k), is_on(made_for.balance_k), "balanced", "not balanced"},
  };
  for (const auto& row : rows) {
    if (row.own == row.other) continue;
    return refusal(row.other ? row.on : row.off, "", row.own ? row.on : row.off);
  }
  return {};
}

Status check_made_for_something(bool any_scale, const char* names) {
  if (any_scale) return {};
  return Status(Code::invalid_argument, std::string("scales_for: is given without ") + names +
                                            "; leave it out, or give the scales that it is of");
}

Status check_toggles(const char* name, const Recipe& r) {
  for (const Toggle toggle : {r.smooth_k, r.smooth_q, r.smooth_v, r.rotate, r.balance_k}) {
    if (toggle != Toggle::automatic && toggle != Toggle::off && toggle != Toggle::on) {
      return Status(Code::invalid_argument,
                    std::string(name) + ": a toggle is neither automatic, off nor on");
    }
  }
  return {};
}

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
  if (channels >= 1 && channels <= most_device_channels) return {};
  const std::string rule =
      found(name, channels) + " is not from 1 to " + text(most_device_channels) + " as on GPUs";
  if (channels < 1) return rule;
  return rule + (channels <= most_of(role) ? "; CPUs compute it: move the tensors there"
                                           : "; longer heads have no kernel here");
}

Status check_device_head_sizes(const Problem& p) {
  std::string why = device_head_size_refusal("q", Role::q, p.d);
  if (why.empty()) why = device_head_size_refusal("v", Role::v, p.dv);
  return why.empty() ? Status() : Status(Code::unsupported, why);
}

}  // namespace qattn
