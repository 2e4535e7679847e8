// Rows of floats to s8 codes, and their sums, a row's steps in registers. Continues words.inl.

/// The row's elements from `at` on, as load_row() gives them but for Inf, which stays.
template <Element Kind>
static inline F load_changed(const void* row, const RowsToCodes& x, int at, int n) {
  F y = load_elements<Kind>(row, at, n);
  if (x.mean) y = v::sub(y, v::load_n(x.mean + at, n));
  if (x.factors) y = v::mul(y, v::load_n(x.factors + at, n));
  return y;
}

/// The scale that formats::amax_scale() gives s8 codes, from a row's magnitudes.
static inline float scale_of_codes(F magnitudes, v::Mask nan) {
  constexpr float least = 0x1p-126f, part = 1.0f / 127.0f;
  const float most = v::reduce_max(magnitudes);
  if (v::any(nan) || most == __builtin_inff()) return __builtin_nanf("");
  const float scale = most * part;
  return scale < least ? least : scale;
}

/// One row. `Vectors`: so many whole ones, which stay in registers; 0: as many as there are, loaded
/// twice.
template <Element Kind, int Vectors>
static inline void row_to_codes(const RowsToCodes& x, int r) {
  const void* row = x.rows.row[r];
  constexpr int kept = Vectors > 0 ? Vectors : 1;
  const int count = Vectors > 0 ? Vectors : (x.channels + v::lanes - 1) / v::lanes;
  const auto value = [&](int i) {
    const int left = x.channels - i * v::lanes;
    return load_changed<Kind>(row, x, i * v::lanes,
                              Vectors > 0 || left > v::lanes ? v::lanes : left);
  };
  F y[kept], most = v::set(0.0f);
  v::Mask nan = v::no_lanes();
  for (int i = 0; i < count; ++i) {
    const F a = value(i);
    if constexpr (Vectors > 0) y[i] = a;
    nan = v::or_nan(nan, a);
    most = v::max(v::abs(a), most);
  }
  const float scale = scale_of_codes(most, nan);
  x.scale[r] = scale;
  std::int8_t* codes = x.codes + r * x.stride;
  if (scale != scale) {
    __builtin_memset(codes, 0, static_cast<std::size_t>(count * v::lanes));
    if (x.sum) x.sum[r] = 0;
    return;
  }
  // Nothing rounds beyond 127 under such a scale.
  const F inverse = v::set(1.0f / scale);
  I sum = v::set_i(0);
  for (int i = 0; i < count; ++i) {
    const I code =
        v::round_to_int(v::mul(Vectors > 0 ? y[Vectors > 0 ? i : 0] : value(i), inverse));
    v::store_bytes(codes + i * v::lanes, code);
    sum = v::add_i(sum, code);
  }
  if (x.sum) x.sum[r] = v::reduce_add(sum);
}

template <Element Kind>
static inline void rows_to_codes_of(const RowsToCodes& x) {
  for (int r = 0; r < x.count; ++r) {
    if (x.channels == 8 * v::lanes) {
      row_to_codes<Kind, 8>(x, r);
    } else if (x.channels == 4 * v::lanes) {
      row_to_codes<Kind, 4>(x, r);
    } else {
      row_to_codes<Kind, 0>(x, r);
    }
  }
}

void rows_to_codes(const RowsToCodes& x) {
  if (x.rows.element == Element::f32) return rows_to_codes_of<Element::f32>(x);
  if (x.rows.element == Element::f16) return rows_to_codes_of<Element::f16>(x);
  rows_to_codes_of<Element::bf16>(x);
}

template <Element Kind>
static inline void sum_rows_of(const FloatRows& x, int count, int channels, float* sum) {
  constexpr int at_once = 4;
  const auto add = [](F total, F a) { return v::add(total, v::add(a, v::sub(a, a))); };
  int c = 0;
  for (; c + at_once * v::lanes <= channels; c += at_once * v::lanes) {
    F total[at_once];
    for (int i = 0; i < at_once; ++i) total[i] = v::set(0.0f);
    for (int r = 0; r < count; ++r) {
      for (int i = 0; i < at_once; ++i) {
        total[i] = add(total[i], load_elements<Kind>(x.row[r], c + i * v::lanes, v::lanes));
      }
    }
    for (int i = 0; i < at_once; ++i) v::store(sum + c + i * v::lanes, total[i]);
  }
  for (; c < channels; c += v::lanes) {
    const int left = channels - c < v::lanes ? channels - c : v::lanes;
    F total = v::set(0.0f);
    for (int r = 0; r < count; ++r) total = add(total, load_elements<Kind>(x.row[r], c, left));
    v::store(sum + c, total);
  }
}

void sum_rows(const FloatRows& x, int count, int channels, float* sum) {
  if (x.element == Element::f32) return sum_rows_of<Element::f32>(x, count, channels, sum);
  if (x.element == Element::f16) return sum_rows_of<Element::f16>(x, count, channels, sum);
  sum_rows_of<Element::bf16>(x, count, channels, sum);
}

using Doubles = double __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(32)));

template <Element Kind>
static inline double dot_of(const void* row, int channels, const float* with) {
  Doubles total[2] = {};
  for (int c = 0; c < channels; c += v::lanes) {
    const int left = channels - c < v::lanes ? channels - c : v::lanes;
    F x = load_elements<Kind>(row, c, left);
    x = v::add(x, v::sub(x, x));
    float a[v::lanes];
    v::store(a, x);
    for (int i = 0; i < 2; ++i) {
      Floats p, q;
      __builtin_memcpy(&p, a + 8 * i, sizeof p);
      __builtin_memcpy(&q, with + c + 8 * i, sizeof q);
      total[i] += __builtin_convertvector(p, Doubles) * __builtin_convertvector(q, Doubles);
    }
  }
  double sum = 0.0;
  for (const Doubles& part : total) {
    for (int i = 0; i < 8; ++i) sum += part[i];
  }
  return sum;
}

double dot(const void* row, Element element, int channels, const float* with) {
  if (element == Element::f32) return dot_of<Element::f32>(row, channels, with);
  if (element == Element::f16) return dot_of<Element::f16>(row, channels, with);
  return dot_of<Element::bf16>(row, channels, with);
}
