// What the CPU makes of a case in formats with built-in scales, and the checks of every byte that
// prepare() writes for them.
#pragma once

#include <cstdint>
#include <vector>

#include "encode_case.hpp"
#include "hidden_case.hpp"

namespace qattn::encode_test {

inline constexpr Format micro_formats[] = {Format::nvfp4, Format::mxfp8, Format::mxfp4};
inline constexpr int micro_dims[] = {40, 64, 104, 128, 200};
inline constexpr Role every_role[] = {Role::q, Role::k, Role::v};

/// Without means, rotation, or balanced channels.
Recipe micro_recipe(Format qk, Format v);
/// Format, storage, dimensions, lengths and order from a number, so that a list of cases covers
/// them.
CaseOptions micro_case(unsigned i);

/// A head of a sequence, by the functions that the CPU's attention consists of, in its order.
struct MicroMade {
  float global = 1.0f;
  std::vector<std::uint8_t> codes;   ///< [token][channel], one a byte
  std::vector<std::uint8_t> scales;  ///< Q, K: [token][group]; V: [group][channel]
  std::vector<bool> bad;             ///< [token]
  std::vector<float> mean;           ///< [mean][channels padded to 16]: Q's of blocks
  bool zeros = false;                ///< all numbers are
  int row_groups = 0;
};
MicroMade make_micro(const Case& c, Role r, std::int64_t b, int h, const Hidden* hidden = nullptr);

/// The place of a key of a tile among K's rows, and in V's contraction order.
int key_place(const Case& c, int key);
int value_place(const Case& c, int key);
/// One of a row of codes.
std::uint8_t code_at(const std::uint8_t* row, int index, int bits);

void check_micro_rows(const Case& c, Role r, const Hidden* hidden = nullptr);
void check_micro_values(const Case& c, const Hidden* hidden = nullptr);
/// What is prepared, after running the kernels.
void check_micro(Case& c);

}  // namespace qattn::encode_test
