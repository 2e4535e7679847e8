#include "kernels/decode/mixed_kv/host.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "kernels/decode/options.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

using kv::most_queries;

using Launcher = isa::LaunchError (*)(const DecodeParams&, void*);
struct Instance {
  DecodeConfig config;
  Launcher launch;
  int shared_bytes, min_blocks;
};
template <DecodeConfig C>
constexpr Instance instance() {
  return {C, &launch_decode<C>, DecodeShape<C>::shared_bytes, DecodeShape<C>::min_blocks};
}
constexpr Instance instances[] = {
#define QATTN_INSTANCE(D, DV, N, BY_CHANNEL, SMALL) \
  instance<DecodeConfig{D, DV, N, BY_CHANNEL, SMALL}>(),
#include "kernels/decode/mixed_kv/instances.inc"
#undef QATTN_INSTANCE
};

bool serves(const Instance& i, const kv::DeviceCache& cache) {
  return i.config.d == cache.d && i.config.dv == cache.dv &&
         i.config.by_channel == (cache.k_by_channel != 0);
}

isa::Gpu gpu_of(const DeviceDecodeCall& call) { return isa::gpu(call.tensors.q.device.index); }

/// The instance for that many query rows, of those that the GPU has shared memory for: with more
/// than 8, one that reads K and V for 16 at once, if there is one; and no small one beside a large.
const Instance* find(const DeviceDecodeCall& call, std::int64_t rows) {
  const int limit = gpu_of(call).shared_bytes;
  const auto rank = [&](const DecodeConfig& c) { return 2 * (rows > 8 ? c.n : -c.n) - c.small; };
  const Instance* found = nullptr;
  for (const Instance& i : instances) {
    if (!serves(i, *call.cache) || i.shared_bytes > limit) continue;
    if (found == nullptr || rank(i.config) > rank(found->config)) found = &i;
  }
  return found;
}

std::string text(std::int64_t value) { return std::to_string(value); }
Status invalid(std::string message) { return Status(Code::invalid_argument, std::move(message)); }
Status refuse(std::string message) { return Status(Code::unsupported, std::move(message)); }

bool is_float(Format f) { return f == Format::f32 || f == Format::f16 || f == Format::bf16; }

/// Shape (-1: any extent), format and address. `dense`: row-major without gaps.
Status check(const char* name, const TensorView& t, bool good_format, const char* formats,
             std::initializer_list<std::int64_t> extents, bool dense) {
  const std::string who = std::string(name) + ": ";
  if (!good_format) return invalid(who + "format should be " + formats);
  if (t.rank != static_cast<std::int32_t>(extents.size())) {
    return invalid(who + "rank " + text(t.rank) + " should be " +
                   text(static_cast<std::int64_t>(extents.size())));
  }
  std::size_t i = 0;
  std::int64_t count = 1;
  for (const std::int64_t wanted : extents) {
    if (t.shape[i] < 0 || (wanted >= 0 && t.shape[i] != wanted)) {
      return invalid(who + "extent " + text(t.shape[i]) + " of dimension " +
                     text(static_cast<std::int64_t>(i)) + " should be " + text(wanted));
    }
    count *= t.shape[i++];
  }
  std::int64_t step = 1;
  for (i = extents.size(); dense && i-- > 0;) {
    if (t.shape[i] > 1 && t.stride[i] != step) {
      return invalid(who + "stride " + text(t.stride[i]) + " of dimension " +
                     text(static_cast<std::int64_t>(i)) + " should be " + text(step));
    }
    step *= t.shape[i];
  }
  if (count > 0 && t.data == nullptr) return invalid(who + "has no memory");
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  const std::uintptr_t size = t.format == Format::b8    ? 1
                              : t.format == Format::f32 ? 4
                              : t.format == Format::s32 ? 4
                                                        : 2;
  return address % size == 0 ? Status()
                             : invalid(who + "address is no multiple of " +
                                       text(static_cast<std::int64_t>(size)) + " bytes");
}

Status check_queries(const DeviceDecodeCall& call) {
  const kv::DeviceCache& c = *call.cache;
  const KvDecodeTensors& t = call.tensors;
  const bool bshd = call.options.layout == Layout::bshd;
  const std::int64_t batch = call.slots.shape[0];
  if (Status s =
          check("q", t.q, is_float(t.q.format), "f32, f16 or bf16", {batch, -1, -1, c.d}, false);
      !s.ok()) {
    return s;
  }
  const std::int64_t queries = t.q.shape[bshd ? 1 : 2], heads = t.q.shape[bshd ? 2 : 1];
  if (queries < 1 || queries > most_queries) {
    return invalid("q: " + text(queries) + " queries of a sequence, should be 1 to " +
                   text(most_queries));
  }
  if (heads < 1 || heads % c.heads_kv != 0) {
    return invalid("q: " + text(heads) + " heads should be a multiple of heads_kv " +
                   text(c.heads_kv));
  }
  if (Status s = check("out", t.out, is_float(t.out.format), "f32, f16 or bf16",
                       {batch, t.q.shape[1], t.q.shape[2], c.dv}, false);
      !s.ok()) {
    return s;
  }
  if (t.q.stride[3] != 1) return invalid("q: stride of the last dimension should be 1");
  if (t.out.stride[3] != 1) return invalid("out: stride of the last dimension should be 1");
  return {};
}

Status check_optional(const DeviceDecodeCall& call) {
  const KvDecodeTensors& t = call.tensors;
  const bool bshd = call.options.layout == Layout::bshd;
  const std::int64_t batch = call.slots.shape[0];
  const std::int64_t queries = t.q.shape[bshd ? 1 : 2], heads = t.q.shape[bshd ? 2 : 1];
  const auto floats = [](const TensorView& v) { return v.format == Format::f32; };
  if (t.lse.present()) {
    const Status s = check("lse", t.lse, floats(t.lse), "f32", {batch, heads, queries}, true);
    if (!s.ok()) return s;
  }
  if (t.sinks.present()) {
    const Status s = check("sinks", t.sinks, floats(t.sinks), "f32", {heads}, true);
    if (!s.ok()) return s;
  }
  if (t.tree_mask.present()) {
    const Status s = check("tree_mask", t.tree_mask, t.tree_mask.format == Format::b8, "b8",
                           {batch, queries, queries}, false);
    if (!s.ok()) return s;
  }
  if (t.mass.present())
    return check("mass", t.mass, floats(t.mass), "f32", {batch, heads, -1}, true);
  return {};
}

Status check_numbers(const DeviceDecodeCall& call) {
  if (call.layer < 0 || call.layer >= call.cache->layers) {
    return invalid("layer: " + text(call.layer) + " should be 0 to " +
                   text(call.cache->layers - 1));
  }
  return kv::check_decode_options(call.options);
}

/// Blocks of Decode for that many units, where `most` fit: a few less if then every unit has as
/// many or every block does. A block with parts of two units begins and merges twice: 5 us of an
/// H200.
std::int32_t block_count(std::int64_t units, std::int64_t most) {
  std::int64_t even = most;
  if (units > 0 && units <= most) even = most / units * units;
  if (units > most) {
    const std::int64_t each = (units + most - 1) / most;
    even = (units + each - 1) / each;
  }
  return static_cast<std::int32_t>(16 * even >= 15 * most ? even : most);
}

DecodeParams params_of(const DeviceDecodeCall& call) {
  const KvDecodeTensors& t = call.tensors;
  const KvDecodeOptions& o = call.options;
  const bool bshd = o.layout == Layout::bshd;
  const int query = bshd ? 1 : 2, head = bshd ? 2 : 1;
  DecodeParams p;
  p.cache = *call.cache;
  p.slots = static_cast<const std::int32_t*>(call.slots.data);
  p.layer = static_cast<std::int32_t>(call.layer);
  p.batch = static_cast<std::int32_t>(call.slots.shape[0]);
  p.queries = static_cast<std::int32_t>(t.q.shape[static_cast<std::size_t>(query)]);
  p.heads_q = static_cast<std::int32_t>(t.q.shape[static_cast<std::size_t>(head)]);
  p.group = p.heads_q / p.cache.heads_kv;
  const Instance& i = *find(call, p.rows());
  p.unit_rows = 8 * i.config.n;
  p.chunks = (p.rows() + p.unit_rows - 1) / p.unit_rows;
  const auto rows = [&](const TensorView& v) {
    return DecodeRows{v.data, v.format, v.stride[0], v.stride[static_cast<std::size_t>(query)],
                      v.stride[static_cast<std::size_t>(head)]};
  };
  p.q = rows(t.q);
  p.out = rows(t.out);
  p.lse = static_cast<float*>(t.lse.data);
  p.sinks = static_cast<const float*>(t.sinks.data);
  p.tree = static_cast<const std::uint8_t*>(t.tree_mask.data);
  for (std::size_t d = 0; d < 3; ++d) p.tree_stride[d] = t.tree_mask.stride[d];
  p.mass = static_cast<float*>(t.mass.data);
  p.mass_blocks = t.mass.present() ? t.mass.shape[2] : 0;
  p.softmax_scale = o.softmax_scale.value_or(1.0f / std::sqrt(static_cast<float>(p.cache.d)));
  p.softcap = o.softcap;
  p.causal = o.causal ? 1 : 0;
  p.debias = o.debias ? 1 : 0;
  // A window longer than any sequence is none.
  p.window_left = o.window_left > 0x3fffffff ? -1 : static_cast<std::int32_t>(o.window_left);
  const int fit = (gpu_of(call).shared_bytes + 1024) / (i.shared_bytes + 1024);
  p.blocks =
      block_count(p.units(), isa::multiprocessors() * std::max(1, std::min(fit, i.min_blocks)));
  p.share = share_of(p.blocks);
  p.mass_chunk = p.list_blocks();
  return p;
}

/// Why there is no instance for a call.
Status refuse_dimensions(const DeviceDecodeCall& call) {
  const kv::DeviceCache& c = *call.cache;
  const Instance* least = nullptr;
  std::string known;
  for (const Instance& i : instances) {
    if (serves(i, c) && (least == nullptr || i.shared_bytes < least->shared_bytes)) least = &i;
    const bool other = i.config.n != 1 || i.config.small;
    if (other || i.config.by_channel != (c.k_by_channel != 0)) continue;
    known.append(known.empty() ? "" : " ").append(text(i.config.d));
    known.append("/").append(text(i.config.dv));
  }
  if (least == nullptr) {
    return refuse("no GPU kernel for K of head dimension " + text(c.d) + " and V of " + text(c.dv) +
                  "; there are " + known);
  }
  return refuse("head dimension " + text(c.d) +
                (c.k_by_channel != 0 ? ", K with a scale a channel," : "") + " needs " +
                text(least->shared_bytes) + " bytes of shared memory a block; " +
                gpu_of(call).name() + " has " + text(gpu_of(call).shared_bytes));
}

}  // namespace

Status supports(const DeviceDecodeCall& call) {
  const kv::DeviceCache& c = *call.cache;
  const isa::Gpu gpu = gpu_of(call);
  if (!gpu.runs_sm(80)) return refuse("needs sm_80 or newer, not " + gpu.name());
  const TensorView& slots = call.slots;
  if (Status s = check("slots", slots, slots.format == Format::s32, "s32", {-1}, true); !s.ok()) {
    return s;
  }
  if (Status s = check_numbers(call); !s.ok()) return s;
  if (Status s = check_queries(call); !s.ok()) return s;
  if (Status s = check_optional(call); !s.ok()) return s;
  if (call.options.debias && c.k_by_channel != 0) {
    // It would be a sum over channels, of a page and a row.
    return refuse("debias: should be off on a GPU where K has a scale a channel");
  }
  if (find(call, 1) == nullptr) return refuse_dimensions(call);
  if (c.pools < 1 || c.pools > kv::most_tiers) {
    return refuse("pools: " + text(c.pools) + " should be 1 to " + text(kv::most_tiers));
  }
  if (c.most_pages >= 1 << 28) {
    return refuse("page table: room for " + text(c.most_pages) +
                  " pages a sequence, should be below 2^28");
  }
  const DecodeParams p = params_of(call);
  constexpr std::int64_t most = 0x7fffffff;
  if (p.combine_blocks() > most || p.units() + p.pairs() * p.parts() > most ||
      std::int64_t{p.batch} * p.heads_q > most || p.units() * p.parts() > most) {
    return refuse("q: " + text(p.batch) + " sequences x " + text(p.heads_q) + " heads x " +
                  text(p.queries) + " queries over " + text(c.most_pages) +
                  " pages make more than 2^31 blocks of kernels");
  }
  return {};
}

std::size_t workspace_bytes(const DeviceDecodeCall& call) {
  return decode_workspace(params_of(call)).bytes;
}

DecodeParams params_in(const DeviceDecodeCall& call, void* workspace) {
  DecodeParams p = params_of(call);
  const DecodeWorkspace w = decode_workspace(p);
  const auto set = [&](auto*& pointer, std::size_t offset) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(
        static_cast<std::byte*>(workspace) + offset);
  };
  set(p.query_words, w.query_words);
  set(p.query_facts, w.query_facts);
  set(p.query_scale, w.query_scale);
  set(p.lists, w.lists);
  set(p.part_counts, w.part_counts);
  set(p.part_costs, w.part_costs);
  set(p.shares, w.shares);
  set(p.first_block, w.first_block);
  set(p.last_block, w.last_block);
  set(p.partial_out, w.partial_out);
  set(p.partial_sum, w.partial_sum);
  set(p.list_places, w.list_places);
  set(p.mass_log, w.mass_log);
  p.error = isa::error_word();
  return p;
}

Status run(const DeviceDecodeCall& call, void* workspace, void* stream) {
  if (Status s = supports(call); !s.ok()) return s;
  if (call.slots.shape[0] == 0) return {};
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0 || workspace == nullptr) {
    return invalid("workspace: address is no multiple of 256 bytes");
  }
  const DecodeParams p = params_in(call, workspace);
  const isa::LaunchError e = find(call, p.rows())->launch(p, stream);
  return e.empty() ? Status() : Status(Code::internal, "decode kernels: " + e);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
