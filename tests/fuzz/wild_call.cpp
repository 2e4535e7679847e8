#include "fuzz/wild_call.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>

namespace qattn::fuzz {
namespace {

constexpr Format floats[] = {Format::f32, Format::f16, Format::bf16};

/// Dense with `gap` elements after every row; packed formats need gaps of whole bytes.
TensorView laid_out(Format format, std::initializer_list<std::int64_t> shape, std::int64_t gap) {
  TensorView view = TensorView::dense(static_cast<void*>(nullptr), format, shape);
  if (gap == 0 || view.rank < 2) return view;
  std::int64_t step = view.shape[view.rank - 1] + gap;
  for (int i = view.rank - 2; i >= 0; --i) {
    view.stride[i] = step;
    step *= std::max<std::int64_t>(view.shape[i], 1);
  }
  return view;
}

Scaling choose_scaling(Choices& c, Role role) {
  Scaling s;
  if (!c.chance(4)) return s;
  using enum Granularity;
  constexpr Granularity free[] = {per_tensor, per_head,  per_block,   per_warp,
                                  per_thread, per_token, per_channel, per_block_channel};
  s.granularity = free[c.below(8)];
  if (role == Role::v && c.chance(2)) s.granularity = per_block_channel;
  if (c.chance(4)) s.block = 8 << c.below(6);
  if (c.chance(8)) s.warp = 8 << c.below(3);
  return s;
}

/// Last of a call's choices, so that bytes that were kept still make what they made.
void choose_scales_for(Choices& c, std::optional<Recipe>& scales_for) {
  if (!c.chance(8)) return;
  const auto names = recipes();
  scales_for = names[static_cast<std::size_t>(c.below(static_cast<int>(names.size())))];
  for (Toggle* toggle : {&scales_for->smooth_k, &scales_for->smooth_q, &scales_for->smooth_v,
                         &scales_for->rotate, &scales_for->balance_k}) {
    if (c.chance(6)) *toggle = static_cast<Toggle>(c.below(4));
  }
}

}  // namespace

WildCall::WildCall(Choices c, bool real) {
  const auto names = recipes();
  if (const int which = c.below(static_cast<int>(names.size()) + 1); which > 0) {
    options.recipe = names[static_cast<std::size_t>(which - 1)];
  }
  if (c.chance(16)) {  // a recipe that no name has
    for (Format* f : {&options.recipe.qk, &options.recipe.p, &options.recipe.v}) {
      if (c.chance(2)) *f = static_cast<Format>(c.below(20));
    }
  }
  operands(c);
  extras(c);
  choose_options(c);
  while (defects < 3 && c.chance(3)) {
    ++defects;
    if (c.chance(3)) {
      break_option(c);
    } else {
      break_view(c);
    }
  }
  back(c, real);
  write_indices(c);
  choose_scales_for(c, options.scales_for);
  memory.freeze();
}

void WildCall::operands(Choices& c) {
  batch_ = 1 + c.below(3) - (c.chance(32) ? 1 : 0);
  queries_ = c.chance(32) ? 0 : 1 + c.below(9);
  keys_ = c.chance(32) ? 0 : 1 + c.below(40) + (c.chance(16) ? c.below(160) : 0);
  heads_kv_ = 1 + c.below(2);
  heads_q_ = heads_kv_ * (1 + c.below(3));
  const std::int64_t d = 8 * (1 + c.below(3)), dv = c.chance(4) ? 8 * (1 + c.below(4)) : d;
  const Format input = floats[c.below(3)], output = c.chance(4) ? floats[c.below(3)] : input;
  options.layout = c.chance(2) ? Layout::bhsd : Layout::bshd;
  const bool packed_q = c.chance(4), packed_k = packed_q ? c.chance(2) : c.chance(8);
  const bool paged = !packed_k && c.chance(4);
  const std::int64_t gap = c.chance(3) ? 8 * c.below(3) : 0;
  const bool tokens_first = options.layout == Layout::bshd;
  const auto shaped = [&](Format f, bool packed, std::int64_t outer, std::int64_t tokens,
                          std::int64_t heads, std::int64_t channels) {
    const std::int64_t first = tokens_first ? tokens : heads,
                       second = tokens_first ? heads : tokens;
    return packed ? laid_out(f, {first, second, channels}, gap)
                  : laid_out(f, {outer, first, second, channels}, gap);
  };
  AttentionTensors& t = tensors;
  t.q = shaped(input, packed_q, batch_, queries_, heads_q_, d);
  t.out = shaped(output, packed_q, batch_, queries_, heads_q_, dv);
  std::int64_t outer = batch_, tokens = keys_;
  const auto vector = [](std::int64_t n) {
    return TensorView::dense(static_cast<void*>(nullptr), Format::s32, {n});
  };
  if (packed_q) t.cu_seqlens_q = vector(batch_ + 1);
  if (packed_k) t.cu_seqlens_k = vector(batch_ + 1);
  if (c.chance(6)) t.seqused_q = vector(batch_);
  if (paged || c.chance(6)) t.seqused_k = vector(batch_);
  if (paged) {
    page_size_ = tokens = 1 + c.below(16);
    const std::int64_t each = (keys_ + page_size_ - 1) / page_size_;
    outer = std::max<std::int64_t>(each * batch_, 1);
    t.page_table = TensorView::dense(static_cast<void*>(nullptr), Format::s32, {batch_, each});
  }
  t.k = shaped(input, packed_k, outer, tokens, heads_kv_, d);
  t.v = shaped(input, packed_k, outer, tokens, heads_kv_, dv);
  if (c.chance(8) && t.k.rank == 4) t.k.stride[0] = t.v.stride[0] = 0;  // every batch the same
  Recipe& r = options.recipe;
  r.q_scale = choose_scaling(c, Role::q);
  r.k_scale = choose_scaling(c, Role::k);
  r.v_scale = choose_scaling(c, Role::v);
  codes(c, Role::q, t.q, t.q_scale, t.q_global, t.cu_seqlens_q);
  codes(c, Role::k, t.k, t.k_scale, t.k_global, t.cu_seqlens_k);
  codes(c, Role::v, t.v, t.v_scale, t.v_global, t.cu_seqlens_k);
  const auto mean = [&](std::int64_t channels) {
    return TensorView::dense(static_cast<void*>(nullptr), Format::f32,
                             {batch_, heads_kv_, channels});
  };
  if (info(t.k.format).scale != Format::none && c.chance(3)) t.k_mean = mean(d);
  if (info(t.v.format).scale != Format::none && c.chance(3)) t.v_mean = mean(dv);
}

/// Turns an operand into codes with their scales, or gives it static scales, in shapes that
/// quantize_shapes() asks for.
void WildCall::codes(Choices& c, Role role, TensorView& x, TensorView& scale, TensorView& global,
                     const TensorView& cu_seqlens) {
  const Recipe& r = options.recipe;
  const Format format = role == Role::v ? r.v : r.qk;
  if (!c.chance(4) || info(format).scale == Format::none) return;
  QuantizeOptions o;
  o.format = format;
  o.role = role;
  o.layout = options.layout;
  o.scaling = role == Role::q ? r.q_scale : role == Role::k ? r.k_scale : r.v_scale;
  std::vector<std::int32_t> cu;
  TensorView packed = cu_seqlens;
  if (packed.present()) {
    const std::int64_t token = options.layout == Layout::bshd ? 0 : 1;
    for (std::int64_t b = 0; b <= batch_; ++b) {
      cu.push_back(static_cast<std::int32_t>(batch_ ? x.shape[token] * b / batch_ : 0));
    }
    packed.data = cu.data();
  }
  const Result<QuantizeShapes> shapes = quantize_shapes(x, o, packed);
  if (!shapes.ok()) return;
  if (info(format).group == 0 && c.chance(3)) {
    scale = shapes->scale;  // static scales of float inputs
  } else {
    x = shapes->codes;
    scale = shapes->scale;
    global = shapes->global;
  }
}

void WildCall::extras(Choices& c) {
  AttentionTensors& t = tensors;
  void* const none = nullptr;
  if (c.chance(2)) {
    t.lse = TensorView::dense(none, Format::f32, {batch_, heads_q_, queries_});
    if (t.q.rank == 3) t.lse = TensorView::dense(none, Format::f32, {heads_q_, queries_});
  }
  if (c.chance(8)) t.saturated = TensorView::dense(none, Format::s64, {3});
  if (c.chance(8)) t.sinks = TensorView::dense(none, floats[c.below(3)], {heads_q_});
  if (c.chance(8)) {
    t.alibi_slopes = c.chance(2) ? TensorView::dense(none, Format::f32, {batch_, heads_q_})
                                 : TensorView::dense(none, Format::f32, {heads_q_});
  }
  const std::int64_t keys = t.page_table.present() ? t.page_table.shape[1] * page_size_ : keys_;
  const auto one = [&](std::int64_t extent) { return c.chance(4) ? 1 : extent; };
  if (c.chance(8)) {
    const std::int64_t rows = options.block_mask_q = 64 * (1 + c.below(2));
    const std::int64_t columns = options.block_mask_k = 64 * (1 + c.below(3));
    t.block_mask = TensorView::dense(none, Format::b8,
                                     {one(batch_), one(heads_q_), one((queries_ + rows - 1) / rows),
                                      one((keys + columns - 1) / columns)});
  }
  if (c.chance(4)) {
    constexpr Format formats[] = {floats[0], floats[1], floats[2], Format::b8, Format::b1};
    const Format format = formats[c.below(5)];
    const std::int64_t extent = format == Format::b1 ? (keys + 7) / 8 * 8 : one(keys);
    t.mask = TensorView::dense(none, format, {one(batch_), one(heads_q_), one(queries_), extent});
  }
  if (c.chance(8)) {
    const Format format = t.out.format;
    const std::int64_t features = 1 + c.below(40), width = heads_q_ * t.v.shape[t.v.rank - 1];
    t.projection = TensorView::dense(none, format, {features, width});
    if (c.chance(2)) t.projection_bias = TensorView::dense(none, format, {features});
    t.out = t.q.rank == 3 ? TensorView::dense(none, format, {queries_, features})
                          : TensorView::dense(none, format, {batch_, queries_, features});
  }
}

void WildCall::choose_options(Choices& c) {
  AttentionOptions& o = options;
  o.threads = 1 + (c.chance(4) ? c.below(3) : 0);
  o.causal = c.chance(4);
  if (c.chance(6)) o.window_left = c.below(60);
  if (c.chance(6) && !o.causal) o.window_right = c.below(60);
  if (c.chance(6)) o.softcap = static_cast<float>(c.below(50)) / 8;
  if (c.chance(6)) o.softmax_scale = static_cast<float>(c.below(250) - 125) / 64;
  for (Toggle* toggle : {&o.recipe.smooth_k, &o.recipe.smooth_q, &o.recipe.smooth_v,
                         &o.recipe.rotate, &o.recipe.balance_k}) {
    if (c.chance(6)) *toggle = static_cast<Toggle>(c.below(3));
  }
}

void break_field(Choices& c, TensorView& view) {
  const int dim = c.below(max_rank);
  switch (c.below(8)) {
    case 0:
    case 1:
      view.shape[dim] = c.wild();
      break;
    case 2:
    case 3:
      view.stride[dim] = c.wild();
      break;
    case 4:
      view.format = static_cast<Format>(c.chance(4) ? c.wild() : c.below(20));
      break;
    case 5:
      view.rank = static_cast<std::int32_t>(c.chance(4) ? c.wild() : c.below(7));
      break;
    case 6:
      view.device.type = static_cast<DeviceType>(c.below(12));
      break;
    default:
      view.device.index = static_cast<std::int32_t>(c.wild());
  }
}

void WildCall::break_view(Choices& c) {
  constexpr int count = std::size(all_attention_tensors);
  TensorView& view = tensors.*all_attention_tensors[c.below(count)].view;
  const int how = c.below(8);
  if (how == 0) {
    view = {};
  } else if (how == 1) {
    view = tensors.*all_attention_tensors[c.below(count)].view;
  } else if (how == 2) {
    const auto type = static_cast<DeviceType>(c.below(12));
    for (const AttentionTensor& m : all_attention_tensors) (tensors.*m.view).device.type = type;
    if (type != DeviceType::cpu) options.threads = 0;  // or that alone would be refused
  } else {
    if (!view.present()) {  // one that does not belong here
      view = TensorView::dense(static_cast<void*>(nullptr), static_cast<Format>(c.below(20)),
                               {c.below(5), c.below(5)});
    }
    break_field(c, view);
    // The same defect on several tensors passes checks that only compare them.
    if (how == 3) {
      const int dim = c.below(max_rank);
      const std::int64_t extent = c.wild(), stride = c.chance(2) ? 0 : 1;
      for (TensorView* x : {&tensors.q, &tensors.k, &tensors.v, &tensors.out, &tensors.lse}) {
        x->shape[dim] = extent;
        x->stride[dim] = stride;
      }
    }
  }
}

void WildCall::break_option(Choices& c) {
  constexpr float numbers[] = {-1.0f, 0.0f, 1e-45f, 3e38f, INFINITY, -INFINITY, NAN};
  AttentionOptions& o = options;
  Recipe& r = o.recipe;
  Scaling* const scalings[] = {&r.q_scale, &r.k_scale, &r.v_scale};
  Toggle* const toggles[] = {&r.smooth_k, &r.smooth_q, &r.smooth_v, &r.rotate, &r.balance_k};
  switch (c.below(10)) {
    case 0:
      o.layout = static_cast<Layout>(c.wild());
      break;
    case 1:
      o.softmax_scale = numbers[c.below(7)];
      break;
    case 2:
      o.window_left = c.wild();
      break;
    case 3:
      o.window_right = c.wild();
      break;
    case 4:
      o.softcap = numbers[c.below(7)];
      break;
    case 5:
      // Thousands of threads are allowed, and slow: only what must be refused.
      o.threads = c.chance(2) ? 4097 : -1 - c.below(200);
      break;
    case 6:
      scalings[c.below(3)]->granularity = static_cast<Granularity>(c.wild());
      break;
    case 7: {
      Scaling& s = *scalings[c.below(3)];
      (c.chance(2) ? s.block : s.warp) = static_cast<std::int32_t>(c.wild());
      break;
    }
    case 8:
      (c.chance(2) ? o.block_mask_q : o.block_mask_k) = c.wild();
      break;
    default:
      *toggles[c.below(5)] = static_cast<Toggle>(c.wild());
  }
}

void WildCall::back(Choices& c, bool real) {
  if (!real) return;
  const std::uint64_t seed = c.byte();
  for (const AttentionTensor& m : all_attention_tensors) {
    TensorView& view = tensors.*m.view;
    if (!view.present()) continue;
    const std::string name = m.name;
    Fill fill = c.chance(16) ? Fill::wild : Fill::tame;
    if (name.ends_with("_scale") || name.ends_with("_global")) {
      fill = c.chance(16) ? Fill::wild : Fill::scale;
    } else if (view.format == Format::s32 || view.format == Format::s64) {
      fill = Fill::zero;
    } else if (view.format == Format::b8 && fill == Fill::tame) {
      fill = Fill::boolean;
    }
    memory.back(m.name, view, m.output, fill,
                seed + static_cast<std::uint64_t>(&m - all_attention_tensors),
                c.chance(64) ? 1 : 0);
  }
  // Shared memory: an output may have none with anybody, and is only ever refused for it.
  if (c.chance(24) && tensors.out.data && tensors.q.data) {
    tensors.out.data = tensors.q.data;
    ++defects;
  }
  if (c.chance(64)) {
    (tensors.*all_attention_tensors[c.below(4)].view).data = nullptr;
    ++defects;
  }
}

/// Lengths and pages that fit, and now and then one that does not.
void WildCall::write_indices(Choices& c) {
  AttentionTensors& t = tensors;
  for (std::int64_t b = 0; b <= batch_; ++b) {
    const std::int64_t parts = std::max<std::int64_t>(batch_, 1);
    const auto q = static_cast<std::int32_t>(queries_ * b / parts);
    const auto k = static_cast<std::int32_t>(keys_ * b / parts);
    Memory::store(t.cu_seqlens_q, b, 0, q);
    Memory::store(t.cu_seqlens_k, b, 0, k);
    const auto used = [&](bool packed, std::int64_t room) {
      if (packed) room /= parts;
      return static_cast<std::int32_t>(c.chance(4) ? c.below(static_cast<int>(room) + 1) : room);
    };
    Memory::store(t.seqused_q, b, 0, used(t.cu_seqlens_q.present(), queries_));
    Memory::store(t.seqused_k, b, 0, used(t.cu_seqlens_k.present(), keys_));
    if (!t.page_table.present() || t.page_table.rank != 2) continue;
    for (std::int64_t i = 0; i < std::min<std::int64_t>(t.page_table.shape[1], 64); ++i) {
      const auto pages = static_cast<int>(std::clamp<std::int64_t>(t.k.shape[0], 1, 256));
      Memory::store(t.page_table, b, i, c.below(pages));
    }
  }
  TensorView* const indices[] = {&t.cu_seqlens_q, &t.cu_seqlens_k, &t.seqused_q, &t.seqused_k,
                                 &t.page_table};
  if (!c.chance(12)) return;
  ++defects;
  TensorView& view = *indices[c.below(5)];
  Memory::store(view, c.below(4), c.below(4), static_cast<std::int32_t>(c.wild()));
}

WildQuantize::WildQuantize(Choices c, bool real) {
  using enum Format;
  constexpr Format coded[] = {s8, e4m3, e4m3fnuz, e5m2, mxfp8, mxfp4, nvfp4};
  options.format = coded[c.below(7)];
  options.role = static_cast<Role>(c.below(3));
  options.layout = c.chance(2) ? Layout::bhsd : Layout::bshd;
  options.scaling = choose_scaling(c, options.role);
  options.smooth = c.chance(4);
  options.rotate = c.chance(4);
  options.threads = 1 + (c.chance(4) ? c.below(3) : 0);
  backwards = c.chance(3);
  const std::int64_t batch = c.below(4), tokens = c.below(20), heads = 1 + c.below(3);
  const std::int64_t d = 8 * (1 + c.below(5)), gap = c.chance(3) ? 8 * c.below(3) : 0;
  const bool packed = c.chance(4), tokens_first = options.layout == Layout::bshd;
  const std::int64_t first = tokens_first ? tokens : heads, second = tokens_first ? heads : tokens;
  const Format input = floats[c.below(3)];
  QuantizeTensors& t = tensors;
  t.x = packed ? laid_out(input, {first, second, d}, gap)
               : laid_out(input, {batch, first, second, d}, gap);
  std::int32_t cu[2] = {0, static_cast<std::int32_t>(tokens)};
  if (packed) t.cu_seqlens = TensorView::dense(static_cast<void*>(cu), s32, {2});
  const auto shapes = quantize_shapes(t.x, options, t.cu_seqlens);
  if (shapes.ok()) {
    t.codes = shapes->codes;
    t.scale = shapes->scale;
    t.global = shapes->global;
    t.mean = shapes->mean;
    if (c.chance(4)) t.static_scale = shapes->scale;
  }
  const struct {
    const char* name;
    TensorView* view;
    bool output;
    Fill fill;
  } list[] = {{"x", &t.x, backwards, c.chance(8) ? Fill::wild : Fill::tame},
              {"codes", &t.codes, !backwards, Fill::tame},
              {"scale", &t.scale, !backwards, Fill::scale},
              {"global", &t.global, !backwards, Fill::scale},
              {"mean", &t.mean, !backwards, Fill::tame},
              {"static_scale", &t.static_scale, false, c.chance(16) ? Fill::wild : Fill::scale},
              {"cu_seqlens", &t.cu_seqlens, false, Fill::zero}};
  for (int n = 0; n < 3 && c.chance(3); ++n) {
    if (c.chance(4)) {
      options.scaling.block = static_cast<std::int32_t>(c.wild());
    } else if (c.chance(4)) {
      options.format = static_cast<Format>(c.wild());
    } else if (c.chance(4)) {
      options.role = static_cast<Role>(c.wild());
    } else if (c.chance(8)) {
      const auto type = static_cast<DeviceType>(c.below(12));
      for (const auto& item : list) item.view->device.type = type;
    } else {
      break_field(c, *list[c.below(7)].view);
    }
  }
  for (const auto& item : list) {
    item.view->data = nullptr;
    if (!real || !item.view->present()) continue;
    memory.back(item.name, *item.view, item.output, item.fill, 1, c.chance(64) ? 1 : 0);
  }
  Memory::store(t.cu_seqlens, 1, 0, c.chance(8) ? static_cast<std::int32_t>(c.wild()) : cu[1]);
  choose_scales_for(c, options.scales_for);
  memory.freeze();
}

bool names_something(const std::string& message) {
  const std::size_t colon = message.find(": ");
  if (colon == std::string::npos || colon == 0 || colon + 2 >= message.size()) return false;
  return std::all_of(message.begin(), message.end(),
                     [](unsigned char x) { return x == '\n' || std::isprint(x); });
}

}  // namespace qattn::fuzz
