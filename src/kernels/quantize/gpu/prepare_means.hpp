// The means that operands lose before they are coded, and what Q's give to the scores.
#pragma once

#include <algorithm>

#include "kernels/quantize/gpu/prepare_call.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// Those that the plain path does not make.
inline LaunchError means(const Call& call, Launches& launches) {
  MeanParams params;
  std::int64_t finishing = 0, blocks = 0;
  for (int i = 0; i < 2; ++i) {
    const OperandSpec& f = call.facts[static_cast<std::size_t>(i + 1)];
    const PrepareLayout::Part& p = call.part(f.role);
    if (p.mean == PrepareLayout::none || call.reads_twice(f.role)) continue;
    MeanRole& m = params.role[i];
    m.rows = call.rows[i + 1];
    m.mean = at<float>(call.workspace, p.mean);
    m.padded = f.padded;
    m.tiles = p.slots / slot_tile;
    const std::int64_t units = std::int64_t{m.rows.batches} * m.rows.heads;
    finishing = std::max(finishing, FinishMeans::blocks(units, m.padded));
    const TensorView& given = given_mean(call.problem, f.role);
    if (given.present()) {
      m.given = static_cast<const float*>(given.data);
      std::copy_n(given.stride.begin(), 3, m.given_stride);
      continue;
    }
    m.seen = call.seen(f.role);
    m.input = input_kind(f.tensor.format);
    m.aligned = aligned_rows(f, m.rows);
    m.sums = at<float>(call.workspace, p.sums);
    params.blocks[i] = SumRows::blocks(m.tiles, f.heads, f.padded);
    blocks += params.blocks[i];
  }
  if (LaunchError e = launches.launch<SumRows>(params, blocks); !e.empty()) return e;
  return launches.launch<FinishMeans>(params, finishing, 2);
}

/// Of Q's blocks, for smooth_q.
inline LaunchError block_means(const Call& call, Launches& launches) {
  const OperandSpec& f = call.facts[0];
  BlockMeanParams params;
  params.role.rows = call.rows[0];
  params.role.padded = f.padded;
  params.role.input = input_kind(f.tensor.format);
  params.role.aligned = aligned_rows(f, call.rows[0]);
  params.out = call.query_means();
  if (params.out.data == nullptr) return {};
  return launches.launch<BlockMeans>(params, params.out.blocks * f.heads);
}

/// With `Keys` keys a block of threads.
template <int Keys>
LaunchError mean_scores(Format format, const MeanScoreParams& params, Launches& launches) {
  using isa::Element;
  const auto launch = [&](auto kernel) {
    using Kernel = decltype(kernel);
    return launches.launch<Kernel>(params, Kernel::Work::blocks(params));
  };
  const bool many = params.means.most > 16;
  if (format == Format::bf16) {
    return many ? launch(MeanProducts<Element::bf16, 64, Keys>{})
                : launch(MeanProducts<Element::bf16, 16, Keys>{});
  }
  if (format == Format::f16) {
    return many ? launch(MeanProducts<Element::f16, 64, Keys>{})
                : launch(MeanProducts<Element::f16, 16, Keys>{});
  }
  return launch(MeanScores<Keys>{});
}

/// Their products with K.
inline LaunchError mean_scores(const Call& call, Launches& launches) {
  const OperandSpec& q = call.facts[0];
  const OperandSpec& k = call.facts[1];
  MeanScoreParams params;
  params.means = call.query_means();
  if (params.means.data == nullptr) return {};
  params.q = call.rows[0];
  params.k = call.rows[1];
  params.aligned = aligned_rows(k, call.rows[1]);
  params.k_mean = call.mean(Role::k);
  if (is_micro(q.format)) {
    params.micro = micro_of(q.format);
    params.k_flags = call.prepared_rows(Role::k).flags;
    params.q_grouping = grouping_of(call, q);
    params.k_grouping = grouping_of(call, k);
  } else {
    params.scale = call.problem.softmax_scale;
  }
  const bool packed = params.k.cu_seqlens != nullptr;
  return packed ? mean_scores<slot_tile>(k.tensor.format, params, launches)
                : mean_scores<2 * slot_tile>(k.tensor.format, params, launches);
}

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
