// The output projection: the rows of attention(), as they are in out's format, times the weight.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "conformance/runner.hpp"
#include "qattn/reference.hpp"

namespace qattn::test {
namespace {

/// Numbers in [-1, 1) without a pattern.
class Numbers {
 public:
  explicit Numbers(std::uint64_t seed) : state_(seed) {}
  double next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 40) / 8388608.0 - 1.0;
  }

 private:
  std::uint64_t state_;
};

/// Weight, bias and result of one call, which has these beside its own tensors.
struct Projected {
  Tensor weight, bias, out;
  std::int64_t features, tokens;
  AttentionTensors tensors;

  Projected(const Call& call, const Laid& laid, std::int64_t e, bool with_bias = true)
      : features(e), tokens(call.rows()), tensors(laid.tensors()) {
    const Format format = laid.how.output;
    const std::int64_t width = call.heads_q * call.dim_v;
    Numbers numbers(1);
    weight = Tensor(format, {e, width}, laid.how.strides);
    for (std::int64_t i = 0; i < e; ++i) {
      for (std::int64_t j = 0; j < width; ++j) weight.set({i, j}, numbers.next() / 4);
    }
    const auto batch = static_cast<std::int64_t>(call.sequences.size());
    out = laid.packed_q ? Tensor(format, {tokens, e}, laid.how.strides)
                        : Tensor(format, {batch, tokens, e}, laid.how.strides);
    tensors.projection = weight.view();
    tensors.out = out.view();
    if (with_bias) {
      bias = Tensor(format, {e}, Strides::dense);
      for (std::int64_t i = 0; i < e; ++i) bias.set({i}, numbers.next());
      tensors.projection_bias = bias.view();
      bias.freeze();
    }
    weight.freeze();
  }

  double at(bool packed, std::int64_t b, std::int64_t row, std::int64_t e) const {
    return packed ? out.get({row, e}) : out.get({b, row, e});
  }
};

/// One result by its definition, and the sum of its terms' magnitudes.
struct Sum {
  double value = 0, magnitude = 0;
};
template <class T>
Sum sum_of(const Call& call, const Projected& x, const std::vector<T>& heads, std::int64_t b,
           std::int64_t i, std::int64_t e) {
  Sum sum;
  if (x.bias.present()) sum.value = x.bias.get({e});
  sum.magnitude = std::abs(sum.value);
  for (std::int64_t h = 0; h < call.heads_q; ++h) {
    for (std::int64_t d = 0; d < call.dim_v; ++d) {
      const double term = static_cast<double>(heads[call.row(b, h, i) * call.dim_v + d]) *
                          x.weight.get({e, h * call.dim_v + d});
      sum.value += term;
      sum.magnitude += std::abs(term);
    }
  }
  return sum;
}

/// Row of a packed tensor, or of its batch entry.
std::int64_t row_of(const Call& call, const Laid& laid, std::int64_t b, std::int64_t i) {
  return laid.packed_q ? call.row(b, 0, i) : i;
}

double rounding(Format format) {
  return format == Format::bf16 ? 0x1p-8 : format == Format::f16 ? 0x1p-11 : 0x1p-24;
}

void expect_products(const Call& call, const Laid& laid, const Projected& x,
                     const std::vector<float>& heads) {
  const auto width = static_cast<double>(call.heads_q * call.dim_v);
  for (std::size_t b = 0; b < call.sequences.size(); ++b) {
    const auto n = static_cast<std::int64_t>(b);
    for (std::int64_t i = 0; i < call.sequences[b].room_q; ++i) {
      for (std::int64_t e = 0; e < x.features; ++e) {
        const Sum want = sum_of(call, x, heads, n, i, e);
        const double got = x.at(laid.packed_q, n, row_of(call, laid, n, i), e);
        const double bound = rounding(laid.how.output) * std::abs(want.value) +
                             width * 0x1p-24 * want.magnitude + 0x1p-24;
        ASSERT_LE(std::abs(got - want.value), bound)
            << "sequence " << b << " row " << i << " feature " << e << ": " << got;
      }
    }
  }
}

/// Plans and runs in a workspace of garbage, behind whose end nothing may be written.
Status run_guarded(const AttentionTensors& tensors, const AttentionOptions& options) {
  const Result<Plan> planned = plan(tensors, options);
  if (!planned.ok()) return planned.status();
  constexpr std::size_t alignment = 64, guard = 4096;
  const std::size_t bytes = planned->workspace_bytes();
  std::vector<std::uint8_t> workspace(bytes + alignment + guard, 0xFF);
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
  std::uint8_t* begin = workspace.data() + (alignment - address % alignment) % alignment;
  const Status status = run(*planned, tensors, options, begin, bytes);
  for (const std::uint8_t* at = begin + bytes; at < workspace.data() + workspace.size(); ++at) {
    if (*at != 0xFF) return {Code::internal, "a byte past the workspace was written"};
  }
  return status;
}

struct Cell {
  Recipe recipe;
  const Feature* feature;
};

void PrintTo(const Cell& cell, std::ostream* out) {
  *out << cell.recipe.name << " " << cell.feature->name;
}

/// Hq * Dv is odd: pairs and eights of channels end behind the last head.
const std::vector<Feature>& odd_widths() {
  static const std::vector<Feature> rows = [] {
    std::vector<Feature> all;
    for (const char* name : {"strides_odd", "f16", "bf16", "varlen_split", "decode"}) {
      Feature f = feature_named(name);
      f.name += "_odd", f.heads_q = f.heads_k = 3, f.dim = 13, f.dim_v = 7;
      if (f.how.input != Format::f32) f.how.strides = Strides::odd;
      all.push_back(f);
    }
    return all;
  }();
  return rows;
}

std::vector<Cell> cells() {
  std::vector<Cell> all;
  for (const Feature& feature : odd_widths()) {
    for (const char* recipe : {"f32", "int8_full"}) {
      all.push_back({*recipe_named(recipe), &feature});
    }
  }
  for (const Recipe& recipe : recipes()) {
    for (const char* name : {"plain",
                             "gqa_8_2",
                             "causal",
                             "mask_bool",
                             "sinks_masked_rows",
                             "varlen_causal_bhsd",
                             "varlen_seqused",
                             "varlen_q_dense_k",
                             "varlen_split",
                             "seqused_q",
                             "paged_24_bhsd",
                             "paged_varlen_q",
                             "decode",
                             "decode_long",
                             "strides_odd",
                             "strides_odd_bhsd_f16",
                             "strides_reversed",
                             "f16",
                             "bf16",
                             "bf16_to_f32",
                             "no_lse"}) {
      const Feature& feature = feature_named(name);
      if (!feature.applies(recipe)) continue;
      all.push_back({recipe, &feature});
      feature.tweak(all.back().recipe);
    }
  }
  return all;
}

class Projection : public testing::TestWithParam<Cell> {};

TEST_P(Projection, IsTheProductOfAttentionsRows) {
  const auto& [recipe, feature] = GetParam();
  const Call call = make_call(*feature, 1);
  Laid laid = lay_out(call, feature->how);
  Projected x(call, laid, 75);  // neither whole panels of 16 nor whole blocks of 64
  AttentionOptions options = call.options;
  options.recipe = recipe;
  for (const std::string& isa : IsaTurns().next()) {
    SCOPED_TRACE(isa);
    const ForceIsa forced(isa);
    const Outcome heads = run_call(call, laid, recipe);
    ASSERT_TRUE(heads.status.ok()) << heads.status.message();
    x.out.clear();
    laid.lse.clear();
    const Status status = run_guarded(x.tensors, options);
    ASSERT_TRUE(status.ok()) << status.message();
    expect_products(call, laid, x, heads.out);
    EXPECT_TRUE(same_bits(laid.read_lse(call), heads.lse));
    EXPECT_TRUE(x.out.guards_intact() && x.weight.unchanged() && x.bias.unchanged());
    EXPECT_EQ(laid.violation(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, Projection, testing::ValuesIn(cells()), [](const auto& cell) {
  return cell.param.recipe.name + "_" + cell.param.feature->name;
});

TEST(ProjectionReference, IsTheProductOfTheReferencesRows) {
  for (const char* name : {"gqa_8_2", "varlen_causal_bhsd", "bhsd", "strides_odd_bhsd_f16"}) {
    SCOPED_TRACE(name);
    const Feature& feature = feature_named(name);
    const Call call = make_call(feature, 2);
    const Laid laid = lay_out(call, feature.how);
    const Exact heads = reference(call, laid);
    const Projected x(call, laid, 21);
    std::vector<double> out(static_cast<std::size_t>(call.total_rows() / call.heads_q * 21));
    std::vector<double> lse(heads.lse.size());
    const Status status = reference_attention(x.tensors, call.options, out, lse);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(lse, heads.lse);
    for (std::size_t b = 0; b < call.sequences.size(); ++b) {
      const auto n = static_cast<std::int64_t>(b);
      for (std::int64_t i = 0; i < call.sequences[b].room_q; ++i) {
        const std::int64_t row = row_of(call, laid, n, i) + (laid.packed_q ? 0 : n * call.rows());
        for (std::int64_t e = 0; e < 21; ++e) {
          const Sum want = sum_of(call, x, heads.out, n, i, e);
          ASSERT_NEAR(out[row * 21 + e], want.value, 1e-12 * (1 + want.magnitude));
        }
      }
    }
  }
}

/// A wide call: several blocks of rows, of columns and of channels.
Feature wide(Format format) {
  Feature f;
  f.sq = {100, 100}, f.sk = {140, 140}, f.heads_q = 10, f.dim = f.dim_v = 64;
  f.how.input = f.how.output = format;
  return f;
}

TEST(ProjectionBits, DependNeitherOnThreadsNorOnOtherRows) {
  for (const Format format : {Format::f32, Format::bf16}) {
    const Feature feature = wide(format);
    Call call = make_call(feature, 3);
    const auto bytes = [&](int threads) {
      const Laid laid = lay_out(call, feature.how);
      Projected x(call, laid, 160);
      AttentionOptions options = call.options;
      options.threads = threads;
      EXPECT_TRUE(attention(x.tensors, options).ok());
      std::vector<double> values;
      for (std::int64_t i = 0; i < 100; ++i) {
        for (std::int64_t e = 0; e < 160; ++e) values.push_back(x.out.get({0, i, e}));
      }
      return values;
    };
    const std::vector<double> both = bytes(1);
    EXPECT_EQ(both, bytes(3));
    call.sequences.resize(1);
    EXPECT_EQ(both, bytes(2));
  }
}

TEST(ProjectionNan, StaysInItsColumnAndItsRows) {
  for (const Format format : {Format::f32, Format::f16, Format::bf16}) {
    const Feature feature = wide(format);
    const Call call = make_call(feature, 4);
    Laid laid = lay_out(call, feature.how);
    Projected clean(call, laid, 40), x(call, laid, 40);
    ASSERT_TRUE(attention(clean.tensors, call.options).ok());
    x.weight.set({5, 333}, std::numeric_limits<double>::quiet_NaN());
    poke(laid, call, Operand::q, 1, 2, 77, 0, std::numeric_limits<double>::quiet_NaN());
    ASSERT_TRUE(attention(x.tensors, call.options).ok());
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t i = 0; i < 100; ++i) {
        for (std::int64_t e = 0; e < 40; ++e) {
          const double got = x.out.get({b, i, e});
          if (e == 5 || (b == 1 && i == 77)) {
            ASSERT_TRUE(std::isnan(got)) << b << " " << i << " " << e << ": " << got;
          } else {
            ASSERT_EQ(got, clean.out.get({b, i, e}));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace qattn::test
