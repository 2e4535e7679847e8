// Facts about one operand (Q, K or V) of a CPU job that several steps ask for.
#pragma once

#include "core/operand.hpp"
#include "kernels/attention/cpu/kernel.hpp"

namespace qattn::cpu {

inline bool free_scale(Format format) {
  return info(format).scale != Format::none && info(format).group == 0;
}
inline bool grouped(Format format) { return info(format).group > 0; }

inline Format format_of(const Config& config, Role role) {
  return operand_recipe(config.recipe, role).format;
}
inline Scaling scaling_of(const Config& config, Role role) {
  return operand_recipe(config.recipe, role).scaling;
}
inline bool has_codes(const Problem& p, Role role) { return operand_of(p, role).codes; }
inline const TensorView& scale_view(const Problem& p, Role role) {
  return operand_of(p, role).scale;
}
inline ScaleMap scale_map(const Job& job, Role role) {
  return {scaling_of(job.config, role), role, info(format_of(job.config, role)).group,
          job.problem.paged && role != Role::q};
}

/// Where a token's scale is found: batch entry and token, or page and place in the page.
struct Place {
  std::int64_t outer, token;
};
inline Place place(const Sequence& x, std::int64_t b, std::int64_t token) {
  if (x.pages == nullptr) return {b, token};
  return {x.page(token), token % x.page_size};
}

Sequence sequence_of(const Job& job, Role role, std::int64_t b, std::int64_t head);
/// Mean and rotation of a row of a float operand.
Transform transform_of(const Job& job, Role role, std::int64_t b, std::int64_t head,
                       std::int64_t token);
/// Scale that the caller gave.
float given_scale(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                  std::int64_t token, int channel);
/// Global scale of nvfp4 codes, else 1.
float given_global(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                   std::int64_t token);
/// Given codes of mxfp8, mxfp4 or nvfp4: element times group scale, exact.
void decode_grouped_row(const Job& job, Role role, const Sequence& x, std::int64_t b,
                        std::int64_t head, std::int64_t token, float* row);

}  // namespace qattn::cpu
