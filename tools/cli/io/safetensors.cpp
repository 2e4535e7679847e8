#include "io/safetensors.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "io/check.hpp"
#include "io/convert.hpp"

namespace qattn::io {

using nlohmann::json;

namespace {

constexpr std::uint64_t length_bytes = 8;
constexpr std::uint64_t max_header = 100'000'000;  // the limit of the reference implementation

struct Dtype {
  std::string_view name;
  Format format;
};
constexpr std::array<Dtype, 8> dtypes{{
    {"F32", Format::f32},
    {"F16", Format::f16},
    {"BF16", Format::bf16},
    {"I8", Format::s8},
    {"U8", Format::u8},
    {"I32", Format::s32},
    {"I64", Format::s64},
    {"BOOL", Format::b8},
}};

std::optional<Format> format_of(std::string_view dtype) {
  for (const Dtype& row : dtypes) {
    if (row.name == dtype) return row.format;
  }
  return std::nullopt;
}

/// The header's JSON. The parser alone would keep the last of two equal keys and build any depth.
json parse_json(const std::string& text, std::string& error) {
  std::array<std::set<std::string>, 3> keys;  // by depth
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    const bool opens =
        event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    if (opens && depth > 2) error = "header is nested too deeply";
    if (event == json::parse_event_t::object_start && depth < 2) keys[depth + 1].clear();
    if (event == json::parse_event_t::key && depth <= 2) {
      const auto& name = value.get_ref<const std::string&>();
      if (!keys[depth].insert(name).second) error = "header has the key '" + name + "' twice";
    }
    return error.empty();
  };
  json header = json::parse(text, watch, /*allow_exceptions=*/false);
  if (error.empty() && header.is_discarded()) error = "header is not valid JSON";
  if (error.empty() && !header.is_object()) error = "header is not a JSON object";
  return header;
}

/// A non-negative JSON integer below 2^63, or nothing.
std::optional<std::int64_t> natural(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<std::int64_t>(number);
}

}  // namespace

/// Fills a SafetensorsFile from its header; each step returns the rule that is broken, or "".
struct SafetensorsFile::HeaderReader {
  SafetensorsFile& file;
  std::uint64_t data_bytes;

  std::string metadata(const json& value) {
    if (!value.is_object()) return "__metadata__ is not an object";
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) return "__metadata__ '" + key + "' is not a string";
      file.metadata_[key] = text.get<std::string>();
    }
    return {};
  }

  std::string entry(const std::string& name, const json& value) {
    const std::string what = "tensor '" + name + "': ";
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
        !value.contains("shape") || !value.contains("data_offsets")) {
      return what + "needs exactly dtype, shape and data_offsets";
    }
    Entry entry;
    if (!value["dtype"].is_string()) return what + "dtype is not a string";
    entry.dtype = value["dtype"].get<std::string>();
    if (!value["shape"].is_array()) return what + "shape is not an array";
    for (const json& extent : value["shape"]) {
      const auto number = natural(extent);
      if (!number) return what + "shape has an extent that is not in [0, 2^63)";
      entry.shape.push_back(*number);
    }
    const json& offsets = value["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !natural(offsets[0]) ||
        !natural(offsets[1])) {
      return what + "data_offsets are not two integers in [0, 2^63)";
    }
    entry.begin = static_cast<std::uint64_t>(*natural(offsets[0]));
    entry.end = static_cast<std::uint64_t>(*natural(offsets[1]));
    if (entry.begin > entry.end) return what + "data_offsets end before they begin";
    if (entry.end > data_bytes) {
      return what + "data_offsets end at " + std::to_string(entry.end) + ", the file has " +
             std::to_string(data_bytes) + " bytes of data (truncated?)";
    }
    file.entries_[name] = std::move(entry);
    return {};
  }

  /// The tensors must tile the data: no overlap, no hole, nothing after the last.
  std::string tiling() const {
    std::vector<const Entry*> order;
    for (const auto& [name, entry] : file.entries_) order.push_back(&entry);
    std::sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
      return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
    });
    std::uint64_t position = 0;
    for (const Entry* entry : order) {
      if (entry->begin < position) return "tensors overlap at byte " + std::to_string(entry->begin);
      if (entry->begin > position) return "hole in the data at byte " + std::to_string(position);
      position = entry->end;
    }
    if (position == data_bytes) return {};
    return "has " + std::to_string(data_bytes - position) + " trailing bytes";
  }
};

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  Result<InputFile> input = InputFile::open(path);
  if (!input.ok()) return input.status();
  SafetensorsFile file(std::move(*input));

  std::array<unsigned char, length_bytes> prefix{};
  if (Status s = file.file_.read(0, std::as_writable_bytes(std::span(prefix))); !s.ok()) return s;
  std::uint64_t length = 0;
  for (std::size_t i = length_bytes; i-- > 0;) length = length << 8 | prefix[i];
  if (length > max_header) {
    return file_error(path, "header of " + std::to_string(length) + " bytes, at most " +
                                std::to_string(max_header));
  }
  if (length > file.file_.size() - length_bytes) {
    return file_error(path, "truncated inside its header of " + std::to_string(length) + " bytes");
  }
  std::string text(length, '\0');
  if (Status s = file.file_.read(length_bytes, std::as_writable_bytes(std::span(text))); !s.ok()) {
    return s;
  }
  file.data_begin_ = length_bytes + length;

  std::string error;
  const json header = parse_json(text, error);
  if (!error.empty()) return file_error(path, error);
  HeaderReader reader{file, file.file_.size() - file.data_begin_};
  for (const auto& [name, value] : header.items()) {
    error = name == "__metadata__" ? reader.metadata(value) : reader.entry(name, value);
    if (!error.empty()) return file_error(path, error);
  }
  if (error = reader.tiling(); !error.empty()) return file_error(path, error);
  return file;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

std::string SafetensorsFile::listing() const {
  constexpr std::size_t longest = 1000;
  std::string list;
  for (const auto& [name, entry] : entries_) {
    if (list.size() + name.size() > longest) return list.append(", ...");
    list.append(list.empty() ? "" : ", ").append(name);
  }
  return list;
}

Result<Array> SafetensorsFile::tensor(const std::string& name, std::string* converted) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    return file_error(file_.path(), "has no tensor '" + name + "'; it has: " + listing());
  }
  const Entry& entry = found->second;
  const std::string where = file_.path() + ":" + name;
  const bool float64 = entry.dtype == "F64";
  const auto format = float64 ? Format::f32 : format_of(entry.dtype);
  if (!format) {
    return file_error(where, "dtype " + entry.dtype +
                                 " is not one of F64, F32, F16, BF16, I8, U8, I32, I64, BOOL");
  }
  if (entry.shape.size() > max_rank) {
    return file_error(where, "shape has more than 5 dimensions");
  }
  if (Status s = check_extent(where, *format, entry.shape, entry.end - entry.begin, float64);
      !s.ok()) {
    return s;
  }
  Array array = zeros(*format, entry.shape);
  Bytes wide(float64 ? entry.end - entry.begin : 0);
  const std::span<std::byte> data = float64 ? std::span(wide) : std::span(array.bytes);
  if (Status s = file_.read(data_begin_ + entry.begin, data); !s.ok()) return s;
  if (float64) {
    if (Status s = narrow_float64(where, wide, array); !s.ok()) return s;
    if (converted) *converted = "float64 to f32";
  }
  if (Status s = check_booleans(where, array); !s.ok()) return s;
  return array;
}

Status write_safetensors(OutputFiles& files, const std::string& path, const std::string& name,
                         const Array& array, const std::map<std::string, std::string>& metadata) {
  std::string_view dtype = "U8";
  for (const Dtype& row : dtypes) {
    if (row.format == array.format) dtype = row.name;
  }
  json header;
  header["__metadata__"] = metadata;
  header[name] = {{"dtype", dtype},
                  {"shape", array.shape},
                  {"data_offsets", {std::size_t{0}, array.bytes.size()}}};
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // so that the data lie at a multiple of 8
  std::string prefix(length_bytes, '\0');
  for (std::size_t i = 0; i < length_bytes; ++i) {
    prefix[i] = static_cast<char>(text.size() >> 8 * i & 0xff);
  }
  text.insert(0, prefix);
  const std::array<std::span<const std::byte>, 2> parts{std::as_bytes(std::span(text)),
                                                        array.bytes};
  return files.add(path, parts);
}

}  // namespace qattn::io
