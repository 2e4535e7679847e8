// Checks of what index tensors and given scales contain. Only host memory can be looked at without
// a synchronisation, so plan.cpp calls this for CPUs, and elsewhere on copies if asked to.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/index_tensor.hpp"
#include "core/operand.hpp"
#include "core/problem.hpp"
#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/f16.hpp"
#include "formats/scale.hpp"
#include "formats/ue8m0.hpp"
#include "qattn/quantize.hpp"

namespace qattn {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

Status invalid(std::string message) { return Status(Code::invalid_argument, std::move(message)); }

constexpr auto entry = index_entry;

Status check_cumulative(const char* name, const TensorView& view, std::int64_t tokens,
                        std::int64_t* longest) {
  if (!view.present()) return {};
  if (entry(view, 0) != 0) {
    return invalid(std::string(name) + ": entry 0 is " + text(entry(view, 0)) + ", should be 0");
  }
  *longest = 0;
  for (std::int64_t i = 1; i < view.shape[0]; ++i) {
    if (entry(view, i) < entry(view, i - 1)) {
      return invalid(std::string(name) + ": entry " + text(i) + " is " + text(entry(view, i)) +
                     ", below the one before, " + text(entry(view, i - 1)));
    }
    *longest = std::max(*longest, entry(view, i) - entry(view, i - 1));
  }
  const std::int64_t last = entry(view, view.shape[0] - 1);
  if (last != tokens) {
    return invalid(std::string(name) + ": last entry " + text(last) + " should be the number of " +
                   "packed tokens, " + text(tokens));
  }
  return {};
}

Status check_used(const char* name, const TensorView& used, const TensorView& cumulative,
                  std::int64_t limit) {
  if (!used.present()) return {};
  for (std::int64_t b = 0; b < used.shape[0]; ++b) {
    const std::int64_t room =
        cumulative.present() ? entry(cumulative, b + 1) - entry(cumulative, b) : limit;
    if (entry(used, b) < 0 || entry(used, b) > room) {
      return invalid(std::string(name) + ": entry " + text(b) + " is " + text(entry(used, b)) +
                     ", not in [0, " + text(room) + "]");
    }
  }
  return {};
}

/// Page `i` of a sequence.
std::int64_t page_of(const Problem& p, std::int64_t b, std::int64_t i) {
  const TensorView& table = p.tensors.page_table;
  return index_at(table, b * table.stride[0] + i * table.stride[1]);
}

Status check_pages(const Problem& p) {
  if (!p.paged) return {};
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t used = (entry(p.tensors.seqused_k, b) + p.page_size - 1) / p.page_size;
    for (std::int64_t i = 0; i < used; ++i) {
      const std::int64_t page = page_of(p, b, i);
      if (page < 0 || page >= p.pages) {
        return invalid("page_table: entry (" + text(b) + ", " + text(i) + ") is " + text(page) +
                       ", not in [0, " + text(p.pages) + ")");
      }
    }
  }
  return {};
}

/// f(entry of the first dimension of an operand's scales, its tokens that exist), until it fails:
/// for every sequence, or every page that one has, once for each. Index tensors hold what
/// check_contents() wants of them.
template <class Function>
Status each_entry(const Problem& p, Role role, Function f) {
  const AttentionTensors& t = p.tensors;
  const bool query = role == Role::q;
  const TensorView& cu = query ? t.cu_seqlens_q : t.cu_seqlens_k;
  const TensorView& used = query ? t.seqused_q : t.seqused_k;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t tokens = used.present() ? entry(used, b)
                                : cu.present() ? entry(cu, b + 1) - entry(cu, b)
                                : query        ? p.max_q
                                               : p.max_k;
    if (!p.paged || query) {
      if (Status s = f(b, tokens); !s.ok()) return s;
      continue;
    }
    for (std::int64_t i = 0; i * p.page_size < tokens; ++i) {
      Status s = f(page_of(p, b, i), std::min(tokens - i * p.page_size, p.page_size));
      if (!s.ok()) return s;
    }
  }
  return {};
}

/// Entries that `tokens` tokens have along the third dimension of scales; -1: there is none.
std::int64_t scale_entries(const Scaling& asked, Role role, Format format, std::int64_t tokens) {
  using enum Granularity;
  const Scaling s = resolve_scaling(asked, role, format);
  if (s.granularity == per_tensor || s.granularity == per_head || s.granularity == per_channel) {
    return -1;
  }
  if (s.granularity != group || role != Role::v) return scale_count(s, role, tokens);
  return (tokens + info(format).group - 1) / info(format).group;
}

/// Are all `count` values positive and finite? Written to vectorise: a cache has a scale a token.
bool all_positive(const float* x, std::int64_t count) {
  int bad = 0;
  for (std::int64_t i = 0; i < count; ++i) bad |= static_cast<int>(!formats::is_scale(x[i]));
  return bad == 0;
}

/// One scale, and whether it may be one. Coded ones: e4m3 may be 0 (an empty group), neither format
/// may be NaN or negative.
std::pair<float, bool> scale_value(const TensorView& view, std::int64_t offset) {
  if (view.format == Format::f32) {
    const float value = static_cast<const float*>(view.data)[offset];
    return {value, formats::is_scale(value)};
  }
  const std::uint8_t code = static_cast<const std::uint8_t*>(view.data)[offset];
  const float value =
      view.format == Format::ue8m0 ? formats::Ue8m0::decode(code) : formats::E4m3::decode(code);
  return {value, value >= 0 && std::isfinite(value)};
}

constexpr std::int64_t all_entries = std::numeric_limits<std::int64_t>::max();

/// Checks scales [outer, ...] whose place in the third dimension is below `used`.
Status check_entry(const char* name, const TensorView& view, std::int64_t outer,
                   std::int64_t used) {
  const int last = view.rank - 1;
  std::int64_t inside = 1, rows = 1;
  bool packed = view.format == Format::f32;  // are all scales of the entry in one run?
  for (int i = last; i > 0; --i) {
    packed = packed && (view.shape[i] <= 1 || view.stride[i] == inside);
    inside *= view.shape[i];
    if (i < last) rows *= view.shape[i];
  }
  packed = packed && inside > 0 && (last < 2 || used >= view.shape[2]);
  if (packed && all_positive(static_cast<const float*>(view.data) + outer * view.stride[0], inside))
    return {};
  std::array<std::int64_t, max_rank> at{};
  at[0] = outer;
  for (std::int64_t n = 0; n < rows; ++n) {
    std::int64_t count = last == 0 ? 1 : view.shape[last];
    if (last == 2) count = std::min(count, used);
    if (last == 3 && at[2] >= used) count = 0;
    std::int64_t offset = 0;
    for (int i = 0; i <= last; ++i) offset += at[i] * view.stride[i];
    const bool run = count > 0 && view.format == Format::f32 && view.stride[last] == 1;
    const bool good_run = run && all_positive(static_cast<const float*>(view.data) + offset, count);
    for (std::int64_t i = 0; i < count && !good_run; ++i) {
      const auto [value, good] = scale_value(view, offset + i * view.stride[last]);
      if (good) continue;
      at[last] += i;
      return invalid(std::string(name) + ": value " + std::to_string(value) + " at " +
                     shape_text(at.data(), view.rank) + " is not positive and finite");
    }
    for (int i = last - 1; i > 0 && ++at[i] == view.shape[i]; --i) at[i] = 0;
  }
  return {};
}

/// Checks an operand's scales, and the globals of nvfp4: those of tokens that exist. A cache has
/// never written the rest.
Status check_scale_values(const Problem& p, Role role) {
  const Operand x = operand_of(p, role);
  const OperandRecipe asked = operand_recipe(p.recipe, role);
  if (!x.scale.present()) return {};  // nor a global, then
  const std::string name = std::string(x.name) + "_scale";
  const auto check = [&](std::int64_t outer, std::int64_t tokens) {
    return check_given_scales(name.c_str(), x.scale, asked.scaling, role, asked.format, outer,
                              tokens);
  };
  if (scale_entries(asked.scaling, role, asked.format, 0) < 0) {
    for (std::int64_t i = 0; i < x.scale.shape[0]; ++i) {
      if (Status s = check(i, 0); !s.ok()) return s;
    }
    return {};
  }
  return each_entry(p, role, [&](std::int64_t outer, std::int64_t tokens) -> Status {
    if (Status s = check(outer, tokens); !s.ok() || tokens == 0) return s;
    if (!x.global.present()) return {};
    return check_entry((std::string(x.name) + "_global").c_str(), x.global, outer, all_entries);
  });
}

/// Packed sequences: the scale tensors must reach the longest one, which only the contents tell.
Status check_packed_scale(const Problem& p, Role role, std::int64_t longest) {
  const Operand x = operand_of(p, role);
  const OperandRecipe asked = operand_recipe(p.recipe, role);
  const TensorView& scale = x.scale;
  if (!x.varlen || !scale.present() || asked.format == Format::none) return {};
  const std::int64_t need = scale_entries(asked.scaling, role, asked.format, longest);
  if (need < 0 || scale.shape[2] >= need) return {};
  return invalid(std::string(x.name) + "_scale: extent " + text(scale.shape[2]) +
                 " of dimension 2 is " + "below " + text(need) +
                 ", which the longest sequence of " + text(longest) + " tokens needs");
}

/// Of an f32, f16 or bf16 tensor.
float float_at(const TensorView& view, std::int64_t offset) {
  if (view.format == Format::f32) return static_cast<const float*>(view.data)[offset];
  const std::uint16_t code = static_cast<const std::uint16_t*>(view.data)[offset];
  return view.format == Format::f16 ? formats::F16::decode(code) : formats::Bf16::decode(code);
}

/// A bias that is not finite would hide in every token what its heads hold.
Status check_bias_values(const TensorView& bias) {
  if (!bias.present()) return {};
  for (std::int64_t i = 0; i < bias.shape[0]; ++i) {
    const float value = float_at(bias, i * bias.stride[0]);
    if (std::isfinite(value)) continue;
    return invalid("projection_bias: value " + std::to_string(value) + " at (" + text(i) +
                   ") is not finite");
  }
  return {};
}

}  // namespace

Status check_given_scales(const char* name, const TensorView& scale, const Scaling& scaling,
                          Role role, Format format, std::int64_t outer, std::int64_t tokens) {
  const std::int64_t entries = scale_entries(scaling, role, format, tokens);
  if (entries < 0) return check_entry(name, scale, outer, all_entries);
  return tokens == 0 ? Status() : check_entry(name, scale, outer, entries);
}

Status check_pointers(const Problem& p) {
  for (const AttentionTensor& tensor : all_attention_tensors) {
    const TensorView& view = p.tensors.*tensor.view;
    if (!view.present() || view.data != nullptr) continue;  // who is absent may have any rank
    bool empty = false;
    for (int i = 0; i < view.rank; ++i) empty |= view.shape[i] == 0;
    if (!empty) return invalid(std::string(tensor.name) + ": data pointer is null");
  }
  return {};
}

Status check_contents(const Problem& p) {
  const AttentionTensors& t = p.tensors;
  if (Status s = check_pointers(p); !s.ok()) return s;
  std::int64_t longest_q = p.max_q, longest_k = p.max_k;
  if (Status s = check_cumulative("cu_seqlens_q", t.cu_seqlens_q, p.tokens_q, &longest_q);
      !s.ok()) {
    return s;
  }
  if (Status s = check_cumulative("cu_seqlens_k", t.cu_seqlens_k, p.tokens_k, &longest_k);
      !s.ok()) {
    return s;
  }
  if (Status s = check_used("seqused_q", t.seqused_q, t.cu_seqlens_q, p.max_q); !s.ok()) return s;
  if (Status s = check_used("seqused_k", t.seqused_k, t.cu_seqlens_k, p.max_k); !s.ok()) return s;
  if (Status s = check_pages(p); !s.ok()) return s;
  for (const auto& [i, longest] : {std::pair{2, longest_q}, std::pair{3, longest_k}}) {
    if (p.mask != MaskKind::none && p.mask_shape[i] != 1 && p.mask_shape[i] < longest) {
      return invalid("mask: extent " + text(p.mask_shape[i]) + " is below the longest sequence, " +
                     text(longest));
    }
  }
  for (const auto& [i, longest, block] :
       {std::tuple{2, longest_q, p.block_mask_q}, std::tuple{3, longest_k, p.block_mask_k}}) {
    const std::int64_t extent = p.block_mask_shape[i];
    if (block > 0 && extent != 1 && extent < (longest + block - 1) / block) {
      return invalid("block_mask: extent " + text(extent) + " of blocks of " + text(block) +
                     " tokens is below the longest sequence, " + text(longest));
    }
  }
  for (const Role role : {Role::q, Role::k, Role::v}) {
    if (Status s = check_scale_values(p, role); !s.ok()) return s;
  }
  if (Status s = check_bias_values(t.projection_bias); !s.ok()) return s;
  for (const Role role : all_roles) {
    const std::int64_t longest = role == Role::q ? longest_q : longest_k;
    if (Status s = check_packed_scale(p, role, longest); !s.ok()) return s;
  }
  return {};
}

}  // namespace qattn
