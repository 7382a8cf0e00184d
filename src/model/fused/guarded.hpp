// Entries for Rust: an exception becomes its text, which the caller frees.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

template <typename F>
char* guarded(F&& f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    return strdup(e.what());
  }
}

template <typename F>
char* guarded(at::Tensor** out, F&& f) {
  return guarded([&] { *out = new at::Tensor(f()); });
}
