// The vocabulary, emulated. Meanings: isa.hpp.
#pragma once

#include "isa/emu/words/arithmetic.hpp"
#include "isa/emu/words/block_scaled.hpp"
#include "isa/emu/words/bulk.hpp"
#include "isa/emu/words/copy_async.hpp"
#include "isa/emu/words/grid.hpp"
#include "isa/emu/words/matrix.hpp"
#include "isa/emu/words/mbarrier.hpp"
#include "isa/emu/words/memory.hpp"
#include "isa/emu/words/order.hpp"
#include "isa/emu/words/wgmma.hpp"
