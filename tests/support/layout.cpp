#include "support/layout.hpp"

#include <algorithm>
#include <numeric>
#include <random>

namespace qattn::test {
namespace {

Index token_shape(const LayoutOptions& how, bool packed, std::int64_t outer, std::int64_t tokens,
                  std::int64_t heads, std::int64_t dim) {
  if (packed) {
    return how.layout == Layout::bshd ? Index{tokens, heads, dim} : Index{heads, tokens, dim};
  }
  return how.layout == Layout::bshd ? Index{outer, tokens, heads, dim}
                                    : Index{outer, heads, tokens, dim};
}

std::int64_t first_token(const Call& call, std::int64_t b, std::int64_t Sequence::* room) {
  std::int64_t first = 0;
  for (std::int64_t n = 0; n < b; ++n) first += call.sequences[n].*room;
  return first;
}

/// Where token s of sequence b lies: its outer index (batch or page) and its place there.
struct Place {
  std::int64_t outer, token;
};

Place place_q(const Call& call, std::int64_t b, std::int64_t s) {
  if (call.packed_q) return {0, first_token(call, b, &Sequence::room_q) + s};
  return {b, s};
}

Place place_k(const Laid& laid, const Call& call, std::int64_t b, std::int64_t s) {
  if (laid.how.page_size > 0) {
    const auto page = static_cast<std::int64_t>(laid.pages.get({b, s / laid.how.page_size}));
    return {page, s % laid.how.page_size};
  }
  if (laid.how.packed_k) return {0, first_token(call, b, &Sequence::room_k) + s};
  return {b, s};
}

/// Page numbers in a shuffled order; the last page of the pool belongs to nobody and stays NaN, and
/// entries behind a sequence's end name it.
void number_pages(Laid& laid, const Call& call, std::int64_t width, std::int64_t used) {
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  const std::int64_t size = laid.how.page_size;
  std::vector<std::int64_t> order(static_cast<std::size_t>(used));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 engine(laid.how.page_seed);
  std::shuffle(order.begin(), order.end(), engine);
  std::size_t next = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t own = (call.sequences[b].len_k + size - 1) / size;
    for (std::int64_t n = 0; n < width; ++n) {
      double page = static_cast<double>(used);
      if (n < own) page = static_cast<double>(order[next++]);
      if (n < own && b > 0 && n < laid.how.shared_pages) page = laid.pages.get({0, n});
      laid.pages.set({b, n}, page);
    }
  }
}

void make_pages(Laid& laid, const Call& call) {
  const std::int64_t size = laid.how.page_size;
  std::int64_t width = 1, used = 0;
  for (const Sequence& sequence : call.sequences) {
    width = std::max(width, (sequence.room_k + size - 1) / size);
    used += (sequence.len_k + size - 1) / size;
  }
  const Index table{static_cast<std::int64_t>(call.sequences.size()), width};
  laid.pages = Tensor(Format::s32, table, laid.how.strides, laid.how.memory);
  if (laid.how.memory) number_pages(laid, call, width, used);
  const Index k = token_shape(laid.how, false, used + 1, size, call.heads_k, call.dim);
  const Index v = token_shape(laid.how, false, used + 1, size, call.heads_k, call.dim_v);
  laid.k = Tensor(laid.how.input, k, laid.how.strides, laid.how.memory);
  laid.v = Tensor(laid.how.input, v, laid.how.strides, laid.how.memory);
}

void make_operands(Laid& laid, const Call& call) {
  const LayoutOptions& how = laid.how;
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  std::int64_t total_q = 0, total_k = 0;
  for (const Sequence& sequence : call.sequences) {
    total_q += sequence.room_q;
    total_k += sequence.room_k;
  }
  const std::int64_t room_q = call.packed_q ? total_q : call.sequences.at(0).room_q;
  const std::int64_t room_k = how.packed_k ? total_k : call.sequences.at(0).room_k;
  const auto make = [&](Format format, bool packed, std::int64_t tokens, std::int64_t heads,
                        std::int64_t dim) {
    const Index shape = token_shape(how, packed, batch, tokens, heads, dim);
    return Tensor(format, shape, how.strides, how.memory);
  };
  laid.q = make(how.input, call.packed_q, room_q, call.heads_q, call.dim);
  laid.out = make(how.output, call.packed_q, room_q, call.heads_q, call.dim_v);
  if (how.lse) {
    const Index shape =
        call.packed_q ? Index{call.heads_q, room_q} : Index{batch, call.heads_q, room_q};
    laid.lse = Tensor(Format::f32, shape, how.strides, how.memory);
  }
  if (how.page_size > 0) {
    make_pages(laid, call);
  } else {
    laid.k = make(how.input, how.packed_k, room_k, call.heads_k, call.dim);
    laid.v = make(how.input, how.packed_k, room_k, call.heads_k, call.dim_v);
  }
}

void write_operands(Laid& laid, const Call& call) {
  for (std::size_t b = 0; b < call.sequences.size(); ++b) {
    const Sequence& seq = call.sequences[b];
    const auto put = [&](Operand operand, const std::vector<float>& x, std::int64_t heads,
                         std::int64_t tokens, std::int64_t dim) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t s = 0; s < tokens; ++s) {
          for (std::int64_t d = 0; d < dim; ++d) {
            poke(laid, call, operand, static_cast<std::int64_t>(b), h, s, d,
                 x[(h * tokens + s) * dim + d]);
          }
        }
      }
    };
    put(Operand::q, seq.q, call.heads_q, seq.len_q, call.dim);
    put(Operand::k, seq.k, call.heads_k, seq.len_k, call.dim);
    put(Operand::v, seq.v, call.heads_k, seq.len_k, call.dim_v);
  }
}

Tensor lengths(const Call& call, const LayoutOptions& how, std::int64_t Sequence::* length) {
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  Tensor tensor(Format::s32, {batch}, Strides::dense, how.memory);
  for (std::size_t b = 0; how.memory && b < call.sequences.size(); ++b) {
    tensor.set({static_cast<std::int64_t>(b)}, static_cast<double>(call.sequences[b].*length));
  }
  return tensor;
}

Tensor cumulated(const Call& call, const LayoutOptions& how, std::int64_t Sequence::* room) {
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  Tensor tensor(Format::s32, {batch + 1}, Strides::dense, how.memory);
  for (std::int64_t b = 0; how.memory && b <= batch; ++b) {
    tensor.set({b}, static_cast<double>(first_token(call, b, room)));
  }
  return tensor;
}

/// Fills the first elements of a tensor's rows, `shape` in all, in row-major order.
void fill(Tensor& tensor, const Index& shape, const std::vector<float>& x) {
  for (std::size_t n = 0; n < x.size(); ++n) {
    auto rest = static_cast<std::int64_t>(n);
    Index index(shape.size());
    for (std::size_t d = shape.size(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    tensor.set(index, x[n]);
  }
}

Tensor filled(Format format, const Index& shape, const LayoutOptions& how,
              const std::vector<float>& x) {
  Tensor tensor(format, shape, how.strides, how.memory);
  if (how.memory) fill(tensor, shape, x);
  return tensor;
}

/// Bits behind the last key stay set: nobody may look at them.
Tensor make_mask(const Mask& mask, const LayoutOptions& how) {
  Index shape = mask.shape;
  if (mask.bits) shape.back() = (shape.back() + 7) / 8 * 8;
  const Format format = mask.bits ? Format::b1 : mask.boolean ? Format::b8 : how.bias;
  Tensor tensor(format, shape, how.strides, how.memory);
  if (how.memory) fill(tensor, mask.shape, mask.values);
  return tensor;
}

void make_extras(Laid& laid, const Call& call) {
  const LayoutOptions& how = laid.how;
  const auto batch = static_cast<std::int64_t>(call.sequences.size());
  if (!call.sinks.empty()) laid.sinks = filled(how.bias, {call.heads_q}, how, call.sinks);
  if (!call.alibi.empty()) {
    laid.alibi = filled(Format::f32, {batch, call.heads_q}, how, call.alibi);
  }
  if (!call.mask.shape.empty()) {
    laid.mask = make_mask(call.mask, how);
  }
  if (!call.block_mask.shape.empty()) {
    laid.block_mask = filled(Format::b8, call.block_mask.shape, how, call.block_mask.values);
  }
  if (call.packed_q) laid.cu_q = cumulated(call, how, &Sequence::room_q);
  if (how.packed_k) laid.cu_k = cumulated(call, how, &Sequence::room_k);
  if (how.seqused_q) laid.used_q = lengths(call, how, &Sequence::len_q);
  if (how.seqused_k || how.page_size > 0) laid.used_k = lengths(call, how, &Sequence::len_k);
  laid.saturated = Tensor(Format::s64, {3});
}

}  // namespace

Index token_index(const LayoutOptions& how, bool packed, std::int64_t outer, std::int64_t h,
                  std::int64_t s, std::int64_t d) {
  if (packed) return how.layout == Layout::bshd ? Index{s, h, d} : Index{h, s, d};
  return how.layout == Layout::bshd ? Index{outer, s, h, d} : Index{outer, h, s, d};
}

void poke(Laid& laid, const Call& call, Operand operand, std::int64_t b, std::int64_t h,
          std::int64_t s, std::int64_t d, double value) {
  if (operand == Operand::q) {
    const Place at = place_q(call, b, s);
    laid.q.set(token_index(laid.how, call.packed_q, at.outer, h, at.token, d), value);
    return;
  }
  const Place at = place_k(laid, call, b, s);
  Tensor& x = operand == Operand::k ? laid.k : laid.v;
  x.set(token_index(laid.how, laid.how.packed_k, at.outer, h, at.token, d), value);
}

AttentionTensors Laid::tensors() const {
  AttentionTensors t;
  t.q = q.view();
  t.k = k.view();
  t.v = v.view();
  t.out = out.view();
  t.lse = lse.view();
  t.q_scale = q_scale.view();
  t.k_scale = k_scale.view();
  t.v_scale = v_scale.view();
  if (q_scale.present() || k_scale.present() || v_scale.present()) t.saturated = saturated.view();
  t.sinks = sinks.view();
  t.mask = mask.view();
  t.block_mask = block_mask.view();
  t.alibi_slopes = alibi.view();
  t.cu_seqlens_q = cu_q.view();
  t.cu_seqlens_k = cu_k.view();
  t.seqused_q = used_q.view();
  t.seqused_k = used_k.view();
  t.page_table = pages.view();
  if (how.zero_stride_kv) t.k.stride[0] = t.v.stride[0] = 0;
  return t;
}

std::vector<float> Laid::read_out(const Call& call) const {
  std::vector<float> rows(static_cast<std::size_t>(call.total_rows() * call.dim_v));
  for (std::size_t n = 0; n < call.sequences.size(); ++n) {
    const auto b = static_cast<std::int64_t>(n);
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 0; i < call.sequences[n].room_q; ++i) {
        const Place at = place_q(call, b, i);
        for (std::int64_t d = 0; d < call.dim_v; ++d) {
          rows[call.row(b, h, i) * call.dim_v + d] = static_cast<float>(
              out.get(token_index(how, call.packed_q, at.outer, h, at.token, d)));
        }
      }
    }
  }
  return rows;
}

std::vector<float> Laid::read_lse(const Call& call) const {
  std::vector<float> rows;
  if (!lse.present()) return rows;
  rows.resize(static_cast<std::size_t>(call.total_rows()));
  for (std::size_t n = 0; n < call.sequences.size(); ++n) {
    const auto b = static_cast<std::int64_t>(n);
    for (std::int64_t h = 0; h < call.heads_q; ++h) {
      for (std::int64_t i = 0; i < call.sequences[n].room_q; ++i) {
        const Place at = place_q(call, b, i);
        const Index index = call.packed_q ? Index{h, at.token} : Index{b, h, i};
        rows[call.row(b, h, i)] = static_cast<float>(lse.get(index));
      }
    }
  }
  return rows;
}

void Laid::freeze() {
  for (Tensor* tensor : {&q, &k, &v, &sinks, &mask, &block_mask, &alibi, &cu_q, &cu_k, &used_q,
                         &used_k, &pages, &q_scale, &k_scale, &v_scale}) {
    tensor->freeze();
  }
}

std::string Laid::violation() const {
  const std::pair<const char*, const Tensor*> inputs[] = {{"q", &q},
                                                          {"k", &k},
                                                          {"v", &v},
                                                          {"sinks", &sinks},
                                                          {"mask", &mask},
                                                          {"block_mask", &block_mask},
                                                          {"alibi", &alibi},
                                                          {"cu_q", &cu_q},
                                                          {"cu_k", &cu_k},
                                                          {"used_q", &used_q},
                                                          {"used_k", &used_k},
                                                          {"pages", &pages},
                                                          {"q_scale", &q_scale},
                                                          {"k_scale", &k_scale},
                                                          {"v_scale", &v_scale}};
  for (const auto& [what, tensor] : inputs) {
    if (tensor->present() && !tensor->unchanged()) return std::string(what) + " was written";
  }
  const std::pair<const char*, const Tensor*> outputs[] = {
      {"out", &out}, {"lse", &lse}, {"saturated", &saturated}};
  for (const auto& [what, tensor] : outputs) {
    if (tensor->present() && !tensor->guards_intact()) {
      return std::string(what) + ": a byte outside the view was written";
    }
  }
  return {};
}

Laid lay_out(const Call& call, const LayoutOptions& how) {
  Laid laid;
  laid.how = how;
  laid.packed_q = call.packed_q;
  make_operands(laid, call);
  if (how.memory) write_operands(laid, call);
  make_extras(laid, call);
  laid.freeze();
  return laid;
}

}  // namespace qattn::test
