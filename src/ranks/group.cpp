// torch's own collectives (c10d) with a C interface: a TCPStore, and a process group over it.
//
// Tensors of the host go through Gloo, those of a GPU through what the entry of device.hpp makes.
// Every entry catches C++ exceptions and returns their text, which the caller frees; null is success.

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/torch.h>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/env.h>

#include "device.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;
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

// Held while Gloo queues a call of any kind.
std::mutex& recorder() {
  static std::mutex one;
  return one;
}

// How calls of a group are waited for: until they end or another thread sets `cancelled`.
struct Wait {
  const bool* cancelled;
  Millis timeout;
  // Null where the rank computes on the processor.
  Backend device;

  void look() const {
    if (__atomic_load_n(cancelled, __ATOMIC_ACQUIRE)) throw std::runtime_error("the call was given up because the run is ending");
  }

  // Makes a call that connects ranks. Nothing interrupts the store or NCCL meanwhile, so a separate thread calls
  // them. That thread stays if the call is given up.
  template <typename F> auto connect(F call, const char* in_vain = "the ranks did not connect") const -> decltype(call()) {
    // What the call has is freed before its result is there.
    std::packaged_task<decltype(call())()> task([call = std::move(call)]() mutable {
      F own = std::move(call);
      return own();
    });
    auto ended = task.get_future();
    std::thread(std::move(task)).detach();
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (ended.wait_for(Millis(50)) != std::future_status::ready) {
      look();
      if (std::chrono::steady_clock::now() > until) {
        throw std::runtime_error(in_vain + std::string(" within ") + std::to_string(timeout.count()) + " ms");
      }
    }
    return ended.get();
  }

  // Begins a collective of `tensor`. `collective` has copies of all that it uses.
  template <typename F> auto begin(const at::Tensor& tensor, F collective) const -> decltype(collective()) {
    if (tensor.is_cpu()) {
      // Gloo only queues it. c10d's flight recorder is not safe to use by two groups of a process in parallel.
      std::lock_guard<std::mutex> guard(recorder());
      return collective();
    }
    // NCCL connects ranks when an algorithm is first used, too. The separate thread has this one's stream.
    const auto stream = c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
    auto launch = [stream, collective = std::move(collective)]() mutable {
      at::NoGradGuard no_grad;
      c10::StreamGuard guard(stream);
      return collective();
    };
    return connect(std::move(launch), "the call did not begin on the GPU");
  }

  void finish(c10d::Work& work, const at::Tensor& tensor) const {
    if (tensor.is_cpu()) {
      on_host(work);
    } else {
      on_device(work);
    }
    // Over Gloo, throws what failed. Over NCCL, only orders the tensor's stream after the work.
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
      // Failed work, for example after a peer is gone, counts as completed.
      if (auto failed = work.exception()) std::rethrow_exception(failed);
    } catch (...) {
      // Otherwise the GPU would wait forever, and the process at its end for the GPU.
      device->abort();
      throw;
    }
  }
};

} // namespace

// torch's own calls wait forever for a server that is stopped or cut off. Here a thread makes each call, and stays if the call is given up.
struct rollflow_store {
  c10::intrusive_ptr<c10d::Store> store;
  std::atomic<int64_t> limit_ms;
  std::atomic<int64_t> waited_ms{0};
  // A call that was given up keeps the connection.
  std::atomic<bool> silent{false};

  template <typename F> auto ask(F call) -> decltype(call(*store)) {
    if (silent) throw std::runtime_error("its server did not answer an earlier call");
    std::packaged_task<decltype(call(*store))()> task([store = store, call = std::move(call)] { return call(*store); });
    auto answer = task.get_future();
    std::thread(std::move(task)).detach();
    // In slices, which leave out the time for which this process is stopped.
    const Millis slice(50);
    for (int64_t waited = 0; answer.wait_for(slice) != std::future_status::ready; waited += slice.count()) {
      waited_ms += slice.count();
      if (waited < limit_ms) continue;
      silent = true;
      throw std::runtime_error("its server has not answered for " + std::to_string(waited) + " ms");
    }
    return answer.get();
  }
};

struct rollflow_group {
  // Null for a group of tensors of a device alone.
  Backend host;
  Wait wait;

  Backend of(const at::Tensor& tensor) const {
    if (tensor.is_cpu() && host) return host;
    if (wait.device) return wait.device;
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
    *out = new rollflow_store{c10::make_intrusive<c10d::PrefixStore>(std::string(prefix), tcp), {timeout_ms}};
  });
}

// Longest wait for the server's answer to a call; otherwise the timeout of rollflow_store_open.
void rollflow_store_limit(rollflow_store* store, int64_t limit_ms) { store->limit_ms = limit_ms; }

// Time that all calls have waited for the server's answers, without that for which this process was stopped.
int64_t rollflow_store_waited(rollflow_store* store) { return store->waited_ms; }

void rollflow_store_close(rollflow_store* store) { delete store; }

char* rollflow_store_set(rollflow_store* store, const char* key, const uint8_t* bytes, size_t len) {
  return caught([&] {
    store->ask([key = std::string(key), value = std::vector<uint8_t>(bytes, bytes + len)](c10d::Store& of) { of.set(key, value); });
  });
}

// The value of a key that is set; the caller frees *bytes.
char* rollflow_store_get(rollflow_store* store, const char* key, uint8_t** bytes, size_t* len) {
  return caught([&] {
    auto value = store->ask([key = std::string(key)](c10d::Store& of) { return of.get(key); });
    *len = value.size();
    *bytes = static_cast<uint8_t*>(malloc(value.size() + 1));
    memcpy(*bytes, value.data(), value.size());
  });
}

char* rollflow_store_has(rollflow_store* store, const char* key, bool* has) {
  return caught([&] { *has = store->ask([key = std::string(key)](c10d::Store& of) { return of.check({key}); }); });
}

// Adds 1 to a number that begins at 0, and returns it.
char* rollflow_store_count(rollflow_store* store, const char* key, int64_t* count) {
  return caught([&] { *count = store->ask([key = std::string(key)](c10d::Store& of) { return of.add(key, 1); }); });
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
    // The flight recorder is read when its first group is made. `begin` locks nothing for a device.
    static std::once_flag unrecorded;
    if (device_group) std::call_once(unrecorded, [] { c10::utils::set_env("TORCH_FR_BUFFER_SIZE", "0"); });
    Wait wait{cancelled, Millis(timeout_ms), nullptr};
    auto join = [=, of = store->store, name = std::string(name), address = std::string(address)] {
      auto prefixed = [&](const char* kind) { return c10::make_intrusive<c10d::PrefixStore>(name + kind, of); };
      Backend host, device;
      if (!device_group || !alone) {
        auto options = c10d::ProcessGroupGloo::Options::create(Millis(timeout_ms));
        options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
        options->threads = 2;
        host = c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed(""), rank, size, options);
      }
      if (device_group) device = device_group(prefixed(alone ? "" : "/device"), rank, size, address.c_str());
      return std::pair<Backend, Backend>(host, device);
    };
    auto [host, device] = wait.connect(std::move(join));
    wait.device = device;
    *out = new rollflow_group{host, wait};
  });
}

// Connects the ranks of a group for tensors of a device, which otherwise the first collective does. Waits for all ranks.
char* rollflow_group_connect(rollflow_group* group, int64_t device) {
  return caught([&] {
    const at::Device of(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    group->wait.connect([of, backend = group->wait.device] { backend->eagerConnectSingleDevice(of); });
  });
}

void rollflow_group_close(rollflow_group* group) { delete group; }

// Closes a group whose calls may never end, in a thread that stays if they do not. The end of the process waits a second, or ten
// where a GPU's are closed, for such threads, since it destroys what they use.
void rollflow_group_abort(rollflow_group* group) {
  static auto& closing = *new std::atomic<int>(0);
  // NCCL takes seconds for it.
  static auto& looks = *new std::atomic<int>(20);
  static const int at_end = std::atexit([] {
    for (int look = 0; closing > 0 && look < looks; ++look) std::this_thread::sleep_for(Millis(50));
  });
  if (group->wait.device) looks = 200;
  ++closing;
  char* error = caught([=] {
    std::thread([=] {
      free(caught([=] {
        if (group->wait.device) group->wait.device->abort();
      }));
      delete group;
      --closing;
    }).detach();
  });
  if (error) --closing;
  free(error);
}

// The sum over all ranks, in place.
char* rollflow_all_reduce(rollflow_group* group, at::Tensor* tensor) {
  return caught([&] {
    auto sum = [backend = group->of(*tensor), tensors = std::vector<at::Tensor>{*tensor}]() mutable { return backend->allreduce(tensors); };
    group->wait.finish(*group->wait.begin(*tensor, std::move(sum)), *tensor);
  });
}

// This rank's part of the sum over all ranks of `whole`. Gloo's own would send every number twice: here each rank sends
// the parts of the others and adds up what it gets, by rank.
char* rollflow_reduce_scatter(rollflow_group* group, at::Tensor* out, at::Tensor* whole) {
  return caught([&] {
    auto backend = group->of(*whole);
    if (!whole->is_cpu()) {
      auto sum = [backend, out = *out, whole = *whole]() mutable { return backend->_reduce_scatter_base(out, whole); };
      return group->wait.finish(*group->wait.begin(*whole, std::move(sum)), *whole);
    }
    at::Tensor received = at::empty_like(*whole);
    std::vector<int64_t> equal;
    group->wait.finish(*group->wait.begin(*whole, [&] { return backend->alltoall_base(received, *whole, equal, equal); }), *whole);
    auto parts = received.chunk(backend->getSize());
    out->copy_(parts[0]);
    for (size_t rank = 1; rank < parts.size(); ++rank) out->add_(parts[rank]);
  });
}

// Begins to gather: out will be all ranks' `in`, end to end.
char* rollflow_all_gather(rollflow_group* group, rollflow_work** begun, at::Tensor* out, at::Tensor* in) {
  return caught([&] {
    auto gather = [backend = group->of(*in), out = *out, in = *in]() mutable { return backend->_allgather_base(out, in); };
    auto work = group->wait.begin(*in, std::move(gather));
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
    c10d::BroadcastOptions options;
    if (timeout_ms > 0) options.timeout = Millis(timeout_ms);
    auto send = [backend = group->of(*tensor), tensors = std::vector<at::Tensor>{*tensor}, options]() mutable {
      return backend->broadcast(tensors, options);
    };
    group->wait.finish(*group->wait.begin(*tensor, std::move(send)), *tensor);
  });
}
}
