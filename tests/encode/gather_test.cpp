// Operands that come quantised in formats with built-in scales, gathered by the emulated kernels:
// bit for bit what these make of the numbers themselves, wherever codes and scales lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "encode_micro_case.hpp"
#include "isa/emu/options.hpp"

namespace qattn::encode_test {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// A case in pages that hold whole groups.
CaseOptions shaped(unsigned i) {
  CaseOptions o = micro_case(i);
  o.page_size = 64;
  return o;
}

/// An operand of a case as codes in the same kind of storage. What no token owns is NaN.
class Coded {
 public:
  Coded(Case& c, Role r) : c_(c), role_(r), format_(c.format(r)) {
    const CaseOptions& o = c.options();
    const bool bshd = o.layout == Layout::bshd, packed = o.storage == Storage::packed;
    paged_ = o.storage == Storage::paged && r != Role::q;
    const TensorView& x = r == Role::q ? c.tensors.q : r == Role::k ? c.tensors.k : c.tensors.v;
    const std::int64_t n = c.channels(r), heads = c.heads(r);
    const std::int64_t tokens = x.shape[(packed ? 0 : 1) + (bshd ? 0 : 1)];
    const std::int64_t outer = packed ? 1 : x.shape[0];
    const std::int64_t width = n + (o.storage == Storage::strided     ? 16
                                    : o.storage == Storage::unaligned ? 2
                                                                      : 0);
    token_ = bshd ? width * heads : width, head_ = bshd ? width : width * tokens;
    batch_ = width * heads * tokens;
    codes = x;
    codes.format = format_;
    const int at = packed ? 0 : 1;
    if (!packed) codes.stride[0] = batch_;
    codes.stride[static_cast<std::size_t>(at + !bshd)] = token_;
    codes.stride[static_cast<std::size_t>(at + bshd)] = head_;
    bytes_.assign(static_cast<std::size_t>(outer * batch_ + 64), 0x7f);
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    codes.data = bytes_.data() + (16 - address % 16) % 16 + (o.storage == Storage::unaligned);
    // Packed: sequences have scales of the longest one's tokens.
    longest_ = 1;
    for (const std::int64_t length : o.lengths) longest_ = std::max(longest_, length);
    const std::int64_t entries = packed ? longest_ : tokens, own = paged_ ? outer : c.batch();
    map_ = {{Granularity::group, 0, 0}, r, info(format_).group, paged_};
    const ScaleShape shape = map_.shape(own, heads, entries, n);
    std::int64_t count = 1;
    for (int i = 0; i < shape.rank; ++i) count *= shape.extent[static_cast<std::size_t>(i)];
    scales_.assign(static_cast<std::size_t>(count), 0xff);
    scale = TensorView::dense(scales_.data(), info(format_).scale,
                              {shape.extent[0], shape.extent[1], shape.extent[2], shape.extent[3]});
    globals_.assign(static_cast<std::size_t>(own * heads), nan_value);
    if (format_ == Format::nvfp4) {
      global = TensorView::dense(globals_.data(), Format::f32, {own, heads});
    }
    for (std::int64_t b = 0; b < c.batch(); ++b) {
      for (int h = 0; h < heads; ++h) fill(b, h);
    }
  }

  std::int64_t outer(std::int64_t b, std::int64_t s) const {
    if (!paged_) return b;
    const auto each = static_cast<std::int64_t>(c_.page_table().size()) / c_.batch();
    return c_.page_table()[static_cast<std::size_t>(b * each + s / c_.options().page_size)];
  }
  std::int64_t token(std::int64_t s) const { return paged_ ? s % c_.options().page_size : s; }

  std::uint8_t& scale_of(std::int64_t b, std::int64_t h, std::int64_t s, int channel) {
    return scales_[static_cast<std::size_t>(map_.offset(scale, outer(b, s), h, token(s), channel))];
  }
  float& global_of(std::int64_t b, std::int64_t h, std::int64_t s = 0) {
    return globals_[static_cast<std::size_t>(outer(b, s) * c_.heads(role_) + h)];
  }
  void put(std::int64_t b, std::int64_t h, std::int64_t s, int channel, std::uint8_t code) {
    const std::int64_t first = c_.options().storage == Storage::packed
                                   ? c_.cu_seqlens()[static_cast<std::size_t>(b)] * token_
                                   : outer(b, s) * batch_;
    const std::int64_t at = first + token(s) * token_ + h * head_ + channel;
    auto* data = static_cast<std::uint8_t*>(codes.data);
    if (info(format_).bits == 8) {
      data[at] = code;
    } else {
      const int shift = 4 * static_cast<int>(at % 2);
      data[at / 2] = static_cast<std::uint8_t>((data[at / 2] & ~(15 << shift)) | code << shift);
    }
  }
  void give(AttentionTensors& t) const {
    (role_ == Role::q ? t.q : role_ == Role::k ? t.k : t.v) = codes;
    (role_ == Role::q ? t.q_scale : role_ == Role::k ? t.k_scale : t.v_scale) = scale;
    (role_ == Role::q ? t.q_global : role_ == Role::k ? t.k_global : t.v_global) = global;
  }

  TensorView codes, scale, global;

 private:
  void fill(std::int64_t b, int h) {
    const MicroMade made = make_micro(c_, role_, b, h);
    const int n = c_.channels(role_), group = info(format_).group;
    for (std::int64_t s = 0; s < c_.length(b); ++s) {
      if (format_ == Format::nvfp4) global_of(b, h, s) = made.global;
      for (int k = 0; k < n; ++k) {
        put(b, h, s, k, made.codes[static_cast<std::size_t>(s * n + k)]);
        const std::int64_t at =
            role_ == Role::v ? s / group * n + k : s * made.row_groups + k / group;
        scale_of(b, h, s, k) = made.scales[static_cast<std::size_t>(at)];
      }
    }
  }

  Case& c_;
  Role role_;
  Format format_;
  bool paged_ = false;
  std::int64_t token_ = 0, head_ = 0, batch_ = 0, longest_ = 0;
  ScaleMap map_;
  std::vector<std::uint8_t> bytes_, scales_;
  std::vector<float> globals_;
};

/// What the kernels make of some tensors.
struct Made {
  std::vector<std::uint8_t> workspace;
  kernels::PrepareLayout layout;
  kernels::Prepared out;
};
std::string prepare(const AttentionTensors& t, const Case& c, Made& made) {
  const Recipe& recipe = c.options().recipe;
  const Result<Problem> problem = Problem::make(t, c.attention);
  if (!problem.ok()) return problem.status().message();
  std::string why = kernels::prepare_refusal(*problem, recipe, c.needs());
  if (!why.empty()) return why;
  made.layout = kernels::plan_prepare(*problem, recipe, c.needs());
  made.workspace.assign(made.layout.bytes + 64, 0xcd);
  const auto base = reinterpret_cast<std::uintptr_t>(made.workspace.data());
  void* at = made.workspace.data() + (64 - base % 64) % 64;
  made.out = kernels::prepared_in(*problem, recipe, made.layout, at);
  isa::Start next;
  return kernels::prepare(*problem, recipe, made.layout, at, nullptr, next);
}

std::string differs(const char* what, const void* a, const void* b, std::int64_t bytes) {
  const auto *x = static_cast<const std::uint8_t*>(a), *y = static_cast<const std::uint8_t*>(b);
  for (std::int64_t i = 0; i < bytes; ++i) {
    if (x[i] != y[i]) {
      return std::string(what) + " byte " + std::to_string(i) + ": " + std::to_string(x[i]) +
             " should be " + std::to_string(y[i]);
    }
  }
  return {};
}

/// The first byte that two preparations have different of an operand; empty: there is none.
std::string compare(const Case& c, Role r, const kernels::Prepared& a, const kernels::Prepared& b) {
  std::string d;
  if (r == Role::v) {
    const kernels::TileOffsets at = kernels::tile_offsets(a.v.channels, a.v.bits, a.v.group);
    const std::int64_t tiles = c.heads(r) * a.v.slots / 64 + 1;
    d = differs("tiles of V", a.v.tiles, b.v.tiles, tiles * at.bytes);
    if (!d.empty() || a.v.channel_scale == nullptr) return d;
    for (std::int64_t n = 0; n < c.batch(); ++n) {
      const std::int64_t size = a.v.channel_block, own = std::int64_t{4} * a.v.channels;
      for (std::int64_t g = 0; g * size < c.length(n) && d.empty(); ++g) {
        for (std::int64_t h = 0; h < c.heads(r) && d.empty(); ++h) {
          const std::int64_t unit = n * c.heads(r) + h;
          d = differs("globals of V", a.v.channel_scale + (unit * a.v.groups + g) * a.v.channels,
                      b.v.channel_scale + unit * b.v.groups * b.v.channels, own);
        }
      }
    }
    return d;
  }
  const kernels::PreparedRows &x = r == Role::q ? a.q : a.k, &y = r == Role::q ? b.q : b.k;
  const std::int64_t slots = c.heads(r) * x.slots;
  d = differs("codes", x.codes, y.codes, slots * x.row_bytes);
  if (d.empty()) d = differs("groups", x.group_scale, y.group_scale, slots * x.group_bytes);
  if (d.empty()) d = differs("scales", x.scale, y.scale, 4 * (slots + 64));
  return d.empty() ? differs("flags", x.flags, y.flags, slots / 16) : d;
}

/// Every mixture of numbers and codes.
void check(const CaseOptions& o) {
  Case c(o);
  Made want;
  ASSERT_EQ(prepare(c.tensors, c, want), "");
  Coded coded[3] = {{c, Role::q}, {c, Role::k}, {c, Role::v}};
  for (int which = 1; which < 8; ++which) {
    AttentionTensors t = c.tensors;
    for (int i = 0; i < 3; ++i) {
      if (which >> i & 1) coded[i].give(t);
    }
    Made got;
    ASSERT_EQ(prepare(t, c, got), "") << which;
    for (const Role r : every_role) {
      ASSERT_EQ(compare(c, r, got.out, want.out), "") << name(r) << which;
    }
  }
}

TEST(Gather, IsWhatTheNumbersGive) {
  for (unsigned i = 0; i < 45; ++i) {
    SCOPED_TRACE(i);
    check(shaped(i));
    if (testing::Test::HasFailure()) return;
  }
}

/// No code and no scale behind a row's end is read.
TEST(Gather, RowsOfAnyLength) {
  constexpr int sizes[] = {2, 20, 36, 66, 100, 250};
  for (unsigned i = 0; i < 18; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o = shaped(i);
    o.d = sizes[i % 6], o.dv = sizes[(i / 6 + i) % 6];
    if (o.recipe.qk == Format::mxfp8) o.d = o.d * 2 / 3;
    if (o.recipe.v == Format::mxfp8) o.dv -= 1;
    check(o);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Gather, SchedulesAndLaneOrdersGiveTheSameBits) {
  const emu::Options before = emu::options();
  for (const auto schedule : {emu::Schedule::early, emu::Schedule::late, emu::Schedule::random}) {
    for (const auto order :
         {emu::LaneOrder::forward, emu::LaneOrder::reverse, emu::LaneOrder::random}) {
      emu::options().schedule = schedule;
      emu::options().order = order;
      for (unsigned i = 0; i < 4; ++i) check(shaped(i * 5 + 1));
    }
  }
  emu::options() = before;
}

/// A case of one head of 129 tokens, all of it as codes.
CaseOptions whole(Format format, Storage storage = Storage::dense) {
  CaseOptions o;
  o.storage = storage;
  o.lengths = {129}, o.heads_q = o.heads_kv = 1, o.d = o.dv = 80;
  o.page_size = 64;
  o.recipe = micro_recipe(format, format);
  o.key_order = format == Format::mxfp8 ? kernels::KeyOrder::natural : kernels::KeyOrder::fp4;
  return o;
}

/// The comparisons would notice a code, a scale or a second level in another place.
TEST(Gather, AnotherPlaceIsNoticed) {
  for (const Format format : micro_formats) {
    const int group = info(format).group;
    for (int fault = 0; fault < 6; ++fault) {
      SCOPED_TRACE(testing::Message() << info(format).name << fault);
      Case c(whole(format));
      Made want, got;
      ASSERT_EQ(prepare(c.tensors, c, want), "");
      Coded q(c, Role::q), k(c, Role::k), v(c, Role::v);
      if (format != Format::nvfp4) {  // such groups have the same power of two
        q.scale_of(0, 0, 3, 0) ^= 1, v.scale_of(0, 0, 40, 7) ^= 1;
      }
      if (fault == 0) std::swap(q.scale_of(0, 0, 3, 0), q.scale_of(0, 0, 3, group));
      if (fault == 1) std::swap(v.scale_of(0, 0, 40, 7), v.scale_of(0, 0, 40 - group, 7));
      if (fault == 2) std::swap(v.scale_of(0, 0, 40, 7), v.scale_of(0, 0, 40, 8));
      if (fault == 3) k.put(0, 0, 64, 1, 5), k.put(0, 0, 65, 1, 6);
      if (fault == 4) v.put(0, 0, 64, 1, 5), v.put(0, 0, 65, 1, 6);
      if (fault == 5) q.put(0, 0, 64, 2, 5), q.put(0, 0, 64, 3, 6);
      AttentionTensors t = c.tensors;
      for (const Coded* x : {&q, &k, &v}) x->give(t);
      ASSERT_EQ(prepare(t, c, got), "");
      const Role r = fault == 0 || fault == 5 ? Role::q : fault == 3 ? Role::k : Role::v;
      EXPECT_NE(compare(c, r, got.out, want.out), "");
    }
  }
}

/// Bits of a code of NaN; 0: the format has none.
std::uint8_t nan_code(Format format) { return format == Format::mxfp8 ? 0x7f : 0; }

bool is_marked(const kernels::PreparedTiles& v, std::int64_t s) {
  const kernels::TileOffsets at = kernels::tile_offsets(v.channels, v.bits, v.group);
  const std::uint8_t* record = v.tiles + s / 64 * at.bytes;
  float mark;
  std::memcpy(&mark, record + at.inverse + 4 * (s % 64), sizeof mark);
  EXPECT_TRUE(!std::isnan(mark) || record[at.flags] == kernels::tile_has_bad) << s;
  return std::isnan(mark);
}

/// What is no scale or no number spoils the tokens that have it, and leaves the rest alone.
TEST(Gather, BadScalesAndCodesSpoilTheirTokens) {
  for (const Format format : micro_formats) {
    const bool four = format == Format::nvfp4;
    const std::int64_t group = info(format).group, first = 70 / group * group;
    for (const std::uint8_t bad : {0xff, four ? 0x7f : 0xff, four ? 0x81 : 0xff}) {
      for (const bool code : {false, true}) {
        if (code && nan_code(format) == 0) continue;
        SCOPED_TRACE(testing::Message() << info(format).name << int{bad} << code);
        Case c(whole(format));
        Made want, got;
        ASSERT_EQ(prepare(c.tensors, c, want), "");
        Coded k(c, Role::k), v(c, Role::v);
        if (code) {
          k.put(0, 0, 70, 79, nan_code(format)), v.put(0, 0, 70, 79, nan_code(format));
        } else {
          k.scale_of(0, 0, 70, 79) = v.scale_of(0, 0, 70, 79) = bad;
        }
        AttentionTensors t = c.tensors;
        k.give(t), v.give(t);
        ASSERT_EQ(prepare(t, c, got), "");
        for (std::int64_t s = 0; s < 129; ++s) {
          EXPECT_EQ(std::isnan(got.out.k.scale[s]), s == 70) << s;
          const bool here = code ? s == 70 : s >= first && s < first + group;
          EXPECT_EQ(is_marked(got.out.v, s), here) << s;
        }
        EXPECT_EQ(got.out.k.flags[0], 0u);
        EXPECT_EQ(got.out.k.flags[1], std::uint32_t{kernels::tile_has_bad});
        // Other tiles are as they were.
        const kernels::TileOffsets at =
            kernels::tile_offsets(want.out.v.channels, want.out.v.bits, want.out.v.group);
        EXPECT_EQ(differs("V", got.out.v.tiles, want.out.v.tiles, at.bytes), "");
        EXPECT_EQ(differs("K", got.out.k.codes, want.out.k.codes, 64 * got.out.k.row_bytes), "");
      }
    }
  }
}

/// A product that float32 does not hold is none, as on CPUs; -0 is a scale of nothing.
TEST(Gather, NumbersBeyondFloatsAndNegativeZero) {
  {
    Case c(whole(Format::mxfp8));
    Coded k(c, Role::k);
    k.scale_of(0, 0, 5, 0) = k.scale_of(0, 0, 6, 0) = 254;
    for (int channel = 0; channel < 32; ++channel) {
      k.put(0, 0, 5, channel, 0x38), k.put(0, 0, 6, channel, 0x40);  // 1 and 2
    }
    AttentionTensors t = c.tensors;
    k.give(t);
    Made got;
    ASSERT_EQ(prepare(t, c, got), "");
    EXPECT_EQ(got.out.k.scale[5], 1.0f);
    EXPECT_TRUE(std::isnan(got.out.k.scale[6]));
  }
  Case c(whole(Format::nvfp4));
  Coded k(c, Role::k);
  k.scale_of(0, 0, 32, 0) = 0x80;  // key 32 lies at place 32
  AttentionTensors t = c.tensors;
  k.give(t);
  Made got;
  ASSERT_EQ(prepare(t, c, got), "");
  EXPECT_EQ(got.out.k.group_scale[32 * got.out.k.group_bytes], 0);
  EXPECT_FALSE(std::isnan(got.out.k.scale[32]));
}

/// A second level that is no scale spoils all that it belongs to: a head of a sequence or a page.
TEST(Gather, BadSecondLevels) {
  for (const Storage storage : {Storage::dense, Storage::paged}) {
    for (const float bad : {nan_value, 0.0f, -1.0f, std::numeric_limits<float>::infinity()}) {
      SCOPED_TRACE(bad);
      Case c(whole(Format::nvfp4, storage));
      Coded k(c, Role::k), v(c, Role::v);
      k.global_of(0, 0, 64) = v.global_of(0, 0, 64) = bad;
      AttentionTensors t = c.tensors;
      k.give(t), v.give(t);
      Made got;
      ASSERT_EQ(prepare(t, c, got), "");
      for (std::int64_t s = 0; s < 129; ++s) {
        const bool here = storage == Storage::dense || s / 64 == 1;
        EXPECT_EQ(std::isnan(got.out.k.scale[s]), here) << s;
        EXPECT_EQ(is_marked(got.out.v, s), here) << s;
      }
    }
  }
}

/// Pages may have second levels of their own.
TEST(Gather, EveryPageHasItsSecondLevel) {
  Case c(whole(Format::nvfp4, Storage::paged));
  Coded k(c, Role::k), v(c, Role::v);
  for (const std::int64_t s : {0, 64, 128}) {
    k.global_of(0, 0, s) = 1.0f + static_cast<float>(s);
    v.global_of(0, 0, s) = 2.0f + static_cast<float>(s);
  }
  AttentionTensors t = c.tensors;
  k.give(t), v.give(t);
  Made got;
  ASSERT_EQ(prepare(t, c, got), "");
  EXPECT_EQ(got.out.v.channel_block, 64);
  for (std::int64_t s = 0; s < 129; ++s) {
    EXPECT_EQ(got.out.k.scale[s], 1.0f + static_cast<float>(s / 64 * 64)) << s;
    EXPECT_EQ(got.out.v.channel_scale[s / 64 * got.out.v.channels],
              2.0f + static_cast<float>(s / 64 * 64));
  }
}

TEST(Gather, PagesThatCutGroupsAreRefused) {
  const auto why = [](Format format, std::int64_t page_size) {
    CaseOptions o = whole(format, Storage::paged);
    o.page_size = page_size;
    Case c(o);
    const Coded v(c, Role::v);
    AttentionTensors t = c.tensors;
    v.give(t);
    Made got;
    return prepare(t, c, got);
  };
  EXPECT_EQ(why(Format::mxfp8, 48),
            "v: pages of 48 keys end inside groups of 32, which GPU kernels read across pages");
  EXPECT_EQ(why(Format::nvfp4, 24),
            "v: pages of 24 keys end inside groups of 16, which GPU kernels read across pages");
  EXPECT_EQ(why(Format::nvfp4, 32),
            "v: pages of 32 keys have a v_global each; GPU kernels have one for 64 keys");
  EXPECT_EQ(why(Format::mxfp8, 32), "");
  EXPECT_EQ(why(Format::nvfp4, 136), "");  // one page
}

/// Packed sequences whose scales end before the longest one does: nobody's memory is read.
TEST(Gather, ScalesThatEndBeforeASequenceSpoilTheRest) {
  for (const Format format : micro_formats) {
    CaseOptions o = whole(format, Storage::packed);
    o.lengths = {20, 129};
    Case c(o);
    Coded k(c, Role::k), v(c, Role::v);
    k.scale.shape[2] = 100, v.scale.shape[2] = 2;
    AttentionTensors t = c.tensors;
    k.give(t), v.give(t);
    Made got;
    ASSERT_EQ(prepare(t, c, got), "");
    for (std::int64_t s = 0; s < 129; ++s) {
      EXPECT_EQ(std::isnan(got.out.k.scale[c.first_slot(Role::k, 1) + s]), s >= 100) << s;
      EXPECT_EQ(is_marked(got.out.v, c.first_slot(Role::v, 1) + s), s >= 2 * info(format).group);
    }
  }
}

}  // namespace
}  // namespace qattn::encode_test
