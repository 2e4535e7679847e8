// save() and load(): the same cache comes back and goes on the same way; no file, however damaged,
// does anything but load or be refused by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

#include "kvcache/data.hpp"
#include "kvcache/decode_case.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::DecodeCase;
using test::normal_rows;
using test::normal_values;

class KvFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(name.begin(), name.end(), '/', '_');
    path_ = testing::TempDir() + "qattn_kv_" + name + ".safetensors";
  }
  void TearDown() override { std::remove(path_.c_str()); }

  std::string bytes() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary).write(bytes.data(), static_cast<long>(bytes.size()));
  }

  std::string path_;
};

/// Where K has a scale a token, and where it has one a channel.
class KvFileBy : public KvFile, public testing::WithParamInterface<Granularity> {};

KvCacheOptions options(Granularity k = Granularity::per_token) {
  KvCacheOptions o;
  o.k_granularity = k;
  o.layers = 2;
  o.heads_kv = 2;
  o.d = 64;
  o.dv = 32;
  o.window = 32;
  o.tiers = {{8, 8}, {4, 3}, {2, 2}};
  o.average_bits = k == Granularity::per_channel ? 5.3 : 4.7;
  o.budget_from = *KvCache::shortest_length(o);
  o.importance = KvImportance::key_norm;
  o.importance_decay = 0.7f;
  o.smooth_v = k == Granularity::per_token;  // version 2 has none
  return o;
}

/// Two sequences that share pages, one empty layer, evicted and truncated tokens.
KvCache filled(Granularity k = Granularity::per_token) {
  KvCache cache = std::move(*KvCache::create(options(k)));
  const std::int64_t gone = *cache.add_sequence(), a = *cache.add_sequence();
  append_rows(cache, a, 0, normal_rows(500, 2, 64, 32, 1));
  const std::int64_t b = *cache.fork(a);
  append_rows(cache, b, 0, normal_rows(90, 2, 64, 32, 2));
  append_rows(cache, b, 1, normal_rows(20, 2, 64, 32, 3));
  EXPECT_TRUE(cache.evict(b, 0, 1, 30, 70).ok());
  EXPECT_TRUE(cache.truncate(a, 450).ok());
  EXPECT_TRUE(cache.release(gone).ok());
  return cache;
}

void expect_same(const KvCache& a, const KvCache& b, std::int64_t id, std::int64_t layer) {
  ASSERT_EQ(*a.length(id, layer), *b.length(id, layer));
  const auto x = test::read_contents(a, id, layer), y = test::read_contents(b, id, layer);
  const auto same = [](const std::vector<float>& p, const std::vector<float>& q) {
    return std::equal(p.begin(), p.end(), q.begin(), q.end(),
                      [](float u, float v) { return u == v || (u != u && v != v); });
  };
  EXPECT_TRUE(same(x.k, y.k) && same(x.v, y.v)) << id << " " << layer;
  EXPECT_EQ(a.usage(id, layer)->bytes, b.usage(id, layer)->bytes);
  EXPECT_EQ(a.usage(id, layer)->allowed_bytes, b.usage(id, layer)->allowed_bytes);
  EXPECT_EQ(a.usage(id, layer)->tier_tokens, b.usage(id, layer)->tier_tokens);
}

TEST_P(KvFileBy, TheSameCacheComesBackAndGoesOnTheSameWay) {
  KvCache cache = filled(GetParam());
  ASSERT_TRUE(cache.save(path_).ok());
  Result<KvCache> loaded = KvCache::load(path_);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->options().k_granularity, GetParam());
  const KvBytes was = cache.bytes(), is = loaded->bytes();
  EXPECT_EQ(std::tie(was.codes, was.scales, was.window, was.tables, was.means),
            std::tie(is.codes, is.scales, is.window, is.tables, is.means))
      << "shared pages stay shared";
  for (int step = 0; step < 60; ++step) {
    for (const std::int64_t id : {1, 2}) {
      for (const std::int64_t layer : {0, 1}) expect_same(cache, *loaded, id, layer);
      const auto rows = normal_rows(7, 2, 64, 32, 10u + static_cast<unsigned>(step));
      append_rows(cache, id, 0, rows);
      append_rows(*loaded, id, 0, rows);
    }
  }
  EXPECT_EQ(*cache.add_sequence(), *loaded->add_sequence()) << "numbers are never given twice";
  ASSERT_TRUE(cache.save(path_).ok());
  const std::string first = bytes();
  ASSERT_TRUE(loaded->save(path_).ok());
  EXPECT_EQ(first, bytes());
}

/// A page that was cut in a tier and grows in 16 bits, and one that is quantised again at once.
TEST_P(KvFileBy, APageThatWasCutAndGrowsComesBack) {
  KvCache cache = filled(GetParam());
  const auto tail_tier = [&] { return cache.data().find(1)->layers[0].tables[0].back().tier; };
  for (const std::int64_t length : {408, 360, 200, 25}) {
    for (const std::int64_t count : {3, 60}) {
      SCOPED_TRACE(std::to_string(length) + " and " + std::to_string(count));
      append_rows(cache, 1, 0, normal_rows(700 - *cache.length(1, 0), 2, 64, 32, 1));
      ASSERT_TRUE(cache.truncate(1, length).ok());
      ASSERT_GT(tail_tier(), 0);
      append_rows(cache, 1, 0, normal_rows(count, 2, 64, 32, 4));
      ASSERT_EQ(tail_tier(), 0);
      ASSERT_TRUE(cache.save(path_).ok());
      Result<KvCache> loaded = KvCache::load(path_);
      ASSERT_TRUE(loaded.ok()) << loaded.status().message();
      expect_same(cache, *loaded, 1, 0);
      const auto rows = normal_rows(100, 2, 64, 32, 5);
      append_rows(cache, 1, 0, rows);
      append_rows(*loaded, 1, 0, rows);
      expect_same(cache, *loaded, 1, 0);
    }
  }
}

TEST_F(KvFile, AnEmptyCache) {
  KvCache cache = std::move(*KvCache::create(options()));
  ASSERT_TRUE(cache.save(path_).ok());
  const Result<KvCache> loaded = KvCache::load(path_, 3);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->options().threads, 3);
  EXPECT_EQ(loaded->bytes().codes, 0);
}

TEST_F(KvFile, FilesOfBeforeGoOnAsTheyDid) {
  for (const Granularity k : {Granularity::per_token, Granularity::per_channel}) {
    KvCacheOptions o = options(k);
    o.balance_k = o.smooth_v = false;
    KvCache cache = std::move(*KvCache::create(o));
    const std::int64_t id = *cache.add_sequence();
    append_rows(cache, id, 0, normal_rows(500, 2, 64, 32, 1));
    ASSERT_TRUE(cache.save(path_).ok());
    const char* version = k == Granularity::per_token ? "version=1 " : "version=2 ";
    EXPECT_NE(bytes().find(version), std::string::npos);
    EXPECT_EQ(bytes().find("k_shifts"), std::string::npos);
    Result<KvCache> loaded = KvCache::load(path_);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    EXPECT_FALSE(loaded->options().balance_k || loaded->options().smooth_v);
    for (KvCache* c : {&cache, &*loaded}) append_rows(*c, id, 0, normal_rows(90, 2, 64, 32, 2));
    expect_same(cache, *loaded, id, 0);
  }
}

TEST_F(KvFile, RefusalsNameTheFile) {
  const auto refused = [&](const std::string& words) {
    const Result<KvCache> loaded = KvCache::load(path_);
    ASSERT_FALSE(loaded.ok()) << words;
    EXPECT_NE(loaded.status().message().find("path: " + path_), std::string::npos);
    EXPECT_NE(loaded.status().message().find(words), std::string::npos)
        << loaded.status().message();
  };
  refused("cannot be read");
  write("");
  refused("is shorter than a header");
  write(std::string("\x10\0\0\0\0\0\0\0{}              ", 24));
  refused("has no header of a KV cache");
  const KvCache cache = filled();
  ASSERT_TRUE(cache.save(path_).ok());
  const std::string good = bytes();
  write(good + "x");
  refused("its header asks for");
  std::string bad = good;
  bad.replace(bad.find("window=32"), 9, "window=33");
  write(bad);
  refused("window: 33 is not a multiple");
  bad = good;
  bad.replace(bad.find("\"tables\""), 8, "\"TABLES\"");
  write(bad);
  refused("has a header that is not its metadata's");
  bad = good;
  bad.replace(bad.find("qattn_kv_cache"), 14, "qattn_kv_cachf");
  write(bad);
  refused("has no metadata qattn_kv_cache");
  EXPECT_FALSE(cache.save("/nonexistent/place/x.safetensors").ok());
}

/// Where the bytes of a tensor begin.
std::size_t place_of(const std::string& file, const std::string& tensor) {
  std::uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  const std::size_t at = file.find("\"" + tensor + "\":");
  const std::string offsets = "\"data_offsets\":[";
  return 8 + header + std::stoull(file.substr(file.find(offsets, at) + offsets.size()));
}

template <class T>
std::string with(std::string file, std::size_t place, T value) {
  std::memcpy(file.data() + place, &value, sizeof value);
  return file;
}

TEST_F(KvFile, ValuesThatNoCallLeavesThereAreRefused) {
  const KvCache cache = filled();
  ASSERT_TRUE(cache.save(path_).ok());
  const std::string good = bytes();
  const auto refused = [&](const std::string& file, const std::string& words) {
    write(file);
    const Result<KvCache> loaded = KvCache::load(path_);
    ASSERT_FALSE(loaded.ok()) << words;
    EXPECT_EQ(loaded.status().message(), "path: " + path_ + ": " + words);
  };
  const std::size_t means = place_of(good, "k_means");
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (const auto& [element, value, text] :
       {std::tuple{0, NAN, "nan"}, std::tuple{7, inf, "inf"}, std::tuple{255, -inf, "-inf"}}) {
    refused(with(good, means + 4 * static_cast<std::size_t>(element), value),
            "k_means: element " + std::to_string(element) + " is " + text + ", should be finite");
  }
  std::string without = good;
  without.replace(without.find("smooth_k=1"), 10, "smooth_k=0");
  write(without);
  EXPECT_NE(KvCache::load(path_).status().message().find(", should be 0 without smooth_k"),
            std::string::npos);
  refused(with(good, place_of(good, "v_means") + 8, inf),
          "v_means: an element of sequence 1 is inf, should be finite");
  refused(with(good, place_of(good, "k_shifts") + 3, std::uint8_t{16}),
          "k_shifts: an element of sequence 1 is 16, should be at most 15");
  for (const int tier : {1, 2, 3}) {
    const std::string name = "pages." + std::to_string(tier);
    const formats::KvBlock block = cache.data().block(tier);
    const std::int64_t last = cache.data().pool(tier).pages_used() - 1;
    ASSERT_GE(last, 0) << tier;
    for (const bool value : {false, true}) {
      const std::size_t place =
          place_of(good, name) +
          static_cast<std::size_t>(last * cache.data().page_bytes(tier) + 2 * 5 +
                                   (value ? block.v_scales() : block.k_scales()));
      for (const auto& [code, text] :
           {std::pair{0xb800, "-0.5"}, std::pair{0x8001, "-5.9604645e-08"},
            std::pair{0x7c00, "inf"}, std::pair{0xfc00, "-inf"}}) {
        refused(with(good, place, static_cast<std::uint16_t>(code)),
                name + ": the scale of " + (value ? "V" : "K") + " of token 5 of page " +
                    std::to_string(last) + " is " + text +
                    ", should be finite and not negative, or NaN for a row that holds NaN or Inf");
      }
      for (const int code : {0x7e00, 0xfe01, 0x8000, 0x7bff}) {
        write(with(good, place, static_cast<std::uint16_t>(code)));
        EXPECT_TRUE(KvCache::load(path_).ok()) << name << " " << code;
      }
    }
  }
}

/// Every call on whatever was loaded.
void use(KvCache& cache) {
  for (const std::int64_t id : {1, 2}) {
    for (std::int64_t layer = 0; layer < cache.options().layers; ++layer) {
      if (!cache.length(id, layer).ok() || *cache.length(id, layer) > 100000) continue;
      if (cache.options().d != 64 || cache.options().dv != 32) continue;
      test::read_contents(cache, id, layer);
      DecodeCase c;
      c.heads_q = cache.options().heads_kv;
      c.q = normal_values(c.heads_q * 64, 1);
      c.with_mass = true;
      (void)c.run(cache, {id}, layer);
      const auto rows = normal_rows(40, cache.options().heads_kv, 64, 32, 1);
      KvAppendTensors t;
      t.k = TensorView::dense(rows.k.data(), Format::f32, {1, 40, cache.options().heads_kv, 64});
      t.v = TensorView::dense(rows.v.data(), Format::f32, {1, 40, cache.options().heads_kv, 32});
      (void)cache.append(layer, {&id, 1}, t);
    }
    (void)cache.fork(id);
    (void)cache.truncate(id, 100);
    (void)cache.release(id);
  }
}

TEST_F(KvFile, ScalesOfChannelsThatNoPageHasAreRefused) {
  const KvCache cache = filled(Granularity::per_channel);
  ASSERT_TRUE(cache.save(path_).ok());
  const std::string good = bytes();
  EXPECT_NE(good.find("version=2 "), std::string::npos);
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), sizeof header);
  // The last part is a byte a (sequence, layer): before it lies the last page of the last tier,
  // whose last are 16 bytes of bad tokens, and before these 64 scales.
  const std::size_t end = good.size() - 4, bad_tokens = end - 16, scales = bad_tokens - 128;
  const auto refused = [&](std::size_t at, const std::string& with, const std::string& words) {
    std::string bad = good;
    bad.replace(at, with.size(), with);
    write(bad);
    const Result<KvCache> loaded = KvCache::load(path_);
    ASSERT_FALSE(loaded.ok()) << words;
    EXPECT_NE(loaded.status().message().find(words), std::string::npos)
        << loaded.status().message();
  };
  using namespace std::string_literals;
  const std::string words = " is not from 0 to 65504";
  refused(scales, "\x00\x7c"s, "the scale of K's channel 0" + words);         // Inf
  refused(scales + 126, "\x00\x7e"s, "the scale of K's channel 63" + words);  // NaN
  refused(scales + 14, "\x00\xbc"s, "the scale of K's channel 7" + words);    // -1
  refused(bad_tokens + 2, "\x01"s, "flags tokens that it does not have");
  refused(bad_tokens + 15, "\x01"s, "flags tokens that it does not have");
  const std::size_t option = good.find("k_granularity=per_channel");
  ASSERT_NE(option, std::string::npos);
  refused(option, "k_granularity=per_tokennn", "has metadata that is not a cache's");
  refused(good.find("version=2"), "version=1", "has metadata that is not a cache's");
  refused(good.find("version=2"), "version=3", "has metadata that is not a cache's");
  refused(good.find("version=2"), "version=5", "is of none of the versions 1 to 4");
}

TEST_P(KvFileBy, DamagedFilesAreRefusedOrHarmless) {
  const KvCache cache = filled(GetParam());
  ASSERT_TRUE(cache.save(path_).ok());
  const std::string good = bytes();
  const std::size_t data = good.find("}   ") != std::string::npos ? good.find("]}}") : 0;
  std::mt19937 random(1);
  int loaded = 0, refused = 0;
  for (int i = 0; i < 600; ++i) {
    std::string bad = good;
    if (i % 5 == 0) {
      bad.resize(random() % good.size());
    } else {
      // Half of the damage to the header and the tables, which decide everything.
      const std::size_t range = i % 2 == 0 ? std::min(good.size(), data + 6000) : good.size();
      for (int n = 1 + static_cast<int>(random() % 3); n > 0; --n) {
        bad[random() % range] = static_cast<char>(random());
      }
    }
    write(bad);
    Result<KvCache> result = KvCache::load(path_);
    result.ok() ? ++loaded : ++refused;
    if (result.ok()) use(*result);
  }
  EXPECT_GT(refused, 120);
  EXPECT_GT(loaded, 40) << "what is damaged in codes only cannot be told";
}

INSTANTIATE_TEST_SUITE_P(Scales, KvFileBy,
                         testing::Values(Granularity::per_token, Granularity::per_channel),
                         [](const auto& x) { return std::string(name(x.param)); });

}  // namespace
}  // namespace qattn
