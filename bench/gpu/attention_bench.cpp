// Compiled by nvcc for GPUs, and by the host compiler for the emulator.
#include "gpu/attention_bench.hpp"

#include <charconv>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "kernels/attention/gpu.hpp"
#include "kernels/attention/schedule/split_kv.hpp"

using namespace qattn;

struct BenchHandle {
  Problem problem;
  std::shared_ptr<detail::PlanData> plan;
  std::string kernel;
  std::optional<kernels::CodesLeft> codes;
};

static std::string error;
static BenchStatic statics{};

/// Bits that one element of an operand takes where the attention step reads it.
static std::int64_t bits_read(Format of_recipe, const TensorView& given) {
  return info(of_recipe == Format::none ? given.format : of_recipe).bits;
}

static bool is_code(Format f) {
  return f != Format::none && f != Format::f16 && f != Format::bf16 && f != Format::f32;
}

static int failed(const Status& status) {
  error = status.message();
  return 1;
}

/// What stands behind a recipe's name.
struct Asked {
  std::optional<kernels::CodesLeft> codes;
  kernels::SplitKvOverride split_kv;
  bool smooth_k = true, smooth_q = false;
  bool scales = false, mean = false;  ///< static
};

/// Takes what is asked for off the name.
static Status take_asked(std::string_view& name, Asked& asked) {
  for (std::size_t at; (at = name.rfind('+')) != name.npos; name = name.substr(0, at)) {
    const std::string_view word = name.substr(at + 1);
    int* number = nullptr;
    if (word == "q" || word == "no_q" || word == "beside") {
      using enum kernels::CodesLeft;
      asked.codes = word == "q" ? queries : word == "beside" ? all : none;
      continue;
    }
    if (word == "no_smooth_k") {
      asked.smooth_k = false;
      continue;
    }
    if (word == "smooth_q") {
      asked.smooth_q = true;
      continue;
    }
    if (word == "static" || word == "static_mean") {
      asked.scales = true, asked.mean = word == "static_mean";
      continue;
    }
    if (word.starts_with("splits=")) number = &asked.split_kv.splits;
    if (word.starts_with("pack=")) number = &asked.split_kv.pack_gqa;
    if (word.starts_with("consumers=")) number = &asked.split_kv.consumers;
    if (word.starts_with("shared_p=")) number = &asked.split_kv.p_in_smem;
    if (word.starts_with("last_splits=")) number = &asked.split_kv.last_splits;
    const char *begin = word.data() + word.find('=') + 1, *end = word.data() + word.size();
    int value = 0;
    const std::from_chars_result read = std::from_chars(begin, end, value);
    const int least = number == &asked.split_kv.p_in_smem ? 0 : 1;
    const bool good = number != nullptr && *number < least && read.ec == std::errc() &&
                      read.ptr == end && value >= least && value <= kernels::most_splits;
    if (good) *number = value;
    if (!good) {
      return Status(Code::invalid_argument, "+" + std::string(word) + " behind a recipe's name");
    }
  }
  return {};
}

/// Puts bench_static()'s into the call: a scale a head, and of s8 V the same for each token.
static void take_static(const BenchShape& s, bool mean, AttentionTensors& t, Recipe& r) {
  const auto view = [](void* data, std::initializer_list<std::int64_t> shape) {
    TensorView x = TensorView::dense(data, Format::f32, shape);
    x.device = {DeviceType::cuda, 0};
    return x;
  };
  t.q_scale = view(statics.q_scale, {s.batch, s.heads_q});
  t.k_scale = view(statics.k_scale, {s.batch, s.heads_kv});
  r.q_scale.granularity = r.k_scale.granularity = Granularity::per_head;
  if (is_code(r.v)) {
    t.v_scale = view(statics.v_scale, {s.batch, s.heads_kv, s.tokens_k});
    t.v_scale.stride = {s.heads_kv, 1, 0};
    r.v_scale.granularity = Granularity::per_token;
  }
  if (mean) t.k_mean = view(statics.k_mean, {s.batch, s.heads_kv, s.d});
}

/// Empty, or what the plan does not do of what was asked.
static std::string missed(const Asked& asked, kernels::GpuPlan& plan, const Problem& problem) {
  const auto says = [&](const char* what, int n, int nothing = 0) {
    const std::string line = std::string("\n") + what + std::to_string(n) + "\n";
    return n == nothing || ("\n" + plan.text).find(line) != std::string::npos;
  };
  if (asked.codes == kernels::CodesLeft::none && plan.can_make == nullptr) {
    return "never makes codes of Q";
  }
  if (asked.codes && kernels::codes_left(plan, problem) != *asked.codes) {
    return asked.codes == kernels::CodesLeft::all ? "makes no codes beside attention for this call"
                                                  : "makes no codes of Q for this call";
  }
  if (!says("splits: ", asked.split_kv.splits)) return "takes other splits";
  if (!says("pack_gqa: ", asked.split_kv.pack_gqa)) return "packs other heads";
  if (!says("consumers: ", asked.split_kv.consumers)) return "has other consumers";
  const int last = asked.split_kv.last_splits;
  if (last > 1 && !says("last_splits: ", last)) return "splits no last works so";
  if (!says("shared_p: ", asked.split_kv.p_in_smem, -1)) return "has P in the other place";
  return {};
}

#define BENCH_EXPORT __attribute__((visibility("default")))

extern "C" {

BENCH_EXPORT const char* bench_error() { return error.c_str(); }

BENCH_EXPORT BenchHandle* bench_create(const char* recipe, const BenchShape* s, void* q, void* k,
                                       void* v, void* out) {
  const Format f = s->f16 ? Format::f16 : Format::bf16;
  AttentionTensors t;
  t.q = TensorView::dense(q, f, {s->batch, s->tokens_q, s->heads_q, s->d});
  t.k = TensorView::dense(k, f, {s->batch, s->tokens_k, s->heads_kv, s->d});
  t.v = TensorView::dense(v, f, {s->batch, s->tokens_k, s->heads_kv, s->dv});
  t.out = TensorView::dense(out, f, {s->batch, s->tokens_q, s->heads_q, s->dv});
  for (TensorView* x : {&t.q, &t.k, &t.v, &t.out}) x->device = {DeviceType::cuda, 0};
  AttentionOptions o;
  std::string_view name = recipe;
  Asked asked;
  if (const Status x = take_asked(name, asked); !x.ok()) return failed(x), nullptr;
  const Result<Recipe> named = recipe_named(name);
  if (!named.ok()) {
    error = named.status().message();
    return nullptr;
  }
  o.recipe = *named;
  if (!asked.smooth_k) o.recipe.smooth_k = Toggle::off;
  if (asked.smooth_q) o.recipe.smooth_q = Toggle::on;
  if (asked.scales) take_static(*s, asked.mean, t, o.recipe);
  o.causal = s->causal != 0;
  Result<Problem> problem = Problem::make(t, o);
  if (!problem.ok()) {
    error = problem.status().message();
    return nullptr;
  }
  error.clear();
  for (const detail::Kernel& kernel : kernels::gpu_attention_kernels()) {
    const Status status = kernel.supports(*problem);
    if (status.ok()) {
      kernels::codes_left_override() = asked.codes;
      kernels::split_kv_override() = asked.split_kv;
      auto plan = kernel.tune(*problem);
      kernels::split_kv_override() = {};
      error = missed(asked, static_cast<kernels::GpuPlan&>(*plan), *problem);
      kernels::codes_left_override() = {};
      if (!error.empty()) {
        error = std::string(kernel.name) + ": " + error;
        return nullptr;
      }
      return new BenchHandle{*problem, std::move(plan), std::string(kernel.name), asked.codes};
    }
    error += (error.empty() ? "" : "; ") + std::string(kernel.name) + ": " + status.message();
  }
  return nullptr;
}

BENCH_EXPORT void bench_static(const BenchStatic* scales) { statics = *scales; }

BENCH_EXPORT const char* bench_kernel(const BenchHandle* h) { return h->kernel.c_str(); }

BENCH_EXPORT const char* bench_plan(const BenchHandle* h) { return h->plan->text.c_str(); }

BENCH_EXPORT std::int64_t bench_workspace(const BenchHandle* h) {
  return static_cast<std::int64_t>(h->plan->workspace);
}

BENCH_EXPORT int bench_quantises(const BenchHandle* h) {
  return is_code(h->plan->recipe.qk) || is_code(h->plan->recipe.v);
}

BENCH_EXPORT std::int64_t bench_kv_bytes(const BenchHandle* h) {
  const Problem& p = h->problem;
  const Recipe& r = h->plan->recipe;
  return p.batch * p.max_k * p.heads_kv *
         (p.d * bits_read(r.qk, p.tensors.k) + p.dv * bits_read(r.v, p.tensors.v)) / 8;
}

BENCH_EXPORT std::int64_t bench_q_bytes(const BenchHandle* h) {
  const Problem& p = h->problem;
  return p.batch * p.max_q * p.heads_q * p.d * bits_read(h->plan->recipe.qk, p.tensors.q) / 8;
}

BENCH_EXPORT int bench_run(BenchHandle* h, int step, void* workspace, void* stream) {
  Status s(Code::invalid_argument, "no such step");
  if (step == 0) {
    kernels::codes_left_override() = h->codes;
    s = kernels::run_steps(*h->plan, h->problem, workspace, stream);
  } else if (step == 1) {
    s = kernels::quantize_operands(*h->plan, h->problem, workspace, stream);
  } else if (step == 2) {
    s = kernels::attend(*h->plan, h->problem, workspace, stream);
  }
  return s.ok() ? 0 : failed(s);
}

BENCH_EXPORT void bench_destroy(BenchHandle* h) { delete h; }
}
