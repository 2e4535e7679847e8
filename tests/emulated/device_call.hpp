// One decode call on the emulated device.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "isa/emu/options.hpp"
#include "kernels/decode/mixed_kv/host.hpp"
#include "kvcache/decode_case.hpp"

namespace qattn::test {

/// When asynchronous copies land and which lanes run first.
struct Timing {
  emu::Schedule schedule;
  emu::LaneOrder order;
};
inline constexpr Timing timings[] = {{emu::Schedule::late, emu::LaneOrder::forward},
                                     {emu::Schedule::early, emu::LaneOrder::reverse},
                                     {emu::Schedule::random, emu::LaneOrder::random}};

/// Another emulated GPU for as long as it lives.
class EmulatedGpu {
 public:
  explicit EmulatedGpu(int architecture, int multiprocessors = 3) : before_(emu::options()) {
    emu::options().architecture = architecture;
    emu::options().multiprocessors = multiprocessors;
  }
  ~EmulatedGpu() { emu::options() = before_; }
  EmulatedGpu(const EmulatedGpu&) = delete;
  EmulatedGpu& operator=(const EmulatedGpu&) = delete;

 private:
  emu::Options before_;
};

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};

struct DecodeResults {
  std::vector<float> out, lse, mass;
};

/// One call on the emulated device.
class DeviceCall {
 public:
  DeviceCall(const DecodeCase& c, const kv::DeviceCache& cache, std::vector<std::int32_t> slots,
             std::int64_t mass_blocks)
      : slots_(std::move(slots)) {
    const auto batch = static_cast<std::int64_t>(slots_.size());
    call_.cache = &cache;
    call_.slots = TensorView::dense(slots_.data(), Format::s32, {batch});
    call_.options = c.options;
    r_.out.assign(static_cast<std::size_t>(batch * c.queries * c.heads_q * cache.dv), 7.0f);
    r_.lse.assign(static_cast<std::size_t>(batch * c.heads_q * c.queries), 7.0f);
    KvDecodeTensors& t = call_.tensors;
    t.q = TensorView::dense(c.q.data(), Format::f32, {batch, c.queries, c.heads_q, cache.d});
    t.out = TensorView::dense(r_.out.data(), Format::f32, {batch, c.queries, c.heads_q, cache.dv});
    t.lse = TensorView::dense(r_.lse.data(), Format::f32, {batch, c.heads_q, c.queries});
    if (!c.sinks.empty()) t.sinks = TensorView::dense(c.sinks.data(), Format::f32, {c.heads_q});
    if (!c.tree.empty()) {
      t.tree_mask = TensorView::dense(c.tree.data(), Format::b8, {batch, c.queries, c.queries});
    }
    if (c.with_mass) {
      r_.mass.assign(static_cast<std::size_t>(batch * c.heads_q * mass_blocks), 7.0f);
      t.mass = TensorView::dense(r_.mass.data(), Format::f32, {batch, c.heads_q, mass_blocks});
    }
  }
  kernels::DeviceDecodeCall& call() { return call_; }

  Status run(const Timing& timing) {
    const emu::Options before = emu::options();
    emu::options().schedule = timing.schedule;
    emu::options().order = timing.order;
    const Status s = kernels::supports(call_);
    if (!s.ok()) {
      emu::options() = before;
      return s;
    }
    const std::size_t bytes = kernels::workspace_bytes(call_);
    const std::unique_ptr<void, FreeMemory> workspace(
        std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    std::memset(workspace.get(), 0xff, bytes);
    const Status ran = kernels::run(call_, workspace.get(), nullptr);
    emu::options() = before;
    return ran;
  }
  const DecodeResults& results() const { return r_; }

 private:
  std::vector<std::int32_t> slots_;
  kernels::DeviceDecodeCall call_;
  DecodeResults r_;
};

}  // namespace qattn::test
