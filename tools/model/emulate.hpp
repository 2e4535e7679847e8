// Runs attention kernels in the emulator to count what they do.
#pragma once

#include <string>

#include "model/bound.hpp"
#include "qattn/status.hpp"

namespace qattn::model {

/// Which kernel: the best for Hopper, or the portable one, which GPUs without one of their own run.
enum class Choice { best, portable };

struct Emulation {
  std::string kernel;
  bool quantises = false;  ///< is there a step of quantisation before it?
  Amounts amounts;         ///< of the attention step alone
  double blocks = 0;       ///< thread blocks of it
};

/// The attention step on normally distributed 16-bit tensors, keys not split. Errors: unsupported
/// with the kernels' reasons; internal if the kernel is broken.
Result<Emulation> emulate(const std::string& recipe, const Shape& shape, Choice choice,
                          Block block = {});

struct Prediction {
  std::string recipe, kernel;
  bool quantises = false;
  Shape shape;
  Block block;
  PerTile per_tile;  ///< a tile of block.rows queries
  Bound bound;
};

/// Emulates small sizes and scales to the shape. Where blocks share keys, the combination of one
/// block's parts is counted.
Result<Prediction> predict(const std::string& recipe, const Shape& shape, Choice choice,
                           const Machine& machine);

}  // namespace qattn::model
