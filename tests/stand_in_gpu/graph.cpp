#include "graph.hpp"

#include <atomic>

#include <ATen/core/Generator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace graph {
namespace {

struct Work {
  std::vector<std::function<void()>> each;
  std::vector<const void*> memory;
  bool broken = false;
};

thread_local Work* recorded = nullptr;

std::mutex mutex;
// How each memory of a graph is given back, once nobody else has it.
std::map<const void*, std::function<void()>> held;
// Graphs of each pool, and pools that are allocated from.
std::map<c10::MempoolId_t, int> graphs_of;
std::set<c10::MempoolId_t> at_work;

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

void refuse(const char* what) {
  if (recorded) recorded->broken = true;
  TORCH_CHECK(!recorded, what);
}

void end_allocating(c10::MempoolId_t pool) {
  const std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK(at_work.erase(pool), "no graph of this pool is recorded");
}

void release(c10::MempoolId_t pool) {
  const std::lock_guard<std::mutex> lock(mutex);
  graphs_of[pool]--;
}

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

c10::MempoolId_t graph_pool_handle() {
  static std::atomic<unsigned long long> made = 0;
  return {0, ++made};
}

// The stream that a GPU would record: this thread's, of the device that is current.
static c10::Stream current_stream() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return guard.getStream(guard.getDevice());
}

struct CUDAGraph {
  CUDAGraph(bool);
  ~CUDAGraph();
  void capture_begin(c10::MempoolId_t, cudaStreamCaptureMode);
  void capture_end();
  void replay();
  graph::Work* work;
  c10::MempoolId_t pool;
  std::optional<c10::Stream> stream;
  bool ended = false;
};

CUDAGraph::CUDAGraph(bool) : work(new graph::Work) {}
CUDAGraph::~CUDAGraph() {
  if (ended) graph::release(pool);
  graph::give_back(*work);
  delete work;
}
void CUDAGraph::capture_begin(c10::MempoolId_t of, cudaStreamCaptureMode) {
  TORCH_CHECK(current_stream().id() != 0, "CUDA graphs must be captured on a non-default stream");
  const std::lock_guard<std::mutex> lock(graph::mutex);
  const auto graphs = graph::graphs_of.find(of);
  TORCH_CHECK(graphs == graph::graphs_of.end() || graphs->second > 0, "a pool whose graphs are all gone takes no other");
  TORCH_CHECK(graph::at_work.insert(of).second, "a graph of this pool is recorded already");
  graph::graphs_of[of]++;
  pool = of, stream = current_stream(), graph::recorded = work;
}
void CUDAGraph::capture_end() {
  graph::recorded = nullptr;
  TORCH_CHECK(current_stream() == *stream, "Capture must end on the same stream it began on");
  TORCH_CHECK(!work->broken, "what is recorded can't be");
  graph::end_allocating(pool);
  ended = true;
}
static thread_local uint64_t replays = 0;

void CUDAGraph::replay() {
  replays++;
  for (const auto& each : work->each) each();
}

}  // namespace at::cuda

// Pools that graphs are recorded into now.
extern "C" void stand_in_recordings(int64_t, uint64_t* recordings, uint64_t*) {
  const std::lock_guard<std::mutex> lock(graph::mutex);
  *recordings = graph::at_work.size();
}

// Graphs that this thread has replayed.
extern "C" void stand_in_replays(int64_t, uint64_t* replays, uint64_t*) { *replays = at::cuda::replays; }
