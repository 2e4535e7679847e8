// AVX-512 VNNI with bf16 dot products (Cooper Lake, Zen 4), where there are no tiles.
#include "kernels/cpu/words.hpp"

#if defined(__AVX512BF16__)

#define QATTN_ISA_NAME "avx512bf16"
#include "isa/cpu/avx512.hpp"

#define QATTN_ISA avx512vnni
#define QATTN_CODES_IN_PLACE
#define QATTN_NATIVE_BF16
#include "kernels/cpu/words.inl"
// Second half: softmax.
#include "kernels/cpu/softmax.inl"

const KernelTable* words_avx512bf16() { return &table; }

}  // namespace qattn::cpu

#else

const qattn::cpu::KernelTable* qattn::cpu::words_avx512bf16() { return nullptr; }

#endif
