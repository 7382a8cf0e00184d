// The order of a GPU's work, as CUDA promises it, in vector clocks: work of one stream in turn, and work of two only where an event or the host's waiting lies in
// between. Work on memory that other work may still be writing or reading is an error, however it happens to run here.

#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace order {

// Memory, by the host's address of its beginning, in the stream that is current.
void allocated(const void* memory, std::size_t bytes, c10::Stream stream);
void freed(const void* memory);

// The allocator gives what it keeps back.
void emptied();

// Work in a stream on memory, by any address in it. Counts as one kernel with `begin`.
void begin(c10::Stream stream);
void reads(const void* memory, c10::Stream stream);
void writes(const void* memory, c10::Stream stream);

// Memory is used in a stream until its end.
void used(const void* memory, c10::Stream stream);

void* recorded(c10::Stream stream);
void waited_for(void* event, c10::Stream stream);
void destroyed(void* event);

// A copy between two devices, which waits for both.
void meet(c10::Stream one, c10::Stream other);

// The host has waited for a stream.
void host_waits(c10::Stream stream);

// An error of memory that was freed too early is the next work's.
void check();

}  // namespace order
