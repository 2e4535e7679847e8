// Products with s8 codes that stay where the caller has them, for few query rows: decode. K is
// turned and V's rows are interleaved in registers. Packing would write and read again what is used
// once. Continues softmax.inl.

/// The lines at `rows` and the 15 rows behind it into L2: more lines than L1 can wait for, and its
/// sets are few for rows that lie apart.
[[gnu::always_inline]] static inline void fetch_lines(const std::uint8_t* rows,
                                                      std::int64_t stride) {
#pragma GCC unroll 1
  for (int i = 0; i < 16; ++i) _mm_prefetch(rows + i * stride, _MM_HINT_T1);
}

/// Channels [c, c + 64) of `width` of the group that is read after group `g`. Rows that begin
/// inside a line end in one more: where numpy's memory begins, 27 % of a decode from memory. GCC 12
/// takes a function that only prefetches for one without effects, and drops calls of it.
[[gnu::always_inline]] static inline void fetch_next(const CodeRows& x, int g, int c, int width) {
  if (x.next == nullptr) return;
  const std::uint8_t* rows = x.next[g] + c;
  fetch_lines(rows, x.stride);
  const int left = width - c;
  if (left <= 64 && reinterpret_cast<std::uintptr_t>(rows) % 64 != 0) {
    fetch_lines(rows + left - 1, x.stride);
  }
}

/// f.operator()<0>() to f.operator()<N - 1>(). GCC 12 unrolls loops too late to keep the arrays
/// that they index in registers: the accumulators would be stored at every step.
template <int N, int I = 0, class F>
[[gnu::always_inline]] static inline void unrolled(const F& f) {
  if constexpr (I < N) {
    f.template operator()<I>();
    unrolled<N, I + 1>(f);
  }
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
  unrolled<4 * R>([&]<int N>() { acc[N / 4][N % 4] = v::set_i(0); });
  const std::uint8_t* codes = x.codes + r0 * tile_keys;
  for (int j = 0; j < x.keys; j += 4) {
    const std::uint8_t* row = x.v.group[j / 16] + j % 16 * x.v.stride + c;
    if (r0 == 0 && j % 16 == 0) fetch_next(x.v, j / 16, c, x.channels);
    I k[4];
    for (int n = 0; n < 4; ++n) k[n] = _mm512_maskz_loadu_epi8(some, row + n * x.v.stride);
    const I a = _mm512_unpacklo_epi8(k[0], k[1]), b = _mm512_unpackhi_epi8(k[0], k[1]);
    const I e = _mm512_unpacklo_epi8(k[2], k[3]), f = _mm512_unpackhi_epi8(k[2], k[3]);
    // w[i], lane L: channels 16 L + 4 i to 16 L + 4 i + 3, four keys of each.
    const I w[4] = {_mm512_unpacklo_epi16(a, e), _mm512_unpackhi_epi16(a, e),
                    _mm512_unpacklo_epi16(b, f), _mm512_unpackhi_epi16(b, f)};
    unrolled<4 * R>([&]<int N>() {
      const I p = v::broadcast4(codes + N / 4 * tile_keys + j);
      acc[N / 4][N % 4] = v::dot4(acc[N / 4][N % 4], p, w[N % 4]);
    });
  }
  unrolled<R>([&]<int N>() {
    const I lo = _mm512_shuffle_i32x4(acc[N][0], acc[N][1], 0x44);
    const I hi = _mm512_shuffle_i32x4(acc[N][0], acc[N][1], 0xEE);
    const I lo2 = _mm512_shuffle_i32x4(acc[N][2], acc[N][3], 0x44);
    const I hi2 = _mm512_shuffle_i32x4(acc[N][2], acc[N][3], 0xEE);
    const I sums[4] = {_mm512_shuffle_i32x4(lo, lo2, 0x88), _mm512_shuffle_i32x4(lo, lo2, 0xDD),
                       _mm512_shuffle_i32x4(hi, hi2, 0x88), _mm512_shuffle_i32x4(hi, hi2, 0xDD)};
    const F alpha = v::set(x.alpha[r0 + N]), beta = v::set(x.beta[r0 + N]);
    for (int i = 0; i < 4 && 16 * i < left; ++i) {
      const int at = c + 16 * i;
      F t = v::to_float(sums[i]);
      if (x.v_scale) t = v::mul(t, v::load(x.v_scale + at));
      float* out = x.out + (r0 + N) * x.channels + at;
      v::store(out, v::fma(t, beta, v::mul(v::load(out), alpha)));
    }
  });
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

#if !defined(QATTN_TILE_PRODUCTS)
/// R rows of scores: K's codes with their signs flipped (code + 128) times queries, less what that
/// adds (correction).
template <int R>
static inline void multiply_turned_codes(const std::uint8_t* queries, int r0, const CodeRows& k,
                                         int keys, int d, const float* q_scale,
                                         const std::int32_t* correction, const float* k_scale,
                                         float* scores) {
  const I flip = v::set_i(static_cast<std::int32_t>(0x80808080u));
  const std::uint8_t* panel = queries + r0 / 16 * 16 * d;
  const int first = r0 % 16;
  for (int j = 0; j < keys; j += 16) {
    const std::uint8_t* rows = k.group[j / 16];
    I acc[R];
    unrolled<R>([&]<int N>() { acc[N] = v::set_i(correction[r0 + N]); });
    for (int c = 0; c < d; c += 64) {
      I loaded[16], turned[16];
      if (r0 == 0) fetch_next(k, j / 16, c, d);
      unrolled<16>([&]<int N>() {
        loaded[N] = _mm512_xor_si512(_mm512_loadu_si512(rows + N * k.stride + c), flip);
      });
      v::transpose(loaded, turned);
      const std::uint8_t* q = panel + c * 16 + first * 4;
      unrolled<16 * R>([&]<int N>() {
        acc[N % R] = v::dot4(acc[N % R], turned[N / R], v::broadcast4(q + N / R * 64 + N % R * 4));
      });
    }
    const F scale = v::load(k_scale + j);
    unrolled<R>([&]<int N>() {
      const F s = v::mul(v::to_float(acc[N]), v::set(q_scale[r0 + N]));
      v::store(scores + (r0 + N) * tile_keys + j, v::mul(s, scale));
    });
  }
}

void qk_s8_rows(const std::uint8_t* queries, int rows, const CodeRows& k, int keys, int d,
                const float* q_scale, const std::int32_t* correction, const float* k_scale,
                float* scores) {
  const auto multiply = [&]<int R>(int r0) {
    multiply_turned_codes<R>(queries, r0, k, keys, d, q_scale, correction, k_scale, scores);
  };
  int r = 0;
  for (; r + 8 <= rows; r += 8) multiply.template operator()<8>(r);
  if ((rows & 4) != 0) multiply.template operator()<4>(r), r += 4;
  if ((rows & 2) != 0) multiply.template operator()<2>(r), r += 2;
  if ((rows & 1) != 0) multiply.template operator()<1>(r);
}

/// More rows would turn the same keys twice.
int most_rows_in_place(int d, int dv) { return d % 64 == 0 && dv % 16 == 0 ? 8 : 0; }
#endif
