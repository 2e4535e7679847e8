// Rows on their way from the Hopper prefill kernel's consumers to the output: a consumer stages
// them in shared memory, and a warp of the producer's warpgroup, which has nothing else to do,
// stores them while the consumer is at its next rows.
#pragma once

#include "kernels/attention/rows/epilogue.cuh"
#include "kernels/attention/sm90a/load.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// What a consumer tells of rows that it has staged.
struct alignas(16) StagedRows {
  std::int64_t token;  ///< of the output: the first row's
  std::int32_t b, head;
  std::int32_t rows;  ///< that the output has room for, none if negative; last: no more will come
  std::int32_t unused[3];

  static constexpr std::int32_t last = -0x40000000;
};

/// The consumer's side. By mbarriers at which every thread arrives: racecheck follows no order by
/// named barriers at which one side arrives only, nor through a warp's barrier and one arrival.
template <Sm90Config C>
struct Sm90Staging {
  using S = Sm90Shape<C>;
  static_assert(S::writers == 0 || S::staged_bytes == S::consumers * int{sizeof(StagedRows)});

  int group;                 ///< this one among the consumers
  std::uint32_t parity = 0;  ///< of the rows to come
  bool free = false;         ///< rows of before have left; where P lies in their place

  QATTN_DEVICE static SharedAddress told(int group) {
    return isa::shared_base() + S::staged_at + group * static_cast<int>(sizeof(StagedRows));
  }
  QATTN_DEVICE static SharedAddress there(int group) {
    return isa::shared_base() + S::rows_there + 8 * group;
  }
  QATTN_DEVICE static SharedAddress gone(int group) {
    return isa::shared_base() + S::rows_gone + 8 * group;
  }

  /// Waits for rows of before to leave: in front of rows, and in front of P in their place.
  QATTN_DEVICE void await_room() {
    if (S::writers == 0 || (S::p_over_out && free)) return;
    isa::mbarrier_wait(gone(group), parity ^ 1);
    free = true;
  }
  /// Behind await_room() and what the warpgroup has staged. `rows`: StagedRows.
  QATTN_DEVICE void hand_over(const WorkTile& work, int rows) {
    if (isa::thread() % 128 == 0) {
      StagedRows x{};
      x.token = work.q.begin + work.first_row + 64 * group;
      x.b = work.b, x.head = work.head, x.rows = rows;
      put_shared(told(group), x);
    }
    isa::mbarrier_arrive(there(group));
    parity ^= 1;
    free = false;
  }
  /// Behind the last work.
  QATTN_DEVICE void end() {
    if constexpr (S::writers > 0) {
      await_room();
      hand_over(WorkTile{}, StagedRows::last);
    }
  }
};

/// One warp, for each S::writers-th consumer.
template <Sm90Config C>
struct Sm90Writer {
  using S = Sm90Shape<C>;
  using Staging = Sm90Staging<C>;

  const Sm90Params& p;
  int first;  ///< consumer

  /// Rows of consumer `group`; false behind the last.
  QATTN_DEVICE bool write(int group, std::uint32_t parity) const {
    isa::mbarrier_wait(Staging::there(group), parity);
    const auto x = take_shared<StagedRows>(Staging::told(group));
    if (x.rows == StagedRows::last) return false;
    const SharedAddress from = isa::shared_base() + S::out_at + 64 * group * S::out_row;
    std::uint16_t* to = static_cast<std::uint16_t*>(p.out.data) + x.b * p.out.batch +
                        x.token * p.out.token + x.head * p.out.head;
    if (p.out.vectors) {
      copy_rows<64, S::dv, S::out_row, isa::Words4>(from, to, p.out.token, x.rows, p.out.channels);
    } else {
      copy_rows<64, S::dv, S::out_row, std::uint16_t>(from, to, p.out.token, x.rows,
                                                      p.out.channels);
    }
    isa::mbarrier_arrive(Staging::gone(group));
    return true;
  }

  /// All consumers hand over the same works.
  QATTN_DEVICE void run() const {
    std::uint32_t parity = 0;
    for (bool more = true; more; parity ^= 1) {
      for (int g = first; g < S::consumers; g += S::writers) more &= write(g, parity);
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
