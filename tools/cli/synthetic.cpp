#include "synthetic.hpp"

#include <cmath>
#include <random>

#include "io/half.hpp"
#include "machine.hpp"

namespace qattn::cli {

namespace {

constexpr std::uint64_t seed = 20240607;
constexpr float key_shift = 8.0f, sink_query = 8.0f, sink_key = 14.0f, sink_value = 0.02f,
                value_mean = 0.5f;

using Random = std::mt19937_64;

float normal(Random& random) { return std::normal_distribution<float>()(random); }

void fill_normal(io::Array& array, Random& random) {
  std::normal_distribution<float> distribution;
  const std::int64_t count = array.count();
  for (std::int64_t i = 0; i < count; ++i) io::set(array, i, distribution(random));
}

/// Adds `scale` * direction to token `token` of every head (-1: every token) of a bhsd array.
void add_direction(io::Array& array, const std::vector<float>& direction, float scale,
                   std::int64_t token) {
  const std::int64_t tokens = array.shape[2], dim = array.shape[3];
  const std::int64_t rows = array.shape[0] * array.shape[1] * tokens;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (token >= 0 && row % tokens != token) continue;
    for (std::int64_t i = 0; i < dim; ++i) {
      const std::int64_t at = row * dim + i;
      io::set(array, at, io::get(array, at) + scale * direction[static_cast<std::size_t>(i)]);
    }
  }
}

}  // namespace

Result<Operands> normal_operands(const Geometry& geometry, Layout layout, Format format) {
  const AttentionTensors shapes = shapes_only(geometry, layout, format);
  AttentionOptions options;
  options.layout = layout;
  const Result<Plan> planned = plan(shapes, options);
  if (!planned.ok() && planned.status().code() != Code::unsupported) return planned.status();
  const auto size = [&](double heads, double tokens, double dim) {
    return static_cast<double>(geometry.batch) * heads * tokens * dim * info(format).bits / 8;
  };
  const auto queries = static_cast<double>(geometry.queries);
  const auto keys = static_cast<double>(geometry.keys);
  const auto dim = static_cast<double>(geometry.dim);
  // Output and workspace take about as much again as the inputs.
  const Status memory =
      require_memory(2 * (size(static_cast<double>(geometry.heads_q), queries, dim) +
                          2 * size(static_cast<double>(geometry.heads_kv), keys, dim)));
  if (!memory.ok()) return memory;

  Operands operands{io::zeros_like(shapes.q), io::zeros_like(shapes.k), io::zeros_like(shapes.v)};
  Random random(seed);
  for (io::Array* array : {&operands.q, &operands.k, &operands.v}) fill_normal(*array, random);
  return operands;
}

Result<Operands> long_context_operands(const Geometry& geometry) {
  Result<Operands> operands = normal_operands(geometry, Layout::bhsd, Format::f32);
  if (!operands.ok()) return operands;
  Random random(seed + 1);
  std::vector<float> shift(static_cast<std::size_t>(geometry.dim)), sink(shift.size()),
      mean(shift.size());
  float norm = 0;
  for (float& value : shift) value = normal(random);
  for (float& value : sink) {
    value = normal(random);
    norm += value * value;
  }
  for (float& value : sink) value /= std::sqrt(norm);
  for (float& value : mean) value = normal(random);
  add_direction(operands->k, shift, key_shift, -1);
  add_direction(operands->q, sink, sink_query, -1);
  add_direction(operands->k, sink, sink_key, 0);
  const std::int64_t stride = geometry.keys * geometry.dim_v;
  for (std::int64_t head = 0; head < geometry.batch * geometry.heads_kv; ++head) {
    for (std::int64_t i = 0; i < geometry.dim_v; ++i) {
      const std::int64_t at = head * stride + i;
      io::set(operands->v, at, sink_value * io::get(operands->v, at));
    }
  }
  add_direction(operands->v, mean, value_mean, -1);
  return operands;
}

}  // namespace qattn::cli
