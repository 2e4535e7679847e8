// Tests of every recipe on the emulated architectures that have kernels for it, some with forced
// splits of the keys and packed heads.
#pragma once

#include <gtest/gtest.h>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {

struct OnGpu {
  Recipe recipe;
  int architecture;
};

inline bool has_fp8(const Recipe& r) {
  const auto fp8 = [](Format f) { return f == Format::e4m3 || f == Format::mxfp8; };
  return fp8(r.qk) || fp8(r.v);
}

inline std::vector<OnGpu> everywhere() {
  std::vector<OnGpu> all;
  for (const Recipe& recipe : gpu_recipes()) {
    for (const int architecture : {90, has_fp8(recipe) ? 89 : 80}) {
      all.push_back({recipe, architecture});
    }
    if (recipe.name != "int8_full") all.push_back({recipe, 120});  // that is the portable kernel's
  }
  for (const Recipe& recipe : grouped_recipes()) all.push_back({recipe, 120});
  return all;
}

inline std::string recipe_name(const testing::TestParamInfo<OnGpu>& gpu) {
  return gpu.param.recipe.name + "_sm" + std::to_string(gpu.param.architecture);
}

inline std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

class OnGpuTest : public testing::TestWithParam<OnGpu> {
 protected:
  const Recipe& recipe() const { return GetParam().recipe; }

  Feature feature(std::int64_t sq, std::int64_t sk, std::int64_t heads_q = 8,
                  std::int64_t heads_k = 2) const {
    Feature f;
    f.sq = {sq, sq}, f.sk = {sk, sk}, f.heads_q = heads_q, f.heads_k = heads_k;
    f.options.causal = true;
    return with_inputs(f, recipe(), Format::bf16);
  }

  /// One timing: Cover and SplitKv cells compare them.
  Outcome run(const Call& call, Laid& laid, int pack, int splits) {
    const ForceSplitKv forced(pack, splits);
    Outcome outcome = run_emulated(call, laid, recipe(), every_timing().subspan(1, 1));
    EXPECT_EQ(outcome.splits, std::max(splits, 1));
    return outcome;
  }

  /// The plan's text.
  std::string planned(const Feature& f) const {
    const Call call = make_call(f, 1);
    const Laid laid = lay_out(call, f.how);
    const EmulatedBackend backend(architecture_for(recipe()));
    AttentionOptions options = call.options;
    options.recipe = recipe();
    return plan(laid.tensors(), options)->to_string();
  }

  /// Rounded P has other roundings where its references differ: u8 P has its own tile's. What is
  /// done about lost mass depends on the codes so far, and parts know their own.
  double tolerance() const {
    const bool fp8 = recipe().p == Format::e4m3 || recipe().p == Format::mxfp8;
    return recipe().p == Format::u8 ? 3e-3 : fp8 ? 3e-2 : 2e-3;
  }

 private:
  OnArchitecture on_{GetParam().architecture};
};

}  // namespace qattn::test
