// Peaks of this CPU's units, and what attention makes of them, as JSON on standard output:
//   cpu_roofline [threads [scale]]   (scale: of the work, 1; a smoke test takes less)
// Peaks come from loops of independent instructions on registers; softmax from the library's own
// function on a tile in cache; attention from whole calls on every instruction set that runs here.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/words.hpp"
#include "qattn/attention.hpp"
#include "qattn/quantize.hpp"

namespace {

using nlohmann::json;
using namespace qattn;

/// Memory that begins with a cache line, as torch's does.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(std::size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* p, std::size_t) { ::operator delete(p, std::align_val_t{64}); }
  bool operator==(const LineAllocator&) const { return true; }
};
template <class T>
using Values = std::vector<T, LineAllocator<T>>;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double scale = 1;  ///< of the work

/// Seconds of several calls after one that warms up, the fastest first.
std::vector<double> times(const std::function<void()>& call, int repeats) {
  call();
  std::vector<double> t;
  for (int i = 0; i < repeats; ++i) {
    const double start = now();
    call();
    t.push_back(now() - start);
  }
  std::sort(t.begin(), t.end());
  return t;
}

/// The median, for what a caller gets.
double seconds(const std::function<void()>& call) { return times(call, 7)[3]; }

/// The fastest, for what a machine can: anything else that runs on it only takes away.
double least_seconds(const std::function<void()>& call) { return times(call, 21)[0]; }

/// Operations a second of `loop`, which does `operations` of them a call, on all threads at once.
double rate(int threads, double operations, void (*loop)(long), long steps) {
  steps = std::max(1L, static_cast<long>(static_cast<double>(steps) * scale));
  const double t = least_seconds([&] {
#pragma omp parallel num_threads(threads)
    loop(steps);
  });
  return threads * operations * static_cast<double>(steps) / t;
}

// ---- Loops --------------------------------------------------------------------------------------
// Twelve accumulators hide the latency of two units with six clocks. The empty asm statements keep
// the compiler from joining steps, and accumulators that would hold the same.

constexpr int chains = 12;

#define QATTN_KEEP(x) asm volatile("" : "+v"(x))
#define QATTN_KEEP_ALL(c)            \
  do {                               \
    for (auto& x : c) QATTN_KEEP(x); \
  } while (0)

[[gnu::target("avx2,fma")]] void fma_avx2(long steps) {
  __m256 c[chains] = {}, a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(0.5f);
  QATTN_KEEP_ALL(c);
  for (long s = 0; s < steps; ++s) {
    for (auto& x : c) x = _mm256_fmadd_ps(a, b, x);
    QATTN_KEEP(a);
  }
  QATTN_KEEP_ALL(c);
}

// Where the sum is an instruction of its own, each product is of its accumulator, or the compiler
// would multiply once a step for all of them; and they have names, since of an array's values it
// keeps copies in memory where there are only sixteen registers.
#define QATTN_EACH(f) \
  f(c0);              \
  f(c1);              \
  f(c2);              \
  f(c3);              \
  f(c4);              \
  f(c5);              \
  f(c6);              \
  f(c7);              \
  f(c8);              \
  f(c9);              \
  f(c10);             \
  f(c11)
#define QATTN_LOOP(Vector, step)                                                     \
  do {                                                                               \
    Vector c0{}, c1{}, c2{}, c3{}, c4{}, c5{}, c6{}, c7{}, c8{}, c9{}, c10{}, c11{}; \
    static_assert(chains == 12);                                                     \
    QATTN_EACH(QATTN_KEEP);                                                          \
    for (long s = 0; s < steps; ++s) {                                               \
      QATTN_EACH(step);                                                              \
      QATTN_KEEP(a);                                                                 \
    }                                                                                \
    QATTN_EACH(QATTN_KEEP);                                                          \
  } while (0)

// Products of bytes as pairs of 16-bit words, as the AVX2 unit computes them.
[[gnu::target("avx2")]] void madd_avx2(long steps) {
#define QATTN_STEP(x) x = _mm256_add_epi32(x, _mm256_madd_epi16(x, a))
  __m256i a = _mm256_set1_epi16(3);
  QATTN_LOOP(__m256i, QATTN_STEP);
#undef QATTN_STEP
}

// What plain C++ can become at best: x86-64 has SSE2 and no more.
void madd_sse2(long steps) {
#define QATTN_STEP(x) x = _mm_add_epi32(x, _mm_madd_epi16(x, a))
  __m128i a = _mm_set1_epi16(3);
  QATTN_LOOP(__m128i, QATTN_STEP);
#undef QATTN_STEP
}

void mul_add_sse2(long steps) {
#define QATTN_STEP(x) x = _mm_add_ps(x, _mm_mul_ps(x, a))
  __m128 a = _mm_set1_ps(0.5f);
  QATTN_LOOP(__m128, QATTN_STEP);
#undef QATTN_STEP
}

[[gnu::target("avx512f")]] void fma_avx512(long steps) {
  __m512 c[chains] = {}, a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(0.5f);
  QATTN_KEEP_ALL(c);
  for (long s = 0; s < steps; ++s) {
    for (auto& x : c) x = _mm512_fmadd_ps(a, b, x);
    QATTN_KEEP(a);
  }
  QATTN_KEEP_ALL(c);
}

[[gnu::target("avx512f,avx512vnni")]] void dot_vnni(long steps) {
  __m512i c[chains] = {}, a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(2);
  QATTN_KEEP_ALL(c);
  for (long s = 0; s < steps; ++s) {
    for (auto& x : c) x = _mm512_dpbusd_epi32(x, a, b);
    QATTN_KEEP(a);
  }
  QATTN_KEEP_ALL(c);
}

[[gnu::target("avx512f,avx512bf16")]] void dot_bf16(long steps) {
  __m512 c[chains] = {};
  __m512i ones = _mm512_set1_epi16(0x3f80);
  QATTN_KEEP_ALL(c);
  for (long s = 0; s < steps; ++s) {
    const auto a = reinterpret_cast<__m512bh>(ones);
    for (auto& x : c) x = _mm512_dpbf16_ps(x, a, a);
    QATTN_KEEP(ones);
  }
  QATTN_KEEP_ALL(c);
}

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
  constexpr TileConfig() {
    for (int i = 0; i < 8; ++i) row_bytes[i] = 64, rows[i] = 16;
  }
};

[[gnu::target("amx-tile")]] void start_tiles() {
  static constexpr TileConfig config;  // in memory as a whole: the intrinsic names 8 bytes of it
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

// Four accumulators from two tiles each of A and B, all in registers.
[[gnu::target("amx-tile,amx-int8")]] void tiles_s8(long steps) {
  start_tiles();
  for (long s = 0; s < steps; ++s) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
}

[[gnu::target("amx-tile,amx-bf16")]] void tiles_bf16(long steps) {
  start_tiles();
  for (long s = 0; s < steps; ++s) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

// ---- Peaks of an instruction set ----------------------------------------------------------------

/// Multiply-adds count as two operations.
json peaks(const std::string& isa, int threads) {
  constexpr long steps = 2'000'000;
  json p;
  const bool wide = isa == "avx512vnni" || isa == "avx512bf16" || isa == "amx";
  if (wide) {
    p["f32"] = rate(threads, 2.0 * 16 * chains, fma_avx512, steps);
    p["integer"] = rate(threads, 2.0 * 64 * chains, dot_vnni, steps);
  }
  if (isa == "avx512bf16") p["bf16"] = rate(threads, 2.0 * 32 * chains, dot_bf16, steps);
  if (isa == "avx2") {
    p["f32"] = rate(threads, 2.0 * 8 * chains, fma_avx2, steps);
    p["integer"] = rate(threads, 2.0 * 16 * chains, madd_avx2, steps);
  }
  if (isa == "scalar") {
    p["f32"] = rate(threads, 2.0 * 4 * chains, mul_add_sse2, steps);
    p["integer"] = rate(threads, 2.0 * 8 * chains, madd_sse2, steps);
  }
  if (isa == "amx") {
    p["integer"] = rate(threads, 4 * 2.0 * 16 * 16 * 64, tiles_s8, steps / 10);
    p["bf16"] = rate(threads, 4 * 2.0 * 16 * 16 * 32, tiles_bf16, steps / 10);
  }
  return p;
}

/// Scores a second that the softmax of a tile in cache turns into rounded P.
double softmax_rate(const cpu::KernelTable& words, cpu::Rounding rounding, int threads) {
  constexpr int rows = cpu::tile_rows, keys = cpu::tile_keys;
  const int calls = std::max(1, static_cast<int>(2000 * scale));
  const double t = least_seconds([&] {
#pragma omp parallel num_threads(threads)
    {
      const std::size_t n = std::size_t{rows} * keys;
      std::vector<float> source(n), scores(n), p(n), log(keys), inverse(keys, 1.0f);
      std::vector<std::uint16_t> p_bf16(n);
      std::vector<std::uint8_t> codes(n), rest(n);
      std::vector<float> max(rows, -INFINITY), sum(rows), mass(rows), alpha(rows), beta(rows);
      for (std::size_t i = 0; i < n; ++i) source[i] = static_cast<float>(i * 37 % 101) * 0.1f;
      for (int call = 0; call < calls; ++call) {
        scores = source;
        cpu::SoftmaxTile tile{};
        tile.scores = scores.data(), tile.rows = rows, tile.keys = keys, tile.rounding = rounding;
        tile.max = max.data(), tile.sum = sum.data(), tile.mass = mass.data();
        tile.alpha = alpha.data(), tile.beta = beta.data();
        tile.p = p.data(), tile.p_bf16 = p_bf16.data(), tile.codes = codes.data();
        tile.rest = rest.data(), tile.v_log = log.data(), tile.v_inverse = inverse.data();
        words.softmax(tile);
      }
    }
  });
  return static_cast<double>(threads) * calls * rows * keys / t;
}

// Eight accumulators of 32 bytes: what a core asks of memory, not of its adders.
[[gnu::target("avx2")]] float sum_avx2(const float* x, std::size_t n) {
  __m256 c[8] = {};
  for (std::size_t i = 0; i + 64 <= n; i += 64) {
    for (std::size_t j = 0; j < 8; ++j) c[j] = _mm256_add_ps(c[j], _mm256_loadu_ps(x + i + 8 * j));
  }
  for (int j = 1; j < 8; ++j) c[0] = _mm256_add_ps(c[0], c[j]);
  return c[0][0];
}

/// The sum in the order in which decode reads 8 heads of 128 bytes that lie side by side: 128 rows
/// of one head, then those of the next.
[[gnu::target("avx2")]] float sum_tiles_avx2(const float* x, std::size_t n) {
  constexpr std::size_t token = 8 * 32, tile = 128 * token;
  __m256 c[4] = {};
  for (std::size_t i = 0; i + tile <= n; i += tile) {
    for (std::size_t head = i; head < i + token; head += 32) {
      for (std::size_t row = head; row < head + tile; row += token) {
        for (std::size_t j = 0; j < 4; ++j) {
          c[j] = _mm256_add_ps(c[j], _mm256_loadu_ps(x + row + 8 * j));
        }
      }
    }
  }
  for (int j = 1; j < 4; ++j) c[0] = _mm256_add_ps(c[0], c[j]);
  return c[0][0];
}

/// Bytes a second of a sum over memory that no cache holds.
double read_rate(int threads, float (*sum_of)(const float*, std::size_t) = sum_avx2) {
  const auto n = static_cast<std::size_t>(scale * (1 << 28)) / threads;  // floats: 1 GiB in all
  std::vector<Values<float>> parts(static_cast<std::size_t>(threads));
#pragma omp parallel num_threads(threads)
  parts[static_cast<std::size_t>(omp_get_thread_num())].assign(n, 1.0f);
  volatile float sink = 0;
  const double t = least_seconds([&] {
#pragma omp parallel num_threads(threads)
    {
      const float sum = sum_of(parts[static_cast<std::size_t>(omp_get_thread_num())].data(), n);
#pragma omp critical
      sink = sink + sum;
    }
  });
  return 4.0 * static_cast<double>(n) * threads / t;
}

// ---- Attention ----------------------------------------------------------------------------------

struct Shape {
  std::int64_t heads_q, heads_kv, queries, keys, d;
  bool codes = false;  ///< K and V are s8 with a scale a token from the start; else bf16
  double flop() const { return 4.0 * static_cast<double>(heads_q * queries * keys * d); }
  double bytes_kv() const {
    return 2.0 * static_cast<double>(heads_kv * keys * (codes ? d + 4 : 2 * d));
  }
  double scores() const { return static_cast<double>(heads_q * queries * keys); }
};

void stop_unless(const Status& status) {
  if (status.ok()) return;
  std::cerr << status.message() << "\n";
  std::exit(1);
}

/// Codes and scales of K or V.
struct Coded {
  Values<std::int8_t> codes;
  Values<float> scales;
};

/// Quantises K or V as a cache of codes holds it; `x` and `x_scale` become views of that.
Coded code(Role role, TensorView& x, TensorView& x_scale) {
  QuantizeOptions options;
  options.role = role;
  options.scaling.granularity = Granularity::per_token;
  const Result<QuantizeShapes> shapes = quantize_shapes(x, options);
  stop_unless(shapes.status());
  const auto count = [](const TensorView& view) {
    std::int64_t n = 1;
    for (int d = 0; d < view.rank; ++d) n *= view.shape[d];
    return static_cast<std::size_t>(n);
  };
  Coded coded{Values<std::int8_t>(count(shapes->codes)), Values<float>(count(shapes->scale))};
  QuantizeTensors tensors;
  tensors.x = x;
  tensors.codes = shapes->codes;
  tensors.codes.data = coded.codes.data();
  tensors.scale = shapes->scale;
  tensors.scale.data = coded.scales.data();
  stop_unless(quantize(tensors, options).status());
  x = tensors.codes;
  x_scale = tensors.scale;
  return coded;
}

/// Seconds of attention, bf16 in and out but for codes; negative: refused.
double attention_seconds(const Shape& s, const std::string& recipe, int threads) {
  const auto tensor = [](std::int64_t tokens, std::int64_t heads, std::int64_t d, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Values<std::uint16_t> x(static_cast<std::size_t>(tokens * heads * d));
    for (auto& v : x) {
      const float f = normal(random);
      std::uint32_t bits;
      static_assert(sizeof bits == sizeof f);
      std::copy_n(reinterpret_cast<const char*>(&f), 4, reinterpret_cast<char*>(&bits));
      v = static_cast<std::uint16_t>(bits >> 16);
    }
    return x;
  };
  auto q = tensor(s.queries, s.heads_q, s.d, 1), k = tensor(s.keys, s.heads_kv, s.d, 2);
  auto v = tensor(s.keys, s.heads_kv, s.d, 3), out = q;
  AttentionTensors t;
  t.q = TensorView::dense(q.data(), Format::bf16, {1, s.queries, s.heads_q, s.d});
  t.k = TensorView::dense(k.data(), Format::bf16, {1, s.keys, s.heads_kv, s.d});
  t.v = TensorView::dense(v.data(), Format::bf16, {1, s.keys, s.heads_kv, s.d});
  t.out = TensorView::dense(out.data(), Format::bf16, {1, s.queries, s.heads_q, s.d});
  Coded k_coded, v_coded;
  if (s.codes) {
    k_coded = code(Role::k, t.k, t.k_scale);
    v_coded = code(Role::v, t.v, t.v_scale);
  }
  AttentionOptions options;
  options.recipe = *recipe_named(recipe);
  options.threads = threads;
  const Result<Plan> made = plan(t, options);
  if (!made.ok()) return -1;
  std::vector<std::byte> memory(made->workspace_bytes() + 64);
  void* workspace = memory.data();
  std::size_t bytes = memory.size();
  std::align(64, made->workspace_bytes(), workspace, bytes);
  return seconds([&] { stop_unless(run(*made, t, options, workspace, bytes)); });
}

/// The unit that multiplies Q, K and P, V of a recipe.
std::string engine(const std::string& recipe, const cpu::KernelTable& words) {
  if (recipe == "int8_full") return "integer";
  return recipe == "bf16" && words.qk_bf16 != nullptr ? "bf16" : "f32";
}

/// Attention on the instruction set in force: seconds, and what they would be with products at
/// their peak and with the softmax alone; and the bytes of K and V.
json paths(const cpu::KernelTable& words, const json& peak, int threads) {
  const std::int64_t length = std::max<std::int64_t>(256, static_cast<std::int64_t>(4096 * scale));
  // A decode that quantised its whole cache each time would be nobody's: integer units read codes.
  const Shape shapes[] = {{8, 8, length, length, 128},
                          {32, 8, 1, 8 * length, 128},
                          {32, 8, 1, length, 128, true},
                          {32, 8, 1, 8 * length, 128, true}};
  json all = json::array();
  for (const char* recipe : {"int8_full", "bf16", "f32"}) {
    const std::string unit = engine(recipe, words);
    if (!peak.contains(unit)) continue;
    const double softmax = softmax_rate(words,
                                        unit == "integer" ? cpu::Rounding::u8_token
                                        : unit == "bf16"  ? cpu::Rounding::bf16
                                                          : cpu::Rounding::f32,
                                        threads);
    for (const Shape& s : shapes) {
      if (s.queries == 1 && s.codes != (unit == "integer")) continue;
      const double t = attention_seconds(s, recipe, threads);
      if (t < 0) continue;
      all.push_back({{"recipe", recipe},
                     {"unit", unit},
                     {"heads_q", s.heads_q},
                     {"heads_kv", s.heads_kv},
                     {"queries", s.queries},
                     {"keys", s.keys},
                     {"d", s.d},
                     {"kv", s.codes ? "s8" : "bf16"},
                     {"seconds", t},
                     {"products", s.flop() / peak[unit].get<double>()},
                     {"softmax", s.scores() / softmax},
                     {"memory", s.bytes_kv()}});
    }
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : omp_get_max_threads();
  if (argc > 2) scale = std::atof(argv[2]);
  if (threads < 1 || !(scale > 0 && scale <= 1)) {
    std::cerr << "cpu_roofline [threads >= 1 [0 < scale <= 1]]\n";
    return 2;
  }
  // loops: 2 since every one of AVX2's products of bytes is computed (before, one in twelve was)
  // and the fastest run is a peak (before, the median).
  json result = {{"threads", threads}, {"loops", 2}};
  double read = 0;  // of several times, since others read the same memory
  for (const char* isa : {"amx", "avx512bf16", "avx512vnni", "avx2", "scalar"}) {
    setenv("QATTN_CPU_ISA", isa, 1);
    const cpu::Selection selected = cpu::select_words();
    if (selected.words == nullptr) continue;
    json peak = peaks(isa, threads);
    read = std::max(read, read_rate(threads));
    json measured = paths(*selected.words, peak, threads);
    result["isas"].push_back({{"isa", isa}, {"peaks", peak}, {"attention", measured}});
  }
  result["read"] = read = std::max(read, read_rate(threads));
  result["read_tiles"] = read_rate(threads, sum_tiles_avx2);
  for (json& isa : result["isas"]) {
    for (json& row : isa["attention"]) row["memory"] = row["memory"].get<double>() / read;
  }
  std::cout << result.dump(1) << "\n";
}
