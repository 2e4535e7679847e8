// Operands of the semantic model: codes from the public quantize(), dequantised here with the index
// maps that recipe.hpp states, so that quantiser and kernels cannot agree on a wrong one.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "qattn/quantize.hpp"
#include "support/model.hpp"
#include "support/numbers.hpp"
#include "support/tensor.hpp"

namespace qattn::test {
namespace {

bool is_real(Format format) {
  return format == Format::f32 || format == Format::f16 || format == Format::bf16;
}

/// Where element (s, d) finds its scale among those of one sequence and head.
std::int64_t scale_slot(const CodeRequest& request, std::int64_t dim, std::int64_t s,
                        std::int64_t d) {
  const Scaling& scaling = request.scaling;
  const int group = info(request.format).group;
  if (group > 0) {
    return request.role == Role::v ? s / group * dim + d
                                   : s * ((dim + group - 1) / group) + d / group;
  }
  switch (scaling.granularity) {
    case Granularity::per_block:
      return s / scaling.block;
    case Granularity::per_warp:
      return s / scaling.warp;
    case Granularity::per_thread:
      return request.role == Role::q   ? s / scaling.warp * 8 + s % 8
             : request.role == Role::k ? s / scaling.block * 4 + s % 8 / 2
                                       : s;
    case Granularity::per_token:
      return s;
    case Granularity::per_channel:
      return d;
    case Granularity::per_block_channel:
      return s / scaling.block * dim + d;
    default:
      return 0;
  }
}

/// The planted defect: two neighbouring slots (for V with scales per channel: two channel rows)
/// change places.
std::int64_t mutate_slot(const CodeRequest& request, std::int64_t slot, std::int64_t dim,
                         std::int64_t count) {
  const Mutation mine = request.role == Role::q   ? Mutation::swap_q_scale
                        : request.role == Role::k ? Mutation::swap_k_scale
                                                  : Mutation::swap_v_scale;
  if (request.mutation != mine) return slot;
  const bool channels =
      request.role == Role::v && (info(request.format).group > 0 ||
                                  request.scaling.granularity == Granularity::per_block_channel);
  const std::int64_t width = channels ? dim : 1;
  if (count < 2 * width || slot >= 2 * width) return slot;
  return slot < width ? slot + width : slot - width;
}

/// `x` without the mean of the tokens that are seen, zeros for the others. quantize() knows only
/// means of all tokens, and that with neutral ones for the others may be the next float, which
/// turns codes beside a tie over. So this mean is added up as docs/NUMERICS.md says.
std::pair<std::vector<float>, std::vector<double>> centred(std::span<const float> x,
                                                           std::int64_t dim,
                                                           const std::vector<bool>& seen) {
  std::vector<float> rows(x.size(), 0.0f);
  std::vector<double> mean(static_cast<std::size_t>(dim), 0.0);
  const auto width = static_cast<std::size_t>(dim);
  const auto count = std::count(seen.begin(), seen.end(), true);
  for (std::size_t d = 0; d < width && count > 0; ++d) {
    double total = 0;
    for (std::size_t tile = 0; tile < seen.size(); tile += 64) {
      float partial = 0;
      for (std::size_t s = tile; s < std::min(seen.size(), tile + 64); ++s) {
        if (seen[s]) partial += x[s * width + d];
      }
      total += partial;
    }
    mean[d] = static_cast<float>(total / static_cast<double>(count));
    for (std::size_t s = 0; s < seen.size(); ++s) {
      if (seen[s]) rows[s * width + d] = x[s * width + d] - static_cast<float>(mean[d]);
    }
  }
  return {std::move(rows), std::move(mean)};
}

/// f32, f16 and bf16 operands have no codes: they are rounded, after the mean where there is one.
Coded round_operand(std::span<const float> x, std::int64_t dim, const CodeRequest& request) {
  Coded coded;
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / dim;
  if (request.smooth) coded.mean.assign(static_cast<std::size_t>(dim), 0.0);
  for (std::int64_t d = 0; d < dim && request.smooth && tokens > 0; ++d) {
    for (std::int64_t s = 0; s < tokens; ++s) coded.mean[d] += x[s * dim + d];
    coded.mean[d] = static_cast<float>(coded.mean[d] / static_cast<double>(tokens));
  }
  for (std::size_t n = 0; n < x.size(); ++n) {
    const float mean = request.smooth ? static_cast<float>(coded.mean[n % dim]) : 0.0f;
    coded.value.push_back(round_real(x[n] - mean, request.format));
  }
  return coded;
}

std::vector<double> numbers(const Tensor& tensor) {
  std::vector<double> out;
  for (std::int64_t n = 0; tensor.present() && n < tensor.count(); ++n) {
    out.push_back(tensor.flat(n));
  }
  return out;
}

/// quantize() takes no odd rows of nibbles: with a channel of zeros, which changes no other one.
Coded code_odd_rows(std::span<const float> x, std::int64_t dim, const CodeRequest& request) {
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / dim;
  std::vector<float> even(static_cast<std::size_t>(tokens * (dim + 1)));
  for (std::int64_t s = 0; s < tokens; ++s) {
    std::copy_n(x.begin() + s * dim, dim, even.begin() + s * (dim + 1));
  }
  CodeRequest whole = request;
  whole.rotate = false;  // of odd rows: signs alone, to which codes of these formats are blind
  Coded coded = code_operand(even, dim + 1, whole);
  const auto cut = [dim](std::vector<double>& rows) {
    std::vector<double> kept;
    for (std::size_t n = 0; n < rows.size(); ++n) {
      if (static_cast<std::int64_t>(n) % (dim + 1) != dim) kept.push_back(rows[n]);
    }
    rows = kept;
  };
  cut(coded.value);
  cut(coded.mean);
  return coded;
}

/// Storage for the outputs of quantize(), and the static scale if there is one.
struct Storage {
  Tensor codes, scale, global, mean, static_scale;

  explicit Storage(const QuantizeShapes& shapes) : codes(shapes.codes), scale(shapes.scale) {
    if (shapes.global.present()) global = Tensor(shapes.global);
    if (shapes.mean.present()) mean = Tensor(shapes.mean);
  }
};

}  // namespace

Coded code_operand(std::span<const float> x, std::int64_t dim, const CodeRequest& request) {
  if (request.smooth && std::count(request.seen.begin(), request.seen.end(), false) > 0) {
    const auto [rows, mean] = centred(x, dim, request.seen);
    CodeRequest rest = request;
    rest.smooth = false;
    Coded coded = code_operand(rows, dim, rest);
    coded.mean = mean;
    return coded;
  }
  if (is_real(request.format)) return round_operand(x, dim, request);
  if (info(request.format).bits < 8 && dim % 2 != 0) return code_odd_rows(x, dim, request);
  const std::int64_t tokens = static_cast<std::int64_t>(x.size()) / dim;
  Coded coded;
  if (tokens == 0) return coded;

  QuantizeOptions options;
  options.format = request.format;
  options.role = request.role;
  options.scaling = request.scaling;
  options.smooth = request.smooth;
  options.rotate = request.rotate;
  QuantizeTensors tensors;
  tensors.x = TensorView::dense(x.data(), Format::f32, {1, tokens, 1, dim});
  const Result<QuantizeShapes> shapes = quantize_shapes(tensors.x, options);
  if (!shapes.ok()) throw std::runtime_error(shapes.status().message());
  Storage storage(*shapes);
  tensors.codes = storage.codes.view();
  tensors.scale = storage.scale.view();
  tensors.global = storage.global.view();
  tensors.mean = storage.mean.view();
  if (!request.static_scale.empty()) {
    tensors.static_scale = storage.scale.view();
    tensors.static_scale.data = const_cast<float*>(request.static_scale.data());
  }
  const Result<QuantizeReport> report = quantize(tensors, options);
  if (!report.ok()) throw std::runtime_error(report.status().message());

  coded.saturated = report->saturated;
  coded.mean = numbers(storage.mean);
  coded.scale = numbers(storage.scale);
  if (storage.global.present()) coded.global = storage.global.flat(0);
  const auto count = static_cast<std::int64_t>(coded.scale.size());
  for (std::int64_t s = 0; s < tokens; ++s) {
    for (std::int64_t d = 0; d < dim; ++d) {
      const std::int64_t slot = mutate_slot(request, scale_slot(request, dim, s, d), dim, count);
      coded.value.push_back(storage.codes.flat(s * dim + d) * coded.scale.at(slot) * coded.global);
    }
  }
  const Granularity g = request.scaling.granularity;
  if (request.role == Role::v && (g == Granularity::per_token || g == Granularity::per_thread)) {
    coded.token_scale = coded.scale;
  }
  return coded;
}

}  // namespace qattn::test
