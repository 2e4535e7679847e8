// Factors that balance K's loud channels (docs/NUMERICS.md, "Loud channels"), bit by bit the CPU's.
#pragma once

#include "formats/balance.hpp"
#include "kernels/operand/numbers.hpp"
#include "kernels/quantize/gpu/seen_keys.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

struct BalanceParams {
  tile::Rows rows;  ///< K
  Format format = Format::bf16;
  SeenKeys seen;                  ///< only keys that share tell
  bool central = false;           ///< K's mean is subtracted
  float* factors = nullptr;       ///< [batches][heads][2][padded]: of K's rows, of Q's
  std::uint32_t* loud = nullptr;  ///< [batches][heads]: is a factor not 1?
  std::int32_t padded = 0;
  std::uint32_t* zeros = nullptr;  ///< words that are cleared meanwhile
  std::int64_t zero_count = 0;
  bool after = false;  ///< is there a kernel before it in the chain whose results it does not read?
};

/// One block a (sequence, head), a thread a channel.
template <int Channels>
struct FindBalance {
  using Params = BalanceParams;
  static constexpr int threads = Channels, min_blocks = 512 / Channels, most_tokens = 32;
  static constexpr int warps = threads / 32;
  // Shared memory: mean squares of channels, their median, of each warp the loudest channel, which
  // tokens are bad and how many channels are heard and quiet, and where the tokens are.
  static constexpr int median_at = 8 * threads, loudest_at = median_at + 16;
  static constexpr int bad_at = loudest_at + 8 * warps, heard_at = bad_at + 4 * warps;
  static constexpr int row_at = heard_at + 4 * warps;
  static constexpr int shared_bytes = row_at + 8 * most_tokens;
  static_assert(most_tokens <= 32 && row_at % 8 == 0);
  static constexpr bool dependent = true;

  struct Sums {
    double sum = 0.0, squares = 0.0;
    int count = 0;
  };

  static QATTN_DEVICE double load(SharedAddress at) {
    return __builtin_bit_cast(double, isa::load_shared<Words2>(at));
  }
  static QATTN_DEVICE void store(SharedAddress at, double x) {
    isa::store_shared(at, __builtin_bit_cast(Words2, x));
  }

  /// The channel of this thread in the tokens that tell; NaN on a page that does not exist. All
  /// loads are under way at a time: one after the other they would take 30 us.
  template <class Word>
  static QATTN_DEVICE void load_rows(const Params& p, int tokens, float (&x)[most_tokens]) {
    const auto* data = static_cast<const Word*>(p.rows.data) + isa::thread();
    Word raw[most_tokens];
#pragma unroll
    for (int i = 0; i < most_tokens; ++i) {
      const bool wanted = i < tokens && isa::thread() < p.rows.channels;
      const auto at = isa::load_shared<std::int64_t>(isa::shared_base() + row_at + 8 * i);
      raw[i] = 0;
      if (wanted && at != -1) raw[i] = isa::load_global(data + at);
      x[i] = wanted && at == -1 ? formats::quiet_nan() : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < most_tokens; ++i) {
      const float y = sizeof(Word) == 4         ? formats::float_of(raw[i])
                      : p.format == Format::f16 ? isa::unpack_f16(raw[i]).lo
                                                : isa::unpack_bf16(raw[i]).lo;
      x[i] = x[i] == 0.0f ? y : x[i];
    }
  }

  /// How many tokens may tell; leaves where the rows of those that do are. By all threads.
  static QATTN_DEVICE int choose(const Params& p, const tile::Span& span, int b, int head) {
    const std::int64_t length = span.bad ? 0 : span.length;
    const bool all = p.seen.bits == nullptr;
    const std::int64_t count = all || length == 0 ? length : sharing_keys(p.seen, b, head);
    const int tokens = formats::balance_tokens(count);
    const SharedAddress to = isa::shared_base() + row_at;
    if (isa::thread() < most_tokens) {
      std::int64_t at = -1;
      if (all && isa::thread() < tokens) {
        const std::int64_t token = formats::balance_token(isa::thread(), count);
        at = tile::row_offset(p.rows, span, b, head, token);
      }
      isa::store_shared(to + 8 * isa::thread(), at);
    }
    isa::sync_threads();
    if (!all) {
      if (isa::thread() == 0) find_sharing(p, span, b, head, count, to);
      isa::sync_threads();
    }
    return tokens;
  }
  /// The same where some keys do not share, by one thread: those before are counted.
  static QATTN_DEVICE void find_sharing(const Params& p, const tile::Span& span, int b, int head,
                                        std::int64_t count, SharedAddress to) {
    const int tokens = formats::balance_tokens(count);
    const std::int64_t first = tile::first_slot(p.rows, span, b) / slot_tile;
    std::int64_t before = 0;
    int found = 0;
    for (std::int64_t t = 0; found < tokens && t * slot_tile < span.length; ++t) {
      const TileSight sight = sight_of(p.seen, b, head, first + t);
      for (int key = 0; key < slot_tile && found < tokens; ++key) {
        if (!sight.shares(key) || t * slot_tile + key >= span.length) continue;
        for (; found < tokens && formats::balance_token(found, count) == before; ++found) {
          isa::store_shared(to + 8 * found,
                            tile::row_offset(p.rows, span, b, head, t * slot_tile + key));
        }
        ++before;
      }
    }
  }

  /// Which tokens are bad: a bit a token, of all channels.
  static QATTN_DEVICE std::uint32_t find_bad(const float (&x)[most_tokens]) {
    std::uint32_t bad = 0;
#pragma unroll
    for (int i = 0; i < most_tokens; ++i) bad |= formats::is_finite(x[i]) ? 0u : 1u << i;
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) bad |= isa::shuffle_xor(bad, mask);
    const SharedAddress words = isa::shared_base() + bad_at, mine = words + 4 * isa::warp();
    if (isa::lane() == 0) isa::store_shared(mine, bad);
    isa::sync_threads();
#pragma unroll
    for (int n = 0; n < warps; ++n) bad |= isa::load_shared<std::uint32_t>(words + 4 * n);
    return bad;
  }

  /// Over the tokens that tell, without those that hold NaN or Inf.
  static QATTN_DEVICE Sums add_up(const Params& p, const tile::Span& span, int b, int head) {
    const int tokens = choose(p, span, b, head);
    float x[most_tokens];
    p.format == Format::f32 ? load_rows<std::uint32_t>(p, tokens, x)
                            : load_rows<std::uint16_t>(p, tokens, x);
    const std::uint32_t bad = find_bad(x);
    Sums sums;
#pragma unroll
    for (int i = 0; i < most_tokens; ++i) {
      if (i >= tokens || (bad >> i & 1) != 0) continue;
      ++sums.count;
      const auto y = static_cast<double>(x[i]);
      sums.sum = formats::add_rn(sums.sum, y);
      sums.squares = formats::add_rn(sums.squares, formats::mul_rn(y, y));
    }
    return sums;
  }

  /// The largest mean square of all channels. Those below 2^1024 are ordered like their patterns.
  static QATTN_DEVICE double find_loudest(double mine) {
    const std::uint64_t top = warp_max(__builtin_bit_cast(std::uint64_t, mine));
    const SharedAddress words = isa::shared_base() + loudest_at, at = words + 8 * isa::warp();
    if (isa::lane() == 0) store(at, __builtin_bit_cast(double, top));
    isa::sync_threads();
    double loudest = 0.0;
#pragma unroll
    for (int n = 0; n < warps; ++n) {
      const double x = load(words + 8 * n);
      loudest = x > loudest ? x : loudest;
    }
    return loudest;
  }

  struct Heard {
    int all = 0;    ///< channels that are not 0 throughout
    int quiet = 0;  ///< those of them that are far below the loudest
  };
  static QATTN_DEVICE Heard count_heard(double mine, double quiet) {
    const SharedAddress words = isa::shared_base() + heard_at, at = words + 4 * isa::warp();
    const std::uint32_t all = isa::ballot(mine > 0.0);
    const std::uint32_t below = isa::ballot(mine > 0.0 && mine <= quiet);
    if (isa::lane() == 0) {
      const int both = formats::popcount(all) << 16 | formats::popcount(below);
      isa::store_shared(at, static_cast<std::uint32_t>(both));
    }
    isa::sync_threads();
    std::uint32_t sum = 0;
#pragma unroll
    for (int n = 0; n < warps; ++n) sum += isa::load_shared<std::uint32_t>(words + 4 * n);
    return {static_cast<int>(sum >> 16), static_cast<int>(sum & 0xffff)};
  }

  /// The median of the channels that are heard, `heard` of them.
  static QATTN_DEVICE double find_median(int channels, int heard, double mine) {
    const SharedAddress squares = isa::shared_base();
    store(squares + 8 * isa::thread(), mine);
    isa::sync_threads();
    int before = 0;
#pragma unroll 8
    for (int c = 0; c < channels; ++c) {
      const double x = load(squares + 8 * c);
      before += x > 0.0 && (x < mine || (x == mine && c < isa::thread())) ? 1 : 0;
    }
    if (mine > 0.0 && before == heard / 2) store(squares + median_at, mine);
    isa::sync_threads();
    return load(squares + median_at);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    if (!p.after) isa::grid_dependency_wait();
    find(p);
    // This kernel's end is that of the chain.
    if (p.after) isa::grid_dependency_wait();
  }

 private:
  static QATTN_DEVICE void find(const Params& p) {
    const int unit = isa::block().x, b = unit / p.rows.heads, head = unit % p.rows.heads;
    const int c = isa::thread();
    for (std::int64_t i = std::int64_t{unit} * threads + c; i < p.zero_count;
         i += std::int64_t{isa::grid().x} * threads) {
      isa::store_global(p.zeros + i, 0u);
    }
    const Sums sums = add_up(p, tile::span_of(p.rows, b), b, head);
    const bool enough = sums.count >= formats::kBalanceLeast;
    double square = enough && c < p.rows.channels ? sums.squares : 0.0;
    if (enough && p.central) {
      square = formats::central_squares(sums.sum, square, 1.0 / sums.count);
    }
    const Heard heard = count_heard(square, find_loudest(square) / formats::kLoudSquare);
    const bool loud = heard.quiet > heard.all / 2;
    const double median = loud ? find_median(p.rows.channels, heard.all, square) : 1.0;
    if (c == 0) isa::store_global(p.loud + unit, loud ? 1u : 0u);
    if (c >= p.padded) return;
    int power = 0;
    if (loud && square > 0.0) power = formats::balance_exponent(square / median);
    float* to = p.factors + std::int64_t{unit} * 2 * p.padded + c;
    isa::store_global(to, formats::power_of_two(-power));
    isa::store_global(to + p.padded, formats::power_of_two(power));
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
