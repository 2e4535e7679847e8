// RowState with an output that it does not hold: O lies with another warp, as in tensor memory, and
// that warp rescales it.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "emulate.hpp"
#include "kernels/attention/common/row_state.cuh"

namespace qattn::isa_test {
namespace {

using isa::SharedAddress;

/// A row tile, eight keys a tile.
template <bool TileP, bool Whole>
struct SmallShape {
  using Fragment = isa::MmaFragment;
  static constexpr int m_tiles = 1, keys = 8, rows = 16, channels = 4;
  static constexpr bool tile_p = TileP, whole_references = Whole, does_blocks_again = false;
  static constexpr bool u8 = TileP;
};

/// Where the warps meet: a factor and a sum for each row, and P of a tile.
template <class S>
struct Places {
  SharedAddress factors = isa::shared_base(), sums = factors + 4 * S::rows, p = sums + 4 * S::rows;
  static constexpr int bytes = 4 * S::rows * (2 + S::keys);
};

/// Leaves factors for the warp that has O.
template <class S>
struct FarOutput {
  using F = typename S::Fragment;
  static constexpr int R = F::rows * S::m_tiles;
  Places<S> at;

  QATTN_DEVICE void rescale(const float (&by)[R]) {
    if (!isa::leads_row<F>(isa::lane())) return;
    for (int r = 0; r < R; ++r) isa::store_shared(at.factors + 4 * F::row(isa::lane(), r), by[r]);
  }
  QATTN_DEVICE void keep() {
    float one[R];
    std::fill(one, one + R, 1.0f);
    rescale(one);
  }
};
static_assert(kernels::OutputOfRows<FarOutput<SmallShape<false, false>>, 2>);

struct Call {
  const float *scores, *v;  ///< [16][tiles * 8], units of log2; [tiles * 8][4]
  float* out;               ///< [16][4]
  int tiles;
};

template <class S>
void own_rows(const Call& call) {
  using F = typename S::Fragment;
  constexpr int R = FarOutput<S>::R;
  const kernels::AttentionParams none{};
  kernels::RowState<S> state(none);
  FarOutput<S> output;
  const int lane = isa::lane(), keys = call.tiles * S::keys;
  for (int t = 0; t < call.tiles; ++t) {
    float s[R][F::row_elements], top[R];
    for (int r = 0; r < R; ++r) {
      for (int e = 0; e < F::row_elements; ++e) {
        const int key = t * S::keys + F::lane_column(lane) + F::element_column(e);
        s[r][e] = isa::load_global(call.scores + F::row(lane, r) * keys + key);
      }
      top[r] = std::max(s[r][0], s[r][1]);
    }
    isa::row_maxima<F>(top);
    output.keep();
    isa::sync_warp();
    state.update_max(top, output);
    for (int r = 0; r < R; ++r) {
      for (int e = 0; e < F::row_elements; ++e) {
        const float p = isa::exp2(s[r][e] - state.reference(state.max[r]));
        state.sum[r] += p;
        const int place = F::row(lane, r) * S::keys + F::lane_column(lane) + F::element_column(e);
        isa::store_shared(output.at.p + 4 * place, p);
      }
    }
    isa::barrier_sync(1, 64);  // P and factors are there
    isa::barrier_sync(2, 64);  // and have been read
  }
  isa::add_rows<F>(state.sum);
  for (int r = 0; r < R && isa::leads_row<F>(lane); ++r) {
    isa::store_shared(output.at.sums + 4 * F::row(lane, r), state.sum[r]);
  }
  isa::barrier_sync(1, 64);
}

/// Half the channels of a row a lane.
template <class S>
void own_output(const Call& call) {
  const Places<S> at;
  const int row = isa::lane() / 2, first = isa::lane() % 2 * 2;
  float o[2] = {};
  for (int t = 0; t < call.tiles; ++t) {
    isa::barrier_sync(1, 64);
    const float factor = isa::load_shared<float>(at.factors + 4 * row);
    for (int c = 0; c < 2; ++c) {
      o[c] *= factor;
      for (int j = 0; j < S::keys; ++j) {
        const float p = isa::load_shared<float>(at.p + 4 * (row * S::keys + j));
        o[c] += p * isa::load_global(call.v + (t * S::keys + j) * S::channels + first + c);
      }
    }
    isa::barrier_sync(2, 64);
  }
  isa::barrier_sync(1, 64);
  const float sum = isa::load_shared<float>(at.sums + 4 * row);
  for (int c = 0; c < 2; ++c) {
    isa::store_global(call.out + row * S::channels + first + c, o[c] / sum);
  }
}

/// Scores that rise by `step` from tile to tile, so that references have to move, or need not.
template <class S>
void expect_softmax(float step, const Options& options) {
  constexpr int tiles = 5, keys = tiles * S::keys;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> scores(S::rows * keys), v(keys * S::channels), out(S::rows * S::channels);
  for (float& x : v) x = normal(random);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = normal(random) + step * static_cast<float>(i % keys / S::keys);
  }
  const Call call{scores.data(), v.data(), out.data(), tiles};
  const std::string error = error_of(64, Places<S>::bytes, options, [&] {
    isa::warp() == 0 ? own_rows<S>(call) : own_output<S>(call);
  });
  ASSERT_EQ(error, "") << describe(options);
  for (std::size_t row = 0; row < S::rows; ++row) {
    for (std::size_t c = 0; c < S::channels; ++c) {
      double sum = 0, want = 0;
      for (std::size_t j = 0; j < keys; ++j) {
        const double p = std::exp2(double{scores[row * keys + j]});
        sum += p, want += p * double{v[j * S::channels + c]};
      }
      EXPECT_NEAR(out[row * S::channels + c], want / sum, 2e-6) << row << " " << c;
    }
  }
}

TEST(OutputElsewhere, IsRescaledByItsOwner) {
  for (const Options& options : all_schedules()) {
    for (const float step : {0.0f, 3.0f, 40.0f, -40.0f}) {
      expect_softmax<SmallShape<false, false>>(step, options);  // references are maxima
      expect_softmax<SmallShape<true, false>>(step, options);   // they move when one is far above
      expect_softmax<SmallShape<false, true>>(step, options);   // and are powers of two
    }
  }
}

}  // namespace
}  // namespace qattn::isa_test
