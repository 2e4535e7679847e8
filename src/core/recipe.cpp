#include "qattn/recipe.hpp"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "core/plan.hpp"

namespace qattn {
namespace {

constexpr std::array<std::string_view, 10> granularity_names = {
    "automatic",  "per_tensor", "per_head",    "per_block",         "per_warp",
    "per_thread", "per_token",  "per_channel", "per_block_channel", "group"};

Recipe make(std::string name, Format qk, Format p, Format v) {
  Recipe recipe;
  recipe.name = std::move(name);
  recipe.qk = qk;
  recipe.p = p;
  recipe.v = v;
  return recipe;
}

// docs/NUMERICS.md, "Recipes". P and V of Format::none stay in 16 bits.
const std::vector<Recipe>& table() {
  using enum Format;
  static const std::vector<Recipe> rows = {
      make("f32", f32, f32, f32),         make("bf16", bf16, bf16, bf16),
      make("f16", f16, f16, f16),         make("int8", s8, none, none),
      make("int8_fp8", s8, e4m3, e4m3),   make("int8_full", s8, u8, s8),
      make("fp8", e4m3, e4m3, e4m3),      make("fp8_p16", e4m3, none, e4m3),
      make("mxfp8", mxfp8, mxfp8, mxfp8), make("nvfp4_qk", nvfp4, none, none),
      make("nvfp4", nvfp4, nvfp4, nvfp4),
  };
  return rows;
}

}  // namespace

std::string_view name(Granularity granularity) {
  const auto i = static_cast<std::size_t>(granularity);
  return i < granularity_names.size() ? granularity_names[i] : "unknown";
}

std::optional<Granularity> granularity_named(std::string_view wanted) {
  for (std::size_t i = 0; i < granularity_names.size(); ++i) {
    if (granularity_names[i] == wanted) return static_cast<Granularity>(i);
  }
  return std::nullopt;
}

std::string_view name(Role role) {
  constexpr std::array<std::string_view, 3> names = {"q", "k", "v"};
  const auto i = static_cast<std::size_t>(role);
  return i < names.size() ? names[i] : "unknown";
}

std::span<const Recipe> recipes() { return table(); }

Result<Recipe> recipe_named(std::string_view wanted) {
  if (wanted == "auto") return Recipe{};
  std::string known = "auto";
  for (const Recipe& recipe : table()) {
    if (recipe.name == wanted) return recipe;
    known += ", " + recipe.name;
  }
  return Status(Code::invalid_argument,
                "recipe: \"" + std::string(wanted) + "\" is not one of " + known);
}

namespace detail {
namespace {

bool is_scaled(Format format) { return info(format).scale != Format::none; }

/// "16-bit" of a recipe: the input's own format, f16 for f32 inputs and codes (11 significant bits
/// against bf16's 8; a V beyond f16's range gives NaN rows, never wrong numbers).
Format sixteen_bits(Format input) { return input == Format::bf16 ? Format::bf16 : Format::f16; }

/// smooth_q in formats of groups: a mean for so many queries, or so many times as many that a
/// sequence has at most most_means. Their products with K are then as large as K of 128 channels.
constexpr std::int64_t mean_rows = 64, most_means = 64;

std::int32_t mean_block(std::int64_t queries) {
  const std::int64_t most = most_means * mean_rows, times = (queries + most - 1) / most;
  return static_cast<std::int32_t>(mean_rows * std::max<std::int64_t>(times, 1));
}

}  // namespace

Recipe resolve_recipe(const Problem& problem, std::string_view automatic, const Scaling& k_default,
                      const Scaling& v_default) {
  Recipe r = problem.recipe;
  if (r.qk == Format::none) {
    Recipe chosen = *recipe_named(automatic);
    chosen.smooth_k = r.smooth_k;
    chosen.smooth_q = r.smooth_q;
    chosen.smooth_v = r.smooth_v;
    chosen.rotate = r.rotate;
    chosen.balance_k = r.balance_k;
    r = chosen;
  }
  if (r.v == Format::none) r.v = sixteen_bits(problem.v.format);
  if (r.p == Format::none) r.p = sixteen_bits(is_float(r.v) ? r.v : problem.out.format);
  const bool free = is_scaled(r.qk) && info(r.qk).group == 0;
  // Scales that the caller gives have the shape that resolve_scaling() tells everybody.
  const bool given = problem.k_codes || problem.tensors.k_scale.present();
  if (free && r.k_scale == Scaling{} && !given) r.k_scale = k_default;
  const bool v_given = problem.v_codes || problem.tensors.v_scale.present();
  if (r.v == Format::s8 && r.v_scale == Scaling{} && !v_given) r.v_scale = v_default;
  const bool block_asked = r.q_scale.block != 0;
  r.q_scale = is_scaled(r.qk) ? resolve_scaling(r.q_scale, Role::q, r.qk) : Scaling{};
  r.k_scale = is_scaled(r.qk) ? resolve_scaling(r.k_scale, Role::k, r.qk) : Scaling{};
  r.v_scale = is_scaled(r.v) ? resolve_scaling(r.v_scale, Role::v, r.v) : Scaling{};
  // K's mean costs one pass and is exact; 16- and 32-bit operands gain nothing from it.
  if (r.smooth_k == Toggle::automatic) {
    r.smooth_k = is_scaled(r.qk) && !problem.k_codes ? Toggle::on : Toggle::off;
  }
  const bool groups = info(r.qk).group > 0;
  if (r.smooth_q == Toggle::automatic) {
    const bool gains = groups && !problem.q_codes && !problem.k_codes;
    // The host does not know how long packed sequences are, and what one gives must not depend on
    // its neighbours.
    const bool packed = problem.varlen_q || problem.varlen_k;
    r.smooth_q = gains && !packed && problem.max_q >= mean_rows ? Toggle::on : Toggle::off;
  }
  for (Toggle* t : {&r.smooth_v, &r.rotate}) {
    if (*t == Toggle::automatic) *t = Toggle::off;
  }
  // In floats of 8 bits loud channels cost the others nothing, unless rotated together with them.
  if (r.balance_k == Toggle::automatic) {
    const bool gains =
        r.rotate == Toggle::on ? is_scaled(r.qk) : r.qk == Format::s8 || info(r.qk).bits == 4;
    r.balance_k = gains && problem.scales_own_rows() ? Toggle::on : Toggle::off;
  }
  // Q's means are of blocks, also where no scales are.
  if (r.smooth_q == Toggle::on && r.q_scale.block == 0) {
    r.q_scale.block = resolve_scaling({}, Role::q, r.qk).block;
  }
  if (r.smooth_q == Toggle::on && groups && !block_asked) {
    r.q_scale.block = mean_block(problem.max_q);
  }
  return r;
}

namespace {

/// May keys be there that no row sees? Causality alone hides none: the last query sees the last
/// key.
bool may_hide_keys(const Problem& p) {
  if (p.mask != MaskKind::none || p.block_mask_q > 0 || p.mask_function) return true;
  if (p.window_left < 0) return false;
  // The first query sees keys from its place on the diagonal less window_left on. A sequence
  // without queries has nobody to be wrong for.
  const bool all_queries = !p.varlen_q && !p.tensors.seqused_q.present();
  const std::int64_t queries = all_queries ? p.max_q : 1;
  return p.max_k - queries > p.window_left;
}

}  // namespace

bool must_find_hidden_keys(const Problem& p, const Recipe& r) {
  if (!may_hide_keys(p)) return false;
  const auto grouped = [](Format f) { return info(f).group > 0; };
  const auto free = [](Format f) { return is_scaled(f) && info(f).group == 0; };
  const bool k_groups =
      free(r.qk) && r.k_scale.granularity != Granularity::per_token && !p.tensors.k_scale.present();
  const bool k_shares = !p.k_codes && (r.smooth_k == Toggle::on || r.balance_k == Toggle::on ||
                                       r.qk == Format::nvfp4 || k_groups);
  const bool v_shares = !p.v_codes && (r.smooth_v == Toggle::on || grouped(r.v) ||
                                       (free(r.v) && !p.tensors.v_scale.present()));
  return k_shares || v_shares;
}

bool bounds_slight_keys(const Problem& p) {
  return p.mask == MaskKind::additive && !p.q_codes && !p.k_codes && !p.score_function &&
         !p.tensors.alibi_slopes.present();
}

}  // namespace detail
}  // namespace qattn
