// Operations of sm_90 for the conformance test. Included by conformance.hpp.
#pragma once

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

// ---- wgmma
// ----------------------------------------------------------------------------------------- Shared
// memory holds random codes; where an element lies is the descriptor's affair, on both sides.

enum class Source { k_major, registers, transposed };

template <Element A, Element B, Source S, Swizzle Z, Operand O>
struct Wgmma : Defaults {
  static constexpr int arch = 90, cases = 4, inputs = 32, outputs = 32, shared_bytes = 16384;
  static constexpr bool hopper_only = true;
  static constexpr Operand operand = O;
  static constexpr Swizzle swizzle = Z;
  static constexpr Source source = S;
  static constexpr Element format_a = A, format_b = B;
  static constexpr Compare compare = O >= Operand::wide_f16 ? Compare::accumulator : Compare::bits;

  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[32], Word32 (&out)[32]) {
    fill_shared(in);
    fence_async_proxy();
    sync_threads();
    // 64 rows of A and of B, each tile 8 KB: rows of one span, groups of 8 rows behind each other.
    constexpr bool transposed = S == Source::transposed;
    constexpr SharedAddress span = 16u << static_cast<int>(Z);
    constexpr SharedAddress leading = Z == Swizzle::none ? 1024 : transposed ? 16 * span : 16;
    constexpr SharedAddress stride = Z == Swizzle::none ? 128 : 8 * span;
    // The other steps of K within a swizzled row begin 32 bytes apart.
    const auto steps = transposed || Z == Swizzle::none ? 1u : span / 32;
    const SharedAddress start =
        shared_base() + 32 * (static_cast<SharedAddress>(block().x) % steps);
    const std::uint64_t a = matrix_descriptor(start, leading, stride, Z);
    const std::uint64_t b = matrix_descriptor(start + 8192, leading, stride, Z);
    Accumulator<A> d[32];
    for (int i = 0; i < 32; ++i) d[i] = static_cast<Accumulator<A>>(i);
    const Word32 fragments[4] = {in[0], in[1], in[2], in[3]};
    wgmma_fence();
    for (int i = 0; i < 2; ++i) {
      if constexpr (S == Source::registers) {
        wgmma<A, B, 64>(d, fragments, b, block().x % 2 == 0);
      } else if constexpr (transposed) {
        wgmma<A, B, 64, true, true>(d, a, b, block().x % 2 == 0);
      } else {
        wgmma<A, B, 64>(d, a, b, block().x % 2 == 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < 32; ++i) out[i] = as_word(d[i]);
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
  static constexpr Mapped mapped = Mapped::outputs;
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

template <class Visit>
void for_each_sm90_operation(Visit visit) {
  using enum Element;
  visit(StoreMatrix());
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
  visit(TmaStore<Swizzle::bytes32>());
  visit(TmaStore<Swizzle::bytes64>());
  visit(TmaStore<Swizzle::bytes128>());
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
