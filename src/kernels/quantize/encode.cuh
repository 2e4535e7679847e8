// The kernels that prepare operands for attention, in the order in which prepare.cpp launches them.
#pragma once

#include "kernels/quantize/encode_balance.cuh"
#include "kernels/quantize/encode_clear.cuh"
#include "kernels/quantize/encode_general.cuh"
#include "kernels/quantize/encode_groups.cuh"
#include "kernels/quantize/encode_means.cuh"
#include "kernels/quantize/encode_plain.cuh"
#include "kernels/quantize/encode_seen.cuh"
