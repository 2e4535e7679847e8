// Who does what of the codes that are made beside attention: one warp of a team hands out the work
// and tells when it is done.
#pragma once

#include <cstring>

#include "kernels/quantize/gpu/encode/common.cuh"
#include "kernels/quantize/overlap/params.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// A block has several teams, which know nothing of each other: a clerk and four coders, two raw
/// tiles in panels of 64 channels, and what belongs to these.
template <isa::Element Input, int Channels>
struct OverlapShape {
  static constexpr isa::Element input = Input;
  static constexpr int channels = Channels;
  /// Warps. With three coders, whose tiles have four parts, S 1024 took 5 % more (H100, D 128).
  static constexpr int coders = 4, team_threads = 32 * (1 + coders);
  static constexpr int teams = 6, threads = teams * team_threads;
  static constexpr int panels = channels / 64, panel_row = 128, panel_bytes = 64 * panel_row;
  static constexpr int buffers = 2, raw_bytes = buffers * panels * panel_bytes;  ///< of a team
  // For each buffer: a job, which sixteen rows of it are bad, maxima of its rows, their factors for
  // each warp, rows that weigh P.
  static constexpr int scratch_at = teams * raw_bytes;
  static constexpr int job_at = 0, job_bytes = 48, bad_at = job_bytes, amax_at = bad_at + 16;
  static constexpr int factors_at = amax_at + 4 * 64, extra_at = factors_at + coders * 4 * 64;
  static constexpr int scratch_stride = extra_at + 8 * 64;
  static constexpr int full = scratch_at + teams * buffers * scratch_stride;  ///< barriers
  static constexpr int shared_bytes = full + teams * 2 * 8 * buffers;
  /// A multiprocessor has room for one block, and for none of attention beside it.
  static_assert(shared_bytes > 116 * 1024 && shared_bytes <= 227 * 1024);
};

QATTN_DEVICE std::uint32_t* progress_of(const OverlapParams& p, int unit) {
  return p.progress + OverlapParams::first_word + std::int64_t{unit} * AwaitedCodes::words_of_unit;
}

enum class Step : std::int32_t { none, sum_k, code_k, code_v, code_q };

/// A tile of 64 tokens and what is done with it.
struct alignas(16) OverlapJob {
  Step step;
  std::int32_t unit;   ///< of OverlapParams
  std::int32_t count;  ///< tokens that exist
  std::int32_t last;   ///< is it the operand's last tile of all?
  std::int64_t slot;   ///< of its first token, in what prepared.hpp describes
  std::int32_t first, head, b;
  std::int32_t balanced;  ///< are the channels of Q and K?
};

/// What the clerk and the coders share, a buffer of the raw tiles each.
template <class S>
struct OverlapJobs {
  static constexpr int job_words = sizeof(OverlapJob) / 16;
  static_assert(sizeof(OverlapJob) <= S::job_bytes);

  QATTN_DEVICE static int team() { return isa::thread() / S::team_threads; }
  QATTN_DEVICE static SharedAddress scratch(int buffer) {
    return isa::shared_base() + S::scratch_at + (team() * S::buffers + buffer) * S::scratch_stride;
  }
  QATTN_DEVICE static SharedAddress raw(int buffer) {
    return isa::shared_base() + (team() * S::buffers + buffer) * S::panels * S::panel_bytes;
  }
  /// There is a job, with its tile; all coders are done with it.
  QATTN_DEVICE static SharedAddress full(int buffer) {
    return isa::shared_base() + S::full + 8 * (team() * 2 * S::buffers + buffer);
  }
  QATTN_DEVICE static SharedAddress done(int buffer) { return full(buffer) + 8 * S::buffers; }

  QATTN_DEVICE static OverlapJob job(int buffer) {
    OverlapJob job;
    isa::Words4 words[job_words];
#pragma unroll
    for (int n = 0; n < job_words; ++n) {
      words[n] = isa::load_shared<isa::Words4>(scratch(buffer) + S::job_at + 16 * n);
    }
    std::memcpy(&job, words, sizeof job);
    return job;
  }
  QATTN_DEVICE static void put(int buffer, const OverlapJob& job) {
    isa::Words4 words[job_words];
    std::memcpy(words, &job, sizeof job);
#pragma unroll
    for (int n = 0; n < job_words; ++n) {
      isa::store_shared(scratch(buffer) + S::job_at + 16 * n, words[n]);
    }
  }
};

/// One warp: takes jobs, whichever come next, has their tiles copied, tells other blocks what has
/// been made, and finishes the means of a unit whose last sum this block has made.
template <class S>
struct OverlapScheduler {
  using Jobs = OverlapJobs<S>;
  static constexpr int chunk = OverlapParams::chunk;

  const OverlapParams& p;

  // ---- What comes next ------------------------------------------------------------------------

  QATTN_DEVICE OverlapJob find(int index) const {
    const int lead = p.ahead * p.sums, step = p.sums + p.codes, tail = p.units - p.ahead;
    OverlapJob job{};
    if (index >= p.units * step) return job;
    bool sums = index < lead;
    if (sums) {
      job.unit = divide(index, p.sums);
      index -= job.unit * p.sums;
    } else {
      index -= lead;
      job.unit = divide(index, step);
      if (job.unit < tail) {
        index -= job.unit * step;
        sums = index < p.sums;
        sums ? job.unit += p.ahead : index -= p.sums;
      } else {
        index -= tail * step;
        job.unit = divide(index, p.codes);
        index -= job.unit * p.codes;
        job.unit += tail;
      }
    }
    job.b = divide(job.unit, p.plain.v.heads);
    job.head = job.unit - job.b * p.plain.v.heads;
    int tiles = p.k_tiles, heads = p.plain.v.heads;
    std::int64_t slots = p.plain.v_out.slots, length = p.plain.v.max_length;
    if (sums) {
      job.step = Step::sum_k;
    } else if (index < tiles) {
      job.step = Step::code_v;
    } else if (index >= p.codes - tiles) {
      job.step = Step::code_k;
      index -= p.codes - tiles;
    } else {
      job.step = Step::code_q;
      index -= tiles;
      tiles = p.q_tiles, heads *= p.group;
      slots = p.plain.row[0].out.slots, length = p.plain.row[0].rows.max_length;
      const int member = divide(index, tiles);
      index -= member * tiles;
      job.head = job.head * p.group + member;
    }
    job.first = index * slot_tile;
    const std::int64_t left = length - job.first;
    job.count = left < slot_tile ? static_cast<int>(left) : slot_tile;
    job.slot = job.head * slots + (job.b * std::int64_t{tiles} + index) * slot_tile;
    job.last = job.slot + slot_tile == heads * slots;
    const std::uint32_t* loud = p.plain.row[1].loud;
    if (loud != nullptr) job.balanced = isa::load_global(loud + job.unit) != 0 ? 1 : 0;
    return job;
  }

  QATTN_DEVICE void load(const OverlapJob& job, int buffer) const {
    const SharedAddress full = Jobs::full(buffer);
    Jobs::put(buffer, job);
    if (job.step == Step::none) {
      isa::mbarrier_arrive(full);
      return;
    }
    const int role = job.step == Step::code_q                              ? 0
                     : job.step == Step::sum_k || job.step == Step::code_k ? 1
                                                                           : 2;
    isa::mbarrier_arrive_expect(full, S::panels * S::panel_bytes);
    for (int n = 0; n < S::panels; ++n) {
      isa::tma_load<4>(Jobs::raw(buffer) + n * S::panel_bytes, p.raw[role],
                       {64 * n, job.first, job.head, job.b}, full);
    }
  }

  /// So many jobs in a row, by their number.
  QATTN_DEVICE std::uint32_t take() const {
    return isa::lane() == 0 ? isa::atomic_add_global(p.progress, 1u) : 0u;
  }

  // ---- What has been made ---------------------------------------------------------------------

  /// What coders wrote can be seen by who reads the count. Returns it.
  QATTN_DEVICE std::uint32_t tell(int unit, OverlapParams::Word word, std::uint32_t jobs) const {
    isa::sync_warp();
    std::uint32_t before = 0;
    if (isa::lane() == 0) {
      before = isa::atomic_add_ordered(progress_of(p, unit) + word, jobs);
    }
    return isa::shuffle(before, 0) + jobs;
  }

  QATTN_DEVICE void store_flags(const OverlapJob& job, int buffer) const {
    const auto bad = isa::load_shared<isa::Words4>(Jobs::scratch(buffer) + S::bad_at);
    const bool any = (bad.w[0] | bad.w[1] | bad.w[2] | bad.w[3]) != 0;
    const PreparedRows& out = p.plain.row[job.step == Step::code_q ? 0 : 1].out;
    if (isa::lane() == 0) {
      isa::store_global(out.flags + job.slot / slot_tile, any ? std::uint32_t{tile_has_bad} : 0u);
    }
  }

  /// K's mean of a unit, two channels a lane, in the order of FinishMeans.
  QATTN_DEVICE void finish(int unit, int pair) const {
    const int heads = p.plain.v.heads, b = divide(unit, heads), head = unit - b * heads;
    const std::int64_t tiles = p.plain.v_out.slots / slot_tile;
    const auto* from =
        reinterpret_cast<const isa::Words2*>(
            p.plain.sums[1] + (head * tiles + b * std::int64_t{p.k_tiles}) * S::channels) +
        pair;
    double lo = 0.0, hi = 0.0;
#pragma unroll 8
    for (int t = 0; t < p.k_tiles; ++t, from += S::channels / 2) {
      const isa::Words2 w = isa::load_global(from);
      lo += static_cast<double>(formats::float_of(w.w[0]));
      hi += static_cast<double>(formats::float_of(w.w[1]));
    }
    const auto mean = [&](double total, int channel) {
      const auto x = static_cast<float>(total / static_cast<double>(p.plain.v.max_length));
      if (channel >= p.plain.row[1].rows.channels) return formats::bits_of(0.0f);
      return formats::bits_of(formats::is_finite(x) ? x : formats::quiet_nan());
    };
    isa::store_global(
        reinterpret_cast<isa::Words2*>(p.k_mean + std::int64_t{unit} * S::channels) + pair,
        isa::Words2{{mean(lo, 2 * pair), mean(hi, 2 * pair + 1)}});
  }

  /// So many jobs of a kind are done. Counts are told of several together, since memory is waited
  /// for each time (1 us), but before other jobs, which may wait for these.
  QATTN_DEVICE void tell_of(Step step, int unit, std::uint32_t jobs) const {
    if (step != Step::sum_k) {
      tell(unit, OverlapParams::codes_there, jobs);
    } else if (tell(unit, OverlapParams::sums_there, jobs) == static_cast<std::uint32_t>(p.sums)) {
      isa::sync_warp();  // lane 0 was told of sums that all lanes read
#pragma unroll 1
      for (int pair = isa::lane(); pair < S::channels / 2; pair += 32) finish(unit, pair);
      tell(unit, OverlapParams::mean_there, 1);
    }
  }

  QATTN_DEVICE void run() const {
    static_assert(S::buffers == 2);
    int buffer = 0, index = 0, open = 0;
    std::uint32_t parity = 0, next = take(), done = 0;
    Step step = Step::none, later = Step::none;  // of the jobs in this buffer and in the other
    int unit = 0, later_unit = 0;
    while (true) {
      if (index % chunk == 0) {
        index = static_cast<int>(isa::shuffle(next, 0)) * chunk;
        next = take();  // comes meanwhile
      }
      const OverlapJob job = find(index++);
      const bool closes = open == S::buffers;
      if (closes) close(buffer, parity ^ 1);
      isa::sync_warp();
      if (isa::lane() == 0) load(job, buffer);
      if (closes) account(step, unit, later, later_unit, done);
      if (!closes) ++open;
      step = later, unit = later_unit;
      later = job.step, later_unit = job.unit;
      if (++buffer == S::buffers) buffer = 0, parity ^= 1;
      if (job.step == Step::none) break;
    }
    // The one in the other buffer.
    if (step != Step::none) {
      close(buffer, parity ^ 1);
      account(step, unit, Step::none, 0, done);
    }
  }

 private:
  /// Waits until all coders are done with the job in a buffer.
  QATTN_DEVICE void close(int buffer, std::uint32_t parity) const {
    isa::mbarrier_wait(Jobs::done(buffer), parity);
    const OverlapJob job = Jobs::job(buffer);
    if (job.step == Step::code_k || job.step == Step::code_q) store_flags(job, buffer);
  }
  QATTN_DEVICE void account(Step step, int unit, Step later, int later_unit,
                            std::uint32_t& done) const {
    ++done;
    if (step == later && unit == later_unit) return;
    tell_of(step, unit, done);
    done = 0;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
