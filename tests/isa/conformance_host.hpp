// The host's side of the conformance test: operands, names, files, comparison.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "conformance.hpp"
#include "formats/bf16.hpp"
#include "formats/e4m3.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"

namespace qattn::isa_test {

using WordList = std::vector<Word32>;
using Results = std::map<std::string, WordList>;

// ---- Operands
// ------------------------------------------------------------------------------------

inline Word32 random_float(std::mt19937& random) {
  static const float corners[] = {
      0.0f,       -0.0f,    0x1p-149f, -0x1p-130f, 0x1p-126f, 1.0f,     -1.0f,           0.5f,
      1.5f,       2.5f,     254.5f,    255.5f,     1e9f,      -1e9f,    448.0f,          464.0f,
      465.0f,     57344.0f, 61440.0f,  65504.0f,   65519.9f,  65520.0f, 0x1p-14f,        0x1p-25f,
      0x1.8p-25f, 0x1p-9f,  0x1p-10f,  0x1.8p-10f, 0x1p-16f,  0x1p-17f, 0x1.fffffep127f, HUGE_VALF,
      -HUGE_VALF, NAN,      127.0f,    128.0f,     -126.0f,   -127.0f,  -150.0f};
  switch (random() % 8) {
    case 0:
      return std::bit_cast<Word32>(corners[random() % (sizeof corners / sizeof corners[0])]);
    case 1:
      return random();  // any bits
    case 2:             // ties and their neighbours
      return std::bit_cast<Word32>(static_cast<float>(static_cast<int>(random() % 1024)) * 0.5f);
    default: {
      const float magnitude = std::ldexp(1.0f + static_cast<float>(random() & 0x7fffffu) * 0x1p-23f,
                                         static_cast<int>(random() % 40) - 24);
      return std::bit_cast<Word32>(random() % 2 ? magnitude : -magnitude);
    }
  }
}

template <class Codec>
Word32 codes(std::mt19937& random, bool wide) {
  constexpr int bits = 8 * sizeof(typename Codec::Code);
  Word32 word = 0;
  for (int i = 0; i < 32; i += bits) {
    const float v = wide ? std::ldexp(static_cast<float>(static_cast<int>(random() % 511) - 255),
                                      static_cast<int>(random() % 12) - 12)
                         : static_cast<float>(static_cast<int>(random() % 7) - 3);
    word |= static_cast<Word32>(Codec::encode(v)) << i;
  }
  return word;
}

inline Word32 random_operand(Operand operand, std::mt19937& random) {
  static const Word32 extremes[] = {0u, ~0u, 0x80808080u, 0x7f7f7f7fu, 0x7fffffffu, 0x01ff017fu};
  switch (operand) {
    case Operand::raw:
      return random() % 8 ? static_cast<Word32>(random()) : extremes[random() % 6];
    case Operand::floats:
      return random_float(random);
    case Operand::small_f16:
    case Operand::wide_f16:
      return codes<formats::F16>(random, operand == Operand::wide_f16);
    case Operand::small_bf16:
    case Operand::wide_bf16:
      return codes<formats::Bf16>(random, operand == Operand::wide_bf16);
    case Operand::small_e4m3:
    case Operand::wide_e4m3:
      return codes<formats::E4m3>(random, operand == Operand::wide_e4m3);
    default:
      return codes<formats::E5m2>(random, operand == Operand::wide_e5m2);
  }
}

// ---- Operations
// ------------------------------------------------------------------------------------

inline const char* text_of(Swizzle s) {
  static const char* const texts[] = {"none", "32", "64", "128"};
  return texts[static_cast<int>(s)];
}
inline const char* text_of(Element e) {
  static const char* const texts[] = {"f16", "bf16", "s8", "u8", "e4m3", "e5m2"};
  return texts[static_cast<int>(e)];
}

template <class Op>
std::string name_of(Op) {
  return Op::name;
}
template <Swizzle Z>
std::string name_of(TmaLoad<Z>) {
  return std::string("tma_load, swizzle ") + text_of(Z);
}
template <Swizzle Z>
std::string name_of(TmaStore<Z>) {
  return std::string("tma_store, swizzle ") + text_of(Z);
}
template <int Rank, int Bytes, Swizzle Z>
std::string text_of(TmaTensor<Rank, Bytes, Z>) {
  return " rank " + std::to_string(Rank) + " of " + std::to_string(Bytes) + "-byte elements" +
         ", swizzle " + text_of(Z);
}
template <int Rank, int Bytes, Swizzle Z, bool Prefetch>
std::string name_of(TmaBoxLoad<Rank, Bytes, Z, Prefetch> op) {
  return (Prefetch ? "tma_prefetch, tma_load" : "tma_load") + text_of<Rank, Bytes, Z>(op);
}
template <int Rank, int Bytes, Swizzle Z>
std::string name_of(TmaBoxStore<Rank, Bytes, Z> op) {
  return "tma_store" + text_of<Rank, Bytes, Z>(op);
}
template <Element A, Element B, Source S, Swizzle Z, Operand O, int N>
std::string name_of(Wgmma<A, B, S, Z, O, N>) {
  static const char* const sources[] = {"K-major", "registers", "transposed",
                                        "registers, transposed B"};
  return std::string("wgmma ") + text_of(A) + " " + text_of(B) +
         (O >= Operand::wide_f16 ? " wide "
          : O == Operand::raw    ? " "
                                 : " small ") +
         sources[static_cast<int>(S)] + ", swizzle " + text_of(Z) +
         (N != 64 ? ", N " + std::to_string(N) : "");
}

template <class Op>
WordList inputs_of(Op op) {
  // A seed of its own each, so that a new operation changes no other's operands.
  const std::string name = name_of(op);
  std::seed_seq seed(name.begin(), name.end());
  std::mt19937 random(seed);
  WordList in(static_cast<std::size_t>(Op::cases * Op::threads * Op::inputs));
  for (Word32& w : in) w = random_operand(Op::operand, random);
  return in;
}
template <class Op>
std::size_t output_words(Op) {
  return static_cast<std::size_t>(Op::cases * Op::threads * Op::outputs);
}

/// The tensor that the operation's map describes, over the inputs or the outputs: rows of bytes, or
/// what TmaTensor says.
template <class Op>
TensorShape shape_of(Op, const void* in, void* out) {
  const std::uint32_t span =
      Op::swizzle == Swizzle::none ? 64u : 16u << static_cast<int>(Op::swizzle);
  const bool inputs = Op::mapped == Mapped::inputs;
  const std::uint64_t bytes =
      std::uint64_t{512} * static_cast<unsigned>(Op::cases * (inputs ? Op::inputs : Op::outputs));
  if constexpr (requires { Op::rank; }) {
    TensorShape shape;
    shape.address = inputs ? in : out;
    shape.element_bytes = Op::element_bytes;
    shape.rank = Op::rank;
    shape.swizzle = Op::swizzle;
    std::uint64_t stride = Op::pitch;
    for (int d = 0; d < Op::rank; ++d) {
      const bool last = d == Op::rank - 1;
      const int size = d == 0 ? Op::row_elements
                       : last ? Op::last_size(static_cast<int>(bytes))
                              : Op::size(d);
      shape.sizes[d] = static_cast<std::uint64_t>(size);
      shape.box[d] = static_cast<std::uint32_t>(Op::box(d));
      if (d > 0) {
        shape.stride_bytes[d] = stride;
        stride *= shape.sizes[d];
      }
    }
    return shape;
  }
  return {.address = inputs ? in : out,
          .rank = 2,
          .sizes = {span - (inputs ? 12 : 16), bytes / (2 * span)},  // narrower than rows are apart
          .stride_bytes = {0, 2 * span},
          .box = {span, 8},
          .swizzle = Op::swizzle};
}

// ---- Files
// -----------------------------------------------------------------------------------------

inline bool write_results(const char* path, const Results& results) {
  std::FILE* file = std::fopen(path, "wb");
  if (!file) return false;
  bool good = true;
  const auto put = [&](const void* data, std::size_t bytes) {
    good = good && std::fwrite(data, 1, bytes, file) == bytes;
  };
  for (const auto& [name, words] : results) {
    const Word32 sizes[2] = {static_cast<Word32>(name.size()), static_cast<Word32>(words.size())};
    put(sizes, sizeof sizes);
    put(name.data(), name.size());
    put(words.data(), 4 * words.size());
  }
  return std::fclose(file) == 0 && good;
}

inline Results read_results(const char* path) {
  Results results;
  std::FILE* file = std::fopen(path, "rb");
  if (!file) return results;
  Word32 sizes[2];
  while (std::fread(sizes, 1, sizeof sizes, file) == sizeof sizes) {
    std::string name(sizes[0], ' ');
    WordList words(sizes[1]);
    if (std::fread(name.data(), 1, name.size(), file) != name.size() ||
        std::fread(words.data(), 4, words.size(), file) != words.size()) {
      break;
    }
    results[name] = std::move(words);
  }
  std::fclose(file);
  return results;
}

// ---- Comparison
// ------------------------------------------------------------------------------------

struct Verdict {
  std::size_t words = 0, mismatches = 0;  ///< beyond what the comparison allows
  double max_ulp = 0, max_relative = 0;
};

/// Distance of two finite floats in representable steps.
inline double ulps_between(float a, float b) {
  const auto ordered = [](float f) -> double {
    const auto bits = std::bit_cast<std::int32_t>(f);
    return bits < 0 ? -static_cast<double>(bits & 0x7fffffff) : static_cast<double>(bits);
  };
  return std::fabs(ordered(a) - ordered(b));
}

inline bool approximately(float got, float want, Verdict& verdict) {
  if (std::isnan(got) || std::isnan(want)) return std::isnan(got) && std::isnan(want);
  if (std::isinf(got) || std::isinf(want)) return got == want;
  // lg2's error near 1 is absolute (PTX ISA, lg2.approx).
  if (std::fabs(got - want) <= 0x1p-22f && std::fabs(want) < 1) return true;
  const double ulps = ulps_between(got, want);
  verdict.max_ulp = std::max(verdict.max_ulp, ulps);
  return ulps <= 2;  // on an H200 exp2 and reciprocal differ by 1, log2 by 2
}

/// What an accumulator may lose, relative to the tile's largest sum. An H200
/// (docs/ISA_CONFORMANCE.md) keeps 23 fraction bits beside the largest addend and truncates:
/// measured 2.4e-7. wgmma on 8-bit floats keeps 13, so each of the 33 addends of either product may
/// lose 2^-13 of the largest: measured 3.6e-4 in 16384 sums, 4.9e-4 in 34816; so does mma.sync on
/// GPUs that do not widen 8-bit floats (Ada).
inline double accumulator_bound(Operand operand, std::size_t sums) {
  if (operand != Operand::wide_e4m3 && operand != Operand::wide_e5m2) return 0x1p-21;
  return sums <= 16384 ? 0x1p-11 : 0x1p-10;
}

/// `tile` words share one scale: a sum's error is relative to its largest addends.
inline Verdict judge(Compare compare, Operand operand, const WordList& got, const WordList& want,
                     std::size_t tile) {
  Verdict verdict;
  verdict.words = want.size();
  if (got.size() != want.size()) {
    verdict.mismatches = want.size();
    return verdict;
  }
  for (std::size_t begin = 0; begin < want.size(); begin += tile) {
    const std::size_t end = std::min(begin + tile, want.size());
    double scale = 0;
    for (std::size_t i = begin; i < end; ++i) {
      scale = std::max(scale, std::fabs(static_cast<double>(std::bit_cast<float>(want[i]))));
    }
    for (std::size_t i = begin; i < end; ++i) {
      const float g = std::bit_cast<float>(got[i]), w = std::bit_cast<float>(want[i]);
      bool good = got[i] == want[i];
      if (compare == Compare::floats) good = good || (std::isnan(g) && std::isnan(w));
      if (compare == Compare::ulp) good = approximately(g, w, verdict);
      if (compare == Compare::accumulator) {
        const double relative = std::fabs(static_cast<double>(g) - w) / scale;
        verdict.max_relative = std::max(verdict.max_relative, relative);
        good = relative <= accumulator_bound(operand, want.size());
      }
      verdict.mismatches += !good;
    }
  }
  return verdict;
}

}  // namespace qattn::isa_test
