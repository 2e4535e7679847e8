// Formats with built-in scales, prepared by the emulated kernels, against the CPU's functions and
// quantize().
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "encode_check.hpp"
#include "encode_micro_case.hpp"
#include "isa/emu/options.hpp"

namespace qattn::encode_test {
namespace {

using kernels::KeyOrder;
using enum Granularity;

/// What a lane of a product of Q and K holds are neighbouring keys, if K lies so.
TEST(EncodeMicro, KeyOrderMakesALanesKeysNeighbours) {
  std::set<int> keys;
  for (int p = 0; p < 32; ++p) {
    EXPECT_EQ(kernels::fp4_position(kernels::fp4_key(p)), p);
    keys.insert(kernels::fp4_key(p));
  }
  EXPECT_EQ(keys.size(), 32u);
  EXPECT_EQ(*keys.begin(), 0);
  EXPECT_EQ(*keys.rbegin(), 31);
  for (int lane = 0; lane < 4; ++lane) {  // columns 2 t and 2 t + 1 of four products
    for (int i = 0; i < 8; ++i) {
      EXPECT_EQ(kernels::fp4_key(8 * (i / 2) + 2 * lane + i % 2), 8 * lane + i);
    }
  }
}

TEST(EncodeMicro, TilesOfOtherFormatsLieAsBefore) {
  for (const int channels : {64, 96, 128, 256}) {
    const kernels::TileOffsets o = kernels::tile_offsets(channels);
    const int codes = 64 * channels;
    EXPECT_EQ(o.extra, codes);
    EXPECT_EQ(o.log, codes + 512);
    EXPECT_EQ(o.inverse, codes + 768);
    EXPECT_EQ(o.flags, codes + 1024);
    EXPECT_EQ(o.bytes, codes + 1040);
  }
  const kernels::TileOffsets o = kernels::tile_offsets(128, 4, 16);
  EXPECT_EQ(o.extra, 128 * 32);
  EXPECT_EQ(o.scales, 136 * 32);
  EXPECT_EQ(o.log, 136 * 36);
}

/// One value that is not 0 in a row, and in a column.
TEST(EncodeMicro, LowerChannelsAndKeysAreLowerHalvesOfBytes) {
  for (const KeyOrder order : {KeyOrder::natural, KeyOrder::fp4}) {
    CaseOptions o;
    o.lengths = {64};
    o.recipe = micro_recipe(Format::nvfp4, Format::nvfp4);
    o.key_order = order;
    Case c(o);
    for (std::int64_t s = 0; s < 64; ++s) {
      for (int k = 0; k < 64; ++k) {
        c.put_value(Role::k, 0, 0, s, k, s == 12 && k == 21 ? 6.0f : 0.0f);
        c.put_value(Role::v, 0, 0, s, k, s == 12 && k == 21 ? -6.0f : 0.0f);
      }
    }
    ASSERT_EQ(c.prepare(), "");
    const int place = order == KeyOrder::fp4 ? 18 : 12;  // 12 = fp4_key(18)
    for (int i = 0; i < 64 * 32; ++i) {
      EXPECT_EQ(c.out.k.codes[i], i == 32 * place + 10 ? 0x70 : 0) << i;
    }
    for (int i = 0; i < 64 * 4; ++i) {
      EXPECT_EQ(c.out.k.group_scale[i], i == 4 * place + 1 ? 0x7e : 0) << i;
    }
    // Position 10 of a run of 16 holds key 12 beside K in the natural order.
    const int key = order == KeyOrder::fp4 ? 12 : 10;
    ASSERT_TRUE(order == KeyOrder::fp4 || kernels::p_key(key) == 12);
    for (int i = 0; i < 64 * 32; ++i) {
      EXPECT_EQ(c.out.v.tiles[i], i == 32 * 21 + key / 2 ? 0x0f : 0) << i;
    }
    const std::uint8_t* scales = c.out.v.tiles + kernels::tile_offsets(64, 4, 16).scales;
    for (int i = 0; i < 64 * 4; ++i) EXPECT_EQ(scales[i], i == 4 * 21 ? 0x7e : 0) << i;
  }
}

TEST(EncodeMicro, StoragesSizesAndFormats) {
  for (unsigned i = 0; i < 45; ++i) {
    SCOPED_TRACE(i);
    Case c(micro_case(i));
    for (const Role r : every_role) EXPECT_FALSE(c.is_plain(r));
    check_micro(c);
    if (HasFailure()) return;
  }
}

/// Case `number` with means, a rotation and balance in turns, which `i` counts.
CaseOptions transformed_case(unsigned number, unsigned i) {
  CaseOptions o = micro_case(number);
  o.recipe.smooth_k = i % 3 ? Toggle::on : Toggle::off;
  o.recipe.smooth_q = i % 4 == 1 ? Toggle::on : Toggle::off;
  o.recipe.smooth_v = i % 5 == 2 ? Toggle::on : Toggle::off;
  o.recipe.rotate = i % 2 ? Toggle::on : Toggle::off;
  o.recipe.balance_k = i % 4 > 1 ? Toggle::on : Toggle::off;
  o.dot_mean = i % 3 == 1;
  return o;
}

TEST(EncodeMicro, MeansRotationAndBalance) {
  for (unsigned i = 0; i < 45; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = transformed_case(i * 7 + i / 5, i);
    Case c(o);
    for (std::int64_t b = 0; b < c.batch() && i % 2; ++b) {
      for (std::int64_t s = 0; s < c.length(b); ++s) {  // loud channels
        for (const int channel : {3, 20}) {
          c.put_value(Role::k, b, 0, s, channel, 60 * c.value(Role::k, b, 0, s, channel));
        }
      }
    }
    check_micro(c);
    if (HasFailure()) return;
  }
}

/// Rows that end inside a group, and inside a piece of eight channels.
TEST(EncodeMicro, RowsOfAnyLength) {
  constexpr int sizes[] = {1, 3, 20, 36, 65, 100, 250};
  for (unsigned i = 0; i < 28; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = transformed_case(i, i);
    o.d = sizes[i % 7], o.dv = sizes[(i / 7 + i + 1) % 7];
    Case c(o);
    check_micro(c);
    if (HasFailure()) return;
  }
}

TEST(EncodeMicro, GivenMeans) {
  for (unsigned i = 0; i < 9; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = micro_case(i);
    o.recipe.smooth_k = Toggle::on;
    o.dot_mean = true;
    Case c(o);
    std::vector<float> mean;
    const std::int64_t count = c.batch() * c.heads(Role::k) * o.d;
    for (std::int64_t n = 0; n < count; ++n) mean.push_back(0.4f + 0.01f * (n % 23));
    c.tensors.k_mean =
        TensorView::dense(mean.data(), Format::f32, {c.batch(), c.heads(Role::k), o.d});
    check_micro(c);
    if (HasFailure()) return;
  }
}

/// In nvfp4 a bad token of Q or K is its head's second level, so that all are bad.
TEST(EncodeMicro, NanAndInf) {
  for (unsigned i = 0; i < 30; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = micro_case(i * 2 + i / 4);
    o.recipe.smooth_v = i % 7 == 6 ? Toggle::on : Toggle::off;
    if (i % 2) o.bad[0] = {3, 62, 64};
    if (i % 3) o.bad[1] = {0, 126};
    o.bad[2] = {1, 2, 63, 100};
    if (i % 5 == 4) {  // a whole group, and more than one
      for (std::int64_t s = 16; s < 70; ++s) o.bad[2].push_back(s);
    }
    Case c(o);
    check_micro(c);
    if (HasFailure()) return;
  }
}

/// Zeros, numbers whose scales are the smallest that there are, and the largest numbers.
TEST(EncodeMicro, SmallAndLargeNumbers) {
  for (unsigned i = 0; i < 24; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = micro_case(i);
    o.input = i % 2 ? Format::f32 : Format::bf16;
    Case c(o);
    const int least = i / 2 % 3 == 0 ? -149 : i / 2 % 3 == 1 ? -40 : 100;
    for (const Role r : every_role) {
      for (std::int64_t b = 0; b < c.batch(); ++b) {
        for (int h = 0; h < c.heads(r); ++h) {
          for (std::int64_t s = 0; s < c.length(b); ++s) {
            for (int k = 0; k < c.channels(r); ++k) {
              const auto power = static_cast<int>(least + (s / 16 + k / 16 * 5) % 24);
              const float x = c.value(r, b, h, s, k);
              c.put_value(r, b, h, s, k, s % 32 == 31 ? 0.0f : std::ldexp(x, power));
            }
          }
        }
      }
    }
    check_micro(c);
    if (HasFailure()) return;
  }
}

/// V in other formats, or as it is, beside Q and K in these.
TEST(EncodeMicro, OfQueriesAndKeysAlone) {
  constexpr Format formats[] = {Format::e4m3, Format::s8, Format::bf16};
  for (unsigned i = 0; i < 18; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = micro_case(i);
    o.recipe = micro_recipe(micro_formats[i / 3 % 3], formats[i % 3]);
    o.recipe.smooth_k = i % 2 ? Toggle::on : Toggle::off;
    Case c(o);
    check_micro(c);
    if (i % 3 < 2) check_tiles(c);
    if (HasFailure()) return;
  }
}

/// And V in these beside others.
TEST(EncodeMicro, OfValuesAlone) {
  for (unsigned i = 0; i < 9; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = micro_case(i);
    o.recipe = micro_recipe(i % 2 ? Format::s8 : Format::e4m3, micro_formats[i % 3]);
    Case c(o);
    check_micro(c);
    check_rows(c, Role::q);
    check_rows(c, Role::k);
    if (HasFailure()) return;
  }
}

/// The public function on a sequence's tokens.
TEST(EncodeMicro, AreWhatQuantizeMakes) {
  for (unsigned i = 0; i < 27; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = micro_case(i);
    o.used = true;
    o.d = o.dv = micro_dims[i / 3 % 5];
    o.recipe.smooth_k = o.recipe.smooth_v = i % 2 ? Toggle::on : Toggle::off;
    o.recipe.smooth_q = i % 4 == 3 ? Toggle::on : Toggle::off;
    o.recipe.rotate = i % 3 == 1 ? Toggle::on : Toggle::off;
    const Case c(o);
    for (const Role r : every_role) {
      const MicroMade made = make_micro(c, r, 0, 0);
      std::vector<float> x;
      for (std::int64_t s = 0; s < c.length(0); ++s) {
        for (int k = 0; k < o.d; ++k) x.push_back(c.value(r, 0, 0, s, k));
      }
      QuantizeOptions q;
      q.format = c.format(r), q.role = r;
      q.scaling = r == Role::q ? o.recipe.q_scale : Scaling{};
      q.smooth = !made.mean.empty();
      q.rotate = r != Role::v && o.recipe.rotate == Toggle::on;
      QuantizeTensors t;
      t.x = TensorView::dense(x.data(), Format::f32, {1, c.length(0), 1, o.d});
      const Result<QuantizeShapes> shapes = quantize_shapes(t.x, q);
      ASSERT_TRUE(shapes.ok()) << shapes.status().message();
      std::vector<std::uint8_t> codes(x.size()), scales(made.scales.size());
      std::vector<float> mean(made.mean.size() + 1);
      float global = 1.0f;
      t.codes = shapes->codes, t.codes.data = codes.data();
      t.scale = shapes->scale, t.scale.data = scales.data();
      t.global = shapes->global, t.mean = shapes->mean;
      if (q.format == Format::nvfp4) t.global.data = &global;
      if (q.smooth) t.mean.data = mean.data();
      const auto report = quantize(t, q);
      ASSERT_TRUE(report.ok()) << report.status().message();
      EXPECT_EQ(global, made.global);
      EXPECT_EQ(scales, made.scales);
      for (std::size_t n = 0; n < x.size(); ++n) {
        const auto at = static_cast<int>(n);
        ASSERT_EQ(code_at(codes.data(), at, info(q.format).bits), made.codes[n]) << n;
      }
    }
  }
}

/// What the kernels make of two contents of hidden tokens, and of the rest.
TEST(EncodeMicro, HiddenKeysLeaveNoTrace) {
  unsigned i = 0;
  for (const Hiding& hiding : hidings) {
    for (int n = 0; n < 2; ++n, ++i) {
      SCOPED_TRACE(hiding.name + " " + std::to_string(i));
      CaseOptions o = micro_case(i * 2 + n);
      o.used = true;
      o.heads_q = 4, o.heads_kv = 2;
      o.lengths = {200, 7, 130};
      o.recipe.smooth_k = i % 3 ? Toggle::on : Toggle::off;
      o.recipe.smooth_v = i % 4 == 1 ? Toggle::on : Toggle::off;
      o.recipe.rotate = i % 4 == 2 ? Toggle::on : Toggle::off;
      o.recipe.balance_k = i % 3 == 1 ? Toggle::on : Toggle::off;
      o.bad[2] = {20, 100};  // some of them hidden
      Hidden x(o, hiding);
      x.fill(0.0f);
      ASSERT_EQ(x.c.prepare(), "");
      ASSERT_NE(x.c.layout.seen, kernels::PrepareLayout::none);
      const std::vector<std::uint8_t> clean(x.c.workspace().begin(), x.c.workspace().end());
      for (const float value : {std::numeric_limits<float>::quiet_NaN(), -infinity, 3.0f}) {
        x.fill(value);
        ASSERT_EQ(x.c.prepare(), "");
        EXPECT_TRUE(std::equal(clean.begin(), clean.end(), x.c.workspace().begin()))
            << "changes with " << value;
      }
      if (hiding.queries == 0) check_micro_rows(x.c, Role::q, &x);
      check_micro_rows(x.c, Role::k, &x);
      check_micro_values(x.c, &x);
      if (HasFailure()) return;
    }
  }
}

/// Tokens under biases that leave them no weight have codes, but no part in what others share.
TEST(EncodeMicro, FaintTokensAreKeptToTheOthersSizes) {
  for (unsigned i = 0; i < 6; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = micro_case(i);
    o.used = true;
    o.lengths = {200, 7, 130};
    o.heads_q = 4, o.heads_kv = 2;
    Hidden x(o, hidings[2]);
    ASSERT_EQ(x.seen(0, 0, 17), Seen::faintly);
    x.each([&](std::int64_t b, int h, std::int64_t s) {
      if (x.seen(b, h, s) != Seen::faintly) return;
      for (const Role r : {Role::k, Role::v}) {
        for (int k = 0; k < x.c.channels(r); ++k) x.c.put_value(r, b, h, s, k, k % 2 ? 500 : -3);
      }
    });
    x.c.put_value(Role::k, 0, 0, 17, 5, infinity);
    x.c.put_value(Role::v, 0, 0, 17, 5, infinity);
    ASSERT_EQ(x.c.prepare(), "");
    check_micro_rows(x.c, Role::k, &x);
    check_micro_values(x.c, &x);
    if (HasFailure()) return;
  }
}

TEST(EncodeMicro, SchedulesAndLaneOrdersGiveTheSameBits) {
  const emu::Options before = emu::options();
  for (const auto schedule : {emu::Schedule::early, emu::Schedule::late, emu::Schedule::random}) {
    for (const auto order :
         {emu::LaneOrder::forward, emu::LaneOrder::reverse, emu::LaneOrder::random}) {
      emu::options().schedule = schedule;
      emu::options().order = order;
      for (unsigned i = 0; i < 4; ++i) {
        SCOPED_TRACE(i);
        CaseOptions o = micro_case(i * 5 + 1);
        o.recipe.smooth_k = Toggle::on;
        o.dot_mean = true;
        Case c(o);
        check_micro(c);
      }
    }
  }
  emu::options() = before;
}

/// Attention kernels load, and forget, what lies in the 64 slots behind a sequence's last tile.
TEST(EncodeMicro, SlotsWithoutTokensHaveScalesAndTables) {
  for (const Format f : micro_formats) {
    CaseOptions o = micro_case(0);
    o.lengths = {1, 200, 64};
    o.used = true;
    o.recipe = micro_recipe(f, f);
    Case c(o);
    ASSERT_EQ(c.prepare(), "");
    const kernels::TileOffsets at =
        kernels::tile_offsets(c.out.v.channels, c.out.v.bits, c.out.v.group);
    const std::int64_t tiles = c.out.k.slots / 64, each = tiles / 3;
    for (std::int64_t tile = 0; tile <= o.heads_kv * tiles; ++tile) {
      const std::int64_t in = tile % tiles;
      if (tile < o.heads_kv * tiles && in % each * 64 < c.length(in / each)) continue;
      const std::uint8_t* record = c.out.v.tiles + tile * at.bytes;
      for (int i = 0; i < 64; ++i) EXPECT_EQ(c.out.k.scale[tile * 64 + i], 0.0f) << tile;
      for (int i = at.extra; i < at.bytes; ++i) EXPECT_EQ(record[i], 0) << tile;
    }
  }
}

TEST(EncodeMicro, APageThatDoesNotExistSpoilsItsTokensOnly) {
  CaseOptions o = micro_case(2);
  ASSERT_EQ(o.storage, Storage::paged);
  o.lengths = {129, 65};
  o.page_size = 16;
  o.recipe = micro_recipe(Format::mxfp8, Format::nvfp4);
  Case c(o);
  c.page_table()[1] = -1;  // tokens 16 to 31 of the first sequence
  ASSERT_EQ(c.prepare(), "");
  const kernels::TileOffsets at = kernels::tile_offsets(c.out.v.channels, 4, 16);
  for (std::int64_t s = 0; s < 129; ++s) {
    const bool bad = s >= 16 && s < 32;
    EXPECT_EQ(std::isnan(c.out.k.scale[s]), bad) << s;
    float mark;
    std::memcpy(&mark, c.out.v.tiles + s / 64 * at.bytes + at.inverse + 4 * (s % 64), sizeof mark);
    EXPECT_EQ(std::isnan(mark), bad) << s;
  }
}

}  // namespace
}  // namespace qattn::encode_test
