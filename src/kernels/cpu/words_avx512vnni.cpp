#include "kernels/cpu/words.hpp"

#if defined(__AVX512VNNI__)

#include "isa/cpu/avx512.hpp"

#define QATTN_ISA avx512vnni
#define QATTN_CODES_IN_PLACE
#include "kernels/cpu/words.inl"
// Second half: softmax.
#include "kernels/cpu/softmax.inl"

const KernelTable* words_avx512vnni() { return &table; }

}  // namespace qattn::cpu

#else

const qattn::cpu::KernelTable* qattn::cpu::words_avx512vnni() { return nullptr; }

#endif
