// Bulk copies and TMA.
#include "isa/emu/units/bulk.hpp"

#include <algorithm>
#include <cstring>

#include "isa/emu/fault.hpp"
#include "isa/isa.hpp"

namespace qattn::emu {

std::uint32_t swizzled(std::uint32_t address, isa::Swizzle swizzle) {
  switch (swizzle) {
    case isa::Swizzle::bytes32:
      return address ^ (address >> 3 & 0x10u);
    case isa::Swizzle::bytes64:
      return address ^ (address >> 3 & 0x30u);
    case isa::Swizzle::bytes128:
      return address ^ (address >> 3 & 0x70u);
    default:
      return address;
  }
}

int swizzle_span(isa::Swizzle swizzle) {
  return swizzle == isa::Swizzle::none ? 16 : 16 << static_cast<int>(swizzle);
}

std::uint32_t TensorMap::box_bytes() const {
  std::uint32_t bytes = static_cast<std::uint32_t>(element_bytes);
  for (int i = 0; i < rank; ++i) bytes *= box[i];
  return bytes;
}

/// visit(shared address, global address, bytes): pieces of at most 16 bytes; a null global address
/// stands for what lies outside of the tensor.
template <class Visit>
void BulkCopies::visit_chunks(const Transfer& t, Visit visit) {
  if (t.map.rank == 0) return visit(t.shared, t.map.address, t.bytes);
  const TensorMap& map = t.map;
  const std::int64_t size = map.element_bytes;
  const std::int64_t row_bytes = map.box[0] * size, rows = t.bytes / row_bytes;
  for (std::int64_t row = 0; row < rows; ++row) {
    bool inside = true;
    char* line = map.address;
    for (std::int64_t d = 1, rest = row; d < map.rank; rest /= map.box[d], ++d) {
      const std::int64_t c = t.corner[d] + rest % map.box[d];
      inside = inside && c >= 0 && static_cast<std::uint64_t>(c) < map.sizes[d];
      line += c * static_cast<std::int64_t>(map.strides[d]);
    }
    const std::int64_t end = static_cast<std::int64_t>(map.sizes[0]) * size;
    for (std::int64_t b = 0; b < row_bytes; b += 16) {
      const std::uint32_t at = swizzled(t.shared + static_cast<std::uint32_t>(row * row_bytes + b),
                                        static_cast<isa::Swizzle>(map.swizzle));
      const std::int64_t x = t.corner[0] * size + b;
      // Of these 16 bytes, [first, last) lie inside of the row.
      const std::int64_t first = inside ? std::clamp<std::int64_t>(-x, 0, 16) : 16;
      const std::int64_t last = inside ? std::clamp<std::int64_t>(end - x, first, 16) : 16;
      const auto piece = [&](std::int64_t from, std::int64_t to, bool there) {
        if (from < to) {
          visit(at + static_cast<std::uint32_t>(from), there ? line + x + from : nullptr,
                static_cast<std::uint32_t>(to - from));
        }
      };
      piece(0, first, false);
      piece(first, last, true);
      piece(last, 16, false);
    }
  }
}

// ---- Loads
// -----------------------------------------------------------------------------------------

void BulkCopies::issue_load(Transfer load, const char* what) {
  load.waited = current_lane->waited;
  const Mbarrier& barrier = mbarriers_.ready(load.mbarrier, what, load.where);
  SharedMemory& shared = block_.shared();
  shared.check_writable(load.shared, load.bytes, what, load.where);
  shared.mark(load.shared, load.bytes, ByteState::in_flight);
  shared.mark_swizzle(load.shared, load.bytes, load.map.swizzle);
  block_.stats.shared_written += load.bytes;
  block_.stats.bulk_bytes += load.bytes;
  if (block_.options().races) {
    Races& races = block_.races();
    load.agent = races.barrier_agent(barrier.index);
    load.time = races.begin(load.agent, current_lane->thread);
    races.write(SharedMemory::offset(load.shared), load.bytes, load.agent, Proxy::async,
                load.where);
  }
  if (at_once()) {
    end_load(load);
  } else {
    loads_.push_back(load);
  }
}

void BulkCopies::end_load(const Transfer& load) {
  visit_chunks(load, [&](std::uint32_t to, const char* from, std::uint32_t bytes) {
    if (from) {
      std::memcpy(block_.shared().at(to), from, bytes);
      block_.touch_global(from, bytes, Touch::read, load.waited, load.where);
    } else {
      std::memset(block_.shared().at(to), 0, bytes);
    }
  });
  block_.shared().mark(load.shared, load.bytes, ByteState::ready);
  mbarriers_.complete(load.mbarrier, load.bytes, load.agent, load.time, load.where);
}

void BulkCopies::complete(std::size_t i) {
  const Transfer load = loads_[i];
  loads_.erase(loads_.begin() + static_cast<std::ptrdiff_t>(i));
  end_load(load);
}

void BulkCopies::bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                           std::uint32_t mbarrier, const Where& where) {
  block_.count(Word::bulk_load);
  if (bytes == 0 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16) {
    throw Error(text("bulk_load: %u bytes from %p: both must be multiples of 16, at %s", bytes,
                     from, describe(where).c_str()));
  }
  block_.shared().check_place(to, bytes, 16, "bulk_load", where);
  Transfer load;
  load.map.rank = 0;
  load.map.address = static_cast<char*>(const_cast<void*>(from));
  load.shared = to;
  load.bytes = bytes;
  load.mbarrier = mbarrier;
  load.where = where;
  issue_load(load, "bulk_load");
}

/// What an H200 answers with "illegal instruction": a box that does not begin at a multiple of 16
/// bytes within its row, be that inside the tensor or not, and a store to negative coordinates. It
/// also stores whole pieces of 16 bytes, over the end of a row that is no multiple of them.
void BulkCopies::check_corner(const TensorMap& map, const int* corner, bool store,
                              const Where& where) {
  const char* what = store ? "tma_store" : "tma_load";
  if (corner[0] * map.element_bytes % 16 != 0) {
    throw Error(text("%s: coordinate %d of %d-byte elements is no multiple of 16 bytes, at %s",
                     what, corner[0], map.element_bytes, describe(where).c_str()));
  }
  if (!store) return;
  for (int i = 0; i < map.rank; ++i) {
    if (corner[i] < 0) {
      throw Error(
          text("%s: coordinate %d is negative, at %s", what, corner[i], describe(where).c_str()));
    }
  }
  const auto row = static_cast<std::uint64_t>(map.element_bytes) * map.sizes[0];
  if (row % 16 != 0) {
    throw Error(text("%s: rows of %llu bytes are no multiple of 16, at %s", what,
                     static_cast<unsigned long long>(row), describe(where).c_str()));
  }
}

void BulkCopies::tma_load(std::uint32_t to, const TensorMap& map, const int* corner,
                          std::uint32_t mbarrier, const Where& where) {
  block_.count(Word::tma_load);
  check_corner(map, corner, false, where);
  Transfer load;
  load.map = map;
  if (planted_fault().fault == Fault::no_swizzle) load.map.swizzle = 0;
  std::copy_n(corner, map.rank, load.corner);
  load.shared = to;
  load.bytes = map.box_bytes();
  load.mbarrier = mbarrier;
  load.where = where;
  block_.shared().check_place(to, load.bytes, 128, "tma_load", where);
  issue_load(load, "tma_load");
}

// ---- Stores
// ----------------------------------------------------------------------------------------

void BulkCopies::issue_store(Transfer store, const char* what) {
  store.waited = current_lane->waited;
  SharedMemory& shared = block_.shared();
  shared.check_readable(store.shared, store.bytes, what, store.where);
  block_.stats.shared_read += store.bytes;
  block_.stats.bulk_bytes += store.bytes;
  if (block_.options().races) {
    Races& races = block_.races();
    store.agent = races.store_agent(current_lane->warp);
    store.time = races.begin(store.agent, current_lane->thread);
    races.read(SharedMemory::offset(store.shared), store.bytes, store.agent, Proxy::async,
               store.where);
  }
  Store pending{store, {}, false, false};
  if (at_once()) {
    read_store(pending);
    write_store(pending);
    pending.read = false;  // nobody may count on it before the wait
  }
  my_stores().begin(std::move(pending));
}

void BulkCopies::read_store(Store& store) {
  if (!store.written && store.data.empty()) {
    visit_chunks(store.transfer, [&](std::uint32_t from, const char*, std::uint32_t bytes) {
      const std::uint8_t* data = block_.shared().at(from);
      store.data.insert(store.data.end(), data, data + bytes);
    });
  }
  store.read = true;
}

void BulkCopies::write_store(Store& store) {
  if (store.written) return;
  const std::uint8_t* data = store.data.data();
  visit_chunks(store.transfer, [&](std::uint32_t, char* to, std::uint32_t bytes) {
    if (to) {
      std::memcpy(to, data, bytes);
      block_.touch_global(to, bytes, Touch::write, store.transfer.waited, store.transfer.where);
    }
    data += bytes;
  });
  store.written = true;
}

void BulkCopies::bulk_store(void* to, std::uint32_t from, std::uint32_t bytes, const Where& where) {
  block_.count(Word::bulk_store);
  if (bytes == 0 || bytes % 16 || reinterpret_cast<std::uintptr_t>(to) % 16) {
    throw Error(text("bulk_store: %u bytes to %p: both must be multiples of 16, at %s", bytes, to,
                     describe(where).c_str()));
  }
  block_.shared().check_place(from, bytes, 16, "bulk_store", where);
  Transfer store;
  store.map.rank = 0;
  store.map.address = static_cast<char*>(to);
  store.shared = from;
  store.bytes = bytes;
  store.where = where;
  issue_store(store, "bulk_store");
}

void BulkCopies::tma_store(const TensorMap& map, const int* corner, std::uint32_t from,
                           const Where& where) {
  block_.count(Word::tma_store);
  check_corner(map, corner, true, where);
  Transfer store;
  store.map = map;
  std::copy_n(corner, map.rank, store.corner);
  store.shared = from;
  store.bytes = map.box_bytes();
  store.where = where;
  block_.shared().check_place(from, store.bytes, 128, "tma_store", where);
  issue_store(store, "tma_store");
}

void BulkCopies::commit_stores() {
  block_.count(Word::bulk_commit);
  my_stores().commit();
}

void BulkCopies::wait_stores(int groups, bool reads_only) {
  block_.count(Word::bulk_wait);
  const auto end = [&](Store& store) {
    read_store(store);
    if (!reads_only) write_store(store);
    if (block_.options().races) {
      block_.races().observe(current_lane->thread, store.transfer.agent, store.transfer.time);
    }
  };
  if (reads_only) {
    my_stores().visit(groups, end);
  } else {
    my_stores().wait(groups, end);
  }
}

// ---- Begin and end ------------------------------------------------------------------------------

void BulkCopies::reset() {
  loads_.clear();
  stores_.resize(static_cast<std::size_t>(block_.threads()));
  for (Groups<Store>& lane : stores_) lane.clear();
}

std::string BulkCopies::check_end() {
  if (!loads_.empty()) {
    return text("the kernel ended with %zu bulk loads in flight, one from %s", loads_.size(),
                describe(loads_.front().where).c_str());
  }
  for (Groups<Store>& lane : stores_) {
    for (Store& store : lane.operations()) {
      if (!store.read) {
        return "the kernel ended while a bulk store may still read shared memory: no "
               "bulk_wait_read after the one from " +
               describe(store.transfer.where);
      }
      write_store(store);
    }
  }
  return {};
}

}  // namespace qattn::emu
