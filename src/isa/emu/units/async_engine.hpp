// The hardware that copies beside the lanes: mbarriers, bulk copies and TMA.
#pragma once

#include <map>
#include <vector>

#include "isa/emu/block/block.hpp"

namespace qattn::isa {
enum class Swizzle;
}

namespace qattn::emu {

/// The place of a byte under a swizzle: address bits 4 and up, XOR bits 7 and up.
std::uint32_t swizzled(std::uint32_t address, isa::Swizzle swizzle);
/// Bytes of a row that a swizzle spans; 16 without one.
int swizzle_span(isa::Swizzle swizzle);

/// A tensor in global memory and the box of it that one instruction copies; dimension 0 is dense.
struct TensorMap {
  char* address = nullptr;
  int element_bytes = 1, rank = 1;
  std::uint64_t sizes[5]{}, strides[5]{};  ///< elements; bytes
  std::uint32_t box[5]{};
  int swizzle = 0;
  std::uint32_t box_bytes() const;
};

class AsyncEngine {
 public:
  explicit AsyncEngine(Block& block) : block_(block) {}
  void reset();
  /// Completes one pending load; false: there is none.
  bool advance();
  /// What the kernel's end must not leave behind; empty: nothing.
  std::string check_end();

  void init(std::uint32_t address, int arrivals, const Where& where);
  void fence_init();
  void arrive(std::uint32_t address, const Where& where);
  void expect(std::uint32_t address, std::uint32_t bytes, const Where& where);
  void wait(std::uint32_t address, std::uint32_t parity, const Where& where);
  bool test(std::uint32_t address, std::uint32_t parity, const Where& where);
  std::string describe_mbarrier(std::uint32_t address, std::uint32_t parity);

  void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t mbarrier,
                 const Where& where);
  void tma_load(std::uint32_t to, const TensorMap& map, const int* corner, std::uint32_t mbarrier,
                const Where& where);
  void bulk_store(void* to, std::uint32_t from, std::uint32_t bytes, const Where& where);
  void tma_store(const TensorMap& map, const int* corner, std::uint32_t from, const Where& where);
  void commit_stores();
  /// At most `groups` of this thread's store groups are still in flight, or still reading.
  void wait_stores(int groups, bool reads_only);

 private:
  struct Mbarrier {
    int index = 0, count = 0, pending = 0;
    std::int64_t missing_bytes = 0;
    std::uint32_t phase = 0;
    int initialiser = 0;
    bool fenced = false;
    std::vector<Lane*> waiting;
    std::vector<int> arrived;  ///< threads, in this phase
    Clock arriving, completed;
  };
  /// A box of a tensor, or plain bytes (rank 0).
  struct Transfer {
    TensorMap map;
    int corner[5]{};
    std::uint32_t shared = 0, bytes = 0;
    std::uint32_t mbarrier = 0;
    int agent = 0;
    std::uint32_t time = 0;
    bool waited = false;  ///< had the lane that issued it, for the kernels before this one?
    Where where;
  };
  struct Store {
    Transfer transfer;
    std::vector<std::uint8_t> data;  ///< what was read, in the order of shared addresses
    bool read = false, written = false;
  };
  struct StoreGroups {
    std::vector<Store> stores;  ///< committed groups first, then the open one
    std::vector<int> groups;
  };

  Mbarrier& find(std::uint32_t address, const char* what, const Where& where);
  void complete_phase(std::uint32_t address, Mbarrier& barrier, const Where& where);
  static void check_corner(const TensorMap& map, const int* corner, bool store, const Where& where);
  void issue_load(Transfer load, const char* what);
  void complete_load(const Transfer& load);
  void issue_store(Transfer store, const char* what);
  void read_store(Store& store);
  void write_store(Store& store);
  template <class Visit>
  static void visit_chunks(const Transfer& transfer, Visit visit);

  Block& block_;
  std::map<std::uint32_t, Mbarrier> mbarriers_;
  std::vector<Transfer> loads_;
  std::vector<StoreGroups> stores_;
};

}  // namespace qattn::emu
