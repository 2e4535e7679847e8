// Operations of sm_80 and sm_89 for the conformance test. Included by conformance.hpp.
#pragma once

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

// ---- Arithmetic
// ----------------------------------------------------------------------------------

struct OfFloats : Defaults {
  static constexpr int cases = 64;
  static constexpr Operand operand = Operand::floats;
};
struct Approximation : OfFloats {
  static constexpr Compare compare = Compare::ulp;
};

struct Exp2 : Approximation {
  static constexpr const char* name = "exp2";
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[1]) {
    out[0] = as_word(isa::exp2(as_float(in[0])));
  }
};
struct Log2 : Approximation {
  static constexpr const char* name = "log2";
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[1]) {
    out[0] = as_word(isa::log2(as_float(in[0])));
  }
};
struct Reciprocal : Approximation {
  static constexpr const char* name = "reciprocal";
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[1]) {
    out[0] = as_word(reciprocal(as_float(in[0])));
  }
};
struct Max3 : OfFloats {
  static constexpr const char* name = "max3";
  static constexpr int inputs = 3;
  static constexpr Compare compare = Compare::floats;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[3], Word32 (&out)[1]) {
    out[0] = as_word(max3(as_float(in[0]), as_float(in[1]), as_float(in[2])));
  }
};
struct Extremes : Defaults {
  static constexpr const char* name = "max3, min3 of integers";
  static constexpr int inputs = 3, outputs = 3;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[3], Word32 (&out)[3]) {
    const auto s = [](Word32 w) { return static_cast<std::int32_t>(w); };
    out[0] = as_word(max3(s(in[0]), s(in[1]), s(in[2])));
    out[1] = max3(in[0], in[1], in[2]);
    out[2] = min3(in[0], in[1], in[2]);
  }
};
struct PackF16 : OfFloats {
  static constexpr const char* name = "pack_f16";
  static constexpr int inputs = 2;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = pack_f16(as_float(in[0]), as_float(in[1]));
  }
};
struct PackBf16 : OfFloats {
  static constexpr const char* name = "pack_bf16";
  static constexpr int inputs = 2;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = pack_bf16(as_float(in[0]), as_float(in[1]));
  }
};
struct PackE4m3 : OfFloats {
  static constexpr const char* name = "pack_e4m3";
  static constexpr int inputs = 2;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = pack_e4m3(as_float(in[0]), as_float(in[1]));
  }
};
struct PackE5m2 : OfFloats {
  static constexpr const char* name = "pack_e5m2";
  static constexpr int inputs = 2;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = pack_e5m2(as_float(in[0]), as_float(in[1]));
  }
};
struct MultiplyF16 : Defaults {
  static constexpr const char* name = "multiply_f16";
  static constexpr int inputs = 2, cases = 64;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = multiply_f16(in[0], in[1]);
  }
};
struct FmaF16 : Defaults {
  static constexpr const char* name = "fma_f16";
  static constexpr int inputs = 3, cases = 64;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[3], Word32 (&out)[1]) {
    out[0] = fma_f16(in[0], in[1], in[2]);
  }
};
struct PackU8 : OfFloats {
  static constexpr const char* name = "pack_u8";
  static constexpr int inputs = 4;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[4], Word32 (&out)[1]) {
    out[0] = pack_u8(as_float(in[0]), as_float(in[1]), as_float(in[2]), as_float(in[3]));
  }
};
struct PackS8 : OfFloats {
  static constexpr const char* name = "pack_s8";
  static constexpr int inputs = 4;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[4], Word32 (&out)[1]) {
    out[0] = pack_s8(as_float(in[0]), as_float(in[1]), as_float(in[2]), as_float(in[3]));
  }
};
struct MaxHalves : Defaults {
  static constexpr const char* name = "max3_u16";
  static constexpr int inputs = 3;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[3], Word32 (&out)[1]) {
    out[0] = max3_u16(in[0], in[1], in[2]);
  }
};
struct MaxF16 : Defaults {
  static constexpr const char* name = "max_f16";
  static constexpr int inputs = 2, cases = 64;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = max_f16(in[0], in[1]);
  }
};
struct MinF16 : Defaults {
  static constexpr const char* name = "min_f16";
  static constexpr int inputs = 2, cases = 64;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = min_f16(in[0], in[1]);
  }
};
struct MaxBf16 : Defaults {
  static constexpr const char* name = "max_bf16";
  static constexpr int inputs = 2, cases = 64;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = max_bf16(in[0], in[1]);
  }
};
struct MinBf16 : Defaults {
  static constexpr const char* name = "min_bf16";
  static constexpr int inputs = 2, cases = 64;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[2], Word32 (&out)[1]) {
    out[0] = min_bf16(in[0], in[1]);
  }
};
struct UnpackF16 : Defaults {
  static constexpr const char* name = "unpack_f16";
  static constexpr int outputs = 2, cases = 64;
  static constexpr Compare compare = Compare::floats;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[2]) {
    const Pair p = unpack_f16(in[0]);
    out[0] = as_word(p.lo);
    out[1] = as_word(p.hi);
  }
};
struct UnpackE4m3 : Defaults {
  static constexpr const char* name = "unpack_e4m3";
  static constexpr int cases = 64;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[1]) {
    out[0] = unpack_e4m3(static_cast<std::uint16_t>(in[0]));
  }
};
struct UnpackBf16 : Defaults {
  static constexpr const char* name = "unpack_bf16";
  static constexpr int outputs = 2;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[2]) {
    const Pair p = unpack_bf16(in[0]);
    out[0] = as_word(p.lo);
    out[1] = as_word(p.hi);
  }
};
struct Bits : Defaults {
  static constexpr const char* name = "byte_permute, lop3, dot4";
  static constexpr int inputs = 3, outputs = 5;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[3], Word32 (&out)[5]) {
    out[0] = byte_permute(in[0], in[1], in[2] & 0x7777u);
    out[1] = lop3<0xe8>(in[0], in[1], in[2]);
    out[2] = lop3<0x6a>(in[0], in[1], in[2]);
    out[3] = as_word(dot4_s8(in[0], in[1], static_cast<std::int32_t>(in[2])));
    out[4] = dot4_u8(in[0], in[1], in[2]);
  }
};

// ---- Lanes, shared memory
// ------------------------------------------------------------------------

struct Shuffles : Defaults {
  static constexpr const char* name = "shuffles, votes";
  static constexpr int outputs = 8;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[8]) {
    const Word32 v = in[0];
    out[0] = shuffle_xor(v, 7);
    out[1] = shuffle(v, lane() / 2);
    out[2] = shuffle_up(v, 5);
    out[3] = shuffle_down(v, 9);
    out[4] = ballot(v % 3 == 0);
    out[5] = any(v % 31 == 0);
    out[6] = all(v % 31 != 0);
    out[7] = static_cast<Word32>(1000 * warp() + lane());
  }
};

struct TransposeMatrix : Defaults {
  static constexpr const char* name = "transpose_matrix";
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[1]) {
    out[0] = transpose_matrix(in[0]);
  }
};

struct LoadMatrix : Defaults {
  static constexpr const char* name = "load_matrix, all forms";
  static constexpr int inputs = 4, outputs = 22, shared_bytes = 2048;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[4], Word32 (&out)[22]) {
    fill_shared(in);
    // Rows in an order of the data's making.
    const SharedAddress rows[1] = {shared_base() + 16 * (in[0] & 127u)};
    const SharedAddress two[2] = {rows[0], shared_base() + 16 * (in[1] & 127u)};
    Word32 r4[2][4], t4[1][4], r2[1][2], t2[1][2], r1[1][1], t1[1][1];
    load_matrix(r4, two);
    load_matrix_transposed(t4, rows);
    load_matrix2(r2, rows);
    load_matrix2_transposed(t2, rows);
    load_matrix1(r1, rows);
    load_matrix1_transposed(t1, rows);
    for (int i = 0; i < 8; ++i) out[i] = r4[i / 4][i % 4];
    for (int i = 0; i < 4; ++i) out[8 + i] = t4[0][i];
    for (int i = 0; i < 2; ++i) out[12 + i] = r2[0][i];
    for (int i = 0; i < 2; ++i) out[14 + i] = t2[0][i];
    out[16] = r1[0][0];
    out[17] = t1[0][0];
    const SharedAddress a = shared_base() + 16 * (in[2] & 127u);
    out[18] = load_shared<std::uint8_t>(a + 3);
    out[19] = load_shared<std::uint16_t>(a + 6);
    out[20] = load_shared<Words2>(a + 8).w[1];
    out[21] = load_shared<Words4>(a).w[2];
  }
};

struct CopyAsync : Defaults {
  static constexpr const char* name = "copy_async16";
  static constexpr int inputs = 4, outputs = 4, shared_bytes = 2048;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&in)[4], Word32 (&out)[4]) {
    const SharedAddress at = shared_base() + static_cast<SharedAddress>(16 * thread());
    copy_async16(at, p.in + 4 * (block().x * 128 + thread()), static_cast<int>(in[0] % 17));
    copy_async_commit();
    copy_async_wait<0>();
    const auto words = load_shared<Words4>(at);
    for (int i = 0; i < 4; ++i) out[i] = words.w[i];
  }
};

struct CopyAsyncSmall : Defaults {
  static constexpr const char* name = "copy_async8, copy_async4";
  static constexpr int inputs = 4, outputs = 3, shared_bytes = 2048;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&in)[4], Word32 (&out)[3]) {
    const SharedAddress at = word_of(4 * thread());
    const Word32* from = p.in + 4 * (block().x * 128 + thread());
    copy_async8(at, from, static_cast<int>(in[0] % 9));
    copy_async4(at + 12, from + 3, static_cast<int>(in[1] % 5));
    copy_async_commit();
    copy_async_wait<0>();
    const auto two = load_shared<Words2>(at);
    out[0] = two.w[0];
    out[1] = two.w[1];
    out[2] = load_shared<Word32>(at + 12);
  }
};

/// The first of two groups is read while the second may still be in flight.
struct CopyAsyncGroups : Defaults {
  static constexpr const char* name = "copy_async_wait, a group in flight";
  static constexpr int inputs = 8, outputs = 8, shared_bytes = 4096;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&)[8], Word32 (&out)[8]) {
    const Word32* from = p.in + 8 * (block().x * 128 + thread());
    for (int group = 0; group < 2; ++group) {
      copy_async16(word_of(512 * group + 4 * thread()), from + 4 * group, 16);
      copy_async_commit();
    }
    copy_async_wait<1>();
    const auto first = load_shared<Words4>(word_of(4 * thread()));
    copy_async_wait<0>();
    const auto second = load_shared<Words4>(word_of(512 + 4 * thread()));
    for (int i = 0; i < 4; ++i) {
      out[i] = first.w[i];
      out[4 + i] = second.w[i];
    }
  }
};

struct Atomics : Defaults {
  static constexpr const char* name = "shared atomics";
  static constexpr int outputs = 2, shared_bytes = 16;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[2]) {
    if (thread() == 0) store_shared(shared_base(), Words2{{0, 0}});
    sync_threads();
    atomic_add_shared(shared_base(), in[0]);
    atomic_max_shared(shared_base() + 4, in[0]);
    sync_threads();
    out[0] = load_shared<Word32>(shared_base());
    out[1] = load_shared<Word32>(shared_base() + 4);
  }
};

// ---- mma
// -------------------------------------------------------------------------------------------

template <Element A, Element B>
struct MmaOf : Defaults {
  static constexpr int inputs = 12, outputs = 8;
  static constexpr int arch = A == Element::e4m3 || A == Element::e5m2 ? 89 : 80;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[12], Word32 (&out)[8]) {
    const Word32 a[1][4] = {{in[0], in[1], in[2], in[3]}};
    const Word32 b[2][2] = {{in[4], in[5]}, {in[6], in[7]}};
    Accumulator<A> d[1][2][4];
    for (int i = 0; i < 4; ++i) {
      d[0][0][i] = d[0][1][i] = static_cast<Accumulator<A>>(static_cast<int>(in[8 + i] & 255u));
    }
    mma<A, B>(d, a, b);
    for (int i = 0; i < 8; ++i) out[i] = as_word(d[0][i / 4][i % 4]);
  }
};
/// Both operands of a mixed product are codes of the first one's format: small integers of one
/// 8-bit float are small multiples of a half in the other, so that sums are exact there, too.
template <Element A, Element B, Operand O, int Name>
struct Mma : MmaOf<A, B> {
  static constexpr const char* names[] = {
      "mma f16 small",       "mma bf16 small",      "mma s8 s8",          "mma s8 u8",
      "mma u8 s8",           "mma u8 u8",           "mma e4m3 small",     "mma e5m2 small",
      "mma e4m3 e5m2 small", "mma e5m2 e4m3 small", "mma f16 wide",       "mma bf16 wide",
      "mma e4m3 wide",       "mma e5m2 wide",       "mma e4m3 e5m2 wide", "mma e5m2 e4m3 wide"};
  static constexpr const char* name = names[Name];
  static constexpr Operand operand = O;
  static constexpr Compare compare = Name >= 10 ? Compare::accumulator : Compare::bits;
};

/// Products that do not add to what was there, and those of a part of the columns.
template <Element A, Element B, Operand O, int Name>
struct MmaForms : Defaults {
  static constexpr const char* names[] = {"mma_zero, mma_at f16", "mma_zero, mma_at bf16",
                                          "mma_zero, mma_at s8 s8", "mma_zero, mma_at u8 s8",
                                          "mma_zero, mma_at e4m3"};
  static constexpr const char* name = names[Name];
  static constexpr int arch = A == Element::e4m3 ? 89 : 80, inputs = 12, outputs = 24;
  static constexpr Operand operand = O;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[12], Word32 (&out)[24]) {
    const Word32 a[1][4] = {{in[0], in[1], in[2], in[3]}};
    const Word32 b[2][2] = {{in[4], in[5]}, {in[6], in[7]}};
    Accumulator<A> zeroed[1][2][4], part[1][4][4];
    for (int i = 0; i < 16; ++i) {
      const auto before = static_cast<Accumulator<A>>(static_cast<int>(in[8 + i % 4] & 255u) + i);
      part[0][i / 4][i % 4] = before;
      if (i < 8) zeroed[0][i / 4][i % 4] = before;
    }
    mma_zero<A, B>(zeroed, a, b);
    mma_at<A, B>(part, 1, a, b);
    for (int i = 0; i < 8; ++i) out[i] = as_word(zeroed[0][i / 4][i % 4]);
    for (int i = 0; i < 16; ++i) out[8 + i] = as_word(part[0][i / 4][i % 4]);
  }
};

/// Subnormal operands are worth what their bits say; every sum is exact.
struct MmaSubnormal : Defaults {
  static constexpr const char* name = "mma f16 subnormal";
  static constexpr int inputs = 8, outputs = 8;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[8], Word32 (&out)[8]) {
    const auto code = [](Word32 x) { return x & 0x00ff00ffu; };
    const auto number = [](Word32 x) { return 0x3c003c00u | (x & 0x80388038u); };
    const Word32 a[1][4] = {{code(in[0]), code(in[1]), code(in[2]), code(in[3])}};
    const Word32 b[2][2] = {{number(in[4]), number(in[5])}, {number(in[6]), number(in[7])}};
    float d[1][2][4] = {};
    mma<Element::f16, Element::f16>(d, a, b);
    for (int i = 0; i < 8; ++i) out[i] = as_word(d[0][i / 4][i % 4]);
  }
};

struct MmaHalf : Defaults {
  static constexpr const char* name = "mma_f16 small";
  static constexpr int inputs = 10, outputs = 4;
  static constexpr Operand operand = Operand::small_f16;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[10], Word32 (&out)[4]) {
    const Word32 a[1][4] = {{in[0], in[1], in[2], in[3]}};
    const Word32 b[2][2] = {{in[4], in[5]}, {in[6], in[7]}};
    Word32 d[1][2][2] = {{{in[8], in[9]}, {in[9], in[8]}}};
    mma_f16(d, a, b);
    for (int i = 0; i < 4; ++i) out[i] = d[0][i / 2][i % 2];
  }
};

template <class Visit>
void for_each_sm80_operation(Visit visit) {
  using enum Element;
  visit(Exp2());
  visit(Log2());
  visit(Reciprocal());
  visit(Max3());
  visit(Extremes());
  visit(PackF16());
  visit(PackBf16());
  visit(PackE4m3());
  visit(UnpackE4m3());
  visit(PackE5m2());
  visit(PackU8());
  visit(PackS8());
  visit(MaxHalves());
  visit(MaxF16());
  visit(MinF16());
  visit(MaxBf16());
  visit(MinBf16());
  visit(MultiplyF16());
  visit(FmaF16());
  visit(UnpackF16());
  visit(UnpackBf16());
  visit(Bits());
  visit(Shuffles());
  visit(TransposeMatrix());
  visit(LoadMatrix());
  visit(CopyAsync());
  visit(CopyAsyncSmall());
  visit(CopyAsyncGroups());
  visit(Atomics());
  visit(MmaSubnormal());
  visit(Mma<f16, f16, Operand::small_f16, 0>());
  visit(Mma<bf16, bf16, Operand::small_bf16, 1>());
  visit(Mma<s8, s8, Operand::raw, 2>());
  visit(Mma<s8, u8, Operand::raw, 3>());
  visit(Mma<u8, s8, Operand::raw, 4>());
  visit(Mma<u8, u8, Operand::raw, 5>());
  visit(Mma<e4m3, e4m3, Operand::small_e4m3, 6>());
  visit(Mma<e5m2, e5m2, Operand::small_e5m2, 7>());
  visit(Mma<e4m3, e5m2, Operand::small_e4m3, 8>());
  visit(Mma<e5m2, e4m3, Operand::small_e5m2, 9>());
  visit(Mma<f16, f16, Operand::wide_f16, 10>());
  visit(Mma<bf16, bf16, Operand::wide_bf16, 11>());
  visit(Mma<e4m3, e4m3, Operand::wide_e4m3, 12>());
  visit(Mma<e5m2, e5m2, Operand::wide_e5m2, 13>());
  visit(Mma<e4m3, e5m2, Operand::wide_e4m3, 14>());
  visit(Mma<e5m2, e4m3, Operand::wide_e5m2, 15>());
  visit(MmaForms<f16, f16, Operand::small_f16, 0>());
  visit(MmaForms<bf16, bf16, Operand::small_bf16, 1>());
  visit(MmaForms<s8, s8, Operand::raw, 2>());
  visit(MmaForms<u8, s8, Operand::raw, 3>());
  visit(MmaForms<e4m3, e4m3, Operand::small_e4m3, 4>());
  visit(MmaHalf());
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
