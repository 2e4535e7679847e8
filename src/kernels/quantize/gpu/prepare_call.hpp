// A call as prepare() launches its kernels: where its operands and results lie, and the chain of
// launches.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "kernels/quantize/gpu/encoders.hpp"
#include "kernels/quantize/gpu/prepare_facts.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

using isa::LaunchError;

template <class T>
T* at(void* workspace, std::size_t offset) {
  if (offset == PrepareLayout::none) return nullptr;
  return reinterpret_cast<T*>(static_cast<std::uint8_t*>(workspace) + offset);
}

/// The launches of a pass, a chain (isa/launch.hpp).
class Launches {
 public:
  explicit Launches(void* stream) : stream_(stream) {}

  /// A grid of one dimension; kernels take more blocks than it has from nobody.
  template <class K>
  LaunchError launch(const typename K::Params& params, std::int64_t blocks, int rows = 1) {
    return go(blocks, [&](isa::Start start) {
      return isa::launch<K>(params, {static_cast<int>(blocks), rows, 1}, stream_, start);
    });
  }

  /// The kernel for rows of so many channels with their padding.
  template <Encoder E, class Params>
  LaunchError launch_encoder(const Params& params, int padded, std::int64_t blocks) {
    return go(blocks, [&](isa::Start start) -> LaunchError {
#define QATTN_INSTANCE(PADDED, KIND)                                        \
  if constexpr (E == Encoder::KIND) {                                       \
    if (padded == PADDED) return encoder<E, PADDED>(params, blocks, start); \
  }
#include "kernels/quantize/gpu/encoders.inc"
#undef QATTN_INSTANCE
      return "prepare: this build has no encoder of " + std::to_string(padded) + " channels";
    });
  }

  /// When the next kernel may start.
  isa::Start next() const { return any_ ? isa::Start::early : isa::Start::after_all; }

 private:
  template <Encoder E, int kPadded, class Params>
  LaunchError encoder(const Params& params, std::int64_t blocks, isa::Start start) const {
    return kernels::launch_encoder<E, kPadded>(params, {static_cast<int>(blocks), 1, 1}, stream_,
                                               start);
  }
  template <class Launch>
  LaunchError go(std::int64_t blocks, Launch launch) {
    if (blocks == 0) return {};
    if (blocks > 0x7fffffff) return "prepare: " + std::to_string(blocks) + " tiles are over 2^31";
    const isa::Start start = next();
    any_ = true;
    return launch(start);
  }

  void* stream_;
  bool any_ = false;
};

/// The call as its launches see it.
struct Call {
  const Problem& problem;
  const Recipe& recipe;
  const PrepareLayout& layout;
  void* workspace;
  std::array<OperandSpec, 3> facts;
  tile::Rows rows[3];

  const PrepareLayout::Part& part(Role role) const { return layout.part[static_cast<int>(role)]; }
  /// Does the variant without detours make the operand's codes?
  bool plain(Role role) const {
    const auto i = static_cast<std::size_t>(role);
    if (mixes_floats()) return false;  // a launch of it reads one format
    if (role != Role::q && layout.seen != PrepareLayout::none) return false;  // it knows no masks
    return facts[i].wanted && is_plain(recipe, facts[i], rows[i]);
  }
  bool mixes_floats() const {
    const Format q = facts[0].tensor.format, k = facts[1].tensor.format;
    return q != k && !facts[0].codes && !facts[1].codes;
  }
  /// Is its first pass that variant's, too?
  bool reads_twice(Role role) const {
    return plain(role) && two_passes(problem, recipe, facts[static_cast<std::size_t>(role)]);
  }
  /// Are the factors that balance K found beside its first pass? Only the plain kernels read them
  /// behind that.
  bool balances_late() const {
    return layout.factors != PrepareLayout::none && reads_twice(Role::k) &&
           (plain(Role::q) || !facts[0].wanted);
  }
  /// Where FindSeen puts what it finds.
  SeenKeys seen() const {
    return {at<std::uint32_t>(workspace, layout.seen),
            at<std::uint32_t>(workspace, layout.seen_counts), part(Role::k).slots / slot_tile,
            layout.seen_heads, static_cast<std::int32_t>(problem.batch)};
  }
  /// The same, for operands that it matters to.
  SeenKeys seen(Role role) const {
    return role == Role::q || facts[static_cast<std::size_t>(role)].codes ? SeenKeys{} : seen();
  }
  SlightKeys slight() const {
    return {at<std::uint32_t>(workspace, layout.slight),
            at<std::uint32_t>(workspace, layout.slight_counts)};
  }
  /// The counter of codes that a given scale clips; null: nobody asked.
  std::uint64_t* saturated(const OperandSpec& f) const {
    const TensorView& s = problem.tensors.saturated;
    if (!s.present() || f.codes) return nullptr;
    return static_cast<std::uint64_t*>(s.data) + static_cast<int>(f.role) * s.stride[0];
  }
  const float* mean(Role role) const { return at<const float>(workspace, part(role).mean); }

  PreparedRows prepared_rows(Role role) const {
    const PrepareLayout::Part& p = part(role);
    const OperandSpec& f = facts[static_cast<std::size_t>(role)];
    return {at<std::uint8_t>(workspace, p.codes),
            at<float>(workspace, p.scale),
            at<std::uint32_t>(workspace, p.flags),
            at<float>(workspace, p.dot_mean),
            p.slots,
            row_bytes(f),
            at<std::uint8_t>(workspace, p.group_scale),
            group_bytes(f)};
  }
  PreparedTiles prepared_tiles() const {
    const PrepareLayout::Part& p = part(Role::v);
    return {at<std::uint8_t>(workspace, p.codes),
            at<float>(workspace, layout.channel_scale),
            layout.channel_groups,
            layout.channel_block,
            layout.packed_groups,
            p.slots,
            facts[2].padded,
            code_bits(facts[2].format),
            info(facts[2].format).group};
  }
  PreparedMeans query_means() const {
    const PrepareLayout::Part& p = part(Role::q);
    return {p.mean_blocks > 0 ? at<float>(workspace, p.mean) : nullptr,
            p.mean_blocks,
            recipe.q_scale.block,
            facts[0].padded,
            at<float>(workspace, p.mean_scores),
            layout.most_means,
            part(Role::k).slots};
  }
  std::int64_t blocks(Role role) const {
    return part(role).slots / slot_tile * facts[static_cast<std::size_t>(role)].heads;
  }
};

inline Grouping grouping_of(const Call& call, const OperandSpec& f) {
  const tile::Rows& r = call.rows[static_cast<int>(f.role)];
  Grouping g;
  g.role = f.role;
  g.granularity = f.scaling.granularity;
  g.block = f.scaling.block;
  g.warp = f.scaling.warp;
  g.maxima = at<std::uint32_t>(call.workspace, call.part(f.role).maxima);
  maxima_words(f, r, g.groups);
  g.block_groups = block_groups(f);
  g.sequence_groups = scale_count(f.scaling, f.role, r.max_length);
  if (f.scale.present()) {
    g.given = static_cast<const float*>(f.scale.data);
    std::copy_n(f.scale.stride.begin(), 4, g.given_stride);
    // Without a dimension of groups there is group 0; of channels, which may stand there, as well.
    g.given_groups = f.scale.rank > 2 ? f.scale.shape[2] : 1;
  }
  return g;
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
