// Which scale serves which token, for every granularity: printed, pinned, and followed through a
// GQA call whose result only comes out right if every scale is taken from its own place.
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn {
namespace {

struct Row {
  Granularity granularity;
  Role role;
  std::vector<std::int64_t> index;  ///< of tokens 0, 1, 7, 8, 15, 16, 31, 32, 127, 128, 200
  std::int64_t count;               ///< for 201 tokens
};

const std::int64_t tokens[] = {0, 1, 7, 8, 15, 16, 31, 32, 127, 128, 200};

TEST(IndexMaps, AreWhatTheHeaderSays) {
  const Row rows[] = {
      {Granularity::per_tensor, Role::q, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 1},
      {Granularity::per_head, Role::k, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 1},
      {Granularity::per_block, Role::k, {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1}, 2},
      {Granularity::per_warp, Role::q, {0, 0, 0, 0, 0, 0, 0, 1, 3, 4, 6}, 8},
      {Granularity::per_thread, Role::q, {0, 1, 7, 0, 7, 0, 7, 8, 31, 32, 48}, 64},
      {Granularity::per_thread, Role::k, {0, 0, 3, 0, 3, 0, 3, 0, 3, 4, 4}, 8},
      {Granularity::per_thread, Role::v, {0, 1, 7, 8, 15, 16, 31, 32, 127, 128, 200}, 201},
      {Granularity::per_token, Role::q, {0, 1, 7, 8, 15, 16, 31, 32, 127, 128, 200}, 201},
      {Granularity::per_channel, Role::v, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 1},
      {Granularity::per_block_channel, Role::v, {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1}, 2},
  };
  for (const Row& row : rows) {
    const Scaling scaling{row.granularity, 128, 32};
    std::cout << name(row.role) << " " << name(row.granularity) << ":";
    for (std::size_t i = 0; i < row.index.size(); ++i) {
      const std::int64_t got = scale_index(scaling, row.role, tokens[i]);
      std::cout << " " << tokens[i] << "->" << got;
      EXPECT_EQ(got, row.index[i]) << "token " << tokens[i];
    }
    std::cout << "\n";
    EXPECT_EQ(scale_count(scaling, row.role, 201), row.count);
    EXPECT_EQ(scale_count(scaling, row.role, 0), row.count == 1 ? 1 : 0);
  }
}

/// Hq 6, Hkv 2: K's codes are all 1 and every K scale differs by KV head and group; V's channel 0
/// holds the token's number. With one query code of 1 the score of key j is D * q_scale *
/// k_scale(j), which double arithmetic repeats from the header's index function alone.
TEST(IndexMaps, GqaUsesTheScalesOfItsOwnKvHead) {
  constexpr std::int64_t hq = 6, hkv = 2, sq = 40, sk = 150, d = 8;
  for (const auto& [gq, gk] : {std::pair{Granularity::per_warp, Granularity::per_block},
                               std::pair{Granularity::per_thread, Granularity::per_thread},
                               std::pair{Granularity::per_token, Granularity::per_token},
                               std::pair{Granularity::per_block, Granularity::per_head}}) {
    const Scaling qs{gq, 32, 16}, ks{gk, 64, 0};
    const std::int64_t nq = scale_count(qs, Role::q, sq), nk = scale_count(ks, Role::k, sk);
    std::vector<std::int8_t> q(hq * sq * d, 1), k(hkv * sk * d, 1);
    std::vector<float> v(hkv * sk * d, 0.0f), out(hq * sq * d), q_scale(hq * nq), k_scale(hkv * nk);
    for (std::size_t i = 0; i < q_scale.size(); ++i) q_scale[i] = 0.1f + 0.003f * float(i % 97);
    for (std::size_t i = 0; i < k_scale.size(); ++i) k_scale[i] = 0.1f + 0.007f * float(i % 89);
    for (std::int64_t h = 0; h < hkv; ++h) {
      for (std::int64_t j = 0; j < sk; ++j) v[(h * sk + j) * d] = float(j) + 1000.0f * float(h);
    }
    AttentionTensors t;
    t.q = TensorView::dense(q.data(), Format::s8, {1, hq, sq, d});
    t.k = TensorView::dense(k.data(), Format::s8, {1, hkv, sk, d});
    t.v = TensorView::dense(v.data(), Format::f32, {1, hkv, sk, d});
    t.out = TensorView::dense(out.data(), Format::f32, {1, hq, sq, d});
    const bool head = gk == Granularity::per_head;
    t.q_scale = TensorView::dense(q_scale.data(), Format::f32, {1, hq, nq});
    t.k_scale = head ? TensorView::dense(k_scale.data(), Format::f32, {1, hkv})
                     : TensorView::dense(k_scale.data(), Format::f32, {1, hkv, nk});
    AttentionOptions o;
    o.layout = Layout::bhsd;
    o.recipe = *recipe_named("int8");
    o.recipe.p = o.recipe.v = Format::f32;
    o.recipe.q_scale = qs;
    o.recipe.k_scale = ks;
    const Status status = attention(t, o);
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::int64_t h = 0; h < hq; ++h) {
      const std::int64_t kv = h / (hq / hkv);
      for (std::int64_t i = 0; i < sq; ++i) {
        double sum = 0, acc = 0;
        for (std::int64_t j = 0; j < sk; ++j) {
          const double s = double(d) * q_scale[h * nq + scale_index(qs, Role::q, i)] *
                           k_scale[kv * nk + scale_index(ks, Role::k, j)] / std::sqrt(double(d));
          sum += std::exp(s);
          acc += std::exp(s) * v[(kv * sk + j) * d];
        }
        ASSERT_NEAR(out[(h * sq + i) * d], acc / sum, 1e-3)
            << name(gq) << "/" << name(gk) << " head " << h << " query " << i;
      }
    }
  }
}

TEST(ScheduledScale, FollowsSigmaInBothDirections) {
  const std::vector<float> up = {0.5f, 1.0f, 2.0f, 4.0f}, down = {4.0f, 2.0f, 1.0f, 0.5f};
  EXPECT_FLOAT_EQ(*scheduled_scale(0.1f, up, 1, 3), 0.4f);
  EXPECT_FLOAT_EQ(*scheduled_scale(0.1f, up, 1, 0), 0.05f);
  EXPECT_FLOAT_EQ(*scheduled_scale(0.1f, down, 2, 0), 0.4f);
  EXPECT_FLOAT_EQ(*scheduled_scale(0.1f, down, 2, 2), 0.1f);
  EXPECT_FALSE(scheduled_scale(0.1f, up, 4, 0).ok());
  EXPECT_FALSE(scheduled_scale(0.1f, up, 0, -1).ok());
  EXPECT_FALSE(scheduled_scale(-0.1f, up, 0, 1).ok());
  EXPECT_FALSE(scheduled_scale(0.1f, std::vector<float>{1.0f, 0.0f}, 0, 1).ok());
}

}  // namespace
}  // namespace qattn
