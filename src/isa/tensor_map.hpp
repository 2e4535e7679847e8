// Tensor maps: what TMA needs to know of a tensor in global memory, encoded for the GPU or for the
// emulator by the same call.
#pragma once

#include <cstdint>
#include <string>

#include "isa/isa.hpp"

#if defined(__CUDACC__)
#include <cuda.h>
#include <cuda_runtime.h>
#endif

namespace qattn::isa {

/// Dimension 0 is dense; strides[i] is that of dimension i, strides[0] is ignored.
struct TensorShape {
  const void* address = nullptr;
  int element_bytes = 1;            ///< 1, 2 or 4
  int rank = 2;                     ///< 2 to 5
  std::uint64_t sizes[5]{};         ///< elements
  std::uint64_t stride_bytes[5]{};  ///< multiples of 16
  std::uint32_t box[5]{};           ///< elements that one copy moves, 1 to 256 each
  Swizzle swizzle = Swizzle::none;
};

/// The swizzle of rows of 32, 64 or 128 bytes.
constexpr Swizzle swizzle_of(int row_bytes) {
  return row_bytes == 32   ? Swizzle::bytes32
         : row_bytes == 64 ? Swizzle::bytes64
                           : Swizzle::bytes128;
}

/// Why there can be no map of this tensor; empty: there can. The limits are the driver's, and one
/// of ours: a swizzled row fills its span, so that a row's place does not depend on the hardware.
inline std::string check_tensor_shape(const TensorShape& t) {
  if (t.rank < 2 || t.rank > 5) return "tensor map: the rank is not 2 to 5";
  if (t.element_bytes != 1 && t.element_bytes != 2 && t.element_bytes != 4) {
    return "tensor map: elements of neither 1, 2 nor 4 bytes";
  }
  if (reinterpret_cast<std::uintptr_t>(t.address) % 16 != 0) {
    return "tensor map: the address is not a multiple of 16";
  }
  for (int i = 0; i < t.rank; ++i) {
    if (t.box[i] < 1 || t.box[i] > 256) return "tensor map: a box side is not 1 to 256";
    if (t.sizes[i] < 1 || t.sizes[i] > std::uint64_t{1} << 32) {
      return "tensor map: a size is not 1 to 2^32";
    }
    if (i > 0 && (t.stride_bytes[i] % 16 != 0 || t.stride_bytes[i] >= std::uint64_t{1} << 40)) {
      return "tensor map: a stride is no multiple of 16 below 2^40";
    }
  }
  const std::uint32_t row = t.box[0] * static_cast<std::uint32_t>(t.element_bytes);
  if (row % 16 != 0) return "tensor map: a box row is no multiple of 16 bytes";
  if (t.swizzle != Swizzle::none && row != 16u << static_cast<int>(t.swizzle)) {
    return "tensor map: a box row does not fill the swizzle's span";
  }
  return {};
}

inline namespace QATTN_TARGET {

#if defined(__CUDACC__)

/// Empty, or why not. The driver's function is looked up, so that nothing links against libcuda.
inline std::string make_tensor_map(const TensorShape& t, TensorMap& map) {
  if (std::string error = check_tensor_shape(t); !error.empty()) return error;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                         cudaEnableDefault, &found);
  if (e != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    return "tensor map: the driver has no cuTensorMapEncodeTiled";
  }
  const CUtensorMapDataType type = t.element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : t.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT32;
  constexpr CUtensorMapSwizzle swizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                             CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  const std::uint32_t every_element[5] = {1, 1, 1, 1, 1};
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, type, static_cast<std::uint32_t>(t.rank), const_cast<void*>(t.address),
      reinterpret_cast<const cuuint64_t*>(t.sizes),
      reinterpret_cast<const cuuint64_t*>(t.stride_bytes + 1), t.box, every_element,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzles[static_cast<int>(t.swizzle)],
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS
             ? std::string()
             : "tensor map: cuTensorMapEncodeTiled failed with " + std::to_string(result);
}

#else

inline std::string make_tensor_map(const TensorShape& t, TensorMap& map) {
  if (std::string error = check_tensor_shape(t); !error.empty()) return error;
  map = {};
  map.address = static_cast<char*>(const_cast<void*>(t.address));
  map.element_bytes = t.element_bytes;
  map.rank = t.rank;
  map.swizzle = static_cast<int>(t.swizzle);
  for (int i = 0; i < 5; ++i) {
    map.sizes[i] = t.sizes[i];
    map.strides[i] = t.stride_bytes[i];
    map.box[i] = t.box[i];
  }
  return {};
}

#endif

}  // namespace QATTN_TARGET
}  // namespace qattn::isa
