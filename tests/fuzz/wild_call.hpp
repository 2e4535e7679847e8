// Calls that are right, nearly right or absurd, built from bytes: no bytes at all give a plain
// valid call, and every byte that is not zero turns something on or breaks something.
#pragma once

#include <string>

#include "fuzz/choices.hpp"
#include "fuzz/memory.hpp"
#include "qattn/qattn.hpp"

namespace qattn::fuzz {

/// Every tensor of a call by name.
struct Member {
  const char* name;
  TensorView AttentionTensors::* view;
  bool output;
};
inline constexpr Member members[] = {
    {"q", &AttentionTensors::q, false},
    {"k", &AttentionTensors::k, false},
    {"v", &AttentionTensors::v, false},
    {"out", &AttentionTensors::out, true},
    {"lse", &AttentionTensors::lse, true},
    {"saturated", &AttentionTensors::saturated, true},
    {"q_scale", &AttentionTensors::q_scale, false},
    {"k_scale", &AttentionTensors::k_scale, false},
    {"v_scale", &AttentionTensors::v_scale, false},
    {"q_global", &AttentionTensors::q_global, false},
    {"k_global", &AttentionTensors::k_global, false},
    {"v_global", &AttentionTensors::v_global, false},
    {"k_mean", &AttentionTensors::k_mean, false},
    {"v_mean", &AttentionTensors::v_mean, false},
    {"sinks", &AttentionTensors::sinks, false},
    {"mask", &AttentionTensors::mask, false},
    {"block_mask", &AttentionTensors::block_mask, false},
    {"alibi_slopes", &AttentionTensors::alibi_slopes, false},
    {"cu_seqlens_q", &AttentionTensors::cu_seqlens_q, false},
    {"cu_seqlens_k", &AttentionTensors::cu_seqlens_k, false},
    {"seqused_q", &AttentionTensors::seqused_q, false},
    {"seqused_k", &AttentionTensors::seqused_k, false},
    {"page_table", &AttentionTensors::page_table, false},
    {"projection", &AttentionTensors::projection, false},
    {"projection_bias", &AttentionTensors::projection_bias, false},
};

/// With `real` memory every tensor that is small enough has memory, else all pointers are null.
struct WildCall {
  WildCall(Choices choices, bool real);

  AttentionTensors tensors;
  AttentionOptions options;
  Memory memory;
  int defects = 0;  ///< deliberate ones

 private:
  void operands(Choices& c);
  void codes(Choices& c, Role role, TensorView& x, TensorView& scale, TensorView& global,
             const TensorView& cu_seqlens);
  void extras(Choices& c);
  void choose_options(Choices& c);
  void break_view(Choices& c);
  void break_option(Choices& c);
  void back(Choices& c, bool real);
  void write_indices(Choices& c);

  std::int64_t batch_ = 1, queries_ = 1, keys_ = 1, heads_q_ = 1, heads_kv_ = 1, page_size_ = 0;
};

struct WildQuantize {
  WildQuantize(Choices choices, bool real);

  QuantizeTensors tensors;
  QuantizeOptions options;
  Memory memory;
  bool backwards = false;  ///< dequantize(): x is the output
};

/// Breaks one field of a view: pointer aside, which belongs to Memory.
void break_field(Choices& c, TensorView& view);

/// Does a message name something ("k: ...", or one kernel a line), as every refusal must?
bool names_something(const std::string& message);

}  // namespace qattn::fuzz
