// CUDA graphs: a sequence of kernels that is recorded once and started at a stroke. By libtorch's own class, whose recording takes memory from a pool of its own;
// its functions are looked up by name, since the header needs CUDA's.

#include <dlfcn.h>

#include <cstring>
#include <new>
#include <utility>

#include "fused/guarded.hpp"

namespace {

using Pool = std::pair<unsigned long long, unsigned long long>;

// at::cuda::CUDAGraph, of which only the functions' names are known here. Its size is 200 bytes in libtorch 2.11.
struct alignas(64) Graph {
  char object[4096];
};

struct Functions {
  void (*construct)(Graph*, bool);
  void (*destruct)(Graph*);
  void (*begin)(Graph*, Pool, int);
  void (*end)(Graph*);
  void (*replay)(Graph*);
  Pool (*pool)();
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
    return of;
  }();
  return functions;
}

constexpr int THREAD_LOCAL = 1;  // cudaStreamCaptureModeThreadLocal: other threads go on allocating

}  // namespace

extern "C" {

bool rollflow_graphs() { return functions().all; }

// A pool of memory for graphs that are replayed one at a time, in two numbers.
void rollflow_graph_pool(uint64_t* pool) {
  const Pool made = functions().pool();
  pool[0] = made.first, pool[1] = made.second;
}

// Records what this thread asks of its stream, which is not the default one, until the end.
char* rollflow_graph_begin(const uint64_t* pool, Graph** graph) {
  return guarded([&] {
    auto* made = new Graph{};
    functions().construct(made, false);
    *graph = made;
    functions().begin(made, {pool[0], pool[1]}, THREAD_LOCAL);
  });
}

char* rollflow_graph_end(Graph* graph) {
  return guarded([&] { functions().end(graph); });
}

char* rollflow_graph_replay(Graph* graph) {
  return guarded([&] { functions().replay(graph); });
}

void rollflow_graph_free(Graph* graph) {
  functions().destruct(graph);
  delete graph;
}
}
