#include "scale_file.hpp"

#include "io/file.hpp"

namespace qattn::cli {

namespace {

constexpr const char* kind = "qattn.scale";
constexpr const char* version = "1";

std::string entry(const Metadata& metadata, const std::string& key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : found->second;
}

}  // namespace

Metadata metadata_of(const QuantizeOptions& options) {
  const auto text = [](bool on) { return on ? "on" : "off"; };
  return {{"format", kind},
          {"version", version},
          {"codes", std::string(info(options.format).name)},
          {"role", std::string(name(options.role))},
          {"smooth", text(options.smooth)},
          {"rotate", text(options.rotate)}};
}

Result<std::optional<Recipe>> made_for(const std::string& spec, const Metadata& metadata,
                                       Role role) {
  if (entry(metadata, "format") != kind) return std::optional<Recipe>();
  if (entry(metadata, "version") != version) {
    return io::file_error(spec,
                          "version " + entry(metadata, "version") + " of scales is not " + version);
  }
  const std::string codes = entry(metadata, "codes"), made = entry(metadata, "role");
  const std::optional<Format> format = format_named(codes);
  if (!format) return io::file_error(spec, "says codes '" + codes + "', which is no format");
  if (made != "q" && made != "k" && made != "v") {
    return io::file_error(spec, "says role '" + made + "', which is none of q, k, v");
  }
  Toggle toggles[2];
  for (int i = 0; i < 2; ++i) {
    const char* key = i == 0 ? "smooth" : "rotate";
    const std::string value = entry(metadata, key);
    if (value != "on" && value != "off") {
      return io::file_error(
          spec, std::string("says ") + key + " '" + value + "', which is neither on nor off");
    }
    toggles[i] = value == "on" ? Toggle::on : Toggle::off;
  }
  if (made != name(role)) {
    return io::file_error(spec,
                          "was made for " + made + "; the call has " + std::string(name(role)));
  }
  Recipe recipe;
  recipe.name.clear();
  recipe.qk = recipe.v = *format;
  recipe.smooth_q = recipe.smooth_k = recipe.smooth_v = toggles[0];
  recipe.rotate = toggles[1];
  return std::optional<Recipe>(recipe);
}

}  // namespace qattn::cli
