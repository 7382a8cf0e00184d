// NCCL where there is none: collectives of tensors of the stand-in GPU, over Gloo. What is refused here NCCL refuses, too: tensors of the host,
// and of several devices.

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <sstream>

#include "device.hpp"
#include "stand_in_gpu.hpp"

namespace {

using Works = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// A call as NCCL's is: one that failed is completed, and a wait for it throws nothing.
class Call final : public c10d::Work {
 public:
  explicit Call(Works gloo) : gloo(std::move(gloo)) {}

  bool isCompleted() override { return gloo->isCompleted(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  bool wait(std::chrono::milliseconds) override { return true; }

 private:
  Works gloo;
};

// Like NCCL, it connects with its first collective: rank 0 makes an id, here the address of a store, and puts it into the group's store.
class OverGloo final : public c10d::Backend {
 public:
  OverGloo(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const char* address)
      : Backend(rank, size), store(std::move(store)), address(address) {}

  void eagerConnectSingleDevice(at::Device) override { connected(); }

  const std::string getBackendName() const override { return "stand-in"; }

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors home = taken(tensors);
    return begun(connected().allreduce(home, options));
  }

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors home = taken(tensors);
    return begun(connected().broadcast(home, options));
  }

  Works _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    Tensors home = taken({out, in});
    return begun(connected()._allgather_base(home[0], home[1], options));
  }

  // Gloo's own never says that it is completed.
  Works _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions&) override {
    Tensors home = taken({out, in});
    Tensors sum{home[1].clone()};
    Works work = connected().allreduce(sum);
    work->wait();
    home[0].copy_(sum[0].chunk(getSize())[getRank()]);
    return work;
  }

 private:
  static constexpr size_t ID_BYTES = 128;

  static Works begun(Works gloo) { return c10::make_intrusive<Call>(std::move(gloo)); }

  c10d::ProcessGroupGloo& connected() {
    if (gloo) return *gloo;
    c10d::TCPStoreOptions where;
    where.waitWorkers = false;
    std::string host = address;
    if (getRank() == 0) {
      where.port = 0;
      where.isServer = true;
    } else {
      const auto id = store->get("0");
      std::istringstream(std::string(id.begin(), id.end())) >> host >> where.port;
    }
    const auto own = c10::make_intrusive<c10d::TCPStore>(host, where);
    if (getRank() == 0) {
      std::string id = host + " " + std::to_string(own->getPort());
      id.resize(ID_BYTES);
      store->set("0", std::vector<uint8_t>(id.begin(), id.end()));
    }
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::hours(1));
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
    options->threads = 2;
    gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(own, getRank(), getSize(), std::move(options));
    return *gloo;
  }

  Tensors taken(const Tensors& tensors) {
    Tensors home;
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous(), "a collective of the stand-in GPU is given a tensor on ", tensor.device());
      if (!device) device = tensor.device();
      TORCH_CHECK(*device == tensor.device(), "a group of ", *device, " is given a tensor on ", tensor.device());
      home.push_back(at_home(tensor));
    }
    return home;
  }

  c10::intrusive_ptr<c10d::Store> store;
  std::string address;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
  std::optional<c10::Device> device;
};

}  // namespace

extern "C" c10::intrusive_ptr<c10d::Backend> rollflow_device_group(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, const char* address) {
  return c10::make_intrusive<OverGloo>(std::move(store), rank, size, address);
}
