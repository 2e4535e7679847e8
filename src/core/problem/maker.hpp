// How Problem::make turns tensors and options into a Problem: one class, a file a concern.
#pragma once

#include <array>
#include <string>

#include "core/operand.hpp"
#include "core/problem.hpp"

namespace qattn {

/// Positions of the dimensions inside a view.
struct Axes {
  int batch, token, head, channel;  // batch -1: packed
};

class ProblemMaker {
 public:
  ProblemMaker(const AttentionTensors& tensors, const AttentionOptions& options)
      : t_(tensors), o_(options) {}

  Result<Problem> make();

 private:
  // make.cpp
  Status views();
  Status options();
  /// Where a window and causality say the same of keys behind a query's own: such a window ends
  /// there, is a distance to both sides, or hides nothing on its right.
  Status causal_window() const;

  // shapes.cpp
  /// q, k, v and out: present, float or codes, ranks, unit stride.
  Status operands();
  /// Where lengths and heads do not fit, and would in the other layout: that.
  std::string layout_hint() const;
  Status dimensions();
  Status plain_out(const Axes& aq);
  /// The weight, its bias, and what they leave of out's dimensions.
  Status projected_out(const Axes& aq);
  Status sequences();

  // scales.cpp
  Status scales();
  /// One operand's scale tensors against its granularity.
  Status operand_scales(Role role);
  /// A mean that comes with numbers is taken off them instead of their own.
  Status mean_of_numbers(const Operand& x, Format target, Toggle smooth) const;
  Status recipe();

  // masks.cpp
  Status extras();
  Status mask();
  Status block_mask();
  /// Extents and strides of a mask that broadcasts to `full`, aligned right; where `open`, contents
  /// alone tell the extent.
  static Status broadcast(const char* name, const TensorView& view, const std::int64_t (&full)[4],
                          const bool (&open)[4], std::array<std::int64_t, 4>& shape,
                          std::array<std::int64_t, 4>& stride);

  const AttentionTensors& t_;
  const AttentionOptions& o_;
  Problem p_;
};

}  // namespace qattn
