// formats_dump: what the codecs do, for a judge that shares no code with them (test_ml_dtypes.py).
// Reads float32 bit patterns as decimal numbers from standard input. Writes one JSON object a line:
// the format, the float32 bits of every code, and the code of every input.
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <vector>

#include "formats/bf16.hpp"
#include "formats/bits.hpp"
#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/e4m3fnuz.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "formats/int8.hpp"
#include "formats/kv/codes.hpp"
#include "formats/ue8m0.hpp"

namespace {

namespace formats = qattn::formats;

using Inputs = std::vector<float>;

// The power-of-two scale has no rounding encoder; emax 0 shows its floor.
struct Ue8m0Floor : formats::Ue8m0 {
  static Code encode(float x) { return floor_encode(x, 0); }
};

template <class Codec>
void dump(const char* name, int codes, const Inputs& inputs) {
  std::printf("{\"format\":\"%s\",\"decode\":[", name);
  for (int code = 0; code < codes; ++code) {
    const float value = Codec::decode(static_cast<typename Codec::Code>(code));
    std::printf("%s%u", code == 0 ? "" : ",", formats::bits_of(value));
  }
  std::printf("],\"encode\":[");
  const char* separator = "";
  for (const float x : inputs) {
    std::printf("%s%d", separator, static_cast<int>(Codec::encode(x)));
    separator = ",";
  }
  std::printf("]}\n");
}

}  // namespace

int main() {
  Inputs inputs;
  for (std::uint32_t bits = 0; std::cin >> bits;) inputs.push_back(formats::float_of(bits));
  if (!std::cin.eof()) {
    std::fprintf(stderr, "formats_dump: input %zu is no 32-bit number\n", inputs.size());
    return 1;
  }
  dump<formats::F16>("f16", 1 << 16, inputs);
  dump<formats::Bf16>("bf16", 1 << 16, inputs);
  dump<formats::E4m3>("e4m3", 256, inputs);
  dump<formats::E4m3Fnuz>("e4m3fnuz", 256, inputs);
  dump<formats::E5m2>("e5m2", 256, inputs);
  dump<formats::E2m1>("e2m1", 16, inputs);
  dump<Ue8m0Floor>("ue8m0", 256, inputs);
  dump<formats::S8>("s8", 256, inputs);
  dump<formats::U8>("u8", 256, inputs);
  dump<formats::Kv<2>>("kv2", 4, inputs);
  dump<formats::Kv<3>>("kv3", 8, inputs);
  dump<formats::Kv<4>>("kv4", 16, inputs);
  dump<formats::Kv<8>>("kv8", 256, inputs);
  return 0;
}
