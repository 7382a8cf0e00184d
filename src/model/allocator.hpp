// libtorch's allocator of a GPU's memory (c10::cuda::CUDACachingAllocator::CUDAAllocator), whose header needs CUDA's: its virtual functions in their order, up to the last
// one that is called here or replaced by the GPU's stand-in of tests.

#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/headeronly/version.h>

// The order is that of libtorch 2.11.
constexpr bool KNOWS_ALLOCATOR = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11;

struct GpuAllocator : c10::DeviceAllocator {
  // Not called here, so without their arguments.
  virtual void raw_alloc() {}
  virtual void raw_alloc_with_stream() {}
  virtual void raw_delete() {}
  virtual void init() {}
  virtual void getMemoryFraction() {}
  virtual void setMemoryFraction() {}
  virtual void getExpandableSegmentSizes() {}
  virtual void enable() {}
  virtual void isEnabled() {}
  virtual void cacheInfo() {}
  virtual void getBaseAllocation() {}
  virtual void record_cuda_stream() {}
  virtual void snapshot() {}
  virtual void beginAllocateToPool() {}
  // What is allocated no longer goes to the memory of graphs that are recorded.
  virtual void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) = 0;
  // A graph of this memory is gone.
  virtual void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) = 0;
};
