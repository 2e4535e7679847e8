#include "kernels/attention/schedule/split_kv.hpp"

#include <algorithm>
#include <cstdint>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/attention/schedule/combine.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

/// Of a split, where the queries fit one tile: on an H200 (86ea62c; 8 KV heads, D 128) one query of
/// 1024 keys took 22.5 us in 2 splits, 19.6 in 8 (bf16 34 and, in 16, 26), one of 4096 keys 23.7 in
/// 8, 22.0 in 16. bench/results/choices-h200.json has more.
constexpr std::int64_t least_keys = 128;
/// Of a split of several tiles of rows, whose combination costs more.
constexpr std::int64_t least_keys_of_tiles = 1024;
constexpr std::int64_t few_keys = 512;  // fewer are one block's
/// Of a row whose last works are split. H100, int8_full, D 128, S 2048 to
/// 32768: 1.00 1.01 1.02 1.03 1.01 times as fast; D 64 0.98 at 2048.
constexpr std::int64_t least_keys_of_last = 4096;
constexpr std::int64_t most_rows = 0x7fffffff;  // of all heads and sequences: blocks of a grid

/// The most query heads of a KV head that fit a tile with all their queries.
int pack_of(const Problem& p, const Recipe& r, const SplitKvLimits& limits) {
  // Tables of block masks and of Q's means are of one head.
  const bool alone = p.block_mask_q > 0 || r.smooth_q == Toggle::on;
  if (alone || p.max_q == 0 || p.max_q > limits.rows) return 1;
  if (p.batch * p.heads_q > most_rows / p.max_q) return 1;
  // All heads at once, with keys too few to split: a tile each is as fast, and ends its rows
  // itself.
  if (p.batch * p.heads_q <= limits.blocks && p.max_k < few_keys) return 1;
  const int asked = split_kv_override().pack_gqa;
  for (std::int64_t n = std::min(p.group(), limits.rows / p.max_q); n > 1; --n) {
    const bool fits = p.group() % n == 0 && (limits.pack_rows == 0 || limits.pack_rows % n == 0);
    if (fits && (asked == 0 || n <= asked)) return static_cast<int>(n);
  }
  return 1;
}

/// As many as fill the device once, of so many keys each that they save more than the combination
/// costs: a few us, and 4 bytes a channel of every row twice.
std::int64_t splits_of(const Problem& p, const SplitKvLimits& limits, std::int64_t blocks,
                       std::int64_t works) {
  if (works == 0) return 1;
  const std::int64_t least = blocks == 1 ? least_keys : least_keys_of_tiles;
  const std::int64_t keys = visible_keys(p, std::min<std::int64_t>(p.max_q, limits.rows));
  if (keys < few_keys) return 1;
  return std::clamp<std::int64_t>(std::min(limits.blocks / works, keys / least), 1, most_splits);
}

/// Room for parts of so many works.
void place_parts(SplitKv& s, std::int64_t works, std::size_t& workspace) {
  s.at = (workspace + 63) / 64 * 64;
  const auto rows = static_cast<std::size_t>(works) * static_cast<std::size_t>(s.rows);
  workspace = s.at + rows * (static_cast<std::size_t>(s.channels) + 2) * sizeof(float);
}

}  // namespace

SplitKvOverride& split_kv_override() {
  static SplitKvOverride value;
  return value;
}

SplitKv plan_split_kv(const Problem& p, const Recipe& r, const SplitKvLimits& limits,
                      std::size_t& workspace) {
  SplitKv s;
  s.pack_gqa = pack_of(p, r, limits);
  // Packed heads have all their queries in one block.
  const std::int64_t blocks = (p.max_q * s.pack_gqa + limits.rows - 1) / limits.rows;
  s.work_tiles = row_blocks(p, limits.rows) * (p.heads_q / s.pack_gqa);
  s.splits = static_cast<int>(splits_of(p, limits, blocks, s.work_tiles));
  if (split_kv_override().splits > 0 && s.work_tiles > 0) s.splits = split_kv_override().splits;
  s.work_tiles *= s.splits;
  if (s.pack_gqa == 1 && s.splits == 1 && !limits.parts) return s;
  s.rows = blocks > 1 ? limits.rows : static_cast<int>(p.max_q * s.pack_gqa);
  s.channels = limits.channels;
  place_parts(s, s.work_tiles, workspace);
  return s;
}

void split_last(const Problem& p, const Recipe& r, const SplitKvLimits& limits, SplitKv& s,
                std::size_t& workspace) {
  const bool windows = p.window_left >= 0 || p.window_right >= 0;
  if (s.rows > 0 || windows || p.varlen_q || p.varlen_k || p.block_mask_q > 0) return;
  // e4m3 P of a row is relative to the maximum of what a split has seen before.
  if (r.p == Format::e4m3) return;
  const std::int64_t works = row_blocks(p, limits.rows) * p.heads_q, last = works % limits.blocks;
  if (last == 0 || last == works) return;
  const int asked = split_kv_override().last_splits;
  std::int64_t splits = std::min(limits.blocks / last, p.max_k / split_tile);
  if (p.max_k < least_keys_of_last) splits = 1;
  splits = std::min<std::int64_t>(asked > 0 ? asked : splits, most_splits);
  if (splits < 2) return;
  s.splits = static_cast<int>(splits);
  s.whole = works - last;
  s.work_tiles = s.whole + last * splits;
  s.rows = limits.rows;
  s.channels = limits.channels;
  place_parts(s, last * splits, workspace);
}

std::string text_of(const SplitKv& s) {
  const bool last = s.whole > 0;
  std::string text = "splits: " + std::to_string(last ? 1 : s.splits) +
                     "\npack_gqa: " + std::to_string(s.pack_gqa) + "\n";
  if (last) {
    text += "whole_works: " + std::to_string(s.whole) +
            "\nlast_splits: " + std::to_string(s.splits) + "\n";
  }
  return text;
}

void set_split_kv(const SplitKv& s, int rows, void* workspace, AttentionParams& a) {
  if (s.rows == 0) return;
  a.pack_gqa = s.pack_gqa, a.splits = s.splits;
  a.pack_gqa_inverse = ((1 << 16) + s.pack_gqa - 1) / s.pack_gqa;
  a.work_tiles = static_cast<std::int32_t>(s.work_tiles);
  a.whole = static_cast<std::int32_t>(s.whole);
  a.parts.rows = s.rows;
  a.parts.channels = s.channels;
  a.parts.tile_rows = rows;
  const std::int64_t count = (s.work_tiles - s.whole) * s.rows;
  a.parts.out = reinterpret_cast<float*>(static_cast<std::byte*>(workspace) + s.at);
  a.parts.state = a.parts.out + count * s.channels;
}

isa::LaunchError combine_parts(const AttentionParams& a, void* stream, isa::Start start) {
  if (a.parts.out == nullptr) return {};
  const std::int64_t sequences = a.q.cu_seqlens != nullptr ? 1 : a.q.batches;
  std::int64_t rows = a.q.max_length * a.q.heads * sequences;
  if (a.whole > 0) rows = std::int64_t{a.work_tiles - a.whole} / a.splits * a.parts.tile_rows;
  if (rows > 0x7fffffff) return "combination: " + std::to_string(rows) + " rows are over 2^31";
  return isa::launch<CombineSplits>(a, {static_cast<int>(rows), 1, 1}, stream, start);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
