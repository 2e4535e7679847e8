// Rows of one head of one sequence, and their quantisation: what quantize() and the attention
// kernels share, so that their codes are equal bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/words.hpp"
#include "kernels/operand/seen.hpp"
#include "qattn/recipe.hpp"

namespace qattn::cpu {

/// The tokens of one (sequence, head) in memory: dense, packed, or scattered over pages.
struct Sequence {
  const std::byte* base = nullptr;  ///< token 0 of this head (paged: token 0 of page 0)
  Format format = Format::none;
  int bits = 0;                   ///< per element
  std::int64_t token_stride = 0;  ///< in elements
  std::int64_t length = 0;        ///< tokens that exist
  int channels = 0;
  const void* pages = nullptr;  ///< this sequence's page numbers, s32 or s64, or null
  bool wide_pages = false;      ///< s64
  std::int64_t page_table_stride = 1, page_size = 1, page_stride = 0;
  const Seen* seen = nullptr;  ///< [length], or null: every token is seen

  bool hidden(std::int64_t token) const { return seen != nullptr && seen[token] == Seen::no; }
  /// Has the token a part in means and in scales of several tokens?
  bool shares(std::int64_t token) const { return seen == nullptr || seen[token] == Seen::yes; }

  std::int64_t page(std::int64_t token) const {
    const std::int64_t at = token / page_size * page_table_stride;
    return wide_pages ? static_cast<const std::int64_t*>(pages)[at]
                      : static_cast<const std::int32_t*>(pages)[at];
  }
  const std::byte* row(std::int64_t token) const {
    const std::int64_t element =
        pages ? page(token) * page_stride + token % page_size * token_stride : token * token_stride;
    return base + element * bits / 8;
  }
};

/// Does any token of [begin, end) share()? Where none does, those that are not hidden share.
bool some_share(const Sequence& x, std::int64_t begin, std::int64_t end);

/// How rows are changed before they are quantised.
struct Transform {
  const float* mean = nullptr;  ///< subtracted first; padded to a multiple of 16
  bool rotate = false;
  const float* factors = nullptr;  ///< of channels, powers of two; before the rotation
};

/// formats::rotate() and formats::unrotate() at the speed of the instruction set, bit for bit.
void rotate(const KernelTable& words, float* x, int n);
void unrotate(const KernelTable& words, float* x, int n);

constexpr int padded(int n) { return (n + lanes - 1) / lanes * lanes; }

/// Row `token` of a float tensor, transformed; dst is padded to a multiple of 16 with zeros. A
/// hidden token's row is all zeros.
void load_row(const KernelTable& words, const Sequence& x, std::int64_t token,
              const Transform& transform, float* dst);

/// Mean over the tokens of [begin, end) that share() (0 without any), summed in float32 by 64 rows
/// and in float64 above. `mean` and `partial`, which is scratch, are padded.
void mean_of_rows(const KernelTable& words, const Sequence& x, std::int64_t begin, std::int64_t end,
                  float* mean, float* partial);

/// Factors that balance K's loud channels, [2][padded(channels)]: of K's rows and of Q's
/// (docs/NUMERICS.md, "Loud channels"). `central`: K's mean is subtracted. False: K is not loud;
/// nothing is written. `row`: scratch for one.
bool balance_rows(const KernelTable& words, const Sequence& x, bool central, float* factors,
                  float* row);

/// max |x| of every transformed row (NaN if it holds a NaN); `row` is scratch for one row.
void amax_of_rows(const KernelTable& words, const Sequence& x, const Transform& transform,
                  float* amax, float* row);

/// Folds the maxima of tokens into one per group; `group_amax` has scale_count() entries and is
/// first set to 0.
void fold_groups(const Scaling& scaling, Role role, const float* token_amax, std::int64_t tokens,
                 float* group_amax, std::int64_t groups);

/// Maxima of consecutive tokens of V, the first at the beginning of a block, to those that
/// Granularity::per_thread codes them for.
void join_amax(float* amax, std::int64_t tokens);

/// Largest magnitude of a code with a free scale: 127, 448, 240 or 57344.
float code_max(Format format);

/// Codes of one row under one scale; returns how many were clipped (never with scale = amax /
/// qmax).
int encode_row(const KernelTable& words, Format format, const float* row, int n, float inverse,
               std::uint8_t* codes);
/// Codes (s8, e4m3, e4m3fnuz, e5m2) as floats, without their scale.
void decode_row(Format format, const std::uint8_t* codes, int n, float* row);

/// Micro-scaled formats: a contiguous run of n values in groups; codes one byte each, scales coded.
void encode_groups(Format format, const float* x, int n, float global, std::uint8_t* codes,
                   std::uint8_t* scales);
/// One code to its value. `global` counts for nvfp4 only.
float decode_group_code(Format format, std::uint8_t code, std::uint8_t scale, float global);

/// The second level of nvfp4 for a matrix whose largest magnitude is `amax`.
float global_scale(float amax);

/// In place: rounds to f16 or bf16 and back; f32 stays.
void round_row(const KernelTable& words, Format format, float* row, int n);

/// One code of a packed row.
std::uint8_t packed_code(const std::byte* row, std::int64_t index, int bits);

/// Converts floats to an output row of f32, f16 or bf16.
void store_row(const KernelTable& words, const float* row, int n, Format format, std::byte* dst);

Element element_of(Format format);

}  // namespace qattn::cpu
