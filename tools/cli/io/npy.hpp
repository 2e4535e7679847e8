// NumPy's .npy files, versions 1 to 3 (numpy.lib.format). C order and little-endian only; formats
// f16, f32, s8, u8, s32, s64, b8, and bf16, which NumPy lacks, as uint16.
#pragma once

#include <string>

#include "io/array.hpp"
#include "io/file.hpp"

namespace qattn::io {

struct ReadOptions {
  bool bf16 = false;  ///< uint16 holds bf16; without it uint16 is refused
};

/// Errors: invalid_argument "path: rule". Allocates no more than the file's own size.
Result<Array> read_npy(const std::string& path, const ReadOptions& options = {});

/// Formats without a NumPy type (bf16 and every 8-bit or packed code) become uint16 or uint8; a
/// packed format's last extent is then counted in bytes. Errors: invalid_argument.
Status write_npy(OutputFiles& files, const std::string& path, const Array& array);

}  // namespace qattn::io
