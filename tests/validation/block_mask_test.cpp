// What a block mask must look like, in C++ and in C.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "qattn/qattn.h"
#include "qattn/qattn.hpp"

namespace qattn {
namespace {

struct Call {
  std::vector<float> q = std::vector<float>(2 * 130 * 2 * 32), out = q;
  std::vector<std::uint8_t> mask = std::vector<std::uint8_t>(64, 1);
  AttentionTensors t;
  AttentionOptions o;

  Call() {
    t.q = t.k = t.v = TensorView::dense(q.data(), Format::f32, {2, 130, 2, 32});
    t.out = TensorView::dense(out.data(), Format::f32, {2, 130, 2, 32});
    t.block_mask = TensorView::dense(mask.data(), Format::b8, {2, 2, 2, 3});
    o.block_mask_q = 128;
    o.block_mask_k = 64;
  }
  std::string message() const { return attention(t, o).message(); }
};

TEST(BlockMask, Shapes) {
  EXPECT_EQ(Call().message(), "");
  for (const auto& shape : {std::vector<std::int64_t>{1, 1, 2, 3}, {2, 3}, {3}, {2, 1, 1, 3}}) {
    Call call;
    call.t.block_mask.rank = static_cast<std::int32_t>(shape.size());
    for (std::size_t d = 0; d < shape.size(); ++d) call.t.block_mask.shape[d] = shape[d];
    EXPECT_EQ(call.message(), "");
  }
  Call call;
  call.t.block_mask.shape[3] = 4;
  EXPECT_EQ(call.message(), "block_mask: shape (2, 2, 2, 4) does not broadcast to (2, 2, 2, 3)");
  call = Call();
  call.t.block_mask.format = Format::u8;
  EXPECT_EQ(call.message().substr(0, 30), "block_mask: format u8 is not o") << call.message();
  call = Call();
  call.t.block_mask.data = nullptr;
  EXPECT_EQ(call.message(), "block_mask: data pointer is null");
}

TEST(BlockMask, Sizes) {
  for (const std::int64_t bad : {0, 1, 32, 96, -64, 1 << 21}) {
    Call call;
    call.o.block_mask_q = bad;
    EXPECT_EQ(call.message(),
              "block_mask_q: " + std::to_string(bad) + " is not a multiple of 64 from 64 to 2^20");
  }
  Call call;
  call.t.block_mask = {};
  EXPECT_EQ(call.message(), "block_mask_q: 128 is given without block_mask");
  call.o.block_mask_q = 0;
  EXPECT_EQ(call.message(), "block_mask_k: 64 is given without block_mask");
}

TEST(BlockMask, PackedSequencesNeedEnoughBlocks) {
  Call call;
  std::vector<std::int32_t> cu = {0, 130, 260};
  for (TensorView* view : {&call.t.q, &call.t.k, &call.t.v, &call.t.out}) {
    *view = TensorView::dense(view->data, Format::f32, {260, 2, 32});
  }
  call.t.cu_seqlens_q = call.t.cu_seqlens_k = TensorView::dense(cu.data(), Format::s32, {3});
  EXPECT_EQ(call.message(), "");
  call.t.block_mask = TensorView::dense(call.mask.data(), Format::b8, {2, 2, 2, 2});
  EXPECT_EQ(call.message(),
            "block_mask: extent 2 of blocks of 64 tokens is below the longest "
            "sequence, 130");
}

TEST(BlockMask, InC) {
  std::vector<float> q(130 * 32, 1.0f), out(q.size(), 7.0f);
  std::uint8_t visible[] = {1, 1, 0, 0, 0, 0};  // the second block of queries sees nothing
  qattn_attention_tensors t;
  qattn_attention_options o;
  qattn_attention_tensors_init(&t);
  qattn_attention_options_init(&o);
  const std::int64_t shape[] = {1, 130, 1, 32}, blocks[] = {2, 3};
  t.q = t.k = t.v = qattn_tensor_dense(q.data(), QATTN_FORMAT_f32, 4, shape);
  t.out = qattn_tensor_dense(out.data(), QATTN_FORMAT_f32, 4, shape);
  t.block_mask = qattn_tensor_dense(visible, QATTN_FORMAT_b8, 2, blocks);
  EXPECT_EQ(qattn_attention(&t, &o), QATTN_INVALID_ARGUMENT);
  o.block_mask_q = 128;
  o.block_mask_k = 64;
  ASSERT_EQ(qattn_attention(&t, &o), QATTN_OK) << qattn_last_error();
  EXPECT_NEAR(out[127 * 32], 1.0f, 1e-2f);
  EXPECT_EQ(out[128 * 32], 0.0f);
  // Callers that were compiled before block masks existed.
  t.struct_size = offsetof(qattn_attention_tensors, block_mask);
  o.struct_size = offsetof(qattn_attention_options, block_mask_q);
  ASSERT_EQ(qattn_attention(&t, &o), QATTN_OK) << qattn_last_error();
  EXPECT_NEAR(out[128 * 32], 1.0f, 1e-2f);
}

}  // namespace
}  // namespace qattn
