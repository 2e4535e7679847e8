// Which keys some row of a call sees: what they share (means, scales, groups) comes from these
// alone. The rule of every backend.
#pragma once

#include <cstdint>

#include "formats/hd.hpp"

namespace qattn {

/// Which rows of a call see a token of K or V?
enum class Seen : std::uint8_t {
  no,        ///< None: nothing of it has any influence, and its values are not read.
  faintly,   ///< Only under biases that leave it no weight beside other tokens. It has codes of its
             ///< own, for rows that see nothing else, but no part in what tokens share.
  slightly,  ///< Only under biases of slight_bias and less, not all of them faint: whether it has
             ///< weight depends on the scores. Until it is settled, by lacks_weight().
  yes,
};

/// Biases from here on leave a key no weight beside one without. BERT's -10000 and f16's lowest
/// number are among them.
inline constexpr float faint_bias = -4096.0f;
/// Biases from here on can leave a key no weight: norms of Q's and K's rows bound what scores can
/// make up for.
inline constexpr float slight_bias = -64.0f;
/// A key whose score is so far below a row's best has no weight: exp(-40) is 4e-18, and a million
/// such keys are less than float32 sees.
inline constexpr float no_weight = -40.0f;

/// How a row sees a key under a bias. NaN hides nothing.
QATTN_HD Seen sight_under(float bias) {
  if (!(bias <= slight_bias)) return Seen::yes;
  if (bias == -__builtin_huge_valf()) return Seen::no;
  return bias <= faint_bias ? Seen::faintly : Seen::slightly;
}

/// From the sum of a row's squares, each exact in double.
QATTN_HD float norm_of(double squares) {
#if defined(__CUDA_ARCH__)
  return static_cast<float>(__dsqrt_rn(squares));
#else
  return static_cast<float>(__builtin_sqrt(squares));
#endif
}

/// By how much the score of a key seen slightly can exceed that of one which is seen, biases apart:
/// |q (k - k')| <= |q| (|k - c| + |k' - c|), by Cauchy and Schwarz, where c is the mean of those
/// that are seen. The largest norms: of a query q, of a seen k' - c, of a slight k - c. NaN or
/// infinity where values are.
QATTN_HD float largest_advantage(float scale, float softcap, float query, float seen,
                                 float slight) {
  const float bound = (scale < 0 ? -scale : scale) * query * (seen + slight);
  return softcap > 0 && bound > 2 * softcap ? 2 * softcap : bound;
}
/// Can a key be without weight under a bias that is not faint?
QATTN_HD bool bounds_weight(float advantage) { return advantage <= no_weight - faint_bias; }
/// Has a slight key no weight in a row that sees it under `bias`, and some key under `best`? One
/// that is seen has to be the row's best: the bound is about those.
QATTN_HD bool lacks_weight(float bias, float best, float advantage) {
  return best > slight_bias && bias - best + advantage <= no_weight;
}

}  // namespace qattn
