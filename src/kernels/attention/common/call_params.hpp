// From a call to AttentionParams: what every GPU prefill kernel is told of it.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/operand/call_masks.hpp"
#include "kernels/operand/prepare.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Blocks of `rows` query rows of a head that a grid has, in all sequences. Packed ones are
/// numbered by tile::first_block(), of whose numbers these are all that rows can have; it takes no
/// address, for plans are made without.
inline std::int64_t row_blocks(const Problem& p, std::int64_t rows) {
  if (p.batch == 0 || p.max_q == 0) return 0;
  if (p.varlen_q) return (p.tokens_q + rows - 1) / rows + p.batch - 1;
  return p.batch * ((p.max_q + rows - 1) / rows);
}

/// Must q . (K's mean) be prepared? Scores lack it; what is not relative to them needs it.
inline bool needs_dot_mean(const Problem& p, const Recipe& r) {
  const bool mean = r.smooth_k == Toggle::on || p.tensors.k_mean.present();
  return mean && (p.tensors.lse.present() || p.softcap > 0 || p.tensors.sinks.present());
}

/// Do rows start and step at multiples of 16 bytes?
inline bool aligned(const TokenTensor& t) {
  const std::int64_t bytes = info(t.format).bits / 8;
  const auto fits = [&](std::int64_t n) { return n * bytes % 16 == 0; };
  return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && fits(t.batch) && fits(t.token) &&
         fits(t.head);
}

/// And are they whole pieces of eight channels? Kernels without detours read no others in place.
inline bool in_pieces(const TokenTensor& t, int channels) {
  return channels % 8 == 0 && aligned(t);
}

/// Strides of a tensor that broadcasts over leading dimensions it lacks.
inline BroadcastView per_head(const TensorView& t) {
  BroadcastView v;
  if (!t.present()) return v;
  v.data = t.data;
  v.format = t.format;
  v.stride[0] = t.rank == 2 ? t.stride[0] : 0;
  v.stride[1] = t.stride[t.rank - 1];
  return v;
}

inline OutputView output_of(const Problem& p) {
  OutputView o;
  o.data = p.out.data;
  o.format = p.out.format;
  o.batch = p.out.batch;
  o.token = p.out.token;
  o.head = p.out.head;
  o.channels = p.dv;
  o.vectors = p.out.format != Format::f32 && in_pieces(p.out, p.dv);
  if (const TensorView& lse = p.tensors.lse; lse.present()) {
    o.lse = static_cast<float*>(lse.data);
    o.lse_batch = p.varlen_q ? 0 : lse.stride[0];
    o.lse_head = lse.stride[p.varlen_q ? 0 : 1];
    o.lse_token = lse.stride[p.varlen_q ? 1 : 2];
  }
  return o;
}

/// Blocks of `rows` query rows.
inline AttentionParams params_of(const Problem& p, const Prepared& prepared, int rows,
                                 std::uint32_t* error) {
  AttentionParams a;
  a.q = rows_of(p, Role::q);
  a.k = rows_of(p, Role::k);
  a.v = rows_of(p, Role::v);
  a.q_vectors = aligned(p.q);
  a.k_vectors = aligned(p.k);
  a.v_vectors = aligned(p.v);
  a.q8 = prepared.q;
  a.k8 = prepared.k;
  a.v8 = prepared.v;
  if (prepared.q.codes != nullptr) a.q.data = nullptr;
  if (prepared.k.codes != nullptr) a.k.data = nullptr;
  a.coded_values = p.v_codes || prepared.v.tiles != nullptr;
  a.q_mean = prepared.q_mean;
  a.v_mean = prepared.v_mean;
  a.v_mean_channels = prepared.v_channels;
  a.out = output_of(p);
  a.scale = p.softmax_scale;
  a.softcap = p.softcap;
  tell_masks(p, a);
  a.alibi = per_head(p.tensors.alibi_slopes);
  a.sinks = per_head(p.tensors.sinks);
  a.group = static_cast<std::int32_t>(p.group());
  const std::int64_t blocks = row_blocks(p, rows);
  a.q_blocks = static_cast<std::int32_t>(p.varlen_q ? blocks : (p.max_q + rows - 1) / rows);
  a.work_tiles = static_cast<std::int32_t>(blocks * p.heads_q);
  a.error = error;
  return a;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
