// Decode attention on CPUs. The pages of a (sequence, KV head) are split into tasks of about equal
// bytes; a task walks its pages in tiles of up to 128 tokens, whatever their tiers, unpacks K and V
// once for all query rows of the group, and leaves (O, max, sum). One pass combines them.
#pragma once

#include "kernels/decode/call.hpp"

namespace qattn::cpu {

Status decode(const kv::DecodeCall& call);

}  // namespace qattn::cpu
