// What is in a page: rows of 16 bits in, codes out, and back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcache/data.hpp"

namespace qattn::kv {

/// K or V of one page.
enum class Part : std::int32_t { k, v };

/// Channels of the callers' rows; a page's own may be more.
int given_channels(const detail::KvCacheData& cache, Part part);

/// A caller's row (f32, f16 or bf16) as a page has it: zeros behind it. `to` has
/// most_channels floats.
void load_given_row(const detail::KvCacheData& cache, Part part, const void* row, Format format,
                    float* to);
/// Copies a caller's row into a page of 16 bits, rounding once.
void store_given_row(const detail::KvCacheData& cache, std::byte* page, Part part, int token,
                     const void* row, Format format);

/// Copies one row (f32, f16 or bf16) of a page's channels into a page of 16 bits, rounding once.
void store_window_row(const detail::KvCacheData& cache, std::byte* page, Part part, int token,
                      const void* row, Format format);

/// Quantises the live tokens of a page of a better tier (0: the 16-bit window) for `tier`. A part
/// that keeps its bits keeps its codes. Codes of tokens that are not alive are zeros or old.
void recode_page(const detail::KvCacheData& cache, int from, const std::byte* page,
                 std::uint64_t live, const Frames& frames, int tier, std::byte* to);

/// The live tokens of a page of codes as rows of 16 bits, rounded into the format's range; rows of
/// others are zeros.
void expand_page(const detail::KvCacheData& cache, int from, const std::byte* page,
                 std::uint64_t live, const Frames& frames, std::byte* to);

/// Tokens of a page whose K is NaN beside channel scales, as bits; 0 where each token has a scale.
std::uint64_t bad_tokens(const formats::KvPage& layout, const std::byte* page);

/// The row of a token, as it is (zeros behind the callers' channels) or, with `stored`, as the
/// codes have it (mean, powers of two and rotation not undone). `row` has most_channels
/// floats.
void load_page_row(const detail::KvCacheData& cache, int tier, const std::byte* page, Part part,
                   int token, const Frames& frames, bool stored, float* row);

}  // namespace qattn::kv
