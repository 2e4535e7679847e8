// Reading a cache's contents, and what its pages are worth.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/guarded.hpp"
#include "formats/bits.hpp"
#include "kvcache/data.hpp"
#include "kvcache/pages.hpp"
#include "kvcache/tensors.hpp"

namespace qattn {

using detail::KvCacheData;
using kv::Entry;
using kv::invalid;
using kv::Layer;
using kv::Table;

namespace {

constexpr int most_channels = 256;
constexpr std::int64_t block = formats::kv_block_tokens;

std::int64_t blocks_of(std::int64_t length) { return (length + block - 1) / block; }

/// Weights of a page from a value a block; `at` gives that of a block of the sequence.
template <class F>
double of_page(const KvCacheData& cache, const Entry& e, std::int64_t blocks, F at) {
  double sum = 0;
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < cache.blocks_per_page(); ++i) {
    if (e.first / block + i >= blocks) break;
    sum += at(e.first / block + i);
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : 0.0;
}

Status check_weights(const std::string& name, const TensorView& view) {
  const auto* x = static_cast<const float*>(view.data);
  std::int64_t count = 1;
  for (int i = 0; i < view.rank; ++i) count *= view.shape[i];
  for (std::int64_t i = 0; i < count; ++i) {
    if (!(x[i] >= 0.0f) || !formats::is_finite(x[i]) || x[i] > 1e15f) {
      return invalid(name + ": element " + std::to_string(i) + " is " + std::to_string(x[i]) +
                     ", should be from 0 to 1e15");
    }
  }
  return {};
}

}  // namespace

Status KvCache::observe(std::int64_t layer, std::span<const std::int64_t> sequences,
                        const TensorView& mass) {
  return guarded<Status>([&]() -> Status {
    if (Status s = kv::check_sequences(*data_, layer, sequences); !s.ok()) return s;
    const auto batch = static_cast<std::int64_t>(sequences.size());
    if (Status s = kv::check_tensor("mass", mass, Format::f32, {batch, -1, -1}, false); !s.ok()) {
      return s;
    }
    const std::int64_t heads = mass.shape[1], blocks = mass.shape[2];
    const std::int64_t group = heads / data_->options.heads_kv;
    if (heads == 0 || heads % data_->options.heads_kv != 0) {
      return invalid("mass: " + std::to_string(heads) +
                     " query heads are no multiple of heads_kv " +
                     std::to_string(data_->options.heads_kv));
    }
    std::int64_t longest = 0;
    for (const std::int64_t id : sequences) longest = std::max(longest, *length(id, layer));
    if (blocks != blocks_of(longest)) {
      return invalid("mass: " + std::to_string(blocks) + " blocks should be " +
                     std::to_string(blocks_of(longest)) + " of the longest sequence");
    }
    if (Status s = check_weights("mass", mass); !s.ok()) return s;
    const float decay = data_->options.importance_decay;
    for (std::int64_t b = 0; b < batch; ++b) {
      kv::Layer& l = data_->find(sequences[static_cast<std::size_t>(b)])
                         ->layers[static_cast<std::size_t>(layer)];
      for (std::size_t h = 0; h < l.tables.size(); ++h) {
        const float* rows = static_cast<const float*>(mass.data) +
                            (b * heads + static_cast<std::int64_t>(h) * group) * blocks;
        for (Entry& e : l.tables[h]) {
          const double square = of_page(*data_, e, blocks, [&](std::int64_t i) {
            double sum = 0;
            for (std::int64_t g = 0; g < group; ++g) {
              const auto m = static_cast<double>(rows[g * blocks + i]);
              sum += m * m;
            }
            return sum / static_cast<double>(group);
          });
          const auto now = static_cast<float>(std::sqrt(square));
          e.importance = e.importance < 0 ? now : decay * e.importance + (1 - decay) * now;
        }
      }
    }
    return {};
  });
}

Status KvCache::set_importance(std::int64_t sequence, std::int64_t layer,
                               const TensorView& importance) {
  return guarded<Status>([&]() -> Status {
    if (Status s = kv::check_place(*data_, sequence, layer); !s.ok()) return s;
    Layer& l = data_->find(sequence)->layers[static_cast<std::size_t>(layer)];
    const std::int64_t blocks = blocks_of(l.length);
    Status s = kv::check_tensor("importance", importance, Format::f32,
                                {data_->options.heads_kv, blocks}, false);
    if (!s.ok()) return s;
    if (s = check_weights("importance", importance); !s.ok()) return s;
    for (std::size_t h = 0; h < l.tables.size(); ++h) {
      const float* row =
          static_cast<const float*>(importance.data) + static_cast<std::int64_t>(h) * blocks;
      for (Entry& e : l.tables[h]) {
        e.importance = static_cast<float>(of_page(
            *data_, e, blocks, [&](std::int64_t i) { return static_cast<double>(row[i]); }));
      }
    }
    return {};
  });
}

Status KvCache::read(std::int64_t sequence, std::int64_t layer, const TensorView& k,
                     const TensorView& v, const TensorView& tiers) const {
  return guarded<Status>([&]() -> Status {
    if (Status s = kv::check_place(*data_, sequence, layer); !s.ok()) return s;
    const Layer& l = data_->find(sequence)->layers[static_cast<std::size_t>(layer)];
    const std::int64_t heads = data_->options.heads_kv, length = l.length;
    for (const auto& [name, view, channels] :
         {std::tuple{"k", &k, data_->options.d}, std::tuple{"v", &v, data_->options.dv}}) {
      if (!view->present()) continue;
      Status s = kv::check_tensor(name, *view, Format::f32, {heads, length, channels}, false);
      if (!s.ok()) return s;
    }
    if (tiers.present()) {
      Status s = kv::check_tensor("tiers", tiers, Format::s32, {heads, length}, false);
      if (!s.ok()) return s;
    }
    const auto fill = [](const TensorView& view, auto value, std::int64_t count) {
      if (view.present()) std::fill_n(static_cast<decltype(value)*>(view.data), count, value);
    };
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    fill(k, nan, heads * length * data_->options.d);
    fill(v, nan, heads * length * data_->options.dv);
    fill(tiers, std::int32_t{-1}, heads * length);
    float row[most_channels];
    for (std::int64_t h = 0; h < heads; ++h) {
      const float* mean = l.k_mean.empty() ? nullptr : l.k_mean.data() + h * data_->d();
      for (const Entry& e : l.tables[static_cast<std::size_t>(h)]) {
        for (std::uint64_t live = e.live; live != 0; live &= live - 1) {
          const int token = std::countr_zero(live);
          const std::int64_t at = h * length + e.first + token;
          if (tiers.present()) static_cast<std::int32_t*>(tiers.data)[at] = e.tier;
          for (const auto& [part, view, channels] : {std::tuple{kv::Part::k, &k, data_->d()},
                                                     std::tuple{kv::Part::v, &v, data_->dv()}}) {
            if (!view->present()) continue;
            kv::load_page_row(*data_, e.tier, data_->page(e), part, token, mean, false, row);
            std::copy_n(row, channels, static_cast<float*>(view->data) + at * channels);
          }
        }
      }
    }
    return {};
  });
}

}  // namespace qattn
