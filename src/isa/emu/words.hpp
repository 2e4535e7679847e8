// The vocabulary, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/words_matrix.hpp"
#include "isa/emu/words_sm80.hpp"
#include "isa/emu/words_sm90.hpp"
