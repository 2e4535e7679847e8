// Offsets beyond 2^32 elements: views whose strides reach far into reserved virtual memory of which
// only the pages with tokens exist. An index that is cut to 32 bits falls into a hole, or on
// another token, and the result differs from the dense one.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn::test {
namespace {

constexpr std::int64_t batch = 2, heads_q = 2, heads_kv = 2, queries = 5, keys = 150, dim = 32;
/// Just over 2^32, and no power of two: a cut one is not 0 and hits no token.
constexpr std::int64_t far = (std::int64_t{1} << 32) + 4096 * 8;

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
    constexpr std::size_t page = 4096;
    const std::size_t begin = offset / page * page;
    const std::size_t end = (offset + bytes + page - 1) / page * page;
    return ::mprotect(base_ + begin, end - begin, PROT_READ | PROT_WRITE) == 0;
  }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_;
};

/// One tensor (B, S, H, D), dense and far apart.
struct Pair {
  std::vector<float> dense;
  TensorView near, away;
  std::unique_ptr<Reserve> reserve;

  /// `axis`: the dimension whose stride is far; `sign` -1 walks backwards.
  bool make(std::initializer_list<std::int64_t> shape, int axis, int sign, unsigned seed) {
    const std::vector<std::int64_t> s(shape);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    dense.resize(static_cast<std::size_t>(s[0] * s[1] * s[2] * s[3]));
    for (float& x : dense) x = normal(random);
    near = TensorView::dense(dense.data(), Format::f32, shape);
    away = near;
    away.stride[axis] = sign * far;
    const std::size_t span = static_cast<std::size_t>(far * (s[axis] - 1)) * 4;
    reserve = std::make_unique<Reserve>(span + dense.size() * 4 + (1 << 16));
    if (reserve->base() == nullptr) return false;
    away.data = reserve->base() + (sign < 0 ? span : 0);
    return copy(true);
  }

  /// dense -> far with `out`, else back.
  bool copy(bool out) {
    const std::int64_t row = near.shape[3];
    for (std::int64_t n = 0; n * row < static_cast<std::int64_t>(dense.size()); ++n) {
      std::int64_t rest = n, offset = 0;
      for (int d = 2; d >= 0; --d) {
        offset += rest % near.shape[d] * away.stride[d];
        rest /= near.shape[d];
      }
      std::byte* at = static_cast<std::byte*>(away.data) + offset * 4;
      float* from = dense.data() + n * row;
      const auto bytes = static_cast<std::size_t>(row) * 4;
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

enum Axis { far_batch = 0, far_token = 1, far_head = 2 };

void compare(const std::string& recipe, int axis, int sign) {
  SCOPED_TRACE(recipe + ", axis " + std::to_string(axis) + (sign < 0 ? ", backwards" : ""));
  Pair q, k, v, out;
  if (!q.make({batch, queries, heads_q, dim}, axis, sign, 1) ||
      !k.make({batch, keys, heads_kv, dim}, axis, sign, 2) ||
      !v.make({batch, keys, heads_kv, dim}, axis, sign, 3) ||
      !out.make({batch, queries, heads_q, dim}, axis, sign, 4)) {
    GTEST_SKIP() << "the system lends too little address space";
  }
  AttentionOptions options;
  options.recipe = *recipe_named(recipe);
  options.causal = true;
  options.threads = 1;
  AttentionTensors t;
  t.q = q.near;
  t.k = k.near;
  t.v = v.near;
  t.out = out.near;
  const Status dense = attention(t, options);
  ASSERT_TRUE(dense.ok()) << dense.message();
  const std::vector<float> expected = out.dense;
  t.q = q.away;
  t.k = k.away;
  t.v = v.away;
  t.out = out.away;
  const Status s = attention(t, options);
  ASSERT_TRUE(s.ok()) << s.message();
  ASSERT_TRUE(out.copy(false));
  EXPECT_EQ(std::memcmp(expected.data(), out.dense.data(), expected.size() * 4), 0);
}

TEST(FarStrides, EveryAxis) {
  for (const char* recipe : {"f32", "int8_full", "fp8", "nvfp4"}) {
    for (const int axis : {far_batch, far_token, far_head}) {
      for (const int sign : {1, -1}) compare(recipe, axis, sign);
    }
  }
}

TEST(FarStrides, Pages) {
  // Two pages of 80 keys a sequence, each page far from the next.
  constexpr std::int64_t size = 80, pages = 4;
  Pair q, k, v, out;
  if (!q.make({batch, queries, heads_q, dim}, far_batch, 1, 1) ||
      !k.make({pages, size, heads_kv, dim}, far_batch, 1, 2) ||
      !v.make({pages, size, heads_kv, dim}, far_batch, 1, 3) ||
      !out.make({batch, queries, heads_q, dim}, far_batch, 1, 4)) {
    GTEST_SKIP() << "the system lends too little address space";
  }
  const std::int32_t table[] = {3, 0, 1, 2}, used[] = {150, 99};
  for (const char* recipe : {"f32", "int8_full"}) {
    SCOPED_TRACE(recipe);
    AttentionOptions options;
    options.recipe = *recipe_named(recipe);
    options.threads = 1;
    AttentionTensors t;
    t.page_table = TensorView::dense(table, Format::s32, {batch, 2});
    t.seqused_k = TensorView::dense(used, Format::s32, {batch});
    t.q = q.near;
    t.k = k.near;
    t.v = v.near;
    t.out = out.near;
    const Status dense = attention(t, options);
    ASSERT_TRUE(dense.ok()) << dense.message();
    const std::vector<float> expected = out.dense;
    t.k = k.away;
    t.v = v.away;
    t.out = out.away;
    const Status s = attention(t, options);
    ASSERT_TRUE(s.ok()) << s.message();
    ASSERT_TRUE(out.copy(false));
    EXPECT_EQ(std::memcmp(expected.data(), out.dense.data(), expected.size() * 4), 0);
  }
}

TEST(FarStrides, Quantize) {
  Pair x;
  if (!x.make({batch, keys, heads_kv, dim}, far_token, 1, 5)) {
    GTEST_SKIP() << "the system lends too little address space";
  }
  QuantizeOptions o;
  o.threads = 1;
  std::vector<std::int8_t> codes[2];
  std::vector<float> scale[2];
  for (const int i : {0, 1}) {
    codes[i].resize(x.dense.size());
    scale[i].resize(batch * heads_kv * keys);
    QuantizeTensors t;
    t.x = i ? x.away : x.near;
    t.codes = TensorView::dense(codes[i].data(), Format::s8, {batch, keys, heads_kv, dim});
    t.scale = TensorView::dense(scale[i].data(), Format::f32, {batch, heads_kv, keys});
    const auto done = quantize(t, o);
    ASSERT_TRUE(done.ok()) << done.status().message();
  }
  EXPECT_EQ(codes[0], codes[1]);
  EXPECT_EQ(scale[0], scale[1]);
}

TEST(FarStrides, Mask) {
  Pair mask, q, k, v, out;
  if (!mask.make({batch, heads_q, queries, keys}, 2, 1, 6) ||
      !q.make({batch, queries, heads_q, dim}, far_batch, 1, 1) ||
      !k.make({batch, keys, heads_kv, dim}, far_batch, 1, 2) ||
      !v.make({batch, keys, heads_kv, dim}, far_batch, 1, 3) ||
      !out.make({batch, queries, heads_q, dim}, far_batch, 1, 4)) {
    GTEST_SKIP() << "the system lends too little address space";
  }
  AttentionTensors t;
  t.q = q.near;
  t.k = k.near;
  t.v = v.near;
  t.out = out.near;
  AttentionOptions options;
  options.recipe = *recipe_named("f32");
  std::vector<float> expected;
  for (const TensorView& view : {mask.near, mask.away}) {
    t.mask = view;
    const Status s = attention(t, options);
    ASSERT_TRUE(s.ok()) << s.message();
    if (expected.empty()) expected = out.dense;
    EXPECT_EQ(expected, out.dense);
  }
}

}  // namespace
}  // namespace qattn::test
