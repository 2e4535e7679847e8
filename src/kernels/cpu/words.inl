// Bodies of the CPU words, written once over isa/cpu. The including unit defines QATTN_ISA as the
// namespace of its vocabulary. No standard library containers or algorithms here: see words.hpp.
#include <cstdint>

#include "formats/lost_share.hpp"
#include "kernels/cpu/words.hpp"

namespace qattn::cpu {
namespace {
namespace v = isa::QATTN_ISA;
using v::F;
using v::I;

constexpr float log2_e = 1.44269504088896340736f;
constexpr float minus_infinity = -__builtin_inff();
constexpr float ones[v::lanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/// 2^t for t <= 128. Relative error 1e-7: a minimax polynomial of degree 6 on [-0.5, 0.5] with the
/// constant fixed at 1, so that 2^0 is exact. -inf and results below 2^-126 give 0, NaN stays NaN.
static inline F exp2(F t) {
  t = v::max(v::set(-200.0f), t);
  const F n = v::round_even(t);
  const F f = v::sub(t, n);
  F p = v::set(1.54531629e-4f);
  p = v::fma(p, f, v::set(1.33908634e-3f));
  p = v::fma(p, f, v::set(9.61808256e-3f));
  p = v::fma(p, f, v::set(5.55035711e-2f));
  p = v::fma(p, f, v::set(2.40226508e-1f));
  p = v::fma(p, f, v::set(6.93147188e-1f));
  p = v::fma(p, f, v::set(1.0f));
  return v::scale_by_power(p, n);
}

/// exp(s - ref): s - ref first, since it is exact where it matters (Sterbenz) and scores are large.
static inline F exp_minus(F s, F ref) { return exp2(v::mul(v::sub(s, ref), v::set(log2_e))); }

static inline float first_lane(F a) {
  float x[v::lanes];
  v::store(x, a);
  return x[0];
}

float exp_one(float x) { return first_lane(exp_minus(v::set(x), v::set(0.0f))); }

/// n <= lanes elements from the one at `at` on, zeros behind.
template <Element Kind>
static inline F load_elements(const void* p, int at, int n) {
  if constexpr (Kind == Element::f32) return v::load_n(static_cast<const float*>(p) + at, n);
  const auto* codes = static_cast<const std::uint16_t*>(p) + at;
  return Kind == Element::f16 ? v::load_f16_n(codes, n) : v::load_bf16_n(codes, n);
}

template <Element Kind>
static inline void load_row_of(const void* src, int n, const float* mean, float* dst) {
  const auto put = [&](int i, int m) {
    F x = load_elements<Kind>(src, i, m);
    x = v::add(x, v::sub(x, x));  // Inf - Inf = NaN; finite values get + 0
    if (mean) x = v::sub(x, v::load_n(mean + i, m));
    v::store(dst + i, x);
  };
  int i = 0;  // whole vectors by themselves: a count that is known takes one load
  for (; i + v::lanes <= n; i += v::lanes) put(i, v::lanes);
  if (i < n) put(i, n - i);
}

void load_row(const void* src, Element element, int n, const float* mean, float* dst) {
  if (element == Element::f32) return load_row_of<Element::f32>(src, n, mean, dst);
  if (element == Element::f16) return load_row_of<Element::f16>(src, n, mean, dst);
  load_row_of<Element::bf16>(src, n, mean, dst);
}

float amax(const float* x, int n) {
  F m = v::set(0.0f);
  v::Mask nan = v::no_lanes();
  for (int i = 0; i < n; i += v::lanes) {
    const F a = v::abs(v::load(x + i));
    nan = v::or_nan(nan, a);
    m = v::max(a, m);
  }
  return v::any(nan) ? __builtin_nanf("") : v::reduce_max(m);
}

/// Sixteen codes; NaN becomes 0 (its token's scale carries it), and the clamp keeps the conversion
/// in range. Returns how many rounded beyond 127.
static inline int encode_s8_lanes(F y, std::int8_t* codes) {
  const F magnitude = v::abs(y);
  y = v::select_less(v::set(-1.0f), magnitude, y, v::set(0.0f));
  const F rounded = v::round_even(v::min(magnitude, v::set(1e6f)));
  y = v::max(v::min(y, v::set(127.0f)), v::set(-127.0f));
  v::store_bytes(codes, v::round_to_int(y));
  return v::count_greater(rounded, v::set(127.0f));
}

int encode_s8(const float* x, int n, float inverse, std::int8_t* codes) {
  int clipped = 0;
  const F factor = v::set(inverse);
  for (int i = 0; i < n; i += v::lanes) {
    clipped += encode_s8_lanes(v::mul(v::load(x + i), factor), codes + i);
  }
  return clipped;
}

int encode_s8_channels(const float* x, int n, const float* inverse, std::int8_t* codes) {
  int clipped = 0;
  for (int i = 0; i < n; i += v::lanes) {
    clipped += encode_s8_lanes(v::mul(v::load(x + i), v::load(inverse + i)), codes + i);
  }
  return clipped;
}

void accumulate_amax(const float* x, int n, float* acc) {
  for (int i = 0; i < n; i += v::lanes) {
    const F a = v::abs(v::load(x + i));
    const F old = v::load(acc + i);
    F m = v::max(old, a);             // a where either is NaN ...
    m = v::add(m, v::sub(old, old));  // ... so NaN of `old` is put back
    v::store(acc + i, m);
  }
}

/// Signs of a butterfly's own lane, for distances 1, 2, 4, 8: the upper of two is subtracted.
constexpr float own_sign[4][v::lanes] = {
    {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
    {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
    {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
    {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
};

template <int Distance>
static inline F butterfly(F a, const float* sign) {
  return v::add(v::exchange<Distance>(a), v::mul(a, v::load(sign)));
}

void hadamard(float* x, int n, int block, float norm) {
  for (int i = 0; i < n; i += v::lanes) {
    F a = v::load(x + i);
    a = butterfly<1>(a, own_sign[0]);
    a = butterfly<2>(a, own_sign[1]);
    a = butterfly<4>(a, own_sign[2]);
    v::store(x + i, butterfly<8>(a, own_sign[3]));
  }
  for (int distance = v::lanes; distance < block; distance *= 2) {
    for (int start = 0; start < n; start += 2 * distance) {
      for (int i = start; i < start + distance; i += v::lanes) {
        const F a = v::load(x + i), b = v::load(x + i + distance);
        v::store(x + i, v::add(a, b));
        v::store(x + i + distance, v::sub(a, b));
      }
    }
  }
  for (int i = 0; i < n; i += v::lanes) v::store(x + i, v::mul(v::load(x + i), v::set(norm)));
}

void narrow_bf16(const float* x, int n, std::uint16_t* out) {
  for (int i = 0; i < n; i += v::lanes) v::store_bf16(out + i, v::load(x + i));
}

/// Natural logarithm of positive normal floats, absolute error 1e-7: with x = 2^e m and
/// t = (m - 1) / (m + 1) in [0, 1/3], log m = 2 atanh t.
static inline F natural_log(F x) {
  const F m = v::mantissa(x);
  const F t = v::div(v::sub(m, v::set(1.0f)), v::add(m, v::set(1.0f)));
  const F y = v::mul(t, t);
  F p = v::set(2.0f / 15);
  p = v::fma(p, y, v::set(2.0f / 13));
  p = v::fma(p, y, v::set(2.0f / 11));
  p = v::fma(p, y, v::set(2.0f / 9));
  p = v::fma(p, y, v::set(2.0f / 7));
  p = v::fma(p, y, v::set(2.0f / 5));
  p = v::fma(p, y, v::set(2.0f / 3));
  p = v::fma(p, y, v::set(2.0f));
  return v::fma(v::exponent(x), v::set(0.69314718056f), v::mul(p, t));
}

void token_scale_tables(const float* scale, int count, float* log, float* inverse) {
  constexpr float smallest = formats::kLeastTokenScale;
  for (int j = 0; j < tile_keys; j += v::lanes) {
    const int left = count - j < 0 ? 0 : count - j;
    const F s = v::load_n(scale + (left ? j : 0), left);
    const F exists = v::load_n(ones + 0, left);
    const F floored = v::max(s, v::set(smallest));
    v::store(log + j, v::mul(natural_log(floored), exists));
    v::store(inverse + j, v::mul(v::div(v::set(1.0f), floored), exists));
  }
}

// --- The two products, once for all engines ------------------------------------------------------
//
// An engine multiplies `pack` elements of the contraction at a time: four codes, two bf16 values or
// one float stand side by side for each of sixteen columns (keys in Q K^T, channels in P V).

struct Integer {
  using Row = std::int8_t;  // or u8: the sign is the order of dot4's operands
  using Panel = std::uint8_t;
  using Sum = I;
  static constexpr int pack = 4;
  static Sum zero() { return v::set_i(0); }
  static F to_float(Sum x) { return v::to_float(x); }
  static I panel(const Panel* p) { return v::load_i(p); }
};
struct IntegerQK : Integer {
  static Sum step(Sum c, const Row* row, I keys) { return v::dot4(c, keys, v::broadcast4(row)); }
};
struct IntegerPV : Integer {
  static Sum step(Sum c, const Row* row, I values) {
    return v::dot4(c, v::broadcast4(row), values);
  }
};
struct Single {
  using Row = float;
  using Panel = float;
  using Sum = F;
  static constexpr int pack = 1;
  static Sum zero() { return v::set(0.0f); }
  static F to_float(Sum x) { return x; }
  static F panel(const Panel* p) { return v::load(p); }
  static Sum step(Sum c, const Row* row, F column) { return v::fma(v::set(*row), column, c); }
};
#if defined(QATTN_NATIVE_BF16)
struct Brain {
  using Row = std::uint16_t;
  using Panel = std::uint16_t;
  using Sum = F;
  static constexpr int pack = 2;
  static Sum zero() { return v::set(0.0f); }
  static F to_float(Sum x) { return x; }
  static I panel(const Panel* p) { return v::load_i(p); }
  static Sum step(Sum c, const Row* row, I column) {
    return v::dot2(c, v::broadcast4(row), column);
  }
};
#endif

/// One R x (16 N) block. `steps` packs of the contraction; the panel of column group n begins at
/// n * group_stride, and one step advances it by step_stride (both in elements).
template <class E, int R, int N>
static inline void block(const typename E::Row* row, std::int64_t row_stride,
                         const typename E::Panel* panel, std::int64_t group_stride,
                         std::int64_t step_stride, int steps, typename E::Sum (&acc)[R][N]) {
  for (int t = 0; t < steps; ++t) {
    decltype(E::panel(panel)) columns[N];
    for (int n = 0; n < N; ++n) columns[n] = E::panel(panel + n * group_stride + t * step_stride);
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) {
        acc[r][n] = E::step(acc[r][n], row + r * row_stride + t * E::pack, columns[n]);
      }
    }
  }
}

template <int Count>
struct Rows {
  static constexpr int count = Count;
};

/// Sixteens of a block, as many as registers hold sums for: 4 rows of 4 fill AVX-512's, 6 rows of
/// one those of others.
#if defined(__AVX512F__)
constexpr int block_groups = 4;
#else
constexpr int block_groups = 1;
#endif

/// Calls f(first row, count as a type) for blocks of rows: fours, or sixes as long as what is left
/// makes fours.
template <class Function>
static inline void each_rows(int rows, Function f) {
  int r = 0;
  if constexpr (block_groups == 1) {
    for (; rows - r >= 6 && rows - r != 8; r += 6) f(r, Rows<6>{});
  }
  for (; r + 4 <= rows; r += 4) f(r, Rows<4>{});
  for (; r < rows; ++r) f(r, Rows<1>{});
}

/// Operands of one Q K^T call; `correction` is null for the float engines.
template <class E>
struct QK {
  const typename E::Row* q;
  const typename E::Panel* k;
  int steps;
  const float* q_scale;
  const std::int32_t* correction;
  const float* k_scale;
  float* scores;
};

template <class E, int R, int N>
static inline void qk_block(const QK<E>& x, int r0, int j0) {
  const std::int64_t width = std::int64_t{x.steps} * E::pack;
  typename E::Sum acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      if constexpr (E::pack == 4) {
        acc[r][n] = v::set_i(x.correction[r0 + r]);
      } else {
        acc[r][n] = E::zero();
      }
    }
  }
  block<E, R, N>(x.q + r0 * width, width, x.k + j0 * width, width * v::lanes, E::pack * v::lanes,
                 x.steps, acc);
  for (int r = 0; r < R; ++r) {
    const F scale = v::set(x.q_scale[r0 + r]);
    for (int n = 0; n < N; ++n) {
      const int j = j0 + n * v::lanes;
      const F s = v::mul(v::mul(E::to_float(acc[r][n]), scale), v::load(x.k_scale + j));
      v::store(x.scores + (r0 + r) * tile_keys + j, s);
    }
  }
}

template <class E, int R>
static inline void qk_rows(const QK<E>& x, int r0, int keys) {
  int j = 0;
  for (; j + block_groups * v::lanes <= keys; j += block_groups * v::lanes)
    qk_block<E, R, block_groups>(x, r0, j);
  for (; j < keys; j += v::lanes) qk_block<E, R, 1>(x, r0, j);
}

template <class E>
static inline void qk(const QK<E>& x, int rows, int keys) {
  each_rows(rows, [&](int r, auto some) { qk_rows<E, decltype(some)::count>(x, r, keys); });
}

/// Operands of one P V call.
template <class E>
struct PV {
  const typename E::Row* p;
  const typename E::Panel* values;
  int steps, channels;
  const float *alpha, *beta, *v_scale;
  float* out;
};

template <class E, int R, int N>
static inline void pv_block(const PV<E>& x, int r0, int c0) {
  typename E::Sum acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = E::zero();
  }
  block<E, R, N>(x.p + r0 * tile_keys, tile_keys, x.values + c0 * E::pack, E::pack * v::lanes,
                 std::int64_t{x.channels} * E::pack, x.steps, acc);
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      F t = E::to_float(acc[r][n]);
      if (x.v_scale) t = v::mul(t, v::load(x.v_scale + c0 + n * v::lanes));
      float* o = x.out + (r0 + r) * x.channels + c0 + n * v::lanes;
      const F kept = v::mul(v::load(o), v::set(x.alpha[r0 + r]));
      v::store(o, v::fma(t, v::set(x.beta[r0 + r]), kept));
    }
  }
}

template <class E, int R>
static inline void pv_rows(const PV<E>& x, int r0) {
  constexpr int step = block_groups * v::lanes;
  int c = 0;
  for (; c + step <= x.channels; c += step) pv_block<E, R, block_groups>(x, r0, c);
  for (; c < x.channels; c += v::lanes) pv_block<E, R, 1>(x, r0, c);
}

template <class E>
static inline void pv(const PV<E>& x, int rows) {
  each_rows(rows, [&](int r, auto some) { pv_rows<E, decltype(some)::count>(x, r); });
}

void qk_s8_lanes(const std::int8_t* q, int rows, const std::uint8_t* k, int keys, int d4,
                 const float* q_scale, const std::int32_t* correction, const float* k_scale,
                 float* scores) {
  qk<IntegerQK>({q, k, d4, q_scale, correction, k_scale, scores}, rows, keys);
}
void pv_u8s8_lanes(const std::uint8_t* codes, int rows, const std::int8_t* value, int keys,
                   int channels, const float* alpha, const float* beta, const float* v_scale,
                   float* out) {
  pv<IntegerPV>(
      {reinterpret_cast<const std::int8_t*>(codes), reinterpret_cast<const std::uint8_t*>(value),
       keys / 4, channels, alpha, beta, v_scale, out},
      rows);
}
#if defined(QATTN_NATIVE_BF16)
void qk_bf16_lanes(const std::uint16_t* q, int rows, const std::uint16_t* k, int keys, int d2,
                   const float* q_scale, const float* k_scale, float* scores) {
  qk<Brain>({q, k, d2, q_scale, nullptr, k_scale, scores}, rows, keys);
}
void pv_bf16_lanes(const std::uint16_t* p, int rows, const std::uint16_t* value, int keys,
                   int channels, const float* alpha, const float* beta, const float* v_scale,
                   float* out) {
  pv<Brain>({p, value, keys / 2, channels, alpha, beta, v_scale, out}, rows);
}
#endif

void qk_f32(const float* q, int rows, const float* k, int keys, int d, const float* q_scale,
            const float* k_scale, float* scores) {
  qk<Single>({q, k, d, q_scale, nullptr, k_scale, scores}, rows, keys);
}
void pv_f32(const float* p, int rows, const float* value, int keys, int channels,
            const float* alpha, const float* beta, const float* v_scale, float* out) {
  pv<Single>({p, value, keys, channels, alpha, beta, v_scale, out}, rows);
}

// --- Products with a packed weight ---------------------------------------------------------------

template <class E, int R, int N>
static inline void linear_block(const LinearTile& x, int r0, int g0) {
  using Row = typename E::Row;
  using Panel = typename E::Panel;
  float* out = x.out + r0 * x.out_stride + g0 * v::lanes;
  typename E::Sum acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = v::load(out + r * x.out_stride + n * v::lanes);
  }
  block<E, R, N>(static_cast<const Row*>(x.x) + r0 * x.x_stride, x.x_stride,
                 static_cast<const Panel*>(x.w) + g0 * x.w_stride, x.w_stride, E::pack * v::lanes,
                 x.d / E::pack, acc);
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) v::store(out + r * x.out_stride + n * v::lanes, acc[r][n]);
  }
}

template <class E, int R>
static inline void linear_rows(const LinearTile& x, int r0) {
  int g = 0;
  for (; g + block_groups <= x.groups; g += block_groups) {
    linear_block<E, R, block_groups>(x, r0, g);
  }
  for (; g < x.groups; ++g) linear_block<E, R, 1>(x, r0, g);
}

template <class E>
static inline void linear(const LinearTile& x) {
  int r = 0;
  for (; r + 6 <= x.rows; r += 6) linear_rows<E, 6>(x, r);
  for (; r + 2 <= x.rows; r += 2) linear_rows<E, 2>(x, r);
  for (; r < x.rows; ++r) linear_rows<E, 1>(x, r);
}

void linear_f32(const LinearTile& tile) { linear<Single>(tile); }
#if defined(QATTN_NATIVE_BF16) && !defined(QATTN_TILE_PRODUCTS)
void linear_bf16(const LinearTile& tile) { linear<Brain>(tile); }
#endif

void encode_bf16(const float* x, int n, std::uint16_t* out) {
  for (int i = 0; i < n; i += v::lanes) {
    const F a = v::load(x + i);
    v::store_bf16(out + i, v::round_mantissa(a, 16));
    if (!v::any(v::or_nan(v::no_lanes(), a))) continue;
    for (int k = i; k < i + v::lanes; ++k) {  // rounding may carry a NaN's payload away
      std::uint32_t bits;
      __builtin_memcpy(&bits, x + k, sizeof bits);
      if (x[k] != x[k]) out[k] = static_cast<std::uint16_t>(bits >> 16 | 0x40u);
    }
  }
}

void encode_f16(const float* x, int n, std::uint16_t* out) {
  for (int i = 0; i < n; i += v::lanes) v::store_f16(out + i, v::load(x + i));
}
