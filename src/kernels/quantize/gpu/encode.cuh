// The kernels that prepare operands for attention, in the order in which prepare.cpp launches them.
#pragma once

#include "kernels/quantize/gpu/encode/balance.cuh"
#include "kernels/quantize/gpu/encode/clear.cuh"
#include "kernels/quantize/gpu/encode/gather.cuh"
#include "kernels/quantize/gpu/encode/general.cuh"
#include "kernels/quantize/gpu/encode/given.cuh"
#include "kernels/quantize/gpu/encode/groups.cuh"
#include "kernels/quantize/gpu/encode/mean_scores.cuh"
#include "kernels/quantize/gpu/encode/means.cuh"
#include "kernels/quantize/gpu/encode/micro.cuh"
#include "kernels/quantize/gpu/encode/plain.cuh"
#include "kernels/quantize/gpu/encode/seen.cuh"
#include "kernels/quantize/gpu/encode/settle.cuh"
