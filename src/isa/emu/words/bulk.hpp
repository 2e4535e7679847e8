// Bulk copies and TMA, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/units/units.hpp"
#include "isa/emu/words/places.hpp"

namespace qattn::isa {
inline namespace QATTN_TARGET {

using emu::TensorMap;

inline emu::BulkCopies& bulk_copies(Word word, const Where& where) {
  return emu::units_for(word, where).bulk;
}

inline void bulk_load(SharedAddress to, const void* from, std::uint32_t bytes,
                      SharedAddress mbarrier, Where where = Where::current()) {
  bulk_copies(Word::bulk_load, where).bulk_load(to, from, bytes, mbarrier, where);
}
inline void bulk_store(void* to, SharedAddress from, std::uint32_t bytes,
                       Where where = Where::current()) {
  bulk_copies(Word::bulk_store, where).bulk_store(to, from, bytes, where);
}
inline void check_rank(const TensorMap& map, int rank, const Where& where) {
  if (map.rank != rank) {
    throw emu::Error(emu::text("TMA of rank %d with a tensor map of rank %d, at %s", rank, map.rank,
                               emu::describe(where).c_str()));
  }
}
template <int Rank>
void tma_load(SharedAddress to, const TensorMap& map, const int (&c)[Rank], SharedAddress mbarrier,
              Where where = Where::current()) {
  static_assert(Rank >= 2 && Rank <= 5);
  check_rank(map, Rank, where);
  bulk_copies(Word::tma_load, where).tma_load(to, map, c, mbarrier, where);
}
template <int Rank>
void tma_store(const TensorMap& map, const int (&c)[Rank], SharedAddress from,
               Where where = Where::current()) {
  static_assert(Rank >= 2 && Rank <= 5);
  check_rank(map, Rank, where);
  bulk_copies(Word::tma_store, where).tma_store(map, c, from, where);
}
inline void tma_prefetch(const TensorMap&, Where where = Where::current()) {
  emu::current_block().require(Word::tma_prefetch, where);
}
inline void bulk_commit(Where where = Where::current()) {
  bulk_copies(Word::bulk_commit, where).commit_stores();
}
template <int N>
void bulk_wait(Where where = Where::current()) {
  bulk_copies(Word::bulk_wait, where).wait_stores(N, false);
}
template <int N>
void bulk_wait_read(Where where = Where::current()) {
  bulk_copies(Word::bulk_wait_read, where).wait_stores(N, true);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
