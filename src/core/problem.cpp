#include "core/problem.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "core/index_tensor.hpp"
#include "core/layout_hint.hpp"
#include "core/operand.hpp"

namespace qattn {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

Status invalid(std::string message) { return Status(Code::invalid_argument, std::move(message)); }

bool is_codes(Format format) { return info(format).scale != Format::none; }

/// Name, view, and whether run() writes it.
struct Named {
  const char* name;
  const TensorView* view;
  bool output;
};

std::vector<Named> all_views(const AttentionTensors& t) {
  return {{"q", &t.q, false},
          {"k", &t.k, false},
          {"v", &t.v, false},
          {"out", &t.out, true},
          {"lse", &t.lse, true},
          {"saturated", &t.saturated, true},
          {"q_scale", &t.q_scale, false},
          {"k_scale", &t.k_scale, false},
          {"v_scale", &t.v_scale, false},
          {"q_global", &t.q_global, false},
          {"k_global", &t.k_global, false},
          {"v_global", &t.v_global, false},
          {"k_mean", &t.k_mean, false},
          {"v_mean", &t.v_mean, false},
          {"sinks", &t.sinks, false},
          {"mask", &t.mask, false},
          {"alibi_slopes", &t.alibi_slopes, false},
          {"cu_seqlens_q", &t.cu_seqlens_q, false},
          {"cu_seqlens_k", &t.cu_seqlens_k, false},
          {"seqused_q", &t.seqused_q, false},
          {"seqused_k", &t.seqused_k, false},
          {"page_table", &t.page_table, false},
          {"block_mask", &t.block_mask, false},
          {"projection", &t.projection, false},
          {"projection_bias", &t.projection_bias, false}};
}

Status check_format(const char* name, const TensorView& view,
                    std::initializer_list<Format> allowed) {
  std::string list;
  for (Format format : allowed) {
    if (view.format == format) return {};
    list += (list.empty() ? "" : ", ") + std::string(info(format).name);
  }
  return invalid(std::string(name) + ": format " + std::string(info(view.format).name) +
                 " is not one of " + list);
}

Status check_shape(const char* name, const TensorView& view, const std::int64_t* extent, int rank) {
  if (view.rank == rank && std::equal(extent, extent + rank, view.shape.begin())) return {};
  return invalid(std::string(name) + ": shape " + shape_text(view.shape.data(), view.rank) +
                 " should be " + shape_text(extent, rank));
}

Status check_shape(const char* name, const TensorView& view,
                   std::initializer_list<std::int64_t> extent) {
  return check_shape(name, view, extent.begin(), static_cast<int>(extent.size()));
}

/// A small dense operand: checked format, shape and stride 1 (rank 1) so that kernels index it
/// flat.
Status check_small(const char* name, const TensorView& view,
                   std::initializer_list<std::int64_t> extent,
                   std::initializer_list<Format> allowed) {
  if (!view.present()) return {};
  if (Status s = check_format(name, view, allowed); !s.ok()) return s;
  return check_shape(name, view, extent);
}

Status check_aliasing(const std::vector<Named>& views) {
  for (const Named& a : views) {
    if (!a.output || !a.view->present() || a.view->data == nullptr) continue;
    const ByteRange ra = byte_range(*a.view);
    for (const Named& b : views) {
      if (&a == &b || !b.view->present() || b.view->data == nullptr) continue;
      const ByteRange rb = byte_range(*b.view);
      if (ra.begin < rb.end && rb.begin < ra.end) {
        return invalid(std::string(a.name) + ": overlaps the memory of " + b.name +
                       "; an output must not share memory with any other tensor");
      }
    }
  }
  return {};
}

/// Positions of the dimensions inside a view.
struct Axes {
  int batch, token, head, channel;  // batch -1: packed
};

Axes axes(Layout layout, bool packed) {
  if (packed) return layout == Layout::bshd ? Axes{-1, 0, 1, 2} : Axes{-1, 1, 0, 2};
  return layout == Layout::bshd ? Axes{0, 1, 2, 3} : Axes{0, 2, 1, 3};
}

/// Integers in a mask might say who may look or what is added.
constexpr const char* bool_hint = "; where its numbers say who may look, pass mask != 0";

TokenTensor token_tensor(const TensorView& view, const Axes& a) {
  TokenTensor t;
  t.data = view.data;
  t.format = view.format;
  t.batch = a.batch < 0 ? 0 : view.stride[a.batch];
  t.token = view.stride[a.token];
  t.head = view.stride[a.head];
  return t;
}

class Maker {
 public:
  Maker(const AttentionTensors& tensors, const AttentionOptions& options)
      : t_(tensors), o_(options) {}

  Result<Problem> make() {
    p_.recipe = o_.recipe;
    p_.tensors = t_;
    p_.threads = o_.threads;
    p_.validate = o_.validate;
    p_.score_function = o_.score_function;
    p_.mask_function = o_.mask_function;
    for (auto step : {&Maker::views, &Maker::operands, &Maker::dimensions, &Maker::sequences,
                      &Maker::scales, &Maker::extras, &Maker::options, &Maker::recipe}) {
      if (Status s = (this->*step)(); !s.ok()) return s;
    }
    if (Status s = check_aliasing(all_views(t_)); !s.ok()) return s;
    return std::move(p_);
  }

 private:
  Status views() {
    for (const Named& n : all_views(t_)) {
      if (!n.view->present()) continue;
      if (Status s = check_view(n.name, *n.view, -1); !s.ok()) return s;
      if (n.view->device != t_.q.device) {
        return invalid(std::string(n.name) + ": lies on another device than q (" +
                       device_text(n.view->device) + ", q on " + device_text(t_.q.device) + ")");
      }
      if (n.output) {
        if (Status s = check_no_overlap(n.name, *n.view); !s.ok()) return s;
      }
    }
    if (o_.layout != Layout::bshd && o_.layout != Layout::bhsd) {
      return invalid("layout: " + text(static_cast<int>(o_.layout)) + " is neither bshd nor bhsd");
    }
    return {};
  }

  /// q, k, v and out: present, float or codes, ranks, unit stride.
  Status operands() {
    p_.varlen_q = t_.cu_seqlens_q.present();
    p_.varlen_k = t_.cu_seqlens_k.present();
    p_.paged = t_.page_table.present();
    if (p_.paged && p_.varlen_k) {
      return invalid(
          "page_table: excludes cu_seqlens_k (paged keys take their lengths from "
          "seqused_k)");
    }
    if (p_.paged && !t_.seqused_k.present()) return invalid("page_table: needs seqused_k");
    const int projected = t_.projection.present() ? 1 : 0;  // out has no heads
    const struct {
      const char* name;
      const TensorView* view;
      bool packed;
      bool* codes;
    } list[] = {{"q", &t_.q, p_.varlen_q, &p_.q_codes},
                {"k", &t_.k, p_.varlen_k, &p_.k_codes},
                {"v", &t_.v, p_.varlen_k, &p_.v_codes},
                {"out", &t_.out, p_.varlen_q, nullptr}};
    for (const auto& item : list) {
      const TensorView& view = *item.view;
      if (!view.present()) return invalid(std::string(item.name) + ": is missing");
      const int rank = (item.packed ? 3 : 4) - (item.codes ? 0 : projected);
      if (view.rank != rank) {
        return invalid(std::string(item.name) + ": rank " + text(view.rank) + " should be " +
                       text(rank) + (item.packed ? " (packed by cu_seqlens)" : "") +
                       (rank < 3 + !item.packed ? " (projected)" : ""));
      }
      const bool codes = item.codes && is_codes(view.format);
      if (item.codes) *item.codes = codes;
      if (!codes && !is_float(view.format)) {
        return invalid(std::string(item.name) + ": format " + std::string(info(view.format).name) +
                       " is not f32, f16, bf16" + (item.codes ? " or a quantised format" : ""));
      }
      if (view.stride[rank - 1] != 1) {
        return invalid(std::string(item.name) + ": stride " + text(view.stride[rank - 1]) +
                       " of the last dimension should be 1");
      }
    }
    if (t_.k.format != t_.v.format && is_float(t_.k.format) && is_float(t_.v.format)) {
      return invalid("v: format " + std::string(info(t_.v.format).name) + " differs from k's " +
                     std::string(info(t_.k.format).name));
    }
    return {};
  }

  /// Where lengths and heads do not fit, and would in the other layout: that.
  std::string layout_hint() const {
    const Layout other = o_.layout == Layout::bshd ? Layout::bhsd : Layout::bshd;
    const Axes aq = axes(other, p_.varlen_q), ak = axes(other, p_.varlen_k);
    const std::int64_t heads_q = t_.q.shape[aq.head], heads_kv = t_.k.shape[ak.head];
    const bool fits = heads_q > 0 && heads_kv > 0 && heads_q % heads_kv == 0 &&
                      t_.v.shape[ak.head] == heads_kv &&
                      t_.v.shape[ak.token] == t_.k.shape[ak.token];
    return fits ? other_layout(o_.layout) : "";
  }

  Status dimensions() {
    const Axes aq = axes(o_.layout, p_.varlen_q), ak = axes(o_.layout, p_.varlen_k);
    p_.q = token_tensor(t_.q, aq);
    p_.k = token_tensor(t_.k, ak);
    p_.v = token_tensor(t_.v, ak);
    p_.heads_q = t_.q.shape[aq.head];
    p_.heads_kv = t_.k.shape[ak.head];
    const std::int64_t d = t_.q.shape[aq.channel], dv = t_.v.shape[ak.channel];
    if (t_.k.shape[ak.channel] != d) {
      return invalid("k: head_dim " + text(t_.k.shape[ak.channel]) + " differs from q's " +
                     text(d));
    }
    const bool cpu = t_.q.device.type == DeviceType::cpu;
    for (const auto& [name, role, extent] :
         {std::tuple{"q", Role::q, d}, std::tuple{"v", Role::v, dv}}) {
      const std::string why = cpu ? head_size_refusal(name, role, extent)
                                  : device_head_size_refusal(name, role, extent);
      if (!why.empty()) return invalid(why);
    }
    p_.d = static_cast<int>(d);
    p_.dv = static_cast<int>(dv);
    if (p_.heads_q < 1 || p_.heads_kv < 1 || p_.heads_q % p_.heads_kv != 0) {
      return invalid("q: " + text(p_.heads_q) + " heads are not a positive multiple of k's " +
                     text(p_.heads_kv) + layout_hint());
    }
    if (t_.v.shape[ak.head] != p_.heads_kv) {
      return invalid("v: " + text(t_.v.shape[ak.head]) + " heads differ from k's " +
                     text(p_.heads_kv) + layout_hint());
    }
    if (t_.v.shape[ak.token] != t_.k.shape[ak.token]) {
      return invalid("v: length " + text(t_.v.shape[ak.token]) + " differs from k's " +
                     text(t_.k.shape[ak.token]) + layout_hint());
    }
    p_.tokens_q = t_.q.shape[aq.token];
    p_.tokens_k = t_.k.shape[ak.token];
    if (ak.batch >= 0 && t_.v.shape[ak.batch] != t_.k.shape[ak.batch]) {
      return invalid("v: batch " + text(t_.v.shape[ak.batch]) + " differs from k's " +
                     text(t_.k.shape[ak.batch]));
    }
    return t_.projection.present() ? projected_out(aq) : plain_out(aq);
  }

  Status plain_out(const Axes& aq) {
    if (t_.projection_bias.present())
      return invalid("projection_bias: is given without projection");
    p_.out = token_tensor(t_.out, aq);
    std::array<std::int64_t, max_rank> out = t_.q.shape;
    out[aq.channel] = p_.dv;
    return check_shape("out", t_.out, out.data(), t_.q.rank);
  }

  /// The weight, its bias, and what they leave of out's dimensions.
  Status projected_out(const Axes& aq) {
    const TensorView &w = t_.projection, &bias = t_.projection_bias;
    for (const auto& [name, view] :
         {std::pair{"projection", &w}, std::pair{"projection_bias", &bias}}) {
      if (view->present() && view->format != t_.out.format) {
        return invalid(std::string(name) + ": format " + std::string(info(view->format).name) +
                       " differs from out's " + std::string(info(t_.out.format).name));
      }
    }
    const std::int64_t width = p_.heads_q * p_.dv;
    if (w.rank != 2 || w.shape[0] < 1 || w.shape[1] != width) {
      return invalid("projection: shape " + shape_text(w.shape.data(), w.rank) +
                     " should be (E, Hq * Dv) with Hq * Dv = " + text(width) + " and E at least 1");
    }
    if (width > 1 << 24) return invalid("projection: Hq * Dv = " + text(width) + " is over 2^24");
    if (w.stride[1] != 1) {
      return invalid("projection: stride " + text(w.stride[1]) +
                     " of the last dimension should be 1 (torch.nn.Linear has its weight so)");
    }
    if (bias.present()) {
      if (Status s = check_shape("projection_bias", bias, {w.shape[0]}); !s.ok()) return s;
    }
    p_.out = {t_.out.data, t_.out.format, aq.batch < 0 ? 0 : t_.out.stride[0],
              t_.out.stride[t_.out.rank - 2], 0};
    const std::int64_t tokens = t_.q.shape[aq.token];
    return aq.batch < 0 ? check_shape("out", t_.out, {tokens, w.shape[0]})
                        : check_shape("out", t_.out, {t_.q.shape[aq.batch], tokens, w.shape[0]});
  }

  Status sequences() {
    const Axes aq = axes(o_.layout, p_.varlen_q), ak = axes(o_.layout, p_.varlen_k);
    p_.max_q = p_.tokens_q;
    p_.max_k = p_.tokens_k;
    if (p_.varlen_q) {
      if (t_.cu_seqlens_q.rank != 1 || t_.cu_seqlens_q.shape[0] < 1) {
        return invalid("cu_seqlens_q: shape " +
                       shape_text(t_.cu_seqlens_q.shape.data(), t_.cu_seqlens_q.rank) +
                       " should be (B + 1)");
      }
      p_.batch = t_.cu_seqlens_q.shape[0] - 1;
      if (p_.batch == 0 && p_.tokens_q > 0) {
        return invalid("cu_seqlens_q: 1 entry has no sequence for the " + text(p_.tokens_q) +
                       " tokens of q");
      }
    } else {
      p_.batch = t_.q.shape[aq.batch];
      p_.tokens_q *= p_.batch;
    }
    if (p_.paged) {
      p_.pages = t_.k.shape[ak.batch];
      p_.page_size = t_.k.shape[ak.token];
      if (p_.page_size < 1) return invalid("k: page size 0 should be at least 1");
      if (t_.page_table.rank != 2 || t_.page_table.shape[0] != p_.batch) {
        return invalid("page_table: shape " +
                       shape_text(t_.page_table.shape.data(), t_.page_table.rank) + " should be (" +
                       text(p_.batch) + ", pages per sequence)");
      }
      if (Status s = check_index_format("page_table", t_.page_table); !s.ok()) return s;
      p_.pages_per_sequence = t_.page_table.shape[1];
      if (__builtin_mul_overflow(p_.pages_per_sequence, p_.page_size, &p_.max_k)) {
        return invalid("page_table: pages per sequence times page size overflows 64 bits");
      }
    } else if (!p_.varlen_k) {
      if (t_.k.shape[ak.batch] != p_.batch) {
        return invalid("k: batch " + text(t_.k.shape[ak.batch]) + " differs from q's " +
                       text(p_.batch));
      }
      p_.tokens_k *= p_.batch;
    }
    for (const auto& [name, view, extent] :
         {std::tuple{"cu_seqlens_q", &t_.cu_seqlens_q, p_.batch + 1},
          std::tuple{"cu_seqlens_k", &t_.cu_seqlens_k, p_.batch + 1},
          std::tuple{"seqused_q", &t_.seqused_q, p_.batch},
          std::tuple{"seqused_k", &t_.seqused_k, p_.batch}}) {
      if (!view->present()) continue;
      if (Status s = check_index_format(name, *view); !s.ok()) return s;
      if (Status s = check_shape(name, *view, {extent}); !s.ok()) return s;
    }
    return check_size("q", p_.batch, p_.heads_q, std::max(p_.max_q, p_.max_k));
  }

  /// One operand's scale tensors against its granularity.
  Status operand_scales(Role role) {
    const Operand x = operand_of(p_, role);
    const auto& [name, codes, scale, global, mean] =
        std::tie(x.name, x.codes, x.scale, x.global, x.mean);
    const auto [target, asked, smooth] = operand_recipe(o_.recipe, role);
    const std::string scale_name = std::string(name) + "_scale";
    if (codes && x.tokens.format != target) {
      return invalid(std::string(name) + ": format " + std::string(info(x.tokens.format).name) +
                     " differs from the recipe's " + std::string(info(target).name));
    }
    if (codes && !scale.present())
      return invalid(scale_name + ": is missing, and " + name + " holds codes");
    if (codes && role == Role::v && info(target).group > 0 && !global.present() &&
        target == Format::nvfp4) {
      return invalid("v_global: is missing, and v holds nvfp4 codes");
    }
    if (!codes && scale.present() && (!is_codes(target) || info(target).group > 0)) {
      return invalid(scale_name + ": is given, but " + name + " in format " +
                     std::string(info(target).name) + " takes no static scale");
    }
    const std::int64_t outer = x.paged ? p_.pages : p_.batch;
    if (global.present() != (codes && target == Format::nvfp4)) {
      return invalid(std::string(name) + "_global: " +
                     (global.present()
                          ? "belongs to nvfp4 codes only"
                          : "is missing, and " + std::string(name) + " holds nvfp4 codes"));
    }
    if (Status s = check_small((std::string(name) + "_global").c_str(), global, {outer, x.heads},
                               {Format::f32});
        !s.ok()) {
      return s;
    }
    if (mean.present() && !codes) {
      if (Status s = mean_of_numbers(x, target, smooth); !s.ok()) return s;
    }
    if (Status s = check_small((std::string(name) + "_mean").c_str(), mean,
                               {p_.batch, x.heads, x.channels}, {Format::f32});
        !s.ok()) {
      return s;
    }
    if (!scale.present()) return {};
    const Scaling scaling = resolve_scaling(asked, role, target);
    if (Status s = check_scaling(name, scaling, role, target); !s.ok()) return s;
    if (Status s = check_format(scale_name.c_str(), scale, {info(target).scale}); !s.ok()) return s;
    const std::int64_t tokens = x.paged ? p_.page_size : x.longest;
    ScaleShape want = ScaleMap{scaling, role, info(target).group, x.paged}.shape(
        outer, x.heads, tokens, x.channels);
    // Packed sequences: the longest one is known from the contents only; check_contents() looks.
    if (x.varlen && want.rank >= 3 && scale.rank == want.rank) want.extent[2] = scale.shape[2];
    if (x.varlen && scaling.granularity == Granularity::per_channel) want.extent[2] = x.channels;
    return check_shape(scale_name.c_str(), scale, want.extent.data(), want.rank);
  }

  /// A mean that comes with numbers is taken off them instead of their own.
  Status mean_of_numbers(const Operand& x, Format target, Toggle smooth) const {
    const std::string name = std::string(x.name) + "_mean: ";
    if (x.role != Role::k) {
      return invalid(name + "belongs to quantised " + x.name + " only");
    }
    if (target == Format::none) return invalid(name + "needs a named recipe, not auto");
    if (!is_codes(target)) {
      return invalid(name + "is given, but k in format " + std::string(info(target).name) +
                     " keeps its mean");
    }
    if (smooth == Toggle::off) return invalid(name + "is given, but smooth_k is off");
    return {};
  }

  Status scales() {
    const Recipe& r = o_.recipe;
    for (const Role role : all_roles) {
      const Operand x = operand_of(p_, role);
      if (r.qk == Format::none && (x.codes || x.scale.present())) {
        return invalid(std::string(x.name) + ": codes and static scales need a named recipe, not " +
                       "auto");
      }
    }
    if (o_.scales_for) {
      const bool any = t_.q_scale.present() || t_.k_scale.present() || t_.v_scale.present();
      Status s = check_made_for_something(any, "q_scale, k_scale or v_scale");
      if (!s.ok()) return s;
    }
    for (const Role role : all_roles) {
      const Operand x = operand_of(p_, role);
      if (!o_.scales_for || x.codes || !x.scale.present()) continue;
      Status s = check_made_for(std::string(x.name) + "_scale", role, *o_.scales_for, r);
      if (!s.ok()) return s;
    }
    for (const Role role : all_roles) {
      if (Status s = operand_scales(role); !s.ok()) return s;
    }
    return {};
  }

  Status extras() {
    const std::initializer_list<Format> floats = {Format::f32, Format::f16, Format::bf16};
    if (t_.lse.present()) {
      if (Status s = check_format("lse", t_.lse, {Format::f32}); !s.ok()) return s;
      Status s = p_.varlen_q ? check_shape("lse", t_.lse, {p_.heads_q, p_.tokens_q})
                             : check_shape("lse", t_.lse, {p_.batch, p_.heads_q, p_.max_q});
      if (!s.ok()) return s;
    }
    if (Status s = check_small("saturated", t_.saturated, {3}, {Format::s64}); !s.ok()) return s;
    if (Status s = check_small("sinks", t_.sinks, {p_.heads_q}, floats); !s.ok()) return s;
    if (t_.alibi_slopes.present()) {
      if (Status s = check_format("alibi_slopes", t_.alibi_slopes, {Format::f32}); !s.ok())
        return s;
      Status s = t_.alibi_slopes.rank == 1
                     ? check_shape("alibi_slopes", t_.alibi_slopes, {p_.heads_q})
                     : check_shape("alibi_slopes", t_.alibi_slopes, {p_.batch, p_.heads_q});
      if (!s.ok()) return s;
    }
    if (Status s = mask(); !s.ok()) return s;
    return block_mask();
  }

  /// Extents and strides of a mask that broadcasts to `full`, aligned right; where `open`, contents
  /// alone tell the extent.
  static Status broadcast(const char* name, const TensorView& view, const std::int64_t (&full)[4],
                          const bool (&open)[4], std::array<std::int64_t, 4>& shape,
                          std::array<std::int64_t, 4>& stride) {
    if (view.rank > 4) {
      return invalid(std::string(name) + ": rank " + text(view.rank) + " is over 4");
    }
    for (int i = 0; i < 4; ++i) {
      const int from = i - (4 - view.rank);
      const std::int64_t extent = from < 0 ? 1 : view.shape[from];
      if (extent != 1 && extent != full[i] && !open[i]) {
        return invalid(std::string(name) + ": shape " + shape_text(view.shape.data(), view.rank) +
                       " does not broadcast to " + shape_text(full, 4));
      }
      shape[i] = extent;
      stride[i] = extent == 1 ? 0 : view.stride[from];
    }
    return {};
  }

  Status block_mask() {
    const struct {
      const char* name;
      std::int64_t tokens;
    } sizes[] = {{"block_mask_q", o_.block_mask_q}, {"block_mask_k", o_.block_mask_k}};
    for (const auto& [name, tokens] : sizes) {
      if (!t_.block_mask.present() && tokens != 0) {
        return invalid(std::string(name) + ": " + text(tokens) + " is given without block_mask");
      }
      if (t_.block_mask.present() && (tokens < 64 || tokens % 64 != 0 || tokens > 1 << 20)) {
        return invalid(std::string(name) + ": " + text(tokens) +
                       " is not a multiple of 64 from 64 to 2^20");
      }
    }
    if (!t_.block_mask.present()) return {};
    if (t_.block_mask.format != Format::b8) {
      return invalid("block_mask: format " + std::string(info(t_.block_mask.format).name) +
                     " is not one of b8 (bool, true = may look)" + bool_hint);
    }
    p_.block_mask_q = o_.block_mask_q;
    p_.block_mask_k = o_.block_mask_k;
    const std::int64_t full[4] = {p_.batch, p_.heads_q,
                                  (p_.max_q + p_.block_mask_q - 1) / p_.block_mask_q,
                                  (p_.max_k + p_.block_mask_k - 1) / p_.block_mask_k};
    // Sequences that are packed may be shorter than what is in memory; check_contents() looks.
    const bool host = t_.q.device.type == DeviceType::cpu;
    const bool open[4] = {false, false, p_.varlen_q && host, p_.varlen_k && host};
    return broadcast("block_mask", t_.block_mask, full, open, p_.block_mask_shape,
                     p_.block_mask_stride);
  }

  Status mask() {
    if (!t_.mask.present()) return {};
    const bool bits = t_.mask.format == Format::b1;
    if (!bits && t_.mask.format != Format::b8 && !is_float(t_.mask.format)) {
      return invalid("mask: format " + std::string(info(t_.mask.format).name) +
                     " is not one of b8, b1 (bool and its bits, true = may look), f32, f16, bf16 "
                     "(added to the scores)" +
                     bool_hint);
    }
    p_.mask = bits || t_.mask.format == Format::b8 ? MaskKind::boolean : MaskKind::additive;
    if (const int last = t_.mask.rank - 1; bits && (last < 0 || t_.mask.stride[last] != 1)) {
      return invalid("mask: " + (last < 0 ? "rank 0" : "stride " + text(t_.mask.stride[last])) +
                     " of b1, whose last dimension should have stride 1");
    }
    // Rows of bits are whole bytes, which check_view() has looked at.
    const std::int64_t keys = bits ? (p_.max_k + 7) / 8 * 8 : p_.max_k;
    const std::int64_t full[4] = {p_.batch, p_.heads_q, p_.max_q, keys};
    const bool open[4] = {false, false, p_.varlen_q, p_.varlen_k};  // extent known from contents
    return broadcast("mask", t_.mask, full, open, p_.mask_shape, p_.mask_stride);
  }

  /// Where a window and causality say the same of keys behind a query's own: such a window ends
  /// there, is a distance to both sides, or hides nothing on its right.
  Status causal_window() const {
    const std::int64_t right = o_.window_right;
    if (!o_.causal || right <= 0 || right == o_.window_left || right >= p_.max_q - 1) return {};
    return invalid("window_right: " + text(right) +
                   " contradicts causal, under which a query sees no key behind its own; it should "
                   "be 0, -1, window_left's " +
                   text(o_.window_left) +
                   " (a distance), or hide nothing, from Sq - 1 = " + text(p_.max_q - 1) + " on");
  }

  Status options() {
    p_.softmax_scale =
        o_.softmax_scale.value_or(static_cast<float>(1.0 / std::sqrt(static_cast<double>(p_.d))));
    if (!std::isfinite(p_.softmax_scale)) {
      return invalid("softmax_scale: " + std::to_string(p_.softmax_scale) + " is not finite");
    }
    if (!std::isfinite(o_.softcap) || o_.softcap < 0) {
      return invalid("softcap: " + std::to_string(o_.softcap) + " is not a finite number >= 0");
    }
    p_.softcap = o_.softcap;
    for (const auto& [name, w] :
         {std::pair{"window_left", o_.window_left}, std::pair{"window_right", o_.window_right}}) {
      if (w < -1) return invalid(std::string(name) + ": " + text(w) + " is below -1 (unlimited)");
    }
    if (Status s = causal_window(); !s.ok()) return s;
    p_.window_left = o_.window_left;
    p_.window_right = o_.causal ? 0 : o_.window_right;
    if (Status s = check_threads(o_.threads); !s.ok()) return s;
    const Device device = t_.q.device;
    if (Status s = check_device("q", device, o_.threads); !s.ok()) return s;
    for (const auto& [name, given] :
         {std::pair{"score_function", static_cast<bool>(o_.score_function)},
          std::pair{"mask_function", static_cast<bool>(o_.mask_function)}}) {
      if (given && device.type != DeviceType::cpu) {
        return invalid(std::string(name) + ": runs on CPUs only, and q lies on " +
                       device_text(device));
      }
    }
    return {};
  }

  Status recipe() {
    const Recipe& r = o_.recipe;
    if (Status s = check_toggles("recipe", r); !s.ok()) return s;
    if (o_.scales_for) {
      if (Status s = check_toggles("scales_for", *o_.scales_for); !s.ok()) return s;
    }
    if (r.qk == Format::none && (r.p != Format::none || r.v != Format::none)) {
      return invalid("recipe: formats of P or V need a format of Q and K");
    }
    const struct {
      const char* name;
      Toggle toggle;
      bool codes;
    } smooth[] = {{"smooth_k", r.smooth_k, p_.k_codes},
                  {"smooth_q", r.smooth_q, p_.q_codes || p_.k_codes},
                  {"smooth_v", r.smooth_v, p_.v_codes},
                  {"rotate", r.rotate, p_.q_codes || p_.k_codes},
                  {"balance_k", r.balance_k, p_.q_codes || p_.k_codes}};
    for (const auto& item : smooth) {
      if (item.toggle == Toggle::on && item.codes) {
        return invalid(std::string(item.name) + ": cannot be applied to codes; ask quantize()");
      }
    }
    if (r.balance_k == Toggle::on && !p_.scales_own_rows()) {
      return invalid("balance_k: changes rows that static scales of q or k were made for");
    }
    const struct {
      const char* name;
      const Scaling* scaling;
      Role role;
      Format format;
    } scalings[] = {{"q", &r.q_scale, Role::q, r.qk},
                    {"k", &r.k_scale, Role::k, r.qk},
                    {"v", &r.v_scale, Role::v, r.v}};
    for (const auto& item : scalings) {
      if (item.format == Format::none) {
        if (*item.scaling == Scaling{}) continue;
        return invalid(std::string(item.name) + "_scale: granularity " +
                       std::string(name(item.scaling->granularity)) + " is given, but " +
                       (r.qk == Format::none ? "recipe auto chooses its own"
                                             : "a 16-bit operand has no scales"));
      }
      if (Status s = check_scaling(item.name, *item.scaling, item.role, item.format); !s.ok()) {
        return s;
      }
    }
    return {};
  }

  const AttentionTensors& t_;
  const AttentionOptions& o_;
  Problem p_;
};

}  // namespace

bool is_float(Format format) {
  return format == Format::f32 || format == Format::f16 || format == Format::bf16;
}

Status check_index_format(const char* name, const TensorView& view) {
  if (view.format == Format::s32) return {};
  if (view.format != Format::s64) return check_format(name, view, {Format::s32, Format::s64});
  if (view.device.type == DeviceType::cpu) return {};
  return invalid(std::string(name) + ": format s64 lies on " + device_text(view.device) +
                 ", where kernels read s32");
}

std::string shape_text(const std::int64_t* extent, int rank) {
  std::string s = "(";
  for (int i = 0; i < rank; ++i) s += (i ? ", " : "") + text(extent[i]);
  return s + ")";
}

ByteRange byte_range(const TensorView& view) {
  const int bits = info(view.format).bits;
  std::int64_t low = 0, high = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return {};
    const std::int64_t reach = view.stride[i] * (view.shape[i] - 1);
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(view.data);
  return {base + static_cast<std::uintptr_t>(low * bits / 8),
          base + static_cast<std::uintptr_t>(((high + 1) * bits + 7) / 8)};
}

Status check_view(const char* name, const TensorView& view, int rank) {
  const std::string who = name;
  if (info(view.format).bits == 0) {
    return invalid(who + ": format " + text(static_cast<int>(view.format)) + " is unknown");
  }
  if (view.rank < 0 || view.rank > max_rank || (rank >= 0 && view.rank != rank)) {
    return invalid(who + ": rank " + text(view.rank) + " should be " +
                   (rank >= 0 ? text(rank) : "0 to " + text(max_rank)));
  }
  const int bits = info(view.format).bits;
  // Offsets are summed in bits and in magnitude, which bounds elements, bytes and pointers at once.
  std::int64_t total = 1, reach = 1;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] < 0) {
      return invalid(who + ": extent " + text(view.shape[i]) + " of dimension " + text(i) +
                     " is negative");
    }
    std::int64_t span = 0;
    const std::int64_t steps = std::max<std::int64_t>(view.shape[i] - 1, 0);
    if (view.stride[i] == std::numeric_limits<std::int64_t>::min() ||
        __builtin_mul_overflow(std::abs(view.stride[i]), steps, &span) ||
        __builtin_add_overflow(reach, span, &reach) ||
        __builtin_mul_overflow(total, std::max<std::int64_t>(view.shape[i], 1), &total)) {
      return invalid(who + ": shape " + shape_text(view.shape.data(), view.rank) +
                     " with its strides overflows 64-bit offsets");
    }
  }
  if (reach > std::numeric_limits<std::int64_t>::max() / 64 ||
      total > std::numeric_limits<std::int64_t>::max() / 64) {
    return invalid(who + ": shape " + shape_text(view.shape.data(), view.rank) +
                   " with its strides overflows 64-bit offsets");
  }
  if (bits < 8) {
    const int per_unit = bits == 3 ? 8 : 8 / bits;
    for (int i = 0; i < view.rank; ++i) {
      const bool last = i == view.rank - 1;
      if (last ? view.shape[i] % per_unit != 0 : view.stride[i] % per_unit != 0) {
        return invalid(who + ": " +
                       (last ? "extent " + text(view.shape[i]) : "stride " + text(view.stride[i])) +
                       " of dimension " + text(i) + " is not a multiple of " + text(per_unit) +
                       " packed " + std::string(info(view.format).name) + " codes");
      }
    }
  }
  if (view.data != nullptr && bits > 8 &&
      reinterpret_cast<std::uintptr_t>(view.data) % static_cast<unsigned>(bits / 8) != 0) {
    return invalid(who + ": address is not aligned to its " + text(bits / 8) + "-byte elements");
  }
  return {};
}

Status check_no_overlap(const char* name, const TensorView& view) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // |stride|, extent
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return {};  // nothing to overlap; numpy gives such arrays stride 0
    if (view.shape[i] > 1) dims.emplace_back(std::abs(view.stride[i]), view.shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 1;
  for (const auto& [stride, extent] : dims) {
    if (stride < reach) {
      return invalid(std::string(name) + ": stride " + text(stride) +
                     " makes elements overlap; an output needs distinct elements");
    }
    reach = stride * (extent - 1) + reach;
  }
  return {};
}

Status check_size(const char* name, std::int64_t batch, std::int64_t heads, std::int64_t tokens) {
  constexpr std::int64_t most = std::int64_t{1} << 48, tile = 128;
  std::int64_t rows = 0;
  if (__builtin_add_overflow(tokens, tile, &rows) ||
      __builtin_mul_overflow(rows, std::max<std::int64_t>(batch, 1), &rows) ||
      __builtin_mul_overflow(rows, std::max<std::int64_t>(heads, 1), &rows) || rows > most) {
    return invalid(std::string(name) + ": batch " + text(batch) + " x heads " + text(heads) +
                   " x tokens " + text(tokens) + " is over 2^48 rows");
  }
  return {};
}

Result<Problem> Problem::make(const AttentionTensors& tensors, const AttentionOptions& options) {
  return Maker(tensors, options).make();
}

std::string Problem::describe() const {
  std::string s;
  const auto line = [&s](const char* key, const std::string& value) {
    s += std::string(key) + ": " + value + "\n";
  };
  line("batch", text(batch));
  line("heads", text(heads_q) + "/" + text(heads_kv));
  line("tokens", text(max_q) + "/" + text(max_k));
  line("head_dim", text(d) + "/" + text(dv));
  line("inputs", std::string(info(q.format).name) + " " + std::string(info(k.format).name) + " " +
                     std::string(info(v.format).name) + " -> " +
                     std::string(info(out.format).name));
  line("sequences", std::string(varlen_q ? "packed q, " : "") + (varlen_k ? "packed k, " : "") +
                        (paged ? "paged k of " + text(page_size) : "dense k"));
  line("window", text(window_left) + "," + text(window_right));
  std::string extras;
  if (softcap > 0) extras += " softcap";
  if (mask == MaskKind::boolean) extras += " boolean-mask";
  if (mask == MaskKind::additive) extras += " additive-mask";
  if (block_mask_q > 0) {
    extras += " block-mask-" + text(block_mask_q) + "x" + text(block_mask_k);
  }
  if (tensors.sinks.present()) extras += " sinks";
  if (tensors.alibi_slopes.present()) extras += " alibi";
  if (score_function) extras += " score-function";
  if (mask_function) extras += " mask-function";
  if (tensors.lse.present()) extras += " lse";
  if (tensors.seqused_q.present()) extras += " seqused_q";
  if (tensors.seqused_k.present()) extras += " seqused_k";
  // Workspaces differ with what need not be computed.
  for (const auto& [name, view] :
       {std::pair{" q_scale", &tensors.q_scale}, std::pair{" k_scale", &tensors.k_scale},
        std::pair{" v_scale", &tensors.v_scale}, std::pair{" k_mean", &tensors.k_mean},
        std::pair{" v_mean", &tensors.v_mean}, std::pair{" saturated", &tensors.saturated}}) {
    if (view->present()) extras += name;
  }
  if (projects()) extras += " projection-to-" + text(tensors.projection.shape[0]);
  if (tensors.projection_bias.present()) extras += " projection_bias";
  line("extras", extras.empty() ? "none" : extras.substr(1));
  if (device().type != DeviceType::cpu) line("device", device_text(device()));
  return s;
}

}  // namespace qattn
