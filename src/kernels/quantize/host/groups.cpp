// Counts and shapes of scales by Granularity, and what may be asked for.
#include <cmath>

#include "core/problem.hpp"
#include "kernels/operand/scale_groups.hpp"
#include "qattn/quantize.hpp"

namespace qattn {

namespace {

ScaleGroups groups_of(const Scaling& s, Role role, int group = 0) {
  return {role, s.granularity, s.block, s.warp, group};
}

}  // namespace

bool joins_groups(const Scaling& s, Role role) { return groups_of(s, role).joins(); }

bool scaled_by_token(const Scaling& s, Role role) { return groups_of(s, role).by_token(); }

std::int64_t scale_index(const Scaling& scaling, Role role, std::int64_t s) {
  return groups_of(scaling, role).index(s);
}

std::int64_t scale_count(const Scaling& scaling, Role role, std::int64_t tokens) {
  const auto blocks = [&](std::int64_t size) { return (tokens + size - 1) / size; };
  switch (scaling.granularity) {
    case Granularity::per_tensor:
    case Granularity::per_head:
    case Granularity::per_channel:
      return 1;
    case Granularity::per_block:
    case Granularity::per_block_channel:
      return blocks(scaling.block);
    case Granularity::per_warp:
      return blocks(scaling.block) * (scaling.block / scaling.warp);
    case Granularity::per_thread:
      return role == Role::q   ? blocks(scaling.block) * (scaling.block / scaling.warp) * 8
             : role == Role::k ? blocks(scaling.block) * 4
                               : tokens;
    case Granularity::per_token:
    case Granularity::group:
    case Granularity::automatic:
      return tokens;
  }
  return tokens;
}

ScaleShape ScaleMap::shape(std::int64_t outer, std::int64_t heads, std::int64_t tokens,
                           std::int64_t channels) const {
  const std::int64_t count = scale_count(scaling, role, tokens);
  switch (scaling.granularity) {
    case Granularity::per_tensor:
      return {1, {1}};
    case Granularity::per_head:
      return paged ? ScaleShape{1, {heads}} : ScaleShape{2, {outer, heads}};
    case Granularity::per_channel:
      return paged ? ScaleShape{2, {heads, channels}} : ScaleShape{3, {outer, heads, channels}};
    case Granularity::per_block_channel:
      return {4, {outer, heads, count, channels}};
    case Granularity::group:
      if (role == Role::v) return {4, {outer, heads, (tokens + group - 1) / group, channels}};
      return {4, {outer, heads, tokens, (channels + group - 1) / group}};
    default:
      return {3, {outer, heads, count}};
  }
}

std::int64_t ScaleMap::offset(const TensorView& scale, std::int64_t outer, std::int64_t head,
                              std::int64_t token, int channel) const {
  return groups_of(scaling, role, group)
      .offset(scale.stride.data(), paged, outer, head, token, channel);
}

namespace {

/// Tokens. Formats of groups have blocks for Q's means alone (smooth_q); docs/tables/fp4-errors.md
/// has the errors.
std::int32_t default_block(Role role, Granularity granularity) {
  if (role == Role::q && granularity == Granularity::group) return 64;
  return role == Role::v && granularity == Granularity::per_thread ? 64 : 128;
}

}  // namespace

Scaling resolve_scaling(const Scaling& asked, Role role, Format format) {
  Scaling s = asked;
  if (s.granularity == Granularity::automatic) {
    if (info(format).group > 0) {
      s.granularity = Granularity::group;
    } else if (role == Role::v) {
      // docs/NUMERICS.md, "Which V scales": per token keeps rows alive that a sink dominates.
      s.granularity = format == Format::s8 ? Granularity::per_token : Granularity::per_channel;
    } else {
      s.granularity = Granularity::per_token;
    }
  }
  if (s.block == 0) s.block = default_block(role, s.granularity);
  if (s.warp == 0) s.warp = 16;
  return s;
}

Status check_scaling(const char* operand, const Scaling& asked, Role role, Format format) {
  const auto refuse = [&](const std::string& why) {
    return Status(Code::invalid_argument, std::string(operand) + "_scale: granularity " +
                                              std::string(name(asked.granularity)) + " " + why);
  };
  const Scaling s = resolve_scaling(asked, role, format);
  const FormatInfo& f = info(format);
  if (name(s.granularity) == "unknown") return refuse("is not a known one");
  if (f.scale == Format::none) {
    if (asked == Scaling{}) return {};
    return refuse("is given, but format " + std::string(f.name) + " has no scales");
  }
  if ((f.group > 0) != (s.granularity == Granularity::group)) {
    return refuse("does not fit format " + std::string(f.name) +
                  (f.group > 0 ? ", whose scales are built in" : ""));
  }
  const bool channels = by_channel(s.granularity);
  if (channels && role != Role::v) return refuse("is for V only");
  const bool warps = s.granularity == Granularity::per_warp ||
                     (s.granularity == Granularity::per_thread && role == Role::q);
  if (s.granularity == Granularity::per_warp && role != Role::q) return refuse("is for Q only");
  const bool joint = role == Role::v && s.granularity == Granularity::per_thread;
  if (joint && (format != Format::s8 || s.block != 64)) {
    return refuse("of V is for s8 in blocks of 64 tokens");
  }
  if (role == Role::v && s.granularity != Granularity::per_token && !channels && !joint &&
      s.granularity != Granularity::group && s.granularity != Granularity::per_head &&
      s.granularity != Granularity::per_tensor) {
    return refuse(
        "is not for V (per_tensor, per_head, per_thread, per_token, per_channel, "
        "per_block_channel)");
  }
  if (s.block < 8 || s.block > 1 << 20 || s.block % 8 != 0) {
    return refuse("has block " + std::to_string(s.block) + ", not a multiple of 8 from 8 to 2^20");
  }
  if (warps && (s.warp < 8 || s.warp % 8 != 0 || s.block % s.warp != 0)) {
    return refuse("has warp " + std::to_string(s.warp) +
                  ", not a multiple of 8 that divides block " + std::to_string(s.block));
  }
  return {};
}

Result<float> scheduled_scale(float scale_at_ref, std::span<const float> sigma, std::int64_t ref,
                              std::int64_t step) {
  const auto steps = static_cast<std::int64_t>(sigma.size());
  for (const auto& [name, t] : {std::pair{"ref", ref}, std::pair{"step", step}}) {
    if (t < 0 || t >= steps) {
      return Status(Code::invalid_argument, std::string(name) + ": " + std::to_string(t) +
                                                " is not a step in [0, " + std::to_string(steps) +
                                                ")");
    }
    const float s = sigma[static_cast<std::size_t>(t)];
    if (!(s > 0) || !std::isfinite(s)) {
      return Status(Code::invalid_argument, "sigma: " + std::to_string(s) + " at step " +
                                                std::to_string(t) + " is not positive and finite");
    }
  }
  if (!(scale_at_ref > 0) || !std::isfinite(scale_at_ref)) {
    return Status(Code::invalid_argument,
                  "scale_at_ref: " + std::to_string(scale_at_ref) + " is not positive and finite");
  }
  return scale_at_ref *
         (sigma[static_cast<std::size_t>(step)] / sigma[static_cast<std::size_t>(ref)]);
}

}  // namespace qattn
