// Q K^T and softmax of a plain tile in one go: 128 keys that every row sees, nothing added. The
// sums go from the tiles through one buffer into the exponentials; running state is kept for
// sixteen rows at a time. Continues tiles_amx.inl; the same arithmetic as softmax.inl up to
// rounding.

constexpr int fused_rows = tile_rows;

/// Sixteen vectors to one: lane i is the reduction of vector i. 15 operations and 30 shuffles where
/// sixteen reductions of their own take 128.
template <class Op>
static inline F reduce_rows(F (&r)[16], Op op) {
  const auto lo32 = [](F a, F b) { return _mm512_unpacklo_ps(a, b); };
  const auto hi32 = [](F a, F b) { return _mm512_unpackhi_ps(a, b); };
  const auto lo64 = [](F a, F b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto hi64 = [](F a, F b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  F p[8], q[4];
  for (int i = 0; i < 8; ++i) p[i] = op(lo32(r[2 * i], r[2 * i + 1]), hi32(r[2 * i], r[2 * i + 1]));
  for (int i = 0; i < 4; ++i) q[i] = op(lo64(p[2 * i], p[2 * i + 1]), hi64(p[2 * i], p[2 * i + 1]));
  // q[g], 128-bit lane L: rows 4 g to 4 g + 3, reduced over the lane.
  const F a = op(_mm512_shuffle_f32x4(q[0], q[1], 0x88), _mm512_shuffle_f32x4(q[0], q[1], 0xDD));
  const F b = op(_mm512_shuffle_f32x4(q[2], q[3], 0x88), _mm512_shuffle_f32x4(q[2], q[3], 0xDD));
  return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

/// The products into sums[rows][128]. An integer product starts at the row's correction.
template <Product P>
static inline void fused_products(const QueryOperands& x, std::int32_t* sums) {
  alignas(64) std::int32_t start[fused_rows][16];
  for (int r = 0; r < fused_rows; ++r) {
    const bool integer = P != Product::bf16 && r < x.rows;
    _mm512_store_si512(start[r], v::set_i(integer ? x.correction[r] : 0));
  }
  configure(x.rows, 64);
  const bool two_rows = x.rows > 16;
  constexpr int stride = tile_keys * 4;
  for (int j = 0; j < tile_keys; j += 32) {
    const TileOperands operands{static_cast<const char*>(x.q),
                                x.width_bytes,
                                static_cast<const char*>(x.k) + std::int64_t{j} * x.width_bytes,
                                64,
                                std::int64_t{16} * x.width_bytes,
                                1024};
    _tile_loadd(0, start[0], 64);
    _tile_loadd(1, start[0], 64);
    if (two_rows) {
      _tile_loadd(2, start[16], 64);
      _tile_loadd(3, start[16], 64);
    }
    accumulate_steps<P>(operands, 0, x.width_bytes / 64, two_rows, true);
    _tile_stored(0, sums + j, stride);
    _tile_stored(1, sums + j + 16, stride);
    if (two_rows) {
      _tile_stored(2, sums + 16 * tile_keys + j, stride);
      _tile_stored(3, sums + 16 * tile_keys + j + 16, stride);
    }
  }
  _tile_release();
}

/// Scores of sixteen rows in place of their sums; returns every row's maximum.
template <Product P>
static inline F fused_scores(const QueryOperands& x, const float* bias, int first, void* sums) {
  F top[16];
  for (int i = 0; i < 16; ++i) {
    top[i] = v::set(minus_infinity);
    if (first + i >= x.rows) continue;
    auto* row = static_cast<float*>(sums) + (first + i) * tile_keys;
    const F scale = v::set(x.q_scale[first + i]);
    for (int j = 0; j < tile_keys; j += v::lanes) {
      F s = P == Product::bf16 ? v::load(row + j) : v::to_float(v::load_i(row + j));
      s = v::mul(v::mul(s, scale), v::load(x.k_scale + j));
      if (bias) s = v::add(s, v::load(bias + j));
      v::store(row + j, s);
      top[i] = v::max(top[i], s);  // a bad query makes every score NaN, the last one too
    }
  }
  return reduce_rows(top, [](F a, F b) { return v::max(a, b); });
}

/// 2^t, relative error 3e-7: one degree less than exp2(), which is what its rounding hides.
static inline F fused_exp2(F t) {
  t = v::max(v::set(-200.0f), t);
  const F n = v::round_even(t);
  const F f = v::sub(t, n);
  F p = v::set(1.33813025e-3f);
  p = v::fma(p, f, v::set(9.66636852e-3f));
  p = v::fma(p, f, v::set(5.55038101e-2f));
  p = v::fma(p, f, v::set(2.4022349e-1f));
  p = v::fma(p, f, v::set(6.93147181e-1f));
  p = v::fma(p, f, v::set(1.0f));
  return v::scale_by_power(p, n);
}

/// One row of P as u8 codes in units of exp(reference) / 255; returns their sum over the scales.
static inline F fused_row_u8(const float* scores, float reference, const float* inverse,
                             std::uint8_t* codes) {
  // 255 exp(s - reference) = 2^(s log2 e + shift): the shift's rounding is common to the row.
  const F shift = v::set(7.9943534f - reference * log2_e);
  F sum = v::set(0.0f);
  for (int j = 0; j < tile_keys; j += 64) {
    I code[4];
    for (int n = 0; n < 4; ++n) {
      const int at = j + n * v::lanes;
      code[n] = v::round_to_int(fused_exp2(v::fma(v::load(scores + at), v::set(log2_e), shift)));
      const F value = v::to_float(code[n]);
      sum = inverse ? v::fma(value, v::load(inverse + at), sum) : v::add(value, sum);
    }
    // Packs interleave 128-bit lanes; the permutation puts them back in order.
    const I words = _mm512_packus_epi16(_mm512_packus_epi32(code[0], code[1]),
                                        _mm512_packus_epi32(code[2], code[3]));
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(codes + j, _mm512_permutexvar_epi32(order, words));
  }
  return sum;
}

/// One row of P in bf16; returns the sum of the rounded values.
static inline F fused_row_bf16(const float* scores, float reference, std::uint16_t* p) {
  const F shift = v::set(-reference * log2_e);
  F sum = v::set(0.0f);
  for (int j = 0; j < tile_keys; j += v::lanes) {
    const F x = round_bf16(fused_exp2(v::fma(v::load(scores + j), v::set(log2_e), shift)));
    v::store_bf16(p + j, x);
    sum = v::add(sum, x);
  }
  return sum;
}

/// Rows [first, first + 16): running state and P.
template <Product P>
static inline void fused_block(const QueryOperands& x, const SoftmaxTile& tile, int first,
                               void* sums) {
  const bool integer = tile.rounding != Rounding::bf16;
  const F top = fused_scores<P>(x, tile.v_log, first, sums);
  const F old = v::load(tile.max + first);
  // The larger one, and NaN once there is one.
  F now = v::max(old, top);
  now = _mm512_mask_mov_ps(now, _mm512_cmp_ps_mask(old, old, _CMP_UNORD_Q), old);
  const F alpha = exp_minus(old, now);
  const F local = integer ? exp_minus(top, now) : v::set(1.0f);
  float reference[16];
  v::store(reference, integer ? top : now);
  F row_sum[16];
  for (int i = 0; i < 16; ++i) {
    const int r = first + i;
    row_sum[i] = v::set(0.0f);
    if (r >= x.rows) continue;
    const float* scores = static_cast<const float*>(sums) + r * tile_keys;
    row_sum[i] =
        integer ? fused_row_u8(scores, reference[i], tile.v_inverse, tile.codes + r * tile_keys)
                : fused_row_bf16(scores, reference[i], tile.p_bf16 + r * tile_keys);
  }
  const F added = reduce_rows(row_sum, [](F a, F b) { return v::add(a, b); });
  const F unit = integer ? v::mul(local, v::set(1.0f / 255.0f)) : local;
  v::store(tile.max + first, now);
  v::store(tile.alpha + first, alpha);
  v::store(tile.beta + first, unit);
  v::store(tile.sum + first, v::fma(added, unit, v::mul(v::load(tile.sum + first), alpha)));
}

bool qk_softmax(const QueryOperands& x, const SoftmaxTile& tile) {
  const bool codes =
      (tile.rounding == Rounding::u8_token && !tile.v_plain) || tile.rounding == Rounding::u8;
  const bool halves = tile.rounding == Rounding::bf16 && tile.p_bf16;
  if (x.rows < least_tile_rows || x.width_bytes % 64 != 0 || tile.keys != tile_keys ||
      !(codes || halves)) {
    return false;
  }
  alignas(64) std::int32_t sums[fused_rows * tile_keys];
  const bool bf16 = x.engine == Engine::bf16;
  if (bf16) {
    fused_products<Product::bf16>(x, sums);
  } else {
    fused_products<Product::s8u8>(x, sums);
  }
  for (int first = 0; first < x.rows; first += 16) {
    if (bf16) {
      fused_block<Product::bf16>(x, tile, first, sums);
    } else {
      fused_block<Product::s8u8>(x, tile, first, sums);
    }
  }
  return true;
}
