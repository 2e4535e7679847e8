// The emulator judged by CUTLASS: CuTe's layouts, not ours, say which lane holds which element,
// where a swizzled tile's elements lie, and what the bits of a matrix descriptor are. Needs the
// headers of the PyPI package nvidia-cutlass, and no GPU.
#include <gtest/gtest.h>

#include <cute/atom/mma_traits_sm120.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm89.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "emulate.hpp"
#include "operands.hpp"
#include "scaled_operands.hpp"

namespace qattn::isa_test {
namespace {

using isa::Element;
using isa::Swizzle;

std::uint32_t place(int value, int element_bits, std::uint32_t code) {
  return code << (value % (32 / element_bits) * element_bits);
}

// ---- mma
// -------------------------------------------------------------------------------------------

template <class Atom, Element A, Element B, bool Narrow = false>
void judge_mma() {
  using Traits = cute::MMA_Traits<Atom>;
  constexpr int bits = isa::is_16bit(A) ? 16 : 8, k = 256 / bits;
  static const Operands<1, 1> operands(A, B, 5);
  const typename Traits::ALayout a_layout;
  const typename Traits::BLayout b_layout;
  const typename Traits::CLayout c_layout;
  const auto kernel = [&] {
    const int l = isa::lane();
    std::uint32_t a[1][4] = {}, b[1][2] = {};
    for (int v = 0; v < 4 * 32 / bits; ++v) {
      const int at = a_layout(l, v);  // column-major in (M, K)
      a[0][v * bits / 32] |= place(v, bits, operands.a[at % 16][at / 16]);
    }
    for (int v = 0; v < 2 * 32 / bits; ++v) {
      const int at = b_layout(l, v);  // column-major in (N, K)
      b[0][v * bits / 32] |= place(v, bits, operands.b[at / 8][at % 8]);
    }
    isa::Accumulator<A> d[1][1][4] = {};
    if constexpr (Narrow) {
      isa::mma_f8f6f4<A, B>(d, a, b);
    } else {
      isa::mma<A, B>(d, a, b);
    }
    for (int v = 0; v < 4; ++v) {
      const int at = c_layout(l, v);
      ASSERT_EQ(static_cast<double>(d[0][0][v]), operands.product(at % 16, at / 16)) << l << v;
    }
  };
  run_block(32, 0, kernel, Narrow ? 120 : 89);  // which have products of FP8
  EXPECT_EQ(int(cute::get<2>(typename Traits::Shape_MNK{})), k);
}

TEST(JudgeCutlass, MmaLaneLayouts) {
  using enum Element;
  judge_mma<cute::SM80_16x8x16_F32F16F16F32_TN, f16, f16>();
  judge_mma<cute::SM80_16x8x16_F32BF16BF16F32_TN, bf16, bf16>();
  judge_mma<cute::SM80_16x8x32_S32S8S8S32_TN, s8, s8>();
  judge_mma<cute::SM80_16x8x32_S32S8U8S32_TN, s8, u8>();
  judge_mma<cute::SM80_16x8x32_S32U8S8S32_TN, u8, s8>();
  judge_mma<cute::SM80_16x8x32_S32U8U8S32_TN, u8, u8>();
  judge_mma<cute::SM89_16x8x32_F32E4M3E4M3F32_TN, e4m3, e4m3>();
  judge_mma<cute::SM89_16x8x32_F32E4M3E5M2F32_TN, e4m3, e5m2>();
  judge_mma<cute::SM89_16x8x32_F32E5M2E4M3F32_TN, e5m2, e4m3>();
  judge_mma<cute::SM89_16x8x32_F32E5M2E5M2F32_TN, e5m2, e5m2>();
}

TEST(JudgeCutlass, NarrowProducts) {
  using enum Element;
  using cutlass::float_e2m1_t, cutlass::float_e4m3_t, cutlass::float_e5m2_t;
  judge_mma<cute::SM120_16x8x32_TN<float_e4m3_t, float_e4m3_t, float>, e4m3, e4m3, true>();
  judge_mma<cute::SM120_16x8x32_TN<float_e4m3_t, float_e5m2_t, float>, e4m3, e5m2, true>();
  judge_mma<cute::SM120_16x8x32_TN<float_e5m2_t, float_e2m1_t, float>, e5m2, e2m1, true>();
  judge_mma<cute::SM120_16x8x32_TN<float_e2m1_t, float_e2m1_t, float>, e2m1, e2m1, true>();
}

/// Products with scales: CuTe also says which lane and byte holds the scale of a row and its k.
template <class Atom, isa::Scaled S>
void judge_scaled() {
  using Traits = cute::MMA_Traits<Atom>;
  using Own = ScaledOperands<S, 1, 1>;
  static const Own operands(5);
  const typename Traits::ALayout a_layout;
  const typename Traits::BLayout b_layout;
  const typename Traits::CLayout c_layout;
  const typename Traits::SFALayout sa_layout;
  const typename Traits::SFBLayout sb_layout;
  const auto kernel = [&] {
    const int l = isa::lane();
    std::uint32_t a[1][4] = {}, b[1][2] = {}, sa[1] = {}, sb[1] = {};
    for (int v = 0; v < 4 * Own::each; ++v) {
      const int at = a_layout(l, v);  // column-major in (M, K)
      a[0][v / Own::each] |= place(v, Own::bits, operands.a[at % 16][at / 16]);
    }
    for (int v = 0; v < 2 * Own::each; ++v) {
      const int at = b_layout(l, v);  // column-major in (N, K)
      b[0][v / Own::each] |= place(v, Own::bits, operands.b[at / 8][at % 8]);
    }
    for (int k = 0; k < Own::depth; k += Own::block) {
      const int row = sa_layout(l, k), column = sb_layout(l, k), i = k / Own::block;
      ASSERT_EQ(row / 16, k);
      ASSERT_EQ(column / 8, k);
      sa[0] |= operands.sa[row % 16][i] << 8 * i;
      sb[0] |= operands.sb[column % 8][i] << 8 * i;
    }
    float d[1][1][4] = {};
    isa::mma_scaled<S, 1, 1>(d, a, b, sa, sb);
    for (int v = 0; v < 4; ++v) {
      const int at = c_layout(l, v);
      ASSERT_EQ(static_cast<double>(d[0][0][v]), operands.product(at % 16, at / 16)) << l << v;
    }
  };
  run_block(32, 0, kernel, 120);
  EXPECT_EQ(int(cute::get<2>(typename Traits::Shape_MNK{})), Own::depth);
}

TEST(JudgeCutlass, ScaledProducts) {
  using namespace cute::SM120::BLOCKSCALED;
  using cutlass::float_e2m1_t, cutlass::float_e4m3_t, cutlass::float_ue4m3_t,
      cutlass::float_ue8m0_t;
  judge_scaled<SM120_16x8x32_TN_VS<float_e4m3_t, float_e4m3_t, float, float_ue8m0_t, 32>,
               isa::Scaled::mxfp8>();
  judge_scaled<SM120_16x8x64_TN_VS<float_e2m1_t, float_e2m1_t, float, float_ue8m0_t, 32>,
               isa::Scaled::mxfp4>();
  judge_scaled<SM120_16x8x64_TN_VS<float_e2m1_t, float_e2m1_t, float, float_ue4m3_t, 16>,
               isa::Scaled::nvfp4>();
}

// ---- wgmma
// -----------------------------------------------------------------------------------------

/// CuTe's layout of a tile of `Rows` (of M or N) by `Depth` elements of K.
template <class Atom, int Rows, int Depth>
using TileLayout =
    decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<Rows>, cute::Int<Depth>>{}));

/// The descriptor that CuTe makes for the first K step of the tile; its address field is 0, for
/// want of shared memory.
template <cute::GMMA::Major kMajor, class T, class Layout, int Rows>
std::uint64_t cute_descriptor() {
  const auto tensor = cute::make_tensor(cute::make_smem_ptr(static_cast<T*>(nullptr)), Layout{});
  const auto step = cute::local_tile(
      tensor, cute::Shape<cute::Int<Rows>, cute::Int<32 / sizeof(T)>>{}, cute::make_coord(0, 0));
  return cute::SM90::GMMA::make_gmma_desc<kMajor>(step).desc_;
}

std::uint64_t at_address(std::uint64_t descriptor, isa::SharedAddress address) {
  return descriptor | address >> 4;
}

/// Products of a 64 x K and an N x K tile in shared memory, K one step of 32 bytes at `step`.
template <Element E, class T, class AtomA, class AtomB, cute::GMMA::Major kMajorA,
          cute::GMMA::Major kMajorB, int Depth>
void judge_wgmma(int step) {
  constexpr int N = 64, k = 32 / sizeof(T);
  using LayoutA = TileLayout<AtomA, 64, Depth>;
  using LayoutB = TileLayout<AtomB, N, Depth>;
  static const Operands<4, N / 8> operands(E, E, 21);
  static const std::uint64_t bits_a = cute_descriptor<kMajorA, T, LayoutA, 64>();
  static const std::uint64_t bits_b = cute_descriptor<kMajorB, T, LayoutB, N>();
  run_block(128, 65536, [step] {
    const auto layout_a = cute::as_position_independent_swizzle_layout(LayoutA{});
    const auto layout_b = cute::as_position_independent_swizzle_layout(LayoutB{});
    const isa::SharedAddress sa = isa::shared_base(), sb = sa + 32768;
    for (int row = isa::thread(); row < 64; row += 128) {
      for (int i = 0; i < k; ++i) {
        const int c = step * k + i;
        isa::store_shared(sa + static_cast<unsigned>(int(layout_a(row, c)) * sizeof(T)),
                          static_cast<T>(operands.a[row][i]));
        isa::store_shared(sb + static_cast<unsigned>(int(layout_b(row, c)) * sizeof(T)),
                          static_cast<T>(operands.b[i][row]));
      }
    }
    isa::fence_async_proxy();
    isa::sync_threads();
    const auto ahead = static_cast<isa::SharedAddress>(32 * step);  // K-major steps
    isa::Accumulator<E> d[N / 2];
    isa::wgmma_fence();
    isa::wgmma<E, E, N, kMajorA == cute::GMMA::Major::MN, kMajorB == cute::GMMA::Major::MN>(
        d, at_address(bits_a, sa + ahead), at_address(bits_b, sb + ahead), false);
    isa::wgmma_commit();
    isa::wgmma_wait<0>();
    const cute::SM90::GMMA::CLayout_64x64 c_layout;
    for (int v = 0; v < N / 2; ++v) {
      const int at = c_layout(isa::thread(), v);
      ASSERT_EQ(static_cast<double>(d[v]), operands.product(at % 64, at / 64)) << v;
    }
  });
}

constexpr auto kK = cute::GMMA::Major::K;
constexpr auto kMn = cute::GMMA::Major::MN;

template <Element E, class T>
void judge_k_major() {
  namespace gmma = cute::GMMA;
  constexpr int one = 32 / sizeof(T);
  judge_wgmma<E, T, gmma::Layout_K_INTER_Atom<T>, gmma::Layout_K_INTER_Atom<T>, kK, kK, one>(0);
  judge_wgmma<E, T, gmma::Layout_K_SW32_Atom<T>, gmma::Layout_K_SW32_Atom<T>, kK, kK, one>(0);
  for (int step = 0; step < 2; ++step) {
    judge_wgmma<E, T, gmma::Layout_K_SW64_Atom<T>, gmma::Layout_K_SW64_Atom<T>, kK, kK, 2 * one>(
        step);
  }
  for (int step = 0; step < 4; ++step) {
    judge_wgmma<E, T, gmma::Layout_K_SW128_Atom<T>, gmma::Layout_K_SW128_Atom<T>, kK, kK, 4 * one>(
        step);
  }
}

TEST(JudgeCutlass, WgmmaOfKMajorTiles) {
  judge_k_major<Element::s8, std::uint8_t>();
  judge_k_major<Element::e4m3, std::uint8_t>();
  judge_k_major<Element::f16, std::uint16_t>();
}

TEST(JudgeCutlass, WgmmaOfTransposedTiles) {
  namespace gmma = cute::GMMA;
  using T = std::uint16_t;
  constexpr Element f16 = Element::f16;
  using Inter = gmma::Layout_MN_INTER_Atom<T>;
  using Sw32 = gmma::Layout_MN_SW32_Atom<T>;
  using Sw64 = gmma::Layout_MN_SW64_Atom<T>;
  using Sw128 = gmma::Layout_MN_SW128_Atom<T>;
  judge_wgmma<f16, T, Inter, Inter, kMn, kMn, 16>(0);
  judge_wgmma<f16, T, Sw32, Sw32, kMn, kMn, 16>(0);
  judge_wgmma<f16, T, Sw64, Sw64, kMn, kMn, 16>(0);
  judge_wgmma<f16, T, Sw128, Sw128, kMn, kMn, 16>(0);
  judge_wgmma<f16, T, gmma::Layout_K_SW32_Atom<T>, Sw128, kK, kMn, 16>(0);
}

template <class Layout, Element E>
void judge_fragments() {
  constexpr int bits = isa::is_16bit(E) ? 16 : 8, k = 256 / bits, N = 8;
  static const Operands<4, 1> operands(E, E, 31);
  run_block(128, 1024, [] {
    // B without a swizzle: 8 rows of 16 bytes, twice.
    for (int i = isa::thread(); i < N * k; i += 128) {
      const int row = i / k, byte = i % k * bits / 8;
      const auto at =
          isa::shared_base() + static_cast<unsigned>(byte / 16 * 128 + row * 16 + byte % 16);
      const std::uint32_t code = operands.b[i % k][row];
      if (bits == 8) isa::store_shared(at, static_cast<std::uint8_t>(code));
      if (bits == 16) isa::store_shared(at, static_cast<std::uint16_t>(code));
    }
    isa::fence_async_proxy();
    isa::sync_threads();
    const Layout layout;
    std::uint32_t a[4] = {};
    for (int v = 0; v < 128 / bits; ++v) {
      const int at = layout(isa::thread(), v);
      a[v * bits / 32] |= place(v, bits, operands.a[at % 64][at / 64]);
    }
    isa::Accumulator<E> d[N / 2];
    const std::uint64_t b = isa::matrix_descriptor(isa::shared_base(), 128, 128, Swizzle::none);
    isa::wgmma_fence();
    isa::wgmma<E, E, N>(d, a, b, false);
    isa::wgmma_commit();
    isa::wgmma_wait<0>();
    const cute::SM90::GMMA::CLayout_64x8 c_layout;
    for (int v = 0; v < 4; ++v) {
      const int at = c_layout(isa::thread(), v);
      ASSERT_EQ(static_cast<double>(d[v]), operands.product(at % 64, at / 64)) << v;
    }
  });
}

TEST(JudgeCutlass, WgmmaFragments) {
  judge_fragments<cute::SM90::GMMA::ALayout_64x16, Element::bf16>();
  judge_fragments<cute::SM90::GMMA::ALayout_64x32, Element::s8>();
}

// ---- Descriptors
// -----------------------------------------------------------------------------------

TEST(JudgeCutlass, DescriptorBits) {
  using Layout = cute::SM90::GMMA::LayoutType;
  constexpr Layout types[] = {Layout::INTERLEAVE, Layout::B32, Layout::B64, Layout::B128};
  for (int s = 0; s < 4; ++s) {
    for (const unsigned address : {1024u, 232432u}) {
      cute::GmmaDescriptor d;
      d.bitfield.start_address_ = static_cast<std::uint16_t>(address >> 4);
      d.bitfield.leading_byte_offset_ = 4096 >> 4;
      d.bitfield.stride_byte_offset_ = 1024 >> 4;
      d.bitfield.base_offset_ = 0;
      d.bitfield.layout_type_ = static_cast<std::uint8_t>(types[s]);
      EXPECT_EQ(isa::matrix_descriptor(address, 4096, 1024, static_cast<Swizzle>(s)),
                std::uint64_t{d.desc_});
    }
  }
}

/// CuTe's own descriptors against ours for the tiles that kernels use.
TEST(JudgeCutlass, DescriptorsOfTiles) {
  namespace gmma = cute::GMMA;
  const auto ours = [](unsigned leading, unsigned stride, Swizzle s) {
    return isa::matrix_descriptor(0, leading, stride, s);
  };
  // CuTe writes 1 or another number where the hardware ignores the leading bytes: compare the rest.
  constexpr std::uint64_t without_leading = ~(std::uint64_t{0x3fff} << 16);
  const auto k128 =
      cute_descriptor<kK, std::uint8_t,
                      TileLayout<gmma::Layout_K_SW128_Atom<std::uint8_t>, 64, 128>, 64>();
  EXPECT_EQ(k128 & without_leading, ours(0, 1024, Swizzle::bytes128));
  const auto k64 =
      cute_descriptor<kK, std::uint8_t, TileLayout<gmma::Layout_K_SW64_Atom<std::uint8_t>, 64, 64>,
                      64>();
  EXPECT_EQ(k64 & without_leading, ours(0, 512, Swizzle::bytes64));
  const auto plain =
      cute_descriptor<kK, std::uint8_t, TileLayout<gmma::Layout_K_INTER_Atom<std::uint8_t>, 64, 32>,
                      64>();
  EXPECT_EQ(plain, ours(1024, 128, Swizzle::none));
  const auto mn128 =
      cute_descriptor<kMn, std::uint16_t,
                      TileLayout<gmma::Layout_MN_SW128_Atom<std::uint16_t>, 128, 16>, 128>();
  // Two chunks of 64 elements; tile_to_shape puts the next chunk before the next 8 rows of K.
  EXPECT_EQ(mn128, ours(1024, 2048, Swizzle::bytes128));
}

}  // namespace
}  // namespace qattn::isa_test
