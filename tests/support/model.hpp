// The semantic model: attention in float64 from the same quantised codes, with the same tile
// partition and the same rounding of P as the kernels. A kernel must match it tightly, so that a
// misplaced scale cannot hide behind "quantisation error".
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "qattn/recipe.hpp"
#include "support/call.hpp"

namespace qattn::test {

/// A defect planted in the model: a comparison that still passes with it is worth nothing.
enum class Mutation {
  none,
  swap_q_scale,  ///< the scales with index 0 and 1 of Q change places
  swap_k_scale,
  swap_v_scale,      ///< the scales of V's first two blocks (or tokens, or channels)
  shift_mask_bound,  ///< causal and window bounds one key too far right
};

/// What becomes of P that its codes in u8 lose in a tile (docs/NUMERICS.md, "Lost mass").
enum class LostMass {
  second_byte,  ///< beyond 1 / 256 of the row's codes so far, a second byte of P
  value_mean,   ///< beyond 1 / 1024 of all the row's codes, the mean of V's codes of four tiles
};
/// As a plan says.
LostMass lost_mass_of(const std::string& plan);

/// Is 16-bit P relative to powers of two, as a plan says, and not to running maxima?
bool has_whole_references(const std::string& plan);

struct ModelOptions {
  Recipe recipe;                ///< as resolved by the plan
  std::int64_t split_keys = 0;  ///< keys per split; 0: none
  /// Only sequences with at most so many rows a KV head (group times queries) are split.
  std::int64_t split_rows = std::numeric_limits<std::int64_t>::max();
  Mutation mutation = Mutation::none;
  std::int64_t tile_keys = 128;
  /// GPUs: blocks that share, in tiles of 128, the keys that `tile_rows` rows can see in all; of
  /// all rows of a sequence where tile_rows is 0.
  std::int64_t splits = 1, tile_rows = 0;
  LostMass lost_mass = LostMass::second_byte;
  bool whole_references = false;  ///< has_whole_references()
  /// Codes of K and V come from quantize(), which knows no masks: hidden keys are in what keys
  /// share.
  bool given_codes = false;
  /// Does the plan look for hidden keys? Only then have those of a sequence without queries no part
  /// in a scale of the tensor.
  bool finds_hidden_keys = true;
  /// Sequences with at most so many rows a KV head take tiles from the first to the last.
  std::int64_t rising_rows = 0;
};

struct ModelOutput {
  std::vector<double> out;  ///< rows in Call::row() order, dim_v values each
  std::vector<double> lse;
  std::int64_t saturated[3] = {0, 0, 0};  ///< codes of q, k, v clipped by static scales
};

ModelOutput model_attention(const Call& call, const ModelOptions& options);

/// One operand of one sequence and head, dequantised to float64.
struct Coded {
  std::vector<double> value;        ///< [token][dim] code * scale; in rotated space if rotated
  std::vector<double> token_scale;  ///< V per token: its scales; otherwise empty
  std::vector<double> code_mean;    ///< [dim] mean_of_codes()
  std::vector<double> mean;         ///< K, V: [dim]; Q: [block][dim]; empty without smoothing
  std::vector<double> scale;        ///< as quantize() gave them
  double global = 1;
  std::int64_t saturated = 0;
};

struct CodeRequest {
  Format format = Format::none;
  Role role = Role::k;
  Scaling scaling;
  bool smooth = false, rotate = false;
  std::span<const float> static_scale;  ///< this sequence and head's, or empty
  Mutation mutation = Mutation::none;
  std::vector<bool> seen = {};  ///< per token: does it share in the mean? Empty: all do
};

/// Quantises x [token][dim] through the public quantize() and dequantises with the index maps of
/// Granularity as recipe.hpp states them.
Coded code_operand(std::span<const float> x, std::int64_t dim, const CodeRequest& request);

/// Powers of two that K's channels are divided by and Q's multiplied with, from the rows k
/// [token][dim] that are seen; all 1 where K is not loud. `central`: K's mean is subtracted.
std::vector<float> balance(std::span<const float> k, const std::vector<bool>& seen,
                           std::int64_t dim, bool central);

/// How P is rounded.
struct PRule {
  Format p = Format::f32;
  bool token_scale = false;  ///< u8 with V per token: V's scale is folded into P before rounding
  LostMass lost_mass = LostMass::second_byte;
  bool rises = false;             ///< tiles come from the first to the last
  bool whole_references = false;  ///< of 16-bit P: powers of two
  double taken = 0;               ///< what kernels' scores of the row are short of
};

/// Weights of a row's keys in one tile: O += factor * sum value[j] * V[j], l += factor * sum
/// mass[j]. u8, in units of V's codes: what P's codes stand for, and what they lost of it.
struct TileWeights {
  double factor = 1, codes = 0, lost = 0;
  std::vector<double> value, mass;
};

/// `s`: scores of the tile's keys, -inf where masked, at least one finite. `m_run`: the row's
/// reference, of this tile and those visited before; `codes`: the sum of factor * codes of these.
/// `sv`: V's token scales in the tile, or empty.
TileWeights round_p(const PRule& rule, std::span<const double> s, double m_run, double codes,
                    std::span<const double> sv);

/// What rounding takes from P of score `s` relative to `reference`, in 16 bits.
double rounded_off(const PRule& rule, double s, double reference);

}  // namespace qattn::test
