#include "emulated/gpu_features.hpp"

namespace qattn::test {

std::vector<Feature> gpu_features() {
  std::vector<Feature> rows;
  for (const std::int64_t s : {1, 63, 64, 65, 127, 129, 300}) {
    add(rows, "queries_" + std::to_string(s), [s](Feature& f) { f.sq = {s}; });
    add(rows, "queries_causal_" + std::to_string(s),
        [s](Feature& f) { f.sq = {s}, f.sk = {129}, f.options.causal = true; });
    add(rows, "square_window_" + std::to_string(s), [s](Feature& f) {
      f.sq = f.sk = {s}, f.options.window_left = 70, f.options.window_right = 1;
    });
  }
  add(rows, "negative_scale", [](Feature& f) { f.options.softmax_scale = -0.1f; });
  add(rows, "gqa_causal_300",
      [](Feature& f) { f.heads_q = 6, f.sq = f.sk = {300}, f.options.causal = true; });
  add(rows, "paged_64_causal", [](Feature& f) {
    f.sq = {129, 129}, f.sk = {320, 320}, f.used_k = {300, 64};
    f.how.page_size = 64, f.options.causal = true;
  });
  add(rows, "strides_odd_causal", [](Feature& f) {
    f.how.strides = Strides::odd, f.sq = f.sk = {130}, f.options.causal = true;
  });
  add(rows, "varlen_tiles", [](Feature& f) {
    f.sq = {64, 1, 129, 65}, f.sk = {64, 129, 63, 65}, f.options.causal = true;
    f.how.packed_q = f.how.packed_k = true;
  });
  // Blocks of Q's means and the rows of a tile or warp: inside, across, over all storages.
  const auto smooth_q = [&rows](const std::string& name, std::int32_t block, auto edit) {
    add(rows, "smooth_q_" + name, [&](Feature& f) {
      f.applies = [](const Recipe& r) { return r.qk == Format::s8; };
      f.sq = {150, 150}, f.sk = {200, 200}, f.heads_q = 4, f.loose = 12;
      f.tweak = [block](Recipe& r) {
        r.smooth_q = Toggle::on, r.q_scale = {Granularity::per_token, block, 8};
      };
      edit(f);
    });
  };
  smooth_q("8_causal", 8, [](Feature& f) { f.options.causal = true; });
  smooth_q("24_paged", 24, [](Feature& f) { f.how.page_size = 16, f.used_k = {131, 200}; });
  smooth_q("48_odd", 48, [](Feature& f) { f.how.strides = Strides::odd; });
  smooth_q("64_varlen", 64, [](Feature& f) {
    f.sq = {70, 1, 150}, f.sk = {64, 129, 200}, f.how.packed_q = f.how.packed_k = true;
  });
  smooth_q("256_dim_72", 256, [](Feature& f) { f.dim = 72, f.sq = {300}, f.sk = {100}; });
  return rows;
}

std::vector<SplitKvFeature> split_kv_features() {
  std::vector<SplitKvFeature> all;
  const auto add = [&](const std::string& name, std::int64_t sq, std::int64_t sk,
                       std::int64_t heads_q, std::int64_t heads_k, int splits, auto edit) {
    Feature f;
    f.name = name + "_splits";
    f.sq = {sq, sq}, f.sk = {sk, sk}, f.heads_q = heads_q, f.heads_k = heads_k;
    edit(f);
    all.push_back({f, splits});
  };
  add("few_1_gqa_4_causal", 1, 450, 8, 2, 3, [](Feature& f) { f.options.causal = true; });
  add("few_1_mqa_8_sinks", 1, 300, 8, 1, 2, [](Feature& f) { f.sinks = true; });
  add("few_1_mha_softcap", 1, 400, 3, 3, 3, [](Feature& f) { f.options.softcap = 2.5f; });
  add("few_2_gqa_8_window", 2, 500, 8, 1, 2,
      [](Feature& f) { f.options.causal = true, f.options.window_left = 270; });
  add("few_2_alibi_mask", 2, 300, 8, 2, 3,
      [](Feature& f) { f.alibi = true, f.mask = MaskShape::full, f.boolean_mask = false; });
  add("few_8_mask_bool_heads", 8, 260, 8, 2, 2, [](Feature& f) { f.mask = MaskShape::heads; });
  add("few_8_mask_bits", 8, 261, 8, 2, 2,
      [](Feature& f) { f.mask = MaskShape::full, f.bit_mask = f.options.causal = true; });
  add("few_8_everything", 8, 400, 4, 1, 3, [](Feature& f) {
    f.alibi = f.sinks = f.options.causal = true, f.options.softcap = 5;
    f.options.window_left = 250, f.mask = MaskShape::full, f.boolean_mask = false;
  });
  add("few_3_gqa_3_odd", 3, 300, 6, 2, 2,
      [](Feature& f) { f.how.strides = Strides::odd, f.options.causal = true; });
  add("few_16_gqa_12_window_both", 16, 300, 12, 1, 2, [](Feature& f) {
    f.sq = {16}, f.sk = {300}, f.options.window_left = 180, f.options.window_right = 5;
  });
  add("few_more_queries_than_keys", 20, 9, 4, 1, 2,
      [](Feature& f) { f.options.causal = f.sinks = true; });
  add("few_varlen", 0, 0, 8, 2, 3, [](Feature& f) {
    f.sq = {1, 8, 0, 2, 5}, f.sk = {200, 300, 7, 129, 0}, f.options.causal = true;
    f.how.packed_q = f.how.packed_k = true;
  });
  add("few_varlen_seqused", 0, 0, 8, 1, 2, [](Feature& f) {
    f.sq = {4, 2, 3}, f.sk = {330, 140, 260}, f.used_q = {4, 0, 2}, f.used_k = {299, 40, 0};
    f.how.packed_q = f.how.packed_k = f.how.seqused_q = f.how.seqused_k = true;
    f.how.layout = Layout::bhsd;
  });
  add("few_paged", 2, 0, 8, 2, 4, [](Feature& f) {
    f.sq = {2, 2, 2}, f.sk = {640, 640, 640}, f.used_k = {640, 1, 277}, f.options.causal = true;
    f.how.page_size = 32;
  });
  add("few_4_smooth_v", 4, 300, 4, 2, 2, [](Feature& f) {
    f.applies = [](const Recipe& r) { return has_codes(r.v); };
    f.tweak = [](Recipe& r) { r.smooth_v = Toggle::on; };
    f.sinks = true;
  });
  add("few_8_smooth_q", 8, 300, 4, 2, 2, [](Feature& f) {
    f.applies = [](const Recipe& r) { return r.qk == Format::s8; };
    f.tweak = [](Recipe& r) {
      r.smooth_q = Toggle::on, r.q_scale = {Granularity::per_token, 8, 8};
    };
    f.loose = 12;
  });
  add("few_2_k_per_token", 2, 300, 4, 1, 2, [](Feature& f) {
    f.applies = [](const Recipe& r) { return free_scales(r.qk); };
    f.tweak = [](Recipe& r) { r.k_scale = {Granularity::per_token, 0, 0}; };
  });
  add("blocks_block_mask", 0, 0, 2, 1, 2, [](Feature& f) {
    f.sq = {270}, f.sk = {600}, f.block_mask = MaskShape::full;
    f.options.block_mask_q = 128, f.options.block_mask_k = 128;
  });
  add("blocks_causal", 0, 0, 4, 2, 2,
      [](Feature& f) { f.sq = {150}, f.sk = {420}, f.options.causal = true; });
  add("blocks_window_varlen", 0, 0, 2, 1, 3, [](Feature& f) {
    f.sq = {140, 3, 200}, f.sk = {400, 500, 200}, f.options.causal = true;
    f.options.window_left = 260, f.how.packed_q = f.how.packed_k = true;
  });
  return all;
}

Cell cell_of(const Recipe& recipe, const Feature& feature, std::string tail) {
  Cell cell{recipe.name + "_" + feature.name + std::move(tail), recipe, feature};
  feature.tweak(cell.recipe);
  const Scaling& v = cell.recipe.v_scale;
  cell.refused = (v.granularity == Granularity::per_block_channel && v.block % 64 != 0) ||
                 (v.granularity == Granularity::per_token && cell.recipe.v == Format::e4m3);
  return cell;
}

}  // namespace qattn::test
