#include "isa/emu/vocabulary.hpp"

#include "isa/emu/error.hpp"
#include "isa/isa.hpp"

namespace qattn::emu {
namespace {

constexpr int first_amd = 900;  ///< isa::vendor_of()
static_assert(isa::vendor_of(first_amd) != isa::vendor_of(first_amd - 1));

/// GPUs that have a word: NVIDIA's from `first` to `last`, and AMD's too or not.
struct Availability {
  int first = 80, last = first_amd - 1;
  bool specific = false;  ///< only in code for one GPU
  bool amd = false;
};
constexpr Availability everywhere{.amd = true};
constexpr Availability nvidia{};
constexpr Availability amd{.first = first_amd, .amd = true};
constexpr Availability of_mma{};  // isa::has_mma() says
constexpr Availability from(int first) { return {.first = first}; }
constexpr Availability specific_from(int first) { return {.first = first, .specific = true}; }
constexpr Availability alone(int gpu) { return {.first = gpu, .last = gpu, .specific = true}; }

struct WordInfo {
  Word word;
  const char* name;
  Pipe pipe;
  Availability where;
  const char* instruction;
};

// Where an instruction exists is what its "Target ISA Notes" in the PTX ISA 9.0 say, with
// ptxas 13.0 as the judge. Three words exist on more GPUs than their instruction does: elect() is
// lane 0 before sm_90; the conversions of FP8 are sequences before sm_89; mbarriers of sm_80, which
// count no bytes, are not in the vocabulary. Words of no row (places, grid_dependency_*) exist
// everywhere. Of AMD's GPUs only what is the same there has been looked at.
constexpr WordInfo kWords[] = {
    {Word::none, "none", Pipe::control, everywhere, ""},
    {Word::load_shared, "load_shared", Pipe::memory, everywhere, "ld.shared"},
    {Word::store_shared, "store_shared", Pipe::memory, everywhere, "st.shared"},
    {Word::load_global, "load_global", Pipe::memory, everywhere, "ld.global"},
    {Word::store_global, "store_global", Pipe::memory, everywhere, "st.global"},
    {Word::atomic_shared, "atomic_shared", Pipe::memory, everywhere, "atom.shared"},
    {Word::atomic_global, "atomic_global", Pipe::memory, everywhere, "atom.global"},
    {Word::sync_threads, "sync_threads", Pipe::control, everywhere, "barrier.sync 0"},
    {Word::barrier_sync, "barrier_sync", Pipe::control, nvidia, "bar.sync"},
    {Word::barrier_sync_anywhere, "barrier_sync_anywhere", Pipe::control, nvidia, "barrier.sync"},
    {Word::barrier_arrive, "barrier_arrive", Pipe::control, nvidia, "bar.arrive"},
    {Word::sync_warp, "sync_warp", Pipe::control, everywhere, "bar.warp.sync"},
    {Word::shuffle, "shuffle", Pipe::memory, everywhere, "shfl.sync"},
    {Word::warp, "warp", Pipe::control, everywhere, "shfl.sync"},
    {Word::vote, "vote", Pipe::control, everywhere, "vote.sync"},
    {Word::ballot, "ballot", Pipe::control, everywhere, "vote.sync.ballot"},
    {Word::ballot64, "ballot64", Pipe::control, amd, "v_cmp, of 64 lanes"},
    {Word::copy_async, "copy_async", Pipe::memory, nvidia, "cp.async"},
    {Word::copy_async_commit, "copy_async_commit", Pipe::control, nvidia, "cp.async.commit_group"},
    {Word::copy_async_wait, "copy_async_wait", Pipe::control, nvidia, "cp.async.wait_group"},
    {Word::load_matrix, "load_matrix", Pipe::memory, nvidia, "ldmatrix"},
    {Word::store_matrix, "store_matrix", Pipe::memory, from(90), "stmatrix"},
    {Word::transpose_matrix, "transpose_matrix", Pipe::memory, nvidia, "movmatrix"},
    {Word::mma_f16, "mma f16", Pipe::tensor, of_mma, "mma.sync"},
    {Word::mma_bf16, "mma bf16", Pipe::tensor, of_mma, "mma.sync"},
    {Word::mma_int8, "mma int8", Pipe::tensor, of_mma, "mma.sync"},
    {Word::mma_fp8, "mma fp8", Pipe::tensor, of_mma, "mma.sync"},
    {Word::exp2, "exp2", Pipe::special, everywhere, "ex2"},
    {Word::log2, "log2", Pipe::special, everywhere, "lg2"},
    {Word::reciprocal, "reciprocal", Pipe::special, everywhere, "rcp"},
    {Word::convert, "convert", Pipe::convert, everywhere, "cvt"},
    {Word::byte_permute, "byte_permute", Pipe::integer, everywhere, "prmt"},
    {Word::lop3, "lop3", Pipe::integer, nvidia, "lop3"},
    {Word::dot4, "dot4", Pipe::integer, everywhere, "dp4a"},
    {Word::min_max, "min, max", Pipe::integer, everywhere, "min, max"},
    {Word::fma, "fma", Pipe::fma, everywhere, "fma"},
    {Word::mbarrier_init, "mbarrier_init", Pipe::control, from(90), "mbarrier.init"},
    {Word::fence_mbarrier_init, "fence_mbarrier_init", Pipe::control, from(90),
     "fence.mbarrier_init"},
    {Word::mbarrier_arrive, "mbarrier_arrive", Pipe::control, from(90), "mbarrier.arrive"},
    {Word::mbarrier_expect, "mbarrier_expect", Pipe::control, from(90), "mbarrier.expect_tx"},
    {Word::mbarrier_wait, "mbarrier_wait", Pipe::control, from(90), "mbarrier.try_wait"},
    {Word::mbarrier_test, "mbarrier_test", Pipe::control, from(90), "mbarrier.test_wait"},
    {Word::fence_async_proxy, "fence_async_proxy", Pipe::control, from(90), "fence.proxy.async"},
    {Word::fence_async_global, "fence_async_global", Pipe::control, from(90), "fence.proxy.async"},
    {Word::bulk_load, "bulk_load", Pipe::memory, from(90), "cp.async.bulk"},
    {Word::bulk_store, "bulk_store", Pipe::memory, from(90), "cp.async.bulk"},
    {Word::tma_load, "tma_load", Pipe::memory, from(90), "cp.async.bulk.tensor"},
    {Word::tma_store, "tma_store", Pipe::memory, from(90), "cp.async.bulk.tensor"},
    {Word::tma_prefetch, "tma_prefetch", Pipe::memory, from(90), "prefetch.tensormap"},
    {Word::bulk_commit, "bulk_commit", Pipe::control, from(90), "cp.async.bulk.commit_group"},
    {Word::bulk_wait, "bulk_wait", Pipe::control, from(90), "cp.async.bulk.wait_group"},
    {Word::bulk_wait_read, "bulk_wait_read", Pipe::control, from(90),
     "cp.async.bulk.wait_group.read"},
    {Word::wgmma_fence, "wgmma_fence", Pipe::control, alone(90), "wgmma.fence"},
    {Word::wgmma, "wgmma", Pipe::tensor, alone(90), "wgmma.mma_async"},
    {Word::wgmma_commit, "wgmma_commit", Pipe::control, alone(90), "wgmma.commit_group"},
    {Word::wgmma_wait, "wgmma_wait", Pipe::control, alone(90), "wgmma.wait_group"},
    {Word::registers, "registers_increase/decrease", Pipe::control, specific_from(90),
     "setmaxnreg"},
    {Word::elect, "elect", Pipe::control, nvidia, "elect.sync"},
    {Word::cluster_sync, "cluster_sync", Pipe::control, from(90), "barrier.cluster"},
    {Word::map_shared, "map_shared", Pipe::integer, from(90), "mapa"},
    {Word::load_cluster, "load_cluster", Pipe::memory, from(90), "ld.shared::cluster"},
    {Word::store_cluster, "store_cluster", Pipe::memory, from(90), "st.shared::cluster"},
    {Word::mma_mxfp8, "mma_scaled mxfp8", Pipe::tensor, specific_from(120), "mma.sync block_scale"},
    {Word::mma_fp4, "mma_scaled fp4", Pipe::tensor, specific_from(120), "mma.sync block_scale"},
    {Word::load_bytes_transposed, "load_bytes_transposed", Pipe::memory, specific_from(120),
     "ldmatrix.b8.trans"},
    {Word::convert_e2m1, "convert to e2m1", Pipe::convert, specific_from(120), "cvt e2m1x2"},
    {Word::convert_ue8m0, "convert to ue8m0", Pipe::convert, specific_from(120), "cvt ue8m0x2"},
    {Word::mma_f8f6f4, "mma f8f6f4", Pipe::tensor, specific_from(120), "mma.sync kind::f8f6f4"},
};

constexpr bool in_order() {
  std::size_t i = 0;
  for (const WordInfo& info : kWords) {
    if (static_cast<std::size_t>(info.word) != i++) return false;
  }
  return i == static_cast<std::size_t>(Word::count);
}
static_assert(in_order(), "one row per Word, in its order");

const WordInfo& info(Word word) { return kWords[static_cast<std::size_t>(word)]; }

bool is_mma(Word word) { return word >= Word::mma_f16 && word <= Word::mma_fp8; }

std::string describe(Word word) {
  if (word == Word::mma_fp8) return "is one instruction on sm_89 and from sm_120 on";
  const Availability& a = info(word).where;
  if (a.first >= first_amd) return "exists on GPUs of AMD alone";
  if (a.first == a.last) return "exists on " + name({a.first, a.specific}) + " alone";
  return text("exists from sm_%d%s on", a.first, a.specific ? "a" : "");
}

}  // namespace

const char* name(Word word) { return info(word).name; }
Pipe pipe(Word word) { return info(word).pipe; }

std::string name(isa::Target target) {
  if (isa::vendor_of(target) == isa::Vendor::amd) return text("gfx%d", target.number);
  return text("sm_%d%s", target.number, target.family ? "f" : target.specific ? "a" : "");
}

bool exists(Word word, isa::Target target) {
  const Availability& a = info(word).where;
  if (isa::vendor_of(target) == isa::Vendor::amd) return a.amd;
  if (is_mma(word)) {
    return isa::has_mma(word == Word::mma_fp8 ? isa::Element::e4m3 : isa::Element::s8,
                        target.number);
  }
  return a.first <= target.number && target.number <= a.last && (target.specific || !a.specific);
}

Vocabulary::Vocabulary(isa::Target target, int gpu) : target_(target), gpu_(gpu) {
  for (const WordInfo& w : kWords) {
    has_[static_cast<std::size_t>(w.word)] = exists(w.word, target) && exists(w.word, {gpu, true});
  }
}

std::string Vocabulary::lack(Word word) const {
  const isa::Target lacks = exists(word, target_) ? isa::Target{gpu_} : target_;
  return text("%s: %s has no such word, which %s", name(word), name(lacks).c_str(),
              describe(word).c_str());
}

}  // namespace qattn::emu
