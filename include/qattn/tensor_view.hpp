// A non-owning view of a tensor: the only way in which data enters or leaves qattn.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "qattn/format.hpp"

namespace qattn {

inline constexpr int max_rank = 5;

enum class DeviceType : std::int32_t { cpu = 1, cuda = 2, hip = 10 };  // DLPack's numbers

struct Device {
  DeviceType type = DeviceType::cpu;
  std::int32_t index = 0;
  bool operator==(const Device&) const = default;
};

/// Pointer, format, shape and strides, all counted in elements (not bytes). Strides may be zero or
/// negative; attention requires stride 1 in the last dimension. In a packed sub-byte format every
/// stride but the last must step over whole bytes. Views given as inputs are never written.
struct TensorView {
  void* data = nullptr;
  Format format = Format::none;
  std::int32_t rank = 0;
  std::array<std::int64_t, max_rank> shape{};
  std::array<std::int64_t, max_rank> stride{};
  Device device{};

  /// Is there a tensor at all? Optional arguments are default-constructed views.
  bool present() const { return format != Format::none; }

  /// A dense row-major view.
  static TensorView dense(void* data, Format format, std::initializer_list<std::int64_t> shape) {
    TensorView view;
    view.data = data;
    view.format = format;
    for (std::int64_t extent : shape) {
      if (view.rank == max_rank) break;
      view.shape[view.rank++] = extent;
    }
    std::int64_t step = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.stride[i] = step;
      step *= view.shape[i];
    }
    return view;
  }
  /// The same, of memory that qattn only reads.
  static TensorView dense(const void* data, Format format,
                          std::initializer_list<std::int64_t> shape) {
    return dense(const_cast<void*>(data), format, shape);
  }
  bool operator==(const TensorView&) const = default;  ///< the same memory, seen the same way
};

}  // namespace qattn
