#include "kvcache/pages.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "formats/bf16.hpp"
#include "formats/kv/quantize.hpp"
#include "kernels/operand/rows.hpp"
#include "kernels/quantize/host/kv_rows.hpp"

namespace qattn::kv {
namespace {

using detail::KvCacheData;
using formats::kv_block_tokens;

constexpr int most_tokens_of_page = 64;

/// K or V of a page: where it lies in a block, and how its places count.
struct PagePart {
  int channels, bits, place_bytes, scale_bytes;  ///< the last two: offsets inside the block
  Part part;
  bool by_channel;  ///< K with a scale a channel, which lie behind the blocks
  bool rotated;     ///< in tiers

  PagePart(const KvCacheData& cache, const formats::KvPage& page, Part p)
      : channels(p == Part::k ? page.block.d : page.block.dv),
        bits(p == Part::k ? page.block.k_bits : page.block.v_bits),
        place_bytes(p == Part::k ? page.block.k_codes() : page.block.v_codes()),
        scale_bytes(p == Part::k ? page.block.k_scales() : page.v_scales()),
        part(p),
        by_channel(p == Part::k && page.k_by_channel),
        rotated(cache.options.rotate && !(p == Part::k && cache.k_by_channel())) {}

  int place(int token, int c) const {
    return part == Part::k ? formats::kv_place_k(token, c)
                           : formats::kv_place_v(channels, token, c);
  }
  int count() const { return kv_block_tokens * channels; }
};

/// Rows of a block, one after the other, to codes and scales in place.
class BlockEncoder {
 public:
  BlockEncoder(const KvCacheData& cache, const PagePart& part, std::byte* to)
      : words_(*cache.words), part_(part), to_(to) {
    for (auto& row : codes_) std::memset(row, 0, static_cast<std::size_t>(part.channels));
  }
  void row(int token, const float* x) {
    scales_[token] = cpu::encode_kv_row(words_, x, part_.channels, part_.bits, codes_[token]);
  }
  void finish() {
    const std::uint8_t* rows[kv_block_tokens];
    for (int t = 0; t < kv_block_tokens; ++t) rows[t] = codes_[t];
    // The orders of kv_place_k() and kv_place_v().
    if (part_.part == Part::k) {
      words_.transpose_packs(rows, part_.channels, 0, panel_);
    } else {
      for (int t = 0; t < kv_block_tokens; t += 4) {
        words_.interleave_bytes(rows + t, part_.channels, panel_ + t * part_.channels);
      }
    }
    words_.kv_pack(panel_, part_.count(), part_.bits,
                   reinterpret_cast<std::uint8_t*>(to_ + part_.place_bytes));
    std::memcpy(to_ + part_.scale_bytes, scales_, sizeof scales_);
  }

 private:
  const cpu::KernelTable& words_;
  const PagePart& part_;
  std::byte* to_;
  std::uint16_t scales_[kv_block_tokens] = {};
  std::uint8_t codes_[kv_block_tokens][most_channels];
  std::uint8_t panel_[kv_block_tokens * most_channels];
};

const std::byte* window_row(const formats::KvBlock& b, const std::byte* block, Part part,
                            int token) {
  const int channels = part == Part::k ? b.d : b.dv;
  return block + (part == Part::k ? b.k_codes() : b.v_codes()) + token * channels * 2;
}

bool alive(std::uint64_t live, std::int64_t block, int token) {
  return (live >> (block * kv_block_tokens + token) & 1) != 0;
}

}  // namespace

int given_channels(const KvCacheData& cache, Part part) {
  return static_cast<int>(part == Part::k ? cache.options.d : cache.options.dv);
}

void load_given_row(const KvCacheData& cache, Part part, const void* row, Format format,
                    float* to) {
  const int given = given_channels(cache, part);
  cache.words->load_row(row, cpu::element_of(format), given, nullptr, to);
  std::fill(to + given, to + (part == Part::k ? cache.d() : cache.dv()), 0.0f);
}

void store_given_row(const KvCacheData& cache, std::byte* page, Part part, int token,
                     const void* row, Format format) {
  if (given_channels(cache, part) == (part == Part::k ? cache.d() : cache.dv())) {
    store_window_row(cache, page, part, token, row, format);
    return;
  }
  float values[most_channels];
  load_given_row(cache, part, row, format, values);
  store_window_row(cache, page, part, token, values, Format::f32);
}

void store_window_row(const KvCacheData& cache, std::byte* page, Part part, int token,
                      const void* row, Format format) {
  const formats::KvBlock b = cache.block(0);
  const int channels = part == Part::k ? b.d : b.dv;
  std::byte* to = page + token / kv_block_tokens * b.bytes() +
                  (window_row(b, page, part, token % kv_block_tokens) - page);
  if (format == cache.options.window_format) {
    std::memcpy(to, row, static_cast<std::size_t>(channels) * 2);
    return;
  }
  float values[most_channels];
  cache.words->load_row(row, cpu::element_of(format), channels, nullptr, values);
  cpu::store_row(*cache.words, values, channels, cache.options.window_format, to);
}

void load_page_row(const KvCacheData& cache, int tier, const std::byte* page, Part part, int token,
                   const Frames& frames, bool stored, float* row) {
  const formats::KvPage layout = cache.layout(tier);
  const std::byte* block = page + token / kv_block_tokens * layout.block_bytes();
  const int in_block = token % kv_block_tokens;
  const PagePart p(cache, layout, part);
  const Frame& own = part == Part::k ? frames.k : frames.v;
  if (layout.block.window()) {
    cache.words->load_row(window_row(layout.block, block, part, in_block),
                          cpu::element_of(cache.options.window_format), p.channels,
                          stored ? own.mean : nullptr, row);
    for (int c = 0; stored && own.shift && c < p.channels; ++c) row[c] *= key_factor(-own.shift[c]);
    if (stored && p.rotated) cpu::rotate(*cache.words, row, p.channels);
    return;
  }
  const auto* packed = reinterpret_cast<const std::uint8_t*>(block + p.place_bytes);
  std::uint16_t scales[most_channels];
  if (p.by_channel) {
    std::memcpy(scales, page + layout.channel_scales(), static_cast<std::size_t>(p.channels) * 2);
    const bool bad = (bad_tokens(layout, page) >> token & 1) != 0;
    if (bad) std::fill_n(scales, p.channels, formats::kv_nan_scale);
  } else {
    std::uint16_t scale;
    std::memcpy(&scale, block + p.scale_bytes + in_block * 2, sizeof scale);
    std::fill_n(scales, p.channels, scale);
  }
  for (int c = 0; c < p.channels; ++c) {
    const std::uint8_t code = formats::kv_code_at(packed, p.count(), p.bits, p.place(in_block, c));
    row[c] = formats::kv_decode(code, scales[c], p.bits);
  }
  if (stored) return;
  if (p.rotated) cpu::unrotate(*cache.words, row, p.channels);
  for (int c = 0; own.shift && c < p.channels; ++c) row[c] *= key_factor(own.shift[c]);
  for (int c = 0; own.mean && c < p.channels; ++c) row[c] += own.mean[c];
  std::fill(row + given_channels(cache, part), row + p.channels, 0.0f);
}

void expand_page(const KvCacheData& cache, int from, const std::byte* page, std::uint64_t live,
                 const Frames& frames, std::byte* to) {
  std::memset(to, 0, static_cast<std::size_t>(cache.page_bytes(0)));
  const float top = formats::largest_16bit(cache.options.window_format == Format::bf16);
  for (; live != 0; live &= live - 1) {
    const int token = std::countr_zero(live);
    for (const Part part : {Part::k, Part::v}) {
      const int channels = part == Part::k ? cache.d() : cache.dv();
      float row[most_channels];
      load_page_row(cache, from, page, part, token, frames, false, row);
      // Codes may lie beyond the value that they are of; NaN stays.
      for (int c = 0; c < channels; ++c) {
        row[c] = row[c] > top ? top : row[c] < -top ? -top : row[c];
      }
      store_window_row(cache, to, part, token, row, Format::f32);
    }
  }
}

std::uint64_t bad_tokens(const formats::KvPage& layout, const std::byte* page) {
  if (!layout.k_by_channel) return 0;
  std::uint64_t bad;
  std::memcpy(&bad, page + layout.bad_tokens(), sizeof bad);
  return bad;
}

namespace {

/// A page that is made of another, which may lie in another tier.
struct Recoding {
  const KvCacheData& cache;
  const int from;
  const std::byte* const page;
  const std::uint64_t live;
  const Frames frames;
  const formats::KvPage source, layout;
  std::byte* const to;

  std::byte* block(std::int64_t i) const { return to + i * layout.block_bytes(); }
  /// A row of the old page as the quantiser takes it.
  void load(Part part, int token, float* row) const {
    load_page_row(cache, from, page, part, token, frames, true, row);
  }
  void copy(const PagePart& old, const PagePart& now) const;
  void encode_tokens(const PagePart& part) const;
  void encode_channels(const PagePart& part) const;
};

/// Codes and scales as they are.
void Recoding::copy(const PagePart& old, const PagePart& now) const {
  for (int i = 0; i < layout.blocks; ++i) {
    const std::byte* same = page + i * source.block_bytes();
    std::memcpy(block(i) + now.place_bytes, same + old.place_bytes,
                static_cast<std::size_t>(formats::kv_code_bytes(now.count(), now.bits)));
    if (now.by_channel) continue;
    std::memcpy(block(i) + now.scale_bytes, same + old.scale_bytes, kv_block_tokens * 2);
  }
  if (!now.by_channel) return;
  std::memcpy(to + layout.channel_scales(), page + source.channel_scales(),
              static_cast<std::size_t>(layout.bytes() - layout.channel_scales()));
}

/// Under a scale a token.
void Recoding::encode_tokens(const PagePart& part) const {
  float row[most_channels];
  for (int i = 0; i < layout.blocks; ++i) {
    BlockEncoder encoder(cache, part, block(i));
    for (int token = 0; token < kv_block_tokens; ++token) {
      if (!alive(live, i, token)) continue;
      load(part.part, i * kv_block_tokens + token, row);
      encoder.row(token, row);
    }
    encoder.finish();
  }
}

/// Under a scale a channel. Tokens that are bad are flagged and leave the scales of the others
/// alone.
void Recoding::encode_channels(const PagePart& part) const {
  float rows[most_tokens_of_page][most_channels];
  int token_of[most_tokens_of_page], count = 0;
  std::uint64_t bad = 0;
  for (std::uint64_t left = live; left != 0; left &= left - 1) {
    const int token = std::countr_zero(left);
    load(part.part, token, rows[count]);
    if (formats::kv_holds(cache.words->amax(rows[count], part.channels), part.bits)) {
      token_of[count++] = token;
    } else {
      bad |= std::uint64_t{1} << token;
    }
  }
  std::uint8_t panels[most_tokens_of_page * most_channels];
  std::memset(panels, 0, static_cast<std::size_t>(layout.blocks * part.count()));
  std::uint16_t scales[most_channels] = {};
  const int column_size = (count + formats::kv_lanes - 1) / formats::kv_lanes * formats::kv_lanes;
  for (int c = 0; count > 0 && c < part.channels; ++c) {
    float column[most_tokens_of_page];
    std::uint8_t codes[most_tokens_of_page];
    for (int i = 0; i < column_size; ++i) column[i] = rows[i % count][c];
    scales[c] = cpu::encode_kv_row(*cache.words, column, column_size, part.bits, codes);
    for (int i = 0; i < count; ++i) {
      const int panel = token_of[i] / kv_block_tokens * part.count();
      panels[panel + part.place(token_of[i] % kv_block_tokens, c)] = codes[i];
    }
  }
  for (int i = 0; i < layout.blocks; ++i) {
    cache.words->kv_pack(panels + i * part.count(), part.count(), part.bits,
                         reinterpret_cast<std::uint8_t*>(block(i) + part.place_bytes));
  }
  std::memset(to + layout.channel_scales(), 0,
              static_cast<std::size_t>(layout.bytes() - layout.channel_scales()));
  std::memcpy(to + layout.channel_scales(), scales, static_cast<std::size_t>(part.channels) * 2);
  std::memcpy(to + layout.bad_tokens(), &bad, sizeof bad);
}

}  // namespace

void recode_page(const KvCacheData& cache, int from, const std::byte* page, std::uint64_t live,
                 const Frames& frames, int tier, std::byte* to) {
  const Recoding recoding{cache, from, page, live, frames, cache.layout(from), cache.layout(tier),
                          to};
  for (const Part part : {Part::k, Part::v}) {
    const PagePart old(cache, recoding.source, part), now(cache, recoding.layout, part);
    if (old.bits == now.bits) {
      recoding.copy(old, now);
    } else if (now.by_channel) {
      recoding.encode_channels(now);
    } else {
      recoding.encode_tokens(now);
    }
  }
}

}  // namespace qattn::kv
