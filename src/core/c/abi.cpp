// The C interface: translation only. Every entry catches what could be thrown by an allocation.
#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "core/c/translate.hpp"

struct qattn_plan {
  qattn::Plan plan;
  std::string text;
};

using namespace qattn;  // a translation unit of nothing but translation
using namespace qattn::c;

namespace {

#define QATTN_FORMAT(id, name, bits, group, scale) \
  static_assert(static_cast<int>(Format::id) == static_cast<int>(QATTN_FORMAT_##id));
#include "qattn/formats.def"
#undef QATTN_FORMAT
static_assert(static_cast<int>(Granularity::group) == QATTN_GROUP);
static_assert(static_cast<int>(Toggle::on) == QATTN_TOGGLE_ON);
static_assert(static_cast<int>(Role::v) == QATTN_ROLE_V);
static_assert(max_rank == QATTN_MAX_RANK);

qattn_tensor tensor(const TensorView& v) {
  qattn_tensor t{};
  t.data = v.data;
  t.format = static_cast<int32_t>(v.format);
  t.rank = v.rank;
  std::copy(v.shape.begin(), v.shape.end(), t.shape);
  std::copy(v.stride.begin(), v.stride.end(), t.stride);
  t.device_type = static_cast<int32_t>(v.device.type);
  t.device_index = v.device.index;
  return t;
}

Scaling scaling(const qattn_scaling& s) {
  return {static_cast<Granularity>(s.granularity), s.block, s.warp};
}

/// A call in C++ terms. Not copied: the options point at the functions that it holds.
struct AttentionCall {
  AttentionTensors tensors;
  AttentionOptions options;
  qattn_score_function score = nullptr;
  qattn_mask_function mask = nullptr;
  const void* score_context = nullptr;
  const void* mask_context = nullptr;

  AttentionCall() = default;
  AttentionCall(const AttentionCall&) = delete;
  AttentionCall& operator=(const AttentionCall&) = delete;
};

qattn_score_run c_run(const ScoreRun& r) {
  return {r.batch, r.head, r.query, r.key, r.count, r.queries, r.keys};
}

void read_functions(const qattn_attention_options& o, AttentionCall& call) {
  call.score = o.score_function;
  call.mask = o.mask_function;
  call.score_context = o.score_context;
  call.mask_context = o.mask_context;
  if (call.score) {
    call.options.score_function = {[](const void* context, const ScoreRun& run, float* scores) {
                                     const auto& c = *static_cast<const AttentionCall*>(context);
                                     const qattn_score_run r = c_run(run);
                                     c.score(c.score_context, &r, scores);
                                   },
                                   &call};
  }
  if (call.mask) {
    call.options.mask_function = {
        [](const void* context, const ScoreRun& run, std::uint8_t* visible) {
          const auto& c = *static_cast<const AttentionCall*>(context);
          const qattn_score_run r = c_run(run);
          c.mask(c.mask_context, &r, visible);
        },
        &call};
  }
}

Status read_scales_for(const qattn_scales_for& given, std::optional<Recipe>& to) {
  if (given.recipe == nullptr) {
    if (given.smooth_k | given.smooth_q | given.smooth_v | given.rotate) {
      return invalid("scales_for: has toggles, and its recipe is NULL");
    }
    return {};
  }
  Result<Recipe> recipe = recipe_named(given.recipe);
  if (!recipe.ok()) return invalid("scales_for: " + recipe.status().message());
  recipe->smooth_k = static_cast<Toggle>(given.smooth_k);
  recipe->smooth_q = static_cast<Toggle>(given.smooth_q);
  recipe->smooth_v = static_cast<Toggle>(given.smooth_v);
  recipe->rotate = static_cast<Toggle>(given.rotate);
  to = *recipe;
  return {};
}

Status read_call(const qattn_attention_tensors* given, const qattn_attention_options* asked,
                 AttentionCall& call) {
  qattn_attention_tensors t;
  qattn_attention_options o;
  qattn_attention_tensors_init(&t);
  qattn_attention_options_init(&o);
  if (Status s = read_struct("tensors", given, t); !s.ok()) return s;
  if (Status s = read_struct("options", asked, o); !s.ok()) return s;
  static_assert(sizeof t ==
                sizeof(std::size_t) + std::size(all_attention_tensors) * sizeof(qattn_tensor));
#define QATTN_TENSOR(name, output) call.tensors.name = view(t.name);
#include "qattn/attention_tensors.def"
#undef QATTN_TENSOR
  Result<Recipe> recipe = recipe_named(o.recipe ? o.recipe : "auto");
  if (!recipe.ok()) return recipe.status();
  if (Status s = read_flag("causal", o.causal); !s.ok()) return s;
  if (Status s = read_flag("has_softmax_scale", o.has_softmax_scale); !s.ok()) return s;
  if (Status s = read_flag("validate", o.validate); !s.ok()) return s;
  call.options.recipe = *recipe;
  call.options.recipe.q_scale = scaling(o.q_scaling);
  call.options.recipe.k_scale = scaling(o.k_scaling);
  call.options.recipe.v_scale = scaling(o.v_scaling);
  call.options.recipe.smooth_k = static_cast<Toggle>(o.smooth_k);
  call.options.recipe.smooth_q = static_cast<Toggle>(o.smooth_q);
  call.options.recipe.smooth_v = static_cast<Toggle>(o.smooth_v);
  call.options.recipe.rotate = static_cast<Toggle>(o.rotate);
  call.options.recipe.balance_k = static_cast<Toggle>(o.balance_k);
  call.options.layout = static_cast<Layout>(o.layout);
  call.options.causal = o.causal != 0;
  if (o.has_softmax_scale) call.options.softmax_scale = o.softmax_scale;
  call.options.window_left = o.window_left;
  call.options.window_right = o.window_right;
  call.options.softcap = o.softcap;
  call.options.threads = o.threads;
  call.options.block_mask_q = o.block_mask_q;
  call.options.block_mask_k = o.block_mask_k;
  call.options.validate = o.validate != 0;
  read_functions(o, call);
  return read_scales_for(o.scales_for, call.options.scales_for);
}

Status read_quantize(const qattn_quantize_tensors* given, const qattn_quantize_options* asked,
                     QuantizeTensors& tensors, QuantizeOptions& options) {
  qattn_quantize_tensors t;
  qattn_quantize_options o;
  qattn_quantize_tensors_init(&t);
  qattn_quantize_options_init(&o);
  if (Status s = read_struct("tensors", given, t); !s.ok()) return s;
  if (Status s = read_struct("options", asked, o); !s.ok()) return s;
  if (Status s = read_flag("smooth", o.smooth); !s.ok()) return s;
  if (Status s = read_flag("rotate", o.rotate); !s.ok()) return s;
  tensors = {view(t.x),    view(t.codes),        view(t.scale),     view(t.global),
             view(t.mean), view(t.static_scale), view(t.cu_seqlens)};
  options.format = static_cast<Format>(o.format);
  options.role = static_cast<Role>(o.role);
  options.layout = static_cast<Layout>(o.layout);
  options.scaling = scaling(o.scaling);
  options.smooth = o.smooth != 0;
  options.rotate = o.rotate != 0;
  options.threads = o.threads;
  return read_scales_for(o.scales_for, options.scales_for);
}

}  // namespace

const char* qattn_version(void) { return qattn::version().data(); }  // a literal, ended by 0

thread_local std::string qattn::c::last_error;

const char* qattn_last_error(void) { return last_error.c_str(); }

qattn_tensor qattn_tensor_dense(void* data, int32_t format, int32_t rank, const int64_t* shape) {
  qattn_tensor t{};
  if (rank < 0 || rank > QATTN_MAX_RANK || (rank > 0 && shape == nullptr)) return t;
  t.data = data;
  t.format = format;
  t.rank = rank;
  t.device_type = QATTN_DEVICE_CPU;
  int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = step;
    if (__builtin_mul_overflow(step, shape[i], &step)) return qattn_tensor{};
  }
  return t;
}

void qattn_attention_tensors_defaults(qattn_attention_tensors* t, size_t size) { fill(t, size); }
void qattn_quantize_tensors_defaults(qattn_quantize_tensors* t, size_t size) { fill(t, size); }
void qattn_attention_options_defaults(qattn_attention_options* given, size_t size) {
  qattn_attention_options o = {};
  o.window_left = o.window_right = -1;
  fill(given, size, o);
}
void qattn_quantize_options_defaults(qattn_quantize_options* given, size_t size) {
  qattn_quantize_options o = {};
  o.format = QATTN_FORMAT_s8;
  o.role = QATTN_ROLE_K;
  fill(given, size, o);
}

qattn_status qattn_attention(const qattn_attention_tensors* tensors,
                             const qattn_attention_options* options) {
  return qattn_attention_on(tensors, options, nullptr);
}

qattn_status qattn_attention_on(const qattn_attention_tensors* tensors,
                                const qattn_attention_options* options, void* stream) {
  return guarded([&]() -> Status {
    AttentionCall call;
    if (Status s = read_call(tensors, options, call); !s.ok()) return s;
    return attention(call.tensors, call.options, stream);
  });
}

qattn_status qattn_device_errors(int32_t device_type, int32_t device_index) {
  return guarded([&]() -> Status {
    return device_errors({static_cast<DeviceType>(device_type), device_index});
  });
}

qattn_status qattn_plan_create(const qattn_attention_tensors* tensors,
                               const qattn_attention_options* options, qattn_plan** out) {
  return guarded([&]() -> Status {
    if (out == nullptr) return invalid("plan: is NULL");
    AttentionCall call;
    if (Status s = read_call(tensors, options, call); !s.ok()) return s;
    Result<Plan> made = plan(call.tensors, call.options);
    if (!made.ok()) return made.status();
    *out = new qattn_plan{*made, made->to_string()};
    return {};
  });
}

void qattn_plan_destroy(qattn_plan* plan) { delete plan; }
size_t qattn_plan_workspace_bytes(const qattn_plan* plan) {
  return plan ? plan->plan.workspace_bytes() : 0;
}
uint64_t qattn_plan_hash(const qattn_plan* plan) { return plan ? plan->plan.hash() : 0; }
const char* qattn_plan_text(const qattn_plan* plan) { return plan ? plan->text.c_str() : ""; }

qattn_status qattn_run(const qattn_plan* plan, const qattn_attention_tensors* tensors,
                       const qattn_attention_options* options, void* workspace,
                       size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan: is NULL");
    AttentionCall call;
    if (Status s = read_call(tensors, options, call); !s.ok()) return s;
    return run(plan->plan, call.tensors, call.options, workspace, workspace_bytes, stream);
  });
}

qattn_status qattn_explain(const qattn_attention_tensors* tensors,
                           const qattn_attention_options* options, char* text, size_t capacity,
                           size_t* needed) {
  return guarded([&]() -> Status {
    if (text == nullptr && capacity > 0) return invalid("text: is NULL");
    AttentionCall call;
    if (Status s = read_call(tensors, options, call); !s.ok()) return s;
    const std::string all = explain(call.tensors, call.options);
    if (needed) *needed = all.size() + 1;
    if (capacity > 0) {
      const size_t n = std::min(capacity - 1, all.size());
      std::memcpy(text, all.data(), n);
      text[n] = '\0';
    }
    return {};
  });
}

qattn_status qattn_quantize_shapes(qattn_quantize_tensors* tensors,
                                   const qattn_quantize_options* options) {
  return qattn_quantize_shapes_on(tensors, options, nullptr);
}

qattn_status qattn_quantize_shapes_on(qattn_quantize_tensors* tensors,
                                      const qattn_quantize_options* options, void* stream) {
  return guarded([&]() -> Status {
    QuantizeTensors t;
    QuantizeOptions o;
    if (Status s = read_quantize(tensors, options, t, o); !s.ok()) return s;
    if (tensors->struct_size != sizeof *tensors) return invalid("tensors: older struct version");
    Result<QuantizeShapes> shapes = quantize_shapes(t.x, o, t.cu_seqlens, stream);
    if (!shapes.ok()) return shapes.status();
    tensors->codes = tensor(shapes->codes);
    tensors->scale = tensor(shapes->scale);
    tensors->global = tensor(shapes->global);
    tensors->mean = tensor(shapes->mean);
    return {};
  });
}

qattn_status qattn_quantize(const qattn_quantize_tensors* tensors,
                            const qattn_quantize_options* options, int64_t* saturated) {
  return qattn_quantize_on(tensors, options, nullptr, saturated);
}

qattn_status qattn_quantize_on(const qattn_quantize_tensors* tensors,
                               const qattn_quantize_options* options, void* stream,
                               int64_t* saturated) {
  return guarded([&]() -> Status {
    QuantizeTensors t;
    QuantizeOptions o;
    if (Status s = read_quantize(tensors, options, t, o); !s.ok()) return s;
    Result<QuantizeReport> report = quantize(t, o, stream);
    if (!report.ok()) return report.status();
    if (saturated) *saturated = report->saturated;
    return {};
  });
}

qattn_status qattn_dequantize(const qattn_quantize_tensors* tensors,
                              const qattn_quantize_options* options) {
  return guarded([&]() -> Status {
    QuantizeTensors t;
    QuantizeOptions o;
    if (Status s = read_quantize(tensors, options, t, o); !s.ok()) return s;
    return dequantize(t, o);
  });
}
