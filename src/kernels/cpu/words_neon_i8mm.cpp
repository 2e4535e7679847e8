#include "kernels/cpu/words.hpp"

#if defined(__ARM_FEATURE_DOTPROD)

#define QATTN_ISA_NAME "neon_i8mm"
#include "isa/cpu/neon.hpp"

#define QATTN_ISA neon
#include "kernels/cpu/words.inl"
// Second half: softmax.
#include "kernels/cpu/softmax.inl"

const KernelTable* words_neon_i8mm() { return &table; }

}  // namespace qattn::cpu

#else

const qattn::cpu::KernelTable* qattn::cpu::words_neon_i8mm() { return nullptr; }

#endif
