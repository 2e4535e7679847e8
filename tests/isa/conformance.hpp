// Hardware against the emulator: the same kernel text runs each operation on both, on the same
// operands from a fixed seed. The emulator's program writes what it got, the GPU's program
// compares.
//
// An operation is a type:
//   name; arch, the first that has it (wgmma: 90 alone); cases, blocks of `threads`;
//   inputs, outputs: words a thread; operand: what the inputs are; compare: how outputs are judged;
//   launches: how often it runs, one launch starting early behind the other (isa/launch.hpp);
//   static QATTN_DEVICE void apply(const Data&, in, out): reads its inputs, writes its outputs, or
//   those in memory where it `writes_itself`
#pragma once

#include <cstdint>

#include "isa/launch.hpp"
#include "isa/tensor_map.hpp"

namespace qattn::isa_test {

using Word32 = std::uint32_t;

enum class Operand {
  raw,     ///< any bits, often extreme bytes
  floats,  ///< float32: random and the corners of every format
  small_f16,
  small_bf16,
  small_e4m3,
  small_e5m2,  ///< integers -3..3: every sum is exact
  wide_f16,
  wide_bf16,
  wide_e4m3,
  wide_e5m2  ///< random finite values
};

enum class Compare {
  bits,
  floats,       ///< equal bits, or NaN both: payloads are free
  ulp,          ///< approximations: within a few units in the last place
  accumulator,  ///< sums of products: deviation relative to the tile's largest value, reported
};

/// What TMA operations copy: nothing, the inputs, or the outputs.
enum class Mapped { nothing, inputs, outputs };

inline namespace QATTN_TARGET {

using namespace isa;

struct Data {
  const Word32* in;
  Word32* out;
  TensorMap map;
  int step = 0;  ///< which of the operation's launches
};

/// What an operation leaves unsaid.
struct Defaults {
  static constexpr int arch = 80, cases = 16, inputs = 1, outputs = 1, shared_bytes = 0;
  static constexpr int threads = 128, launches = 1;
  static constexpr bool writes_itself = false;
  static constexpr Operand operand = Operand::raw;
  static constexpr Compare compare = Compare::bits;
  static constexpr Mapped mapped = Mapped::nothing;
  static constexpr Swizzle swizzle = Swizzle::none;
  static constexpr bool hopper_only = false;
};

template <class Op>
struct ConformanceKernel {
  using Params = Data;
  static constexpr int threads = Op::threads, min_blocks = 1, shared_bytes = Op::shared_bytes;
  static constexpr bool dependent = Op::launches > 1;
  static constexpr Target target{Op::arch, Op::hopper_only};
  static QATTN_DEVICE void run(const Params& p) {
    const int index = block().x * threads + thread();
    Word32 in[Op::inputs], out[Op::outputs];
    for (int i = 0; i < Op::inputs; ++i) in[i] = load_global(p.in + index * Op::inputs + i);
    for (int i = 0; i < Op::outputs; ++i) out[i] = 0;
    Op::apply(p, in, out);
    if constexpr (!Op::writes_itself) {
      for (int i = 0; i < Op::outputs; ++i) store_global(p.out + index * Op::outputs + i, out[i]);
    }
  }
};

QATTN_DEVICE float as_float(Word32 w) {
#if defined(__CUDACC__)
  return __uint_as_float(w);
#else
  return std::bit_cast<float>(w);
#endif
}
QATTN_DEVICE Word32 as_word(float f) {
#if defined(__CUDACC__)
  return __float_as_uint(f);
#else
  return std::bit_cast<Word32>(f);
#endif
}
QATTN_DEVICE Word32 as_word(std::int32_t i) { return static_cast<Word32>(i); }

QATTN_DEVICE SharedAddress word_of(int index) {
  return shared_base() + static_cast<SharedAddress>(4 * index);
}

/// What takes a GPU some thousand clocks, and no compiler knows a shorter way. Who writes it to
/// shared memory is late, so that whoever does not wait for it finds something else.
QATTN_DEVICE Word32 slow(Word32 v) {
  for (Word32 i = 0; i < 256; ++i) v = (v ^ v >> 15) * 0x2c1b3c6du + i;
  return v;
}

/// Puts a thread's words into shared memory, 128 words apart, and the block meets.
template <int N>
QATTN_DEVICE void fill_shared(const Word32 (&in)[N]) {
  for (int i = 0; i < N; ++i) {
    store_shared(shared_base() + static_cast<SharedAddress>(4 * (128 * i + thread())), in[i]);
  }
  sync_threads();
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test

#include "conformance_order.hpp"
#include "conformance_sm80.hpp"
#include "conformance_sm90.hpp"
#include "conformance_tma.hpp"

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

/// visit(Op()) for every operation.
template <class Visit>
void for_each_operation(Visit visit) {
  for_each_sm80_operation(visit);
  for_each_sm90_operation(visit);
  for_each_order_operation(visit);
  for_each_tma_operation(visit);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
