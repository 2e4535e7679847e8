// Every way in which a call can be wrong: the message names the tensor, the value and the rule, and
// no output is touched. One row a case.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn {
namespace {

constexpr std::int64_t big = std::numeric_limits<std::int64_t>::max();

/// A correct call (B 2, Hq 4, Hkv 2, Sq 6, Sk 10, D 16, Dv 24) that cases then break.
struct Call {
  std::vector<float> q = std::vector<float>(2 * 6 * 4 * 16, 0.5f);
  std::vector<float> k = std::vector<float>(2 * 10 * 2 * 16, 0.25f);
  std::vector<float> v = std::vector<float>(2 * 10 * 2 * 24, 1.0f);
  std::vector<float> out = std::vector<float>(2 * 6 * 4 * 24, -7.0f);
  std::vector<float> lse = std::vector<float>(2 * 4 * 6, -7.0f);
  std::vector<float> scales = std::vector<float>(4096, 0.01f);
  std::vector<std::int32_t> index = std::vector<std::int32_t>(64, 0);
  std::vector<std::int64_t> counts = std::vector<std::int64_t>(3, -7);
  std::vector<std::uint8_t> bytes = std::vector<std::uint8_t>(4096, 1);
  AttentionTensors t;
  AttentionOptions o;

  Call() {
    t.q = TensorView::dense(q.data(), Format::f32, {2, 6, 4, 16});
    t.k = TensorView::dense(k.data(), Format::f32, {2, 10, 2, 16});
    t.v = TensorView::dense(v.data(), Format::f32, {2, 10, 2, 24});
    t.out = TensorView::dense(out.data(), Format::f32, {2, 6, 4, 24});
    t.lse = TensorView::dense(lse.data(), Format::f32, {2, 4, 6});
    t.saturated = TensorView::dense(counts.data(), Format::s64, {3});
    o.recipe = *recipe_named("int8");
  }
  TensorView ints(std::initializer_list<std::int64_t> shape) {
    return TensorView::dense(index.data(), Format::s32, shape);
  }
  TensorView floats(std::initializer_list<std::int64_t> shape) {
    return TensorView::dense(scales.data(), Format::f32, shape);
  }
  /// q packed as two sequences of 4 and 2 tokens.
  void pack_q() {
    t.q = TensorView::dense(q.data(), Format::f32, {6, 4, 16});
    t.out = TensorView::dense(out.data(), Format::f32, {6, 4, 24});
    t.lse = TensorView::dense(lse.data(), Format::f32, {4, 6});
    index[0] = 0, index[1] = 4, index[2] = 6;
    t.cu_seqlens_q = ints({3});
  }
  /// k, v as 5 pages of 4 tokens, two sequences of 3 pages.
  void page_k() {
    t.k = TensorView::dense(k.data(), Format::f32, {5, 4, 2, 16});
    t.v = TensorView::dense(v.data(), Format::f32, {5, 4, 2, 24});
    t.page_table = ints({2, 3});
    index[10] = index[11] = 9;
    t.seqused_k = TensorView::dense(index.data() + 10, Format::s32, {2});
  }
  void code_k() {
    t.k = TensorView::dense(bytes.data(), Format::s8, {2, 10, 2, 16});
    t.k_scale = floats({2, 2, 10});
  }
};

struct Case {
  const char* name;
  std::function<void(Call&)> break_it;
  std::vector<std::string> words;  ///< all must stand in the message
  Code code = Code::invalid_argument;
};

const float nan_value = std::numeric_limits<float>::quiet_NaN();
const float infinity = std::numeric_limits<float>::infinity();

const std::vector<Case>& cases() {
  static const std::vector<Case> list = {
      // Operands: presence, rank, format, stride, alignment.
      {"QMissing", [](Call& c) { c.t.q = {}; }, {"q: is missing"}},
      {"KMissing", [](Call& c) { c.t.k = {}; }, {"k: is missing"}},
      {"VMissing", [](Call& c) { c.t.v = {}; }, {"v: is missing"}},
      {"OutMissing", [](Call& c) { c.t.out = {}; }, {"out: is missing"}},
      {"QNull", [](Call& c) { c.t.q.data = nullptr; }, {"q:", "null"}},
      {"OutNull", [](Call& c) { c.t.out.data = nullptr; }, {"out:", "null"}},
      {"LseNull", [](Call& c) { c.t.lse.data = nullptr; }, {"lse:", "null"}},
      {"QRank3", [](Call& c) { c.t.q.rank = 3; }, {"q: rank 3", "4"}},
      {"QRank9", [](Call& c) { c.t.q.rank = 9; }, {"q: rank 9"}},
      {"QRankNegative", [](Call& c) { c.t.q.rank = -1; }, {"q: rank -1"}},
      {"QFormatIndex", [](Call& c) { c.t.q.format = Format::s32; }, {"q: format s32"}},
      {"QFormatUnknown",
       [](Call& c) { c.t.q.format = static_cast<Format>(77); },
       {"q: format 77", "unknown"}},
      {"VFormatDiffers", [](Call& c) { c.t.v.format = Format::f16; }, {"v: format f16", "k's f32"}},
      {"OutFormat", [](Call& c) { c.t.out.format = Format::s8; }, {"out: format s8"}},
      {"QInnerStride", [](Call& c) { c.t.q.stride[3] = 2; }, {"q: stride 2", "1"}},
      {"KMisaligned",
       [](Call& c) { c.t.k.data = static_cast<char*>(c.t.k.data) + 2; },
       {"k: address", "aligned"}},
      // Extents.
      {"HeadDimDiffers", [](Call& c) { c.t.k.shape[3] = 8; }, {"k: head_dim 8", "16"}},
      {"HeadDimZero",
       [](Call& c) { c.t.q.shape[3] = c.t.k.shape[3] = 0; },
       {"q: head_dim 0 is not from 1 to 576"}},
      {"HeadDimTooLarge",
       [](Call& c) { c.t.q.shape[3] = c.t.k.shape[3] = 577; },
       {"q: head_dim 577 is not from 1 to 576; longer heads have no kernel here"}},
      {"VHeadDimZero", [](Call& c) { c.t.v.shape[3] = 0; }, {"v: head_dim 0"}},
      {"VHeadDimTooLarge",
       [](Call& c) { c.t.v.shape[3] = 513; },
       {"v: head_dim 513 is not from 1 to 512"}},
      {"GqaRatio",
       [](Call& c) { c.t.q.shape[2] = c.t.out.shape[2] = 3; },
       {"q: 3 heads", "multiple of k's 2"}},
      {"OtherLayout",
       [](Call& c) {
         for (TensorView* x : {&c.t.q, &c.t.k, &c.t.v, &c.t.out}) {
           std::swap(x->shape[1], x->shape[2]);
           std::swap(x->stride[1], x->stride[2]);
         }
       },
       {"q: 6 heads", "the call says layout bshd", "these fit bhsd, (batch, heads, tokens"}},
      {"NoHeads", [](Call& c) { c.t.k.shape[2] = 0; }, {"heads", "k's 0"}},
      {"VHeads", [](Call& c) { c.t.v.shape[2] = 1; }, {"v: 1 heads", "2"}},
      {"VLength", [](Call& c) { c.t.v.shape[1] = 9; }, {"v: length 9", "10"}},
      {"KBatch", [](Call& c) { c.t.k.shape[0] = c.t.v.shape[0] = 1; }, {"k: batch 1", "2"}},
      {"VBatch", [](Call& c) { c.t.v.shape[0] = 1; }, {"v: batch 1", "2"}},
      {"OutShape", [](Call& c) { c.t.out.shape[1] = 5; }, {"out: shape (2, 5, 4, 24)", "(2, 6, 4"}},
      {"NegativeExtent", [](Call& c) { c.t.q.shape[1] = -6; }, {"q: extent -6", "negative"}},
      {"StrideOverflow", [](Call& c) { c.t.k.stride[0] = big / 2; }, {"k:", "overflows"}},
      {"StrideMin",
       [](Call& c) { c.t.k.stride[0] = std::numeric_limits<std::int64_t>::min(); },
       {"k:", "overflows"}},
      {"ExtentOverflow",
       [](Call& c) { c.t.q.shape[0] = c.t.q.shape[1] = big / 4; },
       {"q:", "overflows"}},
      {"LseShape", [](Call& c) { c.t.lse.shape[2] = 5; }, {"lse: shape (2, 4, 5)", "(2, 4, 6)"}},
      {"LseFormat", [](Call& c) { c.t.lse.format = Format::bf16; }, {"lse: format bf16", "f32"}},
      {"SaturatedShape", [](Call& c) { c.t.saturated.shape[0] = 2; }, {"saturated: shape (2)"}},
      // Memory.
      {"OutIsQ",
       [](Call& c) {
         c.t.out.data = c.t.q.data;
         c.t.out.shape = c.t.q.shape;
         c.t.v.shape[3] = 16;
         c.t.out.stride = c.t.q.stride;
       },
       {"out: overlaps", "q"}},
      {"OutInsideV", [](Call& c) { c.t.out.data = c.v.data() + 8; }, {"out: overlaps", "v"}},
      {"LseInsideOut", [](Call& c) { c.t.lse.data = c.out.data() + 5; }, {"overlaps"}},
      {"OutSelfOverlap", [](Call& c) { c.t.out.stride[1] = 0; }, {"out: stride 0", "overlap"}},
      {"OutOtherDevice",
       [](Call& c) { c.t.out.device.type = DeviceType::cuda; },
       {"out: lies on another device"}},
      {"AllOnGpu",
       [](Call& c) {
         for (TensorView* v : {&c.t.q, &c.t.k, &c.t.v, &c.t.out, &c.t.lse, &c.t.saturated})
           v->device.type = DeviceType::cuda;
       },
       {"not on the CPU"},
       Code::unsupported},
      // Options.
      {"Layout", [](Call& c) { c.o.layout = static_cast<Layout>(4); }, {"layout: 4"}},
      {"ScaleNan", [](Call& c) { c.o.softmax_scale = nan_value; }, {"softmax_scale: nan"}},
      {"ScaleInf", [](Call& c) { c.o.softmax_scale = infinity; }, {"softmax_scale: inf"}},
      {"SoftcapNegative", [](Call& c) { c.o.softcap = -1; }, {"softcap: -1"}},
      {"SoftcapNan", [](Call& c) { c.o.softcap = nan_value; }, {"softcap: nan"}},
      {"WindowLeft", [](Call& c) { c.o.window_left = -2; }, {"window_left: -2"}},
      {"WindowRight", [](Call& c) { c.o.window_right = -5; }, {"window_right: -5"}},
      {"CausalAndRight",
       [](Call& c) {
         c.o.causal = true;
         c.o.window_right = 3;
       },
       {"window_right: 3", "causal"}},
      {"Threads", [](Call& c) { c.o.threads = -1; }, {"threads: -1"}},
      {"Toggle", [](Call& c) { c.o.recipe.smooth_k = static_cast<Toggle>(9); }, {"toggle"}},
      {"PWithoutV",
       [](Call& c) {
         c.o.recipe = {};
         c.o.recipe.p = Format::u8;
       },
       {"recipe:"}},
      // Recipes and granularities.
      {"RecipeCombination",
       [](Call& c) { c.o.recipe.p = Format::u8; },
       {"u8 P goes with s8 V"},
       Code::unsupported},
      {"QkFormat", [](Call& c) { c.o.recipe.qk = Format::kv4; }, {"kv4"}, Code::unsupported},
      {"GranularityChannelK",
       [](Call& c) { c.o.recipe.k_scale.granularity = Granularity::per_channel; },
       {"k_scale", "per_channel", "V only"}},
      {"GranularityWarpK",
       [](Call& c) { c.o.recipe.k_scale.granularity = Granularity::per_warp; },
       {"k_scale", "per_warp", "Q only"}},
      {"GranularityGroup",
       [](Call& c) { c.o.recipe.q_scale.granularity = Granularity::group; },
       {"q_scale", "group", "s8"}},
      {"GranularityUnknown",
       [](Call& c) { c.o.recipe.q_scale.granularity = static_cast<Granularity>(55); },
       {"q_scale"}},
      {"GranularityOfF32",
       [](Call& c) {
         c.o.recipe = *recipe_named("f32");
         c.o.recipe.q_scale.granularity = Granularity::per_head;
       },
       {"q_scale", "f32", "no scales"}},
      {"BlockSize",
       [](Call& c) { c.o.recipe.k_scale = {Granularity::per_block, 12, 0}; },
       {"k_scale", "block 12"}},
      {"WarpSize",
       [](Call& c) { c.o.recipe.q_scale = {Granularity::per_warp, 128, 48}; },
       {"q_scale", "warp 48", "128"}},
      {"VBlock",
       [](Call& c) {
         c.o.recipe = *recipe_named("int8_full");
         c.o.recipe.v_scale = {Granularity::per_block_channel, 96, 0};
       },
       {"v_scale block 96"},
       Code::unsupported},
      // Scales and codes.
      {"CodesWithoutScale",
       [](Call& c) {
         c.code_k();
         c.t.k_scale = {};
       },
       {"k_scale: is missing"}},
      {"CodesAuto",
       [](Call& c) {
         c.code_k();
         c.o.recipe = {};
       },
       {"k:", "named recipe"}},
      {"CodesWrongFormat",
       [](Call& c) {
         c.code_k();
         c.t.k.format = Format::e4m3;
       },
       {"k: format e4m3", "s8"}},
      {"ScaleShape",
       [](Call& c) {
         c.code_k();
         c.t.k_scale.shape[2] = 9;
       },
       {"k_scale: shape (2, 2, 9)", "(2, 2, 10)"}},
      {"ScaleHeadsOfQ",
       [](Call& c) {
         c.code_k();
         c.t.k_scale = c.floats({2, 4, 10});
       },
       {"k_scale: shape (2, 4, 10)", "(2, 2, 10)"}},
      {"ScaleFormat",
       [](Call& c) {
         c.code_k();
         c.t.k_scale.format = Format::f16;
       },
       {"k_scale: format f16", "f32"}},
      {"ScaleNanValue",
       [](Call& c) {
         c.code_k();
         c.scales[7] = nan_value;
       },
       {"k_scale: value nan at (0, 0, 7)"}},
      {"ScaleZero",
       [](Call& c) {
         c.code_k();
         c.scales[11] = 0;
       },
       {"k_scale: value 0", "(0, 1, 1)", "positive"}},
      {"ScaleNegative",
       [](Call& c) {
         c.code_k();
         c.scales[0] = -1;
       },
       {"k_scale: value -1"}},
      {"StaticScaleOfF32",
       [](Call& c) {
         c.o.recipe = *recipe_named("f32");
         c.t.q_scale = c.floats({2, 4, 6});
       },
       {"q_scale: is given", "f32"}},
      {"StaticScaleOfMx",
       [](Call& c) {
         c.o.recipe = *recipe_named("mxfp8");
         c.t.q_scale = c.floats({2, 4, 6});
       },
       {"q_scale: is given", "mxfp8"}},
      {"GlobalUnused", [](Call& c) { c.t.q_global = c.floats({2, 4}); }, {"q_global", "nvfp4"}},
      {"MeanWithoutCodes",
       [](Call& c) { c.t.v_mean = c.floats({2, 2, 16}); },
       {"v_mean", "quantised v"}},
      {"MeanOfNumbersThatKeepTheirs",
       [](Call& c) {
         c.o.recipe = *recipe_named("bf16");
         c.t.k_mean = c.floats({2, 2, 16});
       },
       {"k_mean: is given", "bf16"}},
      {"MeanWithoutSmoothing",
       [](Call& c) {
         c.o.recipe = *recipe_named("int8");
         c.o.recipe.smooth_k = Toggle::off;
         c.t.k_mean = c.floats({2, 2, 16});
       },
       {"k_mean: is given", "smooth_k"}},
      {"MeanWithoutARecipe",
       [](Call& c) {
         c.o.recipe = Recipe{};
         c.t.k_mean = c.floats({2, 2, 16});
       },
       {"k_mean: needs a named recipe"}},
      {"MeanShape",
       [](Call& c) {
         c.code_k();
         c.t.k_mean = c.floats({2, 4, 16});
       },
       {"k_mean: shape (2, 4, 16)", "(2, 2, 16)"}},
      {"SmoothCodes",
       [](Call& c) {
         c.code_k();
         c.o.recipe.smooth_k = Toggle::on;
       },
       {"smooth_k", "codes"}},
      {"BalancedCodes",
       [](Call& c) {
         c.code_k();
         c.o.recipe.balance_k = Toggle::on;
       },
       {"balance_k", "codes"}},
      // Sequences.
      {"CuRank",
       [](Call& c) {
         c.pack_q();
         c.t.cu_seqlens_q.rank = 0;
       },
       {"cu_seqlens_q"}},
      {"CuFormat",
       [](Call& c) {
         c.pack_q();
         c.t.cu_seqlens_q.format = Format::f32;
       },
       {"cu_seqlens_q: format f32", "s32"}},
      {"CuOfNoSequence",
       [](Call& c) {
         c.pack_q();
         c.t.cu_seqlens_q.shape[0] = 1;
       },
       {"cu_seqlens_q: 1 entry has no sequence", "6 tokens of q"}},
      {"CuStart",
       [](Call& c) {
         c.pack_q();
         c.index[0] = 1;
       },
       {"cu_seqlens_q: entry 0 is 1"}},
      {"CuNotMonotone",
       [](Call& c) {
         c.pack_q();
         c.index[1] = 7;
       },
       {"cu_seqlens_q: entry 2 is 6", "7"}},
      {"CuEnd",
       [](Call& c) {
         c.pack_q();
         c.index[2] = 5;
       },
       {"cu_seqlens_q: last entry 5", "6"}},
      {"CuOverrun",
       [](Call& c) {
         c.pack_q();
         c.index[2] = 600;
       },
       {"cu_seqlens_q: last entry 600", "6"}},
      {"SeqUsedShape",
       [](Call& c) { c.t.seqused_k = c.ints({3}); },
       {"seqused_k: shape (3)", "(2)"}},
      {"SeqUsedTooLong",
       [](Call& c) {
         c.t.seqused_k = c.ints({2});
         c.index[1] = 11;
       },
       {"seqused_k: entry 1 is 11", "10"}},
      {"SeqUsedNegative",
       [](Call& c) {
         c.t.seqused_q = c.ints({2});
         c.index[0] = -1;
       },
       {"seqused_q: entry 0 is -1"}},
      {"PagesWithoutLengths",
       [](Call& c) {
         c.page_k();
         c.t.seqused_k = {};
       },
       {"page_table", "seqused_k"}},
      {"PagesAndCu",
       [](Call& c) {
         c.page_k();
         c.t.cu_seqlens_k = c.ints({3});
       },
       {"page_table", "cu_seqlens_k"}},
      {"PageTableShape",
       [](Call& c) {
         c.page_k();
         c.t.page_table.shape[0] = 1;
       },
       {"page_table: shape (1, 3)"}},
      {"PageTableFormat",
       [](Call& c) {
         c.page_k();
         c.t.page_table.format = Format::f32;
       },
       {"page_table: format f32", "s32, s64"}},
      {"PageTooLarge",
       [](Call& c) {
         c.page_k();
         c.index[4] = 5;
       },
       {"page_table: entry (1, 1) is 5", "[0, 5)"}},
      {"PageNegative",
       [](Call& c) {
         c.page_k();
         c.index[2] = -1;
       },
       {"page_table: entry (0, 2) is -1"}},
      // Extras.
      {"SinksShape", [](Call& c) { c.t.sinks = c.floats({2}); }, {"sinks: shape (2)", "(4)"}},
      {"MaskShape",
       [](Call& c) { c.t.mask = TensorView::dense(c.bytes.data(), Format::b8, {5, 10}); },
       {"mask: shape (5, 10)", "(2, 4, 6, 10)"}},
      {"MaskFormat",
       [](Call& c) { c.t.mask = TensorView::dense(c.bytes.data(), Format::u8, {6, 10}); },
       {"mask: format u8", "b8, b1"}},
      {"MaskBitsShape",  // 10 keys are two bytes
       [](Call& c) { c.t.mask = TensorView::dense(c.bytes.data(), Format::b1, {6, 24}); },
       {"mask: shape (6, 24)", "(2, 4, 6, 16)"}},
      {"MaskBitsOfNoWholeBytes",
       [](Call& c) { c.t.mask = TensorView::dense(c.bytes.data(), Format::b1, {6, 10}); },
       {"mask: stride 10 of dimension 0", "multiple of 8 packed b1"}},
      {"MaskBitsBroadcastOverKeys",
       [](Call& c) { c.t.mask = TensorView::dense(c.bytes.data(), Format::b1, {6, 1}); },
       {"mask: stride 1 of dimension 0 is not a multiple of 8"}},
      {"MaskBitsStride",
       [](Call& c) {
         c.t.mask = TensorView::dense(c.bytes.data(), Format::b1, {6, 16});
         c.t.mask.stride[1] = 2;
       },
       {"mask: stride 2 of b1"}},
      {"AlibiShape",
       [](Call& c) { c.t.alibi_slopes = c.floats({4, 2}); },
       {"alibi_slopes: shape (4, 2)", "(2, 4)"}},
      {"AlibiFormat",
       [](Call& c) {
         c.t.alibi_slopes = c.floats({4});
         c.t.alibi_slopes.format = Format::f16;
       },
       {"alibi_slopes: format f16"}},
  };
  return list;
}

class Refusal : public testing::TestWithParam<Case> {};

TEST_P(Refusal, NamesItAndTouchesNothing) {
  Call call;
  GetParam().break_it(call);
  const Status status = attention(call.t, call.o);
  EXPECT_EQ(name(status.code()), name(GetParam().code)) << status.message();
  for (const std::string& word : GetParam().words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "message: " << status.message() << "\nlacks: " << word;
  }
  for (const float x : call.out) ASSERT_EQ(x, -7.0f);
  for (const float x : call.lse) ASSERT_EQ(x, -7.0f);
  for (const std::int64_t x : call.counts) ASSERT_EQ(x, -7);
}

INSTANTIATE_TEST_SUITE_P(Attention, Refusal, testing::ValuesIn(cases()),
                         [](const auto& row) { return row.param.name; });

TEST(RefusalBase, TheUnbrokenCallsWork) {
  for (void (Call::*change)() : {&Call::pack_q, &Call::page_k, &Call::code_k}) {
    Call call;
    (call.*change)();
    if (change == &Call::pack_q) {  // packed q of two sequences against dense keys
      ASSERT_TRUE(attention(call.t, call.o).ok());
    } else {
      const Status s = attention(call.t, call.o);
      ASSERT_TRUE(s.ok()) << s.message();
    }
  }
  Call call;
  const Status s = attention(call.t, call.o);
  ASSERT_TRUE(s.ok()) << s.message();
  for (const float x : call.out) ASSERT_NEAR(x, 1.0f, 1e-3f);
}

TEST(RefusalQuantize, NamesTheRule) {
  std::vector<float> x(2 * 5 * 3 * 16, 1.0f), scale(64, -7.0f);
  std::vector<std::int8_t> codes(x.size(), -7);
  const auto fresh = [&] {
    QuantizeTensors t;
    t.x = TensorView::dense(x.data(), Format::f32, {2, 5, 3, 16});
    t.codes = TensorView::dense(codes.data(), Format::s8, {2, 5, 3, 16});
    t.scale = TensorView::dense(scale.data(), Format::f32, {2, 3, 5});
    return t;
  };
  const auto refuses = [&](const std::function<void(QuantizeTensors&, QuantizeOptions&)>& change,
                           const std::string& word) {
    QuantizeTensors t = fresh();
    QuantizeOptions o;
    change(t, o);
    const Result<QuantizeReport> r = quantize(t, o);
    EXPECT_FALSE(r.ok()) << word;
    EXPECT_NE(r.status().message().find(word), std::string::npos) << r.status().message();
    for (const std::int8_t c : codes) ASSERT_EQ(c, -7);
    for (const float s : scale) ASSERT_EQ(s, -7.0f);
  };
  using T = QuantizeTensors;
  using O = QuantizeOptions;
  refuses([](T& t, O&) { t.x = {}; }, "x: is missing");
  refuses([](T& t, O&) { t.x.format = Format::s8; }, "x: format s8");
  refuses([](T& t, O&) { t.x.shape[3] = 600; }, "x: head_dim 600 is not from 1 to 576");
  refuses([](T& t, O&) { t.x.stride[3] = 2; }, "x: stride 2");
  refuses([](T&, O& o) { o.format = Format::u8; }, "format: u8");
  refuses([](T&, O& o) { o.format = Format::kv2; }, "format: kv2");
  refuses([](T&, O& o) { o.role = static_cast<Role>(8); }, "role");
  refuses([](T&, O& o) { o.threads = -4; }, "threads: -4");
  refuses(
      [](T&, O& o) {
        o.role = Role::v;
        o.rotate = true;
      },
      "rotate");
  refuses([](T&, O& o) { o.scaling = {Granularity::per_block, 20, 0}; }, "block 20");
  refuses([](T& t, O&) { t.scale.shape[2] = 4; }, "scale: shape (2, 3, 4) should be (2, 3, 5)");
  refuses([](T& t, O&) { t.codes.shape[1] = 4; }, "codes: shape");
  refuses([](T& t, O&) { t.codes = {}; }, "codes: is missing");
  refuses([](T& t, O&) { t.codes.format = Format::e4m3; }, "codes: format e4m3");
  refuses([](T& t, O&) { t.mean = t.scale; }, "mean: is given");
  refuses([](T&, O& o) { o.smooth = true; }, "mean: is missing");
  refuses([](T& t, O&) { t.codes.data = t.x.data; }, "codes: overlaps the memory of x");
  refuses(
      [](T& t, O&) {
        t.static_scale = t.scale;
        t.static_scale.shape[2] = 2;
      },
      "static_scale");
}

}  // namespace
}  // namespace qattn
