#include "kernels/quantize/host/quantize_check.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "core/index_tensor.hpp"
#include "core/operand.hpp"

namespace qattn {
namespace {

Status invalid(std::string message) { return Status(Code::invalid_argument, std::move(message)); }

constexpr auto entry = index_entry;

Status check_format(const QuantizeOptions& o) {
  using enum Format;
  for (Format f : {s8, e4m3, e4m3fnuz, e5m2, mxfp8, mxfp4, nvfp4}) {
    if (o.format == f) return {};
  }
  return invalid("format: " + std::string(info(o.format).name) +
                 " is not one of s8, e4m3, e4m3fnuz, e5m2, mxfp8, mxfp4, nvfp4");
}

/// Longest sequence of packed tokens; checks that cu_seqlens is monotone and covers them.
Result<std::int64_t> longest_of(const TensorView& cu, std::int64_t tokens) {
  if (Status s = check_view("cu_seqlens", cu, -1); !s.ok()) return s;
  if (Status s = check_index_format("cu_seqlens", cu); !s.ok()) return s;
  if (cu.rank != 1 || cu.shape[0] < 1 || cu.data == nullptr) {
    return invalid("cu_seqlens: should have the shape (B + 1)");
  }
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < cu.shape[0]; ++i) {
    const std::int64_t before = i > 0 ? entry(cu, i - 1) : 0;
    if (entry(cu, i) < before || (i == 0 && entry(cu, 0) != 0)) {
      return invalid("cu_seqlens: entry " + std::to_string(i) + " is " +
                     std::to_string(entry(cu, i)) + ", not monotone from 0");
    }
    longest = std::max(longest, entry(cu, i) - before);
  }
  if (entry(cu, cu.shape[0] - 1) != tokens) {
    return invalid("cu_seqlens: last entry " + std::to_string(entry(cu, cu.shape[0] - 1)) +
                   " should be the number of packed tokens, " + std::to_string(tokens));
  }
  return longest;
}

TensorView dense(Format format, const ScaleShape& shape) {
  TensorView v;
  v.format = format;
  v.rank = shape.rank;
  v.shape = shape.extent;
  std::int64_t step = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    v.stride[i] = step;
    step *= v.shape[i];
  }
  return v;
}

Status check_like(const char* name, const TensorView& view, const TensorView& want) {
  if (!want.present()) {
    if (!view.present()) return {};
    return invalid(std::string(name) + ": is given, but the options produce none");
  }
  if (!view.present()) return invalid(std::string(name) + ": is missing");
  if (Status s = check_view(name, view, -1); !s.ok()) return s;
  if (view.format != want.format) {
    return invalid(std::string(name) + ": format " + std::string(info(view.format).name) +
                   " should be " + std::string(info(want.format).name));
  }
  if (view.rank != want.rank || view.shape != want.shape) {
    return invalid(std::string(name) + ": shape " + shape_text(view.shape.data(), view.rank) +
                   " should be " + shape_text(want.shape.data(), want.rank));
  }
  bool empty = false;
  for (int i = 0; i < view.rank; ++i) empty |= view.shape[i] == 0;
  if (view.data == nullptr && !empty) return invalid(std::string(name) + ": data pointer is null");
  return {};
}

/// A static scale and the options must be of one format and of the same rows.
Status check_scale_made_for(const QuantizeOptions& o) {
  if (!o.scales_for) return {};
  const auto toggle = [](bool on) { return on ? Toggle::on : Toggle::off; };
  Recipe call;
  call.name.clear();
  call.qk = call.v = o.format;
  call.smooth_q = call.smooth_k = call.smooth_v = toggle(o.smooth);
  call.rotate = toggle(o.rotate);
  return check_made_for("static_scale", o.role, *o.scales_for, call);
}

}  // namespace

Result<QuantizeFacts> quantize_facts(const TensorView& x, const QuantizeOptions& o,
                                     const TensorView& cu) {
  if (Status s = check_format(o); !s.ok()) return s;
  if (o.role != Role::q && o.role != Role::k && o.role != Role::v) {
    return invalid("role: is none of q, k, v");
  }
  if (o.layout != Layout::bshd && o.layout != Layout::bhsd) {
    return invalid("layout: is neither bshd nor bhsd");
  }
  if (Status s = check_threads(o.threads); !s.ok()) return s;
  if (o.rotate && o.role == Role::v) return invalid("rotate: is for Q and K only");
  if (o.scales_for) {
    if (Status s = check_toggles("scales_for", *o.scales_for); !s.ok()) return s;
  }
  QuantizeFacts f;
  f.packed = cu.present();
  if (!x.present()) return invalid("x: is missing");
  if (Status s = check_view("x", x, f.packed ? 3 : 4); !s.ok()) return s;
  if (Status s = check_device("x", x.device, o.threads); !s.ok()) return s;
  if (!is_float(x.format)) {
    return invalid("x: format " + std::string(info(x.format).name) + " is not f32, f16 or bf16");
  }
  const int last = x.rank - 1;
  if (x.stride[last] != 1) {
    return invalid("x: stride " + std::to_string(x.stride[last]) +
                   " of the last dimension should be 1");
  }
  const std::string why = x.device.type == DeviceType::cpu
                              ? head_size_refusal("x", o.role, x.shape[last])
                              : device_head_size_refusal("x", o.role, x.shape[last]);
  if (!why.empty()) return invalid(why);
  if (const int bits = info(o.format).bits; bits < 8 && x.shape[last] % 2 != 0) {
    return invalid("x: head_dim " + std::to_string(x.shape[last]) +
                   " is odd, and a byte holds two " + std::string(info(o.format).name) +
                   " codes of a row");
  }
  const int token = (f.packed ? 0 : 1) + (o.layout == Layout::bshd ? 0 : 1);
  const int head = (f.packed ? 0 : 1) + (o.layout == Layout::bshd ? 1 : 0);
  f.channels = static_cast<int>(x.shape[last]);
  f.tokens = f.longest = x.shape[token];
  f.heads = x.shape[head];
  f.stride_token = x.stride[token];
  f.stride_head = x.stride[head];
  if (f.packed) {
    Result<std::int64_t> longest = longest_of(cu, f.tokens);
    if (!longest.ok()) return longest.status();
    f.longest = *longest;
    f.batch = cu.shape[0] - 1;
  } else {
    f.batch = x.shape[0];
    f.stride_batch = x.stride[0];
  }
  if (Status s = check_scaling(std::string(name(o.role)).c_str(), o.scaling, o.role, o.format);
      !s.ok()) {
    return s;
  }
  if (Status s = check_size("x", f.batch, f.heads, f.longest + o.scaling.block); !s.ok()) {
    return s;
  }
  f.scaling = resolve_scaling(o.scaling, o.role, o.format);
  f.shapes.codes = dense(o.format, {x.rank, x.shape});
  f.shapes.scale =
      dense(info(o.format).scale, ScaleMap{f.scaling, o.role, info(o.format).group}.shape(
                                      f.batch, f.heads, f.longest, f.channels));
  if (o.format == Format::nvfp4) f.shapes.global = dense(Format::f32, {2, {f.batch, f.heads}});
  if (o.smooth) {
    const std::int64_t blocks = (f.longest + f.scaling.block - 1) / f.scaling.block;
    f.shapes.mean = o.role == Role::q
                        ? dense(Format::f32, {4, {f.batch, f.heads, blocks, f.channels}})
                        : dense(Format::f32, {3, {f.batch, f.heads, f.channels}});
  }
  return f;
}

Status check_quantize_tensors(const QuantizeTensors& t, const QuantizeFacts& f,
                              const QuantizeOptions& o, bool writes_x) {
  const struct {
    const char* name;
    const TensorView* view;
    const TensorView* want;
  } list[] = {{"codes", &t.codes, &f.shapes.codes},
              {"scale", &t.scale, &f.shapes.scale},
              {"global", &t.global, &f.shapes.global},
              {"mean", &t.mean, &f.shapes.mean}};
  for (const auto& item : list) {
    if (Status s = check_like(item.name, *item.view, *item.want); !s.ok()) return s;
  }
  if (t.codes.stride[t.codes.rank - 1] != 1) {
    return invalid("codes: stride of the last dimension should be 1");
  }
  if (t.x.data == nullptr && f.tokens * f.batch * f.heads > 0) {
    return invalid("x: data pointer is null");
  }
  if (o.scales_for && !writes_x) {  // options that quantize() had serve dequantize(), too
    Status s = check_made_for_something(t.static_scale.present(), "static_scale");
    if (!s.ok()) return s;
  }
  if (t.static_scale.present()) {
    if (info(o.format).group > 0) {
      return invalid("static_scale: format " + std::string(info(o.format).name) + " takes none");
    }
    if (Status s = check_scale_made_for(o); !s.ok()) return s;
    if (Status s = check_like("static_scale", t.static_scale, f.shapes.scale); !s.ok()) return s;
  }
  const std::pair<const char*, const TensorView*> all[] = {{"codes", &t.codes},
                                                           {"scale", &t.scale},
                                                           {"global", &t.global},
                                                           {"mean", &t.mean},
                                                           {"x", &t.x},
                                                           {"static_scale", &t.static_scale},
                                                           {"cu_seqlens", &t.cu_seqlens}};
  for (const auto& [name, view] : all) {
    const bool output = writes_x ? view == &t.x : view != &t.x && view != &t.cu_seqlens;
    if (!view->present()) continue;
    if (view->device != t.x.device) {
      return invalid(std::string(name) + ": lies on another device than x");
    }
    if (!output || view == &t.static_scale) continue;
    if (Status s = check_no_overlap(name, *view); !s.ok()) return s;
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 7; ++j) {
      if (i == j || !all[i].second->present() || !all[j].second->present()) continue;
      const ByteRange a = byte_range(*all[i].second), b = byte_range(*all[j].second);
      if (a.begin < b.end && b.begin < a.end) {
        return invalid(std::string(all[i].first) + ": overlaps the memory of " + all[j].first);
      }
    }
  }
  return {};
}

Status check_static_scale(const QuantizeTensors& t, const QuantizeFacts& f,
                          const QuantizeOptions& o) {
  if (!t.static_scale.present()) return {};
  for (std::int64_t i = 0; i < t.static_scale.shape[0]; ++i) {
    const std::int64_t tokens =
        f.packed && i < f.batch ? entry(t.cu_seqlens, i + 1) - entry(t.cu_seqlens, i) : f.longest;
    Status s =
        check_given_scales("static_scale", t.static_scale, f.scaling, o.role, o.format, i, tokens);
    if (!s.ok()) return s;
  }
  return {};
}

}  // namespace qattn
