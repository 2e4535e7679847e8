// P of decode over codes in u8: from scores to what the products read.
#pragma once

#include "formats/bits.hpp"
#include "formats/lost_share.hpp"
#include "isa/fragment.hpp"
#include "kernels/attention/common/score.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Of a tile of `Keys` keys. A lane holds two rows of keys 8 n + lane / 4.
template <int Keys>
struct Uniform8Bytes {
  using F = isa::MmaTransposedFragment;
  static constexpr int R = F::rows;
  /// Added to a float, it leaves a whole number, in its low bits.
  static constexpr float whole_numbers = formats::whole_numbers;
  using Scores = float[1][Keys / F::tile_columns][F::elements];
  using Codes = std::uint32_t[Keys / 32][1][2];

  /// Calls f(y, r) for P of every key and row of this lane, of which 255 stands at 2^ref, keys 8 n
  /// + g in turn, and puts the codes that it returns, whole_numbers larger, to where products read
  /// them. before(n) comes before those of keys 8 n + g.
  template <class Before, class Function>
  QATTN_DEVICE static void pack(const Scores& s, const float (&ref)[R], Codes& b, Before before,
                                Function f) {
    std::uint32_t turned[4];
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n) {
      before(n);
      std::uint32_t bits[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        // Of the largest the difference is 0, whatever it is; its code is 255 then.
        const float y = isa::exp2(s[0][n / 2][n % 2 * 2 + r] - ref[r] + log2_255);
        bits[r] = formats::bits_of(f(y, r));
      }
      turned[n % 4] = isa::transpose_matrix(isa::byte_permute(bits[0], bits[1], 0x5410));
      if (n % 2 == 1) {
        b[n / 4][0][n / 2 % 2] = isa::byte_permute(turned[n % 4 - 1], turned[n % 4], 0x6420);
      }
    }
  }

  /// The rows of this lane whose codes of the tile miss more than formats::kMostLost of those so
  /// far, a bit each. `lost`: what this lane's miss of P; `code_sum`: its codes so far. Lanes that
  /// have lost less than that by themselves spare the others the question.
  QATTN_DEVICE static unsigned find_lossy(float (&lost)[R], const float (&code_sum)[R]) {
    float most[R];
    bool some = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      most[r] = code_sum[r] * formats::kMostLost;
      some |= fabsf(lost[r]) > most[r];
    }
    if (!isa::any(some)) return 0;
    isa::add_rows<F>(lost);
    isa::add_rows<F>(most);
    unsigned lossy = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) lossy |= fabsf(lost[r]) > most[r] ? 1u << r : 0u;
    return lossy;
  }

  /// Codes rounded down of the rows in `lossy`, and what they leave, in 1 / 255 of a code.
  QATTN_DEVICE static void split(const Scores& s, const float (&ref)[R], unsigned lossy, Codes& b,
                                 Codes& rest) {
    const auto lower = [](float y) { return y - 0.5f + whole_numbers; };
    pack(
        s, ref, b, [](int) {},
        [&](float y, int r) { return (lossy >> r & 1) != 0 ? lower(y) : y + whole_numbers; });
    pack(
        s, ref, rest, [](int) {},
        [&](float y, int r) {
          const float left = (lossy >> r & 1) != 0 ? y - (lower(y) - whole_numbers) : 0.0f;
          return left * 255.0f + whole_numbers;
        });
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
