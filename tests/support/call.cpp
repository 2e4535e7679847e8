#include "support/call.hpp"

#include <cmath>
#include <random>

#include "support/numbers.hpp"

namespace qattn::test {
namespace {

using Engine = std::mt19937_64;
using Values = std::vector<double>;

Values normal(Engine& engine, std::int64_t count, double sigma = 1) {
  std::normal_distribution<double> draw(0, sigma);
  Values x(static_cast<std::size_t>(count));
  for (double& value : x) value = draw(engine);
  return x;
}

/// x[row] += scale * shift for every row.
void add_rows(Values& x, const Values& shift, double scale) {
  for (std::size_t n = 0; n < x.size(); ++n) x[n] += scale * shift[n % shift.size()];
}

/// 0.1 % of the elements get an extra N(0, 10^2).
void add_outliers(Values& x, Engine& engine) {
  std::uniform_real_distribution<double> chance(0, 1);
  std::normal_distribution<double> draw(0, 10);
  for (double& value : x) {
    if (chance(engine) < 1e-3) value += draw(engine);
  }
}

/// The channels that are loud: in pairs (d, d + dim / 2) that RoPE turns fast, and slowly.
bool is_loud(std::int64_t d, std::int64_t dim) {
  if (dim < 2) return false;  // no pair
  const std::int64_t pair = d % (dim / 2);
  return pair == 1 || pair == dim / 8;
}

/// Biases in a few channels, turned by RoPE.
void add_loud(Values& k, std::int64_t dim) {
  const std::int64_t half = dim / 2;
  for (std::size_t n = 0; n < k.size(); ++n) {
    const auto d = static_cast<std::int64_t>(n) % dim, s = static_cast<std::int64_t>(n) / dim;
    if (!is_loud(d, dim)) continue;
    const double frequency =
        std::pow(1e6, -static_cast<double>(d % half) / static_cast<double>(half));
    const double angle = frequency * static_cast<double>(s);
    k[n] += 200 * (d < half ? std::cos(angle) : std::sin(angle));
  }
}

void shape_keys(Family family, Engine& engine, Values& k, Values& v, Values& direction,
                std::int64_t dim, std::int64_t dim_v) {
  switch (family) {
    case Family::k_shift:
      add_rows(k, normal(engine, dim), 8);
      break;
    case Family::outliers:
      add_outliers(k, engine);
      add_outliers(v, engine);
      break;
    case Family::sink:
    case Family::zero_sink: {  // token 0 draws most of the mass and carries almost no value
      direction = normal(engine, dim);
      double norm = 0;
      for (double x : direction) norm += x * x;
      for (double& x : direction) x /= std::sqrt(norm);
      if (k.empty()) break;
      for (std::int64_t d = 0; d < dim; ++d) k[d] += 14 * direction[d];
      for (std::int64_t d = 0; d < dim_v; ++d) v[d] *= 0.02;
      add_rows(v, normal(engine, dim_v), 0.5);
      for (std::int64_t d = 0; d < dim_v && family == Family::zero_sink; ++d) v[d] = 0;
      break;
    }
    case Family::v_mean:
      add_rows(v, normal(engine, dim_v), 2);
      break;
    case Family::loud:
      add_loud(k, dim);
      break;
    default:
      break;
  }
}

void shape_queries(Family family, Engine& engine, Values& q, const Values& direction,
                   std::int64_t dim) {
  for (std::size_t n = 0; n < q.size() && family == Family::loud; ++n) {
    if (is_loud(static_cast<std::int64_t>(n) % dim, dim)) q[n] *= 0.02;
  }
  if (family == Family::outliers) add_outliers(q, engine);
  if (family == Family::peaky) {
    for (double& value : q) value *= 4;
  }
  if (!direction.empty()) add_rows(q, direction, 8);
}

void append(std::vector<float>& out, const Values& x, Format format) {
  for (double value : x) out.push_back(static_cast<float>(round_real(value, format)));
}

}  // namespace

std::string name(Family family) {
  switch (family) {
    case Family::normal:
      return "normal";
    case Family::k_shift:
      return "k_shift";
    case Family::outliers:
      return "outliers";
    case Family::peaky:
      return "peaky";
    case Family::sink:
      return "sink";
    case Family::zero_sink:
      return "zero_sink";
    case Family::v_mean:
      return "v_mean";
    case Family::loud:
      return "loud";
  }
  return "unknown";
}

float Mask::at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  const std::int64_t index[4] = {b, h, i, j};
  std::int64_t n = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    n = n * shape[d] + (shape[d] == 1 ? 0 : index[4 - shape.size() + d]);
  }
  return values[static_cast<std::size_t>(n)];
}

std::int64_t Call::rows() const {
  if (!packed_q) return sequences.empty() ? 0 : sequences[0].room_q;
  std::int64_t n = 0;
  for (const Sequence& sequence : sequences) n += sequence.room_q;
  return n;
}

std::int64_t Call::row(std::int64_t b, std::int64_t h, std::int64_t i) const {
  if (!packed_q) return (b * heads_q + h) * rows() + i;
  std::int64_t first = 0;
  for (std::int64_t n = 0; n < b; ++n) first += sequences[n].room_q;
  return h * rows() + first + i;
}

std::int64_t Call::total_rows() const {
  const auto batch = static_cast<std::int64_t>(sequences.size());
  return (packed_q ? 1 : batch) * heads_q * rows();
}

void fill(Call& call, Family family, Format format, std::uint64_t seed) {
  const std::int64_t group = call.heads_q / call.heads_k;
  for (std::size_t b = 0; b < call.sequences.size(); ++b) {
    Sequence& sequence = call.sequences[b];
    sequence.q.clear();
    sequence.k.clear();
    sequence.v.clear();
    for (std::int64_t h = 0; h < call.heads_k; ++h) {
      Engine engine(seed * 1000003 + b * 1009 + static_cast<std::uint64_t>(h));
      Values k = normal(engine, sequence.len_k * call.dim), direction;
      Values v = normal(engine, sequence.len_k * call.dim_v);
      shape_keys(family, engine, k, v, direction, call.dim, call.dim_v);
      append(sequence.k, k, format);
      append(sequence.v, v, format);
      for (std::int64_t g = 0; g < group; ++g) {
        Values q = normal(engine, sequence.len_q * call.dim);
        shape_queries(family, engine, q, direction, call.dim);
        append(sequence.q, q, format);
      }
    }
  }
}

}  // namespace qattn::test
