// Plans and the kernels that can serve one. Which there are: backend.hpp.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/plan_cache.hpp"
#include "core/problem.hpp"

namespace qattn::detail {

/// What a kernel decided for a problem. Kernels derive their own configuration from it.
struct PlanData {
  virtual ~PlanData() = default;
  Problem problem;  ///< as planned; its addresses are not used
  PlanKey key;      ///< of the call that was planned
  Recipe recipe;    ///< nothing automatic left in it
  std::string kernel;
  std::string text;  ///< the kernel's part of Plan::to_string()
  std::size_t workspace = 0;
  std::uint64_t hash = 0;
  const struct Kernel* owner = nullptr;
  const struct Backend* backend = nullptr;
  int architecture = 0;  ///< of the device as planned; 0: a CPU
};

/// One kernel of a backend. All three are called with the problem's device current.
struct Kernel {
  const char* name;
  /// Ok, or the reason why this kernel cannot serve the problem here. The only such predicate; the
  /// type of the device is the backend's.
  Status (*supports)(const Problem& problem);
  /// Configuration and workspace of a supported problem.
  std::shared_ptr<PlanData> (*tune)(const Problem& problem);
  Status (*run)(const PlanData& plan, const Problem& problem, void* workspace, Stream stream);
  bool projects = false;  ///< serves calls with an output projection
  bool any_head = false;  ///< serves every head dimension of CPUs (core/operand.hpp)
};

/// The problem's recipe with nothing automatic left in it: `automatic` names what "auto" means,
/// `k_default` and `v_default` (of s8) are scalings where the caller leaves them open and
/// gives no codes.
Recipe resolve_recipe(const Problem& problem, std::string_view automatic,
                      const Scaling& k_default = {}, const Scaling& v_default = {});

/// May keys be hidden from all rows of a call, and do keys that come without codes share something
/// (a mean, a scale, a group, what a tile says of them all), so that it must be found which?
/// `recipe` as resolved.
bool must_find_hidden_keys(const Problem& problem, const Recipe& recipe);

/// Can keys be there whose biases leave them no weight without being faint (seen.hpp), and are
/// their scores bounded by norms of Q's and K's rows?
bool bounds_slight_keys(const Problem& problem);

/// The recipe as text, one line, every field.
std::string recipe_text(const Recipe& recipe);

}  // namespace qattn::detail
