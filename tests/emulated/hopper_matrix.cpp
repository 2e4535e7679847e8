// The cells of Hopper's kernels, and those of lists of instances.
#include <utility>

#include "emulated/gpu_features.hpp"
#include "emulated/matrix.hpp"

namespace qattn::test {
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

std::vector<Cell> hopper_instance_cells() {
  std::vector<Cell> all;
  const auto instance = [&](int d, const char* qk, const char* pv, bool raw, int consumers,
                            bool shared_p = false, int v = 0) {
    if (raw) return;
    auto [recipe, f] = call_for(d, v > 0 ? v : d, qk, pv);
    f.name = "instance_d" + std::to_string(d);
    if (v > 0) f.name.append("_").append(std::to_string(v));
    f.name.append("_").append(pv).append("_").append(std::to_string(consumers));
    if (shared_p) f.name += "_shared_p";
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
  for (Cell& cell : hopper_instance_cells()) all.push_back(std::move(cell));
  return all;
}

std::vector<InstanceCell> instance_cells() {
  std::vector<InstanceCell> all;
  const auto instance = [&](int d, const char* qk, const char* pv, bool general) {
    auto [recipe, f] = call_for(d, d, qk, pv);
    f.name = "d";
    f.name.append(std::to_string(d)).append(general ? "_general_" : "_plain_").append(pv);
    if (general) f.options.softcap = 3;
    Cell cell = cell_of(recipe, f, "");
    cell.architecture = 89;  // Hopper has kernels of its own
    std::string variant = general ? "general d" : "plain d";
    all.push_back({std::move(cell), variant.append(std::to_string(d))});
  };
#define QATTN_INSTANCE(D, QK, PV, GENERAL) instance(D, #QK, #PV, GENERAL);
#include "kernels/attention/sm80/instances.inc"
#undef QATTN_INSTANCE
  return all;
}

}  // namespace qattn::test
