#include "model/emulate.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/f16.hpp"
#include "gpu/attention_bench.hpp"

namespace qattn::model {
namespace {

int architecture(const Machine& machine, Choice choice) {
  return choice == Choice::best ? machine.architecture.best : machine.architecture.portable;
}

/// The emulator's options for as long as it lives. No race checks: tests do those, and they cost.
class OnMachine {
 public:
  OnMachine(const Machine& machine, Choice choice) : before_(emu::options()) {
    emu::options().architecture = architecture(machine, choice);
    emu::options().races = false;
    emu::options().multiprocessors = static_cast<int>(machine.multiprocessors);
  }
  ~OnMachine() { emu::options() = before_; }
  OnMachine(const OnMachine&) = delete;
  OnMachine& operator=(const OnMachine&) = delete;

 private:
  emu::Options before_;
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;

Memory memory(std::size_t bytes) { return Memory(std::aligned_alloc(64, (bytes + 127) / 64 * 64)); }

/// 16-bit codes of numbers that are distributed normally.
Memory normal(std::int64_t count, bool f16, unsigned seed, float deviation = 1.0f) {
  Memory made = memory(static_cast<std::size_t>(count) * 2);
  auto* codes = static_cast<std::uint16_t*>(made.get());
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0.0f, deviation);
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = distribution(random);
    codes[i] = static_cast<std::uint16_t>(f16 ? formats::F16::encode(x) : formats::Bf16::encode(x));
  }
  return made;
}

struct Destroy {
  void operator()(BenchHandle* h) const { bench_destroy(h); }
};
using Call = std::unique_ptr<BenchHandle, Destroy>;

/// A recipe of 16-bit products takes tensors of its own format only.
bool takes_f16(const std::string& recipe) { return recipe == "f16"; }

constexpr std::int64_t consumer_rows = 64;  ///< of Hopper's kernels

/// A block has all keys of its rows, however few blocks there are: tiles and blocks are what costs.
std::string unsplit(const std::string& recipe, Block block) {
  return recipe + "+splits=1" + (block.pack > 1 ? "+pack=" + std::to_string(block.pack) : "") +
         (block.rows > tile ? "+consumers=" + std::to_string(block.rows / consumer_rows) : "") +
         (block.shared_p >= 0 ? "+shared_p=" + std::to_string(block.shared_p) : "");
}

BenchShape bench_shape(const std::string& recipe, const Shape& s) {
  return {s.batch, s.heads_q, s.heads_kv, s.queries,        s.keys,
          s.dim,   s.dim,     s.causal,   takes_f16(recipe)};
}

Status no_kernel(const std::string& recipe) {
  return Status(Code::unsupported, recipe + ": " + bench_error());
}

/// What the plan of a whole call says.
struct Whole {
  double dram_bytes;  ///< that must come from memory and go to it
  Block block;
  std::int64_t splits;  ///< blocks that share the keys of one
};

/// The number behind `name` in a plan's text, `other` if it is not there.
std::int64_t number_in(const std::string& plan, const std::string& name, std::int64_t other = 1) {
  const std::string line = "\n" + name + ": ";
  const std::size_t at = plan.find(line);
  return at == plan.npos ? other : std::atoll(plan.c_str() + at + line.size());
}

Result<Whole> planned(const std::string& recipe, const Shape& s, Choice choice,
                      const Machine& machine) {
  const OnMachine on(machine, choice);
  const BenchShape shape = bench_shape(recipe, s);
  // Nothing is read while a call is planned: any addresses will do that are far apart.
  const auto place = [](std::uintptr_t n) { return reinterpret_cast<void*>(n << 44); };
  const Call call(bench_create(recipe.c_str(), &shape, place(1), place(2), place(3), place(4)));
  if (!call) return no_kernel(recipe);
  const double out = 2.0 * static_cast<double>(s.batch * s.heads_q * s.queries * s.dim);
  const std::string plan = bench_plan(call.get());
  const Block block{number_in(plan, "pack_gqa"),
                    std::max(tile, consumer_rows * number_in(plan, "consumers")),
                    static_cast<int>(number_in(plan, "shared_p", -1))};
  return Whole{static_cast<double>(bench_q_bytes(call.get()) + bench_kv_bytes(call.get())) + out,
               block, number_in(plan, "splits")};
}

struct Fitted {
  Emulation emulation;  ///< of one block of queries
  PerTile per_tile;
};

/// Emulates one block of queries over a few tiles, over more, and two blocks. Once a process: the
/// shapes of a sweep share it.
Result<Fitted> fitted(const std::string& recipe, const Shape& s, Block block, Choice choice,
                      const Machine& machine) {
  using Key = std::tuple<std::string, std::string, std::int64_t, bool, std::int64_t, Block, Choice>;
  static std::map<Key, Fitted> known;
  const std::int64_t pack = block.pack, queries = std::min(s.queries, block.rows);
  const Key key{machine.key, recipe, s.dim, s.causal, queries, block, choice};
  if (const auto it = known.find(key); it != known.end()) return it->second;
  // Pipelines of a few stages are full after two tiles; plans pack heads from four on.
  const std::int64_t few = pack > 1 ? 4 : 2, more = few + 4;
  // Blocks of few queries share no keys: two are two KV heads.
  const std::int64_t kv = queries < block.rows ? 2 : 1;
  const Shape shapes[] = {{1, pack, 1, queries, few * tile, s.dim, s.causal},
                          {1, pack, 1, queries, more * tile, s.dim, s.causal},
                          {1, kv * pack, kv, 2 / kv * queries, more * tile, s.dim, s.causal}};
  Fitted f;
  std::vector<Emulation> runs;
  for (const Shape& shape : shapes) {
    const Result<Emulation> e = emulate(recipe, shape, choice, block, machine);
    if (!e.ok()) return e.status();
    runs.push_back(*e);
  }
  f.emulation = runs[0];
  f.per_tile =
      PerTile::fit({runs[0].amounts, runs[1].amounts, runs[2].amounts, static_cast<double>(few),
                    static_cast<double>(more), tiles_of(shapes[2], block).tiles});
  return known.emplace(key, f).first->second;
}

}  // namespace

Result<Emulation> emulate(const std::string& recipe, const Shape& s, Choice choice, Block block,
                          const Machine& machine) {
  const OnMachine on(machine, choice);
  const bool f16 = takes_f16(recipe);
  const std::int64_t q_count = s.batch * s.queries * s.heads_q * s.dim;
  const std::int64_t kv_count = s.batch * s.keys * s.heads_kv * s.dim;
  // Scores that hardly differ: what rows need whose codes of P lose mass is no part of every tile.
  const Memory q = normal(q_count, f16, 1, 0.25f), k = normal(kv_count, f16, 2),
               v = normal(kv_count, f16, 3), out = memory(static_cast<std::size_t>(q_count) * 2);
  const BenchShape shape = bench_shape(recipe, s);
  const Call call(
      bench_create(unsplit(recipe, block).c_str(), &shape, q.get(), k.get(), v.get(), out.get()));
  if (!call) return no_kernel(recipe);
  const Memory workspace = memory(static_cast<std::size_t>(bench_workspace(call.get())));
  const auto step = [&](int which) {
    return bench_run(call.get(), which, workspace.get(), nullptr);
  };
  Emulation run{bench_kernel(call.get()), bench_quantises(call.get()) != 0, {}, 0};
  if (step(1) != 0) return Status(Code::internal, bench_error());
  emu::take_stats();
  if (step(2) != 0) return Status(Code::internal, bench_error());
  const emu::Stats stats = emu::take_stats();
  run.amounts = amounts_of(stats, machine.products);
  run.blocks = static_cast<double>(stats.blocks);
  return run;
}

Result<Prediction> predict(const std::string& recipe, const Shape& shape, Choice choice,
                           const Machine& machine, const Compiled& compiled) {
  const Result<Whole> whole = planned(recipe, shape, choice, machine);
  if (!whole.ok()) return whole.status();
  const Block block = whole->block;
  const Result<Fitted> f = fitted(recipe, shape, block, choice, machine);
  if (!f.ok()) return f.status();
  Prediction p{
      recipe, f->emulation.kernel, f->emulation.quantises, shape, block, f->per_tile, false, {}};
  const auto code_for = [&](int gpu) {
    return compiled.find({gpu, p.kernel, recipe, static_cast<int>(shape.dim)});
  };
  auto slots = code_for(architecture(machine, choice));
  if (slots == compiled.end()) slots = code_for(machine.architecture.portable);
  if (slots != compiled.end()) {
    p.compiled = true;
    for (int i = 0; i < units; ++i) {
      p.per_tile.tile.of[i] = std::max(p.per_tile.tile.of[i], slots->second.of[i]);
    }
  }
  const Tiles tiles = tiles_of(shape, block);
  Amounts amounts = p.per_tile.scaled(tiles);
  amounts[Unit::dram] = whole->dram_bytes;
  // Of packed heads the emulated blocks are one of attention and those of the combination.
  const double each = block.pack > 1 ? 1 : f->emulation.blocks;
  const double blocks = tiles.blocks * static_cast<double>(whole->splits) * each;
  p.bound = bound_of(amounts, machine, blocks);
  return p;
}

}  // namespace qattn::model
