#include <cmath>
#include <utility>

#include "core/problem/checks.hpp"
#include "core/problem/maker.hpp"

namespace qattn {

using namespace checks;

namespace {

/// Outputs share no memory with any other tensor.
Status check_aliasing(const AttentionTensors& t) {
  for (const AttentionTensor& a : all_attention_tensors) {
    const TensorView& view = t.*a.view;
    if (!a.output || !view.present() || view.data == nullptr) continue;
    const ByteRange ra = byte_range(view);
    for (const AttentionTensor& b : all_attention_tensors) {
      const TensorView& other = t.*b.view;
      if (&a == &b || !other.present() || other.data == nullptr) continue;
      const ByteRange rb = byte_range(other);
      if (ra.begin < rb.end && rb.begin < ra.end) {
        return invalid(std::string(a.name) + ": overlaps the memory of " + b.name +
                       "; an output must not share memory with any other tensor");
      }
    }
  }
  return {};
}

}  // namespace

Result<Problem> ProblemMaker::make() {
  p_.recipe = o_.recipe;
  p_.tensors = t_;
  p_.threads = o_.threads;
  p_.validate = o_.validate;
  p_.score_function = o_.score_function;
  p_.mask_function = o_.mask_function;
  for (auto step : {&ProblemMaker::views, &ProblemMaker::operands, &ProblemMaker::dimensions,
                    &ProblemMaker::sequences, &ProblemMaker::scales, &ProblemMaker::extras,
                    &ProblemMaker::options, &ProblemMaker::recipe}) {
    if (Status s = (this->*step)(); !s.ok()) return s;
  }
  if (Status s = check_aliasing(t_); !s.ok()) return s;
  return std::move(p_);
}

Status ProblemMaker::views() {
  for (const AttentionTensor& n : all_attention_tensors) {
    const TensorView& view = t_.*n.view;
    if (!view.present()) continue;
    if (Status s = check_view(n.name, view, -1); !s.ok()) return s;
    if (view.device != t_.q.device) {
      return invalid(std::string(n.name) + ": lies on another device than q (" +
                     device_text(view.device) + ", q on " + device_text(t_.q.device) + ")");
    }
    if (n.output) {
      if (Status s = check_no_overlap(n.name, view); !s.ok()) return s;
    }
  }
  if (o_.layout != Layout::bshd && o_.layout != Layout::bhsd) {
    return invalid("layout: " + text(static_cast<int>(o_.layout)) + " is neither bshd nor bhsd");
  }
  return {};
}

Status ProblemMaker::causal_window() const {
  const std::int64_t right = o_.window_right;
  if (!o_.causal || right <= 0 || right == o_.window_left || right >= p_.max_q - 1) return {};
  return invalid("window_right: " + text(right) +
                 " contradicts causal, under which a query sees no key behind its own; it should "
                 "be 0, -1, window_left's " +
                 text(o_.window_left) +
                 " (a distance), or hide nothing, from Sq - 1 = " + text(p_.max_q - 1) + " on");
}

Status ProblemMaker::options() {
  p_.softmax_scale =
      o_.softmax_scale.value_or(static_cast<float>(1.0 / std::sqrt(static_cast<double>(p_.d))));
  if (!std::isfinite(p_.softmax_scale)) {
    return invalid("softmax_scale: " + std::to_string(p_.softmax_scale) + " is not finite");
  }
  if (!std::isfinite(o_.softcap) || o_.softcap < 0) {
    return invalid("softcap: " + std::to_string(o_.softcap) + " is not a finite number >= 0");
  }
  p_.softcap = o_.softcap;
  for (const auto& [name, w] :
       {std::pair{"window_left", o_.window_left}, std::pair{"window_right", o_.window_right}}) {
    if (w < -1) return invalid(std::string(name) + ": " + text(w) + " is below -1 (unlimited)");
  }
  if (Status s = causal_window(); !s.ok()) return s;
  p_.window_left = o_.window_left;
  p_.window_right = o_.causal ? 0 : o_.window_right;
  if (Status s = check_threads(o_.threads); !s.ok()) return s;
  const Device device = t_.q.device;
  if (Status s = check_device("q", device, o_.threads); !s.ok()) return s;
  for (const auto& [name, given] :
       {std::pair{"score_function", static_cast<bool>(o_.score_function)},
        std::pair{"mask_function", static_cast<bool>(o_.mask_function)}}) {
    if (given && device.type != DeviceType::cpu) {
      return invalid(std::string(name) + ": runs on CPUs only, and q lies on " +
                     device_text(device));
    }
  }
  return {};
}

Result<Problem> Problem::make(const AttentionTensors& tensors, const AttentionOptions& options) {
  return ProblemMaker(tensors, options).make();
}

}  // namespace qattn
