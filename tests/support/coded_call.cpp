#include "support/coded_call.hpp"

#include <cstring>
#include <utility>

namespace qattn::test {
namespace {

using enum Granularity;

/// Tokens of a dense tensor to pages of a new one; `token`, `head`: which dimensions they are.
Tensor in_pages(const TensorView& from, std::int64_t page_size, int token, int head) {
  const std::int64_t batch = from.shape[0], length = from.shape[token], heads = from.shape[head];
  const std::int64_t each = (length + page_size - 1) / page_size;
  const std::int64_t dim = from.rank == 4 ? from.shape[3] : 1, width = info(from.format).bits / 8;
  Index shape(static_cast<std::size_t>(from.rank));
  for (int i = 0; i < from.rank; ++i) shape[static_cast<std::size_t>(i)] = from.shape[i];
  shape[0] = batch * each;
  shape[static_cast<std::size_t>(token)] = page_size;
  Tensor pages(from.format, shape);
  const TensorView& to = pages.view();
  std::memset(to.data, 0x7f, static_cast<std::size_t>(pages.count() * width));
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t s = 0; s < length; ++s) {
      const std::int64_t page = batch * each - 1 - (b * each + s / page_size);
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t at = page * to.stride[0] + s % page_size * to.stride[token];
        const std::int64_t of = b * from.stride[0] + s * from.stride[token];
        std::memcpy(static_cast<char*>(to.data) + width * (at + h * to.stride[head]),
                    static_cast<const char*>(from.data) + width * (of + h * from.stride[head]),
                    static_cast<std::size_t>(dim * width));
      }
    }
  }
  pages.freeze();
  return pages;
}

}  // namespace

QuantizeOptions options_for(Role role, Format format, const Scaling& scaling, Layout layout) {
  QuantizeOptions options;
  options.role = role;
  options.format = format;
  options.scaling = scaling;
  options.layout = layout;
  return options;
}

Status quantise(const TensorView& x, const QuantizeOptions& options, const TensorView& cu_seqlens,
                CodedTensor& coded) {
  const Result<QuantizeShapes> shapes = quantize_shapes(x, options, cu_seqlens);
  if (!shapes.ok()) return shapes.status();
  coded.codes = Tensor(shapes->codes);
  coded.scale = Tensor(shapes->scale);
  if (shapes->global.present()) coded.global = Tensor(shapes->global);
  if (shapes->mean.present()) coded.mean = Tensor(shapes->mean);
  QuantizeTensors tensors;
  tensors.x = x;
  tensors.codes = coded.codes.view();
  tensors.scale = coded.scale.view();
  tensors.global = coded.global.view();
  tensors.mean = coded.mean.view();
  tensors.cu_seqlens = cu_seqlens;
  return quantize(tensors, options).status();
}

Status put_codes(Laid& laid, const Recipe& recipe) {
  const AttentionTensors t = laid.tensors();
  const auto put = [&](Role role, const TensorView& x, Format format, const Scaling& scaling,
                       Tensor& codes, Tensor& scale) {
    CodedTensor c;
    const QuantizeOptions options = options_for(role, format, scaling, laid.how.layout);
    Status s = quantise(x, options, t.cu_seqlens_k, c);
    codes = std::move(c.codes), scale = std::move(c.scale);
    return s;
  };
  if (Status s = put(Role::k, t.k, recipe.qk, recipe.k_scale, laid.k, laid.k_scale); !s.ok()) {
    return s;
  }
  return put(Role::v, t.v, recipe.v, recipe.v_scale, laid.v, laid.v_scale);
}

void put_into_pages(Laid& laid, const Call& call, std::int64_t page_size) {
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  const std::int64_t length = call.sequences[0].room_k, each = (length + page_size - 1) / page_size;
  laid.pages = Tensor(Format::s32, {batch, each});
  for (std::int64_t i = 0; i < batch * each; ++i) {
    laid.pages.set({i / each, i % each}, static_cast<double>(batch * each - 1 - i));
  }
  laid.pages.freeze();
  for (Tensor* codes : {&laid.k, &laid.v}) *codes = in_pages(codes->view(), page_size, 1, 2);
  for (Tensor* scale : {&laid.k_scale, &laid.v_scale}) {
    const TensorView& v = scale->view();
    if (v.rank == 3 && v.shape[2] == length) *scale = in_pages(v, page_size, 2, 1);
  }
  laid.how.page_size = page_size;
  laid.used_k = Tensor(Format::s32, {batch});
  for (std::int64_t b = 0; b < batch; ++b) laid.used_k.set({b}, static_cast<double>(length));
  laid.used_k.freeze();
}

namespace {

/// Collects cases of one recipe.
class Cases {
 public:
  Cases(std::vector<CodedCase>& all, const char* recipe) : all_(all) {
    base_.name = recipe;
    base_.recipe = *recipe_named(recipe);
    base_.recipe.smooth_k = Toggle::off;
    base_.recipe.q_scale.granularity = per_token;
    base_.recipe.k_scale.granularity = per_token;
    base_.recipe.v_scale.granularity = s8() ? per_token : per_channel;
    // Grouped heads, a few queries, lengths that fill neither tiles nor shares.
    Feature& f = base_.feature;
    f.sq = {3, 3}, f.sk = {450, 450}, f.heads_q = 8, f.heads_k = 2, f.options.causal = true;
    f.how.input = Format::bf16;
  }
  bool s8() const { return base_.recipe.v == Format::s8; }

  template <class Change>
  void add(const std::string& name, Change change) {
    CodedCase c = base_;
    c.name += " " + name;
    change(c);
    all_.push_back(std::move(c));
  }

 private:
  std::vector<CodedCase>& all_;
  CodedCase base_;
};

void add_features(Cases& cases) {
  using C = CodedCase;
  cases.add("plain", [](C&) {});
  cases.add("window and sinks",
            [](C& c) { c.feature.options.window_left = 100, c.feature.sinks = true; });
  cases.add("softcap", [](C& c) { c.feature.options.softcap = 3, c.feature.how.lse = false; });
  cases.add("packed", [](C& c) {
    c.feature.how.packed_q = c.feature.how.packed_k = true;
    c.feature.sq = {1, 4}, c.feature.sk = {70, 450};
  });
  cases.add("heads first",
            [](C& c) { c.feature.how.layout = Layout::bhsd, c.feature.sk = {129, 129}; });
  cases.add("many queries", [](C& c) { c.feature.sq = {16, 16}, c.feature.sk = {150, 150}; });
  cases.add("no causal mask", [](C& c) { c.feature.options.causal = false; });
  if (!cases.s8()) return;
  cases.add("lengths", [](C& c) {  // scales per channel would be of tokens that are NaN
    c.feature.how.seqused_k = c.feature.how.seqused_q = true;
    c.feature.used_q = {2, 3}, c.feature.used_k = {0, 131};
  });
}

void add_shapes(Cases& cases) {
  using C = CodedCase;
  for (const std::int64_t heads : {1, 7, 16, 32}) {
    cases.add(std::to_string(heads) + " heads", [heads](C& c) {
      c.feature.sq = {1, 1}, c.feature.heads_q = heads, c.feature.heads_k = 1;
      c.feature.how.output = Format::bf16;
    });
  }
  for (const auto& [d, dv] : {std::pair{128, 128},
                              {256, 256},
                              {72, 24},
                              {32, 200},
                              {40, 64},
                              {20, 36},
                              {65, 250},
                              {100, 3}}) {
    cases.add("D " + std::to_string(d), [d, dv](C& c) {
      c.feature.dim = d, c.feature.dim_v = dv, c.feature.heads_q = 4, c.feature.sk = {200, 200};
      c.feature.how.input = Format::f16;
    });
  }
  for (const Granularity k : {per_head, per_tensor}) {
    cases.add(std::string(name(k)),
              [k](C& c) { c.recipe.k_scale.granularity = c.recipe.v_scale.granularity = k; });
  }
  cases.add("channels", [](C& c) { c.recipe.v_scale.granularity = per_channel; });
  cases.add("pages and queries", [](C& c) {
    c.page_size = 48;
    if (c.recipe.v == Format::e4m3) c.recipe.v_scale.granularity = per_tensor;
  });
  cases.add("negative scale", [](C& c) { c.feature.options.softmax_scale = -0.1f; });
  for (const std::int64_t page : {16, 24, 64, 128}) {
    for (const std::int64_t d : {64, 128}) {
      cases.add("pages of " + std::to_string(page) + " D " + std::to_string(d), [=](C& c) {
        c.page_size = page;
        c.feature.sq = {1, 1}, c.feature.dim = c.feature.dim_v = d;
        if (c.recipe.v == Format::e4m3) c.recipe.v_scale.granularity = per_tensor;
      });
    }
  }
  cases.add("pages of 32 D 36", [](C& c) {
    c.page_size = 32, c.feature.dim = 36, c.feature.dim_v = 65;
    if (c.recipe.v == Format::e4m3) c.recipe.v_scale.granularity = per_tensor;
  });
}

}  // namespace

std::vector<CodedCase> coded_decode_cases() {
  std::vector<CodedCase> all;
  for (const char* recipe : {"int8_full", "fp8"}) {
    Cases cases(all, recipe);
    add_features(cases);
    add_shapes(cases);
  }
  return all;
}

}  // namespace qattn::test
