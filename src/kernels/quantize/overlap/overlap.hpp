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

#include <string>

#include "isa/launch.hpp"
#include "isa/tensor_map.hpp"
#include "kernels/quantize/gpu/prepare.hpp"

namespace qattn::kernels {

/// Jobs are tiles of 64 tokens of an operand. Those of a unit, which is a KV head of a sequence
/// with its query heads: first sums of K, where it has a mean, then codes, of K last. Sums are made
/// some units ahead, since the last of them is waited for.
struct OverlapParams {
  PlainParams plain;
  isa::TensorMap raw[3];    ///< Q, K, V: (channels, tokens, heads, sequences), boxes of 64 by 64
  float* k_mean = nullptr;  ///< null: nothing is subtracted
  std::int32_t units = 0, ahead = 0, group = 1;
  std::int32_t k_tiles = 0, q_tiles = 0;  ///< of a head of a sequence
  std::int32_t sums = 0, codes = 0;       ///< jobs of a unit
  /// Zeros at first. [0]: chunks of jobs that somebody has taken; [1]: works of attention; then of
  /// each unit: sums that are there, is its mean there? and codes that are there.
  std::uint32_t* progress = nullptr;
  static constexpr int words_of_unit = 4, first_word = 4, chunk = 2;
  enum Word { sums_there, mean_there, codes_there };
};

/// What attention is told of it.
struct AwaitedCodes {
  std::uint32_t* works = nullptr;        ///< that were taken; null: all codes are there
  const std::uint32_t* there = nullptr;  ///< counts of units, words_of_unit apart
  std::uint32_t codes = 0;               ///< what they are to reach
};

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
