// Bulk copies and TMA: loads end at mbarriers in any order, stores in groups of a lane.
#pragma once

#include <vector>

#include "isa/emu/units/mbarriers.hpp"
#include "isa/emu/units/unit.hpp"

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

class BulkCopies final : public AsyncUnit {
 public:
  BulkCopies(Block& block, Mbarriers& mbarriers) : AsyncUnit(block), mbarriers_(mbarriers) {}
  void reset() override;
  std::size_t unordered() const override { return loads_.size(); }
  void complete(std::size_t i) override;
  std::string check_end() override;

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
  static void check_corner(const TensorMap& map, const int* corner, bool store, const Where& where);
  void issue_load(Transfer load, const char* what);
  void end_load(const Transfer& load);
  void issue_store(Transfer store, const char* what);
  void read_store(Store& store);
  void write_store(Store& store);
  template <class Visit>
  static void visit_chunks(const Transfer& transfer, Visit visit);

  Groups<Store>& my_stores() { return stores_[static_cast<std::size_t>(current_lane->thread)]; }

  Mbarriers& mbarriers_;
  std::vector<Transfer> loads_;
  std::vector<Groups<Store>> stores_;
};

}  // namespace qattn::emu
