// The KV cache's interface: sequences, and what may happen to them.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/guarded.hpp"
#include "core/problem.hpp"
#include "core/threads.hpp"
#include "kvcache/append.hpp"
#include "kvcache/data.hpp"
#include "kvcache/tensors.hpp"

namespace qattn {

using detail::KvCacheData;
using kv::Entry;
using kv::invalid;
using kv::Layer;
using kv::Sequence;
using kv::Table;

namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

/// Takes tokens [begin, end) off a table.
void forget_tokens(KvCacheData& cache, Table& table, std::int64_t begin, std::int64_t end) {
  std::size_t out = 0;
  for (Entry e : table) {
    e.live &= ~kv::live_bits(begin, end, e.first, cache.options.page_size);
    if (e.live == 0) {
      cache.drop(e);
    } else {
      table[out++] = e;
    }
  }
  table.resize(out);
}

/// Carries out plans: all pages, then all tables.
void carry_out(KvCacheData& cache, std::vector<kv::AppendPlan>& plans) {
  std::vector<std::pair<const kv::AppendPlan*, const kv::Job*>> jobs;
  for (const kv::AppendPlan& plan : plans) {
    for (const kv::Job& job : plan.jobs()) jobs.emplace_back(&plan, &job);
  }
  const auto count = static_cast<std::int64_t>(jobs.size());
  const auto page = static_cast<std::size_t>(cache.page_bytes(0));
  const auto threads = static_cast<int>(
      std::clamp<std::int64_t>(count, 1, static_cast<std::int64_t>(cache.threads())));
  std::vector<std::byte> scratch(page * static_cast<std::size_t>(threads));
#pragma omp parallel num_threads(team(threads))
  {
    std::byte* mine = scratch.data() + page * static_cast<std::size_t>(kv::thread_index());
#pragma omp for schedule(dynamic, 4)
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& [plan, job] = jobs[static_cast<std::size_t>(i)];
      plan->run(*job, mine);
    }
  }
  for (kv::AppendPlan& plan : plans) plan.commit();
}

}  // namespace

Sequence* KvCacheData::find(std::int64_t id) {
  const auto at = std::lower_bound(sequences.begin(), sequences.end(), id,
                                   [](const Sequence& s, std::int64_t key) { return s.id < key; });
  return at != sequences.end() && at->id == id ? &*at : nullptr;
}

KvCache::KvCache(std::unique_ptr<KvCacheData> data) : data_(std::move(data)) {}
KvCache::KvCache(KvCache&&) noexcept = default;
KvCache& KvCache::operator=(KvCache&&) noexcept = default;
KvCache::~KvCache() = default;

const KvCacheOptions& KvCache::options() const { return data_->options; }

Result<KvCache> KvCache::create(const KvCacheOptions& options) {
  return guarded<Result<KvCache>>([&]() -> Result<KvCache> {
    const Result<std::int64_t> shortest = shortest_length(options);
    if (!shortest.ok()) return shortest.status();
    const cpu::Selection selection = cpu::select_words();
    if (selection.words == nullptr) {
      return Status(Code::unsupported,
                    std::string("QATTN_CPU_ISA: what it names ") + selection.error);
    }
    auto data = std::make_unique<KvCacheData>();
    data->options = options;
    data->words = selection.words;
    data->budget_from =
        options.budget_from == 0 ? std::min(2 * *shortest, kv::most_tokens) : options.budget_from;
    if (data->budget_from < *shortest) {
      return invalid("budget_from: the budget cannot hold from " + text(options.budget_from) +
                     " tokens on; with a window of " + text(options.window) + " and " +
                     text(options.sinks) + " sinks in 16 bits it holds from " + text(*shortest));
    }
    data->most_sets = kv::sets_within(options, data->budget_from);
    data->make_pools();
    return KvCache(std::move(data));
  });
}

Result<std::int64_t> KvCache::add_sequence() {
  return guarded<Result<std::int64_t>>([&]() -> Result<std::int64_t> {
    Sequence s;
    s.id = data_->next_id;
    s.layers.resize(static_cast<std::size_t>(data_->options.layers));
    for (Layer& layer : s.layers) {
      layer.tables.resize(static_cast<std::size_t>(data_->options.heads_kv));
    }
    data_->sequences.push_back(std::move(s));
    return data_->next_id++;
  });
}

Result<std::int64_t> KvCache::fork(std::int64_t sequence) {
  return guarded<Result<std::int64_t>>([&]() -> Result<std::int64_t> {
    if (Status s = kv::check_place(*data_, sequence, 0); !s.ok()) return s;
    Sequence copy = *data_->find(sequence);
    copy.id = data_->next_id;
    data_->sequences.push_back(std::move(copy));
    for (const Layer& layer : data_->sequences.back().layers) {
      for (const Table& table : layer.tables) {
        for (const Entry& e : table) data_->pool(e.tier).retain(e.page);
      }
    }
    return data_->next_id++;
  });
}

Status KvCache::release(std::int64_t sequence) {
  return guarded<Status>([&]() -> Status {
    if (Status s = kv::check_place(*data_, sequence, 0); !s.ok()) return s;
    Sequence* const s = data_->find(sequence);
    for (const Layer& layer : s->layers) {
      for (const Table& table : layer.tables) {
        for (const Entry& e : table) data_->drop(e);
      }
    }
    data_->sequences.erase(data_->sequences.begin() + (s - data_->sequences.data()));
    return {};
  });
}

Result<std::int64_t> KvCache::length(std::int64_t sequence, std::int64_t layer) const {
  return guarded<Result<std::int64_t>>([&]() -> Result<std::int64_t> {
    if (Status s = kv::check_place(*data_, sequence, layer); !s.ok()) return s;
    return data_->find(sequence)->layers[static_cast<std::size_t>(layer)].length;
  });
}

Status KvCache::append(std::int64_t layer, std::span<const std::int64_t> sequences,
                       const KvAppendTensors& tensors, Layout layout) {
  return guarded<Status>([&]() -> Status {
    std::vector<kv::Rows> rows;
    if (Status s = kv::check_append(*data_, layer, sequences, tensors, layout, rows); !s.ok()) {
      return s;
    }
    std::vector<kv::AppendPlan> plans;
    plans.reserve(sequences.size());
    for (std::size_t b = 0; b < sequences.size(); ++b) {
      plans.emplace_back(*data_, *data_->find(sequences[b]), layer, rows[b]);
      if (Status s = plans.back().make(); !s.ok()) {
        return Status(s.code(), "sequence " + text(sequences[b]) + ": " + s.message());
      }
    }
    carry_out(*data_, plans);
    return {};
  });
}

Status KvCache::truncate(std::int64_t sequence, std::int64_t length) {
  return guarded<Status>([&]() -> Status {
    if (Status s = kv::check_place(*data_, sequence, 0); !s.ok()) return s;
    if (length < 0) return invalid("length: " + text(length) + " is below 0");
    Sequence& s = *data_->find(sequence);
    std::vector<kv::AppendPlan> plans;
    for (std::size_t l = 0; l < s.layers.size(); ++l) {
      if (s.layers[l].length <= length) continue;
      if (kv::fits(*data_, s.layers[l], length)) continue;
      plans.emplace_back(*data_, s, static_cast<std::int64_t>(l), kv::Rows{});
      plans.back().cut(length);
    }
    if (!plans.empty()) carry_out(*data_, plans);
    // What needs no memory comes behind what may fail.
    for (Layer& layer : s.layers) {
      if (layer.length <= length) continue;
      for (Table& table : layer.tables) forget_tokens(*data_, table, length, layer.length);
      layer.length = length;
      layer.forget_sets(data_->options);
    }
    return {};
  });
}

Status KvCache::evict(std::int64_t sequence, std::int64_t layer, std::int64_t head,
                      std::int64_t begin, std::int64_t end) {
  return guarded<Status>([&]() -> Status {
    if (Status s = kv::check_place(*data_, sequence, layer, true); !s.ok()) return s;
    if (Status s = kv::check_eviction(data_->options, head, begin, end); !s.ok()) return s;
    Sequence& s = *data_->find(sequence);
    for (std::size_t l = 0; l < s.layers.size(); ++l) {
      if (layer >= 0 && static_cast<std::int64_t>(l) != layer) continue;
      for (std::size_t h = 0; h < s.layers[l].tables.size(); ++h) {
        if (head >= 0 && static_cast<std::int64_t>(h) != head) continue;
        forget_tokens(*data_, s.layers[l].tables[h], begin, end);
      }
      s.layers[l].forget_sets(data_->options);
    }
    return {};
  });
}

KvBytes KvCache::bytes() const {
  const KvCacheData& c = *data_;
  KvBytes b;
  std::int64_t held = static_cast<std::int64_t>(sizeof(KvCacheData)) +
                      static_cast<std::int64_t>(c.options.tiers.capacity() * sizeof(KvTier)) +
                      static_cast<std::int64_t>(c.pools.capacity() * sizeof(kv::PagePool)) +
                      static_cast<std::int64_t>(c.sequences.capacity() * sizeof(Sequence));
  for (std::size_t t = 0; t < c.pools.size(); ++t) {
    const kv::PagePool& pool = c.pools[t];
    const formats::KvPage page = c.layout(static_cast<int>(t));
    held += pool.allocated_bytes();
    (t == 0 ? b.window : b.codes) += pool.pages_used() * page.code_bytes();
    b.scales += pool.pages_used() * page.scale_bytes();
  }
  for (const Sequence& s : c.sequences) {
    held += static_cast<std::int64_t>(s.layers.capacity() * sizeof(Layer));
    for (const Layer& layer : s.layers) {
      const kv::Sets& sets = layer.sets;
      const std::size_t means = sets.k_mean.capacity() + sets.v_mean.capacity();
      held += static_cast<std::int64_t>(layer.tables.capacity() * sizeof(Table) +
                                        means * sizeof(float) + sets.k_shift.capacity());
      b.means += static_cast<std::int64_t>(
          (sets.k_mean.size() + sets.v_mean.size()) * sizeof(float) + sets.k_shift.size());
      for (const Table& table : layer.tables) {
        held += static_cast<std::int64_t>(table.capacity() * sizeof(Entry));
        b.tables += static_cast<std::int64_t>(table.size() * sizeof(Entry));
      }
    }
  }
  b.total = held;
  b.spare = held - b.codes - b.scales - b.window - b.tables - b.means;
  return b;
}

bool kv::fits(const KvCacheData& cache, const Layer& layer, std::int64_t length) {
  const std::int64_t allowed = cache.allowed_bytes(length);
  std::int64_t bytes = std::max<std::int64_t>(layer.sets.count, 1) * mean_bytes(cache.options);
  for (const Table& table : layer.tables) {
    for (const Entry& e : table) {
      const bool stays = (e.live & live_bits(0, length, e.first, cache.options.page_size)) != 0;
      if (stays) bytes += cache.page_bytes(e.tier) + static_cast<std::int64_t>(sizeof(Entry));
    }
  }
  return allowed < 0 || bytes <= allowed;
}

namespace {

/// Channels and heads that some set moves.
void count_moved(const Layer& layer, const KvCacheData& cache, KvUsage& u) {
  for (std::int64_t h = 0; h < cache.options.heads_kv; ++h) {
    std::vector<bool> balanced(static_cast<std::size_t>(cache.d()));
    bool shifted = false;
    for (int set = 0; set < layer.sets.count; ++set) {
      const kv::Frames f = layer.sets.frames(h, set, cache.d(), cache.dv());
      for (std::size_t c = 0; f.k.shift && c < balanced.size(); ++c) {
        if (f.k.shift[c] > 0) balanced[c] = true;
      }
      const auto moves = [](float x) { return x != 0; };
      shifted |= f.v.mean && std::any_of(f.v.mean, f.v.mean + cache.dv(), moves);
    }
    u.balanced_channels += std::count(balanced.begin(), balanced.end(), true);
    u.shifted_heads += shifted ? 1 : 0;
  }
}

}  // namespace

KvUsage kv::usage_of(const KvCacheData& cache, const Layer& layer) {
  const KvCacheOptions& o = cache.options;
  KvUsage u;
  u.length = layer.length;
  u.tier_tokens.resize(o.tiers.size());
  u.bytes = std::max<std::int64_t>(layer.sets.count, 1) * mean_bytes(o);
  for (const Table& table : layer.tables) {
    for (const Entry& e : table) {
      u.bytes += cache.page_bytes(e.tier) + static_cast<std::int64_t>(sizeof(Entry));
      (e.tier == 0 ? u.window_tokens : u.tier_tokens[e.tier - std::size_t{1}]) += e.tokens();
    }
  }
  count_moved(layer, cache, u);
  u.allowed_bytes = std::max<std::int64_t>(cache.allowed_bytes(layer.length), 0);
  const std::int64_t values = layer.length * o.heads_kv * (o.d + o.dv);
  if (values > 0) u.average_bits = 8.0 * static_cast<double>(u.bytes) / static_cast<double>(values);
  return u;
}

Result<KvUsage> KvCache::usage(std::int64_t sequence, std::int64_t layer) const {
  return guarded<Result<KvUsage>>([&]() -> Result<KvUsage> {
    if (Status s = kv::check_place(*data_, sequence, layer); !s.ok()) return s;
    return kv::usage_of(*data_, data_->find(sequence)->layers[static_cast<std::size_t>(layer)]);
  });
}

}  // namespace qattn
