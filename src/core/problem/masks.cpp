#include <cstdint>

#include "core/problem/checks.hpp"
#include "core/problem/maker.hpp"

namespace qattn {

using namespace checks;

namespace {

/// Integers in a mask might say who may look or what is added.
constexpr const char* bool_hint = "; where its numbers say who may look, pass mask != 0";

}  // namespace

Status ProblemMaker::extras() {
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
    if (Status s = check_format("alibi_slopes", t_.alibi_slopes, {Format::f32}); !s.ok()) return s;
    Status s = t_.alibi_slopes.rank == 1
                   ? check_shape("alibi_slopes", t_.alibi_slopes, {p_.heads_q})
                   : check_shape("alibi_slopes", t_.alibi_slopes, {p_.batch, p_.heads_q});
    if (!s.ok()) return s;
  }
  if (Status s = mask(); !s.ok()) return s;
  return block_mask();
}

Status ProblemMaker::broadcast(const char* name, const TensorView& view,
                               const std::int64_t (&full)[4], const bool (&open)[4],
                               std::array<std::int64_t, 4>& shape,
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

Status ProblemMaker::block_mask() {
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

Status ProblemMaker::mask() {
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

}  // namespace qattn
