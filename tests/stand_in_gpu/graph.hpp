// Recording of a GPU's work (at::cuda::CUDAGraph): while a thread records, what it asks for is kept, and run when it is replayed.

#pragma once

#include <c10/core/Allocator.h>

#include <functional>

namespace graph {

// Whether this thread records. The host may then neither wait nor send.
bool records();

// An error of a thread that records what can't be recorded, whose recording then does not end.
void refuse(const char* what);

// What is allocated no longer goes to this pool, and a graph of it is gone: for what libtorch's allocator is asked.
void end_allocating(c10::MempoolId_t pool);
void release(c10::MempoolId_t pool);

// Keeps work for the replays of the graph that is recorded.
void keep(std::function<void()> work);

// Memory that was taken while this thread records belongs to the graph.
void adopt(const void* memory);

// Whether the graph that is recorded has this memory. What other memory holds only replays change.
bool owns(const void* memory);

// Whether a graph has this memory, which it will then give back itself.
bool adopted(const void* memory, std::function<void()> give_back);

}  // namespace graph
