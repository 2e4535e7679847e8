#include "support/tensor.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "support/numbers.hpp"

namespace qattn::test {
namespace {

constexpr std::int64_t guard_bytes = 256;
constexpr std::uint8_t sentinel = 0xFF;

}  // namespace

Tensor::Tensor(Format format, const Index& shape, Strides strides, bool memory) {
  view_.format = format;
  view_.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t step = 1, lowest = 0, highest = 0;
  for (int d = view_.rank - 1; d >= 0; --d) {
    view_.shape[d] = shape[d];
    const bool negative = strides == Strides::reversed && d + 1 < view_.rank;
    view_.stride[d] = negative ? -step : step;
    const std::int64_t reach = std::max<std::int64_t>(shape[d] - 1, 0) * view_.stride[d];
    (negative ? lowest : highest) += reach;
    step *= std::max<std::int64_t>(shape[d], 1);
    if (strides != Strides::dense) step += d + 1 == view_.rank ? 3 : step / shape[d] * 2 + 1;
    if (format == Format::b1) step = (step + 7) / 8 * 8;  // rows are whole bytes
  }
  if (!memory) return;
  const std::int64_t shift = strides == Strides::dense ? 0 : format == Format::b1 ? 8 : 1;
  allocate(highest - lowest + 1 + shift);
  origin_ = guard_bytes + (shift - lowest) * info(format).bits / 8;
  view_.data = bytes_.data() + origin_;
}

Tensor::Tensor(const TensorView& like) {
  view_ = like;
  std::int64_t step = 1;
  for (int d = view_.rank - 1; d >= 0; --d) {
    view_.stride[d] = step;
    step *= view_.shape[d];
  }
  allocate(step);
  origin_ = guard_bytes;
  view_.data = bytes_.data() + origin_;
}

void Tensor::allocate(std::int64_t elements) {
  const std::int64_t bytes = (elements * info(view_.format).bits + 7) / 8;
  bytes_.assign(static_cast<std::size_t>(bytes + 2 * guard_bytes), sentinel);
}

void Tensor::clear() { std::fill(bytes_.begin(), bytes_.end(), sentinel); }

std::int64_t Tensor::count() const {
  std::int64_t n = 1;
  for (int d = 0; d < view_.rank; ++d) n *= view_.shape[d];
  return n;
}

std::int64_t Tensor::element(const Index& index) const {
  std::int64_t offset = 0;
  for (std::size_t d = 0; d < index.size(); ++d) offset += index[d] * view_.stride[d];
  return offset;
}

const std::uint8_t* Tensor::address(const Index& index) const {
  return bytes_.data() + origin_ + (element(index) * info(view_.format).bits >> 3);
}

double Tensor::get(const Index& index) const {
  const std::uint8_t* at = address(index);
  if (view_.format == Format::f32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  if (view_.format == Format::s32) {
    std::int32_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  if (view_.format == Format::s64) {
    std::int64_t value;
    std::memcpy(&value, at, sizeof value);
    return static_cast<double>(value);
  }
  if (info(view_.format).bits == 16) {
    std::uint16_t code;
    std::memcpy(&code, at, sizeof code);
    return decode(view_.format, code);
  }
  return decode(view_.format, *at);
}

void Tensor::set(const Index& index, double value) {
  auto* at = const_cast<std::uint8_t*>(address(index));
  if (view_.format == Format::f32) {
    const float v = static_cast<float>(value);
    std::memcpy(at, &v, sizeof v);
  } else if (view_.format == Format::s32) {
    const auto v = static_cast<std::int32_t>(value);
    std::memcpy(at, &v, sizeof v);
  } else if (info(view_.format).bits == 16) {
    const double r = round_real(value, view_.format);
    const std::uint16_t code = view_.format == Format::f16 ? encode_f16(r) : encode_bf16(r);
    std::memcpy(at, &code, sizeof code);
  } else if (view_.format == Format::b8) {
    *at = value != 0;
  } else if (view_.format == Format::b1) {
    const int bit = 1 << (element(index) & 7);
    *at = static_cast<std::uint8_t>(value != 0 ? *at | bit : *at & ~bit);
  } else {
    std::abort();  // codes come from quantize(), never from here
  }
}

double Tensor::flat(std::int64_t n) const {
  if (info(view_.format).bits == 4) {
    const std::uint8_t pair = bytes_[static_cast<std::size_t>(origin_ + n / 2)];
    return decode(view_.format, n % 2 ? pair >> 4 : pair & 0xF);
  }
  Index index(static_cast<std::size_t>(view_.rank));
  for (int d = view_.rank - 1; d >= 0; --d) {
    index[d] = n % view_.shape[d];
    n /= view_.shape[d];
  }
  return get(index);
}

bool Tensor::guards_intact() const {
  const int bits = info(view_.format).bits;
  std::vector<std::uint8_t> outside(bytes_.size(), 1);
  if (bits < 8) {
    std::fill_n(&outside[static_cast<std::size_t>(origin_)], (count() * bits + 7) / 8, 0);
  } else {
    // By rows of the last dimension, whose elements are neighbours as a rule.
    const int last = view_.rank - 1;
    const std::int64_t length = view_.shape[last], step = view_.stride[last] * bits / 8;
    Index index(static_cast<std::size_t>(view_.rank), 0);
    for (std::int64_t row = 0; length > 0 && row < count() / length; ++row) {
      std::int64_t rest = row;
      for (int d = last - 1; d >= 0; --d) {
        index[d] = rest % view_.shape[d];
        rest /= view_.shape[d];
      }
      std::uint8_t* at = &outside[static_cast<std::size_t>(address(index) - bytes_.data())];
      const bool whole = step == bits / 8;
      const std::int64_t runs = whole ? 1 : length, size = (whole ? length : 1) * bits / 8;
      for (std::int64_t n = 0; n < runs; ++n) std::fill_n(at + n * step, size, 0);
    }
  }
  int changed = 0;
  for (std::size_t n = 0; n < bytes_.size(); ++n) changed |= outside[n] & (bytes_[n] != sentinel);
  return changed == 0;
}

}  // namespace qattn::test
