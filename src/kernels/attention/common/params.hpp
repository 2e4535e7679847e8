// What a GPU prefill kernel is told: addresses, strides and the uniform choices of one launch. Only
// facts that Problem::make has checked; contents of index tensors are guarded in the kernel.
#pragma once

#include <cstdint>

#include "kernels/operand/mask_params.hpp"
#include "kernels/operand/prepared.hpp"
#include "kernels/operand/sequence.hpp"
#include "qattn/format.hpp"

namespace qattn::kernels {

/// Where results go. Strides in elements.
struct OutputView {
  void* data = nullptr;
  Format format = Format::none;
  std::int64_t batch = 0, token = 0, head = 0;
  bool vectors = false;  ///< 16-bit rows that start and step at multiples of 16 bytes
  std::int32_t channels = 0;
  float* lse = nullptr;
  std::int64_t lse_batch = 0, lse_token = 0, lse_head = 0;
};

/// What blocks have of rows that other kernels end (combine.cuh): the rows' sums over some keys. A
/// part belongs to a block of rows and a split of its keys, the splits of a block side by side.
struct PartsView {
  float* out = nullptr;       ///< [parts][rows][channels], not normalised; null: rows end at once
  float* state = nullptr;     ///< [parts][rows][2]: what `out` is relative to, as log2, and its sum
  std::int32_t rows = 0;      ///< of a part that may exist
  std::int32_t channels = 0;  ///< padded, as the kernel has them
  std::int32_t tile_rows = 0;
};
/// Keys are split at multiples of this, behind the first that a block of rows can see.
inline constexpr int split_tile = 128;
inline constexpr int most_splits = 128;

/// Of cu_seqlens: a list that rises from 0 to the number of tokens; one that does not, or not all
/// the way; one whose sequences share tokens.
enum VarlenVerdict : std::uint32_t { varlen_in_order, varlen_incomplete, varlen_in_disorder };

/// Which work tiles there are, in which order, and which keys of a row each has.
struct ScheduleParams {
  /// Blocks of rows: of the longest sequence; of packed queries as tile::block_count() has them.
  std::int32_t q_blocks = 0;
  std::int32_t heads_per_group = 0, shortest_first = 0, snake = 0;  ///< TileScheduler
  /// Heads whose rows share a tile: row n is query n / pack_gqa of head n % pack_gqa of these,
  /// which have one KV head. More than 1: one tile holds all queries of a sequence, and `parts` are
  /// made.
  std::int32_t pack_gqa = 1;
  std::int32_t pack_gqa_inverse = 1 << 16;  ///< n / pack_gqa is n * this >> 16, for rows of a tile
  std::int32_t splits = 1;  ///< blocks that share the keys of a block of rows, if that has parts
  std::int32_t whole = 0;   ///< work tiles that come before the first with parts, if there are any
  PartsView parts;
  /// Blocks of rows and splits of keys: q_blocks, heads / pack_gqa, splits and, unless queries are
  /// packed, sequences multiplied; of blocks of rows before `whole`, no splits.
  std::int32_t work_tiles = 0;
  /// Packed queries (schedule/varlen.cuh): [q_blocks][2], which sequence a block of rows belongs
  /// to, and its first row there, which may be one that the sequence does not have.
  const std::int32_t* varlen_blocks = nullptr;
  const std::uint32_t* verdict = nullptr;  ///< packed queries or keys: a VarlenVerdict
};

/// What a kernel leaves to others that come behind it.
struct FallbackParams {
  std::uint32_t* error = nullptr;  ///< sticky error word of the device
  /// 16-bit Q and K, plain variant: the first key of a tile that holds NaN or Inf (else no_key),
  /// one number a warp, [heads_kv][slots / 64][4].
  std::int32_t* bad_keys = nullptr;
  /// Not 0 where a warp of the Hopper kernel met what it cannot do, [work tiles][fallback_stride]:
  /// the portable kernel does these blocks again, and these alone.
  std::uint32_t* fallback_flags = nullptr;
};

struct AttentionParams : MaskParams, ScheduleParams, FallbackParams {
  /// Operands in place: 16-bit tensors, or codes (whose scales are in q8, k8). `data` null: the
  /// prepared form is read instead.
  tile::Rows q, k, v;
  bool q_vectors = true, k_vectors = true, v_vectors = true;  ///< rows allow 16-byte accesses
  PreparedRows q8, k8;
  PreparedTiles v8;
  bool coded_values = false;      ///< V has codes, wherever they lie
  const float* v_mean = nullptr;  ///< [batches][heads_kv][v_mean_channels] to add to the output
  std::int32_t v_mean_channels = 0;

  PreparedMeans q_mean;  ///< smooth_q: their products with K join the scores

  OutputView out;
  float scale = 1;             ///< softmax_scale
  float softcap = 0;           ///< 0: none
  BroadcastView alibi, sinks;  ///< (batch, head)
  std::int32_t group = 1;      ///< query heads per KV head
};
inline constexpr int fallback_rows = 128;  ///< of the blocks that fallback_flags are about
/// Doubts of warps that own rows: about numbers in V that are not finite. Of the producer: about
/// pages that do not exist. Of two warps that test 16-bit K.
inline constexpr int fallback_warps = 8, fallback_producer = 8, fallback_checkers = 9,
                     fallback_stride = 12;

inline constexpr std::int32_t no_key = 0x7fffffff;

}  // namespace qattn::kernels
