// Tensors by the names that the command line gives them.
#pragma once

#include <string>

#include "io/npy.hpp"

namespace qattn::io {

/// "x.npy" or "file.safetensors:tensor_name". Errors: invalid_argument "path: rule".
Result<Array> load(const std::string& spec, const ReadOptions& options = {});

}  // namespace qattn::io
