// wgmma, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/units/units.hpp"
#include "isa/emu/words/matrix.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

inline std::uint64_t matrix_descriptor(SharedAddress a, std::uint32_t leading_bytes,
                                       std::uint32_t stride_bytes, Swizzle swizzle,
                                       Where where = Where::current()) {
  if ((a | leading_bytes | stride_bytes) % 16 != 0) {
    throw emu::Error("matrix_descriptor: not in units of 16 bytes, at " + emu::describe(where));
  }
  return emu::make_descriptor(a, leading_bytes, stride_bytes, static_cast<int>(swizzle));
}

inline constexpr bool has_wgmma = true;

inline void wgmma_fence(Where where = Where::current()) {
  char none = 0;
  emu::warpgroup_collective(
      Word::wgmma_fence, none, where,
      [](emu::Block& block, emu::Arguments<char>) { block.units().wgmma.fence(); });
}
inline void wgmma_commit(Where where = Where::current()) {
  char none = 0;
  emu::warpgroup_collective(
      Word::wgmma_commit, none, where,
      [](emu::Block& block, emu::Arguments<char>) { block.units().wgmma.commit(); });
}
template <int N>
void wgmma_wait(Where where = Where::current()) {
  char none = 0;
  emu::warpgroup_collective(
      Word::wgmma_wait, none, where,
      [&](emu::Block& block, emu::Arguments<char>) { block.units().wgmma.wait(N, where); });
}

/// The shapes that exist: 8-bit operands are K-major, integers skip most odd multiples of 8.
template <Element A, int N, bool TransposeA, bool TransposeB>
constexpr bool is_wgmma_shape() {
  if (N % 8 != 0 || N < 8 || N > 256) return false;
  if (is_integer(A) && N > 32 && N % 16 != 0) return false;
  return is_16bit(A) || !(TransposeA || TransposeB);
}
template <Element A, Element B, int N, bool TransposeA, bool TransposeB>
void issue_wgmma(emu::WgmmaArguments& mine, const Where& where) {
  static_assert(can_multiply<A, B>() && is_wgmma_shape<A, N, TransposeA, TransposeB>(),
                "no such product");
  emu::warpgroup_collective(
      Word::wgmma, mine, where, [&](emu::Block& block, emu::Arguments<emu::WgmmaArguments> lanes) {
        block.units().wgmma.issue({A, B, N, is_integer(A), TransposeA, TransposeB}, lanes, where);
      });
}
template <Element A, Element B, int N, bool TransposeA = false, bool TransposeB = false>
void wgmma(Accumulator<A> (&d)[N / 2], std::uint64_t a, std::uint64_t b, bool add,
           Where where = Where::current()) {
  emu::WgmmaArguments mine{reinterpret_cast<std::uint32_t*>(d), nullptr, a, b, add};
  issue_wgmma<A, B, N, TransposeA, TransposeB>(mine, where);
}
template <Element A, Element B, int N, bool TransposeB = false>
void wgmma(Accumulator<A> (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b, bool add,
           Where where = Where::current()) {
  emu::WgmmaArguments mine{reinterpret_cast<std::uint32_t*>(d), a, 0, b, add};
  issue_wgmma<A, B, N, false, TransposeB>(mine, where);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
