// Reading a cache's contents, and what its pages are worth.
#include "kvcache/contents.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/guarded.hpp"
#include "kvcache/data.hpp"
#include "kvcache/pages.hpp"
#include "kvcache/tensors.hpp"

namespace qattn {

using kv::Entry;
using kv::invalid;
using kv::Layer;
using kv::Table;

Status kv::Contents::check() const {
  const KvCacheOptions& o = cache_.options;
  for (const auto& [name, view, channels] :
       {std::tuple{"k", &k_, o.d}, std::tuple{"v", &v_, o.dv}}) {
    if (!view->present()) continue;
    Status s = check_tensor(name, *view, Format::f32, {o.heads_kv, length_, channels}, false);
    if (!s.ok()) return s;
  }
  if (tiers_.present()) {
    Status s = check_tensor("tiers", tiers_, Format::s32, {o.heads_kv, length_}, false);
    if (!s.ok()) return s;
  }
  const NamedTensor all[] = {{"k", &k_}, {"v", &v_}, {"tiers", &tiers_}};
  return check_overlap(all, 3);
}

void kv::Contents::clear() const {
  const auto fill = [](const TensorView& view, auto value, std::int64_t count) {
    if (view.present()) std::fill_n(static_cast<decltype(value)*>(view.data), count, value);
  };
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const KvCacheOptions& o = cache_.options;
  fill(k_, nan, o.heads_kv * length_ * o.d);
  fill(v_, nan, o.heads_kv * length_ * o.dv);
  fill(tiers_, std::int32_t{-1}, o.heads_kv * length_);
}

void kv::Contents::page(std::int64_t head, const Entry& e, const std::byte* page,
                        const Sets& sets) const {
  const Frames frames = sets.frames(head, e.set, cache_.d(), cache_.dv());
  float row[most_channels];
  for (std::uint64_t live = e.live; live != 0; live &= live - 1) {
    const int token = std::countr_zero(live);
    const std::int64_t at = head * length_ + e.first + token;
    if (tiers_.present()) static_cast<std::int32_t*>(tiers_.data)[at] = e.tier;
    for (const auto& [part, view, channels] :
         {std::tuple{Part::k, &k_, given_channels(cache_, Part::k)},
          std::tuple{Part::v, &v_, given_channels(cache_, Part::v)}}) {
      if (!view->present()) continue;
      load_page_row(cache_, e.tier, page, part, token, frames, false, row);
      std::copy_n(row, channels, static_cast<float*>(view->data) + at * channels);
    }
  }
}

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
    if (blocks != formats::kv_blocks(longest)) {
      return invalid("mass: " + std::to_string(blocks) + " blocks should be " +
                     std::to_string(formats::kv_blocks(longest)) + " of the longest sequence");
    }
    if (Status s = kv::check_weights("mass", mass); !s.ok()) return s;
    const float decay = data_->options.importance_decay;
    std::vector<float> square(static_cast<std::size_t>(blocks));  // allocated before any change
    for (std::int64_t b = 0; b < batch; ++b) {
      kv::Layer& l = data_->find(sequences[static_cast<std::size_t>(b)])
                         ->layers[static_cast<std::size_t>(layer)];
      const std::int64_t own = formats::kv_blocks(l.length);
      for (std::size_t h = 0; h < l.tables.size(); ++h) {
        const float* rows = static_cast<const float*>(mass.data) +
                            (b * heads + static_cast<std::int64_t>(h) * group) * blocks;
        for (std::int64_t i = 0; i < own; ++i) {
          float sum = 0;
          for (std::int64_t g = 0; g < group; ++g)
            sum += rows[g * blocks + i] * rows[g * blocks + i];
          square[static_cast<std::size_t>(i)] = sum / static_cast<float>(group);
        }
        for (Entry& e : l.tables[h]) {
          const float now = std::sqrt(kv::page_weight(*data_, e.first, square.data(), own));
          const bool measured = e.importance >= 0 && e.guess == 0;
          e.importance = measured ? decay * e.importance + (1 - decay) * now : now;
          e.guess = 0;
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
    const std::int64_t blocks = formats::kv_blocks(l.length);
    Status s = kv::check_tensor("importance", importance, Format::f32,
                                {data_->options.heads_kv, blocks}, false);
    if (!s.ok()) return s;
    if (s = kv::check_weights("importance", importance); !s.ok()) return s;
    for (std::size_t h = 0; h < l.tables.size(); ++h) {
      const float* row =
          static_cast<const float*>(importance.data) + static_cast<std::int64_t>(h) * blocks;
      for (Entry& e : l.tables[h]) {
        e.importance = kv::page_weight(*data_, e.first, row, blocks);
        e.guess = 0;
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
    const kv::Contents out(*data_, k, v, tiers, l.length);
    if (Status s = out.check(); !s.ok()) return s;
    out.clear();
    for (std::int64_t h = 0; h < data_->options.heads_kv; ++h) {
      for (const Entry& e : l.tables[static_cast<std::size_t>(h)]) {
        out.page(h, e, data_->page(e), l.sets);
      }
    }
    return {};
  });
}

}  // namespace qattn
