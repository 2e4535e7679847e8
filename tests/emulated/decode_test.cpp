// The GPU's decode kernels in the emulator against the CPU's decode() of the same cache: every
// schedule gives the same bits, and those are the CPU's up to f16 Q and P.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "emulated/decode_same.hpp"
#include "formats/f16.hpp"

namespace qattn {
namespace {

using test::append_rows;
using test::DecodeCase;
using test::DeviceCall;
using test::expect_same;
using test::fill;
using test::Filled;
using test::MirroredCache;
using test::mixed;
using test::normal_rows;
using test::nrmse;
using test::queries_for;
using test::tight;
using test::timings;
using test::uniform;

// ---- Tests --------------------------------------------------------------------------------------

TEST(DeviceDecode, FourBits) {
  const Filled f = fill(uniform(4, 4), 300);
  DecodeCase c = queries_for(f.cache.options(), 4, 1);
  expect_same(c, f.cache, {f.id}, "4/4: ", -1);
}

/// Pages behind 2^32 bytes of their pool: an offset of 32 bits finds others, or none.
TEST(DeviceDecode, PoolsBeyond32Bits) {
  for (const Granularity k : {Granularity::per_token, Granularity::per_channel}) {
    for (const int bits : {2, 3, 4, 8}) {
      SCOPED_TRACE(std::to_string(bits) + " bits, K " + std::string(name(k)));
      KvCacheOptions options = uniform(bits, bits);
      options.k_granularity = k;
      const Filled f = fill(options, 300);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      ASSERT_TRUE(c.run(f.cache, {f.id}).ok());
      MirroredCache mirror(f.cache, {f.id});
      std::vector<float> out;
      for (const bool far : {false, true}) {
        if (far) mirror.put_behind(std::uint64_t{1} << 32);
        DeviceCall device(c, mirror.view(), {0}, 0);
        ASSERT_TRUE(device.run(timings[0]).ok());
        if (!far) out = device.results().out;
        EXPECT_TRUE(out == device.results().out);
      }
      EXPECT_LE(nrmse(out, c.out), tight);
    }
  }
}

TEST(DeviceDecode, EveryPairOfBits) {
  int turn = 0;
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      const Filled f = fill(uniform(k_bits, v_bits), 500);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      expect_same(c, f.cache, {f.id}, std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ",
                  turn++);
    }
  }
}

TEST(DeviceDecode, EveryPairOfBitsAtTheOtherHeadDimensions) {
  int turn = 0;
  for (const int d : {64, 256}) {
    for (const auto& [k_bits, v_bits] : {std::pair{2, 2}, std::pair{3, 3}, std::pair{4, 4},
                                         std::pair{8, 8}, std::pair{3, 8}, std::pair{8, 3}}) {
      const Filled f = fill(uniform(k_bits, v_bits, 1, d), 400);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      expect_same(
          c, f.cache, {f.id},
          std::to_string(d) + " " + std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ",
          turn++);
    }
  }
}

TEST(DeviceDecode, LengthsAcrossPagesAndTiles) {
  int turn = 0;
  for (const std::int64_t page : {16, 32, 64}) {
    KvCacheOptions o = uniform(4, 2);
    o.page_size = o.window = o.sinks = page;
    for (const std::int64_t length : {1, 15, 16, 17, 63, 64, 65, 129, 257}) {
      const Filled f = fill(o, length);
      DecodeCase c = queries_for(o, 2, 1);
      expect_same(c, f.cache, {f.id},
                  "page " + std::to_string(page) + " length " + std::to_string(length) + ": ",
                  turn++);
    }
  }
}

TEST(DeviceDecode, MixedTiersAtEveryHeadDimensionAndGroup) {
  int turn = 0;
  for (const std::int64_t d : {64, 128, 256}) {
    const Filled f = fill(mixed(2, d), 1200);
    const Result<KvUsage> usage = f.cache.usage(f.id, 0);
    for (const std::int64_t tokens : usage->tier_tokens) {
      EXPECT_GT(tokens, 0) << "a tier is not tested";
    }
    for (const std::int64_t group : {1, 4, 8, 16}) {
      DecodeCase c = queries_for(f.cache.options(), group, 1);
      expect_same(c, f.cache, {f.id},
                  "d " + std::to_string(d) + " group " + std::to_string(group) + ": ", turn++);
    }
  }
}

/// With their mass, for which rows have a thread each.
TEST(DeviceDecode, AnyNumberOfHeadsOfAKvHead) {
  int turn = 0;
  const Filled f = fill(mixed(2, 64), 600);
  for (const auto& [queries, group] :
       {std::pair{1, 17}, std::pair{8, 20}, std::pair{3, 71}, std::pair{1, 130}}) {
    DecodeCase c = queries_for(f.cache.options(), group, queries);
    c.sinks = test::normal_values(c.heads_q, 5, 3.0f);
    expect_same(c, f.cache, {f.id},
                std::to_string(queries) + " queries, group " + std::to_string(group) + ": ",
                turn++);
  }
}

TEST(DeviceDecode, DebiasInEveryTierAndPairOfBits) {
  int turn = 0;
  for (const std::int64_t d : {64, 128}) {
    const Filled f = fill(mixed(2, d), 900);
    for (const std::int64_t group : {4, 16}) {
      DecodeCase c = queries_for(f.cache.options(), group, 1);
      c.options.debias = true;
      expect_same(c, f.cache, {f.id},
                  "d " + std::to_string(d) + " group " + std::to_string(group) + ": ", turn++);
    }
  }
  for (const int k_bits : {2, 3, 4, 8}) {
    for (const int v_bits : {2, 3, 4, 8}) {
      const Filled f = fill(uniform(k_bits, v_bits), 400);
      DecodeCase c = queries_for(f.cache.options(), 4, 1);
      c.options.debias = true;
      const std::string bits = std::to_string(k_bits) + "/" + std::to_string(v_bits) + ": ";
      expect_same(c, f.cache, {f.id}, bits, turn++);
    }
  }
}

TEST(DeviceDecode, SeveralQueriesWindowsSoftcapSinksAndTrees) {
  Filled f = fill(mixed(), 700);
  ASSERT_TRUE(f.cache.evict(f.id, 0, -1, 100, 133).ok());
  ASSERT_TRUE(f.cache.evict(f.id, 0, 1, 401, 402).ok());
  ASSERT_TRUE(f.cache.evict(f.id, 0, 0, 680, 683).ok());
  test::expect_same_with_every_feature(f);
}

TEST(DeviceDecode, MostRowsAndTruncatedPages) {
  Filled f = fill(mixed(1), 600);
  for (const std::int64_t length : {333, 301}) {
    ASSERT_TRUE(f.cache.truncate(f.id, length).ok());
    append_rows(f.cache, f.id, 0, normal_rows(150, 1, 128, 128, static_cast<unsigned>(length)));
  }
  for (const std::int64_t queries : {1, 8}) {
    DecodeCase c = queries_for(f.cache.options(), 16, queries);
    expect_same(c, f.cache, {f.id}, "queries " + std::to_string(queries) + ": ",
                static_cast<int>(queries));
  }
}

TEST(DeviceDecode, ABatchOfDifferentLengths) {
  KvCacheOptions o = mixed();
  o.layers = 2;
  Result<KvCache> cache = KvCache::create(o);
  ASSERT_TRUE(cache.ok());
  std::vector<std::int64_t> ids;
  for (const std::int64_t length : {1, 16, 17, 144, 600, 1333}) {
    ids.push_back(*cache->add_sequence());
    append_rows(*cache, ids.back(), 0,
                normal_rows(length, o.heads_kv, o.d, o.dv, static_cast<unsigned>(length)));
  }
  DecodeCase c = queries_for(o, 4, 1, static_cast<std::int64_t>(ids.size()));
  expect_same(c, *cache, ids, "batch: ", -1);
}

/// So long that a block's share is more than one pass, the last with codes before rows.
TEST(DeviceDecode, SeveralPartsOfATable) {
  const Filled f = fill(uniform(2, 2, 1, 64), 70000);
  DecodeCase c = queries_for(f.cache.options(), 1, 1);
  expect_same(c, f.cache, {f.id}, "70000 tokens: ", -1);
}

/// Keys and values that drift and come back: both parts have pages of several sets.
TEST(DeviceDecode, SetsInSeveralPartsOfATable) {
  const KvCacheOptions o = uniform(2, 2, 1, 64);
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence();
  unsigned seed = 1;
  for (const auto& [count, shift] :
       {std::pair{400, 0.0f}, {400, 9.0f}, {32200, 0.0f}, {600, -9.0f}}) {
    test::KvRows rows = normal_rows(count, 1, 64, 64, seed++);
    for (std::size_t i = 0; i < rows.k.size(); ++i) {
      rows.k[i] += shift * std::cos(static_cast<float>(i % 64));
      rows.v[i] += shift * std::sin(static_cast<float>(i % 64));
    }
    append_rows(*cache, id, 0, rows);
  }
  EXPECT_EQ(cache->data().find(id)->layers[0].sets.count, 3);
  DecodeCase c = queries_for(o, 1, 1);
  expect_same(c, *cache, {id}, "drift: ", -1);
}

TEST(DeviceDecode, OptionsOfTheCache) {
  KvCacheOptions o = mixed(1);
  o.window = 128;
  test::expect_same_under_every_option(o, 800);
}

/// Values so small or so large that f16 alone could not hold P times their scale.
TEST(DeviceDecode, ValuesOfAnySize) {
  for (const float size : {1e-4f, 1.0f, 3000.0f}) {
    KvCacheOptions o = uniform(4, 4);
    Result<KvCache> cache = KvCache::create(o);
    const std::int64_t id = *cache->add_sequence();
    test::KvRows rows = normal_rows(300, 1, 128, 128, 1);
    for (float& v : rows.v) v *= size;
    append_rows(*cache, id, 0, rows);
    DecodeCase c = queries_for(o, 4, 1);
    expect_same(c, *cache, {id}, "size " + std::to_string(size) + ": ", 0);
  }
}

TEST(DeviceDecode, BadTokensSpoilExactlyTheRowsThatSeeThem) {
  int turn = 0;
  for (const Format format : {Format::f16, Format::bf16}) {
    for (const bool in_v : {false, true}) {
      for (const std::int64_t bad : {5, 200, 397}) {  // a sink, a quantised token, the window
        KvCacheOptions o = uniform(4, 4, 2);
        o.window_format = format;
        test::expect_spoilt_by(o, in_v, bad, bad == 200 || in_v, turn);
        turn += 2;
      }
    }
  }
}

TEST(DeviceDecode, RowsThatSeeNothing) {
  KvCacheOptions o = uniform(4, 4, 2);
  Result<KvCache> cache = KvCache::create(o);
  const std::int64_t id = *cache->add_sequence();
  append_rows(*cache, id, 0, normal_rows(100, 2, 128, 128, 1));
  ASSERT_TRUE(cache->evict(id, 0, -1, 0, 100).ok());
  DecodeCase c = queries_for(o, 2, 2);
  expect_same(c, *cache, {id}, "nothing: ", 0);
  for (const float x : c.out) ASSERT_EQ(x, 0.0f);
  c.sinks = {0.5f, -1, 2, 3};
  expect_same(c, *cache, {id}, "a sink: ", 1);
}

TEST(DeviceDecode, SixteenBitOperandsInEitherLayout) {
  const Filled f = fill(uniform(4, 4, 2), 200);
  MirroredCache mirror(f.cache, {f.id});
  const std::int64_t queries = 3, heads = 8, d = 128;
  const DecodeCase c = queries_for(f.cache.options(), heads / 2, queries);
  std::vector<std::uint16_t> q;
  for (const float x : c.q) q.push_back(formats::F16::encode(x));
  for (const Layout layout : {Layout::bshd, Layout::bhsd}) {
    const bool bshd = layout == Layout::bshd;
    // Rows of q are 8 elements apart, those of the output 4.
    const auto view = [&](std::vector<std::uint16_t>& memory, Format format, std::int64_t gap) {
      const std::int64_t outer = bshd ? queries : heads, inner = bshd ? heads : queries;
      memory.resize(static_cast<std::size_t>(outer * inner * (d + gap)), 0x7e01);
      TensorView v = TensorView::dense(memory.data(), format, {1, outer, inner, d});
      v.stride = {outer * inner * (d + gap), inner * (d + gap), d + gap, 1};
      return v;
    };
    std::vector<std::uint16_t> q_memory, want, got;
    KvDecodeTensors t;
    t.q = view(q_memory, Format::f16, 8);
    for (std::size_t i = 0; i < q.size(); ++i) q_memory[i / 128 * 136 + i % 128] = q[i];
    t.out = view(want, Format::f16, 4);
    KvDecodeOptions options;
    options.layout = layout;
    ASSERT_TRUE(decode(f.cache, 0, std::vector{f.id}, t, options).ok());
    DeviceCall device(c, mirror.view(), {0}, 13);
    t.out = view(got, Format::f16, 4);
    device.call().tensors = t;
    device.call().options = options;
    ASSERT_TRUE(device.run(timings[0]).ok());
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (i % 132 >= 128) {
        ASSERT_EQ(got[i], 0x7e01) << "something else was written";
        continue;
      }
      const double x = static_cast<double>(formats::F16::decode(want[i]));
      const double e = x - static_cast<double>(formats::F16::decode(got[i]));
      error += e * e;
      norm += x * x;
    }
    EXPECT_LE(std::sqrt(error / norm), tight);
  }
}

/// What the host cannot see: NaN and the error word, and the rest of the batch unharmed.
TEST(DeviceDecode, UnknownSlotsAndWildPages) {
  const Filled f = fill(uniform(4, 4), 300);
  DecodeCase c = queries_for(f.cache.options(), 4, 1, 2);
  DecodeCase alone = c;
  alone.q.resize(c.q.size() / 2);
  ASSERT_TRUE(alone.run(f.cache, {f.id}).ok());
  MirroredCache mirror(f.cache, {f.id});
  *isa::error_word() = 0;
  DeviceCall device(c, mirror.view(), {0, 5}, 19);
  ASSERT_TRUE(device.run(timings[0]).ok());
  EXPECT_NE(std::exchange(*isa::error_word(), 0u), 0u);
  const std::vector<float>& out = device.results().out;
  const std::size_t half = out.size() / 2;
  EXPECT_LE(nrmse({out.begin(), out.begin() + static_cast<std::ptrdiff_t>(half)}, alone.out),
            tight);
  for (std::size_t i = half; i < out.size(); ++i) ASSERT_TRUE(std::isnan(out[i]));
  const std::vector<float>& mass = device.results().mass;
  for (std::size_t i = mass.size() / 2; i < mass.size(); ++i) ASSERT_TRUE(std::isnan(mass[i]));

  mirror.entries()[3].page = 1 << 20;
  DeviceCall wild(alone, mirror.view(), {0}, 19);
  ASSERT_TRUE(wild.run(timings[0]).ok());
  EXPECT_NE(std::exchange(*isa::error_word(), 0u), 0u);
}

/// Blocks behind the last page get 0; those that the output lacks are left out. Tables with room
/// for much more have blocks of the grid without an entry, and parts without one.
TEST(DeviceDecode, MassOfOtherLengthsThanTheTables) {
  const Filled f = fill(uniform(4, 4, 2), 300);
  DecodeCase c = queries_for(f.cache.options(), 6, 2);
  ASSERT_TRUE(c.run(f.cache, {f.id}).ok());
  const std::int64_t own = 19;
  int turn = 0;
  for (const std::int64_t spare : {0, 600, 2100}) {
    MirroredCache mirror(f.cache, {f.id}, spare);
    for (const std::int64_t blocks : {12, 19, 26, 700}) {
      DeviceCall device(c, mirror.view(), {0}, blocks);
      ASSERT_TRUE(device.run(timings[turn++ % 3]).ok());
      const std::vector<float>& mass = device.results().mass;
      ASSERT_EQ(mass.size(), static_cast<std::size_t>(c.heads_q * blocks));
      for (std::int64_t i = 0; i < c.heads_q * blocks; ++i) {
        const std::int64_t head = i / blocks, n = i % blocks;
        const float want = n < own ? c.mass[static_cast<std::size_t>(head * own + n)] : 0.0f;
        ASSERT_NEAR(mass[static_cast<std::size_t>(i)], want, 1e-3)
            << "room for " << spare << " more, head " << head << " block " << n << " of " << blocks;
      }
    }
  }
}

/// A share that begins where a unit does: not a token before it, which would be a unit more.
TEST(DeviceDecode, SharesBeginWhereUnitsDo) {
  for (const std::uint64_t of_unit : {60ull, 8191ull * 200, 123456789ull}) {
    for (int blocks = 1; blocks <= 320; ++blocks) {
      kernels::DecodeParams p;
      p.share = kernels::share_of(blocks);
      for (int units = 1; units <= blocks; ++units) {
        if (blocks % units != 0) continue;
        const std::uint64_t total = of_unit * static_cast<std::uint64_t>(units);
        for (int unit = 0; unit < units; ++unit) {
          ASSERT_EQ(p.share_begin(total, blocks / units * unit),
                    of_unit * static_cast<std::uint64_t>(unit))
              << blocks << " blocks, unit " << unit << " of " << units;
        }
      }
    }
  }
}

TEST(DeviceDecode, RefusalsNameTheTensorTheValueAndTheRule) {
  const Filled f = fill(uniform(4, 4), 40);
  const DecodeCase c = queries_for(f.cache.options(), 4, 1);
  MirroredCache mirror(f.cache, {f.id});
  const auto refusal = [&](auto change) {
    DeviceCall device(c, mirror.view(), {0}, 3);
    change(device.call());
    return device.run(timings[0]).message();
  };
  using Call = kernels::DeviceDecodeCall;
  const auto expect = [&](auto change, const char* message) {
    EXPECT_NE(refusal(change).find(message), std::string::npos) << refusal(change);
  };
  expect([](Call& x) { x.layer = 1; }, "layer: 1 should be 0 to 0");
  expect([](Call& x) { x.tensors.q.shape[1] = 9; }, "q: 9 queries of a sequence, should be 1 to 8");
  expect([](Call& x) { x.tensors.q.shape[2] = 0; }, "q: 0 heads should be a multiple of");
  expect([](Call& x) { x.tensors.out.shape[3] = 64; },
         "out: extent 64 of dimension 3 should be 128");
  expect([](Call& x) { x.options.softcap = -1; }, "softcap: -1");
  expect([](Call& x) { x.options.softcap = 2, x.options.debias = true; },
         "debias: should be off with a softcap, here 2.0");
  expect([](Call& x) { x.slots.format = Format::f32; }, "slots: format should be s32");
  kv::DeviceCache odd = mirror.view();
  odd.d = 96;
  expect(
      [&](Call& x) {
        x.cache = &odd;
        x.tensors.q.shape[3] = 96;
      },
      "no GPU kernel for K of head dimension 96 and V of 128; there are 64/64 128/128 256/256");
  emu::options().architecture = 75;
  expect([](Call&) {}, "needs sm_80 or newer, not sm_75");
  emu::options().architecture = 90;
}

}  // namespace
}  // namespace qattn
