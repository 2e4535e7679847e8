// Codes made beside attention on them: by a kernel on some of the multiprocessors, which memory
// and its instructions bind, while the attention kernel runs on the others. Counts tell what
// is there, and producers wait for them. Where the first has ended, blocks of the second follow and
// take works that are left.
//
// Multiprocessors share caches of instructions: the two of a TPC one, those of a GPC another. One
// that attended beside a coder on its TPC took twice the time a work (H200, 1024 keys: 22.0 us
// where 12.4, causal 20.6 where 10.9), though neither loads nor stores of coders cost it anything.
// So coders come in pairs (`cluster`), and their loops are short: 1.12 and 1.03 times as fast end
// to end by the first at 1024 causal and 2048 causal, 1.07 and 1.03 by the second.
#pragma once

#include <cstdint>

#include "isa/launch.hpp"
#include "kernels/operand/awaited_codes.hpp"
#include "kernels/operand/prepare.hpp"

namespace qattn::kernels {

inline namespace QATTN_TARGET {

/// Does the kernel serve this call: whole sequences of 16 bits, whose codes are plain ones in s8?
bool overlaps_quantisation(const Problem& problem, const Recipe& recipe,
                           const PrepareLayout& layout);

/// Words of OverlapParams::progress.
std::int64_t overlap_words(const Problem& problem);

/// Enqueues it, behind a kernel that clears `progress`. The kernel behind it may start beside it.
/// `blocks`: an even number.
isa::LaunchError encode_overlapped(const Problem& problem, const Recipe& recipe,
                                   const PrepareLayout& layout, void* workspace,
                                   std::uint32_t* progress, int blocks, void* stream,
                                   AwaitedCodes& awaited);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
