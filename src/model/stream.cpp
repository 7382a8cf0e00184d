// Streams and events of a GPU, through libtorch's own interface to its devices: no CUDA header is needed.

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "fused/guarded.hpp"

namespace {

c10::Device gpu(int64_t index) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)}; }

c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

}  // namespace

extern "C" {

// A stream of high priority of a device, in three numbers.
char* rollflow_stream_new(int64_t device, int64_t* stream) {
  return guarded([&] {
    const auto packed = guard().getStreamFromGlobalPool(gpu(device), true).pack3();
    stream[0] = packed.stream_id, stream[1] = packed.device_index, stream[2] = static_cast<int64_t>(packed.device_type);
  });
}

// Makes a stream this thread's; `stream` becomes the one before.
char* rollflow_stream_exchange(int64_t* stream) {
  return guarded([&] {
    const auto next =
        c10::Stream::unpack3(stream[0], static_cast<c10::DeviceIndex>(stream[1]), static_cast<c10::DeviceType>(stream[2]));
    const auto before = guard().exchangeStream(next).pack3();
    stream[0] = before.stream_id, stream[1] = before.device_index, stream[2] = static_cast<int64_t>(before.device_type);
  });
}

// Waits for what this thread has asked of a device.
char* rollflow_stream_synchronize(int64_t device) {
  return guarded([&] { guard().synchronizeStream(guard().getStream(gpu(device))); });
}

// An event after all that this thread has asked of a device.
char* rollflow_event_new(int64_t device, c10::Event** event) {
  return guarded([&] {
    auto made = std::make_unique<c10::Event>(c10::DeviceType::CUDA);
    made->record(guard().getStream(gpu(device)));
    *event = made.release();
  });
}

// What this thread asks of a device from now on comes after the event.
char* rollflow_event_wait(int64_t device, c10::Event* event) {
  return guarded([&] { event->block(guard().getStream(gpu(device))); });
}

void rollflow_event_free(c10::Event* event) { delete event; }

// A tensor of the host in memory that a device reads by itself.
char* rollflow_pinned(at::Tensor** out, at::Tensor* tensor) {
  return guarded(out, [&] { return at::empty(tensor->sizes(), tensor->options().pinned_memory(true)).copy_(*tensor); });
}

// The tensor's memory is not given to others before what this thread asks of its device until the tensor's end is done.
char* rollflow_stream_uses(at::Tensor* tensor) {
  return guarded([&] { guard().recordDataPtrOnStream(tensor->storage().data_ptr(), guard().getStream(tensor->device())); });
}
}
