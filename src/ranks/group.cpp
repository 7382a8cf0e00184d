// torch's own collectives (c10d) with a C interface: a TCPStore, and a process group over it.
//
// Tensors of the host go through Gloo, those of a GPU through what the entry of device.hpp makes.
// Every entry catches C++ exceptions and returns their text, which the caller frees; null is success.

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include "device.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
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

// How calls of a group are waited for: until they end or another thread sets `cancelled`.
struct Wait {
  const bool* cancelled;
  Millis timeout;
  // Null where the rank computes on the processor.
  c10::intrusive_ptr<c10d::Backend> device;

  void look() const {
    if (__atomic_load_n(cancelled, __ATOMIC_ACQUIRE)) throw std::runtime_error("the call was given up because the run is ending");
  }

  void finish(c10d::Work& work, const at::Tensor& tensor) const {
    if (tensor.is_cpu()) {
      on_host(work);
    } else {
      on_device(work);
    }
    // Throws what failed. On a GPU, orders the tensor's stream after the work.
    work.wait();
  }

  // c10d itself gives a call up after its timeout only.
  void on_host(c10d::Work& work) const {
    while (!work.isCompleted()) {
      look();
      try {
        work.wait(Millis(100));
      } catch (...) {
        // It continues, or has failed, which is thrown later.
      }
    }
  }

  // NCCL destroys its connections after a wait with a timeout, so that this looks until the work is done.
  void on_device(c10d::Work& work) const {
    const auto until = std::chrono::steady_clock::now() + timeout;
    try {
      while (!work.isCompleted()) {
        look();
        if (std::chrono::steady_clock::now() > until) {
          throw std::runtime_error("the call did not end on the GPU within " + std::to_string(timeout.count()) + " ms");
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    } catch (...) {
      // Otherwise the GPU would wait forever, and the process at its end for the GPU.
      device->abort();
      throw;
    }
  }
};

} // namespace

struct rollflow_store {
  c10::intrusive_ptr<c10d::Store> store;
};

struct rollflow_group {
  // Null for a group of tensors of a device alone.
  c10::intrusive_ptr<c10d::Backend> host;
  Wait wait;

  c10d::Backend& of(const at::Tensor& tensor) const {
    if (tensor.is_cpu() && host) return *host;
    if (wait.device) return *wait.device;
    throw std::runtime_error("a tensor on " + tensor.device().str() + " has no group: this rank did not join for it");
  }
};

// A collective that was begun, and the tensors that it reads and writes.
struct rollflow_work {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor out, in;
  Wait wait;
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

// A group of processes that talks through the interface of `address`, whose keys in the store begin with `name`: over Gloo, which waits for all ranks, and for
// tensors of a device over what `device_group` makes, which may be null. `alone`: if there is a device, for its tensors alone. `cancelled` outlives the group.
char* rollflow_group_join(
    rollflow_group** out,
    rollflow_store* store,
    const char* name,
    const char* address,
    int rank,
    int size,
    int64_t timeout_ms,
    const bool* cancelled,
    rollflow_device_group_fn* device_group,
    bool alone) {
  return caught([&] {
    auto prefixed = [&](const char* kind) {
      return c10::make_intrusive<c10d::PrefixStore>(std::string(name) + kind, store->store);
    };
    c10::intrusive_ptr<c10d::Backend> host, device;
    if (!device_group || !alone) {
      auto options = c10d::ProcessGroupGloo::Options::create(Millis(timeout_ms));
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
      options->threads = 2;
      host = c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed(""), rank, size, options);
    }
    if (device_group) device = device_group(prefixed(alone ? "" : "/device"), rank, size, address);
    *out = new rollflow_group{host, {cancelled, Millis(timeout_ms), device}};
  });
}

// Connects the ranks of a group for tensors of a device, which otherwise the first collective does. Waits for all ranks. Nothing interrupts
// NCCL while it connects, so a separate thread calls it. That thread stays if the call is given up.
char* rollflow_group_connect(rollflow_group* group, int64_t device) {
  return caught([&] {
    auto connected = std::make_shared<std::promise<void>>();
    auto ended = connected->get_future();
    const at::Device of(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    std::thread([connected, of, backend = group->wait.device] {
      try {
        backend->eagerConnectSingleDevice(of);
        connected->set_value();
      } catch (...) {
        connected->set_exception(std::current_exception());
      }
    }).detach();
    const auto until = std::chrono::steady_clock::now() + group->wait.timeout;
    while (ended.wait_for(Millis(50)) != std::future_status::ready) {
      group->wait.look();
      if (std::chrono::steady_clock::now() > until) {
        throw std::runtime_error("the ranks did not connect within " + std::to_string(group->wait.timeout.count()) + " ms");
      }
    }
    ended.get();
  });
}

void rollflow_group_close(rollflow_group* group) { delete group; }

// The sum over all ranks, in place.
char* rollflow_all_reduce(rollflow_group* group, at::Tensor* tensor) {
  return caught([&] {
    std::vector<at::Tensor> tensors{*tensor};
    group->wait.finish(*begin([&] { return group->of(*tensor).allreduce(tensors); }), *tensor);
  });
}

// This rank's part of the sum over all ranks of `whole`. Gloo's own would send every number twice: here each rank sends
// the parts of the others and adds up what it gets, by rank.
char* rollflow_reduce_scatter(rollflow_group* group, at::Tensor* out, at::Tensor* whole) {
  return caught([&] {
    auto& backend = group->of(*whole);
    if (!whole->is_cpu()) {
      return group->wait.finish(*begin([&] { return backend._reduce_scatter_base(*out, *whole); }), *whole);
    }
    at::Tensor received = at::empty_like(*whole);
    std::vector<int64_t> equal;
    group->wait.finish(*begin([&] { return backend.alltoall_base(received, *whole, equal, equal); }), *whole);
    auto parts = received.chunk(backend.getSize());
    out->copy_(parts[0]);
    for (size_t rank = 1; rank < parts.size(); ++rank) out->add_(parts[rank]);
  });
}

// Begins to gather: out will be all ranks' `in`, end to end.
char* rollflow_all_gather(rollflow_group* group, rollflow_work** begun, at::Tensor* out, at::Tensor* in) {
  return caught([&] {
    auto work = begin([&] { return group->of(*in)._allgather_base(*out, *in); });
    *begun = new rollflow_work{std::move(work), *out, *in, group->wait};
  });
}

// Waits for a collective that was begun, and frees it.
char* rollflow_work_wait(rollflow_work* work) {
  char* error = caught([&] { work->wait.finish(*work->work, work->out); });
  delete work;
  return error;
}

// Sends rank 0's tensor to all ranks, in place. timeout_ms: of this call; 0: the group's.
char* rollflow_broadcast(rollflow_group* group, at::Tensor* tensor, int64_t timeout_ms) {
  return caught([&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    if (timeout_ms > 0) options.timeout = Millis(timeout_ms);
    group->wait.finish(*begin([&] { return group->of(*tensor).broadcast(tensors, options); }), *tensor);
  });
}
}
