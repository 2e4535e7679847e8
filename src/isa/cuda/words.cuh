// The vocabulary as instructions. Meanings: isa.hpp. PTX lives only in isa/cuda.
#pragma once

#include "isa/cuda/words_pairs.cuh"
#include "isa/cuda/words_sm120.cuh"
#include "isa/cuda/words_sm80.cuh"
#include "isa/cuda/words_sm90.cuh"
