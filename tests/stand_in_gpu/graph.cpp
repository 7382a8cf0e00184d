#include "graph.hpp"

#include <ATen/core/Generator.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace graph {
namespace {

struct Work {
  std::vector<std::function<void()>> each;
  std::vector<const void*> memory;
};

thread_local Work* recorded = nullptr;

std::mutex mutex;
// How each memory of a graph is given back, once nobody else has it.
std::map<const void*, std::function<void()>> held;

void give_back(const Work& work) {
  std::vector<std::function<void()>> last;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const void* memory : work.memory) {
      last.push_back(held[memory]);
      held.erase(memory);
    }
  }
  for (const auto& each : last)
    if (each) each();
}

}  // namespace

bool records() { return recorded; }

void keep(std::function<void()> work) { recorded->each.push_back(std::move(work)); }

void adopt(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (held.emplace(memory, nullptr).second) recorded->memory.push_back(memory);
}

bool owns(const void* memory) {
  return recorded && std::find(recorded->memory.begin(), recorded->memory.end(), memory) != recorded->memory.end();
}

bool adopted(const void* memory, std::function<void()> give_back) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = held.find(memory);
  if (found == held.end()) return false;
  found->second = std::move(give_back);
  return true;
}

}  // namespace graph

// libtorch's class by the names of its functions. What is recorded is also run once, so that results have their shapes, but for our kernels and copies to
// memory that was there before; a GPU runs nothing of it.
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };

namespace at::cuda {

std::pair<unsigned long long, unsigned long long> graph_pool_handle() { return {1, 0}; }

struct CUDAGraph {
  CUDAGraph(bool);
  ~CUDAGraph();
  void capture_begin(std::pair<unsigned long long, unsigned long long>, cudaStreamCaptureMode);
  void capture_end();
  void replay();
  graph::Work* work;
};

CUDAGraph::CUDAGraph(bool) : work(new graph::Work) {}
CUDAGraph::~CUDAGraph() {
  graph::give_back(*work);
  delete work;
}
void CUDAGraph::capture_begin(std::pair<unsigned long long, unsigned long long>, cudaStreamCaptureMode) { graph::recorded = work; }
void CUDAGraph::capture_end() { graph::recorded = nullptr; }
static thread_local uint64_t replays = 0;

void CUDAGraph::replay() {
  replays++;
  for (const auto& each : work->each) each();
}

}  // namespace at::cuda

// Graphs that this thread has replayed.
extern "C" void stand_in_replays(int64_t, uint64_t* replays, uint64_t*) { *replays = at::cuda::replays; }
