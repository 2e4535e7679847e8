#include "core/operand.hpp"

namespace qattn {

Operand operand_of(const Problem& p, Role role) {
  static const TensorView none;
  const AttentionTensors& t = p.tensors;
  switch (role) {
    case Role::q:
      return {
          role,        "q",        p.q,   p.q_codes, t.q_scale, t.q_global, none, t.cu_seqlens_q,
          t.seqused_q, p.varlen_q, false, p.heads_q, p.max_q,   p.tokens_q, p.d};
    case Role::k:
      return {role,        "k",        p.k,      p.k_codes,
              t.k_scale,   t.k_global, t.k_mean, t.cu_seqlens_k,
              t.seqused_k, p.varlen_k, p.paged,  p.heads_kv,
              p.max_k,     p.tokens_k, p.d};
    default:
      return {role,        "v",        p.v,      p.v_codes,
              t.v_scale,   t.v_global, t.v_mean, t.cu_seqlens_k,
              t.seqused_k, p.varlen_k, p.paged,  p.heads_kv,
              p.max_k,     p.tokens_k, p.dv};
  }
}

OperandRecipe operand_recipe(const Recipe& r, Role role) {
  switch (role) {
    case Role::q:
      return {r.qk, r.q_scale, r.smooth_q};
    case Role::k:
      return {r.qk, r.k_scale, r.smooth_k};
    default:
      return {r.v, r.v_scale, r.smooth_v};
  }
}

}  // namespace qattn
