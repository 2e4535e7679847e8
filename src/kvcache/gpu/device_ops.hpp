// What a backend does for a KV cache in its memory: launches on the caller's stream, which neither
// allocate nor wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kvcache/gpu/append_state.hpp"
#include "qattn/attention.hpp"
#include "qattn/kv_cache.hpp"

namespace qattn::kv {

/// A (B, S, heads, channels) tensor with its axes in any order; strides in elements.
struct DeviceRows {
  const void* data = nullptr;
  Format format = Format::none;
  std::int64_t batch = 0, token = 0, head = 0;
};

struct AppendCall {
  DeviceRows k, v;
  const std::int32_t* slots = nullptr;   ///< [batch]
  const std::int32_t* counts = nullptr;  ///< [batch] or null
  const float* importance = nullptr;     ///< [batch][heads_kv][blocks] or null
  std::int64_t blocks = 0;
  std::int32_t batch = 0, tokens = 0, layer = 0;
};

struct ObserveCall {
  const float* mass = nullptr;  ///< [batch][heads_q][blocks]
  const std::int32_t* slots = nullptr;
  std::int64_t blocks = 0;
  std::int32_t batch = 0, heads_q = 0, layer = 0;
};

struct ImportanceCall {
  const float* values = nullptr;  ///< [heads_kv][blocks]
  std::int64_t blocks = 0;
  std::int32_t slot = 0, layer = 0;
};

/// What DecodeCall is on a CPU. Tensors lie on the cache's device.
struct DeviceDecodeCall {
  const DeviceCache* cache = nullptr;
  std::int64_t layer = 0;
  TensorView slots;  ///< (B) s32: which sequences of the cache; read on the device
  /// q, out, lse, sinks, tree_mask and mass as decode() takes them; mass may have any number of
  /// blocks. Positions come from the cache's lengths when the kernels run; a sequence that is
  /// unknown, in error or shorter than Sq gives NaN and sets the device's error word.
  KvDecodeTensors tensors;
  KvDecodeOptions options;  ///< threads means nothing here
};

/// Slot `to`, which is empty, gets all that `from` holds, in the same pages.
struct ForkCall {
  std::int32_t from = 0, to = 0;
};

/// Forgets tokens [begin, end) of some layers and heads of one slot.
struct ForgetCall {
  std::int32_t slot = 0;
  std::int32_t first_layer = 0, end_layer = 0, first_head = 0, end_head = 0;
  std::int64_t begin = 0, end = 0;
  bool truncates = false;  ///< `begin` becomes the length of layers that are longer
  bool resets = false;     ///< the slot is as good as new, its error word is `error`
  std::uint32_t error = 0;
};

/// Those that return a text say what went wrong with a launch; empty: nothing.
struct DeviceOps {
  /// The current device's sticky error word.
  std::uint32_t* (*error_word)() = nullptr;
  std::string (*init)(const AppendState& state, Stream stream) = nullptr;
  std::string (*forget)(const AppendState& state, const ForgetCall& call, Stream stream) = nullptr;
  std::string (*append)(const AppendState& state, const AppendCall& call, Stream stream) = nullptr;
  std::string (*observe)(const AppendState& state, const ObserveCall& call,
                         Stream stream) = nullptr;
  std::string (*set_importance)(const AppendState& state, const ImportanceCall& call,
                                Stream stream) = nullptr;
  std::string (*fork)(const AppendState& state, const ForkCall& call, Stream stream) = nullptr;
  /// What the kernels cannot do.
  Status (*decode_supports)(const DeviceDecodeCall& call) = nullptr;
  /// Of a supported call, in bytes.
  std::size_t (*decode_workspace)(const DeviceDecodeCall& call) = nullptr;
  Status (*decode)(const DeviceDecodeCall& call, void* workspace, Stream stream) = nullptr;
};

}  // namespace qattn::kv
