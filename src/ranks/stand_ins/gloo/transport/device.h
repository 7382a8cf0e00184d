// Replaces a header of Gloo that libtorch does not ship: ProcessGroupGloo.hpp holds pointers to these types.
#pragma once

namespace gloo::transport {
class Device;
class UnboundBuffer;
} // namespace gloo::transport
