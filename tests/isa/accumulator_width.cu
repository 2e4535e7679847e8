// How many bits the matrix units keep while they add up, measured on the GPU: 1 + 2^-n for growing
// n, where 1 and 2^-n are two products of one instruction, or one is the accumulator. Prints JSON:
//   nvcc -std=c++20 -O2 -gencode arch=compute_90a,code=sm_90a -Isrc tests/isa/accumulator_width.cu
//   ./a.out >accumulators.json
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>

#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "isa/launch.hpp"

namespace qattn::isa_test {
namespace {

using namespace isa;

/// d = a[0] * b[0] + a[1] * b[1] + c in every element of a tile.
struct Sum {
  std::uint32_t a, b;  ///< both codes, the first in the low bits
  float c;
  float* out;
};

template <Element E, bool Warpgroup>
struct SumKernel {
  using Params = Sum;
  static constexpr int threads = 128, min_blocks = 1, shared_bytes = 2048;
  static __device__ void run(const Params& p) {
    // Lanes 0, 4, 8, ... hold the first columns of A's rows and the first rows of B's columns.
    const bool mine = lane() % 4 == 0;
    const std::uint32_t a[1][4] = {{mine ? p.a : 0, mine ? p.a : 0, 0, 0}};
    if constexpr (Warpgroup) {
      for (int i = 0; i < 4; ++i) {
        const int word = 4 * thread() + i;
        // Rows of 16 bytes, the first 64 of them with the first columns.
        store_shared(shared_base() + static_cast<SharedAddress>(4 * word),
                     word < 256 && word % 4 == 0 ? p.b : 0u);
      }
      fence_async_proxy();
      sync_threads();
      float d[32];
      for (float& x : d) x = p.c;
      wgmma_fence();
      wgmma<E, E, 64>(d, a[0], matrix_descriptor(shared_base(), 1024, 128, Swizzle::none), true);
      wgmma_commit();
      wgmma_wait<0>();
      if (thread() == 0) store_global(p.out, d[0]);
    } else {
      const std::uint32_t b[1][2] = {{mine ? p.b : 0, 0}};
      float d[1][1][4] = {{{p.c, p.c, p.c, p.c}}};
      mma<E, E>(d, a, b);
      if (thread() == 0) store_global(p.out, d[0][0][0]);
    }
  }
};

template <class Codec>
struct Operand {
  static constexpr int bits = 8 * sizeof(typename Codec::Code);
  /// Codes of 1 (or 0) and of `small`.
  static std::uint32_t pair(double first, double small) {
    return static_cast<std::uint32_t>(Codec::encode(static_cast<float>(first))) |
           static_cast<std::uint32_t>(Codec::encode(static_cast<float>(small))) << bits;
  }
};

float* result = nullptr;
int rows = 0;

template <Element E, bool Warpgroup, class Codec>
double sum(double first, double factor, int exponent, double c) {
  // Half of the exponent in each factor, so that both are numbers of the format.
  const double x = factor * std::ldexp(1, -(exponent / 2)),
               y = std::ldexp(1, exponent / 2 - exponent);
  const Sum s{Operand<Codec>::pair(first, x), Operand<Codec>::pair(first, y), static_cast<float>(c),
              result};
  const LaunchError e = launch<SumKernel<E, Warpgroup>>(s, {1, 1, 1}, nullptr);
  float got = NAN;
  cudaMemcpy(&got, result, sizeof got, cudaMemcpyDeviceToHost);
  return e.empty() ? got : NAN;
}

/// Fraction bits that survive beside 1: the largest n with 1 + 2^-n > 1, of at most `most`.
template <class Function>
int fraction_bits(int most, Function one_plus) {
  int bits = 0;
  while (bits < most && one_plus(1.0, bits + 1) > 1) ++bits;
  return bits;
}

/// Has this GPU the instruction?
bool exists(Element e, bool warpgroup) {
  cudaDeviceProp gpu{};
  if (cudaGetDeviceProperties(&gpu, 0) != cudaSuccess) return false;
  const int arch = 10 * gpu.major + gpu.minor;
  return warpgroup ? arch == 90 : is_16bit(e) ? arch >= 80 : arch >= 89;
}

template <Element E, bool Warpgroup, class Codec>
void measure(const char* name, int most) {
  if (!exists(E, Warpgroup)) return;
  const auto products = [](double f, int n) { return sum<E, Warpgroup, Codec>(1, f, n, 0); };
  const auto into = [](double f, int n) { return sum<E, Warpgroup, Codec>(0, f, n, 1); };
  const auto onto = [](double f, int n) {
    return sum<E, Warpgroup, Codec>(1, 0, 0, f * std::ldexp(1, -n));
  };
  const int p = fraction_bits(most, products), i = fraction_bits(most, into),
            o = fraction_bits(40, onto);
  // Three quarters of the last bit that survives: rounding would give the bit, truncation nothing.
  const auto rounds = [](double value) { return value > 1 ? "rounds" : "truncates"; };
  std::printf(
      "%s    {\"instruction\": \"%s %s\", \"products\": %d, \"product_into_accumulator\": %d, "
      "\"accumulator_onto_product\": %d, \"at_most\": %d, \"products_beyond\": \"%s\", "
      "\"into_accumulator_beyond\": \"%s\"}",
      rows++ > 0 ? ",\n" : "", Warpgroup ? "wgmma" : "mma.sync", name, p, i, o, most,
      p < most ? rounds(products(1.5, p + 1)) : "not seen",
      i < most ? rounds(into(1.5, i + 1)) : "not seen");
}

}  // namespace
}  // namespace qattn::isa_test

int main() {
  using namespace qattn;
  using namespace qattn::isa_test;
  using enum isa::Element;
  if (cudaMalloc(&result, sizeof(float)) != cudaSuccess) return 2;
  std::printf("{\"accumulators\": [\n");
  measure<f16, false, formats::F16>("f16", 28);
  measure<bf16, false, formats::Bf16>("bf16", 40);
  measure<e4m3, false, formats::E4m3>("e4m3", 16);
  measure<e5m2, false, formats::E5m2>("e5m2", 28);
  measure<f16, true, formats::F16>("f16", 28);
  measure<bf16, true, formats::Bf16>("bf16", 40);
  measure<e4m3, true, formats::E4m3>("e4m3", 16);
  measure<e5m2, true, formats::E5m2>("e5m2", 28);
  std::printf("\n]}\n");
  return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
