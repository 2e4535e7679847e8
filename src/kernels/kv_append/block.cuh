// Sums and selections over a block of threads.
#pragma once

#include "isa/isa.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// op over the values of all threads, to all of them; `scratch`: 8 bytes a warp. Collective.
template <int Threads, class T, class Op>
QATTN_DEVICE T block_reduce(T value, isa::SharedAddress scratch, Op op) {
  static_assert(sizeof(T) == 8);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = op(value, isa::shuffle_xor(value, mask));
  isa::sync_threads();  // whoever used the scratch before is done
  const int warp = isa::warp();
  if (isa::lane() == 0) {
    isa::store_shared(scratch + static_cast<isa::SharedAddress>(8 * warp), value);
  }
  isa::sync_threads();
  T all = isa::load_shared<T>(scratch);
  for (int w = 1; w < Threads / 32; ++w) {
    all = op(all, isa::load_shared<T>(scratch + static_cast<isa::SharedAddress>(8 * w)));
  }
  return all;
}
template <int Threads, class T>
QATTN_DEVICE T block_sum(T value, isa::SharedAddress scratch) {
  return block_reduce<Threads>(value, scratch, [](T a, T b) { return a + b; });
}
template <int Threads>
QATTN_DEVICE std::uint64_t block_min(std::uint64_t value, isa::SharedAddress scratch) {
  return block_reduce<Threads>(value, scratch,
                               [](std::uint64_t a, std::uint64_t b) { return a < b ? a : b; });
}
template <int Threads>
QATTN_DEVICE std::uint64_t block_max(std::uint64_t value, isa::SharedAddress scratch) {
  return block_reduce<Threads>(value, scratch,
                               [](std::uint64_t a, std::uint64_t b) { return a > b ? a : b; });
}
template <int Threads>
QATTN_DEVICE bool block_any(bool value, isa::SharedAddress scratch) {
  return block_sum<Threads>(std::uint64_t{value ? 1u : 0u}, scratch) != 0;
}

/// Has the calling thread found the b-th slot of a call a second time?
template <int Threads>
QATTN_DEVICE bool named_twice(const std::int32_t* slots, std::int32_t batch, std::int64_t b) {
  bool twice = false;
  for (std::int32_t i = isa::thread(); i < batch; i += Threads) {
    twice |= i != b && isa::load_global(slots + i) == isa::load_global(slots + b);
  }
  return twice;
}

/// Number of bits that a value has.
QATTN_DEVICE int bit_length(std::uint64_t x) {
  int bits = 0;
  for (; x != 0; x >>= 1) ++bits;
  return bits;
}

/// The smallest key whose weight, with that of all smaller keys, is at least `need`; `need` becomes
/// what keys below it leave of it. Keys have `bits` bits below `prefix`, which they share;
/// visit(f) calls f(key, weight) for those of the calling thread. Digits from the top, each with
/// the sums and numbers of its 256 values in shared memory, until one key is left: sums of
/// integers, the same in any order. Collective; all weights together are at least `need` > 0.
struct WeightedSelect {
  static constexpr int values = 256, width = 8, per_lane = values / 32;
  static constexpr int counts_at = 4 * values, digit_at = 2 * counts_at, below_at = digit_at + 4;
  static constexpr int alone_at = digit_at + 8, key_at = digit_at + 16;
  static constexpr int shared_bytes = digit_at + 24;

  isa::SharedAddress shared;

  QATTN_DEVICE isa::SharedAddress at(int offset, std::uint64_t index = 0) const {
    return shared + static_cast<isa::SharedAddress>(offset + 4 * static_cast<int>(index));
  }

  /// By one warp: the digit in which the running sum reaches `need`.
  QATTN_DEVICE void scan(std::uint32_t need) const {
    std::uint32_t own = 0;
    for (int i = 0; i < per_lane; ++i) {
      own += isa::load_shared<std::uint32_t>(at(0, per_lane * isa::lane() + i));
    }
    std::uint32_t upto = own;
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t before = isa::shuffle_up(upto, step);
      if (isa::lane() >= step) upto += before;
    }
    if (upto < need || upto - own >= need) return;
    std::uint32_t below = upto - own;
    int digit = per_lane * isa::lane();
    for (;; ++digit) {
      const auto here = isa::load_shared<std::uint32_t>(at(0, digit));
      if (below + here >= need) break;
      below += here;
    }
    isa::store_shared(at(digit_at), static_cast<std::uint32_t>(digit));
    isa::store_shared(at(below_at), below);
    isa::store_shared(at(alone_at), isa::load_shared<std::uint32_t>(at(counts_at, digit)));
  }

  template <int Threads, class Visit>
  QATTN_DEVICE std::uint64_t run(std::uint64_t prefix, int bits, std::uint32_t& need,
                                 Visit visit) const {
    while (bits > 0) {
      const int digit_bits = bits < width ? bits : width;
      bits -= digit_bits;
      isa::sync_threads();
      for (int i = isa::thread(); i < 2 * values; i += Threads) isa::store_shared(at(0, i), 0u);
      isa::sync_threads();
      visit([&](std::uint64_t key, std::uint32_t weight) {
        if (((key ^ prefix) >> bits) >> digit_bits != 0) return;
        const std::uint64_t digit = key >> bits & ((1u << digit_bits) - 1);
        isa::atomic_add_shared(at(0, digit), weight);
        isa::atomic_add_shared(at(counts_at, digit), 1u);
      });
      isa::sync_threads();
      if (isa::warp() == 0) scan(need);
      isa::sync_threads();
      prefix |= std::uint64_t{isa::load_shared<std::uint32_t>(at(digit_at))} << bits;
      need -= isa::load_shared<std::uint32_t>(at(below_at));
      if (isa::load_shared<std::uint32_t>(at(alone_at)) > 1) continue;
      visit([&](std::uint64_t key, std::uint32_t) {
        if ((key ^ prefix) >> bits == 0) isa::store_shared(at(key_at), key);
      });
      isa::sync_threads();
      return isa::load_shared<std::uint64_t>(at(key_at));
    }
    return prefix;
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
