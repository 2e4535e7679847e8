// Which GPUs have which words, and what a kernel is told that uses one that its GPU lacks.
#include <utility>

#include "emulate.hpp"
#include "isa/tensor_map.hpp"

namespace qattn::isa_test {
namespace {

using namespace isa;
using emu::exists;
using emu::Word;

constexpr Target of(int number) { return {number}; }
constexpr Target alone(int number) { return {number, true}; }

TEST(Vocabulary, KnowsWhatPtxasTakes) {
  for (const int gpu : {80, 86, 89, 90, 100, 103, 110, 120, 121}) {
    const auto expect = [&](Word word, bool common, bool specific) {
      EXPECT_EQ(exists(word, of(gpu)), common) << emu::name(word) << " on sm_" << gpu;
      EXPECT_EQ(exists(word, alone(gpu)), specific) << emu::name(word) << " on sm_" << gpu << "a";
    };
    const bool sm_90 = gpu >= 90, fp8 = gpu == 89 || gpu >= 120;
    for (const Word word : {Word::copy_async, Word::load_matrix, Word::mma_f16, Word::mma_int8,
                            Word::barrier_arrive, Word::convert, Word::elect}) {
      expect(word, true, true);
    }
    for (const Word word : {Word::store_matrix, Word::tma_load, Word::tma_store, Word::bulk_load,
                            Word::mbarrier_wait, Word::fence_async_proxy, Word::cluster_sync}) {
      expect(word, sm_90, sm_90);
    }
    expect(Word::mma_fp8, fp8, fp8);
    expect(Word::wgmma, false, gpu == 90);
    expect(Word::registers, false, sm_90);
  }
  EXPECT_TRUE(exists(Word::shuffle, gfx942));
  EXPECT_FALSE(exists(Word::copy_async, gfx942));
}

TEST(Vocabulary, SaysWhatCodeRunsWhere) {
  const auto runs = [](Target code, int gpu) { return runs_on(code, gpu_of(gpu)); };
  EXPECT_TRUE(runs(sm_80, 80) && runs(sm_80, 120) && runs(sm_90a, 90));
  EXPECT_FALSE(runs(sm_90, 89) || runs(sm_90a, 100) || runs(sm_80, 942));
}

TEST(Vocabulary, KnowsWhoseAGpuIs) {
  constexpr Gpu hopper = gpu_of(90), mi300 = gpu_of(942), mi350 = gpu_of(950);
  EXPECT_TRUE(hopper.runs_sm(80) && !hopper.runs_sm(100));
  EXPECT_EQ(hopper.name(), "sm_90");
  EXPECT_EQ(hopper.wave, 32);
  EXPECT_EQ(hopper.shared_bytes, 227 * 1024);
  // Its number is the larger one, and its products are none of NVIDIA's.
  EXPECT_FALSE(mi300.runs_sm(80) || has_mma(Element::e4m3, 942) || has_mma(Element::f16, 942));
  EXPECT_EQ(mi300.name(), "gfx942");
  EXPECT_EQ(mi300.wave, 64);
  EXPECT_EQ(mi300.shared_bytes, 64 * 1024);
  EXPECT_EQ(mi350.shared_bytes, 160 * 1024);
}

/// One word, in every lane of a block of four warps.
using Use = std::pair<const char*, void (*)()>;

const Use kHopperWords[] = {
    {"mbarrier_init", [] { mbarrier_init(shared_base(), 1); }},
    {"fence_mbarrier_init", [] { fence_mbarrier_init(); }},
    {"mbarrier_arrive", [] { mbarrier_arrive(shared_base()); }},
    {"mbarrier_expect", [] { mbarrier_expect(shared_base(), 16); }},
    {"mbarrier_expect", [] { mbarrier_arrive_expect(shared_base(), 16); }},
    {"mbarrier_wait", [] { mbarrier_wait(shared_base(), 0); }},
    {"mbarrier_test", [] { mbarrier_test(shared_base(), 0); }},
    {"fence_async_proxy", [] { fence_async_proxy(); }},
    {"fence_async_global", [] { fence_async_global(); }},
    {"bulk_load", [] { bulk_load(shared_base(), nullptr, 16, shared_base()); }},
    {"bulk_store", [] { bulk_store(nullptr, shared_base(), 16); }},
    {"tma_load",
     [] {
       TensorMap map;
       map.rank = 2;
       tma_load<2>(shared_base(), map, {0, 0}, shared_base());
     }},
    {"tma_store",
     [] {
       TensorMap map;
       map.rank = 2;
       tma_store<2>(map, {0, 0}, shared_base());
     }},
    {"tma_prefetch", [] { tma_prefetch(TensorMap()); }},
    {"bulk_commit", [] { bulk_commit(); }},
    {"bulk_wait", [] { bulk_wait<0>(); }},
    {"bulk_wait_read", [] { bulk_wait_read<0>(); }},
    {"store_matrix",
     [] {
       const SharedAddress row[1] = {shared_base()};
       const std::uint32_t r[1][4] = {};
       store_matrix<1>(row, r);
     }},
    {"cluster_sync", [] { cluster_sync(); }},
};
const Use kHopperAlone[] = {
    {"wgmma_fence", [] { wgmma_fence(); }},
    {"wgmma",
     [] {
       float d[4];
       wgmma<Element::f16, Element::f16, 8>(d, 0, 0, false);
     }},
    {"wgmma_commit", [] { wgmma_commit(); }},
    {"wgmma_wait", [] { wgmma_wait<0>(); }},
};

void expect_refused(const Use& use, const Options& options, const std::string& gpu,
                    const std::string& where) {
  const std::string error = error_of(128, 1024, options, use.second);
  const std::string want = use.first + (": " + gpu) + " has no such word, which exists " + where +
                           ", in kernel without a name, at vocabulary_test.cpp:";
  EXPECT_NE(error.find(want), std::string::npos) << "want: " << want << "\ngot: " << error;
}

TEST(Vocabulary, NamesTheWordTheGpuAndThePlace) {
  for (const int gpu : {80, 89}) {
    const std::string name = "sm_" + std::to_string(gpu);
    for (const Use& use : kHopperWords) {
      expect_refused(use, {.architecture = gpu}, name + "a", "from sm_90 on");
    }
  }
  for (const int gpu : {80, 89, 100, 120}) {
    const std::string name = "sm_" + std::to_string(gpu) + "a";
    for (const Use& use : kHopperAlone) {
      expect_refused(use, {.architecture = gpu}, name, "on sm_90a alone");
    }
  }
  const Use registers = {"registers_increase/decrease", [] { registers_decrease<40>(); }};
  expect_refused(registers, {.architecture = 120, .target = of(120)}, "sm_120", "from sm_90a on");
  const Use copy = {"copy_async", [] { copy_async16(shared_base(), nullptr, 0); }};
  expect_refused(copy, {.architecture = 942}, "gfx942", "from sm_80 on");
}

TEST(Vocabulary, HasFp8ProductsWhereTheyAreOneInstruction) {
  const auto product = [] {
    float d[1][1][4] = {};
    const std::uint32_t a[1][4] = {}, b[1][2] = {};
    mma<Element::e4m3, Element::e4m3, 1, 1>(d, a, b);
  };
  for (const int gpu : {80, 89, 90, 100, 120}) {
    const std::string error = error_of(32, 0, {.architecture = gpu}, product);
    EXPECT_EQ(error.empty(), has_mma(Element::e4m3, gpu)) << error;
    if (error.empty()) continue;
    EXPECT_NE(error.find("mma fp8: sm_" + std::to_string(gpu)), std::string::npos) << error;
  }
}

// ---- Kernels know their target -----------------------------------------------------------------

struct Nothing {};

/// Says nothing, so it is for sm_80.
struct Portable {
  using Params = Nothing;
  static constexpr int threads = 128, min_blocks = 1, shared_bytes = 1024;
  static void run(const Params&) {
    wgmma_fence();
    wgmma_commit();
    wgmma_wait<0>();
  }
};
struct Hopper : Portable {
  static constexpr Target target = sm_90a;
};
struct Pairs : Portable {
  static constexpr int cluster = 2;
  static void run(const Params&) {}
};

/// A GPU, and what the code was compiled for, for as long as it lives.
class OnGpu {
 public:
  explicit OnGpu(int gpu, int code = 0) : before_(emu::options()) {
    emu::options().architecture = gpu;
    emu::options().code_architecture = code;
  }
  ~OnGpu() { emu::options() = before_; }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  Options before_;
};

TEST(Target, WhatIsCompiledForOneGpuNeedsItsCode) {
  for (const int code : {80, 89, 90, 100}) {
    const OnGpu on(code == 89 ? 90 : code, code);
    EXPECT_TRUE(has_code<Portable>()) << code;
    EXPECT_EQ(has_code<Hopper>(), code == 90) << code;
  }
  constexpr Target alone{120, true}, family{120};
  EXPECT_TRUE(has_all(sm_90a, sm_90a) && has_all(sm_90a, sm_80) && has_all(alone, family));
  EXPECT_FALSE(has_all(sm_90, sm_90a) || has_all(alone, sm_90a) || has_all(family, alone) ||
               has_all(sm_80, sm_89) || has_all(gfx942, sm_80) || has_all(alone, gfx942));
}

TEST(Vocabulary, HoldsPortableKernelsToTheirTargetOnEveryGpu) {
  for (const int gpu : {80, 89, 90, 120}) {
    const OnGpu on(gpu);
    const std::string error = launch<Portable>({}, {1, 1, 1}, nullptr);
    EXPECT_NE(
        error.find("wgmma_fence: sm_80 has no such word, which exists on sm_90a alone, in "
                   "kernel isa_test::(anonymous namespace)::Portable, at vocabulary_test.cpp:"),
        std::string::npos)
        << error;
  }
  const OnGpu on(90);
  EXPECT_EQ(launch<Hopper>({}, {1, 1, 1}, nullptr), "");
}

TEST(Vocabulary, RefusesKernelsOfOtherGpus) {
  const std::string name = "kernel isa_test::(anonymous namespace)::Hopper is for sm_90a, not for ";
  for (const int gpu : {80, 89, 100, 120}) {
    const OnGpu on(gpu);
    EXPECT_EQ(launch<Hopper>({}, {1, 1, 1}, nullptr), name + "sm_" + std::to_string(gpu));
  }
  const OnGpu on(90, 80);
  EXPECT_EQ(launch<Hopper>({}, {1, 1, 1}, nullptr), name + "sm_80");
}

TEST(Vocabulary, HasNoClustersBeforeHopper) {
  const std::string error = launch<Pairs>({}, {2, 1, 1}, nullptr);
  EXPECT_NE(error.find("::Pairs is launched in clusters, which sm_80 has not"), std::string::npos)
      << error;
}

}  // namespace
}  // namespace qattn::isa_test
