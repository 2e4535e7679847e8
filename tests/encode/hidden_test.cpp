// Keys that no row sees, in the emulated encode kernels: which they are, that nothing of what is
// prepared changes with them, and that the rest is what the CPU's functions make of the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "encode_check.hpp"
#include "formats/scale.hpp"
#include "kernels/cpu/words.hpp"
#include "kernels/quantize/rows.hpp"
#include "kernels/quantize/scale_groups.hpp"

namespace qattn::encode_test {
namespace {

using enum Granularity;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

/// A mask, the lengths of queries, windows, and a block mask of a case.
struct Hiding {
  std::string name;
  Format format = Format::none;     ///< of the mask
  std::array<bool, 4> varies = {};  ///< with sequence, head, query; keys always
  bool one_key = false;             ///< of the mask: it is the same for all keys
  float low = 0;                    ///< what hides
  std::int64_t window_left = -1, window_right = -1;
  std::int64_t block = 0;
  std::int32_t queries = 0;  ///< at most
};

const Hiding hidings[] = {
    {"padding", Format::b8, {true}},
    {"padding_of_floats", Format::f32, {true}, false, -infinity},
    {"faint_padding", Format::f32, {true}, false, -1e4f},
    {"faint_halves", Format::f16, {true, true}, false, -65504.0f},
    {"heads", Format::b8, {false, true}},
    {"rows", Format::b8, {true, false, true}},
    {"bits", Format::b1, {true, true, true}},
    {"rows_of_floats", Format::bf16, {false, true, true}, false, -infinity},
    {"whole_rows", Format::b8, {true, false, true}, true, 0, -1, -1, 0, 1},
    {"window", Format::none, {}, false, 0, 40, 0, 0, 3},
    {"window_and_rows", Format::b8, {true, false, true}, false, 0, 60, 10, 0, 20},
    {"blocks", Format::none, {}, false, 0, -1, -1, 64, 60},
    {"blocks_and_rows", Format::b8, {true, false, true}, false, 0, -1, 0, 64},
    {"blocks_and_window", Format::none, {}, false, 0, 70, 5, 64, 100},
};

/// A case under a Hiding, and which of its keys are seen, found row by row.
class Hidden {
 public:
  Hidden(const CaseOptions& options, const Hiding& hiding)
      : c(options), hiding_(hiding), longest_(c.tensors.out.shape[0]) {
    used_q_.assign(c.seqused().begin(), c.seqused().end());
    if (hiding.queries > 0) {
      for (auto& n : used_q_) n = std::min(n, hiding.queries);
    }
    c.tensors.seqused_q = TensorView::dense(used_q_.data(), Format::s32, {c.batch()});
    c.attention.window_left = hiding.window_left, c.attention.window_right = hiding.window_right;
    longest_ = 0;
    for (std::int64_t b = 0; b < c.batch(); ++b) longest_ = std::max(longest_, c.length(b));
    if (options.storage == Storage::paged) {
      const std::int64_t pages = c.tensors.page_table.shape[1];
      keys_ = pages * options.page_size;
    } else {
      keys_ = longest_ + (options.used ? 5 : 0);
    }
    queries_ = longest_ + (options.used ? 5 : 0);
    if (hiding.format != Format::none) make_mask();
    if (hiding.block > 0) make_block_mask();
    find();
  }

  Seen seen(std::int64_t b, int head, std::int64_t s) const {
    return seen_[static_cast<std::size_t>((b * c.heads(Role::k) + head) * longest_ + s)];
  }
  /// Those of a sequence, as the CPU has them.
  const Seen* row(std::int64_t b, int head) const {
    return seen_.data() + (b * c.heads(Role::k) + head) * longest_;
  }

  /// Other contents of what nobody sees.
  void fill(float value) {
    for (const Role r : {Role::k, Role::v}) {
      each([&](std::int64_t b, int h, std::int64_t s) {
        if (seen(b, h, s) != Seen::no) return;
        for (int k = 0; k < c.channels(r); ++k) c.put_value(r, b, h, s, k, value);
      });
    }
  }

  void each(const std::function<void(std::int64_t, int, std::int64_t)>& f) const {
    for (std::int64_t b = 0; b < c.batch(); ++b) {
      for (int h = 0; h < c.heads(Role::k); ++h) {
        for (std::int64_t s = 0; s < c.length(b); ++s) f(b, h, s);
      }
    }
  }

  Case c;

 private:
  static bool is_padding(std::int64_t b, std::int64_t j) {
    return j == 3 || j % 64 == 17 || j >= 70 + 40 * b;
  }
  /// Does the mask hide it?
  bool masked(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (hiding_.format == Format::none) return false;
    if (!hiding_.varies[0]) b = 0;
    if (hiding_.one_key) return i % 3 != b;
    bool hides = is_padding(b, j);
    if (hiding_.varies[1]) hides |= (j + h) % 2 == 0;
    if (hiding_.varies[2]) hides |= (j + i) % 5 != 0 && i != j;
    return hides;
  }

  void make_mask() {
    mask_shape_ = {hiding_.varies[0] ? c.batch() : 1, hiding_.varies[1] ? c.heads(Role::q) : 1,
                   hiding_.varies[2] ? queries_ : 1, hiding_.one_key ? 1 : keys_};
    const bool bits = hiding_.format == Format::b1;
    const std::int64_t width = bits ? (keys_ + 7) / 8 * 8 : mask_shape_[3];
    TensorView& v = c.tensors.mask;
    v.format = hiding_.format, v.rank = 4;
    v.shape = {mask_shape_[0], mask_shape_[1], mask_shape_[2], width};
    v.stride = {width * mask_shape_[1] * mask_shape_[2], width * mask_shape_[2], width, 1};
    const int size = info(v.format).bits;
    mask_.resize(static_cast<std::size_t>(mask_shape_[0] * v.stride[0] * size / 8 + 8));
    v.data = mask_.data();
    for (std::int64_t b = 0; b < mask_shape_[0]; ++b) {
      for (std::int64_t h = 0; h < mask_shape_[1]; ++h) {
        for (std::int64_t i = 0; i < mask_shape_[2]; ++i) {
          for (std::int64_t j = 0; j < mask_shape_[3]; ++j) {
            put_mask(b * v.stride[0] + h * v.stride[1] + i * v.stride[2] + j, masked(b, h, i, j));
          }
        }
      }
    }
  }
  void put_mask(std::int64_t at, bool hides) {
    std::uint8_t* data = mask_.data();
    const float bias = hides ? hiding_.low : 0.25f;
    switch (hiding_.format) {
      case Format::b8:
        data[at] = hides ? 0 : 1;
        break;
      case Format::b1:
        data[at / 8] = static_cast<std::uint8_t>(data[at / 8] | (hides ? 0 : 1 << at % 8));
        break;
      case Format::f32:
        std::memcpy(data + 4 * at, &bias, 4);
        break;
      default: {
        const bool f16 = hiding_.format == Format::f16;
        const std::uint16_t code = !hides              ? (f16 ? 0x3400 : 0x3e80)
                                   : bias == -infinity ? (f16 ? 0xfc00 : 0xff80)
                                                       : 0xfbff;  // -65504 in f16
        std::memcpy(data + 2 * at, &code, 2);
      }
    }
  }

  bool block_hides(std::int64_t h, std::int64_t i, std::int64_t j) const {
    return hiding_.block > 0 && (i / hiding_.block + j / hiding_.block + h) % 3 != 0;
  }
  void make_block_mask() {
    const std::int64_t n = hiding_.block, q = (queries_ + n - 1) / n, k = (keys_ + n - 1) / n;
    const int heads = c.heads(Role::q);
    block_mask_.resize(static_cast<std::size_t>(heads * q * k));
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < q; ++i) {
        for (std::int64_t j = 0; j < k; ++j) {
          const bool hides = block_hides(h, i * n, j * n);
          block_mask_[static_cast<std::size_t>((h * q + i) * k + j)] = hides ? 0 : 1;
        }
      }
    }
    c.tensors.block_mask = TensorView::dense(block_mask_.data(), Format::b8, {1, heads, q, k});
    c.attention.block_mask_q = c.attention.block_mask_k = n;
  }

  Seen look(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t diagonal = i + c.length(b) - used_q_[static_cast<std::size_t>(b)];
    if (hiding_.window_left >= 0 && j < diagonal - hiding_.window_left) return Seen::no;
    if (hiding_.window_right >= 0 && j > diagonal + hiding_.window_right) return Seen::no;
    if (block_hides(h, i, j)) return Seen::no;
    if (!masked(b, h, i, j)) return Seen::yes;
    return hiding_.low == 0 || hiding_.low == -infinity ? Seen::no : Seen::faintly;
  }
  void find() {
    const int heads = c.heads(Role::k), group = c.heads(Role::q) / heads;
    seen_.assign(static_cast<std::size_t>(c.batch() * heads * longest_), Seen::no);
    each([&](std::int64_t b, int h, std::int64_t s) {
      Seen& best = seen_[static_cast<std::size_t>((b * heads + h) * longest_ + s)];
      for (int g = 0; g < group; ++g) {
        for (std::int64_t i = 0; i < used_q_[static_cast<std::size_t>(b)]; ++i) {
          best = std::max(best, look(b, h * group + g, i, s));
        }
      }
    });
    for (std::int64_t unit = 0; unit < c.batch() * heads; ++unit) {
      const auto from = seen_.begin() + unit * longest_, to = from + longest_;
      if (std::find(from, to, Seen::yes) == to) std::replace(from, to, Seen::faintly, Seen::yes);
    }
  }

  Hiding hiding_;
  std::int64_t longest_ = 0, keys_ = 0, queries_ = 0;
  std::vector<std::int32_t> used_q_;
  std::array<std::int64_t, 4> mask_shape_{};
  std::vector<std::uint8_t> mask_, block_mask_;
  std::vector<Seen> seen_;
};

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

TEST(HiddenKeys, AreFound) {
  unsigned n = 0;
  for (const Hiding& hiding : hidings) {
    for (unsigned i = 0; i < 5; i += 2) {
      const CaseOptions o = shaped(i + n++);
      SCOPED_TRACE(hiding.name + " " + std::to_string(static_cast<int>(o.storage)));
      Hidden x(o, hiding);
      ASSERT_EQ(x.c.prepare(), "");
      ASSERT_NE(x.c.layout.seen, kernels::PrepareLayout::none);
      const auto* words =
          reinterpret_cast<const std::uint32_t*>(x.c.workspace().data() + x.c.layout.seen);
      const auto* counts =
          reinterpret_cast<const std::uint32_t*>(x.c.workspace().data() + x.c.layout.seen_counts);
      const bool each_head = x.c.layout.seen_heads > 1;
      std::int64_t wrong = 0, hidden = 0;
      x.each([&](std::int64_t b, int h, std::int64_t s) {
        const int head = each_head ? h : 0;
        const std::int64_t slot = x.c.first_slot(Role::k, b) + s;
        const std::uint32_t* w = words + (head * x.c.out.k.slots + slot) / 64 * 4 + s % 64 / 32;
        const bool any = (w[0] >> s % 32 & 1) != 0, plainly = (w[2] >> s % 32 & 1) != 0;
        const bool settled = counts[2 * (head * x.c.batch() + b) + 1] > 0;
        const Seen got = plainly || (any && !settled) ? Seen::yes : any ? Seen::faintly : Seen::no;
        wrong += got != x.seen(b, h, s);
        hidden += x.seen(b, h, s) != Seen::yes;
      });
      EXPECT_EQ(wrong, 0);
      EXPECT_GT(hidden, 0);
    }
  }
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
  const cpu::Words& words = *cpu::select_words().words;
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
  std::vector<float> scratch(static_cast<std::size_t>(3 * wide));
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
        std::memcpy(&mark, record + o.plain + 4 * (s % 64), sizeof mark);
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
      float largest;
      std::memcpy(&flags, x.c.out.v.tiles + tile * at.bytes + at.flags, sizeof flags);
      std::memcpy(&largest, x.c.out.v.tiles + tile * at.bytes + at.largest, sizeof largest);
      EXPECT_EQ(flags, 0u) << tile;
      const float want[] = {4.0f, 3.0f};  // of keys 64 to 69
      EXPECT_EQ(largest, tile < 2 ? formats::amax_scale(want[tile], 127.0f) : 0.0f) << tile;
    }
  }
}

}  // namespace
}  // namespace qattn::encode_test
