// The emulator's words as functions of C, for whole warps at once: what tests/isa/ptx_machine.py
// executes foreign kernels with. Registers are [thread][register]. Each function returns what went
// wrong, or null.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "isa/launch.hpp"

namespace qattn::isa_test {
namespace {

using namespace isa;

/// `kernel(thread)` on so many threads of a block; shared memory holds 16 bytes a thread.
template <class F>
const char* run(int threads, const F& kernel) {
  thread_local std::string error;
  try {
    emu::run({1, 1, 1}, threads, 16 * threads, {.architecture = 120}, [&] { kernel(thread()); });
  } catch (const emu::Error& e) {
    error = e.what();
    return error.c_str();
  }
  return nullptr;
}
const char* unknown(const char* word, const char* kind) {
  thread_local std::string error;
  error = std::string(word) + " has no kind " + kind;
  return error.c_str();
}

// ---- Products ----------------------------------------------------------------------------------

struct Product {
  std::uint32_t* d;
  const std::uint32_t *a, *b, *sa, *sb;  ///< 4, 2, 1 and 1 registers a thread
};

/// One product of one thread: `word(d, a, b, sa, sb)` on registers as words have them.
template <class Acc, class Word>
void multiply(const Product& p, int t, const Word& word) {
  Acc d[1][1][4];
  std::uint32_t a[1][4], b[1][2], sa[1] = {}, sb[1] = {};
  std::memcpy(d, p.d + 4 * t, sizeof d);
  std::memcpy(a, p.a + 4 * t, sizeof a);
  std::memcpy(b, p.b + 2 * t, sizeof b);
  if (p.sa) sa[0] = p.sa[t];
  if (p.sb) sb[0] = p.sb[t];
  word(d, a, b, sa, sb);
  std::memcpy(p.d + 4 * t, d, sizeof d);
}

template <Element A, Element B>
void plain(const Product& p, int t) {
  multiply<Accumulator<A>>(p, t,
                           [](auto& d, auto& a, auto& b, auto&, auto&) { mma<A, B>(d, a, b); });
}
template <Element A, Element B>
void narrow(const Product& p, int t) {
  multiply<float>(p, t, [](auto& d, auto& a, auto& b, auto&, auto&) { mma_f8f6f4<A, B>(d, a, b); });
}
template <Scaled S, int Byte>
void scaled(const Product& p, int t) {
  multiply<float>(p, t, [](auto& d, auto& a, auto& b, auto& sa, auto& sb) {
    mma_scaled<S, 1, 1, Byte>(d, a, b, sa, sb);
  });
}

struct Kind {
  std::string_view name;
  void (*run)(const Product&, int thread);
};
constexpr Kind kProducts[] = {
    {"f16.f16", plain<Element::f16, Element::f16>},
    {"bf16.bf16", plain<Element::bf16, Element::bf16>},
    {"s8.s8", plain<Element::s8, Element::s8>},
    {"s8.u8", plain<Element::s8, Element::u8>},
    {"u8.s8", plain<Element::u8, Element::s8>},
    {"u8.u8", plain<Element::u8, Element::u8>},
    {"e4m3.e4m3", plain<Element::e4m3, Element::e4m3>},
    {"e4m3.e5m2", plain<Element::e4m3, Element::e5m2>},
    {"e5m2.e4m3", plain<Element::e5m2, Element::e4m3>},
    {"e5m2.e5m2", plain<Element::e5m2, Element::e5m2>},
    {"f8f6f4 e4m3.e4m3", narrow<Element::e4m3, Element::e4m3>},
    {"f8f6f4 e4m3.e5m2", narrow<Element::e4m3, Element::e5m2>},
    {"f8f6f4 e4m3.e2m1", narrow<Element::e4m3, Element::e2m1>},
    {"f8f6f4 e5m2.e4m3", narrow<Element::e5m2, Element::e4m3>},
    {"f8f6f4 e5m2.e5m2", narrow<Element::e5m2, Element::e5m2>},
    {"f8f6f4 e5m2.e2m1", narrow<Element::e5m2, Element::e2m1>},
    {"f8f6f4 e2m1.e4m3", narrow<Element::e2m1, Element::e4m3>},
    {"f8f6f4 e2m1.e5m2", narrow<Element::e2m1, Element::e5m2>},
    {"f8f6f4 e2m1.e2m1", narrow<Element::e2m1, Element::e2m1>},
    {"mxfp8 0", scaled<Scaled::mxfp8, 0>},
    {"mxfp8 1", scaled<Scaled::mxfp8, 1>},
    {"mxfp8 2", scaled<Scaled::mxfp8, 2>},
    {"mxfp8 3", scaled<Scaled::mxfp8, 3>},
    {"mxfp4 0", scaled<Scaled::mxfp4, 0>},
    {"mxfp4 2", scaled<Scaled::mxfp4, 2>},
    {"nvfp4 0", scaled<Scaled::nvfp4, 0>},
};

// ---- Matrices ----------------------------------------------------------------------------------

template <int Matrices, class Word>
void load(std::uint32_t* to, SharedAddress row, const Word& word) {
  std::uint32_t r[1][Matrices];
  const SharedAddress rows[1] = {row};
  word(r, rows);
  std::memcpy(to, r, sizeof r);
}

/// The word that loads `to` from the row of 16 bytes at `row`; false: there is none.
bool load_kind(std::string_view kind, std::uint32_t* to, SharedAddress row) {
  if (kind == "x4") load<4>(to, row, [](auto& r, auto& a) { load_matrix(r, a); });
  if (kind == "x2") load<2>(to, row, [](auto& r, auto& a) { load_matrix2(r, a); });
  if (kind == "x1") load<1>(to, row, [](auto& r, auto& a) { load_matrix1(r, a); });
  if (kind == "x4.trans") load<4>(to, row, [](auto& r, auto& a) { load_matrix_transposed(r, a); });
  if (kind == "x2.trans") load<2>(to, row, [](auto& r, auto& a) { load_matrix2_transposed(r, a); });
  if (kind == "x1.trans") load<1>(to, row, [](auto& r, auto& a) { load_matrix1_transposed(r, a); });
  if (kind == "b8.trans") load<4>(to, row, [](auto& r, auto& a) { load_bytes_transposed(r, a); });
  for (const std::string_view known :
       {"x4", "x2", "x1", "x4.trans", "x2.trans", "x1.trans", "b8.trans"}) {
    if (kind == known) return true;
  }
  return false;
}

template <int Matrices, class Word>
void store(const std::uint32_t* from, SharedAddress row, const Word& word) {
  std::uint32_t r[1][Matrices];
  std::memcpy(r, from, sizeof r);
  const SharedAddress rows[1] = {row};
  word(rows, r);
}

bool store_kind(std::string_view kind, const std::uint32_t* from, SharedAddress row) {
  if (kind == "x4") store<4>(from, row, [](auto& a, auto& r) { store_matrix(a, r); });
  if (kind == "x2") store<2>(from, row, [](auto& a, auto& r) { store_matrix2(a, r); });
  if (kind == "x1") store<1>(from, row, [](auto& a, auto& r) { store_matrix1(a, r); });
  if (kind == "x4.trans") {
    store<4>(from, row, [](auto& a, auto& r) { store_matrix_transposed(a, r); });
  }
  if (kind == "x2.trans") {
    store<2>(from, row, [](auto& a, auto& r) { store_matrix2_transposed(a, r); });
  }
  if (kind == "x1.trans") {
    store<1>(from, row, [](auto& a, auto& r) { store_matrix1_transposed(a, r); });
  }
  for (const std::string_view known : {"x4", "x2", "x1", "x4.trans", "x2.trans", "x1.trans"}) {
    if (kind == known) return true;
  }
  return false;
}

// ---- Numbers -----------------------------------------------------------------------------------

/// Two floats in one register as codes, the first lowest.
bool convert_kind(std::string_view kind, float lo, float hi, std::uint32_t& codes) {
  if (kind == "e4m3x2") return codes = pack_e4m3(lo, hi), true;
  if (kind == "e5m2x2") return codes = pack_e5m2(lo, hi), true;
  if (kind == "bf16x2") return codes = pack_bf16(lo, hi), true;
  if (kind == "f16x2") return codes = pack_f16(lo, hi), true;
  if (kind == "e2m1x2") return codes = pack_e2m1({lo, hi, 0, 0, 0, 0, 0, 0}), true;
  if (kind == "rz.ue8m0x2") return codes = pack_ue8m0(lo, hi), true;
  if (kind == "rp.ue8m0x2") return codes = pack_ue8m0_up(lo, hi), true;
  return false;
}

}  // namespace

extern "C" {

[[gnu::visibility("default")]] const char* judge_mma(const char* kind, int threads,
                                                     std::uint32_t* d, const std::uint32_t* a,
                                                     const std::uint32_t* b,
                                                     const std::uint32_t* sa,
                                                     const std::uint32_t* sb) {
  for (const Kind& k : kProducts) {
    if (k.name == kind) return run(threads, [&](int t) { k.run({d, a, b, sa, sb}, t); });
  }
  return unknown("mma", kind);
}

/// rows: the 16 bytes that each thread gives the address of. r: 4 registers a thread.
[[gnu::visibility("default")]] const char* judge_load_matrix(const char* kind, int threads,
                                                             const Words4* rows, std::uint32_t* r) {
  bool known = true;
  const char* error = run(threads, [&](int t) {
    const auto row = shared_base() + static_cast<SharedAddress>(16 * t);
    store_shared(row, rows[t]);
    sync_warp();
    known = known && load_kind(kind, r + 4 * t, row);
  });
  return known ? error : unknown("ldmatrix", kind);
}

[[gnu::visibility("default")]] const char* judge_store_matrix(const char* kind, int threads,
                                                              Words4* rows,
                                                              const std::uint32_t* r) {
  bool known = true;
  const char* error = run(threads, [&](int t) {
    const auto row = shared_base() + static_cast<SharedAddress>(16 * t);
    store_shared(row, rows[t]);
    sync_warp();
    known = known && store_kind(kind, r + 4 * t, row);
    sync_warp();
    rows[t] = load_shared<Words4>(row);
  });
  return known ? error : unknown("stmatrix", kind);
}

[[gnu::visibility("default")]] const char* judge_convert(const char* kind, int threads,
                                                         const float* lo, const float* hi,
                                                         std::uint32_t* codes) {
  bool known = true;
  const char* error =
      run(threads, [&](int t) { known = known && convert_kind(kind, lo[t], hi[t], codes[t]); });
  return known ? error : unknown("cvt", kind);
}

[[gnu::visibility("default")]] const char* judge_exp2(int threads, const float* x, float* y) {
  return run(threads, [&](int t) { y[t] = exp2(x[t]); });
}

}  // extern "C"

}  // namespace qattn::isa_test
