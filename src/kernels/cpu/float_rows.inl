// Few query rows over K and V in floats as they lie: products without panels. Continues words.inl.

/// Are all values finite? Zero times anything else is NaN.
template <Element Kind>
static inline bool finite_rows_of(const FloatRows& x, int rows, int channels) {
  constexpr int step = 4 * v::lanes;
  const F zero = v::set(0.0f);
  F sum[4] = {zero, zero, zero, zero};
  for (int j = 0; j < rows; ++j) {
    const void* row = x.row[j];
    int c = 0;
    for (; c + step <= channels; c += step) {
      for (int n = 0; n < 4; ++n) {
        sum[n] = v::fma(load_elements<Kind>(row, c + n * v::lanes, v::lanes), zero, sum[n]);
      }
    }
    for (; c < channels; c += v::lanes) {
      const int n = channels - c < v::lanes ? channels - c : v::lanes;
      sum[0] = v::fma(load_elements<Kind>(row, c, n), zero, sum[0]);
    }
  }
  const F all = v::add(v::add(sum[0], sum[1]), v::add(sum[2], sum[3]));
  return !v::any(v::or_nan(v::no_lanes(), all));
}

bool finite_rows(const FloatRows& x, int rows, int channels) {
  if (x.element == Element::f32) return finite_rows_of<Element::f32>(x, rows, channels);
  if (x.element == Element::f16) return finite_rows_of<Element::f16>(x, rows, channels);
  return finite_rows_of<Element::bf16>(x, rows, channels);
}

/// Brings sixteen elements of the rows that are read after these into L2: products and memory take
/// their time together.
template <Element Kind>
static inline void fetch_elements(const FloatRows& x, int j, int c) {
  constexpr int bytes = Kind == Element::f32 ? 4 : 2;
  __builtin_prefetch(static_cast<const char*>(x.next[j]) + c * bytes, 0, 2);
}

/// Operands of qk_float_rows().
struct FloatQK {
  const float* q;
  std::int64_t q_stride;
  const FloatRows& k;
  int d;
  const float* q_scale;
  float* scores;
};

/// Four products, in lanes to be summed: R rows of Q from r0 on times 4 / R keys from j0 on. Behind
/// the last key it stands again.
template <Element Kind, int R>
static inline void four_products(const FloatQK& x, int r0, int j0, int keys, F* acc) {
  constexpr int count = 4 / R;
  const void* row[count];
  for (int n = 0; n < count; ++n) row[n] = x.k.row[j0 + n < keys ? j0 + n : keys - 1];
  for (int i = 0; i < 4; ++i) acc[i] = v::set(0.0f);
  const float* q = x.q + r0 * x.q_stride;
  const bool fetches = x.k.next != nullptr && r0 == 0 && j0 + count <= keys;
  int c = 0;
  for (; c + v::lanes <= x.d; c += v::lanes) {
    F k[count];
    for (int n = 0; n < count; ++n) k[n] = load_elements<Kind>(row[n], c, v::lanes);
    for (int n = 0; fetches && n < count; ++n) fetch_elements<Kind>(x.k, j0 + n, c);
    for (int r = 0; r < R; ++r) {
      const F a = v::load(q + r * x.q_stride + c);
      for (int n = 0; n < count; ++n) acc[n * R + r] = v::fma(a, k[n], acc[n * R + r]);
    }
  }
  for (int n = 0; n < count && c < x.d; ++n) {
    const F k = load_elements<Kind>(row[n], c, x.d - c);
    for (int r = 0; r < R; ++r) {
      const F a = v::load_n(q + r * x.q_stride + c, x.d - c);
      acc[n * R + r] = v::fma(a, k, acc[n * R + r]);
    }
  }
}

template <Element Kind, int R>
static inline void qk_some_rows(const FloatQK& x, int r0, int keys) {
  constexpr int step = 8 / R;
  for (int j = 0; j < keys; j += step) {
    F acc[8];
    float sums[8];
    four_products<Kind, R>(x, r0, j, keys, acc);
    four_products<Kind, R>(x, r0, j + step / 2, keys, acc + 4);
    v::reduce_add_8(acc, sums);
    for (int n = 0; n < step; ++n) {
      for (int r = 0; r < R && j + n < keys; ++r) {
        x.scores[(r0 + r) * tile_keys + j + n] = sums[n * R + r] * x.q_scale[r0 + r];
      }
    }
  }
}

template <Element Kind>
static inline void qk_all_rows(const FloatQK& x, int rows, int keys) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) qk_some_rows<Kind, 4>(x, r, keys);
  for (; r + 2 <= rows; r += 2) qk_some_rows<Kind, 2>(x, r, keys);
  for (; r < rows; ++r) qk_some_rows<Kind, 1>(x, r, keys);
}

void qk_float_rows(const float* q, std::int64_t q_stride, int rows, const FloatRows& k, int keys,
                   int d, const float* q_scale, float* scores) {
  const FloatQK x{q, q_stride, k, d, q_scale, scores};
  if (k.element == Element::f32) return qk_all_rows<Element::f32>(x, rows, keys);
  if (k.element == Element::f16) return qk_all_rows<Element::f16>(x, rows, keys);
  qk_all_rows<Element::bf16>(x, rows, keys);
}

/// Operands of pv_float_rows().
struct FloatPV {
  const float* p;
  const FloatRows& values;
  int keys, channels;  ///< channels of V's rows; those of `out` are padded
  const float *alpha, *beta;
  float* out;
  std::int64_t width;  ///< of out's rows
};

/// R rows of P times N sixteens of channels from c0 on, `last` of them in the last sixteen.
template <Element Kind, int R, int N>
static inline void pv_float_block(const FloatPV& x, int r0, int c0, int last) {
  F acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = v::set(0.0f);
  }
  const float* p = x.p + r0 * tile_keys;
  const bool fetches = x.values.next != nullptr && r0 == 0;
  for (int j = 0; j < x.keys; ++j) {
    const void* row = x.values.row[j];
    for (int n = 0; fetches && n < N; ++n) fetch_elements<Kind>(x.values, j, c0 + n * v::lanes);
    F value[N];
    for (int n = 0; n < N; ++n) {
      value[n] = load_elements<Kind>(row, c0 + n * v::lanes, n + 1 < N ? v::lanes : last);
    }
    for (int r = 0; r < R; ++r) {
      const F weight = v::set(p[r * tile_keys + j]);
      for (int n = 0; n < N; ++n) acc[r][n] = v::fma(weight, value[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      float* o = x.out + (r0 + r) * x.width + c0 + n * v::lanes;
      const F kept = v::mul(v::load(o), v::set(x.alpha[r0 + r]));
      v::store(o, v::fma(acc[r][n], v::set(x.beta[r0 + r]), kept));
    }
  }
}

/// As many sums as registers hold beside V's values.
#if defined(__AVX512F__)
constexpr int float_sums = 16;
#else
constexpr int float_sums = 4;
#endif

template <Element Kind, int R>
static inline void pv_some_rows(const FloatPV& x, int r0) {
  constexpr int step = float_sums / R < 4 ? float_sums / R : 4;
  int c = 0;
  for (; c + step * v::lanes <= x.channels; c += step * v::lanes) {
    pv_float_block<Kind, R, step>(x, r0, c, v::lanes);
  }
  for (; c < x.channels; c += v::lanes) {
    const int left = x.channels - c;
    if (left >= v::lanes) {
      pv_float_block<Kind, R, 1>(x, r0, c, v::lanes);
    } else {
      pv_float_block<Kind, R, 1>(x, r0, c, left);
    }
  }
}

template <Element Kind>
static inline void pv_all_rows(const FloatPV& x, int rows) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) pv_some_rows<Kind, 4>(x, r);
  for (; r + 2 <= rows; r += 2) pv_some_rows<Kind, 2>(x, r);
  for (; r < rows; ++r) pv_some_rows<Kind, 1>(x, r);
}

void pv_float_rows(const float* p, int rows, const FloatRows& values, int keys, int channels,
                   const float* alpha, const float* beta, float* out) {
  const int width = (channels + v::lanes - 1) / v::lanes * v::lanes;
  const FloatPV x{p, values, keys, channels, alpha, beta, out, width};
  if (values.element == Element::f32) return pv_all_rows<Element::f32>(x, rows);
  if (values.element == Element::f16) return pv_all_rows<Element::f16>(x, rows);
  pv_all_rows<Element::bf16>(x, rows);
}
