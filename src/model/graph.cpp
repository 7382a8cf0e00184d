// CUDA graphs: a sequence of kernels that is recorded once and started at a stroke. By libtorch's own class, whose recording takes memory from a pool of its own;
// its functions are looked up by name, since the header needs CUDA's.

#include <ATen/core/CachingHostAllocator.h>

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <utility>

#include "allocator.hpp"
#include "fused/context.hpp"
#include "fused/guarded.hpp"

namespace {

using Pool = c10::MempoolId_t;

// at::cuda::CUDAGraph, of which only the functions' names are known here. Its size is 200 bytes in libtorch 2.11.
struct alignas(64) Object {
  char object[4096];
};

struct Functions {
  void (*construct)(Object*, bool);
  void (*destruct)(Object*);
  void (*begin)(Object*, Pool, int);
  void (*end)(Object*);
  void (*replay)(Object*);
  Pool (*pool)();
  std::atomic<GpuAllocator*>* allocator;
  bool all = true;
};

const Functions& functions() {
  static const Functions functions = [] {
    Functions of{};
    of.all = true;
    void* const process = dlopen(nullptr, RTLD_NOW);
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(process, name));
      of.all = of.all && function;
    };
    find(of.construct, "_ZN2at4cuda9CUDAGraphC1Eb");
    find(of.destruct, "_ZN2at4cuda9CUDAGraphD1Ev");
    find(of.begin, "_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode");
    find(of.end, "_ZN2at4cuda9CUDAGraph11capture_endEv");
    find(of.replay, "_ZN2at4cuda9CUDAGraph6replayEv");
    find(of.pool, "_ZN2at4cuda17graph_pool_handleEv");
    find(of.allocator, "_ZN3c104cuda20CUDACachingAllocator9allocatorE");
    return of;
  }();
  return functions;
}

constexpr int THREAD_LOCAL = 1;  // cudaStreamCaptureModeThreadLocal: other threads go on allocating

// Threads record and free one at a time: libtorch keeps the graphs of each device's generator in a set without a lock.
std::recursive_mutex& one_at_a_time() {
  static std::recursive_mutex mutex;
  return mutex;
}

struct Graph {
  Object object;
  Pool pool;
  int64_t device;
  // While it is recorded. libtorch records the stream of the device that is current.
  std::unique_lock<std::recursive_mutex> alone;
  std::optional<DeviceContext> context;
};

// Ends what a recording that failed has left at work in libtorch's allocators, which otherwise take memory for it and free less for as long as the process lives. An
// error says that libtorch has ended it.
void abandon(const Graph& graph) {
  if (!KNOWS_ALLOCATOR) return;
  const auto device = static_cast<c10::DeviceIndex>(graph.device);
  auto* const allocator = functions().allocator->load();
  std::free(guarded([&] {
    allocator->endAllocateToPool(device, graph.pool);
    allocator->releasePool(device, graph.pool);
  }));
  std::free(guarded([&] {
    auto* const host = at::getHostAllocator(at::kCUDA);
    if (!host) return;
    host->end_allocate_to_pool(graph.pool);
    host->release_pool(graph.pool);
  }));
}

}  // namespace

extern "C" {

bool rollflow_graphs() { return functions().all; }

// A pool of memory for graphs that are replayed one at a time, in two numbers. libtorch takes none whose graphs are all gone.
void rollflow_graph_pool(uint64_t* pool) {
  const Pool made = functions().pool();
  pool[0] = made.first, pool[1] = made.second;
}

// Records what this thread asks of its stream of a device, which is not the default one, until the end.
char* rollflow_graph_begin(const uint64_t* pool, int64_t device, Graph** graph) {
  return guarded([&] {
    auto made = std::make_unique<Graph>();
    made->pool = {pool[0], pool[1]};
    made->device = device;
    made->alone = std::unique_lock<std::recursive_mutex>(one_at_a_time());
    made->context.emplace(device);
    functions().construct(&made->object, false);
    *graph = made.release();
    try {
      functions().begin(&(*graph)->object, (*graph)->pool, THREAD_LOCAL);
    } catch (...) {
      abandon(**graph);
      (*graph)->context.reset(), (*graph)->alone.unlock();
      throw;
    }
  });
}

char* rollflow_graph_end(Graph* graph) {
  char* const problem = guarded([&] { functions().end(&graph->object); });
  if (problem) abandon(*graph);
  graph->context.reset(), graph->alone.unlock();
  return problem;
}

char* rollflow_graph_replay(Graph* graph) {
  return guarded([&] { functions().replay(&graph->object); });
}

// Gives memory that no tensor has any more back to the devices' driver. libtorch does not while one records.
char* rollflow_memory_give_back() {
  const std::lock_guard<std::recursive_mutex> lock(one_at_a_time());
  return guarded([&] { c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache(); });
}

void rollflow_graph_free(Graph* graph) {
  const std::lock_guard<std::recursive_mutex> lock(one_at_a_time());
  functions().destruct(&graph->object);
  delete graph;
}
}
