// The order in which kernels take their works (WorkOrder): each once, and shared out evenly.
#include "kernels/attn_prefill/order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/attn_prefill/rows.cuh"

namespace qattn::kernels {
namespace {

struct Shape {
  int batch, heads, queries, keys;
  int window_left = -1;
};

constexpr int tile_keys = 128, blocks_of_h100 = 132;

Problem problem_of(const Shape& s) {
  Problem p;
  p.batch = s.batch;
  p.heads_q = p.heads_kv = s.heads;
  p.max_q = s.queries, p.max_k = s.keys;
  p.window_left = s.window_left, p.window_right = 0;
  return p;
}

PrefillParams params_of(const Shape& s, int rows) {
  PrefillParams p;
  const auto operand = [&](int length) {
    tile::Rows r;
    r.batches = s.batch, r.heads = s.heads;
    r.max_length = length;
    return r;
  };
  p.q = operand(s.queries), p.k = operand(s.keys);
  p.window_left = s.window_left, p.window_right = 0;
  p.q_blocks = (s.queries + rows - 1) / rows;
  p.works = p.q_blocks * s.heads * s.batch;
  return p;
}

TEST(WorkOrder, TakesEachWorkOnce) {
  const Shape shape{3, 5, 700, 700};
  PrefillParams p = params_of(shape, 128);
  for (int together = 0; together <= shape.batch * shape.heads; ++together) {
    for (const bool rising : {false, true}) {
      const int folded = together % 3 * 4;
      set_order({together, rising, folded}, p);
      std::set<std::tuple<int, int, int>> seen;
      for (int index = 0; index < p.works; ++index) {
        const PrefillWork work = locate_work(p, index, 128, tile_keys);
        EXPECT_TRUE(work.b < shape.batch && work.head < shape.heads && work.first_row < 700);
        seen.emplace(work.b, work.head, work.first_row);
      }
      EXPECT_EQ(static_cast<int>(seen.size()), p.works) << together << rising;
    }
  }
}

/// The time of the last of the blocks that works are dealt to, beside their mean. A work costs its
/// keys and 384 more.
double imbalance(const PrefillParams& p, int rows) {
  std::vector<std::int64_t> time(blocks_of_h100);
  std::int64_t all = 0;
  for (int index = 0; index < p.works; ++index) {
    const PrefillWork work = locate_work(p, index, rows, tile_keys);
    const int cost = 384 + std::max(0, work.key_end - work.key_begin);
    time[static_cast<std::size_t>(index % blocks_of_h100)] += cost;
    all += cost;
  }
  return static_cast<double>(*std::max_element(time.begin(), time.end())) * blocks_of_h100 /
         static_cast<double>(all);
}

TEST(WorkOrder, SharesOutEvenly) {
  struct Case {
    Shape shape;
    int rows;
    double most;
  };
  const Case cases[] = {
      {{16, 32, 1024, 1024}, 128, 1.04}, {{8, 32, 2048, 2048}, 128, 1.03},
      {{4, 32, 4096, 4096}, 128, 1.02},  {{1, 32, 16384, 16384}, 128, 1.01},
      {{4, 32, 4096, 4096}, 192, 1.03},  {{1, 32, 16384, 16384}, 192, 1.02},
      {{4, 16, 4096, 4096}, 128, 1.02},  {{3, 24, 3000, 3000}, 128, 1.05},
      {{1, 40, 5000, 5000}, 128, 1.03},  {{2, 12, 1500, 1500}, 128, 1.15},
      {{1, 9, 8960, 8960}, 128, 1.10},   {{4, 32, 512, 4096}, 128, 1.04},
      {{4, 32, 4096, 512}, 128, 1.04},   {{4, 32, 8192, 8192, 1024}, 128, 1.04},
      {{1, 1, 32768, 32768}, 128, 1.04},
  };
  for (const Case& c : cases) {
    for (const int bytes : {2, 4}) {  // with more, balance counts less
      PrefillParams p = params_of(c.shape, c.rows);
      set_order(plan_order(problem_of(c.shape), {c.rows, blocks_of_h100, bytes}), p);
      EXPECT_LE(imbalance(p, c.rows), c.most + 0.015 * (bytes - 2))
          << c.shape.batch << " " << c.shape.heads << " " << c.shape.queries << " " << c.shape.keys
          << " by " << p.together;
    }
  }
}

/// What is read at a time has to fit L2: heads that the works of one turn of all blocks belong to.
TEST(WorkOrder, FewHeadsAtATime) {
  for (const Shape& shape : {Shape{16, 32, 1024, 1024}, Shape{8, 32, 2048, 2048},
                             Shape{4, 32, 4096, 4096}, Shape{1, 32, 16384, 16384}}) {
    PrefillParams p = params_of(shape, 128);
    set_order(plan_order(problem_of(shape), {128, blocks_of_h100, 4}), p);
    const int fewest = (blocks_of_h100 + p.q_blocks - 1) / p.q_blocks;
    for (int turn = 0; turn * blocks_of_h100 < p.works; ++turn) {
      std::set<std::pair<int, int>> heads;
      for (int n = 0; n < blocks_of_h100; ++n) {
        const int index = turn * blocks_of_h100 + n;
        if (index >= p.works) break;
        const PrefillWork work = locate_work(p, index, 128, tile_keys);
        heads.emplace(work.b, work.head);
      }
      EXPECT_LE(static_cast<int>(heads.size()), 2 * fewest) << shape.queries;
    }
  }
}

}  // namespace
}  // namespace qattn::kernels
