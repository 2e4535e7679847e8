// quantize() of the emulated kernels against the CPU's: every byte of every output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "kernels/quantize/gpu/quantize_device.hpp"

namespace qattn {
namespace {

using enum Granularity;

struct Call {
  QuantizeOptions options;
  Format input = Format::bf16;
  std::vector<std::int64_t> lengths = {65, 65};
  bool packed = false, strided = false, given = false, bad = false;
  int heads = 2, channels = 64;
  unsigned seed = 1;
};

/// One view with memory of its own, filled with a pattern; `room` elements lie behind every row.
struct Tensor {
  std::vector<std::uint8_t> bytes;
  TensorView view;

  Tensor() = default;
  Tensor(const TensorView& shape, std::int64_t room) : view(shape) {
    std::int64_t step = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.stride[static_cast<std::size_t>(i)] = step;
      step *= view.shape[static_cast<std::size_t>(i)];
      if (i == view.rank - 1 && view.rank > 1) step += room;
    }
    bytes.assign(static_cast<std::size_t>(std::max<std::int64_t>(step, 1)) * 4 + 64, 0xcd);
    view.data = bytes.data();
  }
};

void put(Tensor& t, std::int64_t at, float x) {
  if (t.view.format == Format::f32) {
    std::memcpy(t.bytes.data() + 4 * at, &x, 4);
    return;
  }
  const std::uint16_t half =
      t.view.format == Format::f16 ? formats::F16::encode(x) : formats::Bf16::encode(x);
  std::memcpy(t.bytes.data() + 2 * at, &half, 2);
}

Tensor make_input(const Call& s, std::int64_t tokens) {
  const bool bshd = s.options.layout == Layout::bshd;
  TensorView v;
  v.format = s.input;
  v.rank = s.packed ? 3 : 4;
  int i = 0;
  if (!s.packed) v.shape[0] = static_cast<std::int64_t>(s.lengths.size()), i = 1;
  v.shape[static_cast<std::size_t>(i + (bshd ? 0 : 1))] = tokens;
  v.shape[static_cast<std::size_t>(i + (bshd ? 1 : 0))] = s.heads;
  v.shape[static_cast<std::size_t>(i + 2)] = s.channels;
  Tensor x(v, s.strided ? 3 : 0);
  std::mt19937 random(s.seed);
  std::normal_distribution<float> normal;
  const std::int64_t count = static_cast<std::int64_t>(x.bytes.size() - 64) / 4;
  for (std::int64_t k = 0; k < count; ++k) {
    float value = normal(random) + 0.3f;
    if (k % 97 == 0) value = 0.0f;
    if (s.bad && k == count / 3) value = std::numeric_limits<float>::quiet_NaN();
    if (s.bad && k == count / 2) value = -std::numeric_limits<float>::infinity();
    put(x, k, value);
  }
  return x;
}

void check(const Call& s) {
  std::vector<std::int32_t> cu = {0};
  for (const std::int64_t n : s.lengths) cu.push_back(cu.back() + static_cast<std::int32_t>(n));
  Tensor x = make_input(s, s.packed ? cu.back() : s.lengths[0]);
  TensorView cu_view;
  if (s.packed) {
    cu_view = TensorView::dense(cu.data(), Format::s32, {static_cast<std::int64_t>(cu.size())});
  }
  const Result<QuantizeShapes> shapes = quantize_shapes(x.view, s.options, cu_view);
  ASSERT_TRUE(shapes.ok()) << shapes.status().message();
  struct Outputs {
    Tensor codes, scale, global, mean;
    QuantizeTensors tensors;
  } out[2];
  Tensor given;
  if (s.given) {
    given = Tensor(shapes->scale, 0);
    std::mt19937 random(s.seed + 5);
    std::uniform_real_distribution<float> uniform(0.01f, 0.03f);
    const float fit = s.options.format == Format::s8 ? 1.0f : 0.2f;
    for (std::size_t k = 0; 4 * k + 4 <= given.bytes.size(); ++k) {
      put(given, static_cast<std::int64_t>(k), uniform(random) * fit);
    }
  }
  for (Outputs& o : out) {
    o.codes = Tensor(shapes->codes, s.strided ? 6 : 0);
    o.scale = Tensor(shapes->scale, s.strided ? 5 : 0);
    o.tensors.x = x.view;
    o.tensors.codes = o.codes.view;
    o.tensors.scale = o.scale.view;
    o.tensors.cu_seqlens = cu_view;
    if (shapes->global.present()) {
      o.global = Tensor(shapes->global, 0);
      o.tensors.global = o.global.view;
    }
    if (shapes->mean.present()) {
      o.mean = Tensor(shapes->mean, s.strided ? 2 : 0);
      o.tensors.mean = o.mean.view;
    }
    if (s.given) o.tensors.static_scale = given.view;
  }
  const Result<QuantizeReport> report = quantize(out[0].tensors, s.options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  const Result<QuantizeFacts> facts = quantize_facts(x.view, s.options, cu_view);
  ASSERT_TRUE(facts.ok());
  std::vector<std::uint64_t> workspace(
      kernels::quantize_workspace(out[1].tensors, s.options, *facts) / 8 + 2, 0xcdcdcdcd);
  ASSERT_EQ(kernels::quantize_tokens(out[1].tensors, s.options, *facts, workspace.data(), nullptr),
            "");
  const auto equal = [](const char* what, const Tensor& a, const Tensor& b) {
    for (std::size_t i = 0; i < a.bytes.size(); ++i) {
      if (a.bytes[i] == b.bytes[i]) continue;
      // NaNs may differ in payload and sign, which the instruction sets choose: codes 7f and ff.
      const bool floats = a.view.format == Format::e4m3 || a.view.format == Format::e5m2;
      if (floats && (a.bytes[i] ^ b.bytes[i]) == 0x80 && (a.bytes[i] & 0x7f) == 0x7f) continue;
      if (a.view.format == Format::f32) {
        float fa, fb;
        std::memcpy(&fa, a.bytes.data() + i / 4 * 4, 4);
        std::memcpy(&fb, b.bytes.data() + i / 4 * 4, 4);
        if (fa != fa && fb != fb) continue;
      }
      ADD_FAILURE() << what << " byte " << i << ": " << int{b.bytes[i]} << " should be "
                    << int{a.bytes[i]};
      return;
    }
  };
  equal("codes", out[0].codes, out[1].codes);
  equal("scale", out[0].scale, out[1].scale);
  equal("global", out[0].global, out[1].global);
  equal("mean", out[0].mean, out[1].mean);
  // The CPU also counts the elements of NaN rows.
  if (!s.bad) {
    EXPECT_EQ(workspace[0], static_cast<std::uint64_t>(report->saturated));
    if (s.given) {
      EXPECT_GT(report->saturated, 0);
    }
  }
}

Call shaped(unsigned i) {
  constexpr int dims[] = {64, 80, 8, 104, 128, 256, 72, 36, 65, 3, 250};
  constexpr std::int64_t lengths[] = {1, 63, 64, 65, 130};
  constexpr Format inputs[] = {Format::bf16, Format::f16, Format::f32};
  Call s;
  s.input = inputs[i % 3];
  s.channels = dims[i % 11];
  s.packed = i % 4 == 1;
  s.strided = i % 5 == 2;
  s.options.layout = i / 2 % 2 ? Layout::bhsd : Layout::bshd;
  s.lengths = {lengths[i % 5], lengths[i % 5]};
  if (s.packed) s.lengths = {lengths[i % 5], 0, lengths[(i + 2) % 5]};
  s.heads = 1 + static_cast<int>(i % 2);
  s.seed = i + 1;
  s.bad = i % 6 == 5;
  s.options.role = static_cast<Role>(i % 3);
  s.options.smooth = i / 3 % 2 == 1;
  s.options.rotate = s.options.role != Role::v && i / 2 % 2 == 1;
  return s;
}

TEST(QuantizeTokens, FreeFormats) {
  const Scaling q[] = {{per_tensor, 128, 16}, {per_head, 128, 16},  {per_block, 24, 8},
                       {per_warp, 64, 16},    {per_thread, 64, 32}, {per_token, 128, 16}};
  const Scaling k[] = {{per_tensor, 128, 16}, {per_head, 128, 16},   {per_block, 24, 8},
                       {per_thread, 64, 16},  {per_thread, 128, 16}, {per_token, 128, 16}};
  const Scaling v[] = {{per_tensor, 128, 16},       {per_head, 128, 16},
                       {per_channel, 128, 16},      {per_block_channel, 24, 16},
                       {per_block_channel, 64, 16}, {per_token, 128, 16}};
  constexpr Format formats[] = {Format::s8, Format::e4m3, Format::e5m2, Format::e4m3fnuz};
  for (unsigned i = 0; i < 144; ++i) {
    SCOPED_TRACE(i);
    Call s = shaped(i);
    s.options.format = formats[i / 3 % 4];
    const Scaling* list[] = {q, k, v};
    s.options.scaling = list[static_cast<int>(s.options.role)][i / 4 % 6];
    s.given = i % 7 == 3 && s.options.format != Format::e5m2;
    if (s.given) s.lengths.assign(s.lengths.size(), 65);
    check(s);
    if (HasFailure()) return;
  }
}

// One scale for all tokens of a sequence exists where there are none, too.
TEST(QuantizeTokens, NoTokensAtAll) {
  for (const Granularity granularity : {per_tensor, per_head, per_channel, per_token}) {
    for (const int number : {0, 1, 2, 3}) {
      const bool packed = number % 2 != 0;
      Call s;
      s.lengths.assign(number < 2 ? 2 : 0, 0);  // or no sequences: one scale exists even then
      s.packed = packed;
      s.options.role = Role::v;
      s.options.scaling.granularity = granularity;
      check(s);
    }
  }
}

TEST(QuantizeTokens, MicroFormats) {
  constexpr Format formats[] = {Format::mxfp8, Format::mxfp4, Format::nvfp4};
  for (unsigned i = 0; i < 90; ++i) {
    SCOPED_TRACE(i);
    Call s = shaped(i);
    s.options.format = formats[i / 3 % 3];
    if (info(s.options.format).bits < 8) s.channels += s.channels % 2;  // two codes a byte
    check(s);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace qattn
