#include "core/problem/checks.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <vector>

#include "core/index_tensor.hpp"

namespace qattn {
namespace checks {

Status check_format(const char* name, const TensorView& view,
                    std::initializer_list<Format> allowed) {
  std::string list;
  for (Format format : allowed) {
    if (view.format == format) return {};
    list += (list.empty() ? "" : ", ") + std::string(info(format).name);
  }
  return invalid(std::string(name) + ": format " + std::string(info(view.format).name) +
                 " is not one of " + list);
}

Status check_shape(const char* name, const TensorView& view, const std::int64_t* extent, int rank) {
  if (view.rank == rank && std::equal(extent, extent + rank, view.shape.begin())) return {};
  return invalid(std::string(name) + ": shape " + shape_text(view.shape.data(), view.rank) +
                 " should be " + shape_text(extent, rank));
}

Status check_shape(const char* name, const TensorView& view,
                   std::initializer_list<std::int64_t> extent) {
  return check_shape(name, view, extent.begin(), static_cast<int>(extent.size()));
}

Status check_small(const char* name, const TensorView& view,
                   std::initializer_list<std::int64_t> extent,
                   std::initializer_list<Format> allowed) {
  if (!view.present()) return {};
  if (Status s = check_format(name, view, allowed); !s.ok()) return s;
  return check_shape(name, view, extent);
}

}  // namespace checks

using namespace checks;

bool is_float(Format format) {
  return format == Format::f32 || format == Format::f16 || format == Format::bf16;
}

Status check_index_format(const char* name, const TensorView& view) {
  if (view.format == Format::s32) return {};
  if (view.format != Format::s64) return check_format(name, view, {Format::s32, Format::s64});
  if (view.device.type == DeviceType::cpu) return {};
  return invalid(std::string(name) + ": format s64 lies on " + device_text(view.device) +
                 ", where kernels read s32");
}

std::string shape_text(const std::int64_t* extent, int rank) {
  std::string s = "(";
  for (int i = 0; i < rank; ++i) s += (i ? ", " : "") + text(extent[i]);
  return s + ")";
}

ByteRange byte_range(const TensorView& view) {
  const int bits = info(view.format).bits;
  std::int64_t low = 0, high = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return {};
    const std::int64_t reach = view.stride[i] * (view.shape[i] - 1);
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(view.data);
  return {base + static_cast<std::uintptr_t>(low * bits / 8),
          base + static_cast<std::uintptr_t>(((high + 1) * bits + 7) / 8)};
}

Status check_view(const char* name, const TensorView& view, int rank) {
  const std::string who = name;
  if (info(view.format).bits == 0) {
    return invalid(who + ": format " + text(static_cast<int>(view.format)) + " is unknown");
  }
  if (view.rank < 0 || view.rank > max_rank || (rank >= 0 && view.rank != rank)) {
    return invalid(who + ": rank " + text(view.rank) + " should be " +
                   (rank >= 0 ? text(rank) : "0 to " + text(max_rank)));
  }
  const int bits = info(view.format).bits;
  // Offsets are summed in bits and in magnitude, which bounds elements, bytes and pointers at once.
  std::int64_t total = 1, reach = 1;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] < 0) {
      return invalid(who + ": extent " + text(view.shape[i]) + " of dimension " + text(i) +
                     " is negative");
    }
    std::int64_t span = 0;
    const std::int64_t steps = std::max<std::int64_t>(view.shape[i] - 1, 0);
    if (view.stride[i] == std::numeric_limits<std::int64_t>::min() ||
        __builtin_mul_overflow(std::abs(view.stride[i]), steps, &span) ||
        __builtin_add_overflow(reach, span, &reach) ||
        __builtin_mul_overflow(total, std::max<std::int64_t>(view.shape[i], 1), &total)) {
      return invalid(who + ": shape " + shape_text(view.shape.data(), view.rank) +
                     " with its strides overflows 64-bit offsets");
    }
  }
  if (reach > std::numeric_limits<std::int64_t>::max() / 64 ||
      total > std::numeric_limits<std::int64_t>::max() / 64) {
    return invalid(who + ": shape " + shape_text(view.shape.data(), view.rank) +
                   " with its strides overflows 64-bit offsets");
  }
  if (bits < 8) {
    const int per_unit = bits == 3 ? 8 : 8 / bits;
    for (int i = 0; i < view.rank; ++i) {
      const bool last = i == view.rank - 1;
      if (last ? view.shape[i] % per_unit != 0 : view.stride[i] % per_unit != 0) {
        return invalid(who + ": " +
                       (last ? "extent " + text(view.shape[i]) : "stride " + text(view.stride[i])) +
                       " of dimension " + text(i) + " is not a multiple of " + text(per_unit) +
                       " packed " + std::string(info(view.format).name) + " codes");
      }
    }
  }
  if (view.data != nullptr && bits > 8 &&
      reinterpret_cast<std::uintptr_t>(view.data) % static_cast<unsigned>(bits / 8) != 0) {
    return invalid(who + ": address is not aligned to its " + text(bits / 8) + "-byte elements");
  }
  return {};
}

Status check_no_overlap(const char* name, const TensorView& view) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // |stride|, extent
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return {};  // nothing to overlap; numpy gives such arrays stride 0
    if (view.shape[i] > 1) dims.emplace_back(std::abs(view.stride[i]), view.shape[i]);
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 1;
  for (const auto& [stride, extent] : dims) {
    if (stride < reach) {
      return invalid(std::string(name) + ": stride " + text(stride) +
                     " makes elements overlap; an output needs distinct elements");
    }
    reach = stride * (extent - 1) + reach;
  }
  return {};
}

Status check_size(const char* name, std::int64_t batch, std::int64_t heads, std::int64_t tokens) {
  constexpr std::int64_t most = std::int64_t{1} << 48, tile = 128;
  std::int64_t rows = 0;
  if (__builtin_add_overflow(tokens, tile, &rows) ||
      __builtin_mul_overflow(rows, std::max<std::int64_t>(batch, 1), &rows) ||
      __builtin_mul_overflow(rows, std::max<std::int64_t>(heads, 1), &rows) || rows > most) {
    return invalid(std::string(name) + ": batch " + text(batch) + " x heads " + text(heads) +
                   " x tokens " + text(tokens) + " is over 2^48 rows");
  }
  return {};
}

}  // namespace qattn
