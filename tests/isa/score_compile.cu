// The functors and the kernel of score_kernel.hpp as device code; compiling is the test. The host's
// loop over the same functors stands in the same unit, as a caller's would.
#include "score_kernel.hpp"

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

using Kernel = ScoreKernel<BentBias, SameDocument>;

std::string use(const Kernel::Params& p) {
  return isa::launch<Kernel>(p, Kernel::grid(2, 4, p.queries, p.keys), nullptr);
}

}  // namespace QATTN_TARGET

ScoreFunction on_the_host(const BentBias& f) { return score_function(f); }
MaskFunction on_the_host(const SameDocument& f) { return mask_function(f); }

}  // namespace qattn::isa_test
