// Plans and the registry of kernels that can serve one.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "core/problem.hpp"

namespace qattn::detail {

/// What a kernel decided for a problem. Kernels derive their own configuration from it.
struct PlanData {
  virtual ~PlanData() = default;
  Problem problem;  ///< as planned; its addresses are not used
  Recipe recipe;    ///< nothing automatic left in it
  std::string kernel;
  std::string text;  ///< the kernel's part of Plan::to_string()
  std::size_t workspace = 0;
  std::uint64_t hash = 0;
  const struct Kernel* owner = nullptr;
};

/// One entry of the registry.
struct Kernel {
  const char* name;
  /// Ok, or the reason why this kernel cannot serve the problem here. The only such predicate.
  Status (*supports)(const Problem& problem);
  /// Configuration and workspace of a supported problem.
  std::shared_ptr<PlanData> (*tune)(const Problem& problem);
  Status (*run)(const PlanData& plan, const Problem& problem, void* workspace, Stream stream);
};

/// Kernels in the order in which they are tried.
std::span<const Kernel> registry();

/// The recipe as text, one line, every field.
std::string recipe_text(const Recipe& recipe);

}  // namespace qattn::detail
