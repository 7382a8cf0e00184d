// Groups for tensors of a GPU, over torch's ProcessGroupNCCL. A shared object of its own (scripts/nccl.sh), since it needs libtorch's CUDA half.

#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "device.hpp"

#include <chrono>
#include <cstdlib>

extern "C" c10::intrusive_ptr<c10d::Backend> rollflow_device_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, const char*) {
  // Failures are noticed and reported by the ranks themselves: torch's own watch would end the process.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 0);
  setenv("TORCH_NCCL_ENABLE_MONITORING", "0", 0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  // The waiting thread has a deadline of its own (group.cpp).
  options->timeout = std::chrono::hours(24 * 365);
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), rank, size, std::move(options));
}
