// quantize() and dequantize(): one operand of float tokens to codes and scales, and back.
#include "qattn/quantize.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/backend.hpp"
#include "core/guarded.hpp"
#include "core/index_tensor.hpp"
#include "core/operand.hpp"
#include "core/threads.hpp"
#include "formats/hadamard.hpp"
#include "formats/scale.hpp"
#include "kernels/operand/rows.hpp"
#include "kernels/operand/scale_groups.hpp"
#include "kernels/quantize/host/quantize_check.hpp"

namespace qattn {
namespace {

using cpu::padded;
using cpu::Sequence;

constexpr auto entry = index_entry;

/// One (sequence, head) of a call.
struct Unit {
  const QuantizeTensors& t;
  const QuantizeOptions& o;
  const QuantizeFacts& f;
  const cpu::KernelTable& words;
  std::int64_t b, head, begin, length;
  std::vector<float> means;  ///< one padded row per mean

  Sequence sequence() const {
    Sequence s;
    s.format = t.x.format;
    s.bits = info(s.format).bits;
    s.token_stride = f.stride_token;
    s.length = length;
    s.channels = f.channels;
    const std::int64_t element = b * f.stride_batch + head * f.stride_head + begin * f.stride_token;
    // An empty tensor may have no memory, and null takes no offset.
    if (t.x.data != nullptr) {
      s.base = static_cast<const std::byte*>(t.x.data) + element * s.bits / 8;
    }
    return s;
  }
  std::int64_t mean_index(std::int64_t token) const {
    return o.role == Role::q ? token / f.scaling.block : 0;
  }
  cpu::Transform transform(std::int64_t token) const {
    return {o.smooth ? means.data() + mean_index(token) * padded(f.channels) : nullptr, o.rotate};
  }
  /// Element offset of (token, channel 0) in a view with x's order of dimensions.
  std::int64_t token_offset(const TensorView& view, std::int64_t token) const {
    const int first = f.packed ? 0 : 1;
    const int st = first + (o.layout == Layout::bshd ? 0 : 1), sh = 2 * first + 1 - st;
    return (f.packed ? 0 : b * view.stride[0]) + (begin + token) * view.stride[st] +
           head * view.stride[sh];
  }
  std::int64_t scale_offset(const TensorView& scale, std::int64_t token, int c) const {
    return ScaleMap{f.scaling, o.role, info(o.format).group}.offset(scale, b, head, token, c);
  }
};

void compute_means(Unit& u) {
  if (!u.o.smooth) return;
  const int n = padded(u.f.channels);
  const Sequence x = u.sequence();
  const std::int64_t step =
      u.o.role == Role::q ? u.f.scaling.block : std::max<std::int64_t>(u.length, 1);
  const std::int64_t count = u.o.role == Role::q ? u.t.mean.shape[2] : 1;
  u.means.assign(static_cast<std::size_t>(count * n), 0.0f);
  std::vector<float> scratch(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < count; ++i) {
    float* mean = u.means.data() + i * n;
    if (i * step < u.length) {
      cpu::mean_of_rows(u.words, x, i * step, std::min((i + 1) * step, u.length), mean,
                        scratch.data());
    }
    const TensorView& m = u.t.mean;
    for (int c = 0; c < u.f.channels; ++c) {
      const std::int64_t at =
          u.o.role == Role::q
              ? u.b * m.stride[0] + u.head * m.stride[1] + i * m.stride[2] + c * m.stride[3]
              : u.b * m.stride[0] + u.head * m.stride[1] + c * m.stride[2];
      static_cast<float*>(m.data)[at] = mean[c];
    }
  }
}

/// max |x| of the unit's scale groups, [groups] or [groups][padded channels]; with a static scale
/// only which groups hold NaN matters.
std::vector<float> group_maxima(const Unit& u) {
  const int n = padded(u.f.channels);
  const bool channels = by_channel(u.f.scaling.granularity);
  const std::int64_t groups = scale_count(u.f.scaling, u.o.role, u.f.longest);
  std::vector<float> amax(static_cast<std::size_t>(groups * (channels ? n : 1)), 0.0f);
  std::vector<float> row(static_cast<std::size_t>(n));
  const Sequence x = u.sequence();
  for (std::int64_t s = 0; s < u.length; ++s) {
    cpu::load_row(u.words, x, s, u.transform(s), row.data());
    const std::int64_t g = scale_index(u.f.scaling, u.o.role, s);
    if (channels) {
      u.words.accumulate_amax(row.data(), n, amax.data() + g * n);
    } else {
      auto& a = amax[static_cast<std::size_t>(g)];
      a = formats::fold_amax(a, u.words.amax(row.data(), u.f.channels));
    }
  }
  return amax;
}

void store_code(const TensorView& codes, std::int64_t offset, std::uint8_t code) {
  auto* bytes = static_cast<std::uint8_t*>(codes.data);
  if (info(codes.format).bits == 8) {
    bytes[offset] = code;
    return;
  }
  std::uint8_t& pair = bytes[offset / 2];  // low nibble first
  pair = static_cast<std::uint8_t>(offset % 2 ? (pair & 0x0F) | code << 4 : (pair & 0xF0) | code);
}

/// Formats with a free scale. `common` is per_tensor's maximum over all units.
std::int64_t quantize_scaled(const Unit& u, float common) {
  const int n = padded(u.f.channels);
  const bool channels = by_channel(u.f.scaling.granularity);
  const float qmax = cpu::code_max(u.o.format);
  std::vector<float> scale = group_maxima(u);
  if (joins_groups(u.f.scaling, u.o.role)) cpu::join_amax(scale.data(), u.length);
  const bool tensor = u.f.scaling.granularity == Granularity::per_tensor;
  const auto groups = static_cast<std::int64_t>(scale.size()) / (channels ? n : 1);
  // The first token of every group, to address given and written scales. One group for all tokens
  // exists without any, too.
  std::vector<std::int64_t> first(static_cast<std::size_t>(groups), u.f.longest > 0 ? -1 : 0);
  for (std::int64_t s = u.f.longest - 1; s >= 0; --s) {
    first[static_cast<std::size_t>(scale_index(u.f.scaling, u.o.role, s))] = s;
  }
  for (std::int64_t g = 0; g < groups; ++g) {
    for (int c = 0; c < (channels ? u.f.channels : 1); ++c) {
      float& value = scale[static_cast<std::size_t>(channels ? g * n + c : g)];
      const bool nan = std::isnan(tensor ? common : value);
      const std::int64_t token = first[static_cast<std::size_t>(g)];
      value = formats::amax_scale(tensor ? common : value, qmax);
      const bool place = token >= 0;
      if (u.t.static_scale.present() && place) {
        value = static_cast<const float*>(
            u.t.static_scale.data)[u.scale_offset(u.t.static_scale, token, c)];
        if (nan) value = std::numeric_limits<float>::quiet_NaN();
      }
      if (tensor && (u.b != 0 || u.head != 0)) continue;  // one entry, written once
      if (place) {
        static_cast<float*>(u.t.scale.data)[u.scale_offset(u.t.scale, token, c)] = value;
      } else if (u.f.scaling.granularity == Granularity::per_warp ||
                 u.f.scaling.granularity == Granularity::per_thread) {
        // Groups behind the last token exist in the shape only.
        static_cast<float*>(
            u.t.scale.data)[u.b * u.t.scale.stride[0] + u.head * u.t.scale.stride[1] +
                            g * u.t.scale.stride[2]] = value;
      }
    }
  }
  std::int64_t clipped = 0;
  std::vector<float> row(static_cast<std::size_t>(n));
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(n));
  const Sequence x = u.sequence();
  for (std::int64_t s = 0; s < u.length; ++s) {
    cpu::load_row(u.words, x, s, u.transform(s), row.data());
    const std::int64_t g = scale_index(u.f.scaling, u.o.role, s);
    if (channels) {
      for (int c = 0; c < u.f.channels; ++c) {
        float one[cpu::lanes] = {row[static_cast<std::size_t>(c)]};
        std::uint8_t code[cpu::lanes];
        clipped +=
            cpu::encode_row(u.words, u.o.format, one, 1,
                            formats::reciprocal(scale[static_cast<std::size_t>(g * n + c)]), code);
        codes[static_cast<std::size_t>(c)] = code[0];
      }
    } else {
      clipped +=
          cpu::encode_row(u.words, u.o.format, row.data(), u.f.channels,
                          formats::reciprocal(scale[static_cast<std::size_t>(g)]), codes.data());
    }
    std::memcpy(static_cast<std::uint8_t*>(u.t.codes.data) + u.token_offset(u.t.codes, s),
                codes.data(), static_cast<std::size_t>(u.f.channels));
  }
  return clipped;
}

/// Scales behind a packed sequence's end exist in the shape only; code 0 is a number in both scale
/// formats, so that the tensor as a whole passes the check of given scales.
void fill_unused_scales(const Unit& u) {
  const int group = info(u.o.format).group;
  const bool v = u.o.role == Role::v;
  const std::int64_t step = v ? group : 1;
  auto* scales = static_cast<std::uint8_t*>(u.t.scale.data);
  for (std::int64_t s = (u.length + step - 1) / step * step; s < u.f.longest; s += step) {
    for (int c = 0; c < u.f.channels; c += v ? 1 : group) {
      scales[u.scale_offset(u.t.scale, s, c)] = 0;
    }
  }
}

/// Micro-scaled formats: groups along channels (Q, K) or tokens (V).
void quantize_grouped(const Unit& u) {
  const int n = padded(u.f.channels), group = info(u.o.format).group;
  const Sequence x = u.sequence();
  std::vector<float> rows(static_cast<std::size_t>(group * n));
  float global = 1.0f;
  if (u.o.format == Format::nvfp4) {
    float amax = 0.0f;
    for (std::int64_t s = 0; s < u.length; ++s) {
      cpu::load_row(u.words, x, s, u.transform(s), rows.data());
      amax = formats::fold_amax(amax, u.words.amax(rows.data(), u.f.channels));
    }
    global = cpu::global_scale(amax);
    static_cast<float*>(
        u.t.global.data)[u.b * u.t.global.stride[0] + u.head * u.t.global.stride[1]] = global;
  }
  fill_unused_scales(u);
  auto* scales_out = static_cast<std::uint8_t*>(u.t.scale.data);
  if (u.o.role != Role::v) {
    std::uint8_t codes[most_key_channels], scales[most_key_channels / 16];
    for (std::int64_t s = 0; s < u.length; ++s) {
      cpu::load_row(u.words, x, s, u.transform(s), rows.data());
      cpu::encode_groups(u.o.format, rows.data(), u.f.channels, global, codes, scales);
      for (int c = 0; c < u.f.channels; ++c) {
        store_code(u.t.codes, u.token_offset(u.t.codes, s) + c, codes[c]);
        if (c % group == 0) scales_out[u.scale_offset(u.t.scale, s, c)] = scales[c / group];
      }
    }
    return;
  }
  for (std::int64_t s = 0; s < u.length; s += group) {
    const int count = static_cast<int>(std::min<std::int64_t>(group, u.length - s));
    for (int j = 0; j < count; ++j) {
      cpu::load_row(u.words, x, s + j, u.transform(s + j), rows.data() + j * n);
    }
    for (int c = 0; c < u.f.channels; ++c) {
      float column[32];
      std::uint8_t codes[32], scale;
      for (int j = 0; j < count; ++j) column[j] = rows[static_cast<std::size_t>(j * n + c)];
      cpu::encode_groups(u.o.format, column, count, global, codes, &scale);
      scales_out[u.scale_offset(u.t.scale, s, c)] = scale;
      for (int j = 0; j < count; ++j) {
        store_code(u.t.codes, u.token_offset(u.t.codes, s + j) + c, codes[j]);
      }
    }
  }
}

/// Runs f(unit) over every (sequence, head), in parallel.
template <class Function>
void each_unit(const QuantizeTensors& t, const QuantizeOptions& o, const QuantizeFacts& f,
               const cpu::KernelTable& words, Function body) {
  std::atomic<bool> failed = false;
#pragma omp parallel for schedule(dynamic) num_threads(team(o.threads))
  for (std::int64_t i = 0; i < f.batch * f.heads; ++i) {
    try {
      const std::int64_t b = i / f.heads;
      const std::int64_t begin = f.packed ? entry(t.cu_seqlens, b) : 0;
      const std::int64_t length = f.packed ? entry(t.cu_seqlens, b + 1) - begin : f.longest;
      Unit unit{t, o, f, words, b, i % f.heads, begin, length, {}};
      body(unit);
    } catch (const std::bad_alloc&) {
      failed = true;  // an exception must not leave a parallel region
    }
  }
  if (failed) throw std::bad_alloc();
}

Result<QuantizeReport> quantize_checked(const QuantizeTensors& t, const QuantizeOptions& o,
                                        const QuantizeFacts& f) {
  const cpu::Selection selection = cpu::select_words();
  if (!selection.words) {
    return Status(selection.unknown_name ? Code::invalid_argument : Code::unsupported,
                  std::string("QATTN_CPU_ISA: ") + selection.error);
  }
  const cpu::KernelTable& words = *selection.words;
  std::vector<float> unit_amax(static_cast<std::size_t>(f.batch * f.heads), 0.0f);
  float common = 0.0f;
  if (f.scaling.granularity == Granularity::per_tensor) {
    each_unit(t, o, f, words, [&](Unit& u) {
      compute_means(u);
      unit_amax[static_cast<std::size_t>(u.b * f.heads + u.head)] = group_maxima(u)[0];
    });
    for (const float a : unit_amax) common = formats::fold_amax(common, a);
    if (unit_amax.empty()) {  // the one scale exists without any unit
      *static_cast<float*>(t.scale.data) = t.static_scale.present()
                                               ? *static_cast<const float*>(t.static_scale.data)
                                               : formats::amax_scale(0.0f, cpu::code_max(o.format));
    }
  }
  std::atomic<std::int64_t> clipped = 0;
  each_unit(t, o, f, words, [&](Unit& u) {
    compute_means(u);
    if (info(o.format).group > 0) {
      quantize_grouped(u);
    } else {
      clipped += quantize_scaled(u, common);
    }
  });
  return QuantizeReport{clipped};
}

void dequantize_unit(Unit& u) {
  const int group = info(u.o.format).group, bits = info(u.o.format).bits;
  std::vector<float> row(static_cast<std::size_t>(padded(u.f.channels)));
  const float global =
      u.t.global.present()
          ? static_cast<const float*>(
                u.t.global.data)[u.b * u.t.global.stride[0] + u.head * u.t.global.stride[1]]
          : 1.0f;
  for (std::int64_t s = 0; s < u.length; ++s) {
    const auto* codes =
        static_cast<const std::byte*>(u.t.codes.data) + u.token_offset(u.t.codes, s) * bits / 8;
    if (group == 0) {
      cpu::decode_row(u.o.format, reinterpret_cast<const std::uint8_t*>(codes), u.f.channels,
                      row.data());
    }
    for (int c = 0; c < u.f.channels; ++c) {
      float& x = row[static_cast<std::size_t>(c)];
      const std::int64_t at = u.scale_offset(u.t.scale, s, c);
      x = group == 0 ? x * static_cast<const float*>(u.t.scale.data)[at]
                     : cpu::decode_group_code(u.o.format, cpu::packed_code(codes, c, bits),
                                              static_cast<const std::uint8_t*>(u.t.scale.data)[at],
                                              global);
    }
    if (u.o.rotate) formats::unrotate(row.data(), u.f.channels);
    for (int c = 0; c < u.f.channels && u.o.smooth; ++c) {
      const TensorView& m = u.t.mean;
      const std::int64_t at =
          u.b * m.stride[0] + u.head * m.stride[1] +
          (u.o.role == Role::q ? u.mean_index(s) * m.stride[2] + c * m.stride[3] : c * m.stride[2]);
      row[static_cast<std::size_t>(c)] += static_cast<const float*>(m.data)[at];
    }
    cpu::store_row(u.words, row.data(), u.f.channels, u.t.x.format,
                   static_cast<std::byte*>(u.t.x.data) +
                       u.token_offset(u.t.x, s) * (info(u.t.x.format).bits / 8));
  }
}

/// The facts of a call whose cu_seqlens may lie on a device, from which it is copied.
Result<QuantizeFacts> facts_of(const TensorView& x, const QuantizeOptions& o, TensorView cu,
                               Stream stream) {
  if (!cu.present() || cu.device.type == DeviceType::cpu) return quantize_facts(x, o, cu);
  if (cu.device != x.device) {
    return Status(Code::invalid_argument, "cu_seqlens: lies on another device than x");
  }
  if (Status s = check_view("cu_seqlens", cu, 1); !s.ok()) return s;
  const Result<const detail::Backend*> backend = detail::backend_of(x.device);
  if (!backend.ok()) return backend.status();
  const detail::DeviceGuard guard(**backend, x.device);
  if (!guard.status().ok()) return guard.status();
  detail::HostCopy copy;
  if (cu.data != nullptr) {
    if (Status s = copy.take(**backend, cu, stream); !s.ok()) return s;
  }
  return quantize_facts(x, o, cu);
}

/// check_static_scale() of tensors on a device. The call waits anyway, to count what it clips.
Status check_device_scale(const detail::Backend& backend, const QuantizeTensors& t,
                          const QuantizeFacts& facts, const QuantizeOptions& o, Stream stream) {
  if (!t.static_scale.present()) return {};
  QuantizeTensors read = t;
  detail::HostCopy scale, lengths;
  if (Status s = scale.take(backend, read.static_scale, stream); !s.ok()) return s;
  if (facts.packed) {
    if (Status s = lengths.take(backend, read.cu_seqlens, stream); !s.ok()) return s;
  }
  return check_static_scale(read, facts, o);
}

Result<QuantizeReport> quantize_on_device(const QuantizeTensors& t, const QuantizeOptions& o,
                                          Stream stream) {
  const Result<const detail::Backend*> backend = detail::backend_of(t.x.device);
  if (!backend.ok()) {
    return Status(Code::unsupported,
                  "x: lies on " + device_text(t.x.device) + "; " + backend.status().message());
  }
  if ((*backend)->quantize == nullptr) {
    return Status(Code::unsupported,
                  "x: lies on " + device_text(t.x.device) + ", where there is no quantize() yet");
  }
  Result<QuantizeFacts> facts = facts_of(t.x, o, t.cu_seqlens, stream);
  if (!facts.ok()) return facts.status();
  if (Status s = check_quantize_tensors(t, *facts, o, false); !s.ok()) return s;
  const detail::DeviceGuard guard(**backend, t.x.device);
  if (!guard.status().ok()) return guard.status();
  if (Status s = check_device_scale(**backend, t, *facts, o, stream); !s.ok()) return s;
  return (*backend)->quantize(t, o, *facts, stream);
}

Status stream_of_cpu() {
  return Status(Code::invalid_argument, "stream: tensors on the CPU take none");
}

}  // namespace

Result<QuantizeShapes> quantize_shapes(const TensorView& x, const QuantizeOptions& options,
                                       const TensorView& cu_seqlens, Stream stream) {
  return guarded<Result<QuantizeShapes>>([&]() -> Result<QuantizeShapes> {
    if (stream != nullptr && x.device.type == DeviceType::cpu) return stream_of_cpu();
    Result<QuantizeFacts> facts = facts_of(x, options, cu_seqlens, stream);
    if (!facts.ok()) return facts.status();
    return facts->shapes;
  });
}

Result<QuantizeReport> quantize(const QuantizeTensors& tensors, const QuantizeOptions& options,
                                Stream stream) {
  return guarded<Result<QuantizeReport>>([&]() -> Result<QuantizeReport> {
    if (tensors.x.device.type != DeviceType::cpu) {
      return quantize_on_device(tensors, options, stream);
    }
    if (stream != nullptr) return stream_of_cpu();
    Result<QuantizeFacts> facts = quantize_facts(tensors.x, options, tensors.cu_seqlens);
    if (!facts.ok()) return facts.status();
    if (Status s = check_quantize_tensors(tensors, *facts, options, false); !s.ok()) return s;
    if (Status s = check_static_scale(tensors, *facts, options); !s.ok()) return s;
    return quantize_checked(tensors, options, *facts);
  });
}

Status dequantize(const QuantizeTensors& tensors, const QuantizeOptions& options) {
  return guarded<Status>([&]() -> Status {
    if (tensors.x.device.type != DeviceType::cpu) {
      return Status(Code::unsupported, "x: lies on " + device_text(tensors.x.device) +
                                           ", and dequantize() runs on the CPU only");
    }
    Result<QuantizeFacts> facts = quantize_facts(tensors.x, options, tensors.cu_seqlens);
    if (!facts.ok()) return facts.status();
    if (Status s = check_quantize_tensors(tensors, *facts, options, true); !s.ok()) return s;
    each_unit(tensors, options, *facts, *cpu::words_scalar(), [](Unit& u) { dequantize_unit(u); });
    return {};
  });
}

}  // namespace qattn
