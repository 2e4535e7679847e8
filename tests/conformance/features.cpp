// The table of features. Keys are 300 unless a row is about lengths: two full tiles of 128 and a
// short one.
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "conformance/feature.hpp"

namespace qattn::test {
namespace {

using Rows = std::vector<Feature>;
using Lengths = std::vector<std::int64_t>;

template <class Edit>
void add(Rows& rows, std::string name, Edit edit) {
  Feature feature;
  feature.name = std::move(name);
  edit(feature);
  rows.push_back(std::move(feature));
}

void heads_and_masks(Rows& rows) {
  add(rows, "plain", [](Feature& f) { f.heads_k = 4; });
  add(rows, "gqa_8_2", [](Feature& f) { f.heads_q = 8, f.sq = {33}, f.sk = {300}; });
  add(rows, "mqa", [](Feature& f) { f.heads_k = 1; });
  add(rows, "causal", [](Feature& f) { f.options.causal = true, f.sq = f.sk = {257}; });
  add(rows, "causal_fewer_queries", [](Feature& f) { f.options.causal = true; });
  add(rows, "causal_more_queries",
      [](Feature& f) { f.options.causal = true, f.sq = {200}, f.sk = {130}; });
  add(rows, "causal_window_left", [](Feature& f) {
    f.options.causal = true, f.options.window_left = 37, f.sq = {150}, f.sk = {300};
  });
  add(rows, "window_left", [](Feature& f) { f.options.window_left = 140; });
  add(rows, "window_right", [](Feature& f) { f.options.window_right = 3, f.sq = f.sk = {257}; });
  add(rows, "window_both", [](Feature& f) {
    f.options.window_left = 20, f.options.window_right = 5, f.sq = {200}, f.sk = {260};
  });
  // A right side beyond Sk still hides keys from the first queries when Sq > Sk.
  add(rows, "window_right_beyond_sk",
      [](Feature& f) { f.options.window_right = 70, f.sq = {150}, f.sk = {65}; });
  add(rows, "window_self",
      [](Feature& f) { f.options.window_left = f.options.window_right = 0, f.sq = f.sk = {130}; });
  add(rows, "softcap", [](Feature& f) { f.options.softcap = 2.5f; });
  add(rows, "softmax_scale", [](Feature& f) { f.options.softmax_scale = 0.3f; });
  add(rows, "sinks", [](Feature& f) { f.sinks = true; });
  add(rows, "sinks_masked_rows",
      [](Feature& f) { f.sinks = f.options.causal = true, f.sq = {140}, f.sk = {70}; });
  add(rows, "mask_bool", [](Feature& f) { f.mask = MaskShape::full; });
  add(rows, "mask_bool_2d", [](Feature& f) { f.mask = MaskShape::rows_keys; });
  add(rows, "mask_bool_padding", [](Feature& f) { f.mask = MaskShape::keys_only; });
  add(rows, "mask_bits", [](Feature& f) { f.mask = MaskShape::full, f.bit_mask = true; });
  add(rows, "mask_bits_padding", [](Feature& f) {
    f.mask = MaskShape::keys_only, f.bit_mask = f.options.causal = f.sinks = true;
    f.sk = {301, 301}, f.used_k = {301, 203}, f.how.seqused_k = true;
    f.how.strides = Strides::reversed;
  });
  add(rows, "mask_bits_packed", [](Feature& f) {
    f.mask = MaskShape::heads, f.bit_mask = f.how.packed_q = f.how.packed_k = true;
    f.sq = {40, 20, 30}, f.sk = {130, 41, 157};
  });
  add(rows, "mask_additive", [](Feature& f) { f.mask = MaskShape::full, f.boolean_mask = false; });
  add(rows, "mask_additive_bf16", [](Feature& f) {
    f.mask = MaskShape::heads, f.boolean_mask = false, f.how.bias = Format::bf16;
  });
  add(rows, "mask_bool_causal_sinks", [](Feature& f) {
    f.mask = MaskShape::rows_keys, f.options.causal = f.sinks = true;
    f.how.strides = Strides::odd, f.how.bias = Format::f16;
  });
  add(rows, "alibi", [](Feature& f) { f.alibi = true; });
  add(rows, "alibi_more_queries",
      [](Feature& f) { f.alibi = f.behind = true, f.sq = {200}, f.sk = {130}; });
  add(rows, "alibi_negative_gqa_8_2", [](Feature& f) {
    f.alibi = f.behind = true, f.slope = -0.25f, f.heads_q = 8, f.sq = f.sk = {150};
  });
  add(rows, "alibi_window_both", [](Feature& f) {
    f.alibi = f.behind = true, f.options.window_left = 40, f.options.window_right = 60;
    f.sq = {200}, f.sk = {260};
  });
  add(rows, "alibi_varlen", [](Feature& f) {
    f.alibi = f.behind = true, f.heads_q = 8, f.sq = {65, 0, 1, 33}, f.sk = {130, 7, 0, 300};
    f.how.packed_q = f.how.packed_k = true;
  });
  add(rows, "alibi_seqused", [](Feature& f) {
    f.alibi = f.behind = true, f.sq = {40, 40, 40}, f.sk = {200, 200, 200}, f.used_q = {40, 0, 17};
    f.used_k = {99, 200, 160}, f.how.seqused_q = f.how.seqused_k = true;
  });
  add(rows, "everything", [](Feature& f) {
    f.alibi = f.sinks = f.options.causal = true, f.options.softcap = 5;
    f.options.window_left = 150, f.mask = MaskShape::full, f.boolean_mask = false;
  });
}

void sequences(Rows& rows) {
  add(rows, "varlen", [](Feature& f) {
    f.sq = {65, 0, 1, 33}, f.sk = {130, 7, 0, 300};
    f.how.packed_q = f.how.packed_k = true;
  });
  add(rows, "varlen_causal_bhsd", [](Feature& f) {
    f.sq = {40, 0, 129}, f.sk = {130, 3, 129}, f.options.causal = true, f.sinks = true;
    f.how.packed_q = f.how.packed_k = true, f.how.layout = Layout::bhsd;
  });
  add(rows, "varlen_seqused", [](Feature& f) {
    f.sq = {40, 20, 30}, f.sk = {130, 40, 160}, f.used_q = {40, 0, 17}, f.used_k = {99, 40, 0};
    f.how.packed_q = f.how.packed_k = f.how.seqused_q = f.how.seqused_k = true;
  });
  add(rows, "varlen_q_dense_k", [](Feature& f) {
    f.sq = {5, 0, 33}, f.sk = {140, 140, 140}, f.used_k = {140, 12, 131};
    f.how.packed_q = f.how.seqused_k = true, f.options.causal = true;
  });
  add(rows, "seqused_q",
      [](Feature& f) { f.used_q = {50, 0}, f.how.seqused_q = true, f.options.causal = true; });
  add(rows, "seqused_k", [](Feature& f) {
    f.sq = {20, 20, 20}, f.sk = {200, 200, 200}, f.used_k = {150, 0, 200};
    f.how.seqused_k = true, f.options.causal = true;
  });
  add(rows, "paged_16", [](Feature& f) {
    f.how.page_size = 16, f.sq = {20, 20, 20}, f.sk = {300, 300, 300};
    f.used_k = {261, 0, 130}, f.options.causal = true;
  });
  add(rows, "paged_24_bhsd",
      [](Feature& f) { f.how.page_size = 24, f.how.layout = Layout::bhsd, f.used_k = {131, 299}; });
  add(rows, "paged_shared_prefix", [](Feature& f) {
    f.how.page_size = 64, f.how.shared_pages = 2, f.sq = {9, 9, 9}, f.sk = {320, 320, 320};
    f.used_k = {200, 300, 129}, f.how.strides = Strides::odd;
  });
  add(rows, "paged_varlen_q", [](Feature& f) {
    f.how.page_size = 128, f.how.packed_q = true, f.sq = {1, 40, 0}, f.sk = {300, 300, 300};
    f.used_k = {300, 129, 5}, f.options.causal = true;
  });
  add(rows, "decode",
      [](Feature& f) { f.sq = {1, 1}, f.sk = {300, 300}, f.heads_q = 8, f.options.causal = true; });
  add(rows, "decode_paged", [](Feature& f) {
    f.sq = {1, 1, 1}, f.sk = {640, 640, 640}, f.used_k = {640, 1, 77}, f.heads_q = 8;
    f.how.page_size = 32, f.how.input = Format::f16;
  });
  add(rows, "decode_long", [](Feature& f) { f.sq = {1}, f.sk = {2100}, f.heads_q = 2; });
  add(rows, "varlen_split", [](Feature& f) {
    f.sq = {1, 60, 3}, f.sk = {1500, 1100, 2500}, f.how.packed_q = f.how.packed_k = true;
    f.dim = f.dim_v = 32, f.options.causal = f.sinks = true;
  });
  for (const std::int64_t s : {1, 63, 64, 65, 127, 128, 129, 256}) {
    add(rows, "keys_" + std::to_string(s), [s](Feature& f) { f.sq = {17}, f.sk = {s}; });
  }
  for (const std::int64_t s : {1, 31, 32, 33, 128, 129}) {
    add(rows, "square_causal_" + std::to_string(s),
        [s](Feature& f) { f.sq = f.sk = {s}, f.options.causal = true; });
  }
}

void block_masks(Rows& rows) {
  const auto blocks = [](Feature& f, MaskShape shape, std::int64_t q, std::int64_t k) {
    f.block_mask = shape, f.options.block_mask_q = q, f.options.block_mask_k = k;
    f.sq = {270, 270}, f.sk = {330, 330};
  };
  add(rows, "block_mask", [=](Feature& f) { blocks(f, MaskShape::full, 128, 64); });
  add(rows, "block_mask_causal_sinks", [=](Feature& f) {
    blocks(f, MaskShape::heads, 128, 128), f.options.causal = f.sinks = true;
  });
  add(rows, "block_mask_rows_and_mask", [=](Feature& f) {
    blocks(f, MaskShape::rows_keys, 128, 192), f.mask = MaskShape::full, f.options.window_left = 99;
    f.how.strides = Strides::odd;
  });
  add(rows, "block_mask_paged", [=](Feature& f) {
    blocks(f, MaskShape::full, 256, 64), f.how.page_size = 48, f.used_k = {330, 130};
    f.sk = {336, 336};
  });
  add(rows, "block_mask_varlen", [=](Feature& f) {
    blocks(f, MaskShape::full, 128, 64), f.how.packed_q = f.how.packed_k = true;
    f.sq = {200, 3, 129}, f.sk = {70, 300, 129}, f.options.causal = true;
  });
}

/// Score and mask functions that mistake no index for another and know the sequence's lengths.
/// The bend's slope is at most 1: float32 scores do not drift from the model's.
void score_of_run(const void* context, const ScoreRun& run, float* scores) {
  const float bend = *static_cast<const float*>(context);
  for (std::int64_t j = 0; j < run.count; ++j) {
    const std::int64_t diagonal = run.query + run.keys - run.queries;
    const auto behind = static_cast<float>(std::abs(diagonal - run.key - j) % 64);
    const auto place = static_cast<float>((3 * run.batch + 2 * run.head + 5 * (run.key + j)) % 11);
    scores[j] = scores[j] / (1 + bend * std::abs(scores[j])) - 0.02f * behind + 0.1f * place;
  }
}
void mask_of_run(const void* /*context*/, const ScoreRun& run, std::uint8_t* visible) {
  for (std::int64_t j = 0; j < run.count; ++j) {
    // Every ninth query sees nothing at all.
    const std::int64_t place = run.batch + 2 * run.head + 3 * run.query + run.key + j;
    visible[j] = run.query % 9 != 4 && place % 5 != 0;
  }
}

void functions(Rows& rows) {
  const auto both = [](Feature& f) {
    static constexpr float bend = 0.125f;
    f.options.score_function = {score_of_run, &bend};
    f.options.mask_function = {mask_of_run, nullptr};
  };
  add(rows, "functions", [=](Feature& f) { both(f); });
  add(rows, "functions_gqa_8_2_causal",
      [=](Feature& f) { both(f), f.heads_q = 8, f.sq = {33}, f.options.causal = true; });
  add(rows, "functions_varlen_sinks", [=](Feature& f) {
    both(f), f.sq = {65, 0, 1, 33}, f.sk = {130, 7, 0, 300}, f.sinks = f.options.causal = true;
    f.how.packed_q = f.how.packed_k = true;
  });
  add(rows, "functions_seqused", [=](Feature& f) {
    both(f), f.sq = {20, 20, 20}, f.sk = {200, 200, 200}, f.used_q = {20, 7, 0};
    f.used_k = {150, 200, 130}, f.how.seqused_q = f.how.seqused_k = true;
  });
  add(rows, "functions_paged_sinks", [=](Feature& f) {
    both(f), f.how.page_size = 16, f.sq = {20, 20, 20}, f.sk = {300, 300, 300};
    f.used_k = {261, 0, 130}, f.options.causal = f.sinks = true;
  });
  add(rows, "functions_decode_paged", [=](Feature& f) {
    both(f), f.how.page_size = 32, f.sq = {1, 1}, f.sk = {2112, 2112}, f.used_k = {2100, 77};
    f.heads_q = 8, f.sinks = true;
  });
  add(rows, "functions_and_everything", [=](Feature& f) {
    both(f), f.alibi = f.sinks = f.options.causal = true, f.options.softcap = 5;
    f.options.window_left = 150, f.mask = MaskShape::full, f.boolean_mask = false;
  });
  add(rows, "function_of_scores", [=](Feature& f) { both(f), f.options.mask_function = {}; });
  add(rows, "function_of_masks", [=](Feature& f) {
    both(f), f.options.score_function = {}, f.options.causal = true, f.sq = {150}, f.sk = {300};
  });
}

void shapes(Rows& rows) {
  const std::pair<std::int64_t, std::int64_t> dims[] = {{8, 8},    {24, 24},   {32, 32}, {72, 72},
                                                        {96, 96},  {128, 128}, {32, 64}, {64, 24},
                                                        {128, 72}, {256, 256}, {256, 8}, {8, 256}};
  for (const auto& [d, dv] : dims) {
    add(rows, "dim_" + std::to_string(d) + "_" + std::to_string(dv),
        [d = d, dv = dv](Feature& f) { f.dim = d, f.dim_v = dv, f.sq = {33}, f.sk = {150}; });
  }
  add(rows, "bhsd", [](Feature& f) { f.how.layout = Layout::bhsd; });
  add(rows, "strides_odd", [](Feature& f) { f.how.strides = Strides::odd; });
  add(rows, "strides_odd_bhsd_f16", [](Feature& f) {
    f.how.strides = Strides::odd, f.how.layout = Layout::bhsd;
    f.how.input = f.how.output = Format::f16;
  });
  add(rows, "strides_reversed", [](Feature& f) { f.how.strides = Strides::reversed; });
  add(rows, "strides_zero", [](Feature& f) { f.how.zero_stride_kv = true; });
  add(rows, "f16", [](Feature& f) { f.how.input = f.how.output = Format::f16; });
  add(rows, "bf16", [](Feature& f) { f.how.input = f.how.output = Format::bf16; });
  add(rows, "bf16_to_f32", [](Feature& f) { f.how.input = Format::bf16; });
  add(rows, "no_lse", [](Feature& f) { f.how.lse = false; });
  for (const Family family : {Family::k_shift, Family::outliers, Family::peaky, Family::sink,
                              Family::zero_sink, Family::v_mean}) {
    add(rows, "family_" + name(family), [family](Feature& f) {
      f.family = family;
      // The weight that the sink draws away leaves little to measure the rest against.
      if (family == Family::zero_sink) f.loose = 6;
    });
  }
}

bool coded_qk(const Recipe& r) { return has_codes(r.qk); }
bool free_qk(const Recipe& r) { return free_scales(r.qk); }
bool free_v(const Recipe& r) { return free_scales(r.v); }
bool integer_v(const Recipe& r) { return r.v == Format::s8; }

void granularities(Rows& rows) {
  using enum Granularity;
  const Scaling q_scalings[] = {{per_tensor, 0, 0},  {per_head, 0, 0},     {per_block, 64, 0},
                                {per_warp, 64, 32},  {per_thread, 64, 16}, {per_block, 128, 0},
                                {per_warp, 128, 16}, {per_token, 0, 0}};
  for (const Scaling& scaling : q_scalings) {
    const std::string tail = std::string(name(scaling.granularity)) + "_" +
                             std::to_string(scaling.block) + "_" + std::to_string(scaling.warp);
    add(rows, "q_" + tail, [scaling](Feature& f) {
      f.sq = {150, 150}, f.sk = {140, 140}, f.applies = free_qk;
      f.tweak = [scaling](Recipe& r) { r.q_scale = scaling; };
    });
  }
  const Scaling k_scalings[] = {{per_tensor, 0, 0},   {per_head, 0, 0},    {per_block, 64, 0},
                                {per_thread, 64, 0},  {per_block, 128, 0}, {per_block, 8, 0},
                                {per_thread, 128, 0}, {per_token, 0, 0}};
  for (const Scaling& scaling : k_scalings) {
    const std::string tail =
        std::string(name(scaling.granularity)) + "_" + std::to_string(scaling.block);
    add(rows, "k_" + tail, [scaling](Feature& f) {
      f.sq = {40, 40}, f.applies = free_qk;
      f.tweak = [scaling](Recipe& r) { r.k_scale = scaling; };
    });
    add(rows, "k_" + tail + "_paged", [scaling](Feature& f) {
      f.sq = {20, 20}, f.applies = free_qk, f.used_k = {200, 299}, f.how.page_size = 48;
      f.tweak = [scaling](Recipe& r) { r.k_scale = scaling; };
    });
  }
  const Scaling v_scalings[] = {{per_tensor, 0, 0},          {per_head, 0, 0},
                                {per_token, 0, 0},           {per_thread, 64, 0},
                                {per_channel, 0, 0},         {per_block_channel, 64, 0},
                                {per_block_channel, 128, 0}, {per_block_channel, 256, 0},
                                {per_block_channel, 8, 0}};
  for (const Scaling& scaling : v_scalings) {
    const std::string tail =
        std::string(name(scaling.granularity)) + "_" + std::to_string(scaling.block);
    const auto tweak = [scaling](Recipe& r) { r.v_scale = scaling; };
    const auto applies = scaling.granularity == per_thread ? integer_v : free_v;
    add(rows, "v_" + tail, [=](Feature& f) { f.applies = applies, f.tweak = tweak; });
    add(rows, "v_" + tail + "_zero_sink", [=](Feature& f) {
      f.applies = applies, f.tweak = tweak, f.family = Family::zero_sink, f.loose = 6;
      f.options.causal = f.sinks = true;
    });
    if (scaling.granularity != per_block_channel) continue;
    add(rows, "v_" + tail + "_packed", [=](Feature& f) {
      f.applies = applies, f.tweak = tweak, f.options.causal = true;
      f.sq = {20, 0, 70, 1}, f.sk = {260, 0, 131, 64}, f.how.packed_q = f.how.packed_k = true;
    });
  }
}

void recipe_options(Rows& rows) {
  const std::pair<std::string, Toggle Recipe::*> toggles[] = {{"smooth_k", &Recipe::smooth_k},
                                                              {"smooth_q", &Recipe::smooth_q},
                                                              {"rotate", &Recipe::rotate}};
  for (const auto& [label, toggle] : toggles) {
    for (const Toggle value : {Toggle::off, Toggle::on}) {
      add(rows, label + (value == Toggle::on ? "_on" : "_off"),
          [toggle = toggle, value](Feature& f) {
            f.applies = coded_qk, f.family = Family::k_shift, f.loose = 12;
            f.tweak = [toggle, value](Recipe& r) { r.*toggle = value; };
          });
    }
  }
  add(rows, "smooth_v_on", [](Feature& f) {
    f.applies = [](const Recipe& r) { return has_codes(r.v); };
    f.family = Family::v_mean, f.sinks = f.options.causal = true, f.sq = {100}, f.sk = {90};
    f.tweak = [](Recipe& r) { r.smooth_v = Toggle::on; };
  });
  add(rows, "smooth_all_rotate_softcap", [](Feature& f) {
    f.applies = coded_qk, f.family = Family::k_shift, f.options.softcap = 8, f.sinks = true;
    f.how.input = f.how.output = Format::f16, f.sq = {150, 150}, f.sk = {200, 200};
    f.used_k = {170, 131}, f.how.seqused_k = true;
    f.tweak = [](Recipe& r) {
      r.smooth_k = r.smooth_q = r.rotate = Toggle::on;
      if (has_codes(r.v)) r.smooth_v = Toggle::on;
    };
  });
  add(rows, "rotate_dim_72", [](Feature& f) {
    f.applies = coded_qk, f.dim = 72, f.sq = {33}, f.sk = {150};
    f.tweak = [](Recipe& r) { r.rotate = Toggle::on; };
  });
  add(rows, "static_scales", [](Feature& f) {
    f.applies = free_qk, f.static_scales = true, f.loose = 15, f.sq = {40, 40}, f.sk = {140, 140};
    f.tweak = [](Recipe& r) { r.smooth_k = Toggle::off; };
  });
  add(rows, "static_scales_blocks", [](Feature& f) {
    f.applies = free_qk, f.static_scales = true, f.loose = 15, f.sq = {150}, f.sk = {200};
    f.tweak = [](Recipe& r) {
      r.q_scale = {Granularity::per_warp, 64, 16};
      r.k_scale = {Granularity::per_block, 64, 0};
      r.smooth_k = Toggle::off;
    };
  });
}

/// Keys with loud channels (docs/NUMERICS.md).
void loud_keys(Rows& rows) {
  const auto loud = [&](const std::string& name, auto change) {
    add(rows, "loud" + name, [&](Feature& f) {
      f.applies = coded_qk, f.family = Family::loud, f.behind = true;
      change(f);
    });
  };
  loud("", [](Feature&) {});
  loud("_causal_gqa_8_2", [](Feature& f) { f.heads_q = 8, f.options.causal = true; });
  loud("_decode", [](Feature& f) { f.heads_q = 8, f.sq = {1, 1}, f.sk = {1500, 1500}; });
  loud("_varlen", [](Feature& f) {
    f.sq = {65, 0, 1, 33}, f.sk = {130, 7, 0, 300}, f.how.packed_q = f.how.packed_k = true;
  });
  loud("_paged_seqused", [](Feature& f) {
    f.how.page_size = 16, f.how.input = f.how.output = Format::bf16;
    f.used_k = {170, 9}, f.sk = {200, 200}, f.how.seqused_k = true;
  });
  loud("_window", [](Feature& f) {
    f.sq = {33}, f.sk = {400}, f.options.causal = true, f.options.window_left = 90;
  });
  loud("_softcap_sinks", [](Feature& f) { f.options.softcap = 5, f.sinks = true; });
  loud("_rotate", [](Feature& f) { f.tweak = [](Recipe& r) { r.rotate = Toggle::on; }; });
  loud("_with_mean", [](Feature& f) { f.tweak = [](Recipe& r) { r.smooth_k = Toggle::off; }; });
  loud("_smooth_q_dim_72",
       [](Feature& f) { f.dim = 72, f.tweak = [](Recipe& r) { r.smooth_q = Toggle::on; }; });
  loud("_per_head", [](Feature& f) {
    f.tweak = [](Recipe& r) {
      if (info(r.qk).group == 0) r.q_scale = r.k_scale = {Granularity::per_head, 0, 0};
    };
  });
}

}  // namespace

const std::vector<Feature>& features() {
  static const Rows rows = [] {
    Rows all;
    heads_and_masks(all);
    sequences(all);
    block_masks(all);
    functions(all);
    shapes(all);
    granularities(all);
    recipe_options(all);
    loud_keys(all);
    return all;
  }();
  return rows;
}

std::vector<Feature> features_of_gpus() {
  Rows rows = features();
  std::erase_if(
      rows, [](const Feature& f) { return f.options.score_function || f.options.mask_function; });
  return rows;
}

const Feature& feature_named(const std::string& name) {
  for (const Feature& feature : features()) {
    if (feature.name == name) return feature;
  }
  throw std::out_of_range("no feature " + name);
}

}  // namespace qattn::test
