#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>

#include "conformance/feature.hpp"
#include "qattn/quantize.hpp"
#include "support/numbers.hpp"

namespace qattn::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

std::vector<std::int64_t> mask_extents(const Feature& feature, const Call& call) {
  std::int64_t sq = 0, sk = 0;
  for (const Sequence& sequence : call.sequences) {
    sq = std::max(sq, sequence.room_q);
    sk = std::max(sk, sequence.room_k);
  }
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  switch (feature.mask) {
    case MaskShape::full:
      return {batch, call.heads_q, sq, sk};
    case MaskShape::rows_keys:
      return {sq, sk};
    case MaskShape::keys_only:
      return {batch, 1, 1, sk};
    case MaskShape::heads:
      return {call.heads_q, 1, sk};
    case MaskShape::none:
      break;
  }
  return {};
}

/// Boolean: 3 of 10 keys masked. Additive: N(0,1), 2 of 10 keys -inf. Every seventh row of a mask
/// that has rows sees nothing at all.
void make_mask(const Feature& feature, Call& call, std::mt19937_64& engine) {
  if (call.mask.shape.empty()) return;
  std::int64_t count = 1;
  for (const std::int64_t extent : call.mask.shape) count *= extent;
  const std::int64_t keys = call.mask.shape.back();
  const std::int64_t rows = call.mask.shape[call.mask.shape.size() - 2];
  std::normal_distribution<double> draw;
  for (std::int64_t n = 0; n < count; ++n) {
    const bool blind = rows > 1 && n / keys % rows % 7 == 3;
    const auto chance = engine() % 10;
    if (call.mask.boolean) {
      call.mask.values.push_back(blind || chance < 3 ? 0.0f : 1.0f);
    } else {
      const double bias = round_real(draw(engine), feature.how.bias);
      call.mask.values.push_back(blind || chance < 2 ? -infinity : static_cast<float>(bias));
    }
  }
}

void shape_block_mask(const Feature& feature, Call& call) {
  if (feature.block_mask == MaskShape::none) return;
  Feature as_mask = feature;
  as_mask.mask = feature.block_mask;
  std::vector<std::int64_t> shape = mask_extents(as_mask, call);
  const auto blocks = [](std::int64_t tokens, std::int64_t block) {
    return tokens == 1 ? 1 : (tokens + block - 1) / block;
  };
  shape.back() = blocks(shape.back(), call.options.block_mask_k);
  std::int64_t& rows = shape[shape.size() - 2];
  rows = blocks(rows, call.options.block_mask_q);
  call.block_mask.boolean = true;
  call.block_mask.shape = shape;
}

/// 4 of 10 blocks are forbidden, and every third row of blocks sees nothing, if rows there are. The
/// first one is not, so that calls of one block are no empty ones.
void make_block_mask(Call& call, std::mt19937_64& engine) {
  const std::vector<std::int64_t>& shape = call.block_mask.shape;
  if (shape.empty()) return;
  const std::int64_t rows = shape[shape.size() - 2];
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  for (std::int64_t n = 0; n < count; ++n) {
    const bool blind = rows > 1 && n / shape.back() % rows % 3 == 1;
    call.block_mask.values.push_back(blind || (engine() % 10 < 4 && n > 0) ? 0.0f : 1.0f);
  }
}

/// Keys that tensors share between sequences must be the same numbers.
void share_keys(const Feature& feature, Call& call) {
  const std::int64_t tokens = feature.how.zero_stride_kv
                                  ? call.sequences[0].len_k
                                  : feature.how.shared_pages * feature.how.page_size;
  const auto copy = [&](std::vector<float> Sequence::* x, std::int64_t dim) {
    const Sequence& from = call.sequences[0];
    for (std::size_t b = 1; b < call.sequences.size(); ++b) {
      Sequence& to = call.sequences[b];
      const std::int64_t shared = std::min({tokens, from.len_k, to.len_k});
      for (std::int64_t h = 0; h < call.heads_k; ++h) {
        for (std::int64_t n = 0; n < shared * dim; ++n) {
          (to.*x)[h * to.len_k * dim + n] = (from.*x)[h * from.len_k * dim + n];
        }
      }
    }
  };
  copy(&Sequence::k, call.dim);
  copy(&Sequence::v, call.dim_v);
}

/// Scales that quantize() would choose for (B, S, H, D) numbers laid out [b][h][s][d].
Tensor exact_scales(const Call& call, std::vector<float> Sequence::* x, Role role, Format format,
                    const Scaling& scaling) {
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  const std::int64_t heads = role == Role::q ? call.heads_q : call.heads_k;
  const std::int64_t dim = role == Role::v ? call.dim_v : call.dim;
  std::vector<float> all;
  for (const Sequence& sequence : call.sequences) {
    all.insert(all.end(), (sequence.*x).begin(), (sequence.*x).end());
  }
  const Sequence& first = call.sequences.at(0);
  const std::int64_t tokens = role == Role::q ? first.len_q : first.len_k;
  QuantizeOptions options;
  options.format = format;
  options.role = role;
  options.scaling = scaling;
  options.layout = Layout::bhsd;
  QuantizeTensors tensors;
  tensors.x = TensorView::dense(all.data(), Format::f32, {batch, heads, tokens, dim});
  const Result<QuantizeShapes> shapes = quantize_shapes(tensors.x, options);
  if (!shapes.ok()) throw std::runtime_error(shapes.status().message());
  Tensor codes(shapes->codes), scale(shapes->scale);
  if (all.empty()) return scale;
  tensors.codes = codes.view();
  tensors.scale = scale.view();
  const Result<QuantizeReport> report = quantize(tensors, options);
  if (!report.ok()) throw std::runtime_error(report.status().message());
  return scale;
}

}  // namespace

bool has_codes(Format format) { return info(format).scale != Format::none; }
bool free_scales(Format format) { return has_codes(format) && info(format).group == 0; }

Call make_shapes(const Feature& feature) {
  Call call;
  call.heads_q = feature.heads_q;
  call.heads_k = feature.heads_k;
  call.dim = feature.dim;
  call.dim_v = feature.dim_v;
  call.packed_q = feature.how.packed_q;
  call.options = feature.options;
  call.options.layout = feature.how.layout;
  for (std::size_t b = 0; b < feature.sq.size(); ++b) {
    Sequence sequence;
    sequence.room_q = feature.sq[b];
    sequence.room_k = feature.sk[b];
    sequence.len_q = feature.used_q.empty() ? feature.sq[b] : feature.used_q[b];
    sequence.len_k = feature.used_k.empty() ? feature.sk[b] : feature.used_k[b];
    call.sequences.push_back(sequence);
  }
  call.sinks.resize(feature.sinks ? static_cast<std::size_t>(call.heads_q) : 0);
  call.alibi.resize(feature.alibi ? feature.sq.size() * static_cast<std::size_t>(call.heads_q) : 0);
  call.mask.boolean = feature.boolean_mask;
  call.mask.bits = feature.bit_mask;
  call.mask.shape = mask_extents(feature, call);
  shape_block_mask(feature, call);
  return call;
}

Call make_call(const Feature& feature, std::uint64_t seed) {
  Call call = make_shapes(feature);
  fill(call, feature.family, feature.how.input, seed);
  if (feature.how.zero_stride_kv || feature.how.shared_pages > 0) share_keys(feature, call);
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> draw;
  for (float& sink : call.sinks) {
    sink = static_cast<float>(round_real(1 + 2 * draw(engine), feature.how.bias));
  }
  for (std::size_t n = 0; n < call.alibi.size(); ++n) {
    const double slope = std::exp2(-1.0 - static_cast<double>(n % 8));
    call.alibi[n] = feature.slope * static_cast<float>(slope);
  }
  make_mask(feature, call, engine);
  make_block_mask(call, engine);
  return call;
}

Recipe add_static_scales(Call& call, Laid& laid, const Recipe& resolved, double shrink) {
  const auto make = [&](std::vector<float> Sequence::* x, Role role, Format format,
                        const Scaling& scaling, std::vector<float>& given, Tensor& tensor) {
    if (!free_scales(format)) return;
    tensor = exact_scales(call, x, role, format, scaling);
    const TensorView& view = tensor.view();
    auto* values = static_cast<float*>(view.data);
    for (std::int64_t n = 0; n < tensor.count(); ++n) {
      values[n] = static_cast<float>(values[n] * shrink);
      given.push_back(values[n]);
    }
    tensor.freeze();
  };
  make(&Sequence::q, Role::q, resolved.qk, resolved.q_scale, call.static_q, laid.q_scale);
  make(&Sequence::k, Role::k, resolved.qk, resolved.k_scale, call.static_k, laid.k_scale);
  make(&Sequence::v, Role::v, resolved.v, resolved.v_scale, call.static_v, laid.v_scale);
  Recipe recipe = resolved;
  recipe.balance_k = Toggle::off;  // the scales are of rows that nobody balanced
  return recipe;
}

}  // namespace qattn::test
