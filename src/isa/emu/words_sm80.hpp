// Words that every supported architecture has, emulated. Meanings: isa.hpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "isa/emu/block.hpp"
#include "isa/isa.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

using emu::Where;
using emu::Word;

inline constexpr bool is_emulated = true;
inline constexpr int target_architecture = 120;

// ---- Places ------------------------------------------------------------------------------------

inline int thread() { return emu::current_lane->thread; }
inline int lane() { return emu::current_lane->lane; }
inline Index3 block() {
  const emu::Position p = emu::current_block().index();
  return {p.x, p.y, p.z};
}
inline Index3 grid() {
  const emu::Position p = emu::current_block().grid();
  return {p.x, p.y, p.z};
}
inline SharedAddress shared_base() { return emu::SharedMemory::kBase; }

// ---- Memory ------------------------------------------------------------------------------------

template <class T>
inline constexpr bool is_memory_type =
    std::is_trivially_copyable_v<T> &&
    (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);

template <class T>
T load_shared(SharedAddress a, Where where = Where::current()) {
  static_assert(is_memory_type<T>);
  T value;
  emu::current_block().load(a, sizeof(T), &value, where);
  return value;
}
template <class T>
void store_shared(SharedAddress a, T value, Where where = Where::current()) {
  static_assert(is_memory_type<T>);
  emu::current_block().store(a, sizeof(T), &value, where);
}

template <class T>
void check_global(const T* p, const char* what, const Where& where) {
  static_assert(is_memory_type<T>);
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T) != 0) {
    throw emu::Error(emu::text("%s: misaligned address %p of %zu bytes, at %s", what,
                               static_cast<const void*>(p), sizeof(T),
                               emu::describe(where).c_str()));
  }
}
template <class T>
T load_global(const T* p, Where where = Where::current()) {
  check_global(p, "load_global", where);
  emu::current_block().count(Word::load_global);
  emu::current_block().touch_global(p, sizeof(T), emu::Touch::read, where);
  return *p;
}
template <class T>
void store_global(T* p, T value, Where where = Where::current()) {
  check_global(p, "store_global", where);
  emu::current_block().count(Word::store_global);
  emu::current_block().touch_global(p, sizeof(T), emu::Touch::write, where);
  *p = value;
}
inline Words4 load_once(const Words4* p, Where where = Where::current()) {
  return load_global(p, where);
}
inline void store_once(Words4* p, Words4 value, Where where = Where::current()) {
  store_global(p, value, where);
}

inline std::uint32_t atomic_max_shared(SharedAddress a, std::uint32_t v,
                                       Where where = Where::current()) {
  std::uint32_t* p = emu::current_block().atomic_shared(a, where);
  const std::uint32_t old = *p;
  *p = old > v ? old : v;
  return old;
}
inline std::uint32_t atomic_add_shared(SharedAddress a, std::uint32_t v,
                                       Where where = Where::current()) {
  std::uint32_t* p = emu::current_block().atomic_shared(a, where);
  const std::uint32_t old = *p;
  *p = old + v;
  return old;
}

// Blocks run on several threads.
template <class T>
std::atomic_ref<T> global_atomic(T* p, const Where& where) {
  check_global(p, "atomic", where);
  emu::current_block().count(Word::atomic_global);
  emu::current_block().touch_global(p, sizeof(T), emu::Touch::atomic, where);
  return std::atomic_ref<T>(*p);
}
inline std::uint32_t atomic_max_global(std::uint32_t* p, std::uint32_t v,
                                       Where where = Where::current()) {
  const std::atomic_ref<std::uint32_t> target = global_atomic(p, where);
  std::uint32_t old = target.load();
  while (old < v && !target.compare_exchange_weak(old, v)) {
  }
  return old;
}
inline std::uint32_t atomic_or_global(std::uint32_t* p, std::uint32_t v,
                                      Where where = Where::current()) {
  return global_atomic(p, where).fetch_or(v);
}
inline std::uint32_t atomic_add_global(std::uint32_t* p, std::uint32_t v,
                                       Where where = Where::current()) {
  return global_atomic(p, where).fetch_add(v);
}
inline std::uint64_t atomic_add_global(std::uint64_t* p, std::uint64_t v,
                                       Where where = Where::current()) {
  return global_atomic(p, where).fetch_add(v);
}

inline std::uint32_t atomic_add_ordered(std::uint32_t* p, std::uint32_t v,
                                        Where where = Where::current()) {
  return global_atomic(p, where).fetch_add(v);
}
inline void wait_global(const std::uint32_t* p, std::uint32_t least,
                        Where where = Where::current()) {
  const std::atomic_ref<std::uint32_t> word = global_atomic(const_cast<std::uint32_t*>(p), where);
  while (word.load() < least) emu::current_block().poll_outside(where);
  emu::current_block().end_polls();
}

// ---- Order -------------------------------------------------------------------------------------

inline void sync_threads(Where where = Where::current()) {
  emu::Block& block = emu::current_block();
  block.count(Word::sync_threads);
  block.barrier(0, block.threads(), emu::BarrierUse::sync, where);
}
inline void barrier_sync(int id, int threads, Where where = Where::current()) {
  emu::current_block().count(Word::barrier_sync);
  emu::current_block().barrier(id, threads, emu::BarrierUse::sync, where);
}
inline void barrier_sync_anywhere(int id, int threads, Where where = Where::current()) {
  emu::current_block().count(Word::barrier_sync_anywhere);
  emu::current_block().barrier(id, threads, emu::BarrierUse::sync_anywhere, where);
}
inline void barrier_arrive(int id, int threads, Where where = Where::current()) {
  emu::current_block().count(Word::barrier_arrive);
  emu::current_block().barrier(id, threads, emu::BarrierUse::arrive, where);
}
inline int opaque(int v) { return v; }
inline void schedule_fence() {}
inline void sync_warp(Where where = Where::current()) { emu::current_block().sync_warp(where); }

template <class T>
struct Shuffled {
  T value;
  int source;  ///< outside 0..31: keep one's own
  T result;
};
template <class T>
T shuffle_from(T value, int source, const Where& where) {
  static_assert(is_memory_type<T>);
  Shuffled<T> mine{value, source, value};
  emu::warp_collective(Word::shuffle, mine, where,
                       [](emu::Block&, emu::Arguments<Shuffled<T>> lanes) {
                         for (int i = 0; i < 32; ++i) {
                           const int from = lanes[i].source;
                           if (from >= 0 && from < 32) lanes[i].result = lanes[from].value;
                         }
                       });
  return mine.result;
}
template <class T>
T shuffle_xor(T v, int mask, Where where = Where::current()) {
  return shuffle_from(v, lane() ^ mask, where);
}
template <class T>
T shuffle(T v, int source, Where where = Where::current()) {
  return shuffle_from(v, source & 31, where);
}
template <class T>
T shuffle_up(T v, int delta, Where where = Where::current()) {
  return shuffle_from(v, lane() - delta, where);
}
template <class T>
T shuffle_down(T v, int delta, Where where = Where::current()) {
  return shuffle_from(v, lane() + delta, where);
}

/// A shuffle on GPUs, which is what makes it uniform.
inline int warp(Where where = Where::current()) {
  int mine = emu::current_lane->warp;
  emu::warp_collective(Word::warp, mine, where, [](emu::Block&, emu::Arguments<int>) {});
  return mine;
}

struct Vote {
  bool yes;
  std::uint32_t result;
};
inline std::uint32_t ballot(bool p, Where where = Where::current()) {
  Vote mine{p, 0};
  emu::warp_collective(Word::vote, mine, where, [](emu::Block&, emu::Arguments<Vote> lanes) {
    std::uint32_t all = 0;
    for (int i = 0; i < 32; ++i) all |= static_cast<std::uint32_t>(lanes[i].yes) << i;
    for (int i = 0; i < 32; ++i) lanes[i].result = all;
  });
  return mine.result;
}
inline bool any(bool p, Where where = Where::current()) { return ballot(p, where) != 0; }
inline bool all(bool p, Where where = Where::current()) { return ballot(p, where) == ~0u; }

// ---- Asynchronous copies -----------------------------------------------------------------------

inline void copy_async16(SharedAddress to, const void* from, int bytes,
                         Where where = Where::current()) {
  emu::current_block().copy_async(16, to, from, bytes, where);
}
inline void copy_async8(SharedAddress to, const void* from, int bytes,
                        Where where = Where::current()) {
  emu::current_block().copy_async(8, to, from, bytes, where);
}
inline void copy_async4(SharedAddress to, const void* from, int bytes,
                        Where where = Where::current()) {
  emu::current_block().copy_async(4, to, from, bytes, where);
}
inline void copy_async_commit() { emu::current_block().copy_async_commit(); }
template <int N>
void copy_async_wait() {
  emu::current_block().copy_async_wait(N);
}

// ---- Arithmetic --------------------------------------------------------------------------------

// These also work outside of kernels, where nobody counts them.
inline void count_word(Word word, std::uint64_t instructions = 1) {
  if (emu::current_lane) emu::current_block().count(word, instructions);
}
inline float flush_subnormal(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

/// NaN has no sign, as GPUs give it: kernels count on that (no_sign() of Hopper's prefill kernel).
inline float exp2(float x) {
  count_word(Word::exp2);
  if (std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
  return flush_subnormal(std::exp2(flush_subnormal(x)));
}
inline float log2(float x) {
  count_word(Word::log2);
  return flush_subnormal(std::log2(flush_subnormal(x)));
}
inline float reciprocal(float x) {
  count_word(Word::reciprocal);
  return flush_subnormal(1.0f / flush_subnormal(x));
}
/// As maxima of the hardware: NaN (signalling ones too) only if all are, and +0 is larger than -0.
/// std::fmax leaves both open.
inline float max3(float a, float b, float c) {
  count_word(Word::min_max, 2);  // sm_90 has the three-operand one for integers only
  const auto larger = [](float x, float y) {
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) ? y : x;
    if (x == y) return std::signbit(x) ? y : x;
    return x > y ? x : y;
  };
  return larger(larger(a, b), c);
}
inline std::int32_t max3(std::int32_t a, std::int32_t b, std::int32_t c) {
  count_word(Word::min_max);
  return std::max({a, b, c});
}
inline std::uint32_t max3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::min_max);
  return std::max({a, b, c});
}
inline std::uint32_t min3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::min_max);
  return std::min({a, b, c});
}
inline std::uint32_t max3_u16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::min_max);
  const std::uint32_t high = std::max({a >> 16, b >> 16, c >> 16});
  return high << 16 | std::max({a & 0xffffu, b & 0xffffu, c & 0xffffu});
}

/// The larger or smaller of two numbers in each half, as max.NaN and min.NaN have it.
template <class Format>
std::uint32_t extreme_halves(std::uint32_t a, std::uint32_t b, bool largest) {
  count_word(Word::min_max);
  const auto half = [&](int shift) -> std::uint32_t {
    const auto i = static_cast<std::uint16_t>(a >> shift),
               j = static_cast<std::uint16_t>(b >> shift);
    const float x = Format::decode(i), y = Format::decode(j);
    if (std::isnan(x) || std::isnan(y)) return 0x7fffu;
    const bool less = x != y ? x < y : std::signbit(x);
    return less == largest ? j : i;
  };
  return half(0) | half(16) << 16;
}
inline std::uint32_t max_f16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::F16>(a, b, true);
}
inline std::uint32_t min_f16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::F16>(a, b, false);
}
inline std::uint32_t max_bf16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::Bf16>(a, b, true);
}
inline std::uint32_t min_bf16(std::uint32_t a, std::uint32_t b) {
  return extreme_halves<formats::Bf16>(a, b, false);
}

/// The hardware's conversions give one NaN.
inline std::uint32_t pack_f16(float lo, float hi) {
  count_word(Word::convert);
  const auto code = [](float x) -> std::uint32_t {
    return std::isnan(x) ? 0x7fffu : formats::F16::encode(x);
  };
  return code(lo) | code(hi) << 16;
}
inline std::uint32_t pack_bf16(float lo, float hi) {
  count_word(Word::convert);
  const auto code = [](float x) -> std::uint32_t {
    return std::isnan(x) ? 0x7fffu : formats::Bf16::encode(x);
  };
  return code(lo) | code(hi) << 16;
}
inline Pair unpack_f16(std::uint32_t v) {
  count_word(Word::convert, 2);
  return {formats::F16::decode(static_cast<std::uint16_t>(v)),
          formats::F16::decode(static_cast<std::uint16_t>(v >> 16))};
}
inline Pair unpack_bf16(std::uint32_t v) {
  count_word(Word::convert, 2);
  return {std::bit_cast<float>(v << 16), std::bit_cast<float>(v & 0xffff0000u)};
}
inline std::uint32_t multiply_f16(std::uint32_t a, std::uint32_t b) {
  count_word(Word::fma);
  const auto half = [&](int shift) -> std::uint32_t {
    // 22 bits of product are exact in float32, so it is rounded once.
    const float x = formats::F16::decode(static_cast<std::uint16_t>(a >> shift));
    const float product = x * formats::F16::decode(static_cast<std::uint16_t>(b >> shift));
    return std::isnan(product) ? 0x7fffu : formats::F16::encode(product);
  };
  return half(0) | half(16) << 16;
}
/// As a float whose last bit is set where bits were lost: coarser formats round that as they would
/// round x itself.
inline float float_to_odd(double x) {
  const auto f = static_cast<float>(x);
  const double lost = x - static_cast<double>(f);
  if (lost == 0 || !std::isfinite(x)) return f;
  auto bits = std::bit_cast<std::uint32_t>(f);
  if ((lost < 0) == (x > 0)) --bits;  // f lies beyond x
  return std::bit_cast<float>(bits | 1u);
}
inline std::uint32_t fma_f16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::fma);
  const auto half = [&](int shift) -> std::uint32_t {
    const auto value = [shift](std::uint32_t x) {
      return static_cast<double>(formats::F16::decode(static_cast<std::uint16_t>(x >> shift)));
    };
    // Where float64 does not hold the sum, what is lost is far below half of f16's last place.
    const float sum = float_to_odd(value(a) * value(b) + value(c));
    return std::isnan(sum) ? 0x7fffu : formats::F16::encode(sum);
  };
  return half(0) | half(16) << 16;
}
inline std::uint32_t pack_u8(float x0, float x1, float x2, float x3) {
  count_word(Word::convert, 2);
  const auto code = [](float x) -> std::uint32_t {
    if (!(x > 0)) return 0;  // NaN too
    // Adding 2^23 leaves no fraction bits: the sum rounds half to even in every rounding library.
    return x >= 255 ? 255 : std::bit_cast<std::uint32_t>(x + 0x1p23f) & 0xffu;
  };
  return code(x0) | code(x1) << 8 | code(x2) << 16 | code(x3) << 24;
}
inline std::uint32_t pack_s8(float x0, float x1, float x2, float x3) {
  count_word(Word::convert, 2);
  const auto code = [](float x) -> std::uint32_t {
    if (std::isnan(x)) return 0;
    // Adding 1.5 * 2^23 leaves no fraction bits, as in pack_u8().
    const float kept = std::clamp(x, -128.0f, 127.0f) + 0x1.8p23f;
    return std::bit_cast<std::uint32_t>(kept) & 0xffu;
  };
  return code(x0) | code(x1) << 8 | code(x2) << 16 | code(x3) << 24;
}
/// Infinities saturate here, as the instruction has it; formats:: makes them NaN.
template <class Codec>
std::uint16_t pack_fp8(float lo, float hi) {
  count_word(Word::convert);
  const auto code = [](float x) -> std::uint32_t {
    if (std::isnan(x)) return 0x7fu;
    return Codec::encode(std::isinf(x) ? std::copysign(Codec::max, x) : x);
  };
  return static_cast<std::uint16_t>(code(lo) | code(hi) << 8);
}
inline std::uint16_t pack_e4m3(float lo, float hi) { return pack_fp8<formats::E4m3>(lo, hi); }
inline std::uint16_t pack_e5m2(float lo, float hi) { return pack_fp8<formats::E5m2>(lo, hi); }
inline std::uint32_t unpack_e4m3(std::uint16_t codes) {
  count_word(Word::convert);
  const auto half = [](std::uint32_t code) -> std::uint32_t {
    const float x = formats::E4m3::decode(static_cast<std::uint8_t>(code));
    return x != x ? 0x7fffu : formats::F16::encode(x);
  };
  return half(codes & 0xffu) | half(codes >> 8) << 16;
}

inline std::uint32_t byte_permute(std::uint32_t a, std::uint32_t b, std::uint32_t selector,
                                  Where where = Where::current()) {
  count_word(Word::byte_permute);
  if (selector & 0xffff8888u) {
    throw emu::Error(emu::text("byte_permute: selector 0x%x has a nibble above 7, at %s", selector,
                               emu::describe(where).c_str()));
  }
  const std::uint64_t bytes = a | static_cast<std::uint64_t>(b) << 32;
  std::uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t from = selector >> (4 * i) & 7u;
    result |= static_cast<std::uint32_t>(bytes >> (8 * from) & 0xffu) << (8 * i);
  }
  return result;
}
template <int Table>
std::uint32_t lop3(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  static_assert(Table >= 0 && Table < 256);
  count_word(Word::lop3);
  std::uint32_t result = 0;
  for (int i = 0; i < 8; ++i) {
    if (Table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}
inline float to_float(std::int32_t x) {
  count_word(Word::convert);
  return static_cast<float>(x);
}
inline float to_float(float x) { return x; }
inline std::int32_t dot4_s8(std::uint32_t a, std::uint32_t b, std::int32_t c) {
  count_word(Word::dot4);
  std::uint32_t sum = static_cast<std::uint32_t>(c);
  for (int i = 0; i < 4; ++i) {
    const int x = static_cast<std::int8_t>(a >> (8 * i)),
              y = static_cast<std::int8_t>(b >> (8 * i));
    sum += static_cast<std::uint32_t>(x * y);
  }
  return static_cast<std::int32_t>(sum);
}
inline std::uint32_t dot4_u8(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  count_word(Word::dot4);
  for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 0xffu) * (b >> (8 * i) & 0xffu);
  return c;
}

// C's functions of one instruction each. Kernels call them by their plain names, as CUDA has them,
// and find these, which count.
inline float fmaf(float a, float b, float c) {
  count_word(Word::fma);
  return std::fmaf(a, b, c);
}
inline float fmaxf(float a, float b) {
  count_word(Word::min_max);
  return std::fmax(a, b);
}
inline float fminf(float a, float b) {
  count_word(Word::min_max);
  return std::fmin(a, b);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa

namespace qattn::kernels {
using isa::fmaf;
using isa::fmaxf;
using isa::fminf;
}  // namespace qattn::kernels
namespace qattn::tile {
using isa::fmaf;
using isa::fmaxf;
using isa::fminf;
}  // namespace qattn::tile
