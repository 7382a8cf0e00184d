// What the launchers of our kernels have in common (launch.cpp).

#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "../guarded.hpp"
#include "args.h"

namespace gpu {

using at::Tensor;

// Compute capability, 90 for 9.0.
int generation(int64_t device);

// The definition FORMAT of a kernel.
inline std::string format(at::ScalarType kind) { return kind == at::kHalf ? "-DFORMAT=1" : "-DFORMAT=0"; }

inline std::string define(const char* name, int64_t value) { return std::string("-D") + name + "=" + std::to_string(value); }

struct Grid {
  int64_t x, y = 1, z = 1;
};

// Starts a kernel on the stream of a tensor's device. `args`: its structure.
void launch_with(const Tensor& on, const char* name, const std::vector<std::string>& definitions, Grid grid, int64_t threads, void* args);

// Loads a kernel that a later recorded step may start: the driver loads none while a graph is recorded.
void prepare(const Tensor& on, const char* name, const std::vector<std::string>& definitions);

template <typename Args>
void launch(const Tensor& on, const char* name, const std::vector<std::string>& definitions, Grid grid, int64_t threads, Args args) {
  launch_with(on, name, definitions, grid, threads, &args);
}

// Blocks of kernels that go through their rows in a loop.
constexpr int64_t BLOCKS = 4096;

inline u16* halves(const Tensor& of) { return reinterpret_cast<u16*>(of.data_ptr()); }
inline const float* floats(const Tensor& of) { return reinterpret_cast<const float*>(of.data_ptr()); }
inline float* to_floats(const Tensor& of) { return reinterpret_cast<float*>(of.data_ptr()); }
inline const i64* whole(const Tensor& of) { return reinterpret_cast<const i64*>(of.data_ptr()); }

inline void check(const char* what, const Tensor& of, const Tensor& like, at::ScalarType kind) {
  TORCH_CHECK(of.device() == like.device() && of.scalar_type() == kind && of.is_contiguous(), what, ": contiguous ", kind, " on ", like.device(), ", not ",
              of.scalar_type(), " on ", of.device());
}

}  // namespace gpu
