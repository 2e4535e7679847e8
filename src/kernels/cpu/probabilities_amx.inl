// Softmax of rows of 128 sums for fused_amx.inl: scores in place of sums, then P. Scores are in
// octaves: base 2 (changed ones at first in units of e, as their change takes them).

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

/// What a tile of keys adds to its sums: s = sum * q_scale * scale + bias, in octaves.
struct ScoreTables {
  const float* scale;  ///< [tile_keys]
  alignas(64) float bias[tile_keys];
};

/// Scores of one row in place of its sums; returns their maxima by lane. `unit`: by how much they
/// are larger than those in units of e.
template <Product P, bool Biased>
static inline F score_row(float* row, float q_scale, std::int32_t correction, const ScoreTables& t,
                          float unit = log2_e) {
  const F scale = v::set(q_scale * unit);
  const F start = v::set(q_scale * unit * static_cast<float>(correction));
  F top = v::set(minus_infinity);
  for (int j = 0; j < tile_keys; j += v::lanes) {
    const F x = P == Product::bf16 ? v::mul(v::load(row + j), scale)
                                   : v::fma(v::to_float(v::load_i(row + j)), scale, start);
    const F k = v::load(t.scale + j);
    const F s = Biased ? v::fma(x, k, v::load(t.bias + j)) : v::mul(x, k);
    v::store(row + j, s);
    top = v::max(top, s);  // a bad query makes every score NaN, the last one too
  }
  return top;
}

/// The largest score of a row where that is so large that octaves or V's scales would have too
/// few bits, else 0.
static inline float far_score(const float* row) {
  F top = v::set(minus_infinity);
  for (int j = 0; j < tile_keys; j += v::lanes) top = v::max(top, v::load(row + j));
  const float most = v::reduce_max(top);
  const bool far = (most > 4096.0f || most < -4096.0f) && most != minus_infinity;
  return far ? most : 0.0f;
}

/// Changed scores, less `far`, to octaves, with what their tile adds; returns their maxima by lane,
/// NaN if one is. `low`: has one left the floats, for which it is too low in octaves alone?
template <bool Biased>
static inline F octaves_of_row(float* row, float far, const ScoreTables& t, bool& low) {
  const F unit = v::set(log2_e), lowest = v::set(minus_infinity), less = v::set(far);
  F top = lowest;
  v::Mask nan = v::no_lanes();
  unsigned left = 0;
  for (int j = 0; j < tile_keys; j += v::lanes) {
    const F x = v::sub(v::load(row + j), less);
    const F s = Biased ? v::fma(x, unit, v::load(t.bias + j)) : v::mul(x, unit);
    v::store(row + j, s);
    nan = v::or_nan(nan, s);
    top = v::max(top, s);
    left |= _mm512_cmp_ps_mask(s, lowest, _CMP_EQ_OQ) & _mm512_cmp_ps_mask(x, lowest, _CMP_GT_OQ);
  }
  low |= left != 0;
  return v::any(nan) ? v::set(__builtin_nanf("")) : top;
}

/// Hides all keys of a row but [begin, end); returns the maxima of what is left, NaN if one is.
static inline F hide_keys(float* row, std::int64_t begin, std::int64_t end) {
  const auto below = [](std::int64_t n) -> unsigned {
    return n <= 0 ? 0u : n >= v::lanes ? 0xFFFFu : (1u << n) - 1;
  };
  F top = v::set(minus_infinity);
  v::Mask nan = v::no_lanes();
  for (int j = 0; j < tile_keys; j += v::lanes) {
    const auto seen = static_cast<v::Mask>(below(end - j) & ~below(begin - j));
    const F s = _mm512_mask_mov_ps(v::set(minus_infinity), seen, v::load(row + j));
    v::store(row + j, s);
    nan = v::or_nan(nan, s);
    top = v::max(top, s);
  }
  return v::any(nan) ? v::set(__builtin_nanf("")) : top;
}

/// 2^t, relative error 1e-7: 2^0 is exact, -inf gives 0, NaN stays.
static inline F octaves(F t) {
  const F f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // t - floor(t)
  F p = v::set(1.867135431e-3f);
  p = v::fma(p, f, v::set(9.017018973e-3f));
  p = v::fma(p, f, v::set(5.579992121e-2f));
  p = v::fma(p, f, v::set(2.401644479e-1f));
  p = v::fma(p, f, v::set(6.931513120e-1f));
  p = v::fma(p, f, v::set(1.0f));
  return _mm512_scalef_ps(p, t);  // takes the floor itself
}

/// Four vectors of codes as bytes in their order. Packs interleave 128-bit lanes.
static inline I pack_codes(const I (&code)[4]) {
  const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const I words = _mm512_packus_epi16(_mm512_packus_epi32(code[0], code[1]),
                                      _mm512_packus_epi32(code[2], code[3]));
  return _mm512_permutexvar_epi32(order, words);
}

/// Sums of one row of P by lane: over V's scales, and of its codes before and after rounding.
struct CodeSums {
  F p, exact, codes;
};

/// One row of P as codes of which 255 stands at `reference`.
static inline CodeSums code_row(const float* s, F reference, const float* inverse,
                                std::uint8_t* codes) {
  CodeSums sum{v::set(0.0f), v::set(0.0f), v::set(0.0f)};
  for (int j = 0; j < tile_keys; j += 64) {
    I code[4];
    for (int n = 0; n < 4; ++n) {
      const int at = j + n * v::lanes;
      const F x = v::mul(octaves(v::sub(v::load(s + at), reference)), v::set(255.0f));
      code[n] = v::round_to_int(x);
      sum.exact = v::add(sum.exact, x);
      sum.codes = v::add(sum.codes, v::to_float(code[n]));
      if (inverse) sum.p = v::fma(x, v::load(inverse + at), sum.p);
    }
    v::store_i(codes + j, pack_codes(code));
  }
  if (!inverse) sum.p = sum.exact;
  return sum;
}

/// The same row as codes rounded down, and what these leave in 1 / 255 of a code.
static inline void code_row_twice(const float* s, F reference, std::uint8_t* codes,
                                  std::uint8_t* rest) {
  for (int j = 0; j < tile_keys; j += 64) {
    I code[4], left[4];
    for (int n = 0; n < 4; ++n) {
      const F t = v::sub(v::load(s + j + n * v::lanes), reference);
      const F x = v::mul(octaves(t), v::set(255.0f));
      code[n] = v::round_to_int(v::sub(x, v::set(0.5f)));
      left[n] = v::round_to_int(v::mul(v::sub(x, v::to_float(code[n])), v::set(255.0f)));
    }
    v::store_i(codes + j, pack_codes(code));
    v::store_i(rest + j, pack_codes(left));
  }
}

static inline F nearest_f16(F x) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

/// One row of P in bf16 (one part) or f16 (two), [Parts][tile_keys]; returns the sum
/// of the rounded values by lane.
template <int Parts>
static inline F half_row(const float* s, F reference, std::uint16_t* p) {
  const I pair_of_ones = v::set_i(0x3F803F80);
  F sum = v::set(0.0f);
  for (int j = 0; j < tile_keys; j += 32) {
    F a = octaves(v::sub(v::load(s + j), reference));
    F b = octaves(v::sub(v::load(s + j + 16), reference));
    if constexpr (Parts == 2) {
      a = nearest_f16(a);
      b = nearest_f16(b);
    }
    if constexpr (Parts > 1) sum = v::add(sum, v::add(a, b));
    for (int part = 0; part < Parts; ++part) {
      const auto both = reinterpret_cast<I>(_mm512_cvtne2ps_pbh(b, a));
      v::store_i(p + part * tile_keys + j, both);
      if constexpr (Parts == 1) sum = v::dot2(sum, both, pair_of_ones);
      a = v::sub(a, lower_floats(both));
      b = v::sub(b, upper_floats(both));
    }
  }
  return sum;
}
