// Which keys some row of the call sees. What keys share (means, scales, groups) comes from these
// alone: a padded or unwritten token has no influence, whatever it holds.
#include <algorithm>
#include <cmath>

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
      sight[j] = sight_under(read_float(p.tensors.mask, at));
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

namespace {

float row_norm(const float* row, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{row[i]} * double{row[i]};
  return norm_of(sum);
}

/// largest_advantage() of the rows of K and Q.
float advantage_of(const Job& job, std::int64_t b, std::int64_t kv_head, const Seen* seen,
                   Scratch& scratch) {
  const Problem& p = job.problem;
  const Sequence k = job.k_sequence(b, kv_head);
  float* center = scratch.rows;
  mean_of_rows(job.words(), k, 0, k.length, center, scratch.row);
  Transform centered;
  centered.mean = center;
  float plain = 0, slight = 0, query = 0;
  for (std::int64_t j = 0; j < k.length; ++j) {
    if (seen[j] != Seen::yes && seen[j] != Seen::slightly) continue;
    load_row(job.words(), k, j, centered, scratch.row);
    float& largest = seen[j] == Seen::yes ? plain : slight;
    const float norm = row_norm(scratch.row, k.channels);
    if (!(norm <= largest)) largest = norm;
    if (std::isnan(norm)) return norm;
  }
  for (std::int64_t h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h) {
    const Sequence q = job.q_sequence(b, h);
    for (std::int64_t i = 0; i < q.length; ++i) {
      load_row(job.words(), q, i, Transform{}, scratch.row);
      const float norm = row_norm(scratch.row, q.channels);
      if (std::isnan(norm)) return norm;
      query = std::max(query, norm);
    }
  }
  return largest_advantage(p.softmax_scale, p.softcap, query, plain, slight);
}

/// Calls `visit(j, bias)` for the keys that a row sees.
template <class Visit>
void each_seen_key(const Problem& p, const SequenceInfo& seq, std::int64_t b, const Row& row,
                   const Seen* seen, const Visit& visit) {
  Seen sight[tile_keys];
  const auto& st = p.mask_stride;
  const std::int64_t base = b * st[0] + row.head * st[1] + row.i * st[2];
  for (std::int64_t first = row.begin; first < row.end; first += tile_keys) {
    const int keys = static_cast<int>(std::min<std::int64_t>(tile_keys, row.end - first));
    look(p, seq, b, row, first, keys, sight);
    for (int j = 0; j < keys; ++j) {
      if (sight[j] == Seen::no || seen[first + j] == Seen::no) continue;
      visit(first + j, read_float(p.tensors.mask, base + (first + j) * st[3]));
    }
  }
}

/// Keys seen slightly that may have weight in some row are seen; the others are so faintly. Rows
/// that see none plainly keep what they see.
void settle_slight_keys(const Job& job, std::int64_t b, std::int64_t kv_head, Seen* seen,
                        Scratch& scratch) {
  const Problem& p = job.problem;
  const SequenceInfo& seq = job.arrays.sequences[b];
  Seen* end = seen + seq.k_length;
  const bool bounded = detail::bounds_slight_keys(p) && std::find(seen, end, Seen::yes) != end;
  const float advantage = bounded ? advantage_of(job, b, kv_head, seen, scratch) : nan_value;
  if (!bounds_weight(advantage)) {  // none could be without weight
    return std::replace(seen, end, Seen::slightly, Seen::yes);
  }
  for (std::int64_t h = kv_head * p.group(); h < (kv_head + 1) * p.group(); ++h) {
    for (std::int64_t i = 0; i < seq.q_length; ++i) {
      Row row{h, i, 0, 0};
      set_window(p, seq, row);
      row.begin = std::max<std::int64_t>(row.begin, 0);
      row.end = std::min<std::int64_t>(row.end, seq.k_length);
      float best = -infinity;
      each_seen_key(p, seq, b, row, seen,
                    [&](std::int64_t, float bias) { best = bias > best ? bias : best; });
      each_seen_key(p, seq, b, row, seen, [&](std::int64_t j, float bias) {
        const bool none = lacks_weight(bias, best, advantage);
        if (seen[j] == Seen::slightly && !none) seen[j] = Seen::yes;
      });
    }
  }
  std::replace(seen, end, Seen::slightly, Seen::faintly);
}

}  // namespace

void settle_seen_keys(const Job& job, std::int64_t b, std::int64_t kv_head, Scratch& scratch) {
  Seen* seen = job.arrays.seen + job.k_place(b, kv_head, 0);
  Seen* end = seen + job.arrays.sequences[b].k_length;
  if (std::find(seen, end, Seen::slightly) != end) {
    settle_slight_keys(job, b, kv_head, seen, scratch);
  }
  if (std::find(seen, end, Seen::yes) == end) std::replace(seen, end, Seen::faintly, Seen::yes);
}

}  // namespace qattn::cpu
