#include "kvcache/append.hpp"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/threads.hpp"
#include "formats/bits.hpp"
#include "kernels/quantize/rows.hpp"
#include "kvcache/allocator.hpp"
#include "kvcache/key_size.hpp"
#include "kvcache/key_sums.hpp"
#include "kvcache/pages.hpp"
#include "kvcache/tensors.hpp"

namespace qattn::kv {
namespace {

constexpr int most_channels = 256;

/// How many keys have each size.
class KeySizes {
 public:
  void add(int size) { ++counts_[size]; }
  int largest() const {
    return largest_key_size([&](int n) {
      std::int64_t keys = 0;
      for (int i = 1; i <= n; ++i) keys += counts_[i];
      return keys;
    });
  }

 private:
  std::int64_t counts_[key_sizes] = {};
};

template <class F>
void for_tokens(std::uint64_t live, F f) {
  for (; live != 0; live &= live - 1) f(std::countr_zero(live));
}

}  // namespace

AppendPlan::AppendPlan(AppendPlan&& other) noexcept
    : cache_(other.cache_),
      layer_(other.layer_),
      rows_(other.rows_),
      new_length_(other.new_length_),
      fast_(other.fast_),
      tables_(std::move(other.tables_)),
      mean_(std::move(other.mean_)),
      v_mean_(std::move(other.v_mean_)),
      shift_(std::move(other.shift_)),
      jobs_(std::move(other.jobs_)),
      taken_(std::move(other.taken_)),
      replaced_(std::move(other.replaced_)) {
  other.taken_.clear();
}

AppendPlan::~AppendPlan() {
  for (const Entry& e : taken_) cache_.drop(e);
}

Status AppendPlan::make() {
  if (rows_.count == 0) return {};
  fast_ = only_fills_tails();
  if (fast_) {
    for (std::size_t h = 0; h < layer_.tables.size(); ++h) {
      const Entry& tail = layer_.tables[h].back();
      Job job{static_cast<std::int64_t>(h),
              static_cast<std::int64_t>(layer_.tables[h].size()) - 1,
              tail,
              tail,
              true,
              layer_.length,
              new_length_};
      job.to.live |= live_bits(job.begin, job.end, tail.first, cache_.options.page_size);
      weigh(job);
      jobs_.push_back(job);
    }
  } else {
    tables_ = {};
    tables_.resize(layer_.tables.size());
    for (std::size_t h = 0; h < tables_.size(); ++h) extend(static_cast<std::int64_t>(h));
    if (Status s = assign_tiers(); !s.ok()) return s;
    make_mean();
  }
  take_pages();
  return {};
}

void AppendPlan::cut(std::int64_t length) {
  const std::int64_t page = cache_.options.page_size;
  new_length_ = length;
  tables_.resize(layer_.tables.size());
  for (std::size_t h = 0; h < tables_.size(); ++h) {
    tables_[h].reserve(layer_.tables[h].size());
    for (Entry e : layer_.tables[h]) {
      const std::uint64_t kept = e.live & live_bits(0, length, e.first, page);
      if (kept == 0) {
        replaced_.push_back(e);
      } else {
        e.live = kept;
        tables_[h].push_back(e);
      }
    }
  }
  // A file of before may hold several pages of the same tokens, which no tier makes fit.
  if (cache_.options.average_bits > 0) static_cast<void>(assign_tiers());
  take_pages();
}

bool AppendPlan::only_fills_tails() const {
  const std::int64_t page = cache_.options.page_size, old = layer_.length;
  if (old % page == 0 || new_length_ > (old / page + 1) * page) return false;
  if (cache_.window_begin(new_length_) != cache_.window_begin(old)) return false;
  for (const Table& t : layer_.tables) {
    if (t.empty() || t.back().tier != 0 || t.back().first != old / page * page) return false;
  }
  return true;
}

/// The table with the new tokens' pages, and a job for each page that is new, grows or leaves the
/// window.
void AppendPlan::extend(std::int64_t head) {
  const std::int64_t size = cache_.options.page_size, end = new_length_;
  const Table& old = layer_.tables[static_cast<std::size_t>(head)];
  Table& table = tables_[static_cast<std::size_t>(head)];
  const std::size_t first_job = jobs_.size();
  table.reserve(old.size() + static_cast<std::size_t>((end - 1) / size - layer_.length / size) + 1);
  table = old;
  for (std::size_t i = 0; i < old.size(); ++i) {
    const Entry& e = old[i];
    const bool grows =
        i + 1 == old.size() && layer_.length % size != 0 && e.first == layer_.length / size * size;
    if (!grows && (e.tier > 0 || cache_.in_window(e.first, end))) continue;
    Entry& to = table[i];
    if (to.guess != 0 && cache_.in_window(e.first, end)) {
      // It is guessed anew when it leaves the window.
      to.importance = -1.0f;
      to.guess = 0;
    }
    to.tier = 0;
    to.path = 0;
    jobs_.push_back({head, static_cast<std::int64_t>(i), e, to, true, 0, 0});
  }
  for (std::int64_t at = layer_.length; at < end;) {
    const std::int64_t first = at / size * size, stop = std::min(end, first + size);
    const bool grows = at > first && !table.empty() && table.back().first == first;
    if (!grows) {
      Entry e;
      e.first = static_cast<std::int32_t>(first);
      e.importance = -1.0f;
      table.push_back(e);
      jobs_.push_back({head, static_cast<std::int64_t>(table.size()) - 1, {}, e, false, 0, 0});
    }
    table.back().live |= live_bits(at, stop, first, size);
    jobs_.back().begin = at;
    jobs_.back().end = stop;
    at = stop;
  }
  for (std::size_t j = first_job; j < jobs_.size(); ++j) {
    jobs_[j].to.live = table[static_cast<std::size_t>(jobs_[j].index)].live;
  }
}

/// Tiers of all pages that are not in 16 bits any more: sets `to` of their jobs, adds jobs for
/// demotions.
Status AppendPlan::assign_tiers() {
  const KvCacheOptions& o = cache_.options;
  const std::int64_t end = new_length_;
  const auto entry_bytes = static_cast<std::int64_t>(sizeof(Entry));
  std::vector<std::vector<std::int64_t>> job_of(tables_.size());
  for (std::size_t h = 0; h < tables_.size(); ++h) job_of[h].assign(tables_[h].size(), -1);
  for (std::size_t j = 0; j < jobs_.size(); ++j) {
    Job& job = jobs_[j];
    job_of[static_cast<std::size_t>(job.head)][static_cast<std::size_t>(job.index)] =
        static_cast<std::int64_t>(j);
    weigh(job);
    Entry& e = tables_[static_cast<std::size_t>(job.head)][static_cast<std::size_t>(job.index)];
    e.importance = job.to.importance;
    e.guess = job.to.guess;
  }
  std::vector<Candidate> candidates;
  std::int64_t fixed = mean_bytes(o);
  double told[importance_lanes] = {};
  std::int64_t tellers = 0;
  for (const Table& t : tables_) {
    for (std::size_t i = 0; i < t.size(); ++i) {
      const Entry& e = t[i];
      if (e.tier == 0 && cache_.in_window(e.first, end)) {
        fixed += cache_.page_bytes(0) + entry_bytes;
        continue;
      }
      candidates.push_back({e.importance, e.tier, e.path});
      if (e.importance < 0) continue;
      told[i % importance_lanes] += static_cast<double>(e.importance);
      ++tellers;
    }
  }
  // A page of which nothing is known weighs as much as the others on average.
  add_in_halves<importance_lanes>(told, 1);
  const float average =
      tellers > 0 ? static_cast<float>(told[0] / static_cast<double>(tellers)) : 1.0f;
  for (Candidate& c : candidates) c.importance = c.importance >= 0 ? c.importance : average;
  std::vector<std::int64_t> page_bytes;
  for (std::size_t t = 1; t <= o.tiers.size(); ++t) {
    page_bytes.push_back(cache_.page_bytes(static_cast<int>(t)) + entry_bytes);
  }
  const std::int64_t allowed = cache_.allowed_bytes(end);
  const Allocation a =
      allocate(candidates, o.tiers, page_bytes,
               allowed < 0 ? -1 : std::max<std::int64_t>(allowed - fixed, 0), o.hysteresis);
  if (!a.fits) {
    return Status(Code::out_of_memory,
                  "average_bits: " + std::to_string(o.average_bits) + " at length " +
                      std::to_string(end) + " allow " + std::to_string(allowed) +
                      " bytes, but the last tier takes " + std::to_string(a.bytes + fixed) +
                      "; evict tokens or fork before truncating into quantised pages");
  }
  std::size_t next = 0;
  for (std::size_t h = 0; h < tables_.size(); ++h) {
    for (std::size_t i = 0; i < tables_[h].size(); ++i) {
      Entry& e = tables_[h][i];
      if (e.tier == 0 && cache_.in_window(e.first, end)) continue;
      const std::uint8_t tier = a.tier[next++];
      if (tier == e.tier) continue;
      if (job_of[h][i] < 0) {
        job_of[h][i] = static_cast<std::int64_t>(jobs_.size());
        jobs_.push_back(
            {static_cast<std::int64_t>(h), static_cast<std::int64_t>(i), e, e, true, 0, 0});
      }
      e.tier = tier;
      e.path = static_cast<std::uint8_t>(e.path | 1u << (tier - 1));
      jobs_[static_cast<std::size_t>(job_of[h][i])].to = e;
    }
  }
  return {};
}

void AppendPlan::take_pages() {
  taken_.reserve(jobs_.size());
  replaced_.reserve(jobs_.size());
  for (Job& job : jobs_) {
    const bool in_place = job.has_from && job.from.tier == 0 && job.to.tier == 0 &&
                          cache_.pool(0).references(job.from.page) == 1;
    if (!in_place) {
      job.to.page = cache_.pool(job.to.tier).allocate();
      taken_.push_back(job.to);
      if (job.has_from) replaced_.push_back(job.from);
    }
    if (!fast_) {
      tables_[static_cast<std::size_t>(job.head)][static_cast<std::size_t>(job.index)].page =
          job.to.page;
    }
  }
}

void AppendPlan::load_new(Part part, std::int64_t head, std::int64_t position, float* row) const {
  const Format format = cache_.options.window_format;
  const std::int64_t token = position - layer_.length;
  const bool k = part == Part::k;
  const int channels = k ? cache_.d() : cache_.dv();
  load_given_row(cache_, part, k ? rows_.k_row(head, token) : rows_.v_row(head, token),
                 rows_.format, row);
  if (rows_.format != format) cpu::round_row(format, row, channels);
}

/// Means of the keys behind the sinks that are in 16 bits or new, those that key_size.hpp lets
/// count, and how loud their channels are; means of V likewise.
void AppendPlan::make_mean() {
  const KvCacheOptions& o = cache_.options;
  if (!freezes(o) || !layer_.k_mean.empty()) return;
  bool quantises = false;
  for (const Job& job : jobs_) quantises |= job.to.tier > 0;
  if (!quantises) return;
  const std::int64_t d = cache_.d(), dv = cache_.dv();
  const auto channels = static_cast<std::size_t>(o.heads_kv * d);
  mean_.assign(channels, 0.0f);
  shift_.assign(balances_k(o) ? channels : 0, 0);
  v_mean_.assign(o.smooth_v ? static_cast<std::size_t>(o.heads_kv * dv) : 0, 0.0f);
#pragma omp parallel for num_threads(team(cache_.threads()))
  for (std::int64_t h = 0; h < o.heads_kv; ++h) {
    if (o.smooth_k || !shift_.empty()) {
      freeze_k(h, mean_.data() + h * d, shift_.empty() ? nullptr : shift_.data() + h * d);
    }
    if (o.smooth_v) freeze_v(h, v_mean_.data() + h * dv);
  }
}

template <class F>
void AppendPlan::for_rows(Part part, std::int64_t head, F f) const {
  float row[most_channels];
  const int channels = part == Part::k ? cache_.d() : cache_.dv();
  const auto visit = [&](std::int64_t position) {
    f(position, row, key_size(cache_.words->amax(row, channels)));
  };
  for (const Entry& e : layer_.tables[static_cast<std::size_t>(head)]) {
    if (e.tier != 0 || e.first < cache_.options.sinks) continue;
    for_tokens(e.live, [&](int token) {
      load_page_row(cache_, 0, cache_.page(e), part, token, {}, false, row);
      visit(e.first + token);
    });
  }
  for (std::int64_t at = std::max(layer_.length, cache_.options.sinks); at < new_length_; ++at) {
    load_new(part, head, at, row);
    visit(at);
  }
}

/// Two passes only where some rows are too large to count.
KeyTimes AppendPlan::sum_rows(Part part, std::int64_t head, LaneSums& sums) const {
  KeyTimes times[mean_lanes];
  const auto add = [&](std::int64_t position, const float* row) {
    const std::int64_t block = position / formats::kv_block_tokens;
    const std::int64_t lane = block % mean_lanes;
    const auto time = static_cast<double>(block);
    times[lane].add(time);
    sums.add(static_cast<int>(lane), row, time);
  };
  KeySizes sizes;
  int top = 0;
  for_rows(part, head, [&](std::int64_t position, const float* row, int size) {
    sizes.add(size);
    if (size > most_key_size) return;
    top = std::max(top, size);
    add(position, row);
  });
  if (const int largest = sizes.largest(); top > largest) {
    sums.clear();
    for (KeyTimes& of_lane : times) of_lane = {};
    for_rows(part, head, [&](std::int64_t position, const float* row, int size) {
      if (size <= largest) add(position, row);
    });
  }
  add_lanes(times);
  return times[0];
}

/// `shift` may be null.
void AppendPlan::freeze_k(std::int64_t head, float* mean, std::uint8_t* shift) const {
  LaneSums sums(mean_lanes, cache_.d());
  const KeyTimes times = sum_rows(Part::k, head, sums);
  if (times.count == 0) return;
  const bool smooth = cache_.options.smooth_k;
  KeyEnergy energy[most_channels];
  for (int c = 0; c < cache_.d(); ++c) {
    const KeySums all = sums.of(c);
    if (smooth) mean[c] = static_cast<float>(all.x / times.count);
    energy[c] = KeyEnergy(all, times, smooth);
  }
  if (shift != nullptr) set_key_shifts(energy, times, cache_.d(), shift);
}

void AppendPlan::freeze_v(std::int64_t head, float* mean) const {
  LaneSums sums(mean_lanes, cache_.dv());
  const KeyTimes times = sum_rows(Part::v, head, sums);
  if (times.count == 0) return;
  double of_means = 0, own = 0, x[most_channels];
  for (int c = 0; c < cache_.dv(); ++c) {
    const KeySums all = sums.of(c);
    const KeyEnergy energy(all, times, true);
    x[c] = all.x;
    of_means += energy.whole - energy.own;
    own += energy.own;
  }
  for (int c = 0; is_far(of_means, own) && c < cache_.dv(); ++c) {
    mean[c] = static_cast<float>(x[c] / times.count);
  }
}

void AppendPlan::weigh(Job& job) const {
  if (rows_.importance != nullptr) {
    // A row is as long as the batch's longest sequence; only this one's blocks count.
    job.to.importance =
        page_weight(cache_, job.to.first, rows_.importance + job.head * rows_.blocks,
                    std::min(rows_.blocks, formats::kv_blocks(new_length_)));
    job.to.guess = 0;
    return;
  }
  const bool leaves = !cache_.in_window(job.to.first, new_length_);
  const bool asked = cache_.options.importance == KvImportance::key_norm;
  if (!asked || !leaves || job.from.tier > 0 || job.to.importance >= 0) return;
  job.to.importance = key_importance(job);
  job.to.guess = 1;
}

float AppendPlan::key_importance(const Job& job) const {
  const auto for_rows = [&](auto f) {
    float row[most_channels];
    const auto visit = [&] { f(row, key_size(cache_.words->amax(row, cache_.d()))); };
    if (job.has_from) {
      for_tokens(job.from.live, [&](int token) {
        load_page_row(cache_, 0, cache_.page(job.from), Part::k, token, {}, false, row);
        visit();
      });
    }
    for (std::int64_t at = job.begin; at < job.end; ++at) {
      load_new(Part::k, job.head, at, row);
      visit();
    }
  };
  KeySizes sizes;
  for_rows([&](const float*, int size) { sizes.add(size); });
  const int largest = sizes.largest();
  double sum[norm_lanes] = {};
  std::int64_t count = 0;
  for_rows([&](const float* row, int size) {
    if (size > largest) return;
    for (int c = 0; c < cache_.d(); ++c) {
      const auto x = static_cast<double>(row[c]);
      sum[c % norm_lanes] += x * x;
    }
    ++count;
  });
  if (count == 0) return 0.0f;  // NaN and Inf have nothing to lose
  add_in_halves<norm_lanes>(sum, 1);
  const double norm = sum[0] / (static_cast<double>(count) * static_cast<double>(cache_.options.d));
  // Zeros: as important as can be told.
  return norm > 1e-15 ? static_cast<float>(1.0 / norm) : most_importance;
}

Frames AppendPlan::frames(std::int64_t head) const {
  const std::int64_t d = cache_.d(), dv = cache_.dv();
  if (mean_.empty()) return layer_.frames(head, d, dv);
  return {{mean_.data() + head * d, shift_.empty() ? nullptr : shift_.data() + head * d},
          {v_mean_.empty() ? nullptr : v_mean_.data() + head * dv, nullptr}};
}

void AppendPlan::store_new_rows(const Job& job, std::byte* page) const {
  for (std::int64_t at = job.begin; at < job.end; ++at) {
    const auto token = static_cast<int>(at - job.to.first);
    const std::int64_t row = at - layer_.length;
    store_given_row(cache_, page, Part::k, token, rows_.k_row(job.head, row), rows_.format);
    store_given_row(cache_, page, Part::v, token, rows_.v_row(job.head, row), rows_.format);
  }
}

void AppendPlan::run(const Job& job, std::byte* scratch) const {
  const auto bytes = static_cast<std::size_t>(cache_.page_bytes(0));
  std::byte* to = cache_.page(job.to);
  if (job.to.tier > 0 && job.begin == job.end) {
    recode_page(cache_, job.from.tier, cache_.page(job.from), job.to.live, frames(job.head),
                job.to.tier, to);
    return;
  }
  std::byte* rows = job.to.tier == 0 ? to : scratch;
  if (!job.has_from) {
    std::memset(rows, 0, bytes);
  } else if (job.from.tier > 0) {
    expand_page(cache_, job.from.tier, cache_.page(job.from), job.from.live, frames(job.head),
                rows);
  } else if (const std::byte* from = cache_.page(job.from); from != rows) {
    std::memcpy(rows, from, bytes);
  }
  store_new_rows(job, rows);
  if (job.to.tier > 0) {
    recode_page(cache_, 0, rows, job.to.live, frames(job.head), job.to.tier, to);
  }
}

void AppendPlan::commit() noexcept {
  if (new_length_ == layer_.length) return;
  if (fast_) {
    for (const Job& job : jobs_) layer_.tables[static_cast<std::size_t>(job.head)].back() = job.to;
  } else {
    layer_.tables.swap(tables_);
    if (!mean_.empty()) {
      layer_.k_mean.swap(mean_);
      layer_.k_shift.swap(shift_);
      layer_.v_mean.swap(v_mean_);
    }
  }
  const bool cut = new_length_ < layer_.length;
  layer_.length = new_length_;
  for (const Entry& e : replaced_) cache_.drop(e);
  taken_.clear();
  if (cut) layer_.forget_mean();
}

}  // namespace qattn::kv
