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
  yes,
};

/// Biases from here on leave a key no weight beside one without. BERT's -10000 and f16's lowest
/// number are among them.
inline constexpr float faint_bias = -4096.0f;

}  // namespace qattn
