// What a backend does for a KV cache in its memory: launches on the caller's stream, which neither
// allocate nor wait.
#pragma once

#include <cstdint>
#include <string>

#include "kvcache/gpu/append_state.hpp"
#include "qattn/attention.hpp"

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

/// Forgets tokens [begin, end) of some layers and heads of one slot.
struct ForgetCall {
  std::int32_t slot = 0;
  std::int32_t first_layer = 0, end_layer = 0, first_head = 0, end_head = 0;
  std::int64_t begin = 0, end = 0;
  bool truncates = false;  ///< `begin` becomes the length of layers that are longer
  bool resets = false;     ///< the slot is as good as new, its error word is `error`
  std::uint32_t error = 0;
};

/// Each returns what went wrong with a launch; empty: nothing.
struct DeviceOps {
  /// The current device's sticky error word.
  std::uint32_t* (*error_word)() = nullptr;
  std::string (*init)(const AppendState& state, Stream stream) = nullptr;
  std::string (*forget)(const AppendState& state, const ForgetCall& call, Stream stream) = nullptr;
  std::string (*append)(const AppendState& state, const AppendCall& call, Stream stream) = nullptr;
  std::string (*observe)(const AppendState& state, const ObserveCall& call,
                         Stream stream) = nullptr;
};

}  // namespace qattn::kv
