// Codes that end where memory ends: the kernels that read them where they lie are not instrumented
// by sanitizers (tile loads), so a page without access stands behind the tensors.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <random>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn::test {
namespace {

/// Memory whose last byte is the last one before a page that nobody may touch.
class Edge {
 public:
  explicit Edge(std::size_t bytes) : span_((bytes + page - 1) / page * page + page), bytes_(bytes) {
    void* p = ::mmap(nullptr, span_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base_ = p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
    if (base_ != nullptr) ::mprotect(base_ + span_ - page, page, PROT_NONE);
  }
  Edge(const Edge&) = delete;
  Edge& operator=(const Edge&) = delete;
  ~Edge() {
    if (base_ != nullptr) ::munmap(base_, span_);
  }
  bool exists() const { return base_ != nullptr; }
  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(base_ + span_ - page - bytes_);
  }

 private:
  static constexpr std::size_t page = 4096;
  std::byte* base_ = nullptr;
  std::size_t span_, bytes_;
};

struct Shape {
  std::int64_t keys, dim, dim_v;
};

/// One call on K and V at `k`, `v`; 4 query heads over 2.
std::vector<float> attend(const Shape& shape, Layout layout, std::int8_t* k, std::int8_t* v) {
  constexpr std::int64_t heads = 2, heads_q = 4;
  const auto [keys, dim, dim_v] = shape;
  std::vector<float> q(static_cast<std::size_t>(heads_q * dim), 0.25f);
  std::vector<float> out(static_cast<std::size_t>(heads_q * dim_v));
  std::vector<float> scales(static_cast<std::size_t>(heads * keys), 0.01f);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] += 0.01f * static_cast<float>(i % 7);
  AttentionTensors t;
  const bool tokens_first = layout == Layout::bshd;
  const auto view = [&](auto* data, Format format, std::int64_t tokens, std::int64_t h,
                        std::int64_t d) {
    return tokens_first ? TensorView::dense(data, format, {1, tokens, h, d})
                        : TensorView::dense(data, format, {1, h, tokens, d});
  };
  t.q = view(q.data(), Format::f32, 1, heads_q, dim);
  t.k = view(k, Format::s8, keys, heads, dim);
  t.v = view(v, Format::s8, keys, heads, dim_v);
  t.out = view(out.data(), Format::f32, 1, heads_q, dim_v);
  t.k_scale = t.v_scale = TensorView::dense(scales.data(), Format::f32, {1, heads, keys});
  AttentionOptions options;
  options.recipe = *recipe_named("int8_full");
  options.recipe.smooth_k = Toggle::off;
  options.recipe.k_scale.granularity = Granularity::per_token;
  options.recipe.v_scale.granularity = Granularity::per_token;
  options.layout = layout;
  options.threads = 1;
  const Status status = attention(t, options);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

TEST(Edge, CodesThatEndAtAPage) {
  std::mt19937 random(5);
  for (const std::int64_t keys : {1, 16, 130, 144, 1040}) {
    for (const auto& [dim, dim_v] : {std::pair{64, 64}, {128, 80}, {192, 256}, {256, 16}}) {
      for (const Layout layout : {Layout::bshd, Layout::bhsd}) {
        SCOPED_TRACE(testing::Message() << keys << " keys, D " << dim << " " << dim_v);
        const std::size_t k_bytes = static_cast<std::size_t>(2 * keys * dim);
        const std::size_t v_bytes = static_cast<std::size_t>(2 * keys * dim_v);
        std::vector<std::int8_t> k(k_bytes), v(v_bytes);
        for (auto* x : {&k, &v}) {
          for (std::int8_t& code : *x) code = static_cast<std::int8_t>(random() % 255);
        }
        const Edge k_edge(k_bytes), v_edge(v_bytes);
        ASSERT_TRUE(k_edge.exists() && v_edge.exists());
        std::memcpy(k_edge.data<std::int8_t>(), k.data(), k_bytes);
        std::memcpy(v_edge.data<std::int8_t>(), v.data(), v_bytes);
        const Shape shape{keys, dim, dim_v};
        const std::vector<float> want = attend(shape, layout, k.data(), v.data());
        const std::vector<float> got =
            attend(shape, layout, k_edge.data<std::int8_t>(), v_edge.data<std::int8_t>());
        EXPECT_EQ(std::memcmp(want.data(), got.data(), want.size() * sizeof(float)), 0);
      }
    }
  }
}

}  // namespace
}  // namespace qattn::test
