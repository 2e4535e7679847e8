// The caller's score and mask functions inlined into a kernel (emulated, under all schedules) give
// the bits that attention() on the CPU gives them, at the same places.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "emulate.hpp"
#include "qattn/qattn.hpp"
#include "score_kernel.hpp"

namespace qattn::isa_test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_value = std::numeric_limits<float>::quiet_NaN();

constexpr int batch = 2, heads = 4, heads_kv = 2, queries = 70, keys = 150, dim = 32;

struct Seen {
  std::vector<float> before = std::vector<float>(batch * heads * queries * keys, -infinity);
  std::vector<float> after = before;

  static std::size_t place(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    return static_cast<std::size_t>(((b * heads + h) * queries + i) * keys + j);
  }
};

/// The functors as attention() calls them, with what goes in and comes out kept.
struct SeenScore {
  BentBias f;
  Seen* seen;
  float operator()(float s, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::size_t at = Seen::place(b, h, i, j);
    seen->before[at] = s;
    return seen->after[at] = f(s, b, h, i, j);
  }
};
struct SeenMask {
  SameDocument f;
  Seen* seen;
  bool operator()(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const bool visible = f(b, h, i, j);  // asked after the score has changed
    if (!visible) seen->after[Seen::place(b, h, i, j)] = -infinity;
    return visible;
  }
};

std::vector<std::int32_t> documents() {
  std::vector<std::int32_t> document(keys);
  for (int j = 0; j < keys; ++j) document[static_cast<std::size_t>(j)] = j / 53;
  return document;
}

/// One causal call in float32; hidden keys stay minus infinity on both sides.
Seen seen_by_attention(const BentBias& score, const SameDocument& mask) {
  std::mt19937 engine(3);
  std::normal_distribution<float> normal;
  const auto draw = [&](int count) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& e : x) e = 2 * normal(engine);
    return x;
  };
  std::vector<float> q = draw(batch * queries * heads * dim), out = q;
  std::vector<float> k = draw(batch * keys * heads_kv * dim), v = k;
  AttentionTensors t;
  t.q = TensorView::dense(q.data(), Format::f32, {batch, queries, heads, dim});
  t.k = TensorView::dense(k.data(), Format::f32, {batch, keys, heads_kv, dim});
  t.v = TensorView::dense(v.data(), Format::f32, {batch, keys, heads_kv, dim});
  t.out = TensorView::dense(out.data(), Format::f32, {batch, queries, heads, dim});
  Seen seen;
  const SeenScore score_seen{score, &seen};
  const SeenMask mask_seen{mask, &seen};
  AttentionOptions options;
  options.recipe = *recipe_named("f32");
  options.causal = true;
  options.score_function = score_function(score_seen);
  options.mask_function = mask_function(mask_seen);
  const Status status = attention(t, options);
  EXPECT_TRUE(status.ok()) << status.message();
  return seen;
}

using Kernel = ScoreKernel<BentBias, SameDocument>;

std::vector<float> run_kernel(Kernel::Params p, const std::vector<float>& in, isa::Index3 grid,
                              const Options& options) {
  std::vector<float> out(in.size(), nan_value);
  p.in = in.data();
  p.out = out.data();
  const Options before = emu::options();
  emu::options() = options;
  EXPECT_EQ(isa::launch<Kernel>(p, grid, nullptr), "") << describe(options);
  emu::options() = before;
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

TEST(ScoreFunction, AKernelGivesTheBitsOfTheCpu) {
  const std::vector<std::int32_t> document = documents();
  const BentBias score{0.03f, 4.0f};
  const SameDocument mask{document.data(), 5};
  const Seen seen = seen_by_attention(score, mask);
  std::size_t called = 0, hidden = 0;
  for (std::size_t n = 0; n < seen.before.size(); ++n) {
    if (seen.before[n] == -infinity) continue;
    ++called;
    hidden += seen.after[n] == -infinity;
  }
  ASSERT_GT(called, seen.before.size() / 2);
  ASSERT_GT(hidden, called / 5);
  ASSERT_LT(hidden, called - called / 5);
  const Kernel::Params p{score, mask, nullptr, nullptr, queries, keys};
  const isa::Index3 grid = Kernel::grid(batch, heads, queries, keys);
  for (const Options& options : all_schedules()) {
    const std::vector<float> out = run_kernel(p, seen.before, grid, options);
    EXPECT_TRUE(same_bits(out, seen.after)) << describe(options);
  }
}

// The library's rules, which the CPU path keeps around the caller's function.
TEST(ScoreFunction, AKernelKeepsBadAndHiddenScores) {
  const std::vector<std::int32_t> document(4, 0);
  const Kernel::Params p{{0.0f, 1.0f}, {document.data(), 1000}, nullptr, nullptr, 1, 4};
  const std::vector<float> out =
      run_kernel(p, {0.0f, nan_value, -infinity, infinity}, {1, 1, 1}, Options{});
  EXPECT_EQ(out[0], -infinity);  // the mask's
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_EQ(out[2], -infinity);
  EXPECT_EQ(out[3], 1.0f);  // the function's
}

// ---- What no kernel could take ------------------------------------------------------------------

struct Virtual final {
  virtual float operator()(float s, std::int64_t, std::int64_t, std::int64_t, std::int64_t) const {
    return s;
  }
};
struct Double {
  double operator()(float s, std::int64_t, std::int64_t, std::int64_t, std::int64_t) const {
    return static_cast<double>(s);
  }
};
struct Changing {
  float operator()(float s, std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return s; }
};
using Any = std::function<float(float, std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;
using Pointer = float (*)(float, std::int64_t, std::int64_t, std::int64_t, std::int64_t);

static_assert(DeviceScoreFunction<BentBias> && DeviceMaskFunction<SameDocument>);
static_assert(!DeviceScoreFunction<SameDocument> && !DeviceMaskFunction<BentBias>);
static_assert(!DeviceScoreFunction<Virtual> && !DeviceScoreFunction<Double>);
static_assert(!DeviceScoreFunction<Changing> && !DeviceScoreFunction<Any>);
static_assert(!DeviceScoreFunction<Pointer>);

}  // namespace
}  // namespace qattn::isa_test
