// Which GPUs the kernels say that they serve, and why not the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

bool has_fp8(const Recipe& recipe) { return recipe.qk == Format::e4m3 || recipe.v == Format::e4m3; }

/// explain() of that call on that GPU, or of a small one.
std::string explained(const Recipe& recipe, int architecture, const Feature& feature) {
  const Call call = make_call(feature, 1);
  const Laid laid = lay_out(call, feature.how);
  const EmulatedBackend backend(architecture);
  AttentionOptions options = call.options;
  options.recipe = recipe;
  return explain(laid.tensors(), options);
}

std::string explained(const Recipe& recipe, int architecture) {
  return explained(recipe, architecture, with_inputs(feature_named("plain"), recipe, Format::bf16));
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const std::string chosen = "_prefill: chosen";

class EmulatedArchitecture : public testing::TestWithParam<Recipe> {};

TEST_P(EmulatedArchitecture, ServesWhatHasTheInstructions) {
  for (const int architecture : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
    const bool native = architecture == 89 || architecture == 90 || architecture >= 120;
    const std::string text = explained(GetParam(), architecture);
    EXPECT_EQ(contains(text, chosen), native || !has_fp8(GetParam())) << text;
  }
  const std::string text = explained(GetParam(), 75);
  EXPECT_TRUE(contains(text, "sm80_prefill: needs sm_80 or newer")) << text;
}

TEST_P(EmulatedArchitecture, SaysWhyFp8IsRefused) {
  if (!has_fp8(GetParam())) GTEST_SKIP() << "no FP8";
  EXPECT_TRUE(
      contains(explained(GetParam(), 86), ": sm_86 has no FP8 products, which begin with sm_89"));
  EXPECT_TRUE(contains(explained(GetParam(), 100),
                       ": sm_100 emulates mma.sync of FP8 with 16-bit products; this kernel's FP8 "
                       "is for sm_89 and sm_120"));
}

/// What is told to be served elsewhere is.
TEST_P(EmulatedArchitecture, SmoothQueriesOnHopper) {
  Recipe recipe = GetParam();
  if (recipe.qk != Format::s8) GTEST_SKIP() << "smooth_q is for quantised Q";
  recipe.smooth_q = Toggle::on;
  const std::string text = explained(recipe, 90);
  EXPECT_EQ(contains(text, "smooth_q: no FP8 kernel has it on sm_90"), has_fp8(recipe)) << text;
  EXPECT_EQ(contains(text, "sm80_prefill: chosen") || contains(text, "sm90a_16bit_prefill: chosen"),
            !has_fp8(recipe))
      << text;
}

/// A directory's kernels have its name, serve something where they say that they do, and are under
/// test.
TEST(GpuArchitectures, KernelsAreOfTheirDirectory) {
  const std::vector<Cell> cells = paired_cells();
  const auto check = [&](isa::Vendor vendor, const std::string& directory,
                         const kernels::GpuKernels& own) {
    SCOPED_TRACE(directory);
    for (const detail::Kernel& kernel : own.kernels) {
      EXPECT_TRUE(std::string(kernel.name).starts_with(directory + "_")) << kernel.name;
    }
    ASSERT_FALSE(own.architectures.empty());
    std::vector<std::string> names;
    for (const kernels::Architecture& architecture : own.architectures) {
      const int gpu = architecture.target.number;
      EXPECT_EQ(isa::vendor_of(architecture.target), vendor) << gpu;
      names.push_back(emu::name(architecture.target));
      std::erase(names.back(), '_');
      std::string text;
      for (const Recipe& recipe : gpu_recipes()) text += explained(recipe, gpu);
      EXPECT_TRUE(std::ranges::any_of(own.kernels, [&](const detail::Kernel& kernel) {
        return contains(text, std::string(kernel.name) + ": chosen");
      })) << gpu;
    }
    EXPECT_TRUE(std::ranges::find(names, directory) != names.end());
    const int gpu = own.architectures.back().target.number;
    EXPECT_TRUE(std::ranges::any_of(cells, [&](const Cell& cell) {
      return (cell.architecture ? cell.architecture : architecture_for(cell.recipe)) == gpu;
    })) << gpu;
  };
#define QATTN_ARCHITECTURE(VENDOR, NAME) \
  check(isa::Vendor::VENDOR, #NAME, kernels::NAME##_kernels());
#include "kernels/attention/architectures.inc"
#undef QATTN_ARCHITECTURE
}

/// Hopper has kernels of its own for every recipe, up to head dimension 128.
TEST_P(EmulatedArchitecture, HopperTakesItsOwn) {
  const std::string text = explained(GetParam(), 90);
  const bool wide = !free_scales(GetParam().v);
  EXPECT_TRUE(contains(text, wide ? "sm90a_16bit_prefill: chosen" : "sm90a_prefill: chosen"))
      << text;
}

/// Which of Hopper's kernels serve which head dimensions.
TEST_P(EmulatedArchitecture, HopperPadsHeadDimensions) {
  struct Case {
    std::int64_t dim, dim_v;
    const char* variant;
  };
  for (const Case& c :
       {Case{64, 64, "d64"}, Case{72, 96, "d96"}, Case{96, 40, "d96"}, Case{128, 104, "d128"},
        Case{192, 128, "d192/128"}, Case{136, 64, "d192/128"}, Case{128, 136, "d192"},
        Case{192, 192, "d192"}, Case{96, 200, "d256"}, Case{200, 64, "d256"}}) {
    Feature feature = with_inputs(feature_named("plain"), GetParam(), Format::bf16);
    feature.dim = c.dim, feature.dim_v = c.dim_v;
    const std::string text = explained(GetParam(), 90, feature);
    EXPECT_TRUE(contains(text, std::string("variant: ") + c.variant + "\n")) << text;
  }
}

/// A library for sm_80 alone runs on sm_89, where its FP8 kernels would be empty.
TEST_P(EmulatedArchitecture, AsksWhatTheCodeWasCompiledFor) {
  emu::options().code_architecture = 80;
  const std::string text = explained(GetParam(), 89);
  emu::options().code_architecture = 0;
  EXPECT_EQ(contains(text, chosen), !has_fp8(GetParam())) << text;
  EXPECT_EQ(contains(text,
                     ": the library has no machine code for sm_89, and its code for sm_80 has "
                     "no FP8 products"),
            has_fp8(GetParam()))
      << text;
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedArchitecture, testing::ValuesIn(gpu_recipes()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
