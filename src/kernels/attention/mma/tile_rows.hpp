// How the rows of a tile lie in shared memory.
#pragma once

#include "kernels/operand/copy.hpp"

namespace qattn::kernels {

using isa::SharedAddress;

/// Rows of RowBytes: padded, as cp.async takes them, or as TMA leaves them: in panels of at most
/// 128 bytes of every row, whose pieces of 16 bytes are swizzled. Either way the eight rows of an
/// ldmatrix meet no bank twice. A tile begins at a multiple of 1024 bytes if swizzled.
template <int RowBytes, int Rows, bool Swizzled>
struct TileRows {
  static constexpr int panel = Swizzled && RowBytes > 128 ? 128 : RowBytes;
  static constexpr int stride = Swizzled ? panel : tile::padded_row(RowBytes);
  static constexpr int panels = RowBytes / panel, panel_bytes = Rows * stride;
  static constexpr int bytes = panels * panel_bytes;
  static_assert(panels * panel == RowBytes);
  static_assert(!Swizzled || panel == 128 || panel == 64 || panel == 32);

  /// Where the 16 bytes from `byte` on of a row are. Eight rows on they are 8 * stride further.
  static QATTN_DEVICE SharedAddress place(SharedAddress tile, int row, int byte) {
    if constexpr (!Swizzled) return tile + row * stride + byte;
    const int line = row * panel / 128 % (panel / 16);
    return tile + byte / panel * panel_bytes + row * stride + ((byte % panel) ^ (line * 16));
  }
  /// `bytes` further, a multiple of 32, than place() of byte 0 or 16.
  static QATTN_DEVICE SharedAddress along(SharedAddress at, int bytes) {
    if constexpr (!Swizzled) return at + bytes;
    const auto within = static_cast<SharedAddress>(bytes % panel);
    return (at ^ within) + bytes / panel * panel_bytes;
  }

  /// place(), for what brings rows (copy.hpp).
  struct At {
    SharedAddress tile;
    QATTN_DEVICE SharedAddress operator()(int row, int chunk) const {
      return place(tile, row, chunk);
    }
  };
};

}  // namespace qattn::kernels
