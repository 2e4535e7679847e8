#include "encode_check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "formats/e4m3.hpp"
#include "formats/e4m3fnuz.hpp"
#include "formats/e5m2.hpp"
#include "formats/int8.hpp"
#include "formats/scale.hpp"

namespace qattn::encode_test {

int position(int key) {
  for (int p = 0; p < 16; ++p) {
    if (kernels::p_key(p) == key % 16) return key / 16 * 16 + p;
  }
  return -1;
}

namespace {

/// Counts differences and reports the first.
class Differences {
 public:
  explicit Differences(std::string what) : what_(std::move(what)) {}
  ~Differences() { EXPECT_EQ(count_, 0) << what_ << ": first " << first_; }
  /// Of millions that are equal nothing is said.
  void add(bool equal, const char* what, std::int64_t b, std::int64_t h, std::int64_t s, double got,
           double want) {
    if (equal || count_++ > 0) return;
    first_ = std::string(what) + " of sequence " + std::to_string(b) + " head " +
             std::to_string(h) + " token " + std::to_string(s) + ": " + std::to_string(got) +
             " should be " + std::to_string(want);
  }

 private:
  std::string what_, first_;
  std::int64_t count_ = 0;
};

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

template <class T>
T at(const std::uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

std::uint8_t encode(Format f, float y) {
  switch (f) {
    case Format::s8:
      return static_cast<std::uint8_t>(formats::S8::encode(y));
    case Format::e4m3:
      return formats::E4m3::encode(y);
    case Format::e5m2:
      return formats::E5m2::encode(y);
    default:
      return formats::E4m3Fnuz::encode(y);
  }
}

/// What a token's code and scale should be: quantize()'s, or from the scales as given. Given scales
/// are tested without mean and rotation, so that the codec itself is the judge.
class Truth {
 public:
  Truth(const Case& c, Role r) : case_(c), role_(r) {
    const int i = static_cast<int>(r);
    codes_ = c.options().given_codes[i];
    given_ = codes_ || c.options().given_scales[i];
    format_ = r == Role::v ? c.options().recipe.v : c.options().recipe.qk;
    if (!given_) {
      expected_ = expect(c, r);
      EXPECT_EQ(expected_.error, "");
    }
  }
  bool bad(std::int64_t s) const { return case_.is_bad(role_, s); }
  float scale(std::int64_t b, std::int64_t h, std::int64_t s, int c) const {
    return given_ ? case_.given_scale(role_, b, h, s, c)
                  : expected_.scale_of(case_, role_, b, h, s, c);
  }
  std::uint8_t code(std::int64_t b, std::int64_t h, std::int64_t s, int c) const {
    if (codes_) return case_.code(role_, b, h, s, c);
    if (!given_) return expected_.code(case_, role_, b, h, s, c);
    const float x = case_.value(role_, b, h, s, c) + 0.0f;
    return encode(format_, x * (1.0f / scale(b, h, s, c)));
  }
  bool is_s8() const { return format_ == Format::s8; }
  const Expected& expected() const { return expected_; }

 private:
  const Case& case_;
  Role role_;
  Format format_;
  bool codes_ = false, given_ = false;
  Expected expected_;
};

bool by_token(const Case& c) {
  const Granularity g = c.options().recipe.v_scale.granularity;
  return g == Granularity::per_token || g == Granularity::per_thread;
}

/// Do tokens with the same (key % 8) / 2 of the tile have different scales? `count`: at least 7.
bool is_mixed(const Case& c, const Truth& truth, std::int64_t b, std::int64_t h, std::int64_t first,
              int count) {
  for (int j = 0; j < count; ++j) {
    const std::int64_t s = first + j, shared = first + j % 8 / 2 * 2;
    if (truth.bad(s) || truth.bad(shared)) continue;
    if (by_token(c) && truth.scale(b, h, s, 0) != truth.scale(b, h, shared, 0)) return true;
  }
  return false;
}

/// The tables of one tile of V: log, inverse, flags and what lies behind its codes.
void check_tables(const Case& c, const Truth& truth, const std::uint8_t* record, std::int64_t b,
                  std::int64_t h, std::int64_t first, int count) {
  const int channels = kernels::prepared_channels(c.options().dv);
  const kernels::TileOffsets o = kernels::tile_offsets(channels);
  const std::uint8_t* extra = record + o.extra;
  const bool integer = c.options().recipe.v == Format::s8, token = by_token(c);
  bool any_bad = false;
  int usable = 0;
  Differences wrong("tables of V");
  for (int j = 0; j < 64; ++j) {
    const std::int64_t s = first + j;
    const bool exists = j < count, bad = exists && truth.bad(s);
    const float log = at<float>(record + o.log + 4 * j);
    const float inverse = at<float>(record + o.inverse + 4 * j);
    any_bad |= bad;
    usable += exists && !bad;
    double scale = 1;
    if (exists && !bad && token) {
      scale = std::max<double>(truth.scale(b, h, s, 0), std::ldexp(1.0, -90));
    }
    wrong.add(std::abs(log - std::log2(scale)) <= 1e-5 * std::max(1.0, std::abs(std::log2(scale))),
              "log", b, h, s, log, std::log2(scale));
    const float want = bad                  ? NAN
                       : exists && !integer ? 1.0f
                       : exists             ? 1.0f / static_cast<float>(scale)
                                            : 0.0f;
    wrong.add(same(inverse, want), "inverse", b, h, s, inverse, want);
    if (!integer) {
      const std::uint8_t one = encode(c.options().recipe.v, 1.0f);
      wrong.add(extra[position(j)] == (exists ? one : 0), "one", b, h, s, extra[j], one);
    }
  }
  for (int i = 64; i < 512 && !integer; ++i)
    wrong.add(extra[i] == 0, "extra rows 1 to 7", b, h, first, extra[i], 0);
  for (int k = 0; k < channels && integer; ++k) {
    int sum = 0;
    for (int j = 0; j < 64; ++j) sum += record[o.codes + 64 * k + j] - kernels::value_offset;
    const double want = usable > 0 ? std::max(-127.0, static_cast<double>(sum) / usable) : 0;
    const int got = static_cast<std::int8_t>(extra[k]);
    wrong.add(std::abs(got - want) <= 0.5001, "mean", b, h, k, got, want);
  }
  const bool mixed = count < 7 || is_mixed(c, truth, b, h, first, count);
  const std::uint32_t want_flags = (any_bad ? 1u : 0u) | (mixed ? 4u : 0u);
  // An edge, or a bad token, is enough by itself.
  const std::uint32_t known = count < 7 || any_bad ? 1u : 5u;
  const auto flags = at<std::uint32_t>(record + o.flags);
  wrong.add((flags & known) == (want_flags & known), "flags", b, h, first, flags, want_flags);
}

void check_channel_scales(const Case& c, const Truth& truth) {
  const kernels::PreparedTiles& v = c.out.v;
  ASSERT_EQ(v.channel_scale == nullptr, by_token(c));
  if (by_token(c)) return;
  Differences wrong("scales of V's channels");
  const int heads = c.heads(Role::v);
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < heads; ++h) {
      // Packed sequences that have several groups: where their tokens' entries of a table lie.
      const std::int64_t first = v.packed_groups
                                     ? h * v.groups + c.first_block(Role::v, b, v.channel_block)
                                     : (b * heads + h) * v.groups;
      for (std::int64_t s = 0; s < c.length(b); ++s) {
        const float* scale = v.channel_scale + (first + s / v.channel_block) * v.channels;
        for (int k = 0; k < v.channels; ++k) {
          const float want = k < c.options().dv ? truth.scale(b, h, s, k) : 0.0f;
          wrong.add(same(scale[k], want), "scale", b, h, s, scale[k], want);
        }
      }
    }
  }
}

}  // namespace

void check_rows(const Case& c, Role r) {
  const Truth truth(c, r);
  const kernels::PreparedRows& out = r == Role::q ? c.out.q : c.out.k;
  const int n = c.channels(r);
  ASSERT_EQ(out.row_bytes, kernels::prepared_channels(n));
  Differences codes(std::string(name(r)) + " codes"), scales(std::string(name(r)) + " scales");
  Differences flags(std::string(name(r)) + " flags");
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.heads(r); ++h) {
      bool any_bad = false;
      for (std::int64_t s = 0; s < (c.length(b) + 63) / 64 * 64; ++s) {
        const std::int64_t slot = h * out.slots + c.first_slot(r, b) + s;
        const bool exists = s < c.length(b);
        if (s % 64 == 0) any_bad = false;
        float scale = exists ? truth.scale(b, h, s, 0) : 0.0f;
        if (exists && c.is_spoiled(r, b, s)) scale = NAN;
        any_bad |= std::isnan(scale);
        scales.add(same(out.scale[slot], scale), "scale", b, h, s, out.scale[slot], scale);
        for (int k = 0; k < out.row_bytes; ++k) {
          const std::uint8_t got = out.codes[slot * out.row_bytes + k];
          const bool zero = !exists || k >= n || std::isnan(scale);
          const std::uint8_t want = zero ? 0 : truth.code(b, h, s, k);
          codes.add(got == want, "code", b, h, s, got, want);
        }
        if (s % 64 == 63) {
          flags.add(out.flags[slot / 64] == (any_bad ? 1u : 0u), "flags", b, h, s,
                    out.flags[slot / 64], any_bad);
        }
      }
    }
  }
}

void check_tiles(const Case& c) {
  const Truth truth(c, Role::v);
  const kernels::PreparedTiles& v = c.out.v;
  const int padded = kernels::prepared_channels(c.options().dv);
  ASSERT_EQ(v.channels, padded);
  const kernels::TileOffsets o = kernels::tile_offsets(padded);
  Differences codes("v codes");
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.heads(Role::v); ++h) {
      for (std::int64_t first = 0; first < c.length(b); first += 64) {
        const std::int64_t tile = h * (v.slots / 64) + (c.first_slot(Role::v, b) + first) / 64;
        const std::uint8_t* record = v.tiles + tile * o.bytes;
        const int count = static_cast<int>(std::min<std::int64_t>(64, c.length(b) - first));
        check_tables(c, truth, record, b, h, first, count);
        for (int k = 0; k < padded; ++k) {
          for (int j = 0; j < 64; ++j) {
            const bool zero = j >= count || k >= c.options().dv || truth.bad(first + j);
            const int offset = truth.is_s8() ? kernels::value_offset : 0;
            const auto want =
                static_cast<std::uint8_t>((zero ? 0 : truth.code(b, h, first + j, k)) + offset);
            const std::uint8_t got = record[k * 64 + position(j)];
            codes.add(got == want, "code", b, h, first + j, got, want);
          }
        }
      }
    }
  }
  check_channel_scales(c, truth);
}

void check_means(const Case& c, Role r) {
  const float* mean = r == Role::k ? c.out.k_mean : c.out.v_mean;
  const Toggle wanted = r == Role::k ? c.options().recipe.smooth_k : c.options().recipe.smooth_v;
  ASSERT_EQ(mean != nullptr, wanted == Toggle::on);
  if (mean == nullptr) return;
  const Expected e = expect(c, r);
  const int n = c.channels(r), padded = kernels::prepared_channels(n);
  Differences wrong(std::string(name(r)) + " mean");
  for (std::int64_t i = 0; i < c.batch() * c.heads(r); ++i) {
    for (int k = 0; k < padded; ++k) {
      const float want = k < n ? e.mean[static_cast<std::size_t>(i * n + k)] : 0.0f;
      // The sums have the CPU's order, so they are not merely close.
      wrong.add(same(mean[i * padded + k], want), "mean", i, 0, k, mean[i * padded + k], want);
    }
  }
}

void check_block_means(const Case& c) {
  const kernels::PreparedMeans& out = c.out.q_mean;
  ASSERT_EQ(out.data != nullptr, c.options().recipe.smooth_q == Toggle::on);
  if (out.data == nullptr) return;
  const Expected e = expect(c, Role::q);
  const std::int64_t d = c.options().d, blocks = e.shapes.mean.shape[2];
  ASSERT_EQ(out.channels, kernels::prepared_channels(c.options().d));
  Differences wrong("means of q's blocks");
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.options().heads_q; ++h) {
      const std::int64_t first = h * out.blocks + c.first_block(Role::q, b, out.block);
      for (std::int64_t n = 0; n * out.block < c.length(b); ++n) {
        for (std::int64_t k = 0; k < out.channels; ++k) {
          const std::int64_t at = ((b * c.options().heads_q + h) * blocks + n) * d + k;
          const float want = k < d ? e.mean[static_cast<std::size_t>(at)] : 0.0f;
          const float got = out.data[(first + n) * out.channels + k];
          wrong.add(same(got, want), "mean of block", b, h, n, got, want);
        }
      }
    }
  }
}

void check_mean_scores(const Case& c) {
  const kernels::PreparedMeans& out = c.out.q_mean;
  if (out.data == nullptr) return;
  const int d = c.options().d, group = c.options().heads_q / c.options().heads_kv;
  const bool groups = info(c.format(Role::q)).group > 0;
  Differences wrong("mean of q . k");
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.options().heads_q; ++h) {
      const int hk = h / group;
      const std::int64_t first = h * out.blocks + c.first_block(Role::q, b, out.block);
      const float* k_mean = c.out.k_mean == nullptr
                                ? nullptr
                                : c.out.k_mean + (b * c.heads(Role::k) + hk) * c.padded(Role::k);
      // Bad tokens have no second level; where all are bad nobody reads the scores.
      const auto unit = [&](const kernels::PreparedRows& x, Role r, int head) {
        double scale = 0;
        for (std::int64_t s = 0; s < c.length(b) && !(scale > 0); ++s) {
          scale = x.scale[head * x.slots + c.first_slot(r, b) + s];
        }
        return scale;
      };
      const double factor = groups ? unit(c.out.q, Role::q, h) * unit(c.out.k, Role::k, hk)
                                   : std::sqrt(static_cast<double>(d));
      for (std::int64_t n = 0; n * out.block < c.length(b); ++n) {
        const float* mean = out.data + (first + n) * out.channels;
        const float* scores =
            out.scores + (h * out.most + n) * out.key_slots + c.first_slot(Role::k, b);
        for (std::int64_t s = 0; s < c.length(b); ++s) {
          double sum = 0, size = 0;
          for (int k = 0; k < d; ++k) {
            const double x = c.value(Role::k, b, hk, s, k);
            const double less = k_mean == nullptr ? 0.0 : k_mean[k];
            sum += (x - less) * mean[k];
            size += (std::abs(x) + std::abs(less)) * std::abs(mean[k]);
          }
          const double got = scores[s] * factor;
          wrong.add(std::abs(got - sum) <= 4e-6 * size || (std::isnan(got) && std::isnan(sum)),
                    "mean score", b, h, s, got, sum);
        }
      }
    }
  }
}

void check_dots(const Case& c) {
  ASSERT_EQ(c.out.q.dot_mean != nullptr, c.options().dot_mean);
  if (!c.options().dot_mean) return;
  Differences wrong("q . mean of k");
  const int d = c.options().d, padded = c.padded(Role::k);
  const int group = c.options().heads_q / c.options().heads_kv;
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.options().heads_q; ++h) {
      const float* mean = c.out.k_mean + (b * c.options().heads_kv + h / group) * padded;
      for (std::int64_t s = 0; s < c.length(b); ++s) {
        double sum = 0, size = 0;
        for (int k = 0; k < d; ++k) {
          const double term = static_cast<double>(c.value(Role::q, b, h, s, k)) * mean[k];
          sum += term;
          size += std::abs(term);
        }
        const float got = c.out.q.dot_mean[h * c.out.q.slots + c.first_slot(Role::q, b) + s];
        wrong.add(std::abs(got - sum) <= 1e-5 * size || (std::isnan(got) && std::isnan(sum)), "dot",
                  b, h, s, got, sum);
      }
    }
  }
}

void check_case(const CaseOptions& options) {
  Case c(options);
  ASSERT_EQ(c.prepare(), "");
  check_rows(c, Role::q);
  check_rows(c, Role::k);
  check_tiles(c);
  check_means(c, Role::k);
  check_means(c, Role::v);
  check_block_means(c);
  check_mean_scores(c);
  check_dots(c);
}

}  // namespace qattn::encode_test
