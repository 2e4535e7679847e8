// Compiles every codec as device code. Nothing runs: the conformance tests compare results.
#include <cstdint>

#include "formats/bf16.hpp"
#include "formats/e2m1.hpp"
#include "formats/e4m3.hpp"
#include "formats/e4m3fnuz.hpp"
#include "formats/e5m2.hpp"
#include "formats/f16.hpp"
#include "formats/hadamard.hpp"
#include "formats/int8.hpp"
#include "formats/kv/codes.hpp"
#include "formats/kv/layout.hpp"
#include "formats/kv/quantize.hpp"
#include "formats/micro.hpp"
#include "formats/pack.hpp"
#include "formats/scale.hpp"
#include "formats/ue8m0.hpp"

namespace formats = qattn::formats;

namespace {

template <class Codec>
__device__ void round_trip(float* values, int i) {
  values[i] = Codec::decode(Codec::encode(values[i]));
}

template <int Bits>
__device__ void packed_round_trip(std::uint8_t* codes, std::uint8_t* bytes) {
  formats::pack<Bits>(codes, 16, bytes);
  formats::unpack<Bits>(bytes, 16, codes);
}

__device__ void kv_round_trip(float* values, std::uint8_t* codes, std::uint8_t* bytes) {
  const std::uint16_t scale = formats::kv_row_scale(values, 128, 3);
  const formats::KvBlock block{128, 128, 3, 2};
  for (int c = 0; c < 128; ++c) {
    codes[formats::kv_place_k(5, c)] = formats::kv_encode(values[c], formats::kv_inverse(scale), 3);
  }
  formats::kv_pack(codes, 16 * 128, 3, bytes + block.k_codes());
  const int place = formats::kv_place_v(128, 5, 7);
  values[7] = formats::kv_decode(formats::kv_code_at(bytes, 16 * 128, 3, place), scale, 3);
}

}  // namespace

__global__ void kv_codecs(float* values, std::uint8_t* codes, std::uint8_t* bytes) {
  kv_round_trip(values, codes, bytes);
}

__global__ void codecs(float* values) {
  round_trip<formats::F16>(values, 0);
  round_trip<formats::Bf16>(values, 1);
  round_trip<formats::E4m3>(values, 2);
  round_trip<formats::E4m3Fnuz>(values, 3);
  round_trip<formats::E5m2>(values, 4);
  round_trip<formats::E2m1>(values, 5);
  round_trip<formats::S8>(values, 6);
  round_trip<formats::U8>(values, 7);
  round_trip<formats::Kv<2>>(values, 8);
  round_trip<formats::Kv<3>>(values, 9);
  round_trip<formats::Kv<4>>(values, 10);
  round_trip<formats::Kv<8>>(values, 11);
  values[12] = formats::Ue8m0::decode(formats::Ue8m0::floor_encode(values[12], 8));
}

__global__ void scales(float* values) {
  const float amax = formats::fold_amax(values[0], values[1]);
  values[0] = formats::reciprocal(formats::amax_scale(amax, formats::S8::max));
  values[1] = formats::nvfp4_global(amax);
  values[2] = formats::Ue8m0::decode(formats::mx_scale_code(amax, formats::E4m3::emax));
  values[3] = formats::E4m3::decode(formats::nvfp4_scale_code(amax, values[1]));
}

__global__ void groups(float* values, std::uint8_t* codes, float global) {
  const std::uint8_t fp8 = formats::encode_group_mxfp8(values, 32, codes);
  const std::uint8_t fp4 = formats::encode_group_mxfp4(values, 32, codes + 32);
  const std::uint8_t nv = formats::encode_group_nvfp4(values, 16, global, codes + 64);
  values[0] = formats::decode_mxfp8(codes[0], fp8);
  values[1] = formats::decode_mxfp4(codes[32], fp4);
  values[2] = formats::decode_nvfp4(codes[64], nv, global);
}

__global__ void packing(std::uint8_t* codes, std::uint8_t* bytes) {
  packed_round_trip<2>(codes, bytes);
  packed_round_trip<3>(codes, bytes);
  packed_round_trip<4>(codes, bytes);
  packed_round_trip<8>(codes, bytes);
}

__global__ void rotation(float* row, int dim) {
  formats::rotate(row, dim);
  formats::unrotate(row, dim);
}
