// The inner loops of the CPU backend as a table of functions, one table an instruction set. The
// units that fill a table (words_<isa>.cpp) include nothing that could emit a shared inline
// function compiled for their instruction set; everything else calls through the table.
#pragma once

#include <cstdint>

namespace qattn::cpu {

inline constexpr int tile_rows = 32;   ///< query rows of one task
inline constexpr int tile_keys = 128;  ///< keys of one softmax tile; the unit of tile-local scales
inline constexpr int lanes = 16;       ///< keys (K panels) or channels (V panels) side by side

// A tile's panels of K and V, its rows of Q and O, its scores and P stay in a core's L2: 72 KiB
// with s8 codes and D = 128, and 352 KiB where all are float32 and 256 wide, of 512 KiB in Zen 2
// and 3 and Neoverse N1 and more in newer servers. (Intel's before 2017 have 256 KiB.)
static_assert(4 * (2 * tile_keys * 256 + 2 * tile_rows * 256 + 2 * tile_rows * tile_keys) <=
              512 * 1024);

/// What multiplies: the panels' element type. bf16 panels hold bf16 values and, exactly, every
/// value of the 8- and 4-bit floats without their outermost scale. bf16x2 holds a value as a sum
/// of two bf16, which is exact for f16 (KernelTable::split_bf16()).
enum class Engine : std::int32_t { f32, bf16, bf16x2, integer };

/// bf16 values that hold one value together; 0: other elements.
constexpr int parts_of(Engine e) { return e == Engine::bf16 ? 1 : e == Engine::bf16x2 ? 2 : 0; }
constexpr bool is_split(Engine e) { return parts_of(e) > 1; }
/// Of one value in panels.
constexpr int bytes_of(Engine e) {
  return e == Engine::integer ? 1 : e == Engine::f32 ? 4 : 2 * parts_of(e);
}

/// Element types that load_row() reads.
enum class Element : std::int32_t { f32, f16, bf16 };

/// How P is rounded before it is multiplied with V (docs/NUMERICS.md, "Recipes").
enum class Rounding : std::int32_t { f32, f16, bf16, e4m3, mxfp8, nvfp4, u8, u8_token };

/// One tile of online softmax: scores in, rounded P, factors and running state out.
struct SoftmaxTile {
  float* scores;  ///< [rows][tile_keys], natural logarithm domain; -inf: masked
  int rows;
  int keys;  ///< multiple of 16; keys behind hold -inf
  Rounding rounding;
  float* max;             ///< [rows] running maximum
  float* sum;             ///< [rows] running sum of P: rounded, but of u8 P unrounded
  float* mass;            ///< u8: [rows] running sum of P's codes, or null
  float* alpha;           ///< [rows] factor of what O held before
  float* beta;            ///< [rows] factor of this tile's product
  float* p;               ///< [rows][tile_keys] for the f32 and bf16x2 engines, or null
  std::uint16_t* p_bf16;  ///< [rows][tile_keys] for the bf16 engine, or null
  std::uint8_t* codes;    ///< [rows][tile_keys] for the integer engine, or null
  /// u8: [rows][tile_keys] what the codes leave of P, in 1 / 255 of a code, of the rows whose codes
  /// would lose too much (docs/NUMERICS.md, "Lost mass"), a bit for each in `lossy`. Their codes
  /// are rounded down.
  std::uint8_t* rest;
  std::uint32_t lossy;
  const float *v_log, *v_inverse;  ///< u8_token, per key: log of V's scale, and 1 / scale
  /// u8_token: biases may have made all scores of a row so large that log of V's scale is lost in
  /// them. What they have in common is taken off them then.
  bool biased;
  /// Rows, a bit each, that see a key of this tile which may have a score of -inf.
  std::uint32_t below;
};

/// The sum of a row that has seen keys, but none with a score above -inf: scores below the floats.
/// It goes where a maximum is met, with all that was before.
inline constexpr float sum_of_below = -1.0f;

/// What changes the scores of row `row` of a tile, tile_keys of them, between products and softmax:
/// masks and softcap. Returns whether the row sees a key whose score lies below the floats.
struct ScoreChange {
  bool (*change)(const void* context, std::int64_t first, int row, float* scores) = nullptr;
  const void* context = nullptr;
};

/// The query rows of attend(), and their state. Arrays of rows have room for tile_rows.
struct AttentionRows {
  Engine engine;      ///< of the product with K; V's follows from `rounding`
  Rounding rounding;  ///< of P
  const void* q;      ///< rows of width_bytes
  int rows, width_bytes;
  const float* q_scale;
  const std::int32_t* correction;
  const std::int64_t *begin, *end;  ///< keys that each row sees, where a tile is windowed
  float *max, *sum, *mass;          ///< running, as in SoftmaxTile
  float* out;                       ///< [rows][channels] not yet divided
  int channels;
  ScoreChange change;  ///< knows windows, too; none: nothing but windows
  /// It adds biases, which may be of any size, that leave log of V's scale or even P's exponents no
  /// bits. What a row's scores have in common is taken off them then.
  bool biased = false;
};

/// One tile of keys of attend().
struct AttentionTile {
  std::int64_t first;  ///< its first key
  bool windowed;       ///< some row does not see all of its tile_keys keys, or `bad`
  bool bad;            ///< some key's scale is NaN: whoever sees it becomes NaN
  const void *k, *v;   ///< panels, as the products take them
  const float* k_scale;
  const float *v_log, *v_inverse;  ///< u8_token
  const float* v_scale;            ///< per channel, or null; not with P in bf16
};

/// s8 codes of a tile's keys where the caller has them: rows 16 g to 16 g + 15 begin at group[g]
/// and lie `stride` bytes apart. `next`: the groups of the tile to fetch meanwhile, as many as this
/// one has, or null.
struct CodeRows {
  const std::uint8_t* const* group;
  const std::uint8_t* const* next;
  std::int64_t stride;
};

/// Rows of floats where the caller has them.
struct FloatRows {
  const void* const* row;
  Element element;
  const void* const* next = nullptr;  ///< as many that are read after these; null: nobody knows
};

/// Rows of floats to s8 codes with a scale for each: what load_row(), amax(), formats::amax_scale()
/// and encode_s8() make of them, bit for bit.
struct RowsToCodes {
  FloatRows rows;
  int count, channels;
  const float* mean;     ///< [channels] subtracted first, or null
  const float* factors;  ///< [channels] then multiplied with, or null
  std::int8_t* codes;    ///< rows of channels padded to 16, one every `stride` bytes
  std::int64_t stride;
  float* scale;       ///< [count]; NaN where a row holds NaN or Inf, whose codes are 0
  std::int32_t* sum;  ///< [count] of a row's codes, or null
};

// --- The KV cache's codes (formats/kv/layout.hpp, formats/kv/quantize.hpp) -----------------------

/// Rows of sixteen-bit fixed point as two planes of s8: x = scale * (128 * high + low), row r's
/// high plane in row 2 r of an s8 array, its low plane in row 2 r + 1.
inline constexpr float kv_plane_max = 127.0f * 128.0f;

/// Scores of a tile of codes: (sum over channels of q's planes times codes - centre[j] * sum[r])
/// * scale[r] * k_scale[j] + offset[r].
struct KvScores {
  const std::int8_t* planes;  ///< [2 rows][d]
  int rows;
  int d;
  const std::uint8_t* panels;               ///< [keys / 16][d / 4][16][4] codes
  int keys;                                 ///< multiple of 16
  const float *sum, *scale, *offset;        ///< [rows]; sum: of the planes, in units of `scale`
  const float* noise;                       ///< [rows] times k_noise joins the scores
  const float *centre, *k_scale, *k_noise;  ///< [keys]
  float* scores;                            ///< [rows][tile_keys]
};

/// One tile of online softmax for V codes: V's scales are folded into P, which becomes planes.
struct KvSoftmax {
  float* scores;  ///< [rows][tile_keys], natural logarithm domain; -inf: masked; overwritten
  int rows, keys;
  const float *v_scale, *centre;  ///< [keys]; scales finite
  float *max, *sum, *alpha;       ///< [rows] running maximum, sum of P, factor of what O held
  float* beta;                    ///< [rows] factor of this tile's product
  float* shift;                   ///< [rows] what the product exceeds by the codes' centre
  std::int8_t* planes;            ///< [2 rows][tile_keys]
  float* mass;                    ///< null, or [rows][tile_keys / 16] sums of exp(s - top)
  float* top;                     ///< [rows] maximum of this tile, with `mass`
};

// --- Products with a weight that is packed once (the output projection) --------------------------

/// out[r][j] += x_r . w_j over `d` elements, for `rows` rows and 16 * `groups` columns. Strides are
/// in elements. x: rows of floats or, in bf16, pairs (d is even); w: panels of sixteen columns, one
/// every w_stride, [d][16], or [d / 2][16][2] in bf16.
struct LinearTile {
  const void* x;
  std::int64_t x_stride;
  int rows;
  const void* w;
  std::int64_t w_stride;
  int groups, d;
  float* out;
  std::int64_t out_stride;
};

struct KernelTable {
  const char* isa;

  /// dst[0, n) = src - mean (mean may be null), zeros up to the next multiple of 16. +-Inf becomes
  /// NaN, so that it can never turn into a plausible number later.
  void (*load_row)(const void* src, Element element, int n, const float* mean, float* dst);
  /// max |x|, NaN if any is NaN. n counts floats; the row is padded to a multiple of 16.
  float (*amax)(const float* x, int n);
  /// codes[0, n padded to 16) = clamp(round(x * inverse), -127, 127); returns how many were
  /// clipped. A NaN inverse gives zeros.
  int (*encode_s8)(const float* x, int n, float inverse, std::int8_t* codes);
  /// The same with a factor for every channel, all finite.
  int (*encode_s8_channels)(const float* x, int n, const float* inverse, std::int8_t* codes);
  void (*rows_to_codes)(const RowsToCodes& x);
  /// sum[0, channels padded to 16) = the rows, added one by one from 0 on. Inf is NaN.
  void (*sum_rows)(const FloatRows& x, int count, int channels, float* sum);
  /// row . with, in sixteen sums of doubles. Inf is NaN; `with` is padded to a multiple of 16.
  double (*dot)(const void* row, Element element, int channels, const float* with);
  /// acc[i] = max(acc[i], |x[i]|), NaN wins.
  void (*accumulate_amax)(const float* x, int n, float* acc);

  /// formats::hadamard_blocks(), bit for bit; block and n are multiples of 16.
  void (*hadamard)(float* x, int n, int block, float norm);

  /// bf16 values as such: the upper halves of n floats (padded to a multiple of 16).
  void (*narrow_bf16)(const float* x, int n, std::uint16_t* out);
  /// What softmax() needs of V's scales per token (SoftmaxTile): fills tile_keys entries of each
  /// table, those behind `count` neutrally.
  void (*token_scale_tables)(const float* scale, int count, float* log, float* inverse);
  /// 16 rows of `bytes` to a panel [bytes / 4][16][4], every byte xor flip's.
  void (*transpose_packs)(const std::uint8_t* const* rows, int bytes, std::uint32_t flip,
                          std::uint8_t* panel);
  /// 4 rows of n bytes (a multiple of 16) to [n][4].
  void (*interleave_bytes)(const std::uint8_t* const* rows, int n, std::uint8_t* panel);

  /// scores[r][j] = (q_r . k_j) * q_scale[r] * k_scale[j] for keys in [0, keys), keys a multiple of
  /// 16. q: rows of `d4` groups of four s8; k: panels of 16 keys [d4][16][4] holding code + 128;
  /// correction[r] = -128 * sum of q_r's codes.
  void (*qk_s8)(const std::int8_t* q, int rows, const std::uint8_t* k, int keys, int d4,
                const float* q_scale, const std::int32_t* correction, const float* k_scale,
                float* scores);
  /// The same for float operands: q rows of `d`, k panels [d][16].
  void (*qk_f32)(const float* q, int rows, const float* k, int keys, int d, const float* q_scale,
                 const float* k_scale, float* scores);
  /// The same for bf16: q rows of `d2` pairs, k panels [d2][16][2]. Null where not native.
  void (*qk_bf16)(const std::uint16_t* q, int rows, const std::uint16_t* k, int keys, int d2,
                  const float* q_scale, const float* k_scale, float* scores);
  /// x[i] as out[i] + out[stride + i], the larger one first, for n floats, a multiple of 16. This
  /// and the products of such sums are null where there are none.
  void (*split_bf16)(const float* x, int n, int stride, std::uint16_t* out);
  /// qk_bf16() of sums: q rows [2][d], k panels [2][d / 2][16][2]; d a multiple of 32.
  void (*qk_bf16x2)(const std::uint16_t* q, int rows, const std::uint16_t* k, int keys, int d,
                    const float* q_scale, const float* k_scale, float* scores);
  void (*softmax)(SoftmaxTile& tile);
  /// Both products and softmax of several tiles. AttentionRows::change leaves -infinity in all of a
  /// row's tile_keys scores that it hides: those behind the last key hold anything before. V's
  /// panels hold no NaN within the last step of 64 bytes of P. Null where there is none.
  void (*attend)(const AttentionRows& rows, const AttentionTile* tiles, int count);
  /// Does it serve rows of these kinds? Else the single steps do.
  bool (*attends)(Engine engine, Rounding rounding, int rows, int width_bytes);
  /// qk_s8 with K as it lies. queries: [rows / 16][d / 4][16][4], as transpose_packs() makes them.
  /// Null where there is none.
  void (*qk_s8_rows)(const std::uint8_t* queries, int rows, const CodeRows& k, int keys, int d,
                     const float* q_scale, const std::int32_t* correction, const float* k_scale,
                     float* scores);
  /// The most query rows for which it and pv_u8s8_rows() are the faster way, 0 where they do not
  /// serve the head dimensions.
  int (*most_rows_in_place)(int d, int dv);
  /// out[r][c] = out * alpha[r] + beta[r] * v_scale[c] * sum_j codes[r][j] v[j][c]. v: [keys/4]
  /// [channels][4] s8; keys a multiple of 4, channels of 16; v_scale may be null (1).
  void (*pv_u8s8)(const std::uint8_t* codes, int rows, const std::int8_t* v, int keys, int channels,
                  const float* alpha, const float* beta, const float* v_scale, float* out);
  /// The same with V as it lies.
  void (*pv_u8s8_rows)(const std::uint8_t* codes, int rows, const CodeRows& v, int keys,
                       int channels, const float* alpha, const float* beta, const float* v_scale,
                       float* out);
  /// The same with p for codes and v: [keys][channels].
  void (*pv_f32)(const float* p, int rows, const float* v, int keys, int channels,
                 const float* alpha, const float* beta, const float* v_scale, float* out);
  /// The same for bf16; v: [keys / 2][channels][2], keys even. Null where not native.
  void (*pv_bf16)(const std::uint16_t* p, int rows, const std::uint16_t* v, int keys, int channels,
                  const float* alpha, const float* beta, const float* v_scale, float* out);
  /// pv_bf16() of sums: p rows [2][tile_keys], v [2][tile_keys / 2][channels][2]; of both the next
  /// multiple of 32 keys is read.
  void (*pv_bf16x2)(const std::uint16_t* p, int rows, const std::uint16_t* v, int keys,
                    int channels, const float* alpha, const float* beta, float* out);
  /// Are all values of `rows` rows finite?
  bool (*finite_rows)(const FloatRows& x, int rows, int channels);
  /// scores[r][j] = (q_r . k_j) * q_scale[r] over d channels, K as it lies.
  void (*qk_float_rows)(const float* q, std::int64_t q_stride, int rows, const FloatRows& k,
                        int keys, int d, const float* q_scale, float* scores);
  /// out[r][c] = out * alpha[r] + beta[r] * sum_j p[r][j] v[j][c], V as it lies. p: [rows]
  /// [tile_keys]; out: rows of `channels` padded to 16.
  void (*pv_float_rows)(const float* p, int rows, const FloatRows& v, int keys, int channels,
                        const float* alpha, const float* beta, float* out);
  void (*linear_f32)(const LinearTile& tile);
  /// Null where not native.
  void (*linear_bf16)(const LinearTile& tile);
  /// formats::Bf16::encode() of n floats, n a multiple of 16.
  void (*encode_bf16)(const float* x, int n, std::uint16_t* out);
  /// formats::F16::encode() of n floats, n a multiple of 16.
  void (*encode_f16)(const float* x, int n, std::uint16_t* out);
  /// kv_error() of a row under `count` positive scales.
  void (*kv_errors)(const float* x, int n, int bits, const float* scales, int count, float* errors);
  /// codes[i] = kv_encode(x[i], inverse); x * inverse is no NaN. n is a multiple of 16.
  void (*kv_codes)(const float* x, int n, float inverse, int bits, std::uint8_t* codes);
  /// formats::kv_pack(); n is a multiple of 512.
  void (*kv_pack)(const std::uint8_t* panel, int n, int bits, std::uint8_t* packed);
  /// The inverse of kv_pack(): n codes, one a byte; n is a multiple of 512.
  void (*kv_unpack)(const std::uint8_t* packed, int n, int bits, std::uint8_t* panel);
  /// A row as planes; returns the scale, and the planes' sum in its units. NaN gives a NaN scale.
  float (*kv_planes)(const float* x, int n, std::int8_t* high, std::int8_t* low, float* sum);
  void (*kv_scores)(const KvScores& tile);
  void (*kv_softmax)(const KvSoftmax& tile);
  /// out[r][c] = out * alpha[r] + beta[r] * (sum_j planes[r][j] codes[j][c] - shift[r]). panels:
  /// [keys / 4][channels][4] codes; planes: [2 rows][tile_keys].
  void (*kv_values)(const std::int8_t* planes, int rows, const std::uint8_t* panels, int keys,
                    int channels, const float* alpha, const float* beta, const float* shift,
                    float* out);

  /// s = c * tanh((s + offset) / c) over n floats, n a multiple of 16.
  void (*softcap)(float* s, int n, float offset, float c);
  /// s = -inf where visible[j] is 0, over n keys, n a multiple of 16.
  void (*hide)(float* s, int n, const std::uint8_t* visible);
  /// s += bias over n keys. Numbers that leave the floats together stay the largest; a bias of -inf
  /// hides its key whatever the score.
  void (*add_bias)(float* s, int n, const void* bias, Element element);
  /// exp(x) of one value, the same arithmetic as inside softmax.
  float (*exp_one)(float x);
};

/// One table an instruction set; null where this build has no such unit. Only select_words() may
/// hand one out: it has asked the CPU.
const KernelTable* words_scalar();
const KernelTable* words_avx2();
const KernelTable* words_avx512vnni();
const KernelTable* words_avx512bf16();
const KernelTable* words_amx();
const KernelTable* words_neon_dotprod();
const KernelTable* words_neon_i8mm();

/// The table in force: QATTN_CPU_ISA if set, else the best that this CPU runs.
struct Selection {
  const KernelTable* words = nullptr;
  const char* error = nullptr;  ///< why there is none
  bool unknown_name = false;
};
Selection select_words();

}  // namespace qattn::cpu
