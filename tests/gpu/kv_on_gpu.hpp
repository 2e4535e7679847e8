// What the programs around GpuKvCache on a GPU share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "qattn/qattn.hpp"

namespace qattn::test {

[[noreturn]] inline void fail(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}
inline void need(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(error));
}
inline void need(const Status& status, const char* what) {
  if (!status.ok()) fail(std::string(what) + ": " + status.message());
}

inline constexpr Device gpu{DeviceType::cuda, 0};

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    need(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) { put(from); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void put(const std::vector<T>& from) {
    need(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "put");
  }
  std::vector<T> get() const {
    std::vector<T> to(count_);
    need(cudaMemcpy(to.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "get");
    return to;
  }
  T* data() const { return data_; }
  TensorView view(Format format, std::initializer_list<std::int64_t> shape,
                  std::int64_t offset = 0) const {
    TensorView v = TensorView::dense(data_ + offset, format, shape);
    v.device = gpu;
    return v;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

inline constexpr std::int64_t most_steps = 1000;
/// kv_decode_on_gpu.cpp: these end the program where something is not as it should be. `k`: scales
/// of K; `steps`: replays of a captured step, at most most_steps.
void decode_on_gpu(Granularity k);
void decode_steps_on_gpu(std::int64_t steps);

}  // namespace qattn::test
