// The emulator's race checker beside the plain one: random programs of lanes, fences, barriers and
// units must end in equal errors, word for word, and in equal knowledge of each other.
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "emulate.hpp"
#include "plain_races.hpp"

namespace qattn::isa_test {
namespace {

constexpr std::uint32_t kBytes = 4096;
constexpr int kClocks = 6;

/// One checker of the two, with the barriers of the program.
template <class Checker, class ClockOf>
struct Side {
  Checker blocks[2];
  ClockOf clocks[kClocks], copies[2];

  void prepare(int lanes, int count) {
    blocks[0].prepare(lanes, kBytes, count);
    if (count > 1) blocks[1].join(blocks[0], 1);
    for (ClockOf& clock : clocks) clock = {};
    for (ClockOf& clock : copies) clock = {};
  }
};

/// A random step, drawn once and taken by both.
struct Step {
  int block, lane, kind, clock, copy, unit;
  bool flag;
};

/// What orders accesses. Returns the times it gave.
template <class Checker, class ClockOf>
std::uint32_t order(Side<Checker, ClockOf>& side, const Step& s, int lanes) {
  Checker& r = side.blocks[s.block];
  ClockOf& clock = side.clocks[s.clock];
  const int warp = s.lane / 32 * 32, group = s.lane / 128 * 128;
  std::uint32_t time = 0;
  switch (s.kind) {
    case 0:
      r.meet(warp, 32);
      break;
    case 1:  // a barrier of all
      for (int l = 0; l < lanes; ++l) r.release(l, clock);
      for (int l = 0; l < lanes; ++l) r.acquire(l, clock);
      if (s.flag) clock.clear();
      break;
    case 2:
      for (int l = warp; l < warp + 32; ++l) r.release(l, clock);
      break;
    case 3:
      for (int l = warp; l < warp + 32; ++l) r.acquire(l, clock);
      break;
    case 4:
      r.release(s.lane, clock);
      break;
    case 5:
      r.acquire(s.lane, clock);
      break;
    case 6:
      r.fence_async(s.lane);
      break;
    case 7:
      for (int l = warp; l < warp + 32; ++l) r.fence_async(l);
      break;
    case 8:
      return r.begin(r.barrier_agent(s.unit), s.lane);
    case 9:
      return r.begin(r.store_agent(s.lane / 32), s.lane);
    case 10:  // wgmma, and perhaps its wait
      time = r.begin_for_all(r.wgmma_agent(s.lane / 128), group);
      for (int l = group; s.flag && l < group + 128; ++l) {
        r.observe(l, r.wgmma_agent(s.lane / 128), time);
      }
      return time;
    case 11:  // a copy ends at an mbarrier
      time = r.begin(r.barrier_agent(s.unit), s.lane);
      if (!clock.empty()) r.observe(clock, r.barrier_agent(s.unit), time);
      return time;
    case 12:
      side.copies[s.copy] = clock;
      break;
    case 13:
      r.acquire(s.lane, side.copies[s.copy]);
      break;
    default:
      break;
  }
  return time;
}

struct Touch {
  int agent, what;
  std::uint32_t offset, bytes;
};

template <class Checker>
void access(Checker& r, const Touch& t, int lanes, const Where& where) {
  const Proxy proxy = t.agent >= lanes ? Proxy::async : Proxy::generic;
  if (t.what < 5) {
    r.read(t.offset, t.bytes, t.agent, proxy, where);
  } else if (t.what < 7) {
    r.write(t.offset, t.bytes, t.agent, proxy, where);
  } else {
    r.atomic(t.offset / 4 * 4, 4, t.agent, where);
  }
}

std::string error_in(const std::function<void()>& body) {
  try {
    body();
  } catch (const emu::Error& e) {
    return e.what();
  }
  return {};
}

class RacesFuzz : public testing::TestWithParam<int> {};

TEST_P(RacesFuzz, FindsWhatThePlainOneFinds) {
  static Side<emu::Races, emu::Clock> fast;
  static Side<PlainRaces, PlainClock> plain;
  int errors = 0, lanes_of_all = 0;
  for (int round = 0; round < 10; ++round) {
    std::mt19937 generator(static_cast<unsigned>(10 * GetParam() + round));
    const auto draw = [&](int n) {
      return static_cast<int>(generator() % static_cast<unsigned>(n));
    };
    const int lanes = 128 * (1 + draw(3)), blocks = draw(4) == 0 ? 2 : 1;
    const int units = lanes / 128 + 1 + lanes / 32 + emu::Races::kBarrierAgents;
    lanes_of_all += lanes;
    fast.prepare(lanes, blocks);
    plain.prepare(lanes, blocks);
    const emu::Order& known = fast.blocks[0].known();
    for (int step = 0; step < 400; ++step) {
      const Step s{draw(blocks), draw(lanes), draw(16),    draw(kClocks),
                   draw(2),      draw(16),    draw(2) == 0};
      ASSERT_EQ(order(fast, s, lanes), order(plain, s, lanes)) << "round " << round;
      for (int n = 0; n < 6; ++n) {
        const int agent = draw(3) == 0 ? lanes + draw(units) : draw(lanes);
        const std::uint32_t bytes = 1u << draw(5);
        const auto offset = static_cast<std::uint32_t>(draw(draw(2) ? 64 : kBytes)) / bytes * bytes;
        const Touch touch{agent, draw(8), offset, bytes};
        const Where where = Where::current();
        const std::string found =
            error_in([&] { access(fast.blocks[s.block], touch, lanes, where); });
        ASSERT_EQ(found, error_in([&] { access(plain.blocks[s.block], touch, lanes, where); }))
            << "round " << round << ", step " << step;
        errors += !found.empty();
      }
      if (step % 7 != 0) continue;
      for (int n = 0; n < 200; ++n) {
        const int a = draw(plain.blocks[0].agents()), b = draw(plain.blocks[0].agents());
        ASSERT_EQ(known.seen(a, b), plain.blocks[0].seen(a, b)) << "round " << round;
        ASSERT_EQ(known.visible(a, b), plain.blocks[0].visible(a, b)) << "round " << round;
      }
    }
  }
  EXPECT_GT(errors, lanes_of_all / 10);  // programs whose races are seldom would compare little
}

INSTANTIATE_TEST_SUITE_P(Programs, RacesFuzz, testing::Range(0, 12));

}  // namespace
}  // namespace qattn::isa_test
