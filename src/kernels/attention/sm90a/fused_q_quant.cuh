// Q's codes, made inside the Hopper prefill kernel by the warps that the producer does not need.
#pragma once

#include "kernels/attention/sm90a/load.cuh"
#include "kernels/operand/row_codes.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Rows of 16 bits, 64 at a time, by TMA to shared memory, and from there as codes with a scale per
/// token to where the products read them: bit by bit what prepare() makes. Eight lanes share a row;
/// a lane has 16 bytes of each panel, and reads them twice, since its warpgroup has few registers.
template <Sm90Config C>
struct Sm90Encoder {
  using S = Sm90Shape<C>;
  static constexpr int threads = 32 * S::encoders;
  static constexpr int barrier = 1 + S::consumers;  ///< those below are the turns'
  static constexpr int step_rows = S::encoder_rows, row_lanes = 32 / step_rows;
  static constexpr bool e4m3 = C.qk == isa::Element::e4m3;

  const Sm90Params& p;
  SharedAddress base = isa::shared_base();
  RingPlace<S::q_stages> place{};
  std::uint32_t parity = 0;  ///< of the rows that come

  QATTN_DEVICE void load(const WorkTile& work, int first) const {
    const SharedAddress full = base + S::raw_full;
    isa::mbarrier_arrive_expect(full, S::raw_bytes);
    for (int n = 0; n < S::raw_panels; ++n) {
      load_panel(base + S::raw_at + n * S::raw_panel_bytes, p.q_map, p.q, work, work.q, work.head,
                 first, n, full);
    }
  }

  /// This lane's 16 bytes of panel `n`, under TMA's swizzle.
  QATTN_DEVICE Words4 raw(int row, int n) const {
    const int at = row * sm90_panel + isa::lane() % row_lanes * 16;
    return isa::load_shared<Words4>(base + S::raw_at + n * S::raw_panel_bytes +
                                    (at ^ (at >> 3 & 0x70)));
  }
  /// Their codes, under the swizzle that the products read.
  QATTN_DEVICE void put(SharedAddress codes, int row, int n, const Words2& code) const {
    constexpr int mask = S::qk_swizzle == isa::Swizzle::bytes64 ? 0x30 : 0x70;
    const int at = row * S::qk_panel + n * 64 + isa::lane() % row_lanes * 8;
    isa::store_shared(codes + (at ^ (at >> 3 & mask)), code);
  }

  /// What balances this lane's channels of panel `n`.
  QATTN_DEVICE void load_times(const float* factors, int n, float (&times)[8]) const {
    const int channel = 64 * n + isa::lane() % row_lanes * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Words4 w{};  // of channels that are not there, which are zeros
      if (channel < p.factor_channels) {
        w = isa::load_global(reinterpret_cast<const Words4*>(factors + channel) + i);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) times[4 * i + j] = formats::float_of(w.w[j]);
    }
  }
  /// Factors of the head's channels, null where all are 1.
  QATTN_DEVICE const float* factors_of(const WorkTile& work) const {
    if (p.loud == nullptr) return nullptr;
    const std::int64_t unit = std::int64_t{work.b} * p.k.heads + work.kv_head;
    if (isa::load_global(p.loud + unit) == 0) return nullptr;
    return p.q_factors + unit * 2 * p.factor_channels;
  }

  /// 64 rows, of which `count` exist.
  template <isa::Element Input, bool Balanced>
  QATTN_DEVICE void encode(int buffer, int count, const float* factors) const {
    using Row = RowCodes<Input>;
    constexpr float none[8] = {};
    constexpr float most = e4m3 ? formats::E4m3::max : formats::S8::max;
    const SharedAddress codes = base + S::q_at + buffer * S::q_bytes;
    const SharedAddress facts = base + S::facts_at + buffer * S::fact_bytes;
    const int first = (isa::thread() / 32 - 1) * step_rows + isa::lane() / row_lanes;
#pragma unroll 1
    for (int row = first; row < 64; row += S::encoders * step_rows) {  // the same turns in a warp
      std::uint32_t top = 0;
#pragma unroll
      for (int n = 0; n < S::raw_panels; ++n) {
        std::uint32_t x;
        if constexpr (Balanced) {
          float times[8];
          load_times(factors, n, times);
          x = Row::magnitude(raw(row, n), none, times);
        } else {
          x = Row::magnitude(raw(row, n));
        }
        top = top > x ? top : x;
      }
#pragma unroll
      for (int mask = 1; mask < row_lanes; mask *= 2) {
        const std::uint32_t other = isa::shuffle_xor(top, mask);
        top = top > other ? top : other;
      }
      const float scale = formats::amax_scale(formats::float_of(top), most);
      const float factor = code_factor(row < count, scale);
#pragma unroll
      for (int n = 0; n < S::raw_panels; ++n) {
        if constexpr (Balanced) {
          float times[8];
          load_times(factors, n, times);
          put(codes, row, n, Row::encoded(raw(row, n), factor, none, times));
        } else {
          put(codes, row, n, Row::template encoded<e4m3>(raw(row, n), factor));
        }
      }
      if (isa::lane() % row_lanes == 0) {
        isa::store_shared(facts + 4 * row, row < count ? scale : 0.0f);
      }
    }
  }

  template <isa::Element Input>
  QATTN_DEVICE void encode(int buffer, int count, const float* factors) const {
    if constexpr (!e4m3) {
      if (factors != nullptr) return encode<Input, true>(buffer, count, factors);
    }
    encode<Input, false>(buffer, count, factors);
  }

  QATTN_DEVICE void run() {
    if constexpr (S::fused_q_quant) {
      for (int index = isa::block().x; index < p.work_tiles; index += isa::grid().x) {
        const WorkTile work = locate_work(p, index, S::rows, S::keys);
        const float* factors = factors_of(work);
        for (int w = 0; w < S::consumers; ++w) {
          const int buffer = place.stage * S::consumers + w, first = work.first_row + 64 * w;
          const int count = work.q.bad ? 0 : static_cast<int>(work.q.length) - first;
          if (count > 0 && isa::thread() == 32) load(work, first);
          isa::mbarrier_wait(base + S::q_empty + 8 * buffer, place.parity ^ 1);
          if (count > 0) {
            isa::mbarrier_wait(base + S::raw_full, parity);
            parity ^= 1;
            p.q_input == isa::Element::bf16 ? encode<isa::Element::bf16>(buffer, count, factors)
                                            : encode<isa::Element::f16>(buffer, count, factors);
            isa::fence_async_proxy();
            isa::barrier_sync(barrier, threads);  // the rows may be overwritten
          }
          isa::sync_warp();
          // All lanes that wrote scales: one for all would do, behind the barrier, but racecheck
          // does not follow an order through two barriers.
          if (isa::lane() % row_lanes == 0) isa::mbarrier_arrive(base + S::q_full + 8 * buffer);
        }
        place.advance();
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
