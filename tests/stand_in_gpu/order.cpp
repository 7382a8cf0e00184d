#include "order.hpp"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

namespace order {
namespace {

using Place = int64_t;  // a stream of a device
using Clock = std::map<Place, uint64_t>;

struct Memory {
  std::size_t bytes;
  Place home;
  Place writer;
  uint64_t written;
  Clock readers;
  std::set<Place> users;
};

struct Mark {
  Place of;
  Clock clock;
};

std::mutex mutex;
std::map<uintptr_t, Memory> memories;
std::map<Place, Clock> seen;  // of each stream, its own time included
Clock over;                   // what the host knows to be done
std::string problem;
std::map<int64_t, std::pair<uint64_t, uint64_t>> bytes_of;  // of each device: taken now, and at most
std::map<int64_t, uint64_t> kept_of;  // of each device: what an allocator that keeps all has
std::map<int64_t, std::pair<uint64_t, uint64_t>> counts;  // of each device: kernels started, and waits of the host

Place place(c10::Stream stream) { return static_cast<int64_t>(stream.device_index()) << 40 | stream.id(); }
std::string name(Place of) { return "stream " + std::to_string(of & ((int64_t{1} << 40) - 1)) + " of cuda:" + std::to_string(of >> 40); }
uint64_t time_of(const Clock& clock, Place of) {
  const auto found = clock.find(of);
  return found == clock.end() ? 0 : found->second;
}
bool before(Place of, uint64_t time, Place here) { return of == here || time_of(seen[here], of) >= time || time_of(over, of) >= time; }
void join(Clock& to, const Clock& from) {
  for (const auto& [of, time] : from) to[of] = std::max(to[of], time);
}
Memory* find(const void* at) {
  if (!at) return nullptr;
  auto found = memories.upper_bound(reinterpret_cast<uintptr_t>(at));
  if (found == memories.begin()) return nullptr;
  --found;
  return reinterpret_cast<uintptr_t>(at) < found->first + std::max<std::size_t>(1, found->second.bytes) ? &found->second : nullptr;
}

}  // namespace

void allocated(const void* memory, std::size_t bytes, c10::Stream stream) {
  // What is empty has no memory.
  if (!memory) return;
  const std::lock_guard<std::mutex> lock(mutex);
  memories[reinterpret_cast<uintptr_t>(memory)] = {bytes, place(stream), place(stream), 0, {}, {}};
  auto& [now, most] = bytes_of[stream.device_index()];
  most = std::max(most, now += bytes);
  kept_of[stream.device_index()] = std::max(kept_of[stream.device_index()], now);
}

void freed(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = memories.find(reinterpret_cast<uintptr_t>(memory));
  if (found == memories.end()) return;
  Memory& of = found->second;
  of.readers[of.writer] = std::max(of.readers[of.writer], of.written);
  for (const auto& [reader, time] : of.readers)
    if (!of.users.count(reader) && !before(reader, time, of.home))
      problem = "memory of " + name(of.home) + " was given back while " + name(reader) + " may still use it";
  bytes_of[of.home >> 40].first -= of.bytes;
  memories.erase(found);
}

void emptied() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& [device, kept] : kept_of) kept = bytes_of[device].first;
}

void begin(c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  seen[place(stream)][place(stream)]++;
  counts[stream.device_index()].first++;
}

void reads(const void* memory, c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Place here = place(stream);
  if (Memory* of = find(memory)) {
    TORCH_CHECK(before(of->writer, of->written, here), "a race: ", name(here), " reads what ", name(of->writer), " may still be writing");
    of->readers[here] = seen[here][here];
  }
}

void writes(const void* memory, c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Place here = place(stream);
  if (Memory* of = find(memory)) {
    TORCH_CHECK(before(of->writer, of->written, here), "a race: ", name(here), " writes what ", name(of->writer), " may still be writing");
    for (const auto& [reader, time] : of->readers)
      TORCH_CHECK(before(reader, time, here), "a race: ", name(here), " writes what ", name(reader), " may still be reading");
    of->writer = here;
    of->written = seen[here][here];
    of->readers.clear();
  }
}

void used(const void* memory, c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (Memory* of = find(memory)) of->users.insert(place(stream));
}

void* recorded(c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  return new Mark{place(stream), seen[place(stream)]};
}

void waited_for(void* event, c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  join(seen[place(stream)], static_cast<Mark*>(event)->clock);
}

void destroyed(void* event) { delete static_cast<Mark*>(event); }

void meet(c10::Stream one, c10::Stream other) {
  const std::lock_guard<std::mutex> lock(mutex);
  join(seen[place(one)], seen[place(other)]);
  join(seen[place(other)], seen[place(one)]);
}

void host_waits(c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  join(over, seen[place(stream)]);
  counts[stream.device_index()].second++;
}

void check() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::string told;
  std::swap(told, problem);
  TORCH_CHECK(told.empty(), told);
}

}  // namespace order

// Kernels that were started on a device, and times that the host waited for it, since the program began.
extern "C" void stand_in_counts(int64_t device, uint64_t* kernels, uint64_t* waits) {
  const std::lock_guard<std::mutex> lock(order::mutex);
  std::tie(*kernels, *waits) = order::counts[device];
}

// Bytes that a device's tensors take now, and at most since this was last asked.
extern "C" void stand_in_bytes(int64_t device, uint64_t* now, uint64_t* most) {
  const std::lock_guard<std::mutex> lock(order::mutex);
  auto& of = order::bytes_of[device];
  *now = of.first;
  *most = of.second;
  of.second = of.first;
}

// Bytes that a device's tensors take now, and that an allocator has which keeps the memory of freed ones.
extern "C" void stand_in_kept(int64_t device, uint64_t* now, uint64_t* kept) {
  const std::lock_guard<std::mutex> lock(order::mutex);
  *now = order::bytes_of[device].first;
  *kept = order::kept_of[device];
}
