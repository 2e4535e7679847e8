// Offsets beyond 2^32 elements in GPU kernels.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "emulated/emulated_backend.hpp"
#include "support/far_tensor.hpp"

namespace qattn::test {
namespace {

constexpr std::int64_t batch = 2, queries = 20, keys = 150, heads = 2, dim = 64;

using namespace std::string_literals;
using Wide = Pair<std::uint16_t>;

std::vector<std::uint16_t> draw_bf16(std::initializer_list<std::int64_t> shape, unsigned seed) {
  std::vector<std::uint16_t> x;
  for (const float value : draw(shape, seed)) {
    x.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16));
  }
  return x;
}

/// The portable kernel, Hopper's, and what makes their codes.
struct Kernel {
  const char* recipe;
  int architecture;
};
constexpr Kernel kernels_[] = {{"bf16", 80}, {"int8", 80}, {"int8_full", 80},
                               {"fp8", 89},  {"bf16", 90}, {"int8_full", 90}};

void PrintTo(const Kernel& kernel, std::ostream* out) {
  *out << kernel.recipe << " on sm_" << kernel.architecture;
}

class EmulatedFarStrides : public testing::TestWithParam<Kernel> {
 protected:
  /// Both calls give the same bits; `out` is theirs in turn.
  void expect_equal(AttentionTensors near, AttentionTensors away, Wide& out) {
    const EmulatedBackend backend(GetParam().architecture);
    AttentionOptions options;
    options.recipe = *recipe_named(GetParam().recipe);
    options.causal = true;
    near.out = out.near;
    away.out = out.away;
    for (const AttentionTensors* t : {&near, &away}) {
      const Result<Plan> made = plan(*t, options);
      ASSERT_TRUE(made.ok()) << made.status().message();
      ASSERT_TRUE(is_emulated(made->kernel())) << made->kernel();
    }
    const Status dense = attention(near, options);
    ASSERT_TRUE(dense.ok()) << dense.message();
    const std::vector<std::uint16_t> expected = out.dense;
    const Status s = attention(away, options);
    ASSERT_TRUE(s.ok()) << s.message();
    ASSERT_TRUE(out.copy(false));
    EXPECT_EQ(std::memcmp(expected.data(), out.dense.data(), expected.size() * 2), 0);
  }
};

TEST_P(EmulatedFarStrides, EveryAxis) {
  for (const int axis : {far_batch, far_token, far_head}) {
    for (const int sign : {1, -1}) {
      // TMA walks forwards alone; the portable kernel, which takes its place, rounds elsewhere.
      const bool by_tma = GetParam().architecture == 90 && GetParam().recipe == "bf16"s;
      if (by_tma && sign < 0) continue;
      SCOPED_TRACE(testing::Message() << "axis " << axis << (sign < 0 ? ", backwards" : ""));
      Wide q, k, v, out;
      const auto shape = {batch, queries, heads, dim}, shape_k = {batch, keys, heads, dim};
      if (!q.make(shape, axis, sign, draw_bf16(shape, 1)) ||
          !k.make(shape_k, axis, sign, draw_bf16(shape_k, 2)) ||
          !v.make(shape_k, axis, sign, draw_bf16(shape_k, 3)) ||
          !out.make(shape, axis, sign, draw_bf16(shape, 4))) {
        return no_space();
      }
      AttentionTensors near, away;
      near.q = q.near, near.k = k.near, near.v = v.near;
      away.q = q.away, away.k = k.away, away.v = v.away;
      expect_equal(near, away, out);
    }
  }
}

TEST_P(EmulatedFarStrides, PagesAndMask) {
  // Three pages of 64 keys a sequence, each page far from the next.
  constexpr std::int64_t size = 64, pages = 6, each = 3;
  const std::int32_t table[] = {3, 0, 1, 2, 5, 4}, used[] = {150, 99};
  Wide q, k, v, out;
  Pair<> mask;
  const auto shape = {batch, queries, heads, dim}, shape_k = {pages, size, heads, dim};
  if (!q.make(shape, far_batch, 1, draw_bf16(shape, 1)) ||
      !k.make(shape_k, far_batch, 1, draw_bf16(shape_k, 2)) ||
      !v.make(shape_k, far_batch, 1, draw_bf16(shape_k, 3)) ||
      !out.make(shape, far_batch, 1, draw_bf16(shape, 4)) ||
      !mask.make({batch, heads, queries, size * each}, 2, 1, 6)) {
    return no_space();
  }
  for (const bool masked : {false, true}) {
    SCOPED_TRACE(masked ? "with a mask" : "without");
    AttentionTensors near, away;
    near.page_table = TensorView::dense(table, Format::s32, {batch, each});
    near.seqused_k = TensorView::dense(used, Format::s32, {batch});
    near.q = q.near;
    away = near;
    near.k = k.near, near.v = v.near;
    away.k = k.away, away.v = v.away, away.q = q.away;
    if (masked) near.mask = mask.near, away.mask = mask.away;
    expect_equal(near, away, out);
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedFarStrides, testing::ValuesIn(kernels_),
                         [](const auto& kernel) {
                           return std::string(kernel.param.recipe) + "_sm" +
                                  std::to_string(kernel.param.architecture);
                         });

}  // namespace
}  // namespace qattn::test
