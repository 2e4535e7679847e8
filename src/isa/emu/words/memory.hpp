// Memory, emulated. Meanings: isa.hpp.
#pragma once

#include <atomic>
#include <type_traits>

#include "isa/emu/words/places.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

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
  emu::current_block().use(Word::load_global, where);
  emu::current_block().touch_global(p, sizeof(T), emu::Touch::read, where);
  return *p;
}
template <class T>
void store_global(T* p, T value, Where where = Where::current()) {
  check_global(p, "store_global", where);
  emu::current_block().use(Word::store_global, where);
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
  emu::current_block().use(Word::atomic_global, where);
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

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
