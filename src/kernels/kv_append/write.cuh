// Carries out an append: every page that its plan makes, one block of 16 tokens of K or of V at a
// time, and the page's entry in its table. What the page was before is read from the pool (its
// place is in the job, for the entry may be new by then), new tokens from the call's tensors. K's
// codes under a scale a channel are those of all tokens of a page: write_channels.cuh makes them.
#pragma once

#include "kernels/kv_append/params.hpp"
#include "kernels/kv_append/row.cuh"
#include "kvcache/keys/balance.hpp"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// K or V of one block of 16 tokens in one pool.
struct BlockPart {
  std::uint8_t* page;
  std::uint8_t* codes;    ///< or rows of 16 bits
  std::uint16_t* scales;  ///< of its tokens or, where by_channel, of its page's channels
  int channels, bits;
  bool value, by_channel;

  QATTN_DEVICE BlockPart(const kv::DevicePool& pool, std::int32_t number, int i, bool is_value)
      : page(pool.page(number)), value(is_value) {
    const formats::KvPage& layout = pool.layout;
    const formats::KvBlock& b = layout.block;
    by_channel = !value && layout.k_by_channel;
    channels = value ? b.dv : b.d;
    bits = value ? b.v_bits : b.k_bits;
    std::uint8_t* block = page + i * layout.block_bytes();
    codes = block + (value ? b.v_codes() : b.k_codes());
    scales = reinterpret_cast<std::uint16_t*>(by_channel ? page + layout.channel_scales()
                                              : value    ? block + layout.v_scales()
                                                         : block + b.k_scales());
  }

  QATTN_DEVICE int count() const { return formats::kv_block_tokens * channels; }
  QATTN_DEVICE int place(int token, int c) const {
    return value ? formats::kv_place_v(channels, token, c) : formats::kv_place_k(token, c);
  }
  QATTN_DEVICE std::uint16_t* row(int token) const {
    return reinterpret_cast<std::uint16_t*>(codes) + token * channels;
  }
};

/// The pages that an append makes of the (slot, head) of a block of the grid: none where the slot
/// was not granted them.
struct HeadJobs {
  std::int64_t b = isa::block().z, h = isa::block().y, slot = 0, old_length = 0, count = 0;
  const kv::AppendJob* jobs = nullptr;
  std::uint32_t sets = 0;  ///< that parts of what leaves the window take
  std::int64_t from, to;   ///< where the window began and where it begins

  QATTN_DEVICE explicit HeadJobs(const AppendParams& p) {
    const kv::SlotPlan* plan = p.state.plans + b;
    if (isa::load_global(&plan->granted) == 0) return;
    slot = isa::load_global(&plan->slot);
    old_length = isa::load_global(&plan->old_length);
    const std::int64_t head = p.state.plan_head(b, h);
    jobs = p.state.jobs + head * p.state.cache.most_pages;
    count = isa::load_global(&p.state.heads[head].jobs);
    sets = isa::load_global(&p.state.heads[head].sets);
    from = p.state.window_begin(old_length);
    to = p.state.window_begin(isa::load_global(&plan->new_length));
  }

  /// The set of means and powers of two that the page is to name.
  QATTN_DEVICE std::uint8_t set_of(const AppendParams& p, const kv::AppendJob& job) const {
    if (job.to.tier == 0) return 0;
    if (job.from_tier > 0 && !job.opens()) return job.to.set;
    const kv::DeviceCache& cache = p.state.cache;
    const int part = kv::DriftParts(from, to, cache.sinks, cache.page_size).of(job.to.first);
    return static_cast<std::uint8_t>(sets >> 4 * part & 15u);
  }
};

/// One word of packed codes: what formats::kv_pack() makes of the bytes of four places a plane.
QATTN_DEVICE std::uint32_t pack_word(isa::SharedAddress panel, int n, int bits, int word) {
  const int width = bits == 3 ? 2 : bits, plane = n / 8 * width;
  const int y = 4 * word;
  std::uint32_t packed = 0;
  if (y < plane) {
    const std::uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    for (int i = 0; i < 8 / width; ++i) {
      const auto part =
          isa::load_shared<std::uint32_t>(panel + static_cast<isa::SharedAddress>(i * plane + y));
      packed |= (part & mask) << (i * width);
    }
    return packed;
  }
  for (int i = 0; i < 8; ++i) {  // the plane of high bits
    const auto part = isa::load_shared<std::uint32_t>(
        panel + static_cast<isa::SharedAddress>(i * (n / 8) + y - plane));
    packed |= (part >> 2 & 0x01010101u) << i;
  }
  return packed;
}

/// Rows of up to 16 N channels.
template <int N>
struct WritePages {
  using Params = AppendParams;
  static constexpr int threads = 128, min_blocks = N > 8 ? 4 : 8;
  static constexpr int rows_at_once = threads / row_lanes;
  static constexpr int scales_at = formats::kv_block_tokens * row_lanes * N;
  static constexpr int shared_bytes = scales_at + formats::kv_block_tokens * 2;
  static constexpr bool dependent = true;

  /// Where a unit of work is.
  struct Unit {
    kv::AppendJob job;
    std::int64_t b, head, slot;
    int block;  ///< of the page
    bool value;
    const NewRows& rows;
    std::int64_t new_row;  ///< of the call, at the page's first token
    std::int32_t page;     ///< where it goes
    std::uint8_t set;      ///< that it is to name

    /// A token of this block that the call brings.
    QATTN_DEVICE bool is_new(int token) const {
      const int at = block * formats::kv_block_tokens + token;
      return at >= job.begin && at < job.end;
    }
    QATTN_DEVICE bool alive(int token) const {
      return (job.to.live >> (block * formats::kv_block_tokens + token) & 1) != 0;
    }
    QATTN_DEVICE std::int64_t element(int token) const {
      return rows.row(b, head, new_row + block * formats::kv_block_tokens + token);
    }
  };

  static QATTN_DEVICE BlockPart part_of(const Params& p, int tier, std::int32_t page,
                                        const Unit& u) {
    return BlockPart(p.state.cache.pool[tier], page, u.block, u.value);
  }

  /// Rows of codes as they are in 16 bits, and those of new tokens, which the window then has.
  static QATTN_DEVICE void open_rows(const Params& p, const Unit& u) {
    const BlockPart to = part_of(p, 0, u.page, u);
    const bool bf16 = p.state.cache.bf16 != 0;
    const int first = isa::thread() / row_lanes;
    for (int token = first; token < formats::kv_block_tokens; token += rows_at_once) {
      LaneRow<N> row;
      const bool is_new = u.is_new(token);
      open_row(p, u, token, u.alive(token) && !is_new, row);
      const std::int64_t at = is_new ? u.element(token) : 0;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int c = LaneRow<N>::channel(j);
        if (c >= to.channels) continue;
        isa::store_global(
            to.row(token) + c,
            is_new ? window_bits(u.rows.data, u.rows.kind, at + c, bf16) : narrow(row.x[j], bf16));
      }
    }
  }

  /// Rows that stay in 16 bits. A page that is new is cleared, one that others hold is copied.
  static QATTN_DEVICE void store_rows(const Params& p, const Unit& u) {
    const bool old = u.job.from_page >= 0;
    const BlockPart to = part_of(p, 0, u.page, u);
    const BlockPart from = part_of(p, 0, old ? u.job.from_page : 0, u);
    const bool bf16 = p.state.cache.bf16 != 0;
    const int first = isa::thread() / row_lanes;
    for (int token = first; token < formats::kv_block_tokens; token += rows_at_once) {
      const bool is_new = u.is_new(token);
      if (!is_new && u.job.in_place != 0) continue;
      const std::int64_t at = is_new ? u.element(token) : 0;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int c = LaneRow<N>::channel(j);
        if (c >= to.channels) continue;
        std::uint16_t bits = 0;
        if (is_new) {
          bits = window_bits(u.rows.data, u.rows.kind, at + c, bf16);
        } else if (old) {
          bits = isa::load_global(from.row(token) + c);
        }
        isa::store_global(to.row(token) + c, bits);
      }
    }
  }

  /// The values of a token's codes, zeros where it is not `there`.
  static QATTN_DEVICE void load_codes(const Params& p, const Unit& u, int token, bool there,
                                      LaneRow<N>& row) {
    const BlockPart from = part_of(p, u.job.from_tier, u.job.from_page, u);
    std::uint16_t scale = 0;
    bool bad = false;  // though its channels have scales
    if (there && from.by_channel) {
      const kv::DevicePool& pool = p.state.cache.pool[u.job.from_tier];
      const std::uint64_t all = isa::load_global(pool.bad_tokens(u.job.from_page));
      bad = (all >> (u.block * formats::kv_block_tokens + token) & 1) != 0;
    } else if (there) {
      scale = isa::load_global(from.scales + token);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int c = LaneRow<N>::channel(j);
      row.x[j] = 0.0f;
      if (c >= from.channels || !there) continue;
      if (from.by_channel) scale = bad ? formats::kv_nan_scale : isa::load_global(from.scales + c);
      row.x[j] = formats::kv_decode(code_at(from, from.place(token, c)), scale, from.bits);
    }
  }

  static QATTN_DEVICE kv::Frame frame_of(const Params& p, const Unit& u, int set) {
    const kv::DeviceCache& cache = p.state.cache;
    kv::Frame frame;
    if (u.value) {
      if (cache.smooth_v != 0) frame.mean = cache.v_mean(u.slot, p.layer, u.head, set);
      return frame;
    }
    if (cache.smooth_k != 0) frame.mean = cache.k_mean(u.slot, p.layer, u.head, set);
    if (cache.balance_k != 0) frame.shift = cache.k_shift(u.slot, p.layer, u.head, set);
    return frame;
  }
  static QATTN_DEVICE bool rotates(const Params& p, const Unit& u) {
    return u.value ? p.state.cache.rotate != 0 : p.state.cache.rotates_k();
  }

  /// The row of a token of codes as the window is to have it: the host's expand_page(). Collective.
  static QATTN_DEVICE void open_row(const Params& p, const Unit& u, int token, bool there,
                                    LaneRow<N>& row) {
    const bool bf16 = p.state.cache.bf16 != 0;
    const float top = formats::largest_16bit(bf16);
    const kv::Frame frame = frame_of(p, u, u.job.to.set);
    const int channels = u.value ? p.state.cache.dv : p.state.cache.d;
    load_codes(p, u, token, there, row);
    if (rotates(p, u)) row.unrotate(channels);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int c = LaneRow<N>::channel(j);
      if (c >= channels || !there) {
        row.x[j] = 0.0f;
        continue;
      }
      float x = row.x[j];
      if (frame.shift != nullptr) {
        x = formats::mul_rn(x, kv::key_factor(isa::load_global(frame.shift + c)));
      }
      if (frame.mean != nullptr) x = formats::add_rn(x, isa::load_global(frame.mean + c));
      x = x > top ? top : x < -top ? -top : x;
      row.x[j] = widen(narrow(x, bf16), bf16);
    }
  }

  /// The row of a token as its codes are to have it, from 16 bits or from other codes.
  static QATTN_DEVICE void load_row(const Params& p, const Unit& u, int token, LaneRow<N>& row) {
    const kv::DeviceCache& cache = p.state.cache;
    const bool bf16 = cache.bf16 != 0, is_new = u.is_new(token), alive = u.alive(token);
    const bool opens = u.job.opens(), window = u.job.from_tier == 0 || opens;
    if (u.job.from_tier > 0) {
      const bool there = alive && !is_new;
      if (!opens) return load_codes(p, u, token, there, row);
      open_row(p, u, token, there, row);
    }
    const BlockPart from = part_of(p, 0, u.job.from_page < 0 || opens ? 0 : u.job.from_page, u);
    const int channels = from.channels;
    const std::int64_t at = alive && is_new ? u.element(token) : 0;
    const kv::Frame frame = frame_of(p, u, u.set);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int c = LaneRow<N>::channel(j);
      const bool there = c < channels && alive;
      float x = opens ? row.x[j] : 0.0f;
      if (there && is_new) {
        x = widen(window_bits(u.rows.data, u.rows.kind, at + c, bf16), bf16);
      } else if (there && !opens) {
        x = widen(isa::load_global(from.row(token) + c), bf16);
      }
      x = there ? clean(x) : 0.0f;
      if (there && frame.mean != nullptr) {
        x = formats::add_rn(x, -isa::load_global(frame.mean + c));
      }
      if (there && frame.shift != nullptr) {
        x = formats::mul_rn(x, kv::key_factor(-isa::load_global(frame.shift + c)));
      }
      row.x[j] = x;
    }
    if (window && rotates(p, u)) row.rotate(channels);
  }

  static QATTN_DEVICE std::uint8_t code_at(const BlockPart& from, int place) {
    const formats::KvBits low = formats::kv_bits(from.count(), from.bits, place);
    int code = isa::load_global(from.codes + low.byte) >> low.shift & ((1 << low.width) - 1);
    if (from.bits == 3) {
      const formats::KvBits high = formats::kv_high_bit(from.count(), place);
      code |= (isa::load_global(from.codes + high.byte) >> high.shift & 1) << 2;
    }
    return static_cast<std::uint8_t>(code);
  }

  /// Sixteen rows to codes: a panel in shared memory, packed from there.
  static QATTN_DEVICE void encode(const Params& p, const Unit& u) {
    const BlockPart to = part_of(p, u.job.to.tier, u.page, u);
    const isa::SharedAddress panel = isa::shared_base();
    const int first = isa::thread() / row_lanes;
    for (int token = first; token < formats::kv_block_tokens; token += rows_at_once) {
      LaneRow<N> row;
      load_row(p, u, token, row);
      const std::uint16_t scale = row.scale_code(to.channels, to.bits);
      const float inverse = formats::kv_inverse(scale);
      const bool coded = u.alive(token) && scale != formats::kv_nan_scale;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int c = LaneRow<N>::channel(j);
        if (c >= to.channels) continue;
        isa::store_shared(panel + static_cast<isa::SharedAddress>(to.place(token, c)),
                          coded ? formats::kv_encode(row.x[j], inverse, to.bits) : std::uint8_t{0});
      }
      if (row_lane() == 0) {
        // Tokens that are not there are zeros here and get the scale 0, as on the host.
        isa::store_shared(panel + static_cast<isa::SharedAddress>(scales_at + 2 * token), scale);
      }
    }
    isa::sync_threads();
    const int words = formats::kv_code_bytes(to.count(), to.bits) / 4;
    for (int w = isa::thread(); w < words; w += threads) {
      isa::store_global(reinterpret_cast<std::uint32_t*>(to.codes) + w,
                        pack_word(panel, to.count(), to.bits, w));
    }
    if (isa::thread() < formats::kv_block_tokens) {
      const int token = isa::thread();
      isa::store_global(to.scales + token,
                        isa::load_shared<std::uint16_t>(
                            panel + static_cast<isa::SharedAddress>(scales_at + 2 * token)));
    }
    isa::sync_threads();
  }

  /// A part that keeps its bits keeps its codes.
  static QATTN_DEVICE void copy(const Params& p, const Unit& u) {
    const BlockPart from = part_of(p, u.job.from_tier, u.job.from_page, u);
    const BlockPart to = part_of(p, u.job.to.tier, u.page, u);
    const auto move = [](const void* source, void* target, int bytes) {
      for (int w = isa::thread(); w < bytes / 4; w += threads) {
        isa::store_global(static_cast<std::uint32_t*>(target) + w,
                          isa::load_global(static_cast<const std::uint32_t*>(source) + w));
      }
    };
    move(from.codes, to.codes, formats::kv_code_bytes(to.count(), to.bits));
    const formats::KvPage& layout = p.state.cache.pool[u.job.to.tier].layout;
    if (!to.by_channel) {
      move(from.scales, to.scales, formats::kv_block_tokens * 2);
    } else if (u.block == 0) {
      move(from.scales, to.scales, layout.bytes() - layout.channel_scales());
    }
  }

  /// Does K, or V, of the page keep its bits?
  static QATTN_DEVICE bool keeps_codes(const Params& p, const kv::AppendJob& job, bool value) {
    const auto bits_of = [&](int tier) {
      const formats::KvBlock& b = p.state.cache.pool[tier].layout.block;
      return value ? b.v_bits : b.k_bits;
    };
    return job.from_page >= 0 && !job.opens() && bits_of(job.from_tier) == bits_of(job.to.tier);
  }

  /// The number of the page that a job makes.
  static QATTN_DEVICE std::int32_t resolve(const Params& p, std::int64_t b, std::int64_t h,
                                           const kv::AppendJob& job) {
    if (job.in_place != 0) return job.to.page;
    const int tier = job.to.tier;
    const std::int32_t slot = isa::load_global(p.state.plans[b].takes + tier);
    const std::int32_t head = isa::load_global(p.state.heads[p.state.plan_head(b, h)].takes + tier);
    const std::int64_t place = p.state.ring_place(tier, std::int64_t{slot} + head + job.to.page);
    return isa::load_global(p.state.free_pages[tier] + place);
  }
  /// The page's entry, and the page before it back to its pool; TakePages has seen to shared ones.
  static QATTN_DEVICE void enter(const Params& p, const Unit& u) {
    kv::Entry e = u.job.to;
    e.page = u.page;
    e.set = u.set;
    store_struct(p.state.cache.table(u.slot, p.layer, u.head) + u.job.index, e);
    if (!u.job.lets_go() || u.job.drops()) return;
    const int tier = u.job.from_tier;
    const std::int32_t slot = isa::load_global(p.state.plans[u.b].gives + tier);
    const std::int32_t head =
        isa::load_global(p.state.heads[p.state.plan_head(u.b, u.head)].gives + tier);
    const std::int64_t place = p.state.ring_place(tier, std::int64_t{slot} + head + u.job.given);
    isa::store_global(p.state.free_pages[tier] + place, u.job.from_page);
  }

  static QATTN_DEVICE void run(const Params& p) {
    isa::grid_dependency_launch();
    isa::grid_dependency_wait();
    const kv::DeviceCache& cache = p.state.cache;
    const HeadJobs head(p);
    const int units = 2 * cache.blocks_per_page();
    const std::int64_t total = head.count * units;
    for (std::int64_t i = isa::block().x; i < total; i += isa::grid().x) {
      const kv::AppendJob job = load_struct(head.jobs + i / units);
      const int part = static_cast<int>(i % units);
      const bool value = part % 2 != 0;
      const Unit u{job,
                   head.b,
                   head.h,
                   head.slot,
                   part / 2,
                   value,
                   value ? p.v : p.k,
                   job.to.first - head.old_length,
                   resolve(p, head.b, head.h, job),
                   head.set_of(p, job)};
      if (part == 0 && isa::thread() == 0) enter(p, u);
      if (job.to.tier == 0) {
        job.opens() ? open_rows(p, u) : store_rows(p, u);
      } else if (keeps_codes(p, job, value)) {
        copy(p, u);
      } else if (value || cache.k_by_channel == 0) {
        encode(p, u);
      }
    }
  }
};

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
