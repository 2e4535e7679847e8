// Online softmax of one tile, one function a rounding of P. Continues words.inl.

/// Nearest value of a small float format, ties to even: `drop` mantissa bits go, values under
/// `min_normal` round to multiples of its smallest subnormal by way of `magic` = 1.5 * 2^23 of
/// those.
static inline F round_small(F x, int drop, float min_normal, float magic) {
  const F tiny = v::sub(v::add(x, v::set(magic)), v::set(magic));
  return v::select_less(x, v::set(min_normal), tiny, v::round_mantissa(x, drop));
}
static inline F round_f16(F x) { return round_small(x, 13, 0x1p-14f, 0x1.8p-1f); }
static inline F round_bf16(F x) { return v::round_mantissa(x, 16); }
static inline F round_e4m3(F x) {
  return v::min(round_small(x, 20, 0x1p-6f, 0x1.8p14f), v::set(448.0f));
}
static inline F round_e2m1(F x) {
  return v::min(round_small(x, 22, 1.0f, 0x1.8p22f), v::set(6.0f));
}

/// The row's maximum of s, or of s + bias; NaN if any score is.
template <bool Biased = false>
static inline float row_max(const float* s, int keys, const float* bias = nullptr) {
  F m = v::set(minus_infinity);
  v::Mask nan = v::no_lanes();
  for (int j = 0; j < keys; j += v::lanes) {
    F x = v::load(s + j);
    if constexpr (Biased) x = v::add(x, v::load(bias + j));
    m = v::max(x, m);
    nan = v::or_nan(nan, x);
  }
  return v::any(nan) ? __builtin_nanf("") : v::reduce_max(m);
}

/// Where one row's P goes: floats, or bf16 where every value that the rounding leaves is one.
struct Destination {
  float* f32;
  std::uint16_t* bf16;

  void store(int j, F x) const {
    if (bf16) {
      v::store_bf16(bf16 + j, x);
    } else {
      v::store(f32 + j, x);
    }
  }
};

/// P as floats, rounded to an element format; returns their sum.
template <class Round>
static inline float p_elementwise(const float* s, int keys, float ref, Destination p, Round round) {
  F sum = v::set(0.0f);
  for (int j = 0; j < keys; j += v::lanes) {
    const F x = round(exp_minus(v::load(s + j), v::set(ref)));
    p.store(j, x);
    sum = v::add(sum, x);
  }
  return v::reduce_add(sum);
}

/// The smallest power of two that brings amax to e4m3's largest code, 448, or below: OCP's rule,
/// 2^(floor(log2 amax) - 8), saturates what lies above 1.75 powers of two. amax > 0 and normal.
static inline float mx_scale(float amax) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &amax, sizeof bits);
  const std::uint32_t exponent = (bits + 0x1fffff) >> 23;
  bits = (exponent > 9 ? exponent - 8 : 1) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale;
}

static inline float p_mxfp8(const float* s, int keys, float ref, Destination p) {
  F sum = v::set(0.0f);
  for (int j = 0; j < keys; j += 32) {
    const bool pair = j + v::lanes < keys;
    const F a = exp_minus(v::load(s + j), v::set(ref));
    const F b = pair ? exp_minus(v::load(s + j + v::lanes), v::set(ref)) : v::set(0.0f);
    const float top = v::reduce_max(v::max(a, b));
    const float scale = mx_scale(top);
    const F down = v::set(1.0f / scale), up = v::set(scale);
    const F ra = v::mul(round_e4m3(v::mul(a, down)), up);
    const F rb = v::mul(round_e4m3(v::mul(b, down)), up);
    p.store(j, ra);
    if (pair) p.store(j + v::lanes, rb);
    sum = v::add(sum, v::add(ra, rb));
  }
  return v::reduce_add(sum);
}

/// Two levels: the row's own maximum (1 by the choice of `ref`) and UE4M3 per 16 keys. Stored as
/// element * group scale in units of 1 / (6 * 448), which six significant bits hold exactly.
constexpr float nvfp4_unit = 1.0f / (6.0f * 448.0f);
static inline float p_nvfp4(const float* s, int keys, float ref, Destination p) {
  F sum = v::set(0.0f);
  for (int j = 0; j < keys; j += v::lanes) {
    const F a = exp_minus(v::load(s + j), v::set(ref));
    const float scale = first_lane(round_e4m3(v::set(v::reduce_max(a) * 448.0f)));
    const F down = v::set(scale > 0.0f ? 1.0f / (scale * nvfp4_unit) : 0.0f);
    const F x = v::mul(round_e2m1(v::mul(a, down)), v::set(scale));
    p.store(j, x);
    sum = v::add(sum, x);
  }
  return v::reduce_add(sum);
}

/// One tile of a row of u8 P: the sum of P in units of exp(ref), and of its codes before and after
/// they are rounded.
struct ByteSums {
  float p, exact, codes;
};

/// u8 P, its largest code 255: exp(s + bias - ref), with `Token` of V's scales `bias` their log, so
/// that they cost no second exponential; `ref` is the largest s + bias. `inverse`: 1 / scale.
template <bool Token>
static inline ByteSums p_u8(const float* s, int keys, float ref, const float* bias,
                            const float* inverse, std::uint8_t* codes) {
  F sum = v::set(0.0f), exact = v::set(0.0f);
  I rounded = v::set_i(0);
  for (int j = 0; j < keys; j += v::lanes) {
    F t = v::load(s + j);
    if constexpr (Token) t = v::add(t, v::load(bias + j));
    const F x = v::mul(exp_minus(t, v::set(ref)), v::set(255.0f));
    const I code = v::round_to_int(x);
    v::store_bytes(codes + j, code);
    rounded = v::add_i(rounded, code);
    exact = v::add(exact, x);
    if constexpr (Token) sum = v::fma(x, v::load(inverse + j), sum);
  }
  const float all = v::reduce_add(exact);
  return {(Token ? v::reduce_add(sum) : all) * (1.0f / 255.0f), all,
          static_cast<float>(v::reduce_add(rounded))};
}

/// The same row as codes rounded down, and what these leave in 1 / 255 of a code.
static inline void p_two_bytes(const float* s, int keys, float ref, const float* bias,
                               std::uint8_t* codes, std::uint8_t* rest) {
  for (int j = 0; j < keys; j += v::lanes) {
    F t = v::load(s + j);
    if (bias) t = v::add(t, v::load(bias + j));
    const F x = v::mul(exp_minus(t, v::set(ref)), v::set(255.0f));
    const I code = v::round_to_int(v::sub(x, v::set(0.5f)));
    v::store_bytes(codes + j, code);
    const F left = v::mul(v::sub(x, v::to_float(code)), v::set(255.0f));
    v::store_bytes(rest + j, v::round_to_int(left));
  }
}

static void clear_row(const SoftmaxTile& tile, int r) {
  for (int j = 0; j < tile.keys; j += v::lanes) {
    if (tile.codes) v::store_bytes(tile.codes + r * tile_keys + j, v::set_i(0));
    if (tile.p) v::store(tile.p + r * tile_keys + j, v::set(0.0f));
    if (tile.p_bf16) v::store_bf16(tile.p_bf16 + r * tile_keys + j, v::set(0.0f));
  }
  tile.alpha[r] = 1.0f;
  tile.beta[r] = 0.0f;
}

/// Takes the largest score off all of a row's where biases have made it so large that too few bits
/// are left for log of V's scale. Returns what it took, or 0.
static float bring_near(float* s, int keys) {
  constexpr float far_score = 4096.0f;
  const float top = row_max(s, keys);
  const bool far = (top > far_score || top < -far_score) && top != minus_infinity;
  if (!far) return 0.0f;
  for (int j = 0; j < keys; j += v::lanes) v::store(s + j, v::sub(v::load(s + j), v::set(top)));
  return top;
}

/// Row r's u8 P against its own maximum `top`, which weighs `local`; `alpha`: weight of all before.
/// Returns its sum.
static float bytes_of_row(SoftmaxTile& tile, int r, float top, float local, float alpha) {
  const bool token = tile.rounding == Rounding::u8_token;
  const float *s = tile.scores + r * tile_keys, *bias = token ? tile.v_log : nullptr;
  std::uint8_t* codes = tile.codes + r * tile_keys;
  const ByteSums sums = token ? p_u8<true>(s, tile.keys, top, bias, tile.v_inverse, codes)
                              : p_u8<false>(s, tile.keys, top, nullptr, nullptr, codes);
  tile.mass[r] = tile.mass[r] * alpha + local * sums.codes;
  const float lost = local * (sums.exact - sums.codes), most = tile.mass[r] * formats::kMostLost;
  if (lost > most || lost < -most) {
    tile.lossy |= 1u << r;
    p_two_bytes(s, tile.keys, top, bias, codes, tile.rest + r * tile_keys);
  }
  return sums.p;
}

void softmax(SoftmaxTile& tile) {
  tile.lossy = 0;
  for (int r = 0; r < tile.rows; ++r) {
    float* s = tile.scores + r * tile_keys;
    const float far = tile.biased ? bring_near(s, tile.keys) : 0.0f;
    const Destination p{tile.p ? tile.p + r * tile_keys : nullptr,
                        tile.p_bf16 ? tile.p_bf16 + r * tile_keys : nullptr};
    // The reference may be any number that keeps exponentials in range; per-token scales of V move
    // it from the largest P to the largest P times scale.
    const float top = tile.rounding == Rounding::u8_token ? row_max<true>(s, tile.keys, tile.v_log)
                                                          : row_max(s, tile.keys);
    if (top == minus_infinity) {
      clear_row(tile, r);
      if ((tile.below >> r & 1) != 0 && tile.max[r] == minus_infinity) tile.sum[r] = sum_of_below;
      continue;
    }
    // Of a far row the running one leaves V's scales out, and `top` is relative to `far`.
    const float old = tile.max[r], reached = far != 0.0f ? far : top;
    const float now = reached > old || top != top ? reached : old;
    const float alpha = old == minus_infinity ? 0.0f : exp_one(old - now);
    float local = 1.0f, unit = 1.0f, sum = 0.0f;
    switch (tile.rounding) {
      case Rounding::f32:
        sum = p_elementwise(s, tile.keys, now, p, [](F x) { return x; });
        break;
      case Rounding::f16:
        sum = p_elementwise(s, tile.keys, now, p, [](F x) { return round_f16(x); });
        break;
      case Rounding::bf16:
        sum = p_elementwise(s, tile.keys, now, p, [](F x) { return round_bf16(x); });
        break;
      case Rounding::e4m3:  // 2^8: the largest power of two with room up to 448
        sum = p_elementwise(s, tile.keys, now, p, [](F x) {
          return v::mul(round_e4m3(v::mul(x, v::set(256.0f))), v::set(1.0f / 256.0f));
        });
        break;
      case Rounding::mxfp8:
        sum = p_mxfp8(s, tile.keys, now, p);
        break;
      case Rounding::nvfp4:
        local = exp_one(top - now);
        unit = nvfp4_unit;
        sum = p_nvfp4(s, tile.keys, top, p) * unit;
        break;
      case Rounding::u8:
      case Rounding::u8_token:
        local = exp_one(top - (now - far));
        unit = 1.0f / 255.0f;
        sum = bytes_of_row(tile, r, top, local, alpha);
        break;
    }
    tile.max[r] = now;
    tile.alpha[r] = alpha;
    tile.beta[r] = local * unit;
    tile.sum[r] = tile.sum[r] * alpha + local * sum;
  }
}

void softcap(float* s, int n, float offset, float c) {
  // tanh(x) = 1 - 2 / (exp(2x) + 1), odd: evaluated at |x| so that nothing cancels or overflows.
  // min() hands a NaN on. A cap whose inverse leaves the floats is below all that a score tells.
  constexpr float most = 3.402823466e38f;
  const float inverse_cap = 1.0f / c < most ? 1.0f / c : most;
  const F one = v::set(1.0f), zero = v::set(0.0f), cap = v::set(c), inverse = v::set(inverse_cap);
  for (int j = 0; j < n; j += v::lanes) {
    const F x = v::mul(v::add(v::load(s + j), v::set(offset)), inverse);
    const F a = v::min(v::set(44.0f), v::abs(x));
    const F y = v::mul(a, a);  // odd Taylor series, relative error 1e-8 below 1/16
    F small = v::fma(y, v::set(-17.0f / 315), v::set(2.0f / 15));
    small = v::fma(y, small, v::set(-1.0f / 3));
    small = v::mul(a, v::fma(y, small, one));
    const F e = exp_minus(v::add(a, a), zero);
    const F large = v::sub(one, v::div(v::set(2.0f), v::add(e, one)));
    const F t = v::mul(cap, v::select_less(a, v::set(0.0625f), small, large));
    v::store(s + j, v::select_less(x, zero, v::sub(zero, t), t));
  }
}

void hide(float* s, int n, const std::uint8_t* visible) {
  const F half = v::set(0.5f), hidden = v::set(minus_infinity);
  for (int j = 0; j < n; j += v::lanes) {
    const F seen = v::to_float(v::load_bytes(visible + j));
    v::store(s + j, v::select_less(seen, half, hidden, v::load(s + j)));
  }
}

template <Element Kind>
static inline void add_bias_of(float* s, int n, const void* bias) {
  constexpr float largest = 3.402823466e38f;
  const F infinity = v::set(-minus_infinity), high = v::set(largest), low = v::set(-largest);
  for (int j = 0; j < n; j += v::lanes) {
    const int m = n - j < v::lanes ? n - j : v::lanes;
    const F b = load_elements<Kind>(bias, j, m), x = v::load_n(s + j, m), sum = v::add(x, b);
    // Zero times anything but a number is NaN.
    const bool plain = !v::any(v::or_nan(v::no_lanes(), v::mul(sum, v::set(0.0f))));
    if (m == v::lanes && plain) {
      v::store(s + j, sum);
      continue;
    }
    const F near = v::max(low, v::min(high, sum));  // NaN stays
    const F finite = v::select_less(v::abs(b), infinity, near, sum);
    const F added = v::select_less(v::abs(x), infinity, finite, sum);
    const F out = v::select_less(b, low, v::set(minus_infinity), added);
    if (m == v::lanes) {
      v::store(s + j, out);
      continue;
    }
    float last[v::lanes];
    v::store(last, out);
    for (int i = 0; i < m; ++i) s[j + i] = last[i];
  }
}

void add_bias(float* s, int n, const void* bias, Element element) {
  if (element == Element::f32) return add_bias_of<Element::f32>(s, n, bias);
  if (element == Element::f16) return add_bias_of<Element::f16>(s, n, bias);
  add_bias_of<Element::bf16>(s, n, bias);
}

#include "kernels/cpu/codes.inl"
#include "kernels/cpu/kv.inl"
// For few query rows.
#include "kernels/cpu/float_rows.inl"

#if defined(QATTN_CODES_IN_PLACE)
// For few query rows.
#include "kernels/cpu/rows_avx512.inl"
#else
constexpr auto qk_s8_rows = nullptr;
constexpr auto most_rows_in_place = nullptr;
constexpr auto pv_u8s8_rows = nullptr;
#endif

#if defined(QATTN_TILE_PRODUCTS)
// Products and softmax together.
#include "kernels/cpu/probabilities_amx.inl"
// Which needs them.
#include "kernels/cpu/fused_amx.inl"
// The same on tiles.
#include "kernels/cpu/rows_amx.inl"
#else
constexpr auto attend = nullptr;
constexpr auto attends = nullptr;
constexpr auto split_bf16 = nullptr;
constexpr auto qk_bf16x2 = nullptr;
constexpr auto pv_bf16x2 = nullptr;
constexpr auto qk_s8 = qk_s8_lanes;
constexpr auto pv_u8s8 = pv_u8s8_lanes;
#if defined(QATTN_NATIVE_BF16)
constexpr auto qk_bf16 = qk_bf16_lanes;
constexpr auto pv_bf16 = pv_bf16_lanes;
#else
constexpr auto qk_bf16 = nullptr;
constexpr auto pv_bf16 = nullptr;
constexpr auto linear_bf16 = nullptr;
#endif
#endif

const KernelTable table = {
    .isa = v::name,
    .load_row = load_row,
    .amax = amax,
    .encode_s8 = encode_s8,
    .encode_s8_channels = encode_s8_channels,
    .rows_to_codes = rows_to_codes,
    .sum_rows = sum_rows,
    .dot = dot,
    .accumulate_amax = accumulate_amax,
    .hadamard = hadamard,
    .narrow_bf16 = narrow_bf16,
    .token_scale_tables = token_scale_tables,
    .transpose_packs = v::transpose_packs,
    .interleave_bytes = v::interleave_bytes,
    .qk_s8 = qk_s8,
    .qk_f32 = qk_f32,
    .qk_bf16 = qk_bf16,
    .split_bf16 = split_bf16,
    .qk_bf16x2 = qk_bf16x2,
    .softmax = softmax,
    .attend = attend,
    .attends = attends,
    .qk_s8_rows = qk_s8_rows,
    .most_rows_in_place = most_rows_in_place,
    .pv_u8s8 = pv_u8s8,
    .pv_u8s8_rows = pv_u8s8_rows,
    .pv_f32 = pv_f32,
    .pv_bf16 = pv_bf16,
    .pv_bf16x2 = pv_bf16x2,
    .finite_rows = finite_rows,
    .qk_float_rows = qk_float_rows,
    .pv_float_rows = pv_float_rows,
    .linear_f32 = linear_f32,
    .linear_bf16 = linear_bf16,
    .encode_bf16 = encode_bf16,
    .encode_f16 = encode_f16,
    .kv_errors = kv_errors,
    .kv_codes = kv_codes,
    .kv_pack = kv_pack,
    .kv_unpack = kv_unpack,
    .kv_planes = kv_planes,
    .kv_scores = kv_scores,
    .kv_softmax = kv_softmax,
    .kv_values = kv_values,
    .softcap = softcap,
    .hide = hide,
    .add_bias = add_bias,
    .exp_one = exp_one,
};

}  // namespace
