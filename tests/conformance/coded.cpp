#include "conformance/coded.hpp"

#include <gtest/gtest.h>

namespace qattn::test {

QuantizeOptions options_for(Role role, Format format, const Scaling& scaling, Layout layout) {
  QuantizeOptions options;
  options.role = role;
  options.format = format;
  options.scaling = scaling;
  options.layout = layout;
  return options;
}

CodedTensor quantised(const TensorView& x, const QuantizeOptions& options,
                      const TensorView& cu_seqlens) {
  CodedTensor coded;
  const Result<QuantizeShapes> shapes = quantize_shapes(x, options, cu_seqlens);
  EXPECT_TRUE(shapes.ok()) << shapes.status().message();
  if (!shapes.ok()) return coded;
  coded.codes = Tensor(shapes->codes);
  coded.scale = Tensor(shapes->scale);
  if (shapes->global.present()) coded.global = Tensor(shapes->global);
  if (shapes->mean.present()) coded.mean = Tensor(shapes->mean);
  QuantizeTensors tensors;
  tensors.x = x;
  tensors.codes = coded.codes.view();
  tensors.scale = coded.scale.view();
  tensors.global = coded.global.view();
  tensors.mean = coded.mean.view();
  tensors.cu_seqlens = cu_seqlens;
  const Result<QuantizeReport> report = quantize(tensors, options);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return coded;
}

}  // namespace qattn::test
