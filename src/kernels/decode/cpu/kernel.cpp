#include "kernels/decode/cpu/kernel.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "core/threads.hpp"
#include "kernels/decode/cpu/job.hpp"
#include "kernels/operand/rows.hpp"
#include "kvcache/pages.hpp"
#include "kvcache/tensors.hpp"

namespace qattn::cpu {
namespace {

using kv::DecodeCall;
using kv::Entry;
using kv::Table;

/// Codes of one task, about: enough that a partial result costs little beside them, few enough that
/// two cores share a single sequence evenly. Fixed, so that results do not depend on threads.
constexpr std::int64_t task_bytes = 128 * 1024;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

/// Memory that is not written first: its pages are touched by the threads that fill them.
template <class T>
class Array {
 public:
  void allocate(std::size_t count) { data_ = std::make_unique_for_overwrite<T[]>(count); }
  T* data() { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
};

/// Everything of one call.
class Decode {
 public:
  explicit Decode(const DecodeCall& call)
      : call_(call), rows_(call.rows()), d_(call.cache->d()), dv_(call.cache->dv()) {}

  /// What may fail.
  void prepare_memory();
  void run();

 private:
  void split();
  void split_tier(std::int64_t b, std::int64_t h, int tier, int set);
  void allocate();
  std::int64_t unit(std::int64_t b, std::int64_t head) const {
    return b * call_.cache->options.heads_kv + head;
  }
  const kv::Sets& sets(std::int64_t unit) const {
    return call_.layers[static_cast<std::size_t>(unit / call_.cache->options.heads_kv)]->sets;
  }
  Queries queries(std::int64_t unit, int set);
  Partial partial(std::int64_t index);
  void prepare(std::int64_t unit, int set);
  void work(const Task& task, Scratch& scratch);
  void combine(std::int64_t unit, float* scratch);
  void merge_row(std::int64_t unit, int r, float* rotated, float* raw);
  void add_mass(std::int64_t unit, int r, float lse);
  /// Behind a task's last tile.
  std::int64_t last_tile(std::int64_t task) const;

  const DecodeCall& call_;
  const int rows_, d_, dv_;
  int sets_ = 1;                          ///< at most, of a layer
  std::vector<Task> tasks_;               ///< those of a (sequence, KV head) side by side
  std::vector<std::int64_t> first_task_;  ///< [units + 1]
  std::int64_t tiles_ = 0;                ///< of all tasks, with `mass`
  Array<float> q_raw_, q_sum_, q_scale_, q_offset_, q_noise_;
  Array<std::int8_t> q_planes_;
  Array<float> out_, max_, sum_, mass_sums_, mass_top_;
  Array<std::uint8_t> bad_;
  Array<TileMass> mass_;
  std::vector<Scratch> scratch_;  ///< [threads]
};

void Decode::split() {
  const auto tiers = static_cast<int>(call_.cache->pools.size());
  for (std::int64_t b = 0; b < call_.batch; ++b) {
    for (std::int64_t h = 0; h < call_.cache->options.heads_kv; ++h) {
      first_task_.push_back(static_cast<std::int64_t>(tasks_.size()));
      const auto sets = static_cast<int>(call_.layers[static_cast<std::size_t>(b)]->sets.count);
      sets_ = std::max(sets_, sets);
      split_tier(b, h, 0, 0);
      for (int set = 0; set < std::max(sets, 1); ++set) {
        for (int tier = 1; tier < tiers; ++tier) split_tier(b, h, tier, set);
      }
    }
  }
  first_task_.push_back(static_cast<std::int64_t>(tasks_.size()));
}

void Decode::split_tier(std::int64_t b, std::int64_t h, int tier, int set) {
  const Table& table =
      call_.layers[static_cast<std::size_t>(b)]->tables[static_cast<std::size_t>(h)];
  const auto end = static_cast<std::int64_t>(table.size());
  std::int64_t begin = 0, bytes = 0, blocks = 0;
  const auto add = [&](std::int64_t last) {
    const auto place = static_cast<std::int64_t>(tasks_.size());
    tasks_.push_back({b, h, tier, set, begin, last, place, tiles_});
    if (call_.tensors.mass.present()) tiles_ += (blocks + tile_blocks - 1) / tile_blocks;
    begin = last;
    bytes = blocks = 0;
  };
  for (std::int64_t i = 0; i < end; ++i) {
    const Entry& e = table[static_cast<std::size_t>(i)];
    if (e.tier != tier || e.set != set) continue;
    bytes += call_.cache->page_bytes(tier);
    blocks += kv::live_blocks(e);
    if (bytes >= task_bytes) add(i + 1);
  }
  if (bytes > 0) add(end);
}

void Decode::allocate() {
  const auto rows = static_cast<std::size_t>(rows_);
  const std::size_t units = (first_task_.size() - 1) * static_cast<std::size_t>(sets_);
  q_raw_.allocate(units * rows * static_cast<std::size_t>(d_));
  q_planes_.allocate(units * rows * 2 * static_cast<std::size_t>(d_));
  for (auto* x : {&q_sum_, &q_scale_, &q_offset_, &q_noise_}) x->allocate(units * rows);
  out_.allocate(tasks_.size() * rows * static_cast<std::size_t>(dv_));
  for (auto* x : {&max_, &sum_}) x->allocate(tasks_.size() * rows);
  bad_.allocate(tasks_.size() * rows);
  const auto tiles = static_cast<std::size_t>(tiles_);
  mass_.allocate(tiles);
  mass_sums_.allocate(tiles * rows * tile_blocks);
  mass_top_.allocate(tiles * rows);
}

std::int64_t Decode::last_tile(std::int64_t task) const {
  const auto next = static_cast<std::size_t>(task) + 1;
  return next < tasks_.size() ? tasks_[next].first_tile : tiles_;
}

Queries Decode::queries(std::int64_t unit, int set) {
  const std::int64_t at = (unit * sets_ + set) * rows_;
  return {q_raw_.data() + at * d_, q_planes_.data() + at * 2 * d_, q_sum_.data() + at,
          q_scale_.data() + at,    q_offset_.data() + at,          q_noise_.data() + at};
}

Partial Decode::partial(std::int64_t index) {
  const std::int64_t at = index * rows_;
  return {out_.data() + at * dv_, max_.data() + at, sum_.data() + at, bad_.data() + at};
}

/// The query rows of one (sequence, KV head) for pages of one set.
void Decode::prepare(std::int64_t u, int set) {
  const detail::KvCacheData& cache = *call_.cache;
  const TensorView& view = call_.tensors.q;
  const std::int64_t b = u / cache.options.heads_kv, h = u % cache.options.heads_kv;
  const auto [mean, shift] = sets(u).frames(h, set, d_, dv_).k;
  const Queries q = queries(u, set);
  const std::int64_t bytes = info(view.format).bits / 8;
  float row[kv::most_channels];
  for (int r = 0; r < rows_; ++r) {
    const std::int64_t head = call_.head_of(h, r);
    const std::int64_t element =
        b * call_.q.batch + r % call_.queries * call_.q.query + head * call_.q.head;
    kv::load_given_row(cache, kv::Part::k,
                       static_cast<const std::byte*>(view.data) + element * bytes, view.format,
                       row);
    double dot = 0;
    for (int c = 0; mean && c < d_; ++c) dot += static_cast<double>(row[c]) * mean[c];
    q.offset[r] = static_cast<float>(dot * call_.softmax_scale);
    for (int c = 0; c < d_; ++c) q.raw[r * d_ + c] = row[c] * call_.softmax_scale;
    q.noise[r] = 0;
    if (cache.k_by_channel()) continue;  // every page has planes of its own
    for (int c = 0; shift && c < d_; ++c) row[c] *= kv::key_factor(shift[c]);
    if (call_.debias) {
      float scaled[kv::most_channels];
      for (int c = 0; c < d_; ++c) scaled[c] = row[c] * call_.softmax_scale;
      q.noise[r] = half_square(scaled, d_);
    }
    if (cache.options.rotate) rotate(*cache.words, row, d_);
    std::int8_t* high = q.planes + std::int64_t{2} * r * d_;
    q.scale[r] = call_.softmax_scale * cache.words->kv_planes(row, d_, high, high + d_, q.sum + r);
  }
}

void Decode::work(const Task& task, Scratch& scratch) {
  const Queries q = queries(unit(task.batch, task.head), task.set);
  TileMass* mass = call_.tensors.mass.present() ? mass_.data() + task.first_tile : nullptr;
  for (std::int64_t i = task.first_tile; i < last_tile(task.partial); ++i) {
    const std::int64_t at = i * rows_;
    mass_.data()[i].sums = mass_sums_.data() + at * tile_blocks;
    mass_.data()[i].top = mass_top_.data() + at;
    mass_.data()[i].block[0] = -1;  // until it is written
  }
  (task.tier == 0 ? run_window_task : run_codes_task)(call_, task, q, partial(task.partial), mass,
                                                      scratch);
}

/// Merges the tasks of one row, divides, undoes V's rotation, and writes it.
void Decode::merge_row(std::int64_t u, int r, float* rotated, float* raw) {
  const detail::KvCacheData& cache = *call_.cache;
  const std::int64_t b = u / cache.options.heads_kv, h = u % cache.options.heads_kv;
  const std::int64_t head = call_.head_of(h, r), query = r % call_.queries;
  const std::int64_t begin = first_task_[static_cast<std::size_t>(u)];
  const std::int64_t end = first_task_[static_cast<std::size_t>(u) + 1];
  const auto* sinks = static_cast<const float*>(call_.tensors.sinks.data);
  const float sink = call_.tensors.sinks.present() ? sinks[head] : minus_infinity;
  float top = sink;
  bool nan = sink != sink, bad = false;
  for (std::int64_t t = begin; t < end; ++t) {
    const float m = partial(t).max[r];
    nan |= m != m;
    bad |= partial(t).bad[r] != 0;
    top = m > top ? m : top;
  }
  std::fill_n(rotated, dv_, 0.0f);
  std::fill_n(raw, dv_, 0.0f);
  float sum = sink == minus_infinity ? 0.0f : cache.words->exp_one(sink - top);
  bool codes = false;
  float of_codes[kv::most_sets] = {};
  for (std::int64_t t = begin; t < end; ++t) {
    const Partial p = partial(t);
    if (p.max[r] == minus_infinity) continue;
    const float factor = cache.words->exp_one(p.max[r] - top);
    sum += p.sum[r] * factor;
    const Task& task = tasks_[static_cast<std::size_t>(t)];
    const bool window = task.tier == 0;
    codes |= !window;
    if (!window) of_codes[task.set] += p.sum[r] * factor;
    float* to = window ? raw : rotated;
    for (int c = 0; c < dv_; ++c) to[c] += factor * p.out[std::int64_t{r} * dv_ + c];
  }
  if (codes && cache.options.rotate) unrotate(*cache.words, rotated, dv_);
  for (int set = 0; set < static_cast<int>(sets(u).count); ++set) {
    const float* mean = sets(u).frames(h, set, d_, dv_).v.mean;
    if (!mean || of_codes[set] == 0) continue;
    for (int c = 0; c < dv_; ++c) rotated[c] += of_codes[set] * mean[c];
  }
  const float lse = nan       ? std::numeric_limits<float>::quiet_NaN()
                    : sum > 0 ? top + std::log(sum)
                              : top;
  const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
  for (int c = 0; c < dv_; ++c) {
    raw[c] = nan || bad ? std::numeric_limits<float>::quiet_NaN() : (raw[c] + rotated[c]) * inverse;
  }
  const TensorView& out = call_.tensors.out;
  const std::int64_t element =
      b * call_.out.batch + query * call_.out.query + head * call_.out.head;
  store_row(*cache.words, raw, kv::given_channels(cache, kv::Part::v), out.format,
            static_cast<std::byte*>(out.data) + element * (info(out.format).bits / 8));
  if (call_.tensors.lse.present()) {
    static_cast<float*>(
        call_.tensors.lse.data)[(b * call_.heads_q + head) * call_.queries + query] = lse;
  }
  if (call_.tensors.mass.present()) add_mass(u, r, lse);
}

void Decode::add_mass(std::int64_t u, int r, float lse) {
  const std::int64_t b = u / call_.cache->options.heads_kv;
  const std::int64_t head = call_.head_of(u % call_.cache->options.heads_kv, r);
  float* row =
      static_cast<float*>(call_.tensors.mass.data) + (b * call_.heads_q + head) * call_.blocks;
  const float share = 1.0f / static_cast<float>(call_.queries);
  for (std::int64_t t = first_task_[static_cast<std::size_t>(u)];
       t < first_task_[static_cast<std::size_t>(u) + 1]; ++t) {
    const std::int64_t first = tasks_[static_cast<std::size_t>(t)].first_tile;
    for (std::int64_t i = first; i < last_tile(t); ++i) {
      const TileMass& m = mass_.data()[i];
      if (m.block[0] < 0 || m.top[r] == minus_infinity) continue;
      const float factor = share * std::exp(m.top[r] - lse);
      const float* sums = m.sums + std::int64_t{r} * tile_blocks;
      if (m.side_by_side) {
        float* to = row + m.block[0];
        for (int j = 0; j < tile_blocks; ++j) to[j] += factor * sums[j];
        continue;
      }
      for (int j = 0; j < tile_blocks && m.block[j] >= 0; ++j) row[m.block[j]] += factor * sums[j];
    }
  }
}

void Decode::combine(std::int64_t u, float* scratch) {
  if (call_.tensors.mass.present()) {
    // Heads of all sequences follow one another.
    float* mass = static_cast<float*>(call_.tensors.mass.data) + call_.head_of(u, 0) * call_.blocks;
    std::fill_n(mass, call_.group() * call_.blocks, 0.0f);
  }
  for (int r = 0; r < rows_; ++r) merge_row(u, r, scratch, scratch + dv_);
}

void Decode::prepare_memory() {
  split();
  allocate();
  const auto units = static_cast<std::int64_t>(first_task_.size()) - 1;
  const auto tasks = static_cast<std::int64_t>(tasks_.size());
  const auto useful = std::max({units, tasks, std::int64_t{1}});
  const auto threads = static_cast<int>(std::min<std::int64_t>(call_.threads, useful));
  for (int t = 0; t < threads; ++t) scratch_.emplace_back(call_);
}

void Decode::run() {
  const auto units = static_cast<std::int64_t>(first_task_.size()) - 1;
  const auto tasks = static_cast<std::int64_t>(tasks_.size());
#pragma omp parallel num_threads(team(static_cast<int>(scratch_.size())))
  {
    Scratch& mine = scratch_[static_cast<std::size_t>(kv::thread_index())];
    Phases phases;
    phases.each(units * sets_, [&](std::int64_t i) {
      const auto set = static_cast<int>(i % sets_);
      if (set < std::max<std::int64_t>(sets(i / sets_).count, 1)) prepare(i / sets_, set);
    });
    phases.each(tasks, [&](std::int64_t t) { work(tasks_[static_cast<std::size_t>(t)], mine); });
    phases.each(units, [&](std::int64_t u) { combine(u, mine.v_rows.data()); });
  }
}

}  // namespace

Status decode(const DecodeCall& call) {
  std::vector<DecodeCall> parts;
  for (std::int64_t first = 0; first < call.group(); first += kv::most_group) {
    parts.push_back(call.of_heads(first, std::min(kv::most_group, call.group() - first)));
  }
  std::vector<Decode> all(parts.begin(), parts.end());
  for (Decode& part : all) part.prepare_memory();
  for (Decode& part : all) part.run();
  return {};
}

}  // namespace qattn::cpu
