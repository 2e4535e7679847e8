// qattn: attention with low-precision operands. Include this one header.
#pragma once

#include "qattn/attention.hpp"
#include "qattn/format.hpp"
#include "qattn/kv_cache.hpp"
#include "qattn/kv_cache_gpu.hpp"
#include "qattn/quantize.hpp"
#include "qattn/recipe.hpp"
#include "qattn/reference.hpp"
#include "qattn/score_function.hpp"
#include "qattn/status.hpp"
#include "qattn/tensor_view.hpp"
