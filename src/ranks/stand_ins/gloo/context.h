// Replaces a header of Gloo that libtorch does not ship: ProcessGroupGloo.hpp holds pointers to this type and calls one function.
#pragma once
#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
} // namespace gloo
