#include "emulated/composed.hpp"

#include <algorithm>
#include <cstdio>
#include <string_view>
#include <tuple>
#include <utility>

#include "emulated/emulated_backend.hpp"
#include "kernels/attention/gpu.hpp"

namespace qattn::test {
namespace {

/// A factor of the fields that `tie` names.
template <class Tie>
CellFactor factor(std::string name, Tie tie, std::function<std::string(const Cell&)> level = {}) {
  return {std::move(name), [tie](Cell& to, const Cell& from) { tie(to) = tie(from); },
          [tie](const Cell& a, const Cell& b) { return tie(a) == tie(b); }, std::move(level)};
}
CellFactor rare(CellFactor factor) {
  factor.rare = true;
  return factor;
}
CellFactor dear(std::function<double(const Cell&)> cost, CellFactor factor) {
  factor.cost = std::move(cost);
  return rare(std::move(factor));
}
CellFactor lossy(CellFactor factor) {
  factor.lossy = true;
  return factor;
}

std::string size_of(std::int64_t n) { return n == 1 ? "one" : n < 64 ? "few" : "tile"; }

/// Packed lists and lists of used lengths are levels of their own.
std::string level_of_lengths(const Cell& cell) {
  const Feature& f = cell.feature;
  const std::string used = (f.used_q.empty() ? "" : "_used_q");
  if (f.how.packed_q) return (f.how.packed_k ? "packed" : "packed_q") + used;
  if (!f.used_q.empty() || !f.used_k.empty()) return f.used_q.empty() ? "used_k" : "used_q";
  if (f.sk[0] == 1) return "one_key";
  if (f.sq[0] <= 128) return size_of(f.sq[0]) + "_by_" + (f.sk[0] > 128 ? "many" : "few");
  return f.sq[0] == f.sk[0] ? "square" : f.sq[0] > f.sk[0] ? "more_queries" : "more_keys";
}

/// Scores of tiles of queries.
double cost_of_lengths(const Cell& cell) {
  const Feature& f = cell.feature;
  std::int64_t scores = 0;
  for (std::size_t b = 0; b < f.sq.size(); ++b) scores += (f.sq[b] + 63) / 64 * 64 * f.sk[b];
  return static_cast<double>(scores);
}
double cost_of_dims(const Cell& cell) {
  return static_cast<double>(cell.feature.dim + cell.feature.dim_v);
}
double cost_of_heads(const Cell& cell) { return static_cast<double>(cell.feature.heads_q); }

std::string level_of_dims(const Cell& cell) {
  const std::int64_t widest = std::max(cell.feature.dim, cell.feature.dim_v);
  for (const std::int64_t padded : {64, 96, 128, 192}) {
    if (widest <= padded) return std::to_string(padded);
  }
  return "256";
}

std::string level_of_window(const Cell& cell) {
  const AttentionOptions& o = cell.feature.options;
  const auto side = [](std::int64_t n) { return n < 0 ? "" : n == 0 ? "0" : "n"; };
  return (o.causal ? "causal_" : "") + std::string("left_") + side(o.window_left) + "_right_" +
         side(o.window_right);
}

std::string level_of_block_mask(const Cell& cell) {
  return std::to_string(static_cast<int>(cell.feature.block_mask));
}

std::string level_of_q_scale(const Cell& cell) {
  return std::string(name(cell.recipe.q_scale.granularity));
}

}  // namespace

const std::vector<CellFactor>& cell_factors() {
  static const std::vector<CellFactor> all = {
      factor("recipe",
             [](auto& c) { return std::tie(c.recipe.name, c.recipe.qk, c.recipe.p, c.recipe.v); }),
      factor("input", [](auto& c) { return std::tie(c.feature.how.input); }),
      dear(cost_of_dims,
           factor(
               "dims", [](auto& c) { return std::tie(c.feature.dim, c.feature.dim_v); },
               level_of_dims)),
      dear(cost_of_lengths, factor(
                                "lengths",
                                [](auto& c) {
                                  auto& f = c.feature;
                                  return std::tie(f.sq, f.sk, f.used_q, f.used_k, f.how.packed_q,
                                                  f.how.packed_k);
                                },
                                level_of_lengths)),
      dear(
          cost_of_heads,
          factor(
              "heads", [](auto& c) { return std::tie(c.feature.heads_q, c.feature.heads_k); },
              [](const Cell& c) { return std::to_string(c.feature.heads_q / c.feature.heads_k); })),
      factor("keys in memory",
             [](auto& c) {
               auto& h = c.feature.how;
               return std::tie(h.page_size, h.shared_pages, h.zero_stride_kv);
             }),
      factor("layout", [](auto& c) { return std::tie(c.feature.how.layout); }),
      factor("strides", [](auto& c) { return std::tie(c.feature.how.strides); }),
      factor("output", [](auto& c) { return std::tie(c.feature.how.output); }),
      factor("lse", [](auto& c) { return std::tie(c.feature.how.lse); }),
      rare(factor("mask",
                  [](auto& c) {
                    auto& f = c.feature;
                    return std::tie(f.mask, f.boolean_mask, f.bit_mask, f.how.bias);
                  })),
      rare(factor(
          "block mask",
          [](auto& c) {
            auto& o = c.feature.options;
            return std::tie(c.feature.block_mask, o.block_mask_q, o.block_mask_k);
          },
          level_of_block_mask)),
      rare(factor(
          "window",
          [](auto& c) {
            auto& o = c.feature.options;
            return std::tie(o.causal, o.window_left, o.window_right);
          },
          level_of_window)),
      factor(
          "softcap", [](auto& c) { return std::tie(c.feature.options.softcap); },
          [](const Cell& c) { return c.feature.options.softcap > 0 ? "on" : "off"; }),
      factor("softmax scale", [](auto& c) { return std::tie(c.feature.options.softmax_scale); }),
      factor("sinks", [](auto& c) { return std::tie(c.feature.sinks); }),
      rare(factor("alibi", [](auto& c) { return std::tie(c.feature.alibi, c.feature.slope); })),
      rare(lossy(factor("family", [](auto& c) { return std::tie(c.feature.family); }))),
      lossy(factor(
          "q scale", [](auto& c) { return std::tie(c.recipe.q_scale); }, level_of_q_scale)),
      lossy(factor("k scale", [](auto& c) { return std::tie(c.recipe.k_scale); })),
      lossy(factor("v scale", [](auto& c) { return std::tie(c.recipe.v_scale); })),
      lossy(factor("smooth_q", [](auto& c) { return std::tie(c.recipe.smooth_q); })),
      rare(lossy(
          factor("smooth_k and static scales",
                 [](auto& c) { return std::tie(c.recipe.smooth_k, c.feature.static_scales); }))),
      lossy(factor("smooth_v", [](auto& c) { return std::tie(c.recipe.smooth_v); })),
      lossy(factor("rotate", [](auto& c) { return std::tie(c.recipe.rotate); })),
      factor("gpu", [](auto& c) { return std::tie(c.architecture); }),
      factor("splits", [](auto& c) { return std::tie(c.splits); }),
      factor("consumers", [](auto& c) { return std::tie(c.consumers); }),
      factor("p in shared memory", [](auto& c) { return std::tie(c.shared_p); }),
      factor("timing", [](auto& c) { return std::tie(c.timing); }),
  };
  return all;
}

namespace {

/// A cell of one tile of queries without anything, and all that the products have.
const std::vector<Cell>& source() {
  static const std::vector<Cell> all = [] {
    Cell plain{"plain", every_recipe()[0], {}};
    plain.feature.name = "plain";
    plain.feature.sq = {65}, plain.feature.sk = {130}, plain.feature.heads_k = 4;
    plain.feature.how.input = Format::f16;
    std::vector<Cell> cells;
    for (int timing = 0; timing < static_cast<int>(every_timing().size()); ++timing) {
      cells.push_back(plain);
      cells.back().timing = timing;
    }
    for (const auto& more : {paired_cells(), spread_cells(), grouped_cells(), hopper_cells()}) {
      for (Cell cell : more) {
        cell.timing = 0;
        cells.push_back(std::move(cell));
      }
    }
    return cells;
  }();
  return all;
}

/// The factor on the bound against float64 that the products have for what is in the cell.
double looseness(const Cell& cell) {
  double loose = 3;
  for (const Cell& row : source()) {
    const bool has = std::ranges::all_of(cell_factors(), [&](const CellFactor& each) {
      return !each.lossy || each.same(row, source()[0]) || each.same(row, cell);
    });
    if (has) loose = std::max(loose, row.feature.loose);
  }
  return loose;
}

/// The GPUs that a directory's kernels are tested on, the one first that has all of them.
std::vector<int> gpus_for(std::string_view directory) {
  std::vector<int> own;
  for (const kernels::GpuKernels& each : kernels::gpu_architectures()) {
    if (!std::string_view(each.kernels[0].name).starts_with(directory)) continue;
    for (const kernels::Architecture& a : each.architectures) own.push_back(a.target.number);
  }
  std::ranges::reverse(own);
  return own;
}

/// Can tests lay it out, and does it say something?
bool is_call(const Cell& cell) {
  const Feature& f = cell.feature;
  const Recipe& r = cell.recipe;
  if (f.how.zero_stride_kv && (f.how.packed_k || f.how.page_size > 0)) return false;
  // The mean that is added again drowns the little that the sink leaves.
  if (f.family == Family::zero_sink && r.smooth_v == Toggle::on) return false;
  // Tests make static scales of dense sequences and of N(0,1) as it comes: of other families, or of
  // few channels, they would clip what decides the result.
  if (!f.static_scales) return true;
  const bool dense = !f.how.packed_q && !f.how.packed_k && f.how.page_size == 0 &&
                     f.used_q.empty() && f.used_k.empty();
  const bool changed =
      r.rotate == Toggle::on || r.smooth_q == Toggle::on || r.smooth_v == Toggle::on;
  return dense && !changed && f.family == Family::normal && f.dim >= 24;
}

/// A sequence's keys that others read, too, are the longest.
void put_longest_first(Feature& f) {
  if (f.used_k.empty()) return;
  const auto longest = std::ranges::max_element(f.used_k);
  std::swap(f.used_k[0], *longest);
}

}  // namespace

Cell settled(Cell cell) {
  Feature& f = cell.feature;
  const std::int64_t page = f.how.page_size;
  if (page > 0 && f.used_k.empty()) f.used_k = f.sk;
  for (std::int64_t& room : f.sk) room += page > 0 ? (page - room % page) % page : 0;
  if (f.how.zero_stride_kv || f.how.shared_pages > 0) put_longest_first(f);
  f.how.seqused_q = !f.used_q.empty();
  f.how.seqused_k = !f.used_k.empty() && page == 0;
  return cell;
}

Composed::Composed(std::string directory) : directory_(std::move(directory)) {
  for (const CellFactor& each : cell_factors()) {
    Factor factor{each.name, {}, each.rare};
    std::vector<Cell> values;
    std::vector<std::string> levels;
    const auto add = [&](const Cell& cell) {
      if (std::ranges::any_of(values, [&](const Cell& v) { return each.same(v, cell); })) return;
      const std::string level = each.level ? each.level(cell) : std::to_string(values.size());
      auto at = std::ranges::find(levels, level);
      if (at == levels.end()) at = levels.insert(levels.end(), level);
      factor.level_of.push_back(static_cast<int>(at - levels.begin()));
      values.push_back(cell);
    };
    if (each.name == "gpu") {
      for (const int gpu : gpus_for(directory_)) {
        Cell cell = source()[0];
        cell.architecture = gpu;
        add(cell);
      }
    } else {
      for (const Cell& cell : source()) add(cell);
    }
    for (const Cell& value : values) {
      if (each.cost) factor.cost.push_back(std::max(1.0, each.cost(value) / each.cost(values[0])));
    }
    factors_.push_back(std::move(factor));
    values_.push_back(std::move(values));
  }
  generate();
}

Cell Composed::cell(const Choice& choice) const {
  Cell cell = source()[0];
  for (std::size_t f = 0; f < choice.size(); ++f) {
    cell_factors()[f].take(cell, values_[f][static_cast<std::size_t>(choice[f])]);
  }
  return cell;
}

std::string Composed::description(const Choice& choice) const {
  std::string text;
  for (std::size_t f = 0; f < choice.size(); ++f) {
    if (choice[f] == 0) continue;
    const Cell& value = values_[f][static_cast<std::size_t>(choice[f])];
    text += (text.empty() ? "" : ", ") + factors_[f].name + " of " + value.feature.name;
  }
  return text;
}

namespace {

bool says(const std::string& plan, const std::string& field, int wanted, int nothing) {
  return wanted == nothing ||
         plan.find("\n" + field + ": " + std::to_string(wanted) + "\n") != std::string::npos;
}

}  // namespace

Result<Plan> plan_shapes(const Cell& cell) {
  LayoutOptions how = cell.feature.how;
  how.memory = false;
  Call call = make_shapes(cell.feature);
  Laid laid = lay_out(call, how);
  const OnArchitecture on(cell.architecture);
  const EmulatedBackend backend(architecture_for(cell.recipe));
  const ForceSplitKv forced(0, cell.splits, cell.consumers, cell.shared_p);
  AttentionOptions options = call.options;
  options.recipe = cell.recipe;
  Result<Plan> planned = plan(laid.tensors(), options);
  if (!planned.ok() || !cell.feature.static_scales) return planned;
  add_static_scales(call, laid, planned->recipe(), 1);
  options.recipe.k_scale = planned->recipe().k_scale;
  return plan(laid.tensors(), options);
}

Served Composed::served(const Choice& choice) const {
  const Cell cell = settled(this->cell(choice));
  if (!is_call(cell)) return Served::no;
  const Result<Plan> planned = plan_shapes(cell);
  if (!planned.ok() || !planned->kernel().starts_with(directory_ + "_")) return Served::no;
  const std::string text = planned->to_string();
  if (!says(text, "splits", cell.splits, 0) || !says(text, "consumers", cell.consumers, 0) ||
      !says(text, "shared_p", cell.shared_p, -1)) {
    return Served::no;
  }
  return text.find("portable") == std::string::npos ? Served::alone : Served::helped;
}

void Composed::generate() {
  bool helps = false;
  const auto alone = [&](const Choice& choice) {
    const Served by = served(choice);
    helps = helps || by == Served::helped;
    return by == Served::alone;
  };
  std::vector<Choice> choices = covering_array(factors_, context_factors, alone);
  const auto at_all = [&](const Choice& choice) { return served(choice) != Served::no; };
  if (helps) choices = covering_array(factors_, context_factors, at_all, std::move(choices));
  for (const Choice& choice : choices) {
    cells_.push_back(cell(choice));
    cells_.back().feature.name = description(choice);
    cells_.back().feature.loose = looseness(cells_.back());
    std::string number = std::to_string(cells_.size());
    number.insert(0, 3 - std::min<std::size_t>(3, number.size()), '0');
    cells_.back().name = directory_ + "_" + cells_.back().recipe.name + "_" + number;
  }
}

const std::vector<Composed>& composed() {
  static const std::vector<Composed> all = [] {
    std::vector<Composed> each;
#define QATTN_ARCHITECTURE(VENDOR, NAME) each.emplace_back(#NAME);
#include "kernels/attention/architectures.inc"
#undef QATTN_ARCHITECTURE
    return each;
  }();
  return all;
}

}  // namespace qattn::test
