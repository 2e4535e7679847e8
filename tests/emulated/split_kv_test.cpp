// Few queries on the emulated GPU kernels: heads that share a tile of rows and blocks that share
// keys give what one block a head gives.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "emulated/on_gpu.hpp"
#include "support/thorough.hpp"

namespace qattn::test {
namespace {

/// Where blocks come in turns, and P does not depend on what a split has seen.
std::vector<OnGpu> split_last() {
  std::vector<OnGpu> all = everywhere();
  std::erase_if(all,
                [](const OnGpu& x) { return x.architecture != 90 || x.recipe.p == Format::e4m3; });
  return all;
}

using EmulatedSplitKv = OnGpuTest;

TEST_P(EmulatedSplitKv, SplitsAreTheUnsplitCall) {
  Feature f = feature(3, 1000, 4, 1);
  f.sinks = true;
  const Call call = make_call(f, 6);
  Laid laid = lay_out(call, f.how);
  const Outcome whole = run(call, laid, 1, 1);
  for (const int splits : {2, 3, 8, 40}) {
    const Outcome now = run(call, laid, 1, splits);
    ASSERT_FALSE(HasFailure());
    EXPECT_LE(distance(now.out, widened(whole.out), call.dim_v).nrmse, tolerance()) << splits;
    EXPECT_LE(lse_distance(now.lse, widened(whole.lse)), has_fp8(recipe()) ? 2e-2 : 1e-3) << splits;
    EXPECT_FALSE(recipe().p != Format::u8 && same_bits(now, whole)) << "are there splits?";
  }
}

/// Rows do not know what shares a tile with them. Packed ones leave as parts, without the 128 of u8
/// P already: rows that end in the kernel lose it and divide at once, with other last bits.
TEST_P(EmulatedSplitKv, PackedHeadsChangeNothing) {
  for (const std::int64_t sq : {1, 2, 8}) {
    for (const std::int64_t heads_k : {1, 2, 4}) {
      Feature f = feature(sq, 200, 8, heads_k);
      f.sinks = true;
      const Call call = make_call(f, 7);
      Laid laid = lay_out(call, f.how);
      const Outcome alone = run(call, laid, 1, 1), packed = run(call, laid, 0, 1);
      ASSERT_FALSE(HasFailure());
      EXPECT_NE(packed.plan.find("pack_gqa: " + std::to_string(8 / heads_k) + "\n"),
                std::string::npos)
          << packed.plan;
      const std::string of =
          std::to_string(sq) + " queries, " + std::to_string(heads_k) + " KV heads";
      if (recipe().p == Format::u8) {
        EXPECT_LE(distance(packed.out, widened(alone.out), call.dim_v).nrmse, 1e-6) << of;
        EXPECT_LE(lse_distance(packed.lse, widened(alone.lse)), 0.0) << of;
      } else {
        EXPECT_TRUE(same_bits(alone, packed)) << of;
      }
    }
  }
}

/// What the plan says happens: products are as many as tiles, and blocks as splits.
TEST_P(EmulatedSplitKv, DoesWhatThePlanSays) {
  const Feature f = feature(2, 512, 8, 2);
  const Call call = make_call(f, 8);
  Laid laid = lay_out(call, f.how);
  const auto work = [&](int pack, int splits) {
    emu::take_stats();
    const Outcome outcome = run(call, laid, pack, splits);
    return emu::take_stats();
  };
  const emu::Stats alone = work(1, 1), packed = work(0, 1), split = work(0, 4);
  EXPECT_EQ(alone.tensor_macs, 4 * packed.tensor_macs);
  EXPECT_EQ(split.tensor_macs, packed.tensor_macs);
  const std::uint64_t works = 2 * 2, rows = 2 * 8 * 2;
  if (GetParam().architecture != 90) {
    EXPECT_EQ(alone.blocks + rows, packed.blocks + 3 * works);
    EXPECT_EQ(split.blocks, packed.blocks + 3 * works);
  } else {  // persistent blocks
    EXPECT_GE(split.blocks, packed.blocks);
    EXPECT_GT(split.global_written, packed.global_written);
  }
}

/// A grid has the blocks of rows that packed sequences have, not those of all tokens for each.
TEST_P(EmulatedSplitKv, PackedSequencesTakeTheBlocksOfTheirOwnRows) {
  const auto work = [&](bool packed) {
    Feature f = feature(64, 64, 2, 2);
    f.sq.assign(16, 64), f.sk.assign(16, 64);
    f.how.packed_q = f.how.packed_k = packed;
    const Call call = make_call(f, 9);
    Laid laid = lay_out(call, f.how);
    emu::take_stats();
    run(call, laid, 1, 1);
    return emu::take_stats();
  };
  const emu::Stats packed = work(true), dense = work(false);
  EXPECT_LT(packed.blocks, 2 * dense.blocks);
  EXPECT_LE(packed.warp_instructions(emu::Word::mbarrier_arrive),
            2 * dense.warp_instructions(emu::Word::mbarrier_arrive));
}

/// No kernel looks up the sequence behind the last.
TEST_P(EmulatedSplitKv, NoSequences) {
  for (const Toggle smooth_q : {Toggle::off, Toggle::on}) {
    Recipe recipe = this->recipe();
    const bool portable = GetParam().architecture != 90 && recipe.qk == Format::s8;
    recipe.smooth_q = portable ? smooth_q : Toggle::off;
    Feature f = feature(4, 4);
    f.sq = {}, f.sk = {}, f.how.packed_q = f.how.packed_k = true;
    const Call call = make_call(f, 9);
    Laid laid = lay_out(call, f.how);
    const Outcome outcome = run_emulated(call, laid, recipe, every_timing());
    EXPECT_TRUE(outcome.out.empty());
  }
}

TEST_P(EmulatedSplitKv, BadTokensStayWhereTheyWere) {
  Recipe recipe = this->recipe();
  Feature f = feature(4, 500, 4, 2);
  f.options.window_left = -1;
  const Call call = make_call(f, 9);
  struct Bad {
    Operand operand;
    std::int64_t head, token;
    float value;
  };
  // Key 498 is seen by the last two queries, key 130 by all; key 255 ends a split.
  for (const Bad& bad : {Bad{Operand::q, 1, 2, NAN}, Bad{Operand::k, 0, 498, NAN},
                         Bad{Operand::k, 1, 130, INFINITY}, Bad{Operand::v, 1, 498, INFINITY},
                         Bad{Operand::v, 0, 255, NAN}, Bad{Operand::k, 0, 499, -INFINITY}}) {
    Laid laid = lay_out(call, f.how);
    poke(laid, call, bad.operand, 1, bad.head, bad.token, 5, bad.value);
    const Outcome whole = run(call, laid, 1, 1), now = run(call, laid, 0, 3);
    ASSERT_FALSE(HasFailure());
    std::int64_t count = 0;
    for (std::size_t n = 0; n < now.out.size(); ++n) {
      ASSERT_EQ(std::isnan(now.out[n]), std::isnan(whole.out[n]))
          << n << ", operand " << static_cast<int>(bad.operand) << " token " << bad.token;
      count += std::isnan(now.out[n]) ? 1 : 0;
    }
    for (std::size_t n = 0; n < now.lse.size(); ++n) {
      ASSERT_EQ(std::isnan(now.lse[n]), std::isnan(whole.lse[n])) << n;
    }
    EXPECT_GT(count, 0);
  }
}

/// Works that would keep few multiprocessors busy come in parts; all others have the bits that they
/// have without.
class LastWorks : public EmulatedSplitKv {
 protected:
  /// Of the emulator's 3 multiprocessors one has a fifth turn, and the last head's last block.
  Feature feature(std::int64_t sk = 700) const {
    Feature f = EmulatedSplitKv::feature(200, sk, 4, 2);
    f.sq = {200}, f.sk = {sk};
    f.heads_q = 5, f.heads_k = 5, f.options.causal = false;
    return f;
  }
  Outcome run_last(const Call& call, Laid& laid, int splits,
                   std::span<const Timing> timings = every_timing()) {
    const ForceSplitKv forced(0, 0, 2, -1, splits);
    const LeaveQueries prepared(false);  // else calls leave Q's codes to a kernel without parts
    return run_emulated(call, laid, recipe(), timings);
  }
};

TEST_P(LastWorks, AreTheWholeOnes) {
  for (const bool lse : {false, true}) {
    Feature f = feature();
    f.sinks = lse, f.how.lse = lse;
    const Call call = make_call(f, 6);
    Laid laid = lay_out(call, f.how);
    const Outcome whole = run_last(call, laid, 1);
    for (const int splits : lse ? std::vector{3} : std::vector{2, 6, 9}) {
      const Outcome now = run_last(call, laid, splits);
      ASSERT_FALSE(HasFailure());
      EXPECT_NE(now.plan.find("whole_works: 9\nlast_splits: " + std::to_string(splits) + "\n"),
                std::string::npos)
          << now.plan;
      EXPECT_LE(distance(now.out, widened(whole.out), call.dim_v).nrmse, tolerance()) << splits;
      EXPECT_LE(lse_distance(now.lse, widened(whole.lse)), 1e-3) << splits;
      const auto width = static_cast<std::size_t>(call.dim_v);
      std::int64_t changed = 0;
      for (std::size_t at = 0; at < now.out.size(); at += width) {
        changed += std::memcmp(&now.out[at], &whole.out[at], sizeof(float) * width) == 0 ? 0 : 1;
      }
      EXPECT_LE(changed, 200 - 128) << splits;
      EXPECT_GT(changed, 0) << "are there splits?";
    }
  }
}

TEST_P(LastWorks, BadTokensStayWhereTheyWere) {
  const Feature f = feature();
  const Call call = make_call(f, 9);
  for (const auto& [operand, token, value] :
       {std::tuple{Operand::q, 150, NAN}, std::tuple{Operand::k, 600, NAN},
        std::tuple{Operand::k, 130, INFINITY}, std::tuple{Operand::v, 255, INFINITY},
        std::tuple{Operand::v, 699, NAN}}) {
    Laid laid = lay_out(call, f.how);
    poke(laid, call, operand, 0, 4, token, 5, value);
    const auto one = every_timing().subspan(static_cast<std::size_t>(token) % 3, 1);
    const Outcome whole = run_last(call, laid, 1, one), now = run_last(call, laid, 3, one);
    ASSERT_FALSE(HasFailure());
    std::int64_t count = 0;
    for (std::size_t n = 0; n < now.out.size(); ++n) {
      ASSERT_EQ(std::isnan(now.out[n]), std::isnan(whole.out[n])) << n << ", token " << token;
      count += std::isnan(now.out[n]) ? 1 : 0;
    }
    EXPECT_GT(count, 0);
  }
}

TEST_P(LastWorks, PlansSplitThemWhereItPays) {
  const auto splits = [&](const Feature& f) {
    const std::string text = planned(f);
    const std::size_t at = text.find("last_splits: ");
    return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + 13);
  };
  Feature f = feature(4096);
  EXPECT_EQ(splits(f), 3);
  EXPECT_EQ(splits(feature(4095)), 0);
  f.options.causal = true;
  EXPECT_EQ(splits(f), 0);
  f.options.causal = false, f.options.window_left = 1500;
  EXPECT_EQ(splits(f), 0);
  f = feature(4096), f.heads_q = f.heads_k = 6;  // four turns
  EXPECT_EQ(splits(f), 0);
  f.heads_q = f.heads_k = 1;  // one turn
  EXPECT_EQ(splits(f), 0);
}

TEST_P(EmulatedSplitKv, ItsOwnChoice) {
  const auto expect = [&](const Feature& f, const std::string& lines) {
    const std::string text = planned(f);
    EXPECT_NE(text.find(lines), std::string::npos) << text << "\n" << lines;
  };
  Feature decode = feature(1, 1100, 4, 1);
  decode.sq = {1}, decode.sk = {1100};
  // As many as fill the emulated GPU where it has a block a multiprocessor, else one a tile of 128
  // keys.
  const bool hopper = GetParam().architecture == 90;
  const bool alone = planned(decode).find("kernel: sm80_prefill") == std::string::npos;
  expect(decode, std::string("splits: ") + (alone ? "3" : "8") + "\npack_gqa: 4\n");
  decode.options.window_left = 300;
  expect(decode, "splits: 1\npack_gqa: 4\n");
  Feature several = feature(1, 1100, 12, 12);
  expect(several, "splits: 1\npack_gqa: 1\n");
  Feature prefill = feature(1100, 1100, 4, 2);
  expect(prefill, "splits: 1\npack_gqa: 1\n");
  Feature small = feature(1, 300, 2, 1);
  small.sq = {1}, small.sk = {300};
  expect(small, "splits: 1\npack_gqa: 1\n");
  Feature sixes = feature(2, 300, 6, 1);
  expect(sixes, std::string("pack_gqa: ") + (hopper ? "2\n" : "6\n"));
}

INSTANTIATE_TEST_SUITE_P(Cover, LastWorks, testing::ValuesIn(split_last()), recipe_name);
INSTANTIATE_TEST_SUITE_P(Cover, EmulatedSplitKv, testing::ValuesIn(a_third(everywhere(), 2)),
                         recipe_name);

}  // namespace
}  // namespace qattn::test
