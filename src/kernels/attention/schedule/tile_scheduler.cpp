#include "kernels/attention/schedule/tile_scheduler.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attention/common/call_params.hpp"
#include "kernels/operand/visible_keys.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

/// What a block of rows costs beside its keys, in keys: 10 % of a full call of 4096 tokens and a
/// third of one of 1024 (H100, D 128).
constexpr std::int64_t row_keys = 384;
/// The root of the turns of all multiprocessors that a group's blocks are dealt in counts as so
/// much of a call for each byte of K and V, squared: its heads' keys leave L2, and groups that
/// begin with short blocks ask memory for many heads at once. On an H100 (D 128, causal, 16 times
/// 32 heads of 1024 tokens, TFLOP/s) groups of 2 4 6 8 heads have 325 305 297 299 in bf16 (2 and 2
/// bytes), 451 to 454 in int8_full (1 and 1), all heads in one 239 and 401; at 4096 groups of 2 4 8
/// 16 have 508 538 527 492 in bf16, all in one 372.
constexpr double turn_cost = 0.005;
constexpr std::int64_t most_turns = 64;       // that are looked at, but for a whole group
constexpr std::int64_t most_works = 1 << 20;  // of a group, which takes a few ms
/// Heads of a group come in pairs, whose rows of 16 bits lie beside one another: groups of 1 3 5
/// have 254 290 285 TFLOP/s there in bf16, with heads 32/8 1 2 3 4 have 268 334 300 336.
constexpr std::int64_t pair = 2;
/// Groups of blocks that start as others end: in a simulation of 120 shapes the last of 132 takes
/// 1.04 times their mean, as with all heads in one group; 1.05 with groups of one or two turns.
constexpr std::int64_t turns_as_others_end = 3;

/// Of blocks that no packed sequence has rows in, of which there are up to one a sequence.
constexpr std::int64_t idle_keys = 64;

/// Blocks of rows of a head: of one sequence, of all if they are packed.
std::int64_t blocks_of_head(const Problem& p, std::int64_t rows) {
  return row_blocks(p, rows) / (p.varlen_q ? 1 : p.batch);
}

/// Their costs, in keys. Packed sequences are taken for equal, and lie as tile::first_block() says.
std::vector<std::int64_t> block_costs(const Problem& p, std::int64_t rows) {
  const std::int64_t sequences = p.varlen_q ? p.batch : 1;
  const std::int64_t queries = p.varlen_q ? p.tokens_q / p.batch : p.max_q;
  const std::int64_t keys = p.varlen_k && !p.paged ? p.tokens_k / p.batch : p.max_k;
  const std::int64_t blocks = (queries + rows - 1) / rows, shift = keys - queries;
  std::vector<std::int64_t> costs(static_cast<std::size_t>(blocks_of_head(p, rows)), idle_keys);
  for (std::int64_t n = 0; n < sequences * blocks; ++n) {
    const std::int64_t sequence = n / blocks, block = n % blocks;
    const std::int64_t first = block * rows, past = std::min(first + rows, queries);
    // No sum of these overflows: a window is compared with the keys first.
    const std::int64_t end = visible_end(std::min(p.window_right, keys), past - 1 + shift, keys);
    const std::int64_t begin = visible_begin(std::min(p.window_left, keys), first + shift);
    const std::int64_t seen = end - std::max<std::int64_t>(begin, 0);
    const std::int64_t at = sequence * queries / rows + sequence + block;
    costs[static_cast<std::size_t>(at)] = row_keys + std::max<std::int64_t>(seen, 0);
  }
  return costs;
}

/// So that the last group begins with its longest blocks.
bool is_rising(std::int64_t heads, std::int64_t together) {
  return (heads + together - 1) / together % 2 == 0;
}

/// The costs of works in their order.
std::vector<std::int64_t> in_order(const std::vector<std::int64_t>& costs, std::int64_t heads,
                                   std::int64_t together) {
  std::vector<std::int64_t> all;
  all.reserve(costs.size() * static_cast<std::size_t>(heads));
  bool rising = is_rising(heads, together);
  for (std::int64_t first = 0; first < heads; first += together, rising = !rising) {
    const auto members = static_cast<std::size_t>(std::min(together, heads - first));
    for (std::size_t n = 0; n < costs.size(); ++n) {
      all.insert(all.end(), members, costs[rising ? n : costs.size() - 1 - n]);
    }
  }
  return all;
}

/// The time of the last of `blocks` that take works in turn, beside their mean.
double imbalance(const std::vector<std::int64_t>& works, std::size_t blocks, bool snake) {
  std::vector<std::int64_t> time(blocks);
  std::int64_t all = 0;
  bool backwards = false;
  for (std::size_t first = 0; first < works.size(); first += blocks, backwards = !backwards) {
    const std::size_t count = std::min(blocks, works.size() - first);
    for (std::size_t n = 0; n < count; ++n) {
      const std::int64_t cost = works[first + (snake && backwards ? count - 1 - n : n)];
      time[n] += cost, all += cost;
    }
  }
  const auto last = static_cast<double>(*std::max_element(time.begin(), time.end()));
  return last * static_cast<double>(blocks) / static_cast<double>(all);
}

}  // namespace

TileScheduler plan_order(const Problem& p, const Dealing& dealing) {
  const int rows = dealing.rows, blocks = dealing.blocks;
  const std::int64_t works = row_blocks(p, rows) * p.heads_q;
  if (p.window_right < 0 || works == 0) return {};  // nothing ends at a diagonal
  const std::int64_t each = blocks_of_head(p, rows);
  const std::int64_t sequences = p.varlen_q ? p.batch : 1;  // that a head's blocks belong to
  const std::int64_t heads = p.varlen_q ? p.heads_q : p.heads_q * p.batch;
  const auto heads_of = [&](std::int64_t turns) {
    const std::int64_t n = turns * blocks * sequences / each / pair * pair;
    return std::min(heads, std::max(pair, n));
  };
  TileScheduler order;
  if (!dealing.in_turn) {
    order.heads_per_group = static_cast<std::int32_t>(heads_of(turns_as_others_end));
    order.shortest_first = is_rising(heads, order.heads_per_group);
    return order;
  }
  if (works <= blocks) return {};  // each block has one
  const std::vector<std::int64_t> costs = block_costs(p, rows);
  const std::int64_t looked_at = std::clamp(most_turns * blocks / each, std::int64_t{1}, heads);
  double least = 0;
  for (std::int64_t n = heads_of(dealing.least_turns);;
       n = std::min(heads, n + std::max(pair, n / 4 / pair * pair))) {
    const double turns = static_cast<double>(n * each / sequences) / blocks;
    const double spread = turn_cost * dealing.bytes * dealing.bytes * std::sqrt(turns);
    if (order.heads_per_group == 0) order.heads_per_group = static_cast<std::int32_t>(n);
    if ((least > 0 && 1 + spread >= least) || n > most_works / each) break;
    const std::vector<std::int64_t> taken = in_order(costs, std::max(n, looked_at), n);
    for (const bool snake : {false, true}) {
      const double cost = spread + imbalance(taken, static_cast<std::size_t>(blocks), snake);
      if (least > 0 && cost >= least) continue;
      least = cost;
      order.heads_per_group = static_cast<std::int32_t>(n);
      order.snake = snake ? blocks : 0;
    }
    if (n == heads) break;
  }
  order.shortest_first = is_rising(heads, order.heads_per_group);
  return order;
}

std::string text_of(const TileScheduler& order) {
  if (order.heads_per_group == 0) return {};
  return "heads_per_group: " + std::to_string(order.heads_per_group) +
         "\nsnake: " + std::to_string(order.snake > 0 ? 1 : 0) + "\n";
}

void set_order(const TileScheduler& order, AttentionParams& a) {
  a.heads_per_group = order.heads_per_group;
  a.shortest_first = order.shortest_first ? 1 : 0;
  a.snake = order.snake;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
