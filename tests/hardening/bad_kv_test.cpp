// Thousands of random calls of a KV cache through the C interface, each against what earlier ones
// left: it either succeeds on memory that is exactly as large as its views, or refuses with a
// message that names something, writes nothing and leaves the cache as it was.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <memory>
#include <random>
#include <type_traits>

#include "fuzz/choices.hpp"
#include "hardening/wild_c.hpp"

namespace qattn::test {
namespace {

using fuzz::Choices;
using fuzz::Fill;
using fuzz::Memory;

constexpr int calls = 12000;
constexpr std::int64_t layers = 2, heads = 2, dim = 32;
/// Sequences leave the cache behind this length: what reads them fits fuzz::most_elements.
constexpr std::int64_t longest = 200;

TensorView absent_memory(Format format, std::initializer_list<std::int64_t> shape) {
  return TensorView::dense(static_cast<void*>(nullptr), format, shape);
}

/// A cache of three tiers under a budget.
qattn_kv_options plain_options(std::int32_t k_granularity = QATTN_PER_TOKEN) {
  qattn_kv_options o;
  qattn_kv_options_init(&o);
  o.k_granularity = k_granularity;
  o.layers = layers;
  o.heads_kv = heads;
  o.d = o.dv = dim;
  o.window = 32;
  o.tier_count = 3;
  o.tiers[0] = {8, 8}, o.tiers[1] = {4, 3}, o.tiers[2] = {2, 2};
  o.average_bits = 9;
  EXPECT_EQ(qattn_kv_shortest_length(&o, &o.budget_from), QATTN_OK) << qattn_last_error();
  return o;
}

/// The cache, what its calls left, and one call at a time.
class Calls {
 public:
  explicit Calls(std::int32_t k_granularity) {
    const qattn_kv_options o = plain_options(k_granularity);
    EXPECT_EQ(qattn_kv_create(&o, &cache_), QATTN_OK) << qattn_last_error();
    digest_ = digest();
  }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;
  ~Calls() { qattn_kv_destroy(cache_); }

  /// Makes and judges one call; returns its status.
  qattn_status step(Choices c);

  static constexpr int kinds = 12;

 private:
  qattn_status append(Choices& c);
  qattn_status decode(Choices& c);
  qattn_status read(Choices& c);
  qattn_status sequences(Choices& c);
  qattn_status forget(Choices& c);
  qattn_status weigh(Choices& c);
  qattn_status look(Choices& c);
  qattn_status file(Choices& c);
  qattn_status make(Choices& c);

  /// One or two of the sequences, or nonsense.
  std::vector<std::int64_t> choose(Choices& c);
  std::int64_t one(Choices& c) { return c.chance(16) || ids_.empty() ? c.wild() : some(c); }
  std::int64_t some(Choices& c) { return ids_[static_cast<std::size_t>(c.below(count()))]; }
  std::int64_t layer(Choices& c) { return c.chance(16) ? c.wild() : c.below(layers); }
  int count() const { return static_cast<int>(ids_.size()); }
  std::int64_t length(std::int64_t id, std::int64_t layer) const {
    std::int64_t n = 0;
    return qattn_kv_length(cache_, id, layer, &n) == QATTN_OK ? n : 0;
  }
  std::int64_t most(const std::vector<std::int64_t>& ids, std::int64_t layer) const {
    std::int64_t n = 0;
    for (const std::int64_t id : ids) n = std::max(n, length(id, layer));
    return n;
  }

  void release_long_ones();

  /// Breaks the view sometimes, and gives it memory.
  void back(Choices& c, const char* name, TensorView& view, bool output, Fill fill);
  /// Everything that the cache holds, as one number.
  std::uint64_t digest() const;

  qattn_kv_cache* cache_ = nullptr;
  std::vector<std::int64_t> ids_;
  std::uint64_t digest_ = 0;
  std::unique_ptr<Memory> memory_;
};

std::uint64_t Calls::digest() const {
  std::uint64_t hash = 14695981039346656037u;
  const auto add = [&hash](const void* data, std::size_t bytes) {
    const auto* at = static_cast<const std::uint8_t*>(data);
    for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 1099511628211u;
  };
  for (const std::int64_t id : ids_) {
    for (std::int64_t l = 0; l < layers; ++l) {
      const std::int64_t n = length(id, l);
      std::vector<float> k(static_cast<std::size_t>(heads * n * dim)), v(k.size());
      std::vector<std::int32_t> tiers(static_cast<std::size_t>(heads * n));
      const qattn_tensor tk =
          c_tensor(TensorView::dense(static_cast<void*>(k.data()), Format::f32, {heads, n, dim}));
      const qattn_tensor tv =
          c_tensor(TensorView::dense(static_cast<void*>(v.data()), Format::f32, {heads, n, dim}));
      const qattn_tensor tt =
          c_tensor(TensorView::dense(static_cast<void*>(tiers.data()), Format::s32, {heads, n}));
      EXPECT_EQ(qattn_kv_read(cache_, id, l, &tk, &tv, &tt), QATTN_OK) << qattn_last_error();
      add(&n, sizeof n);
      add(k.data(), k.size() * sizeof(float));
      add(v.data(), v.size() * sizeof(float));
      add(tiers.data(), tiers.size() * sizeof(std::int32_t));
    }
  }
  qattn_kv_bytes b;
  qattn_kv_bytes_init(&b);
  EXPECT_EQ(qattn_kv_get_bytes(cache_, &b), QATTN_OK);
  const std::int64_t used[] = {b.codes, b.scales, b.window, b.means};
  add(used, sizeof used);
  return hash;
}

void Calls::back(Choices& c, const char* name, TensorView& view, bool output, Fill fill) {
  const int how = c.chance(12) ? 1 + c.below(8) : 0;
  if (how == 1) view = {};
  if (how > 2) fuzz::break_field(c, view);
  memory_->back(name, view, output, fill, c.byte(), how == 2 ? 1 : 0);
}

std::vector<std::int64_t> Calls::choose(Choices& c) {
  std::vector<std::int64_t> ids;
  const int wanted = c.chance(32) ? 0 : 1 + c.below(2);
  for (int i = 0; i < wanted; ++i) {
    const std::int64_t id = one(c);
    const bool twice = std::find(ids.begin(), ids.end(), id) != ids.end();
    if (!twice || c.chance(16)) ids.push_back(id);
  }
  return ids;
}

qattn_status Calls::append(Choices& c) {
  constexpr Format floats[] = {Format::f32, Format::f16, Format::bf16};
  const std::vector<std::int64_t> ids = choose(c);
  const std::int64_t l = layer(c), n = 1 + c.below(40);
  const auto batch = static_cast<std::int64_t>(ids.size());
  const bool packed = c.chance(4), first = !c.chance(2);
  const Format format = floats[c.below(3)];
  const Fill fill = c.chance(8) ? Fill::wild : Fill::tame;
  KvAppendTensors t;
  if (packed) {
    t.k = first ? absent_memory(format, {batch * n, heads, dim})
                : absent_memory(format, {heads, batch * n, dim});
    t.cu_seqlens = absent_memory(Format::s32, {batch + 1});
  } else {
    t.k = first ? absent_memory(format, {batch, n, heads, dim})
                : absent_memory(format, {batch, heads, n, dim});
  }
  t.v = t.k;
  if (c.chance(4)) {
    t.importance = absent_memory(Format::f32, {batch, heads, (most(ids, l) + n + 15) / 16});
  }
  back(c, "k", t.k, false, fill);
  back(c, "v", t.v, false, fill);
  if (packed) back(c, "cu_seqlens", t.cu_seqlens, false, Fill::zero);
  for (std::int64_t b = 1; b <= batch; ++b) {
    const std::int64_t entry = c.chance(16) ? c.wild() : b * n;
    Memory::store(t.cu_seqlens, b, 0, static_cast<std::int32_t>(entry));
  }
  if (t.importance.present()) {
    back(c, "importance", t.importance, false, c.chance(8) ? Fill::tame : Fill::scale);
  }
  memory_->freeze();
  qattn_kv_append_tensors ct;
  qattn_kv_append_tensors_init(&ct);
  ct.k = c_tensor(t.k), ct.v = c_tensor(t.v);
  ct.cu_seqlens = c_tensor(t.cu_seqlens), ct.importance = c_tensor(t.importance);
  if (c.chance(32)) ct.struct_size = static_cast<std::size_t>(c.wild());
  const std::int32_t layout = c.chance(32) ? static_cast<std::int32_t>(c.wild())
                              : first      ? QATTN_LAYOUT_BSHD
                                           : QATTN_LAYOUT_BHSD;
  return qattn_kv_append(cache_, l, c.chance(64) ? nullptr : ids.data(), c.chance(64) ? -1 : batch,
                         c.chance(64) ? nullptr : &ct, layout);
}

qattn_status Calls::decode(Choices& c) {
  constexpr float numbers[] = {-1.0f, 0.0f, 1e-45f, 3e38f, INFINITY, -INFINITY, NAN};
  const std::vector<std::int64_t> ids = choose(c);
  const std::int64_t l = layer(c), queries = c.chance(4) ? 1 + c.below(10) : 1,
                     group = c.chance(4) ? c.below(18) : 2, blocks = (most(ids, l) + 15) / 16;
  const auto batch = static_cast<std::int64_t>(ids.size());
  const bool first = !c.chance(2);
  const auto rows = [&](Format format) {
    return first ? absent_memory(format, {batch, queries, heads * group, dim})
                 : absent_memory(format, {batch, heads * group, queries, dim});
  };
  KvDecodeTensors t;
  t.q = rows(c.chance(4) ? Format::bf16 : Format::f32);
  t.out = rows(c.chance(4) ? Format::f16 : Format::f32);
  back(c, "q", t.q, false, c.chance(8) ? Fill::wild : Fill::tame);
  back(c, "out", t.out, true, Fill::wild);
  if (c.chance(64)) t.out.data = t.q.data;
  const auto optional = [&](const char* name, TensorView& view, TensorView shaped, bool output,
                            Fill fill) {
    if (!c.chance(3)) return;
    view = shaped;
    back(c, name, view, output, fill);
  };
  optional("lse", t.lse, absent_memory(Format::f32, {batch, heads * group, queries}), true,
           Fill::wild);
  optional("sinks", t.sinks, absent_memory(Format::f32, {heads * group}), false, Fill::tame);
  optional("tree_mask", t.tree_mask, absent_memory(Format::b8, {batch, queries, queries}), false,
           Fill::boolean);
  optional("mass", t.mass, absent_memory(Format::f32, {batch, heads * group, blocks}), true,
           Fill::wild);
  memory_->freeze();
  qattn_kv_decode_tensors ct;
  qattn_kv_decode_options o;
  qattn_kv_decode_tensors_init(&ct);
  qattn_kv_decode_options_init(&o);
  ct.q = c_tensor(t.q), ct.out = c_tensor(t.out), ct.lse = c_tensor(t.lse);
  ct.sinks = c_tensor(t.sinks), ct.tree_mask = c_tensor(t.tree_mask), ct.mass = c_tensor(t.mass);
  o.layout = first ? QATTN_LAYOUT_BSHD : QATTN_LAYOUT_BHSD;
  o.threads = 1 + c.below(2);
  if (c.chance(16)) o.threads = c.chance(2) ? 4097 : -1 - c.below(200);
  if (c.chance(16)) o.layout = static_cast<std::int32_t>(c.wild());
  if (c.chance(8)) o.causal = c.chance(4) ? static_cast<std::int32_t>(c.wild()) : 0;
  if (c.chance(8)) o.window_left = c.wild();
  if (c.chance(8)) o.softcap = numbers[c.below(7)];
  if (c.chance(8)) o.has_softmax_scale = 1, o.softmax_scale = numbers[c.below(7)];
  if (c.chance(8)) o.debias = c.chance(4) ? static_cast<std::int32_t>(c.wild()) : 1;
  if (c.chance(32)) ct.struct_size = static_cast<std::size_t>(c.wild());
  if (c.chance(32)) o.struct_size = static_cast<std::size_t>(c.wild());
  return qattn_kv_decode(cache_, l, c.chance(64) ? nullptr : ids.data(), c.chance(64) ? -1 : batch,
                         c.chance(64) ? nullptr : &ct, &o);
}

qattn_status Calls::read(Choices& c) {
  const std::int64_t id = one(c), l = layer(c), n = length(id, l);
  TensorView k, v, tiers;
  if (!c.chance(4)) k = absent_memory(Format::f32, {heads, n, dim});
  if (!c.chance(4)) v = absent_memory(Format::f32, {heads, n, dim});
  if (!c.chance(4)) tiers = absent_memory(Format::s32, {heads, n});
  back(c, "k", k, true, Fill::wild);
  back(c, "v", v, true, Fill::wild);
  back(c, "tiers", tiers, true, Fill::wild);
  if (c.chance(64)) v.data = k.data;
  memory_->freeze();
  const qattn_tensor ck = c_tensor(k), cv = c_tensor(v), ct = c_tensor(tiers);
  return qattn_kv_read(cache_, id, l, c.chance(32) ? nullptr : &ck, &cv, &ct);
}

qattn_status Calls::sequences(Choices& c) {
  std::int64_t id = -77;
  qattn_status status = QATTN_OK;
  const int what = count() == 0 ? 0 : c.below(4);
  std::int64_t* const to = c.chance(32) ? nullptr : &id;
  if (what < 2 && count() < 4) {
    status = what == 0 ? qattn_kv_add_sequence(cache_, to) : qattn_kv_fork(cache_, one(c), to);
    if (status == QATTN_OK) {
      EXPECT_TRUE(to != nullptr && id >= 0);
      ids_.push_back(id);
    } else {
      EXPECT_EQ(id, -77) << "a refused call wrote its output";
    }
    return status;
  }
  id = one(c);
  status = qattn_kv_release(cache_, id);
  const auto found = std::find(ids_.begin(), ids_.end(), id);
  EXPECT_EQ(status == QATTN_OK, found != ids_.end());
  if (status == QATTN_OK) ids_.erase(found);
  return status;
}

qattn_status Calls::forget(Choices& c) {
  const std::int64_t id = one(c);
  const std::int64_t n = std::max<std::int64_t>(length(id, 0), 1);
  if (c.chance(2)) {
    return qattn_kv_truncate(cache_, id, c.chance(8) ? c.wild() : n - c.below(256) % n);
  }
  const std::int64_t begin = c.chance(8) ? c.wild() : c.below(256) % n;
  const std::int64_t end = c.chance(8) ? c.wild() : begin + c.below(20);
  const std::int64_t head = c.chance(8) ? c.wild() : c.below(heads + 1) - 1;
  return qattn_kv_evict(cache_, id, c.chance(2) ? -1 : layer(c), head, begin, end);
}

qattn_status Calls::weigh(Choices& c) {
  const Fill fill = c.chance(8) ? Fill::wild : Fill::scale;
  const std::int64_t l = layer(c);
  if (c.chance(2)) {
    const std::vector<std::int64_t> ids = choose(c);
    const auto batch = static_cast<std::int64_t>(ids.size());
    TensorView mass =
        absent_memory(Format::f32, {batch, heads * (1 + c.below(3)), (most(ids, l) + 15) / 16});
    back(c, "mass", mass, false, fill);
    memory_->freeze();
    const qattn_tensor t = c_tensor(mass);
    return qattn_kv_observe(cache_, l, ids.data(), batch, c.chance(32) ? nullptr : &t);
  }
  const std::int64_t id = one(c);
  TensorView importance = absent_memory(Format::f32, {heads, (length(id, l) + 15) / 16});
  back(c, "importance", importance, false, fill);
  memory_->freeze();
  const qattn_tensor t = c_tensor(importance);
  return qattn_kv_set_importance(cache_, id, l, c.chance(32) ? nullptr : &t);
}

qattn_status Calls::look(Choices& c) {
  qattn_kv_usage usage;
  qattn_kv_usage_init(&usage);
  if (c.chance(16)) usage.struct_size = c.chance(2) ? 3 : static_cast<std::size_t>(c.wild());
  usage.length = -77;
  const qattn_status status = qattn_kv_get_usage(cache_, one(c), layer(c), &usage);
  if (status != QATTN_OK) {
    EXPECT_EQ(usage.length, -77) << "a refused call wrote its output";
  }
  return status;
}

qattn_status Calls::file(Choices& c) {
  constexpr const char* paths[] = {"", "/", "/dev/null", "/nowhere/at/all.safetensors"};
  const char* const path = c.chance(8) ? nullptr : paths[c.below(4)];
  if (c.chance(2)) {
    const char* const nowhere = path != nullptr && *path == '/' ? paths[3] : path;
    const qattn_status status = qattn_kv_save(cache_, nowhere);
    EXPECT_NE(status, QATTN_OK);
    return status;
  }
  qattn_kv_cache* none = nullptr;
  const qattn_status status =
      qattn_kv_load(path, static_cast<std::int32_t>(c.wild()), c.chance(16) ? nullptr : &none);
  EXPECT_NE(status, QATTN_OK);
  EXPECT_EQ(none, nullptr);
  return status;
}

/// Another cache, of options that are right or wrong.
qattn_status Calls::make(Choices& c) {
  constexpr double numbers[] = {-1, 0, 2.1, 3, 64, 1e300, INFINITY, NAN};
  qattn_kv_options o = plain_options();
  const auto number = [&c](auto& x) {
    x = static_cast<std::remove_reference_t<decltype(x)>>(c.wild());
  };
  for (int defects = c.below(3); defects > 0; --defects) {
    std::int64_t* const wide[] = {&o.layers, &o.heads_kv, &o.d,         &o.dv,
                                  &o.window, &o.sinks,    &o.page_size, &o.budget_from};
    std::int32_t* const narrow[] = {&o.window_format, &o.tier_count,      &o.tiers[1].k_bits,
                                    &o.smooth_k,      &o.rotate,          &o.importance,
                                    &o.threads,       &o.tiers[0].v_bits, &o.k_granularity,
                                    &o.reserved,      &o.balance_k,       &o.smooth_v};
    const int which = c.below(8);
    switch (c.below(5)) {
      case 0:
        number(*wide[which]);
        break;
      case 1:
        number(*narrow[c.below(12)]);
        break;
      case 2:
        o.average_bits = numbers[which];
        break;
      case 3:
        (c.chance(2) ? o.importance_decay : o.hysteresis) = static_cast<float>(numbers[which]);
        break;
      default:
        number(o.struct_size);
    }
  }
  std::int64_t shortest = -77;
  const qattn_status asked = qattn_kv_shortest_length(&o, &shortest);
  EXPECT_EQ(asked == QATTN_OK, shortest != -77) << qattn_last_error();
  if (asked != QATTN_OK) {
    EXPECT_TRUE(refused_well(asked));
  }
  qattn_kv_cache* other = nullptr;
  const qattn_status status = qattn_kv_create(&o, c.chance(64) ? nullptr : &other);
  EXPECT_EQ(status == QATTN_OK, other != nullptr) << qattn_last_error();
  qattn_kv_destroy(other);
  return status;
}

void Calls::release_long_ones() {
  const std::size_t before = ids_.size();
  std::erase_if(ids_, [&](std::int64_t id) {
    const bool all = std::max(length(id, 0), length(id, 1)) > longest;
    if (all) {
      EXPECT_EQ(qattn_kv_release(cache_, id), QATTN_OK);
    }
    return all;
  });
  if (ids_.size() != before) digest_ = digest();
}

qattn_status Calls::step(Choices c) {
  memory_ = std::make_unique<Memory>();
  const int drawn = c.below(kinds);
  const int what = drawn < 8 && count() == 0 ? 8 : drawn;
  const qattn_status status = what < 2     ? append(c)
                              : what < 5   ? decode(c)
                              : what == 5  ? read(c)
                              : what == 6  ? forget(c)
                              : what == 7  ? weigh(c)
                              : what == 8  ? sequences(c)
                              : what == 9  ? look(c)
                              : what == 10 ? file(c)
                                           : make(c);
  const std::string message = status == QATTN_OK ? "not refused" : qattn_last_error();
  if (status != QATTN_OK) {
    EXPECT_TRUE(refused_well(status));
  }
  EXPECT_EQ(memory_->violation(status != QATTN_OK), "") << message;
  const std::uint64_t now = digest();
  if (status != QATTN_OK) {
    EXPECT_EQ(now, digest_) << "a refused call changed the cache: " << message;
  }
  digest_ = now;
  release_long_ones();
  return status;
}

void make_calls(std::int32_t k_granularity) {
  std::mt19937_64 random(2029);
  Calls cache(k_granularity);
  std::array<int, 5> seen{};
  for (int n = 0; n < calls; ++n) {
    SCOPED_TRACE("call " + std::to_string(n));
    std::vector<std::uint8_t> bytes = draw(random, n);
    bytes[0] = static_cast<std::uint8_t>(random() % Calls::kinds);  // zeros would only append
    const qattn_status status = cache.step(Choices(bytes));
    ASSERT_TRUE(status >= 0 && status < 5);
    ++seen[static_cast<std::size_t>(status)];
    if (testing::Test::HasFailure()) return;
  }
  // A generator that only makes nonsense, or only good calls, would test half of this.
  EXPECT_GT(seen[QATTN_OK], calls / 4);
  EXPECT_GT(seen[QATTN_INVALID_ARGUMENT], calls / 10);
  EXPECT_GT(seen[QATTN_UNSUPPORTED], 0);
}

TEST(BadInput, KvCacheThroughC) { make_calls(QATTN_PER_TOKEN); }
TEST(BadInput, KvCacheWithAScaleAChannelThroughC) { make_calls(QATTN_PER_CHANNEL); }

}  // namespace
}  // namespace qattn::test
