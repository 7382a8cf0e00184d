// The CUDA context of a thread, which the driver's functions need.

#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>

// While it lives, a device and its context are this thread's. libtorch's guard alone asks nothing of the CUDA runtime where the device is current already, which cuda:0
// is in a new thread without a context.
class DeviceContext {
 public:
  explicit DeviceContext(int64_t device) : guard(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))) {
    static const auto set = reinterpret_cast<int (*)(int)>(dlsym(dlopen(nullptr, RTLD_NOW), "cudaSetDevice"));
    TORCH_CHECK(set && set(static_cast<int>(device)) == 0, "the CUDA runtime has no context for cuda:", device);
  }

 private:
  const c10::DeviceGuard guard;
};
