#include <algorithm>
#include <tuple>
#include <utility>

#include "core/index_tensor.hpp"
#include "core/layout_hint.hpp"
#include "core/problem/checks.hpp"
#include "core/problem/maker.hpp"

namespace qattn {

using namespace checks;

namespace {

Axes axes(Layout layout, bool packed) {
  if (packed) return layout == Layout::bshd ? Axes{-1, 0, 1, 2} : Axes{-1, 1, 0, 2};
  return layout == Layout::bshd ? Axes{0, 1, 2, 3} : Axes{0, 2, 1, 3};
}

TokenTensor token_tensor(const TensorView& view, const Axes& a) {
  TokenTensor t;
  t.data = view.data;
  t.format = view.format;
  t.batch = a.batch < 0 ? 0 : view.stride[a.batch];
  t.token = view.stride[a.token];
  t.head = view.stride[a.head];
  return t;
}

}  // namespace

Status ProblemMaker::operands() {
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

std::string ProblemMaker::layout_hint() const {
  const Layout other = o_.layout == Layout::bshd ? Layout::bhsd : Layout::bshd;
  const Axes aq = axes(other, p_.varlen_q), ak = axes(other, p_.varlen_k);
  const std::int64_t heads_q = t_.q.shape[aq.head], heads_kv = t_.k.shape[ak.head];
  const bool fits = heads_q > 0 && heads_kv > 0 && heads_q % heads_kv == 0 &&
                    t_.v.shape[ak.head] == heads_kv && t_.v.shape[ak.token] == t_.k.shape[ak.token];
  return fits ? other_layout(o_.layout) : "";
}

Status ProblemMaker::dimensions() {
  const Axes aq = axes(o_.layout, p_.varlen_q), ak = axes(o_.layout, p_.varlen_k);
  p_.q = token_tensor(t_.q, aq);
  p_.k = token_tensor(t_.k, ak);
  p_.v = token_tensor(t_.v, ak);
  p_.heads_q = t_.q.shape[aq.head];
  p_.heads_kv = t_.k.shape[ak.head];
  const std::int64_t d = t_.q.shape[aq.channel], dv = t_.v.shape[ak.channel];
  if (t_.k.shape[ak.channel] != d) {
    return invalid("k: head_dim " + text(t_.k.shape[ak.channel]) + " differs from q's " + text(d));
  }
  const bool cpu = t_.q.device.type == DeviceType::cpu;
  for (const auto& [name, role, extent] :
       {std::tuple{"q", Role::q, d}, std::tuple{"v", Role::v, dv}}) {
    const std::string why =
        cpu ? head_size_refusal(name, role, extent) : device_head_size_refusal(name, role, extent);
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

Status ProblemMaker::plain_out(const Axes& aq) {
  if (t_.projection_bias.present()) return invalid("projection_bias: is given without projection");
  p_.out = token_tensor(t_.out, aq);
  std::array<std::int64_t, max_rank> out = t_.q.shape;
  out[aq.channel] = p_.dv;
  return check_shape("out", t_.out, out.data(), t_.q.rank);
}

Status ProblemMaker::projected_out(const Axes& aq) {
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

Status ProblemMaker::sequences() {
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

}  // namespace qattn
