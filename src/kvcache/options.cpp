// Options of a KV cache: their checks, and what a budget means.
#include <algorithm>
#include <cmath>

#include "core/guarded.hpp"
#include "core/problem.hpp"
#include "core/threads.hpp"
#include "kvcache/data.hpp"

namespace qattn::kv {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

std::string text(double value) {
  std::string s = std::to_string(value);
  s.erase(s.find_last_not_of('0') + 1);
  return s.ends_with('.') ? s + "0" : s;
}

Status check_dimensions(const KvCacheOptions& o) {
  for (const auto& [name, value, most] :
       {std::tuple{"layers", o.layers, std::int64_t{1} << 16},
        std::tuple{"heads_kv", o.heads_kv, std::int64_t{1} << 16}}) {
    if (value < 1 || value > most) {
      return invalid(std::string(name) + ": " + text(value) + " is not from 1 to " + text(most));
    }
  }
  for (const auto& [name, value, most] :
       {std::tuple{"d", o.d, most_key_channels}, std::tuple{"dv", o.dv, most_value_channels}}) {
    if (value < 1 || value > most) {
      return invalid(std::string(name) + ": " + text(value) + " is not from 1 to " +
                     text(std::int64_t{most}));
    }
  }
  if (o.page_size != 16 && o.page_size != 32 && o.page_size != 64) {
    return invalid("page_size: " + text(o.page_size) + " is not 16, 32 or 64");
  }
  for (const auto& [name, value, least] : {std::tuple{"window", o.window, o.page_size},
                                           std::tuple{"sinks", o.sinks, std::int64_t{0}}}) {
    if (value < least || value > most_tokens || value % o.page_size != 0) {
      return invalid(std::string(name) + ": " + text(value) + " is not a multiple of page_size " +
                     text(o.page_size) + " from " + text(least) + " to " + text(most_tokens));
    }
  }
  return {};
}

Status check_tiers(const std::vector<KvTier>& tiers) {
  if (tiers.empty() || tiers.size() > 7) {
    return invalid("tiers: there are " + text(static_cast<std::int64_t>(tiers.size())) +
                   ", should be 1 to 7");
  }
  const auto known = [](int bits) { return bits == 2 || bits == 3 || bits == 4 || bits == 8; };
  for (std::size_t i = 0; i < tiers.size(); ++i) {
    const KvTier& t = tiers[i];
    const std::string name = "tiers[" + text(static_cast<std::int64_t>(i)) + "]";
    if (!known(t.k_bits) || !known(t.v_bits)) {
      return invalid(name + ": " + text(std::int64_t{t.k_bits}) + " bits of K and " +
                     text(std::int64_t{t.v_bits}) + " of V; each should be 2, 3, 4 or 8");
    }
    if (i == 0) continue;
    const KvTier& better = tiers[i - 1];
    if (t == better || t.k_bits > better.k_bits || t.v_bits > better.v_bits) {
      return invalid(name +
                     ": should have fewer bits than the tier before it, and more of neither");
    }
  }
  return {};
}

/// What a layer of `pages` pages takes at the worst of its lengths, all in the last tier but the
/// window. Just after a page was opened the window has a page more than it is long.
double least_bytes(const KvCacheOptions& o, std::int64_t pages, int sets) {
  detail::KvCacheData sizes;
  sizes.options = o;
  const auto entry = static_cast<std::int64_t>(sizeof(Entry));
  const std::int64_t most_in_window = (o.window + o.sinks) / o.page_size + 1;
  const std::int64_t in_window = std::min(pages, most_in_window);
  const std::int64_t bytes =
      in_window * (sizes.page_bytes(0) + entry) +
      (pages - in_window) * (sizes.page_bytes(static_cast<int>(o.tiers.size())) + entry);
  return static_cast<double>(o.heads_kv * bytes + sets * mean_bytes(o));
}

/// The length from which on the budget holds where a layer has so many sets.
Result<std::int64_t> shortest_with(const KvCacheOptions& o, int sets) {
  if (o.average_bits == 0) return std::int64_t{0};
  const double page = static_cast<double>(o.page_size) * budget_per_token(o);
  // From `many` pages on the window is full and every page is one of the last tier.
  const std::int64_t many = (o.window + o.sinks) / o.page_size + 1;
  const double last = least_bytes(o, many + 1, sets) - least_bytes(o, many, sets);
  const double first = least_bytes(o, many, sets) - last * static_cast<double>(many);
  const double most_pages = static_cast<double>(most_tokens / o.page_size);
  if (page <= last || (first + page) / (page - last) > most_pages) {
    return invalid("average_bits: " + text(o.average_bits) +
                   " hold at no length up to 2^30 tokens: a page of the last tier takes " +
                   text(last * 8 / static_cast<double>(o.page_size * o.heads_kv * (o.d + o.dv))) +
                   " with its scales and table entry");
  }
  // At `enough` pages the line through the last tier's pages is below the budget; where the
  // window fills it is above, so the budget holds from one number on.
  std::int64_t enough = static_cast<std::int64_t>((first + page) / (page - last)) + 2, few = 0;
  const auto holds = [&](std::int64_t n) {
    const double tokens = static_cast<double>((n - 1) * o.page_size + 1);
    return least_bytes(o, n, sets) <= tokens * budget_per_token(o);
  };
  while (enough - few > 1) {
    const std::int64_t middle = few + (enough - few) / 2;
    (holds(middle) ? enough : few) = middle;
  }
  return (enough - 1) * o.page_size + 1;
}

}  // namespace

double budget_per_token(const KvCacheOptions& o) {
  return o.average_bits / 8 * static_cast<double>(o.heads_kv * (o.d + o.dv));
}

std::int64_t mean_bytes(const KvCacheOptions& o) {
  if (!freezes(o)) return 0;
  const std::int64_t d = stored_channels(o.d), dv = stored_channels(o.dv);
  return o.heads_kv * (d * (balances_k(o) ? 5 : 4) + (o.smooth_v ? dv * 4 : 0));
}

int sets_within(const KvCacheOptions& o, std::int64_t budget_from) {
  int sets = freezes(o) ? most_sets : 1;
  for (; sets > 1; --sets) {
    const Result<std::int64_t> shortest = shortest_with(o, sets);
    if (shortest.ok() && *shortest <= budget_from) break;
  }
  return sets;
}

Status check_options(const KvCacheOptions& o) {
  if (Status s = check_dimensions(o); !s.ok()) return s;
  if (o.window_format != Format::f16 && o.window_format != Format::bf16) {
    return invalid("window_format: " + std::string(info(o.window_format).name) +
                   " is neither f16 nor bf16");
  }
  if (Status s = check_tiers(o.tiers); !s.ok()) return s;
  if (o.k_granularity != Granularity::per_token && o.k_granularity != Granularity::per_channel) {
    const std::string known(name(o.k_granularity));
    return invalid(
        "k_granularity: " +
        (known == "unknown" ? text(std::int64_t{static_cast<int>(o.k_granularity)}) : known) +
        " is neither per_token nor per_channel");
  }
  if (!(o.average_bits >= 0 && o.average_bits <= 64)) {
    return invalid("average_bits: " + text(o.average_bits) + " is not from 0 to 64");
  }
  if (o.budget_from < 0 || o.budget_from > most_tokens) {
    return invalid("budget_from: " + text(o.budget_from) + " is not from 0 to 2^30 tokens");
  }
  if (o.average_bits == 0 && o.budget_from != 0) {
    return invalid("budget_from: " + text(o.budget_from) + " without average_bits has no effect");
  }
  if (o.average_bits == 0 && o.tiers.size() > 1) {
    return invalid("tiers: more than one without average_bits; no page would leave the first");
  }
  if (o.importance != KvImportance::uniform && o.importance != KvImportance::key_norm) {
    return invalid("importance: " + text(std::int64_t{static_cast<int>(o.importance)}) +
                   " is neither uniform nor key_norm");
  }
  if (!(o.importance_decay >= 0 && o.importance_decay < 1)) {
    return invalid("importance_decay: " + text(static_cast<double>(o.importance_decay)) +
                   " is not in [0, 1)");
  }
  if (!(o.hysteresis >= 0 && o.hysteresis <= 100)) {
    return invalid("hysteresis: " + text(static_cast<double>(o.hysteresis)) +
                   " is not from 0 to 100");
  }
  return check_threads(o.threads);
}

Status check_place(const detail::KvCacheData& cache, std::int64_t sequence, std::int64_t layer,
                   bool any) {
  if (cache.find(sequence) == nullptr) {
    return invalid("sequence: " + text(sequence) + " is not one of this cache");
  }
  if (layer >= (any ? -1 : 0) && layer < cache.options.layers) return {};
  return invalid("layer: " + text(layer) + " is not from " + (any ? "-1" : "0") + " to " +
                 text(cache.options.layers - 1));
}

Status check_eviction(const KvCacheOptions& o, std::int64_t head, std::int64_t begin,
                      std::int64_t end) {
  if (head < -1 || head >= o.heads_kv) {
    return invalid("head: " + text(head) + " is not from -1 to " + text(o.heads_kv - 1));
  }
  if (begin < 0 || end < begin) {
    return invalid("begin: tokens " + text(begin) + " to " + text(end) + " are no range");
  }
  return {};
}

}  // namespace qattn::kv

namespace qattn {

std::int64_t detail::KvCacheData::allowed_bytes(std::int64_t length) const {
  if (options.average_bits == 0) return -1;
  const auto tokens = static_cast<double>(std::max(length, budget_from));
  return static_cast<std::int64_t>(tokens * kv::budget_per_token(options));
}

int detail::KvCacheData::threads() const { return most_threads(options.threads); }

Result<std::int64_t> KvCache::shortest_length(const KvCacheOptions& o) {
  return guarded<Result<std::int64_t>>([&]() -> Result<std::int64_t> {
    if (Status s = kv::check_options(o); !s.ok()) return s;
    return kv::shortest_with(o, 1);
  });
}

}  // namespace qattn
