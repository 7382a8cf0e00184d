// What tch lacks of libtorch.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <c10/core/AllocatorConfig.h>
#include <omp.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "guarded.hpp"

namespace {

using at::Tensor;

std::vector<Tensor> list(Tensor** tensors, int64_t count) {
  std::vector<Tensor> out;
  for (int64_t i = 0; i < count; i++) out.push_back(*tensors[i]);
  return out;
}

}  // namespace

extern "C" {

// What libtorch should do on a GPU. cuDNN's attention builds a plan for every new shape, for 0.1 to 1 s each, and shapes of rollouts are new nearly every time;
// sums of 16-bit products that are split between blocks would be rounded to 16 bits; and memory in pieces of fixed sizes would fill with gaps that those shapes leave.
// The latter is the user's choice if a variable makes it. Gives back what is set then.
char* rollflow_gpu_defaults(bool* cudnn_attention, bool* rounded_sums, bool* fixed_pieces) {
  return guarded([&] {
    auto& context = at::globalContext();
    context.setSDPUseCuDNN(false);
    context.setAllowBF16ReductionCuBLAS(false);
    context.setAllowFP16ReductionCuBLAS(false);
    *cudnn_attention = context.userEnabledCuDNNSDP();
    constexpr auto rounded = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
    *rounded_sums = context.allowBF16ReductionCuBLAS() == rounded || context.allowFP16ReductionCuBLAS() == rounded;
    using c10::CachingAllocator::AcceleratorAllocatorConfig;
    // Once: it sets others to their defaults.
    static std::once_flag grows;
    std::call_once(grows, [] {
      if (!std::getenv("PYTORCH_ALLOC_CONF") && !std::getenv("PYTORCH_CUDA_ALLOC_CONF"))
        AcceleratorAllocatorConfig::instance().parseArgs("expandable_segments:True");
    });
    *fixed_pieces = !AcceleratorAllocatorConfig::use_expandable_segments();
  });
}

// Sets how many threads share an operation that the caller starts. When a thread first computes in a library, libtorch or this one, the library replaces the
// thread's number by the one that any thread set last. Both do so here, before the number is set.
void rollflow_use_threads(int threads) {
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  at::set_num_threads(threads);
}

// Ends the threads that OpenMP lent the calling thread; its next operation starts others.
void rollflow_release_helpers() { omp_pause_resource(omp_pause_soft, omp_get_initial_device()); }

// Copies tensors to others of their shapes, all at a time on a GPU.
char* rollflow_copy_all(Tensor** to, Tensor** from, int64_t count) {
  return guarded([&] { at::_foreach_copy_(list(to, count), list(from, count)); });
}

// One update of `count` tensors. `maxima` is null without amsgrad, `divisor` where gradients are taken as they are.
char* rollflow_adamw(Tensor** params, Tensor** grads, Tensor** means, Tensor** squares, Tensor** maxima, int64_t count, Tensor* step,
                     Tensor* divisor, double lr, double beta1, double beta2, double weight_decay, double eps) {
  return guarded([&] {
    const std::vector<Tensor> steps(count, *step);
    at::_fused_adamw_(list(params, count), list(grads, count), list(means, count), list(squares, count),
                      maxima ? list(maxima, count) : std::vector<Tensor>{}, steps, lr, beta1, beta2, weight_decay, eps, maxima != nullptr,
                      false, divisor ? std::optional<Tensor>(*divisor) : std::nullopt);
  });
}
}
