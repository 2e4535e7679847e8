// Which tokens share a scale, and where a tensor of scales has it: the one home of the index maps
// of Granularity, for the host and for kernels.
#pragma once

#include <cstdint>

#include "formats/hd.hpp"
#include "qattn/recipe.hpp"

namespace qattn {

/// Has every channel a scale of its own?
QATTN_HD constexpr bool by_channel(Granularity g) {
  return g == Granularity::per_channel || g == Granularity::per_block_channel;
}

struct ScaleGroups {
  Role role = Role::q;
  Granularity granularity = Granularity::per_token;
  std::int32_t block = 64, warp = 16;
  std::int32_t group = 0;  ///< elements of a built-in scale

  /// V's per_thread: tokens join their group's scale unless they are far smaller.
  QATTN_HD bool joins() const { return role == Role::v && granularity == Granularity::per_thread; }
  /// Has every token its own entry in the scale tensor?
  QATTN_HD bool by_token() const { return granularity == Granularity::per_token || joins(); }

  /// Group of a token among those of its sequence and head.
  QATTN_HD std::int64_t index(std::int64_t s) const {
    switch (granularity) {
      case Granularity::per_tensor:
      case Granularity::per_head:
      case Granularity::per_channel:
        return 0;
      case Granularity::per_block:
      case Granularity::per_block_channel:
        return s / block;
      case Granularity::per_warp:
        return s / warp;
      case Granularity::per_thread:
        // Q: rows g, g + 8, ... of a warp's m16n8 fragments belong to lanes of group g.
        // K: columns 2t, 2t + 1 of every n8 fragment belong to lanes t (ISA: mma C fragment).
        // V: as K, but not every token joins its group (joint_amax), so each has its entry.
        if (role == Role::v) return s;
        return role == Role::q ? s / warp * 8 + s % 8 : s / block * 4 + s % 8 / 2;
      default:
        return s;
    }
  }

  /// The first token of a group: the inverse of index().
  QATTN_HD std::int64_t first_token(std::int64_t at) const {
    switch (granularity) {
      case Granularity::per_tensor:
      case Granularity::per_head:
      case Granularity::per_channel:
        return 0;
      case Granularity::per_block:
      case Granularity::per_block_channel:
        return at * block;
      case Granularity::per_warp:
        return at * warp;
      case Granularity::per_thread:
        if (role == Role::v) return at;
        return role == Role::q ? at / 8 * warp + at % 8 : at / 4 * block + at % 4 * 2;
      default:
        return at;
    }
  }

  /// Element of a scale tensor with these strides. `token` is the one inside its sequence, or, with
  /// `paged` scales, inside page `outer`.
  QATTN_HD std::int64_t offset(const std::int64_t* stride, bool paged, std::int64_t outer,
                               std::int64_t head, std::int64_t token, int channel) const {
    const std::int64_t start = outer * stride[0] + head * stride[1];
    switch (granularity) {
      case Granularity::per_tensor:
        return 0;
      case Granularity::per_head:
        return paged ? head * stride[0] : start;
      case Granularity::per_channel:
        return paged ? head * stride[0] + channel * stride[1] : start + channel * stride[2];
      case Granularity::per_block_channel:
        return start + index(token) * stride[2] + channel * stride[3];
      case Granularity::group:
        return role == Role::v ? start + token / group * stride[2] + channel * stride[3]
                               : start + token * stride[2] + channel / group * stride[3];
      default:
        return start + index(token) * stride[2];
    }
  }
};

}  // namespace qattn
