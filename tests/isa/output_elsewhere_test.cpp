// RowState with an output that it does not hold: O lies with another warp, as in tensor memory, and
// that warp rescales it.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "emulate.hpp"
#include "kernels/attention/rows/row_state.cuh"

namespace qattn::isa_test {
namespace {

using isa::SharedAddress;

/// A row tile, eight keys a tile.
template <bool TileP, bool Whole>
struct SmallShape {
  using Fragment = isa::MmaFragment;
  static constexpr int m_tiles = 1, keys = 8, rows = 16, channels = 4;
  static constexpr bool tile_p = TileP, whole_references = Whole, does_blocks_again = false;
  static constexpr bool u8 = false;
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
  int moves = 0;

  QATTN_DEVICE void store(const float (&by)[R]) const {
    if (!isa::leads_row<F>(isa::lane())) return;
    for (int r = 0; r < R; ++r) isa::store_shared(at.factors + 4 * F::row(isa::lane(), r), by[r]);
  }
  QATTN_DEVICE void rescale(const float (&by)[R]) {
    ++moves;
    store(by);
  }
  /// For tiles that move no reference.
  QATTN_DEVICE void keep() const {
    float one[R];
    std::fill(one, one + R, 1.0f);
    store(one);
  }
};
static_assert(kernels::OutputOfRows<FarOutput<SmallShape<false, false>>, 2>);

struct Call {
  const float *scores, *v;  ///< [16][tiles * 8], units of log2; [tiles * 8][4]
  float *out, *max;         ///< [16][4]; [16] last references
  int* moves;               ///< tiles that moved references
  int tiles;
};

/// By the function that kernels with such references call.
template <class S>
void take_maxima(kernels::RowState<S>& state, float (&top)[2], FarOutput<S>& output) {
  constexpr float one[2] = {1.0f, 1.0f}, near[2] = {};
  if constexpr (S::whole_references) {  // of the lanes' own maxima
    state.take_peaks(top, one, output);
  } else {
    isa::row_maxima<typename S::Fragment>(top);
    float ref[2];
    if constexpr (S::tile_p) {
      state.update_far_max(top, near, ref, output);
    } else {
      state.update_max(top, output);
    }
  }
}

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
    output.keep();
    isa::sync_warp();
    take_maxima(state, top, output);
    for (int r = 0; r < R; ++r) {
      for (int e = 0; e < F::row_elements; ++e) {
        const float p = isa::exp2(s[r][e] - state.reference(state.max[r]));
        state.sum[r] += p;
        const int place = F::row(lane, r) * S::keys + F::lane_column(lane) + F::element_column(e);
        isa::store_shared(output.at.p + 4 * place, p);
      }
    }
    isa::barrier_sync_anywhere(1, 64);  // P and factors are there
    isa::barrier_sync_anywhere(2, 64);  // and have been read
  }
  isa::add_rows<F>(state.sum);
  for (int r = 0; r < R && isa::leads_row<F>(lane); ++r) {
    isa::store_shared(output.at.sums + 4 * F::row(lane, r), state.sum[r]);
    isa::store_global(call.max + F::row(lane, r), state.max[r]);
  }
  if (lane == 0) isa::store_global(call.moves, output.moves);
  isa::barrier_sync_anywhere(1, 64);
}

/// Half the channels of a row a lane.
template <class S>
void own_output(const Call& call) {
  const Places<S> at;
  const int row = isa::lane() / 2, first = isa::lane() % 2 * 2;
  float o[2] = {};
  for (int t = 0; t < call.tiles; ++t) {
    isa::barrier_sync_anywhere(1, 64);
    const float factor = isa::load_shared<float>(at.factors + 4 * row);
    for (int c = 0; c < 2; ++c) {
      o[c] *= factor;
      for (int j = 0; j < S::keys; ++j) {
        const float p = isa::load_shared<float>(at.p + 4 * (row * S::keys + j));
        o[c] += p * isa::load_global(call.v + (t * S::keys + j) * S::channels + first + c);
      }
    }
    isa::barrier_sync_anywhere(2, 64);
  }
  isa::barrier_sync_anywhere(1, 64);
  const float sum = isa::load_shared<float>(at.sums + 4 * row);
  for (int c = 0; c < 2; ++c) {
    isa::store_global(call.out + row * S::channels + first + c, o[c] / sum);
  }
}

/// Scores that rise by `step` from tile to tile move references in so many tiles of five.
template <class S>
void expect_softmax(float step, int moves, const Options& options) {
  constexpr int tiles = 5, keys = tiles * S::keys;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> scores(S::rows * keys), v(keys * S::channels), out(S::rows * S::channels);
  std::vector<float> max(S::rows);
  for (float& x : v) x = normal(random);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    scores[i] = normal(random) + step * static_cast<float>(i % keys / S::keys);
  }
  int moved = -1;
  const Call call{scores.data(), v.data(), out.data(), max.data(), &moved, tiles};
  const std::string error = error_of(64, Places<S>::bytes, options, [&] {
    isa::warp() == 0 ? own_rows<S>(call) : own_output<S>(call);
  });
  ASSERT_EQ(error, "") << describe(options);
  EXPECT_EQ(moved, moves) << step;
  for (std::size_t row = 0; row < S::rows; ++row) {
    const float* first = &scores[row * keys];
    const float top = *std::max_element(first, first + keys);
    if (S::whole_references) {
      EXPECT_EQ(max[row], std::ceil(max[row]));
    } else if (!S::tile_p) {
      EXPECT_EQ(max[row], top);
    }
    EXPECT_NEAR(max[row], top, 9.0f);
    for (std::size_t c = 0; c < S::channels; ++c) {
      double sum = 0, want = 0;
      for (std::size_t j = 0; j < keys; ++j) {
        const double p = std::exp2(double{first[j]});
        sum += p, want += p * double{v[j * S::channels + c]};
      }
      EXPECT_NEAR(out[row * S::channels + c], want / sum, 2e-6) << row << " " << c;
    }
  }
}

TEST(OutputElsewhere, IsRescaledByItsOwner) {
  using Maxima = SmallShape<false, false>;  // references are the rows' maxima,
  using Tiles = SmallShape<true, false>;    // or move when one is far above them,
  using Powers = SmallShape<false, true>;   // and are powers of two
  for (const Options& options : all_schedules()) {
    expect_softmax<Maxima>(0.0f, 4, options);
    expect_softmax<Maxima>(3.0f, 4, options);
    expect_softmax<Maxima>(-40.0f, 0, options);
    expect_softmax<Tiles>(0.0f, 0, options);
    expect_softmax<Tiles>(3.0f, 1, options);
    expect_softmax<Tiles>(40.0f, 4, options);
    expect_softmax<Powers>(0.0f, 0, options);
    expect_softmax<Powers>(3.0f, 2, options);
    expect_softmax<Powers>(40.0f, 4, options);
  }
}

}  // namespace
}  // namespace qattn::isa_test
