// Options, counters, and launching a grid over worker threads.
#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "isa/gpu.hpp"
#include "isa/isa.hpp"
// The block after the words.
#include "isa/emu/block/block.hpp"

namespace qattn::emu {
namespace {

thread_local Stats latest, untaken;
thread_local Footprint chain_so_far;
thread_local bool in_chain = false;  ///< was the launch before this one part of a chain?

/// Blocks that no launch uses: making their stacks costs more than running a small kernel.
class Pool {
 public:
  std::unique_ptr<Block> take(int threads) {
    {
      const std::lock_guard lock(mutex_);
      const auto it = std::find_if(free_.begin(), free_.end(),
                                   [&](const auto& b) { return b->threads() == threads; });
      if (it != free_.end()) {
        std::unique_ptr<Block> block = std::move(*it);
        free_.erase(it);
        return block;
      }
    }
    return std::make_unique<Block>(threads);
  }
  void give_back(std::unique_ptr<Block> block) {
    const std::lock_guard lock(mutex_);
    if (free_.size() < 8) free_.push_back(std::move(block));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> free_;
};

Pool& pool() {
  static Pool the_pool;
  return the_pool;
}

}  // namespace

std::string text(const char* format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string describe(const Where& where) {
  const char* slash = std::strrchr(where.file_name(), '/');
  return text("%s:%u", slash ? slash + 1 : where.file_name(), where.line());
}

std::string kernel_name(const std::type_info* kernel) {
  if (kernel == nullptr) return "without a name";
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> demangled(
      abi::__cxa_demangle(kernel->name(), nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? demangled.get() : kernel->name();
  for (const std::string_view prefix : {"qattn::", "kernels::", "isa::", "emulated_target::"}) {
    for (std::size_t at; (at = name.find(prefix)) != std::string::npos;) {
      name.erase(at, prefix.size());
    }
  }
  return name;
}

std::string check_target(const Options& o) {
  const int code = o.code_architecture > 0 ? o.code_architecture : o.architecture;
  const auto kernel = [&] { return "kernel " + kernel_name(o.kernel); };
  if (!isa::runs_on(o.target, isa::gpu_of(code))) {
    return kernel() + " is for " + name(o.target) + ", not for " + name(isa::Target{code});
  }
  if (o.cluster > 1 && !exists(Word::cluster_sync, o.target)) {
    return kernel() + " is launched in clusters, which " + name(o.target) + " has not";
  }
  return {};
}

Options& options() {
  static Options the_options;
  return the_options;
}

double Stats::warp_instructions(Pipe which) const {
  double sum = 0;
  for_each_word([&](Word word) {
    if (pipe(word) == which) sum += warp_instructions(word);
  });
  return sum;
}

Stats& Stats::operator+=(const Stats& other) {
  for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] += other.lanes[i];
  shared_read += other.shared_read;
  shared_written += other.shared_written;
  global_read += other.global_read;
  global_written += other.global_written;
  bulk_bytes += other.bulk_bytes;
  matrix_rows += other.matrix_rows;
  matrix_waves += other.matrix_waves;
  tensor_macs += other.tensor_macs;
  tensor_macs_16bit += other.tensor_macs_16bit;
  switches += other.switches;
  blocks += other.blocks;
  warp_lanes = other.warp_lanes;
  return *this;
}

std::string Stats::report() const {
  const auto number = [](std::uint64_t n) { return static_cast<unsigned long long>(n); };
  std::string lines;
  for_each_word([&](Word word) {
    const double n = warp_instructions(word);
    if (n > 0) lines += text("%-28s %14.1f warp instructions\n", name(word), n);
  });
  lines +=
      text("shared memory: %llu bytes read, %llu written; %llu matrices in %llu waves\n",
           number(shared_read), number(shared_written), number(matrix_rows), number(matrix_waves));
  lines += text("global memory: %llu bytes read, %llu written; %llu by bulk copies and TMA\n",
                number(global_read), number(global_written), number(bulk_bytes));
  return lines + text(
                     "tensor: %llu multiply-accumulates, %llu of 16 bits; "
                     "%llu switches in %llu blocks\n",
                     number(tensor_macs), number(tensor_macs_16bit), number(switches),
                     number(blocks));
}

const Stats& last_stats() { return latest; }
Stats take_stats() { return std::exchange(untaken, {}); }

Stats run(isa::Index3 grid, int threads, int shared_bytes, const Options& options,
          const std::function<void()>& body, Chain chain) {
  const isa::Gpu gpu = isa::gpu_of(options.architecture);
  const int lanes = options.warp_lanes_here();
  if (threads <= 0 || threads % lanes || threads > 1024 || shared_bytes < 0) {
    throw Error(text("launch of %d threads with %d bytes of shared memory", threads, shared_bytes));
  }
  if ((lanes != 32 && lanes != 64) || lanes > gpu.wave) {
    throw Error(text("launch in warps of %d lanes; %s has waves of %d", lanes, gpu.name().c_str(),
                     gpu.wave));
  }
  if (shared_bytes > gpu.shared_bytes) {
    throw Error(text("launch with %d bytes of shared memory a block; %s has %d", shared_bytes,
                     gpu.name().c_str(), gpu.shared_bytes));
  }
  if (options.cluster < 1 || grid.x % options.cluster != 0) {
    throw Error(text("grid of %d blocks: no multiple of clusters of %d", grid.x, options.cluster));
  }
  const std::int64_t blocks = std::int64_t{grid.x} * grid.y * grid.z;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string error;
  Stats total;
  if (follows(chain) && !in_chain) {
    throw Error("starts early behind a kernel that is not of a chain");
  }
  in_chain = chain != Chain::none;
  if (!follows(chain)) chain_so_far.clear();
  const Footprint& earlier = chain_so_far;  // of this thread, not of the workers
  Footprint touched;
  const auto work = [&] {
    std::vector<std::unique_ptr<Block>> held;
    std::vector<Block*> cluster;
    for (int i = 0; i < options.cluster; ++i) {
      held.push_back(pool().take(threads));
      cluster.push_back(held.back().get());
      cluster.back()->prepare(static_cast<std::uint32_t>(shared_bytes), options);
      cluster.back()->prepare_chain(chain, &earlier);
    }
    try {
      for (std::int64_t i; !failed && (i = next.fetch_add(options.cluster)) < blocks;) {
        const auto at = [&](std::int64_t n) { return static_cast<int>(n); };
        Block::run(cluster, {at(i % grid.x), at(i / grid.x % grid.y), at(i / grid.x / grid.y)},
                   {grid.x, grid.y, grid.z}, body);
      }
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex);
      failed = true;
      if (error.empty()) error = e.what();
    }
    const std::lock_guard lock(mutex);
    for (std::unique_ptr<Block>& block : held) {
      total += block->stats;
      touched.add(block->touched());
      pool().give_back(std::move(block));
    }
  };
  if (options.workers <= 1) {
    work();
  } else {
    std::vector<std::thread> workers;
    for (int i = 0; i < options.workers; ++i) workers.emplace_back(work);
    for (std::thread& w : workers) w.join();
  }
  latest = total;
  untaken += total;
  chain_so_far.add(touched);
  if (!error.empty()) throw Error(error);
  return total;
}

}  // namespace qattn::emu
