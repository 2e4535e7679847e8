// Attention operands in every kind of storage, prepared by the emulated kernels, and what the CPU's
// quantize() makes of the same tokens.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/operand/prepare.hpp"
#include "qattn/quantize.hpp"

namespace qattn::encode_test {

enum class Storage { dense, packed, paged, strided, unaligned };

struct CaseOptions {
  Storage storage = Storage::dense;
  Layout layout = Layout::bshd;
  Format input = Format::bf16;
  bool used = false;                  ///< seqused (always with pages)
  std::vector<std::int64_t> lengths;  ///< of the sequences, queries and keys alike
  int heads_q = 2, heads_kv = 1, d = 64, dv = 64;
  std::int64_t page_size = 16;
  float shift = 0.5f;  ///< mean of the values
  Recipe recipe;       ///< resolved
  bool dot_mean = false;
  std::uint32_t seed = 1;
  /// Tokens of all sequences and heads that hold NaN (even) or Inf (odd), by role.
  std::array<std::vector<std::int64_t>, 3> bad;
  bool given_scales[3] = {};  ///< static scales
  bool given_codes[3] = {};
  bool saturated = false;
  bool ties = false;  ///< given scales are 2^-6, and some values 127.5 times that
  kernels::KeyOrder key_order = kernels::KeyOrder::natural;
};

/// Tensors with everything that no kernel may read filled with NaN (or code 0x7f).
class Case {
 public:
  explicit Case(const CaseOptions& options);

  const CaseOptions& options() const { return o_; }
  std::int64_t batch() const { return static_cast<std::int64_t>(o_.lengths.size()); }
  std::int64_t length(std::int64_t b) const { return o_.lengths[static_cast<std::size_t>(b)]; }
  int channels(Role r) const { return r == Role::v ? o_.dv : o_.d; }
  int heads(Role r) const { return r == Role::q ? o_.heads_q : o_.heads_kv; }
  Format format(Role r) const { return r == Role::v ? o_.recipe.v : o_.recipe.qk; }
  /// What the channels are padded to.
  int padded(Role r) const;
  /// What is prepared: operands that do not stay in 16 bits.
  kernels::PrepareNeeds needs() const;
  /// Value of an element as the operand's format holds it (codes: undefined).
  float value(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const;
  void put_value(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c, float value);
  std::uint8_t code(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const;
  /// Given scale of a token's channel.
  float given_scale(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const;
  bool is_bad(Role r, std::int64_t s) const;
  /// Bad, or a key that shares a given scale with a bad one of its tile of 64.
  bool is_spoiled(Role r, std::int64_t b, std::int64_t s) const;

  /// Does the kernel without detours serve the operand?
  bool is_plain(Role r) const;
  /// Runs the emulated kernels; empty, or what went wrong.
  std::string prepare();

  /// Everything that the kernels wrote.
  std::span<const std::uint8_t> workspace() const;

  kernels::Prepared out;
  kernels::PrepareLayout layout;
  std::vector<std::int64_t> saturated = {-1, -1, -1};
  AttentionTensors tensors;
  AttentionOptions attention;

  std::vector<std::int32_t>& page_table() { return pages_; }
  std::vector<std::int32_t>& cu_seqlens() { return cu_; }
  std::vector<std::int32_t>& seqused() { return used_; }

  /// Number of a sequence's first block of `size` tokens, in tables of all sequences.
  std::int64_t first_block(Role r, std::int64_t b, std::int64_t size) const;
  std::int64_t first_slot(Role r, std::int64_t b) const { return 64 * first_block(r, b, 64); }

 private:
  struct Operand {
    std::vector<std::uint8_t> bytes;
    TensorView view;
    std::int64_t batch = 0, token = 0, head = 0;  ///< strides in elements
    std::uint8_t* data = nullptr;
    int size = 2;
    std::vector<float> scales;
    TensorView scale_view;
  };
  void build(Role r);
  void build_scales(Role r);
  std::int64_t element(Role r, std::int64_t b, std::int64_t h, std::int64_t s, int c) const;

  CaseOptions o_;
  std::int64_t longest_ = 0, begin_total_ = 0;
  std::vector<std::int32_t> cu_, used_, pages_;
  std::int64_t pages_per_sequence_ = 0, page_count_ = 0;
  Operand operand_[3];
  std::vector<float> out_;
  std::vector<std::uint8_t> workspace_;
};

/// What quantize() on the CPU says of the existing tokens of one operand, as packed tokens.
struct Expected {
  std::vector<std::uint8_t> codes;  ///< [token][head][channel]
  std::vector<float> scale, mean;
  QuantizeShapes shapes;
  std::vector<std::int64_t> begin;
  std::string error;

  std::uint8_t code(const Case& c, Role r, std::int64_t b, std::int64_t h, std::int64_t s,
                    int channel) const;
  float scale_of(const Case& c, Role r, std::int64_t b, std::int64_t h, std::int64_t s,
                 int channel) const;
};
/// Bad tokens of V are zeros there.
Expected expect(const Case& c, Role r);

}  // namespace qattn::encode_test
