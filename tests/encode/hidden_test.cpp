// Keys that no row sees, in the emulated encode kernels: which they are, that nothing of what is
// prepared changes with them, and that the rest is what the CPU's functions make of the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "encode_check.hpp"
#include "formats/scale.hpp"
#include "hidden_case.hpp"
#include "kernels/cpu/words.hpp"
#include "kernels/operand/rows.hpp"
#include "kernels/operand/scale_groups.hpp"

namespace qattn::encode_test {
namespace {

using enum Granularity;

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

Recipe recipe_of(Format qk, Format v, Scaling k_scale, Scaling v_scale) {
  Recipe r;
  r.name = "test";
  r.qk = qk, r.v = v;
  r.p = v == Format::s8 ? Format::u8 : Format::e4m3;
  r.q_scale = {per_token, 128, 16}, r.k_scale = k_scale, r.v_scale = v_scale;
  r.smooth_q = r.smooth_v = r.rotate = Toggle::off;
  r.smooth_k = Toggle::on;
  return r;
}

CaseOptions shaped(unsigned i) {
  constexpr Storage storages[] = {Storage::dense, Storage::packed, Storage::paged, Storage::strided,
                                  Storage::unaligned};
  CaseOptions o;
  o.storage = storages[i % 5];
  o.layout = i % 2 ? Layout::bhsd : Layout::bshd;
  o.input = i % 3 == 0 ? Format::bf16 : i % 3 == 1 ? Format::f16 : Format::f32;
  o.used = true;
  o.heads_q = 4, o.heads_kv = 2;
  o.lengths = {200, 7, 130};
  o.d = i % 4 ? 64 : 96, o.dv = i % 3 ? 64 : 80;
  o.seed = i + 1;
  o.recipe = recipe_of(Format::s8, Format::s8, {per_block, 64, 16}, {per_token, 128, 16});
  return o;
}

/// Does what the kernels found agree, and is some key not seen?
void check_found(const Hidden& x, bool some = true) {
  ASSERT_NE(x.c.layout.seen, kernels::PrepareLayout::none);
  const auto* words =
      reinterpret_cast<const std::uint32_t*>(x.c.workspace().data() + x.c.layout.seen);
  const auto* counts =
      reinterpret_cast<const std::uint32_t*>(x.c.workspace().data() + x.c.layout.seen_counts);
  const bool each_head = x.c.layout.seen_heads > 1;
  const int heads = x.c.heads(Role::k);
  std::int64_t wrong = 0, hidden = 0;
  std::vector<std::uint32_t> plain(static_cast<std::size_t>(heads * x.c.batch()));
  x.each([&](std::int64_t b, int h, std::int64_t s) {
    const int head = each_head ? h : 0;
    const std::int64_t slot = x.c.first_slot(Role::k, b) + s;
    const std::uint32_t* w = words + (head * x.c.out.k.slots + slot) / 64 * 4 + s % 64 / 32;
    const bool any = (w[0] >> s % 32 & 1) != 0, plainly = (w[2] >> s % 32 & 1) != 0;
    const bool settled = counts[2 * (head * x.c.batch() + b) + 1] > 0;
    const Seen got = plainly || (any && !settled) ? Seen::yes : any ? Seen::faintly : Seen::no;
    wrong += got != x.seen(b, h, s);
    hidden += x.seen(b, h, s) != Seen::yes;
    plain[static_cast<std::size_t>(head * x.c.batch() + b)] += plainly && h == head ? 1 : 0;
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(hidden > 0, some);
  for (std::int64_t unit = 0; unit < (each_head ? heads : 1) * x.c.batch(); ++unit) {
    EXPECT_EQ(counts[2 * unit + 1], plain[static_cast<std::size_t>(unit)]) << unit;
  }
}

TEST(HiddenKeys, AreFound) {
  unsigned n = 0;
  for (const Hiding& hiding : hidings) {
    for (unsigned i = 0; i < 5; i += 2) {
      const CaseOptions o = shaped(i + n++);
      SCOPED_TRACE(hiding.name + " " + std::to_string(static_cast<int>(o.storage)));
      Hidden x(o, hiding);
      ASSERT_EQ(x.c.prepare(), "");
      check_found(x, hiding.name != "too_loud");
    }
  }
}

const Hiding& hiding_named(const std::string& name) {
  return *std::find_if(std::begin(hidings), std::end(hidings),
                       [&](const Hiding& h) { return h.name == name; });
}

/// Slight keys of a head with NaN or Inf may have weight, and where there are other biases.
TEST(HiddenKeys, SlightOnesAreSeenWhereNothingBoundsScores) {
  const Hiding& hiding = hiding_named("slight_padding");
  const auto check = [&](const char* name, auto change) {
    SCOPED_TRACE(name);
    Hidden x(shaped(0), hiding);
    ASSERT_EQ(x.seen(0, 0, 17), Seen::faintly);
    change(x);
    x.find();
    EXPECT_EQ(x.seen(0, 0, 17), Seen::yes);
    ASSERT_EQ(x.c.prepare(), "");
    check_found(x, x.bounded);  // other heads
  };
  check("query", [](Hidden& x) { x.c.put_value(Role::q, 0, 1, 3, 5, nan_value); });
  check("key", [](Hidden& x) { x.c.put_value(Role::k, 0, 0, 5, 5, -infinity); });
  check("slight key", [](Hidden& x) { x.c.put_value(Role::k, 0, 0, 17, 5, infinity); });
  std::vector<float> slopes(4, 0.5f);
  check("slopes", [&](Hidden& x) {
    x.c.tensors.alibi_slopes = TensorView::dense(slopes.data(), Format::f32, {4});
    x.bounded = false;
  });
  Hidden x(shaped(0), hidings[0]);
  ASSERT_EQ(x.c.prepare(), "");
  EXPECT_EQ(x.c.layout.slight, kernels::PrepareLayout::none) << "masks without biases";
}

TEST(HiddenKeys, AreNotLookedForWhereNoneCanBe) {
  for (const bool causal : {false, true}) {
    CaseOptions o = shaped(0);
    Case c(o);
    c.attention.causal = causal;
    ASSERT_EQ(c.prepare(), "");
    EXPECT_EQ(c.layout.seen, kernels::PrepareLayout::none);
  }
}

/// What the CPU's functions make of a head's rows of K or V.
struct Made {
  std::vector<float> mean, scale;  ///< scale: [token], or [token][channel]
  std::vector<std::uint8_t> codes;
  std::vector<bool> bad;
};

Made make_on_cpu(const Hidden& x, Role r, std::int64_t b, int h) {
  const Case& c = x.c;
  const Recipe& recipe = c.options().recipe;
  const cpu::KernelTable& words = *cpu::select_words().words;
  const std::int64_t length = c.length(b);
  const int n = c.channels(r), wide = cpu::padded(n);
  const Format format = r == Role::v ? recipe.v : recipe.qk;
  const Scaling& scaling = r == Role::v ? recipe.v_scale : recipe.k_scale;
  const bool smooth = (r == Role::v ? recipe.smooth_v : recipe.smooth_k) == Toggle::on;
  std::vector<float> rows;
  for (std::int64_t s = 0; s < length; ++s) {
    for (int k = 0; k < n; ++k) rows.push_back(c.value(r, b, h, s, k));
  }
  rows.resize(rows.size() + 16);
  cpu::Sequence from;
  from.base = reinterpret_cast<const std::byte*>(rows.data());
  from.format = Format::f32, from.bits = 32, from.token_stride = n;
  from.length = length, from.channels = n, from.seen = x.row(b, h);
  Made made;
  std::vector<float> scratch(static_cast<std::size_t>(wide));
  made.mean.resize(static_cast<std::size_t>(wide));
  cpu::mean_of_rows(words, from, 0, length, made.mean.data(), scratch.data());
  const cpu::Transform transform{smooth ? made.mean.data() : nullptr,
                                 r != Role::v && recipe.rotate == Toggle::on};
  std::vector<float> loaded(static_cast<std::size_t>(length * wide)), amax, shared;
  for (std::int64_t s = 0; s < length; ++s) {
    cpu::load_row(words, from, s, transform, loaded.data() + s * wide);
    amax.push_back(words.amax(loaded.data() + s * wide, n));
    made.bad.push_back(std::isnan(amax.back()));
    if (r == Role::v && made.bad.back()) {
      std::fill_n(loaded.begin() + s * wide, wide, 0.0f);
      amax.back() = 0;
    }
    shared.push_back(from.shares(s) ? amax.back() : 0.0f);
  }
  for (std::int64_t s = 0; s < length && r == Role::k; ++s) {
    const auto shares = [&](std::int64_t t) {
      return from.shares(t) && scale_index(scaling, r, t) == scale_index(scaling, r, s);
    };
    bool some = false;
    for (std::int64_t t = 0; t < length; ++t) some |= shares(t);
    if (!some) shared[static_cast<std::size_t>(s)] = amax[static_cast<std::size_t>(s)];
  }
  const float qmax = cpu::code_max(format);
  const bool channels = r == Role::v && !scaled_by_token(scaling, r);
  std::vector<float> groups(static_cast<std::size_t>(scale_count(scaling, r, length)));
  cpu::fold_groups(scaling, r, shared.data(), length, groups.data(),
                   static_cast<std::int64_t>(groups.size()));
  if (joins_groups(scaling, r)) cpu::join_amax(shared.data(), length);
  made.codes.resize(static_cast<std::size_t>(length * n));
  for (std::int64_t s = 0; s < length; ++s) {
    const float* row = loaded.data() + s * wide;
    std::vector<float> scale(static_cast<std::size_t>(channels ? n : 1));
    if (!channels) {
      const bool own = scaled_by_token(scaling, r) && !from.shares(s);
      const float top = own ? amax[static_cast<std::size_t>(s)]
                        : joins_groups(scaling, r)
                            ? shared[static_cast<std::size_t>(s)]
                            : groups[static_cast<std::size_t>(scale_index(scaling, r, s))];
      scale[0] = formats::amax_scale(top, qmax);
      if (made.bad[static_cast<std::size_t>(s)] && r == Role::k) scale[0] = nan_value;
    }
    for (int k = 0; k < n && channels; ++k) {
      const std::int64_t block =
          by_channel(scaling.granularity) && scaling.granularity != per_channel ? scaling.block
                                                                                : length;
      const std::int64_t first = s / block * block, last = std::min(first + block, length);
      const bool some = cpu::some_share(from, first, last);
      float top = 0;
      for (std::int64_t t = first; t < last; ++t) {
        if (some && !from.shares(t)) continue;
        const float* other = loaded.data() + t * wide;
        const bool alone = by_channel(scaling.granularity);
        for (int m = alone ? k : 0; m < (alone ? k + 1 : n); ++m) {
          top = std::max(top, std::abs(other[m]));
        }
      }
      scale[static_cast<std::size_t>(k)] = formats::amax_scale(top, qmax);
    }
    for (int k = 0; k < n; ++k) {
      float padded[16] = {row[k]};
      std::uint8_t code[16] = {};
      const float by = scale[static_cast<std::size_t>(channels ? k : 0)];
      cpu::encode_row(words, format, padded, 1, formats::reciprocal(by), code);
      made.codes[static_cast<std::size_t>(s * n + k)] = std::isnan(by) ? 0 : code[0];
    }
    made.scale.insert(made.scale.end(), scale.begin(), scale.end());
  }
  return made;
}

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

void check_keys(const Hidden& x) {
  const kernels::PreparedRows& out = x.c.out.k;
  const int n = x.c.channels(Role::k), heads = x.c.heads(Role::k);
  std::int64_t wrong = 0, means = 0;
  for (std::int64_t b = 0; b < x.c.batch(); ++b) {
    for (int h = 0; h < heads; ++h) {
      const Made want = make_on_cpu(x, Role::k, b, h);
      for (int k = 0; k < n && x.c.out.k_mean != nullptr; ++k) {
        const float mean = x.c.out.k_mean[(b * heads + h) * kernels::prepared_channels(n) + k];
        means += !same(mean, want.mean[static_cast<std::size_t>(k)]);
      }
      for (std::int64_t s = 0; s < x.c.length(b); ++s) {
        const std::int64_t slot = h * out.slots + x.c.first_slot(Role::k, b) + s;
        wrong += !same(out.scale[slot], want.scale[static_cast<std::size_t>(s)]);
        for (int k = 0; k < n; ++k) {
          wrong += out.codes[slot * out.row_bytes + k] !=
                   want.codes[static_cast<std::size_t>(s * n + k)];
        }
      }
    }
  }
  EXPECT_EQ(means, 0) << "of K";
  EXPECT_EQ(wrong, 0) << "scales and codes of K";
}

void check_values(const Hidden& x) {
  const kernels::PreparedTiles& v = x.c.out.v;
  const int n = x.c.channels(Role::v), heads = x.c.heads(Role::v);
  const kernels::TileOffsets o = kernels::tile_offsets(v.channels);
  const int offset = x.c.options().recipe.v == Format::s8 ? kernels::value_offset : 0;
  std::int64_t wrong = 0, marks = 0, means = 0;
  for (std::int64_t b = 0; b < x.c.batch(); ++b) {
    for (int h = 0; h < heads; ++h) {
      const Made want = make_on_cpu(x, Role::v, b, h);
      for (int k = 0; k < n && x.c.out.v_mean != nullptr; ++k) {
        means += !same(x.c.out.v_mean[(b * heads + h) * v.channels + k],
                       want.mean[static_cast<std::size_t>(k)]);
      }
      for (std::int64_t s = 0; s < x.c.length(b); ++s) {
        const std::int64_t tile = h * (v.slots / 64) + (x.c.first_slot(Role::v, b) + s) / 64;
        const std::uint8_t* record = v.tiles + tile * o.bytes;
        float mark;
        std::memcpy(&mark, record + o.inverse + 4 * (s % 64), sizeof mark);
        marks += std::isnan(mark) != want.bad[static_cast<std::size_t>(s)];
        for (int k = 0; k < n; ++k) {
          const int code = want.codes[static_cast<std::size_t>(s * n + k)];
          wrong += record[k * 64 + position(static_cast<int>(s % 64))] !=
                   static_cast<std::uint8_t>(code + offset);
        }
      }
    }
  }
  EXPECT_EQ(means, 0) << "of V";
  EXPECT_EQ(marks, 0) << "bad tokens of V";
  EXPECT_EQ(wrong, 0) << "codes of V";
}

/// What the kernels make of two contents of hidden tokens, and of the rest.
void check_hidden(const CaseOptions& o, const Hiding& hiding) {
  Hidden x(o, hiding);
  x.fill(0.0f);
  ASSERT_EQ(x.c.prepare(), "");
  const std::vector<std::uint8_t> clean(x.c.workspace().begin(), x.c.workspace().end());
  for (const float value : {nan_value, -infinity, 1e30f, 3.0f}) {
    x.fill(o.input == Format::f16 && value == 1e30f ? 65504.0f : value);
    ASSERT_EQ(x.c.prepare(), "");
    EXPECT_TRUE(std::equal(clean.begin(), clean.end(), x.c.workspace().begin()))
        << "changes with " << value;
  }
  check_keys(x);
  check_values(x);
}

/// Every way to hide keys, with the scales that kernels without detours make and with others.
TEST(HiddenKeys, LeaveNoTrace) {
  const Scaling k_scales[] = {{per_block, 64, 16}, {per_thread, 64, 16}, {per_token, 128, 16},
                              {per_head, 128, 16}, {per_block, 128, 16}, {per_thread, 128, 16}};
  const Scaling v_scales[] = {{per_token, 128, 16},        {per_thread, 64, 16},
                              {per_channel, 128, 16},      {per_block_channel, 128, 16},
                              {per_block_channel, 24, 16}, {per_head, 128, 16}};
  constexpr Format formats[] = {Format::s8, Format::e4m3, Format::e5m2};
  unsigned i = 0;
  for (const Hiding& hiding : hidings) {
    for (int n = 0; n < 3; ++n, ++i) {
      CaseOptions o = shaped(i);
      const Scaling& v = v_scales[(i + i / 6) % 6];
      const bool token = v.granularity == per_token || v.granularity == per_thread;
      o.recipe = recipe_of(formats[i % 3], token ? Format::s8 : formats[i / 2 % 3],
                           k_scales[i / 2 % 6], v);
      o.recipe.smooth_v = i % 4 == 1 ? Toggle::on : Toggle::off;
      o.recipe.smooth_k = i % 5 == 4 ? Toggle::off : Toggle::on;
      o.recipe.rotate = i % 4 == 2 ? Toggle::on : Toggle::off;
      SCOPED_TRACE(hiding.name + " " + std::to_string(i));
      check_hidden(o, hiding);
      if (HasFailure()) return;
    }
  }
}

/// A bad key that has no part in its group's scale spoils itself, and the keys of its tile that
/// kernels may read the scale of.
TEST(HiddenKeys, FaintOnesThatAreBadShow) {
  for (const Scaling& scaling : {Scaling{per_block, 64, 16}, Scaling{per_thread, 64, 16},
                                 Scaling{per_token, 128, 16}, Scaling{per_head, 128, 16}}) {
    CaseOptions o = shaped(0);
    o.recipe.k_scale = scaling;
    Hidden x(o, hidings[2]);
    ASSERT_EQ(x.seen(0, 0, 17), Seen::faintly);
    x.c.put_value(Role::k, 0, 0, 17, 5, nan_value);
    x.c.put_value(Role::v, 0, 0, 17, 5, nan_value);
    ASSERT_EQ(x.c.prepare(), "");
    const kernels::PreparedRows& k = x.c.out.k;
    for (std::int64_t s = 0; s < x.c.length(0); ++s) {
      const bool near =
          s < 64 && scale_index(scaling, Role::k, s) == scale_index(scaling, Role::k, 17);
      EXPECT_EQ(std::isnan(k.scale[x.c.first_slot(Role::k, 0) + s]), near) << s;
    }
    EXPECT_EQ(k.flags[0], 1u);
    EXPECT_EQ(k.flags[1], 0u);
    check_values(x);
  }
}

/// Values of hidden tokens do not make a tile a special one.
TEST(HiddenKeys, OfVMakeNoTileSpecial) {
  for (const Granularity g : {per_token, per_thread}) {
    CaseOptions o = shaped(0);
    o.recipe.v_scale = {g, 64, 16};
    Hidden x(o, hidings[0]);
    x.each([&](std::int64_t b, int h, std::int64_t s) {
      const bool shown = x.seen(b, h, s) != Seen::no;
      for (int k = 0; k < o.dv; ++k) {
        x.c.put_value(Role::v, b, h, s, k, shown ? 1.0f + static_cast<float>(s % 8 / 2) : 1e20f);
      }
    });
    ASSERT_EQ(x.c.prepare(), "");
    const kernels::TileOffsets at = kernels::tile_offsets(x.c.out.v.channels);
    for (std::int64_t tile = 0; tile < 4; ++tile) {  // of the first sequence
      std::uint32_t flags;
      float inverse[64];
      std::memcpy(&flags, x.c.out.v.tiles + tile * at.bytes + at.flags, sizeof flags);
      std::memcpy(inverse, x.c.out.v.tiles + tile * at.bytes + at.inverse, sizeof inverse);
      EXPECT_EQ(flags, 0u) << tile;
      const float want[] = {4.0f, 3.0f};  // of keys 64 to 69
      const float least = *std::min_element(inverse, inverse + 64);
      EXPECT_EQ(least, tile < 2 ? 1 / formats::amax_scale(want[tile], 127.0f) : 0.0f) << tile;
    }
  }
}

}  // namespace
}  // namespace qattn::encode_test
