#include "pair.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "same_cache.hpp"

namespace qattn::test {
Pair::Pair(const PairOptions& options) : o_(options), random_(options.seed) {
  Result<KvCache> host = KvCache::create(o_.cache);
  EXPECT_TRUE(host.ok()) << host.status().message();
  Result<GpuKvCache> device = GpuKvCache::create(o_.cache, o_.capacity, {});
  EXPECT_TRUE(device.ok()) << device.status().message();
  if (!host.ok() || !device.ok()) return;
  host_ = std::make_unique<KvCache>(std::move(*host));
  device_ = std::make_unique<GpuKvCache>(std::move(*device));
}

void Pair::add() {
  const Result<std::int64_t> slot = device_->add_sequence();
  ASSERT_TRUE(slot.ok()) << slot.status().message();
  if (static_cast<std::size_t>(*slot) >= ids_.size()) ids_.resize(*slot + 1);
  ids_[*slot] = *host_->add_sequence();
}

std::int64_t Pair::fork(std::int64_t slot) {
  const Result<std::int64_t> copy = device_->fork(slot);
  EXPECT_TRUE(copy.ok()) << copy.status().message();
  if (!copy.ok()) return slot;
  if (static_cast<std::size_t>(*copy) >= ids_.size()) ids_.resize(*copy + 1);
  ids_[*copy] = *host_->fork(ids_[slot]);
  return *copy;
}

void Pair::release(std::int64_t slot) {
  ASSERT_TRUE(device_->release(slot).ok());
  ASSERT_TRUE(host_->release(ids_[slot]).ok());
  ids_[slot] = -1;
}

void Pair::renew(std::int64_t slot) {
  release(slot);
  const Result<std::int64_t> again = device_->add_sequence();
  ASSERT_TRUE(again.ok());
  ASSERT_EQ(*again, slot);
  ids_[slot] = *host_->add_sequence();
}

void Pair::truncate(std::int64_t slot, std::int64_t length) {
  ASSERT_TRUE(device_->truncate(slot, length).ok());
  ASSERT_TRUE(host_->truncate(ids_[slot], length).ok());
}

void Pair::evict(std::int64_t slot, std::int64_t layer, std::int64_t head, std::int64_t begin,
                 std::int64_t end) {
  ASSERT_TRUE(device_->evict(slot, layer, head, begin, end).ok());
  ASSERT_TRUE(host_->evict(ids_[slot], layer, head, begin, end).ok());
}

std::int64_t Pair::length(std::int64_t slot, std::int64_t layer) const {
  return *host_->length(ids_[slot], layer);
}

std::vector<std::uint8_t> Pair::random_rows(std::int64_t rows, std::int64_t channels,
                                            const Step& step, bool loud) {
  std::normal_distribution<float> normal;
  const std::int64_t size = info(o_.input).bits / 8;
  const int phase = o_.drift ? calls_ / 4 % 3 : 0;
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(rows * channels * size));
  for (std::int64_t r = 0; r < rows; ++r) {
    const unsigned kind = step.all_bad ? 0 : step.bad_rows ? random_() % 12 : 99;
    const float sigma = random_() % 9 == 0 ? 1e-3f : 1.0f;
    for (std::int64_t c = 0; c < channels; ++c) {
      float x = normal(random_) * sigma + (c % 7 == 0 ? 3.0f : 0.0f);
      if (loud && c % 32 == 5) x *= phase == 1 ? 1000.0f : 50.0f;
      if (phase > 0) x += 6 * std::cos(static_cast<float>(phase * c));
      if (kind == 0 && c == 5) x = std::nanf("");
      if (kind == 1 && c == 7) x = INFINITY;
      if (kind == 2) x = c % 2 ? 0.0f : -0.0f;
      if (kind == 3) x *= 2e4f;
      std::uint8_t* to = bytes.data() + (r * channels + c) * size;
      if (o_.input == Format::f32) {
        std::memcpy(to, &x, 4);
      } else {
        const std::uint16_t code =
            o_.input == Format::bf16 ? formats::Bf16::encode(x) : formats::F16::encode(x);
        std::memcpy(to, &code, 2);
      }
    }
  }
  return bytes;
}

void Pair::append(const Step& step) {
  const KvCacheOptions& c = o_.cache;
  const auto batch = static_cast<std::int64_t>(step.slots.size());
  const std::int64_t tokens = *std::max_element(step.counts.begin(), step.counts.end());
  const bool ragged = *std::min_element(step.counts.begin(), step.counts.end()) != tokens;
  const std::int64_t size = info(o_.input).bits / 8;
  // Rows with room between them, so that strides count.
  const std::int64_t pitch_k = c.d + 8, pitch_v = c.dv + 8, heads = c.heads_kv;
  std::vector<std::uint8_t> k = random_rows(batch * tokens * heads, pitch_k, step, o_.loud);
  std::vector<std::uint8_t> v = random_rows(batch * tokens * heads, pitch_v, step, false);
  ++calls_;
  const bool bshd = o_.layout == Layout::bshd;
  const auto view = [&](std::vector<std::uint8_t>& data, std::int64_t pitch,
                        std::int64_t channels) {
    TensorView t = TensorView::dense(data.data(), o_.input,
                                     {batch, bshd ? tokens : heads, bshd ? heads : tokens, pitch});
    t.shape[3] = channels;
    return t;
  };
  KvGpuAppendTensors t;
  t.k = view(k, pitch_k, c.d);
  t.v = view(v, pitch_v, c.dv);
  std::vector<std::int32_t> slots(step.slots.begin(), step.slots.end());
  t.slots = TensorView::dense(slots.data(), Format::s32, {batch});
  if (ragged) t.counts = TensorView::dense(step.counts.data(), Format::s32, {batch});
  const std::int64_t blocks = formats::kv_blocks(o_.capacity.tokens);
  std::vector<float> importance(static_cast<std::size_t>(batch * heads * blocks));
  std::uniform_real_distribution<float> exponent(-step.spread, step.spread);
  for (float& x : importance) x = random_() % 20 ? std::pow(10.0f, exponent(random_)) : 0.0f;
  if (step.with_importance) {
    t.importance = TensorView::dense(importance.data(), Format::f32, {batch, heads, blocks});
  }
  const Status device = device_->append(step.layer, t, o_.layout);
  ASSERT_TRUE(device.ok()) << device.message();
  for (std::int64_t b = 0; b < batch; ++b) {
    const Status slot = device_->status(step.slots[b]);
    if (std::count(step.refused.begin(), step.refused.end(), step.slots[b]) > 0) {
      ASSERT_EQ(slot.code(), Code::out_of_memory);
      ASSERT_NE(slot.message().find("a pool had no page left"), std::string::npos);
      continue;
    }
    ASSERT_TRUE(slot.ok()) << slot.message();
    KvAppendTensors one;
    const auto alone = [&](TensorView whole) {
      whole.data = static_cast<std::uint8_t*>(whole.data) + b * whole.stride[0] * size;
      whole.shape[0] = 1;
      whole.shape[bshd ? 1 : 2] = step.counts[b];
      return whole;
    };
    one.k = alone(t.k);
    one.v = alone(t.v);
    const std::int64_t own = formats::kv_blocks(length(step.slots[b], step.layer) + step.counts[b]);
    std::vector<float> row;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto* from = importance.data() + (b * heads + h) * blocks;
      row.insert(row.end(), from, from + own);
    }
    if (step.with_importance && own > 0) {
      one.importance = TensorView::dense(row.data(), Format::f32, {1, heads, own});
    }
    const std::int64_t id = ids_[step.slots[b]];
    const Status host = host_->append(step.layer, {&id, 1}, one, o_.layout);
    ASSERT_TRUE(host.ok()) << host.message();
  }
}

void Pair::observe(std::int64_t layer, const std::vector<std::int64_t>& slots, float spread) {
  const auto batch = static_cast<std::int64_t>(slots.size());
  const std::int64_t heads = o_.cache.heads_kv * (1 + random_() % 3);
  const std::int64_t blocks = formats::kv_blocks(o_.capacity.tokens);
  std::vector<float> mass(static_cast<std::size_t>(batch * heads * blocks));
  std::uniform_real_distribution<float> exponent(-spread, spread);
  for (float& x : mass) x = std::pow(10.0f, exponent(random_));
  std::vector<std::int32_t> numbers(slots.begin(), slots.end());
  const Status device =
      device_->observe(layer, TensorView::dense(numbers.data(), Format::s32, {batch}),
                       TensorView::dense(mass.data(), Format::f32, {batch, heads, blocks}));
  ASSERT_TRUE(device.ok()) << device.message();
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t own = formats::kv_blocks(length(slots[b], layer));
    std::vector<float> row;
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto* from = mass.data() + (b * heads + h) * blocks;
      row.insert(row.end(), from, from + own);
    }
    const std::int64_t id = ids_[slots[b]];
    const Status host = host_->observe(layer, {&id, 1},
                                       TensorView::dense(row.data(), Format::f32, {1, heads, own}));
    ASSERT_TRUE(host.ok()) << host.message();
  }
}

void Pair::set_importance(std::int64_t slot, std::int64_t layer, float spread) {
  const std::int64_t heads = o_.cache.heads_kv, own = formats::kv_blocks(length(slot, layer));
  const std::int64_t blocks = formats::kv_blocks(o_.capacity.tokens);
  std::vector<float> told(static_cast<std::size_t>(heads * blocks)), row;
  std::uniform_real_distribution<float> exponent(-spread, spread);
  for (float& x : told) x = random_() % 20 ? std::pow(10.0f, exponent(random_)) : 0.0f;
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto* from = told.data() + h * blocks;
    row.insert(row.end(), from, from + own);
    told[static_cast<std::size_t>((h + 1) * blocks - 1)] = NAN;  // behind all sequences
  }
  if (own == blocks) return;
  const Status device = device_->set_importance(
      slot, layer, TensorView::dense(told.data(), Format::f32, {heads, blocks}));
  ASSERT_TRUE(device.ok()) << device.message();
  const Status host = host_->set_importance(
      ids_[slot], layer, TensorView::dense(row.data(), Format::f32, {heads, own}));
  ASSERT_TRUE(host.ok()) << host.message();
}

void Pair::through_files(const std::string& path) {
  Status saved = device_->save(path);
  ASSERT_TRUE(saved.ok()) << saved.message();
  Result<KvCache> host = KvCache::load(path);
  ASSERT_TRUE(host.ok()) << host.status().message();
  *host_ = std::move(*host);
  for (std::size_t slot = 0; slot < ids_.size(); ++slot) {
    if (ids_[slot] >= 0) ids_[slot] = static_cast<std::int64_t>(slot);
  }
  compare();
  saved = host_->save(path);
  ASSERT_TRUE(saved.ok()) << saved.message();
  Result<GpuKvCache> device = GpuKvCache::load(path, o_.capacity, {});
  ASSERT_TRUE(device.ok()) << device.status().message();
  std::remove(path.c_str());
  *device_ = std::move(*device);
  for (std::size_t slot = 0; slot < ids_.size(); ++slot) {
    ASSERT_EQ(device_->holds(static_cast<std::int64_t>(slot)), ids_[slot] >= 0);
  }
  compare();
}

void Pair::compare() const {
  ASSERT_EQ(difference(*host_, ids_, *device_), "");
  for (std::size_t slot = 0; slot < ids_.size(); ++slot) {
    for (std::int64_t layer = 0; ids_[slot] >= 0 && layer < o_.cache.layers; ++layer) {
      const Result<KvUsage> a = host_->usage(ids_[slot], layer);
      const Result<KvUsage> b = device_->usage(static_cast<std::int64_t>(slot), layer);
      ASSERT_TRUE(a.ok() && b.ok()) << b.status().message();
      ASSERT_EQ(a->length, b->length);
      ASSERT_EQ(a->bytes, b->bytes);
      ASSERT_EQ(a->allowed_bytes, b->allowed_bytes);
      ASSERT_EQ(a->average_bits, b->average_bits);
      if (o_.cache.average_bits > 0) {
        ASSERT_LE(a->bytes, a->allowed_bytes);
      }
      ASSERT_EQ(a->window_tokens, b->window_tokens);
      ASSERT_EQ(a->tier_tokens, b->tier_tokens);
    }
  }
}

std::vector<std::uint8_t> memory_of(const GpuKvCache& cache) {
  const kv::AppendState& s = cache.data().state;
  const auto* begin = static_cast<const std::uint8_t*>(cache.data().memory);
  std::vector<std::uint8_t> all(begin, reinterpret_cast<const std::uint8_t*>(s.plans));
  const auto at = reinterpret_cast<const std::uint8_t*>(s.cache.errors) - begin;
  std::memset(all.data() + at, 0, static_cast<std::size_t>(s.cache.slots) * 4);
  return all;
}

}  // namespace qattn::test
