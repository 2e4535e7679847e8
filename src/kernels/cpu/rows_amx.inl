// Scores of s8 codes that stay where the caller has them, on tiles: K^T is never formed, because
// tiles multiply K by Q^T as well as Q by K^T. Continues rows_avx512.inl.

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
    for (int t = 0; t < Steps; ++t) fetch_next(k, j / 16, 64 * t, 64 * Steps);
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
                const float* q_scale, const std::int32_t* /*correction*/, const float* k_scale,
                float* scores) {
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

/// More rows are worth panels, and attend() takes them.
int most_rows_in_place(int d, int dv) {
  return d % 64 == 0 && d <= 256 && dv % 16 == 0 ? least_tile_rows - 1 : 0;
}
