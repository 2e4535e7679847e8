// The kernels that make codes, by what they do and what rows are padded to. Each is compiled in a
// source of its own (instance.cu.in): together they are minutes of nvcc.
#pragma once

#include "isa/launch.hpp"
#include "kernels/quantize/gpu/encode/gather.cuh"
#include "kernels/quantize/gpu/encode/general.cuh"
#include "kernels/quantize/gpu/encode/given.cuh"
#include "kernels/quantize/gpu/encode/micro.cuh"
#include "kernels/quantize/gpu/encode/plain.cuh"

namespace qattn::kernels {
inline namespace QATTN_TARGET {

/// `plain` and `given` are of an input format.
enum class Encoder { general, micro, gather, plain_f16, plain_bf16, given_f16, given_bf16 };

template <Encoder E, int kPadded>
struct EncoderKernel;
template <int kPadded>
struct EncoderKernel<Encoder::general, kPadded> {
  using type = EncodeGeneral<kPadded>;
};
template <int kPadded>
struct EncoderKernel<Encoder::micro, kPadded> {
  using type = EncodeMicro<kPadded>;
};
template <int kPadded>
struct EncoderKernel<Encoder::gather, kPadded> {
  using type = GatherMicro<kPadded>;
};
template <int kPadded>
struct EncoderKernel<Encoder::plain_f16, kPadded> {
  using type = EncodePlain<isa::Element::f16, kPadded>;
};
template <int kPadded>
struct EncoderKernel<Encoder::plain_bf16, kPadded> {
  using type = EncodePlain<isa::Element::bf16, kPadded>;
};
template <int kPadded>
struct EncoderKernel<Encoder::given_f16, kPadded> {
  using type = EncodeGiven<isa::Element::f16, kPadded>;
};
template <int kPadded>
struct EncoderKernel<Encoder::given_bf16, kPadded> {
  using type = EncodeGiven<isa::Element::bf16, kPadded>;
};

/// Defined in the instances' sources.
template <Encoder E, int kPadded>
isa::LaunchError launch_encoder(const typename EncoderKernel<E, kPadded>::type::Params& params,
                                isa::Index3 grid, void* stream, isa::Start start);

}  // namespace QATTN_TARGET
}  // namespace qattn::kernels
