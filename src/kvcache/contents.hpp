// The tensors of read().
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcache/data.hpp"
#include "qattn/tensor_view.hpp"

namespace qattn::kv {

/// k (Hkv, S, D), v (Hkv, S, Dv) f32 and tiers (Hkv, S) s32 in host memory, each if present.
class Contents {
 public:
  Contents(const detail::KvCacheData& cache, const TensorView& k, const TensorView& v,
           const TensorView& tiers, std::int64_t length)
      : cache_(cache), k_(k), v_(v), tiers_(tiers), length_(length) {}
  Status check() const;
  void clear() const;  ///< to what tokens read as that are not there
  void page(std::int64_t head, const Entry& e, const std::byte* page, const Sets& sets) const;

 private:
  const detail::KvCacheData& cache_;
  const TensorView &k_, &v_, &tiers_;
  std::int64_t length_;
};

}  // namespace qattn::kv
