// Q, K and V that come quantised with scales of groups, on GeForce Blackwell's kernels: bit by bit
// what the same call gives for numbers that quantize() makes such codes of.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "conformance/coded.hpp"
#include "emulated/on_gpu.hpp"

namespace qattn::test {
namespace {

struct Results {
  std::vector<float> out, lse;
};

/// The call's numbers as codes of a recipe.
struct CodedCall {
  CodedTensor q, k, v;

  /// `which`: bits for Q, K and V.
  AttentionTensors give(AttentionTensors t, int which) const {
    if (which & 1) t.q = q.codes.view(), t.q_scale = q.scale.view(), t.q_global = q.global.view();
    if (which & 2) t.k = k.codes.view(), t.k_scale = k.scale.view(), t.k_global = k.global.view();
    if (which & 4) t.v = v.codes.view(), t.v_scale = v.scale.view(), t.v_global = v.global.view();
    return t;
  }
};

class GeforceCoded : public OnGpuTest {
 protected:
  GeforceCoded() {
    recipe_ = GetParam().recipe;
    // What quantize() does not do, or only if asked.
    recipe_.smooth_k = recipe_.smooth_q = recipe_.smooth_v = recipe_.balance_k = Toggle::off;
    if (recipe_.v == Format::e4m3) recipe_.v_scale.granularity = Granularity::per_channel;
  }
  bool codes_of_v() const { return has_codes(recipe_.v); }
  int mixtures() const { return codes_of_v() ? 8 : 4; }

  static Feature small() {
    Feature f;
    f.how.input = Format::bf16;
    f.sq = {70, 70}, f.sk = {200, 200};
    return f;
  }

  QuantizeOptions options(Role role, const Feature& f) const {
    const Format format = role == Role::v ? recipe_.v : recipe_.qk;
    const Scaling scaling = role == Role::v ? recipe_.v_scale : Scaling{};
    return options_for(role, format, scaling, f.how.layout);
  }
  CodedCall coded(const Feature& f, const AttentionTensors& t, bool smooth = false) const {
    const auto make = [&](Role role, const TensorView& x, const TensorView& cu) {
      QuantizeOptions o = options(role, f);
      o.smooth = smooth && role != Role::q;
      return quantised(x, o, cu);
    };
    CodedCall c;
    c.q = make(Role::q, t.q, t.cu_seqlens_q);
    c.k = make(Role::k, t.k, t.cu_seqlens_k);
    if (codes_of_v()) c.v = make(Role::v, t.v, t.cu_seqlens_k);
    return c;
  }

  Results attend(const AttentionTensors& t, const Call& call, Laid& laid) const {
    laid.out.clear();
    laid.lse.clear();
    AttentionOptions o = call.options;
    o.recipe = recipe_;
    const Status status = attention(t, o);
    EXPECT_TRUE(status.ok()) << status.message();
    return {laid.read_out(call), laid.read_lse(call)};
  }
  /// By the emulated kernels, under one timing.
  Results emulated(const AttentionTensors& t, const Call& call, Laid& laid,
                   const Timing& timing = every_timing()[0], bool host_memory = true) const {
    const EmulatedBackend backend(120, host_memory);
    const ForceTiming forced(timing);
    AttentionOptions o = call.options;
    o.recipe = recipe_;
    const Result<Plan> made = plan(t, o);
    EXPECT_TRUE(made.ok() && made->kernel() == "sm120a_prefill") << explain(t, o);
    const Results r = attend(t, call, laid);
    EXPECT_EQ(device_errors({}).message(), "");
    return r;
  }

  /// Numbers as the model says under every timing, and mixtures with codes bit by bit the same:
  /// codes alone under every timing, and all others (`every`) or one of an operand alone.
  void compare(const Feature& f, bool every = false) {
    const Call call = make_call(f, 41);
    Laid laid = lay_out(call, f.how), clean = lay_out(call, f.how);
    clear_unowned(clean, call);
    const CodedCall c = coded(f, clean.tensors());
    const Outcome want = run_emulated(call, laid, recipe_, every_timing());
    ASSERT_FALSE(HasFailure());
    expect_matches_model(want, call, f.how.output, model_attention(call, want.model_options()));
    const int alone = 1 << turn_++ % (codes_of_v() ? 3 : 2);
    for (int which = 1; which < mixtures(); ++which) {
      if (!every && which != alone && which != mixtures() - 1) continue;
      const AttentionTensors t = c.give(laid.tensors(), which);
      const bool all = which == mixtures() - 1;
      for (const Timing& timing : all ? every_timing() : every_timing().subspan(which % 3, 1)) {
        const Results got = emulated(t, call, laid, timing);
        EXPECT_TRUE(same_bits(got.out, want.out) && same_bits(got.lse, want.lse));
        if (HasFailure()) FAIL() << "codes of " << which;
      }
    }
  }

  /// Zeros where memory belongs to no token, so that groups and heads do not get NaN from there.
  static void clear_unowned(Laid& laid, const Call& call) {
    const std::int64_t page = std::max<std::int64_t>(laid.how.page_size, 1);
    for (std::size_t n = 0; n < call.sequences.size(); ++n) {
      const Sequence& s = call.sequences[n];
      const auto clear = [&](Operand x, std::int64_t heads, std::int64_t first, std::int64_t end,
                             std::int64_t dim) {
        for (std::int64_t i = 0; i < heads * (end - first) * dim; ++i) {
          poke(laid, call, x, static_cast<std::int64_t>(n), i / dim / (end - first),
               first + i / dim % (end - first), i % dim, 0.0);
        }
      };
      const std::int64_t end =
          laid.how.page_size > 0 ? (s.len_k + page - 1) / page * page : s.room_k;
      if (s.len_q < s.room_q) clear(Operand::q, call.heads_q, s.len_q, s.room_q, call.dim);
      if (s.len_k == end) continue;
      clear(Operand::k, call.heads_k, s.len_k, end, call.dim);
      clear(Operand::v, call.heads_k, s.len_k, end, call.dim_v);
    }
  }

  Recipe recipe_;

 private:
  int turn_ = 0;
};

TEST_P(GeforceCoded, Dense) {
  for (const std::int64_t dim : {64, 128, 80}) {
    SCOPED_TRACE(dim);
    Feature f = small();
    f.dim = f.dim_v = dim, f.heads_q = 2, f.heads_k = 1;
    compare(f, dim == 64);
    if (HasFailure()) return;
    f.heads_k = 2, f.options.causal = true, f.how.layout = Layout::bhsd;
    compare(f);
    if (HasFailure()) return;
  }
}

TEST_P(GeforceCoded, PackedCausal) {
  for (const std::int64_t dim : {64, 128, 80}) {
    SCOPED_TRACE(dim);
    Feature f = small();
    f.dim = f.dim_v = dim, f.heads_q = 2, f.options.causal = true;
    f.sq = {64, 1, 30}, f.sk = {70, 129, 33}, f.how.packed_q = f.how.packed_k = true;
    compare(f);
    if (HasFailure()) return;
  }
}

/// The general kernels: other widths of V, and everything that scores may meet.
TEST_P(GeforceCoded, GeneralCalls) {
  Feature f = small();
  f.dim = 72, f.dim_v = 136, f.options.softcap = 4, f.sinks = true, f.heads_q = 2;
  compare(f);
  f.dim = f.dim_v = 200, f.options.causal = true, f.sq = {33, 33}, f.sk = {90, 90};
  compare(f);
  f = small();
  f.alibi = true, f.options.window_left = 180, f.heads_q = 6;
  compare(f);
}

/// Rows that end inside a group, and inside a piece of eight channels.
TEST_P(GeforceCoded, HeadsOfAnySize) {
  Feature f = small();
  f.dim = 20, f.dim_v = 36, f.sq = {33, 33}, f.sk = {90, 90}, f.heads_q = 2, f.heads_k = 1;
  compare(f);
  const bool bytes = recipe_.qk == Format::mxfp8;
  f.dim = bytes ? 65 : 66, f.dim_v = bytes ? 3 : 2, f.options.causal = true;
  f.how.layout = Layout::bhsd;
  compare(f);
}

TEST_P(GeforceCoded, FewQueriesOfManyHeads) {
  Feature f = small();
  f.sq = {2, 2}, f.sk = {330, 330}, f.heads_q = 8, f.options.causal = true;
  const ForceSplitKv forced(0, 2);
  compare(f);
}

TEST_P(GeforceCoded, TokensOutOfUse) {
  Feature f = small();
  f.used_q = {70, 3}, f.used_k = {77, 161}, f.how.seqused_q = f.how.seqused_k = true;
  if (recipe_.v == Format::e4m3) f.used_k = {200, 200};  // scales of channels are of all tokens
  compare(f);
}

TEST_P(GeforceCoded, OddStridesOfNumbersBesideCodes) {
  Feature f = small();
  f.how.strides = Strides::odd;
  compare(f);
}

/// Q in numbers that all of the formats hold.
void make_exact(Call& call) {
  constexpr float numbers[] = {6, 0.5f, -1, 1.5f, -2, 3, -4, 0};
  for (Sequence& s : call.sequences) {
    for (std::size_t n = 0; n < s.q.size(); ++n) s.q[n] = numbers[n % 8 == 0 ? 0 : n * 5 / 3 % 8];
  }
}

/// What quantize() took off comes with the codes.
TEST_P(GeforceCoded, Means) {
  if (recipe_.v == Format::e4m3) GTEST_SKIP() << "smooth_v has its own order of roundings there";
  Feature f = small();
  f.family = Family::k_shift, f.options.causal = true, f.sinks = true;
  Call call = make_call(f, 42);
  make_exact(call);
  Laid laid = lay_out(call, f.how);
  recipe_.smooth_k = Toggle::on;
  recipe_.smooth_v = codes_of_v() ? Toggle::on : Toggle::off;
  const AttentionTensors plain = laid.tensors();
  const CodedCall c = coded(f, plain, true);
  const Results want = emulated(plain, call, laid);
  for (int which = 1; which < mixtures(); ++which) {
    AttentionTensors t = c.give(plain, which);
    const Recipe before = recipe_;
    if (which & 2) recipe_.smooth_k = Toggle::off, t.k_mean = c.k.mean.view();
    if (which & 4) recipe_.smooth_v = Toggle::off, t.v_mean = c.v.mean.view();
    const Results got = emulated(t, call, laid);
    if (which & 1) {  // the product of Q and the mean has roundings of its own
      EXPECT_LE(distance(got.out, widened(want.out), call.dim_v).nrmse, 1e-5) << which;
      EXPECT_LE(lse_distance(got.lse, widened(want.lse)), 3e-5) << which;
    } else {
      EXPECT_TRUE(same_bits(got.out, want.out) && same_bits(got.lse, want.lse)) << which;
    }
    recipe_ = before;
  }
}

/// Second levels of pages times powers of two, and scales of groups by these: the same numbers.
void shift_pages(CodedTensor& x) {
  const TensorView &s = x.scale.view(), &g = x.global.view();
  for (std::int64_t n = 0; n < s.shape[0] * s.shape[1]; ++n) {
    const auto power = static_cast<int>(n % 3);
    static_cast<float*>(g.data)[n] *= static_cast<float>(1 << power);
    for (std::int64_t i = 0; i < s.stride[1]; ++i) {
      std::uint8_t& code = static_cast<std::uint8_t*>(s.data)[n * s.stride[1] + i];
      if (code == 0 || code == 0x7f) continue;
      ASSERT_GT(code, 8 * (power + 1));
      code = static_cast<std::uint8_t>(code - 8 * power);
    }
  }
}

/// Pages have codes, scales and second levels of their own, in any order.
TEST_P(GeforceCoded, Pages) {
  Feature f = small();
  f.sk = {256, 256}, f.used_k = {201, 64}, f.how.page_size = 64, f.options.causal = true;
  f.options.softcap = 30;  // the general kernel for codes and numbers
  Call call = make_call(f, 43);
  for (Sequence& s : call.sequences) {  // pages have the second level of their head
    for (std::vector<float>* x : {&s.k, &s.v}) {
      for (std::int64_t n = 0; n < call.heads_k * s.len_k; ++n) {
        if (n % s.len_k % 64 == 5) (*x)[static_cast<std::size_t>(64 * n + 3)] = -8;
      }
    }
  }
  Laid laid = lay_out(call, f.how), clean = lay_out(call, f.how);
  clear_unowned(clean, call);
  if (recipe_.v == Format::e4m3) recipe_.v_scale.granularity = Granularity::per_tensor;
  // Pages that no token owns stay NaN, and so does what quantize() says of them.
  CodedCall c = coded(f, clean.tensors());
  if (recipe_.qk == Format::nvfp4) shift_pages(c.k);
  if (recipe_.v == Format::nvfp4) shift_pages(c.v);
  const AttentionTensors plain = laid.tensors();
  const Results want = emulated(plain, call, laid);
  // Such a page would spoil the scale of a tensor.
  for (int which = 1; which < (recipe_.v == Format::e4m3 ? 4 : mixtures()); ++which) {
    const Results got = emulated(c.give(plain, which), call, laid, every_timing()[which % 3]);
    EXPECT_TRUE(same_bits(got.out, want.out) && same_bits(got.lse, want.lse)) << which;
  }
}

/// Second levels that differ from page to page: the plan takes a kernel that reads them all.
TEST_P(GeforceCoded, PagesOfOtherSizes) {
  for (const std::int64_t page : {64, 48}) {
    SCOPED_TRACE(page);
    Feature f = small();
    f.sk = {4 * page, 4 * page}, f.used_k = {4 * page, 2 * page}, f.how.page_size = page;
    Call call = make_call(f, 49);
    for (Sequence& s : call.sequences) {
      for (std::int64_t n = 0; n < call.heads_k * s.len_k * 64; ++n) {
        const auto at = static_cast<std::size_t>(n);
        if (n / 64 % s.len_k / page % 2 == 1) s.k[at] *= 0.25f, s.v[at] *= 0.125f;
      }
    }
    Laid laid = lay_out(call, f.how), clean = lay_out(call, f.how);
    clear_unowned(clean, call);
    if (recipe_.v == Format::e4m3) recipe_.v_scale.granularity = Granularity::per_tensor;
    const CodedCall c = coded(f, clean.tensors());
    const bool of_v = page == 64 && recipe_.v != Format::e4m3;  // NaN pages would spoil its scale
    for (int which = 1; which < (of_v ? mixtures() : 4); ++which) {
      const AttentionTensors t = c.give(laid.tensors(), which);
      const Results got = emulated(t, call, laid), cpu = attend(t, call, laid);
      // P in 4 bits is rounded beside its own tile, of which CPUs have larger ones.
      const double bound = recipe_.p == Format::nvfp4 ? 8e-2 : 2e-2;
      EXPECT_LE(distance(got.out, widened(cpu.out), call.dim_v).nrmse, bound) << which;
      EXPECT_LE(lse_distance(got.lse, widened(cpu.lse)), bound / 2) << which;
    }
  }
}

/// Scales of a neighbouring group, or keys of another order, do not pass.
TEST_P(GeforceCoded, OtherGroupsAreNoticed) {
  Feature f = small();
  f.family = Family::outliers;
  const Call call = make_call(f, 44);
  Laid laid = lay_out(call, f.how);
  const Outcome right = run_emulated(call, laid, recipe_, every_timing().subspan(1, 1));
  const ModelOutput model = model_attention(call, right.model_options());
  const bool groups_of_v = info(recipe_.v).group > 0;
  for (int fault = 0; fault < (groups_of_v ? 4 : 3); ++fault) {
    CodedCall c = coded(f, laid.tensors());
    Tensor& x = fault == 0 ? c.q.scale : fault == 3 ? c.v.scale : c.k.scale;
    if (fault == 2) {  // the order of K in 4 bits: keys 2 and 3 of 32 change places with 8 and 9
      const std::int64_t row = 2 * info(recipe_.qk).bits * 64 / 8;
      auto* bytes = static_cast<std::uint8_t*>(c.k.codes.view().data);
      for (std::int64_t n = 0; n + 32 * row <= 2 * 200 * row; n += 32 * row) {
        std::swap_ranges(bytes + n + 2 * row, bytes + n + 4 * row, bytes + n + 8 * row);
      }
    } else {
      const TensorView& s = x.view();
      auto* bytes = static_cast<std::uint8_t*>(s.data);
      const std::int64_t step = fault == 3 ? s.stride[2] : 1;
      for (std::int64_t n = 0; n + 2 * step <= x.count(); n += 2 * step) {
        std::swap_ranges(bytes + n, bytes + n + step, bytes + n + step);
      }
    }
    const Results got = emulated(c.give(laid.tensors(), mixtures() - 1), call, laid);
    EXPECT_GT(distance(got.out, model.out, call.dim_v).nrmse, 100 * 2e-3) << fault;
  }
}

/// What is no scale makes the rows NaN that use it, and only these.
TEST_P(GeforceCoded, BadScalesShowWhereTheyAreSeen) {
  Feature f = small();
  f.options.causal = true;
  const Call call = make_call(f, 45);
  Laid laid = lay_out(call, f.how);
  const AttentionTensors plain = laid.tensors();
  const Results clean = emulated(coded(f, plain).give(plain, mixtures() - 1), call, laid);
  const std::int64_t group = info(recipe_.v).group, token = 163;
  for (const char who : {'q', 'k', 'v'}) {
    if (who == 'v' && group == 0) continue;
    SCOPED_TRACE(who);
    CodedCall c = coded(f, plain);
    const TensorView& s = (who == 'q' ? c.q.scale : who == 'k' ? c.k.scale : c.v.scale).view();
    const std::int64_t place = who == 'q' ? 9 : who == 'k' ? token : token / group;
    static_cast<std::uint8_t*>(s.data)[s.stride[0] + s.stride[1] + place * s.stride[2] + 1] = 0xff;
    for (const Timing& timing : every_timing()) {
      const AttentionTensors t = c.give(plain, mixtures() - 1);
      const Results got = emulated(t, call, laid, timing, false);
      const std::int64_t first = who == 'v' ? token / group * group : token;
      for (std::int64_t n = 0; n < call.total_rows(); ++n) {
        const std::int64_t b = n / 280, h = n / 70 % 4, i = n % 70;
        const bool near = b == 1 && (who == 'q' ? h == 1 : h / 2 == 1);
        const bool sees = near && (who == 'q' ? i == 9 : i + 130 >= first);
        const auto at = static_cast<std::size_t>(n * call.dim_v);
        ASSERT_EQ(std::isnan(got.out[at]), sees) << n;
        ASSERT_TRUE(sees || got.out[at] == clean.out[at]) << n;
        ASSERT_EQ(std::isnan(got.lse[static_cast<std::size_t>(n)]), sees) << n;
      }
    }
  }
}

/// A second level that is none spoils its head, but no row that sees no key.
TEST_P(GeforceCoded, BadSecondLevelsShow) {
  if (recipe_.qk != Format::nvfp4) GTEST_SKIP() << "there is none";
  for (const bool general : {false, true}) {
    Feature f = small();
    f.sq = {70, 70}, f.sk = {40, 40}, f.options.causal = true;  // rows 0 to 29 see no key
    f.options.softcap = general ? 30.0f : 0.0f;
    const Call call = make_call(f, 46);
    Laid laid = lay_out(call, f.how);
    for (const char who : {'q', 'k', 'v'}) {
      if (who == 'v' && recipe_.v != Format::nvfp4) continue;
      SCOPED_TRACE(testing::Message() << who << (general ? " general" : ""));
      CodedCall c = coded(f, laid.tensors());
      (who == 'q' ? c.q.global : who == 'k' ? c.k.global : c.v.global).set({1, 1}, NAN);
      const Results got =
          emulated(c.give(laid.tensors(), mixtures() - 1), call, laid, every_timing()[1], false);
      for (std::int64_t n = 0; n < call.total_rows(); ++n) {
        const std::int64_t b = n / 280, h = n / 70 % 4, i = n % 70;
        const bool near = b == 1 && (who == 'q' ? h == 1 : h / 2 == 1);
        const float x = got.out[static_cast<std::size_t>(n * call.dim_v)];
        if (i < 30) {
          ASSERT_EQ(x, 0.0f) << n;
        } else {
          ASSERT_EQ(std::isnan(x), near) << n;
        }
      }
    }
  }
}

/// Keys that no query sees have no say, whatever their codes and scales are.
TEST_P(GeforceCoded, HiddenKeysHaveNoSay) {
  Feature f = small();
  f.options.window_left = 50;
  const Call call = make_call(f, 47);
  Laid laid = lay_out(call, f.how);
  const AttentionTensors plain = laid.tensors();
  CodedCall c = coded(f, plain);
  const Results want = emulated(c.give(plain, mixtures() - 1), call, laid);
  // Query 0 sees keys from 80 on: whole groups before that.
  for (Tensor* x : {&c.k.scale, &c.v.scale}) {
    if (!x->present() || x->view().format == Format::f32) continue;
    const TensorView& s = x->view();
    const std::int64_t entries = x == &c.k.scale ? 80 : 80 / info(recipe_.v).group;
    for (std::int64_t n = 0; n < s.shape[0] * s.shape[1]; ++n) {
      std::memset(static_cast<std::uint8_t*>(s.data) + n * s.stride[1], 0xff,
                  static_cast<std::size_t>(entries * s.stride[2]));
    }
  }
  const Results got = emulated(c.give(plain, mixtures() - 1), call, laid, every_timing()[2], false);
  EXPECT_TRUE(same_bits(got.out, want.out) && same_bits(got.lse, want.lse));
}

/// Plans say what is gathered and which kernel reads it; other GPUs have none.
TEST_P(GeforceCoded, PlansSaySo) {
  const Feature f = small();
  const Call call = make_call(f, 50);
  const Laid laid = lay_out(call, f.how);
  const CodedCall c = coded(f, laid.tensors());
  AttentionOptions o = call.options;
  o.recipe = recipe_;
  const bool groups_of_v = info(recipe_.v).group > 0;
  for (int which = 0; which < mixtures(); ++which) {
    const AttentionTensors t = c.give(laid.tensors(), which);
    const std::string names = std::string(which & 1 ? " q" : "") + (which & 2 ? " k" : "") +
                              (which & 4 && groups_of_v ? " v" : "");
    {
      const EmulatedBackend backend(120);
      const std::string text = plan(t, o)->to_string();
      EXPECT_NE(text.find("variant: plain"), std::string::npos) << which << text;
      const std::string line = names.empty() ? "gathered:" : "\ngathered:" + names + "\n";
      EXPECT_EQ(text.find(line) == std::string::npos, names.empty()) << which << text;
    }
    for (const int gpu : {80, 89, 90}) {
      const EmulatedBackend backend(gpu);
      const Result<Plan> made = plan(t, o);
      EXPECT_TRUE(!made.ok() || !is_emulated(made->kernel())) << gpu << made->kernel();
    }
  }
}

/// On request contents are looked at first, and named.
TEST_P(GeforceCoded, ValidationNamesABadScale) {
  const Feature f = small();
  const Call call = make_call(f, 48);
  const Laid laid = lay_out(call, f.how);
  CodedCall c = coded(f, laid.tensors());
  const std::uint8_t bad = recipe_.qk == Format::mxfp8 ? 0xff : 0x7f;
  static_cast<std::uint8_t*>(c.k.scale.view().data)[1] = bad;
  const EmulatedBackend backend(120, false);
  AttentionOptions o = call.options;
  o.recipe = recipe_, o.validate = true;
  const Status status = attention(c.give(laid.tensors(), 2), o);
  EXPECT_EQ(status.message(), "k_scale: value nan at (0, 0, 0, 1) is not positive and finite");
}

std::vector<OnGpu> grouped() {
  std::vector<OnGpu> all;
  for (const Recipe& recipe : grouped_recipes()) all.push_back({recipe, 120});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cover, GeforceCoded, testing::ValuesIn(grouped()), recipe_name);

}  // namespace
}  // namespace qattn::test
