// A cache in a .safetensors file, which any reader of that format opens:
//
//   sequences    I64 [n]                  numbers, ascending
//   lengths      I64 [n][layers]
//   table_sizes  I64 [n][layers][heads]
//   tables       U8  [entries][24]        kv::Entry, one table behind the other, pages renumbered
//   k_means      F32 [frozen][heads][D]
//   pages.0 ..   U8  [pages][page bytes]  a pool each (formats/kv_layout.hpp); shared pages once
//   mean_flags   U8  [n][layers]          1: the layer's mean is frozen, and the next of k_means
//
// Everything that the header says follows from the options and counts in its one line of metadata,
// so load() reads that line, writes the header again and compares: there is no parser to trust.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "core/guarded.hpp"
#include "kvcache/data.hpp"
#include "kvcache/file_values.hpp"
#include "kvcache/tensors.hpp"

namespace qattn {

using detail::KvCacheData;
using kv::Entry;
using kv::invalid;
using kv::Layer;
using kv::Sequence;
using kv::Table;

namespace {

constexpr const char* opening = "{\"__metadata__\":{\"qattn_kv_cache\":\"";
constexpr std::size_t longest_line = 4096;

std::string text(std::int64_t value) { return std::to_string(value); }

/// Options and counts: the metadata line.
struct Counts {
  KvCacheOptions options;
  std::int64_t next_id = 0, sequences = 0, entries = 0, means = 0;
  std::vector<std::int64_t> pages;  ///< [1 + tiers]

  std::string line() const;
  /// Errors: invalid_argument, without the path.
  static Result<Counts> parse(const std::string& line);
};

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

std::string Counts::line() const {
  std::string s = "version=1";
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
  return s;
}

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
  void fail() { wrong_ = true; }
  bool wrong() const { return wrong_; }

 private:
  std::istringstream words_;
  bool wrong_ = false;
};

Result<Counts> Counts::parse(const std::string& line) {
  Counts c;
  Fields f(line);
  if (f.integer("version") != 1) return invalid("is not of version 1");
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
  if (f.wrong() || c.pages.size() != c.options.tiers.size() + 1 || c.line() != line) {
    return invalid("has metadata that is not a cache's");
  }
  return c;
}

/// One tensor of the file.
struct Part {
  std::string name;
  const char* dtype;
  std::vector<std::int64_t> shape;
  std::int64_t bytes;
};

/// The tensors in the order of the file. Nothing overflows: load() has checked the total.
std::vector<Part> parts_of(const Counts& c, const KvCacheData& data) {
  const std::int64_t n = c.sequences, layers = c.options.layers, heads = c.options.heads_kv;
  std::vector<Part> parts = {
      {"sequences", "I64", {n}, 8 * n},
      {"lengths", "I64", {n, layers}, 8 * n * layers},
      {"table_sizes", "I64", {n, layers, heads}, 8 * n * layers * heads},
      {"tables", "U8", {c.entries, 24}, 24 * c.entries},
      {"k_means", "F32", {c.means, heads, c.options.d}, 4 * c.means * heads * c.options.d}};
  for (std::size_t t = 0; t < c.pages.size(); ++t) {
    const std::int64_t page = data.page_bytes(static_cast<int>(t));
    parts.push_back({"pages." + text(static_cast<std::int64_t>(t)),
                     "U8",
                     {c.pages[t], page},
                     c.pages[t] * page});
  }
  // Behind all others, whose elements must lie at multiples of their size.
  parts.push_back({"mean_flags", "U8", {n, layers}, n * layers});
  return parts;
}

/// The JSON header, padded with spaces to a multiple of 8.
std::string header_of(const Counts& c, const std::vector<Part>& parts) {
  std::string s = opening + c.line() + "\"}";
  std::int64_t at = 0;
  for (const Part& p : parts) {
    s += ",\"" + p.name + "\":{\"dtype\":\"" + p.dtype + "\",\"shape\":[";
    for (std::size_t i = 0; i < p.shape.size(); ++i) {
      s.append(i ? "," : "").append(text(p.shape[i]));
    }
    s += "],\"data_offsets\":[" + text(at) + "," + text(at + p.bytes) + "]}";
    at += p.bytes;
  }
  s += "}";
  s.append((8 - s.size() % 8) % 8, ' ');
  return s;
}

struct Close {
  void operator()(std::FILE* f) const { std::fclose(f); }
};
using File = std::unique_ptr<std::FILE, Close>;

/// A whole cache in arrays, as the file has it.
struct Image {
  std::vector<std::int64_t> sequences, lengths, table_sizes;
  std::vector<Entry> entries;
  std::vector<float> means;
  std::vector<std::uint8_t> flags;
};

/// Numbers the used pages of every pool from 0 in the order of the tables.
class Renumber {
 public:
  explicit Renumber(const KvCacheData& data) : pages_(data.pools.size()), places_(pages_.size()) {}

  std::int32_t operator()(const Entry& e) {
    std::vector<std::int32_t>& place = places_[e.tier];
    const auto page = static_cast<std::size_t>(e.page);
    if (page >= place.size()) place.resize(page + 1, -1);
    if (place[page] < 0) {
      place[page] = static_cast<std::int32_t>(pages_[e.tier].size());
      pages_[e.tier].push_back(e.page);
    }
    return place[page];
  }
  const std::vector<std::int32_t>& pages(std::size_t tier) const { return pages_[tier]; }

 private:
  std::vector<std::vector<std::int32_t>> pages_, places_;
};

Image image_of(const KvCacheData& data, Renumber& renumber, Counts& c) {
  Image image;
  for (const Sequence& s : data.sequences) {
    image.sequences.push_back(s.id);
    for (const Layer& layer : s.layers) {
      image.lengths.push_back(layer.length);
      image.flags.push_back(layer.k_mean.empty() ? 0 : 1);
      c.means += layer.k_mean.empty() ? 0 : 1;
      image.means.insert(image.means.end(), layer.k_mean.begin(), layer.k_mean.end());
      for (const Table& table : layer.tables) {
        image.table_sizes.push_back(static_cast<std::int64_t>(table.size()));
        for (Entry e : table) {
          e.page = renumber(e);
          image.entries.push_back(e);
        }
      }
    }
  }
  c.sequences = static_cast<std::int64_t>(image.sequences.size());
  c.entries = static_cast<std::int64_t>(image.entries.size());
  return image;
}

}  // namespace

Status KvCache::save(const std::string& path) const {
  return guarded<Status>([&]() -> Status {
    Counts c;
    c.options = data_->options;
    c.options.budget_from = data_->options.average_bits > 0 ? data_->budget_from : 0;
    c.next_id = data_->next_id;
    Renumber renumber(*data_);
    const Image image = image_of(*data_, renumber, c);
    for (std::size_t t = 0; t < data_->pools.size(); ++t) {
      c.pages.push_back(static_cast<std::int64_t>(renumber.pages(t).size()));
    }
    const std::string header = header_of(c, parts_of(c, *data_));
    const std::string temporary = path + ".part";
    File file(std::fopen(temporary.c_str(), "wb"));
    if (!file) return invalid("path: " + temporary + " cannot be written");
    bool good = true;
    const auto put = [&](const void* bytes, std::size_t count) {
      good = good && (count == 0 || std::fwrite(bytes, 1, count, file.get()) == count);
    };
    const auto put_all = [&](const auto& x) { put(x.data(), x.size() * sizeof(x[0])); };
    const std::uint64_t size = header.size();
    put(&size, sizeof size);
    put_all(header);
    put_all(image.sequences);
    put_all(image.lengths);
    put_all(image.table_sizes);
    put_all(image.entries);
    put_all(image.means);
    for (std::size_t t = 0; t < data_->pools.size(); ++t) {
      const kv::PagePool& pool = data_->pools[t];
      for (const std::int32_t page : renumber.pages(t)) {
        put(pool.page(page), static_cast<std::size_t>(pool.page_bytes()));
      }
    }
    put_all(image.flags);
    good = std::fclose(file.release()) == 0 && good;
    if (good && std::rename(temporary.c_str(), path.c_str()) == 0) return {};
    std::remove(temporary.c_str());
    return invalid("path: " + path + " cannot be written");
  });
}

namespace {

/// An open file and what is left of it.
class Reader {
 public:
  explicit Reader(const std::string& path) : file_(std::fopen(path.c_str(), "rb")) {
    if (!file_ || std::fseek(file_.get(), 0, SEEK_END) != 0) return;
    size_ = std::ftell(file_.get());
    std::rewind(file_.get());
  }
  std::int64_t size() const { return size_; }
  bool read(void* to, std::size_t bytes) {
    return bytes == 0 || std::fread(to, 1, bytes, file_.get()) == bytes;
  }
  template <class T>
  bool read_all(std::vector<T>& to, std::int64_t count) {
    to.resize(static_cast<std::size_t>(count));
    return read(to.data(), to.size() * sizeof(T));
  }

 private:
  File file_;
  std::int64_t size_ = -1;
};

/// The header's text, and what its metadata says.
Status read_header(Reader& file, std::string& header, Counts& c) {
  std::uint64_t length = 0;
  if (!file.read(&length, sizeof length)) return invalid("is shorter than a header");
  const std::size_t least = std::string_view(opening).size();
  if (length < least || length > longest_line * 4 ||
      static_cast<std::int64_t>(length) > file.size() - 8) {
    return invalid("has no header of a KV cache");
  }
  header.resize(length);
  if (!file.read(header.data(), header.size())) return invalid("ends inside its header");
  const std::size_t end = header.find('"', least);
  if (header.rfind(opening, 0) != 0 || end == std::string::npos || end - least > longest_line) {
    return invalid("has no header of a KV cache");
  }
  Result<Counts> counts = Counts::parse(header.substr(least, end - least));
  if (!counts.ok()) return counts.status();
  c = std::move(*counts);
  return {};
}

/// The header must be the one that its counts make, and the file as long as it says.
Status check_size(const Reader& file, const std::string& header, const Counts& c,
                  const KvCacheData& data) {
  // Every count is of things in the file, which bounds their products, too.
  const std::int64_t all = file.size();
  const std::int64_t widest =
      8 * c.options.layers * c.options.heads_kv * std::max<std::int64_t>(c.options.d, 8);
  bool bounded = c.entries <= all / 24 && std::max(c.sequences, c.means) <= all / 4 &&
                 std::max(c.sequences, c.means) <= INT64_MAX / 16 / widest;
  for (const std::int64_t n : c.pages) bounded &= n <= all / 64;
  if (!bounded) return invalid("counts more than its size holds");
  const std::vector<Part> parts = parts_of(c, data);
  std::int64_t bytes = 8 + static_cast<std::int64_t>(header.size());
  for (const Part& p : parts) bytes += p.bytes;
  if (header_of(c, parts) != header) return invalid("has a header that is not its metadata's");
  if (bytes == all) return {};
  return invalid("has " + text(all) + " bytes, its header asks for " + text(bytes));
}

/// What an entry must be, whoever wrote it; `table`: those before it.
bool is_valid(const Entry& e, const Table& table, const Counts& c, std::int64_t length) {
  const std::int64_t size = c.options.page_size;
  const auto tiers = c.options.tiers.size();
  if (e.tier > tiers || e.page < 0 || e.page >= c.pages[e.tier] || e.reserved != 0) return false;
  if (e.first < 0 || e.first % size != 0 || e.live == 0) return false;
  if ((e.live & ~kv::live_bits(0, length, e.first, size)) != 0) return false;
  // The codes' path ends in the page's tier.
  if (static_cast<unsigned>(std::bit_width(e.path)) != e.tier) return false;
  if (!kv::is_weight(e)) return false;
  std::uint64_t taken = 0;
  for (auto i = table.rbegin(); i != table.rend() && i->first == e.first; ++i) taken |= i->live;
  return (taken & e.live) == 0 && (table.empty() || table.back().first <= e.first);
}

/// Sequences and tables from the image; counts each page's references.
Status build(const Image& image, const Counts& c, KvCacheData& data,
             std::vector<std::vector<std::int64_t>>& references) {
  const auto layers = static_cast<std::size_t>(c.options.layers);
  const auto heads = static_cast<std::size_t>(c.options.heads_kv);
  const auto width = static_cast<std::size_t>(c.options.heads_kv * c.options.d);
  std::size_t entry = 0, mean = 0;
  for (std::size_t i = 0; i < image.sequences.size(); ++i) {
    Sequence s;
    s.id = image.sequences[i];
    if (s.id < 0 || s.id >= c.next_id || (i > 0 && s.id <= image.sequences[i - 1])) {
      return invalid("sequences: entry " + text(static_cast<std::int64_t>(i)) + " is " +
                     text(s.id) + "; they should rise and be below next_id");
    }
    for (std::size_t l = i * layers; l < (i + 1) * layers; ++l) {
      Layer layer;
      layer.length = image.lengths[l];
      if (layer.length < 0 || layer.length > kv::most_tokens) {
        return invalid("lengths: " + text(layer.length) + " is not from 0 to 2^30");
      }
      if (image.flags[l] > 1 || (image.flags[l] == 1 && (mean + 1) * width > image.means.size())) {
        return invalid("mean_flags: do not fit k_means");
      }
      if (image.flags[l] == 1) {
        const float* from = image.means.data() + mean++ * width;
        layer.k_mean.assign(from, from + width);
      }
      for (std::size_t h = 0; h < heads; ++h) {
        const std::int64_t size = image.table_sizes[l * heads + h];
        if (size < 0 || size > static_cast<std::int64_t>(image.entries.size() - entry)) {
          return invalid("table_sizes: do not add up to the entries of tables");
        }
        Table table;
        table.reserve(static_cast<std::size_t>(size));
        for (std::int64_t k = 0; k < size; ++k) {
          const Entry& e = image.entries[entry++];
          if (!is_valid(e, table, c, layer.length)) {
            return invalid("tables: entry " + text(static_cast<std::int64_t>(entry) - 1) +
                           " is not that of a page");
          }
          ++references[e.tier][static_cast<std::size_t>(e.page)];
          table.push_back(e);
        }
        layer.tables.push_back(std::move(table));
      }
      s.layers.push_back(std::move(layer));
    }
    data.sequences.push_back(std::move(s));
  }
  if (entry != image.entries.size() || mean * width != image.means.size()) {
    return invalid("tables: more entries or means than its sequences have");
  }
  return {};
}

Status read_body(Reader& file, const Counts& c, KvCacheData& data) {
  Image image;
  const std::int64_t n = c.sequences, layers = c.options.layers, heads = c.options.heads_kv;
  bool whole = file.read_all(image.sequences, n) && file.read_all(image.lengths, n * layers) &&
               file.read_all(image.table_sizes, n * layers * heads) &&
               file.read_all(image.entries, c.entries) &&
               file.read_all(image.means, c.means * heads * c.options.d);
  for (std::size_t t = 0; whole && t < data.pools.size(); ++t) {
    kv::PagePool& pool = data.pools[t];
    for (std::int64_t i = 0; whole && i < c.pages[t]; ++i) {
      whole = file.read(pool.page(pool.allocate()), static_cast<std::size_t>(pool.page_bytes()));
    }
  }
  whole = whole && file.read_all(image.flags, n * layers);
  if (!whole) return invalid("cannot be read to its end");
  std::vector<std::vector<std::int64_t>> references;
  for (const std::int64_t pages : c.pages) references.emplace_back(static_cast<std::size_t>(pages));
  if (Status s = build(image, c, data, references); !s.ok()) return s;
  for (std::size_t t = 0; t < references.size(); ++t) {
    for (std::size_t page = 0; page < references[t].size(); ++page) {
      if (references[t][page] == 0) {
        return invalid("pages." + text(static_cast<std::int64_t>(t)) + ": page " +
                       text(static_cast<std::int64_t>(page)) + " is in no table");
      }
      for (std::int64_t i = 1; i < references[t][page]; ++i) {
        data.pools[t].retain(static_cast<std::int32_t>(page));
      }
    }
  }
  data.next_id = c.next_id;
  return {};
}

}  // namespace

Result<KvCache> KvCache::load(const std::string& path, int threads) {
  return guarded<Result<KvCache>>([&]() -> Result<KvCache> {
    const auto about = [&](const Status& s) {
      return Status(s.code(), "path: " + path + ": " + s.message());
    };
    Reader file(path);
    if (file.size() < 0) return invalid("path: " + path + " cannot be read");
    Counts c;
    std::string header;
    if (Status s = read_header(file, header, c); !s.ok()) return about(s);
    c.options.threads = threads;
    Result<KvCache> made = create(c.options);
    if (!made.ok()) return about(made.status());
    KvCacheData& data = *made->data_;
    if (Status s = check_size(file, header, c, data); !s.ok()) return about(s);
    if (Status s = read_body(file, c, data); !s.ok()) return about(s);
    if (Status s = kv::check_values(data); !s.ok()) return about(s);
    return made;
  });
}

}  // namespace qattn
