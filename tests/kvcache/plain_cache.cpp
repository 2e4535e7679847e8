#include "kvcache/plain_cache.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/hadamard.hpp"

namespace qattn::test {
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

std::string text(std::int64_t value) { return std::to_string(value); }

void quantise_part(PlainPart& part, int bits) {
  if (part.bits == bits) return;
  const PlainRow row = quantize_plainly(part.stored, bits);
  for (std::size_t i = 0; i < part.stored.size(); ++i) {
    part.stored[i] = static_cast<float>(row.value(i));
  }
  part.bits = bits;
}

/// K of a page under a scale a channel: the values of its tokens, repeated in order up to a
/// multiple of sixteen, are what a row is elsewhere. Tokens that would have no scale of their own
/// are NaN.
void quantise_channels(PlainPage& page, int bits) {
  if (page.tokens.begin()->second.k.bits == bits) return;
  std::vector<PlainPart*> good;
  for (auto& [at, token] : page.tokens) {
    token.k.bits = bits;
    if (std::isnan(quantize_plainly(token.k.stored, bits).scale)) {
      std::fill(token.k.stored.begin(), token.k.stored.end(), nan);
    } else {
      good.push_back(&token.k);
    }
  }
  const std::size_t channels = page.tokens.begin()->second.k.stored.size();
  for (std::size_t c = 0; !good.empty() && c < channels; ++c) {
    std::vector<float> column;
    for (std::size_t i = 0; i < (good.size() + 15) / 16 * 16; ++i) {
      column.push_back(good[i % good.size()]->stored[c]);
    }
    const PlainRow row = quantize_plainly(column, bits);
    for (std::size_t i = 0; i < good.size(); ++i) {
      good[i]->stored[c] = static_cast<float>(row.value(i));
    }
  }
}

}  // namespace

void PlainCache::add(std::int64_t id) {
  PlainLayer layer;
  layer.heads.resize(static_cast<std::size_t>(o_.heads_kv));
  sequences_[id].assign(static_cast<std::size_t>(o_.layers), layer);
}

bool PlainCache::in_window(std::int64_t first, std::int64_t length) const {
  // The newest `window` tokens, rounded up to whole pages.
  const std::int64_t oldest = std::max<std::int64_t>(length - o_.window, 0);
  return first + o_.page_size <= o_.sinks || first + o_.page_size > oldest;
}

std::string PlainCache::append(std::int64_t id, std::int64_t layer_index, std::int64_t count,
                               const std::vector<float>& k, const std::vector<float>& v,
                               const std::vector<std::int32_t>& tiers) {
  PlainLayer& layer = sequences_.at(id)[static_cast<std::size_t>(layer_index)];
  const std::int64_t begin = layer.length, end = begin + count;
  if (count == 0) return "";
  layer.length = end;
  bool quantises = false;
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    std::vector<PlainPage>& pages = layer.heads[h];
    for (std::int64_t at = begin; at < end; ++at) {
      const std::int64_t first = at - at % o_.page_size;
      const auto row = [&](const std::vector<float>& x, std::int64_t n) {
        const std::int64_t place = ((at - begin) * o_.heads_kv + static_cast<std::int64_t>(h)) * n;
        return std::vector<float>(x.begin() + place, x.begin() + place + n);
      };
      const bool joins = !pages.empty() && pages.back().first == first;
      if (joins && pages.back().tier > 0) open(layer, h, pages.back());
      if (!joins) {
        pages.emplace_back();
        pages.back().first = first;
      } else if (at == begin && pages.back().identity.use_count() > 1) {
        pages.back().identity = std::make_shared<int>(0);
      }
      pages.back().tokens[at] = {row(k, o_.d), row(v, o_.dv), {}, {}};
    }
    for (const PlainPage& page : pages) quantises |= page.tier == 0 && !in_window(page.first, end);
  }
  if (quantises && layer.mean.empty() && (o_.smooth_k || balances() || o_.smooth_v)) {
    freeze_mean(layer);
  }
  return demote(id, layer_index, tiers);
}

std::string PlainCache::demote(std::int64_t id, std::int64_t layer_index,
                               const std::vector<std::int32_t>& tiers) {
  PlainLayer& layer = sequences_.at(id)[static_cast<std::size_t>(layer_index)];
  const std::int64_t end = layer.length;
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    for (PlainPage& page : layer.heads[h]) {
      const std::int64_t some = page.tokens.begin()->first;
      const int tier = tiers[h * static_cast<std::size_t>(end) + static_cast<std::size_t>(some)];
      const std::string where = "head " + text(static_cast<std::int64_t>(h)) + " page " +
                                text(page.first) + " tier " + text(tier) + ": ";
      if (page.tier == 0 && in_window(page.first, end) != (tier == 0)) {
        return where + "16 bits exactly inside the window and the sinks";
      }
      if (tier < page.tier) return where + "was promoted from " + text(page.tier);
      if (tier > static_cast<int>(o_.tiers.size())) return where + "does not exist";
      if (tier != page.tier) requantise(layer, h, page, tier);
    }
  }
  return "";
}

/// A page that was cut in a tier and grows is in 16 bits again.
void PlainCache::open(const PlainLayer& layer, std::size_t head, PlainPage& page) const {
  for (auto& [at, token] : page.tokens) {
    std::vector<float> k, v;
    values(layer, head, page, token, k, v);
    for (std::vector<float>* x : {&k, &v}) {
      for (float& value : *x) {
        const bool f16 = o_.window_format == Format::f16;
        const double most = f16 ? 65504.0 : std::ldexp(255.0, 120);
        const double kept = std::min(std::max(static_cast<double>(value), -most), most);
        if (!std::isnan(value)) {
          value = static_cast<float>(f16 ? round_f16(kept) : round_bf16(kept));
        }
      }
    }
    token = {k, v, {}, {}};
  }
  page.tier = 0;
  page.identity = std::make_shared<int>(0);
}

namespace {

/// Exponent of the largest magnitude, as floats have it; 255: not finite.
int size_of(const std::vector<float>& x) {
  float amax = 0;
  for (const float v : x) {
    if (!std::isfinite(v)) return 255;
    amax = std::max(amax, std::abs(v));
  }
  return amax < std::ldexp(1.0f, -126) ? 0 : std::ilogb(amax) + 127;
}

/// The largest size of rows that count: two above the median of those that are finite and not zero.
int largest_size(const std::vector<const std::vector<float>*>& rows) {
  std::vector<int> sizes;
  for (const auto* row : rows) {
    if (const int size = size_of(*row); size > 0 && size < 255) sizes.push_back(size);
  }
  if (sizes.empty()) return 0;
  std::sort(sizes.begin(), sizes.end());
  return std::min(sizes[(sizes.size() - 1) / 2] + 2, 254);
}

}  // namespace

namespace {

struct Moves {
  double whole = 0, own = 0;
};
Moves moves_of(const PlainSums& x, double count, bool smooth) {
  const double own = std::max(x[1] - x[0] * (x[0] / count), 0.0);
  return {x[1], smooth ? own : x[1]};
}

/// 2^round(13 / 16 log2(loudness / median)) of pairs of channels half a row apart, 1 below 8.
std::vector<float> balance(const std::vector<Moves>& of) {
  const std::size_t pairs = of.size() / 2;
  std::vector<double> pair(pairs);
  for (std::size_t j = 0; j < pairs; ++j) pair[j] = of[j].own + of[j + pairs].own;
  std::vector<double> sorted = pair;
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[(pairs - 1) / 2];
  std::vector<float> over(of.size(), 1.0f);
  for (std::size_t j = 0; j < pairs && median > 0; ++j) {
    const double e = pair[j] > 0 ? std::round(13.0 / 32 * std::log2(pair[j] / median)) : 0;
    if (e >= 3) over[j] = over[j + pairs] = static_cast<float>(std::exp2(std::min(e, 15.0)));
  }
  return over;
}

/// Sixteen sums, added in halves.
PlainSums add_up(std::vector<PlainSums> lanes) {
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) {
      for (std::size_t k = 0; k < 2; ++k) lanes[i][k] += lanes[i + half][k];
    }
  }
  return lanes[0];
}

}  // namespace

/// Sums over the rows of K or V of a head that are in 16 bits behind the sinks, without those
/// far above the median: of each channel, and how many rows there are.
void PlainCache::sum_rows(const std::vector<PlainPage>& pages,
                          std::vector<float> PlainToken::* part, std::vector<PlainSums>& sums,
                          double& count) const {
  std::vector<const std::vector<float>*> rows;
  for (const PlainPage& page : pages) {
    if (page.tier != 0 || page.first < o_.sinks) continue;
    for (const auto& [at, token] : page.tokens) rows.push_back(&(token.*part));
  }
  const int largest = largest_size(rows);
  // Sixteen sums, by block of 16 tokens.
  std::vector<std::vector<PlainSums>> lanes(sums.size(), std::vector<PlainSums>(16));
  count = 0;
  for (const PlainPage& page : pages) {
    if (page.tier != 0 || page.first < o_.sinks) continue;
    for (const auto& [at, token] : page.tokens) {
      const std::vector<float>& row = token.*part;
      if (size_of(row) > largest) continue;
      const auto lane = static_cast<std::size_t>(at / 16 % 16);
      count += 1;
      for (std::size_t c = 0; c < row.size(); ++c) {
        const auto x = static_cast<double>(row[c]);
        lanes[c][lane] = {lanes[c][lane][0] + x, lanes[c][lane][1] + x * x};
      }
    }
  }
  for (std::size_t c = 0; c < sums.size(); ++c) sums[c] = add_up(lanes[c]);
}

void PlainCache::freeze_mean(PlainLayer& layer) const {
  for (const std::vector<PlainPage>& pages : layer.heads) {
    std::vector<PlainSums> k(static_cast<std::size_t>(o_.d)), v(static_cast<std::size_t>(o_.dv));
    double count = 0;
    sum_rows(pages, &PlainToken::k16, k, count);
    std::vector<Moves> moves(k.size());
    layer.mean.emplace_back();
    for (std::size_t c = 0; c < k.size(); ++c) {
      const bool none = count == 0;
      if (!none) moves[c] = moves_of(k[c], count, o_.smooth_k);
      layer.mean.back().push_back(none || !o_.smooth_k ? 0.0f
                                                       : static_cast<float>(k[c][0] / count));
    }
    if (balances()) layer.over.push_back(balance(moves));
    if (!o_.smooth_v) continue;
    sum_rows(pages, &PlainToken::v16, v, count);
    double of_means = 0, own = 0;
    for (std::size_t c = 0; count > 0 && c < v.size(); ++c) {
      const Moves m = moves_of(v[c], count, true);
      of_means += m.whole - m.own;
      own += m.own;
    }
    layer.v_mean.emplace_back();
    for (const PlainSums& sum : v) {
      const bool moved = count > 0 && 16 * of_means > own;
      layer.v_mean.back().push_back(moved ? static_cast<float>(sum[0] / count) : 0.0f);
    }
  }
}

void PlainCache::requantise(const PlainLayer& layer, std::size_t head, PlainPage& page,
                            int tier) const {
  const KvTier& bits = o_.tiers[static_cast<std::size_t>(tier) - 1];
  for (auto& [at, token] : page.tokens) {
    if (page.tier == 0) {
      token.k = {token.k16, 16};
      token.v = {token.v16, 16};
      for (std::size_t c = 0; !layer.mean.empty() && c < token.k.stored.size(); ++c) {
        token.k.stored[c] -= layer.mean[head][c];
        if (balances()) token.k.stored[c] /= layer.over[head][c];
      }
      for (std::size_t c = 0; !layer.v_mean.empty() && c < token.v.stored.size(); ++c) {
        token.v.stored[c] -= layer.v_mean[head][c];
      }
      if (o_.rotate && !k_by_channel()) {
        formats::rotate(token.k.stored.data(), static_cast<int>(o_.d));
      }
      if (o_.rotate) {
        formats::rotate(token.v.stored.data(), static_cast<int>(o_.dv));
      }
    }
    if (!k_by_channel()) quantise_part(token.k, bits.k_bits);
    quantise_part(token.v, bits.v_bits);
  }
  if (k_by_channel()) quantise_channels(page, bits.k_bits);
  page.tier = tier;
  page.identity = std::make_shared<int>(0);
}

namespace {

template <class Keep>
void keep_tokens(PlainLayer& layer, std::size_t head, Keep keep) {
  std::vector<PlainPage>& pages = layer.heads[head];
  for (PlainPage& page : pages) {
    std::erase_if(page.tokens, [&](const auto& item) { return !keep(item.first); });
  }
  std::erase_if(pages, [](const PlainPage& page) { return page.tokens.empty(); });
}

/// A mean that nothing was quantised with any more goes.
void forget_mean(PlainLayer& layer) {
  for (const std::vector<PlainPage>& pages : layer.heads) {
    for (const PlainPage& page : pages) {
      if (page.tier > 0) return;
    }
  }
  layer.mean.clear();
  layer.over.clear();
  layer.v_mean.clear();
}

}  // namespace

void PlainCache::truncate(std::int64_t id, std::int64_t length) {
  for (PlainLayer& layer : sequences_.at(id)) {
    if (layer.length <= length) continue;
    layer.length = length;
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      keep_tokens(layer, h, [&](std::int64_t at) { return at < length; });
    }
    forget_mean(layer);
  }
}

void PlainCache::evict(std::int64_t id, std::int64_t layer_index, std::int64_t head,
                       std::int64_t begin, std::int64_t end) {
  PlainSequence& s = sequences_.at(id);
  for (std::size_t l = 0; l < s.size(); ++l) {
    if (layer_index >= 0 && l != static_cast<std::size_t>(layer_index)) continue;
    for (std::size_t h = 0; h < s[l].heads.size(); ++h) {
      if (head >= 0 && h != static_cast<std::size_t>(head)) continue;
      keep_tokens(s[l], h, [&](std::int64_t at) { return at < begin || at >= end; });
    }
    forget_mean(s[l]);
  }
}

void PlainCache::values(const PlainLayer& layer, std::size_t head, const PlainPage& page,
                        const PlainToken& token, std::vector<float>& k,
                        std::vector<float>& v) const {
  k = page.tier == 0 ? token.k16 : token.k.stored;
  v = page.tier == 0 ? token.v16 : token.v.stored;
  if (page.tier == 0) return;
  if (o_.rotate && !k_by_channel()) formats::unrotate(k.data(), static_cast<int>(o_.d));
  if (o_.rotate) formats::unrotate(v.data(), static_cast<int>(o_.dv));
  for (std::size_t c = 0; !layer.mean.empty() && c < k.size(); ++c) {
    if (balances()) k[c] *= layer.over[head][c];
    k[c] += layer.mean[head][c];
  }
  for (std::size_t c = 0; !layer.v_mean.empty() && c < v.size(); ++c) v[c] += layer.v_mean[head][c];
}

void PlainCache::contents(std::int64_t id, std::int64_t layer_index, std::vector<float>& k,
                          std::vector<float>& v, std::vector<std::int32_t>& tiers) const {
  const PlainLayer& layer = sequences_.at(id)[static_cast<std::size_t>(layer_index)];
  const auto rows = static_cast<std::size_t>(layer.length * o_.heads_kv);
  k.assign(rows * static_cast<std::size_t>(o_.d), nan);
  v.assign(rows * static_cast<std::size_t>(o_.dv), nan);
  tiers.assign(rows, -1);
  for (std::size_t h = 0; h < layer.heads.size(); ++h) {
    for (const PlainPage& page : layer.heads[h]) {
      for (const auto& [at, token] : page.tokens) {
        const std::size_t row =
            h * static_cast<std::size_t>(layer.length) + static_cast<std::size_t>(at);
        tiers[row] = page.tier;
        std::vector<float> ks, vs;
        values(layer, h, page, token, ks, vs);
        std::copy(ks.begin(), ks.end(), k.begin() + static_cast<std::ptrdiff_t>(row * ks.size()));
        std::copy(vs.begin(), vs.end(), v.begin() + static_cast<std::ptrdiff_t>(row * vs.size()));
      }
    }
  }
}

std::int64_t PlainCache::code_bytes(int tier) const {
  if (tier == 0) return o_.page_size * (o_.d + o_.dv) * 2;
  const KvTier& bits = o_.tiers[static_cast<std::size_t>(tier) - 1];
  return o_.page_size * (o_.d * bits.k_bits + o_.dv * bits.v_bits) / 8;
}

std::int64_t PlainCache::scale_bytes(int tier) const {
  if (tier == 0) return 0;
  return o_.page_size * 2 + (k_by_channel() ? o_.d * 2 + 16 : o_.page_size * 2);
}

std::int64_t PlainCache::layer_bytes(std::int64_t id, std::int64_t layer_index) const {
  const PlainLayer& layer = sequences_.at(id)[static_cast<std::size_t>(layer_index)];
  const bool any = o_.smooth_k || balances() || o_.smooth_v;
  std::int64_t bytes = any ? o_.heads_kv * o_.d * 4 : 0;
  bytes += balances() ? o_.heads_kv * o_.d : 0;
  bytes += o_.smooth_v ? o_.heads_kv * o_.dv * 4 : 0;
  for (const auto& pages : layer.heads) {
    for (const PlainPage& page : pages) bytes += page_bytes(page.tier) + 24;
  }
  return bytes;
}

KvBytes PlainCache::bytes() const {
  KvBytes b;
  std::set<const int*> seen;
  for (const auto& [id, sequence] : sequences_) {
    for (const PlainLayer& layer : sequence) {
      for (const auto& mean : layer.mean) b.means += static_cast<std::int64_t>(mean.size()) * 4;
      for (const auto& mean : layer.v_mean) b.means += static_cast<std::int64_t>(mean.size()) * 4;
      for (const auto& over : layer.over) b.means += static_cast<std::int64_t>(over.size());
      for (const auto& pages : layer.heads) {
        b.tables += static_cast<std::int64_t>(pages.size()) * 24;
        for (const PlainPage& page : pages) {
          if (!seen.insert(page.identity.get()).second) continue;
          (page.tier == 0 ? b.window : b.codes) += code_bytes(page.tier);
          b.scales += scale_bytes(page.tier);
        }
      }
    }
  }
  return b;
}

}  // namespace qattn::test
