// What supports() of several GPU kernels ask: each rule and its text once. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "core/problem.hpp"
#include "isa/isa.hpp"
#include "kernels/attention/common/call_params.hpp"
#include "kernels/operand/prepare.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

inline Status refuse(std::string why) { return Status(Code::unsupported, std::move(why)); }

inline std::string text(Format f) { return std::string(info(f).name); }

/// Is an operand of the format quantised?
inline bool coded(Format format) { return info(format).scale != Format::none; }

/// Are they numbers of 16 bits?
inline bool is_16bit(Format format) { return format == Format::f16 || format == Format::bf16; }

/// What a format that GPU kernels multiply is as an element of a product.
inline isa::Element element_of(Format format) {
  switch (format) {
    case Format::f16:
      return isa::Element::f16;
    case Format::bf16:
      return isa::Element::bf16;
    case Format::e4m3:
    case Format::mxfp8:
      return isa::Element::e4m3;
    case Format::mxfp4:
    case Format::nvfp4:
      return isa::Element::e2m1;
    default:
      return isa::Element::s8;
  }
}

/// That of P beside such V.
inline isa::Element probability_of(Format v) {
  return v == Format::s8 ? isa::Element::u8 : element_of(v);
}

/// Is K's scale the same for all of `keys` neighbouring keys, or, `by_thread`, for those of them
/// with the same (key % 8) / 2?
inline bool shares_k_scale(const Problem& p, const Recipe& r, int keys, bool by_thread) {
  using enum Granularity;
  const Scaling& s = r.k_scale;
  if (p.paged && p.tensors.k_scale.present()) return false;  // given with the pages
  return s.granularity == per_tensor || s.granularity == per_head ||
         ((s.granularity == per_block || (by_thread && s.granularity == per_thread)) &&
          s.block % keys == 0);
}

/// May a kernel that reads Q in 16 bits make its codes, a scale a row, as the encoders do?
inline bool has_plain_queries(const Problem& p, const Recipe& r) {
  return is_16bit(p.q.format) && !p.tensors.q_scale.present() && r.rotate != Toggle::on &&
         r.q_scale.granularity == Granularity::per_token && in_pieces(p.q, p.d);
}

/// Code for none of the GPU's kind, and no PTX that it could be made of.
inline Status no_code(const isa::Gpu& gpu) {
  return refuse("the library has no code that runs on " + gpu.name());
}

/// Scales per token of V are a factor of P, of which codes of e4m3 know nothing.
inline Status check_value_scales(const Recipe& r) {
  return r.v == Format::e4m3 && r.v_scale.granularity == Granularity::per_token
             ? refuse("v: scales per token do not fit e4m3 P, which is rounded without them")
             : Status();
}

/// What prepares codes has no effect where there are none.
inline Status check_preparation(const Recipe& r) {
  const bool qk = coded(r.qk);
  if (r.smooth_q == Toggle::on && !qk) return refuse("smooth_q has no effect on 16-bit products");
  if (r.smooth_k == Toggle::on && !qk) return refuse("smooth_k has no effect on 16-bit products");
  if (r.smooth_v == Toggle::on && !coded(r.v)) return refuse("smooth_v is for quantised V");
  if (r.rotate == Toggle::on && !qk) return refuse("rotate is for quantised Q and K");
  return {};
}

/// Sequences that kernels can index with 32 bits, a tile behind the end included.
inline Status check_lengths(const Problem& p) {
  return std::max(p.max_q, p.max_k) > std::int64_t{1} << 30
             ? refuse("sequences longer than 2^30 tokens")
             : Status();
}

/// All rows of a tile have the same blocks; those of keys are multiples of 64 anyway. `whose`:
/// "the rows of a tile".
inline Status check_block_mask(const Problem& p, int rows, const std::string& whose) {
  return p.block_mask_q % rows != 0
             ? refuse("block_mask_q: " + std::to_string(p.block_mask_q) + " is not a multiple of " +
                      std::to_string(rows) + ", " + whose)
             : Status();
}

/// Blocks of `rows` query rows that are counted with 32 bits: more than `limit`?
inline bool too_many_blocks(const Problem& p, int rows, std::int64_t limit = 0x7fffffff) {
  return row_blocks(p, rows) > limit / std::max<std::int64_t>(p.heads_q, 1);
}

/// Of the first step of a plan, even if it prepares nothing.
inline Status check_prepared(const Problem& p, const Recipe& r, const PrepareNeeds& needs) {
  std::string why = prepare_refusal(p, r, needs);
  return why.empty() ? Status() : refuse(std::move(why));
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
