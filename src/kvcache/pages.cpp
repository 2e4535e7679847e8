#include "kvcache/pages.hpp"

#include <cstring>

#include "formats/bf16.hpp"
#include "formats/hadamard.hpp"
#include "formats/kv_quantize.hpp"
#include "kernels/quantize/kv_rows.hpp"
#include "kernels/quantize/rows.hpp"

namespace qattn::kv {
namespace {

using detail::KvCacheData;
using formats::kv_block_tokens;

constexpr int most_channels = 256;

/// One part of one block: where it lies and how its places count.
struct BlockPart {
  int channels, bits, place_bytes, scale_bytes;  ///< the last two: offsets inside the block
  Part part;

  BlockPart(const formats::KvBlock& b, Part p)
      : channels(p == Part::k ? b.d : b.dv),
        bits(p == Part::k ? b.k_bits : b.v_bits),
        place_bytes(p == Part::k ? b.k_codes() : b.v_codes()),
        scale_bytes(p == Part::k ? b.k_scales() : b.v_scales()),
        part(p) {}

  int place(int token, int c) const {
    return part == Part::k ? formats::kv_place_k(token, c)
                           : formats::kv_place_v(channels, token, c);
  }
  int count() const { return kv_block_tokens * channels; }
};

/// Rows of a block, one after the other, to codes and scales in place.
class BlockEncoder {
 public:
  BlockEncoder(const KvCacheData& cache, const formats::KvBlock& block, Part part, std::byte* to)
      : words_(*cache.words), part_(block, part), to_(to) {
    std::memset(panel_, 0, sizeof panel_);
  }
  void row(int token, const float* x) {
    std::uint8_t codes[most_channels];
    scales_[token] = cpu::encode_kv_row(words_, x, part_.channels, part_.bits, codes);
    for (int c = 0; c < part_.channels; ++c) panel_[part_.place(token, c)] = codes[c];
  }
  void finish() {
    formats::kv_pack(panel_, part_.count(), part_.bits,
                     reinterpret_cast<std::uint8_t*>(to_ + part_.place_bytes));
    std::memcpy(to_ + part_.scale_bytes, scales_, sizeof scales_);
  }

 private:
  const cpu::Words& words_;
  BlockPart part_;
  std::byte* to_;
  std::uint16_t scales_[kv_block_tokens] = {};
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
  cpu::store_row(values, channels, cache.options.window_format, to);
}

void load_page_row(const KvCacheData& cache, int tier, const std::byte* page, Part part, int token,
                   const float* k_mean, bool stored, float* row) {
  const formats::KvBlock b = cache.block(tier);
  const std::byte* block = page + token / kv_block_tokens * b.bytes();
  const int in_block = token % kv_block_tokens;
  const BlockPart p(b, part);
  const float* mean = part == Part::k ? k_mean : nullptr;
  if (b.window()) {
    cache.words->load_row(window_row(b, block, part, in_block),
                          cpu::element_of(cache.options.window_format), p.channels,
                          stored ? mean : nullptr, row);
    if (stored && cache.options.rotate) formats::rotate(row, p.channels);
    return;
  }
  const auto* packed = reinterpret_cast<const std::uint8_t*>(block + p.place_bytes);
  std::uint16_t scale;
  std::memcpy(&scale, block + p.scale_bytes + in_block * 2, sizeof scale);
  for (int c = 0; c < p.channels; ++c) {
    const std::uint8_t code = formats::kv_code_at(packed, p.count(), p.bits, p.place(in_block, c));
    row[c] = formats::kv_decode(code, scale, p.bits);
  }
  if (stored) return;
  if (cache.options.rotate) formats::unrotate(row, p.channels);
  for (int c = 0; mean && c < p.channels; ++c) row[c] += mean[c];
}

void recode_page(const KvCacheData& cache, int from, const std::byte* page, std::uint64_t live,
                 const float* k_mean, int tier, std::byte* to) {
  const formats::KvBlock source = cache.block(from), b = cache.block(tier);
  float row[most_channels];
  for (std::int64_t i = 0; i < cache.blocks_per_page(); ++i) {
    std::byte* block = to + i * b.bytes();
    for (const Part part : {Part::k, Part::v}) {
      const BlockPart old(source, part), now(b, part);
      if (old.bits == now.bits) {
        const std::byte* same = page + i * source.bytes();
        std::memcpy(block + now.place_bytes, same + old.place_bytes,
                    static_cast<std::size_t>(formats::kv_code_bytes(now.count(), now.bits)));
        std::memcpy(block + now.scale_bytes, same + old.scale_bytes, kv_block_tokens * 2);
        continue;
      }
      BlockEncoder encoder(cache, b, part, block);
      for (int token = 0; token < kv_block_tokens; ++token) {
        if (!alive(live, i, token)) continue;
        const int in_page = static_cast<int>(i) * kv_block_tokens + token;
        load_page_row(cache, from, page, part, in_page, k_mean, true, row);
        encoder.row(token, row);
      }
      encoder.finish();
    }
  }
}

}  // namespace qattn::kv
