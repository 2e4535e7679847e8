// Arguments of the append kernels.
#pragma once

#include "kernels/operand/input_kind.hpp"
#include "kvcache/gpu/append_state.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// New rows: (B, S, heads, channels) in any order, channels side by side. Strides in elements.
struct NewRows {
  const void* data = nullptr;
  InputKind kind = InputKind::f16;
  std::int64_t batch = 0, token = 0, head = 0;

  QATTN_DEVICE std::int64_t row(std::int64_t b, std::int64_t head_index, std::int64_t s) const {
    return b * batch + head_index * head + s * token;
  }
};

struct AppendParams {
  kv::AppendState state;
  NewRows k, v;
  const std::int32_t* slots = nullptr;   ///< [batch] or null: `slot` alone, without rows
  const std::int32_t* counts = nullptr;  ///< [batch] rows that there are, or null: `tokens` each
  const float* importance = nullptr;     ///< [batch][heads][blocks] or null
  std::int64_t blocks = 0;
  std::int32_t batch = 0, tokens = 0, layer = 0;
  std::int32_t slot = 0;  ///< which the budget allows fewer bytes now; what fails leaves it alone

  QATTN_HD bool shortens() const { return slots == nullptr; }
};

/// Probability mass on blocks, [batch][heads_q][blocks].
struct ObserveParams {
  kv::AppendState state;
  const float* mass = nullptr;
  std::int64_t blocks = 0;
  const std::int32_t* slots = nullptr;
  std::int32_t batch = 0, heads_q = 0, layer = 0;
};

/// What is told of the pages of one (slot, layer), [heads_kv][blocks].
struct ImportanceParams {
  kv::AppendState state;
  const float* values = nullptr;
  std::int64_t blocks = 0;
  std::int32_t slot = 0, layer = 0;
};

/// By one thread that has refused something: the host asks the device, not every slot.
QATTN_DEVICE void set_device_error(const kv::AppendState& state) {
  if (state.device_error == nullptr) return;
  isa::atomic_or_global(state.device_error, std::uint32_t{kv::device_error_bit});
}

/// Structures in global memory move as words.
template <class T>
QATTN_DEVICE T load_struct(const T* from) {
  static_assert(sizeof(T) % 4 == 0 && alignof(T) >= 4);
  constexpr int words = sizeof(T) / 4;
  std::uint32_t w[words];
#pragma unroll
  for (int i = 0; i < words; ++i) {
    w[i] = isa::load_global(reinterpret_cast<const std::uint32_t*>(from) + i);
  }
  T value;
  __builtin_memcpy(&value, w, sizeof value);
  return value;
}
template <class T>
QATTN_DEVICE void store_struct(T* to, const T& value) {
  constexpr int words = sizeof(T) / 4;
  std::uint32_t w[words];
  __builtin_memcpy(w, &value, sizeof value);
#pragma unroll
  for (int i = 0; i < words; ++i) {
    isa::store_global(reinterpret_cast<std::uint32_t*>(to) + i, w[i]);
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
