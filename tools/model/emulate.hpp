// Runs attention kernels in the emulator to count what they do.
#pragma once

#include <map>
#include <string>
#include <tuple>

#include "model/bound.hpp"
#include "qattn/status.hpp"

namespace qattn::model {

/// Which kernel: the best for the machine, or the portable one, which GPUs without one of their own
/// run.
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
                          Block block = {}, const Machine& machine = h200());

/// What compiled kernels execute for a tile of 128 x 128 scores, which operators of C++ are part
/// of: by architecture, kernel, recipe and head dimension.
using Compiled = std::map<std::tuple<int, std::string, std::string, int>, Amounts>;

struct Prediction {
  std::string recipe, kernel;
  bool quantises = false;
  Shape shape;
  Block block;
  PerTile per_tile;       ///< a tile of block.rows queries
  bool compiled = false;  ///< are instructions of machine code in it?
  Bound bound;
};

/// Emulates small sizes and scales to the shape. Where blocks share keys, the combination of one
/// block's parts is counted. Of `compiled` kernels no unit has less to do than it says.
Result<Prediction> predict(const std::string& recipe, const Shape& shape, Choice choice,
                           const Machine& machine, const Compiled& compiled = {});

}  // namespace qattn::model
