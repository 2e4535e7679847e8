// What the Hopper prefill kernel's producer leaves to the other warps of its warpgroup, where
// operands of 16 bits are read in place.
#pragma once

#include "kernels/attention/common/check.cuh"
#include "kernels/attention/sm90a/load.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// The first warp puts zeros in the place of rows of V behind a sequence's end. Beside codes of Q
/// and K it is alone; K of 16 bits two warps test where TMA has put it. From global memory, by the
/// same 64 threads, they took 12 us a block of rows (H200, D 128), more than the block's products.
/// Blocks share them and leave notes to SpoilRows (p.bad_keys), or each tests what it sees and
/// leaves bad keys to the portable kernel. General calls test every score instead.
template <Sm90Config C>
struct Sm90Checker {
  using S = Sm90Shape<C>;
  static constexpr int warps = S::checkers / 32;

  const Sm90Params& p;
  bool cleans;  ///< is this the first warp?
  SharedAddress base = isa::shared_base();
  RingPlace<S::stages> place{};
  std::uint32_t parities = 0;  ///< of the stages' unclean barriers, which few rounds use

  QATTN_DEVICE void clean(const WorkTile& work, int tile) {
    isa::mbarrier_wait(base + S::unclean + 8 * place.stage, parities >> place.stage & 1);
    parities ^= 1u << place.stage;
    const SharedAddress values = base + S::ring_at + place.stage * S::stage_bytes + S::v_at;
    const int first = static_cast<int>(work.k.length) - tile;
    constexpr int chunks = S::v_row / 16;
    for (int n = first * chunks + isa::lane(); n < S::keys * chunks; n += 32) {
#pragma unroll
      for (int panel = 0; panel < S::v_panels; ++panel) {
        isa::store_shared(values + panel * S::v_bytes + 16 * n, isa::Words4{});
      }
    }
    isa::fence_async_proxy();
    isa::sync_warp();
    if (isa::lane() == 0) isa::mbarrier_arrive(base + S::full + 8 * place.stage);
  }

  /// A thread tests a row in 64. Lanes take a row's chunks in turns that spare banks.
  QATTN_DEVICE bool test(const WorkTile& work, int tile, SharedAddress keys) const {
    const int thread = isa::thread() % S::checkers, length = static_cast<int>(work.k.length);
    bool any = false;
    for (int row = thread; row < S::keys; row += note_keys) {
      if (tile + row - thread >= length) break;
      bool bad = false;
#pragma unroll
      for (int n = 0; n < S::qk_panels; ++n) {
#pragma unroll
        for (int c = 0; c < S::qk_panel / 16; ++c) {
          const int chunk = (c + thread) % (S::qk_panel / 16);
          bad |= not_finite<C.qk>(isa::load_shared<isa::Words4>(keys + n * S::k_panel_bytes +
                                                                row * S::qk_panel + 16 * chunk));
        }
      }
      bad &= tile + row < length;
      any |= bad;
      if (p.bad_keys == nullptr) continue;
      note_keys_of(p, work, tile + row - thread, bad ? tile + row : no_key, thread / 32, warps);
    }
    return any;
  }

  /// K of a tile. Is any of it bad?
  QATTN_DEVICE bool check(const WorkTile& work, const KeyShare& share, int tile) {
    isa::mbarrier_wait(base + S::full + 8 * place.stage, place.parity);
    const bool mine = p.bad_keys != nullptr ? share.has(tile, S::keys) : !p.general;
    const bool bad = tile >= 0 && mine &&
                     test(work, tile, base + S::ring_at + place.stage * S::stage_bytes + S::k_at);
    isa::mbarrier_arrive(base + S::empty + 8 * place.stage);
    return bad;
  }

  QATTN_DEVICE void run() {
    if constexpr (S::pv_16bit) {
      static_assert(!S::qk_16bit || S::checkers == note_keys);
      for (int index = isa::block().x; index < p.work_tiles; index += isa::grid().x) {
        const WorkTile work = locate_work(p, index, S::rows, S::keys);
        const KeyShare share(p, work, S::rows);
        bool needs_fallback = false;
        each_stage(p, work, S::keys, [&](int tile, int before) {
          if (cleans && before >= 0 && needs_cleaning(p, work, before, S::keys)) {
            clean(work, before);
          }
          if constexpr (S::qk_16bit) needs_fallback |= check(work, share, tile);
          place.advance();
        });
        if constexpr (S::qk_16bit) {
          const bool again = p.bad_keys == nullptr && isa::any(needs_fallback);
          if (isa::lane() == 0) {
            flag_fallback(p, index, fallback_checkers + isa::thread() % S::checkers / 32, again);
          }
        }
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
