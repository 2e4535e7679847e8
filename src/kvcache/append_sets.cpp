// Which means and powers of two the pages of an append are moved by: those of a layer's first
// pages, and others where keys or values have drifted.
#include <algorithm>

#include "core/threads.hpp"
#include "formats/bits.hpp"
#include "kvcache/append.hpp"
#include "kvcache/keys/size.hpp"
#include "kvcache/keys/sums.hpp"
#include "kvcache/prices.hpp"
#include "kvcache/tensors.hpp"

namespace qattn::kv {
namespace {

/// Is a page quantised by this job, and not only moved to a worse tier?
bool codes_rows(const Job& job) {
  return job.to.tier > 0 && (job.from.tier == 0 || job.begin < job.end);
}

}  // namespace

/// Sums over rows, by channel.
struct AppendPlan::Moments {
  double count = 0;
  KeySums channel[most_channels];

  /// Of so few rows that they say nothing: 0.
  double energy(const Frame& frame, int channels) const {
    constexpr int longest = 1024;
    static_assert(most_channels <= longest);
    // As kernels add; what is behind the channels changes no sum.
    return channels <= 256 ? energy_in<256>(frame, channels) : energy_in<longest>(frame, channels);
  }

 private:
  template <int Halves>
  double energy_in(const Frame& frame, int channels) const {
    double sum[Halves] = {};
    for (int c = 0; count >= least_keys && c < channels; ++c) {
      sum[c] = moved_energy(channel[c], count, frame.mean ? frame.mean[c] : 0.0f,
                            frame.shift ? frame.shift[c] : 0);
    }
    add_in_halves<Halves>(sum, 1);
    return sum[0];
  }
};

/// What a head is moved by.
struct AppendPlan::Moved {
  float k_mean[most_channels] = {}, v_mean[most_channels] = {};
  std::uint8_t k_shift[most_channels] = {};
  int set = 0;

  Frames frames() const { return {{k_mean, k_shift}, {v_mean, nullptr}}; }
};

/// Rows [begin, end) of a head, and what they are added up in.
struct AppendPlan::Span {
  std::int64_t head, begin, end;
  LaneSums& sums;
};

/// What the parts of a head's pages that leave the window take, and the sets that are new.
struct AppendPlan::Choices {
  std::uint8_t set[DriftParts::most] = {};
  std::vector<Moved> made;
};

template <class F>
void AppendPlan::for_rows(Part part, const Span& span, F f) const {
  float row[most_channels];
  const int channels = part == Part::k ? cache_.d() : cache_.dv();
  const auto visit = [&](std::int64_t position) {
    f(position, row, key_size(cache_.words->amax(row, channels)));
  };
  const std::int64_t begin = std::max(span.begin, cache_.options.sinks);
  for (const Entry& e : layer_.tables[static_cast<std::size_t>(span.head)]) {
    if (e.tier != 0 || e.first < begin || e.first >= span.end) continue;
    for_tokens(e.live, [&](int token) {
      load_page_row(cache_, 0, cache_.page(e), part, token, {}, false, row);
      visit(e.first + token);
    });
  }
  for (std::int64_t at = std::max(layer_.length, begin); at < span.end; ++at) {
    load_new(part, span.head, at, row);
    visit(at);
  }
}

/// Of rows that keys/size.hpp lets count, behind the sinks, in 16 bits or new. Two passes only
/// where some are too large.
AppendPlan::Moments AppendPlan::moments(Part part, const Span& span) const {
  const int channels = part == Part::k ? cache_.d() : cache_.dv();
  LaneSums& sums = span.sums;
  sums.clear(channels);
  Moments m;
  const auto add = [&](std::int64_t position, const float* row) {
    m.count += 1;
    sums.add(static_cast<int>(position / formats::kv_block_tokens % mean_lanes), row);
  };
  KeySizes sizes;
  int top = 0;
  for_rows(part, span, [&](std::int64_t position, const float* row, int size) {
    sizes.add(size);
    if (size > most_key_size) return;
    top = std::max(top, size);
    add(position, row);
  });
  if (const int largest = sizes.largest(); top > largest) {
    sums.clear(channels);
    m.count = 0;
    for_rows(part, span, [&](std::int64_t position, const float* row, int size) {
      if (size <= largest) add(position, row);
    });
  }
  sums.add_up();
  for (int c = 0; c < channels; ++c) m.channel[c] = sums.of(c);
  return m;
}

void AppendPlan::freeze_k(const Moments& m, const float* from, Moved& moved) const {
  if (m.count == 0) return;
  const bool smooth = cache_.options.smooth_k;
  KeyEnergy energy[most_channels];
  for (int c = 0; c < cache_.d(); ++c) {
    const KeySums& all = m.channel[c];
    if (smooth) moved.k_mean[c] = static_cast<float>(all.x / m.count);
    energy[c] = KeyEnergy(all, m.count, smooth);
    if (from != nullptr) {
      energy[c].own = std::max(energy[c].own, moved_energy(all, m.count, from[c], 0));
    }
  }
  if (balances_k(cache_.options)) set_key_shifts(energy, cache_.d(), moved.k_shift);
}

void AppendPlan::freeze_v(const Moments& m, Moved& moved) const {
  if (m.count == 0) return;
  double of_means = 0, own = 0;
  for (int c = 0; c < cache_.dv(); ++c) {
    const KeyEnergy energy(m.channel[c], m.count, true);
    of_means += energy.whole - energy.own;
    own += energy.own;
  }
  for (int c = 0; is_far(of_means, own) && c < cache_.dv(); ++c) {
    moved.v_mean[c] = static_cast<float>(m.channel[c].x / m.count);
  }
}

/// Of rows of K and V, as the options ask.
struct AppendPlan::Both {
  Moments k, v;

  Both(const AppendPlan& plan, const Span& span) {
    const KvCacheOptions& o = plan.cache_.options;
    if (o.smooth_k || balances_k(o)) k = plan.moments(Part::k, span);
    if (o.smooth_v) v = plan.moments(Part::v, span);
  }
  void freeze(const AppendPlan& plan, Moved& moved, const float* from = nullptr) const {
    plan.freeze_k(k, from, moved);
    plan.freeze_v(v, moved);
  }
  /// Of K or of V, whichever is more.
  double excess(const AppendPlan& plan, const Frames& over, const Frames& of) const {
    const int d = plan.cache_.d(), dv = plan.cache_.dv();
    return std::max(kv::excess(k.energy(over.k, d), k.energy(of.k, d)),
                    kv::excess(v.energy(over.v, dv), v.energy(of.v, dv)));
  }
};

void AppendPlan::choose_part(const Span& part, std::uint32_t& named, int& last,
                             Choices& choices) const {
  const auto frames_of = [&](int set) {
    for (const Moved& m : choices.made) {
      if (m.set == set) return m.frames();
    }
    return layer_.sets.frames(part.head, set, cache_.d(), cache_.dv());
  };
  const Both rows(*this, part);
  Moved own, fresh;
  rows.freeze(*this, own);
  const auto best = [&](const Moved& of) {
    return best_set(named, last,
                    [&](int set) { return rows.excess(*this, frames_of(set), of.frames()); });
  };
  Choice choice = best(own);
  if (choice.excess > drift) {
    const KvCacheOptions& o = cache_.options;
    const std::int64_t end = std::min(new_length_, part.end + o.window + o.page_size);
    Both(*this, {part.head, part.begin, end, part.sums})
        .freeze(*this, fresh, frames_of(last).k.mean);
    choice = best(fresh);
    // As many as the budget was asked for.
    const auto sets = static_cast<int>(layer_.sets.count);
    const int most =
        o.average_bits > 0 ? reserved_sets(sets, true, cache_.most_sets) : cache_.most_sets;
    fresh.set = spare_set(named, most);
    if (choice.excess > drift && fresh.set < most) {
      choice.set = fresh.set;
      named |= 1u << fresh.set;
      choices.made.push_back(fresh);
    }
  }
  last = choice.set;
}

void AppendPlan::choose_set(std::int64_t head, const DriftParts& parts, LaneSums& sums,
                            Choices& choices) const {
  if (layer_.sets.count == 0) {
    choices.made.emplace_back();
    Both(*this, {head, 0, new_length_, sums}).freeze(*this, choices.made[0]);
    return;
  }
  std::uint32_t named = 0;
  int last = 0;
  for (const Entry& e : layer_.tables[static_cast<std::size_t>(head)]) {
    if (e.tier == 0) continue;
    named |= 1u << e.set;
    last = e.set;
  }
  if (named == 0) named = 1;
  for (int i = 0; i < parts.count(); ++i) {
    choose_part({head, parts.begin(i), parts.end(i), sums}, named, last, choices);
    choices.set[i] = static_cast<std::uint8_t>(last);
  }
}

void AppendPlan::put_set(std::int64_t head, const Moved& moved) {
  const std::int64_t d = cache_.d(), dv = cache_.dv(), i = sets_.index(head, moved.set);
  std::copy_n(moved.k_mean, d, sets_.k_mean.begin() + i * d);
  if (!sets_.k_shift.empty()) std::copy_n(moved.k_shift, d, sets_.k_shift.begin() + i * d);
  if (!sets_.v_mean.empty()) std::copy_n(moved.v_mean, dv, sets_.v_mean.begin() + i * dv);
}

void AppendPlan::choose_sets() {
  const KvCacheOptions& o = cache_.options;
  const bool quantises = std::any_of(jobs_.begin(), jobs_.end(), codes_rows);
  if (!freezes(o) || !quantises) return;
  const DriftParts parts(cache_.window_begin(layer_.length), cache_.window_begin(new_length_),
                         o.sinks, o.page_size);
  // Nothing is allocated, and so thrown, inside of the loop.
  std::vector<Choices> of_head(static_cast<std::size_t>(o.heads_kv));
  for (Choices& c : of_head) c.made.reserve(most_sets);
  const auto threads = static_cast<int>(std::min<std::int64_t>(o.heads_kv, cache_.threads()));
  std::vector<LaneSums> sums(static_cast<std::size_t>(threads),
                             LaneSums(std::max(cache_.d(), cache_.dv())));
#pragma omp parallel for num_threads(team(threads))
  for (std::int64_t h = 0; h < o.heads_kv; ++h) {
    choose_set(h, parts, sums[static_cast<std::size_t>(thread_index())],
               of_head[static_cast<std::size_t>(h)]);
  }
  std::int64_t count = layer_.sets.count;
  bool some = false;
  for (const Choices& c : of_head) {
    for (const Moved& m : c.made) count = std::max<std::int64_t>(count, m.set + 1);
    some |= !c.made.empty();
  }
  if (some) {
    sets_ = layer_.sets;
    sets_.resize(count, o);
    for (std::int64_t h = 0; h < o.heads_kv; ++h) {
      for (const Moved& m : of_head[static_cast<std::size_t>(h)].made) put_set(h, m);
    }
  }
  for (Job& job : jobs_) {
    if (!codes_rows(job)) continue;
    const auto h = static_cast<std::size_t>(job.head);
    job.to.set = of_head[h].set[parts.of(job.to.first)];
    tables_[h][static_cast<std::size_t>(job.index)].set = job.to.set;
  }
}

}  // namespace qattn::kv
