// Tiles of attention in one go: Q K^T, softmax and P V of 32 query rows. The same arithmetic as
// softmax.inl up to rounding. Continues probabilities_amx.inl.
//
// While one tile of keys is in its softmax, the tiles multiply the last one's values and the next
// one's keys. Vector arithmetic runs at half its rate while tile instructions are about and for
// some hundred nanoseconds after them (measured), so taking turns would gain nothing.

/// Nothing that the compiler holds in registers may cross: GCC's tile loads do not say that they
/// read memory.
static inline void memory_is_read() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

/// QParts: of a value of Q and K; Parts: of a value of P (half_row()), 0: P is codes.
template <Product QK, int QParts, int Parts>
class Attention {
  static constexpr bool Codes = Parts == 0;

 public:
  explicit Attention(const AttentionRows& rows) : x_(rows), two_rows_(rows.rows > 16) {
    slots_[0].rest = rest_[0], slots_[1].rest = rest_[1];
  }

  void run(const AttentionTile* tiles, int count) {
    const AttentionTile* end = tiles + count;
    const AttentionTile* now = next_seen(tiles, end);
    if (now == end) return;
    configure(tile_rows, 64);
    for (int j = 0; j < seen_keys(*now); j += 32) multiply_keys(*now, j, slots_[0].sums);
    const AttentionTile* last = nullptr;
    for (int i = 0; now != end; i ^= 1) {
      const AttentionTile* next = next_seen(now + 1, end);
      softmax(*now, slots_[i], next == end ? nullptr : next, last, slots_[i ^ 1]);
      last = now;
      now = next;
      last_slot_ = i;
    }
    Slot& slot = slots_[last_slot_];
    begin_values(slot);
    for (int c = 0; c < x_.channels; c += 32) multiply_values(*last, slot, c);
    fold_values(*last, slot);
    _tile_release();
  }

 private:
  static constexpr int p_bytes = Codes ? 1 : 2, p_row = tile_keys * (Codes ? 1 : Parts) * p_bytes;
  static constexpr int most_value = 512;  // channels of V

  /// A tile of keys under way. Two take turns: the next one's sums may be written while the last
  /// one's P is still read.
  struct Slot {
    alignas(64) std::int32_t sums[tile_rows * tile_keys];  ///< then scores
    alignas(64) std::uint8_t p[tile_rows * p_row];
    alignas(64) float alpha[tile_rows], beta[tile_rows];
    alignas(64) float far[tile_rows] = {};  ///< biased: what scores are relative to (far_score())
    std::uint8_t* rest;                     ///< [tile_rows][tile_keys], as SoftmaxTile's
    std::uint32_t lossy;
    std::uint32_t below;  ///< rows that see a key whose score lies below the floats
  };

  const AttentionTile* next_seen(const AttentionTile* t, const AttentionTile* end) const {
    while (t != end && seen_keys(*t) == 0) ++t;
    return t;
  }

  /// The first key, a multiple of 32, from which on no row sees one.
  int seen_keys(const AttentionTile& t) const {
    if (!t.windowed) return tile_keys;
    std::int64_t seen = 0;
    for (int r = 0; r < x_.rows; ++r) {
      const std::int64_t end = x_.end[r] - t.first;
      if (x_.begin[r] < x_.end[r] && end > seen) seen = end;
    }
    return seen >= tile_keys ? tile_keys : static_cast<int>((seen + 31) / 32 * 32);
  }

  void fill_tables(const AttentionTile& t) {
    tables_.scale = t.k_scale;
    if constexpr (Codes) {
      for (int j = 0; j < tile_keys; j += v::lanes) {
        const F bias = t.v_log ? v::load(t.v_log + j) : v::set(0.0f);
        v::store(tables_.bias + j, v::mul(bias, v::set(log2_e)));
      }
    }
  }

  void put_sums(void* to, std::int64_t stride, bool two_columns) const {
    auto* p = static_cast<char*>(to);
    _tile_stored(0, p, stride);
    if (two_columns) _tile_stored(1, p + 64, stride);
    if (two_rows_) _tile_stored(2, p + 16 * stride, stride);
    if (two_rows_ && two_columns) _tile_stored(3, p + 16 * stride + 64, stride);
  }
  static void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  /// Keys [j, j + 32) of a tile times Q.
  [[gnu::always_inline]] void multiply_keys(const AttentionTile& t, int j,
                                            std::int32_t* sums) const {
    const int width = x_.width_bytes, part = width / QParts;
    const TileOperands operands{static_cast<const char*>(x_.q),
                                width,
                                static_cast<const char*>(t.k) + std::int64_t{j} * width,
                                64,
                                std::int64_t{16} * width,
                                1024,
                                part,
                                std::int64_t{16} * part};
    memory_is_read();
    clear_sums();
    accumulate_parts<QK, QParts>(operands, part / 64, two_rows_, true);
    put_sums(sums + j, tile_keys * 4, true);
  }

  /// P times channels [c, c + 32) of V: sums of codes by themselves, floats on top of `out`.
  [[gnu::always_inline]] void multiply_values(const AttentionTile& t, const Slot& slot, int c) {
    const std::int64_t stride = std::int64_t{x_.channels} * 4;
    const TileOperands operands{reinterpret_cast<const char*>(slot.p),
                                p_row,
                                static_cast<const char*>(t.v) + c * 4,
                                stride,
                                64,
                                16 * stride,
                                tile_keys * p_bytes,
                                tile_keys * p_bytes * std::int64_t{x_.channels}};
    const bool two = c + 16 < x_.channels;
    const int steps = (seen_keys(t) * p_bytes + 63) / 64;
    memory_is_read();
    if constexpr (Codes) {
      clear_sums();
      accumulate_parts<Product::u8s8, 1>(operands, steps, two_rows_, two);
      put_sums(products_ + c, stride, two);
    } else {
      float* out = x_.out + c;
      _tile_loadd(0, out, stride);
      if (two) _tile_loadd(1, out + 16, stride);
      if (two_rows_) _tile_loadd(2, out + 16 * x_.channels, stride);
      if (two_rows_ && two) _tile_loadd(3, out + 16 * x_.channels + 16, stride);
      accumulate_parts<Product::bf16, Parts>(operands, steps, two_rows_, two);
      put_sums(out, stride, two);
    }
  }

  /// Softmax of a tile. Between its rows the tiles multiply the last one's values, then the next
  /// one's keys.
  void softmax(const AttentionTile& t, Slot& slot, const AttentionTile* next,
               const AttentionTile* last, Slot& other) {
    fill_tables(t);
    slot.below = 0;
    if (last) begin_values(other);
    const int channels = last ? x_.channels : 0, keys = next ? seen_keys(*next) : 0;
    alignas(64) float tops[tile_rows];
    int done = 0;
    for (int first = 0; first < x_.rows; first += 16) {
      F top[16];
      for (int i = 0; i < 16; ++i) {
        const int r = first + i;
        top[i] = r < x_.rows ? scores(t, slot, r) : v::set(minus_infinity);
        for (; done < channels && done * x_.rows < channels * (r + 1); done += 32)
          multiply_values(*last, other, done);
      }
      v::store(tops + first, reduce_rows(top, [](F a, F b) {
                 return _mm512_mask_mov_ps(v::max(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
               }));
    }
    if (last) fold_values(*last, other);
    done = 0;
    for (int first = 0; first < x_.rows; first += 16) {
      alignas(64) float references[16];
      const F top = v::load(tops + first);
      F old = v::load(x_.max + first);
      if (x_.biased) old = v::sub(old, v::load(slot.far + first));
      old = v::mul(old, v::set(log2_e));
      const F reference = Codes ? top : v::max(old, top);
      // A row that sees nothing: any reference makes its P zero.
      const auto some = _mm512_cmp_ps_mask(reference, v::set(minus_infinity), _CMP_NEQ_UQ);
      v::store(references, _mm512_maskz_mov_ps(some, reference));
      F sums[16], exact[Codes ? 16 : 1], codes[Codes ? 16 : 1];
      for (int i = 0; i < 16; ++i) {
        const int r = first + i;
        const bool exists = r < x_.rows;
        if constexpr (Codes) {
          const F none = v::set(0.0f);
          const CodeSums s =
              exists ? codes_of(t, slot, r, references[i]) : CodeSums{none, none, none};
          sums[i] = s.p, exact[i] = s.exact, codes[i] = s.codes;
        } else {
          sums[i] = exists ? halves_of(slot, r, references[i]) : v::set(0.0f);
        }
        for (; done < keys && done * x_.rows < keys * (r + 1); done += 32)
          multiply_keys(*next, done, other.sums);
      }
      const auto add = [](F a, F b) { return v::add(a, b); };
      update_state(t, slot, first, top, reduce_rows(sums, add));
      if constexpr (Codes) {
        mend_rows(slot, first, references, reduce_rows(exact, add), reduce_rows(codes, add));
      }
    }
  }

  /// Scores of one row; returns the maxima by lane.
  F scores(const AttentionTile& t, Slot& slot, int r) const {
    auto* row = reinterpret_cast<float*>(slot.sums) + r * tile_keys;
    const std::int32_t correction = QK == Product::bf16 ? 0 : x_.correction[r];
    if (x_.change.change != nullptr) {
      score_row<QK, false>(row, x_.q_scale[r], correction, tables_, 1.0f);
      bool low = x_.change.change(x_.change.context, t.first, r, row);
      const float far = x_.biased ? far_score(row) : 0.0f;
      slot.far[r] = far;
      const F top = octaves_of_row<Codes>(row, far, tables_, low);
      slot.below |= (low ? 1u : 0u) << r;
      return top;
    }
    const F top = score_row<QK, Codes>(row, x_.q_scale[r], correction, tables_);
    if (!t.windowed) return top;
    const std::int64_t begin = x_.begin[r] - t.first, end = x_.end[r] - t.first;
    return t.bad || begin > 0 || end < tile_keys ? hide_keys(row, begin, end) : top;
  }

  static const float* scores_of(const Slot& slot, int r) {
    return reinterpret_cast<const float*>(slot.sums) + r * tile_keys;
  }
  static CodeSums codes_of(const AttentionTile& t, Slot& slot, int r, float reference) {
    return code_row(scores_of(slot, r), v::set(reference), t.v_inverse, slot.p + r * tile_keys);
  }
  static F halves_of(Slot& slot, int r, float reference) {
    return half_row<Parts>(scores_of(slot, r), v::set(reference),
                           reinterpret_cast<std::uint16_t*>(slot.p + r * p_row));
  }

  /// Rows [first, first + 16) whose codes lose too much get a second byte of P (SoftmaxTile).
  void mend_rows(Slot& slot, int first, const float* references, F exact, F codes) {
    const F unit = v::set(255.0f), alpha = v::load(slot.alpha + first);
    const F local = v::mul(v::load(slot.beta + first), unit);
    const F mass = v::fma(local, codes, v::mul(v::load(x_.mass + first), alpha));
    v::store(x_.mass + first, mass);
    const F lost = _mm512_abs_ps(v::mul(local, v::sub(exact, codes)));
    const F most = v::mul(mass, v::set(formats::kMostLost));
    // What lies behind the last row may be anything.
    const std::uint32_t exist = x_.rows - first < 16 ? (1u << (x_.rows - first)) - 1 : 0xFFFFu;
    std::uint32_t lossy = _mm512_cmp_ps_mask(lost, most, _CMP_GT_OQ) & exist;
    if (first == 0) slot.lossy = 0;
    slot.lossy |= lossy << first;
    for (; lossy != 0; lossy &= lossy - 1) {
      const int i = __builtin_ctz(lossy), r = first + i;
      code_row_twice(scores_of(slot, r), v::set(references[i]), slot.p + r * tile_keys,
                     slot.rest + r * tile_keys);
    }
  }

  /// Of a row whose scores are all -infinity.
  bool sees_key(const AttentionTile& t, const Slot& slot, int r) const {
    if (x_.change.change != nullptr) return (slot.below >> r & 1) != 0;
    const std::int64_t begin = x_.begin[r] - t.first, end = x_.end[r] - t.first;
    return !t.windowed || (begin < end && begin < tile_keys && end > 0);
  }

  void update_state(const AttentionTile& t, Slot& slot, int first, F top, F added) {
    const __mmask16 none = _mm512_cmp_ps_mask(top, v::set(minus_infinity), _CMP_EQ_OQ);
    const F old = v::load(x_.max + first), old_sum = v::load(x_.sum + first);
    const F own = v::mul(top, v::set(1.0f / log2_e));
    F far = v::set(0.0f), here = own;
    if (x_.biased) {
      far = v::load(slot.far + first);
      // The running maximum of a far row leaves V's scales out, for which it has no bits.
      here = _mm512_mask_mov_ps(own, _mm512_cmp_ps_mask(far, v::set(0.0f), _CMP_NEQ_OQ), far);
    }
    // The larger one, and NaN once there is one.
    F now = v::max(old, here);
    now = _mm512_mask_mov_ps(now, _mm512_cmp_ps_mask(old, old, _CMP_UNORD_Q), old);
    const F local = Codes ? exp_minus(own, v::sub(now, far)) : v::set(1.0f);
    const F beta = Codes ? v::mul(local, v::set(1.0f / 255.0f)) : local;
    const F alpha = _mm512_mask_mov_ps(exp_minus(old, now), none, v::set(1.0f));
    const F sum = v::fma(added, beta, v::mul(old_sum, alpha));
    v::store(slot.alpha + first, alpha);
    v::store(slot.beta + first, _mm512_mask_mov_ps(beta, none, v::set(0.0f)));
    v::store(x_.max + first, now);
    v::store(x_.sum + first, _mm512_mask_mov_ps(sum, none, old_sum));
    for (unsigned left = none; left != 0; left &= left - 1) {
      const int r = first + __builtin_ctz(left);
      if (r < x_.rows && x_.max[r] == minus_infinity && sees_key(t, slot, r))
        x_.sum[r] = sum_of_below;
    }
  }

  /// Floats are added up in `out` itself, so what is there is scaled first.
  void begin_values(const Slot& slot) {
    if constexpr (!Codes) {
      for (int r = 0; r < x_.rows; ++r) {
        if (slot.alpha[r] == 1.0f) continue;
        float* out = x_.out + std::int64_t{r} * x_.channels;
        for (int c = 0; c < x_.channels; c += v::lanes) {
          v::store(out + c, v::mul(v::load(out + c), v::set(slot.alpha[r])));
        }
      }
    }
  }

  /// Sums of codes join `out`.
  void fold_values(const AttentionTile& t, const Slot& slot) {
    if constexpr (Codes) {
      for (int r = 0; r < x_.rows; ++r) {
        const std::int64_t at = std::int64_t{r} * x_.channels;
        const F alpha = v::set(slot.alpha[r]), beta = v::set(slot.beta[r]);
        for (int c = 0; c < x_.channels; c += v::lanes) {
          F sum = v::to_float(v::load_i(products_ + at + c));
          if (t.v_scale) sum = v::mul(sum, v::load(t.v_scale + c));
          float* out = x_.out + at + c;
          v::store(out, v::fma(sum, beta, v::mul(v::load(out), alpha)));
        }
      }
      for (std::uint32_t left = slot.lossy; left != 0; left &= left - 1) {
        const int r = __builtin_ctz(left);
        const float alpha = 1.0f, beta = slot.beta[r] * (1.0f / 255.0f);
        pv_u8s8_lanes(slot.rest + r * tile_keys, 1, static_cast<const std::int8_t*>(t.v),
                      seen_keys(t), x_.channels, &alpha, &beta, t.v_scale,
                      x_.out + std::int64_t{r} * x_.channels);
      }
    }
  }

  const AttentionRows& x_;
  bool two_rows_;
  ScoreTables tables_;
  int last_slot_ = 0;
  Slot slots_[2];
  alignas(64) std::uint8_t rest_[2][Codes ? tile_rows * tile_keys : 1];
  alignas(64) std::int32_t products_[Codes ? tile_rows * most_value : 1];  ///< [rows][channels]
};

bool attends(Engine engine, Rounding rounding, int rows, int width_bytes) {
  const int parts = is_split(engine) ? parts_of(engine) : 1;
  const bool known = rounding == Rounding::u8_token || rounding == Rounding::u8 ||
                     rounding == Rounding::bf16 || rounding == Rounding::f16;
  return known && rows >= least_tile_rows && engine != Engine::f32 &&
         width_bytes % (64 * parts) == 0;
}

/// Attention with scores from products QK.
template <Product QK, int QParts>
static void attend_with(const AttentionRows& x, const AttentionTile* tiles, int count) {
  if (x.rounding == Rounding::bf16) {
    Attention<QK, QParts, 1>(x).run(tiles, count);
  } else if (x.rounding == Rounding::f16) {
    Attention<QK, QParts, 2>(x).run(tiles, count);
  } else {
    Attention<QK, QParts, 0>(x).run(tiles, count);
  }
}

void attend(const AttentionRows& x, const AttentionTile* tiles, int count) {
  if (x.engine == Engine::integer) {
    attend_with<Product::s8u8, 1>(x, tiles, count);
  } else if (x.engine == Engine::bf16x2) {
    attend_with<Product::bf16, 2>(x, tiles, count);
  } else {
    attend_with<Product::bf16, 1>(x, tiles, count);
  }
}
