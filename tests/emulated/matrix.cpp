#include "emulated/matrix.hpp"

#include <algorithm>
#include <utility>

#include "emulated/emulated_backend.hpp"
#include "kernels/attention/gpu.hpp"

namespace qattn::test {
namespace {

struct Heads {
  std::int64_t dim, dim_v;
};

// Often the cheap ones: D = 256 takes four times the emulator's time of D = 64.
constexpr Heads rotation[] = {{64, 64},  {128, 128}, {64, 64}, {80, 80},
                              {128, 64}, {64, 128},  {64, 64}, {96, 96}};
constexpr Heads every_shape[] = {{64, 64},   {80, 80},  {96, 96},  {128, 128}, {200, 200},
                                 {256, 256}, {64, 128}, {128, 64}, {96, 200},  {64, 192}};

template <class Edit>
void add(std::vector<Feature>& rows, const std::string& name, Edit edit) {
  Feature feature;
  feature.name = name;
  feature.sq = {65};
  feature.sk = {130};
  edit(feature);
  rows.push_back(std::move(feature));
}

/// What GPUs' tiles and paths ask beyond the table: 64 keys, 64 or 128 rows, 16-byte rows.
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

bool resized(const Feature& f) { return f.dim != 64 || f.dim_v != 64; }

Cell cell_of(const Recipe& recipe, const Feature& feature, std::string tail) {
  Cell cell{recipe.name + "_" + feature.name + std::move(tail), recipe, feature};
  feature.tweak(cell.recipe);
  const Scaling& v = cell.recipe.v_scale;
  cell.refused = (v.granularity == Granularity::per_block_channel && v.block % 64 != 0) ||
                 (v.granularity == Granularity::per_token && cell.recipe.v == Format::e4m3);
  return cell;
}

/// A GPU for each directory of kernels.
std::vector<int> gpus_under_test() {
  std::vector<int> all;
  for (const kernels::GpuKernels& own : kernels::gpu_architectures()) {
    all.push_back(own.architectures.back().target.number);
  }
  std::ranges::sort(all);
  return all;
}

/// Has the GPU a kernel for the cell? The portable one serves all but FP8 where mma.sync has none.
bool is_served(const Cell& cell, int gpu) {
  const Recipe& r = cell.recipe;
  if (r.qk != Format::e4m3 && r.v != Format::e4m3) return true;
  if (cell.refused) return false;
  if (gpu != 90) return isa::has_mma(isa::Element::e4m3, gpu);
  return r.smooth_q != Toggle::on && cell.feature.options.block_mask_q % 128 == 0 &&
         r.v_scale.granularity != Granularity::per_block_channel;
}

/// The GPUs on which other kernels serve the cell than on its own.
std::vector<int> other_gpus(const Cell& cell) {
  std::vector<int> all;
  for (const int gpu : gpus_under_test()) {
    if (gpu != architecture_for(cell.recipe) && is_served(cell, gpu)) all.push_back(gpu);
  }
  return all;
}

void move(Cell& cell, int gpu) {
  cell.architecture = gpu;
  cell.name += "_sm" + std::to_string(gpu);
}

/// Every cell once more on each of its other GPUs.
void add_others(std::vector<Cell>& cells) {
  for (std::size_t n = 0, count = cells.size(); n < count; ++n) {
    for (const int gpu : other_gpus(cells[n])) {
      cells.push_back(cells[n]);
      move(cells.back(), gpu);
    }
  }
}

/// The same for s8 V; cells of other recipes take their GPUs in turn.
void share_with_others(std::vector<Cell>& cells) {
  for (std::size_t n = 0, count = cells.size(); n < count; ++n) {
    const std::vector<int> others = other_gpus(cells[n]);
    if (cells[n].recipe.v == Format::s8) {
      for (const int gpu : others) {
        cells.push_back(cells[n]);
        move(cells.back(), gpu);
      }
    } else if (const std::size_t turn = n % (others.size() + 1); turn > 0) {
      move(cells[n], others[turn - 1]);
    }
  }
}

/// Recipe and feature of every cell that means something.
std::vector<std::pair<Recipe, Feature>> pairs() {
  std::vector<Feature> rows = features_of_gpus();
  for (Feature& f : gpu_features()) rows.push_back(std::move(f));
  std::vector<std::pair<Recipe, Feature>> all;
  for (const bool behind : {false, true}) {
    for (const Recipe& recipe : gpu_recipes()) {
      for (const Feature& feature : rows) {
        const bool turn = feature.behind == behind;
        if (turn && feature.applies(recipe)) all.emplace_back(recipe, feature);
      }
    }
  }
  return all;
}

struct SplitKvFeature {
  Feature feature;
  int splits;
};

/// Rows of several heads in a tile, and keys that several blocks share: everything that depends on
/// a row's head, its query or on where its keys begin and end.
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

}  // namespace

std::vector<Recipe> gpu_recipes() {
  std::vector<Recipe> all;
  for (const char* name : {"f16", "bf16", "int8", "int8_full", "int8_fp8", "fp8"}) {
    all.push_back(*recipe_named(name));
  }
  return all;
}

std::vector<Recipe> grouped_recipes() {
  std::vector<Recipe> all;
  for (const char* name : {"mxfp8", "nvfp4_qk", "nvfp4"}) all.push_back(*recipe_named(name));
  all.push_back(all.back());  // no name of its own: e4m3 P and V beside Q and K of 4 bits
  all.back().name = "nvfp4_qk_fp8", all.back().p = all.back().v = Format::e4m3;
  return all;
}

std::vector<Recipe> every_recipe() {
  std::vector<Recipe> all = gpu_recipes();
  for (Recipe& recipe : grouped_recipes()) all.push_back(std::move(recipe));
  return all;
}

Feature unprepared(std::int64_t dim, std::vector<std::int64_t> sq, std::vector<std::int64_t> sk) {
  Feature f;
  f.dim = f.dim_v = dim, f.heads_q = 4, f.heads_k = 2;
  f.sq = std::move(sq), f.sk = std::move(sk);
  f.how.lse = false;
  return f;
}

Feature with_inputs(Feature feature, const Recipe& recipe, Format wanted) {
  const bool fixed = recipe.qk == Format::f16 || recipe.qk == Format::bf16;
  Format& input = feature.how.input;
  input = fixed ? recipe.qk : input == Format::f32 ? wanted : input;
  return feature;
}

std::vector<Cell> spread_cells() {
  std::vector<Cell> all;
  std::size_t n = 0;
  for (const Recipe& recipe : gpu_recipes()) {
    for (const auto& [row, splits] : split_kv_features()) {
      if (!row.applies(recipe)) continue;
      Feature f = with_inputs(row, recipe, n % 2 ? Format::f16 : Format::bf16);
      const Heads heads = rotation[n / 2 % std::size(rotation)];
      f.dim = heads.dim, f.dim_v = heads.dim_v;
      if (n % 3 == 1) f.how.output = f.how.input;
      Cell cell = cell_of(recipe, f, "");
      cell.splits = splits;
      all.push_back(std::move(cell));
      ++n;
    }
  }
  share_with_others(all);
  return all;
}

std::vector<Cell> covering_cells() {
  std::vector<Cell> all;
  std::size_t n = 0;
  for (const auto& [recipe, row] : pairs()) {
    Feature f = with_inputs(row, recipe, n % 2 ? Format::f16 : Format::bf16);
    const Heads heads = rotation[n / 2 % std::size(rotation)];
    if (!resized(f)) f.dim = heads.dim, f.dim_v = heads.dim_v;
    if (n % 3 == 1 && f.how.output == Format::f32) f.how.output = f.how.input;
    if (n % 7 == 3 && f.how.strides == Strides::dense) f.how.layout = Layout::bhsd;
    if (n % 7 == 5 && f.how.strides == Strides::dense) f.how.strides = Strides::odd;
    all.push_back(cell_of(recipe, f, ""));
    ++n;
  }
  share_with_others(all);
  return all;
}

std::vector<Cell> grouped_cells(bool every) {
  constexpr Heads dims[] = {{64, 64},  {128, 128}, {96, 96}, {80, 80},
                            {128, 64}, {64, 128},  {64, 64}, {200, 200}};
  std::vector<SplitKvFeature> rows;
  for (Feature& f : features_of_gpus()) rows.push_back({std::move(f), 0});
  for (Feature& f : gpu_features()) rows.push_back({std::move(f), 0});
  for (SplitKvFeature& f : split_kv_features()) rows.push_back(std::move(f));
  std::vector<Cell> all;
  std::size_t n = 0;
  for (const Recipe& recipe : grouped_recipes()) {
    const bool shares = !every && recipe.qk == Format::nvfp4 && recipe.v != Format::nvfp4;
    int turn = has_codes(recipe.v) ? 1 : 0;
    for (const auto& [row, splits] : rows) {
      if (shares && turn++ % 2 == 1) continue;
      if (!row.applies(recipe)) continue;
      Feature f = with_inputs(row, recipe, n % 2 ? Format::f16 : Format::bf16);
      const Heads heads = dims[n / 2 % std::size(dims)];
      if (!resized(f)) f.dim = heads.dim, f.dim_v = heads.dim_v;
      if (n % 3 == 1 && f.how.output == Format::f32) f.how.output = f.how.input;
      Cell cell = cell_of(recipe, f, "");
      cell.splits = splits, cell.architecture = 120;
      all.push_back(std::move(cell));
      ++n;
    }
  }
  return all;
}

std::vector<Cell> all_cells() {
  std::vector<Cell> all;
  std::size_t n = 0;
  for (const auto& [recipe, row] : pairs()) {
    for (const Format format : {Format::f16, Format::bf16}) {
      if (recipe.qk == Format::f16 || recipe.qk == Format::bf16 ? recipe.qk != format
                                                                : has_codes(recipe.v) && n % 2) {
        ++n;
        continue;
      }
      for (const Heads heads : every_shape) {
        Feature f = with_inputs(row, recipe, format);
        const bool own = resized(f);
        if (!own) f.dim = heads.dim, f.dim_v = heads.dim_v;
        if (n % 2 && f.how.output == Format::f32) f.how.output = f.how.input;
        std::string tail = "_";
        tail.append(info(format).name).append("_").append(std::to_string(f.dim));
        tail.append("_").append(std::to_string(f.dim_v));
        all.push_back(cell_of(recipe, f, tail));
        ++n;
        if (own) break;
      }
    }
  }
  add_others(all);
  for (Cell& cell : grouped_cells(true)) all.push_back(std::move(cell));
  return all;
}

namespace {

/// A call for a kernel of padded head dimensions `d` and `dv`, Q and K in `qk`, P in `pv`.
std::pair<Recipe, Feature> call_for(int d, int dv, const std::string& qk, const std::string& pv) {
  Feature f;
  f.sq = {130}, f.sk = {190}, f.heads_q = 2, f.heads_k = 1;
  const auto odd = [](int n) { return n == 96 ? 80 : n == 192 ? 168 : n == 256 ? 200 : n; };
  f.dim = odd(d), f.dim_v = odd(dv);
  f.options.causal = true;
  f.how.input = pv == "f16" || qk == "f16" ? Format::f16 : Format::bf16;
  return {*recipe_named(qk == "e4m3"   ? "fp8"
                        : qk != "s8"   ? qk
                        : pv == "u8"   ? "int8_full"
                        : pv == "e4m3" ? "int8_fp8"
                                       : "int8"),
          f};
}

/// For kernels that plans take by shapes, or only if told to: sequences that end in each consumer's
/// part of a block, and what rows may see.
std::vector<Feature> rows_of_variants() {
  std::vector<Feature> rows;
  for (const char* name : {"window_both", "causal_window_left", "mask_bits_padding", "everything",
                           "sinks_masked_rows"}) {
    rows.push_back(feature_named(name));
  }
  add(rows, "causal_long", [](Feature& f) { f.sq = f.sk = {450}, f.options.causal = true; });
  add(rows, "full_long", [](Feature& f) { f.sq = {400}, f.sk = {520}; });
  add(rows, "pages", [](Feature& f) {
    f.sq = {220, 20, 1}, f.sk = {512, 512, 512}, f.used_k = {417, 0, 129};
    f.how.page_size = 48, f.how.packed_q = f.options.causal = true;
  });
  add(rows, "packed", [](Feature& f) {
    f.sq = {1, 64, 0, 130, 200, 385}, f.sk = {129, 64, 70, 0, 257, 385};
    f.how.packed_q = f.how.packed_k = f.options.causal = true;
  });
  return rows;
}

/// Blocks of 192 rows.
void add_three_consumers(std::vector<Cell>& all) {
  std::size_t n = 0;
  for (const Feature& row : rows_of_variants()) {
    for (const Recipe& recipe : gpu_recipes()) {
      if (!has_codes(recipe.v) || !row.applies(recipe)) continue;
      Feature f = with_inputs(row, recipe, n % 2 ? Format::f16 : Format::bf16);
      f.dim = f.dim_v = n / 3 % 2 && recipe.p != Format::u8 ? 128 : 64, f.name += "_three";
      Cell cell = cell_of(recipe, f, "");
      cell.architecture = 90, cell.consumers = 3;
      all.push_back(std::move(cell));
      ++n;
    }
  }
}

/// Every kind of input with three consumers, whose plans want longer rows than tests have.
void add_families(std::vector<Cell>& all) {
  for (const Feature& row : features_of_gpus()) {
    if (!row.name.starts_with("family_")) continue;
    for (const Recipe& recipe : gpu_recipes()) {
      if (!has_codes(recipe.v) || !row.applies(recipe)) continue;
      Feature f = with_inputs(row, recipe, Format::bf16);
      f.sq = {200}, f.sk = {300}, f.name += "_three_consumers";
      f.dim = f.dim_v = recipe.p == Format::u8 ? 64 : 128;
      Cell cell = cell_of(recipe, f, "");
      cell.architecture = 90, cell.consumers = 3;
      all.push_back(std::move(cell));
    }
  }
}

/// 8-bit V of more than 128 channels: P V in parts, and one buffer of Q; every fourth with rows at
/// odd addresses, whose output leaves an element at a time.
void add_wide_codes(std::vector<Cell>& all) {
  std::size_t n = 0;
  for (const Feature& row : rows_of_variants()) {
    for (const Recipe& recipe : gpu_recipes()) {
      if (!has_codes(recipe.v) || !row.applies(recipe)) continue;
      Feature f = with_inputs(row, recipe, Format::bf16);
      f.dim = 200, f.dim_v = 248, f.name += "_wide_codes";
      if (n++ % 4 == 0) f.how.strides = Strides::odd;
      Cell cell = cell_of(recipe, f, "");
      cell.architecture = 90;
      all.push_back(std::move(cell));
    }
  }
}

/// Head dimensions that are no power of two, and a V narrower than Q and K.
void add_other_dims(std::vector<Cell>& all) {
  constexpr Heads others[] = {{96, 96}, {192, 128}, {192, 192}, {72, 96}, {136, 40}};
  std::size_t n = 0;
  for (const Feature& row : rows_of_variants()) {
    for (const Recipe& recipe : gpu_recipes()) {
      if (!row.applies(recipe)) continue;
      Feature f = with_inputs(row, recipe, n % 3 ? Format::bf16 : Format::f16);
      if (!has_codes(recipe.v)) {  // TMA reads it in place
        f.how.strides = Strides::dense;
        if (f.how.page_size > 0) f.how.page_size = 64;
      }
      const Heads heads = others[n % std::size(others)];
      f.dim = heads.dim, f.dim_v = heads.dim_v;
      f.name += "_dims_" + std::to_string(f.dim) + "_" + std::to_string(f.dim_v);
      Cell cell = cell_of(recipe, f, "");
      cell.architecture = 90;
      all.push_back(std::move(cell));
      ++n;
    }
    ++n;  // or a recipe may always meet the same
  }
}

/// P in shared memory, which 16 bits have for causal or longer rows than tests do.
void add_shared_p(std::vector<Cell>& all) {
  for (const Feature& row : rows_of_variants()) {
    for (const Recipe& recipe : gpu_recipes()) {
      if (!row.applies(recipe)) continue;
      Feature f = with_inputs(row, recipe, Format::bf16);
      if (!has_codes(recipe.v)) {  // TMA reads it in place
        f.how.strides = Strides::dense;
        if (f.how.page_size > 0) f.how.page_size = 64;
      }
      f.dim = f.dim_v = 128, f.name += "_shared_p";
      Cell cell = cell_of(recipe, f, "");
      cell.architecture = 90, cell.shared_p = 1;
      all.push_back(std::move(cell));
    }
  }
}

}  // namespace

std::vector<Cell> hopper_cells() {
  std::vector<Feature> rows;
  for (const char* name :
       {"window_left", "causal_window_left", "window_both", "window_right", "window_self",
        "window_right_beyond_sk", "mask_bool", "mask_bool_2d", "mask_bool_padding", "mask_additive",
        "mask_additive_bf16", "softcap", "alibi", "everything", "paged_16", "k_per_token_0",
        "k_per_thread_64", "static_scales_blocks"}) {
    rows.push_back(feature_named(name));
  }
  add(rows, "window_plain_tiles", [](Feature& f) {
    f.sq = f.sk = {600}, f.options.window_left = 330, f.options.window_right = 40;
  });
  add(rows, "negative_scale", [](Feature& f) { f.options.softmax_scale = -0.1f; });
  for (const std::int64_t size : {16, 32, 64, 128, 256}) {
    add(rows, "pages_of_" + std::to_string(size), [size](Feature& f) {
      f.sq = {129, 20, 1}, f.sk = {512, 512, 512}, f.used_k = {417, 0, 129};
      f.how.page_size = size, f.how.packed_q = f.options.causal = true;
    });
  }
  add(rows, "pages_varlen_window", [](Feature& f) {
    f.sq = {1, 140, 0}, f.sk = {320, 320, 320}, f.used_k = {300, 129, 5}, f.how.page_size = 32;
    f.how.packed_q = f.options.causal = true, f.options.window_left = 70;
  });
  add(rows, "pages_shared_mask_bhsd", [](Feature& f) {
    f.sq = {9, 9}, f.sk = {320, 320}, f.used_k = {200, 300}, f.mask = MaskShape::full;
    f.how.page_size = 64, f.how.shared_pages = 2, f.how.layout = Layout::bhsd;
  });
  const std::size_t any_v = rows.size();
  for (const char* name : {"block_mask", "block_mask_causal_sinks", "block_mask_varlen"}) {
    rows.push_back(feature_named(name));
  }
  const auto blocks = [&](const std::string& name, std::int64_t keys, auto edit) {
    add(rows, "block_mask_" + name, [&](Feature& f) {
      f.block_mask = MaskShape::full, f.options.block_mask_q = 128, f.options.block_mask_k = keys;
      f.sq = {140}, f.sk = {700}, edit(f);
    });
  };
  blocks("64_softcap", 64, [](Feature& f) { f.options.softcap = 3; });
  blocks("192_window", 192, [](Feature& f) { f.options.window_left = 400; });
  blocks("64_pages", 64, [](Feature& f) { f.how.page_size = 64, f.sk = {704}, f.used_k = {650}; });
  std::vector<Cell> all;
  for (std::size_t n = 0; n < rows.size(); ++n) {
    for (const Recipe& recipe : gpu_recipes()) {
      const bool wide = !has_codes(recipe.v);
      if (!rows[n].applies(recipe)) continue;
      if (n < any_v && (!wide || recipe.name == (n % 2 ? "f16" : "bf16"))) continue;
      Feature f = with_inputs(rows[n], recipe, n / 2 % 2 ? Format::f16 : Format::bf16);
      const Heads heads = rotation[all.size() % std::size(rotation)];
      f.dim = heads.dim, f.dim_v = heads.dim_v;
      Cell cell = cell_of(recipe, f, "");
      cell.architecture = 90;
      all.push_back(std::move(cell));
    }
  }
  add_three_consumers(all);
  add_families(all);
  add_wide_codes(all);
  add_shared_p(all);
  add_other_dims(all);
  // One call for every line of the list; raw queries: fused_q_quant_test.cpp.
  const auto instance = [&](int d, const char* qk, const char* pv, bool raw, int consumers,
                            bool shared_p = false, int v = 0) {
    if (raw) return;
    auto [recipe, f] = call_for(d, v > 0 ? v : d, qk, pv);
    f.name = "instance_d" + std::to_string(d) + (v > 0 ? "_" + std::to_string(v) : "") + "_" + pv +
             "_" + std::to_string(consumers) + (shared_p ? "_shared_p" : "");
    Cell cell = cell_of(recipe, f, "");
    cell.architecture = 90, cell.consumers = has_codes(recipe.v) ? consumers : 0;
    cell.shared_p = shared_p ? 1 : 0;
    all.push_back(std::move(cell));
  };
#define QATTN_INSTANCE(D, QK, PV, ...) instance(D, #QK, #PV, __VA_ARGS__);
#include "kernels/attention/sm90a/instances.inc"
#undef QATTN_INSTANCE
  return all;
}

std::vector<InstanceCell> instance_cells() {
  std::vector<InstanceCell> all;
  const auto instance = [&](int d, const char* qk, const char* pv, bool general) {
    auto [recipe, f] = call_for(d, d, qk, pv);
    f.name = "d" + std::to_string(d) + (general ? "_general_" : "_plain_") + pv;
    if (general) f.options.softcap = 3;
    Cell cell = cell_of(recipe, f, "");
    cell.architecture = 89;  // Hopper has kernels of its own
    all.push_back(
        {std::move(cell), std::string(general ? "general" : "plain") + " d" + std::to_string(d)});
  };
#define QATTN_INSTANCE(D, QK, PV, GENERAL) instance(D, #QK, #PV, GENERAL);
#include "kernels/attention/sm80/instances.inc"
#undef QATTN_INSTANCE
  return all;
}

}  // namespace qattn::test
