// The options that every command about one attention call shares, and the call that they describe.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/array.hpp"
#include "qattn/qattn.hpp"

namespace qattn::cli {

/// What a call computes, on whatever device. As typed; options() checks what CLI11 does not.
struct MeaningFlags {
  std::string layout = "bhsd";
  bool causal = false;
  std::optional<float> scale;
  std::string window;
  float softcap = 0.0f;

  void add_to(CLI::App& app);
  /// Options of the call, with recipe "auto". Errors: invalid_argument.
  Result<AttentionOptions> options() const;
};

/// And what it runs on.
struct CallFlags : MeaningFlags {
  std::string backend = "auto";
  int threads = 0;

  void add_to(CLI::App& app);
  /// Options of the call, with recipe "auto". Errors: invalid_argument; unsupported for a backend
  /// that this build lacks.
  Result<AttentionOptions> options() const;
};

/// --q, --k, --v and how to read them.
struct OperandFlags {
  std::string q, k, v;
  bool bf16 = false;

  void add_to(CLI::App& app);
};

/// Sizes of one call; the order of --shape, with Dv last.
struct Geometry {
  std::int64_t batch = 0, heads_q = 0, heads_kv = 0, queries = 0, keys = 0, dim = 0, dim_v = 0;

  /// "B,Hq,Hkv,Sq,Sk,D"
  static Result<Geometry> parse(const std::string& text);
  std::string text() const;
  /// Multiply-adds count as two, both products, half for causal (docs/NUMERICS.md, "Metrics").
  double flops(bool causal) const;
};

/// io::load() of the tensor called `name`, which begins a message; what had to be converted is said
/// on standard error. `metadata`: of the file.
Result<io::Array> load_tensor(const char* name, const std::string& spec, bool bf16,
                              std::map<std::string, std::string>* metadata = nullptr);

/// Inputs of one attention call.
struct Operands {
  io::Array q, k, v;

  /// Reads the three files; a message begins with the tensor's name.
  static Result<Operands> load(const OperandFlags& flags);
  AttentionTensors tensors() const;
};

/// One call: inputs and everything but the recipe.
struct Case {
  Operands operands;
  AttentionOptions options;
  Geometry geometry;
};

/// Checks the call with a recipe that every CPU has and fills in the geometry.
Result<Case> make_case(Operands operands, const AttentionOptions& options);

/// Sizes of operands whose ranks and shapes plan() accepted.
Geometry geometry_of(const AttentionTensors& tensors, Layout layout);

/// Tensors without memory, which is all that plan() and explain() look at.
AttentionTensors shapes_only(const Geometry& geometry, Layout layout, Format format);

/// Shape of one operand in the order of `layout`.
std::vector<std::int64_t> operand_shape(Layout layout, std::int64_t batch, std::int64_t heads,
                                        std::int64_t tokens, std::int64_t dim);

/// "all", or names separated by commas (repeats dropped). Errors: invalid_argument.
Result<std::vector<Recipe>> parse_recipes(const std::string& text);

/// f32, f16 or bf16. Errors: invalid_argument names `option`.
Result<Format> parse_input_format(const std::string& option, const std::string& text);

/// "1,2,3" as integers; nothing if any part is no integer.
std::optional<std::vector<std::int64_t>> parse_integers(const std::string& text);

Layout parse_layout(const std::string& text);

}  // namespace qattn::cli
