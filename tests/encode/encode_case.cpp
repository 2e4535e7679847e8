#include "encode_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "kernels/quantize/gpu/prepare_facts.hpp"

namespace qattn::encode_test {
namespace {

constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

void put(std::uint8_t* at, Format format, float x) {
  if (format == Format::f32) {
    std::memcpy(at, &x, 4);
    return;
  }
  const std::uint16_t half =
      format == Format::f16 ? formats::F16::encode(x) : formats::Bf16::encode(x);
  std::memcpy(at, &half, 2);
}

float get(const std::uint8_t* at, Format format) {
  float x;
  std::uint16_t half;
  if (format == Format::f32) {
    std::memcpy(&x, at, 4);
    return x;
  }
  std::memcpy(&half, at, 2);
  return format == Format::f16 ? formats::F16::decode(half) : formats::Bf16::decode(half);
}

const Scaling& scaling_of(const Recipe& r, Role role) {
  return role == Role::q ? r.q_scale : role == Role::k ? r.k_scale : r.v_scale;
}

Format code_format(const Recipe& r, Role role) { return role == Role::v ? r.v : r.qk; }

}  // namespace

Case::Case(const CaseOptions& options) : o_(options) {
  const std::int64_t batches = batch();
  cu_.push_back(0);
  for (const std::int64_t n : o_.lengths) {
    longest_ = std::max(longest_, n);
    // With seqused, memory holds some rows more than exist.
    cu_.push_back(cu_.back() + static_cast<std::int32_t>(n + (o_.used ? 5 : 0)));
    used_.push_back(static_cast<std::int32_t>(n));
  }
  if (o_.used) longest_ += 5;
  if (o_.storage == Storage::paged) {
    pages_per_sequence_ = std::max<std::int64_t>((longest_ + o_.page_size - 1) / o_.page_size, 1);
    page_count_ = batches * pages_per_sequence_ + 3;
    std::vector<std::int32_t> order(static_cast<std::size_t>(page_count_));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    std::shuffle(order.begin(), order.end(), std::mt19937(o_.seed));
    pages_.assign(order.begin(), order.begin() + batches * pages_per_sequence_);
  }
  for (const Role r : {Role::q, Role::k, Role::v}) build(r);
  const auto index = [](std::vector<std::int32_t>& v, std::initializer_list<std::int64_t> shape) {
    return TensorView::dense(v.data(), Format::s32, shape);
  };
  if (o_.storage == Storage::packed) {
    tensors.cu_seqlens_q = tensors.cu_seqlens_k = index(cu_, {batches + 1});
  }
  if (o_.used) tensors.seqused_q = index(used_, {batches});
  if (o_.used || o_.storage == Storage::paged) tensors.seqused_k = index(used_, {batches});
  if (o_.storage == Storage::paged) {
    tensors.page_table = index(pages_, {batches, pages_per_sequence_});
  }
  tensors.q = operand_[0].view;
  tensors.k = operand_[1].view;
  tensors.v = operand_[2].view;
  for (const Role r : {Role::q, Role::k, Role::v}) build_scales(r);
  tensors.q_scale = operand_[0].scale_view;
  tensors.k_scale = operand_[1].scale_view;
  tensors.v_scale = operand_[2].scale_view;
  if (o_.saturated) tensors.saturated = TensorView::dense(saturated.data(), Format::s64, {3});
  // Output: dense or packed like q, contents unused.
  const bool packed = o_.storage == Storage::packed;
  const bool bshd = o_.layout == Layout::bshd;
  const std::int64_t rows = packed ? cu_.back() : longest_;
  out_.resize(static_cast<std::size_t>(
      std::max<std::int64_t>((packed ? 1 : batches) * rows * o_.heads_q * o_.dv, 1)));
  if (packed) {
    tensors.out = bshd ? TensorView::dense(out_.data(), Format::f32, {rows, o_.heads_q, o_.dv})
                       : TensorView::dense(out_.data(), Format::f32, {o_.heads_q, rows, o_.dv});
  } else {
    tensors.out =
        bshd ? TensorView::dense(out_.data(), Format::f32, {batches, rows, o_.heads_q, o_.dv})
             : TensorView::dense(out_.data(), Format::f32, {batches, o_.heads_q, rows, o_.dv});
  }
  attention.recipe = o_.recipe;
  attention.layout = o_.layout;
}

void Case::build(Role r) {
  Operand& x = operand_[static_cast<int>(r)];
  const bool codes = o_.given_codes[static_cast<int>(r)];
  const Format format = codes ? code_format(o_.recipe, r) : o_.input;
  x.size = info(format).bits / 8;
  const bool bshd = o_.layout == Layout::bshd, packed = o_.storage == Storage::packed;
  const bool paged = o_.storage == Storage::paged && r != Role::q;
  const std::int64_t outer = packed ? 1 : paged ? page_count_ : batch();
  const std::int64_t tokens = packed ? cu_.back() : paged ? o_.page_size : longest_;
  const int n = channels(r), h = heads(r);
  // Strided: room behind every row; unaligned: rows at odd multiples of an element.
  const std::int64_t width = n + (o_.storage == Storage::strided     ? 16
                                  : o_.storage == Storage::unaligned ? 3
                                                                     : 0);
  x.token = bshd ? width * h : width;
  x.head = bshd ? width : width * tokens;
  x.batch = width * h * tokens;
  const std::int64_t total = std::max<std::int64_t>(outer * x.batch, 1) + 64;
  x.bytes.resize(static_cast<std::size_t>(total * x.size) + 64);
  const auto base = reinterpret_cast<std::uintptr_t>(x.bytes.data());
  x.data = x.bytes.data() + (64 - base % 64) % 64;
  if (o_.storage == Storage::unaligned) x.data += x.size;
  for (std::int64_t i = 0; i < total - 1; ++i) {
    if (codes) {
      x.data[i] = 0x7f;
    } else {
      put(x.data + i * x.size, format, nan_value);
    }
  }
  TensorView& view = x.view;
  view.data = x.data;
  view.format = format;
  view.rank = packed ? 3 : 4;
  int i = 0;
  if (!packed) view.shape[0] = outer, view.stride[0] = x.batch, i = 1;
  view.shape[i + (bshd ? 0 : 1)] = tokens;
  view.stride[i + (bshd ? 0 : 1)] = x.token;
  view.shape[i + (bshd ? 1 : 0)] = h;
  view.stride[i + (bshd ? 1 : 0)] = x.head;
  view.shape[i + 2] = n;
  view.stride[i + 2] = 1;

  std::mt19937 random(o_.seed * 7 + static_cast<unsigned>(r));
  std::normal_distribution<float> normal;
  for (std::int64_t b = 0; b < batch(); ++b) {
    for (std::int64_t head = 0; head < h; ++head) {
      for (std::int64_t s = 0; s < length(b); ++s) {
        // Some tokens of V are smaller than the rest, by a little and by far, and some are zeros.
        float size = 1.0f;
        if (r == Role::v && s % 5 == 2) size = std::ldexp(1.0f, -static_cast<int>(s % 11));
        if (r == Role::v && s % 7 == 3) size = s % 2 ? 1e-4f : 0.0f;
        for (int c = 0; c < n; ++c) {
          std::uint8_t* at = x.data + element(r, b, head, s, c) * x.size;
          if (codes) {
            std::uint8_t code = static_cast<std::uint8_t>(random());
            if (format != Format::s8) code &= 0xbf;  // no NaN and no infinity
            if (format == Format::e4m3fnuz && code == 0x80) code = 0;
            *at = code;
            continue;
          }
          float value = (normal(random) + o_.shift) * size;
          if (o_.ties && (s + c) % 17 == 3) value = 127.5f / 64;
          if ((s + c) % 13 == 5) value = -0.0f;  // whose code is +0's in every format
          if (is_bad(r, s) && c == n - 1) {
            value = s % 2 ? std::numeric_limits<float>::infinity() : nan_value;
          }
          put(at, format, value);
        }
      }
    }
  }
}

void Case::build_scales(Role r) {
  const int i = static_cast<int>(r);
  if (!o_.given_scales[i] && !o_.given_codes[i]) return;
  Operand& x = operand_[i];
  const bool paged = o_.storage == Storage::paged && r != Role::q;
  const ScaleMap map{scaling_of(o_.recipe, r), r, 0, paged};
  const std::int64_t outer = paged ? page_count_ : batch();
  const std::int64_t tokens = paged ? o_.page_size : longest_;
  const ScaleShape shape = map.shape(outer, heads(r), tokens, channels(r));
  TensorView& v = x.scale_view;
  v.format = Format::f32;
  v.rank = shape.rank;
  v.shape = shape.extent;
  std::int64_t step = 1;
  for (int k = v.rank - 1; k >= 0; --k) {
    v.stride[k] = step;
    step *= v.shape[k];
  }
  std::mt19937 random(o_.seed * 11 + static_cast<unsigned>(r));
  std::uniform_real_distribution<float> uniform(0.01f, 0.03f);
  x.scales.resize(static_cast<std::size_t>(std::max<std::int64_t>(step, 1)));
  const Format f = code_format(o_.recipe, r);
  // As tight as amax / 127 of N(0.5, 1): some codes are clipped.
  const float fit = f == Format::s8 ? 1.0f : f == Format::e5m2 ? 127.0f / 57344 : 127.0f / 448;
  for (float& s : x.scales) s = o_.ties ? 1.0f / 64 : uniform(random) * fit;
  v.data = x.scales.data();
}

std::int64_t Case::element(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const {
  const Operand& x = operand_[static_cast<int>(r)];
  if (o_.storage == Storage::packed) {
    return (cu_[static_cast<std::size_t>(b)] + s) * x.token + h * x.head + c;
  }
  if (o_.storage == Storage::paged && r != Role::q) {
    const std::int32_t page =
        pages_[static_cast<std::size_t>(b * pages_per_sequence_ + s / o_.page_size)];
    return page * x.batch + s % o_.page_size * x.token + h * x.head + c;
  }
  return b * x.batch + s * x.token + h * x.head + c;
}

float Case::value(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const {
  const Operand& x = operand_[static_cast<int>(r)];
  return get(x.data + element(r, b, h, s, c) * x.size, x.view.format);
}

void Case::put_value(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c, float value) {
  const Operand& x = operand_[static_cast<int>(r)];
  put(x.data + element(r, b, h, s, c) * x.size, x.view.format, value);
}

std::uint8_t Case::code(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const {
  return operand_[static_cast<int>(r)].data[element(r, b, h, s, c)];
}

float Case::given_scale(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const {
  const Operand& x = operand_[static_cast<int>(r)];
  const bool paged = o_.storage == Storage::paged && r != Role::q;
  std::int64_t outer = b, token = s;
  if (paged) {
    outer = pages_[static_cast<std::size_t>(b * pages_per_sequence_ + s / o_.page_size)];
    token = s % o_.page_size;
  }
  const ScaleMap map{scaling_of(o_.recipe, r), r, 0, paged};
  return x.scales[static_cast<std::size_t>(map.offset(x.scale_view, outer, h, token, c))];
}

bool Case::is_bad(Role r, std::int64_t s) const {
  const auto& list = o_.bad[static_cast<std::size_t>(r)];
  return std::find(list.begin(), list.end(), s) != list.end();
}

bool Case::is_spoiled(Role r, std::int64_t b, std::int64_t s) const {
  const bool given = o_.given_scales[1] || o_.given_codes[1];
  if (r != Role::k || !given || o_.storage == Storage::paged) return is_bad(r, s);
  const Scaling& scaling = scaling_of(o_.recipe, r);
  for (std::int64_t n = s / 64 * 64; n < std::min(s / 64 * 64 + 64, length(b)); ++n) {
    if (is_bad(r, n) && scale_index(scaling, r, n) == scale_index(scaling, r, s)) return true;
  }
  return false;
}

std::int64_t Case::first_block(Role r, std::int64_t b, std::int64_t size) const {
  if (o_.storage == Storage::packed) return cu_[static_cast<std::size_t>(b)] / size + b;
  const std::int64_t rows =
      o_.storage == Storage::paged && r != Role::q ? pages_per_sequence_ * o_.page_size : longest_;
  return b * ((rows + size - 1) / size);
}

int Case::padded(Role r) const {
  return info(format(r)).group > 0 ? kernels::micro_channels(channels(r))
                                   : kernels::prepared_channels(channels(r));
}

kernels::PrepareNeeds Case::needs() const {
  kernels::PrepareNeeds n;
  n.q_rows = n.k_rows = info(o_.recipe.qk).scale != Format::none;
  n.v_tiles = info(o_.recipe.v).scale != Format::none;
  n.dot_mean = o_.dot_mean;
  n.key_order = o_.key_order;
  return n;
}

bool Case::is_plain(Role r) const {
  const Result<Problem> problem = Problem::make(tensors, attention);
  if (!problem.ok()) return false;
  const kernels::OperandSpec f = kernels::facts_of(*problem, o_.recipe, needs(), r);
  return kernels::is_plain(o_.recipe, f, kernels::rows_of(*problem, r));
}

std::string Case::prepare() {
  const Result<Problem> problem = Problem::make(tensors, attention);
  if (!problem.ok()) return problem.status().message();
  if (std::string why = kernels::prepare_refusal(*problem, o_.recipe, needs()); !why.empty()) {
    return why;
  }
  layout = kernels::plan_prepare(*problem, o_.recipe, needs());
  workspace_.assign(layout.bytes + 64, 0xcd);  // what nobody writes shows
  void* at = const_cast<std::uint8_t*>(workspace().data());
  out = kernels::prepared_in(*problem, o_.recipe, layout, at);
  isa::Start next;
  return kernels::prepare(*problem, o_.recipe, layout, at, nullptr, next);
}

std::span<const std::uint8_t> Case::workspace() const {
  const auto base = reinterpret_cast<std::uintptr_t>(workspace_.data());
  return {workspace_.data() + (64 - base % 64) % 64, layout.bytes};
}

// --- What is expected --------------------------------------------------------------------------

Expected expect(const Case& c, Role r) {
  Expected e;
  const CaseOptions& o = c.options();
  const int n = c.channels(r), heads = c.heads(r);
  std::vector<std::int32_t> cu = {0};
  e.begin.push_back(0);
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    e.begin.push_back(e.begin.back() + c.length(b));
    cu.push_back(static_cast<std::int32_t>(e.begin.back()));
  }
  const std::int64_t tokens = e.begin.back();
  std::vector<float> x(static_cast<std::size_t>(std::max<std::int64_t>(tokens * heads * n, 1)));
  std::size_t i = 0;
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (std::int64_t s = 0; s < c.length(b); ++s) {
      for (int h = 0; h < heads; ++h) {
        for (int k = 0; k < n; ++k, ++i) {
          x[i] = r == Role::v && c.is_bad(r, s) ? 0.0f : c.value(r, b, h, s, k);
        }
      }
    }
  }
  QuantizeOptions q;
  q.format = code_format(o.recipe, r);
  q.role = r;
  q.scaling = scaling_of(o.recipe, r);
  q.smooth = (r == Role::q   ? o.recipe.smooth_q
              : r == Role::k ? o.recipe.smooth_k
                             : o.recipe.smooth_v) == Toggle::on;
  q.rotate = r != Role::v && o.recipe.rotate == Toggle::on;
  QuantizeTensors t;
  t.x = TensorView::dense(x.data(), Format::f32, {tokens, heads, n});
  t.cu_seqlens = TensorView::dense(cu.data(), Format::s32, {c.batch() + 1});
  const Result<QuantizeShapes> shapes = quantize_shapes(t.x, q, t.cu_seqlens);
  if (!shapes.ok()) {
    e.error = shapes.status().message();
    return e;
  }
  e.shapes = *shapes;
  const auto count = [](const TensorView& v) {
    std::int64_t product = 1;
    for (int k = 0; k < v.rank; ++k) product *= v.shape[k];
    return static_cast<std::size_t>(std::max<std::int64_t>(product, 1));
  };
  e.codes.resize(count(e.shapes.codes));
  e.scale.resize(count(e.shapes.scale));
  t.codes = e.shapes.codes;
  t.codes.data = e.codes.data();
  t.scale = e.shapes.scale;
  t.scale.data = e.scale.data();
  if (q.smooth) {
    e.mean.resize(count(e.shapes.mean));
    t.mean = e.shapes.mean;
    t.mean.data = e.mean.data();
  }
  if (const auto report = quantize(t, q); !report.ok()) e.error = report.status().message();
  return e;
}

std::uint8_t Expected::code(const Case& c, Role r, std::int64_t b, std::int64_t h, std::int64_t s,
                            int channel) const {
  const std::int64_t token = begin[static_cast<std::size_t>(b)] + s;
  return codes[static_cast<std::size_t>((token * c.heads(r) + h) * c.channels(r) + channel)];
}

float Expected::scale_of(const Case& c, Role r, std::int64_t b, std::int64_t h, std::int64_t s,
                         int channel) const {
  const ScaleMap map{scaling_of(c.options().recipe, r), r};
  return scale[static_cast<std::size_t>(map.offset(shapes.scale, b, h, s, channel))];
}

}  // namespace qattn::encode_test
