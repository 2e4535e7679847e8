// Scales that callers give, static ones of quantize() and those of attention(), are positive and
// finite, and of what they are told to be made for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn {
namespace {

constexpr float infinite = std::numeric_limits<float>::infinity();
constexpr float no_scales[] = {0.0f, -0.0f, -1.0f, infinite, -infinite, NAN};

/// Every granularity, format and role; the last scale is as wrong as the first.
TEST(StaticScales, ArePositiveAndFinite) {
  using enum Granularity;
  std::vector<float> x(2 * 40 * 3 * 16, 1.0f);
  const TensorView view = TensorView::dense(x.data(), Format::f32, {2, 40, 3, 16});
  int tried = 0;
  for (const Granularity g : {per_tensor, per_head, per_block, per_warp, per_thread, per_token,
                              per_channel, per_block_channel}) {
    for (const Role role : {Role::q, Role::k, Role::v}) {
      for (const Format format : {Format::s8, Format::e4m3, Format::e5m2, Format::e4m3fnuz}) {
        QuantizeOptions o;
        o.format = format, o.role = role, o.scaling = {g, 0, 0};
        const Result<QuantizeShapes> shapes = quantize_shapes(view, o);
        if (!shapes.ok()) continue;  // per_channel and per_block_channel are V's
        std::int64_t count = 1;
        for (int i = 0; i < shapes->scale.rank; ++i) count *= shapes->scale.shape[i];
        for (const float bad : no_scales) {
          for (const std::int64_t place : {std::int64_t{0}, count - 1}) {
            std::vector<std::int8_t> codes(x.size(), -7);
            std::vector<float> scale(count, -7.0f), given(count, 0.5f);
            given[place] = bad;
            QuantizeTensors t{view, shapes->codes, shapes->scale, {}, {}, shapes->scale, {}};
            t.codes.data = codes.data(), t.scale.data = scale.data();
            t.static_scale.data = given.data();
            const Status s = quantize(t, o).status();
            EXPECT_EQ(s.code(), Code::invalid_argument);
            const std::string text = "static_scale: value " + std::to_string(bad) + " at (";
            EXPECT_EQ(s.message().find(text), 0u) << s.message() << " of " << text;
            EXPECT_NE(s.message().find("is not positive and finite"), std::string::npos);
            for (const std::int8_t c : codes) ASSERT_EQ(c, -7);
            for (const float y : scale) ASSERT_EQ(y, -7.0f);
            given[place] = 0.5f;
            EXPECT_TRUE(quantize(t, o).ok());
            ++tried;
          }
        }
      }
    }
  }
  EXPECT_GE(tried, 700);
}

/// Packed sequences: what stands behind the end of one is nobody's scale, as in attention().
TEST(StaticScales, OfTokensThatExist) {
  std::vector<float> x(7 * 2 * 16, 1.0f), scale(2 * 2 * 5), given(2 * 2 * 5, 0.5f);
  std::vector<std::int8_t> codes(x.size());
  std::vector<std::int32_t> cu = {0, 2, 7};
  QuantizeTensors t;
  t.x = TensorView::dense(x.data(), Format::f32, {7, 2, 16});
  t.codes = TensorView::dense(codes.data(), Format::s8, {7, 2, 16});
  t.scale = TensorView::dense(scale.data(), Format::f32, {2, 2, 5});
  t.static_scale = TensorView::dense(given.data(), Format::f32, {2, 2, 5});
  t.cu_seqlens = TensorView::dense(cu.data(), Format::s32, {3});
  given[2] = given[9] = NAN;  // tokens 2 and 4 of the sequence of two
  EXPECT_TRUE(quantize(t, {}).ok());
  given[6] = -1.0f;  // head 1, token 1
  EXPECT_NE(quantize(t, {}).status().message().find("static_scale: value -1.000000 at (0, 1, 1)"),
            std::string::npos);
}

/// attention() refuses scales of V by the same rule, whatever the granularity.
TEST(GivenScales, OfVArePositiveAndFinite) {
  std::vector<float> x(2 * 40 * 3 * 16, 1.0f), out(x.size(), -7.0f);
  for (const char* recipe : {"int8_full", "int8_fp8", "fp8"}) {
    for (const Granularity g : {Granularity::automatic, Granularity::per_tensor,
                                Granularity::per_head, Granularity::per_channel}) {
      AttentionTensors t;
      t.q = t.k = t.v = TensorView::dense(x.data(), Format::f32, {2, 40, 3, 16});
      t.out = t.q;
      t.out.data = out.data();
      AttentionOptions o;
      o.recipe = *recipe_named(recipe);
      o.recipe.v_scale.granularity = g;
      QuantizeOptions quantized;
      quantized.role = Role::v, quantized.format = o.recipe.v, quantized.scaling = o.recipe.v_scale;
      t.v_scale = quantize_shapes(t.v, quantized)->scale;
      std::int64_t count = 1;
      for (int i = 0; i < t.v_scale.rank; ++i) count *= t.v_scale.shape[i];
      for (const float bad : no_scales) {
        std::vector<float> given(count, 0.5f);
        t.v_scale.data = given.data();
        given[count - 1] = bad;
        const Status s = attention(t, o);
        EXPECT_EQ(s.message().find("v_scale: value " + std::to_string(bad) + " at ("), 0u)
            << s.message();
        for (const float y : out) ASSERT_EQ(y, -7.0f);
      }
    }
  }
}

std::string name_of(Format f) { return std::string(info(f).name); }

bool has_codes(Format f) { return info(f).scale != Format::none; }

/// A call with a static scale a head for each operand that becomes codes.
struct StaticCall {
  std::vector<float> x = std::vector<float>(2 * 16 * 3 * 16, 1.0f);
  std::vector<float> out = std::vector<float>(x.size(), -7.0f);
  std::vector<float> scale = std::vector<float>(6, 0.1f);
  AttentionTensors t;
  AttentionOptions o;

  explicit StaticCall(const Recipe& recipe) {
    t.q = t.k = t.v = t.out = TensorView::dense(x.data(), Format::f32, {2, 16, 3, 16});
    t.out.data = out.data();
    o.recipe = recipe;
    o.threads = 1;
    const TensorView given = TensorView::dense(scale.data(), Format::f32, {2, 3});
    if (has_codes(recipe.qk)) {
      t.q_scale = t.k_scale = given;
      o.recipe.q_scale.granularity = o.recipe.k_scale.granularity = Granularity::per_head;
    }
    if (has_codes(recipe.v)) {
      t.v_scale = given;
      o.recipe.v_scale.granularity = Granularity::per_head;
    }
  }
  /// Refused with a message that begins so, at every door, and nothing is written; "": taken.
  void expect(const std::string& start) {
    SCOPED_TRACE(start);
    AttentionOptions untold = o;
    untold.scales_for.reset();
    const Result<Plan> planned = plan(t, untold);
    ASSERT_TRUE(planned.ok()) << planned.status().message();
    void* workspace = std::aligned_alloc(64, (planned->workspace_bytes() + 63) / 64 * 64);
    const Status all[] = {plan(t, o).status(),
                          run(*planned, t, o, workspace, planned->workspace_bytes()),
                          attention(t, o)};
    std::free(workspace);
    for (const Status& s : all) {
      EXPECT_EQ(s.ok(), start.empty()) << s.message();
      EXPECT_EQ(s.message().rfind(start, 0), 0u) << s.message();
      if (!start.empty()) {
        EXPECT_EQ(s.code(), Code::invalid_argument);
      }
    }
    EXPECT_EQ(explain(t, o).rfind("refused: " + start, 0) == 0, !start.empty());
    for (const float y : out) ASSERT_EQ(y == -7.0f, !start.empty());
  }
};

/// Recipes whose operands' scales are free, and one of the caller's own.
std::vector<Recipe> free_recipes() {
  std::vector<Recipe> list;
  for (const char* name : {"int8", "int8_full", "int8_fp8", "fp8", "fp8_p16"}) {
    list.push_back(*recipe_named(name));
  }
  list.push_back(*recipe_named("fp8"));
  list.back().name = "own", list.back().qk = Format::e4m3fnuz;
  return list;
}

/// "NAME_scale: was made for ...", or "" where the operand's formats are one.
std::string clash(const Recipe& recipe, const Recipe& made_for, const char* role) {
  const bool v = *role == 'v';
  const Format own = v ? recipe.v : recipe.qk, other = v ? made_for.v : made_for.qk;
  if (own == other || !has_codes(own)) return "";
  return std::string(role) + "_scale: was made for recipe " + made_for.name + ", " + role + " in " +
         name_of(other) + "; recipe " + recipe.name + " has " + role + " in " + name_of(own);
}

TEST(ScalesFor, EveryRecipeWithScalesOfEveryOther) {
  int taken = 0, refused = 0;
  for (const Recipe& recipe : free_recipes()) {
    for (const Recipe& made_for : free_recipes()) {
      StaticCall call(recipe);
      call.expect("");
      std::fill(call.out.begin(), call.out.end(), -7.0f);
      call.o.scales_for = made_for;
      std::string start = clash(recipe, made_for, "q");
      if (start.empty()) start = clash(recipe, made_for, "v");
      call.expect(start);
      ++(start.empty() ? taken : refused);
      // One operand's alone.
      for (const char* role : {"q", "k", "v"}) {
        StaticCall one(recipe);
        if (!has_codes(*role == 'v' ? recipe.v : recipe.qk)) continue;
        if (*role != 'q') one.t.q_scale = {}, one.o.recipe.q_scale = {};
        if (*role != 'k') one.t.k_scale = {}, one.o.recipe.k_scale = {};
        if (*role != 'v') one.t.v_scale = {}, one.o.recipe.v_scale = {};
        one.o.scales_for = made_for;
        one.expect(clash(recipe, made_for, role));
      }
    }
  }
  EXPECT_EQ(taken, 10);  // each its own; int8 those of Q and K of two; fp8 and fp8_p16 are alike
  EXPECT_EQ(refused, 26);
}

/// Means, rotation and balance change the rows, and so their largest values.
TEST(ScalesFor, TheSameRows) {
  using R = Recipe;
  const struct {
    void (*set)(Recipe&, Toggle);
    bool usual;  ///< what is automatic, of static scales
    const char *name, *on, *off;
  } rows[] = {
      {[](R& r, Toggle x) { r.smooth_k = x; }, true, "k", "less its mean", "with its mean"},
      {[](R& r, Toggle x) { r.smooth_q = x; }, false, "q", "less its mean", "with its mean"},
      {[](R& r, Toggle x) { r.smooth_v = x; }, false, "v", "less its mean", "with its mean"},
      {[](R& r, Toggle x) { r.rotate = x; }, false, "q", "rotated", "not rotated"},
  };
  for (const auto& row : rows) {
    for (const Toggle own : {Toggle::automatic, Toggle::off, Toggle::on}) {
      for (const Toggle other : {Toggle::automatic, Toggle::off, Toggle::on}) {
        Recipe recipe = *recipe_named("fp8"), made_for = recipe;
        row.set(recipe, own), row.set(made_for, other);
        const auto is_on = [&](Toggle t) {
          return t == Toggle::automatic ? row.usual : t == Toggle::on;
        };
        StaticCall call(recipe);
        call.o.scales_for = made_for;
        const std::string role = row.name;
        call.expect(is_on(own) == is_on(other)
                        ? ""
                        : role + "_scale: was made for recipe fp8, " + role + " " +
                              (is_on(other) ? row.on : row.off) + "; the call has " + role + " " +
                              (is_on(own) ? row.on : row.off));
      }
    }
  }
  StaticCall call(*recipe_named("int8"));
  call.o.scales_for = call.o.recipe;
  call.o.scales_for->balance_k = Toggle::on;
  call.expect("q_scale: was made for recipe int8, q balanced; the call has q not balanced");
  call.o.scales_for->name.clear();  // of a file, which knows no recipe
  call.expect("q_scale: was made for q balanced; the call has q not balanced");
  call.o.scales_for->balance_k = static_cast<Toggle>(7);
  call.expect("scales_for: a toggle is neither automatic, off nor on");
}

/// Codes know their format; without any scale there is nothing that it could be of.
TEST(ScalesFor, IsOfNumbers) {
  StaticCall call(*recipe_named("int8"));
  std::vector<std::int8_t> codes(call.x.size(), 3);
  call.t.q.data = call.t.k.data = codes.data();
  call.t.q.format = call.t.k.format = Format::s8;
  call.o.scales_for = *recipe_named("fp8");
  call.expect("");
  StaticCall dynamic(*recipe_named("fp8"));
  dynamic.t.q_scale = dynamic.t.k_scale = dynamic.t.v_scale = {};
  const std::string nothing = "scales_for: is given without q_scale, k_scale or v_scale; leave it";
  for (const char* made_for : {"fp8", "int8", "bf16", "auto"}) {
    dynamic.o.scales_for = *recipe_named(made_for);
    dynamic.expect(nothing);
  }
  for (const char* recipe : {"auto", "f32", "mxfp8"}) {
    StaticCall none(*recipe_named("f32"));
    none.o.recipe = *recipe_named(recipe);
    none.expect("");
    std::fill(none.out.begin(), none.out.end(), -7.0f);
    none.o.scales_for = none.o.recipe;
    none.expect(nothing);
  }
  // A scale of one operand is enough, also one that stands beside codes.
  StaticCall one(*recipe_named("fp8"));
  one.t.q_scale = one.t.k_scale = {};
  one.o.recipe.q_scale = one.o.recipe.k_scale = {};
  one.o.scales_for = one.o.recipe;
  one.expect("");
}

/// quantize(): the role says which of a recipe's formats and toggles are meant.
TEST(ScalesFor, OfQuantize) {
  const std::vector<float> x(2 * 16 * 3 * 16, 1.0f), given(6, 0.1f);
  int taken = 0, refused = 0;
  for (const Format format : {Format::s8, Format::e4m3, Format::e4m3fnuz, Format::e5m2}) {
    for (const Recipe& made_for : free_recipes()) {
      for (const Role role : {Role::q, Role::k, Role::v}) {
        for (const Toggle other : {Toggle::automatic, Toggle::off, Toggle::on}) {
          for (const bool smooth : {false, true}) {
            QuantizeOptions o;
            o.format = format, o.role = role, o.smooth = smooth;
            o.scaling.granularity = Granularity::per_head;
            o.threads = 1;
            o.scales_for = made_for;
            Toggle Recipe::* const toggles[] = {&Recipe::smooth_q, &Recipe::smooth_k,
                                                &Recipe::smooth_v};
            (*o.scales_for).*toggles[static_cast<int>(role)] = other;
            QuantizeTensors t;
            t.x = TensorView::dense(x.data(), Format::f32, {2, 16, 3, 16});
            const auto shapes = quantize_shapes(t.x, o);
            ASSERT_TRUE(shapes.ok()) << shapes.status().message();
            std::vector<std::uint8_t> codes(x.size(), 77);
            std::vector<float> scale(6, -7.0f), mean(2 * 3 * 16, -7.0f);
            t.codes = shapes->codes, t.scale = t.static_scale = shapes->scale;
            t.mean = shapes->mean;
            t.codes.data = codes.data(), t.scale.data = scale.data();
            t.static_scale.data = const_cast<float*>(given.data());
            if (smooth) t.mean.data = mean.data();
            const bool less = other == Toggle::automatic ? role == Role::k : other == Toggle::on;
            const Format made = role == Role::v ? made_for.v : made_for.qk;
            const std::string operand(name(role));
            std::string rule;
            if (made != format) {
              rule =
                  " in " + name_of(made) + "; the call has " + operand + " in " + name_of(format);
            } else if (less != smooth) {
              rule = std::string(less ? " less" : " with") + " its mean; the call has " + operand +
                     (smooth ? " less its mean" : " with its mean");
            }
            const Status s = quantize(t, o).status();
            EXPECT_EQ(s.ok(), rule.empty()) << s.message();
            ++(s.ok() ? taken : refused);
            if (rule.empty()) continue;
            EXPECT_EQ(s.message(),
                      "static_scale: was made for recipe " + made_for.name + ", " + operand + rule);
            for (const std::uint8_t c : codes) ASSERT_EQ(c, 77);
            for (const float y : scale) ASSERT_EQ(y, -7.0f);
            for (const float y : mean) ASSERT_EQ(y, -7.0f);
            t.static_scale = {};  // nothing that it could be of
            EXPECT_EQ(quantize(t, o).status().message(),
                      "scales_for: is given without static_scale; leave it out, or give the "
                      "scales that it is of");
            for (const std::uint8_t c : codes) ASSERT_EQ(c, 77);
            o.scales_for.reset();
            EXPECT_TRUE(quantize(t, o).ok());
          }
        }
      }
    }
  }
  EXPECT_GT(taken, 40);
  EXPECT_GT(refused, 300);
}

}  // namespace
}  // namespace qattn
