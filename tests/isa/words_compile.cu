// Every word of sm_90 and sm_120a, and those of sm_80 that few kernels use, as device code;
// compiling is the test (for sm_80 the bodies of sm_90's are empty).
#include "isa/launch.hpp"
#include "isa/tensor_map.hpp"

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

using namespace isa;

struct AllWords {
  struct Params {
    TensorMap map;
    float* out;
    int* integers;
  };
  static constexpr int threads = 128, min_blocks = 1, shared_bytes = 65536;
  static constexpr Target target = sm_90a;

  template <Element A, Element B, int N>
  static QATTN_DEVICE void both(std::uint64_t a, std::uint64_t b, float* out) {
    Accumulator<A> d[N / 2];
    const std::uint32_t fragments[4] = {1, 2, 3, 4};
    wgmma_fence();
    wgmma<A, B, N>(d, a, b, false);
    wgmma<A, B, N>(d, fragments, b, true);
    if constexpr (has_transposes<A>) {
      wgmma<A, B, N, true, true>(d, a, b, true);
      wgmma<A, B, N, true>(d, fragments, b, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) out[i] += static_cast<float>(d[i]);
  }
  template <int N>
  static QATTN_DEVICE void all_formats(std::uint64_t a, std::uint64_t b, float* out) {
    using enum Element;
    both<f16, f16, N>(a, b, out);
    both<bf16, bf16, N>(a, b, out);
    if constexpr (N <= 32 || N % 16 == 0) {  // integers have no other N
      both<s8, s8, N>(a, b, out);
      both<s8, u8, N>(a, b, out);
      both<u8, s8, N>(a, b, out);
      both<u8, u8, N>(a, b, out);
    }
    both<e4m3, e4m3, N>(a, b, out);
    both<e4m3, e5m2, N>(a, b, out);
    both<e5m2, e4m3, N>(a, b, out);
    both<e5m2, e5m2, N>(a, b, out);
  }

  static QATTN_DEVICE void copy(SharedAddress s, const Params& p) {
    copy_async16(s, p.out, 16);
    copy_async8(s + 16, p.out, 8);
    copy_async4(s + 24, p.out, 4);
    copy_async_commit();
    copy_async_wait<0>();
    auto* words = reinterpret_cast<Words4*>(p.integers);
    store_once(words + 1, load_once(words));
  }

  static QATTN_DEVICE void run(const Params& p) {
    const SharedAddress s = shared_base(), barrier = s + 60000;
    if (warp() == 0 && elect()) {
      mbarrier_init(barrier, 2);
      fence_mbarrier_init();
      tma_prefetch(p.map);
      mbarrier_expect(barrier, 64);
      mbarrier_arrive_expect(barrier, 32);
      bulk_load(s, p.out, 64, barrier);
      tma_load<2>(s, p.map, {1, 2}, barrier);
      tma_load<3>(s, p.map, {1, 2, 3}, barrier);
      tma_load<4>(s, p.map, {1, 2, 3, 4}, barrier);
      tma_load<5>(s, p.map, {1, 2, 3, 4, 5}, barrier);
      mbarrier_arrive(barrier);
    }
    cluster_sync();
    const SharedAddress there = map_shared(shared_base(), cluster_blocks() - 1 - cluster_rank());
    store_cluster(there, load_cluster<std::uint32_t>(there) + 1u);
    store_cluster(there, load_cluster<Words2>(there + 8));
    store_cluster(there, load_cluster<Words4>(there + 16));
    grid_dependency_wait();
    registers_decrease<40>();
    registers_increase<232>();
    mbarrier_wait(barrier, 0);
    if (!mbarrier_test(barrier, 0)) return;
    const std::uint64_t a = matrix_descriptor(s, 16, 1024, Swizzle::bytes128);
    const std::uint64_t b = matrix_descriptor(s + 16384, 16, 512, Swizzle::bytes64);
    all_formats<8>(a, b, p.out);
    all_formats<16>(a, b, p.out);
    all_formats<32>(a, b, p.out);
    all_formats<64>(a, b, p.out);
    all_formats<72>(a, b, p.out);
    all_formats<96>(a, b, p.out);
    all_formats<104>(a, b, p.out);
    all_formats<128>(a, b, p.out);
    all_formats<136>(a, b, p.out);
    all_formats<192>(a, b, p.out);
    all_formats<256>(a, b, p.out);
    copy(s, p);
    store_matrix<1>({s}, {{1, 2, 3, 4}});
    store_matrix_transposed<1>({s}, {{1, 2, 3, 4}});
    store_matrix2<1>({s}, {{1, 2}});
    store_matrix2_transposed<1>({s}, {{1, 2}});
    store_matrix1<1>({s}, {{1}});
    store_matrix1_transposed<1>({s}, {{1}});
    fence_async_proxy();
    bulk_store(p.out, s, 64);
    tma_store<2>(p.map, {1, 2}, s);
    tma_store<3>(p.map, {1, 2, 3}, s);
    tma_store<4>(p.map, {1, 2, 3, 4}, s);
    tma_store<5>(p.map, {1, 2, 3, 4, 5}, s);
    bulk_commit();
    bulk_wait_read<1>();
    bulk_wait<0>();
    grid_dependency_launch();
  }
};

/// A kernel of its own: for sm_120a nothing of the one above is left behind wgmma, which traps.
struct WordsOfSm120 {
  struct Params {
    float* out;
  };
  static constexpr int threads = 32, min_blocks = 1, shared_bytes = 1024;
  static constexpr Target target{120, true};

  template <Scaled S, int Byte>
  static QATTN_DEVICE void scaled(SharedAddress s, float* out) {
    std::uint32_t a[1][4], b[1][2] = {{1, 2}};
    load_bytes_transposed<1>(a, {s});
    float d[1][1][4] = {}, x[8] = {};
    using enum Element;
    mma_f8f6f4<e4m3, e4m3, 1, 1>(d, a, b);
    mma_f8f6f4<e4m3, e5m2, 1, 1>(d, a, b);
    mma_f8f6f4<e4m3, e2m1, 1, 1>(d, a, b);
    mma_f8f6f4<e5m2, e4m3, 1, 1>(d, a, b);
    mma_f8f6f4<e5m2, e5m2, 1, 1>(d, a, b);
    mma_f8f6f4<e5m2, e2m1, 1, 1>(d, a, b);
    mma_f8f6f4<e2m1, e4m3, 1, 1>(d, a, b);
    mma_f8f6f4<e2m1, e5m2, 1, 1>(d, a, b);
    mma_f8f6f4<e2m1, e2m1, 1, 1>(d, a, b);
    mma_scaled<S, 1, 1, Byte>(d, a, b, {3}, {4});
    for (int i = 0; i < 4; ++i) x[i] = out[i] += d[0][0][i];
    out[4] += static_cast<float>(pack_e2m1(x));
    out[5] += static_cast<float>(pack_ue8m0(x[0], x[1]) + pack_ue8m0_up(x[2], x[3]));
  }

  static QATTN_DEVICE void pairs(float* out) {
    Pair x = fma_pair({out[0], out[1]}, {out[2], out[3]}, {out[4], out[5]});
    x = add_pair(x, multiply_pair({out[6], out[7]}, x));
    out[8] = max3(x.lo, x.hi, out[9]);
  }

  static QATTN_DEVICE void run(const Params& p) {
    scaled<Scaled::mxfp8, 3>(shared_base(), p.out);
    scaled<Scaled::mxfp4, 2>(shared_base(), p.out);
    scaled<Scaled::nvfp4, 0>(shared_base(), p.out);
    pairs(p.out);
  }
};

std::string use(const AllWords::Params& p) {
  TensorMap map;
  const std::string error = make_tensor_map({}, map);
  return error.empty() ? launch<AllWords>(p, {1, 1, 1}, nullptr) : error;
}

std::string use(const WordsOfSm120::Params& p) {
  return launch<WordsOfSm120>(p, {1, 1, 1}, nullptr);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
