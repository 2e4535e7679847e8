// Every kernel of libqattn_cuda once at small sizes, without Python: against the semantic model on
// the same codes, NaN and Inf by place, codes bit for bit, bad indices. Also what compute-sanitizer
// is run on (`make gpu-sanitize`):
//   sanitize_kernels [--exact] [--run-only] [--names] [--every N [--from K]] [--only SUBSTRING]
//                    [--json FILE]
//     --exact     allocations without guard bytes, workspaces uninitialised
//     --run-only  no comparison with the model, which takes most of the time
//     --names     each case before it runs, between what tools say
//     --every     one case of N, for tools that are slow: case K, K + N and so on
//     --json      counts and the largest deviations from the model
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>

#include "conformance/feature.hpp"
#include "gpu/device_call.hpp"
#include "gpu/device_table.hpp"
#include "qattn/quantize.hpp"
#include "support/measure.hpp"

namespace qattn::test {
namespace {

constexpr double quiet_nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// A recipe and the format of its inputs: each has kernels of its own.
struct Kind {
  const char* recipe;
  Format input;
  std::string name() const { return recipe + (" " + std::string(info(input).name)); }
};
constexpr Kind kinds[] = {{"f16", Format::f16},       {"bf16", Format::bf16},
                          {"int8", Format::f16},      {"int8", Format::bf16},
                          {"int8_full", Format::f16}, {"int8_full", Format::bf16},
                          {"int8_fp8", Format::bf16}, {"fp8", Format::f16}};

struct Settings {
  Memory memory = Memory::guarded;
  bool compare = true, names = false;
  int every = 1, from = 0;
  std::string only, json;
};

/// The largest deviations of one kind.
struct Worst {
  double nrmse = 0, row = 0, lse = 0;
};

bool runs_on(const DeviceOutcome& outcome, const std::string& kernel) {
  return outcome.plan.find("kernel: " + kernel + "\n") != std::string::npos;
}

class Check {
 public:
  explicit Check(Settings settings) : settings_(std::move(settings)) {}

  bool wanted(const std::string& name) {
    const bool is = name.find(settings_.only) != std::string::npos &&
                    cases_++ % settings_.every == settings_.from;
    if (is && settings_.names) {
      std::printf("%s\n", name.c_str());
      std::fflush(stdout);
    }
    return is;
  }
  const Settings& settings() const { return settings_; }

  void fail(const std::string& name, const std::string& why) {
    if (++failures_ <= 60) std::printf("FAIL %s: %s\n", name.c_str(), why.c_str());
  }
  /// Runs a call and notes what it used; false where there is nothing to compare.
  bool run(const std::string& name, const Kind& kind, const Call& call, Laid& laid,
           const Recipe& recipe, DeviceOutcome& outcome) {
    outcome = run_on_device(call, laid, recipe, settings_.memory);
    if (outcome.status.code() == Code::unsupported) {
      ++refused_[reason(outcome.status.message())];
      return false;
    }
    ++calls_;
    if (!outcome.status.ok()) return fail(name, outcome.status.message()), false;
    if (!outcome.violation.empty()) fail(name, outcome.violation);
    const bool three = outcome.plan.find("\nconsumers: 3\n") != std::string::npos;
    if (runs_on(outcome, "sm90a_prefill") &&
        three != (name.find(three_consumers) != std::string::npos)) {
      fail(name, three ? "has three consumers" : "has two consumers");
    }
    const bool long_p = outcome.plan.find("\nshared_p: 1\n") != std::string::npos;
    if (runs_on(outcome, "sm90a_16bit_prefill") && !long_p &&
        name.find(long_rows) != std::string::npos) {
      fail(name, "has P in registers");
    }
    const std::size_t at = outcome.plan.find("variant: ");
    if (at != std::string::npos) {
      variants_.insert(std::string(kind.recipe) + " " + std::string(info(kind.input).name) + " " +
                       outcome.plan.substr(at + 9, outcome.plan.find('\n', at) - at - 9) +
                       (three    ? ", three consumers"
                        : long_p ? ", P in shared memory"
                                 : ""));
    }
    return true;
  }
  void matches_model(const std::string& name, const Kind& kind, const Call& call, Format output,
                     const DeviceOutcome& outcome);
  void quantised(bool refused) { ++(refused ? quantise_refused_ : quantised_); }

  int report() const;

 private:
  bool write_json() const;
  /// What the GPU's kernel said, from the list that names every kernel's reason.
  static std::string reason(const std::string& message) {
    const std::size_t at = message.find("sm80_prefill");
    if (at == std::string::npos) return message;
    return message.substr(at, message.find_first_of("\n;", at) - at);
  }

  Settings settings_;
  int cases_ = 0, failures_ = 0, calls_ = 0, quantised_ = 0, quantise_refused_ = 0;
  std::map<std::string, int> refused_;
  std::set<std::string> variants_;
  std::map<std::string, Worst> worst_;
};

void Check::matches_model(const std::string& name, const Kind& kind, const Call& call,
                          Format output, const DeviceOutcome& outcome) {
  ModelOptions options{.recipe = outcome.resolved, .tile_keys = outcome.tile_keys};
  options.lost_mass = lost_mass_of(outcome.plan);
  options.whole_references = has_whole_references(outcome.plan);
  options.splits = outcome.splits, options.tile_rows = outcome.tile_rows;
  const ModelOutput model = model_attention(call, options);
  const std::int64_t spared = spared_rows(outcome.resolved, call.total_rows());
  const Distance d = distance(outcome.out, in_format(model.out, output), call.dim_v, spared);
  const double lse = outcome.lse.empty() ? 0 : lse_distance(outcome.lse, model.lse, spared);
  Worst& worst = worst_[kind.name()];
  worst.nrmse = std::max(worst.nrmse, d.trimmed);
  worst.row = std::max(worst.row, d.worst_row);
  worst.lse = std::max(worst.lse, lse);
  // Scores are added up and 2^x taken in other units than the CPU's, so more P lie on the other
  // side of a rounding boundary: the 16-bit bound serves float32 outputs too. FP8 sums of wgmma
  // keep 13 bits of fraction, of which the model knows nothing (docs/ISA_CONFORMANCE.md).
  const bool narrow = outcome.resolved.v == Format::e4m3 && runs_on(outcome, "sm90a_prefill");
  const double bound = narrow ? 6e-3 : tight_bound(Format::f16), lse_bound = narrow ? 8e-3 : 1e-3;
  char text[160];
  std::snprintf(text, sizeof text, "NRMSE %.2e (%.2e), worst row %lld with %.2e, LSE %.2e", d.nrmse,
                d.trimmed, static_cast<long long>(d.worst_at), d.worst_row, lse);
  if (!(d.trimmed <= bound && d.worst_row <= (narrow ? 0.15 : 0.1) && lse <= lse_bound)) {
    fail(name, text);
  }
}

int Check::report() const {
  for (const auto& [kind, w] : worst_) {
    std::printf("%-16s NRMSE %.2e  worst row %.2e  LSE %.2e\n", kind.c_str(), w.nrmse, w.row,
                w.lse);
  }
  for (const auto& [why, count] : refused_) std::printf("refused %4d: %s\n", count, why.c_str());
  for (const std::string& v : variants_) std::printf("ran %s\n", v.c_str());
  std::printf("%d calls of attention, %d of quantize (%d refused), %zu variants, %d failures\n",
              calls_, quantised_, quantise_refused_, variants_.size(), failures_);
  if (!settings_.json.empty() && !write_json()) return 1;
  return failures_ == 0 ? 0 : 1;
}

bool Check::write_json() const {
  std::FILE* file = std::fopen(settings_.json.c_str(), "w");
  if (file == nullptr) return std::perror(settings_.json.c_str()), false;
  std::fprintf(file,
               "{\"attention\": %d, \"quantize\": %d, \"quantize_refused\": %d, \"variants\": %zu, "
               "\"failures\": %d, \"kinds\": [",
               calls_, quantised_, quantise_refused_, variants_.size(), failures_);
  const char* comma = "";
  for (const auto& [kind, w] : worst_) {
    std::fprintf(file,
                 "%s\n  {\"kind\": \"%s\", \"nrmse\": %.3e, \"worst_row\": %.3e, \"lse\": %.3e}",
                 comma, kind.c_str(), w.nrmse, w.row, w.lse);
    comma = ",";
  }
  std::fprintf(file, "]}\n");
  return std::fclose(file) == 0;
}

// ---- The conformance table ---------------------------------------------------------------------

/// Has this GPU a kernel for the kind? FP8 is refused where mma.sync emulates it.
bool serves(Check& check, const Kind& kind) {
  Feature feature = feature_named("plain");
  feature.how.input = kind.input;
  const Call call = make_call(feature, 1);
  Laid laid = lay_out(call, feature.how);
  DeviceOutcome outcome;
  return check.run(kind.name() + " plain", kind, call, laid, *recipe_named(kind.recipe), outcome);
}

void run_feature(Check& check, const Kind& kind, Feature feature) {
  const std::string name = kind.name() + " " + feature.name;
  Recipe recipe = *recipe_named(kind.recipe);
  if (!check.wanted(name) || !feature.applies(recipe)) return;
  feature.tweak(recipe);
  if (feature.how.input == Format::f32) {
    feature.how.input = kind.input;
  } else if (feature.how.input != kind.input) {
    return;
  }
  if (feature.how.output == Format::none) feature.how.output = kind.input;
  Call call = make_call(feature, 1);
  Laid laid = lay_out(call, feature.how);
  DeviceOutcome outcome;
  if (feature.static_scales) {
    if (!check.run(name, kind, call, laid, recipe, outcome)) return;
    // Given scales change what is automatic.
    recipe = add_static_scales(call, laid, outcome.resolved, 0.6);
  }
  if (!check.run(name, kind, call, laid, recipe, outcome)) return;
  if (check.settings().compare) {
    check.matches_model(name, kind, call, feature.how.output, outcome);
  }
}

// ---- NaN and Inf -------------------------------------------------------------------------------

constexpr std::int64_t bad_b = 1, bad_h = 1, bad_key = 230, bad_query = 160, bad_d = 5;

bool same_bits(const float* a, const float* b, std::int64_t n) {
  return std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(float)) == 0;
}

/// The same but for the rounding of P in 16 bits; false for NaN.
bool same_but_rounded(const float* a, const float* b, std::int64_t n) {
  double error = 0, square = 0;
  for (std::int64_t d = 0; d < n; ++d) {
    const double x = b[d], e = static_cast<double>(a[d]) - x;
    error += e * e, square += x * x;
  }
  return error <= 1e-4 * square;
}

/// Empty, or the first row that is not NaN where it must be or changed where it must not.
std::string check_rows(const Call& call, Operand operand, bool shares, const DeviceOutcome& now,
                       const DeviceOutcome& clean) {
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 0; i < call.sequences[b].room_q; ++i) {
        const bool q = operand == Operand::q;
        const bool place = b == bad_b && (q ? h : h / 2) == bad_h;
        const std::int64_t last = call.options.causal
                                      ? i + call.sequences[b].len_k - call.sequences[b].len_q
                                      : call.sequences[b].len_k;
        const bool depends = place && (q ? i == bad_query : last >= bad_key);
        if (place && !depends && shares) continue;  // a scale or a mean in common
        const std::int64_t row = call.row(b, h, i), at = row * call.dim_v;
        bool good = true;
        for (std::int64_t d = 0; d < call.dim_v && depends; ++d) {
          good = good && std::isnan(now.out[at + d]);
        }
        if (depends && operand != Operand::v) good = good && std::isnan(now.lse[row]);
        if (!depends) {
          // Blocks that meet such a V leave Hopper's kernel for one with other tiles.
          const bool again =
              place && operand == Operand::v && runs_on(clean, "sm90a_16bit_prefill");
          const auto same = again ? same_but_rounded : same_bits;
          good = same(&now.out[at], &clean.out[at], call.dim_v) &&
                 same(&now.lse[row], &clean.lse[row], 1);
        }
        if (good) continue;
        return "sequence " + std::to_string(b) + " head " + std::to_string(h) + " row " +
               std::to_string(i) + (depends ? " should be NaN" : " changed") + ", holds " +
               std::to_string(now.out[at]) + ", LSE " + std::to_string(now.lse[row]);
      }
    }
  }
  return {};
}

void run_bad_values(Check& check, const Kind& kind, std::int64_t dim, bool causal, bool general) {
  const std::string name = kind.name() + " bad values, D " + std::to_string(dim) +
                           (causal ? " causal" : "") + (general ? " softcap" : "");
  if (!check.wanted(name)) return;
  Feature feature;
  feature.dim = dim, feature.dim_v = dim == 192 ? 128 : dim;
  feature.sq = {290, 290}, feature.sk = {333, 333};
  feature.options.causal = causal;
  if (general) feature.options.softcap = 2.0f;
  feature.how.input = kind.input;
  const Recipe recipe = *recipe_named(kind.recipe);
  const Call call = make_call(feature, 5);
  Laid laid = lay_out(call, feature.how);
  DeviceOutcome clean, now;
  if (!check.run(name, kind, call, laid, recipe, clean)) return;
  for (const Operand operand : {Operand::q, Operand::k, Operand::v}) {
    const bool q = operand == Operand::q;
    const std::int64_t token = q ? bad_query : bad_key;
    const Sequence& sequence = call.sequences[bad_b];
    const auto& x = q ? sequence.q : operand == Operand::k ? sequence.k : sequence.v;
    const std::int64_t width = operand == Operand::v ? feature.dim_v : dim;
    const float good = x[(bad_h * (q ? 290 : 333) + token) * width + bad_d];
    Tensor& tensor = q ? laid.q : operand == Operand::k ? laid.k : laid.v;
    for (const double bad : {quiet_nan, infinity, -infinity}) {
      poke(laid, call, operand, bad_b, bad_h, token, bad_d, bad);
      tensor.freeze();
      const std::string what =
          name + ", " + "qkv"[static_cast<int>(operand)] + " is " + std::to_string(bad);
      if (!check.run(what, kind, call, laid, recipe, now)) return check.fail(what, "did not run");
      // K's mean; V's scales per channel or group, which leave bad tokens out.
      const Granularity v = clean.resolved.v_scale.granularity;
      const bool shares = operand == Operand::k
                              ? has_codes(clean.resolved.qk)
                              : operand == Operand::v &&
                                    (v == Granularity::per_channel || v == Granularity::per_thread);
      const std::string why = check_rows(call, operand, shares, now, clean);
      if (!why.empty()) check.fail(what, why);
    }
    poke(laid, call, operand, bad_b, bad_h, token, bad_d, good);
    tensor.freeze();
  }
}

// ---- Bad indices -------------------------------------------------------------------------------

/// Kernels must not follow an index out of a tensor; the device's error word tells of it.
void run_bad_indices(Check& check, const Kind& kind) {
  const Recipe recipe = *recipe_named(kind.recipe);
  for (const std::string which : {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"}) {
    for (const double bad : {1e6, -5.0}) {
      const std::string name = kind.name() + " bad index in " + which + ": " + std::to_string(bad);
      if (!check.wanted(name)) continue;
      Feature feature = feature_named(which == "page_table"  ? "paged_16"
                                      : which == "seqused_k" ? "seqused_k"
                                                             : "varlen");
      feature.how.input = kind.input;
      const Call call = make_call(feature, 7);
      Laid laid = lay_out(call, feature.how);
      Tensor& x = which == "cu_seqlens_q"   ? laid.cu_q
                  : which == "cu_seqlens_k" ? laid.cu_k
                  : which == "seqused_k"    ? laid.used_k
                                            : laid.pages;
      x.set(which == "page_table" ? Index{0, 1} : Index{1}, bad);
      x.freeze();
      const DeviceOutcome outcome = run_on_device(call, laid, recipe, check.settings().memory);
      if (!outcome.status.ok()) {
        check.fail(name, outcome.status.message());
      } else if (outcome.violation.find("out of range") == std::string::npos) {
        check.fail(name, "the error word is " + outcome.violation);
      }
    }
  }
}

// ---- Codes -------------------------------------------------------------------------------------

struct Coded {
  Tensor codes, scale, global, mean;
  QuantizeTensors tensors(const TensorView& x) const {
    return {x, codes.view(), scale.view(), global.view(), mean.view(), {}, {}};
  }
};

/// quantize() on the GPU and on the CPU: every byte.
void run_quantize(Check& check, const QuantizeOptions& options, Format input, std::int64_t dim) {
  const std::string name = "quantize " + std::string(info(options.format).name) + " " +
                           std::string(qattn::name(options.role)) + " " +
                           std::string(qattn::name(options.scaling.granularity)) +
                           (options.smooth ? " smooth" : "") + (options.rotate ? " rotate" : "") +
                           " " + std::string(info(input).name) + " D " + std::to_string(dim);
  if (!check.wanted(name)) return;
  Tensor x(input, {2, 150, 2, dim});
  std::mt19937 random(11);
  std::normal_distribution<double> normal(0.3, 1.0);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t n = 0; n < 150 * 2 * dim; ++n) {
      x.set({b, n / (2 * dim), n / dim % 2, n % dim}, normal(random));
    }
  }
  x.freeze();
  const Result<QuantizeShapes> shapes = quantize_shapes(x.view(), options);
  if (!shapes.ok()) return;  // this granularity is not for this role or format
  Coded cpu, gpu;
  for (Coded* c : {&cpu, &gpu}) {
    c->codes = Tensor(shapes->codes);
    c->scale = Tensor(shapes->scale);
    if (shapes->global.present()) c->global = Tensor(shapes->global);
    if (shapes->mean.present()) c->mean = Tensor(shapes->mean);
  }
  const Result<QuantizeReport> wanted = quantize(cpu.tensors(x.view()), options);
  if (!wanted.ok()) return check.fail(name, wanted.status().message());
  DeviceCopies copies(check.settings().memory);
  QuantizeTensors t;
  t.x = copies.add(x);
  t.codes = copies.add(gpu.codes);
  t.scale = copies.add(gpu.scale);
  t.global = copies.add(gpu.global);
  t.mean = copies.add(gpu.mean);
  const Result<QuantizeReport> report = quantize(t, options);
  check.quantised(!report.ok() && report.status().code() == Code::unsupported);
  if (!report.ok()) {
    if (report.status().code() != Code::unsupported) check.fail(name, report.status().message());
    return;
  }
  need(static_cast<int>(device_errors({DeviceType::cuda, 0}).ok() ? 0 : 1), "quantize");
  copies.fetch();
  if (!x.unchanged()) check.fail(name, "x was written");
  if (cpu.codes.bytes() != gpu.codes.bytes()) check.fail(name, "other codes than the CPU's");
  if (cpu.scale.bytes() != gpu.scale.bytes()) check.fail(name, "other scales than the CPU's");
  if (cpu.global.bytes() != gpu.global.bytes()) check.fail(name, "another second level");
  if (cpu.mean.bytes() != gpu.mean.bytes()) check.fail(name, "other means than the CPU's");
}

void run_quantize_table(Check& check) {
  using enum Granularity;
  const Scaling scalings[] = {{},
                              {per_tensor, 0, 0},
                              {per_head, 0, 0},
                              {per_block, 64, 0},
                              {per_warp, 64, 16},
                              {per_thread, 64, 16},
                              {per_token, 0, 0},
                              {per_channel, 0, 0},
                              {per_block_channel, 64, 0}};
  const Format inputs[] = {Format::bf16, Format::f16, Format::f32};
  const std::int64_t dims[] = {64, 128, 72, 256};
  int n = 0;
  for (const Format format : {Format::s8, Format::e4m3, Format::e4m3fnuz, Format::e5m2,
                              Format::mxfp8, Format::mxfp4, Format::nvfp4}) {
    for (const Role role : {Role::q, Role::k, Role::v}) {
      for (const Scaling& scaling : scalings) {
        for (int flags = 0; flags < 4; ++flags, ++n) {
          QuantizeOptions o;
          o.format = format;
          o.role = role;
          o.scaling = scaling;
          o.smooth = (flags & 1) != 0;
          o.rotate = (flags & 2) != 0;
          run_quantize(check, o, inputs[n % 3], o.rotate ? dims[n % 2] : dims[n % 4]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace qattn::test

int main(int argc, char** argv) {
  using namespace qattn::test;
  Settings settings;
  for (int n = 1; n < argc; ++n) {
    const std::string argument = argv[n];
    if (argument == "--exact") settings.memory = Memory::exact;
    if (argument == "--run-only") settings.compare = false;
    if (argument == "--names") settings.names = true;
    if (argument == "--every" && n + 1 < argc) settings.every = std::atoi(argv[++n]);
    if (argument == "--from" && n + 1 < argc) settings.from = std::atoi(argv[++n]);
    if (argument == "--only" && n + 1 < argc) settings.only = argv[++n];
    if (argument == "--json" && n + 1 < argc) settings.json = argv[++n];
  }
  if (settings.from < 0 || settings.from >= settings.every) {
    std::fprintf(stderr, "--from %d: should be from 0 to below --every\n", settings.from);
    return 2;
  }
  Check check(settings);
  const std::vector<Feature> rows = device_table();
  for (const Kind& kind : kinds) {
    if (!serves(check, kind)) continue;
    for (const Feature& feature : rows) run_feature(check, kind, feature);
    for (const std::int64_t dim : {64, 96, 128, 192, 256}) {
      for (const bool causal : {false, true}) {
        run_bad_values(check, kind, dim, causal, false);
        if (dim <= 128) run_bad_values(check, kind, dim, causal, true);
      }
    }
    run_bad_indices(check, kind);
    std::printf("%s done\n", kind.name().c_str());
    std::fflush(stdout);
  }
  run_quantize_table(check);
  return check.report();
}
