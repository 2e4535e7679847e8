// Options, counters, and launching a grid over worker threads.
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "isa/isa.hpp"
// The block after the words.
#include "isa/emu/block/block.hpp"
#include "isa/emu/units/async_engine.hpp"
#include "isa/emu/units/wgmma.hpp"

namespace qattn::emu {
namespace {

struct WordInfo {
  Word word;
  const char* name;
  Pipe pipe;
};

constexpr WordInfo kWords[] = {
    {Word::none, "none", Pipe::control},
    {Word::load_shared, "load_shared", Pipe::memory},
    {Word::store_shared, "store_shared", Pipe::memory},
    {Word::load_global, "load_global", Pipe::memory},
    {Word::store_global, "store_global", Pipe::memory},
    {Word::atomic_shared, "atomic_shared", Pipe::memory},
    {Word::atomic_global, "atomic_global", Pipe::memory},
    {Word::sync_threads, "sync_threads", Pipe::control},
    {Word::barrier_sync, "barrier_sync", Pipe::control},
    {Word::barrier_sync_anywhere, "barrier_sync_anywhere", Pipe::control},
    {Word::barrier_arrive, "barrier_arrive", Pipe::control},
    {Word::sync_warp, "sync_warp", Pipe::control},
    {Word::shuffle, "shuffle", Pipe::memory},
    {Word::warp, "warp", Pipe::control},
    {Word::vote, "vote", Pipe::control},
    {Word::copy_async, "copy_async", Pipe::memory},
    {Word::copy_async_commit, "copy_async_commit", Pipe::control},
    {Word::copy_async_wait, "copy_async_wait", Pipe::control},
    {Word::load_matrix, "load_matrix", Pipe::memory},
    {Word::store_matrix, "store_matrix", Pipe::memory},
    {Word::mma_f16, "mma f16", Pipe::tensor},
    {Word::mma_bf16, "mma bf16", Pipe::tensor},
    {Word::mma_int8, "mma int8", Pipe::tensor},
    {Word::mma_fp8, "mma fp8", Pipe::tensor},
    {Word::exp2, "exp2", Pipe::special},
    {Word::log2, "log2", Pipe::special},
    {Word::reciprocal, "reciprocal", Pipe::special},
    {Word::convert, "convert", Pipe::convert},
    {Word::byte_permute, "byte_permute", Pipe::integer},
    {Word::lop3, "lop3", Pipe::integer},
    {Word::dot4, "dot4", Pipe::integer},
    {Word::min_max, "min, max", Pipe::integer},
    {Word::fma, "fma", Pipe::fma},
    {Word::mbarrier_init, "mbarrier_init", Pipe::control},
    {Word::mbarrier_arrive, "mbarrier_arrive", Pipe::control},
    {Word::mbarrier_wait, "mbarrier_wait", Pipe::control},
    {Word::fence_async_proxy, "fence_async_proxy", Pipe::control},
    {Word::bulk_load, "bulk_load", Pipe::memory},
    {Word::bulk_store, "bulk_store", Pipe::memory},
    {Word::tma_load, "tma_load", Pipe::memory},
    {Word::tma_store, "tma_store", Pipe::memory},
    {Word::bulk_commit, "bulk_commit", Pipe::control},
    {Word::bulk_wait, "bulk_wait", Pipe::control},
    {Word::wgmma_fence, "wgmma_fence", Pipe::control},
    {Word::wgmma, "wgmma", Pipe::tensor},
    {Word::wgmma_commit, "wgmma_commit", Pipe::control},
    {Word::wgmma_wait, "wgmma_wait", Pipe::control},
    {Word::registers, "registers_increase/decrease", Pipe::control},
    {Word::elect, "elect", Pipe::control},
    {Word::cluster_sync, "cluster_sync", Pipe::control},
};

constexpr bool in_order() {
  std::size_t i = 0;
  for (const WordInfo& info : kWords) {
    if (static_cast<std::size_t>(info.word) != i++) return false;
  }
  return i == static_cast<std::size_t>(Word::count);
}
static_assert(in_order(), "one row per Word, in its order");

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

Options& options() {
  static Options the_options;
  return the_options;
}

const char* name(Word word) { return kWords[static_cast<std::size_t>(word)].name; }
Pipe pipe(Word word) { return kWords[static_cast<std::size_t>(word)].pipe; }

double Stats::warp_instructions(Pipe which) const {
  double sum = 0;
  for (const WordInfo& info : kWords) {
    if (info.pipe == which) sum += warp_instructions(info.word);
  }
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
  return *this;
}

std::string Stats::report() const {
  const auto number = [](std::uint64_t n) { return static_cast<unsigned long long>(n); };
  std::string lines;
  for (const WordInfo& info : kWords) {
    const double n = warp_instructions(info.word);
    if (n > 0) lines += text("%-28s %14.1f warp instructions\n", info.name, n);
  }
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
  if (threads <= 0 || threads % 32 || threads > 1024 || shared_bytes < 0) {
    throw Error(text("launch of %d threads with %d bytes of shared memory", threads, shared_bytes));
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
    std::unique_ptr<Block> block = pool().take(threads);
    block->prepare(static_cast<std::uint32_t>(shared_bytes), options);
    block->prepare_chain(chain, &earlier);
    try {
      for (std::int64_t i; !failed && (i = next.fetch_add(1)) < blocks;) {
        const auto at = [&](std::int64_t n) { return static_cast<int>(n); };
        block->run({at(i % grid.x), at(i / grid.x % grid.y), at(i / grid.x / grid.y)},
                   {grid.x, grid.y, grid.z}, body);
      }
    } catch (const std::exception& e) {
      const std::lock_guard lock(mutex);
      failed = true;
      if (error.empty()) error = e.what();
    }
    const std::lock_guard lock(mutex);
    total += block->stats;
    touched.add(block->touched());
    pool().give_back(std::move(block));
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
