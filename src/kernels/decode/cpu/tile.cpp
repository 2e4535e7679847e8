// The tiles of the CPU's decode: up to eight blocks of 16 tokens, unpacked once for all query rows.
#include <algorithm>
#include <cstring>
#include <limits>

#include "formats/bits.hpp"
#include "formats/kv/quantize.hpp"
#include "kernels/decode/cpu/job.hpp"
#include "kernels/operand/rows.hpp"
#include "kvcache/pages.hpp"

namespace qattn::cpu {
namespace {

using formats::kv_block_tokens;
using kv::DecodeCall;
using kv::Entry;

constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

/// One block of a tile.
struct Block {
  const Entry* entry;
  const std::byte* data;
  std::int64_t first;  ///< position of its first token
  std::uint32_t live;  ///< 16 bits
};

/// Walks the blocks of a task that have tokens.
class Blocks {
 public:
  Blocks(const DecodeCall& call, const Task& task)
      : call_(call),
        table_(call.layers[static_cast<std::size_t>(task.batch)]
                   ->tables[static_cast<std::size_t>(task.head)]),
        task_(task),
        entry_(task.begin) {}

  /// Fills `blocks` with the next ones, at most tile_blocks; returns how many.
  int next(Block* blocks) {
    int count = 0;
    const std::int64_t per_page = call_.cache->blocks_per_page();
    for (; entry_ < task_.end; ++entry_, block_ = 0) {
      const Entry& e = table_[static_cast<std::size_t>(entry_)];
      if (!task_.takes(e)) continue;
      for (; block_ < per_page; ++block_) {
        const auto live =
            static_cast<std::uint32_t>(e.live >> (block_ * kv_block_tokens) & 0xffffu);
        if (live == 0) continue;
        if (count == tile_blocks) return count;
        const std::byte* data =
            call_.cache->page(e) + block_ * call_.cache->layout(e.tier).block_bytes();
        blocks[count++] = {&e, data, e.first + block_ * kv_block_tokens, live};
      }
    }
    return count;
  }

 private:
  const DecodeCall& call_;
  const kv::Table& table_;
  const Task& task_;
  std::int64_t entry_, block_ = 0;
};

/// Tokens of a block that a query may see, as bits.
std::uint32_t visible_bits(const DecodeCall& call, std::int64_t b, std::int64_t query,
                           const Block& block) {
  const auto inside = static_cast<std::uint32_t>(kv::live_bits(
      call.visible_begin(b, query), call.visible_end(b, query), block.first, kv_block_tokens));
  std::uint32_t bits = block.live & inside;
  if (!call.tensors.tree_mask.present()) return bits;
  for (int i = 0; i < kv_block_tokens; ++i) {
    if ((bits >> i & 1) != 0 && !call.visible(b, query, block.first + i)) bits &= ~(1u << i);
  }
  return bits;
}

/// Puts -inf where a row may not look, and flags rows that see a token whose V is bad.
void mask_tile(const DecodeCall& call, const Task& task, const Block* blocks, int count,
               const std::uint32_t* bad_tokens, float* scores, std::uint8_t* bad_rows) {
  for (int i = 0; i < count; ++i) {
    for (std::int64_t query = 0; query < call.queries; ++query) {
      const std::uint32_t seen = visible_bits(call, task.batch, query, blocks[i]);
      if (seen == 0xffffu && bad_tokens[i] == 0) continue;
      for (std::int64_t g = 0; g < call.group(); ++g) {
        const std::int64_t r = g * call.queries + query;
        float* s = scores + r * tile_keys + i * kv_block_tokens;
        for (int j = 0; j < kv_block_tokens; ++j) {
          if ((seen >> j & 1) == 0) s[j] = minus_infinity;
        }
        if ((seen & bad_tokens[i]) != 0) bad_rows[r] = 1;
      }
    }
  }
}

void cap_scores(const DecodeCall& call, float* scores, int keys) {
  if (call.softcap <= 0) return;
  for (int r = 0; r < call.rows(); ++r) {
    call.cache->words->softcap(scores + static_cast<std::int64_t>(r) * tile_keys, keys, 0.0f,
                               call.softcap);
  }
}

void name_blocks(TileMass& mass, const Block* blocks, int count) {
  mass.side_by_side = true;
  for (int i = 0; i < tile_blocks; ++i) {
    mass.block[i] = i < count ? static_cast<std::int32_t>(blocks[i].first / kv_block_tokens) : -1;
    mass.side_by_side &= mass.block[i] == mass.block[0] + i;
  }
}

void clear(const DecodeCall& call, const Partial& partial) {
  const auto rows = static_cast<std::size_t>(call.rows());
  std::fill_n(partial.out, rows * static_cast<std::size_t>(call.cache->dv()), 0.0f);
  std::fill_n(partial.max, rows, minus_infinity);
  std::fill_n(partial.sum, rows, 0.0f);
  std::fill_n(partial.bad, rows, std::uint8_t{0});
}

/// What a tile of codes needs beside its panels, per token.
struct TokenTables {
  float k_scale[tile_keys], v_scale[tile_keys], k_centre[tile_keys], v_centre[tile_keys];
  float k_noise[tile_keys] = {};   ///< mean squared error of an element of K, with `debias`
  std::uint32_t bad[tile_blocks];  ///< tokens whose V has a NaN scale
};

/// Unpacks one block of codes into place `i` of the tile.
void unpack_block(const DecodeCall& call, const Block& block, int i, Scratch& scratch,
                  TokenTables& t) {
  const detail::KvCacheData& cache = *call.cache;
  const KernelTable& words = *cache.words;
  const formats::KvPage page = cache.layout(block.entry->tier);
  const formats::KvBlock& b = page.block;
  const int d = cache.d(), dv = cache.dv(), at = i * kv_block_tokens;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(block.data);
  words.kv_unpack(codes + b.k_codes(), kv_block_tokens * d, b.k_bits,
                  scratch.k_panels.data() + at * d);
  words.kv_unpack(codes + b.v_codes(), kv_block_tokens * dv, b.v_bits,
                  scratch.v_panels.data() + at * dv);
  if (page.k_by_channel) {
    const std::uint64_t bad = kv::bad_tokens(page, cache.page(*block.entry));
    const auto first = static_cast<int>(block.first - block.entry->first);
    for (int j = 0; j < kv_block_tokens; ++j) {
      t.k_scale[at + j] = (bad >> (first + j) & 1) != 0 ? quiet_nan : 1.0f;
    }
  } else {
    words.load_row(block.data + b.k_scales(), Element::f16, kv_block_tokens, nullptr,
                   t.k_scale + at);
  }
  for (int j = 0; call.debias && j < kv_block_tokens; ++j) {
    t.k_noise[at + j] = formats::kv_noise(b.k_bits) * t.k_scale[at + j] * t.k_scale[at + j];
  }
  words.load_row(block.data + page.v_scales(), Element::f16, kv_block_tokens, nullptr,
                 t.v_scale + at);
  std::fill_n(t.k_centre + at, kv_block_tokens, static_cast<float>((1 << b.k_bits) - 1) * 0.5f);
  std::fill_n(t.v_centre + at, kv_block_tokens, static_cast<float>((1 << b.v_bits) - 1) * 0.5f);
  t.bad[i] = 0;
  for (int j = 0; j < kv_block_tokens; ++j) {
    float& scale = t.v_scale[at + j];
    if (scale == scale) continue;
    scale = 0.0f;
    t.bad[i] |= 1u << j;
  }
}

/// Query rows times the channel scales of a page, as planes.
void scale_queries(const DecodeCall& call, const Entry& entry, const Queries& queries,
                   Scratch& scratch) {
  const detail::KvCacheData& cache = *call.cache;
  const KernelTable& words = *cache.words;
  const int d = cache.d();
  float scale[kv::most_channels], row[kv::most_channels];
  words.load_row(cache.page(entry) + cache.layout(entry.tier).channel_scales(), Element::f16, d,
                 nullptr, scale);
  for (int r = 0; r < call.rows(); ++r) {
    const float* q = queries.raw + std::int64_t{r} * d;
    for (int c = 0; c < d; ++c) row[c] = q[c] * scale[c];
    // What overflows is no plane; NaN goes on as NaN.
    if (!formats::is_finite(words.amax(row, d))) row[0] = quiet_nan;
    std::int8_t* high = scratch.q_planes.data() + std::int64_t{2} * r * d;
    const auto at = static_cast<std::size_t>(r);
    scratch.q_scale[at] = words.kv_planes(row, d, high, high + d, &scratch.q_sum[at]);
    scratch.q_noise[at] = call.debias ? half_square(row, d) : 0.0f;
  }
}

/// Scores of a tile of codes. With K's scales per channel, page by page: each has Q of its own.
void score_codes(const DecodeCall& call, const Block* blocks, int count, const Queries& queries,
                 const TokenTables& t, Scratch& scratch) {
  const detail::KvCacheData& cache = *call.cache;
  const int rows = call.rows(), d = cache.d();
  const auto score = [&](int begin, int end, const std::int8_t* planes, const float* sum,
                         const float* scale, const float* noise) {
    const int at = begin * kv_block_tokens;
    cache.words->kv_scores({planes, rows, d, scratch.k_panels.data() + at * d,
                            (end - begin) * kv_block_tokens, sum, scale, queries.offset, noise,
                            t.k_centre + at, t.k_scale + at, t.k_noise + at,
                            scratch.scores.data() + at});
  };
  if (!cache.k_by_channel()) {
    return score(0, count, queries.planes, queries.sum, queries.scale, queries.noise);
  }
  for (int begin = 0, end; begin < count; begin = end) {
    for (end = begin + 1; end < count && blocks[end].entry == blocks[begin].entry;) ++end;
    scale_queries(call, *blocks[begin].entry, queries, scratch);
    score(begin, end, scratch.q_planes.data(), scratch.q_sum.data(), scratch.q_scale.data(),
          scratch.q_noise.data());
  }
}

}  // namespace

float half_square(const float* x, int n) {
  constexpr int sums = 16;  // that need not wait for each other; n is a multiple of 32
  float sum[sums] = {};
  for (int i = 0; i < n; i += sums) {
    for (int j = 0; j < sums; ++j) sum[j] += x[i + j] * x[i + j];
  }
  float all = 0;
  for (const float s : sum) all += s;
  // Finite, so that keys without noise are left alone.
  return all != all ? all : std::min(0.5f * all, std::numeric_limits<float>::max());
}

Scratch::Scratch(const DecodeCall& call) {
  const auto rows = static_cast<std::size_t>(call.rows());
  const auto d = static_cast<std::size_t>(call.cache->d());
  const auto dv = static_cast<std::size_t>(call.cache->dv());
  k_panels.resize(tile_keys * d);
  v_panels.resize(tile_keys * dv);
  k_rows.resize(kv_block_tokens * d);
  k_floats.resize(tile_keys * d);
  v_rows.resize(tile_keys * dv);
  scores.resize(rows * tile_keys);
  p.resize(rows * tile_keys);
  planes.resize(2 * rows * tile_keys);
  q_planes.resize(call.cache->k_by_channel() ? 2 * rows * d : 0);
  q_sum.resize(rows);
  q_scale.resize(rows);
  q_noise.resize(rows);
  alpha.resize(rows);
  beta.resize(rows);
  shift.resize(rows);
}

void run_codes_task(const DecodeCall& call, const Task& task, const Queries& queries,
                    const Partial& partial, TileMass* mass, Scratch& scratch) {
  const KernelTable& words = *call.cache->words;
  const int rows = call.rows(), dv = call.cache->dv();
  clear(call, partial);
  Blocks walk(call, task);
  Block blocks[tile_blocks];
  TokenTables t;
  while (const int count = walk.next(blocks)) {
    const int keys = count * kv_block_tokens;
    for (int i = 0; i < count; ++i) unpack_block(call, blocks[i], i, scratch, t);
    score_codes(call, blocks, count, queries, t, scratch);
    cap_scores(call, scratch.scores.data(), keys);
    mask_tile(call, task, blocks, count, t.bad, scratch.scores.data(), partial.bad);
    words.kv_softmax({scratch.scores.data(), rows, keys, t.v_scale, t.v_centre, partial.max,
                      partial.sum, scratch.alpha.data(), scratch.beta.data(), scratch.shift.data(),
                      scratch.planes.data(), mass ? mass->sums : nullptr,
                      mass ? mass->top : nullptr});
    words.kv_values(scratch.planes.data(), rows, scratch.v_panels.data(), keys, dv,
                    scratch.alpha.data(), scratch.beta.data(), scratch.shift.data(), partial.out);
    if (mass) name_blocks(*mass++, blocks, count);
  }
}

namespace {

/// Rows of a block in 16 bits as floats: K's panel, V's rows. Bad rows of V become zeros.
std::uint32_t load_window_block(const DecodeCall& call, const Block& block, int i,
                                Scratch& scratch) {
  const detail::KvCacheData& cache = *call.cache;
  const KernelTable& words = *cache.words;
  const formats::KvBlock b = cache.block(0);
  const Element element = element_of(cache.options.window_format);
  const int d = cache.d(), dv = cache.dv();
  const std::uint8_t* rows[kv_block_tokens];
  std::uint32_t bad = 0;
  for (int j = 0; j < kv_block_tokens; ++j) {
    float* k = scratch.k_rows.data() + j * d;
    float* v = scratch.v_rows.data() + (i * kv_block_tokens + j) * dv;
    words.load_row(block.data + b.k_codes() + j * d * 2, element, d, nullptr, k);
    words.load_row(block.data + b.v_codes() + j * dv * 2, element, dv, nullptr, v);
    rows[j] = reinterpret_cast<const std::uint8_t*>(k);
    if (const float amax = words.amax(v, dv); amax == amax) continue;
    std::fill_n(v, dv, 0.0f);
    bad |= 1u << j;
  }
  words.transpose_packs(
      rows, d * 4, 0,
      reinterpret_cast<std::uint8_t*>(scratch.k_floats.data() + i * kv_block_tokens * d));
  return bad;
}

}  // namespace

void run_window_task(const DecodeCall& call, const Task& task, const Queries& queries,
                     const Partial& partial, TileMass* mass, Scratch& scratch) {
  const KernelTable& words = *call.cache->words;
  const int rows = call.rows(), dv = call.cache->dv();
  clear(call, partial);
  Blocks walk(call, task);
  Block blocks[tile_blocks];
  float ones[tile_keys];  // scales of keys, and of rows
  static_assert(kv::most_queries * kv::most_group <= tile_keys);
  std::fill_n(ones, tile_keys, 1.0f);
  while (const int count = walk.next(blocks)) {
    const int keys = count * kv_block_tokens;
    std::uint32_t bad[tile_blocks];
    for (int i = 0; i < count; ++i) bad[i] = load_window_block(call, blocks[i], i, scratch);
    float* scores = scratch.scores.data();
    words.qk_f32(queries.raw, rows, scratch.k_floats.data(), keys, call.cache->d(), ones, ones,
                 scores);
    cap_scores(call, scores, keys);
    mask_tile(call, task, blocks, count, bad, scores, partial.bad);
    SoftmaxTile tile{};
    tile.scores = scores;
    tile.rows = rows;
    tile.keys = keys;
    tile.rounding = Rounding::f32;
    tile.max = partial.max;
    tile.sum = partial.sum;
    tile.alpha = scratch.alpha.data();
    tile.beta = scratch.beta.data();
    tile.p = scratch.p.data();
    words.softmax(tile);
    words.pv_f32(scratch.p.data(), rows, scratch.v_rows.data(), keys, dv, scratch.alpha.data(),
                 scratch.beta.data(), nullptr, partial.out);
    if (!mass) continue;
    for (int r = 0; r < rows; ++r) {
      // A tile that the row does not see leaves zeros in p; its reference may be anything.
      mass->top[r] = partial.max[r];
      for (int i = 0; i < count; ++i) {
        float sum = 0;
        for (int j = 0; j < kv_block_tokens; ++j) {
          sum += scratch.p[static_cast<std::size_t>(r * tile_keys + i * kv_block_tokens + j)];
        }
        mass->sums[r * tile_blocks + i] = sum;
      }
    }
    name_blocks(*mass++, blocks, count);
  }
}

}  // namespace qattn::cpu
