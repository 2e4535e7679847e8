// The C++ interface of an installed library: every header, and calls of each of its parts.
#include <cstdio>
#include <qattn/qattn.hpp>
#include <string>
#include <vector>

int main() {
  const std::vector<float> ones(4 * 16, 1.0f);
  std::vector<float> out(4 * 16);
  std::vector<double> judge(4 * 16);
  const auto view = [](auto* data) {
    return qattn::TensorView::dense(data, qattn::Format::f32, {1, 4, 1, 16});
  };
  qattn::AttentionTensors tensors;
  tensors.q = tensors.k = tensors.v = view(ones.data());
  tensors.out = view(out.data());
  qattn::AttentionOptions options;
  options.recipe = *qattn::recipe_named("int8_full");
  options.causal = true;
  qattn::Status status = qattn::attention(tensors, options);
  if (status.ok()) status = qattn::reference_attention(tensors, options, judge);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  const double nrmse = qattn::compare(out, judge, 16).nrmse;
  const auto shapes = qattn::quantize_shapes(tensors.k, {});
  if (!(nrmse < 0.01) || !shapes.ok()) return 2;
  std::printf("C++, qattn %s: NRMSE %.1e\n", std::string(qattn::version()).c_str(), nrmse);
  return 0;
}
