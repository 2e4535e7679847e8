// Which keys some row of the call sees. What keys share (means, scales, groups) comes from these
// alone: a padded or unwritten token has no influence, whatever it holds.
#include <algorithm>

#include "kernels/attention/cpu/operand.hpp"
#include "kernels/attention/cpu/task.hpp"

namespace qattn::cpu {
namespace {

/// Do rows of one head see other keys than windows tell?
bool varies_by_row(const Problem& p) {
  return p.block_mask_q > 0 || p.mask_function ||
         (p.mask != MaskKind::none && p.mask_stride[2] != 0);
}

/// What one row sees of keys [first, first + keys), masks alone.
void look(const Problem& p, const SequenceInfo& seq, std::int64_t b, const Row& row,
          std::int64_t first, int keys, Seen* sight) {
  std::fill(sight, sight + keys, Seen::yes);
  const auto& st = p.mask_stride;
  const std::int64_t base = b * st[0] + row.head * st[1] + row.i * st[2];
  for (int j = 0; j < keys && p.mask != MaskKind::none; ++j) {
    const std::int64_t at = base + (first + j) * st[3];
    const auto* bytes = static_cast<const std::uint8_t*>(p.tensors.mask.data);
    if (p.tensors.mask.format == Format::b1) {
      if ((bytes[at >> 3] >> ((first + j) & 7) & 1) == 0) sight[j] = Seen::no;
    } else if (p.mask == MaskKind::boolean) {
      if (bytes[at] == 0) sight[j] = Seen::no;
    } else {
      const float bias = read_float(p.tensors.mask, at);
      if (bias <= faint_bias) sight[j] = bias == -infinity ? Seen::no : Seen::faintly;
    }
  }
  for (int j = 0; j < keys && p.block_mask_q > 0; ++j) {
    if (!p.block_visible(b, row.head, row.i, first + j)) sight[j] = Seen::no;
  }
  if (!p.mask_function) return;
  std::uint8_t visible[tile_keys];
  std::fill(visible, visible + keys, std::uint8_t{1});
  const ScoreRun run{b, row.head, row.i, first, keys, seq.q_length, seq.k_length};
  p.mask_function.apply(p.mask_function.context, run, visible);
  for (int j = 0; j < keys; ++j) {
    if (visible[j] == 0) sight[j] = Seen::no;
  }
}

}  // namespace

void find_seen_keys(const Job& job, std::int64_t b, std::int64_t kv_head, std::int64_t first) {
  const Problem& p = job.problem;
  const SequenceInfo& seq = job.arrays.sequences[b];
  Seen* seen = job.arrays.seen + job.k_place(b, kv_head, first);
  const int keys = static_cast<int>(std::min<std::int64_t>(tile_keys, seq.k_length - first));
  std::fill(seen, seen + keys, Seen::no);
  const std::int64_t heads = p.masks_vary_by_head() ? p.group() : 1;
  const std::int64_t queries = seq.q_length;
  const bool each_row = varies_by_row(p);
  // Rows whose diagonal crosses the tile see most of it: all its keys are often found in one row.
  const std::int64_t diagonal = first + keys - 1 - (seq.k_length - seq.q_length);
  const std::int64_t start = queries > 0 ? std::clamp<std::int64_t>(diagonal, 0, queries - 1) : 0;
  int left = keys;
  Seen sight[tile_keys];
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t n = 0; n < (each_row ? queries : std::min<std::int64_t>(queries, 1)); ++n) {
      const std::int64_t i = each_row ? (start + n) % queries : 0;
      Row row{kv_head * p.group() + h, i, 0, 0};
      set_window(p, seq, row);
      if (!each_row) {  // windows move to the right: together they are one run of keys
        Row last{row.head, queries - 1, 0, 0};
        set_window(p, seq, last);
        row.end = std::max(row.end, last.end);
      }
      const auto begin = static_cast<int>(std::clamp<std::int64_t>(row.begin - first, 0, keys));
      const auto end = static_cast<int>(std::clamp<std::int64_t>(row.end - first, begin, keys));
      if (begin == end) continue;
      look(p, seq, b, row, first + begin, end - begin, sight);
      for (int j = begin; j < end; ++j) {
        const Seen now = std::max(seen[j], sight[j - begin]);
        left -= now == Seen::yes && seen[j] != Seen::yes;
        seen[j] = now;
      }
      if (left == 0) return;
    }
  }
}

void settle_seen_keys(const Job& job, std::int64_t b, std::int64_t kv_head) {
  Seen* seen = job.arrays.seen + job.k_place(b, kv_head, 0);
  Seen* end = seen + job.arrays.sequences[b].k_length;
  if (std::find(seen, end, Seen::yes) == end) std::replace(seen, end, Seen::faintly, Seen::yes);
}

}  // namespace qattn::cpu
