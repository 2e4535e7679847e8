#include "isa/cpu/scalar.hpp"

#define QATTN_ISA scalar
#include "kernels/cpu/words.inl"
// Second half: softmax.
#include "kernels/cpu/softmax.inl"

const KernelTable* words_scalar() { return &table; }

}  // namespace qattn::cpu
