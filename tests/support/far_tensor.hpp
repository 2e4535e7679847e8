// Views whose strides reach far into reserved virtual memory of which only the pages with tokens
// exist. An index that is cut to 32 bits falls into a hole, or on another token, and the result
// differs from the dense one.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "isa/emu/sanitizers.hpp"
#include "qattn/tensor_view.hpp"

namespace qattn::test {

/// Just over 2^32, and no power of two: a cut one is not 0 and hits no token.
inline constexpr std::int64_t far = (std::int64_t{1} << 32) + 4096 * 8;

/// Address space without memory; pages get some where they are written.
class Reserve {
 public:
  explicit Reserve(std::size_t bytes) : bytes_(bytes) {
    void* p = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
  }
  Reserve(const Reserve&) = delete;
  Reserve& operator=(const Reserve&) = delete;
  ~Reserve() {
    if (base_) ::munmap(base_, bytes_);
  }
  std::byte* base() const { return base_; }
  std::size_t size() const { return bytes_; }

  bool open(std::size_t offset, std::size_t bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t begin = offset / page * page;
    const std::size_t end = (offset + bytes + page - 1) / page * page;
    return ::mprotect(base_ + begin, end - begin, PROT_READ | PROT_WRITE) == 0;
  }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_;
};

inline std::vector<float> draw(std::initializer_list<std::int64_t> shape, unsigned seed) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& value : x) value = normal(random);
  return x;
}

/// One tensor, dense and far apart: tokens (B, S, H, D), scales (B, H, S).
template <class T = float>
struct Pair {
  static constexpr Format format = std::is_same_v<T, std::int8_t>     ? Format::s8
                                   : std::is_same_v<T, std::uint16_t> ? Format::bf16
                                                                      : Format::f32;
  std::vector<T> dense;
  TensorView near, away;
  std::unique_ptr<Reserve> reserve;

  /// `axis`: the dimension whose stride is far; `sign` -1 walks backwards.
  bool make(std::initializer_list<std::int64_t> shape, int axis, int sign, std::vector<T> values) {
    dense = std::move(values);
    near = TensorView::dense(static_cast<void*>(dense.data()), format, shape);
    away = near;
    away.stride[axis] = sign * far;
    const std::size_t span = static_cast<std::size_t>(far * (near.shape[axis] - 1)) * sizeof(T);
    reserve = std::make_unique<Reserve>(span + dense.size() * sizeof(T) + (1 << 16));
    if (reserve->base() == nullptr) return false;
    away.data = reserve->base() + (sign < 0 ? span : 0);
    return copy(true);
  }
  bool make(std::initializer_list<std::int64_t> shape, int axis, int sign, unsigned seed) {
    return make(shape, axis, sign, draw(shape, seed));
  }

  /// dense -> far with `out`, else back.
  bool copy(bool out) {
    const std::int64_t row = near.shape[near.rank - 1];
    for (std::int64_t n = 0; n * row < static_cast<std::int64_t>(dense.size()); ++n) {
      std::int64_t rest = n, offset = 0;
      for (int d = near.rank - 2; d >= 0; --d) {
        offset += rest % near.shape[d] * away.stride[d];
        rest /= near.shape[d];
      }
      std::byte* at =
          static_cast<std::byte*>(away.data) + offset * static_cast<std::int64_t>(sizeof(T));
      T* from = dense.data() + n * row;
      const auto bytes = static_cast<std::size_t>(row) * sizeof(T);
      if (out && !reserve->open(static_cast<std::size_t>(at - reserve->base()), bytes))
        return false;
      if (out) {
        std::memcpy(at, from, bytes);
      } else {
        std::memcpy(from, at, bytes);
      }
    }
    return true;
  }
};

/// Some 6 TB of address space fit any 64-bit Linux that does not forbid it, so a test that cannot
/// have them fails unless something known does.
inline void no_space() {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &limit), 0);
#if defined(QATTN_ASAN) || defined(QATTN_TSAN)
  GTEST_SKIP() << "the sanitizer has the address space";
#endif
  if (limit.rlim_cur != RLIM_INFINITY) GTEST_SKIP() << "ulimit -v forbids the address space";
  FAIL() << "the system lends too little address space";
}

enum Axis { far_batch = 0, far_token = 1, far_head = 2 };

}  // namespace qattn::test
