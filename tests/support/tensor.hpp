// A tensor that owns its memory, in any format and with any strides, between guard bytes. All bytes
// start as 0xFF: NaN in every float format, so that whatever a kernel reads beside the view poisons
// its result, and a sentinel that shows whatever it writes there.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "qattn/tensor_view.hpp"

namespace qattn::test {

/// dense; odd: gaps after every row, odd strides, an odd first element; reversed: the same with
/// negative strides in every dimension but the last.
enum class Strides { dense, odd, reversed };

/// Up to max_rank numbers in place: tests make one for every element they touch.
class Index {
 public:
  Index() = default;
  explicit Index(std::size_t count, std::int64_t value = 0) : count_(count) {
    for (std::size_t i = 0; i < count; ++i) values_[i] = value;
  }
  Index(std::initializer_list<std::int64_t> values) {
    for (const std::int64_t v : values) push_back(v);
  }
  Index(const std::vector<std::int64_t>& values) {
    for (const std::int64_t v : values) push_back(v);
  }
  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  void push_back(std::int64_t v) { values_.at(count_++) = v; }
  std::int64_t& operator[](std::size_t i) { return values_[i]; }
  std::int64_t operator[](std::size_t i) const { return values_[i]; }
  std::int64_t& back() { return values_[count_ - 1]; }
  std::int64_t back() const { return values_[count_ - 1]; }
  std::int64_t* begin() { return values_.data(); }
  std::int64_t* end() { return values_.data() + count_; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + count_; }

 private:
  std::array<std::int64_t, 8> values_{};
  std::size_t count_ = 0;
};

class Tensor {
 public:
  Tensor() = default;
  /// Without `memory` a view alone, as plan() takes it, which nobody reads or writes.
  Tensor(Format format, const Index& shape, Strides strides = Strides::dense, bool memory = true);
  /// Dense storage of the shape and format of `like` (an answer of quantize_shapes()).
  explicit Tensor(const TensorView& like);
  Tensor(Tensor&&) = default;  // moving keeps the memory where view() points; copying would not
  Tensor& operator=(Tensor&&) = default;

  bool present() const { return view_.present(); }
  const TensorView& view() const { return view_; }

  /// Elements of unpacked formats as numbers; set() rounds.
  double get(const Index& index) const;
  void set(const Index& index, double value);
  /// Element `n` in row-major order of a dense tensor, packed formats included.
  double flat(std::int64_t n) const;
  std::int64_t count() const;

  /// Every byte becomes the sentinel again.
  void clear();
  /// The bytes as they are now; unchanged() compares with them.
  void freeze() { frozen_ = bytes_; }
  bool unchanged() const { return bytes_ == frozen_; }
  /// Do all bytes outside the view's elements still hold the sentinel?
  bool guards_intact() const;
  const std::vector<std::uint8_t>& bytes() const { return bytes_; }
  std::vector<std::uint8_t>& bytes() { return bytes_; }

 private:
  void allocate(std::int64_t elements);
  std::int64_t element(const Index& index) const;
  const std::uint8_t* address(const Index& index) const;

  std::vector<std::uint8_t> bytes_, frozen_;
  TensorView view_;
  std::int64_t origin_ = 0;  ///< byte of the element with index 0
};

}  // namespace qattn::test
