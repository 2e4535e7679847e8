// What nobody has looked at before a GPU does: NaN and Inf in operands, and index tensors that hold
// nonsense.
#include "conformance/bad_input.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "emulated/emulated_backend.hpp"
#include "emulated/matrix.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

/// One timing a call, in turn: there are dozens of calls.
RunCall in_turn(const Recipe& recipe) {
  return [recipe, n = std::size_t{0}](const Call& call, Laid& laid) mutable {
    return run_emulated(call, laid, recipe, every_timing().subspan(n++ % every_timing().size(), 1));
  };
}

/// A recipe on one of the GPUs whose kernels differ.
struct OnGpu {
  Recipe recipe;
  int architecture;
  int consumers = 0;      ///< of Hopper's kernel; 0: what it takes, which is 2 here
  bool shared_p = false;  ///< P in shared memory, D 128
};

class EmulatedBadInput : public testing::TestWithParam<OnGpu> {
 protected:
  const Recipe& recipe() const { return GetParam().recipe; }
  Feature feature(Format wanted = Format::bf16) const {
    Feature f = bad_input_feature();
    // P V in two halves, but of u8 P, which has no such kernel.
    if (GetParam().consumers == 3) f.dim = f.dim_v = recipe().p == Format::u8 ? 64 : 128;
    if (GetParam().shared_p) f.dim = f.dim_v = 128;
    return with_inputs(f, recipe(), wanted);
  }
  bool again() const { return !free_scales(recipe().v) && GetParam().architecture == 90; }

 private:
  OnArchitecture on_{GetParam().architecture};
  ForceSplitKv forced_{0, 0, GetParam().consumers, GetParam().shared_p ? 1 : -1};
  // The kernels that make Q's codes have P in registers.
  std::optional<LeaveQueries> prepared_ =
      GetParam().shared_p ? std::optional<LeaveQueries>(std::in_place, false) : std::nullopt;
};

TEST_P(EmulatedBadInput, StaysInItsPlace) {
  expect_bad_input_stays(feature(), in_turn(recipe()), again());
}

TEST_P(EmulatedBadInput, StaysInItsPlaceWhereKeysAreSplit) {
  const ForceSplitKv forced(0, 2);
  expect_bad_input_stays(feature(), in_turn(recipe()), again(), BadValues::one_each);
}

TEST_P(EmulatedBadInput, SoftcapDoesNotHideIt) {
  Feature f = feature(Format::f16);
  f.options.softcap = 2.0f;
  expect_bad_input_stays(f, in_turn(recipe()), again(), BadValues::one_each);
}

TEST_P(EmulatedBadInput, StaysInItsPlaceWithoutSharedScales) {
  Recipe recipe = this->recipe();
  recipe.smooth_k = Toggle::off;
  // e4m3 P has no room for V's scales; per channel they leave bad tokens out.
  if (recipe.v == Format::s8) recipe.v_scale.granularity = Granularity::per_token;
  Feature f = feature(Format::f16);
  f.how.strides = Strides::odd;
  expect_bad_input_stays(f, in_turn(recipe), false, BadValues::one_each);
}

TEST_P(EmulatedBadInput, BadKeyAndValue) {
  Recipe recipe = this->recipe();
  if (recipe.v != Format::s8 || GetParam().architecture == 90) {
    GTEST_SKIP() << "rows have a mean of V's codes, or 16-bit V";
  }
  recipe.smooth_k = Toggle::off, recipe.v_scale.granularity = Granularity::per_token;
  expect_bad_pair_stays(feature(Format::f16), in_turn(recipe));
}

TEST_P(EmulatedBadInput, ChannelScales) {
  Recipe recipe = this->recipe();
  if (!free_scales(recipe.v)) GTEST_SKIP() << "V has no scales";
  recipe.v_scale.granularity = Granularity::per_channel;
  expect_bad_input_stays(feature(), in_turn(recipe), false, BadValues::one_each);
}

TEST_P(EmulatedBadInput, SmoothedQueries) {
  Recipe recipe = this->recipe();
  if (recipe.qk != Format::s8) GTEST_SKIP() << "smooth_q is for quantised Q";
  if (recipe.v == Format::e4m3 && GetParam().architecture == 90) {
    GTEST_SKIP() << "not on Hopper";
  }
  recipe.smooth_q = Toggle::on, recipe.smooth_k = Toggle::off;
  recipe.q_scale = {Granularity::per_token, 24, 8};
  if (recipe.v == Format::s8) recipe.v_scale.granularity = Granularity::per_token;
  expect_bad_input_stays(feature(), in_turn(recipe));
}

TEST_P(EmulatedBadInput, WithoutCausalMask) {
  // Every row sees the bad key: nothing but the sequence and the head tells rows apart.
  Feature f = feature();
  f.options.causal = false;
  f.sq = {100, 100};
  const Call call = make_call(f, 5);
  for (const Operand operand : {Operand::k, Operand::v}) {
    Laid laid = lay_out(call, f.how);
    const RunCall run = in_turn(recipe());
    const Outcome clean = run(call, laid);
    poke(laid, call, operand, bad_b, bad_h, bad_key, bad_d, -INFINITY);
    const Outcome now = run(call, laid);
    ASSERT_FALSE(HasFailure());
    for (std::int64_t row = 0; row < call.total_rows(); ++row) {
      const bool bad = row / 400 == bad_b && row / 100 % 4 / 2 == bad_h;
      const float* out = &now.out[row * call.dim_v];
      ASSERT_EQ(std::isnan(out[0]), bad) << "row " << row;
      ASSERT_TRUE(bad || std::memcmp(out, &clean.out[row * call.dim_v], 32 * sizeof(float)) == 0);
    }
  }
}

TEST_P(EmulatedBadInput, NanBiasAndSink) {
  expect_bad_bias_and_sink_stay(feature(), in_turn(recipe()));
}

// ---- Index tensors
// -------------------------------------------------------------------------------

struct Unchecked {
  Status status, errors;
  std::vector<float> out, lse;
  std::string violation;
};

/// Without the host's checks; the inputs as they are now, the mask perhaps smaller.
Unchecked run_unchecked(const Call& call, Laid& laid, const Recipe& recipe,
                        const TensorView* mask = nullptr) {
  const EmulatedBackend backend(architecture_for(recipe), false);
  laid.out.clear();
  laid.lse.clear();
  laid.freeze();
  AttentionOptions options = call.options;
  options.recipe = recipe;
  AttentionTensors tensors = laid.tensors();
  if (mask != nullptr) tensors.mask = *mask;
  Unchecked run;
  run.status = attention(tensors, options);
  run.errors = device_errors({});
  run.out = laid.read_out(call);
  run.lse = laid.read_lse(call);
  run.violation = laid.violation();
  return run;
}

/// Sequence `bad` alone becomes NaN (or nothing is written: `unknown`), and the device says `what`.
void expect_one_bad(const Call& call, const Unchecked& now, const Unchecked& clean,
                    std::int64_t bad, bool unknown, const std::string& what) {
  ASSERT_TRUE(now.status.ok()) << now.status.message();
  EXPECT_EQ(now.violation, "");
  EXPECT_NE(now.errors.message().find(what), std::string::npos) << now.errors.message();
  for (std::size_t n = 0; n < call.sequences.size(); ++n) {
    const auto b = static_cast<std::int64_t>(n);
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 0; i < call.sequences[n].room_q; ++i) {
        const std::int64_t row = call.row(b, h, i);
        for (std::int64_t c = 0; c < call.dim_v; ++c) {
          const float x = now.out[row * call.dim_v + c];
          // What nobody writes is NaN, too: the outputs' sentinel.
          ASSERT_TRUE(b == bad ? std::isnan(x) : x == clean.out[row * call.dim_v + c])
              << "sequence " << b << " head " << h << " row " << i << " channel " << c << ": " << x;
        }
        ASSERT_TRUE(b == bad ? std::isnan(now.lse[row]) : now.lse[row] == clean.lse[row])
            << "LSE of sequence " << b << " row " << i << (unknown ? " (unknown rows)" : "");
      }
    }
  }
}

struct BadIndex {
  const char* name;
  Tensor Laid::* tensor;
  Index at;
  double value;
  const char* what;
  bool unknown = false;  ///< where the rows lie is what the entry says
};

class EmulatedBadIndex : public testing::TestWithParam<Recipe> {
 protected:
  void sweep(const Feature& row, std::int64_t bad, std::initializer_list<BadIndex> entries) {
    for (const bool softcap : {false, true}) {  // both variants of the kernels
      Feature f = with_inputs(row, GetParam(), Format::f16);
      f.options.softcap = softcap ? 3.0f : 0.0f;
      const Call call = make_call(f, 5);
      for (const BadIndex& entry : entries) {
        SCOPED_TRACE(std::string(entry.name) + " = " + std::to_string(entry.value));
        Laid laid = lay_out(call, f.how);
        const Unchecked clean = run_unchecked(call, laid, GetParam());
        ASSERT_TRUE(clean.status.ok()) << clean.status.message();
        ASSERT_TRUE(clean.errors.ok()) << clean.errors.message();
        (laid.*entry.tensor).set(entry.at, entry.value);
        const Unchecked now = run_unchecked(call, laid, GetParam());
        expect_one_bad(call, now, clean, bad, entry.unknown, entry.what);
        if (HasFailure()) return;
        // With validate the entry is named before anything runs.
        const EmulatedBackend backend(architecture_for(GetParam()), false);
        AttentionOptions options = call.options;
        options.recipe = GetParam();
        options.validate = true;
        EXPECT_EQ(attention(laid.tensors(), options).code(), Code::invalid_argument);
      }
    }
  }
};

constexpr const char* length_error = "cu_seqlens or seqused";

TEST_P(EmulatedBadIndex, PackedSequences) {
  Feature f;
  f.heads_q = 2, f.heads_k = 1, f.options.causal = true;
  f.sq = {40, 70, 20}, f.sk = {130, 90, 65};
  f.how.packed_q = f.how.packed_k = true;
  // The last entry belongs to the last sequence alone.
  sweep(f, 2,
        {{"cu_seqlens_k", &Laid::cu_k, {3}, 1e9, length_error},
         {"cu_seqlens_k", &Laid::cu_k, {3}, -5, length_error},
         {"cu_seqlens_k", &Laid::cu_k, {3}, 286, length_error},
         {"cu_seqlens_k", &Laid::cu_k, {3}, 219, length_error},
         {"cu_seqlens_q", &Laid::cu_q, {3}, 1e9, length_error, true},
         {"cu_seqlens_q", &Laid::cu_q, {3}, 109, length_error, true}});
}

/// What packed sequences are where other entries of cu_seqlens are wrong.
class EmulatedBadLengths : public testing::TestWithParam<Recipe> {
 protected:
  enum class Rows { as_before, spoilt, other };
  bool packed_q_ = true;
  Recipe recipe_ = GetParam();

  /// `fate(b, i)`: of row i of sequence b.
  template <class Fate>
  void expect(Tensor Laid::* tensor, std::int64_t at, double value, Fate fate) {
    for (const int splits : {0, 2}) {
      SCOPED_TRACE(std::to_string(at) + ": " + std::to_string(value));
      const ForceSplitKv forced(0, splits);
      Feature f = with_inputs(Feature(), recipe_, Format::f16);
      f.heads_q = 2, f.heads_k = 1, f.options.causal = true;
      f.sq = {40, 150, 20}, f.sk = {130, 190, 65};
      f.how.packed_q = packed_q_, f.how.packed_k = true;
      if (!packed_q_) f.sq = {40, 40, 40};
      const Call call = make_call(f, 5);
      Laid laid = lay_out(call, f.how);
      const Unchecked clean = run_unchecked(call, laid, recipe_);
      ASSERT_TRUE(clean.errors.ok()) << clean.errors.message();
      (laid.*tensor).set({at}, value);
      const Unchecked now = run_unchecked(call, laid, recipe_);
      ASSERT_TRUE(now.status.ok()) << now.status.message();
      EXPECT_EQ(now.violation, "");
      EXPECT_NE(now.errors.message().find(length_error), std::string::npos);
      for (std::int64_t b = 0; b < 3; ++b) {
        for (std::int64_t h = 0; h < call.heads_q; ++h) {
          for (std::int64_t i = 0; i < call.sequences[static_cast<std::size_t>(b)].room_q; ++i) {
            const std::int64_t row = call.row(b, h, i);
            const Rows wanted = fate(b, i);
            for (std::int64_t c = 0; c < call.dim_v; ++c) {
              const float x = now.out[row * call.dim_v + c];
              const bool right = wanted == Rows::as_before ? x == clean.out[row * call.dim_v + c]
                                 : wanted == Rows::spoilt  ? std::isnan(x)
                                                           : std::isfinite(x);
              ASSERT_TRUE(right) << "sequence " << b << " head " << h << " row " << i << ": " << x;
            }
            ASSERT_TRUE(wanted == Rows::other ||
                        std::isnan(now.lse[row]) == (wanted == Rows::spoilt));
          }
        }
      }
    }
  }
};

TEST_P(EmulatedBadLengths, TokensOfNoSequenceBecomeNaN) {
  expect(&Laid::cu_q, 0, 5, [](std::int64_t b, std::int64_t i) {
    return b > 0 ? Rows::as_before : i < 5 ? Rows::spoilt : Rows::other;
  });
  expect(&Laid::cu_q, 3, 200, [](std::int64_t b, std::int64_t i) {
    return b < 2 ? Rows::as_before : i < 10 ? Rows::other : Rows::spoilt;
  });
  expect(&Laid::cu_k, 0, 5,
         [](std::int64_t b, std::int64_t) { return b > 0 ? Rows::as_before : Rows::other; });
  expect(&Laid::cu_k, 3, 380,
         [](std::int64_t b, std::int64_t) { return b < 2 ? Rows::as_before : Rows::other; });
}

TEST_P(EmulatedBadLengths, SequencesThatShareTokensAreAllNaN) {
  const auto all = [](std::int64_t, std::int64_t) { return Rows::spoilt; };
  expect(&Laid::cu_q, 2, 20, all);
  expect(&Laid::cu_k, 2, 100, all);
}

TEST_P(EmulatedBadLengths, KeysThatShareTokensSpoilDenseQueries) {
  packed_q_ = false;
  expect(&Laid::cu_k, 2, 100, [](std::int64_t, std::int64_t) { return Rows::spoilt; });
  expect(&Laid::cu_k, 3, 380,
         [](std::int64_t b, std::int64_t) { return b < 2 ? Rows::as_before : Rows::other; });
}

TEST_P(EmulatedBadLengths, BeyondTheEndSpoilsItsNeighbours) {
  // Where bisection would look first.
  expect(&Laid::cu_q, 1, 1e9,
         [](std::int64_t b, std::int64_t) { return b == 2 ? Rows::as_before : Rows::spoilt; });
  if (free_scales(GetParam().v)) {
    recipe_.v_scale = {Granularity::per_block_channel, 64, 0};
    expect(&Laid::cu_k, 1, 1e9,
           [](std::int64_t b, std::int64_t) { return b == 2 ? Rows::as_before : Rows::spoilt; });
    recipe_ = GetParam();
  }
  const auto last_two = [](std::int64_t b, std::int64_t) {
    return b == 0 ? Rows::as_before : Rows::spoilt;
  };
  expect(&Laid::cu_q, 2, 1e9, last_two);
  expect(&Laid::cu_k, 2, -7, last_two);
}

TEST_P(EmulatedBadIndex, FewQueriesOfSplitKeys) {
  const ForceSplitKv forced(0, 3);
  Feature f;
  f.heads_q = 4, f.heads_k = 1, f.options.causal = true;
  f.sq = {4, 7, 2}, f.sk = {130, 90, 265};
  f.how.packed_q = f.how.packed_k = true;
  sweep(f, 2,
        {{"cu_seqlens_k", &Laid::cu_k, {3}, 1e9, length_error},
         {"cu_seqlens_k", &Laid::cu_k, {3}, 219, length_error},
         {"cu_seqlens_q", &Laid::cu_q, {3}, 10, length_error, true}});
  f = Feature();
  f.heads_q = 4, f.heads_k = 1, f.how.page_size = 64;
  f.sq = {3, 3}, f.sk = {384, 384}, f.used_k = {350, 330};
  sweep(f, 1,
        {{"page_table", &Laid::pages, {1, 0}, -1, "page_table"},
         {"page_table", &Laid::pages, {1, 4}, 1e9, "page_table"},
         {"seqused_k", &Laid::used_k, {1}, 385, length_error}});
}

TEST_P(EmulatedBadIndex, AMaskThatEndsBeforeASequenceDoes) {
  Feature f = with_inputs(Feature(), GetParam(), Format::bf16);
  f.heads_q = 2, f.heads_k = 1, f.mask = MaskShape::full;
  f.sq = {40, 70, 20}, f.sk = {65, 90, 64};
  f.how.packed_q = f.how.packed_k = true;
  for (const bool boolean : {false, true}) {
    f.boolean_mask = boolean;
    const Call call = make_call(f, 5);
    Laid laid = lay_out(call, f.how);
    const Unchecked clean = run_unchecked(call, laid, GetParam());
    ASSERT_TRUE(clean.errors.ok()) << clean.errors.message();
    for (const int dimension : {2, 3}) {
      TensorView mask = laid.tensors().mask;
      ASSERT_EQ(mask.shape[dimension], dimension == 2 ? 70 : 90);
      --mask.shape[dimension];
      expect_one_bad(call, run_unchecked(call, laid, GetParam(), &mask), clean, 1, false,
                     length_error);
      if (HasFailure()) return;
    }
  }
}

TEST_P(EmulatedBadIndex, UsedLengths) {
  Feature f;
  f.heads_q = 2, f.heads_k = 1;
  f.sq = {70, 70}, f.sk = {150, 150}, f.used_q = {70, 66}, f.used_k = {150, 90};
  f.how.seqused_q = f.how.seqused_k = true;
  sweep(f, 1,
        {{"seqused_k", &Laid::used_k, {1}, 151, length_error},
         {"seqused_k", &Laid::used_k, {1}, -1, length_error},
         {"seqused_q", &Laid::used_q, {1}, 71, length_error},
         {"seqused_q", &Laid::used_q, {1}, -2e9, length_error}});
}

TEST_P(EmulatedBadIndex, Pages) {
  for (const std::int64_t size : {16, 64}) {
    Feature f;
    f.heads_q = 2, f.heads_k = 1, f.how.page_size = size;
    f.sq = {40, 40}, f.sk = {192, 192}, f.used_k = {150, 130};
    sweep(f, 1,
          {{"page_table", &Laid::pages, {1, 0}, -1, "page_table"},
           {"page_table", &Laid::pages, {1, 1}, 1e9, "page_table"},
           {"seqused_k", &Laid::used_k, {1}, 193, length_error}});
  }
}

// ---- Given scales
// --------------------------------------------------------------------------------

class EmulatedBadScale : public testing::TestWithParam<Recipe> {};

/// What the host refuses where it looks: here head 1 of sequence 1 becomes NaN where it has that
/// scale, and nothing else changes.
TEST_P(EmulatedBadScale, IsNaN) {
  Recipe recipe = GetParam();
  if (!has_codes(recipe.qk)) GTEST_SKIP() << "no operand has codes";
  recipe.q_scale.granularity = recipe.k_scale.granularity = Granularity::per_token;
  Feature f = with_inputs(Feature(), recipe, Format::f16);
  f.heads_q = f.heads_k = 2, f.sq = {40, 40}, f.sk = {150, 150};
  Call call = make_call(f, 6);
  Laid laid = lay_out(call, f.how);
  AttentionOptions options = call.options;
  options.recipe = recipe;
  {
    const EmulatedBackend backend(architecture_for(recipe), false);
    add_static_scales(call, laid, plan(laid.tensors(), options)->recipe(), 1);
  }
  const Unchecked clean = run_unchecked(call, laid, recipe);
  ASSERT_TRUE(clean.status.ok()) << clean.status.message();
  for (Tensor Laid::* tensor : {&Laid::q_scale, &Laid::k_scale, &Laid::v_scale}) {
    TensorView view = (laid.*tensor).view();
    if (view.rank != 3) continue;  // V of 16 bits has none
    auto* place = static_cast<float*>(view.data) + view.stride[0] + view.stride[1];
    const float before = *place;
    for (const float bad : {0.0f, -before, INFINITY, -INFINITY, NAN}) {
      SCOPED_TRACE((tensor == &Laid::q_scale   ? "q "
                    : tensor == &Laid::k_scale ? "k "
                                               : "v ") +
                   std::to_string(bad));
      *place = bad;
      const Unchecked now = run_unchecked(call, laid, recipe);
      *place = before;
      ASSERT_TRUE(now.status.ok()) << now.status.message();
      for (std::int64_t n = 0; n < 4 * 40; ++n) {
        const std::int64_t b = n / 80, h = n / 40 % 2, i = n % 40;
        const std::int64_t at = call.row(b, h, i) * call.dim_v;
        if (b == 1 && h == 1 && (tensor != &Laid::q_scale || i == 0)) {
          ASSERT_TRUE(std::isnan(now.out[at])) << "row " << i << ": " << now.out[at];
        } else {
          for (std::int64_t c = 0; c < call.dim_v; ++c) {
            ASSERT_EQ(now.out[at + c], clean.out[at + c]) << b << " " << h << " " << i;
          }
        }
      }
    }
  }
}

const auto recipe_name = [](const auto& recipe) { return recipe.param.name; };

std::vector<OnGpu> recipes_on_gpus() {
  std::vector<OnGpu> all;
  for (const Recipe& recipe : gpu_recipes()) {
    for (const int architecture : {89, 90}) all.push_back({recipe, architecture});
    if (recipe.v == Format::e4m3) all.push_back({recipe, 120});
    if (has_codes(recipe.v)) all.push_back({recipe, 90, 3});
    if (has_codes(recipe.v) || !has_codes(recipe.qk)) all.push_back({recipe, 90, 0, true});
  }
  for (const Recipe& recipe : grouped_recipes()) all.push_back({recipe, 120});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cover, EmulatedBadInput, testing::ValuesIn(a_third(recipes_on_gpus(), 1)),
                         [](const auto& on) {
                           return on.param.recipe.name + "_sm" +
                                  std::to_string(on.param.architecture) +
                                  (on.param.consumers > 0 ? "_three_consumers" : "") +
                                  (on.param.shared_p ? "_shared_p" : "");
                         });
INSTANTIATE_TEST_SUITE_P(Cover, EmulatedBadScale, testing::ValuesIn(gpu_recipes()), recipe_name);
INSTANTIATE_TEST_SUITE_P(Cover, EmulatedBadIndex, testing::ValuesIn(every_recipe()), recipe_name);
INSTANTIATE_TEST_SUITE_P(Cover, EmulatedBadLengths, testing::ValuesIn(every_recipe()), recipe_name);

}  // namespace
}  // namespace qattn::test
