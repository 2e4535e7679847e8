// Head dimensions that are no multiples of 8, and those above 256: padded inside. Every size up to
// 64 with a recipe and a feature in turn, and larger ones with all recipes.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "conformance/coded.hpp"
#include "conformance/runner.hpp"
#include "support/far_tensor.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

struct Cell {
  std::string name;
  Recipe recipe;
  Feature feature;
};

void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.name; }

const std::vector<std::string>& turns() {
  static const std::vector<std::string> names = {
      "causal",           "gqa_8_2",       "mask_bool",    "seqused_k",    "varlen",
      "paged_24_bhsd",    "decode_paged",  "varlen_split", "everything",   "strides_reversed",
      "mask_bits_packed", "static_scales", "bf16",         "smooth_q_on",  "strides_odd_bhsd_f16",
      "smooth_v_on",      "loud",          "rotate_on",    "v_per_head_0", "k_per_block_64"};
  return names;
}

/// The feature with fewer tokens, between guards: what lies behind a row is NaN.
Feature sized(const std::string& name, std::int64_t dim, std::int64_t dim_v) {
  Feature f = feature_named(name);
  f.dim = dim, f.dim_v = dim_v;
  if (f.how.strides == Strides::dense) f.how.strides = Strides::odd;
  for (std::int64_t& s : f.sq) s = std::min<std::int64_t>(s, 40);
  for (std::int64_t& s : f.used_q) s = std::min<std::int64_t>(s, 40);
  return f;
}

void add(std::vector<Cell>& all, std::size_t turn, std::int64_t dim, std::int64_t dim_v,
         const Recipe& recipe) {
  for (std::size_t n = turn;; ++n) {
    const std::string& name = turns()[n % turns().size()];
    Cell cell{recipe.name + "_" + std::to_string(dim) + "_" + std::to_string(dim_v) + "_" + name,
              recipe, sized(name, dim, dim_v)};
    if (!cell.feature.applies(recipe)) continue;
    cell.feature.tweak(cell.recipe);
    all.push_back(std::move(cell));
    return;
  }
}

std::vector<Cell> cells() {
  std::vector<Cell> all;
  std::size_t turn = 0;
  for (std::int64_t d = 1; d <= 64; ++d, ++turn) {
    add(all, turn, d, 1 + d * 7 % 64, recipes()[turn % recipes().size()]);
  }
  const std::pair<std::int64_t, std::int64_t> large[] = {
      {65, 72},   {72, 65},   {100, 127}, {127, 130}, {130, 100}, {255, 257},
      {257, 255}, {288, 512}, {320, 320}, {512, 288}, {512, 512}, {576, 512}};
  for (const auto& [d, dv] : large) {
    for (std::size_t r = 0; r < recipes().size(); ++r, ++turn) {
      if (!thorough() && d > 256 && r % 2 != turn / recipes().size() % 2) continue;
      add(all, turn, d, dv, recipes()[r]);
    }
  }
  return all;
}

class HeadSize : public testing::TestWithParam<Cell> {};

TEST_P(HeadSize, MatchesModel) {
  const Feature& feature = GetParam().feature;
  Call call = make_call(feature, 5);
  Laid laid = lay_out(call, feature.how);
  if (feature.static_scales) {
    AttentionOptions options = call.options;
    options.recipe = GetParam().recipe;
    const Result<Plan> planned = plan(laid.tensors(), options);
    ASSERT_TRUE(planned.ok()) << planned.status().message();
    add_static_scales(call, laid, planned->recipe(), 0.6);
  }
  ModelOutput model;
  for (const std::string& isa : IsaTurns().next()) {
    SCOPED_TRACE(isa);
    const ForceIsa forced(isa);
    const Outcome outcome = run_call(call, laid, GetParam().recipe);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
    if (model.out.empty()) model = model_attention(call, outcome.model_options());
    expect_matches_model(outcome, call, feature.how.output, model);
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, HeadSize, testing::ValuesIn(cells()),
                         [](const auto& cell) { return cell.param.name; });

/// Bytes that end where a page begins that nobody may touch.
class Edge {
 public:
  explicit Edge(std::size_t bytes) : page_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) {
    whole_ = (bytes + page_ - 1) / page_ * page_;
    memory_ = std::make_unique<Reserve>(whole_ + page_);
    if (memory_->base() == nullptr || !memory_->open(0, whole_)) return;
    at_ = memory_->base() + whole_ - bytes;
  }
  void* data() const { return at_; }

 private:
  std::size_t page_, whole_ = 0;
  std::unique_ptr<Reserve> memory_;
  std::byte* at_ = nullptr;
};

/// The last row of every operand ends with its memory.
TEST(HeadSizes, NothingIsReadOrWrittenBehindTheLastRow) {
  constexpr std::int64_t keys = 133;
  for (const Recipe& recipe : recipes()) {
    for (const std::int64_t queries : {3, 45}) {
      for (const auto& [d, dv] : {std::pair<std::int64_t, std::int64_t>{13, 7}, {65, 130}}) {
        SCOPED_TRACE(testing::Message() << recipe.name << " " << queries << " " << d << " " << dv);
        AttentionTensors t, plain;
        std::vector<Edge> edges;
        std::vector<std::vector<float>> numbers;
        const auto put = [&](TensorView AttentionTensors::* at, std::int64_t tokens,
                             std::int64_t width) {
          numbers.push_back(draw({tokens, width}, 7));
          const std::size_t bytes = numbers.back().size() * sizeof(float);
          edges.emplace_back(bytes);
          ASSERT_NE(edges.back().data(), nullptr);
          std::memcpy(edges.back().data(), numbers.back().data(), bytes);
          plain.*at = TensorView::dense(numbers.back().data(), Format::f32, {1, tokens, 1, width});
          t.*at = plain.*at;
          (t.*at).data = edges.back().data();
        };
        numbers.reserve(4);
        put(&AttentionTensors::q, queries, d);
        put(&AttentionTensors::k, keys, d);
        put(&AttentionTensors::v, keys, dv);
        put(&AttentionTensors::out, queries, dv);
        AttentionOptions options;
        options.recipe = recipe;
        for (const std::string& isa : isas()) {
          const ForceIsa forced(isa);
          if (!forced.available()) continue;
          ASSERT_TRUE(attention(t, options).ok());
          ASSERT_TRUE(attention(plain, options).ok());
          EXPECT_EQ(std::memcmp(t.out.data, plain.out.data, numbers.back().size() * 4), 0) << isa;
        }
      }
    }
  }
}

/// Zeros behind a row by hand are what is padded inside; rotated rows would be other ones.
TEST(HeadSizes, AreThoseWithZerosBehindThem) {
  constexpr std::int64_t tokens = 40;
  for (const Recipe& recipe : recipes()) {
    for (const auto& [d, dv] : {std::pair<std::int64_t, std::int64_t>{61, 27}, {250, 100}}) {
      SCOPED_TRACE(testing::Message() << recipe.name << " " << d << " " << dv);
      const std::int64_t wide = (d + 7) / 8 * 8, wide_v = (dv + 7) / 8 * 8;
      std::vector<float> bytes[2][4];
      AttentionTensors t[2];
      for (const int padded : {0, 1}) {
        int n = 0;
        for (TensorView AttentionTensors::* at : {&AttentionTensors::q, &AttentionTensors::k,
                                                  &AttentionTensors::v, &AttentionTensors::out}) {
          const std::int64_t width = n < 2 ? d : dv, room = padded ? n < 2 ? wide : wide_v : width;
          const std::vector<float> x = draw({tokens, width}, 11 + n);
          std::vector<float>& own = bytes[padded][n++];
          own.assign(static_cast<std::size_t>(tokens * room), 0.0f);
          for (std::int64_t s = 0; s < tokens; ++s) {
            std::copy_n(x.begin() + s * width, width, own.begin() + s * room);
          }
          t[padded].*at = TensorView::dense(own.data(), Format::f32, {1, tokens, 1, room});
        }
      }
      AttentionOptions options;
      options.recipe = recipe;
      options.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(d)));
      ASSERT_TRUE(attention(t[0], options).ok());
      ASSERT_TRUE(attention(t[1], options).ok());
      options.softmax_scale.reset();
      std::vector<float> out = bytes[0][3];
      for (std::int64_t s = 0; s < tokens; ++s) {
        EXPECT_EQ(std::memcmp(&out[s * dv], &bytes[1][3][s * wide_v], dv * sizeof(float)), 0) << s;
      }
      ASSERT_TRUE(attention(t[0], options).ok());  // 1 / sqrt(d) is the scale by default
      EXPECT_EQ(out, bytes[0][3]);
    }
  }
}

/// Codes of two a byte need whole bytes a row.
TEST(HeadSizes, OddRowsOfNibblesAreRefused) {
  std::vector<float> x(5 * 34);
  QuantizeOptions o;
  o.format = Format::nvfp4;
  TensorView view = TensorView::dense(x.data(), Format::f32, {1, 5, 1, 33});
  EXPECT_EQ(quantize_shapes(view, o).status().message(),
            "x: head_dim 33 is odd, and a byte holds two nvfp4 codes of a row");
  AttentionTensors t;
  for (int d = 0; d < 3; ++d) view.stride[d] += view.stride[d] % 2;  // of whole bytes, too
  t.q = t.k = t.v = t.out = view;
  t.k.format = Format::nvfp4;
  const Status s = plan(t, {}).status();
  EXPECT_NE(s.message().find("k: extent 33 of dimension 3 is not a multiple of 2 packed nvfp4"),
            std::string::npos)
      << s.message();
}

}  // namespace
}  // namespace qattn::test
