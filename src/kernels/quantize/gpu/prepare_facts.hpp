// What prepare() asks of an operand: its format and scales, and which kernels that needs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/operand.hpp"
#include "kernels/operand/prepare.hpp"
#include "kernels/quantize/gpu/encode.cuh"
#include "qattn/quantize.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

inline bool free_scale(Format f) { return info(f).scale != Format::none && info(f).group == 0; }
/// Has every group of elements a scale that belongs to the format?
inline bool is_micro(Format f) { return info(f).group > 0; }

/// What a role of a call means, from the problem and the recipe.
struct OperandSpec {
  Role role;
  Format format;  ///< of the codes
  Scaling scaling;
  bool codes = false;  ///< the operand comes quantised
  TensorView scale;    ///< given, or absent; of codes in nvfp4 the second level
  TensorView groups;   ///< built-in scales of codes
  TokenTensor tensor;
  int channels = 0, padded = 0;
  std::int64_t heads = 0;
  bool wanted = false;
};

/// Does it come in codes with built-in scales, which GatherMicro brings?
inline bool gathered(const OperandSpec& f) { return is_micro(f.format) && f.codes; }

inline OperandSpec facts_of(const Problem& p, const Recipe& r, const PrepareNeeds& needs,
                            Role role) {
  const Operand x = operand_of(p, role);
  const OperandRecipe asked = operand_recipe(r, role);
  OperandSpec f;
  f.role = role;
  f.format = asked.format;
  f.scaling = asked.scaling;
  f.codes = x.codes;
  f.scale = x.scale;
  f.tensor = x.tokens;
  f.channels = x.channels;
  f.padded = is_micro(f.format) ? micro_channels(f.channels) : prepared_channels(f.channels);
  // Tokens have nothing in common then but the second level of nvfp4.
  if (is_micro(f.format)) f.scaling.granularity = Granularity::per_head;
  if (gathered(f)) {
    f.groups = x.scale;
    f.scale = x.global;
    if (x.paged && f.format == Format::nvfp4) {  // which every page has
      f.scaling.granularity = Granularity::per_block;
      f.scaling.block = static_cast<std::int32_t>(p.page_size);
    }
  }
  f.heads = x.heads;
  f.wanted = role == Role::q ? needs.q_rows : role == Role::v ? needs.v_tiles : needs.k_rows;
  return f;
}

inline std::array<OperandSpec, 3> all_facts(const Problem& p, const Recipe& r,
                                            const PrepareNeeds& needs) {
  return {facts_of(p, r, needs, Role::q), facts_of(p, r, needs, Role::k),
          facts_of(p, r, needs, Role::v)};
}

/// Can every row be read in pieces of eight channels, 16 bytes (f32: 32, codes: 8)?
inline bool aligned_rows(const OperandSpec& f, const tile::Rows& r) {
  const int size = std::max(info(f.tensor.format).bits / 8, 1), unit = std::min(16, 8 * size);
  const std::int64_t strides = r.batch | r.token | r.head;
  return reinterpret_cast<std::uintptr_t>(r.data) % static_cast<unsigned>(unit) == 0 &&
         strides * size % unit == 0 && f.channels % chunk_channels == 0;
}

/// Q's are of blocks, K's and V's of sequences.
inline bool subtracts_mean(const Recipe& r, const OperandSpec& f) {
  return !f.codes && operand_recipe(r, f.role).smooth == Toggle::on;
}

inline const TensorView& given_mean(const Problem& p, Role role) {
  return operand_of(p, role).mean;
}

/// Is there a mean of K's or V's sequences?
inline bool has_mean(const Problem& p, const Recipe& r, const OperandSpec& f) {
  return f.role != Role::q && (subtracts_mean(r, f) || given_mean(p, f.role).present());
}

inline bool two_bytes(const OperandSpec& f) {
  return f.tensor.format == Format::f16 || f.tensor.format == Format::bf16;
}

/// V in e4m3 with a scale per channel of the sequence, from 16 bits.
inline bool scales_channels(const Recipe& r, const OperandSpec& f) {
  return f.role == Role::v && two_bytes(f) && f.format == Format::e4m3 &&
         f.scaling.granularity == Granularity::per_channel && !f.scale.present() &&
         !subtracts_mean(r, f);
}

/// Does a variant without detours serve this operand: EncodePlain, under given scales EncodeGiven?
/// Depends on its address, too.
inline bool is_plain(const Recipe& r, const OperandSpec& f, const tile::Rows& rows) {
  if (!two_bytes(f) || f.codes || !aligned_rows(f, rows)) return false;
  const Granularity g = f.scaling.granularity;
  const bool given = f.scale.present();
  if (f.role == Role::v) {
    if (subtracts_mean(r, f)) return false;
    if (f.format == Format::s8) return scaled_by_token(f.scaling, f.role);
    const bool of_sequence =
        g == Granularity::per_channel || g == Granularity::per_head || g == Granularity::per_tensor;
    return scales_channels(r, f) || (given && f.format == Format::e4m3 && of_sequence);
  }
  if (f.role == Role::q && subtracts_mean(r, f)) return false;
  if (r.rotate == Toggle::on) return false;
  if (f.format != Format::s8 && (f.format != Format::e4m3 || r.balance_k == Toggle::on)) {
    return false;
  }
  return given || g == Granularity::per_token ||
         (g == Granularity::per_block && f.scaling.block == slot_tile) ||
         (g == Granularity::per_thread && f.role == Role::k && f.scaling.block == slot_tile);
}

/// Must that variant read the operand twice: K for its mean, V for the maxima of its channels?
inline bool two_passes(const Problem& p, const Recipe& r, const OperandSpec& f) {
  return f.role == Role::k ? has_mean(p, r, f) && !given_mean(p, f.role).present()
                           : scales_channels(r, f);
}

inline ScaleSource source_of(const OperandSpec& f) {
  const Scaling& s = f.scaling;
  if (is_micro(f.format) && f.format != Format::nvfp4) return ScaleSource::row;
  const bool token = scaled_by_token(s, f.role);
  if (f.role == Role::v && !token) return ScaleSource::channel;
  if (f.scale.present()) return ScaleSource::given;
  if (token) return ScaleSource::row;
  switch (s.granularity) {
    case Granularity::per_block:
      return slot_tile % s.block == 0 ? ScaleSource::tile : ScaleSource::maxima;
    case Granularity::per_warp:
      return slot_tile % s.warp == 0 ? ScaleSource::tile : ScaleSource::maxima;
    case Granularity::per_thread:
      return slot_tile % (f.role == Role::q ? s.warp : s.block) == 0 ? ScaleSource::tile
                                                                     : ScaleSource::maxima;
    default:
      return ScaleSource::maxima;
  }
}

inline std::int32_t code_bits(Format f) { return free_scale(f) || is_micro(f) ? info(f).bits : 8; }
/// Bytes of a row of Q or K, and of its built-in scales.
inline std::int32_t row_bytes(const OperandSpec& f) { return f.padded * code_bits(f.format) / 8; }
inline std::int32_t group_bytes(const OperandSpec& f) {
  return is_micro(f.format) ? (f.padded / info(f.format).group + 3) / 4 * 4 : 0;
}
inline TileOffsets tile_offsets(const OperandSpec& f) {
  return kernels::tile_offsets(f.padded, code_bits(f.format), info(f.format).group);
}

/// Must maxima be found before the codes?
inline bool needs_maxima(const OperandSpec& f) {
  const ScaleSource s = source_of(f);
  return s == ScaleSource::maxima || (s == ScaleSource::channel && !f.scale.present());
}

/// Groups in one block of the index maps.
inline std::int32_t block_groups(const OperandSpec& f) {
  const Scaling& s = f.scaling;
  if (s.granularity == Granularity::per_warp) return s.block / s.warp;
  if (s.granularity == Granularity::per_thread) {
    return f.role == Role::q ? s.block / s.warp * 8 : 4;
  }
  return 1;
}

/// Words of the table of maxima; `groups` is per head.
inline std::int64_t maxima_words(const OperandSpec& f, const tile::Rows& r, std::int64_t& groups) {
  groups = 1;
  if (f.scaling.granularity == Granularity::per_tensor) return 1;
  if (f.scaling.granularity == Granularity::per_head ||
      f.scaling.granularity == Granularity::per_channel) {
    groups = r.batches;
  } else if (r.cu_seqlens != nullptr) {
    groups = (r.total / f.scaling.block + r.batches + 1) * block_groups(f);
  } else {
    groups = r.batches * scale_count(f.scaling, f.role, r.max_length);
  }
  return f.heads * groups * (by_channel(f.scaling.granularity) ? f.padded : 1);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
