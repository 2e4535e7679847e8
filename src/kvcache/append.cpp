#include "kvcache/append.hpp"

#include <bit>
#include <cmath>
#include <cstring>

#include "core/threads.hpp"
#include "formats/bits.hpp"
#include "kernels/operand/rows.hpp"
#include "kvcache/allocator.hpp"
#include "kvcache/keys/size.hpp"
#include "kvcache/keys/sums.hpp"
#include "kvcache/pages.hpp"
#include "kvcache/tensors.hpp"

namespace qattn::kv {

AppendPlan::AppendPlan(AppendPlan&& other) noexcept
    : cache_(other.cache_),
      layer_(other.layer_),
      rows_(other.rows_),
      new_length_(other.new_length_),
      fast_(other.fast_),
      tables_(std::move(other.tables_)),
      sets_(std::move(other.sets_)),
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
    choose_sets();
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
    to.set = 0;
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
  std::int64_t fixed = 0;
  bool quantises = false;
  double told[importance_lanes] = {};
  std::int64_t tellers = 0;
  for (const Table& t : tables_) {
    for (std::size_t i = 0; i < t.size(); ++i) {
      const Entry& e = t[i];
      if (e.tier == 0 && cache_.in_window(e.first, end)) {
        fixed += cache_.page_bytes(0) + entry_bytes;
        continue;
      }
      quantises |= e.tier == 0;
      candidates.push_back({e.importance, e.tier, e.path});
      if (e.importance < 0) continue;
      told[i % importance_lanes] += static_cast<double>(e.importance);
      ++tellers;
    }
  }
  const auto sets = static_cast<int>(layer_.sets.count);
  fixed += reserved_sets(sets, quantises, cache_.most_sets) * mean_bytes(o);
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
  if (rows_.format != format) cpu::round_row(*cache_.words, format, row, channels);
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

Frames AppendPlan::frames(std::int64_t head, int set) const {
  const Sets& sets = sets_.count > 0 ? sets_ : layer_.sets;
  return sets.frames(head, set, cache_.d(), cache_.dv());
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
    recode_page(cache_, job.from.tier, cache_.page(job.from), job.to.live,
                frames(job.head, job.to.set), job.to.tier, to);
    return;
  }
  std::byte* rows = job.to.tier == 0 ? to : scratch;
  if (!job.has_from) {
    std::memset(rows, 0, bytes);
  } else if (job.from.tier > 0) {
    expand_page(cache_, job.from.tier, cache_.page(job.from), job.from.live,
                frames(job.head, job.from.set), rows);
  } else if (const std::byte* from = cache_.page(job.from); from != rows) {
    std::memcpy(rows, from, bytes);
  }
  store_new_rows(job, rows);
  if (job.to.tier > 0) {
    recode_page(cache_, 0, rows, job.to.live, frames(job.head, job.to.set), job.to.tier, to);
  }
}

void AppendPlan::commit() noexcept {
  if (new_length_ == layer_.length) return;
  if (fast_) {
    for (const Job& job : jobs_) layer_.tables[static_cast<std::size_t>(job.head)].back() = job.to;
  } else {
    layer_.tables.swap(tables_);
    if (sets_.count > 0) std::swap(layer_.sets, sets_);
  }
  const bool cut = new_length_ < layer_.length;
  layer_.length = new_length_;
  for (const Entry& e : replaced_) cache_.drop(e);
  taken_.clear();
  if (cut) layer_.forget_sets(cache_.options);
}

}  // namespace qattn::kv
