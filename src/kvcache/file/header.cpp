#include "kvcache/file/header.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

namespace qattn::kv {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

/// Calls f(name, field) for every number of the line but tiers and pages.
template <class C, class F>
void each_number(C& c, F f) {
  f("layers", c.options.layers);
  f("heads_kv", c.options.heads_kv);
  f("d", c.options.d);
  f("dv", c.options.dv);
  f("page_size", c.options.page_size);
  f("window", c.options.window);
  f("sinks", c.options.sinks);
  f("budget_from", c.options.budget_from);
  f("next_id", c.next_id);
  f("sequences", c.sequences);
  f("entries", c.entries);
  f("means", c.means);
}

std::string hexadecimal(double value) {
  char buffer[64];  // to_chars: printf would write the locale's decimal point
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::hex);
  return {buffer, end.ptr};
}

}  // namespace

std::string FileCounts::line() const {
  const bool by_channel = options.k_granularity == Granularity::per_channel;
  const bool newer = drifted || balances_k(options) || options.smooth_v;
  std::string s = drifted      ? "version=4"
                  : newer      ? "version=3"
                  : by_channel ? "version=2"
                               : "version=1";
  each_number(*this, [&](const char* name, std::int64_t value) {
    s += std::string(" ") + name + "=" + text(value);
  });
  s += " window_format=" + std::string(info(options.window_format).name) + " tiers=";
  for (std::size_t i = 0; i < options.tiers.size(); ++i) {
    s.append(i ? "," : "").append(text(options.tiers[i].k_bits)).append("/");
    s.append(text(options.tiers[i].v_bits));
  }
  s += " pages=";
  for (std::size_t i = 0; i < pages.size(); ++i) s.append(i ? "," : "").append(text(pages[i]));
  s += " average_bits=" + hexadecimal(options.average_bits) +
       " smooth_k=" + text(options.smooth_k) + " rotate=" + text(options.rotate) +
       " importance=" + text(static_cast<int>(options.importance)) +
       " importance_decay=" + hexadecimal(static_cast<double>(options.importance_decay)) +
       " hysteresis=" + hexadecimal(static_cast<double>(options.hysteresis));
  if (by_channel || newer) {
    s += " k_granularity=" + std::string(name(options.k_granularity));
  }
  if (newer) {
    s += " balance_k=" + text(balances_k(options)) + " smooth_v=" + text(options.smooth_v);
  }
  return s;
}

namespace {

/// The fields of a line, in order; each is asked for once, by name.
class Fields {
 public:
  explicit Fields(const std::string& line) : words_(line) {}

  std::string take(const std::string& name) {
    std::string word;
    words_ >> word;
    if (word.rfind(name + "=", 0) == 0) return word.substr(name.size() + 1);
    wrong_ = true;
    return "0";
  }
  std::int64_t integer(const std::string& name) { return number(take(name)); }
  double real(const std::string& name) {
    const std::string s = take(name);
    double value = 0;
    const char* last = s.data() + s.size();
    const auto end = std::from_chars(s.data(), last, value, std::chars_format::hex);
    wrong_ |= end.ec != std::errc() || end.ptr != last || !std::isfinite(value);
    return value;
  }
  /// Digits up to 2^53.
  std::int64_t number(const std::string& s) {
    const bool digits =
        !s.empty() && s.size() < 16 && s.find_first_not_of("0123456789") == std::string::npos;
    wrong_ |= !digits;
    return digits ? std::stoll(s) : 0;
  }
  std::vector<std::string> list(const std::string& name, char separator) {
    std::vector<std::string> parts;
    std::istringstream all(take(name));
    for (std::string part; std::getline(all, part, separator);) parts.push_back(part);
    return parts;
  }
  bool wrong() const { return wrong_; }

 private:
  std::istringstream words_;
  bool wrong_ = false;
};

}  // namespace

Result<FileCounts> FileCounts::parse(const std::string& line) {
  FileCounts c;
  Fields f(line);
  const std::int64_t version = f.integer("version");
  if (version < 1 || version > 4) return invalid("is of none of the versions 1 to 4");
  c.drifted = version == 4;
  each_number(c, [&](const char* name, std::int64_t& value) { value = f.integer(name); });
  c.options.window_format = format_named(f.take("window_format")).value_or(Format::none);
  c.options.tiers.clear();
  for (const std::string& tier : f.list("tiers", ',')) {
    const std::size_t slash = std::min(tier.find('/'), tier.size() - 1);
    c.options.tiers.push_back({static_cast<int>(f.number(tier.substr(0, slash)) & 0xff),
                               static_cast<int>(f.number(tier.substr(slash + 1)) & 0xff)});
  }
  for (const std::string& count : f.list("pages", ',')) c.pages.push_back(f.number(count));
  c.options.average_bits = f.real("average_bits");
  c.options.smooth_k = f.integer("smooth_k") != 0;
  c.options.rotate = f.integer("rotate") != 0;
  c.options.importance = static_cast<KvImportance>(f.integer("importance"));
  c.options.importance_decay = static_cast<float>(f.real("importance_decay"));
  c.options.hysteresis = static_cast<float>(f.real("hysteresis"));
  c.options.balance_k = c.options.smooth_v = false;
  if (version >= 2) {
    c.options.k_granularity =
        granularity_named(f.take("k_granularity")).value_or(Granularity::automatic);
  }
  if (version >= 3) {
    c.options.balance_k = f.integer("balance_k") != 0;
    c.options.smooth_v = f.integer("smooth_v") != 0;
  }
  if (f.wrong() || c.pages.size() != c.options.tiers.size() + 1 || c.line() != line) {
    return invalid("has metadata that is not a cache's");
  }
  return c;
}

std::vector<FilePart> file_parts(const FileCounts& c, const detail::KvCacheData& data) {
  const std::int64_t n = c.sequences, layers = c.options.layers, heads = c.options.heads_kv;
  const std::int64_t d = data.d(), dv = data.dv();
  std::vector<FilePart> parts = {{"sequences", "I64", {n}, 8 * n},
                                 {"lengths", "I64", {n, layers}, 8 * n * layers},
                                 {"table_sizes", "I64", {n, layers, heads}, 8 * n * layers * heads},
                                 {"tables", "U8", {c.entries, 24}, 24 * c.entries},
                                 {"k_means", "F32", {c.means, heads, d}, 4 * c.means * heads * d}};
  for (std::size_t t = 0; t < c.pages.size(); ++t) {
    const std::int64_t page = data.page_bytes(static_cast<int>(t));
    parts.push_back({"pages." + text(static_cast<std::int64_t>(t)),
                     "U8",
                     {c.pages[t], page},
                     c.pages[t] * page});
  }
  if (c.options.smooth_v) {
    parts.push_back({"v_means", "F32", {c.means, heads, dv}, 4 * c.means * heads * dv});
  }
  // Behind all others, whose elements must lie at multiples of their size.
  parts.push_back({"mean_flags", "U8", {n, layers}, n * layers});
  if (data.balances_k()) {
    parts.push_back({"k_shifts", "U8", {c.means, heads, d}, c.means * heads * d});
  }
  return parts;
}

namespace {

/// A tensor in the header up to its first offset.
std::string entry_opening(const FilePart& p) {
  std::string s = ",\"" + p.name + "\":{\"dtype\":\"" + p.dtype + "\",\"shape\":[";
  for (std::size_t i = 0; i < p.shape.size(); ++i) {
    s.append(i ? "," : "").append(text(p.shape[i]));
  }
  return s + "],\"data_offsets\":[";
}

std::string offsets(std::int64_t place, std::int64_t bytes) {
  return text(place) + "," + text(place + bytes) + "]}";
}

}  // namespace

std::string file_header(const FileCounts& c, const std::vector<FilePart>& parts) {
  std::string s = file_opening + c.line() + "\"}";
  std::int64_t at = 0;
  for (const FilePart& p : parts) {
    s += entry_opening(p) + offsets(at, p.bytes);
    at += p.bytes;
  }
  s += "}";
  s.append((8 - s.size() % 8) % 8, ' ');
  return s;
}

bool find_places(const std::string& header, const FileCounts& c, std::vector<FilePart>& parts) {
  const std::string opening = file_opening + c.line() + "\"}";
  if (header.rfind(opening, 0) != 0) return false;
  // Each entry once, and nothing else: then the header's length is that of all.
  std::size_t length = opening.size() + 1;
  std::vector<const FilePart*> by_place;
  for (FilePart& p : parts) {
    const std::string entry = entry_opening(p);
    const std::size_t found = header.find(entry, opening.size());
    if (found == std::string::npos) return false;
    const char* digits = header.data() + found + entry.size();
    const char* end = header.data() + header.size();
    if (std::from_chars(digits, end, p.place).ec != std::errc() || p.place < 0 ||
        p.place > INT64_MAX - p.bytes) {
      return false;
    }
    const std::string rest = offsets(p.place, p.bytes);
    if (header.compare(found + entry.size(), rest.size(), rest) != 0) return false;
    length += entry.size() + rest.size();
    by_place.push_back(&p);
  }
  if (header.find_last_not_of(' ') + 1 != length || header[length - 1] != '}') return false;
  std::sort(by_place.begin(), by_place.end(), [](const FilePart* a, const FilePart* b) {
    return a->place != b->place ? a->place < b->place : a->bytes < b->bytes;
  });
  std::int64_t at = 0;
  for (const FilePart* p : by_place) {
    if (p->place != at) return false;
    at += p->bytes;
  }
  return true;
}

}  // namespace qattn::kv
