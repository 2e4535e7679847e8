// The only validator. Problem::make turns tensors and options into facts that kernels may rely on.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "qattn/attention.hpp"

namespace qattn {

enum class MaskKind : std::int32_t { none, boolean, additive };

/// A tensor of tokens as (batch, token, head, channel), whatever its layout was. Element (b, s, h,
/// d) lies at data + b * batch + s * token + h * head + d; in packed and paged tensors `batch` is
/// the stride of a page, or 0.
struct TokenTensor {
  void* data = nullptr;
  Format format = Format::none;
  std::int64_t batch = 0, token = 0, head = 0;  ///< strides in elements
};

struct Problem {
  Recipe recipe;  ///< as asked; plan() resolves what is automatic
  std::int64_t batch = 0, heads_q = 0, heads_kv = 0;
  std::int64_t max_q = 0, max_k = 0;        ///< longest possible sequence (from shapes)
  std::int64_t tokens_q = 0, tokens_k = 0;  ///< rows of q and k in memory, all sequences
  int d = 0, dv = 0;
  bool varlen_q = false, varlen_k = false, paged = false;
  std::int64_t pages = 0, page_size = 0, pages_per_sequence = 0;
  bool q_codes = false, k_codes = false, v_codes = false;  ///< operand comes quantised

  float softmax_scale = 0;
  std::int64_t window_left = -1, window_right = -1;  ///< causal is window_right = 0
  float softcap = 0;
  MaskKind mask = MaskKind::none;
  std::array<std::int64_t, 4> mask_shape{},
      mask_stride{};                                ///< (B, Hq, Sq, Sk); stride 0: broadcast
  std::int64_t block_mask_q = 0, block_mask_k = 0;  ///< tokens a block; 0: no block mask
  std::array<std::int64_t, 4> block_mask_shape{},
      block_mask_stride{};  ///< (B, Hq, query block, key block)
  int threads = 0;
  bool validate = false;
  ScoreFunction score_function;
  MaskFunction mask_function;

  TokenTensor q, k, v, out;  ///< out, projected: stride 0 between heads
  AttentionTensors tensors;  ///< the views as given

  /// May query i of the head see key j at all? Only with a block mask in host memory.
  bool block_visible(std::int64_t b, std::int64_t head, std::int64_t i, std::int64_t j) const {
    const auto& st = block_mask_stride;
    return static_cast<const std::uint8_t*>(
               tensors.block_mask.data)[b * st[0] + head * st[1] + i / block_mask_q * st[2] +
                                        j / block_mask_k * st[3]] != 0;
  }

  /// Is out the projection of the heads?
  bool projects() const { return tensors.projection.present(); }
  /// Do scales of Q and K come from their rows as they are quantised here?
  bool scales_own_rows() const {
    return !q_codes && !k_codes && !tensors.q_scale.present() && !tensors.k_scale.present();
  }
  /// May heads see other keys than each other?
  bool masks_vary_by_head() const {
    return mask_function || (block_mask_q > 0 && block_mask_stride[1] != 0) ||
           (mask != MaskKind::none && mask_stride[1] != 0);
  }

  std::int64_t group() const { return heads_q / heads_kv; }
  Device device() const { return tensors.q.device; }

  /// Checks shapes, strides, formats, devices, aliasing and options; never the contents.
  static Result<Problem> make(const AttentionTensors& tensors, const AttentionOptions& options);

  /// Every fact but the addresses, one line each.
  std::string describe() const;
};

struct ScaleShape {
  int rank = 0;
  std::array<std::int64_t, max_rank> extent{};
};

/// Layout of a scale tensor as listed at Granularity: the one home of its shape and its addresses.
/// `outer` is the batch entry, or the page of paged K and V; `token` counts inside that.
struct ScaleMap {
  Scaling scaling;
  Role role = Role::q;
  int group = 0;  ///< of the format; 0: free granularity
  bool paged = false;

  ScaleShape shape(std::int64_t outer, std::int64_t heads, std::int64_t tokens,
                   std::int64_t channels) const;
  /// Element offset of the scale that serves (token, channel).
  std::int64_t offset(const TensorView& scale, std::int64_t outer, std::int64_t head,
                      std::int64_t token, int channel) const;
};

std::string shape_text(const std::int64_t* extent, int rank);
std::string device_text(Device device);  ///< "cpu", "cuda:0"

/// Is it a device that qattn knows, and are the options that only CPUs have left alone there?
Status check_device(const char* name, Device device, int threads);

/// CPU threads of any call: 0 (the default) to 4096.
Status check_threads(int threads);

/// Checks a view by itself: rank, extents, overflow of offsets and bytes, alignment, packed
/// strides.
Status check_view(const char* name, const TensorView& view, int rank);

/// An output must give every element its own place.
Status check_no_overlap(const char* name, const TensorView& view);

/// Views with stride 0 have any extent without memory, but workspaces and scales are of all rows:
/// up to this bound their sizes, a few KiB a row, cannot overflow 64 bits.
Status check_size(const char* name, std::int64_t batch, std::int64_t heads, std::int64_t tokens);

/// Is the granularity possible for this operand and format, with sane block sizes?
Status check_scaling(const char* name, const Scaling& scaling, Role role, Format format);

/// First and one-past-last byte that a view touches.
struct ByteRange {
  std::uintptr_t begin = 0, end = 0;
};
ByteRange byte_range(const TensorView& view);

/// ScaleGroups::joins() and by_token() of a scaling.
bool joins_groups(const Scaling& s, Role role);
bool scaled_by_token(const Scaling& s, Role role);

/// The scaling with automatic fields replaced by the defaults that every backend shares: per_token
/// (V: per_channel, or per_token for s8), blocks of 128 tokens, warps of 16 rows.
Scaling resolve_scaling(const Scaling& scaling, Role role, Format format);

bool is_float(Format format);  ///< f32, f16 or bf16

/// Scales that the caller gives: those of the `tokens` tokens of entry `outer` (of the first
/// dimension) are positive and finite (coded ones: not negative, not NaN). In host memory.
Status check_given_scales(const char* name, const TensorView& scale, const Scaling& scaling,
                          Role role, Format format, std::int64_t outer, std::int64_t tokens);

/// No tensor that is there and has elements may lack memory.
Status check_pointers(const Problem& problem);

/// check_pointers(), and the contents of index tensors and given scales, which must lie in host
/// memory.
Status check_contents(const Problem& problem);

}  // namespace qattn
