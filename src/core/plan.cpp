#include "core/plan.hpp"

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include "core/guarded.hpp"
#include "kernels/attn_prefill/cpu.hpp"
#include "kernels/cpu/words.hpp"

namespace qattn {
namespace detail {
namespace {

std::uint64_t fnv1a(const std::string& text) {
  std::uint64_t h = 14695981039346656037u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}

std::string scaling_text(const Scaling& s) {
  return std::string(name(s.granularity)) + "/" + std::to_string(s.block) + "/" +
         std::to_string(s.warp);
}

}  // namespace

std::span<const Kernel> registry() {
  static const auto kernels = cpu::attention_kernels();
  return kernels;
}

std::string recipe_text(const Recipe& r) {
  const auto on = [](Toggle t) {
    return t == Toggle::on ? "on" : t == Toggle::off ? "off" : "auto";
  };
  std::string s = r.name;
  s += " qk=" + std::string(info(r.qk).name) + " p=" + std::string(info(r.p).name) +
       " v=" + std::string(info(r.v).name);
  s += " q_scale=" + scaling_text(r.q_scale) + " k_scale=" + scaling_text(r.k_scale) +
       " v_scale=" + scaling_text(r.v_scale);
  s += std::string(" smooth_k=") + on(r.smooth_k) + " smooth_q=" + on(r.smooth_q) +
       " smooth_v=" + on(r.smooth_v) + " rotate=" + on(r.rotate);
  return s;
}

}  // namespace detail

std::string Plan::to_string() const {
  return "kernel: " + data_->kernel + "\nrecipe: " + detail::recipe_text(data_->recipe) + "\n" +
         data_->problem.describe() + data_->text +
         "workspace_bytes: " + std::to_string(data_->workspace) + "\n";
}
std::uint64_t Plan::hash() const { return data_->hash; }
std::size_t Plan::workspace_bytes() const { return data_->workspace; }
const Recipe& Plan::recipe() const { return data_->recipe; }
const std::string& Plan::kernel() const { return data_->kernel; }

namespace {

/// A few words on why `auto` chose as it did; the rule itself is in the kernels' tune().
constexpr const char* auto_reason =
    "recipe auto: int8_full where integer dot products are native (lowest error and highest speed "
    "of the 8-bit recipes), else f32\n";

struct Walk {
  std::shared_ptr<detail::PlanData> plan;
  std::string log;  ///< one line a kernel: its reason, or "chosen"
};

Walk walk(const Problem& problem) {
  Walk w;
  for (const detail::Kernel& kernel : detail::registry()) {
    const Status s = w.plan ? Status() : kernel.supports(problem);
    if (w.plan) {
      w.log += std::string(kernel.name) + ": not tried, a better one was chosen\n";
    } else if (!s.ok()) {
      w.log += std::string(kernel.name) + ": " + s.message() + "\n";
    } else {
      w.plan = kernel.tune(problem);
      w.plan->problem = problem;
      w.plan->kernel = kernel.name;
      w.plan->owner = &kernel;
      w.plan->hash = detail::fnv1a(Plan(w.plan).to_string());
      w.log += std::string(kernel.name) + ": chosen\n";
    }
  }
  return w;
}

Result<Plan> plan_for(const Problem& problem) {
  const cpu::Selection selection = cpu::select_words();
  if (selection.unknown_name) {
    return Status(
        Code::invalid_argument,
        std::string("QATTN_CPU_ISA: \"") + std::getenv("QATTN_CPU_ISA") + "\" " + selection.error);
  }
  Walk w = walk(problem);
  if (!w.plan) return Status(Code::unsupported, "no kernel can serve this call:\n" + w.log);
  return Plan(std::move(w.plan));
}

}  // namespace

Result<Plan> plan(const AttentionTensors& tensors, const AttentionOptions& options) {
  return guarded<Result<Plan>>([&]() -> Result<Plan> {
    Result<Problem> problem = Problem::make(tensors, options);
    if (!problem.ok()) return problem.status();
    return plan_for(*problem);
  });
}

namespace {

Status run_problem(const Plan& plan, const Problem& problem, void* workspace, std::size_t bytes,
                   Stream stream) {
  if (bytes < plan.workspace_bytes()) {
    return Status(Code::out_of_memory, "workspace: " + std::to_string(bytes) +
                                           " bytes are less than the plan's " +
                                           std::to_string(plan.workspace_bytes()));
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % 64 != 0) {
    return Status(Code::invalid_argument, "workspace: address is not aligned to 64 bytes");
  }
  for (const auto& [name, view] :
       {std::pair{"q", &problem.tensors.q}, std::pair{"k", &problem.tensors.k},
        std::pair{"v", &problem.tensors.v}, std::pair{"out", &problem.tensors.out}}) {
    bool empty = false;
    for (int i = 0; i < view->rank; ++i) empty |= view->shape[i] == 0;
    if (view->data == nullptr && !empty) {
      return Status(Code::invalid_argument, std::string(name) + ": data pointer is null");
    }
  }
  const detail::PlanData& data = plan.data();
  return data.owner->run(data, problem, workspace, stream);
}

}  // namespace

Status run(const Plan& plan, const AttentionTensors& tensors, const AttentionOptions& options,
           void* workspace, std::size_t workspace_bytes, Stream stream) {
  return guarded<Status>([&]() -> Status {
    Result<Problem> problem = Problem::make(tensors, options);
    if (!problem.ok()) return problem.status();
    const Problem& planned = plan.data().problem;
    // The tensors' shapes, formats and options decide the plan; a mismatch means the wrong plan.
    if (problem->describe() != planned.describe() ||
        detail::recipe_text(problem->recipe) != detail::recipe_text(planned.recipe) ||
        problem->threads != planned.threads || problem->tokens_q != planned.tokens_q ||
        problem->tokens_k != planned.tokens_k) {
      return Status(Code::invalid_argument,
                    "plan: was made for other shapes, formats or options:\n" + planned.describe() +
                        "but this call has\n" + problem->describe());
    }
    return run_problem(plan, *problem, workspace, workspace_bytes, stream);
  });
}

Status attention(const AttentionTensors& tensors, const AttentionOptions& options) {
  return guarded<Status>([&]() -> Status {
    Result<Problem> problem = Problem::make(tensors, options);
    if (!problem.ok()) return problem.status();
    Result<Plan> plan = plan_for(*problem);
    if (!plan.ok()) return plan.status();
    const std::size_t bytes = (plan->workspace_bytes() + 63) / 64 * 64;
    std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, bytes ? bytes : 64),
                                                       &std::free);
    if (!memory) {
      return Status(Code::out_of_memory,
                    "workspace: allocation of " + std::to_string(bytes) + " bytes failed");
    }
    return run_problem(*plan, *problem, memory.get(), bytes, nullptr);
  });
}

namespace {

std::string explained(const AttentionTensors& tensors, const AttentionOptions& options) {
  Result<Problem> problem = Problem::make(tensors, options);
  if (!problem.ok()) return "refused: " + problem.status().message() + "\n";
  const Walk w = walk(*problem);
  std::string text = w.log;
  if (problem->recipe.qk == Format::none) text += auto_reason;
  if (w.plan) text += Plan(w.plan).to_string();
  return text;
}

}  // namespace

std::string explain(const AttentionTensors& tensors, const AttentionOptions& options) {
  try {
    return explained(tensors, options);
  } catch (const std::bad_alloc&) {
    return {};  // no memory for a text
  }
}

Result<std::string> cpu_isa() {
  const cpu::Selection s = cpu::select_words();
  if (s.words) return std::string(s.words->isa);
  return Status(s.unknown_name ? Code::invalid_argument : Code::unsupported,
                std::string("QATTN_CPU_ISA: \"") + std::getenv("QATTN_CPU_ISA") + "\": " + s.error);
}

std::string_view version() { return QATTN_VERSION; }

}  // namespace qattn
