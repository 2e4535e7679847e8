// wgmma of one N, which QATTN_N and its companions give. Included by words_wgmma.cuh, once per N.

template <>
struct WgmmaOf<QATTN_N> {
  template <Element A, Element B, bool TransposeA, bool TransposeB>
  static QATTN_DEVICE void shared(Accumulator<A> (&d)[QATTN_N / 2], std::uint64_t a,
                                  std::uint64_t b, int add) {
    using enum Element;
    if constexpr (A == f16) {
      QATTN_WGMMA_SHARED("k16.f32.f16.f16", "+f", ", 1, 1, " QATTN_P3 ", " QATTN_P4,
                         "n"(int{TransposeA}), "n"(int{TransposeB}));
    } else if constexpr (A == bf16) {
      QATTN_WGMMA_SHARED("k16.f32.bf16.bf16", "+f", ", 1, 1, " QATTN_P3 ", " QATTN_P4,
                         "n"(int{TransposeA}), "n"(int{TransposeB}));
    } else if constexpr (A == e4m3 && B == e4m3) {
      QATTN_WGMMA_SHARED("k32.f32.e4m3.e4m3", "+f", ", 1, 1");
    } else if constexpr (A == e4m3 && B == e5m2) {
      QATTN_WGMMA_SHARED("k32.f32.e4m3.e5m2", "+f", ", 1, 1");
    } else if constexpr (A == e5m2 && B == e4m3) {
      QATTN_WGMMA_SHARED("k32.f32.e5m2.e4m3", "+f", ", 1, 1");
    } else if constexpr (A == e5m2 && B == e5m2) {
      QATTN_WGMMA_SHARED("k32.f32.e5m2.e5m2", "+f", ", 1, 1");
    } else if constexpr (A == s8 && B == s8) {
      QATTN_WGMMA_SHARED("k32.s32.s8.s8", "+r", "");
    } else if constexpr (A == s8 && B == u8) {
      QATTN_WGMMA_SHARED("k32.s32.s8.u8", "+r", "");
    } else if constexpr (A == u8 && B == s8) {
      QATTN_WGMMA_SHARED("k32.s32.u8.s8", "+r", "");
    } else {
      static_assert(A == u8 && B == u8, "no such product");
      QATTN_WGMMA_SHARED("k32.s32.u8.u8", "+r", "");
    }
  }

  template <Element A, Element B, bool TransposeB>
  static QATTN_DEVICE void registers(Accumulator<A> (&d)[QATTN_N / 2], const std::uint32_t (&a)[4],
                                     std::uint64_t b, int add) {
    using enum Element;
    if constexpr (A == f16) {
      QATTN_WGMMA_REGISTERS("k16.f32.f16.f16", "+f", ", 1, 1, " QATTN_P6, "n"(int{TransposeB}));
    } else if constexpr (A == bf16) {
      QATTN_WGMMA_REGISTERS("k16.f32.bf16.bf16", "+f", ", 1, 1, " QATTN_P6, "n"(int{TransposeB}));
    } else if constexpr (A == e4m3 && B == e4m3) {
      QATTN_WGMMA_REGISTERS("k32.f32.e4m3.e4m3", "+f", ", 1, 1");
    } else if constexpr (A == e4m3 && B == e5m2) {
      QATTN_WGMMA_REGISTERS("k32.f32.e4m3.e5m2", "+f", ", 1, 1");
    } else if constexpr (A == e5m2 && B == e4m3) {
      QATTN_WGMMA_REGISTERS("k32.f32.e5m2.e4m3", "+f", ", 1, 1");
    } else if constexpr (A == e5m2 && B == e5m2) {
      QATTN_WGMMA_REGISTERS("k32.f32.e5m2.e5m2", "+f", ", 1, 1");
    } else if constexpr (A == s8 && B == s8) {
      QATTN_WGMMA_REGISTERS("k32.s32.s8.s8", "+r", "");
    } else if constexpr (A == s8 && B == u8) {
      QATTN_WGMMA_REGISTERS("k32.s32.s8.u8", "+r", "");
    } else if constexpr (A == u8 && B == s8) {
      QATTN_WGMMA_REGISTERS("k32.s32.u8.s8", "+r", "");
    } else {
      static_assert(A == u8 && B == u8, "no such product");
      QATTN_WGMMA_REGISTERS("k32.s32.u8.u8", "+r", "");
    }
  }
};

#undef QATTN_N
#undef QATTN_D
#undef QATTN_OUT
#undef QATTN_P0
#undef QATTN_P1
#undef QATTN_P2
#undef QATTN_P3
#undef QATTN_P4
#undef QATTN_P5
#undef QATTN_P6
