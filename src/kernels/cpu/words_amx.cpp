// AVX-512 with AMX: the products run on tiles (Intel SDM, volume 1, chapter 18), the rest is
// shared.
#include "kernels/cpu/words.hpp"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__)

#define QATTN_ISA_NAME "amx"
#include "isa/cpu/avx512.hpp"

#define QATTN_ISA avx512vnni
#define QATTN_CODES_IN_PLACE
#define QATTN_NATIVE_BF16
#define QATTN_TILE_PRODUCTS
#include "kernels/cpu/words.inl"
// The products on tiles.
#include "kernels/cpu/tiles_amx.inl"
// Second half: softmax.
#include "kernels/cpu/softmax.inl"

const KernelTable* words_amx() { return &table; }

}  // namespace qattn::cpu

#else

const qattn::cpu::KernelTable* qattn::cpu::words_amx() { return nullptr; }

#endif
