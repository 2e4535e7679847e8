#include "convert.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>
#include <limits>

namespace qattn::python {
namespace {

[[noreturn]] void invalid(std::string message) {
  throw StatusError(Status(Code::invalid_argument, std::move(message)));
}

const char* class_name(Code code) {
  switch (code) {
    case Code::invalid_argument:
      return "InvalidArgument";
    case Code::unsupported:
      return "Unsupported";
    case Code::out_of_memory:
      return "OutOfMemory";
    default:
      return "InternalError";
  }
}

/// Shape and strides of an array of bytes that hold packed codes, in elements.
void widen(TensorView& view, int bits) {
  const int per_byte = 8 / bits;
  for (int i = 0; i + 1 < view.rank; ++i) view.stride[i] *= per_byte;
  if (view.rank == 0) return;
  std::int64_t& last = view.shape[view.rank - 1];
  if (last == 1) view.stride[view.rank - 1] = 1;  // any stride is right of one byte
  last *= per_byte;
}

void set_dense(TensorView& view) {
  std::int64_t step = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.stride[i] = step;
    step *= view.shape[i];
  }
}

void check_rank(const char* name, std::size_t rank) {
  if (rank > max_rank) {
    invalid(std::string(name) + ": rank " + std::to_string(rank) + " is over " +
            std::to_string(max_rank));
  }
}

template <class Array>
TensorView view_of(const char* name, const Array& array, Format format) {
  const int bits = info(format).bits;
  if (array.itemsize() * 8 != static_cast<std::size_t>(std::max(bits, 8))) {
    invalid(std::string(name) + ": elements of " + std::to_string(array.itemsize()) +
            " bytes cannot hold format " + std::string(info(format).name));
  }
  if (array.device_type() != nb::device::cpu::value) {
    throw StatusError(
        Status(Code::unsupported, std::string(name) + ": does not lie in the memory of the CPU"));
  }
  check_rank(name, array.ndim());
  TensorView view;
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  view.format = format;
  view.rank = static_cast<std::int32_t>(array.ndim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = static_cast<std::int64_t>(array.shape(i));
    view.stride[i] = array.stride(i);
  }
  if (bits < 8 && 8 % bits == 0) widen(view, bits);
  const auto end = view.shape.begin() + view.rank;
  if (std::find(view.shape.begin(), end, 0) != end) set_dense(view);  // numpy gives strides of 0
  return view;
}

/// The two kinds of entry that are no array: addresses on a device, and shapes alone.
TensorView plain_view(const char* name, const nb::tuple& tuple, Format format) {
  const bool memory = !tuple[0].is_none();
  const nb::tuple shape = nb::cast<nb::tuple>(tuple[2]);
  check_rank(name, shape.size());
  TensorView view;
  view.format = format;
  view.rank = static_cast<std::int32_t>(shape.size());
  for (int i = 0; i < view.rank; ++i) view.shape[i] = nb::cast<std::int64_t>(shape[i]);
  const int at = memory ? 4 : 3;
  view.device = {static_cast<DeviceType>(nb::cast<std::int32_t>(tuple[at])),
                 nb::cast<std::int32_t>(tuple[at + 1])};
  if (!memory) {
    set_dense(view);
    return view;
  }
  view.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(tuple[0]));
  const nb::tuple strides = nb::cast<nb::tuple>(tuple[3]);
  for (int i = 0; i < view.rank; ++i) view.stride[i] = nb::cast<std::int64_t>(strides[i]);
  if (const int bits = info(format).bits; bits < 8 && 8 % bits == 0) widen(view, bits);
  return view;
}

std::int32_t narrow(const std::string& what, std::int64_t value) {
  if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) {
    invalid(what + ": " + std::to_string(value) + " is not in [0, 2147483647]");
  }
  return static_cast<std::int32_t>(value);
}

}  // namespace

void register_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      const nb::object type = nb::module_::import_("qattn._errors").attr(class_name(error.code()));
      PyErr_SetString(type.ptr(), error.what());
    }
  });
}

void check(Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

void rename_word(std::string& text, std::string_view word, std::string_view other) {
  const auto inside = [&](std::size_t at) {
    if (at >= text.size()) return false;
    return std::isalnum(static_cast<unsigned char>(text[at])) != 0 ||
           std::string_view("_/.-").find(text[at]) != std::string_view::npos;
  };
  for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos;) {
    const bool part = (at > 0 && inside(at - 1)) || inside(at + word.size());
    if (!part) text.replace(at, word.size(), other);
    at += part ? word.size() : other.size();
  }
}

std::string attention_text(std::string text) {
  rename_word(text, "softmax_scale", "scale");
  rename_word(text, "projection_bias", "bias");
  return text;
}

void attention_check(const Status& status) {
  if (!status.ok()) throw StatusError(Status(status.code(), attention_text(status.message())));
}

TensorView Views::add(const char* name, nb::handle entry, bool writable) {
  const nb::tuple tuple = nb::cast<nb::tuple>(entry);
  const Format format = format_from(name, nb::cast<std::string>(tuple[1]));
  if (tuple.size() > 2) return plain_view(name, tuple, format);
  if (writable) {
    nb::ndarray<> array;
    if (!nb::try_cast(tuple[0], array, false)) {
      invalid(std::string(name) + ": cannot be written in place (read-only, or not an array)");
    }
    outputs_.push_back(std::move(array));
    return view_of(name, outputs_.back(), format);
  }
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(tuple[0], array, false)) {
    invalid(std::string(name) + ": cannot be viewed without a copy");
  }
  inputs_.push_back(std::move(array));
  return view_of(name, inputs_.back(), format);
}

AttentionTensors attention_tensors(const nb::dict& entries, Views& views) {
  AttentionTensors tensors;
  for (const auto& [key, entry] : entries) {
    const auto* name = nb::cast<const char*>(key);
    const auto* tensor =
        std::find_if(std::begin(all_attention_tensors), std::end(all_attention_tensors),
                     [&](const AttentionTensor& x) { return std::strcmp(x.name, name) == 0; });
    if (tensor == std::end(all_attention_tensors)) {
      throw StatusError(
          Status(Code::internal, std::string(name) + ": a tensor that attention() does not know"));
    }
    tensors.*tensor->view = views.add(tensor->name, entry, tensor->output);
  }
  return tensors;
}

Format format_from(const char* what, const std::string& name) {
  if (name == "none") return Format::none;
  const std::optional<Format> format = format_named(name);
  if (format) return *format;
  std::string known;
  for (const FormatInfo& row : all_formats()) {
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  invalid(std::string(what) + ": format \"" + name + "\" is not one of " + known);
}

Layout layout_from(const std::string& name) {
  if (name == "bshd") return Layout::bshd;
  if (name == "bhsd") return Layout::bhsd;
  invalid("layout: \"" + name + "\" is neither \"bshd\" nor \"bhsd\"");
}

Role role_from(const std::string& wanted) {
  for (const Role role : {Role::q, Role::k, Role::v}) {
    if (name(role) == wanted) return role;
  }
  invalid("role: \"" + wanted + "\" is none of \"q\", \"k\", \"v\"");
}

Scaling scaling_from(const char* operand, const ScalingTuple& tuple) {
  const auto& [granularity, block, warp] = tuple;
  const std::optional<Granularity> found = granularity_named(granularity);
  if (!found) {
    std::string known;
    for (int i = 0; name(static_cast<Granularity>(i)) != "unknown"; ++i) {
      known += (i ? ", " : "") + std::string(name(static_cast<Granularity>(i)));
    }
    invalid(std::string(operand) + "granularity: \"" + granularity + "\" is not one of " + known);
  }
  Scaling scaling;
  scaling.granularity = *found;
  scaling.block = narrow(std::string(operand) + "granularity: block", block);
  scaling.warp = narrow(std::string(operand) + "granularity: warp", warp);
  return scaling;
}

Toggle toggle_from(std::optional<bool> value) {
  if (!value) return Toggle::automatic;
  return *value ? Toggle::on : Toggle::off;
}

Recipe recipe_from(const char* what, const RecipeTuple& tuple,
                   const std::array<std::optional<bool>, 5>& toggles) {
  Recipe recipe;
  recipe.name = std::get<0>(tuple);
  recipe.qk = format_from(what, std::get<1>(tuple));
  recipe.p = format_from(what, std::get<2>(tuple));
  recipe.v = format_from(what, std::get<3>(tuple));
  recipe.smooth_k = toggle_from(toggles[0]);
  recipe.smooth_q = toggle_from(toggles[1]);
  recipe.smooth_v = toggle_from(toggles[2]);
  recipe.rotate = toggle_from(toggles[3]);
  recipe.balance_k = toggle_from(toggles[4]);
  return recipe;
}

std::optional<Recipe> made_for_from(const std::optional<MadeForTuple>& tuple) {
  if (!tuple) return {};
  return recipe_from("scales_for", std::get<0>(*tuple), std::get<1>(*tuple));
}

RecipeTuple to_tuple(const Recipe& recipe) {
  const auto text = [](Format format) { return std::string(info(format).name); };
  return {recipe.name, text(recipe.qk), text(recipe.p), text(recipe.v)};
}

Stream stream_from(std::uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

int threads_from(std::int64_t threads) { return narrow("threads", threads); }

}  // namespace qattn::python
