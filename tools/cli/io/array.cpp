#include "io/array.hpp"

#include <algorithm>
#include <limits>
#include <string>

namespace qattn::io {

namespace {

/// Small tensors get memory too, so that an empty one still has a pointer.
constexpr std::size_t min_capacity = 64;

}  // namespace

std::int64_t Array::count() const {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}

TensorView Array::view() const {
  TensorView view;
  view.data = const_cast<std::byte*>(bytes.data());
  view.format = format;
  view.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = shape[i];
    view.stride[i] = step;
    step *= shape[i];
  }
  return view;
}

Array zeros(Format format, std::vector<std::int64_t> shape) {
  Array array;
  array.format = format;
  const auto size = static_cast<std::size_t>(dense_bytes(format, shape).value());
  array.shape = std::move(shape);
  array.bytes.reserve(std::max(size, min_capacity));
  array.bytes.resize(size);
  return array;
}

Array zeros_like(const TensorView& like) {
  return zeros(like.format, {like.shape.begin(), like.shape.begin() + like.rank});
}

std::optional<std::int64_t> dense_bytes(Format format, const std::vector<std::int64_t>& shape) {
  // In bits, so that sub-byte formats need no special case. A zero extent makes the tensor empty
  // but does not excuse the others: strides are products of them.
  std::int64_t bits = info(format).bits;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    empty = empty || extent == 0;
    if (extent == 0) continue;
    if (bits > std::numeric_limits<std::int64_t>::max() / 8 / extent) return std::nullopt;
    bits *= extent;
  }
  return empty ? 0 : (bits + 7) / 8;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + ")";
}

}  // namespace qattn::io
