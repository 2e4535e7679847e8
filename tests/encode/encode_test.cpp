// The encode kernels, emulated, against quantize() and the text of prepared.hpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "encode_check.hpp"
#include "isa/emu/options.hpp"

namespace qattn::encode_test {
namespace {

using enum Granularity;

Recipe recipe_of(Format qk, Format v, Scaling q_scale, Scaling k_scale, Scaling v_scale) {
  Recipe r;
  r.name = "test";
  r.qk = qk;
  r.p = v == Format::s8 ? Format::u8 : Format::e4m3;
  r.v = v;
  r.q_scale = q_scale;
  r.k_scale = k_scale;
  r.v_scale = v_scale;
  r.smooth_k = r.smooth_q = r.smooth_v = r.rotate = Toggle::off;
  return r;
}
Recipe default_recipe() {
  Recipe r = recipe_of(Format::s8, Format::s8, {per_token, 128, 16}, {per_block, 64, 16},
                       {per_token, 128, 16});
  r.smooth_k = Toggle::on;
  return r;
}

constexpr int dims[] = {64, 80, 96, 104, 128, 256};
constexpr std::int64_t lengths[] = {1, 63, 64, 65, 127, 129, 300};
constexpr Storage storages[] = {Storage::dense, Storage::packed, Storage::paged, Storage::strided,
                                Storage::unaligned};
constexpr Format inputs[] = {Format::bf16, Format::f16, Format::f32};

/// Storage, layout, dimensions and lengths from a number, so that a list of cases covers them.
CaseOptions shaped(unsigned i) {
  CaseOptions o;
  o.storage = storages[i % 5];
  o.layout = i / 5 % 2 ? Layout::bhsd : Layout::bshd;
  o.d = dims[i % 6];
  o.dv = dims[i / 3 % 6];
  o.input = inputs[i % 3];
  o.lengths = {lengths[i % 7], lengths[(i + 3) % 7]};
  if (i % 3 == 0) o.lengths.push_back(0);
  // Lengths that differ need cu_seqlens or seqused, or both.
  o.used = o.storage == Storage::packed ? i % 2 == 1 : true;
  if (o.storage != Storage::packed && o.storage != Storage::paged && i % 4 == 1) {
    o.used = false;
    o.lengths = {lengths[i % 7], lengths[i % 7]};
  }
  o.heads_q = 2;
  o.heads_kv = i % 2 ? 2 : 1;
  o.page_size = i % 2 ? 16 : 24;
  o.seed = i + 1;
  return o;
}

TEST(Encode, PlainPathOverStoragesAndSizes) {
  for (unsigned i = 0; i < 42; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i);
    if (o.input == Format::f32) o.input = Format::bf16;
    if (o.storage == Storage::unaligned) o.storage = Storage::dense;
    o.recipe = default_recipe();
    if (i % 3 == 1) o.recipe.k_scale.granularity = per_token;
    if (i % 3 == 2) o.recipe.k_scale = {per_thread, 64, 16};
    if (i % 4 > 1) o.recipe.v_scale = {per_thread, 64, 16};
    if (i % 5 == 0) o.recipe.qk = Format::e4m3;
    o.dot_mean = i % 3 == 1;
    check_case(o);
    if (HasFailure()) return;
  }
}

/// What the Hopper kernels ask for, with V in e4m3, in 16 bits of any storage that is aligned, with
/// grouped heads.
CaseOptions floating(unsigned i) {
  CaseOptions o = shaped(i);
  if (o.input == Format::f32) o.input = i % 2 ? Format::f16 : Format::bf16;
  if (o.storage == Storage::unaligned) o.storage = Storage::dense;
  o.recipe = recipe_of(i % 2 ? Format::s8 : Format::e4m3, Format::e4m3, {per_token, 128, 16},
                       {per_thread, 64, 16}, {per_channel, 128, 16});
  o.recipe.smooth_k = i % 4 ? Toggle::on : Toggle::off;
  o.heads_kv = 1 << i % 3;
  o.heads_q = o.heads_kv * (1 + static_cast<int>(i % 2));
  o.dot_mean = o.recipe.smooth_k == Toggle::on && i % 3 == 1;
  return o;
}

TEST(Encode, FloatingValuesTakeThePlainPath) {
  for (unsigned i = 0; i < 42; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = floating(i);
    for (const Role r : {Role::q, Role::k, Role::v}) EXPECT_TRUE(Case(o).is_plain(r)) << name(r);
    check_case(o);
    if (HasFailure()) return;
  }
}

TEST(Encode, FloatingValuesWithNanAndInf) {
  for (unsigned i = 0; i < 14; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = floating(i);
    o.recipe.smooth_k = Toggle::off;
    o.dot_mean = false;
    o.bad[0] = {3, 62, 64};
    o.bad[1] = {0, 126};
    o.bad[2] = {1, 2, 63, 64, 100};
    check_case(o);
    if (HasFailure()) return;
  }
}

/// Every granularity of Q, K and V with every format, over the shapes.
TEST(Encode, GranularitiesAndFormats) {
  const Scaling q_scales[] = {{per_tensor, 128, 16}, {per_head, 128, 16},    {per_block, 64, 16},
                              {per_block, 24, 8},    {per_block, 128, 16},   {per_warp, 64, 16},
                              {per_warp, 96, 24},    {per_thread, 64, 16},   {per_thread, 96, 48},
                              {per_token, 128, 16},  {per_thread, 128, 128}, {per_block, 8, 8}};
  const Scaling k_scales[] = {{per_tensor, 128, 16}, {per_head, 128, 16},   {per_block, 32, 16},
                              {per_block, 40, 8},    {per_block, 128, 16},  {per_thread, 64, 16},
                              {per_thread, 24, 8},   {per_thread, 128, 16}, {per_token, 128, 16}};
  const Scaling v_scales[] = {{per_tensor, 128, 16},        {per_head, 128, 16},
                              {per_channel, 128, 16},       {per_block_channel, 64, 16},
                              {per_block_channel, 8, 16},   {per_block_channel, 24, 16},
                              {per_block_channel, 128, 16}, {per_token, 128, 16}};
  constexpr Format formats[] = {Format::s8, Format::e4m3, Format::e5m2, Format::e4m3fnuz};
  for (unsigned i = 0; i < 72; ++i) {  // every scaling, format and pair of them with a shape
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i * 11 + i / 30);
    o.recipe = recipe_of(formats[i % 4], formats[i / 2 % 4], q_scales[i % 12], k_scales[i % 9],
                         v_scales[i % 8]);
    o.recipe.smooth_k = i % 3 ? Toggle::on : Toggle::off;
    o.recipe.smooth_v = i % 5 == 0 ? Toggle::on : Toggle::off;
    o.recipe.rotate = i % 2 ? Toggle::on : Toggle::off;
    o.dot_mean = i % 3 == 1;
    check_case(o);
    if (HasFailure()) return;
  }
}

/// Q less the mean of its blocks, whose size is that of the scales' blocks.
TEST(Encode, MeansOfQueryBlocks) {
  const Scaling scalings[] = {{per_token, 128, 16}, {per_block, 64, 16}, {per_token, 24, 8},
                              {per_warp, 96, 24},   {per_block, 8, 8},   {per_thread, 128, 32},
                              {per_head, 512, 16}};
  for (unsigned i = 0; i < 42; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i * 5 + i / 7);
    o.recipe = default_recipe();
    o.recipe.q_scale = scalings[i % 7];
    o.recipe.smooth_q = Toggle::on;
    o.recipe.smooth_k = i % 3 ? Toggle::on : Toggle::off;
    o.recipe.rotate = i % 4 == 1 ? Toggle::on : Toggle::off;
    o.dot_mean = i % 3 == 1;
    if (i % 7 == 5) o.lengths[0] = 2300;  // more pieces of 64 rows than a block adds up at once
    if (i % 7 == 5 && !o.used && o.storage != Storage::packed) o.lengths[1] = o.lengths[0];
    if (i % 7 == 5) o.recipe.q_scale.block = 2048;
    check_case(o);
    if (HasFailure()) return;
  }
}

TEST(Encode, ABadQuerySpoilsItsBlockWithSmoothing) {
  for (const std::int64_t bad : {3, 65, 127}) {
    CaseOptions o = shaped(0);
    o.lengths = {300, 300};
    o.used = false;
    o.recipe = default_recipe();
    o.recipe.q_scale = {per_token, 64, 16};
    o.recipe.smooth_q = Toggle::on;
    o.bad[0] = {bad};
    Case c(o);
    ASSERT_EQ(c.prepare(), "");
    for (std::int64_t s = 0; s < 300; ++s) {
      EXPECT_EQ(std::isnan(c.out.q.scale[s]), s / 64 == bad / 64) << bad << " " << s;
    }
  }
}

TEST(Encode, SchedulesAndLaneOrdersGiveTheSameBits) {
  const emu::Options before = emu::options();
  for (const auto schedule : {emu::Schedule::early, emu::Schedule::late, emu::Schedule::random}) {
    for (const auto order :
         {emu::LaneOrder::forward, emu::LaneOrder::reverse, emu::LaneOrder::random}) {
      emu::options().schedule = schedule;
      emu::options().order = order;
      for (unsigned i = 0; i < 10; ++i) {
        SCOPED_TRACE(i);
        CaseOptions o = i < 6 ? shaped(i * 3) : floating(i * 3);
        if (i < 6) o.recipe = default_recipe();
        if (i < 6 && i % 2) {
          o.recipe.v_scale = {per_block_channel, 24, 16};
          o.recipe.k_scale = {per_thread, 128, 16};
        }
        check_case(o);
      }
    }
  }
  emu::options() = before;
}

TEST(Encode, NanAndInfStayInTheirGroups) {
  for (unsigned i = 0; i < 30; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i);
    o.recipe = default_recipe();
    o.recipe.smooth_k = i % 4 == 3 ? Toggle::on : Toggle::off;
    if (i % 3 == 1) o.recipe.q_scale = {per_thread, 64, 32};
    if (i % 3 == 1) o.recipe.v_scale = {per_block_channel, 8, 16};
    if (i % 3 == 2) o.recipe.k_scale = {per_block, 128, 16};
    if (i % 3 == 2) o.recipe.v_scale = {per_channel, 128, 16};
    if (i % 6 == 3) o.recipe.v_scale = {per_head, 128, 16};
    if (i % 6 == 0) o.recipe.v_scale = {per_tensor, 128, 16};
    if (i % 5 == 4) o.recipe.v = Format::e4m3, o.recipe.p = Format::e4m3;
    o.recipe.rotate = i % 2 ? Toggle::on : Toggle::off;
    o.bad[0] = {3, 62, 64};
    o.bad[1] = {0, 126};
    o.bad[2] = {1, 2, 63, 100};
    check_case(o);
    if (HasFailure()) return;
  }
}

std::int64_t clipped(const Case& c, Role r, Format f) {
  std::int64_t count = 0;
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.heads(r); ++h) {
      for (std::int64_t s = 0; s < c.length(b); ++s) {
        if (c.is_spoiled(r, b, s)) continue;
        for (int k = 0; k < c.channels(r); ++k) {
          const float y = c.value(r, b, h, s, k) * (1.0f / c.given_scale(r, b, h, s, k));
          count += f == Format::s8 ? std::nearbyint(std::abs(y)) > 127 : std::abs(y) > 448 + 16;
        }
      }
    }
  }
  return count;
}

TEST(Encode, GivenScalesAndTheirClippedCodes) {
  const Scaling q_scales[] = {{per_token, 128, 16},
                              {per_block, 24, 16},
                              {per_thread, 64, 32},
                              {per_head, 128, 16},
                              {per_tensor, 128, 16}};
  const Scaling k_scales[] = {
      {per_token, 128, 16}, {per_block, 128, 16}, {per_thread, 64, 16}, {per_tensor, 128, 16}};
  const Scaling v_scales[] = {{per_token, 128, 16},  {per_channel, 128, 16},
                              {per_head, 128, 16},   {per_block_channel, 24, 16},
                              {per_tensor, 128, 16}, {per_block_channel, 16, 16}};
  std::int64_t all = 0;
  for (unsigned i = 0; i < 40; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i);
    const Format f = i % 3 ? Format::s8 : Format::e4m3;
    o.recipe = recipe_of(f, f, q_scales[i % 5], k_scales[i % 4], v_scales[i / 2 % 6]);
    for (bool& given : o.given_scales) given = true;
    o.saturated = i % 4 != 0;
    o.ties = i % 5 == 2;
    if (i % 2) o.bad = {std::vector<std::int64_t>{5}, {9, 64}, {0, 63}};
    Case c(o);
    ASSERT_EQ(c.prepare(), "");
    check_rows(c, Role::q);
    check_rows(c, Role::k);
    check_tiles(c);
    for (const Role r : {Role::q, Role::k, Role::v}) {
      const std::int64_t want = o.saturated ? clipped(c, r, f) : -1;
      EXPECT_EQ(c.saturated[static_cast<std::size_t>(r)], want) << name(r);
      all += want;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(all, 1000);
}

TEST(Encode, GivenCodes) {
  const Scaling v_scales[] = {{per_token, 128, 16},
                              {per_channel, 128, 16},
                              {per_head, 128, 16},
                              {per_block_channel, 24, 16}};
  constexpr Format formats[] = {Format::s8, Format::e4m3, Format::e5m2, Format::e4m3fnuz};
  for (unsigned i = 0; i < 40; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i);
    o.recipe = recipe_of(formats[i % 4], formats[i % 4], {per_token, 128, 16},
                         {i % 2 ? per_block : per_token, 24, 16}, v_scales[i / 2 % 4]);
    for (bool& given : o.given_codes) given = true;
    if (i % 3 == 1) o.given_codes[0] = false;
    if (i % 3 == 1 && o.input == Format::f32) o.input = Format::f16;
    check_case(o);
    if (HasFailure()) return;
  }
}

/// Rows that are no whole pieces of eight channels: nothing behind their ends is read, and zeros
/// fill the codes.
TEST(Encode, RowsOfAnyLength) {
  constexpr int sizes[] = {1, 3, 20, 36, 65, 100, 250};
  const Scaling q_scales[] = {{per_token, 128, 16}, {per_block, 64, 16}, {per_thread, 64, 16}};
  const Scaling k_scales[] = {{per_block, 64, 16}, {per_thread, 64, 16}, {per_tensor, 128, 16}};
  const Scaling v_scales[] = {{per_token, 128, 16}, {per_channel, 128, 16}, {per_thread, 64, 16}};
  for (unsigned i = 0; i < 42; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i);
    o.d = sizes[i % 7], o.dv = sizes[(i / 7 + i) % 7];
    const Format v = i % 3 == 1 ? Format::e4m3 : Format::s8;
    o.recipe = recipe_of(i % 4 ? Format::s8 : Format::e4m3, v, q_scales[i % 3], k_scales[i / 2 % 3],
                         v_scales[i % 3]);
    o.recipe.smooth_k = i % 5 ? Toggle::on : Toggle::off;
    o.recipe.smooth_q = i % 6 == 2 ? Toggle::on : Toggle::off;
    o.recipe.smooth_v = i % 4 == 3 ? Toggle::on : Toggle::off;
    o.recipe.rotate = i % 3 == 2 ? Toggle::on : Toggle::off;
    o.dot_mean = i % 3 == 1 && i % 5 > 0;
    if (i % 7 == 6) {
      o.given_codes[1] = o.given_codes[2] = true, o.dot_mean = false;
      o.recipe.smooth_k = o.recipe.smooth_q = o.recipe.smooth_v = o.recipe.rotate = Toggle::off;
    } else if (i % 5 == 1) {
      o.bad = {std::vector<std::int64_t>{5}, {9, 64}, {0, 63}};
      o.recipe.smooth_v = Toggle::off;
    }
    for (const Role r : {Role::q, Role::k, Role::v}) {
      EXPECT_EQ(Case(o).is_plain(r) && Case(o).channels(r) % 8 != 0, false);
    }
    check_case(o);
    if (HasFailure()) return;
  }
}

/// Attention kernels load, and forget, what lies in the 64 slots behind a sequence's last tile.
TEST(Encode, SlotsWithoutTokensHaveScalesAndTables) {
  for (const bool plain : {true, false}) {
    CaseOptions o = shaped(0);
    o.storage = Storage::dense;
    o.input = plain ? Format::bf16 : Format::f32;
    o.lengths = {1, 300, 64};
    o.used = true;
    o.recipe = default_recipe();
    Case c(o);
    ASSERT_EQ(c.is_plain(Role::v), plain);
    ASSERT_EQ(c.prepare(), "");
    const kernels::TileOffsets at = kernels::tile_offsets(c.out.v.channels);
    const std::int64_t tiles = c.out.k.slots / 64, each = tiles / 3;
    for (std::int64_t tile = 0; tile <= o.heads_kv * tiles; ++tile) {
      const std::int64_t in = tile % tiles;
      if (tile < o.heads_kv * tiles && in % each * 64 < c.length(in / each)) continue;
      const std::uint8_t* record = c.out.v.tiles + tile * at.bytes;
      for (int i = 0; i < 64; ++i) EXPECT_EQ(c.out.k.scale[tile * 64 + i], 0.0f) << tile;
      for (int i = c.out.v.channels * 64; i < at.bytes; ++i) EXPECT_EQ(record[i], 0) << tile;
    }
  }
}

TEST(Encode, APageThatDoesNotExistSpoilsItsTokensOnly) {
  for (const bool plain : {true, false}) {
    CaseOptions o = shaped(2);
    ASSERT_EQ(o.storage, Storage::paged);
    o.input = plain ? Format::bf16 : Format::f32;
    o.lengths = {129, 65};
    o.page_size = 16;
    o.recipe = default_recipe();
    o.recipe.smooth_k = Toggle::off;
    o.recipe.k_scale.granularity = per_token;
    Case c(o);
    const std::int32_t kept[2] = {c.page_table()[1], c.page_table()[3]};
    c.page_table()[1] = -1;       // tokens 16 to 31 of the first sequence
    c.page_table()[3] = 1 << 30;  // 48 to 63
    ASSERT_EQ(c.prepare(), "");
    const kernels::TileOffsets at = kernels::tile_offsets(kernels::prepared_channels(o.dv));
    for (std::int64_t s = 0; s < 129; ++s) {
      const bool bad = (s >= 16 && s < 32) || (s >= 48 && s < 64);
      EXPECT_EQ(std::isnan(c.out.k.scale[s]), bad) << s;
      const std::uint8_t* record = c.out.v.tiles + s / 64 * at.bytes;
      float mark;
      std::memcpy(&mark, record + at.inverse + 4 * (s % 64), sizeof mark);
      EXPECT_EQ(std::isnan(mark), bad) << s;
    }
    EXPECT_EQ(c.out.k.flags[0], 1u);
    EXPECT_EQ(c.out.k.flags[1], 0u);
    c.page_table()[1] = kept[0];
    c.page_table()[3] = kept[1];
    check_rows(c, Role::q);
  }
}

TEST(Encode, AWrongEntryOfCuSeqlensSpoilsItsSequencesOnly) {
  for (const std::int32_t wrong : {-5, 1 << 30, 70}) {
    CaseOptions o = shaped(1);
    ASSERT_EQ(o.storage, Storage::packed);
    o.used = false;
    o.lengths = {64, 65, 0, 129, 33};
    o.recipe = default_recipe();
    Case c(o);
    c.cu_seqlens()[2] = wrong;  // the end of sequence 1 and the begin of sequence 2
    ASSERT_EQ(c.prepare(), "");
    c.cu_seqlens()[2] = 129;
    Case right(o);
    ASSERT_EQ(right.prepare(), "");
    for (const std::int64_t b : {0, 3, 4}) {
      const std::int64_t slot = c.first_slot(Role::k, b), count = (c.length(b) + 63) / 64 * 64;
      const int bytes = c.out.k.row_bytes;
      EXPECT_EQ(0, std::memcmp(c.out.k.codes + slot * bytes, right.out.k.codes + slot * bytes,
                               static_cast<std::size_t>(count * bytes)))
          << wrong << " " << b;
      EXPECT_EQ(0, std::memcmp(c.out.k.scale + slot, right.out.k.scale + slot,
                               static_cast<std::size_t>(count * 4)));
    }
  }
}

}  // namespace
}  // namespace qattn::encode_test
