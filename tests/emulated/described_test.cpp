// What is said of a GPU that is not here is what calls on it are told.
#include <gtest/gtest.h>

#include "backends/described/devices.hpp"
#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
namespace {

/// The lines of GPU kernels, and of such a one's plan what does not say where tensors lie.
std::string of_gpu_kernels(const std::string& text) {
  std::string kept, line;
  bool plan = false;
  for (const char c : text) {
    line += c;
    if (c != '\n') continue;
    plan = plan || is_emulated_plan(line);
    const bool skipped = line.starts_with("device: ");
    if (!skipped && (plan || is_emulated(line))) kept += line;
    line.clear();
  }
  return kept;
}

class Described : public testing::TestWithParam<Recipe> {};

TEST_P(Described, SaysWhatCallsAreTold) {
  for (const described::Gpu& gpu : described::gpus()) {
    if (gpu.type != DeviceType::cuda) continue;
    for (const char* name : {"plain", "causal", "decode_long", "mask_bool", "paged_16"}) {
      SCOPED_TRACE(std::string(gpu.name) + " " + name);
      Feature feature = with_inputs(feature_named(name), GetParam(), Format::bf16);
      feature.dim = feature.dim_v = 64;  // which a sample of the instances has, too
      const Call call = make_call(feature, 1);
      const Laid laid = lay_out(call, feature.how);
      AttentionTensors tensors = laid.tensors();
      AttentionOptions options = call.options;
      options.recipe = GetParam();
      std::string told, said;
      {
        const EmulatedBackend backend(gpu.architecture);
        const int before = std::exchange(emu::options().multiprocessors, gpu.multiprocessors);
        told = explain(tensors, options);
        emu::options().multiprocessors = before;
      }
      for (TensorView* view : {&tensors.q, &tensors.k, &tensors.v, &tensors.out, &tensors.lse,
                               &tensors.mask, &tensors.seqused_k, &tensors.page_table}) {
        view->device = {DeviceType::cuda, 0};
      }
      options.threads = 0;
      {
        const described::OnGpu there(gpu);
        said = explain(tensors, options);
        EXPECT_EQ(attention(tensors, options).code(), Code::unsupported);
      }
      EXPECT_EQ(of_gpu_kernels(said), of_gpu_kernels(told));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, Described, testing::ValuesIn(gpu_recipes()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
