// How a call fills a GPU. Of few queries: query heads of a KV head share a tile of rows, and
// several blocks share the keys. Of many: where the last works would keep few multiprocessors busy,
// all share their keys. Parts of rows (PartsView) lie in the workspace until CombineSplits ends
// them.
#pragma once

#include <cstddef>
#include <string>

#include "core/problem.hpp"
#include "isa/launch.hpp"
#include "kernels/attention/common/params.hpp"
#include "kernels/attention/schedule/average_keys.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// What a kernel can do.
struct SplitKvLimits {
  int rows = 128;      ///< of a tile
  int channels = 128;  ///< of its output, padded
  int blocks = 1;      ///< that the device runs at a time
  bool parts = false;  ///< it can leave rows as parts alone
  int pack_rows = 0;   ///< heads that share a tile divide this number, if it is not 0
};

/// A plan's choice, from shapes and the device alone.
struct SplitKv {
  int pack_gqa = 1;  ///< heads that share a tile
  int splits = 1;    ///< blocks that share the keys of one
  int rows = 0;      ///< of a part; 0: there are none, rows end in the kernel
  int channels = 0;
  std::int64_t work_tiles = 0;  ///< AttentionParams::work_tiles
  std::int64_t whole = 0;       ///< AttentionParams::whole
  std::size_t at = 0;           ///< of the parts in the workspace

  /// Is there no row that ends in the kernel?
  bool all_parts() const { return rows > 0 && whole == 0; }
};

using detail::visible_keys;

/// The choice for a call, and room for its parts behind `workspace`, which grows.
SplitKv plan_split_kv(const Problem& problem, const Recipe& recipe, const SplitKvLimits& limits,
                      std::size_t& workspace);

/// Of a call whose works are whole so far and come in turns to `limits.blocks` that run at a time:
/// splits the keys of those behind the last turn that is full, if that pays. 4096 works (32 heads,
/// 16384 tokens) are 31 turns of 132 multiprocessors, and 4 works: 3 % of a call.
void split_last(const Problem& problem, const Recipe& recipe, const SplitKvLimits& limits,
                SplitKv& split_kv, std::size_t& workspace);

/// Its lines of a plan's text.
std::string text_of(const SplitKv& split_kv);

/// Tells kernels with tiles of `rows` rows; before that `params` is of one block a head and tile.
void set_split_kv(const SplitKv& split_kv, int rows, void* workspace, AttentionParams& params);

/// Ends the rows that a kernel left as parts; does nothing where there are none. `start`: early
/// behind a kernel that is `dependent`.
isa::LaunchError combine_parts(const AttentionParams& params, void* stream,
                               isa::Start start = isa::Start::after_all);

/// For tests and benchmarks: what plans take instead of their own choice; 0: nothing. Packs and
/// consumers (of Hopper's kernel) that a call cannot have it does not take.
struct SplitKvOverride {
  int pack_gqa = 0, splits = 0, consumers = 0;
  int p_in_smem = -1;   ///< 16-bit P in shared memory (Sm90Config::p_in_smem), or not; -1: nothing
  int last_splits = 0;  ///< of works behind the last full turn; 1: they stay whole
};
SplitKvOverride& split_kv_override();

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
