// A recipe says in which format each operand of attention is multiplied and how it is scaled.
// docs/NUMERICS.md defines every recipe and gives its error.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "qattn/format.hpp"
#include "qattn/status.hpp"

namespace qattn {

/// Which elements share one scale. Shapes of the scale tensors (B batch, H heads, S tokens; index =
/// token index inside its sequence, so block 0 starts every sequence):
///   per_tensor         (1)
///   per_head           (B, H)                          paged K and V: (H)
///   per_block          (B, H, ceil(S / block))
///   per_warp           (B, H, ceil(S / block) * block / warp)
///   per_thread         Q: (B, H, ceil(S / block) * block / warp * 8), index (s / warp) * 8 + s % 8
///                      K: (B, H, ceil(S / block) * 4), index (s / block) * 4 + s % 8 / 2
///                      V (s8, block 64): (B, H, S): the tokens of a block with the same s % 8 / 2
///                      share the scale of their largest; tokens below a quarter of it have their
///                      own
///   per_token          (B, H, S)
///   per_channel        (B, H, D)
///   per_block_channel  (B, H, ceil(S / block), D)
///   group              built into the format (mxfp8, mxfp4, nvfp4): Q, K (B, H, S, ceil(D /
///   group));
///                      V (B, H, ceil(S / group), D)
/// B H order whatever the layout of the tensor. GQA: Q's scales per query head, K's and V's per KV
/// head. Paged K and V: B becomes the number of pages and S the page size.
enum class Granularity : std::int32_t {
  automatic,
  per_tensor,
  per_head,
  per_block,
  per_warp,
  per_thread,
  per_token,
  per_channel,
  per_block_channel,
  group,
};
std::string_view name(Granularity granularity);
std::optional<Granularity> granularity_named(std::string_view name);

/// The operand that a tensor is: it decides the direction of the contraction and of the groups.
enum class Role : std::int32_t { q, k, v };
std::string_view name(Role role);

/// Granularity of an operand's scales with its block sizes in tokens (0: the default of the
/// device).
struct Scaling {
  Granularity granularity = Granularity::automatic;
  std::int32_t block =
      0;  ///< tokens per block of per_block, per_warp, per_thread, per_block_channel
  std::int32_t warp = 0;  ///< rows per warp of per_warp and per_thread (Q)
  bool operator==(const Scaling&) const = default;
};

enum class Toggle : std::int32_t { automatic, off, on };

struct Recipe {
  std::string name = "auto";
  Format qk = Format::none;  ///< codes of Q and K; none: resolved by the plan (recipe "auto")
  Format p = Format::none;   ///< codes of P; none: 16-bit like V
  Format v = Format::none;   ///< codes of V; none: the input's 16-bit format (f16 for f32 inputs)
  Scaling q_scale, k_scale, v_scale;
  Toggle smooth_k = Toggle::automatic;  ///< subtract K's mean over its sequence; exact
  /// Subtract each Q block's mean; exact. Automatic: for formats of groups, 64 queries or more of
  /// numbers, not packed; blocks (q_scale.block) of 64, or so large that a sequence has 64.
  Toggle smooth_q = Toggle::automatic;
  Toggle smooth_v = Toggle::automatic;  ///< subtract V's mean over its sequence; automatic = off
  Toggle rotate = Toggle::automatic;    ///< Hadamard rotation of Q and K; automatic = off
  /// Divide loud channels of K by powers of two and multiply Q's by them; exact, and nothing
  /// changes where K has none. Automatic: beside `rotate`, and on CPUs for s8 and 4-bit floats;
  /// off where Q or K has codes or static scales.
  Toggle balance_k = Toggle::automatic;
  bool operator==(const Recipe&) const = default;
};

/// Every named recipe except "auto", in the order of docs/NUMERICS.md.
std::span<const Recipe> recipes();

/// The recipe called `name` ("auto" included), or invalid_argument with the list of names.
Result<Recipe> recipe_named(std::string_view name);

}  // namespace qattn
