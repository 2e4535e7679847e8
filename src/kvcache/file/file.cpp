// A cache in a .safetensors file, which any reader of that format opens:
//
//   sequences    I64 [n]                  numbers, ascending
//   lengths      I64 [n][layers]
//   table_sizes  I64 [n][layers][heads]
//   tables       U8  [entries][24]        kv::Entry, one table behind the other, pages renumbered
//   k_means      F32 [sets][heads][D]
//   pages.0 ..   U8  [pages][page bytes]  a pool each (formats/kv/layout.hpp); shared pages once
//   mean_flags   U8  [n][layers]          how many of the next of k_means are the layer's
//   k_shifts     U8  [sets][heads][D]     with balance_k: what K is divided by, exponents of 2
//   v_means      F32 [sets][heads][Dv]    with smooth_v; before mean_flags
//
// Everything that the header says follows from the options and counts in its one line of metadata,
// so load() reads that line and knows each entry's text: there is no parser to trust. The tensors
// may lie in another order, as after safetensors has read the file and written it again.
// Versions 1 and 2 (k_granularity=per_channel) have neither balance_k nor smooth_v; version 3 says
// of both and of the granularity; in version 4 some layer has more than one set.
#include "kvcache/file/file.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "core/guarded.hpp"
#include "kvcache/file/header.hpp"
#include "kvcache/file/values.hpp"
#include "kvcache/tensors.hpp"

namespace qattn {

using detail::KvCacheData;
using kv::Entry;
using kv::FileCounts;
using kv::invalid;
using kv::Layer;
using kv::Sequence;
using kv::Table;

namespace {

constexpr std::size_t longest_line = 4096;

std::string text(std::int64_t value) { return std::to_string(value); }

struct Close {
  void operator()(std::FILE* f) const { std::fclose(f); }
};
using File = std::unique_ptr<std::FILE, Close>;

/// A whole cache in arrays, as the file has it.
struct Image {
  std::vector<std::int64_t> sequences, lengths, table_sizes;
  std::vector<Entry> entries;
  std::vector<float> means, v_means;
  std::vector<std::uint8_t> flags, shifts;
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

Image image_of(const KvCacheData& data, Renumber& renumber, FileCounts& c) {
  Image image;
  for (const Sequence& s : data.sequences) {
    image.sequences.push_back(s.id);
    for (const Layer& layer : s.layers) {
      image.lengths.push_back(layer.length);
      const kv::Sets& sets = layer.sets;
      image.flags.push_back(static_cast<std::uint8_t>(sets.count));
      c.means += sets.count;
      c.drifted |= sets.count > 1;
      image.means.insert(image.means.end(), sets.k_mean.begin(), sets.k_mean.end());
      image.v_means.insert(image.v_means.end(), sets.v_mean.begin(), sets.v_mean.end());
      image.shifts.insert(image.shifts.end(), sets.k_shift.begin(), sets.k_shift.end());
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

Status kv::write_file(const KvCacheData& data, const std::string& path) {
  FileCounts c;
  c.options = data.options;
  c.options.budget_from = data.options.average_bits > 0 ? data.budget_from : 0;
  c.next_id = data.next_id;
  Renumber renumber(data);
  const Image image = image_of(data, renumber, c);
  for (std::size_t t = 0; t < data.pools.size(); ++t) {
    c.pages.push_back(static_cast<std::int64_t>(renumber.pages(t).size()));
  }
  const std::string header = kv::file_header(c, kv::file_parts(c, data));
  const std::string temporary = path + ".part";
  File file(std::fopen(temporary.c_str(), "wb"));
  if (!file) return invalid("path: " + temporary + " cannot be written");
  bool good = true;
  if (struct stat old{}; ::stat(path.c_str(), &old) == 0) {  // a file that is there keeps its mode
    good = ::fchmod(::fileno(file.get()), old.st_mode & 07777) == 0;
  }
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
  for (std::size_t t = 0; t < data.pools.size(); ++t) {
    const kv::PagePool& pool = data.pools[t];
    for (const std::int32_t page : renumber.pages(t)) {
      put(pool.page(page), static_cast<std::size_t>(pool.page_bytes()));
    }
  }
  put_all(image.v_means);
  put_all(image.flags);
  put_all(image.shifts);
  good = std::fclose(file.release()) == 0 && good;
  if (good && std::rename(temporary.c_str(), path.c_str()) == 0) return {};
  std::remove(temporary.c_str());
  return invalid("path: " + path + " cannot be written");
}

Status KvCache::save(const std::string& path) const {
  return guarded<Status>([&] { return kv::write_file(*data_, path); });
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
  bool seek(std::int64_t place) { return std::fseek(file_.get(), place, SEEK_SET) == 0; }
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
Status read_header(Reader& file, std::string& header, FileCounts& c) {
  std::uint64_t length = 0;
  if (!file.read(&length, sizeof length)) return invalid("is shorter than a header");
  const std::size_t least = std::string_view(kv::file_opening).size();
  if (length > longest_line * 4 || static_cast<std::int64_t>(length) > file.size() - 8) {
    return invalid("has no header of a KV cache");
  }
  header.resize(length);
  if (!file.read(header.data(), header.size())) return invalid("ends inside its header");
  if (header.find("\"sequences\":{") != std::string::npos &&
      header.find("\"qattn_kv_cache\"") == std::string::npos) {
    return invalid(
        "has no metadata qattn_kv_cache, which says what its tensors mean: what wrote it again "
        "left that out (safetensors keeps what save_file() gets as metadata=)");
  }
  const std::size_t end = length < least ? std::string::npos : header.find('"', least);
  if (header.rfind(kv::file_opening, 0) != 0 || end == std::string::npos ||
      end - least > longest_line) {
    return invalid("has no header of a KV cache");
  }
  Result<FileCounts> counts = FileCounts::parse(header.substr(least, end - least));
  if (!counts.ok()) return counts.status();
  c = std::move(*counts);
  return {};
}

/// The header must say what its counts do, and the file be as long as it says; where in the file
/// the tensors are.
Status find_parts(const Reader& file, const std::string& header, const FileCounts& c,
                  const KvCacheData& data, std::vector<kv::FilePart>& parts) {
  // Every count is of things in the file, which bounds their products, too.
  const std::int64_t all = file.size();
  const std::int64_t widest = 8 * c.options.layers * c.options.heads_kv * std::int64_t{data.d()};
  bool bounded = c.entries <= all / 24 && std::max(c.sequences, c.means) <= all / 4 &&
                 std::max(c.sequences, c.means) <= INT64_MAX / 16 / widest;
  for (const std::int64_t n : c.pages) bounded &= n <= all / 64;
  if (!bounded) return invalid("counts more than its size holds");
  parts = kv::file_parts(c, data);
  const std::int64_t body = 8 + static_cast<std::int64_t>(header.size());
  std::int64_t bytes = body;
  for (const kv::FilePart& p : parts) bytes += p.bytes;
  if (!kv::find_places(header, c, parts)) return invalid("has a header that is not its metadata's");
  for (kv::FilePart& p : parts) p.place += body;
  if (bytes == all) return {};
  return invalid("has " + text(all) + " bytes, its header asks for " + text(bytes));
}

/// What an entry must be, whoever wrote it; `table`: those before it.
bool is_valid(const Entry& e, const Table& table, const FileCounts& c, const Layer& layer) {
  const std::int64_t size = c.options.page_size;
  const auto tiers = c.options.tiers.size();
  if (e.tier > tiers || e.page < 0 || e.page >= c.pages[e.tier]) return false;
  if (e.set >= (e.tier > 0 ? std::max<std::int64_t>(layer.sets.count, 1) : 1)) return false;
  if (e.first < 0 || e.first % size != 0 || e.live == 0) return false;
  if ((e.live & ~kv::live_bits(0, layer.length, e.first, size)) != 0) return false;
  // The codes' path ends in the page's tier.
  if (static_cast<unsigned>(std::bit_width(e.path)) != e.tier) return false;
  if (!kv::is_weight(e)) return false;
  std::uint64_t taken = 0;
  for (auto i = table.rbegin(); i != table.rend() && i->first == e.first; ++i) taken |= i->live;
  return (taken & e.live) == 0 && (table.empty() || table.back().first <= e.first);
}

/// Sequences and tables from the image; counts each page's references.
Status build(const Image& image, const FileCounts& c, KvCacheData& data,
             std::vector<std::vector<std::int64_t>>& references) {
  const auto layers = static_cast<std::size_t>(c.options.layers);
  const auto heads = static_cast<std::size_t>(c.options.heads_kv);
  const auto width = static_cast<std::size_t>(c.options.heads_kv * data.d());
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
      const std::size_t sets = image.flags[l];
      if (sets > (c.drifted ? static_cast<std::size_t>(data.most_sets) : 1) ||
          (mean + sets) * width > image.means.size()) {
        return invalid("mean_flags: do not fit k_means");
      }
      layer.sets.resize(static_cast<std::int64_t>(sets), data.options);
      const auto copy = [&](const auto& from, auto& to) {
        if (sets == 0 || to.empty()) return;
        const std::size_t each = to.size() / sets;
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(mean * each), to.size(), to.begin());
      };
      copy(image.means, layer.sets.k_mean);
      copy(image.v_means, layer.sets.v_mean);
      copy(image.shifts, layer.sets.k_shift);
      mean += sets;
      for (std::size_t h = 0; h < heads; ++h) {
        const std::int64_t size = image.table_sizes[l * heads + h];
        if (size < 0 || size > static_cast<std::int64_t>(image.entries.size() - entry)) {
          return invalid("table_sizes: do not add up to the entries of tables");
        }
        Table table;
        table.reserve(static_cast<std::size_t>(size));
        for (std::int64_t k = 0; k < size; ++k) {
          const Entry& e = image.entries[entry++];
          if (!is_valid(e, table, c, layer)) {
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

bool read_tensors(Reader& file, const FileCounts& c, const std::vector<kv::FilePart>& parts,
                  KvCacheData& data, Image& image) {
  const std::int64_t n = c.sequences, layers = c.options.layers, heads = c.options.heads_kv;
  auto part = parts.begin();  // in the order of file_parts()
  bool whole = true;
  const auto next = [&] { whole = whole && file.seek((part++)->place); };
  const auto take = [&](auto& to, std::int64_t count) {
    next();
    whole = whole && file.read_all(to, count);
  };
  take(image.sequences, n);
  take(image.lengths, n * layers);
  take(image.table_sizes, n * layers * heads);
  take(image.entries, c.entries);
  take(image.means, c.means * heads * data.d());
  for (std::size_t t = 0; t < data.pools.size(); ++t) {
    kv::PagePool& pool = data.pools[t];
    next();
    for (std::int64_t i = 0; whole && i < c.pages[t]; ++i) {
      whole = file.read(pool.page(pool.allocate()), static_cast<std::size_t>(pool.page_bytes()));
    }
  }
  if (data.options.smooth_v) take(image.v_means, c.means * heads * data.dv());
  take(image.flags, n * layers);
  if (data.balances_k()) take(image.shifts, c.means * heads * data.d());
  return whole;
}

Status read_body(Reader& file, const FileCounts& c, const std::vector<kv::FilePart>& parts,
                 KvCacheData& data) {
  Image image;
  if (!read_tensors(file, c, parts, data, image)) return invalid("cannot be read to its end");
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
    FileCounts c;
    std::string header;
    if (Status s = read_header(file, header, c); !s.ok()) return about(s);
    c.options.threads = threads;
    Result<KvCache> made = create(c.options);
    if (!made.ok()) return about(made.status());
    KvCacheData& data = *made->data_;
    std::vector<kv::FilePart> parts;
    if (Status s = find_parts(file, header, c, data, parts); !s.ok()) return about(s);
    if (Status s = read_body(file, c, parts, data); !s.ok()) return about(s);
    if (Status s = kv::check_values(data); !s.ok()) return about(s);
    return made;
  });
}

}  // namespace qattn
