// Python objects to the types of include/qattn and back. Nothing here computes or decides.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn::python {

namespace nb = nanobind;

/// A Status on its way to Python, where it becomes the class of qattn._errors for its code.
class StatusError : public std::exception {
 public:
  explicit StatusError(Status status) : status_(std::move(status)) {}
  const char* what() const noexcept override { return status_.message().c_str(); }
  Code code() const { return status_.code(); }

 private:
  Status status_;
};

void register_errors();

/// Throws StatusError unless the status is ok.
void check(Status status);

/// Every `word` of a text that stands by itself, not in a longer name or a path, becomes `other`.
void rename_word(std::string& text, std::string_view word, std::string_view other);
/// A text of attention() as Python has it: arguments are named as there.
std::string attention_text(std::string text);
/// check() of attention() and what takes its arguments.
void attention_check(const Status& status);

template <class T>
T check(Result<T> result) {
  if (!result.ok()) throw StatusError(result.status());
  return std::move(*result);
}

/// Views of Python arrays, which stay referenced as long as this object lives. Must be destroyed
/// with the GIL held.
class Views {
 public:
  /// `entry` is (array, format name) for host memory; (address, format name, shape, strides, device
  /// type, device index) for memory of a device, which the caller keeps; (None, format name, shape,
  /// device type, device index) for a tensor without memory. Arrays of packed formats hold bytes;
  /// their last dimension and strides are widened to elements.
  /// Throws StatusError (invalid_argument) if the array cannot be viewed without a copy.
  TensorView add(const char* name, nb::handle entry, bool writable);

 private:
  std::vector<nb::ndarray<nb::ro>> inputs_;
  std::vector<nb::ndarray<>> outputs_;
};

/// The tensors of attention() from {field name: entry}; unknown names are refused.
AttentionTensors attention_tensors(const nb::dict& entries, Views& views);

/// (granularity, block, warp); granularity "automatic" and sizes 0 are the defaults.
using ScalingTuple = std::tuple<std::string, std::int64_t, std::int64_t>;
/// (name, format of Q and K, of P, of V); "none" as in Recipe.
using RecipeTuple = std::tuple<std::string, std::string, std::string, std::string>;

/// What static scales were made for: a recipe and its toggles smooth_k, smooth_q, smooth_v, rotate
/// and balance_k.
using MadeForTuple = std::tuple<RecipeTuple, std::array<std::optional<bool>, 5>>;

Format format_from(const char* what, const std::string& name);
Layout layout_from(const std::string& name);
Role role_from(const std::string& name);
Scaling scaling_from(const char* operand, const ScalingTuple& tuple);
Toggle toggle_from(std::optional<bool> value);
/// A recipe by names of formats; `what` names it in an error.
Recipe recipe_from(const char* what, const RecipeTuple& tuple,
                   const std::array<std::optional<bool>, 5>& toggles);
std::optional<Recipe> made_for_from(const std::optional<MadeForTuple>& tuple);
RecipeTuple to_tuple(const Recipe& recipe);
int threads_from(std::int64_t threads);

Stream stream_from(std::uintptr_t handle);

/// kv_cache.cpp: adds the class KvCache and its options to the module.
void add_kv_cache(nb::module_& m);
/// kv_cache_gpu.cpp: the class GpuKvCache.
void add_gpu_kv_cache(nb::module_& m);

}  // namespace qattn::python
