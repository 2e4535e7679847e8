// Every word as the emulator knows it: its name, the unit that executes it, and which GPUs have it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "isa/target.hpp"

namespace qattn::emu {

/// Instructions as the counters name them.
enum class Word : std::uint8_t {
  none,
  load_shared,
  store_shared,
  load_global,
  store_global,
  atomic_shared,
  atomic_global,
  sync_threads,
  barrier_sync,
  barrier_sync_anywhere,
  barrier_arrive,
  sync_warp,
  shuffle,
  warp,
  vote,
  ballot,
  ballot64,
  copy_async,
  copy_async_commit,
  copy_async_wait,
  load_matrix,
  store_matrix,
  transpose_matrix,
  mma_f16,
  mma_bf16,
  mma_int8,
  mma_fp8,
  exp2,
  log2,
  reciprocal,
  convert,
  byte_permute,
  lop3,
  dot4,
  min_max,
  fma,
  mbarrier_init,
  fence_mbarrier_init,
  mbarrier_arrive,
  mbarrier_expect,
  mbarrier_wait,
  mbarrier_test,
  fence_async_proxy,
  fence_async_global,
  bulk_load,
  bulk_store,
  tma_load,
  tma_store,
  tma_prefetch,
  bulk_commit,
  bulk_wait,
  bulk_wait_read,
  wgmma_fence,
  wgmma,
  wgmma_commit,
  wgmma_wait,
  registers,
  elect,
  cluster_sync,
  map_shared,
  load_cluster,
  store_cluster,
  mma_mxfp8,
  mma_fp4,
  load_bytes_transposed,
  convert_e2m1,
  convert_ue8m0,
  mma_f8f6f4,
  count
};

/// Execution units, as far as a bound on a kernel's speed needs them.
enum class Pipe : std::uint8_t { control, memory, tensor, special, convert, integer, fma, count };

const char* name(Word word);
Pipe pipe(Word word);

template <class Visit>
void for_each_word(Visit visit) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(Word::count); ++i) {
    visit(static_cast<Word>(i));
  }
}

/// May code for such GPUs use the word?
bool exists(Word word, isa::Target target);

/// A set of words.
class Vocabulary {
 public:
  /// Those of code for `target` where it runs on `gpu`. What has none because it is no more than a
  /// hint, or takes a sequence of instructions there, exists.
  Vocabulary(isa::Target target, int gpu);
  bool has(Word word) const { return has_[static_cast<std::size_t>(word)]; }
  /// "wgmma: sm_80 has no such word, which exists on sm_90a alone"; for a word that is missing.
  std::string lack(Word word) const;

 private:
  isa::Target target_;
  int gpu_;
  std::array<bool, static_cast<std::size_t>(Word::count)> has_;
};

/// "sm_90a", "gfx942"
std::string name(isa::Target target);

}  // namespace qattn::emu
