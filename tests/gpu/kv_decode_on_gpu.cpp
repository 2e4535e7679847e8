// decode() over GpuKvCache on a GPU: against the CPU's over the same cache, and a whole step
// (append, decode, observe, and the tiers that follow) that is captured once and replayed a
// thousand times.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "formats/f16.hpp"
#include "gpu/kv_on_gpu.hpp"
#include "kvcache/data.hpp"
#include "kvcache_gpu/same_cache.hpp"

namespace qattn::test {
namespace {

constexpr double tight = 2e-3;  // docs/NUMERICS.md

std::vector<std::uint16_t> normal_f16(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> x(count);
  for (std::uint16_t& v : x) v = formats::F16::encode(normal(random));
  return x;
}

/// |a - b| / |b|; infinite where one alone is no number.
double nrmse(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    const double e = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    if (!std::isfinite(e)) return std::numeric_limits<double>::infinity();
    error += e * e;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(error / norm);
}

/// A workspace for calls of these shapes.
class Workspace {
 public:
  Workspace(const GpuKvCache& cache, const TensorView& slots, const KvDecodeTensors& t,
            const KvDecodeOptions& o)
      : bytes_(size(decode_workspace(cache, 0, slots, t, o))), memory_(bytes_) {}
  void decode(const GpuKvCache& cache, const TensorView& slots, const KvDecodeTensors& t,
              const KvDecodeOptions& o, Stream stream) const {
    need(qattn::decode(cache, 0, slots, t, o, memory_.data(), bytes_, stream), "decode");
  }

 private:
  static std::size_t size(const Result<std::size_t>& bytes) {
    need(bytes.status(), "decode_workspace");
    return *bytes;
  }
  std::size_t bytes_;
  DeviceArray<std::uint8_t> memory_;
};

// ---- Against the CPU ----------------------------------------------------------------------------

struct Mix {
  const char* name;
  std::vector<KvTier> tiers;
  double average_bits;
  Granularity k;
};

/// Sequences of many lengths on the host and on the device.
class Filled {
 public:
  Filled(std::int64_t d, const Mix& mix, std::int64_t heads, std::vector<std::int64_t> lengths)
      : host(make(d, mix, heads)),
        device(on_gpu(host.options(), static_cast<std::int64_t>(lengths.size()), lengths)),
        random_(static_cast<unsigned>(d)) {
    for (const std::int64_t length : lengths) {
      ids.push_back(*host.add_sequence());
      slots.push_back(static_cast<std::int32_t>(*device.add_sequence()));
      const std::int64_t first = (length + 1) / 2;
      append(first);
      if (length > first) append(length - first);
      longest = std::max(longest, length);
    }
    need(cudaDeviceSynchronize(), "append");
    const std::string what = difference(host, ids, device);
    if (!what.empty()) fail(std::string(mix.name) + ": " + what);
  }

  KvCache host;
  GpuKvCache device;
  std::vector<std::int64_t> ids;
  std::vector<std::int32_t> slots;
  std::int64_t longest = 0;

 private:
  static KvCache make(std::int64_t d, const Mix& mix, std::int64_t heads) {
    KvCacheOptions o;
    o.heads_kv = heads;
    o.d = o.dv = d;
    o.tiers = mix.tiers;
    o.k_granularity = mix.k;
    o.window = 64;
    o.average_bits = mix.average_bits;
    if (o.average_bits > 0) o.budget_from = *KvCache::shortest_length(o);
    Result<KvCache> cache = KvCache::create(o);
    need(cache.status(), "create on the host");
    return std::move(*cache);
  }
  static GpuKvCache on_gpu(const KvCacheOptions& o, std::int64_t sequences,
                           const std::vector<std::int64_t>& lengths) {
    const std::int64_t most = *std::max_element(lengths.begin(), lengths.end());
    Result<GpuKvCache> cache = GpuKvCache::create(o, {sequences, most, {}}, gpu);
    need(cache.status(), "create");
    return std::move(*cache);
  }
  /// To the newest sequence, with importance that makes tiers differ.
  void append(std::int64_t count) {
    const KvCacheOptions& o = host.options();
    const auto size = static_cast<std::size_t>(count * o.heads_kv * o.d);
    std::vector<std::uint16_t> k = normal_f16(size, random_), v = normal_f16(size, random_);
    if (o.k_granularity == Granularity::per_channel && count == 80) {
      k[static_cast<std::size_t>((40 * o.heads_kv + 1) * o.d + 3)] = 0x7e00;  // a bad token
    }
    const std::int64_t blocks = (*host.length(ids.back(), 0) + count + 15) / 16;
    std::vector<float> weight(static_cast<std::size_t>(o.heads_kv * blocks));
    std::lognormal_distribution<float> lognormal(0.0f, 2.0f);
    for (float& w : weight) w = lognormal(random_);
    const std::initializer_list<std::int64_t> shape = {1, count, o.heads_kv, o.d};
    KvAppendTensors t;
    t.k = TensorView::dense(k.data(), Format::f16, shape);
    t.v = TensorView::dense(v.data(), Format::f16, shape);
    t.importance = TensorView::dense(weight.data(), Format::f32, {1, o.heads_kv, blocks});
    need(host.append(0, {&ids.back(), 1}, t), "append on the host");
    const DeviceArray<std::uint16_t> device_k(k), device_v(v);
    const DeviceArray<float> device_weight(weight);
    const DeviceArray<std::int32_t> slot(std::vector<std::int32_t>{slots.back()});
    KvGpuAppendTensors g;
    g.slots = slot.view(Format::s32, {1});
    g.k = device_k.view(Format::f16, shape);
    g.v = device_v.view(Format::f16, shape);
    g.importance = device_weight.view(Format::f32, {1, o.heads_kv, blocks});
    need(device.append(0, g), "append");
    need(cudaDeviceSynchronize(), "append");  // before its tensors go
  }
  std::mt19937 random_;
};

struct Worst {
  double out = 0, mass = 0, lse = 0;
};

void compare_decode(Filled& f, std::int64_t group, std::int64_t queries, unsigned features,
                    Worst& worst) {
  const KvCacheOptions& o = f.host.options();
  const auto batch = static_cast<std::int64_t>(f.ids.size());
  const std::int64_t heads = group * o.heads_kv, blocks = (f.longest + 15) / 16;
  std::mt19937 random(features);
  const auto rows = static_cast<std::size_t>(batch * queries * heads);
  std::vector<std::uint16_t> q = normal_f16(rows * static_cast<std::size_t>(o.d), random);
  std::vector<float> out(rows * static_cast<std::size_t>(o.dv)), lse(rows);
  std::vector<float> mass(static_cast<std::size_t>(batch * heads * blocks));
  std::vector<float> sinks(static_cast<std::size_t>(heads), 0.5f);
  KvDecodeOptions options;
  if (features & 1) options.window_left = 200;
  if (features & 2) options.softcap = 3.0f;
  options.debias = (features & 3) == 1 && o.k_granularity == Granularity::per_token;
  const std::initializer_list<std::int64_t> shape = {batch, queries, heads, o.d};
  KvDecodeTensors t;
  t.q = TensorView::dense(q.data(), Format::f16, shape);
  t.out = TensorView::dense(out.data(), Format::f32, shape);
  t.lse = TensorView::dense(lse.data(), Format::f32, {batch, heads, queries});
  t.mass = TensorView::dense(mass.data(), Format::f32, {batch, heads, blocks});
  if (features & 4) t.sinks = TensorView::dense(sinks.data(), Format::f32, {heads});
  need(decode(f.host, 0, f.ids, t, options), "decode on the host");

  const DeviceArray<std::uint16_t> device_q(q);
  const DeviceArray<float> device_out(out.size()), device_lse(lse.size()), device_mass(mass.size());
  const DeviceArray<float> device_sinks(sinks);
  const DeviceArray<std::int32_t> slots(f.slots);
  KvDecodeTensors g;
  g.q = device_q.view(Format::f16, shape);
  g.out = device_out.view(Format::f32, shape);
  g.lse = device_lse.view(Format::f32, {batch, heads, queries});
  g.mass = device_mass.view(Format::f32, {batch, heads, blocks});
  if (features & 4) g.sinks = device_sinks.view(Format::f32, {heads});
  const TensorView slot_view = slots.view(Format::s32, {batch});
  const Workspace workspace(f.device, slot_view, g, options);
  workspace.decode(f.device, slot_view, g, options, nullptr);
  need(cudaDeviceSynchronize(), "decode");
  need(device_errors(gpu), "decode");
  worst.out = std::max(worst.out, nrmse(device_out.get(), out));
  worst.mass = std::max(worst.mass, nrmse(device_mass.get(), mass));
  const std::vector<float> device_lses = device_lse.get();
  for (std::size_t i = 0; i < lse.size(); ++i) {
    worst.lse = std::max(worst.lse, std::abs(static_cast<double>(device_lses[i] - lse[i])));
  }
  if (!(worst.out <= tight) || !(worst.mass <= tight) || !(worst.lse <= 4e-3)) {
    fail("decode, D " + std::to_string(o.d) + ", group " + std::to_string(group) + ", " +
         std::to_string(queries) + " queries, features " + std::to_string(features) + ": NRMSE " +
         std::to_string(worst.out) + ", of the mass " + std::to_string(worst.mass) + ", LSE " +
         std::to_string(worst.lse));
  }
}

void against_the_cpu(Granularity k, const std::vector<Mix>& mixes) {
  for (const std::int64_t d : {64, 128, 256}) {
    Worst worst;
    for (const Mix& mix : mixes) {
      Filled f(d, mix, 2, {3000, 8, 77, 1024, 1999, 160});
      unsigned features = 0;
      for (const std::int64_t group : {1, 4, 7, 16}) {
        for (const std::int64_t queries : {1, 8, 3}) {
          compare_decode(f, group, queries, features++ % 8, worst);
        }
      }
    }
    std::printf(
        "decode against the CPU's, D %d, K %s: NRMSE %.1e, of the mass %.1e (allowed 2e-3), LSE "
        "%.1e\n",
        static_cast<int>(d), std::string(name(k)).c_str(), worst.out, worst.mass, worst.lse);
  }
}

// ---- Captured steps -----------------------------------------------------------------------------

constexpr std::int64_t batch = 4, heads_kv = 4, heads = 16, dim = 128;
constexpr std::int64_t prompt = 1000, most_tokens = prompt + most_steps;
constexpr std::int64_t blocks = (most_tokens + 15) / 16;
constexpr std::int64_t kv_rows = batch * heads_kv * dim, q_rows = batch * heads * dim;
constexpr std::int64_t masses = batch * heads * blocks;

KvCacheOptions loop_options() {
  KvCacheOptions o;
  o.heads_kv = heads_kv;
  o.d = o.dv = dim;
  o.window = 64;
  o.average_bits = 4;
  return o;
}

/// What the steps are given, on both sides.
struct Inputs {
  Inputs(unsigned seed, std::int64_t count)
      : steps(count),
        random(seed),
        prompt_k(normal_f16(prompt * kv_rows, random)),
        prompt_v(normal_f16(prompt * kv_rows, random)),
        k(normal_f16(steps * kv_rows, random)),
        v(normal_f16(steps * kv_rows, random)),
        q(normal_f16(steps * q_rows, random)) {}
  std::int64_t steps;
  std::mt19937 random;
  std::vector<std::uint16_t> prompt_k, prompt_v, k, v, q;
};

/// A cache on the GPU with the prompt in it, and its steps.
class Loop {
 public:
  explicit Loop(const Inputs& in)
      : steps_(in.steps),
        cache_(make()),
        slots_(add(cache_)),
        k_(in.k),
        v_(in.v),
        q_(in.q),
        out_(in.steps * q_rows),
        mass_(in.steps * masses) {
    const DeviceArray<std::uint16_t> k(in.prompt_k), v(in.prompt_v);
    append(k.view(Format::f16, {batch, prompt, heads_kv, dim}),
           v.view(Format::f16, {batch, prompt, heads_kv, dim}), nullptr);
    need(cudaDeviceSynchronize(), "prompt");
    const KvDecodeTensors t = tensors(q_, out_, mass_, 0);
    workspace_ = std::make_unique<Workspace>(cache_, slot_view(), t, KvDecodeOptions{});
  }

  void run_eagerly(Stream stream) {
    for (std::int64_t i = 0; i < steps_; ++i) step(k_, v_, q_, out_, mass_, i, stream);
  }
  /// One captured step, with copies of its tensors between replays.
  void run_captured(cudaStream_t stream) {
    const DeviceArray<std::uint16_t> k(kv_rows), v(kv_rows), q(q_rows);
    const DeviceArray<float> out(q_rows), mass(masses);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    // In this mode everything that waits or allocates fails and breaks the capture.
    need(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    step(k, v, q, out, mass, 0, stream);
    need(cudaStreamEndCapture(stream, &graph), "end of the capture");
    const std::size_t nodes = only_kernels(graph);
    need(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
    const auto copy = [&](auto* to, const auto* from, std::int64_t count) {
      need(cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof *to,
                           cudaMemcpyDeviceToDevice, stream),
           "copy");
    };
    cudaEvent_t begin, end;
    need(cudaEventCreate(&begin), "event");
    need(cudaEventCreate(&end), "event");
    need(cudaEventRecord(begin, stream), "record");
    for (std::int64_t i = 0; i < steps_; ++i) {
      copy(k.data(), k_.data() + i * kv_rows, kv_rows);
      copy(v.data(), v_.data() + i * kv_rows, kv_rows);
      copy(q.data(), q_.data() + i * q_rows, q_rows);
      need(cudaGraphLaunch(replay, stream), "replay");
      copy(out_.data() + i * q_rows, out.data(), q_rows);
      copy(mass_.data() + i * masses, mass.data(), masses);
    }
    need(cudaEventRecord(end, stream), "record");
    need(cudaStreamSynchronize(stream), "replays");
    float ms = 0;
    need(cudaEventElapsedTime(&ms, begin, end), "time");
    std::printf("a step of %d kernels and no other node (B 4, heads 16/4, D 128): %.1f us\n",
                static_cast<int>(nodes), 1000 * ms / static_cast<float>(steps_));
    need(cudaGraphExecDestroy(replay), "destroy");
    need(cudaGraphDestroy(graph), "destroy");
  }

  const GpuKvCache& cache() const { return cache_; }
  std::vector<float> out() const { return out_.get(); }
  std::vector<float> mass() const { return mass_.get(); }

 private:
  static GpuKvCache make() {
    Result<GpuKvCache> cache = GpuKvCache::create(loop_options(), {batch, most_tokens, {}}, gpu);
    need(cache.status(), "create");
    return std::move(*cache);
  }
  static std::vector<std::int32_t> add(GpuKvCache& cache) {
    std::vector<std::int32_t> slots;
    for (std::int64_t b = 0; b < batch; ++b) {
      slots.push_back(static_cast<std::int32_t>(*cache.add_sequence()));
    }
    return slots;
  }
  TensorView slot_view() const { return slots_.view(Format::s32, {batch}); }
  void append(const TensorView& k, const TensorView& v, Stream stream) {
    KvGpuAppendTensors t;
    t.slots = slot_view();
    t.k = k;
    t.v = v;
    need(cache_.append(0, t, Layout::bshd, stream), "append");
  }
  static KvDecodeTensors tensors(const DeviceArray<std::uint16_t>& q, const DeviceArray<float>& out,
                                 const DeviceArray<float>& mass, std::int64_t i) {
    KvDecodeTensors t;
    t.q = q.view(Format::f16, {batch, 1, heads, dim}, i * q_rows);
    t.out = out.view(Format::f32, {batch, 1, heads, dim}, i * q_rows);
    t.mass = mass.view(Format::f32, {batch, heads, blocks}, i * masses);
    return t;
  }
  /// With the i-th rows of each array. Tiers follow in the next append that opens a page.
  void step(const DeviceArray<std::uint16_t>& k, const DeviceArray<std::uint16_t>& v,
            const DeviceArray<std::uint16_t>& q, const DeviceArray<float>& out,
            const DeviceArray<float>& mass, std::int64_t i, Stream stream) {
    append(k.view(Format::f16, {batch, 1, heads_kv, dim}, i * kv_rows),
           v.view(Format::f16, {batch, 1, heads_kv, dim}, i * kv_rows), stream);
    const KvDecodeTensors t = tensors(q, out, mass, i);
    workspace_->decode(cache_, slot_view(), t, {}, stream);
    need(cache_.observe(0, slot_view(), t.mass, stream), "observe");
  }
  /// Neither a host's node nor a copy, an allocation or anything else; their number.
  static std::size_t only_kernels(cudaGraph_t graph) {
    std::size_t count = 0;
    need(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
    std::vector<cudaGraphNode_t> nodes(count);
    need(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      need(cudaGraphNodeGetType(node, &type), "type of a node");
      if (type != cudaGraphNodeTypeKernel) {
        fail("the captured step has a node of type " + std::to_string(static_cast<int>(type)));
      }
    }
    return count;
  }

  std::int64_t steps_;
  GpuKvCache cache_;
  DeviceArray<std::int32_t> slots_;
  DeviceArray<std::uint16_t> k_, v_, q_;
  DeviceArray<float> out_, mass_;
  std::unique_ptr<Workspace> workspace_;
};

/// The host's cache after the same steps with the masses that the GPU saw.
KvCache follow_on_the_host(const Inputs& in, const std::vector<float>& mass,
                           std::vector<std::int64_t>& ids) {
  Result<KvCache> cache = KvCache::create(loop_options());
  need(cache.status(), "create on the host");
  for (std::int64_t b = 0; b < batch; ++b) ids.push_back(*cache->add_sequence());
  const auto append = [&](const std::uint16_t* k, const std::uint16_t* v, std::int64_t count) {
    KvAppendTensors t;
    t.k = TensorView::dense(k, Format::f16, {batch, count, heads_kv, dim});
    t.v = TensorView::dense(v, Format::f16, {batch, count, heads_kv, dim});
    need(cache->append(0, ids, t), "append on the host");
  };
  append(in.prompt_k.data(), in.prompt_v.data(), prompt);
  std::vector<float> own;
  for (std::int64_t i = 0; i < in.steps; ++i) {
    append(in.k.data() + i * kv_rows, in.v.data() + i * kv_rows, 1);
    const std::int64_t now = (prompt + i + 16) / 16;
    own.clear();
    for (std::int64_t row = 0; row < batch * heads; ++row) {
      const auto from = mass.begin() + i * masses + row * blocks;
      own.insert(own.end(), from, from + now);
    }
    need(cache->observe(0, ids, TensorView::dense(own.data(), Format::f32, {batch, heads, now})),
         "observe on the host");
  }
  return std::move(*cache);
}

/// Pages that were quantised for one tier and later for a worse one.
std::int64_t demoted_pages(const KvCache& cache, const std::vector<std::int64_t>& ids) {
  std::int64_t count = 0;
  for (const std::int64_t id : ids) {
    for (const kv::Table& table : cache.data().find(id)->layers[0].tables) {
      for (const kv::Entry& e : table) count += (e.path & (e.path - 1)) != 0 ? 1 : 0;
    }
  }
  return count;
}

void captured_steps(std::int64_t steps) {
  const Inputs in(11, steps);
  Loop eager(in), captured(in);
  cudaStream_t stream;
  need(cudaStreamCreate(&stream), "stream");
  eager.run_eagerly(nullptr);
  need(cudaDeviceSynchronize(), "eager steps");
  captured.run_captured(stream);
  need(device_errors(gpu), "steps");
  const std::vector<float> mass = eager.mass();
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  if (!same(eager.out(), captured.out())) fail("replayed steps give other outputs");
  if (!same(mass, captured.mass())) fail("replayed steps give other masses");
  std::vector<std::int64_t> ids;
  const KvCache host = follow_on_the_host(in, mass, ids);
  for (const Loop* loop : {&eager, &captured}) {
    const std::string what = difference(host, ids, loop->cache());
    if (!what.empty()) fail("after the steps: " + what);
  }
  const std::int64_t demoted = demoted_pages(host, ids);
  if (demoted == 0 && steps == most_steps) fail("no page changed its tier in any step");
  need(cudaStreamDestroy(stream), "stream");
  std::printf(
      "append, decode, observe and new tiers (%d pages demoted): %d replays of a captured "
      "step equal the eager run and the host's cache\n",
      static_cast<int>(demoted), static_cast<int>(steps));
}

}  // namespace

void decode_on_gpu(Granularity k) {
  if (k == Granularity::per_channel) {
    return against_the_cpu(
        k, {{"8, 4, 3, 2 bits at 5, K a channel", {{8, 8}, {4, 4}, {3, 3}, {2, 2}}, 5, k},
            {"K 2, V 4 bits, K a channel", {{2, 4}}, 0, k}});
  }
  against_the_cpu(k, {{"8, 4, 3, 2 bits at 4.5", {{8, 8}, {4, 4}, {3, 3}, {2, 2}}, 4.5, k},
                      {"8 bits", {{8, 8}}, 0, k},
                      {"K 4, V 2 bits", {{4, 2}}, 0, k},
                      {"3 bits", {{3, 3}}, 0, k}});
}

void decode_steps_on_gpu(std::int64_t steps) { captured_steps(steps); }

}  // namespace qattn::test
