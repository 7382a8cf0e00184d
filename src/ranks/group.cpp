// torch's own collectives (c10d) with a C interface: a TCPStore, and a process group over it.
//
// Every entry catches C++ exceptions and returns their text, which the caller frees; null is success.

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Millis = std::chrono::milliseconds;

template <typename F> char* caught(F&& work) {
  try {
    work();
    return nullptr;
  } catch (const c10::Error& e) {
    return strdup(e.what_without_backtrace());
  } catch (const std::exception& e) {
    return strdup(e.what());
  } catch (...) {
    return strdup("unknown C++ exception");
  }
}

// Begins a collective. c10d's flight recorder is not safe to use by two groups of a process at once.
template <typename F> c10::intrusive_ptr<c10d::Work> begin(F&& collective) {
  static std::mutex one;
  std::lock_guard<std::mutex> guard(one);
  return collective();
}

// Waits for a collective until it ends or another thread sets `cancelled`: c10d itself gives a call up after its timeout only.
void finish(const c10::intrusive_ptr<c10d::Work>& work, const bool* cancelled) {
  while (!work->isCompleted()) {
    if (__atomic_load_n(cancelled, __ATOMIC_ACQUIRE)) throw std::runtime_error("the call was given up because the run is ending");
    try {
      work->wait(Millis(100));
    } catch (...) {
      // It goes on, or has failed, which is thrown below.
    }
  }
  work->wait();
}

} // namespace

struct rollflow_store {
  c10::intrusive_ptr<c10d::Store> store;
};

struct rollflow_group {
  c10::intrusive_ptr<c10d::Backend> backend;
  const bool* cancelled;
};

// A collective that was begun, and the tensors that it reads and writes.
struct rollflow_work {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> alive;
  const bool* cancelled;
};

extern "C" {

// Connects to the store at host:port, or serves it there. A served port of 0 is chosen by the system; *port is the port in use.
char* rollflow_store_open(rollflow_store** out, const char* host, uint16_t* port, bool serves, const char* prefix, int64_t timeout_ms) {
  // Errors are returned; torch would print them too.
  FLAGS_caffe2_log_level = 2;
  return caught([&] {
    c10d::TCPStoreOptions options;
    options.port = *port;
    options.isServer = serves;
    options.waitWorkers = false;
    options.timeout = Millis(timeout_ms);
    auto tcp = c10::make_intrusive<c10d::TCPStore>(std::string(host), options);
    *port = tcp->getPort();
    *out = new rollflow_store{c10::make_intrusive<c10d::PrefixStore>(std::string(prefix), tcp)};
  });
}

void rollflow_store_close(rollflow_store* store) { delete store; }

char* rollflow_store_set(rollflow_store* store, const char* key, const uint8_t* bytes, size_t len) {
  return caught([&] { store->store->set(key, std::vector<uint8_t>(bytes, bytes + len)); });
}

// The value of a key that is set; the caller frees *bytes.
char* rollflow_store_get(rollflow_store* store, const char* key, uint8_t** bytes, size_t* len) {
  return caught([&] {
    auto value = store->store->get(key);
    *len = value.size();
    *bytes = static_cast<uint8_t*>(malloc(value.size() + 1));
    memcpy(*bytes, value.data(), value.size());
  });
}

char* rollflow_store_has(rollflow_store* store, const char* key, bool* has) {
  return caught([&] { *has = store->store->check({key}); });
}

// Adds 1 to a number that begins at 0, and returns it.
char* rollflow_store_count(rollflow_store* store, const char* key, int64_t* count) {
  return caught([&] { *count = store->store->add(key, 1); });
}

// A group of processes over Gloo that talks through the interface of `address`. `cancelled` outlives the group.
char* rollflow_group_gloo(
    rollflow_group** out,
    rollflow_store* store,
    const char* name,
    const char* address,
    int rank,
    int size,
    int64_t timeout_ms,
    const bool* cancelled) {
  return caught([&] {
    auto options = c10d::ProcessGroupGloo::Options::create(Millis(timeout_ms));
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
    options->threads = 2;
    auto prefixed = c10::make_intrusive<c10d::PrefixStore>(std::string(name), store->store);
    *out = new rollflow_group{c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, rank, size, options), cancelled};
  });
}

void rollflow_group_close(rollflow_group* group) { delete group; }

// The sum over all ranks, in place.
char* rollflow_all_reduce(rollflow_group* group, at::Tensor* tensor) {
  return caught([&] {
    std::vector<at::Tensor> tensors{*tensor};
    finish(begin([&] { return group->backend->allreduce(tensors); }), group->cancelled);
  });
}

// Begins to gather: out will be all ranks' `in`, end to end.
char* rollflow_all_gather(rollflow_group* group, rollflow_work** begun, at::Tensor* out, at::Tensor* in) {
  return caught([&] {
    auto work = begin([&] { return group->backend->_allgather_base(*out, *in); });
    *begun = new rollflow_work{std::move(work), {*out, *in}, group->cancelled};
  });
}

// Waits for a collective that was begun, and frees it.
char* rollflow_work_wait(rollflow_work* work) {
  char* error = caught([&] { finish(work->work, work->cancelled); });
  delete work;
  return error;
}

// Sends rank 0's tensor to all ranks, in place. timeout_ms: of this call; 0: the group's.
char* rollflow_broadcast(rollflow_group* group, at::Tensor* tensor, int64_t timeout_ms) {
  return caught([&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    if (timeout_ms > 0) options.timeout = Millis(timeout_ms);
    finish(begin([&] { return group->backend->broadcast(tensors, options); }), group->cancelled);
  });
}
}
