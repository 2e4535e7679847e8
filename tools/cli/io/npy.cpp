#include "io/npy.hpp"

#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "io/check.hpp"
#include "io/convert.hpp"

namespace qattn::io {

namespace {

constexpr std::string_view magic = "\x93NUMPY";
constexpr std::size_t prefix_bytes = 8;  // magic, major, minor
/// The three keys of a plain array take about 100 bytes; a long header is not one of ours.
constexpr std::uint64_t max_header = 1 << 16;

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

/// A reader of the Python dictionary literal that numpy.save writes, and of nothing more.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  /// The header, or in error() why not.
  std::optional<Header> parse();
  const std::string& error() const { return error_; }

 private:
  bool value(const std::string& key, Header& header);
  bool string(std::string& into);
  bool boolean(bool& into);
  bool tuple(std::vector<std::int64_t>& into);

  bool fail(const char* rule) {
    if (error_.empty()) error_ = rule;
    return false;
  }
  void skip_space() {
    while (!text_.empty() && (text_[0] == ' ' || text_[0] == '\n')) text_.remove_prefix(1);
  }
  bool take(std::string_view token) {
    skip_space();
    if (!text_.starts_with(token)) return false;
    text_.remove_prefix(token.size());
    return true;
  }

  std::string_view text_;
  std::string error_;
  unsigned seen_ = 0;
};

std::optional<Header> HeaderParser::parse() {
  Header header;
  if (!take("{")) fail("header is not a dictionary");
  while (error_.empty() && !take("}")) {
    std::string key;
    if (!string(key)) {
      fail("header key is not a string");
    } else if (!take(":")) {
      fail("header lacks ':' after a key");
    } else if (value(key, header)) {
      skip_space();
      if (!take(",") && !text_.starts_with("}")) fail("header lacks ',' or '}'");
    }
  }
  skip_space();
  if (error_.empty() && !text_.empty()) fail("header has text after its dictionary");
  if (error_.empty() && seen_ != 7) fail("header needs descr, fortran_order and shape");
  if (!error_.empty()) return std::nullopt;
  return header;
}

bool HeaderParser::value(const std::string& key, Header& header) {
  const unsigned bit = key == "descr" ? 1 : key == "fortran_order" ? 2 : key == "shape" ? 4 : 0;
  if (bit == 0) return fail("header has an unknown key");
  if (seen_ & bit) return fail("header has a key twice");
  seen_ |= bit;
  if (bit == 1) return string(header.descr) || fail("descr is not a plain dtype string");
  if (bit == 2) return boolean(header.fortran_order);
  return tuple(header.shape);
}

bool HeaderParser::string(std::string& into) {
  skip_space();
  if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) return false;
  const std::size_t end = text_.find(text_[0], 1);
  if (end == std::string_view::npos) return false;
  into = text_.substr(1, end - 1);
  text_.remove_prefix(end + 1);
  return true;
}

bool HeaderParser::boolean(bool& into) {
  if (take("True")) {
    into = true;
    return true;
  }
  if (take("False")) {
    into = false;
    return true;
  }
  return fail("fortran_order is neither True nor False");
}

bool HeaderParser::tuple(std::vector<std::int64_t>& into) {
  if (!take("(")) return fail("shape is not a tuple");
  while (!take(")")) {
    if (into.size() == max_rank) return fail("shape has more than 5 dimensions");
    if (text_.starts_with("-")) return fail("shape has a negative extent");
    std::int64_t extent = 0;
    const auto [end, code] = std::from_chars(text_.data(), text_.data() + text_.size(), extent);
    if (code == std::errc::result_out_of_range) return fail("shape has an extent over 2^63");
    if (code != std::errc()) return fail("shape has an extent that is no number");
    text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
    into.push_back(extent);
    const bool comma = take(",");
    if (!comma && (into.size() == 1 || !text_.starts_with(")"))) {
      return fail("shape lacks ',' or ')'");
    }
  }
  return true;
}

struct Dtype {
  std::string_view descr;
  Format format;
};
constexpr std::array<Dtype, 8> dtypes{{
    {"<f4", Format::f32},
    {"<f2", Format::f16},
    {"<u2", Format::bf16},
    {"|i1", Format::s8},
    {"|u1", Format::u8},
    {"<i4", Format::s32},
    {"<i8", Format::s64},
    {"|b1", Format::b8},
}};

/// What a file's elements are.
struct Element {
  Format format = Format::none;  ///< of the array
  bool float64 = false, big_endian = false;
  std::string converted;  ///< what of this the caller is told
};

Result<Element> element_of(const std::string& path, std::string descr, const ReadOptions& options) {
  const std::string named = "dtype '" + descr + "'";
  Element element;
  // bf16 of ml_dtypes: raw memory of two bytes to numpy, which some writers name.
  if (descr == "<V2" || descr == "bfloat16") {
    element.format = Format::bf16;
    if (descr == "<V2") element.converted = "raw <V2 to bf16, as ml_dtypes writes it";
    return element;
  }
  if (descr == "<V1" || descr == "|V1") {
    return file_error(path, named + " could be any format of 8 bits; write .view(numpy.uint8)");
  }
  // One-byte types have no byte order; some writers name one all the same.
  if (descr.size() == 3 && (descr[0] == '<' || descr[0] == '>') && descr[2] == '1') descr[0] = '|';
  if (descr.starts_with('>')) {
    descr[0] = '<';
    element.big_endian = true;
    element.converted = "big to little endian";
  }
  if (descr == "<f8") {
    element.format = Format::f32;
    element.float64 = true;
    element.converted += (element.big_endian ? ", " : "") + std::string("float64 to f32");
    return element;
  }
  for (const Dtype& dtype : dtypes) {
    if (dtype.descr != descr) continue;
    if (dtype.format == Format::bf16 && !options.bf16) {
      return file_error(path, named + " (uint16) is read only as bf16, with --bf16");
    }
    element.format = dtype.format;
    return element;
  }
  return file_error(path,
                    named + " is not one of f16, f32, f64, i8, u8, i32, i64, bool, V2 (bf16)");
}

/// The data as they lie in the file, in little-endian order.
Status read_elements(InputFile& file, std::uint64_t begin, const Element& element, Array& array) {
  const std::size_t width = element.float64 ? 8 : info(array.format).bits / 8;
  Bytes wide;
  if (element.float64) wide.resize(static_cast<std::size_t>(array.count()) * width);
  const std::span<std::byte> data = element.float64 ? std::span(wide) : std::span(array.bytes);
  if (Status s = file.read(begin, data); !s.ok()) return s;
  if (element.big_endian) swap_bytes(data, width);
  return element.float64 ? narrow_float64(file.path(), wide, array) : Status();
}

struct HeaderText {
  std::string text;
  std::uint64_t data_begin = 0;
};

Result<HeaderText> read_header(InputFile& file) {
  std::array<unsigned char, prefix_bytes + 4> prefix{};
  const auto bytes = std::as_writable_bytes(std::span(prefix));
  if (Status s = file.read(0, bytes.first(prefix_bytes)); !s.ok()) return s;
  if (std::memcmp(prefix.data(), magic.data(), magic.size()) != 0) {
    return file_error(file.path(), "not a .npy file: wrong magic bytes");
  }
  const int major = prefix[6], minor = prefix[7];
  if (major < 1 || major > 3 || minor != 0) {
    return file_error(file.path(), "version " + std::to_string(major) + "." +
                                       std::to_string(minor) + " is not 1.0, 2.0 or 3.0");
  }
  const std::size_t length_bytes = major == 1 ? 2 : 4;
  if (Status s = file.read(prefix_bytes, bytes.subspan(prefix_bytes, length_bytes)); !s.ok()) {
    return s;
  }
  std::uint64_t length = 0;
  for (std::size_t i = length_bytes; i-- > 0;) length = length << 8 | prefix[prefix_bytes + i];
  if (length > max_header) {
    return file_error(file.path(), "header of " + std::to_string(length) + " bytes, at most " +
                                       std::to_string(max_header));
  }
  HeaderText header;
  header.data_begin = prefix_bytes + length_bytes + length;
  if (header.data_begin > file.size()) {
    return file_error(file.path(), "truncated inside its header");
  }
  header.text.resize(length);
  Status s = file.read(prefix_bytes + length_bytes, std::as_writable_bytes(std::span(header.text)));
  if (!s.ok()) return s;
  return header;
}

std::string_view descr_of(Format format) {
  for (const Dtype& dtype : dtypes) {
    if (dtype.format == format) return dtype.descr;
  }
  return "|u1";
}

}  // namespace

Result<Array> read_npy(const std::string& path, const ReadOptions& options) {
  Result<InputFile> file = InputFile::open(path);
  if (!file.ok()) return file.status();
  Result<HeaderText> text = read_header(*file);
  if (!text.ok()) return text.status();

  HeaderParser parser(text->text);
  const std::optional<Header> header = parser.parse();
  if (!header) return file_error(path, parser.error());
  Result<Element> element = element_of(path, header->descr, options);
  if (!element.ok()) return element.status();
  if (Status s = check_extent(path, element->format, header->shape, file->size() - text->data_begin,
                              element->float64);
      !s.ok()) {
    return s;
  }
  Array array = zeros(element->format, header->shape);
  if (Status s = read_elements(*file, text->data_begin, *element, array); !s.ok()) return s;
  if (Status s = check_booleans(path, array); !s.ok()) return s;
  if (header->fortran_order) {
    from_column_major(array);
    element->converted +=
        (element->converted.empty() ? "" : ", ") + std::string("Fortran to C order");
  }
  if (options.converted) *options.converted = std::move(element->converted);
  return array;
}

Status write_npy(OutputFiles& files, const std::string& path, const Array& array) {
  std::vector<std::int64_t> shape = array.shape;
  const int bits = info(array.format).bits;
  if (bits < 8 && !shape.empty()) shape.back() = packed_bytes(shape.back(), bits);
  std::string tuple = shape_text(shape);
  if (shape.size() == 1) tuple.insert(tuple.end() - 1, ',');

  std::string header = "{'descr': '" + std::string(descr_of(array.format)) +
                       "', 'fortran_order': False, 'shape': " + tuple + ", }";
  // The format asks for data at a multiple of 64 bytes and a newline before it.
  const std::size_t fixed = prefix_bytes + 2;
  header.append(63 - (fixed + header.size()) % 64, ' ');
  header += '\n';
  std::string prefix(magic);
  prefix += {'\x01', '\x00', static_cast<char>(header.size() & 0xff),
             static_cast<char>(header.size() >> 8)};
  header.insert(0, prefix);

  const std::array<std::span<const std::byte>, 2> parts{std::as_bytes(std::span(header)),
                                                        array.bytes};
  return files.add(path, parts);
}

}  // namespace qattn::io
