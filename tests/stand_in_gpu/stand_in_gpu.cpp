// A GPU where there is none: libtorch takes this library for its CUDA half, and finds seven devices.
//
// Their memory is this machine's, at addresses that no processor reads, and every operation runs on the processor. So numbers are the processor's to the
// bit, and what a GPU would refuse or crash at is refused here too: operands on different devices, and memory of a device read by the host. What
// only a GPU can show stays to be shown there: its kernels' results, speed, streams, and memory.
//
// Longer than other files: devices, contexts, allocators and the runtime's functions share one state of each device.
//
// Preloaded under the name libtorch_cuda.so it is what is found; scripts/stand_in_gpu.sh builds it so, and runs what the project does on "cuda".

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "../../src/model/allocator.hpp"
#include "graph.hpp"
#include "order.hpp"
#include "stand_in_gpu.hpp"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>

namespace {

using at::Tensor;
using c10::DeviceType;

constexpr c10::DeviceIndex DEVICES = 7;

void* away(const void* real) { return real ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(real) + AWAY) : nullptr; }
void* home(const void* far) { return far ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(far) - AWAY) : nullptr; }

// Devices and streams: a thread has one device, and one stream of each.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static thread_local c10::DeviceIndex device;
  static thread_local int context;
  static std::array<std::atomic<bool>, DEVICES> has_context;
  static thread_local std::array<c10::StreamId, DEVICES> streams;
  DeviceType type() const override { return DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {DeviceType::CUDA, device}; }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() >= 0 && to.index() < DEVICES, "no device ", to);
    uncheckedSetDevice(to);
  }
  // As libtorch's guard, it asks nothing of the runtime where the device is current already. No operation gives a thread a context: it may find all memory that it takes in
  // an allocator.
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (device != to.index()) enter(to.index());
  }
  static void enter(int to) {
    device = static_cast<c10::DeviceIndex>(to), context = to;
    has_context[to] = true;
  }
  c10::Stream getStream(c10::Device of) const noexcept override {
    const c10::Device there(DeviceType::CUDA, of.has_index() ? of.index() : device);
    return c10::Stream(c10::Stream::UNSAFE, there, streams[there.index()]);
  }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    const auto before = getStream(to.device());
    streams[to.device_index()] = to.id();
    return before;
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    static std::atomic<c10::StreamId> made = 0;
    return c10::Stream(c10::Stream::UNSAFE, of, ++made);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>((static_cast<uintptr_t>(stream.device_index()) << 40 | static_cast<uintptr_t>(stream.id())) + 1);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event) order::destroyed(*event);
    *event = order::recorded(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) order::waited_for(event, stream);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) order::destroyed(event);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { order::host_waits(stream); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override { order::used(home(memory.get()), stream); }
};
thread_local c10::DeviceIndex Guard::device = 0;
thread_local int Guard::context = -1;
std::array<std::atomic<bool>, DEVICES> Guard::has_context{};
thread_local std::array<c10::StreamId, DEVICES> Guard::streams{};

c10::Device here() { return {DeviceType::CUDA, Guard::device}; }
c10::Stream stream_of(c10::Device device) { return Guard().getStream(device); }
const void* memory_of(const Tensor& tensor) { return home(tensor.storage().data()); }

void give_back(void* real) {
  const auto free = [real] {
    if (real) order::freed(real);
    std::free(real);
  };
  if (!graph::adopted(real, free)) free();
}

struct Memory final : GpuAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* real = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(real || !bytes, "no memory for ", bytes, " bytes");
    if (real) order::allocated(real, bytes, stream_of(here()));
    if (real && graph::records()) {
      graph::adopt(real);
      // Our kernels write only in replays: places and experts that libtorch's operations go by are those of 0 until then.
      std::memset(real, 0, bytes);
    }
    return {away(real), real, &give_back, here()};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(home(to), home(from), bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { order::emptied(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  void endAllocateToPool(c10::DeviceIndex, c10::MempoolId_t pool) override { graph::end_allocating(pool); }
  void releasePool(c10::DeviceIndex, c10::MempoolId_t pool) override { graph::release(pool); }
};

Memory memory;

// Memory of the host that is pinned.
struct Pinned final : c10::Allocator {
  static std::mutex mutex;
  static std::map<uintptr_t, size_t> all;
  c10::DataPtr allocate(size_t bytes) override {
    void* const made = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(made || !bytes, "no memory for ", bytes, " bytes");
    const std::lock_guard<std::mutex> lock(mutex);
    if (made) all[reinterpret_cast<uintptr_t>(made)] = bytes;
    return {made, made, &free, c10::Device(DeviceType::CPU)};
  }
  static void free(void* made) {
    const std::lock_guard<std::mutex> lock(mutex);
    all.erase(reinterpret_cast<uintptr_t>(made));
    std::free(made);
  }
  static bool has(const void* at) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto after = all.upper_bound(reinterpret_cast<uintptr_t>(at));
    if (after == all.begin()) return false;
    const auto [first, bytes] = *std::prev(after);
    return reinterpret_cast<uintptr_t>(at) < first + bytes;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
std::mutex Pinned::mutex;
std::map<uintptr_t, size_t> Pinned::all;

Pinned pinned;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return here().index(); }
  c10::DeviceIndex getCurrentDevice() const override { return here().index(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return Pinned::has(data); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

}  // namespace

int context() { return Guard::context; }

// The CUDA runtime's.
extern "C" int cudaSetDevice(int device) {
  if (device < 0 || device >= DEVICES) return 101;
  Guard::enter(device);
  return 0;
}

// Whether this process has a context on a device, which takes memory of it.
extern "C" void stand_in_contexts(int64_t device, uint64_t* made, uint64_t*) { *made = Guard::has_context[device]; }

c10::Stream stream_of_handle(void* handle) {
  const uintptr_t number = reinterpret_cast<uintptr_t>(handle) - 1;
  const c10::Device device(DeviceType::CUDA, static_cast<c10::DeviceIndex>(number >> 40));
  return c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(number & ((uintptr_t{1} << 40) - 1)));
}

Tensor at_home(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  // What is empty may be for a result, which is given its size.
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
  return at::from_blob(home(tensor.data_ptr()), tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

namespace {

// A tensor of the host that no one else holds, as one of a device.
Tensor sent(const Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  auto* held = new c10::Storage(tensor.storage());
  order::allocated(held->data(), held->nbytes(), stream_of(device));
  order::writes(held->data(), stream_of(device));
  if (graph::records()) graph::adopt(held->data());
  const auto give_back = [](void* of) {
    auto* held = static_cast<c10::Storage*>(of);
    const auto free = [held] {
      order::freed(held->data());
      delete held;
    };
    if (!graph::adopted(held->data(), free)) free();
  };
  c10::DataPtr data{away(held->data()), held, give_back, device};
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->nbytes(), std::move(data), &memory);
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return out;
}

// The memory of a result that was given its size on the host.
void grow(const Tensor& tensor, const Tensor& result) {
  if (tensor.sizes() == result.sizes()) return;
  auto* grown = tensor.unsafeGetTensorImpl();
  grown->set_storage_keep_dtype(sent(result, tensor.device()).storage());
  grown->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
}

// Where an operation's operands are: all on one device, but for single numbers, which may come from the host.
struct Where {
  const c10::OperatorHandle& op;
  std::optional<c10::Device> device;
  bool host = false;

  Tensor take(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cuda()) {
      TORCH_CHECK(!device || *device == tensor.device(), op.schema().name(), ": operands on ", *device, " and ", tensor.device());
      device = tensor.device();
    } else {
      host |= tensor.dim() > 0;
    }
    return at_home(tensor);
  }

  void agree() const {
    TORCH_CHECK(!(host && device), op.schema().name(), ": operands on ", *device, " and on the host");
  }
};

// Tells the order of work what an operation reads and writes.
void works_on(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& kept, c10::Stream stream) {
  order::check();
  order::begin(stream);
  for (size_t at = 0; at < kept.size(); ++at) {
    const auto* alias = schema.arguments()[at].alias_info();
    const auto each = [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda() || !tensor.numel()) return;
      alias && alias->isWrite() ? order::writes(memory_of(tensor), stream) : order::reads(memory_of(tensor), stream);
    };
    if (kept[at].isTensor()) each(kept[at].toTensor());
    if (kept[at].isTensorList())
      for (const Tensor& tensor : kept[at].toTensorList()) each(tensor);
    if (kept[at].isOptionalTensorList())
      for (const std::optional<Tensor>& tensor : kept[at].toOptionalTensorList())
        if (tensor) each(*tensor);
  }
}

// A recorded operation: done again with the same operands, its results are put where they were the first time.
void keep_operation(const c10::OperatorHandle& op, std::vector<c10::IValue> kept, std::vector<c10::IValue> results) {
  graph::keep([op, kept = std::move(kept), results = std::move(results)] {
    torch::jit::Stack stack(kept.begin(), kept.end());
    op.callBoxed(&stack);
    for (size_t at = 0; at < results.size(); ++at) {
      if (!results[at].isTensor() || !results[at].toTensor().defined()) continue;
      const Tensor to = results[at].toTensor(), from = stack[at].toTensor();
      if (to.data_ptr() != from.data_ptr()) at_home(to).copy_(at_home(from));
    }
  });
}

// Computes on the host. Products of 16 bits are summed in f32 and rounded once, as on a GPU: many processors have them only number by number.
void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto is = [&](const char* name) { return schema.name() == name; };
  const auto is_half = [](const c10::IValue& of) { return of.isTensor() && at::isReducedFloatingType(of.toTensor().scalar_type()); };
  const bool product = is("aten::mm") || is("aten::bmm") || is("aten::addmm") || is("aten::baddbmm") || is("aten::_grouped_mm");
  const std::vector<c10::IValue> given(stack->end() - schema.arguments().size(), stack->end());
  if (!product || !is_half(given[0])) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto place = stack->end() - given.size(); place != stack->end(); ++place)
    if (is_half(*place)) *place = place->toTensor().to(at::kFloat);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const Tensor exact = stack->back().toTensor();
  const bool to_given = schema.overload_name() == "out";
  stack->back() = to_given ? given.back().toTensor().copy_(exact) : exact.to(given[0].toTensor().scalar_type());
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto given = torch::jit::last(*stack, schema.arguments().size());
  const std::vector<c10::IValue> kept(given.begin(), given.end());
  const size_t first = stack->size() - kept.size();
  Where where{op, {}};
  for (size_t at = 0; at < kept.size(); ++at) {
    const auto& value = kept[at];
    auto& place = (*stack)[first + at];
    if (value.isTensor()) {
      place = where.take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) list.push_back(where.take(tensor));
      place = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional<Tensor>(where.take(*tensor)) : std::nullopt);
      }
      place = list;
    } else if (value.isDevice()) {
      where.device = value.toDevice();
      place = c10::Device(DeviceType::CPU);
    }
  }
  where.agree();
  const std::vector<c10::IValue> taken(stack->end() - kept.size(), stack->end());
  TORCH_CHECK(where.device, schema.name(), ": on no device");
  works_on(schema, kept, stream_of(*where.device));
  compute(op, stack);
  const size_t results = stack->size() - schema.returns().size();
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    auto& result = (*stack)[results + at];
    const auto* alias = schema.returns()[at].alias_info();
    if (alias) {
      TORCH_CHECK(alias->isWrite(), schema.name(), ": a view that the stand-in does not make");
      for (size_t from = 0; from < kept.size(); ++from) {
        const auto* other = schema.arguments()[from].alias_info();
        if (!other || !(*other == *alias)) continue;
        if (kept[from].isTensor()) grow(kept[from].toTensor(), taken[from].toTensor());
        result = kept[from];
      }
    } else if (result.isTensor()) {
      result = sent(result.toTensor(), *where.device);
    } else if (result.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : result.toTensorList()) list.push_back(sent(tensor, *where.device));
      result = list;
    }
  }
  if (graph::records()) keep_operation(op, kept, {stack->begin() + results, stack->end()});
}

c10::Device target(std::optional<c10::Device> device) {
  const auto wanted = device.value_or(here());
  return wanted.has_index() ? wanted : here();
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> kind, std::optional<at::Layout>, std::optional<at::Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(target(device));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(kind), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> kind, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(target(device));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(kind));
}

// Bytes of ordinary memory that the host sends without waiting, since the driver copies them first.
constexpr size_t COPIED = 64 << 10;

// The one operation between devices. The host waits for what comes to it, and for what it sends unless told not to, and it is pinned or little.
Tensor& copy_(Tensor& to, const Tensor& from, bool without_waiting) {
  const c10::Stream stream = stream_of(to.is_cuda() ? to.device() : from.device());
  order::check();
  // Between two devices it is work of the one that is read, for which the other waits.
  const c10::Stream reader = from.is_cuda() ? stream_of(from.device()) : stream;
  if (reader != stream) {
    order::meet(stream, reader);
    order::begin(reader);
  }
  if (from.is_cuda() && from.numel()) order::reads(memory_of(from), reader);
  if (reader != stream) order::meet(stream, reader);
  order::begin(stream);
  if (!to.is_cuda() || !from.is_cuda()) graph::refuse("a copy between host and device cannot be recorded");
  if (graph::records()) {
    graph::keep([to, from] { at_home(to).copy_(at_home(from)); });
    if (!graph::owns(memory_of(to))) return to;
  }
  if (to.is_cuda() && to.numel()) order::writes(memory_of(to), stream);
  const bool sent_at_once = without_waiting && (from.nbytes() <= COPIED || Pinned::has(from.storage().data()));
  if (!to.is_cuda() || (!from.is_cuda() && !sent_at_once)) order::host_waits(stream);
  at_home(to).copy_(at_home(from));
  return to;
}

at::Scalar number(const Tensor& tensor) {
  graph::refuse("the host cannot read a number of what is only recorded");
  order::reads(memory_of(tensor), stream_of(tensor.device()));
  order::host_waits(stream_of(tensor.device()));
  return at::native::_local_scalar_dense_cpu(at_home(tensor));
}

Tensor as_strided(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

// What the host computes from these operands, now and with each replay.
template <typename Computed>
Tensor own(std::initializer_list<const Tensor*> operands, const Computed& computed) {
  const c10::Device device = (*operands.begin())->device();
  order::begin(stream_of(device));
  for (const Tensor* of : operands) order::reads(memory_of(*of), stream_of(device));
  const Tensor out = sent(computed(), device);
  if (graph::records()) graph::keep([out, computed] { at_home(out).copy_(computed()); });
  return out;
}

// For operations that no recorded step has.
void not_recorded() { graph::refuse("the stand-in does not record this operation"); }

// From 16 bits to 32 on the way, which GPUs do and processors don't.
template <Tensor (*softmax)(const Tensor&, int64_t, bool)>
Tensor softmax_from_half(const Tensor& tensor, int64_t dimension, bool widen) {
  return own({&tensor}, [tensor, dimension, widen] {
    const Tensor given = at_home(tensor);
    return softmax(widen ? given.to(at::kFloat) : given, dimension, false);
  });
}

template <Tensor (*backward)(const Tensor&, const Tensor&, int64_t, at::ScalarType)>
Tensor softmax_to_half(const Tensor& gradient, const Tensor& output, int64_t dimension, at::ScalarType kind) {
  not_recorded();
  return sent(backward(at_home(gradient), at_home(output), dimension, gradient.scalar_type()).to(kind), gradient.device());
}

// Products of 16-bit numbers that are not rounded, which GPUs make and processors don't.
template <Tensor (Tensor::*product)(const Tensor&) const>
Tensor product_in(const Tensor& left, const Tensor& right, at::ScalarType kind) {
  TORCH_CHECK(left.device() == right.device() && left.is_cuda(), "a product of operands on ", left.device(), " and ", right.device());
  return own({&left, &right}, [left, right, kind] {
    const Tensor wide = at_home(left).to(kind);
    return (wide.*product)(at_home(right).to(kind));
  });
}

// Attention by its definition: the fused ones have kernels of their own for each kind of device.
int64_t written_out(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

// One sequence of flash attention over packed rows, by its definition in f32: [heads, tokens, d] each.
struct Run {
  int64_t q_begin, queries, k_begin, keys, shared;
  Tensor q, k, v, scores, sums;

  Run(const Tensor& all_q, const Tensor& all_k, const Tensor& all_v, const Tensor& q_ends, const Tensor& k_ends, const std::optional<Tensor>& used,
      int64_t at, bool causal, double scale, std::optional<int64_t> left) {
    const auto number = [](const Tensor& of, int64_t at) { return of[at].item<int64_t>(); };
    q_begin = number(q_ends, at), queries = number(q_ends, at + 1) - q_begin, k_begin = number(k_ends, at);
    keys = used ? number(*used, at) : number(k_ends, at + 1) - k_begin;
    shared = all_q.size(1) / all_k.size(1);
    q = heads(all_q, q_begin, queries, 1), k = heads(all_k, k_begin, keys, shared), v = heads(all_v, k_begin, keys, shared);
    const Tensor query = at::arange(queries).unsqueeze(1) + keys - queries, key = at::arange(keys).unsqueeze(0);
    Tensor hidden = at::zeros({queries, keys}, at::kBool);
    if (causal || left) hidden = hidden | (key > query);
    if (left) hidden = hidden | (key < query - *left);
    scores = (q.matmul(k.transpose(1, 2)) * scale).masked_fill(hidden, -std::numeric_limits<double>::infinity());
    sums = scores.logsumexp(-1);
  }

  static Tensor heads(const Tensor& of, int64_t first, int64_t len, int64_t times) {
    return of.narrow(0, first, len).to(at::kFloat).repeat_interleave(times, 1).transpose(0, 1);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_ends, const std::optional<Tensor>& k_ends, int64_t most_q,
    int64_t most_k, double dropout, bool causal, bool, std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t>,
    const std::optional<Tensor>& used, const std::optional<Tensor>&) {
  not_recorded();
  TORCH_CHECK(q_ends->scalar_type() == at::kInt && k_ends->scalar_type() == at::kInt && dropout == 0.0, "flash attention: int32 ends, no dropout");
  TORCH_CHECK(q.scalar_type() != at::kFloat && q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1, "flash attention: 16 bits, rows in one piece");
  for (const Tensor* on : {&k, &v, &*q_ends, &*k_ends}) TORCH_CHECK(on->device() == q.device(), "flash attention: operands on two devices");
  const auto lengths = [](const Tensor& ends) { return at_home(ends).diff().max().item<int64_t>(); };
  // With `used`, ends of keys say only where a sequence begins.
  TORCH_CHECK(lengths(*q_ends) <= most_q && (used ? at_home(*used).max().item<int64_t>() : lengths(*k_ends)) <= most_k, "flash attention: a sequence is longer than the longest");
  std::optional<Tensor> counted;
  if (used) counted = at_home(*used);
  std::vector<Tensor> rows, sums;
  for (int64_t at = 0; at + 1 < q_ends->size(0); at++) {
    const Run run(at_home(q), at_home(k), at_home(v), at_home(*q_ends), at_home(*k_ends), counted, at, causal, *scale, left);
    rows.push_back(run.scores.softmax(-1).matmul(run.v).transpose(0, 1));
    sums.push_back(run.sums);
  }
  const Tensor none = at::empty({0});
  return {sent(at::cat(rows).to(q.scalar_type()), q.device()), sent(at::cat(sums, 1), q.device()), sent(none, q.device()), sent(none, q.device()), sent(none, q.device())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums,
                                                  const Tensor& q_ends, const Tensor& k_ends, int64_t, int64_t, double, bool causal, const Tensor&,
                                                  const Tensor&, std::optional<double> scale, std::optional<int64_t> left, std::optional<int64_t>) {
  const Tensor by_q = at::zeros(q.sizes(), at::kFloat), by_k = at::zeros(k.sizes(), at::kFloat), by_v = at::zeros(v.sizes(), at::kFloat);
  for (int64_t at = 0; at + 1 < q_ends.size(0); at++) {
    const Run run(at_home(q), at_home(k), at_home(v), at_home(q_ends), at_home(k_ends), std::nullopt, at, causal, *scale, left);
    const Tensor by_out = Run::heads(at_home(grad), run.q_begin, run.queries, 1), by_shares = by_out.matmul(run.v.transpose(1, 2));
    // As the kernel has it: by the sums and results that it is given.
    const Tensor shares = (run.scores - at_home(sums).narrow(1, run.q_begin, run.queries).unsqueeze(-1)).exp();
    const Tensor slopes = (by_out * Run::heads(at_home(out), run.q_begin, run.queries, 1)).sum(-1, true);
    const Tensor by_scores = shares * (by_shares - slopes) * *scale;
    const auto grouped = [&](const Tensor& of) { return of.reshape({k.size(1), run.shared, run.keys, -1}).sum(1).transpose(0, 1); };
    by_q.narrow(0, run.q_begin, run.queries).copy_(by_scores.matmul(run.k).transpose(0, 1));
    by_k.narrow(0, run.k_begin, run.keys).copy_(grouped(by_scores.transpose(1, 2).matmul(run.q)));
    by_v.narrow(0, run.k_begin, run.keys).copy_(grouped(shares.transpose(1, 2).matmul(by_out)));
  }
  const auto rounded = [&](const Tensor& of) { return sent(of.to(q.scalar_type()), q.device()); };
  return {rounded(by_q), rounded(by_k), rounded(by_v)};
}

// The gradient of an RMS norm by its input and its weight, which is a composite operation on processors.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef, const Tensor& factors,
                                             const std::optional<Tensor>& weight, std::array<bool, 2>) {
  const auto wide = [](const Tensor& of) { return at_home(of).to(at::kFloat); };
  const Tensor normed = wide(input) * wide(factors), by_normed = wide(grad) * wide(*weight);
  const Tensor by_input = (by_normed - normed * (by_normed * normed).mean(-1, true)) * wide(factors);
  const auto rounded = [&](const Tensor& of) { return sent(of.to(input.scalar_type()), input.device()); };
  return {rounded(by_input), rounded((wide(grad) * normed).sum_to_size(weight->sizes()))};
}

// Convolutions of each channel by itself, which have an operation of their own on GPUs.
Tensor conv_depthwise(const Tensor& input, const Tensor& weight, at::IntArrayRef, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation) {
  TORCH_CHECK(!bias || !bias->defined(), "a convolution with a bias, which the stand-in does not make");
  return own({&input, &weight}, [input, weight, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec()] {
    return at::convolution(at_home(input), at_home(weight), {}, stride, padding, dilation, false, {0, 0}, input.size(1));
  });
}

std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, at::OptionalIntArrayRef biases,
                                                 at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                                 at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> asked) {
  const auto of = at::convolution_backward(at_home(grad), at_home(input), at_home(weight), biases, stride, padding, dilation, transposed,
                                           output_padding, groups, asked);
  return {sent(std::get<0>(of), input.device()), sent(std::get<1>(of), input.device()), sent(std::get<2>(of), input.device())};
}

}  // namespace

namespace at {
// Asked for by this name.
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace c10::impl

REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &memory)

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", number);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", [](const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::as_strided_tensorimpl(tensor, size, stride, tensor.storage_offset());
  });
  library.impl("view", [](const Tensor& tensor, at::IntArrayRef size) { return at::native::view(tensor, size); });
  library.impl("_softmax", softmax_from_half<&at::_softmax>);
  library.impl("_log_softmax", softmax_from_half<&at::_log_softmax>);
  library.impl("_softmax_backward_data", softmax_to_half<&at::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data", softmax_to_half<&at::_log_softmax_backward_data>);
  library.impl("mm.dtype", product_in<&Tensor::mm>);
  library.impl("bmm.dtype", product_in<&Tensor::bmm>);
  library.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
  library.impl("_fused_sdp_choice", written_out);
  library.impl("_fused_rms_norm_backward", rms_norm_backward);
  library.impl("_conv_depthwise2d", conv_depthwise);
  library.impl("convolution_backward", conv_backward);
  library.impl("_flash_attention_forward", flash_forward);
  library.impl("_flash_attention_backward", flash_backward);
}

// libtorch's name of its allocator.
namespace c10::cuda::CUDACachingAllocator {
std::atomic<GpuAllocator*> allocator{&memory};
}

// Found before libtorch's function of this name: threads of the host don't change what a GPU computes, to the bit.
namespace at {
void set_num_threads(int) {
  static const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_NEXT, "_ZN2at15set_num_threadsEi"));
  set(1);
}
}  // namespace at
