// The C interface of the cache on a device against the C++ one, with the kernels in the emulator.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kv_backend.hpp"
#include "kvcache/decode_case.hpp"
#include "qattn/qattn.h"
#include "qattn/qattn.hpp"

namespace qattn {
namespace {

constexpr std::int64_t S = 300, H = 2, D = 64, HQ = 4, N = 25;  // blocks of 400 tokens

qattn_tensor dense(const void* data, std::int32_t format, const std::vector<std::int64_t>& shape) {
  return qattn_tensor_dense(const_cast<void*>(data), format,
                            static_cast<std::int32_t>(shape.size()), shape.data());
}

class KvDeviceC : public ::testing::Test {
 protected:
  KvDeviceC()
      : rows_(test::normal_rows(S, H, D, D, 3)), q_(test::normal_values(HQ * D, 4)), slots_{0} {
    qattn_kv_options_init(&options_);
    options_.heads_kv = H;
    options_.d = options_.dv = D;
    options_.window = 32;
    options_.tier_count = 1;
    options_.tiers[0] = {4, 4};
    qattn_kv_gpu_capacity_init(&capacity_);
    capacity_.sequences = 2;
    capacity_.tokens = 400;
    qattn_kv_gpu_append_tensors_init(&append_);
    append_.k = dense(rows_.k.data(), QATTN_FORMAT_f32, {1, S, H, D});
    append_.v = dense(rows_.v.data(), QATTN_FORMAT_f32, {1, S, H, D});
    append_.slots = slot_tensor();
    qattn_kv_decode_tensors_init(&tensors_);
    tensors_.q = dense(q_.data(), QATTN_FORMAT_f32, {1, 1, HQ, D});
    tensors_.out = dense(out_.data(), QATTN_FORMAT_f32, {1, 1, HQ, D});
    tensors_.mass = dense(mass_.data(), QATTN_FORMAT_f32, {1, HQ, N});
    qattn_kv_decode_options_init(&decode_);
  }
  qattn_tensor slot_tensor() const { return dense(slots_.data(), QATTN_FORMAT_s32, {1}); }
  static std::string error() { return qattn_last_error(); }

  test::KvBackend backend_;
  test::KvRows rows_;
  std::vector<float> q_;
  std::vector<std::int32_t> slots_;
  std::vector<float> out_ = std::vector<float>(HQ * D), mass_ = std::vector<float>(HQ * N);
  qattn_kv_options options_;
  qattn_kv_gpu_capacity capacity_;
  qattn_kv_gpu_append_tensors append_;
  qattn_kv_decode_tensors tensors_;
  qattn_kv_decode_options decode_;
};

TEST_F(KvDeviceC, DoesWhatTheCppInterfaceDoes) {
  qattn_kv_gpu_cache* cache = nullptr;
  ASSERT_EQ(qattn_kv_gpu_create(&options_, &capacity_, QATTN_DEVICE_CPU, 0, nullptr, &cache), 0)
      << error();
  const std::unique_ptr<qattn_kv_gpu_cache, decltype(&qattn_kv_gpu_destroy)> owner(
      cache, &qattn_kv_gpu_destroy);
  std::int64_t slot = -1, copy = -1, length = 0;
  ASSERT_EQ(qattn_kv_gpu_add_sequence(cache, nullptr, &slot), 0) << error();
  EXPECT_EQ(slot, 0);
  ASSERT_EQ(qattn_kv_gpu_append(cache, 0, &append_, QATTN_LAYOUT_BSHD, nullptr), 0) << error();
  const qattn_tensor slots = slot_tensor();
  std::size_t bytes = 0;
  ASSERT_EQ(qattn_kv_gpu_decode_workspace(cache, 0, &slots, &tensors_, &decode_, &bytes), 0)
      << error();
  const std::unique_ptr<void, decltype(&std::free)> memory(
      std::aligned_alloc(256, (bytes + 255) / 256 * 256), &std::free);
  ASSERT_EQ(
      qattn_kv_gpu_decode(cache, 0, &slots, &tensors_, &decode_, memory.get(), bytes, nullptr), 0)
      << error();
  ASSERT_EQ(qattn_kv_gpu_observe(cache, 0, &slots, &tensors_.mass, nullptr), 0) << error();
  const std::vector<float> out = out_;

  KvCacheOptions o;
  o.heads_kv = H;
  o.d = o.dv = D;
  o.window = 32;
  o.tiers = {{4, 4}};
  Result<GpuKvCache> same = GpuKvCache::create(o, {2, 400, {}}, {});
  ASSERT_TRUE(same.ok() && same->add_sequence().ok());
  const TensorView slot_view = TensorView::dense(slots_.data(), Format::s32, {1});
  KvGpuAppendTensors a;
  a.slots = slot_view;
  a.k = TensorView::dense(rows_.k.data(), Format::f32, {1, S, H, D});
  a.v = TensorView::dense(rows_.v.data(), Format::f32, {1, S, H, D});
  ASSERT_TRUE(same->append(0, a).ok());
  KvDecodeTensors t;
  t.q = TensorView::dense(q_.data(), Format::f32, {1, 1, HQ, D});
  t.out = TensorView::dense(out_.data(), Format::f32, {1, 1, HQ, D});
  t.mass = TensorView::dense(mass_.data(), Format::f32, {1, HQ, N});
  const std::vector<float> mass = mass_;
  ASSERT_TRUE(decode(*same, 0, slot_view, t, {}, memory.get(), bytes).ok());
  EXPECT_EQ(out, out_);
  EXPECT_EQ(mass, mass_);

  ASSERT_EQ(qattn_kv_gpu_fork(cache, 0, nullptr, &copy), 0) << error();
  EXPECT_EQ(copy, 1);
  ASSERT_EQ(qattn_kv_gpu_truncate(cache, copy, 100, nullptr), 0) << error();
  ASSERT_EQ(qattn_kv_gpu_evict(cache, copy, -1, 1, 3, 9, nullptr), 0) << error();
  ASSERT_EQ(qattn_kv_gpu_length(cache, copy, 0, nullptr, &length), 0) << error();
  EXPECT_EQ(length, 100);
  std::vector<float> k(H * 100 * D);
  const qattn_tensor read_k = dense(k.data(), QATTN_FORMAT_f32, {H, 100, D});
  ASSERT_EQ(qattn_kv_gpu_read(cache, copy, 0, &read_k, nullptr, nullptr, nullptr), 0) << error();
  EXPECT_TRUE(std::isnan(k[(100 + 5) * D]));
  EXPECT_FALSE(std::isnan(k[5 * D]));
  EXPECT_EQ(qattn_kv_gpu_slot_status(cache, copy, nullptr), 0);
  qattn_kv_bytes b;
  qattn_kv_bytes_init(&b);
  ASSERT_EQ(qattn_kv_gpu_get_bytes(cache, &b), 0) << error();
  EXPECT_EQ(b.total, same->bytes().total);
  // What is told shows in which pages are demoted: see tests/kvcache_gpu/append_test.cpp. Here:
  // that it arrives.
  std::vector<float> told(H * 7, 2.0f);
  const qattn_tensor importance = dense(told.data(), QATTN_FORMAT_f32, {H, 7});
  ASSERT_EQ(qattn_kv_gpu_set_importance(cache, copy, 0, &importance, nullptr), 0) << error();
  EXPECT_TRUE(device_errors({}).ok());
  told[3] = -2.0f;
  ASSERT_EQ(qattn_kv_gpu_set_importance(cache, copy, 0, &importance, nullptr), 0) << error();
  EXPECT_FALSE(device_errors({}).ok());
  EXPECT_EQ(qattn_kv_gpu_set_importance(cache, 5, 0, &importance, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "slot: 5 holds no sequence of this cache");
  EXPECT_EQ(qattn_kv_gpu_set_importance(cache, copy, 0, nullptr, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "importance: is missing");
  qattn_kv_usage usage;
  qattn_kv_usage_init(&usage);
  ASSERT_EQ(qattn_kv_gpu_get_usage(cache, copy, 0, nullptr, &usage), 0) << error();
  EXPECT_EQ(usage.length, 100);
  EXPECT_EQ(usage.window_tokens + usage.tier_tokens[0], H * 100 - 6);  // of head 1 are six gone
  EXPECT_EQ(qattn_kv_gpu_get_usage(cache, copy, 1, nullptr, &usage), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "layer: 1 is not from 0 to 0");
  ASSERT_EQ(qattn_kv_gpu_release(cache, copy, nullptr), 0);
  EXPECT_EQ(qattn_kv_gpu_release(cache, copy, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "slot: 1 holds no sequence of this cache");
}

TEST_F(KvDeviceC, FilesAreTheHosts) {
  const std::string path = testing::TempDir() + "qattn_kv_gpu_c.safetensors";
  qattn_kv_gpu_cache *cache = nullptr, *loaded = nullptr;
  qattn_kv_cache* host = nullptr;
  std::int64_t slot = -1;
  ASSERT_EQ(qattn_kv_gpu_create(&options_, &capacity_, QATTN_DEVICE_CPU, 0, nullptr, &cache), 0)
      << error();
  ASSERT_EQ(qattn_kv_gpu_add_sequence(cache, nullptr, &slot), 0) << error();
  ASSERT_EQ(qattn_kv_gpu_append(cache, 0, &append_, QATTN_LAYOUT_BSHD, nullptr), 0) << error();
  ASSERT_EQ(qattn_kv_gpu_save(cache, path.c_str(), nullptr), 0) << error();
  const auto load = [&] {
    return qattn_kv_gpu_load(path.c_str(), &capacity_, QATTN_DEVICE_CPU, 0, nullptr, &loaded);
  };
  ASSERT_EQ(load(), 0) << error();
  ASSERT_EQ(qattn_kv_load(path.c_str(), 0, &host), 0) << error();
  std::vector<float> k(H * S * D, 7.0f), same = k, on_host = k;
  const qattn_tensor views[] = {dense(k.data(), QATTN_FORMAT_f32, {H, S, D}),
                                dense(same.data(), QATTN_FORMAT_f32, {H, S, D}),
                                dense(on_host.data(), QATTN_FORMAT_f32, {H, S, D})};
  EXPECT_EQ(qattn_kv_gpu_read(cache, slot, 0, &views[0], nullptr, nullptr, nullptr), 0);
  EXPECT_EQ(qattn_kv_gpu_read(loaded, slot, 0, &views[1], nullptr, nullptr, nullptr), 0);
  EXPECT_EQ(qattn_kv_read(host, slot, 0, &views[2], nullptr, nullptr), 0);
  EXPECT_NE(k[0], 7.0f);
  EXPECT_EQ(k, same);
  EXPECT_EQ(k, on_host);
  qattn_kv_destroy(host);
  std::int32_t holds = 7;
  EXPECT_EQ(qattn_kv_gpu_holds(loaded, slot, &holds), 0);
  EXPECT_EQ(holds, 1);
  EXPECT_EQ(qattn_kv_gpu_holds(loaded, slot + 1, &holds), 0);
  EXPECT_EQ(holds, 0);
  EXPECT_EQ(qattn_kv_gpu_holds(loaded, slot, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "holds: is NULL");
  qattn_kv_gpu_destroy(loaded);
  loaded = nullptr;
  capacity_.tokens = S - 1;
  EXPECT_EQ(load(), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "capacity.tokens: 299 are fewer than the 300 of sequence 0 of the file");
  capacity_.pool_count = -1;
  EXPECT_EQ(load(), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "pool_count: -1 is not from 0 to 8");
  EXPECT_EQ(loaded, nullptr);
  EXPECT_EQ(qattn_kv_gpu_load(nullptr, &capacity_, QATTN_DEVICE_CPU, 0, nullptr, &loaded),
            QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "path: is NULL");
  EXPECT_EQ(qattn_kv_gpu_save(cache, nullptr, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "path: is NULL");
  qattn_kv_gpu_destroy(cache);
  std::remove(path.c_str());
}

TEST_F(KvDeviceC, Refusals) {
  qattn_kv_gpu_cache* cache = nullptr;
  const auto create = [&] {
    return qattn_kv_gpu_create(&options_, &capacity_, QATTN_DEVICE_CPU, 0, nullptr, &cache);
  };
  options_.k_granularity = QATTN_PER_CHANNEL;
  ASSERT_EQ(create(), QATTN_OK) << error();
  qattn_kv_gpu_destroy(cache);
  cache = nullptr;
  options_.k_granularity = QATTN_PER_HEAD;
  EXPECT_EQ(create(), QATTN_INVALID_ARGUMENT);
  EXPECT_NE(error().find("k_granularity: per_head"), std::string::npos) << error();
  options_.k_granularity = QATTN_PER_TOKEN;
  capacity_.pool_count = 9;
  EXPECT_EQ(create(), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "pool_count: 9 is not from 0 to 8");
  capacity_.pool_count = 0;
  capacity_.reserved = 3;
  EXPECT_EQ(create(), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "reserved: 3 is not 0");
  capacity_.reserved = 0;
  capacity_.pages[1] = 64;
  EXPECT_EQ(create(), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "pages: entry 1 is 64, but pool_count is 0");
  capacity_.pages[1] = 0;
  capacity_.pool_count = 1;
  EXPECT_EQ(create(), QATTN_INVALID_ARGUMENT);
  EXPECT_NE(error().find("capacity.pages: there are 1 numbers"), std::string::npos) << error();
  capacity_.struct_size = 12;
  EXPECT_EQ(create(), QATTN_INVALID_ARGUMENT);
  EXPECT_NE(error().find("capacity: struct_size 12"), std::string::npos) << error();
  EXPECT_EQ(cache, nullptr);
  std::size_t bytes = 7;
  EXPECT_EQ(qattn_kv_gpu_decode_workspace(nullptr, 0, nullptr, &tensors_, &decode_, &bytes),
            QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "cache: is NULL");
  qattn_kv_gpu_capacity_init(&capacity_);
  capacity_.tokens = 400;
  ASSERT_EQ(create(), 0) << error();
  EXPECT_EQ(qattn_kv_gpu_decode_workspace(cache, 0, nullptr, &tensors_, &decode_, &bytes),
            QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "slots: is missing");
  EXPECT_EQ(bytes, 7u);
  EXPECT_EQ(qattn_kv_gpu_add_sequence(cache, nullptr, nullptr), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(error(), "slot: is NULL");
  qattn_kv_gpu_destroy(cache);
  qattn_kv_gpu_destroy(nullptr);
}

}  // namespace
}  // namespace qattn
