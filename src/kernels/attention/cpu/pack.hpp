// What packing K and packing V share.
#pragma once

#include "kernels/attention/cpu/kernel.hpp"
#include "kernels/attention/cpu/operand.hpp"

namespace qattn::cpu {

/// Tokens of the tile that begins with token `first`.
int tile_count(const Sequence& x, std::int64_t first);
/// Values of a row of given codes with a free scale. Inf, which e5m2 has, spoils like NaN.
void decode_given_row(const Sequence& x, std::int64_t token, float* row);
/// Given scales of tokens [first, first + count) of one head, channel granularities aside.
void given_token_scales(const Job& job, Role role, const Sequence& x, std::int64_t b,
                        std::int64_t head, std::int64_t first, int count, float* scale);
/// A row of codes and zeros behind it, `width` in all: the tensor ends where its channels end.
const std::uint8_t* filled_codes(const Sequence& x, std::int64_t token, int width,
                                 std::uint8_t* memory);
/// Are rows that a float engine takes the rows of the tensor, as they lie?
bool as_it_lies(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
                int width);
/// Are rows of floats coded by code_rows(): s8 codes for the integer engine, a scale each? It
/// counts no codes for a report.
bool coded_at_once(const Job& job, Role role, const Sequence& x);
/// Where code_rows() puts what it makes: codes every `stride` bytes, scales, and if it is wanted
/// each row's sum of codes.
struct CodedRows {
  std::uint8_t* codes;
  std::int64_t stride;
  float* scale;
  std::int32_t* sum = nullptr;
};
/// Tokens [first, first + count), tile_keys at most.
void code_rows(const Job& job, Role role, const Sequence& x, std::int64_t b, std::int64_t head,
               std::int64_t first, int count, const CodedRows& to);
/// Which of the rows of tokens [first, first + count) hold NaN or Inf: a byte each. Returns whether
/// any does; all of them are near then.
std::uint8_t find_bad_rows(const Job& job, const Sequence& x, std::int64_t first, int count,
                           std::uint8_t* bad);
/// Scales of s8 codes of V for the integer engine.
void given_value_scales(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                        std::int64_t first, int count, const Tile& tile, Scratch& scratch);
/// Loads a tile of V into scratch.rows ([tile_keys][dv padded]): transformed floats, or the values
/// of given codes without their free scale. Rows that hold NaN or Inf become zeros and are flagged:
/// the tile loop turns every query that can see such a token into NaN and nobody else.
void load_values(const Job& job, const Sequence& x, std::int64_t b, std::int64_t head,
                 std::int64_t first, int count, const Tile& tile, Scratch& scratch);
/// V's panels of a tile.
void pack_values(const Job& job, std::int64_t b, std::int64_t head, std::int64_t first,
                 const Tile& tile, Scratch& scratch);

}  // namespace qattn::cpu
