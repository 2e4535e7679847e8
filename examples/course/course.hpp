// What the five steps share: one head's queries, keys and values, their attention in float64, and
// a launch in the emulator that says what it cost.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "isa/launch.hpp"

namespace course {

namespace isa = qattn::isa;
using isa::Element;
using isa::fmaf, isa::fmaxf;  // those of <cmath> would not be counted
using isa::Index3;
using isa::SharedAddress;
using isa::Words4;

constexpr int queries = 128, keys = 256, dim = 64;
constexpr float log2_e = 1.44269504f;
/// Of scores, in units of log2: kernels have exp2() and no exp().
constexpr float score_scale = log2_e / 8;  // 8 = sqrt(dim)

/// N(0,1), rows of `dim` numbers.
struct Problem {
  std::vector<float> q, k, v;
  std::vector<double> want;  ///< softmax(q k^T / 8) v

  Problem() {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    const auto rows = [&](int count) {
      std::vector<float> x(static_cast<std::size_t>(count * dim));
      for (float& e : x) e = normal(engine);
      return x;
    };
    q = rows(queries), k = rows(keys), v = rows(keys);
    want.assign(q.size(), 0.0);
    for (int i = 0; i < queries; ++i) {
      double p[keys], sum = 0;
      for (int j = 0; j < keys; ++j) {
        double s = 0;
        for (int c = 0; c < dim; ++c) s += double{at(q, i, c)} * at(k, j, c);
        sum += p[j] = std::exp(s / 8);
      }
      for (int j = 0; j < keys; ++j) {
        for (int c = 0; c < dim; ++c) {
          want[static_cast<std::size_t>(i * dim + c)] += p[j] / sum * at(v, j, c);
        }
      }
    }
  }
  static float at(const std::vector<float>& x, int row, int channel) {
    return x[static_cast<std::size_t>(row * dim + channel)];
  }
};

/// Runs kernel K under three schedules of its copies and lanes, which must give the same bits;
/// prints what it cost and how far `out` is from the truth. 0, for main() to return, if it is
/// within `bound`.
template <class K>
int run(const char* step, const typename K::Params& params, int blocks,
        const std::vector<float>& out, const Problem& problem, double bound) {
  namespace emu = qattn::emu;
  std::vector<float> first;
  for (const auto when : {emu::Schedule::early, emu::Schedule::late, emu::Schedule::random}) {
    emu::options().schedule = when;
    emu::options().order =
        when == emu::Schedule::random ? emu::LaneOrder::random : emu::LaneOrder::forward;
    const auto error = isa::launch<K>(params, {blocks, 1, 1}, nullptr);
    if (!error.empty() || (!first.empty() && first != out)) {
      std::printf("%s: %s\n", step, error.empty() ? "depends on the schedule" : error.c_str());
      return 1;
    }
    first = out;
  }
  const emu::Stats& s = emu::last_stats();
  const auto words = [&](emu::Pipe pipe) { return s.warp_instructions(pipe); };
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += (out[i] - problem.want[i]) * (out[i] - problem.want[i]);
    norm += problem.want[i] * problem.want[i];
  }
  const double nrmse = std::sqrt(error / norm);
  std::printf("| %s | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f | %.0e |\n", step,
              static_cast<double>(s.global_read + s.global_written) / 1024,
              static_cast<double>(s.shared_read + s.shared_written) / 1024,
              words(emu::Pipe::memory), words(emu::Pipe::fma), words(emu::Pipe::tensor),
              words(emu::Pipe::special), nrmse);
  return nrmse <= bound ? 0 : 1;
}

}  // namespace course
