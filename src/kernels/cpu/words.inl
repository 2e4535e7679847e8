// Bodies of the CPU words, written once over isa/cpu. The including unit defines QATTN_ISA as the
// namespace of its vocabulary. No standard library containers or algorithms here: see words.hpp.
#include <cstdint>

#include "kernels/cpu/words.hpp"

namespace qattn::cpu {
namespace {
namespace v = isa::QATTN_ISA;
using v::F;
using v::I;

constexpr float log2_e = 1.44269504088896340736f;
constexpr float minus_infinity = -__builtin_inff();

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

void load_row(const void* src, Element element, int n, const float* mean, float* dst) {
  for (int i = 0; i < n; i += v::lanes) {
    const int m = n - i < v::lanes ? n - i : v::lanes;
    F x;
    if (element == Element::f32) {
      x = v::load_n(static_cast<const float*>(src) + i, m);
    } else if (element == Element::f16) {
      x = v::load_f16_n(static_cast<const std::uint16_t*>(src) + i, m);
    } else {
      x = v::load_bf16_n(static_cast<const std::uint16_t*>(src) + i, m);
    }
    x = v::add(x, v::sub(x, x));  // Inf - Inf = NaN; finite values get + 0
    if (mean) x = v::sub(x, v::load_n(mean + i, m));
    v::store(dst + i, x);
  }
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
  y = v::select_less(magnitude, v::set(__builtin_inff()), y, v::set(0.0f));
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

void accumulate(const float* x, int n, float* sum) {
  for (int i = 0; i < n; i += v::lanes) v::store(sum + i, v::add(v::load(sum + i), v::load(x + i)));
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

// --- Q K^T -------------------------------------------------------------------------------------

template <int R, int N>
static inline void qk_s8_block(const std::int8_t* q, const std::uint8_t* k, int d4,
                               const float* q_scale, const std::int32_t* correction,
                               const float* k_scale, float* scores) {
  I acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = v::set_i(correction[r]);
  }
  for (int t = 0; t < d4; ++t) {
    I keys[N];
    for (int n = 0; n < N; ++n) keys[n] = v::load_i(k + (n * d4 + t) * 64);
    for (int r = 0; r < R; ++r) {
      const I row = v::broadcast4(q + (r * d4 + t) * 4);
      for (int n = 0; n < N; ++n) acc[r][n] = v::dot4(acc[r][n], keys[n], row);
    }
  }
  for (int r = 0; r < R; ++r) {
    const F scale = v::set(q_scale[r]);
    for (int n = 0; n < N; ++n) {
      const F s = v::mul(v::mul(v::to_float(acc[r][n]), scale), v::load(k_scale + n * v::lanes));
      v::store(scores + r * tile_keys + n * v::lanes, s);
    }
  }
}

template <int R>
static inline void qk_s8_rows(const std::int8_t* q, const std::uint8_t* k, int keys, int d4,
                              const float* q_scale, const std::int32_t* correction,
                              const float* k_scale, float* scores) {
  int j = 0;
  for (; j + 64 <= keys; j += 64) {
    qk_s8_block<R, 4>(q, k + j * d4 * 4, d4, q_scale, correction, k_scale + j, scores + j);
  }
  for (; j < keys; j += v::lanes) {
    qk_s8_block<R, 1>(q, k + j * d4 * 4, d4, q_scale, correction, k_scale + j, scores + j);
  }
}

void qk_s8(const std::int8_t* q, int rows, const std::uint8_t* k, int keys, int d4,
           const float* q_scale, const std::int32_t* correction, const float* k_scale,
           float* scores) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    qk_s8_rows<4>(q + r * d4 * 4, k, keys, d4, q_scale + r, correction + r, k_scale,
                  scores + r * tile_keys);
  }
  for (; r < rows; ++r) {
    qk_s8_rows<1>(q + r * d4 * 4, k, keys, d4, q_scale + r, correction + r, k_scale,
                  scores + r * tile_keys);
  }
}

template <int R, int N>
static inline void qk_f32_block(const float* q, const float* k, int d, const float* q_scale,
                                const float* k_scale, float* scores) {
  F acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = v::set(0.0f);
  }
  for (int t = 0; t < d; ++t) {
    F keys[N];
    for (int n = 0; n < N; ++n) keys[n] = v::load(k + (n * d + t) * v::lanes);
    for (int r = 0; r < R; ++r) {
      const F row = v::set(q[r * d + t]);
      for (int n = 0; n < N; ++n) acc[r][n] = v::fma(row, keys[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      F s = v::mul(acc[r][n], v::set(q_scale[r]));
      if (k_scale) s = v::mul(s, v::load(k_scale + n * v::lanes));
      v::store(scores + r * tile_keys + n * v::lanes, s);
    }
  }
}

template <int R>
static inline void qk_f32_rows(const float* q, const float* k, int keys, int d,
                               const float* q_scale, const float* k_scale, float* scores) {
  int j = 0;
  for (; j + 64 <= keys; j += 64) {
    qk_f32_block<R, 4>(q, k + j * d, d, q_scale, k_scale ? k_scale + j : nullptr, scores + j);
  }
  for (; j < keys; j += v::lanes) {
    qk_f32_block<R, 1>(q, k + j * d, d, q_scale, k_scale ? k_scale + j : nullptr, scores + j);
  }
}

void qk_f32(const float* q, int rows, const float* k, int keys, int d, const float* q_scale,
            const float* k_scale, float* scores) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    qk_f32_rows<4>(q + r * d, k, keys, d, q_scale + r, k_scale, scores + r * tile_keys);
  }
  for (; r < rows; ++r) {
    qk_f32_rows<1>(q + r * d, k, keys, d, q_scale + r, k_scale, scores + r * tile_keys);
  }
}

// --- P V ---------------------------------------------------------------------------------------

template <int R, int N>
static inline void pv_u8s8_block(const std::uint8_t* codes, const std::int8_t* value, int keys,
                                 int channels, const float* alpha, const float* beta,
                                 const float* v_scale, float* out) {
  I acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = v::set_i(0);
  }
  for (int j = 0; j < keys; j += 4) {
    I values[N];
    for (int n = 0; n < N; ++n) values[n] = v::load_i(value + j * channels + n * 64);
    for (int r = 0; r < R; ++r) {
      const I row = v::broadcast4(codes + r * tile_keys + j);
      for (int n = 0; n < N; ++n) acc[r][n] = v::dot4(acc[r][n], row, values[n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      F t = v::to_float(acc[r][n]);
      if (v_scale) t = v::mul(t, v::load(v_scale + n * v::lanes));
      float* o = out + r * channels + n * v::lanes;
      v::store(o, v::fma(t, v::set(beta[r]), v::mul(v::load(o), v::set(alpha[r]))));
    }
  }
}

template <int R>
static inline void pv_u8s8_rows(const std::uint8_t* codes, const std::int8_t* value, int keys,
                                int channels, const float* alpha, const float* beta,
                                const float* v_scale, float* out) {
  int c = 0;
  for (; c + 64 <= channels; c += 64) {
    pv_u8s8_block<R, 4>(codes, value + c * 4, keys, channels, alpha, beta,
                        v_scale ? v_scale + c : nullptr, out + c);
  }
  for (; c < channels; c += v::lanes) {
    pv_u8s8_block<R, 1>(codes, value + c * 4, keys, channels, alpha, beta,
                        v_scale ? v_scale + c : nullptr, out + c);
  }
}

void pv_u8s8(const std::uint8_t* codes, int rows, const std::int8_t* value, int keys, int channels,
             const float* alpha, const float* beta, const float* v_scale, float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    pv_u8s8_rows<4>(codes + r * tile_keys, value, keys, channels, alpha + r, beta + r, v_scale,
                    out + r * channels);
  }
  for (; r < rows; ++r) {
    pv_u8s8_rows<1>(codes + r * tile_keys, value, keys, channels, alpha + r, beta + r, v_scale,
                    out + r * channels);
  }
}

template <int R, int N>
static inline void pv_f32_block(const float* p, const float* value, int keys, int channels,
                                const float* alpha, const float* beta, float* out) {
  F acc[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) acc[r][n] = v::set(0.0f);
  }
  for (int j = 0; j < keys; ++j) {
    F values[N];
    for (int n = 0; n < N; ++n) values[n] = v::load(value + j * channels + n * v::lanes);
    for (int r = 0; r < R; ++r) {
      const F row = v::set(p[r * tile_keys + j]);
      for (int n = 0; n < N; ++n) acc[r][n] = v::fma(row, values[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      float* o = out + r * channels + n * v::lanes;
      v::store(o, v::fma(acc[r][n], v::set(beta[r]), v::mul(v::load(o), v::set(alpha[r]))));
    }
  }
}

template <int R>
static inline void pv_f32_rows(const float* p, const float* value, int keys, int channels,
                               const float* alpha, const float* beta, float* out) {
  int c = 0;
  for (; c + 64 <= channels; c += 64) {
    pv_f32_block<R, 4>(p, value + c, keys, channels, alpha, beta, out + c);
  }
  for (; c < channels; c += v::lanes) {
    pv_f32_block<R, 1>(p, value + c, keys, channels, alpha, beta, out + c);
  }
}

void pv_f32(const float* p, int rows, const float* value, int keys, int channels,
            const float* alpha, const float* beta, float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) {
    pv_f32_rows<4>(p + r * tile_keys, value, keys, channels, alpha + r, beta + r,
                   out + r * channels);
  }
  for (; r < rows; ++r) {
    pv_f32_rows<1>(p + r * tile_keys, value, keys, channels, alpha + r, beta + r,
                   out + r * channels);
  }
}
