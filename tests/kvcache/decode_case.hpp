// Filled caches, and float64 attention over what they hold.
#pragma once

#include <cstdint>
#include <vector>

#include "qattn/kv_cache.hpp"

namespace qattn::test {

/// Keys and values of one (sequence, layer): (S, Hkv, D), (S, Hkv, Dv).
struct KvRows {
  std::int64_t count = 0;
  std::vector<float> k, v;
};

/// N(0,1), with `key_shift` added to a few channels of every key.
KvRows normal_rows(std::int64_t count, std::int64_t heads, std::int64_t d, std::int64_t dv,
                   unsigned seed, float key_shift = 0);

std::vector<float> normal_values(std::int64_t count, unsigned seed, float sigma = 1.0f);

/// Appends to one sequence; fails the test if that is refused.
void append_rows(KvCache& cache, std::int64_t sequence, std::int64_t layer, const KvRows& rows);
/// Rows [begin, end) of `rows`.
KvRows slice(const KvRows& rows, std::int64_t begin, std::int64_t end);

/// As files of earlier versions may have it: every page of codes of a layer becomes two of the same
/// positions, the second with the tokens of its second half.
void split_pages(KvCache& cache, std::int64_t sequence, std::int64_t layer = 0);

/// One decode call with its memory. q: (B, Sq, Hq, D).
struct DecodeCase {
  std::int64_t queries = 1, heads_q = 1;
  KvDecodeOptions options;
  std::vector<float> q, sinks;     ///< sinks: empty or (Hq)
  std::vector<std::uint8_t> tree;  ///< empty or (B, Sq, Sq)
  bool with_mass = false;

  std::vector<float> out, lse, mass;  ///< filled by run()
  Status run(const KvCache& cache, const std::vector<std::int64_t>& sequences,
             std::int64_t layer = 0);
};

/// A cache with one sequence of normal_rows(); importance at random so that every tier is used.
struct Filled {
  KvCache cache;
  std::int64_t id;
  KvRows rows;
};
Filled fill(const KvCacheOptions& o, std::int64_t length, float key_shift = 3.0f);

/// N(0, 1.5^2), with the probability mass.
DecodeCase queries_for(const KvCacheOptions& o, std::int64_t group, std::int64_t queries,
                       std::int64_t batch = 1);

struct DecodeTruth {
  std::vector<double> out;   ///< (B, Sq, Hq, Dv)
  std::vector<double> lse;   ///< (B, Hq, Sq)
  std::vector<double> mass;  ///< (B, Hq, blocks)
};

/// Attention in float64 over keys and values of each sequence: (Hkv, S, D) and (Hkv, S, Dv), NaN
/// rows being evicted tokens.
struct Contents {
  std::int64_t length = 0;
  std::vector<float> k, v;
  std::vector<double> noise;  ///< as k: variances that debias reckons with; empty: none
};
DecodeTruth attend(const DecodeCase& c, const KvCacheOptions& o,
                   const std::vector<Contents>& contents);

/// What the cache reads as.
Contents read_contents(const KvCache& cache, std::int64_t sequence, std::int64_t layer = 0);
/// The same layout of what was appended.
Contents contents_of(const KvRows& rows, std::int64_t heads, std::int64_t d, std::int64_t dv);

/// |a - b| / |b|.
double nrmse(const std::vector<float>& a, const std::vector<double>& b);
double largest_difference(const std::vector<float>& a, const std::vector<double>& b);

}  // namespace qattn::test
