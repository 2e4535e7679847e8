#include "kernels/attention/common/spoil.hpp"

#include <cstdint>

#include "kernels/attention/common/spoil.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

std::size_t bad_keys_bytes(const Problem& p, const PrepareLayout& prepared) {
  const std::int64_t slots = prepared.part[static_cast<int>(Role::k)].slots;
  return static_cast<std::size_t>(p.heads_kv * slots / note_keys * note_warps) *
         sizeof(std::int32_t);
}

isa::LaunchError spoil_rows(const Problem& p, const AttentionParams& params, Stream stream) {
  return isa::launch<SpoilRows>(params, {static_cast<int>(p.batch * p.heads_q), 1, 1}, stream);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
