// After Decode: partial results into O and LSE.
#pragma once

#include "kernels/decode/mixed_kv/mass.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A block of the grid is a row of a pair, whose warps share the blocks of Decode that had parts of
/// it; blocks behind these are DecodeMass's, which need not wait for any result of the others.
template <int Dv>
struct DecodeCombine {
  using Params = DecodeParams;
  static constexpr int threads = combine_threads, min_blocks = 5;
  static constexpr int warps = threads / 32;
  static constexpr int row_bytes = (Dv + 4) * 4;  ///< of a warp: its sums, base and sum
  static constexpr int shared_bytes = warps * row_bytes;
  static constexpr bool dependent = true;

  struct Row {
    LaneRow<Dv> out;
    RowSum sum;

    QATTN_DEVICE void add(float base, float part, const LaneRow<Dv>& x) {
      const RowSum::Weights w = sum.add(base, part);
      if (w.weight == 0) return;
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        out.x[i] = fmaf(out.x[i], w.keep, w.weight * x.x[i]);
      }
    }
    /// What a block of Decode had of it, if anything; all is on its way before any is looked at.
    QATTN_DEVICE void add_part(const Params& p, int block, std::int64_t unit, int row) {
      const std::int64_t at = (block + unit) * p.unit_rows + row;
      const auto words =
          isa::load_global(reinterpret_cast<const isa::Words2*>(p.partial_sum + at * 2));
      LaneRow<Dv> x;
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        x.x[i] = isa::load_global(p.partial_out + at * Dv + out.channel(i));
      }
      if (!takes_part(p, block, unit)) return;
      add(formats::float_of(words.w[0]), formats::float_of(words.w[1]), x);
    }
    QATTN_DEVICE void store(isa::SharedAddress to) const {
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        isa::store_shared(to + static_cast<isa::SharedAddress>(out.channel(i) * 4), out.x[i]);
      }
      if (isa::lane() == 0) {
        isa::store_shared(to + Dv * 4,
                          isa::Words2{{formats::bits_of(sum.top), formats::bits_of(sum.total)}});
      }
    }
    QATTN_DEVICE void add_stored(isa::SharedAddress from) {
      LaneRow<Dv> x;
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        x.x[i] =
            isa::load_shared<float>(from + static_cast<isa::SharedAddress>(out.channel(i) * 4));
      }
      const auto words = isa::load_shared<isa::Words2>(from + Dv * 4);
      add(formats::float_of(words.w[0]), formats::float_of(words.w[1]), x);
    }
    QATTN_DEVICE void add_sink(float sink) {
      const RowSum::Weights w = sum.add(sink * tile::log2_e, 1.0f);
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) out.x[i] *= w.keep;
    }
  };

  static QATTN_DEVICE void store_number(void* data, Format format, std::int64_t at, float x) {
    if (format == Format::f32) return isa::store_global(static_cast<float*>(data) + at, x);
    const std::uint32_t bits =
        format == Format::f16 ? isa::pack_f16(x, 0.0f) : isa::pack_bf16(x, 0.0f);
    isa::store_global(static_cast<std::uint16_t*>(data) + at, static_cast<std::uint16_t>(bits));
  }

  static QATTN_DEVICE void write(const Params& p, std::int64_t pair, int r, bool bad, Row& x) {
    const Quotient place(pair, p.cache.heads_kv), of_row(r, p.queries);
    const std::int64_t head = std::int64_t{place.remainder} * p.group + of_row.quotient,
                       query = of_row.remainder;
    if (p.cache.rotate != 0) x.out.unrotate();
    if (p.cache.smooth_v != 0 && !bad) {
      const std::int64_t slot = isa::load_global(p.slots + place.quotient);
      const float* mean = p.cache.v_mean(slot, p.layer, place.remainder, 0);
#pragma unroll
      for (int i = 0; i < LaneRow<Dv>::count; ++i) {
        x.out.x[i] = fmaf(x.sum.total, isa::load_global(mean + x.out.channel(i)), x.out.x[i]);
      }
    }
    if (p.sinks != nullptr) x.add_sink(isa::load_global(p.sinks + head));
    const float inverse = x.sum.total > 0 ? formats::reciprocal(x.sum.total) : 0.0f;
    bad |= tile::is_nan(x.sum.total);
    const float lse = bad ? tile::quiet_nan() : x.sum.lse();
    const std::int64_t to = place.quotient * p.out.batch + query * p.out.query + head * p.out.head;
#pragma unroll
    for (int i = 0; i < LaneRow<Dv>::count; ++i) {
      store_number(p.out.data, p.out.format, to + x.out.channel(i),
                   bad ? tile::quiet_nan() : x.out.x[i] * inverse);
    }
    if (isa::lane() != 0) return;
    if (p.lse != nullptr) {
      isa::store_global(
          p.lse + (std::int64_t{place.quotient} * p.heads_q + head) * p.queries + query,
          lse * tile::ln_2);
    }
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    const std::int64_t of_mass = isa::block().x - p.pairs() * p.rows();
    if (of_mass >= 0) return DecodeMass::run(p, of_mass);
    isa::grid_dependency_wait();
    const Quotient place(isa::block().x, p.rows());
    const std::int64_t pair = place.quotient;
    const std::int64_t unit = pair + p.chunk_of(place.remainder) * p.pairs();
    const int row = place.remainder & (p.unit_rows - 1);
    int first = 0, last = -1;
    if (p.places() > 0) {
      first = isa::load_global(p.first_block + unit);
      last = isa::load_global(p.last_block + unit);
    }
    const bool bad = tile::is_nan(isa::load_global(p.query_scale + unit));
    Row x;
#pragma unroll
    for (int i = 0; i < LaneRow<Dv>::count; ++i) x.out.x[i] = 0;
    const int warp = isa::warp();
    for (int block = first + warp; block <= last; block += warps) x.add_part(p, block, unit, row);
    const isa::SharedAddress shared = isa::shared_base();
    if (warp > 0) x.store(shared + static_cast<isa::SharedAddress>(warp * row_bytes));
    isa::sync_threads();
    if (warp > 0) return;
    for (int w = 1; w < warps && first + w <= last; ++w) {
      x.add_stored(shared + static_cast<isa::SharedAddress>(w * row_bytes));
    }
    write(p, pair, place.remainder, bad, x);
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
