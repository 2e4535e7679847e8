// The importance of pages after an append: folds decode's probability mass into it, or sets it, one
// block of threads a slot: either all of its pages or, where a value is not from 0 to 1e15, none.
#pragma once

#include "kernels/kv_append/block.cuh"
#include "kernels/kv_append/weights.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Are there at least `own` blocks, and those of all rows from 0 to 1e15? Collective.
template <int Threads>
QATTN_DEVICE bool all_fit(const float* rows, std::int64_t count, std::int64_t blocks,
                          std::int64_t own) {
  bool bad = own > blocks;
  for (std::int64_t row = 0; !bad && row < count; ++row) {
    for (std::int64_t n = isa::thread(); n < own; n += Threads) {
      const float x = isa::load_global(rows + row * blocks + n);
      bad |= !(x >= 0.0f && x <= most_importance);
    }
  }
  return !block_any<Threads>(bad, isa::shared_base());
}

struct ObserveMass {
  using Params = ObserveParams;
  static constexpr int threads = 512, min_blocks = 1;
  static constexpr int shared_bytes = 8 * (threads / 32);

  /// Mean square over the query heads of a KV head.
  static QATTN_DEVICE float square(const Params& p, std::int64_t row, int group, std::int64_t n) {
    float sum = 0.0f;
    for (int g = 0; g < group; ++g) {
      const float x = isa::load_global(p.mass + (row + g) * p.blocks + n);
      sum = formats::add_rn(sum, formats::mul_rn(x, x));
    }
    return formats::div_rn(sum, static_cast<float>(group));
  }

  static QATTN_DEVICE bool named_twice(const std::int32_t* slots, std::int32_t batch,
                                       std::int64_t b) {
    return block_any<threads>(kernels::named_twice<threads>(slots, batch, b), isa::shared_base());
  }

  static QATTN_DEVICE void run(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t b = isa::block().x, slot = isa::load_global(p.slots + b);
    std::uint32_t error = 0;
    std::int64_t own = 0;
    bool good = slot >= 0 && slot < cache.slots;
    if (good) {
      error = isa::load_global(cache.errors + slot);
      own = formats::kv_blocks(isa::load_global(cache.lengths + cache.layer_index(slot, p.layer)));
      if (error == 0 && named_twice(p.slots, p.batch, b)) error = kv::slot_twice;
      const float* rows = p.mass + b * p.heads_q * p.blocks;
      if (error == 0 && !all_fit<threads>(rows, p.heads_q, p.blocks, own)) error = kv::slot_weight;
      good = error == 0;
    }
    if (!good) {
      if (isa::thread() == 0) set_device_error(p.state);
      return;
    }
    const int group = p.heads_q / cache.heads_kv;
    for (std::int32_t h = 0; h < cache.heads_kv; ++h) {
      const std::int64_t row = b * p.heads_q + std::int64_t{h} * group;
      const std::int32_t count =
          isa::load_global(cache.counts + cache.head_index(slot, p.layer, h));
      for (std::int32_t i = isa::thread(); i < count; i += threads) {
        kv::Entry* e = cache.table(slot, p.layer, h) + i;
        bool bad = false;
        const float now =
            formats::sqrt_rn(page_weight(cache, isa::load_global(&e->first), own, bad,
                                         [&](std::int64_t n) { return square(p, row, group, n); }));
        const float old = isa::load_global(&e->importance), decay = p.state.decay;
        const bool measured = old >= 0 && isa::load_global(&e->guess) == 0;
        const float kept = formats::mul_rn(decay, old);
        const float added = formats::mul_rn(formats::add_rn(1.0f, -decay), now);
        isa::store_global(&e->importance, measured ? formats::add_rn(kept, added) : now);
        isa::store_global(&e->guess, std::uint8_t{0});
      }
    }
  }
};

/// What the caller tells of all pages of a (slot, layer). One block.
struct SetImportance {
  using Params = ImportanceParams;
  static constexpr int threads = ObserveMass::threads, min_blocks = 1;
  static constexpr int shared_bytes = ObserveMass::shared_bytes;

  static QATTN_DEVICE void run(const Params& p) {
    const kv::DeviceCache& cache = p.state.cache;
    const std::int64_t own =
        formats::kv_blocks(isa::load_global(cache.lengths + cache.layer_index(p.slot, p.layer)));
    const bool usable = isa::load_global(cache.errors + p.slot) == 0;
    if (!usable || !all_fit<threads>(p.values, cache.heads_kv, p.blocks, own)) {
      if (isa::thread() == 0) set_device_error(p.state);
      return;
    }
    for (std::int32_t h = 0; h < cache.heads_kv; ++h) {
      const float* row = p.values + h * p.blocks;
      const std::int32_t count =
          isa::load_global(cache.counts + cache.head_index(p.slot, p.layer, h));
      for (std::int32_t i = isa::thread(); i < count; i += threads) {
        kv::Entry* e = cache.table(p.slot, p.layer, h) + i;
        bool bad = false;  // none is
        const float now = page_weight(cache, isa::load_global(&e->first), own, bad,
                                      [&](std::int64_t n) { return isa::load_global(row + n); });
        isa::store_global(&e->importance, now);
        isa::store_global(&e->guess, std::uint8_t{0});
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
