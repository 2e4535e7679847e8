// Operations that order threads, launches and updates, for the conformance test. Included by
// conformance.hpp. A barrier that does not wait shows as a word that nobody has written yet.
#pragma once

namespace qattn::isa_test {
inline namespace QATTN_TARGET {

// ---- Barriers
// --------------------------------------------------------------------------------------

/// Warps 0 and 1 hand words to warps 2 and 3, who say when they have read them; then each half
/// meets alone.
struct NamedBarriers : Defaults {
  static constexpr const char* name = "barrier_sync, barrier_arrive";
  static constexpr int outputs = 3, shared_bytes = 1024;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[3]) {
    const int there = 1 + block().x % 6, back = there + 6;
    const bool producer = warp() < 2;
    store_shared(word_of(thread()), 0u);
    store_shared(word_of(128 + thread()), 0u);
    sync_threads();
    for (int round = 0; round < 2; ++round) {
      if (producer) {
        out[round] = slow(in[0] + static_cast<Word32>(round));
        store_shared(word_of(thread()), out[round]);
        barrier_arrive(there, 128);
        barrier_sync(back, 128);
      } else {
        barrier_sync(there, 128);
        out[round] = load_shared<Word32>(word_of(127 - thread()));
        barrier_arrive(back, 128);
      }
    }
    const bool late = warp() % 2 == 0;
    store_shared(word_of(128 + thread()), late ? slow(in[0]) : in[0]);
    barrier_sync(producer ? 14 : 15, 64);
    out[2] = load_shared<Word32>(word_of(128 + (thread() ^ 32)));
  }
};

/// Every warp meets the others at a place of its own.
struct BarrierAnywhere : Defaults {
  static constexpr const char* name = "barrier_sync_anywhere";
  static constexpr int outputs = 1, shared_bytes = 512;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[1]) {
    store_shared(word_of(thread()), 0u);
    sync_threads();
    switch (warp()) {
      case 0:
        store_shared(word_of(thread()), slow(in[0]));
        barrier_sync_anywhere(7, 128);
        break;
      case 1:
        store_shared(word_of(thread()), in[0] + 1);
        barrier_sync_anywhere(7, 128);
        break;
      default:
        store_shared(word_of(thread()), slow(in[0] + 2));
        barrier_sync_anywhere(7, 128);
    }
    out[0] = load_shared<Word32>(word_of(127 - thread()));
  }
};

/// Both answers, before and after each of two phases.
struct MbarrierTest : Defaults {
  static constexpr const char* name = "mbarrier_test";
  static constexpr int arch = 90, outputs = 3, shared_bytes = 1024 + 8;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[3]) {
    const SharedAddress barrier = shared_base() + 1024;
    if (thread() == 0) {
      mbarrier_init(barrier, 128);
      fence_mbarrier_init();
    }
    sync_threads();
    const bool late = warp() % 2 == 0;
    Word32 answers = 0;
    for (int phase = 0; phase < 2; ++phase) {
      const auto parity = static_cast<Word32>(phase);
      // This thread has not arrived: the phase is open, the one before it has completed.
      answers = answers << 4 | Word32{mbarrier_test(barrier, parity)} << 1 |
                Word32{mbarrier_test(barrier, parity ^ 1)};
      store_shared(word_of(128 * phase + thread()), late ? slow(in[0]) : in[0]);
      mbarrier_arrive(barrier);
      while (!mbarrier_test(barrier, parity)) {
      }
      answers = answers << 4 | Word32{mbarrier_test(barrier, parity)};
      out[1 + phase] = load_shared<Word32>(word_of(128 * phase + (thread() ^ 33)));
    }
    out[0] = answers;
  }
};

/// A cluster of one block.
struct ClusterSync : Defaults {
  static constexpr const char* name = "cluster_sync, one block";
  static constexpr int arch = 90, shared_bytes = 512;
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[1], Word32 (&out)[1]) {
    store_shared(word_of(thread()), warp() % 2 == 0 ? slow(in[0]) : in[0]);
    cluster_sync();
    out[0] = load_shared<Word32>(word_of(thread() ^ 33));
  }
};

/// Three warpgroups start with 168 registers a thread. One gives most of its away, the others keep
/// more than 168 words at work in what they get.
struct MoveRegisters : Defaults {
  static constexpr const char* name = "registers_decrease, registers_increase";
  static constexpr int arch = 90, cases = 4, inputs = 4, threads = 384;
  static constexpr bool hopper_only = true;  // sm_90a
  static QATTN_DEVICE void apply(const Data&, const Word32 (&in)[4], Word32 (&out)[1]) {
    if (warp() < 4) {
      registers_decrease<40>();
      out[0] = slow(in[0]);
      return;
    }
    registers_increase<232>();
    constexpr int words = 196;
    Word32 v[words];
#pragma unroll
    for (int i = 0; i < words; ++i) v[i] = (in[i % 4] + static_cast<Word32>(i)) * 0x9e3779b1u;
    for (int round = opaque(20); round > 0; --round) {
#pragma unroll
      for (int i = 0; i < words; ++i) v[i] = v[i] * 5 + (v[(i + 1) % words] >> 3);
    }
    out[0] = 0;
#pragma unroll
    for (int i = 0; i < words; ++i) out[0] = out[0] * 3 + v[i];
  }
};

// ---- Launches
// --------------------------------------------------------------------------------------

/// Four launches, each started early behind the one before, whose words its threads take from
/// other blocks after the wait.
struct Launches : Defaults {
  static constexpr const char* name = "grid_dependency_launch, grid_dependency_wait";
  static constexpr int arch = 90, cases = 64, outputs = 4, launches = 4;
  static constexpr bool writes_itself = true;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&in)[1], Word32 (&)[4]) {
    constexpr int all = cases * threads;
    const int mine = block().x * threads + thread(), other = (5 * mine + 77) % all;
    grid_dependency_launch();
    Word32 word = slow(in[0] + static_cast<Word32>(p.step));
    grid_dependency_wait();
    if (p.step > 0) word += load_global(p.out + (p.step - 1) * all + other);
    store_global(p.out + p.step * all + mine, word);
  }
};

// ---- Global memory
// ---------------------------------------------------------------------------------

/// Updates of words that threads of all blocks share, which end in one value in whatever order; and
/// old values where only this thread updates.
struct GlobalAtomics : Defaults {
  static constexpr const char* name = "global atomics";
  static constexpr int inputs = 2, outputs = 3;
  static constexpr bool writes_itself = true;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&in)[2], Word32 (&)[3]) {
    constexpr int all = cases * threads;
    static_assert(all == 4 * 512);
    atomic_add_global(p.out + in[0] % 512, in[1]);
    atomic_max_global(p.out + 512 + in[0] / 512 % 512, in[1]);
    atomic_or_global(p.out + 1024 + in[0] / 7 % 512, in[1] & in[1] >> 3 & in[1] >> 11);
    // Sums that carry into the upper half.
    auto* wide = reinterpret_cast<std::uint64_t*>(p.out + 1536);
    atomic_add_global(wide + in[0] / 3 % 256, std::uint64_t{in[1]} << 8 | in[0] % 256);
    const int mine = block().x * threads + thread();
    Word32* own = p.out + all + mine;
    const Word32 zero = atomic_add_global(own, in[0]), first = atomic_add_global(own, in[1]);
    const Word32 sum = atomic_max_global(own, in[0] ^ in[1]);
    const Word32 largest = atomic_or_global(own, in[1] >> 1);
    store_global(p.out + 2 * all + mine, zero + 3 * first + 5 * sum + 7 * largest);
  }
};

struct LoadOnce : Defaults {
  static constexpr const char* name = "load_once, store_once";
  static constexpr int inputs = 4, outputs = 4;
  static constexpr bool writes_itself = true;
  static QATTN_DEVICE void apply(const Data& p, const Word32 (&)[4], Word32 (&)[4]) {
    const int first = block().x * threads, other = first + 37 * thread() % threads;
    Words4 words = load_once(reinterpret_cast<const Words4*>(p.in) + other);
    words.w[0] += 1;
    store_once(reinterpret_cast<Words4*>(p.out) + first + thread(), words);
  }
};

template <class Visit>
void for_each_order_operation(Visit visit) {
  visit(NamedBarriers());
  visit(BarrierAnywhere());
  visit(MbarrierTest());
  visit(ClusterSync());
  visit(MoveRegisters());
  visit(Launches());
  visit(GlobalAtomics());
  visit(LoadOnce());
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa_test
