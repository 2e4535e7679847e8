#include "conformance/hidden_keys.hpp"

#include <limits>

namespace qattn::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

void hide_in_function(const void*, const ScoreRun& run, std::uint8_t* visible) {
  for (std::int64_t j = 0; j < run.count; ++j) {
    visible[j] = visible[j] != 0 && !is_padding(run.key + j);
  }
}

}  // namespace

bool is_padding(std::int64_t j) { return j >= 100 || j == 3 || j == 17; }

Mask padding_mask(std::vector<std::int64_t> shape, bool boolean, float visible, float hidden) {
  Mask mask;
  mask.boolean = boolean;
  mask.shape = shape;
  std::int64_t rows = 1;
  for (std::size_t n = 0; n + 1 < shape.size(); ++n) rows *= shape[n];
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t j = 0; j < shape.back(); ++j) {
      const bool missed = is_padding(j) || (rows > 1 && (j + row) % 3 == 0);
      mask.values.push_back(missed ? hidden : visible);
    }
  }
  return mask;
}

std::vector<Hiding> every_hiding(std::int64_t queries, std::int64_t keys) {
  std::vector<Hiding> all;
  const auto masked = [&](const std::string& name, Mask mask) {
    all.push_back({name, [mask](Call& call) { call.mask = mask; }, is_padding});
  };
  masked("padding", padding_mask({1, 1, 1, keys}, true, 1, 0));
  masked("infinite_biases", padding_mask({1, 1, 1, keys}, false, 0.5f, -infinity));
  masked("every_row", padding_mask({1, 1, queries, keys}, true, 1, 0));
  masked("every_head", padding_mask({1, 4, 1, keys}, true, 1, 0));
  Mask bits = padding_mask({1, 1, queries, keys}, true, 1, 0);
  bits.bits = true;
  masked("bits", bits);
  all.push_back({"window",
                 [](Call& call) { call.options.causal = true, call.options.window_left = 40; },
                 [=](std::int64_t j) { return j < keys - queries - 40; }});
  all.push_back({"blocks",
                 [](Call& call) {
                   call.options.block_mask_q = 128, call.options.block_mask_k = 64;
                   call.block_mask.boolean = true;
                   call.block_mask.shape = {1, 1, 1, 3};
                   call.block_mask.values = {1, 0, 1};
                 },
                 [](std::int64_t j) { return j / 64 == 1; }});
  all.push_back({"function",
                 [](Call& call) { call.options.mask_function = {hide_in_function, nullptr}; },
                 is_padding});
  return all;
}

void fill_keys(Call& call, const std::function<bool(std::int64_t)>& hides, float value) {
  Sequence& seq = call.sequences[0];
  for (const auto& [x, dim] : {std::pair{&seq.k, call.dim}, std::pair{&seq.v, call.dim_v}}) {
    for (std::size_t n = 0; n < x->size(); ++n) {
      if (hides(static_cast<std::int64_t>(n) / dim % seq.len_k)) (*x)[n] = value;
    }
  }
}

}  // namespace qattn::test
