// Calls that are right, nearly right or absurd, built from bytes: no bytes at all give a plain
// valid call, and every byte that is not zero turns something on or breaks something.
#pragma once

#include <string>

#include "fuzz/choices.hpp"
#include "fuzz/memory.hpp"
#include "qattn/qattn.hpp"

namespace qattn::fuzz {

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
