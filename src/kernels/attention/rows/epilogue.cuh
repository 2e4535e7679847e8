// How query rows end: sums, sinks, LSE, and their way to the output.
#pragma once

#include "formats/bits.hpp"
#include "kernels/attention/common/finish.hpp"
#include "kernels/attention/rows/score_rules.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A warp takes `rows` rows, of Rows at most, of 16-bit channels from shared memory to the output,
/// in pieces of one type. `to`: the first of `channels` of row 0; `stride`: elements from row to
/// row.
template <int Rows, int Channels, int RowBytes, class Piece>
QATTN_DEVICE void copy_rows(SharedAddress from, std::uint16_t* to, std::int64_t stride, int rows,
                            int channels) {
  constexpr int width = sizeof(Piece) / 2, pieces = Channels / width;
  constexpr int lanes = pieces < 32 ? pieces : 32, step = 32 / lanes;
  [[maybe_unused]] constexpr int ahead = Rows == 64 ? 2 : 8;  // Sm90Writer has few registers
  const int lane = isa::lane(), first = lane / lanes;
  if (lane >= lanes * step) return;
  to += first * stride, from += first * RowBytes;
#pragma unroll
  for (int c = lane % lanes * width; c < Channels; c += lanes * width) {
    if (c >= channels) break;
    std::uint16_t* out = to + c;
    SharedAddress at = from + 2 * c;
#pragma unroll ahead
    for (int row = first; row < Rows; row += step) {
      if (row < rows) {
        isa::store_global(reinterpret_cast<Piece*>(out), isa::load_shared<Piece>(at));
      }
      out += step * stride, at += step * RowBytes;
    }
  }
}

/// Ends the rows of a thread whose O lies in registers. `S` gives Fragment, m_tiles, warp_rows, dv,
/// d_tiles, out_channels, out_row, p_log2, pv, pv_16bit; whole_references: is P relative to powers
/// of two? direct_sums: is P V of u8 in units of 2^-149? two_row_ends: is there a quick way to end
/// usual rows? divides: by a division?
template <class S>
struct Epilogue {
  using F = typename S::Fragment;
  static_assert(F::run % 2 == 0);  // channels leave in pairs of neighbours
  static constexpr int M = S::m_tiles, R = F::rows * M;

  const RowMap<S>& map;
  RowState<S>& state;
  RegisterOutput<S>& output;
  const AttentionParams& p = map.p;
  const WorkTile& work = map.work;

  /// Ends all rows and writes them. `rows`: shared memory for S::out_row bytes a row of the block,
  /// of which a warp touches its own rows only. `part`: has the work a split?
  QATTN_DEVICE void write(SharedAddress rows, bool part) {
    if (!end(part)) return;
#pragma unroll
    for (int first = 0; first < S::dv; first += S::out_channels) {
      isa::sync_warp();  // rows of earlier work have left
      stage_rows(rows, first);
      isa::sync_warp();
      store_rows(rows, first);
    }
  }

  /// Ends all rows. Do they leave through shared memory? The others have left then.
  // This counts where blocks have few tiles: of 22000 clocks at S 1024 (H200, D 128) rows that
  // ended one after the other took 1300, and stores by the warps that own them 1050.
  QATTN_DEVICE bool end(bool part) {
    isa::add_rows<F>(state.sum);
    if constexpr (S::whole_references) end_references(part);
    if (part) {
      if constexpr (S::direct_sums) output.end_values(state.excess);
      write_part();
      return false;
    }
    RowEnds ends;
#pragma unroll
    for (int r = 0; r < R; ++r) ends.poison[r] = row_poison(r);
    if (!S::two_row_ends || !end_usual_rows(ends)) {
      end_rows(ends);
      mend_rows(ends);
      if constexpr (S::direct_sums) scale_far_rows(ends);
    }
    scale_rows(ends);
    if (p.v_mean != nullptr) add_mean(ends.mean_weight);
    if (p.out.format == Format::f32) store_floats();
    return p.out.format != Format::f32;
  }

  /// What rounding to P's 16 bits takes from 2^x.
  QATTN_DEVICE static float rounded_off(float x) {
    const float e = isa::exp2(x);
    if constexpr (S::pv == Element::f16) return e - isa::unpack_f16(isa::pack_f16(e, e)).lo;
    return e - isa::unpack_bf16(isa::pack_bf16(e, e)).lo;
  }
  /// Sums are of rounded P, as the output is. Relative to a power of two, P of the largest score is
  /// rounded, too, and the sum of a row that it dominates is this one number. What the row's mass
  /// is more than its sum moves the reference, for the LSE and for what it weighs beside a sink or
  /// other parts. The largest exponent is what the tiles had, to the bit: its key has left the
  /// reference where it is now.
  QATTN_DEVICE void end_references(bool part) {
    const bool weighs = part || p.out.lse != nullptr || p.sinks.data != nullptr;
    if (weighs) isa::row_maxima<F>(state.peak);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      state.max[r] = state.max[r] == state.unseen ? -tile::infinity() : state.max[r];
      const float more = rounded_off(state.peak[r]) * isa::reciprocal(state.sum[r]);
      if (weighs && state.sum[r] > 0.0f) state.max[r] += isa::log2(1.0f + more);
    }
  }

  /// Leaves the rows to CombineSplits. A bad row has a sum of NaN, unless it has seen no key.
  QATTN_DEVICE void write_part() {
    const PartsView& parts = p.parts;
    const std::int64_t first = part_row(p, work.q, work.b, work.head, work.first_row) +
                               std::int64_t{work.split} * parts.rows;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float poison = row_poison(r), top = state.max[r] - S::p_log2;
      const bool bad = isa::any_in_row<F>(map.lane, (state.bad_rows >> r & 1) != 0);
      const bool exists = map.exists(r);
      if constexpr (S::pv_16bit) {
        state.needs_fallback |=
            exists && tile::is_nan(poison) && !bad && tile::is_finite(state.sum[r]);
      }
      const float total = bad && top != -tile::infinity() ? tile::quiet_nan() : state.sum[r];
      if (!exists) continue;
      const std::int64_t row = first + map.local_row(r);
      if (isa::leads_row<F>(map.lane)) {
        isa::store_global(reinterpret_cast<isa::Words2*>(parts.state + 2 * row),
                          isa::Words2{{__builtin_bit_cast(std::uint32_t, top),
                                       __builtin_bit_cast(std::uint32_t, total)}});
      }
      if (top == -tile::infinity() && !tile::is_nan(total)) continue;
      float* to = parts.out + row * parts.channels + map.first_column();
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; e += 2) {
          const std::uint32_t words[2] = {formats::bits_of(map.element(output.o, r, n, e)),
                                          formats::bits_of(map.element(output.o, r, n, e + 1))};
          isa::store_global(reinterpret_cast<isa::Words2*>(to + map.column(n, e)),
                            isa::Words2{{words[0], words[1]}});
        }
      }
    }
  }

  /// What becomes of the rows' accumulators x: x * factor + poison + the mean's share.
  struct RowEnds {
    float factor[R], poison[R], mean_weight[R];
  };

  /// x[r], for an index that only a run of the loop knows.
  template <class T>
  QATTN_DEVICE static T pick(const T (&x)[R], int r) {
    T value = x[0];
#pragma unroll
    for (int n = 1; n < R; ++n) value = r == n ? x[n] : value;
    return value;
  }
  /// Elements may have no value before: to give them one spills 992 bytes at D 256 on sm_100.
  template <class T>
  QATTN_DEVICE static void put(T (&x)[R], int r, T value) {
#pragma unroll
    for (int n = 0; n < R; ++n) x[n] = r == n ? value : x[n];
  }

  QATTN_DEVICE void store_lse(int i, float lse) {
    if (isa::leads_row<F>(map.lane) && p.out.lse != nullptr && i < work.q.rows) {
      isa::store_global(p.out.lse + work.b * p.out.lse_batch +
                            (work.q.begin + i) * p.out.lse_token + work.head * p.out.lse_head,
                        lse);
    }
  }

  /// Ends the warp's rows as tile::finish_row() does if nothing is special about any. Else returns
  /// false.
  QATTN_DEVICE bool end_usual_rows(RowEnds& ends) {
    constexpr float least = S::direct_sums ? 1 / most_direct_factor : 0x1p-100f;
    bool usual = state.bad_rows == 0 && p.sinks.data == nullptr && !work.k.bad && !work.q.bad;
    float top[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      top[r] = state.max[r] - S::p_log2 + state.lse_offset[r];
      if constexpr (S::divides) {
        ends.factor[r] = 1.0f / state.sum[r];
      } else {  // the same within the bounds below, without a branch
        const float near = isa::reciprocal(state.sum[r]);
        ends.factor[r] = fmaf(near, fmaf(-state.sum[r], near, 1.0f), near);
      }
      ends.mean_weight[r] = 1.0f;
      const float total = state.sum[r];
      usual = usual & map.exists(r) & (fabsf(top[r]) < tile::squeezed_from) & (total > least) &
              (total < 0x1p100f) & (ends.poison[r] == 0.0f);
    }
    if (!isa::all(usual)) return false;
    if (p.out.lse != nullptr) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        store_lse(work.first_row + map.local_row(r),
                  (top[r] + isa::log2(state.sum[r])) * tile::ln_2);
      }
    }
    return true;
  }

  /// Ends any rows.
  QATTN_DEVICE void end_rows(RowEnds& ends) {
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      const int i = work.first_row + map.local_row(r);
      // Any of the lanes that share the row may have found it bad.
      const bool bad = isa::any_in_row<F>(map.lane, (state.bad_rows >> r & 1) != 0);
      const float top = pick(state.max, r) - S::p_log2;
      const bool below = top == -tile::infinity() && map.sees_below(r);
      const float total = below ? tile::quiet_nan() : pick(state.sum, r);
      const tile::RowEnd end = tile::finish_row(p, work.b, work.head, map.exists(r), bad, top,
                                                total, pick(state.lse_offset, r));
      // An index tensor that holds nonsense makes the whole row NaN; so does, in all channels, a
      // bad token of 16-bit V in one.
      const bool exists = map.exists(r);  // Q of a row that does not may hold anything
      const float poison = work.k.bad || work.q.bad ? tile::quiet_nan()
                           : exists                 ? pick(ends.poison, r)
                                                    : 0.0f;
      // With NaN or Inf in Q or K the sum is none either, and rightly so.
      if constexpr (S::pv_16bit) {
        state.needs_fallback |= tile::is_nan(poison) && !bad && tile::is_finite(total);
      }
      store_lse(i, end.lse + poison);
      put(ends.factor, r, end.factor);
      put(ends.poison, r, poison);
      put(ends.mean_weight, r, end.mean_weight);
    }
  }

  /// Rows that saw nothing, whose factor is 0, and those that are NaN.
  QATTN_DEVICE void mend_rows(const RowEnds& ends) {
    bool odd = false;
#pragma unroll
    for (int r = 0; r < R; ++r) odd |= ends.factor[r] == 0.0f || ends.poison[r] != 0.0f;
    if (!isa::any(odd)) return;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const bool none = ends.factor[r] == 0.0f;
      if (none) state.excess[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; ++e) {
          float& x = map.element(output.o, r, n, e);
          x = (none ? 0.0f : x) + ends.poison[r];
        }
      }
    }
  }
  /// The largest factor that direct sums can have: with their units larger ones overflow.
  static constexpr float most_direct_factor = 0x1p68f;

  /// Scales rows that scale_rows() cannot, and leaves it nothing to do.
  // Of the forms that were tried, this one leaves the loops over tiles as they were, bit for bit.
  QATTN_DEVICE void scale_far_rows(RowEnds& ends) {
    bool far = false;
#pragma unroll
    for (int r = 0; r < R; ++r) far |= ends.factor[r] > most_direct_factor;
    if (!isa::any(far)) return;
    output.end_values(state.excess);
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; ++e) map.element(output.o, r, n, e) *= ends.factor[r];
      }
      state.excess[r] = 0.0f, ends.factor[r] = 1 / u8_value_unit;
    }
  }
  QATTN_DEVICE void scale_rows(const RowEnds& ends) {
    float by[R], less[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) by[r] = ends.factor[r];
    if constexpr (S::direct_sums) {
      isa::add_rows<F>(state.excess);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        by[r] *= u8_value_unit;
        less[r] = state.excess[r] * -value_offset * by[r];
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; ++e) {
          float& x = map.element(output.o, r, n, e);
          x = S::direct_sums ? fmaf(x, by[r], less[r]) : x * by[r];
        }
      }
    }
  }

  /// NaN if a channel of row r is not finite, else 0.
  QATTN_DEVICE float row_poison(int r) {
    if constexpr (!S::pv_16bit) return 0.0f;
    float part[4] = {};  // chains that do not wait for one another
#pragma unroll
    for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < F::row_elements; ++e) {
        float& x = part[(n % 2 * 2 + e) % 4];
        x = fmaf(map.element(output.o, r, n, e), 0.0f, x);
      }
    }
    return isa::row_sum<F>((part[0] + part[1]) + (part[2] + part[3]));
  }

  /// The numbers of this thread's channels of N tiles from `first` on, from a table of `channels`;
  /// behind its end, the first. All are on their way before any is used: one after the other those
  /// of a row took 4 us (H200, D 128).
  template <int N>
  QATTN_DEVICE static void load_channels(const RowMap<S>& map, const float* table, int channels,
                                         int first, float (&x)[N][F::row_elements]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < F::row_elements; e += F::run) {
        const int c = map.column(first + n, e) + map.first_column();
        const float* at = table + (c < channels ? c : 0);
#pragma unroll
        for (int i = 0; i < F::run; ++i) x[n][e + i] = isa::load_global(at + i);
      }
    }
  }

  QATTN_DEVICE void add_mean(const float (&weight)[R]) {
    const float* table =
        p.v_mean + (work.b * p.k.heads + work.kv_head) * std::int64_t{p.v_mean_channels};
    constexpr int together = 4;  // all at once have no room in registers beside the output
#pragma unroll
    for (int first = 0; first < S::d_tiles; first += together) {
      float mean[together][F::row_elements];
      load_channels(map, table, p.v_mean_channels, first, mean);
#pragma unroll
      for (int n = 0; n < together; ++n) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int e = 0; e < F::row_elements; ++e) {
            float& x = map.element(output.o, r, first + n, e);
            if (weight[r] != 0.0f) x += weight[r] * mean[n][e];
          }
        }
      }
    }
  }

  /// S::out_channels of the warp's rows, from channel `first` on, in the output's 16 bits to shared
  /// memory. (By stmatrix int8_full was 4 to 5 % slower at S 4096: ptxas ordered its tiles anew.)
  template <class Pack>
  QATTN_DEVICE void stage(SharedAddress rows, int first, Pack pack) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const SharedAddress row = rows + map.local_row(r) * S::out_row + 2 * map.first_column();
#pragma unroll
      for (int n = 0; n < S::out_channels / F::tile_columns; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; e += 2) {
          const int from = first / F::tile_columns + n;
          isa::store_shared(
              row + 2 * map.column(n, e),
              pack(map.element(output.o, r, from, e), map.element(output.o, r, from, e + 1)));
        }
      }
    }
  }
  QATTN_DEVICE void stage_rows(SharedAddress rows, int first) {
    if (p.out.format == Format::f16) {
      stage(rows, first, [](float lo, float hi) { return isa::pack_f16(lo, hi); });
    } else {
      stage(rows, first, [](float lo, float hi) { return isa::pack_bf16(lo, hi); });
    }
  }

  /// Those from shared memory to the output.
  QATTN_DEVICE void store_rows(SharedAddress rows, int first) {
    const int row = map.warp * S::warp_rows, left = rows_in_memory() - row;
    std::uint16_t* to = static_cast<std::uint16_t*>(p.out.data) + out_offset(row) + first;
    rows += row * S::out_row;
    const int channels = p.out.channels - first;
    if (p.out.vectors) {
      copy_rows<S::warp_rows, S::out_channels, S::out_row, isa::Words4>(rows, to, p.out.token, left,
                                                                        channels);
    } else {
      copy_rows<S::warp_rows, S::out_channels, S::out_row, std::uint16_t>(rows, to, p.out.token,
                                                                          left, channels);
    }
  }

  QATTN_DEVICE void store_floats() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = map.local_row(r), first = map.first_column();
      if (row >= rows_in_memory()) continue;
      float* to = static_cast<float*>(p.out.data) + out_offset(row) + first;
#pragma unroll
      for (int n = 0; n < S::d_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < F::row_elements; ++e) {
          if (map.column(n, e) + first < p.out.channels) {
            isa::store_global(to + map.column(n, e), map.element(output.o, r, n, e));
          }
        }
      }
    }
  }

  /// Rows of the block that the output has room for.
  QATTN_DEVICE int rows_in_memory() const { return static_cast<int>(work.q.rows) - work.first_row; }
  QATTN_DEVICE std::int64_t out_offset(int row) const {
    return work.b * p.out.batch + (work.q.begin + work.first_row + row) * p.out.token +
           work.head * p.out.head;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
