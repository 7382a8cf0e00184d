#pragma once

#include <ATen/ATen.h>

#include <cstdint>

// Added to an address, it is one that faults when the host reads it.
constexpr uintptr_t AWAY = uintptr_t{1} << 62;

// The numbers of a tensor of the stand-in, as a tensor of the host that owns nothing.
at::Tensor at_home(const at::Tensor& tensor);

// The device whose context this thread has; −1 until the runtime gives it one. The driver's functions need one.
int context();

// The stream whose native handle this is.
c10::Stream stream_of_handle(void* handle);
