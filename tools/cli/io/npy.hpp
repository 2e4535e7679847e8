// NumPy's .npy files, versions 1 to 3 (numpy.lib.format). Formats f16, f32, s8, u8, s32, s64, b8,
// and bf16, which NumPy lacks, as ml_dtypes writes it or as uint16. float64, Fortran order and big
// endian are converted.
#pragma once

#include <map>
#include <string>

#include "io/array.hpp"
#include "io/file.hpp"

namespace qattn::io {

struct ReadOptions {
  bool bf16 = false;  ///< uint16 holds bf16; without it uint16 is refused
  /// Is told what of the file is not as the array has it, as in "float64 to f32, Fortran to C
  /// order"; empty: nothing.
  std::string* converted = nullptr;
  /// Is told what a .safetensors file says of itself; a .npy file says nothing.
  std::map<std::string, std::string>* metadata = nullptr;
};

/// Errors: invalid_argument "path: rule". Allocates no more than twice the file's own size.
Result<Array> read_npy(const std::string& path, const ReadOptions& options = {});

/// Formats without a NumPy type (bf16 and every 8-bit or packed code) become uint16 or uint8; a
/// packed format's last extent is then counted in bytes. Errors: invalid_argument.
Status write_npy(OutputFiles& files, const std::string& path, const Array& array);

}  // namespace qattn::io
