// GpuKvCache on a GPU against KvCache on the host, bit for bit: random appends, importance that is
// told, forks and files, an append that is captured in a graph and replayed, and how long steps
// take. decode():
// kv_decode_on_gpu.cpp.
//   kv_cache_on_gpu [--no-times STEPS] [--k per_token|per_channel]
//     --no-times   without the steps that are only timed, and with so many of the 1000 replays of a
//                  captured step: racecheck ends a program of 1000
//     --k          caches whose K has such scales alone; captured decode steps are per_token's
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "formats/f16.hpp"
#include "gpu/kv_on_gpu.hpp"
#include "kvcache_gpu/same_cache.hpp"

namespace qattn {
namespace {

using test::DeviceArray;
using test::fail;
using test::gpu;
using test::need;

struct Shape {
  std::int64_t batch = 4, heads = 4, d = 128, tokens = 4096;
  double average_bits = 4;
  std::int64_t page = 16;
  Granularity k = Granularity::per_token;
};

/// Both caches, and the tensors of calls.
class Pair {
 public:
  Pair(const Shape& s, std::int64_t longest_append)
      : s_(s),
        host_(make_host(s)),
        device_(make_device(s)),
        k_(size(longest_append)),
        v_(size(longest_append)),
        slots_(static_cast<std::size_t>(s.batch)) {
    std::vector<std::int32_t> numbers;
    for (std::int64_t b = 0; b < s.batch; ++b) {
      ids_.push_back(*host_.add_sequence());
      numbers.push_back(static_cast<std::int32_t>(*device_.add_sequence()));
    }
    slots_.put(numbers);
  }

  /// New rows in the tensors of a call of `count` tokens.
  void fill(std::int64_t count) {
    std::normal_distribution<float> normal;
    for (auto* rows : {&host_k_, &host_v_}) {
      rows->resize(size(count));
      constexpr std::size_t period = 1000003;  // drawing all of a long prefill takes a minute
      for (std::size_t i = 0; i < rows->size(); ++i) {
        (*rows)[i] = i < period ? formats::F16::encode(normal(random_)) : (*rows)[i - period];
      }
    }
    if (s_.k == Granularity::per_channel) {
      for (std::size_t i = 17; i < host_k_.size(); i += 5003) host_k_[i] = 0x7e00;  // bad tokens
    }
    k_.put(host_k_);
    v_.put(host_v_);
  }
  void append_on_host(std::int64_t count) {
    KvAppendTensors t;
    t.k = TensorView::dense(host_k_.data(), Format::f16, {s_.batch, count, s_.heads, s_.d});
    t.v = TensorView::dense(host_v_.data(), Format::f16, {s_.batch, count, s_.heads, s_.d});
    need(host_.append(0, ids_, t), "append on the host");
  }
  Status append(std::int64_t count, Stream stream = nullptr) {
    KvGpuAppendTensors t;
    t.slots = slots_.view(Format::s32, {s_.batch});
    t.k = k_.view(Format::f16, {s_.batch, count, s_.heads, s_.d});
    t.v = v_.view(Format::f16, {s_.batch, count, s_.heads, s_.d});
    return device_.append(0, t, Layout::bshd, stream);
  }
  void observe() {
    const std::int64_t blocks = (*host_.length(ids_[0], 0) + 15) / 16;
    std::lognormal_distribution<float> weight(0.0f, 2.0f);
    std::vector<float> mass(static_cast<std::size_t>(s_.batch * 2 * s_.heads * blocks));
    for (float& x : mass) x = weight(random_);
    DeviceArray<float> copy(mass.size());
    copy.put(mass);
    need(device_.observe(0, slots_.view(Format::s32, {s_.batch}),
                         copy.view(Format::f32, {s_.batch, 2 * s_.heads, blocks})),
         "observe");
    need(cudaDeviceSynchronize(), "observe");
    need(
        host_.observe(
            0, ids_, TensorView::dense(mass.data(), Format::f32, {s_.batch, 2 * s_.heads, blocks})),
        "observe on the host");
  }
  void set_importance() {
    const std::int64_t blocks = (*host_.length(ids_[1], 0) + 15) / 16;
    std::lognormal_distribution<float> weight(0.0f, 2.0f);
    std::vector<float> told(static_cast<std::size_t>(s_.heads * blocks));
    for (float& x : told) x = weight(random_);
    DeviceArray<float> copy(told);
    need(device_.set_importance(1, 0, copy.view(Format::f32, {s_.heads, blocks})),
         "set_importance");
    need(cudaDeviceSynchronize(), "set_importance");
    need(host_.set_importance(ids_[1], 0,
                              TensorView::dense(told.data(), Format::f32, {s_.heads, blocks})),
         "set_importance on the host");
  }
  /// The host's cache becomes what the device's file holds, the device's what that one's does.
  void through_files() {
    // Others may run this in the same folder.
    const std::string path = "kv_cache_on_gpu." + std::to_string(getpid()) + ".safetensors";
    need(device_.save(path), "save");
    Result<KvCache> host = KvCache::load(path);
    need(host.status(), "load on the host");
    host_ = std::move(*host);
    for (std::int64_t slot = 0; slot < s_.batch; ++slot) ids_[slot] = slot;
    compare("saved");
    need(host_.save(path), "save on the host");
    Result<GpuKvCache> device = GpuKvCache::load(path, {s_.batch, s_.tokens, {}}, gpu);
    need(device.status(), "load");
    std::remove(path.c_str());
    device_ = std::move(*device);
    compare("loaded");
  }
  /// The last slot becomes a copy of the first.
  void fork() {
    need(host_.release(ids_.back()), "release on the host");
    need(device_.release(s_.batch - 1), "release");
    ids_.back() = *host_.fork(ids_[0]);
    const Result<std::int64_t> copy = device_.fork(0);
    need(copy.status(), "fork");
    if (*copy != s_.batch - 1) fail("fork takes another slot than the one that is free");
  }
  void compare(const char* when) {
    need(cudaDeviceSynchronize(), when);
    const std::string what = test::difference(host_, ids_, device_);
    if (!what.empty()) fail(std::string(when) + ": " + what);
    for (std::int64_t slot = 0; slot < s_.batch; ++slot) {
      const Result<KvUsage> a = host_.usage(ids_[slot], 0), b = device_.usage(slot, 0);
      need(b.status(), when);
      if (a->bytes != b->bytes || a->tier_tokens != b->tier_tokens) fail("usage differs");
    }
    need(device_errors(gpu), when);
  }
  std::mt19937& random() { return random_; }

 private:
  static KvCacheOptions options(const Shape& s) {
    KvCacheOptions o;
    o.heads_kv = s.heads;
    o.d = o.dv = s.d;
    o.page_size = s.page;
    o.k_granularity = s.k;
    if (s.k == Granularity::per_channel && s.page > 16) o.window_format = Format::bf16;
    o.average_bits = s.average_bits;
    o.window = 128;
    o.sinks = 64;
    return o;
  }
  static KvCache make_host(const Shape& s) {
    Result<KvCache> host = KvCache::create(options(s));
    need(host.status(), "create on the host");
    return std::move(*host);
  }
  static GpuKvCache make_device(const Shape& s) {
    Result<GpuKvCache> device = GpuKvCache::create(options(s), {s.batch, s.tokens, {}}, gpu);
    need(device.status(), "create");
    return std::move(*device);
  }
  std::size_t size(std::int64_t tokens) const {
    return static_cast<std::size_t>(s_.batch * tokens * s_.heads * s_.d);
  }

  Shape s_;
  KvCache host_;
  GpuKvCache device_;
  DeviceArray<std::uint16_t> k_, v_;
  DeviceArray<std::int32_t> slots_;
  std::vector<std::uint16_t> host_k_, host_v_;
  std::vector<std::int64_t> ids_;
  std::mt19937 random_{7};
};

void random_appends(const Shape& s) {
  Pair pair(s, 600);
  std::int64_t length = 0;
  for (int n = 0; n < 60; ++n) {
    const std::int64_t count = n % 10 == 0 ? 1 + pair.random()() % 600 : 1 + pair.random()() % 9;
    if (length + count > s.tokens) break;
    pair.fill(count);
    pair.append_on_host(count);
    need(pair.append(count), "append");
    length += count;
    if (n % 4 == 1) pair.observe();
    if (n % 16 == 9) pair.fork();
    if (n % 6 == 5) pair.set_importance();
    if (n % 20 == 13) pair.through_files();
    pair.compare("random appends");
  }
  std::printf("random appends, forks and files, D %d, pages of %d, K %s: equal\n",
              static_cast<int>(s.d), static_cast<int>(s.page), std::string(name(s.k)).c_str());
}

void captured_steps(Granularity k) {
  Shape s;
  s.k = k;
  Pair pair(s, 1000);
  pair.fill(1000);
  pair.append_on_host(1000);
  need(pair.append(1000), "append");
  cudaStream_t stream;
  need(cudaStreamCreate(&stream), "stream");
  need(cudaDeviceSynchronize(), "prefill");
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  need(pair.append(1, stream), "captured append");
  need(cudaStreamEndCapture(stream, &graph), "end of the capture");
  need(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
  for (int n = 0; n < 50; ++n) {
    pair.fill(1);
    pair.append_on_host(1);
    need(cudaGraphLaunch(replay, stream), "replay");
    need(cudaStreamSynchronize(stream), "replay");
    if (n % 7 == 0) pair.observe();
    pair.compare("replayed steps");
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  std::printf("a captured append, K %s, replayed 50 times: equal\n", std::string(name(k)).c_str());
}

/// Microseconds of every one of `steps` appends of one token after a prefill.
void time_steps(std::int64_t prefill, Granularity k) {
  Shape s;
  s.k = k;
  s.batch = 16;
  s.heads = 8;
  s.tokens = prefill + 600;
  s.average_bits = 3;
  Pair pair(s, prefill);
  cudaEvent_t begin, end;
  need(cudaEventCreate(&begin), "event");
  need(cudaEventCreate(&end), "event");
  const auto timed = [&](std::int64_t count) {
    need(cudaEventRecord(begin), "record");
    need(pair.append(count), "append");
    need(cudaEventRecord(end), "record");
    need(cudaEventSynchronize(end), "append");
    float ms = 0;
    need(cudaEventElapsedTime(&ms, begin, end), "time");
    return 1000 * ms;
  };
  pair.fill(prefill);
  const float first = timed(prefill);
  std::vector<float> steps;
  for (int n = 0; n < 512; ++n) steps.push_back(timed(1));
  std::sort(steps.begin(), steps.end());
  need(device_errors(gpu), "timed steps");
  std::printf(
      "B 16, 8 heads, D 128, 3 bits, K %s: prefill of %d tokens %.0f us; a step: median %.1f us, "
      "one in 16 up to %.1f us\n",
      std::string(name(k)).c_str(), static_cast<int>(prefill), first, steps[256], steps[507]);
}

}  // namespace
}  // namespace qattn

int main(int argc, char** argv) {
  using qattn::Granularity;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was right before a tool stopped it
  bool times = true, good = argc % 2 == 1;
  std::int64_t steps = qattn::test::most_steps;
  std::vector<Granularity> scales = {Granularity::per_token, Granularity::per_channel};
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--no-times") {
      times = false;
      steps = std::atoll(argv[i + 1]);
    } else if (const auto k = qattn::granularity_named(argv[i + 1]); option == "--k" && k) {
      scales = {*k};
    } else {
      good = false;
    }
  }
  if (!good || steps < 1 || steps > qattn::test::most_steps ||
      (scales[0] != Granularity::per_token && scales[0] != Granularity::per_channel)) {
    std::fprintf(stderr,
                 "usage: kv_cache_on_gpu [--no-times STEPS] [--k per_token|per_channel], of 1 to "
                 "1000 replays\n");
    return 2;
  }
  for (const Granularity k : scales) {
    for (const std::int64_t d : {64, 128, 256}) {
      for (const std::int64_t page : {16, 64}) {
        qattn::Shape s;
        s.d = d;
        s.page = page;
        s.k = k;
        if (k == Granularity::per_channel) s.average_bits += 0.5;  // scales of pages of 16 tokens
        qattn::random_appends(s);
      }
    }
    qattn::test::decode_on_gpu(k);
    qattn::captured_steps(k);
    for (const std::int64_t tokens : {1000, 8000, 32000}) {
      if (times) qattn::time_steps(tokens, k);
    }
  }
  if (scales[0] == Granularity::per_token) qattn::test::decode_steps_on_gpu(steps);
  return 0;
}
