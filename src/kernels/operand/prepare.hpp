// Quantises Q, K and V of an attention call into the workspace (prepared.hpp) with kernels that run
// on the caller's stream. Compiled twice: by nvcc for GPUs, by the host compiler for the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/problem.hpp"
#include "isa/launch.hpp"
#include "kernels/operand/prepared.hpp"

namespace qattn::kernels {

/// What an attention kernel wants prepared. Operands that stay in 16 bits are read in place.
struct PrepareNeeds {
  bool q_rows = false, k_rows = false, v_tiles = false;
  bool dot_mean = false;  ///< PreparedRows::dot_mean of Q; needs smooth_k or a given k_mean
  /// Of K, and of V in a format with built-in scales. Other formats know the natural one only.
  KeyOrder key_order = KeyOrder::natural;
};

/// Where everything lies in the workspace, in bytes from its start; `none` for what is not there.
struct PrepareLayout {
  static constexpr std::size_t none = ~std::size_t{0};
  struct Part {
    std::size_t codes = none, scale = none, flags = none, dot_mean = none, group_scale = none;
    std::size_t mean = none;
    std::size_t sums = none;    ///< of 64 rows, for the mean of K or V; or maxima of V
    std::size_t maxima = none;  ///< bits of max |x| of groups larger than a tile
    std::int64_t slots = 0;
    std::int64_t groups = 0;         ///< maxima: groups per head, all sequences
    std::int64_t mean_blocks = 0;    ///< means of Q per head, all sequences
    std::size_t mean_scores = none;  ///< of Q: PreparedMeans::scores
  };
  PrepareNeeds needs;
  Part part[3];                      ///< by Role; V's `codes` are its tiles
  std::size_t channel_scale = none;  ///< of V; PreparedTiles has the rest
  std::size_t factors = none;        ///< that balance K's channels, and Q's
  std::size_t loud = none;           ///< are there any that are not 1?
  std::int64_t channel_groups = 0, channel_block = 0;
  std::int64_t most_means = 0;  ///< PreparedMeans::most
  bool packed_groups = false;
  /// Which keys are hidden from all rows, and must leave no trace: SeenKeys. `none`: no key can be.
  std::size_t seen = none, seen_counts = none;
  std::int32_t seen_heads = 1;
  /// SlightKeys; `none`: no key can be, or scores are not bounded.
  std::size_t slight = none, slight_counts = none;
  std::size_t bytes = 0;
  std::uint32_t* error = nullptr;  ///< of the device; asked for when a plan is made
};

/// What prepare() made. Means of K and V: [batch][heads_kv][padded channels], null where none is
/// subtracted.
struct Prepared {
  PreparedRows q, k;
  PreparedTiles v;
  PreparedMeans q_mean;
  const float* k_mean = nullptr;
  const float* v_mean = nullptr;
  std::int32_t v_channels = 0;  ///< of a row of v_mean, padded
};

/// Head dimension that prepared rows and tiles are padded to: 64, 96, 128 or 256; in formats with
/// built-in scales micro_channels().
constexpr int prepared_channels(int channels) {
  return channels <= 64 ? 64 : channels <= 96 ? 96 : channels <= 128 ? 128 : 256;
}

inline namespace QATTN_TARGET {

/// The tokens of an operand for kernels. Index tensors must have unit stride in their last
/// dimension.
tile::Rows rows_of(const Problem& problem, Role role);

/// Why these kernels cannot prepare what is asked for; empty: they can. `recipe` as resolved:
/// nothing automatic left in it.
std::string prepare_refusal(const Problem& problem, const Recipe& recipe,
                            const PrepareNeeds& needs);

/// How many keys of a sequence share V's scales per channel; all of them where it has none.
std::int64_t channel_block(const Problem& problem, const Recipe& recipe, const PrepareNeeds& needs);

PrepareLayout plan_prepare(const Problem& problem, const Recipe& recipe, const PrepareNeeds& needs);

/// A line of a plan's text: are hidden keys looked for?
std::string hidden_keys_text(const PrepareLayout& layout);

/// Enqueues everything on the stream; allocates nothing and waits for nothing. `workspace` has
/// layout.bytes bytes, 64-byte aligned. `next`: when the kernel behind it may start.
isa::LaunchError prepare(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
                         void* workspace, void* stream, isa::Start& next);

/// Where what balances Q's channels is; null if nothing does (PlainRows::factors).
void query_factors(const PrepareLayout& layout, const Problem& problem, void* workspace,
                   const float*& factors, const std::uint32_t*& loud);

/// The first kernel of a chain: clears `count` words, and finds the factors that balance K's
/// channels, if the recipe asks for them.
isa::LaunchError begin(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
                       void* workspace, std::uint32_t* zeros, std::int64_t count, void* stream);

/// Where prepare() puts its results.
Prepared prepared_in(const Problem& problem, const Recipe& recipe, const PrepareLayout& layout,
                     void* workspace);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
