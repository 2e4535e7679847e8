// Codes of Q, K and V, made beside attention on them.
#pragma once

#include "kernels/operand/row_codes.cuh"
#include "kernels/quantize/overlap/jobs.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A coder: one warp. No job waits for a later one, so that blocks need not all run at a time.
/// Codes, scales and means are bit by bit what prepare() makes. Warps wait for each other in tiles
/// of V alone: of K a warp has the rows that share a scale, of Q sixteen.
template <class S>
struct OverlapQuantizer {
  using Jobs = OverlapJobs<S>;
  static constexpr int warps = S::coders, part_rows = 16, parts = slot_tile / part_rows;
  static constexpr int row_lanes = S::channels / chunk_channels, step_rows = 32 / row_lanes;
  static constexpr int steps = part_rows / step_rows;  ///< of a warp through its rows
  using Row = RowCodes<S::input>;

  const OverlapParams& p;
  int warp;  ///< among the coders
  int buffer = 0;
  int mean_of = -1;  ///< a unit whose mean is known to be there

  // ---- Tiles ----------------------------------------------------------------------------------

  /// Rows that share K's scale are a part of the tile, of sixteen; those of other operands are too,
  /// so that addresses of a lane's rows differ by constants. Of its row in the first step:
  QATTN_DEVICE static int first_row(int part) {
    const int n = isa::lane() / row_lanes;
    return n / 2 * 8 + 2 * part + n % 2;
  }
  static constexpr int step_stride = 4 * step_rows;  ///< rows from a step to the next

  /// Where this lane's 16 bytes of that row are, under TMA's swizzle: lanes hold a row's channels
  /// side by side.
  QATTN_DEVICE SharedAddress chunk_at(int part) const {
    const int chunk = isa::lane() % row_lanes;
    const int at = first_row(part) * S::panel_row + chunk % 8 * 16;
    return Jobs::raw(buffer) + chunk / 8 * S::panel_bytes + (at ^ (at >> 3 & 0x70));
  }
  QATTN_DEVICE static Words4 chunk_of(SharedAddress first, int step) {
    return isa::load_shared<Words4>(first + step * step_stride * S::panel_row);
  }
  /// Two channels of a row: lanes hold a panel's side by side.
  QATTN_DEVICE std::uint32_t pair_of(int panel, int row) const {
    const int at = isa::lane() * 4;
    return isa::load_shared<std::uint32_t>(Jobs::raw(buffer) + panel * S::panel_bytes +
                                           row * S::panel_row + (at ^ row % 8 * 16));
  }

  /// The maxima of rows that lie over row_lanes lanes each, one a step: a lane gets its row's of
  /// step (lane % row_lanes) / 2. `Halves`: of both halves.
  template <bool Halves>
  QATTN_DEVICE static std::uint32_t row_maxima(std::uint32_t (&m)[steps]) {
    static_assert(2 * steps == row_lanes);
    const auto larger = [](std::uint32_t a, std::uint32_t b) {
      return Halves ? isa::max3_u16(a, b, b) : a > b ? a : b;
    };
#pragma unroll
    for (int count = steps / 2; count > 0; count /= 2) {
      const bool upper = (isa::lane() & 2 * count) != 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const std::uint32_t keep = upper ? m[i + count] : m[i];
        m[i] = larger(keep, isa::shuffle_xor(upper ? m[i] : m[i + count], 2 * count));
      }
    }
    return larger(m[0], isa::shuffle_xor(m[0], 1));
  }
  /// The row whose maximum this lane gets.
  QATTN_DEVICE static int maximum_row(int part) {
    return first_row(part) + isa::lane() % row_lanes / 2 * step_stride;
  }
  QATTN_DEVICE std::uint32_t find_maximum(SharedAddress chunks) const {
    std::uint32_t m[steps];
#pragma unroll
    for (int step = 0; step < steps; ++step) m[step] = Row::pair_magnitude(chunk_of(chunks, step));
    return Row::larger(row_maxima<true>(m));
  }

  QATTN_DEVICE void await_mean(int unit) {
    if (unit == mean_of) return;
    isa::wait_global(progress_of(p, unit) + OverlapParams::mean_there, 1);
    mean_of = unit;
  }
  /// Of row `n` of a table, this lane's channels.
  QATTN_DEVICE static void load_channels(const float* table, std::int64_t n, float (&x)[8]) {
    const float* from = table + n * S::channels + isa::lane() % row_lanes * chunk_channels;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Words4 w = isa::load_global(reinterpret_cast<const Words4*>(from) + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = formats::float_of(w.w[j]);
    }
  }

  /// What changes this lane's channels of Q or K in front of their codes: `Less`, their mean,
  /// `Balanced`, powers of two.
  template <bool Less, bool Balanced>
  struct Change {
    float mean[8] = {}, times[8];

    QATTN_DEVICE std::uint32_t magnitude(const Words4& raw) const {
      if constexpr (Balanced) return Row::magnitude(raw, mean, times);
      return Row::magnitude(raw, mean);
    }
    QATTN_DEVICE Words2 encoded(const Words4& raw, float factor) const {
      if constexpr (Balanced) return Row::encoded(raw, factor, mean, times);
      if constexpr (Less) return Row::template encoded<false>(raw, factor, mean);
      return Row::template encoded<false>(raw, factor);
    }
  };

  /// Bits of max |x| of this lane's changed rows, all of which exist: of the largest and the
  /// smallest x of each channel, since rounding keeps differences in order. Half of the
  /// instructions.
  template <class Changed>
  QATTN_DEVICE static std::uint32_t spread_of_rows(SharedAddress chunks, const Changed& change) {
    Words4 most = chunk_of(chunks, 0), least = most;
#pragma unroll
    for (int step = 1; step < steps; ++step) {
      const Words4 raw = chunk_of(chunks, step);
      most = Row::most(most, raw);
      least = Row::least(least, raw);
    }
    return isa::max3(change.magnitude(most), change.magnitude(least), 0u);
  }

  /// Q or K: a part's rows. Returns whether one is bad.
  template <bool Less, bool Balanced>
  QATTN_DEVICE bool encode_part(const OverlapJob& job, const PlainRows& row, int part,
                                const Change<Less, Balanced>& change) const {
    const SharedAddress chunks = chunk_at(part);
    std::uint32_t top;
    if constexpr (!Less && !Balanced) {
      top = find_maximum(chunks);
    } else if (Less && row.shared == SharedScales::thread && job.count == slot_tile) {
      top = spread_of_rows(chunks, change);
    } else {
      std::uint32_t m[steps];
#pragma unroll
      for (int step = 0; step < steps; ++step) m[step] = change.magnitude(chunk_of(chunks, step));
      top = row_maxima<false>(m);
    }
    const int mine = maximum_row(part);
    const bool exists = mine < job.count;
    float amax = exists ? formats::float_of(top) : 0.0f;
    if (row.shared == SharedScales::thread) {
      amax = formats::float_of(warp_max(formats::bits_of(amax)));
    }
    const float scale = formats::amax_scale(amax, formats::S8::max);
    if (isa::lane() % 2 == 0) {
      isa::store_global(row.out.scale + job.slot + mine, exists ? scale : 0.0f);
    }
    const float factor = code_factor(exists, scale);
    std::uint8_t* out = row.out.codes + (job.slot + first_row(part)) * S::channels +
                        isa::lane() % row_lanes * chunk_channels;
    // Few instructions: see operand/overlap.hpp. (Two steps at a time: up to 2 % slower.)
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const float f = isa::shuffle(factor, (isa::lane() & ~(row_lanes - 1)) + 2 * step);
      const Words2 code = change.encoded(chunk_of(chunks, step), f);
      isa::store_global(reinterpret_cast<Words2*>(out + step * step_stride * S::channels), code);
    }
    return isa::any(exists && !formats::is_finite(scale));
  }

  template <bool Less, bool Balanced>
  QATTN_DEVICE void encode_rows(const OverlapJob& job) {
    const PlainRows& row = p.plain.row[job.step == Step::code_q ? 0 : 1];
    Change<Less, Balanced> change;
    if constexpr (Less) {
      await_mean(job.unit);
      load_channels(p.k_mean, job.unit, change.mean);
    }
    if constexpr (Balanced) load_channels(row.factors, 2 * std::int64_t{job.unit}, change.times);
#pragma unroll 1
    for (int part = warp; part < parts; part += warps) {
      const bool bad = encode_part(job, row, part, change);
      if (isa::lane() == 0) {
        isa::store_shared(Jobs::scratch(buffer) + S::bad_at + 4 * part, bad ? 1u : 0u);
      }
    }
  }

  // ---- V --------------------------------------------------------------------------------------

  QATTN_DEVICE SharedAddress factors() const {
    return Jobs::scratch(buffer) + S::factors_at + warp * 4 * slot_tile;
  }

  /// Scales of V's rows; this warp has their factors then.
  QATTN_DEVICE RowPair find_scales(const OverlapJob& job) const {
    const SharedAddress maxima = Jobs::scratch(buffer) + S::amax_at;
#pragma unroll 1
    for (int part = warp; part < parts; part += warps) {
      const std::uint32_t top = find_maximum(chunk_at(part));
      if (isa::lane() % 2 == 0) isa::store_shared(maxima + 4 * maximum_row(part), top);
    }
    isa::barrier_sync(1 + Jobs::team(), 32 * warps);
    RowPair r;
    float amax[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = isa::lane() + 32 * i;
      r.exists[i] = row < job.count;
      const auto top = isa::load_shared<float>(maxima + 4 * row);
      amax[i] = r.exists[i] ? top : 0.0f;
    }
    find_pair_scales(r, amax, p.plain.v_shared, formats::S8::max);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      isa::store_shared(factors() + 4 * (isa::lane() + 32 * i),
                        code_factor(r.exists[i], r.scale[i]));
    }
    isa::sync_warp();
    return r;
  }

  /// Codes of two channels of four keys, which lie side by side in V's contraction order.
  QATTN_DEVICE static Words2 value_codes(const std::uint32_t (&raw)[4], const float (&factor)[4]) {
    float lo[4], hi[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const isa::Pair x = Row::unpack(raw[i]);  // of a row that has 0, NaN perhaps, whose code is 0
      lo[i] = formats::mul_rn(x.lo, factor[i]);
      hi[i] = formats::mul_rn(x.hi, factor[i]);
    }
    return {{value_word(isa::pack_s8(lo[0], lo[1], lo[2], lo[3]), true),
             value_word(isa::pack_s8(hi[0], hi[1], hi[2], hi[3]), true)}};
  }

  /// Word n of lane t becomes word t of lane n, in each four lanes.
  QATTN_DEVICE static void transpose(std::uint32_t (&a)[4]) {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const bool upper = (isa::lane() & mask) != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int low = mask == 1 ? 2 * i : i, high = low + mask;
        const std::uint32_t other = isa::shuffle_xor(upper ? a[low] : a[high], mask);
        a[low] = upper ? other : a[low];
        a[high] = upper ? a[high] : other;
      }
    }
  }

  /// Sixteen channels: a lane codes two of them, of four keys in each sixteen, and writes sixteen
  /// keys of each, so that four lanes write a channel's row.
  QATTN_DEVICE void encode_channels(std::uint8_t* record, int task, float per_token) const {
    const int panel = task / 4, t = isa::lane() % 4, byte = task % 4 * 32 + isa::lane() / 4 * 4;
    const int channel = 64 * panel + byte / 2;
    // Keys 2t, 2t + 1 and those eight further on, under TMA's swizzle.
    const SharedAddress raw = Jobs::raw(buffer) + panel * S::panel_bytes + 2 * t * S::panel_row;
    const SharedAddress even = raw + (byte ^ 32 * t);
    const SharedAddress odd = raw + S::panel_row + (byte ^ (32 * t + 16));
    std::uint32_t lo[4], hi[4];
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      std::uint32_t x[4];
      float factor[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 16 * run + 8 * i;
        x[2 * i] = isa::load_shared<std::uint32_t>(even + row * S::panel_row);
        x[2 * i + 1] = isa::load_shared<std::uint32_t>(odd + row * S::panel_row);
        const auto w = isa::load_shared<Words2>(factors() + 4 * (row + 2 * t));
        factor[2 * i] = formats::float_of(w.w[0]), factor[2 * i + 1] = formats::float_of(w.w[1]);
      }
      const Words2 codes = value_codes(x, factor);
      lo[run] = codes.w[0], hi[run] = codes.w[1];
    }
    transpose(lo);
    transpose(hi);
    auto* to = reinterpret_cast<Words4*>(record + channel * slot_tile) + t;
    isa::store_global(to, Words4{{lo[0], lo[1], lo[2], lo[3]}});
    isa::store_global(to + slot_tile / 16, Words4{{hi[0], hi[1], hi[2], hi[3]}});
    const std::uint32_t means = channel_mean(lo, per_token) | channel_mean(hi, per_token) << 8;
    if (t == 0) {
      auto* at = record + S::channels * slot_tile + channel;
      isa::store_global(reinterpret_cast<std::uint16_t*>(at), static_cast<std::uint16_t>(means));
    }
  }
  /// Mean code of the channel whose row four lanes hold.
  QATTN_DEVICE static std::uint32_t channel_mean(const std::uint32_t (&codes)[4], float per_token) {
    std::uint32_t sum = 0;
#pragma unroll
    for (const std::uint32_t word : codes) sum = isa::dot4_u8(word, 0x01010101u, sum);
    sum += isa::shuffle_xor(sum, 1);
    sum += isa::shuffle_xor(sum, 2);
    return mean_code(static_cast<std::int32_t>(sum) - slot_tile * value_offset, per_token);
  }

  QATTN_DEVICE void encode_values(const OverlapJob& job) {
    std::uint8_t* record =
        p.plain.v_out.tiles + job.slot / slot_tile * tile_offsets(S::channels).bytes;
    const RowPair r = find_scales(job);
    if (warp == warps - 1) {
      store_value_tables(record, S::channels, Jobs::scratch(buffer) + S::extra_at, r,
                         ValueScales::integer_token, 0);
    }
    const int usable = formats::popcount(isa::ballot(r.exists[0] && !r.bad[0])) +
                       formats::popcount(isa::ballot(r.exists[1] && !r.bad[1]));
    const float per_token = usable > 0 ? formats::reciprocal(static_cast<float>(usable)) : 0.0f;
#pragma unroll 1
    for (int task = warp; task < 4 * S::panels; task += warps) {
      encode_channels(record, task, per_token);
    }
  }

  // ---- The first pass -------------------------------------------------------------------------

  /// Sums of K's channels, row by row. Rows behind the end are zeros, which change no sum.
  QATTN_DEVICE void sum_keys(const OverlapJob& job) const {
    static_assert(S::panels <= warps);
    if (warp >= S::panels) return;
    float lo = 0.0f, hi = 0.0f;
#pragma unroll 8
    for (int row = 0; row < slot_tile; ++row) {
      const isa::Pair x = Row::unpack(pair_of(warp, row));
      lo = formats::add_rn(lo, x.lo);
      hi = formats::add_rn(hi, x.hi);
    }
    float* sums = p.plain.sums[1] + job.slot / slot_tile * S::channels;
    isa::store_global(reinterpret_cast<Words2*>(sums) + 32 * warp + isa::lane(),
                      Words2{{formats::bits_of(lo), formats::bits_of(hi)}});
  }

  /// Behind the last tile of all there is one that kernels read, and forget.
  QATTN_DEVICE void store_none(const OverlapJob& job) const {
    const int thread = 32 * warp + isa::lane();
    if (job.step == Step::code_v) {
      constexpr TileOffsets at = tile_offsets(S::channels);
      std::uint8_t* record = p.plain.v_out.tiles + (job.slot / slot_tile + 1) * at.bytes;
      for (int n = thread; n < (at.bytes - S::channels * slot_tile) / 16; n += 32 * warps) {
        isa::store_global(reinterpret_cast<Words4*>(record + S::channels * slot_tile) + n,
                          Words4{});
      }
    } else if (thread < slot_tile) {
      const PreparedRows& out = p.plain.row[job.step == Step::code_q ? 0 : 1].out;
      isa::store_global(out.scale + job.slot + slot_tile + thread, 0.0f);
    }
  }

  QATTN_DEVICE void work(const OverlapJob& job) {
    if (job.step == Step::sum_k) return sum_keys(job);
    if (job.step == Step::code_v) {
      encode_values(job);
    } else {
      const bool less = job.step == Step::code_k && p.k_mean != nullptr;
      const bool balanced = job.balanced != 0;
      less       ? balanced ? encode_rows<true, true>(job) : encode_rows<true, false>(job)
      : balanced ? encode_rows<false, true>(job)
                 : encode_rows<false, false>(job);
    }
    if (job.last) store_none(job);
  }

  QATTN_DEVICE void run() {
    std::uint32_t parity = 0;
    while (true) {
      isa::mbarrier_wait(Jobs::full(buffer), parity);
      const OverlapJob job = Jobs::job(buffer);
      if (job.step != Step::none) work(job);
      isa::fence_async_global();  // TMA reads codes and scales
      // All lanes, whose reads racecheck would not see behind those of one.
      isa::mbarrier_arrive(Jobs::done(buffer));
      if (job.step == Step::none) break;
      if (++buffer == S::buffers) buffer = 0, parity ^= 1;
    }
  }
};

template <isa::Element Input, int Channels>
struct EncodeOverlapped {
  using Params = OverlapParams;
  using S = OverlapShape<Input, Channels>;
  static constexpr int threads = S::threads, shared_bytes = S::shared_bytes, min_blocks = 1;
  static constexpr bool dependent = true;
  static constexpr int cluster = 2;
  static constexpr isa::Target target = isa::sm_90;

  static QATTN_DEVICE void run(const Params& p) {
    const int warp = isa::warp() % (S::team_threads / 32);
    if (isa::thread() % S::team_threads == 0) {
      for (int n = 0; n < S::buffers; ++n) {
        isa::mbarrier_init(OverlapJobs<S>::full(n), 1);
        isa::mbarrier_init(OverlapJobs<S>::done(n), 32 * S::coders);
      }
      isa::fence_mbarrier_init();
    }
    isa::sync_threads();
    isa::grid_dependency_wait();    // for counts of zero
    isa::grid_dependency_launch();  // which attention may read now
    warp == 0 ? OverlapScheduler<S>{p}.run() : OverlapQuantizer<S>{p, warp - 1}.run();
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
