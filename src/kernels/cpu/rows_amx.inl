// Products with s8 codes that stay where the caller has them, for few query rows: decode. K^T is
// never formed, because tiles multiply K by Q^T as well as Q by K^T, and V's rows are interleaved
// in registers. Packing would read, write and read again what is used once. Continues
// tiles_amx.inl.

/// Into L2: more lines than L1 can wait for, and its sets are few for rows that lie apart.
static inline void fetch(const std::uint8_t* line) { _mm_prefetch(line, _MM_HINT_T1); }

/// 16 keys a step: sums[key][query] = K Q^T.
template <int Steps>
static inline void multiply_code_rows(const std::uint8_t* queries, const CodeRows& k, int keys,
                                      std::int32_t (*sums)[16]) {
  _tile_loadd(4, queries, 64);
  if constexpr (Steps > 1) _tile_loadd(5, queries + 1024, 64);
  if constexpr (Steps > 2) _tile_loadd(6, queries + 2048, 64);
  if constexpr (Steps > 3) _tile_loadd(7, queries + 3072, 64);
  for (int j = 0; j < keys; j += 16) {
    const std::uint8_t* rows = k.group[j / 16];
    for (int i = 0; k.next != nullptr && i < 16; ++i) {
      for (int t = 0; t < Steps; ++t) fetch(k.next[j / 16] + i * k.stride + 64 * t);
    }
    _tile_zero(0);
    _tile_loadd(1, rows, k.stride);
    _tile_dpbssd(0, 1, 4);
    if constexpr (Steps > 1) {
      _tile_loadd(2, rows + 64, k.stride);
      _tile_dpbssd(0, 2, 5);
    }
    if constexpr (Steps > 2) {
      _tile_loadd(3, rows + 128, k.stride);
      _tile_dpbssd(0, 3, 6);
    }
    if constexpr (Steps > 3) {
      _tile_loadd(1, rows + 192, k.stride);
      _tile_dpbssd(0, 1, 7);
    }
    _tile_stored(0, sums[j], 64);
  }
}

/// Four queries' sums of 16 keys, one vector a query.
static inline void turn_sums(const std::int32_t (*sums)[16], int query, I (&turned)[4]) {
  I z[4];  // z[i], lane L: key 4 L + i
  for (int i = 0; i < 4; ++i) {
    const auto piece = [&](int lane) {
      return _mm_load_si128(reinterpret_cast<const __m128i*>(&sums[4 * lane + i][query]));
    };
    I x = _mm512_castsi128_si512(piece(0));
    x = _mm512_inserti32x4(x, piece(1), 1);
    x = _mm512_inserti32x4(x, piece(2), 2);
    z[i] = _mm512_inserti32x4(x, piece(3), 3);
  }
  const I a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
  const I c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  turned[0] = _mm512_unpacklo_epi64(a, c);
  turned[1] = _mm512_unpackhi_epi64(a, c);
  turned[2] = _mm512_unpacklo_epi64(b, d);
  turned[3] = _mm512_unpackhi_epi64(b, d);
}

void qk_s8_rows(const std::uint8_t* queries, int rows, const CodeRows& k, int keys, int d,
                const float* q_scale, const float* k_scale, float* scores) {
  alignas(64) std::int32_t sums[tile_keys][16];
  configure(tile_rows, 64);
  for (int r0 = 0; r0 < rows; r0 += 16) {
    const std::uint8_t* panel = queries + r0 * d;
    if (d == 64) multiply_code_rows<1>(panel, k, keys, sums);
    if (d == 128) multiply_code_rows<2>(panel, k, keys, sums);
    if (d == 192) multiply_code_rows<3>(panel, k, keys, sums);
    if (d == 256) multiply_code_rows<4>(panel, k, keys, sums);
    for (int j = 0; j < keys; j += 16) {
      const F scale = v::load(k_scale + j);
      for (int r = r0; r < rows && r < r0 + 16; r += 4) {
        I turned[4];
        turn_sums(sums + j, r - r0, turned);
        for (int n = 0; n < 4 && r + n < rows; ++n) {
          const F s = v::mul(v::to_float(turned[n]), v::set(q_scale[r + n]));
          v::store(scores + (r + n) * tile_keys + j, v::mul(s, scale));
        }
      }
    }
  }
  _tile_release();
}

/// Operands of one P V with rows of codes.
struct RowValues {
  const std::uint8_t* codes;
  const CodeRows& v;
  int keys, channels;
  const float *alpha, *beta, *v_scale;
  float* out;
};

/// R rows of P times up to 64 channels from c on.
template <int R>
static inline void multiply_value_rows(const RowValues& x, int r0, int c) {
  const int left = x.channels - c;
  const __mmask64 some = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
  I acc[R][4];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < 4; ++i) acc[r][i] = v::set_i(0);
  }
  const std::uint8_t* codes = x.codes + r0 * tile_keys;
  const bool first = x.v.next != nullptr && r0 == 0;
  for (int j = 0; j < x.keys; j += 4) {
    const std::uint8_t* row = x.v.group[j / 16] + j % 16 * x.v.stride + c;
    for (int n = 0; first && n < 4; ++n) {
      fetch(x.v.next[j / 16] + (j % 16 + n) * x.v.stride + c);
    }
    I k[4];
    for (int n = 0; n < 4; ++n) k[n] = _mm512_maskz_loadu_epi8(some, row + n * x.v.stride);
    const I a = _mm512_unpacklo_epi8(k[0], k[1]), b = _mm512_unpackhi_epi8(k[0], k[1]);
    const I e = _mm512_unpacklo_epi8(k[2], k[3]), f = _mm512_unpackhi_epi8(k[2], k[3]);
    // w[i], lane L: channels 16 L + 4 i to 16 L + 4 i + 3, four keys of each.
    const I w[4] = {_mm512_unpacklo_epi16(a, e), _mm512_unpackhi_epi16(a, e),
                    _mm512_unpacklo_epi16(b, f), _mm512_unpackhi_epi16(b, f)};
    for (int r = 0; r < R; ++r) {
      const I p = v::broadcast4(codes + r * tile_keys + j);
      for (int i = 0; i < 4; ++i) acc[r][i] = v::dot4(acc[r][i], p, w[i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    const I lo = _mm512_shuffle_i32x4(acc[r][0], acc[r][1], 0x44);
    const I hi = _mm512_shuffle_i32x4(acc[r][0], acc[r][1], 0xEE);
    const I lo2 = _mm512_shuffle_i32x4(acc[r][2], acc[r][3], 0x44);
    const I hi2 = _mm512_shuffle_i32x4(acc[r][2], acc[r][3], 0xEE);
    const I sums[4] = {_mm512_shuffle_i32x4(lo, lo2, 0x88), _mm512_shuffle_i32x4(lo, lo2, 0xDD),
                       _mm512_shuffle_i32x4(hi, hi2, 0x88), _mm512_shuffle_i32x4(hi, hi2, 0xDD)};
    const F alpha = v::set(x.alpha[r0 + r]), beta = v::set(x.beta[r0 + r]);
    for (int i = 0; i < 4 && 16 * i < left; ++i) {
      const int at = c + 16 * i;
      F t = v::to_float(sums[i]);
      if (x.v_scale) t = v::mul(t, v::load(x.v_scale + at));
      float* out = x.out + (r0 + r) * x.channels + at;
      v::store(out, v::fma(t, beta, v::mul(v::load(out), alpha)));
    }
  }
}

void pv_u8s8_rows(const std::uint8_t* codes, int rows, const CodeRows& values, int keys,
                  int channels, const float* alpha, const float* beta, const float* v_scale,
                  float* out) {
  const RowValues x{codes, values, keys, channels, alpha, beta, v_scale, out};
  for (int c = 0; c < channels; c += 64) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) multiply_value_rows<4>(x, r, c);
    if (rows - r == 3) multiply_value_rows<3>(x, r, c);
    if (rows - r == 2) multiply_value_rows<2>(x, r, c);
    if (rows - r == 1) multiply_value_rows<1>(x, r, c);
  }
}

/// More rows are worth panels, and attend() takes them.
int most_rows_in_place(int d, int dv) {
  return d % 64 == 0 && d <= 256 && dv % 16 == 0 ? least_tile_rows - 1 : 0;
}
