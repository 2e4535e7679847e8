// Conversions judged by CUDA's own headers, which have them on the host, too. Needs the headers of
// the PyPI package nvidia-cuda-runtime, and no GPU.
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <functional>

#include "emulate.hpp"

namespace qattn::isa_test {
namespace {

/// Pairs of floats of every exponent, either sign, and fractions at, below and above the halves of
/// narrow formats; infinities and NaN among them.
void for_each_pair(const std::function<void(float, float)>& judge) {
  constexpr std::uint32_t fractions[] = {0,        1,        0x080000, 0x100000, 0x180000,
                                         0x200000, 0x200001, 0x300000, 0x3fffff, 0x400000,
                                         0x500000, 0x600000, 0x700001, 0x780000, 0x7fffff};
  run_block(
      32, 0,
      [&] {
        if (isa::lane() != 0) return;
        float before = 1;
        for (std::uint32_t sign_and_exponent = 0; sign_and_exponent < 512; ++sign_and_exponent) {
          for (const std::uint32_t fraction : fractions) {
            const float x = std::bit_cast<float>(sign_and_exponent << 23 | fraction);
            judge(x, before);
            before = x;
          }
        }
      },
      120);
}

TEST(JudgeConversions, ToUe8m0) {
  for_each_pair([](float lo, float hi) {
    const auto judged = [=](cudaRoundMode rounding) {
      return __nv_cvt_float2_to_e8m0x2({lo, hi}, __NV_SATFINITE, rounding);
    };
    ASSERT_EQ(isa::pack_ue8m0(lo, hi), judged(cudaRoundZero)) << lo << ' ' << hi;
    ASSERT_EQ(isa::pack_ue8m0_up(lo, hi), judged(cudaRoundPosInf)) << lo << ' ' << hi;
  });
}

TEST(JudgeConversions, ToFp8) {
  for_each_pair([](float lo, float hi) {
    ASSERT_EQ(isa::pack_e4m3(lo, hi), __nv_cvt_float2_to_fp8x2({lo, hi}, __NV_SATFINITE, __NV_E4M3))
        << lo << ' ' << hi;
    ASSERT_EQ(isa::pack_e5m2(lo, hi), __nv_cvt_float2_to_fp8x2({lo, hi}, __NV_SATFINITE, __NV_E5M2))
        << lo << ' ' << hi;
  });
}

/// The word does not look at NaN.
TEST(JudgeConversions, ToE2m1) {
  for_each_pair([](float lo, float hi) {
    if (lo != lo || hi != hi) return;
    const std::uint32_t judged = __nv_cvt_float2_to_fp4x2({lo, hi}, __NV_E2M1, cudaRoundNearest);
    ASSERT_EQ(isa::pack_e2m1({lo, hi, lo, hi, lo, hi, lo, hi}), judged * 0x01010101u)
        << lo << ' ' << hi;
  });
}

}  // namespace
}  // namespace qattn::isa_test
