#include "encode_micro_case.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "encode_check.hpp"
#include "formats/scale.hpp"
#include "kernels/cpu/words.hpp"
#include "kernels/operand/rows.hpp"

namespace qattn::encode_test {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

struct Gathered {
  std::vector<float> values;
  cpu::Sequence x;
};

Gathered gather(const Case& c, Role r, std::int64_t b, int h, const Hidden* hidden) {
  Gathered g;
  const int n = c.channels(r);
  for (std::int64_t s = 0; s < c.length(b); ++s) {
    for (int k = 0; k < n; ++k) g.values.push_back(c.value(r, b, h, s, k));
  }
  g.values.resize(g.values.size() + 16);
  g.x.base = reinterpret_cast<const std::byte*>(g.values.data());
  g.x.format = Format::f32, g.x.bits = 32, g.x.token_stride = n;
  g.x.length = c.length(b), g.x.channels = n;
  if (hidden != nullptr && r != Role::q) g.x.seen = hidden->row(b, h);
  return g;
}

const cpu::KernelTable& words() { return *cpu::select_words().words; }

/// Means of the sequence, or of Q's blocks; empty: none is subtracted.
std::vector<float> means_of(const Case& c, Role r, std::int64_t b, int h, const cpu::Sequence& x) {
  const Recipe& recipe = c.options().recipe;
  const auto wide = static_cast<std::size_t>(cpu::padded(x.channels));
  const Toggle smooth = r == Role::q   ? recipe.smooth_q
                        : r == Role::k ? recipe.smooth_k
                                       : recipe.smooth_v;
  if (smooth != Toggle::on) return {};
  const TensorView& given = r == Role::v ? c.tensors.v_mean : c.tensors.k_mean;
  const std::int64_t block =
      r == Role::q ? recipe.q_scale.block : std::max<std::int64_t>(x.length, 1);
  std::vector<float> means, mean(wide), scratch(wide);
  for (std::int64_t s = 0; s == 0 || s < x.length; s += block) {
    if (r != Role::q && given.present()) {
      const auto* from = static_cast<const float*>(given.data) + (b * c.heads(r) + h) * x.channels;
      std::copy(from, from + x.channels, mean.begin());
    } else {
      cpu::mean_of_rows(words(), x, s, std::min(s + block, x.length), mean.data(), scratch.data());
    }
    means.insert(means.end(), mean.begin(), mean.end());
  }
  return means;
}

/// Powers of two for K's channels, and Q's; empty: all are 1.
std::vector<float> factors_of(const Case& c, std::int64_t b, int head, const Hidden* hidden) {
  const Gathered k = gather(c, Role::k, b, head, hidden);
  const auto wide = static_cast<std::size_t>(cpu::padded(k.x.channels));
  std::vector<float> factors(2 * wide), row(wide);
  const bool central = c.options().recipe.smooth_k == Toggle::on;
  if (!cpu::balance_rows(words(), k.x, central, factors.data(), row.data())) return {};
  return factors;
}

/// V's groups of keys. Tokens without a part in their group's scale go no further than the others.
void encode_columns(const Case& c, const cpu::Sequence& x, const std::vector<float>& rows,
                    MicroMade& made) {
  const int n = x.channels, wide = cpu::padded(n), group = info(c.format(Role::v)).group;
  for (std::int64_t first = 0; first < x.length; first += group) {
    const auto count = static_cast<int>(std::min<std::int64_t>(group, x.length - first));
    const bool some = cpu::some_share(x, first, first + count);
    for (int k = 0; k < n; ++k) {
      float column[32], most = 0;
      std::uint8_t codes[32], scale;
      for (int j = 0; j < count; ++j) {
        column[j] = rows[static_cast<std::size_t>((first + j) * wide + k)];
        if (x.shares(first + j)) most = std::max(most, std::abs(column[j]));
      }
      for (int j = 0; j < count && some; ++j) column[j] = std::clamp(column[j], -most, most);
      cpu::encode_groups(c.format(Role::v), column, count, made.global, codes, &scale);
      made.scales.push_back(scale);
      for (int j = 0; j < count; ++j) {
        made.codes[static_cast<std::size_t>((first + j) * n + k)] = codes[j];
      }
    }
  }
}

/// Counts differences and reports the first.
class Differences {
 public:
  explicit Differences(std::string what) : what_(std::move(what)) {}
  ~Differences() { EXPECT_EQ(count_, 0) << what_ << ": first " << first_; }
  template <class T>
  void expect(T got, T want, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t c = 0) {
    const bool nan = std::isnan(static_cast<double>(got)) && std::isnan(static_cast<double>(want));
    if (nan || std::memcmp(&got, &want, sizeof got) == 0) return;
    if (count_++ > 0) return;
    first_ = "sequence " + std::to_string(b) + " head " + std::to_string(h) + " token " +
             std::to_string(s) + " channel " + std::to_string(c) + ": " + std::to_string(got) +
             " should be " + std::to_string(want);
  }

 private:
  std::string what_, first_;
  std::int64_t count_ = 0;
};

float float_at(const std::uint8_t* bytes, int index) {
  float x;
  std::memcpy(&x, bytes + 4 * index, sizeof x);
  return x;
}

/// One tile of V behind its codes. `there`: whether each of its 64 keys counts as existing.
void check_micro_tail(const Case& c, const std::uint8_t* record, const MicroMade& made,
                      const bool (&there)[64], std::int64_t b, int h, std::int64_t first) {
  const Format format = c.format(Role::v);
  const int bits = info(format).bits, group = info(format).group, groups = 64 / group;
  const int padded = c.padded(Role::v), n = c.channels(Role::v), row = 8 * bits;
  const kernels::TileOffsets o = kernels::tile_offsets(padded, bits, group);
  Differences wrong("behind the codes of V");
  bool any_bad = false;
  for (int j = 0; j < 64; ++j) {
    const bool exists = first + j < c.length(b);
    const bool bad = exists && made.bad[static_cast<std::size_t>(first + j)];
    any_bad |= bad;
    wrong.expect(float_at(record + o.log, j), 0.0f, b, h, first + j);
    wrong.expect(float_at(record + o.inverse, j),
                 bad        ? nan_value
                 : there[j] ? 1.0f
                            : 0.0f,
                 b, h, first + j);
    const std::uint8_t one = format == Format::mxfp8 ? 0x38 : 2;
    wrong.expect<std::uint8_t>(code_at(record + o.extra, value_place(c, j), bits),
                               there[j] ? one : 0, b, h, first + j, -1);
  }
  for (int i = row; i < 8 * row; ++i) {
    wrong.expect<std::uint8_t>(record[o.extra + i], 0, b, h, first, i);
  }
  for (int i = 0; i < o.log - o.scales; ++i) {
    const int k = i / groups;
    const std::int64_t g = first / group + i % groups;
    const std::uint8_t one = format == Format::nvfp4 ? 0x38 : 0x7f;
    std::uint8_t want = k >= padded && k < padded + 8 ? one : 0;
    if (k < n && g * group < c.length(b)) want = made.scales[static_cast<std::size_t>(g * n + k)];
    wrong.expect(record[o.scales + i], want, b, h, g * group, k);
  }
  std::uint32_t flags[4];
  std::memcpy(flags, record + o.flags, sizeof flags);
  wrong.expect(flags[0], any_bad ? 1u : 0u, b, h, first, -2);
}

}  // namespace

Recipe micro_recipe(Format qk, Format v) {
  Recipe r;
  r.name = "test";
  r.qk = qk, r.v = v;
  r.p = v == Format::s8 ? Format::u8 : info(v).group > 0 ? v : Format::e4m3;
  r.q_scale = resolve_scaling({Granularity::automatic, 64, 16}, Role::q, qk);
  r.k_scale = resolve_scaling({}, Role::k, qk);
  if (info(v).scale != Format::none) r.v_scale = resolve_scaling({}, Role::v, v);
  r.smooth_k = r.smooth_q = r.smooth_v = r.rotate = r.balance_k = Toggle::off;
  return r;
}

CaseOptions micro_case(unsigned i) {
  constexpr Storage storages[] = {Storage::dense, Storage::packed, Storage::paged, Storage::strided,
                                  Storage::unaligned};
  constexpr Format inputs[] = {Format::bf16, Format::f16, Format::f32};
  constexpr std::int64_t lengths[] = {1, 31, 64, 65, 112, 129, 200};
  CaseOptions o;
  o.storage = storages[i % 5];
  o.layout = i / 5 % 2 ? Layout::bhsd : Layout::bshd;
  o.d = micro_dims[i / 3 % 5];
  o.dv = micro_dims[(i / 3 + i / 15) % 5];
  o.input = inputs[i / 2 % 3];
  o.lengths = {lengths[i % 7], lengths[(i + 3) % 7]};
  if (i % 4 == 0) o.lengths.push_back(0);
  o.used = o.storage == Storage::packed ? i % 2 == 1 : true;
  o.heads_q = 2;
  o.heads_kv = i % 2 ? 2 : 1;
  o.page_size = i % 2 ? 16 : 24;
  o.seed = i + 1;
  o.recipe = micro_recipe(micro_formats[i % 3], micro_formats[(i + i / 9) % 3]);
  o.key_order = i % 2 ? kernels::KeyOrder::fp4 : kernels::KeyOrder::natural;
  return o;
}

MicroMade make_micro(const Case& c, Role r, std::int64_t b, int h, const Hidden* hidden) {
  const Recipe& recipe = c.options().recipe;
  const Gathered from = gather(c, r, b, h, hidden);
  const cpu::Sequence& x = from.x;
  const int n = x.channels, wide = cpu::padded(n), group = info(c.format(r)).group;
  MicroMade made;
  made.row_groups = (n + group - 1) / group;
  made.mean = means_of(c, r, b, h, x);
  std::vector<float> factors;
  if (r != Role::v && recipe.balance_k == Toggle::on) {
    factors =
        factors_of(c, b, r == Role::q ? h / (c.heads(Role::q) / c.heads(Role::k)) : h, hidden);
  }
  std::vector<float> rows(static_cast<std::size_t>(x.length * wide));
  float amax = 0;
  for (std::int64_t s = 0; s < x.length; ++s) {
    float* row = rows.data() + s * wide;
    cpu::Transform t;
    const std::int64_t mean = r == Role::q ? s / recipe.q_scale.block : 0;
    if (!made.mean.empty()) t.mean = made.mean.data() + mean * wide;
    if (!factors.empty()) t.factors = factors.data() + (r == Role::q ? wide : 0);
    t.rotate = r != Role::v && recipe.rotate == Toggle::on;
    cpu::load_row(words(), x, s, t, row);
    const float top = words().amax(row, n);
    made.bad.push_back(std::isnan(top));
    if (r == Role::v && made.bad.back()) std::fill_n(row, wide, 0.0f);
    if (x.shares(s) && !(r == Role::v && made.bad.back())) amax = formats::fold_amax(amax, top);
  }
  if (c.format(r) == Format::nvfp4) made.global = cpu::global_scale(amax);
  made.zeros = amax == 0;
  made.codes.resize(static_cast<std::size_t>(x.length * n));
  if (r == Role::v) {
    encode_columns(c, x, rows, made);
    return made;
  }
  made.scales.resize(static_cast<std::size_t>(x.length * made.row_groups));
  for (std::int64_t s = 0; s < x.length; ++s) {
    cpu::encode_groups(c.format(r), rows.data() + s * wide, n, made.global,
                       made.codes.data() + s * n, made.scales.data() + s * made.row_groups);
    if (std::isnan(made.global)) made.bad[static_cast<std::size_t>(s)] = true;
  }
  return made;
}

int key_place(const Case& c, int key) {
  if (c.options().key_order == kernels::KeyOrder::natural) return key;
  for (int p = 0; p < 32; ++p) {
    if (kernels::fp4_key(p) == key % 32) return key / 32 * 32 + p;
  }
  return -1;
}

int value_place(const Case& c, int key) {
  return c.options().key_order == kernels::KeyOrder::natural ? position(key) : key;
}

std::uint8_t code_at(const std::uint8_t* row, int index, int bits) {
  if (bits == 8) return row[index];
  return static_cast<std::uint8_t>(row[index / 2] >> 4 * (index % 2) & 15);
}

void check_micro_rows(const Case& c, Role r, const Hidden* hidden) {
  const kernels::PreparedRows& out = r == Role::q ? c.out.q : c.out.k;
  const int n = c.channels(r), bits = info(c.format(r)).bits, padded = c.padded(r);
  ASSERT_EQ(out.row_bytes, padded * bits / 8);
  ASSERT_EQ(out.group_bytes, std::max(padded / info(c.format(r)).group, 4));
  const std::string who(name(r));
  Differences codes(who + " codes"), groups(who + " groups"), scales(who + " scales");
  Differences flags(who + " flags");
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.heads(r); ++h) {
      const MicroMade made = make_micro(c, r, b, h, hidden);
      const std::int64_t first = h * out.slots + c.first_slot(r, b);
      bool any_bad = false;
      for (std::int64_t s = 0; s < (c.length(b) + 63) / 64 * 64; ++s) {
        const auto at = static_cast<std::size_t>(s);
        const bool exists = s < c.length(b), bad = exists && made.bad[at];
        any_bad = bad || (any_bad && s % 64 != 0);
        scales.expect(out.scale[first + s],
                      !exists      ? 0.0f
                      : bad        ? nan_value
                      : made.zeros ? 1.0f
                                   : made.global,
                      b, h, s);
        const auto in = static_cast<int>(s % 64);
        const std::int64_t slot = first + s - in + (r == Role::k ? key_place(c, in) : in);
        for (int k = 0; k < padded; ++k) {
          const bool zero = !exists || bad || k >= n;
          codes.expect<std::uint8_t>(
              code_at(out.codes + slot * out.row_bytes, k, bits),
              zero ? 0 : made.codes[at * static_cast<std::size_t>(n) + static_cast<std::size_t>(k)],
              b, h, s, k);
        }
        for (int g = 0; g < out.group_bytes; ++g) {
          const bool zero = !exists || bad || g >= made.row_groups;
          const auto want = static_cast<std::size_t>(s * made.row_groups + g);
          groups.expect<std::uint8_t>(out.group_scale[slot * out.group_bytes + g],
                                      zero ? 0 : made.scales[want], b, h, s, g);
        }
        if (in == 63) flags.expect(out.flags[(first + s) / 64], any_bad ? 1u : 0u, b, h, s);
      }
    }
  }
}

void check_micro_values(const Case& c, const Hidden* hidden) {
  const kernels::PreparedTiles& v = c.out.v;
  const Format format = c.format(Role::v);
  const int bits = info(format).bits, n = c.channels(Role::v), padded = c.padded(Role::v);
  ASSERT_EQ(v.channels, padded);
  ASSERT_EQ(v.bits, bits);
  ASSERT_EQ(v.group, info(format).group);
  ASSERT_EQ(v.channel_scale != nullptr, format == Format::nvfp4);
  const kernels::TileOffsets o = kernels::tile_offsets(padded, bits, v.group);
  Differences codes("v codes"), globals("v globals");
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.heads(Role::v); ++h) {
      const MicroMade made = make_micro(c, Role::v, b, h, hidden);
      for (int k = 0; k < padded && v.channel_scale != nullptr && c.length(b) > 0; ++k) {
        globals.expect(v.channel_scale[(b * c.heads(Role::v) + h) * padded + k], made.global, b, h,
                       0, k);
      }
      for (std::int64_t first = 0; first < c.length(b); first += 64) {
        const std::int64_t tile = h * (v.slots / 64) + (c.first_slot(Role::v, b) + first) / 64;
        const std::uint8_t* record = v.tiles + tile * o.bytes;
        bool there[64], some = false;
        const auto hides = [&](std::int64_t s) {
          return hidden != nullptr && hidden->seen(b, h, s) == Seen::no;
        };
        for (int j = 0; j < 64; ++j) {
          const std::int64_t s = first + j;
          there[j] = s < c.length(b);
          some |= there[j] && !hides(s) && !made.bad[static_cast<std::size_t>(s)];
        }
        for (int j = 0; j < 64; ++j) {
          const std::int64_t s = first + j;
          const bool exists = there[j];
          there[j] = exists && (some || !hides(s));
          for (int k = 0; k < padded; ++k) {
            const std::uint8_t want =
                exists && k < n ? made.codes[static_cast<std::size_t>(s * n + k)] : 0;
            codes.expect(code_at(record + k * 8 * bits, value_place(c, j), bits), want, b, h, s, k);
          }
        }
        check_micro_tail(c, record, made, there, b, h, first);
      }
    }
  }
}

void check_micro(Case& c) {
  ASSERT_EQ(c.prepare(), "");
  for (const Role r : {Role::q, Role::k}) {
    if (info(c.format(r)).group > 0) check_micro_rows(c, r);
  }
  if (info(c.format(Role::v)).group > 0) check_micro_values(c);
  check_mean_scores(c);
  check_dots(c);
}

}  // namespace qattn::encode_test
