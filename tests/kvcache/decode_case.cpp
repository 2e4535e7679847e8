#include "kvcache/decode_case.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "formats/f16.hpp"
#include "formats/kv/quantize.hpp"
#include "kvcache/data.hpp"

namespace qattn::test {

std::vector<float> normal_values(std::int64_t count, unsigned seed, float sigma) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& v : x) v = normal(random);
  return x;
}

KvRows normal_rows(std::int64_t count, std::int64_t heads, std::int64_t d, std::int64_t dv,
                   unsigned seed, float key_shift) {
  KvRows rows{count, normal_values(count * heads * d, seed),
              normal_values(count * heads * dv, seed + 1000)};
  for (std::size_t i = 0; i < rows.k.size(); ++i) {
    if (i % static_cast<std::size_t>(d) % 21 == 5) rows.k[i] += key_shift;
  }
  return rows;
}

void append_rows(KvCache& cache, std::int64_t sequence, std::int64_t layer, const KvRows& rows) {
  const KvCacheOptions& o = cache.options();
  KvAppendTensors t;
  t.k = TensorView::dense(rows.k.data(), Format::f32, {1, rows.count, o.heads_kv, o.d});
  t.v = TensorView::dense(rows.v.data(), Format::f32, {1, rows.count, o.heads_kv, o.dv});
  const Status s = cache.append(layer, {&sequence, 1}, t);
  ASSERT_TRUE(s.ok()) << s.message();
}

KvRows slice(const KvRows& rows, std::int64_t begin, std::int64_t end) {
  const auto part = [&](const std::vector<float>& x) {
    const auto row = static_cast<std::ptrdiff_t>(x.size()) / rows.count;
    return std::vector<float>(x.begin() + begin * row, x.begin() + end * row);
  };
  return {end - begin, part(rows.k), part(rows.v)};
}

Filled fill(const KvCacheOptions& o, std::int64_t length, float key_shift) {
  Result<KvCache> made = KvCache::create(o);
  if (!made.ok()) ADD_FAILURE() << made.status().message();
  Filled f{std::move(*made), 0, normal_rows(length, o.heads_kv, o.d, o.dv, 7, key_shift)};
  f.id = *f.cache.add_sequence();
  const std::int64_t first = (length + 1) / 2, blocks = formats::kv_blocks(first);
  append_rows(f.cache, f.id, 0, slice(f.rows, 0, first));
  std::vector<float> weights = normal_values(o.heads_kv * blocks, 3);
  for (float& w : weights) w = std::exp(4 * w);
  const Status s = f.cache.set_importance(
      f.id, 0, TensorView::dense(weights.data(), Format::f32, {o.heads_kv, blocks}));
  EXPECT_TRUE(s.ok()) << s.message();
  if (first < length) append_rows(f.cache, f.id, 0, slice(f.rows, first, length));
  return f;
}

void split_pages(KvCache& cache, std::int64_t sequence, std::int64_t layer) {
  auto& data = const_cast<detail::KvCacheData&>(cache.data());
  for (kv::Table& table : data.find(sequence)->layers[static_cast<std::size_t>(layer)].tables) {
    kv::Table split;
    const auto half = static_cast<int>(data.options.page_size / 2);
    for (kv::Entry e : table) {
      const std::uint64_t second = e.live >> half << half;
      if (e.tier > 0 && second != 0 && second != e.live) {
        kv::Entry other = e;
        other.page = data.pool(e.tier).allocate();
        other.live = second;
        e.live ^= second;
        std::memcpy(data.page(other), data.page(e),
                    static_cast<std::size_t>(data.page_bytes(e.tier)));
        split.push_back(e);
        split.push_back(other);
      } else {
        split.push_back(e);
      }
    }
    table = split;
  }
}

DecodeCase queries_for(const KvCacheOptions& o, std::int64_t group, std::int64_t queries,
                       std::int64_t batch) {
  DecodeCase c;
  c.queries = queries;
  c.heads_q = o.heads_kv * group;
  c.q = normal_values(batch * queries * c.heads_q * o.d, 11, 1.5f);
  c.with_mass = true;
  return c;
}

Status DecodeCase::run(const KvCache& cache, const std::vector<std::int64_t>& sequences,
                       std::int64_t layer) {
  const KvCacheOptions& o = cache.options();
  const auto batch = static_cast<std::int64_t>(sequences.size());
  std::int64_t longest = 0;
  for (const std::int64_t id : sequences) longest = std::max(longest, *cache.length(id, layer));
  const std::int64_t blocks = (longest + 15) / 16;
  out.assign(static_cast<std::size_t>(batch * queries * heads_q * o.dv), 7.0f);
  lse.assign(static_cast<std::size_t>(batch * heads_q * queries), 7.0f);
  mass.assign(static_cast<std::size_t>(with_mass ? batch * heads_q * blocks : 0), 7.0f);
  KvDecodeTensors t;
  t.q = TensorView::dense(q.data(), Format::f32, {batch, queries, heads_q, o.d});
  t.out = TensorView::dense(out.data(), Format::f32, {batch, queries, heads_q, o.dv});
  t.lse = TensorView::dense(lse.data(), Format::f32, {batch, heads_q, queries});
  if (!sinks.empty()) t.sinks = TensorView::dense(sinks.data(), Format::f32, {heads_q});
  if (!tree.empty()) {
    t.tree_mask = TensorView::dense(tree.data(), Format::b8, {batch, queries, queries});
  }
  if (with_mass) t.mass = TensorView::dense(mass.data(), Format::f32, {batch, heads_q, blocks});
  return decode(cache, layer, sequences, t, options);
}

namespace {

/// Scores of one row, -inf where it may not look.
std::vector<double> scores_of(const DecodeCase& c, const KvCacheOptions& o, const Contents& x,
                              std::int64_t b, std::int64_t i, std::int64_t head) {
  const std::int64_t kv = head / (c.heads_q / o.heads_kv), n = x.length;
  const float* q = c.q.data() + ((b * c.queries + i) * c.heads_q + head) * o.d;
  const double scale = c.options.softmax_scale ? static_cast<double>(*c.options.softmax_scale)
                                               : 1 / std::sqrt(static_cast<double>(o.d));
  std::vector<double> s(static_cast<std::size_t>(n), -std::numeric_limits<double>::infinity());
  const std::int64_t position = n - c.queries + i;
  for (std::int64_t j = 0; j < n; ++j) {
    const float* k = x.k.data() + (kv * n + j) * o.d;
    const std::int64_t newest = j - (n - c.queries);
    if (std::isnan(k[0])) continue;
    if (c.options.causal && j > position) continue;
    if (c.options.window_left >= 0 && j < position - c.options.window_left) continue;
    if (!c.tree.empty() && newest >= 0 &&
        c.tree[static_cast<std::size_t>((b * c.queries + i) * c.queries + newest)] == 0) {
      continue;
    }
    double dot = 0;
    for (std::int64_t e = 0; e < o.d; ++e) dot += static_cast<double>(q[e]) * k[e];
    dot *= scale;
    for (std::int64_t e = 0; c.options.debias && !x.noise.empty() && e < o.d; ++e) {
      const double each = scale * static_cast<double>(q[e]);
      dot += 0.5 * each * each * x.noise[static_cast<std::size_t>((kv * n + j) * o.d + e)];
    }
    const double cap = static_cast<double>(c.options.softcap);
    s[static_cast<std::size_t>(j)] = cap > 0 ? cap * std::tanh(dot / cap) : dot;
  }
  return s;
}

}  // namespace

DecodeTruth attend(const DecodeCase& c, const KvCacheOptions& o,
                   const std::vector<Contents>& contents) {
  const auto batch = static_cast<std::int64_t>(contents.size());
  std::int64_t longest = 0;
  for (const Contents& x : contents) longest = std::max(longest, x.length);
  const std::int64_t blocks = (longest + 15) / 16;
  DecodeTruth truth;
  truth.out.assign(static_cast<std::size_t>(batch * c.queries * c.heads_q * o.dv), 0.0);
  truth.lse.assign(static_cast<std::size_t>(batch * c.heads_q * c.queries), 0.0);
  truth.mass.assign(static_cast<std::size_t>(batch * c.heads_q * blocks), 0.0);
  for (std::int64_t b = 0; b < batch; ++b) {
    const Contents& x = contents[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i < c.queries; ++i) {
      for (std::int64_t head = 0; head < c.heads_q; ++head) {
        const std::vector<double> s = scores_of(c, o, x, b, i, head);
        const double sink = c.sinks.empty()
                                ? -std::numeric_limits<double>::infinity()
                                : static_cast<double>(c.sinks[static_cast<std::size_t>(head)]);
        double top = sink;
        for (const double v : s) top = std::max(top, v);
        double sum = std::isinf(sink) ? 0 : std::exp(sink - top);
        for (const double v : s) sum += std::isinf(v) ? 0 : std::exp(v - top);
        truth.lse[static_cast<std::size_t>((b * c.heads_q + head) * c.queries + i)] =
            sum > 0 ? top + std::log(sum) : top;
        double* out = truth.out.data() + ((b * c.queries + i) * c.heads_q + head) * o.dv;
        const std::int64_t kv = head / (c.heads_q / o.heads_kv);
        for (std::int64_t j = 0; j < x.length; ++j) {
          const double v = s[static_cast<std::size_t>(j)];
          if (std::isinf(v)) continue;
          const double p = std::exp(v - top) / sum;
          truth.mass[static_cast<std::size_t>((b * c.heads_q + head) * blocks + j / 16)] +=
              p / static_cast<double>(c.queries);
          const float* value = x.v.data() + (kv * x.length + j) * o.dv;
          for (std::int64_t e = 0; e < o.dv; ++e) out[e] += p * static_cast<double>(value[e]);
        }
      }
    }
  }
  return truth;
}

namespace {

/// Variances of K's elements from the scales in the cache's pages.
std::vector<double> noise_of(const KvCache& cache, std::int64_t sequence, std::int64_t layer) {
  const detail::KvCacheData& data = cache.data();
  const std::int64_t d = cache.options().d, length = *cache.length(sequence, layer);
  std::vector<double> noise(static_cast<std::size_t>(cache.options().heads_kv * length * d));
  const kv::Layer& l = data.find(sequence)->layers[static_cast<std::size_t>(layer)];
  for (std::size_t head = 0; head < l.tables.size(); ++head) {
    for (const kv::Entry& e : l.tables[head]) {
      if (e.tier == 0) continue;
      const formats::KvPage page = data.layout(e.tier);
      const auto scale = [&](std::int64_t at) {
        std::uint16_t code;
        std::memcpy(&code, data.page(e) + at, 2);
        return static_cast<double>(formats::F16::decode(code));
      };
      const std::int64_t tokens =
          std::min(data.blocks_per_page() * formats::kv_block_tokens, length - e.first);
      for (std::int64_t j = 0; j < tokens; ++j) {
        for (std::int64_t c = 0; c < d; ++c) {
          const std::int64_t at =
              page.k_by_channel ? page.channel_scales() + 2 * c
                                : j / formats::kv_block_tokens * page.block_bytes() +
                                      page.block.k_scales() + j % formats::kv_block_tokens * 2;
          noise[((head * static_cast<std::size_t>(length) + static_cast<std::size_t>(e.first + j)) *
                 static_cast<std::size_t>(d)) +
                static_cast<std::size_t>(c)] =
              static_cast<double>(formats::kv_noise(page.block.k_bits)) * scale(at) * scale(at);
        }
      }
    }
  }
  return noise;
}

}  // namespace

Contents read_contents(const KvCache& cache, std::int64_t sequence, std::int64_t layer) {
  const KvCacheOptions& o = cache.options();
  Contents x;
  x.length = *cache.length(sequence, layer);
  x.k.resize(static_cast<std::size_t>(o.heads_kv * x.length * o.d));
  x.v.resize(static_cast<std::size_t>(o.heads_kv * x.length * o.dv));
  const Status s = cache.read(
      sequence, layer, TensorView::dense(x.k.data(), Format::f32, {o.heads_kv, x.length, o.d}),
      TensorView::dense(x.v.data(), Format::f32, {o.heads_kv, x.length, o.dv}), {});
  EXPECT_TRUE(s.ok()) << s.message();
  x.noise = noise_of(cache, sequence, layer);
  return x;
}

Contents contents_of(const KvRows& rows, std::int64_t heads, std::int64_t d, std::int64_t dv) {
  Contents x;
  x.length = rows.count;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t j = 0; j < rows.count; ++j) {
      const auto copy = [&](const std::vector<float>& from, std::int64_t n,
                            std::vector<float>& to) {
        const float* row = from.data() + (j * heads + h) * n;
        to.insert(to.end(), row, row + n);
      };
      copy(rows.k, d, x.k);
      copy(rows.v, dv, x.v);
    }
  }
  return x;
}

double nrmse(const std::vector<float>& a, const std::vector<double>& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double e = static_cast<double>(a[i]) - b[i];
    error += e * e;
    norm += b[i] * b[i];
  }
  return std::sqrt(error / norm);
}

double largest_difference(const std::vector<float>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double x = static_cast<double>(a[i]);
    if (std::isinf(b[i]) && x == b[i]) continue;
    const double e = std::abs(x - b[i]);
    most = e == e ? std::max(most, e) : std::numeric_limits<double>::infinity();
  }
  return most;
}

}  // namespace qattn::test
