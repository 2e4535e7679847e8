#include "kernels/operand/rows.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/operand.hpp"
#include "formats/balance.hpp"
#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/e4m3fnuz.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "formats/hadamard.hpp"
#include "formats/micro.hpp"
#include "formats/scale.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {
namespace {

template <class Codec>
int encode_fp8(const float* row, int n, float inverse, std::uint8_t* codes) {
  // Up to half a step beyond the largest code is rounding, not clipping: x * (1 / scale) of the
  // very amax that gave the scale may land an ulp above max.
  const std::uint8_t top = Codec::encode(Codec::max);
  const float limit =
      Codec::max + 0.5f * (Codec::max - Codec::decode(static_cast<std::uint8_t>(top - 1)));
  int clipped = 0;
  for (int i = 0; i < n; ++i) {
    const float x = row[i] * inverse;
    codes[i] = Codec::encode(x);
    clipped += x > limit || x < -limit;
  }
  return clipped;
}

template <class Codec>
void decode_fp8(const std::uint8_t* codes, int n, float* row) {
  for (int i = 0; i < n; ++i) row[i] = Codec::decode(codes[i]);
}

/// Codes of f16 or bf16.
void encode_halves(const KernelTable& words, const float* x, int n, Format format,
                   std::uint16_t* codes) {
  const int whole = n / lanes * lanes;
  const bool f16 = format == Format::f16;
  (f16 ? words.encode_f16 : words.encode_bf16)(x, whole, codes);
  for (int i = whole; i < n; ++i) {
    codes[i] = f16 ? formats::F16::encode(x[i]) : formats::Bf16::encode(x[i]);
  }
}

constexpr int most_signs = most_key_channels;

/// x times rotation_sign(), exactly.
void flip(float* x, int n) {
  static constexpr std::array<float, most_signs> sign = [] {
    std::array<float, most_signs> s{};
    for (int i = 0; i < most_signs; ++i) {
      s[static_cast<std::size_t>(i)] = formats::rotation_sign(i);
    }
    return s;
  }();
  for (int i = 0; i < n; ++i) x[i] *= sign[static_cast<std::size_t>(i)];
}

/// Do vectors hold whole blocks of the rotation?
bool in_vectors(int n) { return n <= most_signs && formats::rotation_block(n) >= lanes; }

void hadamard(const KernelTable& words, float* x, int n) {
  const int block = formats::rotation_block(n);
  words.hadamard(x, n, block, formats::rotation_norm(block));
}

}  // namespace

void rotate(const KernelTable& words, float* x, int n) {
  if (!in_vectors(n)) return formats::rotate(x, n);
  flip(x, n);
  hadamard(words, x, n);
}

void unrotate(const KernelTable& words, float* x, int n) {
  if (!in_vectors(n)) return formats::unrotate(x, n);
  hadamard(words, x, n);
  flip(x, n);
}

Element element_of(Format format) {
  return format == Format::f16    ? Element::f16
         : format == Format::bf16 ? Element::bf16
                                  : Element::f32;
}

bool some_share(const Sequence& x, std::int64_t begin, std::int64_t end) {
  return x.seen == nullptr || std::find(x.seen + begin, x.seen + end, Seen::yes) != x.seen + end;
}

void load_row(const KernelTable& words, const Sequence& x, std::int64_t token,
              const Transform& transform, float* dst) {
  if (x.hidden(token)) {
    std::memset(dst, 0, sizeof(float) * static_cast<std::size_t>(padded(x.channels)));
    return;
  }
  words.load_row(x.row(token), element_of(x.format), x.channels, transform.mean, dst);
  if (transform.factors != nullptr) {
    for (int i = 0; i < x.channels; ++i) dst[i] *= transform.factors[i];
  }
  if (transform.rotate) rotate(words, dst, x.channels);
}

void mean_of_rows(const KernelTable& words, const Sequence& x, std::int64_t begin, std::int64_t end,
                  float* mean, float* partial) {
  constexpr int at_once = 64;
  const int n = padded(x.channels);
  double total[most_key_channels] = {};
  std::int64_t count = 0;
  for (std::int64_t s = begin; s < end;) {
    const void* rows[at_once];
    int sharing = 0;
    for (const std::int64_t stop = std::min(s + at_once, end); s < stop; ++s) {
      if (x.shares(s)) rows[sharing++] = x.row(s);
    }
    words.sum_rows({rows, element_of(x.format)}, sharing, x.channels, partial);
    for (int i = 0; i < x.channels; ++i) total[i] += static_cast<double>(partial[i]);
    count += sharing;
  }
  const double tokens = count > 0 ? static_cast<double>(count) : 1.0;
  for (int i = 0; i < n; ++i) {
    mean[i] = i < x.channels ? static_cast<float>(total[i] / tokens) : 0.0f;
  }
}

namespace {

/// The rows that tell how loud channels are: calls use(token).
template <class Use>
void each_balance_token(const Sequence& x, Use use) {
  std::int64_t count = x.length, rank = 0, s = -1;
  if (x.seen != nullptr) count = std::count(x.seen, x.seen + x.length, Seen::yes);
  for (int i = 0; i < formats::balance_tokens(count); ++i) {
    const std::int64_t wanted = formats::balance_token(i, count);
    if (x.seen == nullptr) s = wanted;
    for (; x.seen != nullptr && rank <= wanted; ++rank) {
      do ++s;
      while (!x.shares(s));
    }
    use(s);
  }
}

/// Sums over those rows, without the bad ones with `careful`. Returns how many there were.
int sum_balance_rows(const KernelTable& words, const Sequence& x, bool careful, double* sum,
                     double* squares, float* row) {
  int count = 0;
  std::fill(sum, sum + x.channels, 0.0);
  std::fill(squares, squares + x.channels, 0.0);
  each_balance_token(x, [&](std::int64_t s) {
    load_row(words, x, s, {}, row);
    if (careful && std::isnan(words.amax(row, x.channels))) return;
    ++count;
    for (int i = 0; i < x.channels; ++i) {
      const auto value = static_cast<double>(row[i]);
      sum[i] += value;
      squares[i] += value * value;  // exact: a product of floats
    }
  });
  return count;
}

}  // namespace

bool balance_rows(const KernelTable& words, const Sequence& x, bool central, float* factors,
                  float* row) {
  const int n = x.channels;
  double sum[most_key_channels], squares[most_key_channels];
  int count = sum_balance_rows(words, x, false, sum, squares, row);
  // A bad token spoils nobody else.
  if (std::any_of(sum, sum + n, [](double s) { return std::isnan(s); })) {
    count = sum_balance_rows(words, x, true, sum, squares, row);
  }
  if (count < formats::kBalanceLeast) return false;
  const double inverse = 1.0 / count;
  for (int i = 0; central && i < n; ++i) {
    squares[i] = formats::central_squares(sum[i], squares[i], inverse);
  }
  // Most channels are quiet beside the loudest, or none is loud.
  const double quiet = *std::max_element(squares, squares + n) / formats::kLoudSquare;
  double sorted[most_key_channels];
  int heard = 0, below = 0;  // channels that are not 0 throughout
  for (int i = 0; i < n; ++i) {
    heard += squares[i] > 0.0 ? 1 : 0;
    below += squares[i] > 0.0 && squares[i] <= quiet ? 1 : 0;
  }
  if (below <= heard / 2) return false;
  std::copy_if(squares, squares + n, sorted, [](double r) { return r > 0.0; });
  std::nth_element(sorted, sorted + heard / 2, sorted + heard);
  const double median = sorted[heard / 2];
  for (int i = 0; i < padded(n); ++i) {
    const int power = i < n ? formats::balance_exponent(squares[i] / median) : 0;
    factors[i] = formats::power_of_two(-power);
    factors[padded(n) + i] = formats::power_of_two(power);
  }
  return true;
}

void amax_of_rows(const KernelTable& words, const Sequence& x, const Transform& transform,
                  float* amax, float* row) {
  for (std::int64_t s = 0; s < x.length; ++s) {
    load_row(words, x, s, transform, row);
    amax[s] = words.amax(row, x.channels);
  }
}

void fold_groups(const Scaling& scaling, Role role, const float* token_amax, std::int64_t tokens,
                 float* group_amax, std::int64_t groups) {
  for (std::int64_t g = 0; g < groups; ++g) group_amax[g] = 0.0f;
  for (std::int64_t s = 0; s < tokens; ++s) {
    float& g = group_amax[scale_index(scaling, role, s)];
    g = formats::fold_amax(g, token_amax[s]);
  }
}

void join_amax(float* amax, std::int64_t tokens) {
  constexpr std::int64_t block = 64;
  for (std::int64_t first = 0; first < tokens; first += block) {
    const std::int64_t end = std::min(first + block, tokens);
    float top[4] = {};
    for (std::int64_t s = first; s < end; ++s) {
      if (formats::is_finite(amax[s])) top[s % 8 / 2] = std::max(top[s % 8 / 2], amax[s]);
    }
    for (std::int64_t s = first; s < end; ++s) {
      amax[s] = formats::joint_amax(amax[s], top[s % 8 / 2]);
    }
  }
}

float code_max(Format format) {
  switch (format) {
    case Format::s8:
      return 127.0f;
    case Format::e4m3:
      return formats::E4m3::max;
    case Format::e4m3fnuz:
      return formats::E4m3Fnuz::max;
    case Format::e5m2:
      return formats::E5m2::max;
    default:
      return std::numeric_limits<float>::quiet_NaN();
  }
}

int encode_row(const KernelTable& words, Format format, const float* row, int n, float inverse,
               std::uint8_t* codes) {
  switch (format) {
    case Format::s8:
      return words.encode_s8(row, n, inverse, reinterpret_cast<std::int8_t*>(codes));
    case Format::e4m3:
      return encode_fp8<formats::E4m3>(row, n, inverse, codes);
    case Format::e4m3fnuz:
      return encode_fp8<formats::E4m3Fnuz>(row, n, inverse, codes);
    default:
      return encode_fp8<formats::E5m2>(row, n, inverse, codes);
  }
}

void decode_row(Format format, const std::uint8_t* codes, int n, float* row) {
  switch (format) {
    case Format::s8:
      for (int i = 0; i < n; ++i) row[i] = static_cast<float>(static_cast<std::int8_t>(codes[i]));
      break;
    case Format::e4m3:
      decode_fp8<formats::E4m3>(codes, n, row);
      break;
    case Format::e4m3fnuz:
      decode_fp8<formats::E4m3Fnuz>(codes, n, row);
      break;
    default:
      decode_fp8<formats::E5m2>(codes, n, row);
      break;
  }
}

void encode_groups(Format format, const float* x, int n, float global, std::uint8_t* codes,
                   std::uint8_t* scales) {
  const int group = info(format).group;
  for (int i = 0, g = 0; i < n; i += group, ++g) {
    const int count = n - i < group ? n - i : group;
    std::uint8_t full[32];
    switch (format) {
      case Format::mxfp8:
        scales[g] = formats::encode_group_mxfp8(x + i, count, full);
        break;
      case Format::mxfp4:
        scales[g] = formats::encode_group_mxfp4(x + i, count, full);
        break;
      default:
        scales[g] = formats::encode_group_nvfp4(x + i, count, global, full);
        break;
    }
    std::memcpy(codes + i, full, static_cast<std::size_t>(count));
  }
}

float decode_group_code(Format format, std::uint8_t code, std::uint8_t scale, float global) {
  switch (format) {
    case Format::mxfp8:
      return formats::decode_mxfp8(code, scale);
    case Format::mxfp4:
      return formats::decode_mxfp4(code, scale);
    default:
      return formats::decode_nvfp4(code, scale, global);
  }
}

float global_scale(float amax) { return formats::nvfp4_global(amax); }

void round_row(const KernelTable& words, Format format, float* row, int n) {
  if (format != Format::f16 && format != Format::bf16) return;
  constexpr int step = 16 * lanes;
  for (int i = 0; i < n; i += step) {
    std::uint16_t codes[step];
    const int count = std::min(step, n - i);
    encode_halves(words, row + i, count, format, codes);
    if (count % lanes == 0) {  // a value that overflows f16 becomes NaN, as +-Inf inputs do
      words.load_row(codes, element_of(format), count, nullptr, row + i);
      continue;
    }
    float rounded[step];
    words.load_row(codes, element_of(format), count, nullptr, rounded);
    std::copy(rounded, rounded + count, row + i);
  }
}

std::uint8_t packed_code(const std::byte* row, std::int64_t index, int bits) {
  if (bits == 8) return std::to_integer<std::uint8_t>(row[index]);
  const std::uint8_t pair = std::to_integer<std::uint8_t>(row[index / 2]);  // 4 bits: low first
  return index % 2 ? pair >> 4 : pair & 15;
}

void store_row(const KernelTable& words, const float* row, int n, Format format, std::byte* dst) {
  if (format == Format::f32) {
    std::memcpy(dst, row, sizeof(float) * static_cast<std::size_t>(n));
    return;
  }
  encode_halves(words, row, n, format, reinterpret_cast<std::uint16_t*>(dst));
}

}  // namespace qattn::cpu
