#include "isa/emu/block/chain.hpp"

#include <algorithm>

namespace qattn::emu {
namespace {

/// Calls visit(page, word in the page, bits) for runs of up to 64 bytes.
template <class Visit>
void visit_words(const void* at, std::size_t bytes, std::size_t page_bytes, Visit visit) {
  auto address = reinterpret_cast<std::uintptr_t>(at);
  while (bytes > 0) {
    const std::size_t from = address % 64, count = std::min<std::size_t>(bytes, 64 - from);
    const std::uint64_t ones = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
    visit(address / page_bytes, address % page_bytes / 64, ones << from);
    address += count;
    bytes -= count;
  }
}

}  // namespace

void Footprint::add(const void* at, std::size_t bytes, Touch touch) {
  visit_words(at, bytes, page_bytes, [&](std::uintptr_t page, std::size_t word, std::uint64_t m) {
    if (last_ == nullptr || last_number_ != page) last_ = &pages_[page], last_number_ = page;
    last_->touched[static_cast<std::size_t>(touch)][word] |= m;
  });
}

void Footprint::add(const Footprint& other) {
  for (const auto& [number, from] : other.pages_) {
    Page& to = pages_[number];
    for (std::size_t kind = 0; kind < to.touched.size(); ++kind) {
      for (std::size_t i = 0; i < from.touched[kind].size(); ++i) {
        to.touched[kind][i] |= from.touched[kind][i];
      }
    }
  }
}

bool Footprint::conflicts(const void* at, std::size_t bytes, Touch touch) const {
  bool found = false;
  visit_words(at, bytes, page_bytes, [&](std::uintptr_t page, std::size_t word, std::uint64_t m) {
    const auto it = pages_.find(page);
    if (it == pages_.end()) return;
    for (const Touch other : {Touch::read, Touch::write, Touch::atomic}) {
      if (touch == other && touch != Touch::write) continue;
      found |= (it->second.touched[static_cast<std::size_t>(other)][word] & m) != 0;
    }
  });
  return found;
}

}  // namespace qattn::emu
