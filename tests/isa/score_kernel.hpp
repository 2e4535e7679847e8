// A score and a mask function as a GPU kernel would inline them; the CPU path takes the same
// functors. The words are a kernel's, so the text runs in the emulator and compiles for GPUs.
#pragma once

#include <cmath>
#include <cstdint>

#include "isa/launch.hpp"
#include "qattn/score_function.hpp"

namespace qattn::isa_test {

/// A relative bias by head and sequence behind a bend of the score, with a function of <cmath>.
struct BentBias {
  float slope, bend;
  QATTN_HOST_DEVICE float operator()(float score, std::int64_t batch, std::int64_t head,
                                     std::int64_t query, std::int64_t key) const {
    const auto distance = static_cast<float>(query < key ? key - query : query - key);
    const float bent = bend * std::tanh(score / bend);
    return bent - slope * static_cast<float>(1 + head + 4 * batch) * distance;
  }
};

/// Documents of several lengths in one sequence, told by a table in memory; stripes by head.
struct SameDocument {
  const std::int32_t* document;  ///< of every token
  std::int64_t stripe;
  QATTN_HOST_DEVICE bool operator()(std::int64_t batch, std::int64_t head, std::int64_t query,
                                    std::int64_t key) const {
    return document[query] == document[key] && (query + 2 * key + head + batch) % stripe != 0;
  }
};

inline namespace QATTN_TARGET {

/// A block: 64 queries x 64 keys of one head, 16 queries a warp, scores where mma() leaves them.
template <DeviceScoreFunction Score, DeviceMaskFunction Mask>
struct ScoreKernel {
  struct Params {
    Score score;
    Mask mask;
    const float* in;  ///< (batch, head, query, key); minus infinity: hidden already
    float* out;
    int queries, keys;
  };
  static constexpr int tile = 64, threads = 128, min_blocks = 1, shared_bytes = 0;

  static isa::Index3 grid(int batch, int heads, int queries, int keys) {
    return {(queries + tile - 1) / tile * ((keys + tile - 1) / tile), heads, batch};
  }

  /// The rules of ScoreFunction and MaskFunction for one score.
  static QATTN_DEVICE float change(const Params& p, float score, std::int64_t query,
                                   std::int64_t key) {
    const isa::Index3 at = isa::block();
    const bool stays = score != score || score == -INFINITY;
    const float changed = stays ? score : p.score(score, at.z, at.y, query, key);
    return p.mask(at.z, at.y, query, key) ? changed : -INFINITY;
  }

  static QATTN_DEVICE void run(const Params& p) {
    const isa::Index3 at = isa::block();
    const int tiles = (p.keys + tile - 1) / tile;
    const int g = isa::lane() / 4, t = isa::lane() % 4;
    const int row = at.x / tiles * tile + 16 * isa::warp() + g;
    const int column = at.x % tiles * tile + 2 * t;
    const std::int64_t plane =
        (static_cast<std::int64_t>(at.z) * isa::grid().y + at.y) * p.queries * p.keys;
    for (int n = 0; n < tile / 8; ++n) {
      for (int i = 0; i < 4; ++i) {
        const std::int64_t query = row + 8 * (i / 2), key = column + 8 * n + i % 2;
        if (query >= p.queries || key >= p.keys) continue;
        const std::int64_t place = plane + query * p.keys + key;
        isa::store_global(p.out + place, change(p, isa::load_global(p.in + place), query, key));
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
