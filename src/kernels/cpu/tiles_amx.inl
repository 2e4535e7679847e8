// Q K^T and P V on AMX tiles. Continues words.inl.
//
// A tile is 16 rows of 64 bytes. A (rows of Q or P) is read from memory as it lies; B (K and V
// panels) has the contraction in rows, four bytes or one bf16 pair a column: just how the panels
// are laid out. Two by two accumulators of 16 x 16 let every loaded tile serve twice: one product
// takes 16 clocks (8-bit: 16384 multiply-adds), one load about 8.

/// LDTILECFG's memory operand.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

/// Tiles 0 to 3: C[i][j] at 2 i + j. 4, 5: A of the rows' halves. 6, 7: B of the columns' halves.
/// The contraction comes in steps of 64 bytes of A; `tail` is what is left for the last one.
static inline void configure(int rows, int step_bytes) {
  TileConfig c;
  const int half[2] = {rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 0};
  for (int i = 0; i < 2; ++i) {
    const int r = half[i] ? half[i] : 1;  // an unused tile still needs a shape
    for (int j = 0; j < 2; ++j) {
      c.rows[2 * i + j] = static_cast<std::uint8_t>(r);
      c.row_bytes[2 * i + j] = 64;
    }
    c.rows[4 + i] = static_cast<std::uint8_t>(r);
    c.row_bytes[4 + i] = static_cast<std::uint16_t>(step_bytes);
    c.rows[6 + i] = static_cast<std::uint8_t>(step_bytes / 4);
    c.row_bytes[6 + i] = 64;
  }
  // GCC's intrinsic says that it reads eight bytes: stores to the others might be left out.
  std::uint64_t words[8];
  static_assert(sizeof words == sizeof c);
  __builtin_memcpy(words, &c, sizeof c);
  alignas(64) volatile std::uint64_t stored[8];
  for (int i = 0; i < 8; ++i) stored[i] = words[i];
  _tile_loadconfig(const_cast<const std::uint64_t*>(stored));
}

enum class Product { s8u8, u8s8, bf16 };

template <Product P>
static inline void multiply(bool two_rows, bool two_columns) {
#define QATTN_TILES(op)                       \
  do {                                        \
    op(0, 4, 6);                              \
    if (two_columns) op(1, 4, 7);             \
    if (two_rows) op(2, 5, 6);                \
    if (two_rows && two_columns) op(3, 5, 7); \
  } while (0)
  if constexpr (P == Product::s8u8) {
    QATTN_TILES(_tile_dpbsud);
  } else if constexpr (P == Product::u8s8) {
    QATTN_TILES(_tile_dpbusd);
  } else {
    QATTN_TILES(_tile_dpbf16ps);
  }
#undef QATTN_TILES
}

/// Byte addresses of one product: A rows every a_stride; B's step t begins at b + t * b_step (its
/// rows every b_stride), the second column group b_group further on.
struct TileOperands {
  const char* a;
  std::int64_t a_stride;
  const char* b;
  std::int64_t b_stride, b_group, b_step;
  std::int64_t a_part = 0, b_part = 0;  ///< between the parts of sums
};

template <Product P>
static inline void accumulate_steps(const TileOperands& x, int first, int steps, bool two_rows,
                                    bool two_columns) {
  for (int t = first; t < first + steps; ++t) {
    _tile_loadd(4, x.a + t * 64, x.a_stride);
    if (two_rows) _tile_loadd(5, x.a + 16 * x.a_stride + t * 64, x.a_stride);
    _tile_loadd(6, x.b + t * x.b_step, x.b_stride);
    if (two_columns) _tile_loadd(7, x.b + t * x.b_step + x.b_group, x.b_stride);
    multiply<P>(two_rows, two_columns);
  }
}

/// A and B are sums of so many parts: all their products.
template <Product P, int Parts>
static inline void accumulate_parts(const TileOperands& x, int steps, bool two_rows,
                                    bool two_columns) {
  if constexpr (Parts == 1) return accumulate_steps<P>(x, 0, steps, two_rows, two_columns);
  for (int i = 0; i < Parts; ++i) {
    for (int j = 0; j < Parts; ++j) {
      TileOperands part = x;
      part.a += i * x.a_part;
      part.b += j * x.b_part;
      accumulate_steps<P>(part, 0, steps, two_rows, two_columns);
    }
  }
}

/// C = A B for up to 32 rows and 32 columns, into buffer[32][32] of 32-bit sums. `bytes` of A's
/// rows are contracted. A rest under 64 bytes, which sums of parts do not have, runs first, under a
/// shape of its own: C survives a change of configuration only in memory.
template <Product P, int Parts = 1>
static inline void tile_block(const TileOperands& x, int rows, int bytes, bool two_columns,
                              std::int32_t* buffer) {
  const bool two_rows = rows > 16;
  const int steps = bytes / 64, tail = bytes % 64;
  const auto clear = [&] {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  };
  const auto put = [&] {
    _tile_stored(0, buffer, 128);
    if (two_columns) _tile_stored(1, buffer + 16, 128);
    if (two_rows) _tile_stored(2, buffer + 16 * 32, 128);
    if (two_rows && two_columns) _tile_stored(3, buffer + 16 * 32 + 16, 128);
  };
  if (tail == 0) {
    clear();
    accumulate_parts<P, Parts>(x, steps, two_rows, two_columns);
    put();
    return;
  }
  configure(rows, tail);
  clear();
  accumulate_steps<P>(x, steps, 1, two_rows, two_columns);
  put();
  if (steps > 0) {
    configure(rows, 64);
    _tile_loadd(0, buffer, 128);
    if (two_columns) _tile_loadd(1, buffer + 16, 128);
    if (two_rows) _tile_loadd(2, buffer + 16 * 32, 128);
    if (two_rows && two_columns) _tile_loadd(3, buffer + 16 * 32 + 16, 128);
    accumulate_steps<P>(x, 0, steps, two_rows, two_columns);
    put();
  }
}

static inline F sums(const std::int32_t* buffer, std::int32_t correction, Product p) {
  if (p == Product::bf16) return v::load(reinterpret_cast<const float*>(buffer));
  return v::to_float(v::add_i(v::load_i(buffer), v::set_i(correction)));
}

template <Product P, int Parts = 1>
static inline void tile_qk(const void* q, int rows, const void* k, int keys, int width_bytes,
                           const float* q_scale, const std::int32_t* correction,
                           const float* k_scale, float* scores) {
  alignas(64) std::int32_t buffer[32 * 32];
  if (width_bytes % 64 == 0) configure(rows, 64);
  const std::int64_t row_bytes = std::int64_t{Parts} * width_bytes;
  for (int j = 0; j < keys; j += 32) {
    const bool two = j + 16 < keys;
    // A panel of 16 keys is row_bytes / 4 rows of 64 bytes; 16 of them are one step.
    const TileOperands x{static_cast<const char*>(q),
                         row_bytes,
                         static_cast<const char*>(k) + j * row_bytes,
                         64,
                         16 * row_bytes,
                         1024,
                         width_bytes,
                         std::int64_t{16} * width_bytes};
    tile_block<P, Parts>(x, rows, width_bytes, two, buffer);
    for (int r = 0; r < rows; ++r) {
      const std::int32_t start = P == Product::bf16 ? 0 : correction[r];
      const F scale = v::set(q_scale[r]);
      for (int n = 0; n < (two ? 32 : 16); n += 16) {
        const F s =
            v::mul(v::mul(sums(buffer + r * 32 + n, start, P), scale), v::load(k_scale + j + n));
        v::store(scores + r * tile_keys + j + n, s);
      }
    }
  }
  _tile_release();
}

template <Product P, int Parts = 1>
static inline void tile_pv(const void* p, int rows, const void* values, int width_bytes,
                           int part_bytes, int channels, const float* alpha, const float* beta,
                           const float* v_scale, float* out) {
  alignas(64) std::int32_t buffer[32 * 32];
  if (width_bytes % 64 == 0) configure(rows, 64);
  for (int c = 0; c < channels; c += 32) {
    const bool two = c + 16 < channels;
    const std::int64_t stride = std::int64_t{channels} * 4;
    const TileOperands x{static_cast<const char*>(p),
                         std::int64_t{Parts} * part_bytes,
                         static_cast<const char*>(values) + c * 4,
                         stride,
                         64,
                         16 * stride,
                         part_bytes,
                         std::int64_t{part_bytes} * channels};
    tile_block<P, Parts>(x, rows, width_bytes, two, buffer);
    for (int r = 0; r < rows; ++r) {
      for (int n = 0; n < (two ? 32 : 16); n += 16) {
        F t = sums(buffer + r * 32 + n, 0, P);
        if (v_scale) t = v::mul(t, v::load(v_scale + c + n));
        float* o = out + r * channels + c + n;
        v::store(o, v::fma(t, v::set(beta[r]), v::mul(v::load(o), v::set(alpha[r]))));
      }
    }
  }
  _tile_release();
}

/// Fewer rows leave most of a tile idle, and its configuration costs as much as their products.
constexpr int least_tile_rows = 8;

void qk_s8(const std::int8_t* q, int rows, const std::uint8_t* k, int keys, int d4,
           const float* q_scale, const std::int32_t* correction, const float* k_scale,
           float* scores) {
  if (rows < least_tile_rows) {
    qk_s8_lanes(q, rows, k, keys, d4, q_scale, correction, k_scale, scores);
    return;
  }
  tile_qk<Product::s8u8>(q, rows, k, keys, d4 * 4, q_scale, correction, k_scale, scores);
}
void qk_bf16(const std::uint16_t* q, int rows, const std::uint16_t* k, int keys, int d2,
             const float* q_scale, const float* k_scale, float* scores) {
  if (rows < least_tile_rows) {
    qk_bf16_lanes(q, rows, k, keys, d2, q_scale, k_scale, scores);
    return;
  }
  tile_qk<Product::bf16>(q, rows, k, keys, d2 * 4, q_scale, nullptr, k_scale, scores);
}
void pv_u8s8(const std::uint8_t* codes, int rows, const std::int8_t* value, int keys, int channels,
             const float* alpha, const float* beta, const float* v_scale, float* out) {
  if (rows < least_tile_rows) {
    pv_u8s8_lanes(codes, rows, value, keys, channels, alpha, beta, v_scale, out);
    return;
  }
  tile_pv<Product::u8s8>(codes, rows, value, keys, tile_keys, channels, alpha, beta, v_scale, out);
}
void pv_bf16(const std::uint16_t* p, int rows, const std::uint16_t* value, int keys, int channels,
             const float* alpha, const float* beta, const float* v_scale, float* out) {
  if (rows < least_tile_rows) {
    pv_bf16_lanes(p, rows, value, keys, channels, alpha, beta, v_scale, out);
    return;
  }
  tile_pv<Product::bf16>(p, rows, value, keys * 2, tile_keys * 2, channels, alpha, beta, v_scale,
                         out);
}

/// Two vectors of bf16 side by side as floats.
static inline F lower_floats(I halves) {
  const I wide = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline F upper_floats(I halves) {
  const I wide = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(halves, 1));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

void split_bf16(const float* x, int n, int stride, std::uint16_t* out) {
  const F most = v::set(0x1.FEp127f);  // what is above it must not round to Inf
  const F least = v::sub(v::set(0.0f), most);
  for (int i = 0; i < n; i += v::lanes) {
    F rest = v::load(x + i);
    // Of a NaN both return the second one.
    F near = _mm512_max_ps(least, _mm512_min_ps(most, rest));
    for (int part = 0; part < 2; ++part) {
      const auto halves = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(near));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + part * stride + i), halves);
      rest = v::sub(rest, lower_floats(_mm512_castsi256_si512(halves)));
      near = rest;
    }
  }
}

void qk_bf16x2(const std::uint16_t* q, int rows, const std::uint16_t* k, int keys, int d,
               const float* q_scale, const float* k_scale, float* scores) {
  tile_qk<Product::bf16, 2>(q, rows, k, keys, d * 2, q_scale, nullptr, k_scale, scores);
}
void pv_bf16x2(const std::uint16_t* p, int rows, const std::uint16_t* value, int keys, int channels,
               const float* alpha, const float* beta, float* out) {
  tile_pv<Product::bf16, 2>(p, rows, value, (keys + 31) / 32 * 64, tile_keys * 2, channels, alpha,
                            beta, nullptr, out);
}

/// Sums of a block on tiles, which join what `out` holds. Few rows too: a row's bits must not
/// depend on how many others there are.
void linear_bf16(const LinearTile& x) {
  alignas(64) std::int32_t buffer[32 * 32];
  const int width_bytes = 2 * x.d;
  for (int r0 = 0; r0 < x.rows; r0 += 32) {
    const int rows = x.rows - r0 < 32 ? x.rows - r0 : 32;
    if (width_bytes % 64 == 0) configure(rows, 64);
    for (int g = 0; g < x.groups; g += 2) {
      const bool two = g + 1 < x.groups;
      const TileOperands block{static_cast<const char*>(x.x) + 2 * r0 * x.x_stride,
                               2 * x.x_stride,
                               static_cast<const char*>(x.w) + 2 * g * x.w_stride,
                               64,
                               2 * x.w_stride,
                               1024};
      tile_block<Product::bf16>(block, rows, width_bytes, two, buffer);
      for (int r = 0; r < rows; ++r) {
        for (int n = 0; n < (two ? 2 : 1); ++n) {
          float* o = x.out + (r0 + r) * x.out_stride + (g + n) * v::lanes;
          v::store(o, v::add(v::load(o), sums(buffer + r * 32 + n * 16, 0, Product::bf16)));
        }
      }
    }
  }
  _tile_release();
}
