// Random sequences of operations on a KV cache, against a plain model of it: equal contents bit for
// bit, legal tiers, the budget kept, bytes() exact by category and in total (what operator new gave
// out), nothing left at the end. QATTN_KV_SEQUENCES sets how many sequences of operations.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <sstream>

#include "kvcache/counted_new.hpp"
#include "kvcache/plain_cache.hpp"

namespace qattn {
namespace {

#if defined(QATTN_KV_SEQUENCES)
constexpr int default_sequences = QATTN_KV_SEQUENCES;
#else
constexpr int default_sequences = 10000;
#endif

using test::Counted;
using test::PlainCache;

class Walk {
 public:
  explicit Walk(unsigned seed) : random_(seed) {}

  /// Returns what was wrong, or "".
  std::string run() {
    choose_options();
    const std::int64_t before = test::counted_bytes();
    {
      const Counted counted;
      Result<KvCache> made = KvCache::create(o_);
      if (!made.ok()) return "create: " + made.status().message();
      cache_.emplace(std::move(*made));
    }
    model_ = std::make_unique<PlainCache>(o_);
    const int steps = 8 + below(24);
    for (int i = 0; i < steps; ++i) {
      std::string wrong = step();
      if (wrong.empty()) wrong = compare();
      if (!wrong.empty()) return "step " + std::to_string(i) + ", " + last_ + ": " + wrong;
    }
    while (!model_->sequences().empty()) release(model_->sequences().begin()->first);
    if (std::string wrong = compare(); !wrong.empty()) return "all released: " + wrong;
    const KvBytes b = cache_->bytes();
    if (b.codes + b.scales + b.window + b.tables + b.means != 0) return "pages are left";
    cache_.reset();
    const std::int64_t leaked = test::counted_bytes() - before;
    return leaked == 0 ? "" : std::to_string(leaked) + " bytes leaked";
  }

 private:
  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return below(n) == 0; }

  void choose_options() {
    o_.layers = 1 + below(2);
    o_.heads_kv = 1 + below(2);
    o_.d = one_in(3) ? 64 : 32;
    o_.dv = one_in(3) ? 96 : 32;
    o_.page_size = one_in(3) ? 32 : 16;
    o_.window = o_.page_size * (1 + below(2));
    o_.sinks = o_.page_size * below(2);
    o_.window_format = one_in(2) ? Format::bf16 : Format::f16;
    o_.smooth_k = !one_in(4);
    o_.rotate = !one_in(4);
    o_.balance_k = !one_in(4);
    o_.smooth_v = !one_in(4);
    loud_ = one_in(2);
    far_ = one_in(2) ? 8.0f : 0.0f;
    o_.k_granularity = one_in(3) ? Granularity::per_channel : Granularity::per_token;
    o_.importance = one_in(2) ? KvImportance::key_norm : KvImportance::uniform;
    o_.threads = 1 + below(2);
    if (one_in(4)) {
      o_.tiers = {{4, 3}};
      return;
    }
    if (one_in(3)) o_.tiers = {{8, 8}, {8, 4}, {4, 4}, {4, 2}, {2, 2}};
    o_.average_bits = 4.5 + 0.5 * below(8);
    const Result<std::int64_t> shortest = KvCache::shortest_length(o_);
    o_.budget_from = *shortest + below(40);
  }

  std::int64_t any_sequence() {
    auto it = model_->sequences().begin();
    std::advance(it, below(static_cast<int>(model_->sequences().size())));
    return it->first;
  }
  std::int64_t length(std::int64_t id, std::int64_t layer) const {
    return model_->sequences().at(id)[static_cast<std::size_t>(layer)].length;
  }

  std::string step() {
    if (model_->sequences().empty() || (model_->sequences().size() < 4 && one_in(8))) return add();
    const std::int64_t id = any_sequence();
    switch (below(12)) {
      case 0:
        last_ = "fork";
        return model_->sequences().size() < 5 ? fork(id) : "";
      case 1:
        last_ = "truncate";
        return truncate(id);
      case 2:
        last_ = "evict";
        return evict(id);
      case 3:
        last_ = "release";
        return one_in(2) ? release(id) : "";
      case 4:
      case 5:
        last_ = "importance";
        return importance(id);
      default:
        last_ = "append";
        return append(id);
    }
  }

  std::string add() {
    last_ = "add";
    const Result<std::int64_t> id = [&] {
      const Counted counted;
      return cache_->add_sequence();
    }();
    if (!id.ok()) return id.status().message();
    model_->add(*id);
    return "";
  }

  std::string fork(std::int64_t id) {
    Result<std::int64_t> copy = [&] {
      const Counted counted;
      return cache_->fork(id);
    }();
    if (!copy.ok()) return copy.status().message();
    model_->fork(id, *copy);
    return "";
  }

  std::string release(std::int64_t id) {
    const Status s = cache_->release(id);
    if (!s.ok()) return s.message();
    model_->release(id);
    return cache_->release(id).ok() ? "released twice" : "";
  }

  std::string truncate(std::int64_t id) {
    const auto to = static_cast<std::int64_t>(below(static_cast<int>(length(id, 0)) + 20));
    const Status s = [&] {
      const Counted counted;
      return cache_->truncate(id, to);
    }();
    if (!s.ok()) return s.message();
    model_->truncate(id, to);
    for (std::int64_t layer = 0; layer < o_.layers; ++layer) {
      if (std::string wrong = model_->demote(id, layer, tiers(id, layer)); !wrong.empty()) {
        return wrong;
      }
    }
    return "";
  }

  std::string evict(std::int64_t id) {
    const std::int64_t layer = below(static_cast<int>(o_.layers) + 1) - 1;
    const std::int64_t head = below(static_cast<int>(o_.heads_kv) + 1) - 1;
    const std::int64_t begin = below(static_cast<int>(length(id, 0)) + 1);
    const std::int64_t end = begin + below(one_in(2) ? 3 : 70);
    const Status s = cache_->evict(id, layer, head, begin, end);
    if (!s.ok()) return s.message();
    model_->evict(id, layer, head, begin, end);
    return "";
  }

  std::string importance(std::int64_t id) {
    const std::int64_t layer = below(static_cast<int>(o_.layers));
    const std::int64_t blocks = (length(id, layer) + 15) / 16;
    const std::int64_t group = 1 + below(2);
    std::vector<float> mass(static_cast<std::size_t>(o_.heads_kv * group * blocks));
    for (float& m : mass) m = static_cast<float>(below(1000)) / 1000.0f;
    const Status s =
        one_in(2)
            ? cache_->observe(
                  layer, {&id, 1},
                  TensorView::dense(mass.data(), Format::f32, {1, o_.heads_kv * group, blocks}))
            : cache_->set_importance(
                  id, layer, TensorView::dense(mass.data(), Format::f32, {o_.heads_kv, blocks}));
    return s.ok() ? "" : s.message();
  }

  /// Values that both window formats hold, now and then an outlier, a NaN or an infinity.
  std::vector<float> rows(std::int64_t count, std::int64_t channels) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<std::size_t>(count * o_.heads_kv * channels));
    for (float& v : x) {
      v = static_cast<float>(
          test::round_f16(test::round_bf16(static_cast<double>(normal(random_) + far_))));
    }
    for (std::size_t i = 3; loud_ && i < x.size(); i += static_cast<std::size_t>(channels)) {
      x[i] *= 64;
    }
    const bool bf16 = o_.window_format == Format::bf16;
    if (!x.empty() && one_in(6)) x[random_() % x.size()] = 4096.0f;
    if (!x.empty() && one_in(12)) x[random_() % x.size()] = bf16 ? 0x1.fep127f : -65504.0f;
    if (!x.empty() && one_in(12)) x[random_() % x.size()] = bf16 ? -0x1.94p99f : 40960.0f;
    if (!x.empty() && one_in(30)) x[random_() % x.size()] = one_in(2) ? NAN : -INFINITY;
    // What leaves through Inf comes back as NaN, as everywhere in the library.
    for (float& v : x) v = std::isinf(v) ? NAN : v;
    return x;
  }

  std::string append(std::int64_t id) {
    const std::int64_t layer = below(static_cast<int>(o_.layers));
    std::vector<std::int64_t> ids{id};
    if (one_in(3)) {
      for (const auto& [other, s] : model_->sequences()) {
        if (other != id) ids.push_back(other);
      }
    }
    const bool packed = one_in(3);
    std::vector<std::int64_t> counts;
    const int usual = one_in(3) ? 1 : 1 + below(60);
    for (std::size_t b = 0; b < ids.size(); ++b) counts.push_back(packed ? below(50) : usual);
    std::vector<std::int32_t> cu{0};
    std::vector<float> k, v;
    std::vector<std::vector<float>> ks, vs;
    for (const std::int64_t count : counts) {
      ks.push_back(rows(count, o_.d));
      vs.push_back(rows(count, o_.dv));
      k.insert(k.end(), ks.back().begin(), ks.back().end());
      v.insert(v.end(), vs.back().begin(), vs.back().end());
      cu.push_back(cu.back() + static_cast<std::int32_t>(count));
    }
    KvAppendTensors t;
    const auto batch = static_cast<std::int64_t>(ids.size());
    if (packed) {
      t.k = TensorView::dense(k.data(), Format::f32, {cu.back(), o_.heads_kv, o_.d});
      t.v = TensorView::dense(v.data(), Format::f32, {cu.back(), o_.heads_kv, o_.dv});
      t.cu_seqlens = TensorView::dense(cu.data(), Format::s32, {batch + 1});
    } else {
      t.k = TensorView::dense(k.data(), Format::f32, {batch, usual, o_.heads_kv, o_.d});
      t.v = TensorView::dense(v.data(), Format::f32, {batch, usual, o_.heads_kv, o_.dv});
    }
    std::int64_t longest = 0;
    for (std::size_t b = 0; b < ids.size(); ++b) {
      longest = std::max(longest, length(ids[b], layer) + counts[b]);
    }
    std::vector<float> weights(
        static_cast<std::size_t>(batch * o_.heads_kv * ((longest + 15) / 16)));
    for (float& w : weights) w = static_cast<float>(below(100));
    if (one_in(4)) {
      t.importance =
          TensorView::dense(weights.data(), Format::f32, {batch, o_.heads_kv, (longest + 15) / 16});
    }
    Status s = [&] {
      const Counted counted;
      return cache_->append(layer, ids, t);
    }();
    if (!s.ok()) return s.message();
    for (std::size_t b = 0; b < ids.size(); ++b) {
      const std::string wrong = model_append(ids[b], layer, counts[b], ks[b], vs[b]);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  std::string model_append(std::int64_t id, std::int64_t layer, std::int64_t count,
                           const std::vector<float>& k, const std::vector<float>& v) {
    const std::int64_t now = length(id, layer) + count;
    const Result<std::int64_t> length = cache_->length(id, layer);
    if (*length != now) return "length " + std::to_string(*length);
    return model_->append(id, layer, count, k, v, tiers(id, layer));
  }

  /// As read() gives them.
  std::vector<std::int32_t> tiers(std::int64_t id, std::int64_t layer) const {
    const std::int64_t n = *cache_->length(id, layer);
    std::vector<std::int32_t> tiers(static_cast<std::size_t>(o_.heads_kv * n));
    const Status s = cache_->read(id, layer, {}, {},
                                  TensorView::dense(tiers.data(), Format::s32, {o_.heads_kv, n}));
    EXPECT_TRUE(s.ok()) << s.message();
    return tiers;
  }

  std::string compare() const {
    for (const auto& [id, sequence] : model_->sequences()) {
      for (std::int64_t layer = 0; layer < o_.layers; ++layer) {
        if (std::string wrong = compare_layer(id, layer); !wrong.empty()) {
          return "sequence " + std::to_string(id) + " layer " + std::to_string(layer) + ": " +
                 wrong;
        }
      }
    }
    const KvBytes want = model_->bytes(), got = cache_->bytes();
    for (const auto& [name, w, g] :
         {std::tuple{"codes", want.codes, got.codes}, std::tuple{"scales", want.scales, got.scales},
          std::tuple{"window", want.window, got.window},
          std::tuple{"tables", want.tables, got.tables},
          std::tuple{"means", want.means, got.means}}) {
      if (w != g) {
        return std::string(name) + ": " + std::to_string(g) + " bytes, should be " +
               std::to_string(w);
      }
    }
    if (got.spare < 0) return "spare: " + std::to_string(got.spare) + " bytes";
    const std::int64_t held = test::counted_bytes();
    if (got.total != held) {
      return "bytes() says " + std::to_string(got.total) + ", allocated are " +
             std::to_string(held);
    }
    return "";
  }

  std::string compare_layer(std::int64_t id, std::int64_t layer) const {
    const std::int64_t n = length(id, layer), h = o_.heads_kv;
    if (*cache_->length(id, layer) != n)
      return "length " + std::to_string(*cache_->length(id, layer));
    std::vector<float> want_k, want_v;
    std::vector<std::int32_t> want_tiers;
    model_->contents(id, layer, want_k, want_v, want_tiers);
    std::vector<float> k(want_k.size(), 7.0f), v(want_v.size(), 7.0f);
    std::vector<std::int32_t> tiers(want_tiers.size(), 77);
    const Status s = cache_->read(id, layer, TensorView::dense(k.data(), Format::f32, {h, n, o_.d}),
                                  TensorView::dense(v.data(), Format::f32, {h, n, o_.dv}),
                                  TensorView::dense(tiers.data(), Format::s32, {h, n}));
    if (!s.ok()) return s.message();
    if (tiers != want_tiers) return "tiers differ";
    if (std::string d = difference(k, want_k); !d.empty()) return "k: " + d;
    if (std::string d = difference(v, want_v); !d.empty()) return "v: " + d;
    const Result<KvUsage> u = cache_->usage(id, layer);
    if (u->bytes != model_->layer_bytes(id, layer)) return "usage().bytes differs";
    if (o_.average_bits > 0 && u->bytes > u->allowed_bytes) {
      return "the budget allows " + std::to_string(u->allowed_bytes) + " bytes, it takes " +
             std::to_string(u->bytes);
    }
    return "";
  }

  static std::string difference(const std::vector<float>& got, const std::vector<float>& want) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(got[i]) && std::isnan(want[i])) continue;
      if (got[i] == want[i]) continue;  // a zero may lose its sign
      std::ostringstream text;
      text << std::hexfloat << "element " << i << " is " << got[i] << ", should be " << want[i];
      return text.str();
    }
    return "";
  }

  std::mt19937 random_;
  bool loud_ = false;  ///< a channel is
  float far_ = 0;      ///< from 0 are the rows
  KvCacheOptions o_;
  std::optional<KvCache> cache_;
  std::unique_ptr<PlainCache> model_;
  std::string last_;
};

/// A quarter of the sequences each, so that they can run side by side.
class KvCacheProperty : public testing::TestWithParam<int> {};

TEST_P(KvCacheProperty, RandomOperationsEqualThePlainModel) {
  const char* asked = std::getenv("QATTN_KV_SEQUENCES");
  const int count = asked ? std::atoi(asked) : default_sequences;
  for (int i = GetParam(); i < count; i += 4) {
    const std::string wrong = Walk(static_cast<unsigned>(i) + 1).run();
    ASSERT_EQ(wrong, "") << "sequence of operations " << i + 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Quarter, KvCacheProperty, testing::Range(0, 4));

}  // namespace
}  // namespace qattn
