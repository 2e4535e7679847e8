// Backends: which one serves a call, what it is asked for, and how a library is found or refused.
#include "core/backend.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/quantize/host/quantize_check.hpp"
#include "qattn/qattn.h"
#include "qattn/qattn.hpp"

namespace qattn {
namespace {

/// What the backend below was asked, in order.
std::vector<std::string> events;
int current_device = 7;
std::uint32_t error_bits = 0;

void happened(const std::string& what) { events.push_back(what); }

detail::Backend recording(DeviceType device, bool host_memory) {
  static const detail::Kernel kernels[] = {
      {"attn.test.wide",
       [](const Problem& p) {
         return p.d > 64 ? Status() : Status(Code::unsupported, "d is small");
       },
       nullptr, nullptr},
      {"attn.test.plain", [](const Problem&) { return Status(); },
       [](const Problem& p) {
         auto plan = std::make_shared<detail::PlanData>();
         plan->recipe = p.recipe;
         plan->workspace = 128;
         plan->text = "tune: " + std::to_string(current_device) + "\n";
         return plan;
       },
       [](const detail::PlanData&, const Problem&, void* workspace, Stream stream) {
         std::memset(workspace, 0, 128);
         happened("run on " + std::to_string(current_device) +
                  (stream != nullptr ? " with a stream" : ""));
         return Status();
       }}};
  detail::Backend b;
  b.name = "test";
  b.device = device;
  b.kernels = kernels;
  b.host_memory = host_memory;
  b.enter = [](int index, int* previous) {
    if (index > 3) return Status(Code::unsupported, "device " + std::to_string(index) + ": none");
    *previous = current_device;
    current_device = index;
    return Status();
  };
  b.leave = [](int previous) { current_device = previous; };
  b.architecture = [] { return 80 + current_device; };
  b.allocate = [](std::size_t bytes, Stream) -> Result<void*> {
    happened("allocate " + std::to_string(bytes));
    return std::aligned_alloc(64, 128);
  };
  b.release = [](void* memory, Stream) {
    happened("release");
    std::free(memory);
  };
  b.copy_to_host = [](void* to, const void* from, std::size_t bytes, Stream stream) {
    happened("copy " + std::to_string(bytes) + (stream != nullptr ? " on a stream" : ""));
    std::memcpy(to, from, bytes);
    return Status();
  };
  b.take_errors = []() -> Result<std::uint32_t> { return std::exchange(error_bits, 0); };
  b.quantize = [](const QuantizeTensors&, const QuantizeOptions&, const QuantizeFacts& facts,
                  Stream) -> Result<QuantizeReport> {
    happened("quantize " + std::to_string(facts.longest));
    return QuantizeReport{3};
  };
  return b;
}

struct Call {
  std::vector<float> q = std::vector<float>(2 * 4 * 2 * 32), out = q;
  std::array<std::int32_t, 3> cu{0, 3, 8};
  AttentionTensors t;
  AttentionOptions o;

  explicit Call(Device device) {
    t.q = t.k = t.v = TensorView::dense(q.data(), Format::f32, {2, 4, 2, 32});
    t.out = TensorView::dense(out.data(), Format::f32, {2, 4, 2, 32});
    for (TensorView* view : {&t.q, &t.k, &t.v, &t.out}) view->device = device;
  }
  void pack(Device device) {
    for (TensorView* view : {&t.q, &t.k, &t.v, &t.out}) {
      *view = TensorView::dense(view->data, Format::f32, {8, 2, 32});
      view->device = device;
    }
    t.cu_seqlens_q = t.cu_seqlens_k = TensorView::dense(cu.data(), Format::s32, {3});
    t.cu_seqlens_q.device = t.cu_seqlens_k.device = device;
  }
};

class BackendTest : public testing::Test {
 protected:
  void use(DeviceType device, bool host_memory) {
    backend_ = recording(device, host_memory);
    detail::use_backend(&backend_);
  }
  void SetUp() override {
    events.clear();
    current_device = 7;
    setenv("QATTN_CUDA_LIBRARY", "/nowhere/libqattn_cuda.so", 1);
  }
  void TearDown() override {
    detail::use_backend(nullptr);
    unsetenv("QATTN_CUDA_LIBRARY");
  }

 private:
  detail::Backend backend_;
};

TEST_F(BackendTest, ComesBeforeTheCpuAndServesItsTensors) {
  use(DeviceType::cpu, true);
  Call call({DeviceType::cpu, 0});
  const std::string text = explain(call.t, call.o);
  EXPECT_EQ(text.find("attn.test.wide: d is small\nattn.test.plain: chosen\nattn.cpu."), 0u)
      << text;
  const Result<Plan> made = plan(call.t, call.o);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(made->kernel(), "attn.test.plain");
  EXPECT_NE(made->to_string().find("architecture: sm_80\n"), std::string::npos);
  ASSERT_TRUE(attention(call.t, call.o).ok());
  EXPECT_EQ(events, (std::vector<std::string>{"allocate 128", "run on 0", "release"}));
  detail::use_backend(nullptr);
  EXPECT_EQ(plan(call.t, call.o)->to_string().find("architecture"), std::string::npos);
}

TEST_F(BackendTest, RunsOnTheTensorsDeviceAndPutsTheCurrentOneBack) {
  use(DeviceType::cuda, false);
  Call call({DeviceType::cuda, 2});
  const Result<Plan> made = plan(call.t, call.o);
  ASSERT_TRUE(made.ok()) << made.status().message();
  for (const char* line : {"device: cuda:2\n", "architecture: sm_82\n", "tune: 2\n"}) {
    EXPECT_NE(made->to_string().find(line), std::string::npos) << line;
  }
  EXPECT_EQ(current_device, 7);
  alignas(64) std::byte workspace[128];
  int stream = 0;
  ASSERT_TRUE(run(*made, call.t, call.o, workspace, 128, &stream).ok());
  EXPECT_EQ(events, std::vector<std::string>{"run on 2 with a stream"});
  EXPECT_EQ(current_device, 7);

  Call other({DeviceType::cuda, 1});
  EXPECT_NE(plan(other.t, other.o)->hash(), made->hash());
  EXPECT_EQ(run(*made, other.t, other.o, workspace, 128).code(), Code::invalid_argument);
  Call none({DeviceType::cuda, 4});
  const Status refused = attention(none.t, none.o);
  EXPECT_EQ(refused.code(), Code::unsupported);
  EXPECT_NE(refused.message().find("device 4: none"), std::string::npos) << refused.message();
}

TEST_F(BackendTest, ContentsAreReadOnTheHostOrWhereAskedFor) {
  for (const bool host : {true, false}) {
    use(DeviceType::cuda, host);
    events.clear();
    const Device device{DeviceType::cuda, 0};
    Call call(device);
    call.pack(device);
    call.cu = {0, 9, 8};
    EXPECT_EQ(attention(call.t, call.o).ok(), !host);
    call.o.validate = true;
    const Status refused = attention(call.t, call.o);
    EXPECT_EQ(refused.code(), Code::invalid_argument);
    EXPECT_NE(refused.message().find("cu_seqlens_q: entry 2 is 8"), std::string::npos)
        << refused.message();
    call.cu = {0, 3, 8};
    EXPECT_TRUE(attention(call.t, call.o).ok());
    call.t.cu_seqlens_q.data = nullptr;
    call.o.validate = false;
    EXPECT_NE(attention(call.t, call.o).message().find("cu_seqlens_q: data pointer is null"),
              std::string::npos);
  }
}

/// A call that fails after its workspace is there gives that back.
TEST_F(BackendTest, AFailedCallLeavesNoWorkspace) {
  const Device device{DeviceType::cuda, 0};
  use(device.type, true);
  Call call(device);
  call.pack(device);
  call.cu = {0, 9, 8};
  EXPECT_EQ(attention(call.t, call.o).code(), Code::invalid_argument);
  EXPECT_EQ(events, (std::vector<std::string>{"allocate 128", "release"}));
}

TEST_F(BackendTest, WhatOnlyCpusHaveIsRefusedOnADevice) {
  use(DeviceType::cuda, false);
  const auto message = [](Device device, auto change) {
    Call call(device);
    change(call);
    return plan(call.t, call.o).status().message();
  };
  const Device gpu{DeviceType::cuda, 0};
  const auto same = [](float s, std::int64_t, std::int64_t, std::int64_t, std::int64_t) {
    return s;
  };
  const auto all = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return true; };
  EXPECT_EQ(message(gpu, [](Call& c) { c.o.threads = 2; }),
            "threads: 2 is for CPUs, and q lies on cuda:0");
  EXPECT_EQ(message(gpu, [&](Call& c) { c.o.score_function = score_function(same); }),
            "score_function: runs on CPUs only, and q lies on cuda:0");
  EXPECT_EQ(message(gpu, [&](Call& c) { c.o.mask_function = mask_function(all); }),
            "mask_function: runs on CPUs only, and q lies on cuda:0");
  EXPECT_EQ(message({DeviceType::cuda, -1}, [](Call&) {}), "q: device index -1 is negative");
  EXPECT_EQ(message({static_cast<DeviceType>(5), 0}, [](Call&) {}),
            "q: device type 5 is none of cpu, cuda, hip");
  EXPECT_EQ(message(gpu, [](Call& c) { c.t.k.device = {}; }),
            "k: lies on another device than q (cpu, q on cuda:0)");
}

TEST_F(BackendTest, QuantizeGoesThroughItsHook) {
  use(DeviceType::cuda, false);
  const Device gpu{DeviceType::cuda, 1};
  Call call(gpu);
  QuantizeTensors t;
  QuantizeOptions o;
  call.pack(gpu);
  t.x = call.t.q;
  t.cu_seqlens = call.t.cu_seqlens_q;
  const Result<QuantizeShapes> shapes = quantize_shapes(t.x, o, t.cu_seqlens);
  ASSERT_TRUE(shapes.ok()) << shapes.status().message();
  EXPECT_EQ(shapes->scale.shape[2], 5);  // the longest sequence, read from the device
  int its_stream = 0;
  events.clear();
  EXPECT_TRUE(quantize_shapes(t.x, o, t.cu_seqlens, &its_stream).ok());
  EXPECT_EQ(events, (std::vector<std::string>{"copy 12 on a stream"}));
  std::vector<std::int8_t> codes(8 * 2 * 32);
  std::vector<float> scale(2 * 2 * 5);
  t.codes = shapes->codes;
  t.scale = shapes->scale;
  t.codes.data = codes.data();
  t.scale.data = scale.data();
  t.codes.device = t.scale.device = gpu;
  events.clear();
  const Result<QuantizeReport> report = quantize(t, o);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->saturated, 3);
  EXPECT_EQ(events, (std::vector<std::string>{"copy 12", "quantize 5"}));
  EXPECT_EQ(dequantize(t, o).code(), Code::unsupported);
  // A static scale, for which the call waits anyway, is looked at before anything runs.
  std::vector<float> given(2 * 2 * 5, 0.5f);
  t.static_scale = t.scale;
  t.static_scale.data = given.data();
  given[4] = -1.0f;  // behind the first sequence's end
  events.clear();
  EXPECT_TRUE(quantize(t, o).ok());
  EXPECT_EQ(events, (std::vector<std::string>{"copy 12", "copy 80", "copy 12", "quantize 5"}));
  given[14] = -1.0f;
  events.clear();
  EXPECT_NE(quantize(t, o).status().message().find("static_scale: value -1.000000 at (1, 0, 4)"),
            std::string::npos);
  EXPECT_EQ(events, (std::vector<std::string>{"copy 12", "copy 80", "copy 12"}));
  t.static_scale = {};
  o.threads = 1;
  EXPECT_EQ(quantize(t, o).status().code(), Code::invalid_argument);
  int stream = 0;
  t.x.device = {};
  EXPECT_NE(quantize(t, {}, &stream).status().message().find("stream"), std::string::npos);
  EXPECT_NE(quantize_shapes(t.x, {}, {}, &stream).status().message().find("stream"),
            std::string::npos);
}

TEST_F(BackendTest, ErrorsAreReadAndCleared) {
  EXPECT_TRUE(device_errors({}).ok());
  use(DeviceType::cuda, false);
  EXPECT_TRUE(device_errors({DeviceType::cuda, 0}).ok());
  error_bits = detail::error_page;
  const Status found = device_errors({DeviceType::cuda, 0});
  EXPECT_EQ(found.code(), Code::invalid_argument);
  EXPECT_NE(found.message().find("cuda:0: page_table held"), std::string::npos) << found.message();
  EXPECT_TRUE(device_errors({DeviceType::cuda, 0}).ok());
  error_bits = detail::error_length;
  EXPECT_EQ(qattn_device_errors(QATTN_DEVICE_CUDA, 0), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(qattn_device_errors(QATTN_DEVICE_CUDA, -1), QATTN_INVALID_ARGUMENT);
  EXPECT_EQ(qattn_device_errors(QATTN_DEVICE_HIP, 0), QATTN_UNSUPPORTED);
}

TEST_F(BackendTest, AMissingLibraryIsNamed) {
  Call call({DeviceType::cuda, 0});
  const Status named = attention(call.t, call.o);
  EXPECT_EQ(named.code(), Code::unsupported);
  EXPECT_NE(named.message().find("QATTN_CUDA_LIBRARY: /nowhere/libqattn_cuda.so"),
            std::string::npos)
      << named.message();
  EXPECT_NE(named.message().find("attn.cpu.scalar: tensors are not on the CPU"), std::string::npos);
  unsetenv("QATTN_CUDA_LIBRARY");
  const std::string message = device_errors({DeviceType::cuda, 0}).message();
  EXPECT_NE(message.find("libqattn_cuda.so: is neither in /"), std::string::npos) << message;
  EXPECT_TRUE(attention(Call({}).t, call.o).ok()) << "CPU calls do not need it";
}

TEST_F(BackendTest, ALibraryOfAnotherVersionIsRefused) {
  setenv("QATTN_CUDA_LIBRARY", QATTN_OTHER_VERSION, 1);
  const std::string message = device_errors({DeviceType::cuda, 0}).message();
  EXPECT_NE(message.find(QATTN_OTHER_VERSION), std::string::npos) << message;
  EXPECT_NE(message.find("was built for libqattn 0.0.0, and this one is "), std::string::npos)
      << message;
}

TEST_F(BackendTest, CValidatesAndTakesAStream) {
  use(DeviceType::cuda, false);
  float memory[64] = {};
  qattn_attention_tensors t;
  qattn_attention_options o;
  qattn_attention_tensors_init(&t);
  qattn_attention_options_init(&o);
  const std::int64_t shape[] = {1, 1, 1, 32};
  t.q = t.k = t.v = qattn_tensor_dense(memory, QATTN_FORMAT_f32, 4, shape);
  t.out = qattn_tensor_dense(memory + 32, QATTN_FORMAT_f32, 4, shape);
  int stream = 0;
  EXPECT_EQ(qattn_attention_on(&t, &o, &stream), QATTN_INVALID_ARGUMENT) << "a stream on the CPU";
  for (qattn_tensor* x : {&t.q, &t.k, &t.v, &t.out}) x->device_type = QATTN_DEVICE_CUDA;
  EXPECT_EQ(qattn_attention_on(&t, &o, &stream), QATTN_OK) << qattn_last_error();
  EXPECT_EQ(events[1], "run on 0 with a stream");
  o.validate = 2;
  EXPECT_EQ(qattn_attention(&t, &o), QATTN_INVALID_ARGUMENT);
  o.validate = 1;
  EXPECT_EQ(qattn_attention(&t, &o), QATTN_OK);
  // A caller that was compiled before `validate` existed.
  o.struct_size = offsetof(qattn_attention_options, validate);
  o.validate = o.balance_k = 77;
  EXPECT_EQ(qattn_attention(&t, &o), QATTN_OK) << qattn_last_error();
}

}  // namespace
}  // namespace qattn
