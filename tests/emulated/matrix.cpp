#include "emulated/matrix.hpp"

#include <algorithm>
#include <utility>

#include "emulated/emulated_backend.hpp"
#include "emulated/gpu_features.hpp"
#include "kernels/attention/gpu.hpp"

namespace qattn::test {
namespace {

constexpr Heads every_shape[] = {{64, 64},   {80, 80},  {96, 96},  {128, 128}, {200, 200},
                                 {256, 256}, {64, 128}, {128, 64}, {96, 200},  {64, 192}};

bool resized(const Feature& f) { return f.dim != 64 || f.dim_v != 64; }

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

std::vector<Cell> paired_cells() {
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

std::vector<Cell> head_size_cells() {
  constexpr Heads sizes[] = {{20, 36}, {65, 3}, {100, 65}, {1, 1}, {36, 20}, {3, 100}};
  constexpr const char* names[] = {
      "causal",      "gqa_8_2",     "mask_bool",     "varlen",    "paged_24_bhsd", "decode_paged",
      "seqused_k",   "everything",  "static_scales", "rotate_on", "smooth_v_on",   "loud",
      "smooth_q_on", "strides_odd", "dim_8_8",       "paged_16",  "v_per_head_0",  "k_per_token_0"};
  std::vector<Cell> all, grouped;
  std::size_t n = 0, turn = 0;
  for (const Recipe& recipe : every_recipe()) {
    const bool groups = info(recipe.qk).group > 0;
    for (int i = 0; i < 3; ++i) {
      const Heads& heads = sizes[n % std::size(sizes)];
      while (!feature_named(names[turn % std::size(names)]).applies(recipe)) ++turn;
      const Feature& row = feature_named(names[turn++ % std::size(names)]);
      Feature f = with_inputs(row, recipe, n % 2 ? Format::f16 : Format::bf16);
      f.dim = heads.dim, f.dim_v = heads.dim_v;
      if (f.sq.size() < 3) f.sq.assign(f.sq.size(), std::min<std::int64_t>(f.sq[0], 40));
      if (f.sk.size() == 1) f.sk = {std::min<std::int64_t>(f.sk[0], 150)};
      if (n % 2) f.how.output = f.how.input;
      if (n % 3 == 1) f.how.lse = false;
      f.name += "_heads_" + std::to_string(f.dim) + "_" + std::to_string(f.dim_v);
      Cell cell = cell_of(recipe, f, "");
      if (groups) cell.architecture = 120;
      (groups ? grouped : all).push_back(std::move(cell));
      ++n;
    }
  }
  // A kernel of 256 channels takes four times the time: once each.
  for (const Recipe& recipe : {*recipe_named("int8_full"), *recipe_named("bf16")}) {
    Feature f = with_inputs(feature_named("dim_8_8"), recipe, Format::bf16);
    f.dim = 250, f.dim_v = 131, f.name = "causal_heads_250_131", f.options.causal = true;
    all.push_back(cell_of(recipe, f, ""));
  }
  share_with_others(all);
  all.insert(all.end(), grouped.begin(), grouped.end());
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

}  // namespace qattn::test
