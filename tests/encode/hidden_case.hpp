// A case whose keys are hidden by a mask, a window or a block mask, and which of them are seen.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "encode_case.hpp"
#include "kernels/operand/seen.hpp"

namespace qattn::encode_test {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

/// A mask, the lengths of queries, windows, and a block mask of a case.
struct Hiding {
  std::string name;
  Format format = Format::none;     ///< of the mask
  std::array<bool, 4> varies = {};  ///< with sequence, head, query; keys always
  bool one_key = false;             ///< of the mask: it is the same for all keys
  float low = 0;                    ///< what hides
  std::int64_t window_left = -1, window_right = -1;
  std::int64_t block = 0;
  std::int32_t queries = 0;  ///< at most
  float spread = 0;          ///< every third key's bias is so much lower, every third twice
  float loud = 1;            ///< factor of the padding's keys
};

inline const Hiding hidings[] = {
    {"padding", Format::b8, {true}},
    {"padding_of_floats", Format::f32, {true}, false, -infinity},
    {"faint_padding", Format::f32, {true}, false, -1e4f},
    {"faint_halves", Format::f16, {true, true}, false, -65504.0f},
    {"heads", Format::b8, {false, true}},
    {"rows", Format::b8, {true, false, true}},
    {"bits", Format::b1, {true, true, true}},
    {"rows_of_floats", Format::bf16, {false, true, true}, false, -infinity},
    {"whole_rows", Format::b8, {true, false, true}, true, 0, -1, -1, 0, 1},
    {"window", Format::none, {}, false, 0, 40, 0, 0, 3},
    {"window_and_rows", Format::b8, {true, false, true}, false, 0, 60, 10, 0, 20},
    {"blocks", Format::none, {}, false, 0, -1, -1, 64, 60},
    {"blocks_and_rows", Format::b8, {true, false, true}, false, 0, -1, 0, 64},
    {"blocks_and_window", Format::none, {}, false, 0, 70, 5, 64, 100},
    {"slight_padding", Format::f32, {true}, false, -100},
    {"slight_heads", Format::f32, {true, true}, false, -64, -1, -1, 0, 0, 500},
    {"slight_rows", Format::f32, {true, false, true}, false, -1000, -1, -1, 0, 40, 2000},
    {"some_slight", Format::f32, {true}, false, -70, -1, -1, 0, 0, 150, 12},
    {"some_slight_rows", Format::f32, {false, false, true}, false, -70, -1, -1, 0, 90, 150, 12},
    {"slight_window", Format::f32, {true, true}, false, -80, 40, 3, 0, 60, 100, 8},
    {"slight_blocks", Format::f32, {true}, false, -90, -1, -1, 64, 60, 100, 8},
    {"too_loud", Format::f32, {true}, false, -300, -1, -1, 0, 0, 1000, 1000},
};

/// A case under a Hiding, and which of its keys are seen, found row by row.
class Hidden {
 public:
  Hidden(const CaseOptions& options, const Hiding& hiding)
      : c(options), hiding_(hiding), longest_(c.tensors.out.shape[0]) {
    used_q_.assign(c.seqused().begin(), c.seqused().end());
    if (hiding.queries > 0) {
      for (auto& n : used_q_) n = std::min(n, hiding.queries);
    }
    c.tensors.seqused_q = TensorView::dense(used_q_.data(), Format::s32, {c.batch()});
    c.attention.window_left = hiding.window_left, c.attention.window_right = hiding.window_right;
    longest_ = 0;
    for (std::int64_t b = 0; b < c.batch(); ++b) longest_ = std::max(longest_, c.length(b));
    if (options.storage == Storage::paged) {
      const std::int64_t pages = c.tensors.page_table.shape[1];
      keys_ = pages * options.page_size;
    } else {
      keys_ = longest_ + (options.used ? 5 : 0);
    }
    queries_ = longest_ + (options.used ? 5 : 0);
    if (hiding.format != Format::none) make_mask();
    if (hiding.block > 0) make_block_mask();
    if (hiding.loud != 1) make_loud();
    find();
  }

  Seen seen(std::int64_t b, int head, std::int64_t s) const {
    return seen_[static_cast<std::size_t>((b * c.heads(Role::k) + head) * longest_ + s)];
  }
  /// Those of a sequence, as the CPU has them.
  const Seen* row(std::int64_t b, int head) const {
    return seen_.data() + (b * c.heads(Role::k) + head) * longest_;
  }

  /// Other contents of what nobody sees.
  void fill(float value) {
    for (const Role r : {Role::k, Role::v}) {
      each([&](std::int64_t b, int h, std::int64_t s) {
        if (seen(b, h, s) != Seen::no) return;
        for (int k = 0; k < c.channels(r); ++k) c.put_value(r, b, h, s, k, value);
      });
    }
  }

  void each(const std::function<void(std::int64_t, int, std::int64_t)>& f) const {
    for (std::int64_t b = 0; b < c.batch(); ++b) {
      for (int h = 0; h < c.heads(Role::k); ++h) {
        for (std::int64_t s = 0; s < c.length(b); ++s) f(b, h, s);
      }
    }
  }

  /// Finds again which keys are seen.
  void find() {
    const int heads = c.heads(Role::k);
    seen_.assign(static_cast<std::size_t>(c.batch() * heads * longest_), Seen::no);
    each([&](std::int64_t b, int h, std::int64_t s) {
      each_row(b, h, [&](int head, std::int64_t i) {
        Seen& best = seen_[place(b, h, s)];
        best = std::max(best, look(b, head, i, s));
      });
    });
    for (std::int64_t b = 0; b < c.batch(); ++b) {
      for (int h = 0; h < heads; ++h) settle(b, h);
    }
  }

  Case c;
  bool bounded = true;  ///< scores, by norms

 private:
  static bool is_padding(std::int64_t b, std::int64_t j) {
    return j == 3 || j % 64 == 17 || j >= 70 + 40 * b;
  }
  /// Does the mask hide it?
  bool masked(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (hiding_.format == Format::none) return false;
    if (!hiding_.varies[0]) b = 0;
    if (hiding_.one_key) return i % 3 != b;
    bool hides = is_padding(b, j);
    if (hiding_.varies[1]) hides |= (j + h) % 2 == 0;
    if (hiding_.varies[2]) hides |= (j + i) % 5 != 0 && i != j;
    return hides;
  }

  /// Of a mask of floats.
  float bias(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const bool hides = masked(b, h, i, j);
    return hides ? hiding_.low - static_cast<float>(j % 3) * hiding_.spread : 0.25f;
  }

  void make_loud() {
    each([&](std::int64_t b, int h, std::int64_t s) {
      if (!is_padding(b, s)) return;
      for (int k = 0; k < c.channels(Role::k); ++k) {
        c.put_value(Role::k, b, h, s, k, hiding_.loud * c.value(Role::k, b, h, s, k));
      }
    });
  }

  void make_mask() {
    mask_shape_ = {hiding_.varies[0] ? c.batch() : 1, hiding_.varies[1] ? c.heads(Role::q) : 1,
                   hiding_.varies[2] ? queries_ : 1, hiding_.one_key ? 1 : keys_};
    const bool bits = hiding_.format == Format::b1;
    const std::int64_t width = bits ? (keys_ + 7) / 8 * 8 : mask_shape_[3];
    TensorView& v = c.tensors.mask;
    v.format = hiding_.format, v.rank = 4;
    v.shape = {mask_shape_[0], mask_shape_[1], mask_shape_[2], width};
    v.stride = {width * mask_shape_[1] * mask_shape_[2], width * mask_shape_[2], width, 1};
    const int size = info(v.format).bits;
    mask_.resize(static_cast<std::size_t>(mask_shape_[0] * v.stride[0] * size / 8 + 8));
    v.data = mask_.data();
    for (std::int64_t b = 0; b < mask_shape_[0]; ++b) {
      for (std::int64_t h = 0; h < mask_shape_[1]; ++h) {
        for (std::int64_t i = 0; i < mask_shape_[2]; ++i) {
          for (std::int64_t j = 0; j < mask_shape_[3]; ++j) {
            put_mask(b * v.stride[0] + h * v.stride[1] + i * v.stride[2] + j, masked(b, h, i, j),
                     bias(b, h, i, j));
          }
        }
      }
    }
  }
  void put_mask(std::int64_t at, bool hides, float bias) {
    std::uint8_t* data = mask_.data();
    switch (hiding_.format) {
      case Format::b8:
        data[at] = hides ? 0 : 1;
        break;
      case Format::b1:
        data[at / 8] = static_cast<std::uint8_t>(data[at / 8] | (hides ? 0 : 1 << at % 8));
        break;
      case Format::f32:
        std::memcpy(data + 4 * at, &bias, 4);
        break;
      default: {
        const bool f16 = hiding_.format == Format::f16;
        const std::uint16_t code = !hides              ? (f16 ? 0x3400 : 0x3e80)
                                   : bias == -infinity ? (f16 ? 0xfc00 : 0xff80)
                                                       : 0xfbff;  // -65504 in f16
        std::memcpy(data + 2 * at, &code, 2);
      }
    }
  }

  bool block_hides(std::int64_t h, std::int64_t i, std::int64_t j) const {
    return hiding_.block > 0 && (i / hiding_.block + j / hiding_.block + h) % 3 != 0;
  }
  void make_block_mask() {
    const std::int64_t n = hiding_.block, q = (queries_ + n - 1) / n, k = (keys_ + n - 1) / n;
    const int heads = c.heads(Role::q);
    block_mask_.resize(static_cast<std::size_t>(heads * q * k));
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < q; ++i) {
        for (std::int64_t j = 0; j < k; ++j) {
          const bool hides = block_hides(h, i * n, j * n);
          block_mask_[static_cast<std::size_t>((h * q + i) * k + j)] = hides ? 0 : 1;
        }
      }
    }
    c.tensors.block_mask = TensorView::dense(block_mask_.data(), Format::b8, {1, heads, q, k});
    c.attention.block_mask_q = c.attention.block_mask_k = n;
  }

  Seen look(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t diagonal = i + c.length(b) - used_q_[static_cast<std::size_t>(b)];
    if (hiding_.window_left >= 0 && j < diagonal - hiding_.window_left) return Seen::no;
    if (hiding_.window_right >= 0 && j > diagonal + hiding_.window_right) return Seen::no;
    if (block_hides(h, i, j)) return Seen::no;
    if (!masked(b, h, i, j)) return Seen::yes;
    if (hiding_.low == 0 || hiding_.low == -infinity) return Seen::no;
    return bias(b, h, i, j) <= -4096 ? Seen::faintly : Seen::slightly;
  }

  std::size_t place(std::int64_t b, int h, std::int64_t s) const {
    return static_cast<std::size_t>((b * c.heads(Role::k) + h) * longest_ + s);
  }
  /// Calls f(query head, query) for the rows of a KV head.
  template <class F>
  void each_row(std::int64_t b, int h, const F& f) const {
    const int group = c.heads(Role::q) / c.heads(Role::k);
    for (int g = 0; g < group; ++g) {
      for (std::int64_t i = 0; i < used_q_[static_cast<std::size_t>(b)]; ++i) f(h * group + g, i);
    }
  }

  /// The norm of a row, less `mean` if there is one.
  double norm(Role r, std::int64_t b, int h, std::int64_t s,
              const std::vector<double>& mean) const {
    double sum = 0;
    for (int k = 0; k < c.channels(r); ++k) {
      const double x = c.value(r, b, h, s, k);
      sum += std::pow(mean.empty() ? x : x - mean[static_cast<std::size_t>(k)], 2);
    }
    return std::sqrt(sum);
  }
  /// By how much scores of slight keys of a head can exceed those of keys that are seen.
  double advantage(std::int64_t b, int h) const {
    std::vector<double> mean(static_cast<std::size_t>(c.channels(Role::k)));
    double count = 0, query = 0, most[4] = {};
    for (std::int64_t s = 0; s < c.length(b); ++s) count += seen(b, h, s) == Seen::yes;
    for (std::int64_t s = 0; s < c.length(b); ++s) {
      if (seen(b, h, s) != Seen::yes) continue;
      for (std::size_t k = 0; k < mean.size(); ++k) {
        mean[k] += c.value(Role::k, b, h, s, static_cast<int>(k)) / count;
      }
    }
    const auto larger = [](double a, double x) { return x <= a ? a : x; };  // NaN stays
    for (std::int64_t s = 0; s < c.length(b); ++s) {
      double& top = most[static_cast<int>(seen(b, h, s))];
      if (!std::isnan(top)) top = larger(top, norm(Role::k, b, h, s, mean));
    }
    each_row(b, h, [&](int head, std::int64_t i) {
      if (!std::isnan(query)) query = larger(query, norm(Role::q, b, head, i, {}));
    });
    const double sum = most[static_cast<int>(Seen::yes)] + most[static_cast<int>(Seen::slightly)];
    return query * sum / std::sqrt(c.channels(Role::q));
  }
  /// Which slight keys of a head have weight.
  void settle(std::int64_t b, int h) {
    const auto from = seen_.begin() + static_cast<std::ptrdiff_t>(place(b, h, 0));
    const auto to = from + c.length(b);
    const bool any = std::find(from, to, Seen::slightly) != to;
    const bool plain = std::find(from, to, Seen::yes) != to;
    const double more = any && plain && bounded ? advantage(b, h) : infinity;
    if (any && !(more <= 4056)) std::replace(from, to, Seen::slightly, Seen::yes);
    std::vector<bool> weight(static_cast<std::size_t>(c.length(b)));
    each_row(b, h, [&](int head, std::int64_t i) {
      float best = -infinity;
      const auto each_key = [&](auto f) {
        for (std::int64_t s = 0; s < c.length(b); ++s) {
          if (look(b, head, i, s) != Seen::no) f(s, bias(b, head, i, s));
        }
      };
      if (any && more <= 4056) {
        each_key([&](std::int64_t, float x) { best = std::max(best, x); });
        each_key([&](std::int64_t s, float x) {
          const bool none = best > -64 && x - best + more <= -40;
          if (!none) weight[static_cast<std::size_t>(s)] = true;
        });
      }
    });
    for (std::int64_t s = 0; s < c.length(b); ++s) {
      Seen& now = seen_[place(b, h, s)];
      if (now != Seen::slightly) continue;
      now = weight[static_cast<std::size_t>(s)] ? Seen::yes : Seen::faintly;
    }
    if (std::find(from, to, Seen::yes) == to) std::replace(from, to, Seen::faintly, Seen::yes);
  }

  Hiding hiding_;
  std::int64_t longest_ = 0, keys_ = 0, queries_ = 0;
  std::vector<std::int32_t> used_q_;
  std::array<std::int64_t, 4> mask_shape_{};
  std::vector<std::uint8_t> mask_, block_mask_;
  std::vector<Seen> seen_;
};

}  // namespace qattn::encode_test
