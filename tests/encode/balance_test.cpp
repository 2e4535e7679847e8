// The encoding without detours balances loud channels of K bit by bit as the general one does.
#include <gtest/gtest.h>

#include <cstring>

#include "encode_case.hpp"

namespace qattn::encode_test {
namespace {

using enum Granularity;

Case loud_case(const CaseOptions& options) {
  Case c(options);
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (int h = 0; h < c.heads(Role::k); ++h) {
      for (std::int64_t s = 0; s < c.length(b); ++s) {
        for (const int channel : {3, 35, options.d - 2}) {
          const float x = c.value(Role::k, b, h, s, channel);
          c.put_value(Role::k, b, h, s, channel, s % 2 == 0 ? 90 * x : -130 * x);
        }
      }
    }
  }
  EXPECT_EQ(c.prepare(), "");
  return c;
}

/// Codes, scales and products with K's mean of all tokens of `r`.
void expect_same(const Case& a, const Case& b, Role r) {
  const kernels::PreparedRows& x = r == Role::q ? a.out.q : a.out.k;
  const kernels::PreparedRows& y = r == Role::q ? b.out.q : b.out.k;
  ASSERT_EQ(x.slots, y.slots);
  ASSERT_EQ(x.row_bytes, y.row_bytes);
  int different = 0;
  for (std::int64_t n = 0; n < a.batch(); ++n) {
    for (int h = 0; h < a.heads(r); ++h) {
      for (std::int64_t s = 0; s < a.length(n); ++s) {
        const std::int64_t slot = h * x.slots + a.first_slot(r, n) + s, at = slot * x.row_bytes;
        const auto bytes = static_cast<std::size_t>(x.row_bytes);
        different += std::memcmp(x.codes + at, y.codes + at, bytes) != 0;
        different += x.scale[slot] != y.scale[slot];
        if (x.dot_mean != nullptr) different += x.dot_mean[slot] != y.dot_mean[slot];
      }
    }
  }
  EXPECT_EQ(different, 0);
}

TEST(Encode, LoudChannelsWithoutDetours) {
  const Scaling k_scales[] = {{per_block, 64, 16}, {per_thread, 64, 16}, {per_token, 128, 16}};
  const int dims[] = {64, 96, 128, 80, 256};
  for (unsigned i = 0; i < 30; ++i) {
    SCOPED_TRACE(i);
    CaseOptions o;
    o.d = o.dv = dims[i % 5];
    o.input = i % 2 ? Format::f16 : Format::bf16;
    o.lengths = {130 + i, 130 + i};
    o.heads_q = 4, o.heads_kv = i / 2 % 2 ? 2 : 1;
    o.seed = i + 1;
    o.recipe.qk = o.recipe.v = Format::s8, o.recipe.p = Format::u8;
    o.recipe.q_scale = o.recipe.v_scale = {per_token, 128, 16};
    o.recipe.k_scale = k_scales[i % 3];
    o.recipe.smooth_k = i % 4 ? Toggle::on : Toggle::off;
    o.recipe.smooth_q = o.recipe.smooth_v = o.recipe.rotate = Toggle::off;
    o.recipe.balance_k = Toggle::on;
    o.dot_mean = i % 4 == 2;
    const Case plain = loud_case(o);
    o.storage = Storage::unaligned;
    const Case general = loud_case(o);
    o.recipe.balance_k = Toggle::off;
    const Case loud = loud_case(o);
    for (const Role r : {Role::q, Role::k}) {
      ASSERT_TRUE(plain.is_plain(r) && !general.is_plain(r));
      expect_same(plain, general, r);
    }
    // What was balanced has smaller scales.
    EXPECT_LT(plain.out.k.scale[0], 0.2f * loud.out.k.scale[0]);
  }
}

}  // namespace
}  // namespace qattn::encode_test
