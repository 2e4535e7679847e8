// Which rows and keys a CPU task has, and its queries in the engine's form.
#include "kernels/attention/cpu/task.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/attention/cpu/pack.hpp"
#include "kernels/operand/visible_keys.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {

void set_window(const Problem& p, const SequenceInfo& s, Row& row) {
  const std::int64_t diagonal = row.i + s.k_length - s.q_length;
  const std::int64_t keys = row.i < s.q_length ? s.k_length : 0;  // past seqused_q: nothing
  // No sum overflows: a diagonal lies between -Sq and Sk, so that a window of both sees all.
  const std::int64_t all = s.q_length + s.k_length;
  row.begin = kernels::visible_begin(std::min(p.window_left, all), diagonal);
  row.end = kernels::visible_end(std::min(p.window_right, all), diagonal, keys);
  row.begin = std::max<std::int64_t>(row.begin, 0);
  row.end = std::max(row.end, row.begin);
}

SlotOwner owner_of(const Job& job, std::int64_t slot) {
  const SequenceInfo* first = job.arrays.sequences;
  const SequenceInfo* last = first + job.problem.batch;
  const SequenceInfo* found = std::upper_bound(
      first, last, slot, [](std::int64_t x, const SequenceInfo& s) { return x < s.slot; });
  if (found == first) return {-1, 0};
  --found;
  const std::int64_t key = slot - found->slot;
  return key < found->k_length ? SlotOwner{found - first, key} : SlotOwner{-1, 0};
}

std::int64_t sequence_of_task(const Job& job, std::int64_t index) {
  const SequenceInfo* s = job.arrays.sequences;
  const SequenceInfo* found =
      std::upper_bound(s, s + job.problem.batch, index,
                       [](std::int64_t i, const SequenceInfo& x) { return i < x.first_task; });
  return found - s - 1;
}

std::int64_t heads_per_group(const SequenceInfo& sequence) {
  return sequence.q_rows > 0 ? tile_rows / sequence.q_rows : 0;
}

std::int64_t tasks_of(const Problem& p, const SequenceInfo& sequence) {
  const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t together = heads_per_group(sequence);
  if (together > 1) return p.heads_kv * ceil_div(p.group(), together);
  return p.heads_q * ceil_div(sequence.q_rows, tile_rows);
}

Task make_task(const Job& job, std::int64_t index) {
  const Problem& p = job.problem;
  Task t{};
  t.b = sequence_of_task(job, index);
  const SequenceInfo& seq = job.arrays.sequences[t.b];
  std::int64_t local = index - seq.first_task;
  t.key_end = seq.k_length;
  t.partial = -1;
  const std::int64_t group = p.group();
  if (packs_itself(p, seq)) {  // every head of the group in one block
    t.kv_head = local % p.heads_kv;
    if (seq.splits > 0) {
      t.key_begin = local / p.heads_kv * job.config.split_keys;
      t.key_end = std::min(t.key_begin + job.config.split_keys, seq.k_length);
      t.partial =
          seq.first_partial + (t.kv_head * seq.splits + local / p.heads_kv) * group * seq.q_rows;
    }
    for (std::int64_t g = 0; g < group; ++g) {
      for (std::int64_t i = 0; i < seq.q_rows; ++i) {
        t.rows[t.count++] = {t.kv_head * group + g, i, 0, 0};
      }
    }
  } else if (const std::int64_t together = heads_per_group(seq); together > 1) {
    const std::int64_t blocks = (group + together - 1) / together;
    t.kv_head = local / blocks;
    const std::int64_t first = local % blocks * together;
    for (std::int64_t g = first; g < std::min(first + together, group); ++g) {
      for (std::int64_t i = 0; i < seq.q_rows; ++i) {
        t.rows[t.count++] = {t.kv_head * group + g, i, 0, 0};
      }
    }
  } else {
    const std::int64_t blocks = (seq.q_rows + tile_rows - 1) / tile_rows;
    const std::int64_t block = blocks - 1 - local % blocks;  // causal: the longest first
    const std::int64_t head = local / blocks;
    t.kv_head = head / group;
    const std::int64_t stop = std::min((block + 1) * tile_rows, seq.q_rows);
    for (std::int64_t i = block * tile_rows; i < stop; ++i) t.rows[t.count++] = {head, i, 0, 0};
  }
  for (int r = 0; r < t.count; ++r) {
    set_window(p, seq, t.rows[r]);
    t.rows[r].begin = std::max(t.rows[r].begin, t.key_begin);
    t.rows[r].end = std::max(std::min(t.rows[r].end, t.key_end), t.rows[r].begin);
  }
  return t;
}

namespace {

/// softmax_scale * q . mu, from q as it came (codes: as they dequantise, rotated like mu).
float mean_offset(const Job& job, const Task& t, const void* q, Element element, int channels) {
  const float* mean = job.arrays.k_mean + job.unit(t.b, t.kv_head) * padded(job.d());
  const double dot = job.words().dot(q, element, channels, mean);
  return static_cast<float>(dot) * job.problem.softmax_scale;
}

/// Rows of one head from r on to codes, as many as exist. Returns the first that was not.
int code_queries(const Job& job, const Task& t, const Sequence& x, int r, bool offset, Scratch& s) {
  const Row& first = t.rows[r];
  const auto left = job.arrays.sequences[t.b].q_length - first.i;
  int end = r;
  while (end < t.count && t.rows[end].head == first.head && end - r < left) ++end;
  const int d = job.d();
  code_rows(
      job, Role::q, x, t.b, first.head, first.i, end - r,
      {reinterpret_cast<std::uint8_t*>(s.q_codes + r * d), d, s.q_scale + r, s.correction + r});
  const Element element = element_of(x.format);
  for (int i = r; i < end; ++i) {
    s.q_scale[i] *= job.problem.softmax_scale;
    s.correction[i] *= -128;  // panels hold code + 128
    s.offset[i] = offset ? mean_offset(job, t, x.row(t.rows[i].i), element, x.channels) : 0.0f;
  }
  return end;
}

/// Query codes to panels; rows behind the last one repeat it.
void turn_queries(const Job& job, int count, Scratch& s) {
  const int d = job.d();
  for (int r0 = 0; r0 < count; r0 += lanes) {
    const std::uint8_t* rows[lanes];
    for (int i = 0; i < lanes; ++i) {
      const std::int8_t* row = s.q_codes + std::min(r0 + i, count - 1) * d;
      rows[i] = reinterpret_cast<const std::uint8_t*>(row);
    }
    job.words().transpose_packs(rows, d, 0, s.q_panels + r0 * d);
  }
}

}  // namespace

void load_queries(const Job& job, const Task& t, Scratch& s) {
  const Problem& p = job.problem;
  const int d = job.d();
  const bool offset = job.config.smooth_k || p.tensors.k_mean.present();
  const bool in_place =
      t.count <= job.config.float_rows_in_place && packs_itself(p, job.arrays.sequences[t.b]);
  // Every split of a sequence quantises the same rows; the first one counts what was clipped.
  const std::int64_t clipped_before = s.saturated[0];
  Sequence x;
  std::int64_t head = -1;  // that x belongs to
  bool as_lies = false, at_once = false;
  const auto width = static_cast<std::size_t>(d);
  for (int r = 0; r < t.count; ++r) {
    const Row& row = t.rows[r];
    float* q = s.row;
    std::uint8_t* codes = s.codes_row;
    s.offset[r] = 0.0f;
    s.q_scale[r] = p.softmax_scale;
    if (row.head != head) {
      head = row.head;
      x = job.q_sequence(t.b, head);
      as_lies = !offset && !in_place && as_it_lies(job, Role::q, x, t.b, head, d);
      at_once = d == padded(x.channels) && coded_at_once(job, Role::q, x);
    }
    if (at_once && row.i < job.arrays.sequences[t.b].q_length) {
      r = code_queries(job, t, x, r, offset, s) - 1;
      continue;
    }
    if (row.i < job.arrays.sequences[t.b].q_length) {
      const void* from = x.row(row.i);
      // Inf spoils a row like NaN, which load_row() sees to.
      if (as_lies && job.words().finite_rows({&from, element_of(x.format)}, 1, d)) {
        if (job.config.qk == Engine::bf16) std::memcpy(s.q_bf16 + r * d, from, 2 * width);
        if (job.config.qk == Engine::f32) std::memcpy(s.q + r * d, from, 4 * width);
        continue;
      }
      if (offset && !p.q_codes) {
        load_row(job.words(), x, row.i, {}, q);
        s.offset[r] = mean_offset(job, t, q, Element::f32, padded(d));
      }
      const float scale = quantized_row(job, Role::q, x, t.b, row.head, row.i, s, q, codes);
      s.q_scale[r] = scale * p.softmax_scale;
      if (offset && p.q_codes) {
        s.offset[r] = mean_offset(job, t, q, Element::f32, padded(d)) * scale;
      }
    } else {  // does not exist: nothing may be read
      std::memset(q, 0, sizeof(float) * static_cast<std::size_t>(padded(d)));
      std::memset(codes, 0, static_cast<std::size_t>(d));
    }
    if (job.config.qk == Engine::integer) {
      std::int32_t sum = 0;
      for (int i = 0; i < d; ++i) sum += static_cast<std::int8_t>(codes[i]);
      std::memcpy(s.q_codes + r * d, codes, static_cast<std::size_t>(d));
      s.correction[r] = -128 * sum;  // panels hold code + 128
    } else if (job.config.qk == Engine::bf16) {
      store_row(job.words(), q, d, Format::bf16, reinterpret_cast<std::byte*>(s.q_bf16 + r * d));
    } else if (is_split(job.config.qk)) {
      job.words().split_bf16(q, d, d, s.q_bf16 + r * 2 * d);
    }
    if (in_place) {  // scaled, so that products of large numbers stay in range
      for (int i = 0; i < d; ++i) s.q[r * d + i] = q[i] * s.q_scale[r];
      s.q_scale[r] = 1.0f;
    } else if (job.config.qk == Engine::f32) {
      std::memcpy(s.q + r * d, q, sizeof(float) * static_cast<std::size_t>(d));
    }
  }
  if (t.key_begin > 0) s.saturated[0] = clipped_before;
  if (t.count <= job.config.rows_in_place) turn_queries(job, t.count, s);
}

}  // namespace qattn::cpu
