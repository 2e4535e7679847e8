// The KV cache's words: quantiser, unpacking, products with codes, softmax. Continues words.inl.
//
// Codes are unsigned bytes, Q and P two planes of signed bytes (high * 128 + low), so that both
// products are exact sums of vpdpbusd and its like, and a score is as good as fifteen bits of Q.

/// Grid point of y, see kv_grid(); v::floor() wants the clamp first.
static inline F kv_grid(F y, F low, F high) {
  return v::add(v::floor(v::min(v::max(y, low), high)), v::set(0.5f));
}

/// Bounds under which floor() gives the lowest and the highest code.
struct KvBounds {
  F low, high;
  explicit KvBounds(int bits)
      : low(v::set(-static_cast<float>(1 << (bits - 1)))),
        high(v::set(static_cast<float>((1 << (bits - 1)) - 1))) {}
};

void kv_errors(const float* x, int n, int bits, const float* scales, int count, float* errors) {
  const KvBounds bounds(bits);
  for (int k = 0; k < count; ++k) {
    const F inverse = v::set(1.0f / scales[k]);
    F sum = v::set(0.0f);
    for (int i = 0; i < n; i += v::lanes) {
      const F y = v::mul(v::load(x + i), inverse);
      const F e = v::sub(y, kv_grid(y, bounds.low, bounds.high));
      sum = v::add(sum, v::mul(e, e));
    }
    errors[k] = scales[k] * scales[k] * v::reduce_add(sum);
  }
}

void kv_codes(const float* x, int n, float inverse, int bits, std::uint8_t* codes) {
  const KvBounds bounds(bits);
  const F to_code = v::set(static_cast<float>(1 << (bits - 1)) - 0.5f);
  for (int i = 0; i < n; i += v::lanes) {
    const F g = kv_grid(v::mul(v::load(x + i), v::set(inverse)), bounds.low, bounds.high);
    v::store_bytes(codes + i, v::round_to_int(v::add(g, to_code)));
  }
}

/// Planes of `Width` bits.
template <int Width>
static inline void unpack_planes(const std::uint8_t* packed, int n, std::uint8_t* panel) {
  const int plane = n / 8 * Width;
  constexpr std::uint32_t mask = 0x01010101u * ((1u << Width) - 1);
  for (int y = 0; y < plane; y += 4 * v::lanes) {
    const I bytes = v::load_i(packed + y);
    for (int i = 0; i < 8 / Width; ++i) {
      v::store_i(panel + i * plane + y, v::field(bytes, i * Width, mask));
    }
  }
}

/// Adds the high bits of 3-bit codes.
static inline void unpack_high_bits(const std::uint8_t* packed, int n, std::uint8_t* panel) {
  const int plane = n / 8;
  for (int y = 0; y < plane; y += 4 * v::lanes) {
    const I bytes = v::load_i(packed + y);
    for (int i = 0; i < 8; ++i) {
      const I bit = v::field(bytes, i, 0x01010101u);
      const I twice = v::add_i(bit, bit);
      std::uint8_t* at = panel + i * plane + y;
      v::store_i(at, v::add_i(v::load_i(at), v::add_i(twice, twice)));
    }
  }
}

void kv_unpack(const std::uint8_t* packed, int n, int bits, std::uint8_t* panel) {
  switch (bits) {
    case 2:
      return unpack_planes<2>(packed, n, panel);
    case 3:
      unpack_planes<2>(packed, n, panel);
      return unpack_high_bits(packed + n / 4, n, panel);
    case 4:
      return unpack_planes<4>(packed, n, panel);
    default:
      __builtin_memcpy(panel, packed, static_cast<unsigned long>(n));
  }
}

/// Planes of `Width` bits: those of every code's bits from `shift` on.
template <int Width>
static inline void pack_planes(const std::uint8_t* panel, int n, int shift, std::uint8_t* packed) {
  const int plane = n / 8 * Width;
  constexpr std::uint32_t mask = 0x01010101u * ((1u << Width) - 1);
  for (int y = 0; y < plane; y += 4 * v::lanes) {
    I bytes = v::set_i(0);
    for (int i = 8 / Width - 1; i >= 0; --i) {
      for (int bit = 0; bit < Width; ++bit) bytes = v::add_i(bytes, bytes);
      bytes = v::add_i(bytes, v::field(v::load_i(panel + i * plane + y), shift, mask));
    }
    v::store_i(packed + y, bytes);
  }
}

void kv_pack(const std::uint8_t* panel, int n, int bits, std::uint8_t* packed) {
  switch (bits) {
    case 2:
      return pack_planes<2>(panel, n, 0, packed);
    case 3:
      pack_planes<2>(panel, n, 0, packed);
      return pack_planes<1>(panel, n, 2, packed + n / 4);
    case 4:
      return pack_planes<4>(panel, n, 0, packed);
    default:
      __builtin_memcpy(packed, panel, static_cast<unsigned long>(n));
  }
}

/// Sixteen values in fixed point to their planes: |x| <= kv_plane_max, integral.
static inline void split_planes(F x, std::int8_t* high, std::int8_t* low) {
  const F h = v::round_even(v::mul(x, v::set(1.0f / 128.0f)));
  v::store_bytes(high, v::round_to_int(h));
  v::store_bytes(low, v::round_to_int(v::sub(x, v::mul(h, v::set(128.0f)))));
}

float kv_planes(const float* x, int n, std::int8_t* high, std::int8_t* low, float* sum) {
  const float top = amax(x, n);
  const bool nan = top != top;
  const float scale = top * (1.0f / kv_plane_max);
  const F factor = v::set(nan || top < 1e-30f ? 0.0f : kv_plane_max / top);
  F total = v::set(0.0f);
  for (int i = 0; i < n; i += v::lanes) {
    const F code = nan ? v::set(0.0f) : v::round_even(v::mul(v::load(x + i), factor));
    split_planes(code, high + i, low + i);
    total = v::add(total, code);
  }
  *sum = v::reduce_add(total);
  return scale;
}

/// Both planes of a sum; exact up to 2^24.
static inline F join_planes(I high, I low) {
  return v::fma(v::to_float(high), v::set(128.0f), v::to_float(low));
}

template <int R, int N>
static inline void kv_scores_block(const KvScores& x, int r0, int j0) {
  I acc[2 * R][N];
  for (auto& row : acc) {
    for (I& a : row) a = v::set_i(0);
  }
  block<IntegerQK, 2 * R, N>(x.planes + std::int64_t{2} * r0 * x.d, x.d,
                             x.panels + std::int64_t{j0} * x.d, std::int64_t{x.d} * v::lanes,
                             4 * v::lanes, x.d / 4, acc);
  for (int r = 0; r < R; ++r) {
    const F sum = v::set(x.sum[r0 + r]), scale = v::set(x.scale[r0 + r]);
    const F noise = v::set(x.noise[r0 + r]);
    for (int n = 0; n < N; ++n) {
      const int j = j0 + n * v::lanes;
      F s = join_planes(acc[2 * r][n], acc[2 * r + 1][n]);
      s = v::sub(s, v::mul(v::load(x.centre + j), sum));
      s = v::fma(v::mul(s, v::load(x.k_scale + j)), scale, v::set(x.offset[r0 + r]));
      s = v::fma(v::load(x.k_noise + j), noise, s);
      v::store(x.scores + (r0 + r) * tile_keys + j, s);
    }
  }
}

template <int R>
static inline void kv_scores_rows(const KvScores& x, int r0) {
  int j = 0;
  for (; j + 32 <= x.keys; j += 32) kv_scores_block<R, 2>(x, r0, j);
  for (; j < x.keys; j += v::lanes) kv_scores_block<R, 1>(x, r0, j);
}

void kv_scores(const KvScores& x) {
  int r = 0;
  for (; r + 4 <= x.rows; r += 4) kv_scores_rows<4>(x, r);
  for (; r < x.rows; ++r) kv_scores_rows<1>(x, r);
}

/// P times V's scale of one row into x.scores; returns its largest, adds P to *total.
static inline float kv_probabilities(const KvSoftmax& x, int r, float top, float* total) {
  float* s = x.scores + r * tile_keys;
  constexpr int blocks = tile_keys / v::lanes;
  static_assert(blocks == 8);
  F sum = v::set(0.0f), most = v::set(0.0f), all[blocks];
  for (int n = 0; n < blocks; ++n) all[n] = v::set(0.0f);
  for (int j = 0; j < x.keys; j += v::lanes) {
    const F p = exp_minus(v::load(s + j), v::set(top));
    const F weight = v::mul(p, v::load(x.v_scale + j));
    all[j / v::lanes] = p;
    sum = v::add(sum, p);
    most = v::max(weight, most);
    v::store(s + j, weight);
  }
  if (x.mass) v::reduce_add_8(all, x.mass + r * blocks);
  *total = v::reduce_add(sum);
  return v::reduce_max(most);
}

void kv_softmax(const KvSoftmax& x) {
  for (int r = 0; r < x.rows; ++r) {
    float* s = x.scores + r * tile_keys;
    std::int8_t* high = x.planes + std::int64_t{2} * r * tile_keys;
    const float top = row_max(s, x.keys);
    const bool hidden = top == minus_infinity;
    const float old = x.max[r];
    const float now = top > old || top != top ? top : old;
    float total = 0.0f;
    const float most = kv_probabilities(x, r, hidden ? 0.0f : top, &total);
    // A tile whose V is all zeros, or that is hidden, leaves no codes.
    const F factor = v::set(most > 1e-30f ? kv_plane_max / most : 0.0f);
    F shift = v::set(0.0f);
    for (int j = 0; j < x.keys; j += v::lanes) {
      const F code = v::round_even(v::mul(v::load(s + j), factor));
      split_planes(code, high + j, high + tile_keys + j);
      shift = v::fma(code, v::load(x.centre + j), shift);
    }
    const float local = hidden ? 0.0f : exp_one(top - now);
    x.shift[r] = v::reduce_add(shift);
    x.alpha[r] = old == minus_infinity ? 0.0f : exp_one(old - now);
    x.beta[r] = local * most * (1.0f / kv_plane_max);
    x.sum[r] = x.sum[r] * x.alpha[r] + local * total;
    x.max[r] = now;
    if (x.mass) x.top[r] = top;
  }
}

/// Operands of one product with V.
struct KvValues {
  const std::int8_t* planes;
  const std::uint8_t* panels;
  int steps, channels;
  const float *alpha, *beta, *shift;
  float* out;
};

template <int R, int N>
static inline void kv_values_block(const KvValues& x, int r0, int c0) {
  I acc[2 * R][N];
  for (auto& row : acc) {
    for (I& a : row) a = v::set_i(0);
  }
  block<IntegerQK, 2 * R, N>(x.planes + std::int64_t{2} * r0 * tile_keys, tile_keys,
                             x.panels + c0 * 4, 4 * v::lanes, std::int64_t{x.channels} * 4, x.steps,
                             acc);
  for (int r = 0; r < R; ++r) {
    const F alpha = v::set(x.alpha[r0 + r]), beta = v::set(x.beta[r0 + r]);
    for (int n = 0; n < N; ++n) {
      float* o = x.out + std::int64_t{r0 + r} * x.channels + c0 + n * v::lanes;
      const F t = v::sub(join_planes(acc[2 * r][n], acc[2 * r + 1][n]), v::set(x.shift[r0 + r]));
      v::store(o, v::fma(t, beta, v::mul(v::load(o), alpha)));
    }
  }
}

template <int R>
static inline void kv_values_rows(const KvValues& x, int r0) {
  for (int c = 0; c < x.channels; c += 2 * v::lanes) kv_values_block<R, 2>(x, r0, c);
}

void kv_values(const std::int8_t* planes, int rows, const std::uint8_t* panels, int keys,
               int channels, const float* alpha, const float* beta, const float* shift,
               float* out) {
  const KvValues x{planes, panels, keys / 4, channels, alpha, beta, shift, out};
  int r = 0;
  for (; r + 4 <= rows; r += 4) kv_values_rows<4>(x, r);
  for (; r < rows; ++r) kv_values_rows<1>(x, r);
}
