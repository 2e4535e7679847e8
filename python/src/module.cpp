// The extension module: one function a public function of include/qattn, with plain arguments. The
// package python/qattn gives them their Python face. The GIL is released while qattn works.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "convert.hpp"

namespace qattn::python {
namespace {

using nb::literals::operator""_a;
using Doubles = nb::ndarray<double, nb::c_contig, nb::device::cpu>;

std::span<double> span_of(const std::optional<Doubles>& array) {
  if (!array) return {};
  return {array->data(), array->size()};
}

AttentionOptions make_options(const RecipeTuple& recipe, const std::string& layout, bool causal,
                              std::pair<std::int64_t, std::int64_t> window, double softcap,
                              std::optional<double> scale,
                              const std::array<ScalingTuple, 3>& scalings,
                              const std::array<std::optional<bool>, 5>& toggles,
                              std::int64_t threads, bool validate,
                              std::pair<std::int64_t, std::int64_t> block_mask_size,
                              const std::optional<MadeForTuple>& scales_for) {
  AttentionOptions o;
  o.recipe = recipe_from("recipe", recipe, toggles);
  o.recipe.q_scale = scaling_from("q_", scalings[0]);
  o.recipe.k_scale = scaling_from("k_", scalings[1]);
  o.recipe.v_scale = scaling_from("v_", scalings[2]);
  o.layout = layout_from(layout);
  if (scale) o.softmax_scale = static_cast<float>(*scale);
  o.causal = causal;
  o.window_left = window.first;
  o.window_right = window.second;
  o.softcap = static_cast<float>(softcap);
  o.threads = threads_from(threads);
  o.validate = validate;
  o.block_mask_q = block_mask_size.first;
  o.block_mask_k = block_mask_size.second;
  o.scales_for = made_for_from(scales_for);
  return o;
}

/// `allocate`: None, or a function of bytes that gives a torch tensor: the workspace. It is
/// released once everything is enqueued, which is right for an allocator that knows the stream.
void run_attention(const nb::dict& entries, const AttentionOptions& options, std::uintptr_t stream,
                   const nb::object& allocate) {
  Views views;
  const AttentionTensors tensors = attention_tensors(entries, views);
  Status status;
  if (allocate.is_none()) {
    const nb::gil_scoped_release unlocked;
    status = attention(tensors, options, stream_from(stream));
  } else {
    const Result<Plan> planned = plan(tensors, options);
    attention_check(planned.status());
    const Plan& chosen = *planned;
    const std::size_t bytes = chosen.workspace_bytes();
    const nb::object memory = allocate(bytes);
    const auto address = nb::cast<std::uintptr_t>(memory.attr("data_ptr")());
    const nb::gil_scoped_release unlocked;
    status =
        run(chosen, tensors, options, reinterpret_cast<void*>(address), bytes, stream_from(stream));
  }
  attention_check(status);
}

/// Refuses what is wrong with a call, whether or not a kernel here can serve it.
void run_check(const nb::dict& entries, const AttentionOptions& options) {
  Views views;
  const Status status = plan(attention_tensors(entries, views), options).status();
  if (status.code() != Code::unsupported) attention_check(status);
}

std::string run_explain(const nb::dict& entries, const AttentionOptions& options) {
  Views views;
  return attention_text(explain(attention_tensors(entries, views), options));
}

void run_reference(const nb::dict& entries, const AttentionOptions& options, const Doubles& out,
                   const std::optional<Doubles>& lse, const std::vector<std::int64_t>& rows) {
  Views views;
  const AttentionTensors tensors = attention_tensors(entries, views);
  ReferenceOptions reference;
  reference.rows = rows;
  reference.threads = options.threads;
  Status status;
  {
    const nb::gil_scoped_release unlocked;
    status =
        reference_attention(tensors, options, {out.data(), out.size()}, span_of(lse), reference);
  }
  attention_check(status);
}

/// Options of quantize() in one object.
QuantizeOptions make_quantize_options(const std::string& format, const std::string& role,
                                      const std::string& layout, const ScalingTuple& scaling,
                                      bool smooth, bool rotate, std::int64_t threads,
                                      const std::optional<MadeForTuple>& scales_for) {
  QuantizeOptions o;
  o.format = format_from("format", format);
  o.role = role_from(role);
  o.layout = layout_from(layout);
  o.scaling = scaling_from("", scaling);
  o.smooth = smooth;
  o.rotate = rotate;
  o.threads = threads_from(threads);
  o.scales_for = made_for_from(scales_for);
  return o;
}

QuantizeTensors quantize_tensors(const nb::dict& entries, bool decode, Views& views) {
  QuantizeTensors t;
  const struct {
    const char* name;
    TensorView& view;
    bool output;
  } list[] = {{"x", t.x, decode},
              {"codes", t.codes, !decode},
              {"scale", t.scale, !decode},
              {"global", t.global, !decode},
              {"mean", t.mean, !decode},
              {"static_scale", t.static_scale, false},
              {"cu_seqlens", t.cu_seqlens, false}};
  for (const auto& item : list) {
    if (entries.contains(item.name)) {
      item.view = views.add(item.name, entries[item.name], item.output);
    }
  }
  return t;
}

/// {name: (format, shape in elements)} of what quantize() writes.
nb::dict run_quantize_shapes(const nb::dict& entries, const QuantizeOptions& options,
                             std::uintptr_t stream) {
  Views views;
  const QuantizeTensors t = quantize_tensors(entries, false, views);
  const QuantizeShapes shapes =
      check(quantize_shapes(t.x, options, t.cu_seqlens, stream_from(stream)));
  nb::dict result;
  for (const auto& [name, view] :
       {std::pair{"codes", &shapes.codes}, std::pair{"scale", &shapes.scale},
        std::pair{"global", &shapes.global}, std::pair{"mean", &shapes.mean}}) {
    if (!view->present()) continue;
    nb::list extents;
    for (int i = 0; i < view->rank; ++i) extents.append(view->shape[i]);
    result[name] = nb::make_tuple(std::string(info(view->format).name), nb::tuple(extents));
  }
  return result;
}

std::int64_t run_quantize(const nb::dict& entries, const QuantizeOptions& options,
                          std::uintptr_t stream) {
  Views views;
  const QuantizeTensors tensors = quantize_tensors(entries, false, views);
  Result<QuantizeReport> report = Status();
  {
    const nb::gil_scoped_release unlocked;
    report = quantize(tensors, options, stream_from(stream));
  }
  return check(std::move(report)).saturated;
}

void run_dequantize(const nb::dict& entries, const QuantizeOptions& options) {
  Views views;
  const QuantizeTensors tensors = quantize_tensors(entries, true, views);
  Status status;
  {
    const nb::gil_scoped_release unlocked;
    status = dequantize(tensors, options);
  }
  check(std::move(status));
}

std::vector<RecipeTuple> recipe_table() {
  std::vector<RecipeTuple> table;
  for (const Recipe& recipe : recipes()) table.push_back(to_tuple(recipe));
  return table;
}

/// {name: (bits, group, format of one scale)} of every row of formats.def.
nb::dict format_table() {
  nb::dict table;
  for (const FormatInfo& row : all_formats()) {
    table[std::string(row.name).c_str()] =
        nb::make_tuple(row.bits, row.group, std::string(info(row.scale).name));
  }
  return table;
}

}  // namespace
}  // namespace qattn::python

NB_MODULE(_qattn, m) {
  using namespace qattn::python;
  register_errors();
  nb::class_<qattn::AttentionOptions>(m, "Options");
  nb::class_<qattn::QuantizeOptions>(m, "QuantizeOptions");
  m.def("options", &make_options, nb::kw_only(), "recipe"_a, "layout"_a, "causal"_a, "window"_a,
        "softcap"_a, "scale"_a.none(), "scalings"_a, "toggles"_a, "threads"_a, "validate"_a,
        "block_mask_size"_a, "scales_for"_a.none());
  m.def("attention", &run_attention, "tensors"_a, "options"_a, "stream"_a, "allocate"_a.none());
  m.def("device_errors", [](std::int32_t type, std::int32_t index) {
    qattn::Status status;
    {
      const nb::gil_scoped_release unlocked;
      status = qattn::device_errors({static_cast<qattn::DeviceType>(type), index});
    }
    check(std::move(status));
  });
  m.def("check", &run_check, "tensors"_a, "options"_a);
  m.def("explain", &run_explain, "tensors"_a, "options"_a);
  m.def("reference_attention", &run_reference, "tensors"_a, "options"_a, "out"_a, "lse"_a.none(),
        "rows"_a);
  m.def("quantize_options", &make_quantize_options, nb::kw_only(), "format"_a, "role"_a, "layout"_a,
        "scaling"_a, "smooth"_a, "rotate"_a, "threads"_a, "scales_for"_a.none());
  m.def("quantize_shapes", &run_quantize_shapes, "tensors"_a, "options"_a, "stream"_a);
  m.def("quantize", &run_quantize, "tensors"_a, "options"_a, "stream"_a);
  m.def("dequantize", &run_dequantize, "tensors"_a, "options"_a);
  m.def(
      "scheduled_scale",
      [](double scale, const std::vector<float>& sigma, std::int64_t ref, std::int64_t step) {
        return check(qattn::scheduled_scale(static_cast<float>(scale), sigma, ref, step));
      },
      "scale_at_ref"_a, "sigma"_a, "ref"_a, "step"_a);
  m.def(
      "recipe", [](const std::string& name) { return to_tuple(check(qattn::recipe_named(name))); },
      "name"_a);
  m.def("recipes", &recipe_table);
  m.def("formats", &format_table);
  m.def("cpu_isa", [] { return check(qattn::cpu_isa()); });
  add_kv_cache(m);
  add_gpu_kv_cache(m);
  m.def("version", [] { return std::string(qattn::version()); });
}
