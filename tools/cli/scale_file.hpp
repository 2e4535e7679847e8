// What a file of scales says that they were made for, in the metadata of a .safetensors file. A
// .npy file has no place for it.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "qattn/qattn.hpp"

namespace qattn::cli {

using Metadata = std::map<std::string, std::string>;

/// The name of the tensor in such a file.
inline constexpr const char* scale_tensor = "scale";

/// Of scales that quantize() gave.
Metadata metadata_of(const QuantizeOptions& options);

/// As QuantizeOptions::scales_for has it, a recipe without a name; nothing where the file is not of
/// metadata_of(). Errors: invalid_argument for another version, nonsense, or another role than
/// `role`; `spec` begins the message.
Result<std::optional<Recipe>> made_for(const std::string& spec, const Metadata& metadata,
                                       Role role);

}  // namespace qattn::cli
