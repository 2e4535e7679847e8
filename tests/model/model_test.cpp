// The bounds of tools/model: their arithmetic by hand, and the scaling against more emulation.
#include <gtest/gtest.h>

#include "model/emulate.hpp"

namespace qattn::model {
namespace {

constexpr double clock_rate = 1.755e9;

TEST(Bound, AnEightBitTileByHand) {
  // 128 x 128 scores at D 128: two products of 128^3, one EX2 a score.
  Amounts a;
  a[Unit::tensor] = 2.0 * 128 * 128 * 128;
  a[Unit::special] = 128.0 * 128;
  const Machine& gpu = h200();
  // On one of its multiprocessors both take 1024 clocks.
  EXPECT_DOUBLE_EQ(gpu.seconds(Unit::tensor, a[Unit::tensor], 1) * clock_rate, 1024);
  EXPECT_DOUBLE_EQ(gpu.seconds(Unit::special, a[Unit::special], 1) * clock_rate, 1024);
  EXPECT_DOUBLE_EQ(gpu.seconds(Unit::tensor, a[Unit::tensor], 2) * clock_rate, 512);
  // 64 x 1000 tiles on all of them, with one EX2 more.
  Amounts many = 64000 * a;
  many[Unit::special] += 16;
  const Bound b = bound_of(many, gpu, 1000);
  EXPECT_EQ(b.limit, Unit::special);
  EXPECT_DOUBLE_EQ(b.predicted(), (64000.0 * 1024 + 1) / (132 * clock_rate));
  EXPECT_DOUBLE_EQ(b.seconds[0], 64000.0 * 1024 / (132 * clock_rate));
  many[Unit::dram] = 4.8e12;
  EXPECT_EQ(bound_of(many, gpu, 1000).limit, Unit::dram);
  EXPECT_DOUBLE_EQ(bound_of(many, gpu, 1000).predicted(), 1);
}

TEST(Bound, AmountsOfCounters) {
  emu::Stats s;
  const auto lanes = [&](emu::Word word, std::uint64_t n) {
    s.lanes[static_cast<std::size_t>(word)] = n;
  };
  lanes(emu::Word::exp2, 320);
  lanes(emu::Word::reciprocal, 32);
  lanes(emu::Word::convert, 64);
  lanes(emu::Word::min_max, 96);
  lanes(emu::Word::fma, 128);
  lanes(emu::Word::load_shared, 32);
  s.tensor_macs = 1000;
  s.tensor_macs_16bit = 400;
  s.shared_read = 70;
  s.shared_written = 30;
  s.matrix_rows = 5;
  s.matrix_waves = 7;
  s.bulk_bytes = 9;
  s.global_read = 11;
  s.global_written = 22;
  const Amounts a = amounts_of(s);
  EXPECT_EQ(a[Unit::tensor], 1400);
  EXPECT_EQ(a[Unit::special], 352);
  EXPECT_EQ(a[Unit::convert], 64);
  EXPECT_EQ(a[Unit::integer], 96);
  EXPECT_EQ(a[Unit::fma], 128);
  EXPECT_EQ(a[Unit::issue], 21);
  EXPECT_EQ(a[Unit::shared], 100 + 2 * 128);
  EXPECT_EQ(a[Unit::l2], 33);
  EXPECT_EQ(a[Unit::tma], 9);
}

TEST(Bound, ProductsHaveTheRatesOfTheMachine) {
  emu::Stats s;
  const auto executed = [&](emu::Word word) {
    s.lanes[static_cast<std::size_t>(word)] = std::uint64_t{32} * 1000;
  };
  // A thousand of each; the counters tell 16 bits from the rest and no more.
  for (const emu::Word word : {emu::Word::mma_bf16, emu::Word::mma_int8, emu::Word::mma_fp8,
                               emu::Word::mma_mxfp8, emu::Word::mma_fp4}) {
    executed(word);
  }
  s.tensor_macs_16bit = 2048000;
  s.tensor_macs = 2048000 + 3 * 4096000 + 8192000;
  const auto clocks = [&](const char* device) {
    const Machine& m = *machine_named(device);
    return amounts_of(s, m.products)[Unit::tensor] / m.per_clock[0] / 1000;
  };
  // FLOP a clock and multiprocessor: 5090: bf16 512, s8 2048, e4m3 1024, with scales 2048, FP4
  // 4096.
  EXPECT_DOUBLE_EQ(clocks("5090"), 8 + 4 + 8 + 4 + 4);
  EXPECT_DOUBLE_EQ(clocks("pro6000"), 4 + 4 + 4 + 4 + 4);
  EXPECT_EQ(machine_named("3090"), nullptr);
}

TEST(Bound, PeaksAreThePublishedOnes) {
  const auto tops = [](const char* device, double weight) {
    const Machine& m = *machine_named(device);
    return 2 * m.per_clock[0] / weight * m.multiprocessors * m.hertz / 1e12;
  };
  EXPECT_NEAR(tops("5090", 1), 838, 1);
  EXPECT_NEAR(tops("5090", machine_named("5090")->products.fp4), 1676, 1);
  EXPECT_NEAR(tops("5090", machine_named("5090")->products.wide), 209.5, 0.1);
  EXPECT_NEAR(tops("pro6000", machine_named("pro6000")->products.wide), 503.8, 0.1);
  EXPECT_NEAR(tops("4090", machine_named("4090")->products.fp8), 330.3, 0.1);
  EXPECT_NEAR(tops("a100", 2), 312, 1);
  EXPECT_NEAR(tops("h100", 1), 1979, 1);
}

TEST(Bound, InTurnNothingRunsBesideProducts) {
  Amounts a;
  a[Unit::tensor] = 4096.0 * 10;
  a[Unit::special] = 16.0 * 5;
  a[Unit::issue] = 4.0 * 7;
  EXPECT_DOUBLE_EQ(bound_of(a, h200(), 1).in_turn() * clock_rate, 17);
}

TEST(Bound, TilesOfShapes) {
  const auto expect = [](const Shape& s, double blocks, double tiles, double keys) {
    EXPECT_EQ(tiles_of(s).blocks, blocks);
    EXPECT_EQ(tiles_of(s).tiles, tiles);
    EXPECT_EQ(tiles_of(s).keys, keys);
  };
  expect({2, 3, 1, 256, 512, 64, false}, 12, 48, 8);
  expect({1, 1, 1, 512, 512, 64, true}, 4, 1 + 2 + 3 + 4, 4);
  expect({1, 1, 1, 1, 1000, 64, false}, 1, 8, 8);   // whole tiles
  expect({1, 1, 1, 128, 1024, 64, true}, 1, 8, 8);  // the end of a long prompt
  expect({1, 1, 1, 300, 100, 64, true}, 3, 2, 1);   // 200 queries see no key
}

TEST(Bound, FitsBlockTileAndKeys) {
  Amounts block, one, keys;
  block[Unit::issue] = 7;
  one[Unit::issue] = 3;
  one[Unit::tensor] = 10;
  keys[Unit::issue] = 2;
  const auto run = [&](const Tiles& t) { return t.blocks * block + t.tiles * one + t.keys * keys; };
  for (const double both : {12.0, 11.0}) {  // full, causal
    const PerTile p = PerTile::fit({run({1, 2, 2}), run({1, 6, 6}), run({2, both, 6}), 2, 6, both});
    EXPECT_DOUBLE_EQ(p.tile[Unit::issue], 3);
    EXPECT_DOUBLE_EQ(p.block[Unit::issue], 7);
    EXPECT_DOUBLE_EQ(p.keys[Unit::issue], 2);
    EXPECT_DOUBLE_EQ(p.scaled({4, 10, 5})[Unit::issue], 68);
    EXPECT_DOUBLE_EQ(p.scaled({4, 10, 5})[Unit::tensor], 100);
  }
}

struct Case {
  const char *recipe, *kernel;
  std::int64_t dim;
  Choice choice;
};
class Emulated : public testing::TestWithParam<Case> {};

/// A tile of the emulated kernels needs what the algorithm says.
TEST_P(Emulated, ATileIsWhatTheAlgorithmSays) {
  const Case& c = GetParam();
  const Result<Prediction> p =
      predict(c.recipe, {1, 1, 1, 1024, 1024, c.dim, false}, c.choice, h200());
  ASSERT_TRUE(p.ok()) << p.status().message();
  EXPECT_EQ(p->kernel, c.kernel);
  const bool qk_16bit = std::string(c.recipe) == "bf16",
             pv_16bit = c.recipe != std::string("int8_full");
  const double product = 128.0 * 128 * static_cast<double>(c.dim);
  Products rates{.integer = 1, .wide = 2};  // wgmma's
  if (c.choice == Choice::portable) rates = h200().products;
  const auto weight = [&](bool wide) { return wide ? rates.wide : rates.integer; };
  EXPECT_DOUBLE_EQ(p->per_tile.tile[Unit::tensor], product * (weight(qk_16bit) + weight(pv_16bit)));
  // One EX2 a score, and a few a row and tile.
  EXPECT_GE(p->per_tile.tile[Unit::special], 128.0 * 128);
  EXPECT_LE(p->per_tile.tile[Unit::special], 128.0 * 128 * 1.15);
  // K and V of the tile, each once, with their scales.
  const double bytes = 128.0 * static_cast<double>(c.dim) * (qk_16bit ? 2 : 1) +
                       128.0 * static_cast<double>(c.dim) * (pv_16bit ? 2 : 1);
  EXPECT_GE(p->per_tile.tile[Unit::l2], bytes);
  EXPECT_LE(p->per_tile.tile[Unit::l2], bytes * 1.25);
}

/// What is scaled from two lengths of one block is what a larger call does.
TEST_P(Emulated, ScalesToOtherShapes) {
  const Case& c = GetParam();
  // Blocks that have tiles beside the diagonal's join zeros to the output first, where P lies in
  // shared memory; the first block of a causal call does not, which is 2 % of so many.
  for (const Shape& shape :
       {Shape{1, 2, 1, 256, 384, c.dim, false}, Shape{2, 1, 1, 768, 768, c.dim, true}}) {
    const Result<Prediction> p = predict(c.recipe, shape, c.choice, h200());
    ASSERT_TRUE(p.ok()) << p.status().message();
    const Result<Emulation> run = emulate(c.recipe, shape, c.choice);
    ASSERT_TRUE(run.ok()) << run.status().message();
    EXPECT_DOUBLE_EQ(p->bound.amounts[Unit::tensor], run->amounts[Unit::tensor]);
    for (const Unit unit : {Unit::special, Unit::convert, Unit::integer, Unit::fma, Unit::issue,
                            Unit::shared, Unit::l2, Unit::tma}) {
      const double counted = run->amounts[unit];
      EXPECT_NEAR(p->bound.amounts[unit], counted, 0.03 * counted)
          << name(unit) << (shape.causal ? ", causal" : ", full");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Emulated,
                         testing::Values(Case{"int8_full", "sm90a_prefill", 128, Choice::best},
                                         Case{"int8_full", "sm90a_prefill", 64, Choice::best},
                                         Case{"int8_full", "sm80_prefill", 128, Choice::portable},
                                         Case{"int8", "sm80_prefill", 64, Choice::portable},
                                         Case{"bf16", "sm80_prefill", 128, Choice::portable}),
                         [](const auto& it) {
                           return std::string(it.param.recipe) + "_" + it.param.kernel + "_" +
                                  std::to_string(it.param.dim);
                         });

TEST(Predict, FewBlocksLeaveMultiprocessorsIdle) {
  const Result<Prediction> one =
      predict("int8_full", {1, 1, 1, 129, 8192, 128, false}, Choice::best, h200());
  const Result<Prediction> many =
      predict("int8_full", {2, 33, 1, 129, 8192, 128, false}, Choice::best, h200());
  const Result<Prediction> more =
      predict("int8_full", {4, 33, 1, 129, 8192, 128, false}, Choice::best, h200());
  ASSERT_TRUE(one.ok() && many.ok() && more.ok());
  const int special = static_cast<int>(Unit::special);
  // Keys in 8 splits: 16 blocks share what 66 times as much gives 132 of them.
  EXPECT_NEAR(8 * one->bound.seconds[special], many->bound.seconds[special],
              1e-9 * many->bound.seconds[special]);
  EXPECT_NEAR(more->bound.seconds[special], 2 * many->bound.seconds[special],
              1e-9 * many->bound.seconds[special]);
}

/// Heads of a group in one tile, keys shared by blocks that fill the GPU, and products of the one
/// warpgroup that has rows.
TEST(Predict, OneQueryOfManyKeys) {
  const Result<Prediction> p =
      predict("int8_full", {1, 32, 8, 1, 8192, 128, false}, Choice::best, h200());
  ASSERT_TRUE(p.ok()) << p.status().message();
  EXPECT_EQ(p->kernel, "sm90a_prefill");
  const double scores = 8.0 * 64 * 8192;
  EXPECT_DOUBLE_EQ(p->bound.amounts[Unit::tensor], scores * 128 * 2);
  const int tensor = static_cast<int>(Unit::tensor);
  // 8 KV heads in 16 splits each.
  EXPECT_NEAR(p->bound.seconds[tensor], scores * 128 * 2 / 4096 / 128 / 1.755e9, 1e-12);
  EXPECT_EQ(p->bound.limit, Unit::dram);
  EXPECT_GE(p->bound.amounts[Unit::l2], 2.0 * 8 * 8192 * 128);
  EXPECT_LE(p->bound.amounts[Unit::l2], 2.0 * 8 * 8192 * 128 * 1.25);
}

/// Three warpgroups share a tile of keys, which comes for a third less.
TEST(Predict, LongRowsHaveThreeConsumers) {
  const auto of = [](std::int64_t s) {
    return predict("int8_full", {1, 32, 32, s, s, 64, false}, Choice::best, h200());
  };
  const Result<Prediction> few = of(1024), many = of(16384);
  ASSERT_TRUE(few.ok() && many.ok());
  EXPECT_EQ(few->block.rows, 128);
  EXPECT_EQ(many->block.rows, 192);
  EXPECT_DOUBLE_EQ(many->per_tile.tile[Unit::tensor], 1.5 * few->per_tile.tile[Unit::tensor]);
  EXPECT_NEAR(many->per_tile.tile[Unit::tma], few->per_tile.tile[Unit::tma],
              0.01 * few->per_tile.tile[Unit::tma]);
}

/// Scores and sums of products become numbers, P becomes bytes.
TEST(Predict, ConversionsOfEightBits) {
  const Result<Prediction> p =
      predict("int8_full", {1, 1, 1, 1024, 1024, 128, false}, Choice::best, h200());
  ASSERT_TRUE(p.ok()) << p.status().message();
  // Scores to floats, and two at a time to P; P V is a float as it is. Each of 256 threads converts
  // four maxima.
  const double scores = 128.0 * 128, wanted = scores + scores / 2 + 256 * 4;
  EXPECT_GE(p->per_tile.tile[Unit::convert], wanted);
  EXPECT_LE(p->per_tile.tile[Unit::convert], 1.05 * wanted);
}

TEST(Predict, MemoryIsEachOperandOnce) {
  const Shape s{2, 8, 2, 100, 1000, 64, false};
  const Result<Prediction> full = predict("int8_full", s, Choice::best, h200());
  const Result<Prediction> wide = predict("bf16", s, Choice::portable, h200());
  ASSERT_TRUE(full.ok() && wide.ok());
  const double q = 2 * 8 * 100 * 64, kv = 2.0 * 2 * 2 * 1000 * 64, out = 2 * q;
  EXPECT_EQ(full->bound.amounts[Unit::dram], q + kv + out);
  EXPECT_EQ(wide->bound.amounts[Unit::dram], 2 * q + 2 * kv + out);
}

TEST(Predict, RefusesWhatNoKernelServes) {
  const Result<Prediction> p = predict("f32", {1, 1, 1, 128, 128, 64, false}, Choice::best, h200());
  ASSERT_FALSE(p.ok());
  EXPECT_EQ(p.status().code(), Code::unsupported);
  EXPECT_NE(p.status().message().find("sm80_prefill"), std::string::npos);
  EXPECT_FALSE(predict("bf16", {1, 1, 1, 128, 128, 257, false}, Choice::best, h200()).ok());
}

TEST(Bound, CompiledInstructionsCountWhereTheyAreMore) {
  const Shape s{1, 1, 1, 1024, 1024, 64, false};
  const Machine& gpu = *machine_named("5090");
  Amounts more;
  more[Unit::issue] = 1e5;
  more[Unit::special] = 1;
  const Compiled compiled = {{{120, "sm120a_prefill", "nvfp4", 64}, more}};
  const Result<Prediction> counted = predict("nvfp4", s, Choice::best, gpu),
                           whole = predict("nvfp4", s, Choice::best, gpu, compiled),
                           other = predict("mxfp8", s, Choice::best, gpu, compiled);
  ASSERT_TRUE(counted.ok() && whole.ok() && other.ok()) << counted.status().message();
  EXPECT_EQ(whole->kernel, "sm120a_prefill");
  EXPECT_EQ(whole->per_tile.tile[Unit::issue], 1e5);
  EXPECT_EQ(whole->per_tile.tile[Unit::special], counted->per_tile.tile[Unit::special]);
  EXPECT_EQ(whole->bound.limit, Unit::issue);
  EXPECT_TRUE(whole->compiled);
  EXPECT_FALSE(counted->compiled || other->compiled);
  // The portable kernel has plain FP8 at half rate.
  const Result<Prediction> own = predict("fp8", s, Choice::best, gpu),
                           portable = predict("fp8", s, Choice::portable, gpu);
  ASSERT_TRUE(own.ok() && portable.ok());
  EXPECT_EQ(portable->kernel, "sm80_prefill");
  EXPECT_DOUBLE_EQ(portable->per_tile.tile[Unit::tensor], 2 * own->per_tile.tile[Unit::tensor]);
}

}  // namespace
}  // namespace qattn::model
