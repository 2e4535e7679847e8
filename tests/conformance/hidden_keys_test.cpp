// Keys that no query sees have no influence, whatever they hold: not a bit of the results changes
// with them, on every instruction set of this CPU. And keys under biases like finfo.min have none
// on what keys share.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "conformance/runner.hpp"

namespace qattn::test {
namespace {

constexpr std::int64_t queries = 5, keys = 150;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// A way to hide keys: what a call has, and which keys nobody sees then.
struct Hiding {
  std::string name;
  std::function<void(Call&)> apply;
  std::function<bool(std::int64_t)> hides;
};

bool is_padding(std::int64_t j) { return j >= 100 || j == 3 || j == 17; }

/// A mask of that shape (stride of each dimension, the last one 1) with `visible` and `hidden`.
Mask mask_of(std::vector<std::int64_t> shape, bool boolean, float visible, float hidden) {
  Mask mask;
  mask.boolean = boolean;
  mask.shape = shape;
  std::int64_t rows = 1;
  for (std::size_t n = 0; n + 1 < shape.size(); ++n) rows *= shape[n];
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t j = 0; j < keys; ++j) {
      // Of the keys that are no padding each row misses other ones, if rows differ at all.
      const bool missed = is_padding(j) || (rows > 1 && (j + row) % 3 == 0);
      mask.values.push_back(missed ? hidden : visible);
    }
  }
  return mask;
}

void hide_in_function(const void*, const ScoreRun& run, std::uint8_t* visible) {
  for (std::int64_t j = 0; j < run.count; ++j) {
    visible[j] = visible[j] != 0 && !is_padding(run.key + j);
  }
}

std::vector<Hiding> every_hiding() {
  std::vector<Hiding> all;
  const auto masked = [&](const std::string& name, Mask mask) {
    all.push_back({name, [mask](Call& call) { call.mask = mask; }, is_padding});
  };
  masked("padding", mask_of({1, 1, 1, keys}, true, 1, 0));
  masked("infinite_biases", mask_of({1, 1, 1, keys}, false, 0.5f, -infinity));
  masked("every_row", mask_of({1, 1, queries, keys}, true, 1, 0));
  masked("every_head", mask_of({1, 4, 1, keys}, true, 1, 0));
  Mask bits = mask_of({1, 1, queries, keys}, true, 1, 0);
  bits.bits = true;
  masked("bits", bits);
  all.push_back({"window",
                 [](Call& call) { call.options.causal = true, call.options.window_left = 40; },
                 [](std::int64_t j) { return j < keys - queries - 40; }});
  all.push_back({"blocks",
                 [](Call& call) {
                   call.options.block_mask_q = call.options.block_mask_k = 64;
                   call.block_mask.boolean = true;
                   call.block_mask.shape = {1, 1, 1, 3};
                   call.block_mask.values = {1, 0, 1};
                 },
                 [](std::int64_t j) { return j / 64 == 1; }});
  all.push_back({"function",
                 [](Call& call) {
                   call.options.mask_function = {hide_in_function, nullptr};
                 },
                 is_padding});
  return all;
}

class HiddenKeys : public testing::TestWithParam<Recipe> {
 protected:
  static Call call_with(std::int64_t rows = queries) {
    Feature feature;
    feature.sq = {rows}, feature.sk = {keys};
    return make_call(feature, 3);
  }

  static void fill(Call& call, const std::function<bool(std::int64_t)>& hides, float value) {
    Sequence& seq = call.sequences[0];
    for (std::vector<float>* x : {&seq.k, &seq.v}) {
      for (std::size_t n = 0; n < x->size(); ++n) {
        if (hides(static_cast<std::int64_t>(n) / call.dim % keys)) (*x)[n] = value;
      }
    }
  }

  static void on_every_isa(const std::function<void()>& expect) {
    for (const std::string& isa : isas()) {
      SCOPED_TRACE(isa);
      const ForceIsa forced(isa);
      if (forced.available()) expect();
      if (HasFailure()) return;
    }
  }

  static Outcome run(const Call& call, const Recipe& recipe) {
    Laid laid = lay_out(call, {});
    Outcome outcome = run_call(call, laid, recipe);
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    return outcome;
  }
};

TEST_P(HiddenKeys, HaveNoInfluence) {
  on_every_isa([&] {
    for (const Hiding& hiding : every_hiding()) {
      SCOPED_TRACE(hiding.name);
      Call call = call_with();
      hiding.apply(call);
      const Outcome want = run(call, GetParam());
      for (const float x : want.out) EXPECT_TRUE(std::isfinite(x));
      for (const float value : {0.0f, 1000.0f, -3e38f, infinity, std::nanf("")}) {
        fill(call, hiding.hides, value);
        EXPECT_TRUE(same_bits(want, run(call, GetParam()))) << "filled with " << value;
      }
    }
  });
}

/// Many rows, so that tiles are prepared before the tasks: another way through the code.
TEST_P(HiddenKeys, HaveNoInfluenceOnManyRows) {
  on_every_isa([&] {
    Call call = call_with(70);
    call.mask = mask_of({1, 1, 70, keys}, true, 1, 0);
    const Outcome want = run(call, GetParam());
    fill(call, is_padding, std::nanf(""));
    EXPECT_TRUE(same_bits(want, run(call, GetParam())));
  });
}

/// Keys as large as uninitialised memory may be, under the masks of padding that models add.
TEST_P(HiddenKeys, HaveNoPartInWhatIsSharedUnderTheLowestBias) {
  Call alone = call_with();
  alone.mask = mask_of({1, 1, 1, keys}, false, 0, -infinity);
  on_every_isa([&] {
    for (const float bias : {-3.4028235e38f, -1e9f, -1e4f}) {
      SCOPED_TRACE(bias);
      Call call = call_with();
      call.mask = mask_of({1, 1, 1, keys}, false, 0, bias);
      fill(call, is_padding, 1000.0f);
      const Outcome want = run(alone, GetParam()), got = run(call, GetParam());
      std::vector<double> exact(want.out.begin(), want.out.end());
      EXPECT_LE(distance(got.out, exact, call.dim_v).nrmse, 1e-2);
    }
  });
}

/// A row that sees nothing but such keys gives them equal weights, as in torch.
TEST_P(HiddenKeys, UnderTheLowestBiasAloneStayUniform) {
  on_every_isa([&] {
    Call call = call_with();
    call.mask.shape = {1, 1, 1, keys};
    call.mask.values.assign(keys, -1e9f);
    Call free = call;
    free.mask = {};
    for (Call* c : {&call, &free}) {
      std::fill(c->sequences[0].q.begin(), c->sequences[0].q.end(), 0.0f);
    }
    const Outcome want = run(free, GetParam()), got = run(call, GetParam());
    std::vector<double> exact(want.out.begin(), want.out.end());
    EXPECT_LE(distance(got.out, exact, call.dim_v).nrmse, 1e-2);
  });
}

INSTANTIATE_TEST_SUITE_P(Cpu, HiddenKeys, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& recipe) { return recipe.param.name; });

}  // namespace
}  // namespace qattn::test
