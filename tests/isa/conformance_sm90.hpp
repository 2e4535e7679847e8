// Operations of sm_90 for the conformance test. Included by conformance.hpp.
#pragma once

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

// ---- wgmma
// ----------------------------------------------------------------------------------------- Shared
// memory holds random codes; where an element lies is the descriptor's affair, on both sides.

enum class Source { k_major, registers, transposed, registers_transposed };

template <Element A, Element B, Source S, Swizzle Z, Operand O, int N = 64>
struct Wgmma : Defaults {
  /// A's tile of 8 KB, then 128 bytes for each of B's rows, of which narrower swizzles use a part.
  static constexpr int shared_bytes = 8192 + 128 * N;
  static constexpr int arch = 90, cases = 4, inputs = (shared_bytes + 511) / 512, outputs = N / 2;
  static constexpr bool hopper_only = true;
  static constexpr Operand operand = O;
  static constexpr Swizzle swizzle = Z;
  static constexpr Source source = S;
  static constexpr Element format_a = A, format_b = B;
  static constexpr Compare compare = O >= Operand::wide_f16 ? Compare::accumulator : Compare::bits;
  static_assert(shared_bytes == 512 * inputs);

  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[inputs], Word32 (&out)[outputs]) {
    fill_shared(in);
    fence_async_proxy();
    sync_threads();
    // Rows of one span, groups of 8 rows behind each other.
    constexpr bool transposed = S == Source::transposed || S == Source::registers_transposed;
    constexpr SharedAddress span = 16u << static_cast<int>(Z);
    constexpr SharedAddress leading = Z == Swizzle::none ? 1024 : transposed ? 16 * span : 16;
    constexpr SharedAddress stride = Z == Swizzle::none ? 128 : 8 * span;
    // The other steps of K within a swizzled row begin 32 bytes apart.
    const auto steps = transposed || Z == Swizzle::none ? 1u : span / 32;
    const SharedAddress start =
        shared_base() + 32 * (static_cast<SharedAddress>(block().x) % steps);
    const std::uint64_t a = matrix_descriptor(start, leading, stride, Z);
    const std::uint64_t b = matrix_descriptor(start + 8192, leading, stride, Z);
    Accumulator<A> d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = static_cast<Accumulator<A>>(i);
    const Word32 fragments[4] = {in[0], in[1], in[2], in[3]};
    wgmma_fence();
    // ptxas 13.0 makes one product of two that are the same to the letter (s8, N 8 to 32).
    for (int i = 0; i < 2; ++i) {
      const bool add = i == 1 || block().x % 2 == 0;
      if constexpr (S == Source::registers || S == Source::registers_transposed) {
        wgmma<A, B, N, transposed>(d, fragments, b, add);
      } else {
        wgmma<A, B, N, transposed, transposed>(d, a, b, add);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) out[i] = as_word(d[i]);
  }
};

/// The first of two products is used while the second may still be in flight.
struct WgmmaGroups : Defaults {
  static constexpr const char* name = "wgmma_wait, a group in flight";
  static constexpr int arch = 90, cases = 4, inputs = 32, outputs = 36, shared_bytes = 16384;
  static constexpr bool hopper_only = true;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[32], Word32 (&out)[36]) {
    fill_shared(in);
    fence_async_proxy();
    sync_threads();
    const std::uint64_t a = matrix_descriptor(shared_base(), 16, 1024, Swizzle::bytes128);
    const std::uint64_t b = matrix_descriptor(shared_base() + 8192, 16, 1024, Swizzle::bytes128);
    std::int32_t first[4], second[32];
    wgmma_fence();
    wgmma<Element::s8, Element::s8, 8>(first, a, b, false);
    wgmma_commit();
    wgmma<Element::s8, Element::s8, 64>(second, a, b, false);
    wgmma<Element::s8, Element::s8, 64>(second, a + 2, b + 2, true);
    wgmma_commit();
    wgmma_wait<1>();
    for (int i = 0; i < 4; ++i) out[i] = as_word(first[i]) * 3;
    wgmma_wait<0>();
    for (int i = 0; i < 32; ++i) out[4 + i] = as_word(second[i]);
  }
};

// ---- TMA, bulk copies, mbarriers
// ---------------------------------------------------------------------

/// Loads a box that may stick out of the tensor.
template <Swizzle Z>
struct TmaLoad : Defaults {
  static constexpr int arch = 90, inputs = 4, outputs = 2, shared_bytes = 1024 + 8;
  static constexpr Mapped mapped = Mapped::inputs;
  static constexpr Swizzle swizzle = Z;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&)[4], Word32 (&out)[2]) {
    constexpr int width = Z == Swizzle::none ? 64 : 16 << static_cast<int>(Z);
    const SharedAddress barrier = shared_base() + 1024;
    if (thread() == 0) {
      mbarrier_init(barrier, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect(barrier, 8 * width);
      tma_load<2>(shared_base(), p.map, {16 * (block().x % 6) - 32, 5 * block().x - 3}, barrier);
    }
    sync_threads();
    mbarrier_wait(barrier, 0);
    if (8 * thread() >= 8 * width) return;
    const auto words =
        load_shared<Words2>(shared_base() + static_cast<SharedAddress>(8 * thread()));
    out[0] = words.w[0];
    out[1] = words.w[1];
  }
};
template <Swizzle Z>
struct TmaStore : Defaults {
  static constexpr int arch = 90, inputs = 2, outputs = 2, shared_bytes = 1024;
  static constexpr Mapped mapped = Mapped::outputs;
  static constexpr bool writes_itself = true;
  static constexpr Swizzle swizzle = Z;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&in)[2], Word32 (&)[2]) {
    fill_shared(in);
    fence_async_proxy();
    sync_threads();
    if (thread() != 0) return;
    tma_store<2>(p.map, {16 * (block().x % 3), 8 * block().x}, shared_base());
    bulk_commit();
    bulk_wait<0>();
  }
};

struct BulkCopies : Defaults {
  static constexpr const char* name = "bulk_load, bulk_store, mbarrier";
  static constexpr int arch = 90, inputs = 4, outputs = 4, shared_bytes = 2048 + 8;
  static constexpr bool writes_itself = true;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&)[4], Word32 (&)[4]) {
    const SharedAddress barrier = shared_base() + 2048;
    if (thread() == 0) {
      mbarrier_init(barrier, 2);
      fence_mbarrier_init();
      mbarrier_expect(barrier, 2048);
      bulk_load(shared_base(), p.in + 512 * block().x, 2048, barrier);
      mbarrier_arrive(barrier);
    }
    sync_threads();
    if (thread() == 64) mbarrier_arrive(barrier);
    mbarrier_wait(barrier, 0);
    const SharedAddress mine = shared_base() + static_cast<SharedAddress>(4 * thread());
    store_shared(mine, load_shared<Word32>(mine) + 1);
    fence_async_proxy();
    sync_threads();
    if (warp() != 0 || !elect()) return;
    bulk_store(p.out + 512 * block().x, shared_base(), 2048);
    bulk_commit();
    bulk_wait_read<0>();
  }
};

struct StoreMatrix : Defaults {
  static constexpr const char* name = "store_matrix";
  static constexpr int arch = 90, inputs = 4, outputs = 4, shared_bytes = 2048;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[4], Word32 (&out)[4]) {
    const Word32 r[1][4] = {{in[0], in[1], in[2], in[3]}};
    const int row = 32 * warp() + (lane() * 5 + block().x) % 32;
    store_matrix<1>({shared_base() + static_cast<SharedAddress>(16 * row)}, r);
    sync_warp();
    const auto words =
        load_shared<Words4>(shared_base() + static_cast<SharedAddress>(16 * thread()));
    for (int i = 0; i < 4; ++i) out[i] = words.w[i];
  }
};

/// One, two and four matrices, as rows and as columns; rows in an order of the block's making.
struct StoreMatrixForms : Defaults {
  static constexpr const char* name = "store_matrix, the other forms";
  static constexpr int arch = 90, inputs = 10, outputs = 10, shared_bytes = 4 * 1280;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[10], Word32 (&out)[10]) {
    const SharedAddress mine = shared_base() + static_cast<SharedAddress>(1280 * warp());
    // Lanes without a row of their own repeat one.
    const auto row = [&](int at, int rows) {
      return mine + static_cast<SharedAddress>(16 * (at + (lane() * 5 + block().x) % rows));
    };
    store_matrix_transposed<1>({row(0, 32)}, {{in[0], in[1], in[2], in[3]}});
    store_matrix2<1>({row(32, 16)}, {{in[4], in[5]}});
    store_matrix2_transposed<1>({row(48, 16)}, {{in[6], in[7]}});
    store_matrix1<1>({row(64, 8)}, {{in[8]}});
    store_matrix1_transposed<1>({row(72, 8)}, {{in[9]}});
    sync_warp();
    for (int i = 0; i < 10; ++i) {
      out[i] = load_shared<Word32>(mine + static_cast<SharedAddress>(4 * (32 * i + lane())));
    }
  }
};

template <Element A, Element B, Operand O, class Visit>
void visit_k_major(Visit visit) {
  visit(Wgmma<A, B, Source::k_major, Swizzle::none, O>());
  visit(Wgmma<A, B, Source::k_major, Swizzle::bytes32, O>());
  visit(Wgmma<A, B, Source::k_major, Swizzle::bytes64, O>());
  visit(Wgmma<A, B, Source::k_major, Swizzle::bytes128, O>());
  visit(Wgmma<A, B, Source::registers, Swizzle::bytes128, O>());
}
template <Element A, Operand O, class Visit>
void visit_transposed(Visit visit) {
  visit(Wgmma<A, A, Source::transposed, Swizzle::none, O>());
  visit(Wgmma<A, A, Source::transposed, Swizzle::bytes32, O>());
  visit(Wgmma<A, A, Source::transposed, Swizzle::bytes64, O>());
  visit(Wgmma<A, A, Source::transposed, Swizzle::bytes128, O>());
}

/// The shapes of the prefill kernels, and every other N that has a row in words_wgmma.cuh.
template <class Visit>
void visit_shapes(Visit visit) {
  using enum Element;
  using enum Source;
  using enum Swizzle;
  using enum Operand;
  visit(Wgmma<s8, s8, k_major, bytes64, raw, 128>());
  visit(Wgmma<s8, s8, k_major, bytes128, raw, 128>());
  visit(Wgmma<e4m3, e4m3, k_major, bytes64, small_e4m3, 128>());
  visit(Wgmma<e4m3, e4m3, k_major, bytes128, small_e4m3, 128>());
  visit(Wgmma<f16, f16, k_major, bytes128, small_f16, 128>());
  visit(Wgmma<bf16, bf16, k_major, bytes128, small_bf16, 128>());
  visit(Wgmma<u8, s8, registers, bytes64, raw, 64>());
  visit(Wgmma<u8, s8, registers, bytes64, raw, 128>());
  visit(Wgmma<e4m3, e4m3, registers, bytes64, small_e4m3, 72>());
  visit(Wgmma<u8, s8, registers, bytes64, raw, 96>());
  visit(Wgmma<e4m3, e4m3, registers, bytes64, small_e4m3, 104>());
  visit(Wgmma<e4m3, e4m3, registers, bytes64, small_e4m3, 136>());
  visit(Wgmma<e4m3, e4m3, registers, bytes64, wide_e4m3, 136>());
  visit(Wgmma<f16, f16, registers_transposed, bytes128, small_f16, 64>());
  visit(Wgmma<f16, f16, registers_transposed, bytes128, small_f16, 96>());
  visit(Wgmma<f16, f16, registers_transposed, bytes128, small_f16, 128>());
  visit(Wgmma<f16, f16, registers_transposed, bytes128, wide_f16, 128>());
  visit(Wgmma<bf16, bf16, registers_transposed, bytes128, small_bf16, 64>());
  visit(Wgmma<bf16, bf16, registers_transposed, bytes128, small_bf16, 96>());
  visit(Wgmma<bf16, bf16, registers_transposed, bytes128, small_bf16, 128>());
  visit(Wgmma<bf16, bf16, registers_transposed, bytes128, wide_bf16, 128>());
  visit(Wgmma<s8, s8, k_major, bytes128, raw, 8>());
  visit(Wgmma<s8, s8, k_major, bytes128, raw, 16>());
  visit(Wgmma<s8, s8, k_major, bytes128, raw, 32>());
  visit(Wgmma<f16, f16, k_major, bytes128, small_f16, 72>());
  visit(Wgmma<s8, s8, k_major, bytes128, raw, 96>());
  visit(Wgmma<f16, f16, k_major, bytes128, small_f16, 136>());
  visit(Wgmma<s8, s8, k_major, bytes128, raw, 192>());
  visit(Wgmma<s8, s8, k_major, bytes128, raw, 256>());
}

/// Codes of the first format on both sides (conformance_sm80.hpp, Mma).
template <class Visit>
void visit_mixed(Visit visit) {
  using enum Element;
  visit(Wgmma<e4m3, e5m2, Source::k_major, Swizzle::bytes128, Operand::small_e4m3>());
  visit(Wgmma<e5m2, e4m3, Source::k_major, Swizzle::bytes128, Operand::small_e5m2>());
  visit(Wgmma<e4m3, e5m2, Source::registers, Swizzle::bytes128, Operand::small_e4m3>());
  visit(Wgmma<e5m2, e4m3, Source::registers, Swizzle::bytes128, Operand::small_e5m2>());
  visit(Wgmma<e4m3, e5m2, Source::k_major, Swizzle::bytes128, Operand::wide_e4m3>());
  visit(Wgmma<e5m2, e4m3, Source::k_major, Swizzle::bytes128, Operand::wide_e5m2>());
}

template <class Visit>
void for_each_sm90_operation(Visit visit) {
  using enum Element;
  visit(StoreMatrix());
  visit(StoreMatrixForms());
  visit(BulkCopies());
  visit(TmaLoad<Swizzle::none>());
  visit(TmaLoad<Swizzle::bytes32>());
  visit(TmaLoad<Swizzle::bytes64>());
  visit(TmaLoad<Swizzle::bytes128>());
  visit_k_major<f16, f16, Operand::small_f16>(visit);
  visit_k_major<bf16, bf16, Operand::small_bf16>(visit);
  visit_k_major<s8, s8, Operand::raw>(visit);
  visit_k_major<e4m3, e4m3, Operand::small_e4m3>(visit);
  visit_transposed<f16, Operand::small_f16>(visit);
  visit_transposed<bf16, Operand::small_bf16>(visit);
  visit(Wgmma<s8, u8, Source::k_major, Swizzle::bytes128, Operand::raw>());
  visit(Wgmma<u8, s8, Source::registers, Swizzle::bytes128, Operand::raw>());
  visit(Wgmma<u8, u8, Source::k_major, Swizzle::bytes64, Operand::raw>());
  visit(Wgmma<e5m2, e5m2, Source::k_major, Swizzle::bytes128, Operand::small_e5m2>());
  visit(Wgmma<f16, f16, Source::k_major, Swizzle::bytes128, Operand::wide_f16>());
  visit(Wgmma<bf16, bf16, Source::k_major, Swizzle::bytes128, Operand::wide_bf16>());
  visit(Wgmma<e4m3, e4m3, Source::k_major, Swizzle::bytes128, Operand::wide_e4m3>());
  visit(Wgmma<e4m3, e4m3, Source::registers, Swizzle::bytes128, Operand::wide_e4m3>());
  visit(Wgmma<e5m2, e5m2, Source::k_major, Swizzle::bytes128, Operand::wide_e5m2>());
  visit_shapes(visit);
  visit(WgmmaGroups());
  visit_mixed(visit);
  visit(TmaStore<Swizzle::bytes32>());
  visit(TmaStore<Swizzle::bytes64>());
  visit(TmaStore<Swizzle::bytes128>());
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
