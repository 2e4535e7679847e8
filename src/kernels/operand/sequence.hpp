// Where the tokens of an operand lie, for kernels. Index tensors live on the device and nobody has
// looked at them: every entry is checked here before it is used. A sequence with a bad entry is
// marked, its rows become NaN and the device's error word is set (docs/NUMERICS.md).
#pragma once

#include <cstdint>

#include "isa/isa.hpp"

namespace qattn::tile {

/// Tokens of one operand of every sequence. Element (b, s, h, c) lies at data + offset(...);
/// strides are in elements. Dense: batch stride; packed (cu_seqlens): token counts over all
/// sequences; paged: `batch` is the stride of a page.
struct Rows {
  const void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0;
  std::int64_t max_length = 0;  ///< longest possible sequence
  std::int64_t total = 0;       ///< packed: tokens in memory; paged: pages
  const std::int32_t* cu_seqlens = nullptr;
  const std::int32_t* used = nullptr;  ///< seqused: only so many tokens exist
  const std::int32_t* page_table = nullptr;
  std::int64_t page_table_stride = 0;
  std::int32_t page_size = 0;
  std::int32_t batches = 0, heads = 0, channels = 0;
  std::uint32_t* error = nullptr;  ///< the device's error word, for preparing kernels
};

/// One sequence: tokens [begin, begin + length) of a packed tensor, or of its batch entry.
struct Span {
  std::int64_t begin = 0;
  std::int64_t length = 0;  ///< tokens that exist
  std::int64_t rows = 0;    ///< tokens in memory; those from `length` on give empty rows
  bool bad = false;         ///< an index tensor holds nonsense
};

/// Bits of the device's sticky error word.
enum ErrorBit : std::uint32_t {
  error_sequence = 1,  ///< cu_seqlens or seqused is out of range, or beyond what a mask has
  error_page = 2,      ///< a page number is out of range
};

inline namespace QATTN_TARGET {

QATTN_DEVICE Span span_of(const Rows& r, int b) {
  Span s;
  s.rows = r.max_length;
  if (r.cu_seqlens != nullptr) {
    const std::int64_t first = isa::load_global(r.cu_seqlens + b);
    const std::int64_t last = isa::load_global(r.cu_seqlens + b + 1);
    s.bad = first < 0 || last < first || last > r.total || last - first > r.max_length;
    s.begin = s.bad ? 0 : first;
    s.rows = s.bad ? 0 : last - first;
  }
  s.length = s.rows;
  if (r.used != nullptr) {
    const std::int64_t used = isa::load_global(r.used + b);
    const bool wrong = used < 0 || used > s.rows;
    s.bad |= wrong;
    s.length = wrong ? 0 : used;
  }
  return s;
}

/// Element offset of channel 0 of token `s` of sequence `b`; -1 for a page that does not exist.
QATTN_DEVICE std::int64_t row_offset(const Rows& r, const Span& span, int b, int head,
                                     std::int64_t s) {
  if (r.page_table != nullptr) {
    const std::int64_t page =
        isa::load_global(r.page_table + b * r.page_table_stride + s / r.page_size);
    if (page < 0 || page >= r.total) return -1;
    return page * r.batch + s % r.page_size * r.token + head * r.head;
  }
  return b * r.batch + (span.begin + s) * r.token + head * r.head;
}

/// Entries of cu_seqlens have 32 bits, and a division of 64 is a subroutine, which costs spills.
QATTN_DEVICE std::int64_t block_of(std::int64_t begin, std::int64_t size) {
  return static_cast<std::uint32_t>(begin) / static_cast<std::uint32_t>(size);
}

/// Tables have an entry for every `size` tokens of a sequence. Number of a sequence's first entry;
/// needs nothing but the sequence's own entry of cu_seqlens.
QATTN_DEVICE std::int64_t first_block(const Rows& r, const Span& span, int b, std::int64_t size) {
  if (r.cu_seqlens != nullptr) return block_of(span.begin, size) + b;
  return b * ((r.max_length + size - 1) / size);
}

/// Is entry `index` of such a table one of packed sequence `b`, whose tokens are `span`?
QATTN_DEVICE bool owns_block(const Rows& r, const Span& span, int b, std::int64_t index,
                             std::int64_t size) {
  const std::int64_t at = index - first_block(r, span, b, size);
  return at >= 0 && at * size < span.rows;  // none of a wrong sequence, which has no rows
}

/// The first of the packed sequences that has(span, b), or sequence 0. One by one, so that a wrong
/// entry of cu_seqlens spoils nobody else's.
template <class Has>
QATTN_DEVICE int first_sequence(const Rows& r, Has has) {
  for (int b = 0; b < r.batches; ++b) {
    if (has(span_of(r, b), b)) return b;
  }
  return 0;
}

/// The last of the packed sequences whose position(first token, sequence) is not behind `at`, or
/// sequence 0. By bisection: of lists that rise.
template <class Position>
QATTN_DEVICE int last_sequence(const Rows& r, std::int64_t at, Position position) {
  int first = 0, last = r.batches - 1;
  while (first < last) {
    const int b = last - (last - first) / 2;
    const std::int64_t begin = isa::load_global(r.cu_seqlens + b);
    if (position(begin, b) <= at) {
      first = b;
    } else {
      last = b - 1;
    }
  }
  return first;
}

/// Prepared operands lie in slots, a multiple of 64 per sequence: [head][slots].
QATTN_DEVICE std::int64_t first_slot(const Rows& r, const Span& span, int b) {
  return first_block(r, span, b, 64) * 64;
}

}  // namespace QATTN_TARGET

/// Entries of such a table for all sequences.
QATTN_CONSTEXPR std::int64_t block_count(const Rows& r, std::int64_t size) {
  if (r.cu_seqlens != nullptr) return r.total / size + r.batches + 1;
  return r.batches * ((r.max_length + size - 1) / size);
}

/// Slots a head needs for all sequences.
QATTN_CONSTEXPR std::int64_t slot_count(const Rows& r) { return block_count(r, 64) * 64; }

}  // namespace qattn::tile
