#include "kernels/attention/cpu/kernel.hpp"

#include <omp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>

#include "core/index_tensor.hpp"
#include "core/threads.hpp"
#include "kernels/attention/automatic.hpp"
#include "kernels/attention/cpu/operand.hpp"
#include "kernels/attention/cpu/task.hpp"
#include "qattn/quantize.hpp"

namespace qattn::cpu {
namespace {

using detail::Kernel;
using detail::PlanData;

/// Sequences of so many rows (query heads of a group times queries) take K and V in floats as they
/// lie. Eight rows read a tile twice from a core's cache; with more of them panels are worth their
/// while.
constexpr std::int64_t few_rows = 8;

/// From how many keys on int8_full is faster than f32 over f32 tensors, one thread. Zen 3, where a
/// product of four bytes takes three instructions: D 64 1.05 to 1.2 times the time to 256 keys, 0.9
/// to 1.1 at 1024 and 2048; D 128 1.0 at 256, 0.9 at 1024, 0.85 at 2048. The others of a Xeon
/// (bench/results/cpu-shapes-*.json): D 64 1.09 and 0.87 of the time at 256 and 512 keys, D 128
/// 0.88 at 256 without tiles; 0.90 and 0.70 at 256 with them. NEON has no record.
constexpr detail::Codes avx2{"int8_full", true, {{{64, 1500.0}, {128, 400.0}, {256, 200.0}}}};
constexpr detail::Codes avx512{"int8_full", true, {{{64, 350.0}, {128, 150.0}, {256, 100.0}}}};
constexpr detail::Codes amx{"int8_full", true, {{{64, 200.0}, {128, 100.0}, {256, 64.0}}}};

/// Null: nothing is known of the machine's.
const detail::Codes* codes_of(const KernelTable* words) {
  if (words == words_neon_dotprod() || words == words_neon_i8mm()) return nullptr;
  return words == words_avx2() ? &avx2 : words->attend != nullptr ? &amx : &avx512;
}

detail::Automatic automatic(const Problem& p, const KernelTable* words) {
  const bool free = detail::may_choose(p);
  // How long packed sequences are the host does not know, and neighbours have no influence.
  if (free && !p.varlen_q && p.group() * p.max_q <= few_rows) {
    return {"f32", "few queries read K and V once"};
  }
  const auto is_bf16 = [](const TokenTensor& x) { return x.format == Format::bf16; };
  const bool bf16 = is_bf16(p.q) && is_bf16(p.k) && is_bf16(p.v);
  if (free && words->attend != nullptr && bf16) {
    return {"bf16", "products of bf16 are as fast as those of bytes, without codes to make"};
  }
  if (words == words_scalar()) return {"f32", "no products of bytes here"};
  const detail::Codes* codes = codes_of(words);
  if (free && codes != nullptr && !p.varlen_q && !p.varlen_k && !codes_gain(*codes, p)) {
    const bool native = bf16 && words->qk_bf16 != nullptr;
    return {native ? "bf16" : "f32", "too few rows and keys for codes"};
  }
  return {"int8_full", "products of bytes"};
}

Recipe resolve(const Problem& problem, const KernelTable* words) {
  return detail::resolve_recipe(problem, automatic(problem, words).recipe);
}

bool v_block_fits(const Scaling& s) {
  if (s.granularity != Granularity::per_block_channel) return true;
  return s.block % tile_keys == 0 || (tile_keys % s.block == 0 && s.block % 4 == 0);
}

/// Keys of a tile that share V's scales per channel; given ones, and nvfp4's, end with a page.
int value_block(const Problem& p, const Recipe& r) {
  const bool by_block = r.v_scale.granularity == Granularity::per_block_channel;
  const int block = by_block ? std::min<int>(r.v_scale.block, tile_keys) : tile_keys;
  const bool pages = p.paged && p.tensors.v_scale.present() && (by_block || r.v == Format::nvfp4);
  return pages ? static_cast<int>(std::gcd(std::int64_t{block}, p.page_size)) : block;
}

Status refuse(const std::string& why) { return Status(Code::unsupported, why); }

Status supports(const Problem& problem, const KernelTable* wanted) {
  using enum Format;
  const Selection selection = select_words();
  if (selection.words == nullptr) {
    return refuse(std::string("QATTN_CPU_ISA asks for what this machine lacks: ") +
                  selection.error);
  }
  if (wanted == nullptr) return refuse("not in this build");
  if (selection.words != wanted) {
    return refuse(std::string("the instruction set in force is ") + selection.words->isa);
  }
  const Recipe r = resolve(problem, wanted);
  const auto among = [](Format f, std::initializer_list<Format> list) {
    return std::find(list.begin(), list.end(), f) != list.end();
  };
  if (!among(r.qk, {f32, f16, bf16, s8, e4m3, e4m3fnuz, e5m2, mxfp8, mxfp4, nvfp4})) {
    return refuse("no CPU path for Q and K in " + std::string(info(r.qk).name));
  }
  if (!among(r.v, {f32, f16, bf16, s8, e4m3, e4m3fnuz, e5m2, mxfp8, mxfp4, nvfp4})) {
    return refuse("no CPU path for V in " + std::string(info(r.v).name));
  }
  if (!among(r.p, {f32, f16, bf16, e4m3, u8, mxfp8, nvfp4})) {
    return refuse("no CPU path for P in " + std::string(info(r.p).name));
  }
  if ((r.p == u8) != (r.v == s8)) return refuse("u8 P goes with s8 V only, and s8 V with u8 P");
  if (!v_block_fits(r.v_scale)) {
    return refuse("v_scale block " + std::to_string(r.v_scale.block) +
                  " neither divides nor is a multiple of the key tile of 128");
  }
  if (r.v == s8 && value_block(problem, r) % 4 != 0) {
    return refuse("v_scale: belongs to pages of " + std::to_string(problem.page_size) +
                  " tokens, and four of s8 V are multiplied at once");
  }
  return {};
}

Rounding rounding_of(const Recipe& r, bool v_token_scale) {
  switch (r.p) {
    case Format::f16:
      return Rounding::f16;
    case Format::bf16:
      return Rounding::bf16;
    case Format::e4m3:
      return Rounding::e4m3;
    case Format::mxfp8:
      return Rounding::mxfp8;
    case Format::nvfp4:
      return Rounding::nvfp4;
    case Format::u8:
      return v_token_scale ? Rounding::u8_token : Rounding::u8;
    default:
      return Rounding::f32;
  }
}

/// Is every value exact in bf16? Of 8- and 4-bit floats, with an e4m3 group scale 6 bits, it is.
bool bf16_values(Format format) {
  using enum Format;
  return format != f32 && format != f16 && format != s8;
}

/// What multiplies values of `format` with values of `with`. On tiles four products of bf16 take
/// less time than one of float32; six, of f32 as sums of three, do not
/// (docs/experiments/floats-as-sums-of-bf16.md).
Engine float_engine(const KernelTable& words, Format format, Format with) {
  using enum Format;
  if (words.qk_bf16 != nullptr && bf16_values(format) && bf16_values(with)) return Engine::bf16;
  return words.split_bf16 != nullptr && format == f16 && with == f16 ? Engine::bf16x2 : Engine::f32;
}

const char* name_of(Engine e) {
  constexpr const char* names[] = {"f32", "bf16", "bf16x2", "integer"};
  return names[static_cast<int>(e)];
}

bool given_codes(const Problem& p, const Config& c) {
  return p.k_codes && p.v_codes && c.qk == Engine::integer && c.pv == Engine::integer;
}

/// Config::rows_in_place.
int rows_in_place(const Problem& p, const Config& c) {
  if (!given_codes(p, c) || c.words->most_rows_in_place == nullptr) return 0;
  if (p.paged && p.page_size % 16 != 0) return 0;
  if (c.v_channel_scale && c.v_block % 16 != 0) return 0;
  return c.words->most_rows_in_place(p.d, p.dv);
}

/// Config::float_rows_in_place.
int float_rows_in_place(const Problem& p, const Config& c) {
  const bool plain = is_float(c.recipe.qk) && is_float(c.recipe.v) && !c.smooth_k && !c.smooth_q &&
                     !c.smooth_v && !c.rotate && !c.balances() && !p.tensors.k_mean.present() &&
                     !p.tensors.v_mean.present();
  return plain && may_be_short(p) ? static_cast<int>(few_rows) : 0;
}

/// Config::heads_in_turn: where the heads of a token lie side by side, memory is read in long runs.
int heads_in_turn(const Problem& p) {
  const auto inside = [](const TokenTensor& x) { return std::abs(x.head) < std::abs(x.token); };
  const bool side_by_side = inside(p.k) && inside(p.v);
  if (!may_be_short(p) || !side_by_side) return 1;
  return static_cast<int>(std::min<std::int64_t>(p.heads_kv, most_heads_in_turn));
}

std::shared_ptr<PlanData> tune(const Problem& problem) {
  auto c = std::make_shared<Config>();
  c->words = select_words().words;
  c->recipe = resolve(problem, c->words);
  const Recipe& r = c->recipe;
  const bool native = c->words->qk_bf16 != nullptr;
  const bool token = free_scale(r.v) && scaled_by_token(r.v_scale, Role::v);
  c->qk = r.qk == Format::s8 ? Engine::integer : float_engine(*c->words, r.qk, r.qk);
  if (is_split(c->qk) && filled(problem.d) % 32 != 0) c->qk = Engine::f32;
  c->v_block = value_block(problem, r);
  const bool pairs = c->v_block % 2 == 0;  // of keys, which bf16 products take
  c->pv = r.v == Format::s8 ? Engine::integer
          : pairs && !token ? float_engine(*c->words, r.v, r.p)
                            : Engine::f32;
  c->v_token_scale = c->pv == Engine::integer && token;
  c->v_channel_scale = (free_scale(r.v) && !token) || r.v == Format::nvfp4;
  c->rounding = rounding_of(r, c->v_token_scale);
  c->smooth_k = r.smooth_k == Toggle::on;
  c->smooth_q = r.smooth_q == Toggle::on;
  c->smooth_v = r.smooth_v == Toggle::on;
  c->rotate = r.rotate == Toggle::on;
  c->finds_seen = detail::must_find_hidden_keys(problem, c->recipe);
  c->rows_in_place = rows_in_place(problem, *c);
  c->float_rows_in_place = float_rows_in_place(problem, *c);
  c->heads_in_turn = heads_in_turn(problem);
  c->projection = native && problem.out.format == Format::bf16 ? Engine::bf16 : Engine::f32;
  c->threads = most_threads(problem.threads);
  Arrays unused;
  c->workspace = layout(problem, *c, nullptr, unused);
  const bool split = may_be_short(problem) && problem.max_k > c->split_keys;
  c->text = std::string("isa: ") + c->words->isa + "\nengines: " + name_of(c->qk) + " " +
            name_of(c->pv) + "\ntile: " + std::to_string(tile_rows) + " rows x " +
            std::to_string(tile_keys) +
            " keys\nsplit_keys: " + std::to_string(split ? c->split_keys : 0) +
            "\nsplit_rows: " + std::to_string(split ? tile_rows : 0) +
            "\nhidden_keys: " + (c->finds_seen ? "are looked for" : "none") +
            "\nlost_mass: " + (c->pv == Engine::integer ? "a second byte" : "none") +
            "\nrising_rows: " + std::to_string(c->pv == Engine::integer ? tile_rows : 0) +
            "\nrows_in_place: " + std::to_string(c->rows_in_place) +
            "\nfloat_rows_in_place: " + std::to_string(c->float_rows_in_place) +
            "\nheads_in_turn: " + std::to_string(c->heads_in_turn) +
            "\nthreads: " + std::to_string(c->threads) + "\n";
  c->text += detail::text_of(automatic(problem, c->words), problem);
  if (problem.projects()) {
    c->text +=
        std::string("projection: ") + name_of(c->projection) + " products, after all heads\n";
  }
  return c;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr auto read_index = index_entry;

/// Fills the sequence table; returns the number of tasks.
std::int64_t plan_sequences(const Problem& p, const Config& c, SequenceInfo* table) {
  std::int64_t slot = 0, task = 0, partial = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    SequenceInfo& s = table[b];
    s = {};
    s.q_rows = p.max_q;
    if (p.varlen_q) {
      s.q_begin = read_index(p.tensors.cu_seqlens_q, b);
      s.q_rows = read_index(p.tensors.cu_seqlens_q, b + 1) - s.q_begin;
    }
    s.q_length = p.tensors.seqused_q.present() ? read_index(p.tensors.seqused_q, b) : s.q_rows;
    s.k_length = p.max_k;
    if (p.varlen_k) {
      s.k_begin = read_index(p.tensors.cu_seqlens_k, b);
      s.k_length = read_index(p.tensors.cu_seqlens_k, b + 1) - s.k_begin;
    }
    if (p.tensors.seqused_k.present()) s.k_length = read_index(p.tensors.seqused_k, b);
    s.slot = slot;
    slot += ceil_div(s.k_length, tile_keys) * tile_keys;
    s.first_task = task;
    s.first_partial = partial;
    if (p.group() * s.q_rows <= tile_rows && s.k_length > c.split_keys) {
      s.splits = ceil_div(s.k_length, c.split_keys);
      task += p.heads_kv * s.splits;
      partial += p.heads_kv * s.splits * p.group() * s.q_rows;
    } else if (p.group() * s.q_rows <= tile_rows) {
      task += s.q_rows > 0 ? p.heads_kv : 0;
    } else {
      task += tasks_of(p, s);
    }
  }
  return task;
}

/// Packs the tile whose first slot is `slot`, unless it belongs to nobody or its task packs it.
void prepare_tile(const Job& job, std::int64_t slot, std::int64_t head, Scratch& scratch) {
  const auto [b, key] = owner_of(job, slot);
  if (b < 0 || packs_itself(job.problem, job.arrays.sequences[b])) return;
  pack_tile(job, b, head, key, job.prepared_tile(b, head, key), scratch);
}

void find_seen_tile(const Job& job, std::int64_t slot, std::int64_t head) {
  const auto [b, key] = owner_of(job, slot);
  if (b >= 0) find_seen_keys(job, b, head, key);
}

bool packs_tiles(const Problem& p, const SequenceInfo& s) { return !packs_itself(p, s); }
bool is_split(const Problem&, const SequenceInfo& s) { return s.splits > 0; }

bool some_sequence(const Job& job, bool (*is)(const Problem&, const SequenceInfo&)) {
  const SequenceInfo* first = job.arrays.sequences;
  return std::any_of(first, first + job.problem.batch,
                     [&](const SequenceInfo& s) { return is(job.problem, s); });
}

/// Tasks that one thread takes at a time: heads to run in turn, as long as there are tasks enough.
std::int64_t chunk_of_tasks(const Job& job, std::int64_t tasks) {
  const Problem& p = job.problem;
  if (some_sequence(job, packs_tiles)) return 1;  // long ones are better spread
  const std::int64_t most = job.config.heads_in_turn;
  std::int64_t chunk = std::clamp<std::int64_t>(tasks / (4 * job.config.threads), 1, most);
  while (p.heads_kv % chunk != 0) --chunk;
  return chunk;
}

void run_tasks(const Job& job, std::int64_t begin, std::int64_t end, Scratch& scratch) {
  while (begin < end) {
    const int in_turn = tasks_in_turn(job, begin, end - begin);
    if (in_turn > 0) {
      run_in_turn(job, begin, in_turn, scratch);
    } else {
      run_task(job, begin, scratch);
    }
    begin += std::max(in_turn, 1);
  }
}

Status run(const PlanData& plan, const Problem& problem, void* workspace, Stream) {
  const auto& config = static_cast<const Config&>(plan);
  Job job{problem, config, {}};
  layout(problem, config, workspace, job.arrays);
  Arrays& a = job.arrays;
  const std::int64_t tasks = plan_sequences(problem, config, a.sequences);
  const std::int64_t kv_units = problem.batch * problem.heads_kv;
  const Problem& p = problem;
  for (int t = 0; t < config.threads; ++t) {
    for (std::int64_t& count : a.scratch[t].saturated) count = 0;
  }
  // How often each loop has something to do.
  const std::int64_t means = has_means(problem, config) ? kv_units : 0;
  const std::int64_t all_tiles = a.slots / tile_keys;
  const std::int64_t tiles = some_sequence(job, packs_tiles) ? all_tiles : 0;
  const std::int64_t merges = some_sequence(job, is_split) ? kv_units : 0;
  const std::int64_t chunk = chunk_of_tasks(job, tasks);
  const std::int64_t packs = weight_blocks(p);  // of which attention needs nothing
  // Where no loop has two turns a team would cost more than the call. Between one and all there is
  // nothing: OpenMP ends threads that a smaller team leaves out.
  const std::int64_t turns = std::max({means, kv_units, p.heads_kv * tiles, packs + tasks, merges,
                                       projection_blocks(p), std::int64_t{1}});
#pragma omp parallel num_threads(team(turns > 1 ? config.threads : 1))
  {
    Scratch& mine = a.scratch[omp_get_thread_num()];
    Phases phases;
    phases.each(config.finds_seen ? p.heads_kv * all_tiles : 0, [&](std::int64_t i) {
      find_seen_tile(job, i % all_tiles * tile_keys, i / all_tiles);
    });
    phases.each(config.finds_seen ? kv_units : 0, [&](std::int64_t i) {
      settle_seen_keys(job, i / p.heads_kv, i % p.heads_kv, mine);
    });
    phases.each(means,
                [&](std::int64_t i) { prepare_means(job, i / p.heads_kv, i % p.heads_kv, mine); });
    for (const Role role : {Role::q, Role::k, Role::v}) {
      const std::int64_t heads = role == Role::q ? p.heads_q : p.heads_kv;
      const std::int64_t units = p.batch * heads;
      phases.each(needs_head_pass(p, config, role) ? units : 0,
                  [&](std::int64_t i) { prepare_head(job, role, i / heads, i % heads, mine); });
      phases.each(needs_scale_pass(p, config, role) ? units : 0,
                  [&](std::int64_t i) { prepare_scales(job, role, i / heads, i % heads, mine); });
    }
    phases.each(p.heads_kv * tiles, [&](std::int64_t i) {  // heads of a token may lie side by side
      prepare_tile(job, i / p.heads_kv * tile_keys, i % p.heads_kv, mine);
    });
    phases.each(packs + (tasks + chunk - 1) / chunk, [&](std::int64_t i) {
      if (i < packs) return pack_weight(job, i, mine);
      const std::int64_t first = (i - packs) * chunk;
      run_tasks(job, first, std::min(first + chunk, tasks), mine);
    });
    phases.each(merges,
                [&](std::int64_t i) { merge_splits(job, i / p.heads_kv, i % p.heads_kv, mine); });
    phases.each(projection_blocks(p), [&](std::int64_t i) { project(job, i, mine); });
  }
  if (problem.tensors.saturated.present()) {
    auto* out = static_cast<std::int64_t*>(problem.tensors.saturated.data);
    for (int i = 0; i < 3; ++i) {
      std::int64_t total = 0;
      for (int t = 0; t < config.threads; ++t) total += a.scratch[t].saturated[i];
      out[i * problem.tensors.saturated.stride[0]] = total;
    }
  }
  return {};
}

Sequence sequence(const Job& job, const TokenTensor& x, std::int64_t begin, std::int64_t length,
                  std::int64_t b, std::int64_t head, int channels, bool paged) {
  const Problem& p = job.problem;
  Sequence s;
  s.format = x.format;
  s.bits = info(x.format).bits;
  s.token_stride = x.token;
  s.length = length;
  s.channels = channels;
  std::int64_t element = head * x.head + begin * x.token;
  if (paged) {
    const TensorView& table = p.tensors.page_table;
    s.wide_pages = table.format == Format::s64;
    s.pages = static_cast<const std::byte*>(table.data) +
              b * table.stride[0] * (info(table.format).bits / 8);
    s.page_table_stride = table.stride[1];
    s.page_size = p.page_size;
    s.page_stride = x.batch;
  } else {
    element += b * x.batch;
  }
  // An empty tensor may have no memory, and null takes no offset.
  if (x.data != nullptr) s.base = static_cast<const std::byte*>(x.data) + element * s.bits / 8;
  return s;
}

}  // namespace

Sequence Job::q_sequence(std::int64_t b, std::int64_t head) const {
  const SequenceInfo& s = arrays.sequences[b];
  return sequence(*this, problem.q, s.q_begin, s.q_length, b, head, problem.d, false);
}
Sequence Job::k_sequence(std::int64_t b, std::int64_t head) const {
  const SequenceInfo& s = arrays.sequences[b];
  Sequence x = sequence(*this, problem.k, s.k_begin, s.k_length, b, head, problem.d, problem.paged);
  x.seen = seen(b, head);
  return x;
}
Sequence Job::v_sequence(std::int64_t b, std::int64_t head) const {
  const SequenceInfo& s = arrays.sequences[b];
  Sequence x =
      sequence(*this, problem.v, s.k_begin, s.k_length, b, head, problem.dv, problem.paged);
  x.seen = seen(b, head);
  return x;
}

namespace {

/// A registry entry of one instruction set: `supports` differs, the rest is the same text.
template <const KernelTable* (*words)()>
Kernel kernel(const char* name) {
  return {name, [](const Problem& p) { return supports(p, words()); }, tune, run, true, true};
}

}  // namespace

std::array<Kernel, 7> attention_kernels() {
  return {kernel<words_amx>("attn.cpu.amx"),
          kernel<words_avx512bf16>("attn.cpu.avx512bf16"),
          kernel<words_avx512vnni>("attn.cpu.avx512vnni"),
          kernel<words_avx2>("attn.cpu.avx2"),
          kernel<words_neon_i8mm>("attn.cpu.neon_i8mm"),
          kernel<words_neon_dotprod>("attn.cpu.neon_dotprod"),
          kernel<words_scalar>("attn.cpu.scalar")};
}

}  // namespace qattn::cpu
