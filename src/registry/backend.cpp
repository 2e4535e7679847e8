#include "core/backend.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

#include "core/guarded.hpp"
#include "kernels/attention/cpu/kernel.hpp"

namespace qattn {
namespace detail {
namespace {

Backend make_cpu_backend() {
  static const auto kernels = cpu::attention_kernels();
  Backend b;
  b.name = "cpu";
  b.kernels = kernels;
  b.host_memory = true;
  b.enter = [](int, int*) { return Status(); };
  b.leave = [](int) {};
  b.architecture = [] { return 0; };
  b.allocate = [](std::size_t bytes, Stream) -> Result<void*> {
    void* memory = std::aligned_alloc(64, (std::max<std::size_t>(bytes, 1) + 63) / 64 * 64);
    if (memory != nullptr) return memory;
    return Status(Code::out_of_memory,
                  "workspace: allocation of " + std::to_string(bytes) + " bytes failed");
  };
  b.release = [](void* memory, Stream) { std::free(memory); };
  b.take_errors = []() -> Result<std::uint32_t> { return 0u; };
  return b;
}

const Backend& cpu_backend() {
  static const Backend backend = make_cpu_backend();
  return backend;
}

std::atomic<const Backend*> front = nullptr;
std::atomic<const Backend*> cuda = nullptr;

constexpr const char* cuda_library = "libqattn_cuda.so";

/// The folder of the file that holds this code: libqattn.so, a Python extension or a program.
std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&cuda_library), &info) == 0 || !info.dli_fname) {
    return ".";
  }
  char* real = realpath(info.dli_fname, nullptr);
  const std::string path = real ? real : info.dli_fname;
  std::free(real);
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

Status refuse(std::string message) { return Status(Code::unsupported, std::move(message)); }

/// Never unloaded: plans hold pointers into it.
Result<const Backend*> open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return refuse(why ? why : path + ": cannot be loaded");  // dlerror() names the path itself
  }
  using Entry = const Backend* (*)(const char*);
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "qattn_backend"));
  if (entry == nullptr) return refuse(path + ": has no function qattn_backend");
  const Backend* backend = entry(backend_interface().c_str());
  if (backend == nullptr) return refuse(path + ": gives no backend");
  if (backend->refusal != nullptr) return refuse(path + ": " + backend->refusal);
  return backend;
}

Result<const Backend*> find_cuda() {
  if (const char* named = std::getenv("QATTN_CUDA_LIBRARY"); named != nullptr && *named != '\0') {
    Result<const Backend*> backend = open_library(named);
    if (backend.ok()) return backend;
    return refuse("QATTN_CUDA_LIBRARY: " + backend.status().message());
  }
  const std::string folder = own_folder(), beside = folder + "/" + cuda_library;
  if (access(beside.c_str(), F_OK) == 0) return open_library(beside);
  Result<const Backend*> found = open_library(cuda_library);
  if (found.ok()) return found;
  return refuse(std::string(cuda_library) + ": is neither in " + folder +
                " nor where the loader looks (" + found.status().message() +
                "); QATTN_CUDA_LIBRARY can name it");
}

constinit std::mutex loading;
constinit thread_local bool loads = false;  ///< does this thread hold it, not for fork()?

/// Held while a library is loaded. One that forks meanwhile does so with the lock.
struct Loading {
  const std::lock_guard<std::mutex> lock{loading};
  Loading() { loads = true; }
  ~Loading() { loads = false; }
  Loading(const Loading&) = delete;
  Loading& operator=(const Loading&) = delete;
};

/// A library that was not found is looked for again at the next call; a loaded one stays.
Result<const Backend*> load_cuda() {
  const Loading held;
  if (const Backend* loaded = cuda.load()) return loaded;
  Result<const Backend*> found = find_cuda();
  if (found.ok()) cuda = *found;
  return found;
}

}  // namespace

void hold_backends() {
  try {
    static_cast<void>(cpu_backend());
  } catch (const std::bad_alloc&) {  // then nobody has it yet, and the child makes its own
  }
  if (!loads) loading.lock();
}
void release_backends() {
  if (!loads) loading.unlock();
}

void use_backend(const Backend* backend) { front = backend; }
bool is_backend_replaced() { return front.load() != nullptr; }

Result<const Backend*> backend_of(Device device) {
  const Backend* first = front;
  if (first != nullptr && first->device == device.type) return first;
  if (device.type == DeviceType::cpu) return &cpu_backend();
  if (device.type != DeviceType::cuda) {
    return refuse(device_text(device) + ": there is no backend for such devices");
  }
  if (const Backend* loaded = cuda.load()) return loaded;
  return load_cuda();
}

Backends backends_for(DeviceType device) {
  Backends b;
  const auto add = [&b](const Backend* backend) {
    for (const Backend* known : b.list) {
      if (known == backend) return;
    }
    if (backend != nullptr) b.list.push_back(backend);
  };
  add(front);
  if (device != DeviceType::cpu) {
    const Result<const Backend*> own = backend_of({device, 0});
    if (own.ok()) {
      add(*own);
    } else {
      b.missing = own.status();
    }
  }
  add(&cpu_backend());
  add(cuda);
  return b;
}

Status HostCopy::take(const Backend& backend, TensorView& view, Stream stream) {
  const ByteRange range = byte_range(view);
  if (range.begin == range.end) return {};
  bytes_.resize(range.end - range.begin);
  if (Status s = backend.copy_to_host(bytes_.data(), reinterpret_cast<const void*>(range.begin),
                                      bytes_.size(), stream);
      !s.ok()) {
    return s;
  }
  view.data = bytes_.data() + (reinterpret_cast<std::uintptr_t>(view.data) - range.begin);
  return {};
}

}  // namespace detail

Status device_errors(Device device) {
  return guarded<Status>([&]() -> Status {
    if (Status s = check_device("device", device, 0); !s.ok()) return s;
    const Result<const detail::Backend*> backend = detail::backend_of(device);
    if (!backend.ok()) return backend.status();
    const detail::DeviceGuard guard(**backend, device);
    if (!guard.status().ok()) return guard.status();
    const Result<std::uint32_t> word = (*backend)->take_errors();
    if (!word.ok()) return word.status();
    if (*word == 0) return {};
    std::string what;
    for (const auto& [bit, text] :
         {std::pair{detail::error_length, "cu_seqlens or seqused held an entry out of range"},
          std::pair{detail::error_page, "page_table held an entry out of range"},
          std::pair{
              detail::error_cache,
              "a KV cache refused a slot (its status() says why, but of importance and mass)"}}) {
      if ((*word & bit) != 0) what += (what.empty() ? "" : ", ") + std::string(text);
    }
    if (what.empty()) what = "a kernel reported error " + std::to_string(*word);
    return Status(Code::invalid_argument,
                  device_text(device) + ": " + what +
                      "; the rows that depend on it are NaN (validate names the entry)");
  });
}

}  // namespace qattn
