#include "kernels/kv_append/kv_device.hpp"

#include <algorithm>

#include "isa/launch.hpp"
#include "kernels/decode/mixed_kv/host.hpp"
#include "kernels/kv_append/fork.cuh"
#include "kernels/kv_append/key_mean.cuh"
#include "kernels/kv_append/observe.cuh"
#include "kernels/kv_append/plan.cuh"
#include "kernels/kv_append/reset.cuh"
#include "kernels/kv_append/take.cuh"
#include "kernels/kv_append/write.cuh"
#include "kernels/kv_append/write_channels.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using isa::LaunchError;

NewRows new_rows(const kv::DeviceRows& from) {
  NewRows r;
  r.data = from.data;
  r.kind = input_kind(from.format);
  r.batch = from.batch;
  r.token = from.token;
  r.head = from.head;
  return r;
}

AppendParams append_params(const kv::AppendState& state, const kv::AppendCall& call) {
  AppendParams p;
  p.state = state;
  p.k = new_rows(call.k);
  p.v = new_rows(call.v);
  p.slots = call.slots;
  p.counts = call.counts;
  p.importance = call.importance;
  p.blocks = call.blocks;
  p.batch = call.batch;
  p.tokens = call.tokens;
  p.layer = call.layer;
  return p;
}

LaunchError write_pages(const AppendParams& p, Stream stream) {
  const kv::DeviceCache& cache = p.state.cache;
  // Pages that the new tokens lie in, one that leaves the window and one that is demoted; where
  // there are more, blocks take several.
  constexpr std::int64_t most_blocks = 4096;
  const std::int64_t pages = p.tokens / cache.page_size + 3;
  const std::int64_t blocks = std::min(pages * 2 * cache.blocks_per_page(), most_blocks);
  const isa::Index3 grid{static_cast<int>(blocks), cache.heads_kv, p.batch};
  const int channels = std::max(cache.d, cache.dv);
  if (channels <= 64) return isa::launch<WritePages<4>>(p, grid, stream, isa::Start::early);
  if (channels <= 128) return isa::launch<WritePages<8>>(p, grid, stream, isa::Start::early);
  return isa::launch<WritePages<16>>(p, grid, stream, isa::Start::early);
}

template <int Tokens>
LaunchError write_channels(const AppendParams& p, Stream stream) {
  const kv::DeviceCache& cache = p.state.cache;
  const isa::Index3 grid{std::min(p.tokens / cache.page_size + 3, 2048), cache.heads_kv, p.batch};
  constexpr isa::Start early = isa::Start::early;
  if (cache.d <= 64) return isa::launch<WriteChannels<4, Tokens>>(p, grid, stream, early);
  if (cache.d <= 128) return isa::launch<WriteChannels<8, Tokens>>(p, grid, stream, early);
  return isa::launch<WriteChannels<16, Tokens>>(p, grid, stream, early);
}

LaunchError carry_out(const AppendParams& p, Stream stream) {
  const kv::AppendState& state = p.state;
  if (LaunchError e = isa::launch<PlanAppend>(p, {p.batch, 1, 1}, stream); !e.empty()) return e;
  LaunchError e = isa::launch<TakePages>(p, {1, 1, 1}, stream, isa::Start::early);
  if (!e.empty()) return e;
  if (state.cache.freezes() && !p.shortens()) {
    e = isa::launch<FreezeMean>(p, {state.cache.heads_kv, p.batch, 1}, stream, isa::Start::early);
    if (!e.empty()) return e;
  }
  if (e = write_pages(p, stream); !e.empty() || state.cache.k_by_channel == 0) return e;
  // Most pages have 16 tokens; larger ones want up to 80 KiB of shared memory.
  return state.cache.page_size == 16 ? write_channels<16>(p, stream)
                                     : write_channels<64>(p, stream);
}

LaunchError append(const kv::AppendState& state, const kv::AppendCall& call, Stream stream) {
  return carry_out(append_params(state, call), stream);
}

/// Demotes pages of a slot that is shorter now as far as the budget asks.
LaunchError shorten(const kv::AppendState& state, std::int32_t slot, Stream stream) {
  AppendParams p;
  p.state = state;
  p.slot = slot;
  p.batch = 1;
  for (p.layer = 0; p.layer < state.cache.layers; ++p.layer) {
    if (LaunchError e = carry_out(p, stream); !e.empty()) return e;
  }
  return {};
}

LaunchError observe(const kv::AppendState& state, const kv::ObserveCall& call, Stream stream) {
  ObserveParams p;
  p.state = state;
  p.mass = call.mass;
  p.blocks = call.blocks;
  p.slots = call.slots;
  p.batch = call.batch;
  p.heads_q = call.heads_q;
  p.layer = call.layer;
  return isa::launch<ObserveMass>(p, {p.batch, 1, 1}, stream);
}

LaunchError set_importance(const kv::AppendState& state, const kv::ImportanceCall& call,
                           Stream stream) {
  ImportanceParams p;
  p.state = state;
  p.values = call.values;
  p.blocks = call.blocks;
  p.slot = call.slot;
  p.layer = call.layer;
  return isa::launch<SetImportance>(p, {1, 1, 1}, stream);
}

LaunchError init(const kv::AppendState& state, Stream stream) {
  ResetParams p;
  p.state = state;
  return isa::launch<InitCache>(p, {2 * isa::multiprocessors(), 1, 1}, stream);
}

LaunchError forget(const kv::AppendState& state, const kv::ForgetCall& call, Stream stream) {
  ResetParams p;
  p.state = state;
  p.slot = call.slot;
  p.first_layer = call.first_layer;
  p.end_layer = call.end_layer;
  p.first_head = call.first_head;
  p.end_head = call.end_head;
  p.begin = call.begin;
  p.end = call.end;
  p.truncates = call.truncates ? 1 : 0;
  p.resets = call.resets ? 1 : 0;
  p.error = call.error;
  LaunchError e = isa::launch<ForgetTokens>(p, {1, 1, 1}, stream);
  const bool shortens = call.truncates && !call.resets && state.has_budget != 0;
  return e.empty() && shortens ? shorten(state, call.slot, stream) : e;
}

LaunchError fork(const kv::AppendState& state, const kv::ForkCall& call, Stream stream) {
  ForkParams p;
  p.state = state;
  p.from = call.from;
  p.to = call.to;
  const std::int64_t tables = std::int64_t{state.cache.layers} * state.cache.heads_kv;
  const std::int64_t most_blocks = 8 * isa::multiprocessors();
  return isa::launch<ForkTables>(p, {static_cast<int>(std::min(tables, most_blocks)), 1, 1},
                                 stream);
}

}  // namespace

const kv::DeviceOps& kv_device_ops() {
  static const kv::DeviceOps ops{isa::error_word, init, forget,   append,          observe,
                                 set_importance,  fork, supports, workspace_bytes, run};
  return ops;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
