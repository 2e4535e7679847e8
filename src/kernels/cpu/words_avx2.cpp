#include "kernels/cpu/words.hpp"

#if defined(__AVX2__)

#include "isa/cpu/avx2.hpp"

#define QATTN_ISA avx2
#include "kernels/cpu/words.inl"
// Second half: softmax.
#include "kernels/cpu/softmax.inl"

const KernelTable* words_avx2() { return &table; }

}  // namespace qattn::cpu

#else

const qattn::cpu::KernelTable* qattn::cpu::words_avx2() { return nullptr; }

#endif
