// Rows of an operand from global to shared memory. Rows in shared memory are padded by 16 bytes,
// which makes every ldmatrix of this library free of bank conflicts for rows of 32 n bytes, and
// keeps its addresses a base plus constants.
#pragma once

#include <cstdint>

#include "isa/isa.hpp"
#include "kernels/operand/sequence.hpp"

namespace qattn::tile {

constexpr int padded_row(int row_bytes) { return row_bytes + 16; }

/// Rows of one sequence and head, in bytes.
struct RowSource {
  const std::byte* base = nullptr;  ///< of token 0
  std::int64_t stride = 0;          ///< bytes from token to token
  std::int32_t length = 0;          ///< tokens that exist; the others are zeros
  std::int32_t row_bytes = 0;       ///< bytes that exist of a row; the others are zeros
  bool vectors = true;              ///< rows start and step at multiples of 16 bytes
  const std::int32_t* pages = nullptr;
  std::int64_t page_stride = 0;  ///< bytes from page to page
  std::int64_t page_count = 0;
  std::int32_t page_size = 0;
};

inline namespace QATTN_TARGET {

/// The source of sequence `b`, head `head` of an operand with elements of `width` bytes.
QATTN_DEVICE RowSource row_source(const Rows& r, const Span& span, int b, int head, int width,
                                  bool vectors) {
  RowSource s;
  s.base = static_cast<const std::byte*>(r.data) + r.head * head * width;
  s.stride = r.token * width;
  s.length = static_cast<std::int32_t>(span.length);
  s.row_bytes = r.channels * width;
  s.vectors = vectors;
  if (r.page_table != nullptr) {
    s.pages = r.page_table + b * r.page_table_stride;
    s.page_stride = r.batch * width;
    s.page_count = r.total;
    s.page_size = r.page_size;
  } else {
    s.base += (b * r.batch + span.begin * r.token) * width;
  }
  return s;
}

/// Address of a token's row; null for a page that does not exist.
QATTN_DEVICE const std::byte* row_address(const RowSource& s, int token) {
  if (s.pages == nullptr) return s.base + token * s.stride;
  const std::int64_t page = isa::load_global(s.pages + token / s.page_size);
  if (page < 0 || page >= s.page_count) return nullptr;
  return s.base + page * s.page_stride + token % s.page_size * s.stride;
}

/// 16 bytes of which the first `bytes` exist, for rows at any address.
QATTN_DEVICE isa::Words4 gather16(const std::byte* from, int bytes) {
  isa::Words4 v{};
#pragma unroll 1
  for (int i = 0; i < bytes; ++i) {
    const std::uint32_t byte = isa::load_global(reinterpret_cast<const std::uint8_t*>(from) + i);
#pragma unroll
    for (int w = 0; w < 4; ++w) v.w[w] |= i / 4 == w ? byte << (i % 4 * 8) : 0;
  }
  return v;
}

/// How many of 16 bytes exist where `left` are left of a row, or less than none.
QATTN_DEVICE int of_16(int left) { return left < 0 ? 0 : left > 16 ? 16 : left; }

// Which thread brings which 16 bytes from where, however it brings them and wherever to:
// place(row, chunk) is where the bytes of a row from `chunk` on belong, and move(to, from, bytes)
// brings 16 of which the first `bytes` exist, from an aligned address; the others are zeros.

/// Tokens [first, first + Rows) that the plain way cannot bring: scattered over pages, or not
/// aligned to 16 bytes. The rows of a page that does not exist become NaN (of either 16-bit format)
/// and set `error`.
template <int RowBytes, int Rows, int Threads, class Place, class Move>
QATTN_DEVICE void bring_scattered_rows(const RowSource& s, int first, int thread,
                                       std::uint32_t* error, Place place, Move move) {
  constexpr int chunks = RowBytes / 16;
#pragma unroll 1
  for (int n = thread; n < Rows * chunks; n += Threads) {
    const int row = n / chunks, chunk = n % chunks * 16, token = first + row;
    const int left = token < s.length ? s.row_bytes - chunk : 0;
    const int bytes = of_16(left);
    const isa::SharedAddress to = place(row, chunk);
    const std::byte* from = bytes > 0 ? row_address(s, token) : s.base;
    if (from == nullptr) {
      isa::store_shared(to, isa::Words4{{~0u, ~0u, ~0u, ~0u}});
      isa::atomic_or_global(error, error_page);
    } else if (s.vectors) {
      move(to, bytes > 0 ? from + chunk : from, bytes);
    } else {
      isa::store_shared(to, gather16(from + chunk, bytes));
    }
  }
}

/// Tokens [first, first + Rows), which lie anyhow if `General`.
template <int RowBytes, int Rows, int Threads, bool General, class Place, class Move>
QATTN_DEVICE void bring_rows(const RowSource& s, int first, int thread, std::uint32_t* error,
                             Place place, Move move) {
  constexpr int chunks = RowBytes / 16;
  if constexpr (General) {
    if (s.pages != nullptr || !s.vectors) {
      bring_scattered_rows<RowBytes, Rows, Threads>(s, first, thread, error, place, move);
      return;
    }
  }
  // Of 0 bytes nothing is read, so rows behind the end need no address of their own.
  const int row0 = thread / chunks, chunk0 = thread % chunks * 16;
  const std::byte* from0 = s.base + (first + row0) * s.stride + chunk0;
#pragma unroll
  for (int i = 0; i < (Rows * chunks + Threads - 1) / Threads; ++i) {
    int row, chunk;
    const std::byte* from;
    if constexpr (Rows * chunks % Threads == 0 && Threads % chunks == 0) {
      // Every thread keeps its column.
      row = row0 + i * (Threads / chunks), chunk = chunk0;
      from = from0 + i * (Threads / chunks) * s.stride;
    } else {
      const int n = i * Threads + thread;
      row = n / chunks, chunk = n % chunks * 16;
      from = s.base + (first + row) * s.stride + chunk;
      if (n >= Rows * chunks) break;
    }
    const int left = first + row < s.length ? s.row_bytes - chunk : 0;
    move(place(row, chunk), from, of_16(left));
  }
}

/// Rows of `pack` heads, `head_stride` bytes apart: row n is token n / pack of head n % pack. `s`
/// is the first head's, and not in pages.
template <int RowBytes, int Rows, int Threads, class Place, class Move>
QATTN_DEVICE void bring_gqa_rows(const RowSource& s, int pack, std::int64_t head_stride, int thread,
                                 Place place, Move move) {
  constexpr int chunks = RowBytes / 16;
#pragma unroll 1
  for (int n = thread; n < Rows * chunks; n += Threads) {
    const int row = n / chunks, chunk = n % chunks * 16, token = row / pack;
    const int left = token < s.length ? s.row_bytes - chunk : 0;
    const int bytes = left < 0 ? 0 : left > 16 ? 16 : left;  // of_16() makes another comparison
    const isa::SharedAddress to = place(row, chunk);
    const std::byte* from =
        bytes > 0 ? s.base + token * s.stride + (row - token * pack) * head_stride + chunk : s.base;
    if (s.vectors) {
      move(to, from, bytes);
    } else {
      isa::store_shared(to, gather16(from, bytes));
    }
  }
}

/// By cp.async.
struct CopyAsync {
  QATTN_DEVICE void operator()(isa::SharedAddress to, const std::byte* from, int bytes) const {
    isa::copy_async16(to, from, bytes);
  }
};

/// To padded rows at `base`.
template <int RowBytes>
struct PaddedRows {
  isa::SharedAddress base;
  QATTN_DEVICE isa::SharedAddress operator()(int row, int chunk) const {
    return base + row * padded_row(RowBytes) + chunk;
  }
};

/// Starts copying tokens [first, first + Rows) to padded rows at `to`; the caller commits and
/// waits.
template <int RowBytes, int Rows, int Threads, bool General>
QATTN_DEVICE void copy_rows(isa::SharedAddress to, const RowSource& s, int first,
                            std::uint32_t* error) {
  bring_rows<RowBytes, Rows, Threads, General>(s, first, isa::thread(), error,
                                               PaddedRows<RowBytes>{to}, CopyAsync{});
}

/// Starts copying `Rows` contiguous rows of RowBytes (a V tile) to padded rows.
template <int RowBytes, int Rows, int Threads>
QATTN_DEVICE void copy_packed(isa::SharedAddress to, const std::byte* from) {
  constexpr int chunks = RowBytes / 16;
  const int n = isa::thread();
  to += n / chunks * padded_row(RowBytes) + n % chunks * 16;
  from += n * 16;
#pragma unroll
  for (int i = 0; i < Rows * chunks; i += Threads) {
    if (i + Threads <= Rows * chunks || i + n < Rows * chunks) {
      isa::copy_async16(to + i / chunks * padded_row(RowBytes), from + i * 16, 16);
    }
  }
}

/// The same for a number of rows that is known at run time only.
template <int RowBytes, int Threads>
QATTN_DEVICE void copy_packed(isa::SharedAddress to, const std::byte* from, int rows) {
  constexpr int chunks = RowBytes / 16;
  for (int n = isa::thread(); n < rows * chunks; n += Threads) {
    isa::copy_async16(to + n / chunks * padded_row(RowBytes) + n % chunks * 16, from + n * 16, 16);
  }
}

/// Starts copying `bytes` contiguous bytes, a multiple of 16.
template <int Threads>
QATTN_DEVICE void copy_linear(isa::SharedAddress to, const std::byte* from, int bytes) {
  for (int n = isa::thread() * 16; n < bytes; n += Threads * 16) {
    isa::copy_async16(to + n, from + n, 16);
  }
}

}  // namespace QATTN_TARGET
}  // namespace qattn::tile
