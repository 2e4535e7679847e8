// Which keys some row of a call sees: what they share (means, scales, groups) comes from these
// alone.
#pragma once

#include <cstdint>

namespace qattn {

/// Which rows of a call see a token of K or V?
enum class Seen : std::uint8_t {
  no,       ///< None: nothing of it has any influence, and its values are not read.
  faintly,  ///< Only under biases that leave it no weight beside other tokens. It has codes of its
            ///< own, for rows that see nothing else, but no part in what tokens share.
  slightly,  ///< Only under biases of slight_bias and less, not all of them faint: whether it has
             ///< weight depends on the scores. On CPUs until settle_seen_keys().
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

}  // namespace qattn
