#include "qattn/recipe.hpp"

#include <array>
#include <utility>
#include <vector>

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

}  // namespace qattn
