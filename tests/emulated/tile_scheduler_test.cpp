// The order in which kernels take their works (TileScheduler): each once, and shared out evenly.
#include "kernels/attention/schedule/tile_scheduler.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "kernels/attention/common/work_tile.cuh"

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

AttentionParams params_of(const Shape& s, int rows) {
  AttentionParams p;
  const auto operand = [&](int length) {
    tile::Rows r;
    r.batches = s.batch, r.heads = s.heads;
    r.max_length = length;
    return r;
  };
  p.q = operand(s.queries), p.k = operand(s.keys);
  p.window_left = s.window_left, p.window_right = 0;
  p.q_blocks = (s.queries + rows - 1) / rows;
  p.work_tiles = p.q_blocks * s.heads * s.batch;
  return p;
}

TEST(TileScheduler, TakesEachWorkOnce) {
  const Shape shape{3, 5, 700, 700};
  AttentionParams p = params_of(shape, 128);
  for (int together = 0; together <= shape.batch * shape.heads; ++together) {
    for (const bool rising : {false, true}) {
      const int snake = together % 3 * 4;
      set_order({together, rising, snake}, p);
      std::set<std::tuple<int, int, int>> seen;
      for (int index = 0; index < p.work_tiles; ++index) {
        const WorkTile work = locate_work(p, index, 128, tile_keys);
        EXPECT_TRUE(work.b < shape.batch && work.head < shape.heads && work.first_row < 700);
        seen.emplace(work.b, work.head, work.first_row);
      }
      EXPECT_EQ(static_cast<int>(seen.size()), p.work_tiles) << together << rising;
    }
  }
}

/// The time of the last of the blocks that works are dealt to, beside their mean. A work costs its
/// keys and 384 more.
double imbalance(const AttentionParams& p, int rows) {
  std::vector<std::int64_t> time(blocks_of_h100);
  std::int64_t all = 0;
  for (int index = 0; index < p.work_tiles; ++index) {
    const WorkTile work = locate_work(p, index, rows, tile_keys);
    const int cost = 384 + std::max(0, work.key_end - work.key_begin);
    time[static_cast<std::size_t>(index % blocks_of_h100)] += cost;
    all += cost;
  }
  return static_cast<double>(*std::max_element(time.begin(), time.end())) * blocks_of_h100 /
         static_cast<double>(all);
}

TEST(TileScheduler, SharesOutEvenly) {
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
      AttentionParams p = params_of(c.shape, c.rows);
      set_order(plan_order(problem_of(c.shape), {c.rows, blocks_of_h100, bytes}), p);
      EXPECT_LE(imbalance(p, c.rows), c.most + 0.015 * (bytes - 2))
          << c.shape.batch << " " << c.shape.heads << " " << c.shape.queries << " " << c.shape.keys
          << " by " << p.heads_per_group;
    }
  }
}

/// Where fewer blocks run at a time than was thought, the longest have to start first, however few.
TEST(TileScheduler, StartsWithTheLongest) {
  for (const Shape& shape : {Shape{1, 8, 4096, 4096}, Shape{1, 1, 300, 300}}) {
    AttentionParams p = params_of(shape, 128);
    set_order(plan_order(problem_of(shape), {128, 256, 4, false}), p);
    EXPECT_EQ(locate_work(p, 0, 128, tile_keys).first_row, (p.q_blocks - 1) * 128);
  }
}

TEST(TileScheduler, TakesAsManyHeadsAsAsked) {
  const Shape shape{16, 32, 1024, 1024};  // 8 blocks a head
  const TileScheduler free = plan_order(problem_of(shape), {128, blocks_of_h100, 2});
  const TileScheduler asked = plan_order(problem_of(shape), {128, blocks_of_h100, 2, true, 2});
  EXPECT_LT(free.heads_per_group, 32);
  EXPECT_GE(asked.heads_per_group, 32);
}

/// Sequences may have less than a token each, or be very many.
TEST(TileScheduler, PackedSequences) {
  for (const std::int64_t tokens : {1, 5, 1000, 1 << 20, 1 << 27}) {
    for (const std::int64_t batch : {1, 7, 1 << 20}) {
      Problem p = problem_of({1, 64, 4096, 4096});
      p.varlen_q = p.varlen_k = true;
      p.batch = batch, p.tokens_q = p.tokens_k = tokens;
      for (const bool in_turn : {false, true}) {
        const TileScheduler order = plan_order(p, {128, blocks_of_h100, 2, in_turn});
        EXPECT_GE(order.heads_per_group, in_turn ? 0 : 2);
        EXPECT_LE(order.heads_per_group, 64);
      }
    }
  }
}

/// As imbalance(), of heads that have blocks of these costs; locate_work() would need a GPU's
/// tables.
double imbalance(const std::vector<int>& costs, int heads, const TileScheduler& order) {
  std::vector<int> works;
  bool rising = order.shortest_first;
  for (int first = 0; first < heads; first += order.heads_per_group, rising = !rising) {
    for (std::size_t n = 0; n < costs.size(); ++n) {
      const int cost = costs[rising ? n : costs.size() - 1 - n];
      for (int head = first; head < std::min(heads, first + order.heads_per_group); ++head) {
        works.push_back(cost);
      }
    }
  }
  std::vector<double> time(blocks_of_h100);
  double all = 0;
  for (std::size_t first = 0, turn = 0; first < works.size(); first += time.size(), ++turn) {
    const std::size_t count = std::min(time.size(), works.size() - first);
    for (std::size_t n = 0; n < count; ++n) {
      const bool backwards = order.snake > 0 && turn % 2 == 1;
      time[n] += works[first + (backwards ? count - 1 - n : n)];
      all += works[first + n];
    }
  }
  return *std::max_element(time.begin(), time.end()) * blocks_of_h100 / all;
}

/// Of equal packed sequences, whose blocks tile::first_block() numbers.
TEST(TileScheduler, SharesOutPackedSequences) {
  struct Case {
    Shape shape;
    double most;
  };
  for (const Case& c : {Case{{65, 32, 1000, 1000}, 1.05}, Case{{32, 8, 2048, 2048}, 1.06},
                        Case{{40, 4, 2657, 2657}, 1.12}, Case{{4, 32, 4096, 4096}, 1.04}}) {
    const int batch = c.shape.batch, length = c.shape.queries;
    std::vector<int> costs(static_cast<std::size_t>((batch * length + 127) / 128 + batch - 1), 64);
    for (int b = 0; b < batch; ++b) {
      for (int row = 0; row < length; row += 128) {
        const int at = b * length / 128 + b + row / 128;
        costs[static_cast<std::size_t>(at)] = 384 + std::min(row + 128, length);
      }
    }
    Problem p = problem_of(c.shape);
    p.varlen_q = p.varlen_k = true;
    p.tokens_q = p.tokens_k = batch * length;
    const TileScheduler order = plan_order(p, {128, blocks_of_h100, 2});
    EXPECT_LE(imbalance(costs, c.shape.heads, order), c.most)
        << batch << " " << length << " by " << order.heads_per_group;
  }
}

/// What is read at a time has to fit L2: heads that the works of one turn of all blocks belong to.
TEST(TileScheduler, FewHeadsAtATime) {
  for (const Shape& shape : {Shape{16, 32, 1024, 1024}, Shape{8, 32, 2048, 2048},
                             Shape{4, 32, 4096, 4096}, Shape{1, 32, 16384, 16384}}) {
    AttentionParams p = params_of(shape, 128);
    set_order(plan_order(problem_of(shape), {128, blocks_of_h100, 4}), p);
    const int fewest = (blocks_of_h100 + p.q_blocks - 1) / p.q_blocks;
    for (int turn = 0; turn * blocks_of_h100 < p.work_tiles; ++turn) {
      std::set<std::pair<int, int>> heads;
      for (int n = 0; n < blocks_of_h100; ++n) {
        const int index = turn * blocks_of_h100 + n;
        if (index >= p.work_tiles) break;
        const WorkTile work = locate_work(p, index, 128, tile_keys);
        heads.emplace(work.b, work.head);
      }
      EXPECT_LE(static_cast<int>(heads.size()), 2 * fewest) << shape.queries;
    }
  }
}

}  // namespace
}  // namespace qattn::kernels
