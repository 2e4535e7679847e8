#include <string>
#include <utility>

#include "core/problem/checks.hpp"

namespace qattn {

using checks::text;

std::string Problem::describe() const {
  std::string s;
  const auto line = [&s](const char* key, const std::string& value) {
    s += std::string(key) + ": " + value + "\n";
  };
  line("batch", text(batch));
  line("heads", text(heads_q) + "/" + text(heads_kv));
  line("tokens", text(max_q) + "/" + text(max_k));
  line("head_dim", text(d) + "/" + text(dv));
  line("inputs", std::string(info(q.format).name) + " " + std::string(info(k.format).name) + " " +
                     std::string(info(v.format).name) + " -> " +
                     std::string(info(out.format).name));
  line("sequences", std::string(varlen_q ? "packed q, " : "") + (varlen_k ? "packed k, " : "") +
                        (paged ? "paged k of " + text(page_size) : "dense k"));
  line("window", text(window_left) + "," + text(window_right));
  std::string extras;
  if (softcap > 0) extras += " softcap";
  if (mask == MaskKind::boolean) extras += " boolean-mask";
  if (mask == MaskKind::additive) extras += " additive-mask";
  if (block_mask_q > 0) {
    extras += " block-mask-" + text(block_mask_q) + "x" + text(block_mask_k);
  }
  if (tensors.sinks.present()) extras += " sinks";
  if (tensors.alibi_slopes.present()) extras += " alibi";
  if (score_function) extras += " score-function";
  if (mask_function) extras += " mask-function";
  if (tensors.lse.present()) extras += " lse";
  if (tensors.seqused_q.present()) extras += " seqused_q";
  if (tensors.seqused_k.present()) extras += " seqused_k";
  // Workspaces differ with what need not be computed.
  for (const auto& [name, view] :
       {std::pair{" q_scale", &tensors.q_scale}, std::pair{" k_scale", &tensors.k_scale},
        std::pair{" v_scale", &tensors.v_scale}, std::pair{" k_mean", &tensors.k_mean},
        std::pair{" v_mean", &tensors.v_mean}, std::pair{" saturated", &tensors.saturated}}) {
    if (view->present()) extras += name;
  }
  if (projects()) extras += " projection-to-" + text(tensors.projection.shape[0]);
  if (tensors.projection_bias.present()) extras += " projection_bias";
  line("extras", extras.empty() ? "none" : extras.substr(1));
  if (device().type != DeviceType::cpu) line("device", device_text(device()));
  return s;
}

}  // namespace qattn
