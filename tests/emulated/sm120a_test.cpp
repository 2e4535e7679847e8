// GeForce Blackwell's kernels, with numbers that the conformance table does not have, and with
// broken words.
#include <cmath>
#include <tuple>
#include <utility>

#include "conformance/coded.hpp"
#include "emulated/on_gpu.hpp"
#include "isa/emu/fault.hpp"

namespace qattn::test {
namespace {

/// Recipes whose products have scales. Of others sm120a_ring_test.cpp has what is new.
std::vector<OnGpu> on_geforce() {
  std::vector<OnGpu> all = everywhere();
  std::erase_if(all, [](const OnGpu& x) {
    const bool scaled = has_fp8(x.recipe) || info(x.recipe.qk).group > 0;
    return x.architecture != 120 || !scaled;
  });
  return all;
}

class Geforce : public OnGpuTest {
 protected:
  /// Whole tiles that every row sees, for the plain variant; with `general` for the other.
  Feature feature(bool general, Format wanted = Format::bf16) const {
    Feature f = with_inputs(Feature(), recipe(), wanted);
    f.sq = {130, 130}, f.sk = {192, 192}, f.heads_q = 2, f.heads_k = 1;
    if (general) f.options.softcap = 50, f.sk = {190, 190}, f.dim_v = 128;
    return f;
  }
  /// What the call gives, after a comparison with the model.
  Outcome expect_model(const Feature& f, const Call& call) {
    return expect_model(f, call, recipe());
  }
  Outcome expect_model(const Feature& f, const Call& call, const Recipe& recipe) {
    Laid laid = lay_out(call, f.how);
    const ForceSplitKv forced(0, 0);
    const Outcome outcome = run_emulated(call, laid, recipe, every_timing().subspan(1, 1));
    if (!HasFailure()) {
      expect_matches_model(outcome, call, f.how.output,
                           model_attention(call, outcome.model_options()));
      for (const float x : outcome.out) EXPECT_TRUE(std::isfinite(x));
    }
    return outcome;
  }
};

void multiply(std::vector<float>& x, float by) {
  for (float& value : x) value *= by;
}

/// Scores stay as they are: only scales know.
TEST_P(Geforce, QueriesAndKeysOfAnySize) {
  for (const bool general : {false, true}) {
    for (const auto& [format, q, k, v] : {std::tuple{Format::bf16, 0x1p100f, 0x1p-100f, 0x1p100f},
                                          std::tuple{Format::bf16, 0x1p-100f, 0x1p100f, 0x1p-100f},
                                          std::tuple{Format::bf16, 0x1p-100f, 0x1p-30f, 1.0f},
                                          std::tuple{Format::f16, 0x1p13f, 0x1p-13f, 0x1p13f}}) {
      SCOPED_TRACE(testing::Message() << q << " " << k << " " << v << (general ? " general" : ""));
      const Feature f = feature(general, format);
      Call call = make_call(f, 11);
      for (Sequence& s : call.sequences) {
        // f16 has too few bits so far down.
        if (format == Format::f16) {
          for (float& x : s.k) x = std::round(x * 64) / 64;
        }
        multiply(s.q, q), multiply(s.k, k), multiply(s.v, v);
      }
      expect_model(f, call);
      if (HasFailure()) return;
    }
  }
}

/// Zeros have scales, too: rows, whole tiles, whole operands.
TEST_P(Geforce, Zeros) {
  for (const char operand : {'q', 'k', 'v'}) {
    bool general = operand == 'k';
    for (const auto& [first, last] :
         {std::pair{0, 1 << 20}, std::pair{64, 128}, std::pair{5, 6}, std::pair{16, 48}}) {
      general = !general;
      SCOPED_TRACE(testing::Message() << operand << " from " << first << " to " << last
                                      << (general ? " general" : ""));
      const Feature f = feature(general);
      Call call = make_call(f, 12);
      Sequence& s = call.sequences[1];
      auto& x = operand == 'q' ? s.q : operand == 'k' ? s.k : s.v;
      const std::int64_t dim = operand == 'v' ? call.dim_v : call.dim;
      const std::int64_t tokens = operand == 'q' ? s.len_q : s.len_k;
      for (std::size_t n = 0; n < x.size(); ++n) {
        const std::int64_t token = static_cast<std::int64_t>(n) / dim % tokens;
        if (token >= first && token < last) x[n] = 0;
      }
      const Outcome outcome = expect_model(f, call);
      if (HasFailure()) return;
      const auto row = static_cast<std::size_t>(call.row(1, 0, 5));
      if (operand != 'v' && (operand == 'q' || last > 192) && first <= 5) {
        // A row of zeros among others is their mean's opposite to smooth_q, and rounded.
        const bool rounded = outcome.resolved.smooth_q == Toggle::on && last == 6;
        EXPECT_NEAR(outcome.lse[row], std::log(static_cast<double>(s.len_k)),
                    rounded ? 6e-2 : 2e-2);
      }
    }
  }
}

/// Every tile has larger scores than those before it, by more than P has room for: P is relative to
/// what has been seen, and nothing saturates.
TEST_P(Geforce, RisingScores) {
  for (const float step : {1.0f, 4.0f, 30.0f}) {
    for (const bool rising : {false, true}) {
      SCOPED_TRACE(testing::Message() << step << (rising ? " rising" : " falling"));
      Feature f = feature(false);
      f.sk = {320, 320};
      Call call = make_call(f, 13);
      for (Sequence& s : call.sequences) {
        for (std::int64_t n = 0; n < call.heads_q * s.len_q; ++n) {
          s.q[static_cast<std::size_t>(n * call.dim)] = 8;
        }
        for (std::int64_t n = 0; n < call.heads_k * s.len_k; ++n) {
          const std::int64_t tile = n % s.len_k / 64;
          s.k[static_cast<std::size_t>(n * call.dim)] =
              step * static_cast<float>(rising ? 4 - tile : tile);
        }
      }
      // Where Q's mean takes part, large scores are rounded once more, as floats.
      Recipe recipe = this->recipe();
      if (step > 4) recipe.smooth_q = Toggle::off;
      expect_model(f, call, recipe);
      if (HasFailure()) return;
    }
  }
}

TEST_P(Geforce, ScalesOfZeroAndBelow) {
  for (const float scale : {0.0f, -0.1f, 1e-30f, -1e-30f}) {
    Feature f = feature(false);
    f.options.softmax_scale = scale;
    const Call call = make_call(f, 14);
    const Outcome outcome = expect_model(f, call);
    if (HasFailure()) return;
    if (std::abs(scale) > 1e-3f) continue;
    for (const float x : outcome.lse) EXPECT_NEAR(x, std::log(192.0), 2e-2) << scale;
  }
}

/// Every timing gives the same bits, of keys in parts too.
TEST_P(Geforce, TimingsChangeNothing) {
  for (const int splits : {1, 2}) {
    const Feature f = feature(splits == 2);
    const Call call = make_call(f, 15);
    Laid laid = lay_out(call, f.how);
    const ForceSplitKv forced(0, splits);
    run_emulated(call, laid, recipe(), every_timing());
  }
}

/// Products that overflow are no numbers that look like some.
TEST_P(Geforce, ScoresBeyondFloatsShow) {
  for (const bool general : {false, true}) {
    const Feature f = feature(general);
    if (f.options.softcap > 0 && recipe().qk == Format::s8) continue;
    Call call = make_call(f, 18);
    for (Sequence& s : call.sequences) multiply(s.q, 0x1p70f), multiply(s.k, 0x1p70f);
    Laid laid = lay_out(call, f.how);
    const Outcome outcome = run(call, laid, 0, 0);
    ASSERT_FALSE(HasFailure());
    for (std::size_t n = 0; n < outcome.out.size(); ++n) {
      ASSERT_TRUE(std::isnan(outcome.out[n])) << n << ": " << outcome.out[n];
    }
  }
}

/// Bad keys at the ends of tiles, and tiles of nothing else: no scale of K is left to read.
TEST_P(Geforce, TilesOfBadKeys) {
  Recipe recipe = this->recipe();
  recipe.smooth_k = Toggle::off;
  const bool alone = recipe.qk == Format::mxfp8;  // in others a tile or a sequence has one scale
  for (const auto& [first, last] :
       {std::pair{128, 129}, std::pair{191, 192}, std::pair{128, 192}, std::pair{64, 191}}) {
    SCOPED_TRACE(testing::Message() << first << " to " << last);
    Feature f = feature(false);
    f.options.causal = true, f.heads_q = 4, f.heads_k = 2;
    const Call call = make_call(f, 19);
    Laid laid = lay_out(call, f.how);
    const auto timings = every_timing().subspan(1, 1);
    const Outcome clean = run_emulated(call, laid, recipe, timings);
    for (std::int64_t token = first; token < last; ++token) {
      poke(laid, call, Operand::k, 1, 1, token, 3, NAN);
    }
    const Outcome now = run_emulated(call, laid, recipe, timings);
    ASSERT_FALSE(HasFailure());
    for (std::int64_t n = 0; n < call.total_rows(); ++n) {
      const std::int64_t b = n / 4 / 130, h = n / 130 % 4, i = n % 130;
      const bool near = b == 1 && h / 2 == 1, sees = near && i + 192 - 130 >= first;
      const auto at = static_cast<std::size_t>(n * call.dim_v);
      const bool same = now.out[at] == clean.out[at] && now.lse[n] == clean.lse[n];
      const bool bad = std::isnan(now.out[at]) && std::isnan(now.lse[n]);
      ASSERT_TRUE(sees ? bad : same || (bad && near && !alone)) << n << ": " << now.out[at];
    }
  }
}

// ---- Broken words -------------------------------------------------------------------------------

/// Plants a fault for as long as it lives.
class Planted {
 public:
  Planted(emu::Fault fault, int column_tiles) { emu::planted_fault() = {fault, column_tiles}; }
  ~Planted() { emu::planted_fault() = {}; }
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;
};

/// Q K^T has a tile's eight columns of eight keys, P V two of channels.
constexpr int qk_tiles = 8, pv_tiles = 2;

/// A broken product does not pass for a right one: it is far outside of what conformance allows.
TEST_P(Geforce, BrokenWordsAreNoticed) {
  const bool qk = info(recipe().qk).group > 0, pv = info(recipe().v).group > 0;
  if (!qk) GTEST_SKIP() << "all scales are 1";
  for (const bool general : {false, true}) {
    Feature f = feature(general);
    f.family = Family::outliers, f.sq = {40, 40};
    const Call call = make_call(f, 16);
    const Outcome right = expect_model(f, call);
    if (HasFailure()) return;
    const ModelOutput model = model_attention(call, right.model_options());
    const std::int64_t spared = spared_rows(right.resolved, call.total_rows());
    for (const emu::Fault fault : {emu::Fault::scale_lane, emu::Fault::scale_byte,
                                   emu::Fault::neighbours, emu::Fault::stale_scales}) {
      for (const int tiles : {qk_tiles, pv_tiles}) {
        if (tiles == pv_tiles && !pv) continue;
        const Planted planted(fault, tiles);
        Laid laid = lay_out(call, f.how);
        const Outcome broken = run(call, laid, 0, 0);
        const Distance d = distance(broken.out, model.out, call.dim_v, spared);
        EXPECT_FALSE(d.trimmed <= 100 * tight_bound(f.how.output))
            << "fault " << static_cast<int>(fault) << " of " << tiles << " tiles: NRMSE "
            << d.nrmse;
      }
    }
  }
}

// ---- Refusals -----------------------------------------------------------------------------------

/// What has no kernel is told why.
TEST(GeforceRefusals, SayWhy) {
  const Feature f = with_inputs(Feature(), *recipe_named("mxfp8"), Format::bf16);
  const Call call = make_call(f, 17);
  const Laid laid = lay_out(call, f.how);
  const EmulatedBackend backend(120);
  const auto expect = [&](const AttentionTensors& t, const Recipe& recipe, const char* why) {
    AttentionOptions options = call.options;
    options.recipe = recipe;
    const std::string text = explain(t, options);
    EXPECT_NE(text.find(why), std::string::npos) << why << "\n" << text;
  };
  const AttentionTensors plain = laid.tensors();
  for (const Format v : {Format::mxfp4, Format::nvfp4}) {
    Recipe four = *recipe_named("nvfp4");
    four.qk = Format::mxfp4, four.p = four.v = v;
    expect(plain, four, "sm120a_prefill: no instance for Q and K in mxfp4, V in ");
  }
  for (const char* name : {"mxfp8", "nvfp4"}) {
    const Recipe r = *recipe_named(name);
    const CodedTensor k = quantised(plain.k, options_for(Role::k, r.qk, {}, Layout::bshd));
    AttentionTensors t = plain;
    t.k_scale = k.scale.view();
    expect(t, r, ("k_scale: is given, but k in format " + r.name).c_str());
  }
}

INSTANTIATE_TEST_SUITE_P(Cover, Geforce, testing::ValuesIn(on_geforce()), recipe_name);

}  // namespace
}  // namespace qattn::test
