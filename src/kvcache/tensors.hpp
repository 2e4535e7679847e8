// Tensors of the KV cache's calls: their checks, and their rows.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvcache/append.hpp"

namespace qattn::kv {

/// Index of the calling thread in its team.
int thread_index();

/// A tensor in the cache's memory (the host's unless `device` says another) of this format
/// (Format::none: f32, f16 or bf16), shape and unit last stride; extents of -1 are free. Strides
/// may be any where `strided`, else the tensor is dense.
Status check_tensor(const std::string& name, const TensorView& view, Format format,
                    std::initializer_list<std::int64_t> extent, bool strided, Device device = {});

struct NamedTensor {
  const char* name;
  const TensorView* view;
};
/// The first `outputs` of these share no memory with any other of them.
Status check_overlap(std::span<const NamedTensor> tensors, std::size_t outputs);

/// Importance or mass: every element from 0 to most_importance. Its square is a float, too.
inline constexpr float most_importance = 1e15f;
Status check_weights(const std::string& name, const TensorView& view);

/// The sequences are of this cache and differ from each other, the layer exists.
Status check_sequences(const detail::KvCacheData& cache, std::int64_t layer,
                       std::span<const std::int64_t> sequences);

/// append()'s arguments; fills the rows of every sequence.
Status check_append(const detail::KvCacheData& cache, std::int64_t layer,
                    std::span<const std::int64_t> sequences, const KvAppendTensors& tensors,
                    Layout layout, std::vector<Rows>& rows);

}  // namespace qattn::kv
