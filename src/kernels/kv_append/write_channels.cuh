// K's codes under a scale a channel, of every page that an append makes and whose K does not keep
// its bits: what WritePages leaves out. Half a warp judges a token, then quantises a channel.
// formats/kv/layout.hpp and kv/quantize.hpp say what is computed; the host's is the same bit for
// bit (src/kvcache/pages.cpp, encode_channels()).
#pragma once

#include "kernels/kv_append/write.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Pages of up to `Tokens` tokens, rows of up to 16 N channels.
template <int N, int Tokens>
struct WriteChannels {
  using Params = AppendParams;
  using Write = WritePages<N>;
  using Unit = typename Write::Unit;
  static constexpr int threads = 128, min_blocks = 1;
  static constexpr int at_once = threads / row_lanes;  ///< tokens, then channels
  static constexpr int most_tokens = Tokens, most_channels = row_lanes * N;
  static constexpr int per_lane = most_tokens / row_lanes;
  static constexpr bool dependent = true;

  /// Rows as floats, one more a row so that a column has no bank conflict; codes of all blocks;
  /// which tokens are good; a byte for what each token is.
  static constexpr int pitch = (most_channels + 1) * 4;
  static constexpr int panels_at = most_tokens * pitch;
  static constexpr int good_at = panels_at + most_tokens * most_channels;
  static constexpr int kinds_at = good_at + most_tokens;
  static constexpr int shared_bytes = kinds_at + most_tokens;
  enum Kind : std::uint8_t { dead, good, bad };

  static QATTN_DEVICE isa::SharedAddress at(int place, int index = 0) {
    return isa::shared_base() + static_cast<isa::SharedAddress>(place + index);
  }

  /// The tokens' rows, and what they are. Dead and bad ones have codes 0.
  static QATTN_DEVICE void load_tokens(const Params& p, Unit& u, int channels, int bits) {
    const int tokens = p.state.cache.page_size;
    for (int i = isa::thread(); i < tokens * channels / 4; i += threads) {
      isa::store_shared(at(panels_at, 4 * i), 0u);
    }
    for (int token = isa::thread() / row_lanes; token < tokens; token += at_once) {
      u.block = token / formats::kv_block_tokens;
      LaneRow<N> row;
      Write::load_row(p, u, token % formats::kv_block_tokens, row);
      const bool holds = formats::kv_holds(row.amax(), bits);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (LaneRow<N>::channel(j) >= channels) continue;
        isa::store_shared(at(token * pitch, 4 * LaneRow<N>::channel(j)),
                          formats::bits_of(row.x[j]));
      }
      if (row_lane() != 0) continue;
      const Kind kind = !u.alive(token % formats::kv_block_tokens) ? dead : holds ? good : bad;
      isa::store_shared(at(kinds_at, token), static_cast<std::uint8_t>(kind));
    }
  }

  /// Bits of the page's tokens that are `kind`; every warp finds them for itself.
  static QATTN_DEVICE std::uint64_t tokens_that_are(Kind kind, int tokens) {
    std::uint64_t found = 0;
    for (int first = 0; first < tokens; first += 32) {
      const int token = first + isa::lane();
      const bool is = token < tokens && isa::load_shared<std::uint8_t>(at(kinds_at, token)) == kind;
      found |= std::uint64_t{isa::ballot(is)} << first;
    }
    return found;
  }

  /// One channel of the good tokens: its scale, and its codes into the panels.
  static QATTN_DEVICE void encode_channel(const BlockPart& to, int c, int count) {
    const int size = (count + row_lanes - 1) / row_lanes * row_lanes;
    LaneRow<per_lane> column;
    int token[per_lane];
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      const int i = LaneRow<per_lane>::channel(j);
      column.x[j] = 0.0f;
      token[j] = 0;
      if (i >= size) continue;
      token[j] = isa::load_shared<std::uint8_t>(at(good_at, i % count));
      column.x[j] = formats::float_of(isa::load_shared<std::uint32_t>(at(token[j] * pitch, 4 * c)));
    }
    const std::uint16_t scale = column.scale_code(size, to.bits);
    const float inverse = formats::kv_inverse(scale);
#pragma unroll
    for (int j = 0; j < per_lane; ++j) {
      if (LaneRow<per_lane>::channel(j) >= count) continue;
      const int block = token[j] / formats::kv_block_tokens;
      isa::store_shared(
          at(panels_at, block * to.count() + to.place(token[j] % formats::kv_block_tokens, c)),
          formats::kv_encode(column.x[j], inverse, to.bits));
    }
    if (row_lane() == 0) isa::store_global(to.scales + c, scale);
  }

  static QATTN_DEVICE void store_panels(const Params& p, const Unit& u, const BlockPart& first) {
    const int words = formats::kv_code_bytes(first.count(), first.bits) / 4;
    const int blocks = p.state.cache.blocks_per_page();
    const int block_bytes = p.state.cache.pool[u.job.to.tier].layout.block_bytes();
    for (int i = isa::thread(); i < blocks * words; i += threads) {
      const int block = i / words, word = i % words;
      isa::store_global(
          reinterpret_cast<std::uint32_t*>(first.codes + block * block_bytes) + word,
          pack_word(at(panels_at, block * first.count()), first.count(), first.bits, word));
    }
  }

  static QATTN_DEVICE void encode(const Params& p, Unit& u) {
    const int tokens = p.state.cache.page_size;
    const BlockPart to(p.state.cache.pool[u.job.to.tier], u.page, 0, false);
    load_tokens(p, u, to.channels, to.bits);
    isa::sync_threads();
    const std::uint64_t is_good = tokens_that_are(good, tokens);
    const std::uint64_t is_bad = tokens_that_are(bad, tokens);
    const int count = __builtin_popcountll(is_good);
    if (const int token = isa::thread(); token < tokens && (is_good >> token & 1) != 0) {
      isa::store_shared(
          at(good_at, __builtin_popcountll(is_good & ((std::uint64_t{1} << token) - 1))),
          static_cast<std::uint8_t>(token));
    }
    if (isa::thread() == 0) {
      std::uint64_t* words = p.state.cache.pool[u.job.to.tier].bad_tokens(u.page);
      isa::store_global(words, is_bad);
      isa::store_global(words + 1, std::uint64_t{0});
    }
    isa::sync_threads();
    for (int c = isa::thread() / row_lanes; c < to.channels; c += at_once) {
      if (count > 0) {
        encode_channel(to, c, count);
      } else if (row_lane() == 0) {
        isa::store_global(to.scales + c, std::uint16_t{0});
      }
    }
    isa::sync_threads();
    store_panels(p, u, to);
    isa::sync_threads();
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const HeadJobs head(p);
    for (std::int64_t i = isa::block().x; i < head.count; i += isa::grid().x) {
      const kv::AppendJob job = load_struct(head.jobs + i);
      if (job.to.tier == 0 || Write::keeps_codes(p, job, false)) continue;
      Unit u{job,
             head.b,
             head.h,
             head.slot,
             0,
             false,
             p.k,
             job.to.first - head.old_length,
             Write::resolve(p, head.b, head.h, job),
             head.set_of(p, job)};
      encode(p, u);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
