#include "kernels/quantize/overlap/overlap.cuh"

#include <algorithm>

#include "kernels/operand/map_rows.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {
namespace {

/// Maps of what the kernel reads. Empty, or why TMA cannot.
std::string map_inputs(const Problem& p, OverlapParams& params) {
  for (const Role role : {Role::q, Role::k, Role::v}) {
    isa::TensorMap& map = params.raw[static_cast<int>(role)];
    if (std::string e = map_rows(rows_of(p, role), 64, slot_tile, map); !e.empty()) return e;
  }
  return {};
}

template <isa::Element Input>
isa::LaunchError launch(const OverlapParams& p, int channels, int blocks, void* stream) {
  const isa::Index3 grid{blocks, 1, 1};
  return channels > 64
             ? isa::launch<EncodeOverlapped<Input, 128>>(p, grid, stream, isa::Start::early)
             : isa::launch<EncodeOverlapped<Input, 64>>(p, grid, stream, isa::Start::early);
}

}  // namespace

bool overlaps_quantisation(const Problem& p, const Recipe& r, const PrepareLayout& layout) {
  if (p.batch == 0 || p.max_q == 0 || p.max_k == 0 || p.heads_q == 0) return false;
  const int channels = prepared_channels(p.d);
  if ((channels != 64 && channels != 128) || prepared_channels(p.dv) != channels) return false;
  if (r.qk != Format::s8 || r.v != Format::s8 || layout.needs.dot_mean) return false;
  if (p.tensors.k_mean.present()) return false;  // there K's own mean is found
  PlainParams plain;
  OverlapParams params;
  if (!plan_plain(p, r, layout, nullptr, plain)) return false;
  const SharedScales q = plain.row[0].shared, k = plain.row[1].shared;
  if (q != SharedScales::none || (k != SharedScales::none && k != SharedScales::thread)) {
    return false;
  }
  return p.q.data == nullptr || map_inputs(p, params).empty();  // no address yet: while planning
}

std::int64_t overlap_words(const Problem& p) {
  return OverlapParams::first_word + p.batch * p.heads_kv * AwaitedCodes::words_of_unit;
}

isa::LaunchError encode_overlapped(const Problem& p, const Recipe& recipe,
                                   const PrepareLayout& layout, void* workspace,
                                   std::uint32_t* progress, int blocks, void* stream,
                                   AwaitedCodes& awaited) {
  OverlapParams b;
  plan_plain(p, recipe, layout, workspace, b.plain);
  if (std::string e = map_inputs(p, b); !e.empty()) return e;
  const auto tiles = [](std::int64_t tokens) {
    return static_cast<std::int32_t>((tokens + slot_tile - 1) / slot_tile);
  };
  constexpr int finishing = 5;        // units, while a mean is added up
  const int in_flight = 32 * blocks;  // jobs at work, and as many that were taken
  b.k_mean = const_cast<float*>(b.plain.row[1].mean);
  b.units = static_cast<std::int32_t>(p.batch * p.heads_kv);
  b.group = static_cast<std::int32_t>(p.group());
  b.k_tiles = tiles(p.max_k), b.q_tiles = tiles(p.max_q);
  b.sums = b.k_mean != nullptr ? b.k_tiles : 0;
  b.codes = 2 * b.k_tiles + b.group * b.q_tiles;
  b.ahead = std::min(b.units, (in_flight + b.codes - 1) / b.codes + finishing);
  b.progress = progress;
  awaited = {progress + 1, progress + OverlapParams::first_word + OverlapParams::codes_there,
             static_cast<std::uint32_t>(b.codes)};
  const std::int64_t words = overlap_words(p);
  auto e = begin(p, recipe, layout, workspace, progress, words, stream);
  if (!e.empty()) return e;
  return b.plain.input == isa::Element::bf16
             ? launch<isa::Element::bf16>(b, prepared_channels(p.d), blocks, stream)
             : launch<isa::Element::f16>(b, prepared_channels(p.d), blocks, stream);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
