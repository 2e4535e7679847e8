// qattn kv: what a KV cache makes of given keys and values: tiers, bytes, errors.
#include <fmt/format.h>

#include <cmath>

#include "call.hpp"
#include "commands.hpp"
#include "console.hpp"
#include "io/half.hpp"
#include "io/npy.hpp"

namespace qattn::cli {

namespace {

struct KvFlags {
  std::string k, v, q, probe, tiers, window_format = "f16", importance = "uniform",
                                     k_granularity = "per_token";
  double budget = 0;
  KvCacheOptions cache;
  bool no_smooth = false, no_smooth_v = false, no_rotate = false, no_balance = false,
       debias = false, bf16 = false, json = false;

  void add_to(CLI::App& app) {
    app.add_option("--k", k, "keys (B, Hkv, S, D): .npy or file.safetensors:name")->required();
    app.add_option("--v", v, "values (B, Hkv, S, Dv)")->required();
    app.add_option("--q", q, "queries (B, Hq, Sq, D) that see every key: adds the output's error");
    app.add_option("--probe", probe,
                   "queries whose attention says how important each page is (default: none)");
    app.add_option("--budget", budget, "average bits an element, everything counted; 0: none");
    app.add_option("--budget-from", cache.budget_from, "length from which the budget holds")
        ->check(CLI::PositiveNumber);
    app.add_option("--tiers", tiers,
                   "best first, bits or K/V bits: 8,4/2,2 (default 8,4,3,2; without budget 4)");
    app.add_option("--window", cache.window, "newest tokens in 16 bits (default 128)");
    app.add_option("--sinks", cache.sinks, "first tokens in 16 bits (default 16)");
    app.add_option("--page-size", cache.page_size, "tokens a page: 16 (default), 32 or 64");
    app.add_option("--window-format", window_format, "f16 (default) or bf16");
    app.add_option("--importance", importance, "uniform (default) or key_norm")
        ->check(CLI::IsMember({"uniform", "key_norm"}));
    app.add_flag("--no-smooth", no_smooth, "leave the mean in the keys");
    app.add_flag("--no-smooth-v", no_smooth_v, "leave the mean in the values");
    app.add_flag("--no-rotate", no_rotate, "no Hadamard rotation");
    app.add_flag("--no-balance", no_balance, "leave loud channels of the keys as they are");
    app.add_option("--k-granularity", k_granularity,
                   "K's scales: per_token (default), or per_channel of a page")
        ->check(CLI::IsMember({"per_token", "per_channel"}));
    app.add_flag("--debias", debias, "add half the variance that rounding K left in a score")
        ->needs("--q");
    app.add_option("--threads", cache.threads, "CPU threads (default: all)");
    app.add_flag("--bf16", bf16, "a uint16 .npy file holds bf16");
    app.add_flag("--json", json, "print JSON");
  }
};

Result<std::vector<KvTier>> parse_tiers(const std::string& text) {
  std::vector<KvTier> tiers;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    std::string tier = text.substr(begin, end - begin);
    const std::size_t slash = tier.find('/');
    if (slash != std::string::npos) tier[slash] = ',';
    const auto bits = parse_integers(tier);
    if (!bits || bits->size() > 2 || (bits->size() == 2) != (slash != std::string::npos)) {
      return usage_error("--tiers " + text + ": give numbers of bits, or K/V pairs, as in 8,4/2,2");
    }
    for (const std::int64_t b : *bits) {
      if (b < 1 || b > 16) return usage_error(fmt::format("--tiers {}: {} bits", text, b));
    }
    tiers.push_back({static_cast<int>(bits->front()), static_cast<int>(bits->back())});
    begin = end + 1;
  }
  return tiers;
}

Result<io::Array> load_as(const char* name, const std::string& path, bool bf16) {
  Result<io::Array> array = load_tensor(name, path, bf16);
  if (!array.ok() || array->shape.size() == 4) return array;
  return usage_error(fmt::format("{}: shape {} should have 4 dimensions (B, H, S, D)", name,
                                 io::shape_text(array->shape)));
}

struct Inputs {
  io::Array k, v, q, probe;
};

Result<Inputs> load_inputs(const KvFlags& flags) {
  Inputs in;
  for (const auto& [name, path, array] :
       {std::tuple{"k", &flags.k, &in.k}, std::tuple{"v", &flags.v, &in.v},
        std::tuple{"q", &flags.q, &in.q}, std::tuple{"probe", &flags.probe, &in.probe}}) {
    if (path->empty()) continue;
    Result<io::Array> loaded = load_as(name, *path, flags.bf16);
    if (!loaded.ok()) return loaded.status();
    *array = std::move(*loaded);
  }
  return in;
}

Result<KvCacheOptions> options_of(const KvFlags& flags, const Inputs& in) {
  KvCacheOptions o = flags.cache;
  o.heads_kv = in.k.shape[1];
  o.d = in.k.shape[3];
  o.dv = in.v.shape[3];
  o.average_bits = flags.budget;
  o.smooth_k = !flags.no_smooth;
  o.smooth_v = !flags.no_smooth_v;
  o.rotate = !flags.no_rotate;
  o.balance_k = !flags.no_balance;
  o.k_granularity = granularity_named(flags.k_granularity).value_or(Granularity::automatic);
  o.importance = flags.importance == "key_norm" ? KvImportance::key_norm : KvImportance::uniform;
  const Result<Format> format = parse_input_format("--window-format", flags.window_format);
  if (!format.ok()) return format.status();
  o.window_format = *format;
  if (flags.budget == 0) o.tiers = {{4, 4}};
  if (!flags.tiers.empty()) {
    Result<std::vector<KvTier>> tiers = parse_tiers(flags.tiers);
    if (!tiers.ok()) return tiers.status();
    o.tiers = std::move(*tiers);
  }
  return o;
}

/// A cache that holds k and v, one sequence an entry of the batch.
struct Filled {
  KvCache cache;
  std::vector<std::int64_t> sequences;
};

Result<Filled> fill(const KvCacheOptions& options, const Inputs& in, const TensorView& importance) {
  Result<KvCache> made = KvCache::create(options);
  if (!made.ok()) return made.status();
  Filled filled{std::move(*made), {}};
  for (std::int64_t b = 0; b < in.k.shape[0]; ++b) {
    const Result<std::int64_t> id = filled.cache.add_sequence();
    if (!id.ok()) return id.status();
    filled.sequences.push_back(*id);
  }
  if (filled.sequences.empty()) return usage_error("k: the batch is empty");
  KvAppendTensors t;
  t.k = in.k.view();
  t.v = in.v.view();
  t.importance = importance;
  if (Status s = filled.cache.append(0, filled.sequences, t, Layout::bhsd); !s.ok()) return s;
  return filled;
}

/// Queries [begin, begin + count) of a (B, H, S, D) tensor.
TensorView slice(TensorView view, std::int64_t begin, std::int64_t count) {
  const std::int64_t bytes = begin * view.stride[2] * info(view.format).bits / 8;
  view.data = static_cast<std::byte*>(view.data) + bytes;
  view.shape[2] = count;
  return view;
}

/// Decodes all queries, eight at a time, every one seeing every key; `each` takes the mass of each
/// step if it is asked for.
Status decode_all(const Filled& filled, const io::Array& q, const io::Array& out, bool debias,
                  io::Array* mass = nullptr, const std::function<void()>& each = {}) {
  for (std::int64_t at = 0; at < q.shape[2]; at += 8) {
    const std::int64_t count = std::min<std::int64_t>(8, q.shape[2] - at);
    KvDecodeTensors t;
    t.q = slice(q.view(), at, count);
    t.out = slice(out.view(), at, count);
    if (mass) t.mass = mass->view();
    KvDecodeOptions options;
    options.layout = Layout::bhsd;
    options.causal = false;
    options.debias = debias;
    if (Status s = decode(filled.cache, 0, filled.sequences, t, options); !s.ok()) return s;
    if (each) each();
  }
  return {};
}

/// Root mean square over probe queries and the heads of a group of the mass on each block, from a
/// cache of eight bits.
Result<io::Array> probe_importance(const KvCacheOptions& options, const Inputs& in) {
  KvCacheOptions eight = options;
  eight.tiers = {{8, 8}};
  eight.average_bits = 0;
  eight.budget_from = 0;
  Result<Filled> filled = fill(eight, in, {});
  if (!filled.ok()) return filled.status();
  const std::int64_t batch = in.k.shape[0], heads = in.probe.shape[1], kv = options.heads_kv;
  const std::int64_t blocks = (in.k.shape[2] + 15) / 16, group = heads / kv;
  io::Array mass = io::zeros(Format::f32, {batch, heads, blocks});
  io::Array out = io::zeros(Format::f32, {batch, heads, in.probe.shape[2], options.dv});
  io::Array weight = io::zeros(Format::f32, {batch, kv, blocks});
  auto* w = reinterpret_cast<float*>(weight.bytes.data());
  const auto* m = reinterpret_cast<const float*>(mass.bytes.data());
  std::int64_t steps = 0;
  Status s = decode_all(*filled, in.probe, out, false, &mass, [&] {
    ++steps;
    for (std::int64_t i = 0; i < batch * heads * blocks; ++i) {
      const std::int64_t row = i / blocks;
      const std::int64_t to = (row / heads * kv + row % heads / group) * blocks + i % blocks;
      w[to] += m[i] * m[i] / static_cast<float>(group);
    }
  });
  if (!s.ok()) return s;
  for (std::int64_t i = 0; i < weight.count(); ++i) {
    w[i] = std::sqrt(w[i] / static_cast<float>(steps));
  }
  return weight;
}

struct Losses {
  double k = 0, v = 0;  ///< relative RMS errors of what the cache reads as
  ErrorMetrics output;  ///< of attention, with queries
};

Result<Losses> losses_of(const Filled& filled, const Inputs& in, bool debias) {
  Losses losses;
  double error[2] = {}, norm[2] = {};
  const std::int64_t heads = in.k.shape[1], tokens = in.k.shape[2];
  for (std::size_t b = 0; b < filled.sequences.size(); ++b) {
    io::Array k = io::zeros(Format::f32, {heads, tokens, in.k.shape[3]});
    io::Array v = io::zeros(Format::f32, {heads, tokens, in.v.shape[3]});
    Status s = filled.cache.read(filled.sequences[b], 0, k.view(), v.view(), {});
    if (!s.ok()) return s;
    for (const auto& [part, own, given] : {std::tuple{0, &k, &in.k}, std::tuple{1, &v, &in.v}}) {
      const std::int64_t count = own->count();
      for (std::int64_t i = 0; i < count; ++i) {
        const double want = io::get(*given, static_cast<std::int64_t>(b) * count + i);
        const double e = static_cast<double>(io::get(*own, i)) - want;
        error[part] += e * e;
        norm[part] += want * want;
      }
    }
  }
  losses.k = error[0] == 0 ? 0 : std::sqrt(error[0] / norm[0]);
  losses.v = error[1] == 0 ? 0 : std::sqrt(error[1] / norm[1]);
  if (in.q.format == Format::none) return losses;
  const std::int64_t batch = in.q.shape[0], heads_q = in.q.shape[1], queries = in.q.shape[2];
  io::Array out = io::zeros(Format::f32, {batch, heads_q, queries, in.v.shape[3]});
  if (Status s = decode_all(filled, in.q, out, debias); !s.ok()) return s;
  AttentionTensors t;
  t.q = in.q.view();
  t.k = in.k.view();
  t.v = in.v.view();
  t.out = out.view();
  AttentionOptions options;
  options.layout = Layout::bhsd;
  std::vector<double> truth(static_cast<std::size_t>(out.count()));
  if (Status s = reference_attention(t, options, truth); !s.ok()) return s;
  losses.output = compare({reinterpret_cast<const float*>(out.bytes.data()), truth.size()}, truth,
                          in.v.shape[3]);
  return losses;
}

std::string tier_name(const KvTier& tier) { return fmt::format("{}/{}", tier.k_bits, tier.v_bits); }

/// Tokens by tier, all sequences and heads; the first entry is the window.
struct Histogram {
  std::vector<std::string> names{"16"};
  std::vector<std::int64_t> tokens{0};
  std::int64_t bytes = 0, allowed = 0, elements = 0;
  std::int64_t balanced_channels = 0, shifted_heads = 0;

  static Result<Histogram> of(const Filled& filled) {
    Histogram h;
    const KvCacheOptions& o = filled.cache.options();
    for (const KvTier& tier : o.tiers) h.names.push_back(tier_name(tier));
    h.tokens.resize(h.names.size());
    for (const std::int64_t id : filled.sequences) {
      const Result<KvUsage> u = filled.cache.usage(id, 0);
      if (!u.ok()) return u.status();
      h.tokens[0] += u->window_tokens;
      for (std::size_t t = 0; t < u->tier_tokens.size(); ++t) h.tokens[t + 1] += u->tier_tokens[t];
      h.bytes += u->bytes;
      h.allowed += u->allowed_bytes;
      h.balanced_channels += u->balanced_channels;
      h.shifted_heads += u->shifted_heads;
      h.elements += u->length * o.heads_kv * (o.d + o.dv);
    }
    return h;
  }
  double average_bits() const {
    return 8.0 * static_cast<double>(bytes) / static_cast<double>(elements);
  }
};

void report(const KvFlags& flags, const Filled& filled, const Histogram& h, const Losses& losses) {
  const KvBytes b = filled.cache.bytes();
  const bool output = !flags.q.empty();
  std::int64_t all = 0;
  for (const std::int64_t n : h.tokens) all += n;
  if (flags.json) {
    Json tiers = Json::array();
    for (std::size_t t = 0; t < h.names.size(); ++t) {
      tiers.push_back({{"bits", h.names[t]}, {"tokens", h.tokens[t]}});
    }
    Json json{{"tiers", tiers},
              {"average_bits", h.average_bits()},
              {"bytes", h.bytes},
              {"allowed_bytes", h.allowed},
              {"balanced_channels", h.balanced_channels},
              {"shifted_heads", h.shifted_heads},
              {"allocated",
               {{"codes", b.codes},
                {"scales", b.scales},
                {"window", b.window},
                {"tables", b.tables},
                {"means", b.means},
                {"spare", b.spare},
                {"total", b.total}}},
              {"k_relative_rms_error", losses.k},
              {"v_relative_rms_error", losses.v}};
    if (output) {
      json["nrmse"] = losses.output.nrmse;
      json["worst_row_cosine"] = losses.output.worst_row_cosine;
      json["nan_rows"] = losses.output.nan_rows;
      json["reference_nan_rows"] = losses.output.nan_ref_rows;
    }
    print_json(json);
    return;
  }
  Table table({"K/V bits", "tokens x heads", "share"});
  for (std::size_t t = 0; t < h.names.size(); ++t) {
    const double share = 100.0 * static_cast<double>(h.tokens[t]) / static_cast<double>(all);
    table.add({h.names[t], std::to_string(h.tokens[t]), fixed(share, 1) + " %"});
  }
  print(table.text());
  print(fmt::format(
      "\naverage bits  {} ({} bytes; codes {}, scales {}, window {}, tables {}, "
      "means {})\n",
      fixed(h.average_bits(), 3), h.bytes, b.codes, b.scales, b.window, b.tables, b.means));
  print(fmt::format("allocated     {} bytes\n", b.total));
  if (h.balanced_channels > 0 || h.shifted_heads > 0) {
    print(fmt::format("chosen        {} channels of K balanced, V's mean taken off in {} heads\n",
                      h.balanced_channels, h.shifted_heads));
  }
  print(fmt::format("error         K {}  V {} (relative RMS)\n", scientific(losses.k),
                    scientific(losses.v)));
  if (output) {
    print(fmt::format("attention     NRMSE {}  worst row's cosine {}  NaN rows {}\n",
                      scientific(losses.output.nrmse), fixed(losses.output.worst_row_cosine, 5),
                      losses.output.nan_rows));
  }
}

Status run_kv(const KvFlags& flags) {
  const Result<Inputs> in = load_inputs(flags);
  if (!in.ok()) return in.status();
  const Result<KvCacheOptions> options = options_of(flags, *in);
  if (!options.ok()) return options.status();
  if (in->k.shape[2] == 0) return usage_error("k: there are no tokens");
  io::Array importance;
  if (!flags.probe.empty()) {
    Result<io::Array> probed = probe_importance(*options, *in);
    if (!probed.ok()) return Status(probed.status().code(), "probe: " + probed.status().message());
    importance = std::move(*probed);
  }
  const Result<Filled> filled =
      fill(*options, *in, flags.probe.empty() ? TensorView{} : importance.view());
  if (!filled.ok()) return filled.status();
  const Result<Histogram> histogram = Histogram::of(*filled);
  if (!histogram.ok()) return histogram.status();
  const Result<Losses> losses = losses_of(*filled, *in, flags.debias);
  if (!losses.ok()) return losses.status();
  report(flags, *filled, *histogram, *losses);
  const ErrorMetrics& m = losses->output;
  if (m.nan_rows + m.nan_ref_rows > 0) {
    warn_of_nan(fmt::format("attention: {} of {} output rows hold NaN or Inf, {} of float64's",
                            m.nan_rows, m.rows, m.nan_ref_rows));
  }
  if (!std::isfinite(losses->k) || !std::isfinite(losses->v)) {
    warn_of_nan("error: K or V, or what the cache reads as, holds NaN or Inf");
  }
  return {};
}

}  // namespace

void add_kv(CLI::App& program, Action& chosen) {
  add_command<KvFlags>(program, chosen, "kv", "a KV cache of given keys and values: tiers, errors",
                       run_kv);
}

}  // namespace qattn::cli
