#include "model/bound.hpp"

namespace qattn::model {
namespace {

// Per clock and multiprocessor, in the order of Unit. The schedulers (four), shared memory (32
// banks of 4 bytes) and the port to L2 (64 bytes, taken for all) are the architecture's; 16 EX2, 64
// conversions and 64 operations of the integer unit are what the CUDA programming guide and
// microbenchmarks on an H200 say, and are taken for all of them: nobody has measured F2FP to e2m1.
// FFMA: 64 lanes on sm_80, else 128. Products: the data sheet divided by multiprocessors and boost
// clock, of s8; what others take beside it is in Products.

// Hopper's own products are wgmma's. A microbenchmark on an H100: m16n8k16 of bf16 and m16n8k32 of
// s8 take 6.2 clocks of a scheduler each, where wgmma takes 4.
constexpr Products mma_on_hopper{.integer = 1.55, .wide = 3.1};

std::vector<Machine> all() {
  return {
      // Lanes a clock: microbenchmarks on an H200 (EX2 16; F2IP, F2FP, PRMT, FMNMX 64; FFMA 128).
      // Products: the data sheet's 1979 TOP/s are 4096 multiply-accumulates of 8 bits at 1.83 GHz;
      // the 1870 to 1917 that a microbenchmark of wgmma sustains are that at 1.73 to 1.77. Clock:
      // what runs of these kernels sustain. Memory: the data sheet's.
      {"h200",
       "NVIDIA H200",
       {90, 80},
       132,
       1.755e9,
       {4096, 16, 64, 64, 128, 4, 128, 64, 64, 0},
       4.8e12,
       mma_on_hopper,
       "microbenchmarks and data sheet of the H200; clock sustained under load"},
      // The same chip; HBM3 of the SXM card. Clock: 1979 TOP/s of the data sheet.
      {"h100",
       "NVIDIA H100 SXM",
       {90, 80},
       132,
       1.83e9,
       {4096, 16, 64, 64, 128, 4, 128, 64, 64, 0},
       3.35e12,
       mma_on_hopper,
       "data sheet of the H100 SXM and its boost clock; lanes as on the H200"},
      // 312 TFLOP/s bf16, 624 TOP/s s8, 1.41 GHz, 2039 GB/s: data sheet of the 80 GB SXM card.
      {"a100",
       "NVIDIA A100 SXM 80 GB",
       {80, 80},
       108,
       1.41e9,
       {2048, 16, 64, 64, 64, 4, 128, 64, 64, 0},
       2.039e12,
       {},
       "data sheet and its boost clock; lanes by the CUDA programming guide"},
      // Data sheet (Ada whitepaper): bf16 with float32 sums 165.2, FP8 with float32 sums 330.3, s8
      // 660.6; 2.52 GHz; 1008 GB/s.
      {"4090",
       "NVIDIA GeForce RTX 4090",
       {89, 89},
       128,
       2.52e9,
       {1024, 16, 64, 64, 128, 4, 128, 64, 64, 0},
       1.008e12,
       {.wide = 4, .fp8 = 2},
       "Ada whitepaper and its boost clock; lanes by the CUDA programming guide"},
      // Boost 2.407 GHz, 1792 GB/s: data sheet. s8: 838 TOP/s, derived by others from the sheet's
      // sparse FP4. Microbenchmarks of others on the card: bf16 253 TFLOP/s, plain e4m3 506, e4m3
      // with scales 993, nvfp4 4096 FLOP a clock and multiprocessor, at up to 2.9 GHz.
      {"5090",
       "NVIDIA GeForce RTX 5090",
       {120, 89},
       170,
       2.407e9,
       {1024, 16, 64, 64, 128, 4, 128, 64, 64, 0},
       1.792e12,
       {.wide = 4, .fp8 = 2, .fp4 = 0.5},
       "data sheet, its boost clock and microbenchmarks of others; lanes as on the H200"},
      // bf16 503.8 TFLOP/s with float32 sums, FP8 and s8 1007.6, FP4 2015; 2.617 GHz, 1792 GB/s:
      // listings of the workstation card. Its float32 sums are not halved.
      {"pro6000",
       "NVIDIA RTX PRO 6000 Blackwell",
       {120, 89},
       188,
       2.617e9,
       {1024, 16, 64, 64, 128, 4, 128, 64, 64, 0},
       1.792e12,
       {.fp4 = 0.5},
       "published peaks of the workstation card and its boost clock; lanes as on the H200"},
  };
}

}  // namespace

const std::vector<Machine>& machines() {
  static const std::vector<Machine> known = all();
  return known;
}

const Machine* machine_named(const std::string& key) {
  for (const Machine& m : machines()) {
    if (m.key == key) return &m;
  }
  return nullptr;
}

const Machine& h200() { return machines().front(); }

}  // namespace qattn::model
