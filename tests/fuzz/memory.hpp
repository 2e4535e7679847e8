// Real memory for wild views: exactly as many bytes as a view reaches, between guards.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "qattn/tensor_view.hpp"

namespace qattn::fuzz {

/// A view that is larger than this, in bytes or in elements, gets a null pointer: what such a call
/// must do is refuse it.
inline constexpr std::int64_t most_bytes = 1 << 16, most_elements = 1 << 14;

/// What a tensor is filled with.
enum class Fill {
  tame,     ///< floats of magnitude 4, codes of any value
  wild,     ///< any bits: NaN, infinities, denormals
  scale,    ///< one positive value
  zero,     ///< index tensors, whose contents store() writes
  boolean,  ///< 0 and 1
};

class Memory {
 public:
  Memory() = default;
  Memory(Memory&&) = default;
  ~Memory();

  /// Points `view` to memory of its own, or to null where it is malformed or too large.
  /// `skew`: bytes that the pointer is moved from its alignment.
  void back(const char* name, TensorView& view, bool output, Fill fill, std::uint64_t seed,
            int skew = 0);

  /// Writes element `i` of an s32 vector, or (i, j) of a matrix, if the view has it.
  static void store(const TensorView& view, std::int64_t i, std::int64_t j, std::int32_t value);

  /// Ends the writing of contents: from here on every change is the call's.
  void freeze();

  /// What a finished call has written that it must not; empty if nothing.
  std::string violation(bool refused);

 private:
  struct Block {
    std::string name;
    TensorView view;
    bool output;
    std::int64_t payload;  ///< bytes between the guards
    std::unique_ptr<std::uint8_t[]> bytes;
    std::vector<std::uint8_t> before;
    std::uint8_t* begin;  ///< of the payload; aligned but for the skew
  };
  static std::vector<bool> written(const Block& block);

  std::vector<Block> blocks_;
};

/// Does `view` describe memory at all, and little enough to be allocated?
bool small_enough(const TensorView& view);

}  // namespace qattn::fuzz
