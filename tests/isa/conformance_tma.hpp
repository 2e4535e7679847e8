// TMA on tensors of every rank and size of element, for the conformance test. Included by
// conformance.hpp, after the operations of rank 2 and one byte in conformance_sm90.hpp.
#pragma once

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

/// The tensor and its boxes: rows of one span, apart by two; 5, 3 and 2 of the dimensions between
/// the first and the last, which takes what is left. Some elements stick out behind the span.
template <int Rank, int Bytes, Swizzle Z>
struct TmaTensor : Defaults {
  static constexpr int arch = 90, rank = Rank, element_bytes = Bytes;
  static constexpr Swizzle swizzle = Z;
  static constexpr int span = Z == Swizzle::none ? 64 : 16 << static_cast<int>(Z);
  static constexpr int pitch = 2 * span, box_bytes = span * (4 << (Rank - 2));

  static QATTN_CONSTEXPR int box(int d) { return d == 0 ? span / Bytes : d == 1 ? 4 : 2; }
  static QATTN_CONSTEXPR int size(int d) { return d == 1 ? 5 : d == 2 ? 3 : 2; }
  static QATTN_CONSTEXPR int last_size(int bytes) {
    int rest = bytes / pitch;
    for (int d = 1; d < Rank - 1; ++d) rest /= size(d);
    return rest;
  }
};

/// Boxes that stick out on either side of every dimension.
template <int Rank, int Bytes, Swizzle Z, bool Prefetch = false>
struct TmaBoxLoad : TmaTensor<Rank, Bytes, Z> {
  using Tensor = TmaTensor<Rank, Bytes, Z>;
  static constexpr int inputs = 4, outputs = 8, shared_bytes = 4096 + 8;
  static constexpr Mapped mapped = Mapped::inputs;
  static constexpr bool prefetches = Prefetch;
  static constexpr int row_elements = (Tensor::span + 20) / Bytes;

  static QATTN_DEVICE void apply(const Data& p, const Word32 (&)[4], Word32 (&out)[8]) {
    const SharedAddress barrier = shared_base() + 4096;
    const int n = block().x;
    if (thread() == 0) {
      if constexpr (Prefetch) tma_prefetch(p.map);
      mbarrier_init(barrier, 1);
      fence_mbarrier_init();
      int corner[Rank];
      corner[0] = 16 / Bytes * (n % 6 - 2);
      for (int d = 1; d < Rank - 1; ++d) corner[d] = n * (d + 1) % (Tensor::size(d) + 2) - 1;
      const int last = Tensor::last_size(512 * Tensor::cases * inputs);
      corner[Rank - 1] = n % (last + 2) - 1;
      mbarrier_arrive_expect(barrier, Tensor::box_bytes);
      tma_load<Rank>(shared_base(), p.map, corner, barrier);
    }
    sync_threads();
    mbarrier_wait(barrier, 0);
    for (int i = 0; i < outputs; ++i) {
      const int word = 128 * i + thread();
      if (4 * word < Tensor::box_bytes) out[i] = load_shared<Word32>(word_of(word));
    }
  }
};

/// Boxes that begin inside and stick out behind; no two blocks' touch.
template <int Rank, int Bytes, Swizzle Z>
struct TmaBoxStore : TmaTensor<Rank, Bytes, Z> {
  using Tensor = TmaTensor<Rank, Bytes, Z>;
  static constexpr int cases = 4, inputs = 8, outputs = 32, shared_bytes = 4096;
  static constexpr Mapped mapped = Mapped::outputs;
  static constexpr bool writes_itself = true;
  static constexpr int row_elements = (Tensor::span + 16) / Bytes;

  static QATTN_DEVICE void apply(const Data& p, const Word32 (&in)[8], Word32 (&)[32]) {
    fill_shared(in);
    fence_async_proxy();
    sync_threads();
    if (thread() != 0) return;
    const int n = block().x;
    int corner[Rank];
    corner[0] = 16 / Bytes * (n % 3);
    for (int d = 1; d < Rank - 1; ++d) corner[d] = (n + d) % Tensor::size(d);
    const int last = Tensor::last_size(512 * cases * outputs);
    corner[Rank - 1] = n < 3 ? Tensor::box(Rank - 1) * n : last - 1;
    tma_store<Rank>(p.map, corner, shared_base());
    bulk_commit();
    bulk_wait<0>();
  }
};

template <class Visit>
void for_each_tma_operation(Visit visit) {
  using enum Swizzle;
  visit(TmaBoxLoad<2, 2, bytes64, true>());
  visit(TmaBoxLoad<2, 2, bytes128>());
  visit(TmaBoxLoad<2, 4, none>());
  visit(TmaBoxLoad<3, 1, bytes64>());
  visit(TmaBoxLoad<3, 2, none>());
  visit(TmaBoxLoad<3, 2, bytes128>());
  visit(TmaBoxLoad<4, 1, bytes32>());
  visit(TmaBoxLoad<4, 2, bytes128>());
  visit(TmaBoxLoad<4, 4, bytes64>());
  visit(TmaBoxLoad<5, 1, none>());
  visit(TmaBoxLoad<5, 2, bytes128>());
  visit(TmaStore<none>());
  visit(TmaBoxStore<2, 2, none>());
  visit(TmaBoxStore<2, 2, bytes128>());
  visit(TmaBoxStore<3, 1, bytes64>());
  visit(TmaBoxStore<3, 2, bytes128>());
  visit(TmaBoxStore<4, 2, none>());
  visit(TmaBoxStore<4, 4, bytes32>());
  visit(TmaBoxStore<5, 1, none>());
  visit(TmaBoxStore<5, 2, bytes128>());
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
