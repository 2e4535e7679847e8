// Rows of the KV cache on CPUs: formats/kv/quantize.hpp at the speed of the instruction set in
// force, bit for bit.
#pragma once

#include <cstdint>

#include "kernels/cpu/words.hpp"

namespace qattn::cpu {

/// Codes (one a byte) of a row of n elements, n a multiple of 16; returns its scale's f16 code.
std::uint16_t encode_kv_row(const KernelTable& words, const float* x, int n, int bits,
                            std::uint8_t* codes);

}  // namespace qattn::cpu
