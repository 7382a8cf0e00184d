// Memory of a GPU that other processes can map (CUDA IPC). libtorch's own allocator hands out parts of larger blocks, and blocks that no other
// process can map, so that this memory comes from the driver.

#include <ATen/ATen.h>
#include <dlfcn.h>

#include <cstdlib>

#include "fused/context.hpp"
#include "fused/guarded.hpp"

namespace {

// The driver's functions, by their documented signatures.
struct Driver {
  int (*allocate)(uint64_t*, size_t);
  int (*release)(uint64_t);
  int (*handle)(void*, uint64_t);
  int (*device)(int*, int);
  int (*uuid)(void*, int);
};

const Driver& driver() {
  static const Driver driver = [] {
    Driver of{};
    void *process = dlopen(nullptr, RTLD_NOW), *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    const auto find = [&](auto& function, const char* name) {
      void* found = dlsym(process, name);
      if (!found && library) found = dlsym(library, name);
      TORCH_CHECK(found, name, " is in no library here");
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
    };
    find(of.allocate, "cuMemAlloc_v2");
    find(of.release, "cuMemFree_v2");
    find(of.handle, "cuIpcGetMemHandle");
    find(of.device, "cuDeviceGet");
    find(of.uuid, "cuDeviceGetUuid_v2");
    return of;
  }();
  return driver;
}

void check(int code, const char* what, int64_t device) { TORCH_CHECK(code == 0, what, " on cuda:", device, " failed with code ", code, " of the driver"); }

}  // namespace

// Bytes of a device as a tensor, its handle of 64 bytes and the device's UUID of 16.
extern "C" char* rollflow_shared_memory(at::Tensor** out, int64_t device, int64_t bytes, char* handle, char* uuid) {
  return guarded([&] {
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    const DeviceContext context(device);
    uint64_t memory = 0;
    int number = 0;
    check(driver().allocate(&memory, static_cast<size_t>(bytes)), "taking memory", device);
    // By whichever thread is the last one to have it.
    const auto free = [device](void* of) {
      std::free(guarded([&] {
        const DeviceContext context(device);
        driver().release(reinterpret_cast<uint64_t>(of));
      }));
    };
    at::Tensor tensor = at::from_blob(reinterpret_cast<void*>(memory), {bytes}, free, options, options.device());
    check(driver().handle(handle, memory), "sharing memory", device);
    check(driver().device(&number, static_cast<int>(device)), "finding the device", device);
    check(driver().uuid(uuid, number), "reading the device's UUID", device);
    *out = new at::Tensor(std::move(tensor));
  });
}
