#include "core/plan.hpp"

#include <cstdint>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/backend.hpp"
#include "core/guarded.hpp"
#include "core/operand.hpp"
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
       " smooth_v=" + on(r.smooth_v) + " rotate=" + on(r.rotate) + " balance_k=" + on(r.balance_k);
  return s;
}

}  // namespace detail

std::string Plan::to_string() const {
  const int sm = data_->architecture;
  return "kernel: " + data_->kernel + "\nrecipe: " + detail::recipe_text(data_->recipe) + "\n" +
         data_->problem.describe() +
         (sm > 0 ? "architecture: sm_" + std::to_string(sm) + "\n" : "") + data_->text +
         "workspace_bytes: " + std::to_string(data_->workspace) + "\n";
}
std::uint64_t Plan::hash() const { return data_->hash; }
std::size_t Plan::workspace_bytes() const { return data_->workspace; }
const Recipe& Plan::recipe() const { return data_->recipe; }
const std::string& Plan::kernel() const { return data_->kernel; }

namespace {

using detail::plan_key;
using detail::PlanKey;

/// What `auto` looks for; how is in the kernels' tune(), whose plans may say why ("auto:").
constexpr const char* auto_reason =
    "recipe auto: the fastest whose error is at most that of int8_full\n";

/// Of kernels whose device has matrix libraries that qattn does not link.
constexpr const char* no_projection =
    "projection: this kernel has none; leave it out and multiply out by a library of the device "
    "(cuBLAS), as qattn.attention() does in Python for torch tensors";

struct Walk {
  std::shared_ptr<detail::PlanData> plan;
  std::string log;  ///< one line a kernel: its reason, or "chosen"
};

/// Shows the problem to one kernel.
void try_kernel(const detail::Backend& backend, const detail::Kernel& kernel,
                const Problem& problem, Walk& w) {
  const std::string name = kernel.name;
  const bool elsewhere = backend.device != problem.device().type;
  if (w.plan || elsewhere) {
    w.log += name + (w.plan ? ": not tried, a better one was chosen\n"
                     : backend.device == DeviceType::cpu
                         ? ": tensors are not on the CPU\n"
                         : ": tensors are not on a device of " + std::string(backend.name) + "\n");
    return;
  }
  if (problem.projects() && !kernel.projects) {
    w.log += name + ": " + no_projection + "\n";
    return;
  }
  const Status heads = kernel.any_head ? Status() : check_device_head_sizes(problem);
  if (const Status s = heads.ok() ? kernel.supports(problem) : heads; !s.ok()) {
    w.log += name + ": " + s.message() + "\n";
    return;
  }
  w.plan = kernel.tune(problem);
  w.plan->problem = problem;
  w.plan->kernel = kernel.name;
  w.plan->owner = &kernel;
  w.plan->backend = &backend;
  w.plan->architecture = backend.architecture();
  w.plan->hash = detail::fnv1a(Plan(w.plan).to_string());
  w.log += name + ": chosen\n";
}

Walk walk(const Problem& problem) {
  Walk w;
  const detail::Backends backends = detail::backends_for(problem.device().type);
  if (!backends.missing.ok()) w.log += backends.missing.message() + "\n";
  for (const detail::Backend* backend : backends.list) {
    if (backend->device != problem.device().type) {
      for (const detail::Kernel& kernel : backend->kernels)
        try_kernel(*backend, kernel, problem, w);
      continue;
    }
    const detail::DeviceGuard guard(*backend, problem.device());
    if (!guard.status().ok()) {
      w.log += std::string(backend->name) + ": " + guard.status().message() + "\n";
      continue;
    }
    for (const detail::Kernel& kernel : backend->kernels) try_kernel(*backend, kernel, problem, w);
  }
  return w;
}

Result<Plan> make_plan(const Problem& problem, const PlanKey& key) {
  const bool cpu = problem.device().type == DeviceType::cpu;
  if (const cpu::Selection selection = cpu::select_words(); cpu && selection.unknown_name) {
    return Status(
        Code::invalid_argument,
        std::string("QATTN_CPU_ISA: \"") + std::getenv("QATTN_CPU_ISA") + "\" " + selection.error);
  }
  Walk w = walk(problem);
  if (!w.plan) return Status(Code::unsupported, "no kernel can serve this call:\n" + w.log);
  w.plan->key = key;
  return Plan(std::move(w.plan));
}

/// The same, of a call that this thread may have planned before.
Result<Plan> plan_for(const Problem& problem, const AttentionTensors& tensors,
                      const AttentionOptions& options) {
  const PlanKey key = plan_key(tensors, options);
  if (detail::is_backend_replaced()) return make_plan(problem, key);
  if (std::optional<Plan> known = detail::known_plan(key)) return *std::move(known);
  Result<Plan> made = make_plan(problem, key);
  if (made.ok()) detail::keep_plan(key, *made);
  return made;
}

}  // namespace

Result<Plan> plan(const AttentionTensors& tensors, const AttentionOptions& options) {
  return guarded<Result<Plan>>([&]() -> Result<Plan> {
    Result<Problem> problem = Problem::make(tensors, options);
    if (!problem.ok()) return problem.status();
    return plan_for(*problem, tensors, options);
  });
}

namespace {

/// What only the contents of index tensors and scales tell, where the host can read them or the
/// caller asked for it.
Status check_what_is_readable(const detail::Backend& backend, const Problem& problem,
                              Stream stream) {
  if (backend.host_memory) return check_contents(problem);
  if (Status s = check_pointers(problem); !s.ok() || !problem.validate) return s;
  Problem read = problem;
  AttentionTensors& t = read.tensors;
  std::vector<detail::HostCopy> copies;
  for (TensorView* view :
       {&t.cu_seqlens_q, &t.cu_seqlens_k, &t.seqused_q, &t.seqused_k, &t.page_table, &t.q_scale,
        &t.k_scale, &t.v_scale, &t.q_global, &t.k_global, &t.v_global}) {
    if (!view->present()) continue;
    copies.emplace_back();
    if (Status s = copies.back().take(backend, *view, stream); !s.ok()) return s;
  }
  return check_contents(read);
}

/// With the device current.
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
  const detail::PlanData& data = plan.data();
  if (problem.device().type == DeviceType::cpu && stream != nullptr) {
    return Status(Code::invalid_argument, "stream: a CPU plan takes none");
  }
  if (Status s = check_what_is_readable(*data.backend, problem, stream); !s.ok()) return s;
  return data.owner->run(data, problem, workspace, stream);
}

/// Shapes, formats and options decide a plan; other strides or addresses it may serve.
Status check_serves(const Plan& plan, const Problem& problem) {
  const Problem& planned = plan.data().problem;
  if (problem.describe() == planned.describe() &&
      detail::recipe_text(problem.recipe) == detail::recipe_text(planned.recipe) &&
      problem.threads == planned.threads && problem.tokens_q == planned.tokens_q &&
      problem.tokens_k == planned.tokens_k) {
    return {};
  }
  return Status(Code::invalid_argument, "plan: was made for other shapes, formats or options:\n" +
                                            planned.describe() + "but this call has\n" +
                                            problem.describe());
}

}  // namespace

Status run(const Plan& plan, const AttentionTensors& tensors, const AttentionOptions& options,
           void* workspace, std::size_t workspace_bytes, Stream stream) {
  return guarded<Status>([&]() -> Status {
    Result<Problem> problem = Problem::make(tensors, options);
    if (!problem.ok()) return problem.status();
    if (detail::plan_key(tensors, options) != plan.data().key) {
      if (Status s = check_serves(plan, *problem); !s.ok()) return s;
    }
    const detail::DeviceGuard guard(*plan.data().backend, problem->device());
    if (!guard.status().ok()) return guard.status();
    return run_problem(plan, *problem, workspace, workspace_bytes, stream);
  });
}

Status attention(const AttentionTensors& tensors, const AttentionOptions& options, Stream stream) {
  return guarded<Status>([&]() -> Status {
    Result<Problem> problem = Problem::make(tensors, options);
    if (!problem.ok()) return problem.status();
    Result<Plan> plan = plan_for(*problem, tensors, options);
    if (!plan.ok()) return plan.status();
    const detail::Backend& backend = *plan->data().backend;
    const detail::DeviceGuard guard(backend, problem->device());
    if (!guard.status().ok()) return guard.status();
    const Result<void*> memory = backend.allocate(plan->workspace_bytes(), stream);
    if (!memory.ok()) return memory.status();
    const Status status = run_problem(*plan, *problem, *memory, plan->workspace_bytes(), stream);
    backend.release(*memory, stream);
    return status;
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
