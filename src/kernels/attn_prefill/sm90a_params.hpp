// What the Hopper prefill kernel is told, and how its shared memory is laid out.
#pragma once

#include "isa/tensor_map.hpp"
#include "kernels/attn_prefill/params.hpp"
#include "tile/copy.hpp"

namespace qattn::kernels {

using isa::SharedAddress;

/// Everything that selects code of the Hopper kernel.
struct Sm90Config {
  int d = 128;                         ///< padded head dimension of Q, K and V: 64 or 128
  isa::Element qk = isa::Element::s8;  ///< Q and K
  isa::Element pv = isa::Element::u8;  ///< P; V is s8 beside u8
  bool operator==(const Sm90Config&) const = default;
};

struct Sm90Params : PrefillParams {
  isa::TensorMap q_map;  ///< prepared Q: (row bytes, heads * slots), boxes of 64 rows
  isa::TensorMap k_map;  ///< prepared K, boxes of 128 rows
  isa::TensorMap v_map;  ///< prepared V: (64 keys, channels, tiles), boxes of one tile
  std::int32_t works = 0;
  /// Some feature touches single scores: every tile takes the long way.
  bool general = false;
};

/// Two consumer warpgroups of 64 rows each, one producer; tiles of 128 keys. A stage of the ring
/// holds K of a tile with its scales and V's tables, and the codes of V of the tile before, which
/// is multiplied in the same step.
template <Sm90Config C>
struct Sm90Shape {
  static_assert(C.qk == isa::Element::s8 && C.pv == isa::Element::u8, "no other products yet");
  static constexpr bool wide_qk = false, wide_pv = false, u8 = true;
  static constexpr float p_log2 = 0.0f;
  static constexpr int d = C.d, keys = 128, consumers = 2, rows = 64 * consumers;
  static constexpr int m_tiles = 1, warp_rows = 16, n_tiles = keys / 8, d_tiles = d / 8;
  static constexpr int threads = 128 * (consumers + 1), row_warps = 4 * consumers;

  static constexpr isa::Swizzle qk_swizzle =
      d == 64 ? isa::Swizzle::bytes64 : isa::Swizzle::bytes128;
  static constexpr int qk_row = d, qk_stride = 8 * qk_row;  ///< bytes of a row and of 8
  static constexpr int v_stride = 8 * slot_tile;            ///< of 8 channels
  static constexpr int halves = keys / slot_tile;           ///< prepared V tiles in one of ours

  // Bytes of one copy.
  static constexpr TileOffsets record = tile_offsets(d);
  static constexpr int q_bytes = 64 * qk_row, k_bytes = keys * qk_row;
  static constexpr int v_bytes = d * slot_tile;              ///< codes of 64 keys
  static constexpr int tail_bytes = record.bytes - v_bytes;  ///< the other tables of 64 keys
  static constexpr int scale_bytes = 4 * keys;
  static constexpr int key_bytes = k_bytes + scale_bytes + halves * tail_bytes;

  // Inside a stage.
  static constexpr int k_at = 0, v_at = k_bytes, tail_at = v_at + halves * v_bytes;
  static constexpr int scale_at = tail_at + halves * tail_bytes;
  static constexpr int stage_bytes = (scale_at + scale_bytes + 1023) / 1024 * 1024;
  // Inside a tail.
  static constexpr int weights_at = 0, log_at = record.log - v_bytes;
  static constexpr int plain_at = record.plain - v_bytes, unit_at = record.unit - v_bytes;
  static constexpr int flags_at = record.flags - v_bytes;

  static constexpr int stages = 4;
  static constexpr int out_row = tile::padded_row(2 * d);
  static constexpr int q_at = 0, ring_at = q_at + consumers * q_bytes;
  static constexpr int out_at = ring_at + stages * stage_bytes;
  static constexpr int barriers_at = out_at + rows * out_row;
  // Barriers: Q full and empty per consumer, stage full and empty.
  static constexpr int q_full = barriers_at, q_empty = q_full + 8 * consumers;
  static constexpr int full = q_empty + 8 * consumers, empty = full + 8 * stages;
  static constexpr int shared_bytes = empty + 8 * stages;
  static_assert(shared_bytes <= 232448, "sm_90 has 227 KiB a block");
  static_assert(q_bytes % 1024 == 0 && k_bytes % 1024 == 0 && v_bytes % 512 == 0);
};

}  // namespace qattn::kernels
