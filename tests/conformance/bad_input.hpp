// NaN and Inf by place: rows that depend on a bad element become NaN, rows that share a scale or a
// mean with it may, all others keep their bits (docs/NUMERICS.md, "The function, in this order").
#pragma once

#include <functional>

#include "conformance/runner.hpp"

namespace qattn::test {

/// The bad element: in sequence 1, (KV) head 1, token 150 (queries: 60), channel 5.
inline constexpr std::int64_t bad_b = 1, bad_h = 1, bad_key = 150, bad_query = 60, bad_d = 5;

/// Two sequences of 100 queries and 200 keys, causal: the fates below are about such calls.
Feature bad_input_feature();

enum class Fate { untouched, may_be_nan, is_nan };
Fate fate(const Recipe& resolved, Operand operand, std::int64_t b, std::int64_t h, std::int64_t i);

using RunCall = std::function<Outcome(const Call&, Laid&)>;

/// NaN and both infinities in each operand, or one of them in each.
enum class BadValues { all, one_each };

/// Puts bad values into the bad element of each operand in turn and records failures unless every
/// row has its fate. `again`: a kernel that meets them in V leaves the block to one with other
/// tiles, so that its rows may be rounded differently.
void expect_bad_input_stays(const Feature& feature, const RunCall& run, bool again = false,
                            BadValues values = BadValues::all);

/// A key and its value are bad together: of rows that see no key which shares a scale with it no
/// bit changes.
void expect_bad_pair_stays(const Feature& feature, const RunCall& run);

/// A NaN in the bias of query 20 and in the sink of head 3: all rows that see one become NaN.
void expect_bad_bias_and_sink_stay(Feature feature, const RunCall& run);

}  // namespace qattn::test
