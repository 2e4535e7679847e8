#include "fuzz/memory.hpp"

#include <algorithm>
#include <cstring>

#include "isa/emu/sanitizers.hpp"
#ifdef QATTN_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace qattn::fuzz {
namespace {

constexpr std::int64_t guard = 64;
constexpr std::uint8_t sentinel = 0xA5;

/// The sanitizer then sees a read of a guard, which the comparison of bytes cannot.
void protect([[maybe_unused]] std::uint8_t* begin, [[maybe_unused]] std::int64_t size,
             [[maybe_unused]] bool on) {
#ifdef QATTN_ASAN
  if (on) {
    ASAN_POISON_MEMORY_REGION(begin, static_cast<std::size_t>(size));
  } else {
    ASAN_UNPOISON_MEMORY_REGION(begin, static_cast<std::size_t>(size));
  }
#endif
}

__extension__ typedef __int128 Wide;

struct Reach {
  Wide low = 0, high = 0, elements = 1;
};

Reach reach(const TensorView& view) {
  Reach r;
  for (int i = 0; i < view.rank; ++i) {
    r.elements *= std::max<std::int64_t>(view.shape[i], 0);
    if (r.elements > most_elements) return r;  // so that the next product fits
    const Wide span =
        static_cast<Wide>(view.stride[i]) * std::max<std::int64_t>(view.shape[i] - 1, 0);
    (span < 0 ? r.low : r.high) += span;
  }
  return r;
}

void fill(std::uint8_t* bytes, std::int64_t size, Format format, Fill how, std::uint64_t seed) {
  std::uint64_t state = seed * 2654435761u + 88172645463325252u;
  const auto next = [&state] {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  };
  for (std::int64_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(next() >> 24);
  if (how == Fill::wild) return;
  if (how == Fill::zero) std::fill(bytes, bytes + size, std::uint8_t{0});
  if (how == Fill::boolean) std::for_each(bytes, bytes + size, [](std::uint8_t& b) { b &= 1; });
  if (how == Fill::scale && info(format).bits == 8) {
    std::fill(bytes, bytes + size, format == Format::ue8m0 ? std::uint8_t{120} : std::uint8_t{40});
  }
  const bool tame = how == Fill::tame || how == Fill::scale;
  if (tame && format == Format::f32) {
    for (std::int64_t i = 0; i + 4 <= size; i += 4) {
      const float value = how == Fill::scale ? 0.02f : static_cast<float>(bytes[i] - 128) / 32;
      std::memcpy(bytes + i, &value, sizeof value);
    }
  } else if (tame && (format == Format::f16 || format == Format::bf16)) {
    // A cleared top bit of the exponent: below 2 in magnitude.
    for (std::int64_t i = 1; i < size; i += 2) bytes[i] &= 0xBF;
  }
}

}  // namespace

bool small_enough(const TensorView& view) {
  const int bits = info(view.format).bits;
  if (bits == 0 || view.rank < 0 || view.rank > max_rank) return false;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] < 0 || view.shape[i] > most_elements) return false;
  }
  const Reach r = reach(view);
  return r.elements <= most_elements && (r.high - r.low + 1) * bits / 8 <= most_bytes;
}

Memory::~Memory() {
  for (Block& b : blocks_) protect(b.bytes.get(), b.payload + 3 * guard, false);
}

void Memory::back(const char* name, TensorView& view, bool output, Fill how, std::uint64_t seed,
                  int skew) {
  view.data = nullptr;
  if (!view.present() || !small_enough(view)) return;
  const Reach r = reach(view);
  const int bits = info(view.format).bits;
  // Offsets of whole elements before the pointer, rounded outwards to bytes.
  const auto before = static_cast<std::int64_t>((-r.low * bits + 7) / 8);
  const auto after = static_cast<std::int64_t>(((r.high + 1) * bits + 7) / 8);
  Block block{name, view, output, r.elements == 0 ? 0 : before + after, nullptr, {}, nullptr};
  const std::int64_t all = block.payload + 3 * guard;
  block.bytes = std::make_unique<std::uint8_t[]>(static_cast<std::size_t>(all));
  std::fill_n(block.bytes.get(), all, sentinel);
  std::uint8_t* start = block.bytes.get() + guard;
  start += (guard - reinterpret_cast<std::uintptr_t>(start) % guard) % guard;
  const std::int64_t lead = r.elements == 0 ? 0 : before;
  // The element at the pointer is aligned, whatever lies before it.
  block.begin = start + (guard - lead % guard) % guard % 8 + skew;
  fill(block.begin, block.payload, view.format, how, seed);
  view.data = block.begin + lead;
  block.view = view;
  blocks_.push_back(std::move(block));
}

void Memory::store(const TensorView& view, std::int64_t i, std::int64_t j, std::int32_t value) {
  if (view.data == nullptr || view.format != Format::s32 || view.rank < 1 || view.rank > 2) return;
  if (i >= view.shape[0] || (view.rank == 2 && j >= view.shape[1])) return;
  const std::int64_t offset = i * view.stride[0] + (view.rank == 2 ? j * view.stride[1] : 0);
  std::memcpy(static_cast<std::uint8_t*>(view.data) + offset * 4, &value, sizeof value);
}

void Memory::freeze() {
  for (Block& b : blocks_) {
    const std::int64_t all = b.payload + 3 * guard;
    protect(b.bytes.get(), all, false);
    b.before.assign(b.bytes.get(), b.bytes.get() + all);
    const std::int64_t lead = b.begin - b.bytes.get();
    // Poisoning works in units of 8 bytes: what is left over at the seams stays readable.
    protect(b.bytes.get(), lead, true);
    protect(b.begin + b.payload, all - lead - b.payload, true);
    protect(b.begin, b.payload, false);
  }
}

std::vector<bool> Memory::written(const Block& b) {
  const int bits = info(b.view.format).bits;
  std::vector<bool> inside(static_cast<std::size_t>(b.payload) + 3 * guard, false);
  const std::int64_t origin = static_cast<std::uint8_t*>(b.view.data) - b.bytes.get();
  std::int64_t count = 1;
  for (int i = 0; i < b.view.rank; ++i) count *= b.view.shape[i];
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t rest = n, offset = 0;
    for (int i = b.view.rank - 1; i >= 0; --i) {
      offset += rest % b.view.shape[i] * b.view.stride[i];
      rest /= b.view.shape[i];
    }
    const std::int64_t first = origin * 8 + offset * bits;
    for (std::int64_t byte = first / 8; byte * 8 < first + bits; ++byte) inside[byte] = true;
  }
  return inside;
}

std::string Memory::violation(bool refused) {
  for (Block& b : blocks_) {
    const std::int64_t all = b.payload + 3 * guard;
    protect(b.bytes.get(), all, false);
    if (std::equal(b.before.begin(), b.before.end(), b.bytes.get())) continue;
    if (refused) return b.name + (b.output ? ": written by a refused call" : ": input written");
    if (!b.output) return b.name + ": input written";
    const std::vector<bool> inside = written(b);
    for (std::int64_t i = 0; i < all; ++i) {
      if (!inside[i] && b.bytes[i] != b.before[i]) return b.name + ": written beside its elements";
    }
  }
  return {};
}

}  // namespace qattn::fuzz
