// Compiles kernels.cu for the GPU at hand by NVRTC, and launches them on libtorch's stream. Neither a CUDA compiler nor its headers are needed to build this: the
// driver's and NVRTC's functions are looked up by name when a GPU is first used.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <dlfcn.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "guarded.hpp"
#include "kernel_args.h"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// ---- Libraries

// The driver's and NVRTC's functions, by their documented signatures.
struct Library {
  int (*attribute)(int*, int, int);
  int (*load)(void**, const void*);
  int (*function)(void**, void*, const char*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*create)(void**, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile)(void*, int, const char* const*);
  int (*log_size)(void*, size_t*);
  int (*log)(void*, char*);
  int (*binary_size)(void*, size_t*);
  int (*binary)(void*, char*);
  int (*destroy)(void**);
  std::string problem;
};

// Where a library of this process is mapped from.
std::string folder_of(const char* name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto path = line.find('/'), file = line.rfind('/');
    if (path != std::string::npos && line.compare(file + 1, std::strlen(name), name) == 0) return line.substr(path, file - path);
  }
  return "";
}

void* open_any(const std::vector<std::string>& names) {
  for (const auto& name : names)
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
  return nullptr;
}

// NVRTC as the loader finds it, or beside the CUDA runtime that libtorch brought.
void* open_nvrtc() {
  std::vector<std::string> names{"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
  const std::string runtime = folder_of("libcudart");
  for (const std::string& folder : {runtime, runtime + "/../../cuda_nvrtc/lib"}) {
    std::error_code none;
    if (runtime.empty()) continue;
    for (const auto& file : std::filesystem::directory_iterator(folder, none))
      if (file.path().filename().string().rfind("libnvrtc.so", 0) == 0) names.push_back(file.path().string());
  }
  return open_any(names);
}

const Library& library() {
  static const Library library = [] {
    Library of{};
    void *process = dlopen(nullptr, RTLD_NOW), *driver = open_any({"libcuda.so.1"}), *nvrtc = nullptr;
    const auto find = [&](auto& function, void* in, const char* name) {
      void* found = dlsym(process, name);
      if (!found && in) found = dlsym(in, name);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
      if (!found && of.problem.empty()) of.problem = std::string(name) + " is in no library here";
    };
    if (!dlsym(process, "nvrtcCreateProgram")) nvrtc = open_nvrtc();
    find(of.attribute, nullptr, "cudaDeviceGetAttribute");
    find(of.load, driver, "cuModuleLoadData");
    find(of.function, driver, "cuModuleGetFunction");
    find(of.launch, driver, "cuLaunchKernel");
    find(of.create, nvrtc, "nvrtcCreateProgram");
    find(of.compile, nvrtc, "nvrtcCompileProgram");
    find(of.log_size, nvrtc, "nvrtcGetProgramLogSize");
    find(of.log, nvrtc, "nvrtcGetProgramLog");
    find(of.binary_size, nvrtc, "nvrtcGetCUBINSize");
    find(of.binary, nvrtc, "nvrtcGetCUBIN");
    find(of.destroy, nvrtc, "nvrtcDestroyProgram");
    return of;
  }();
  return library;
}

// ---- Compiling

std::string& source() {
  static std::string text;
  return text;
}

int attribute(int which, int64_t device) {
  int value = 0;
  TORCH_CHECK(library().attribute(&value, which, static_cast<int>(device)) == 0, "CUDA does not tell what cuda:", device, " can do");
  return value;
}

int generation(int64_t device) { return 10 * attribute(75, device) + attribute(76, device); }

// Machine code of all kernels for a device, under definitions such as "-DFORMAT=0".
std::vector<char> compiled(int64_t device, const std::vector<std::string>& definitions) {
  const Library& of = library();
  std::vector<std::string> options{"--gpu-architecture=sm_" + std::to_string(generation(device)), "--std=c++17"};
  options.insert(options.end(), definitions.begin(), definitions.end());
  std::vector<const char*> pointers;
  for (const auto& option : options) pointers.push_back(option.c_str());
  void* program = nullptr;
  TORCH_CHECK(of.create(&program, source().c_str(), "kernels.cu", 0, nullptr, nullptr) == 0, "NVRTC takes no program");
  const int result = of.compile(program, static_cast<int>(pointers.size()), pointers.data());
  size_t size = 0;
  std::string log;
  if (of.log_size(program, &size) == 0 && size > 1) {
    log.resize(size);
    of.log(program, log.data());
  }
  TORCH_CHECK(result == 0, "NVRTC does not compile our kernels for ", options[0], ": ", log.c_str());
  std::vector<char> binary;
  if (of.binary_size(program, &size) == 0) {
    binary.resize(size);
    of.binary(program, binary.data());
  }
  of.destroy(&program);
  TORCH_CHECK(!binary.empty(), "NVRTC gives no machine code for ", options[0]);
  return binary;
}

// A kernel, compiled once for each device and set of definitions, and never unloaded.
void* kernel(int64_t device, const std::string& name, const std::vector<std::string>& definitions) {
  static std::mutex mutex;
  static std::map<std::pair<int64_t, std::vector<std::string>>, std::pair<void*, std::map<std::string, void*>>> modules;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = modules.find({device, definitions});
  if (found == modules.end()) {
    const auto binary = compiled(device, definitions);
    void* module = nullptr;
    TORCH_CHECK(library().load(&module, binary.data()) == 0, "the CUDA driver does not load our kernels on cuda:", device);
    found = modules.insert({{device, definitions}, {module, {}}}).first;
  }
  auto& [module, functions] = found->second;
  void*& function = functions[name];
  if (!function) TORCH_CHECK(library().function(&function, module, name.c_str()) == 0, "the kernel ", name, " is missing");
  return function;
}

std::string format(at::ScalarType kind) { return kind == at::kHalf ? "-DFORMAT=1" : "-DFORMAT=0"; }

struct Grid {
  int64_t x, y = 1, z = 1;
};

template <typename Args>
void launch(const Tensor& on, const char* name, const std::vector<std::string>& definitions, Grid grid, int64_t threads, Args args) {
  if (grid.x == 0) return;
  const c10::DeviceGuard guard(on.device());
  const c10::impl::VirtualGuardImpl streams(on.device().type());
  void* const stream = streams.getStreamNativeHandle(streams.getStream(on.device()));
  void* params[] = {&args};
  const auto size = [](int64_t of) { return static_cast<unsigned>(of); };
  const int result = library().launch(kernel(on.device().index(), name, definitions), size(grid.x), size(grid.y), size(grid.z), size(threads), 1, 1, 0,
                                      stream, params, nullptr);
  TORCH_CHECK(result == 0, "the kernel ", name, " does not start: the CUDA driver's error ", result);
}

// ---- Operands

u16* halves(const Tensor& of) { return reinterpret_cast<u16*>(of.data_ptr()); }
const float* floats(const Tensor& of) { return reinterpret_cast<const float*>(of.data_ptr()); }
float* to_floats(const Tensor& of) { return reinterpret_cast<float*>(of.data_ptr()); }
const i64* whole(const Tensor& of) { return reinterpret_cast<const i64*>(of.data_ptr()); }

void check(const char* what, const Tensor& of, const Tensor& like, at::ScalarType kind) {
  TORCH_CHECK(of.device() == like.device() && of.scalar_type() == kind && of.is_contiguous(), what, ": contiguous ", kind, " on ", like.device(), ", not ",
              of.scalar_type(), " on ", of.device());
}

constexpr int64_t BLOCKS = 4096;  // of kernels that go through their rows in a loop

// Of a block that goes through a row of logits.
int64_t threads_for(const Tensor& logits) { return logits.size(1) >= 1 << 15 ? 1024 : 256; }

struct AddRmsNorm : Function<AddRmsNorm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& y, const Tensor& weight, double eps) {
    const Tensor a = x.contiguous(), b = y.contiguous(), w = weight.contiguous();
    const int64_t width = a.size(-1), rows = a.numel() / width;
    check("add_rms_norm", b, a, a.scalar_type()), check("add_rms_norm", w, a, a.scalar_type());
    Tensor sum = at::empty_like(a), normed = at::empty_like(a), factors = at::empty({rows, 1}, a.options().dtype(at::kFloat));
    launch(a, "add_rms_norm", {format(a.scalar_type())}, {rows}, width >= 2048 ? 256 : 128,
           NormArgs{halves(a), halves(b), halves(w), halves(sum), halves(normed), to_floats(factors), width, eps});
    ctx->save_for_backward({sum, w, factors});
    return {sum, normed};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &sum = saved[0], &weight = saved[1], &factors = saved[2];
    if (!grads[1].defined()) return {grads[0], grads[0], Tensor(), Tensor()};
    const auto [by_sum, by_weight] =
        at::_fused_rms_norm_backward(grads[1].contiguous(), sum, {sum.size(-1)}, factors, weight, {true, ctx->needs_input_grad(2)});
    const Tensor both = grads[0].defined() ? by_sum + grads[0] : by_sum;
    return {both, both, by_weight, Tensor()};
  }
};

struct SwiGlu : Function<SwiGlu> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up) {
    const Tensor from = gate_up.contiguous();
    const int64_t rows = from.size(0), width = from.size(1) / 2;
    Tensor out = at::empty({rows, width}, from.options());
    launch(from, "swiglu", {format(from.scalar_type())}, {std::min(BLOCKS, (rows * width / 8 + 255) / 256)}, 256,
           GateArgs{halves(from), nullptr, halves(out), rows, width});
    ctx->save_for_backward({from});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor from = ctx->get_saved_variables()[0], by_out = grads[0].contiguous();
    const int64_t rows = from.size(0), width = from.size(1) / 2;
    Tensor by_from = at::empty_like(from);
    launch(from, "swiglu_backward", {format(from.scalar_type())}, {std::min(BLOCKS, (rows * width / 8 + 255) / 256)}, 256,
           GateArgs{halves(from), halves(by_out), halves(by_from), rows, width});
    return {by_from};
  }
};

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, double turn) {
  const Tensor from = x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
  check("rotate", cos, x, at::kFloat), check("rotate", sin, x, at::kFloat);
  Tensor out = at::empty(x.sizes(), x.options());
  launch(x, "rotate", {format(x.scalar_type())}, {x.size(0)}, 128,
         RotateArgs{halves(from), floats(cos), floats(sin), halves(out), from.stride(0), x.size(1), x.size(2), turn});
  return out;
}

struct Rotate : Function<Rotate> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& cos, const Tensor& sin) {
    ctx->save_for_backward({cos, sin});
    return rotated(x, cos, sin, 1.0);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {rotated(grads[0].contiguous(), saved[0], saved[1], -1.0), Tensor(), Tensor()};
  }
};

// Sum of the rows at each token's places, [tokens, each], weighed unless `weights` is null.
Tensor combined(const Tensor& rows, const Tensor& places, const Tensor* weights) {
  const Tensor from = rows.contiguous();
  check("combine", places, from, at::kLong);
  if (weights) check("combine", *weights, from, at::kFloat);
  const int64_t tokens = places.size(0), width = from.size(1);
  Tensor out = at::empty({tokens, width}, from.options());
  launch(from, "combine", {format(from.scalar_type())}, {tokens}, std::min<int64_t>(256, (width / 8 + 31) / 32 * 32),
         CombineArgs{halves(from), nullptr, whole(places), weights ? floats(*weights) : nullptr, halves(out), nullptr, places.size(1), width});
  return out;
}

struct Combine : Function<Combine> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& places, const Tensor& weights) {
    const Tensor from = rows.contiguous(), by = weights.contiguous();
    ctx->save_for_backward({from, places, by});
    return combined(from, places, &by);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &rows = saved[0], &places = saved[1], &weights = saved[2], by_out = grads[0].contiguous();
    Tensor by_rows = at::empty_like(rows), by_weights = at::empty_like(weights);
    launch(rows, "combine_backward", {format(rows.scalar_type())}, {places.size(0)}, 256,
           CombineArgs{halves(rows), halves(by_out), whole(places), floats(weights), halves(by_rows), to_floats(by_weights), places.size(1), rows.size(1)});
    return {by_rows, Tensor(), by_weights};
  }
};

// Rows of x, of which each is sent to `each` places.
struct Send : Function<Send> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& sources, const Tensor& places) {
    ctx->save_for_backward({places});
    return x.index_select(0, sources);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {combined(grads[0], ctx->get_saved_variables()[0], nullptr), Tensor(), Tensor()};
  }
};

std::string define(const char* name, int64_t value) { return std::string("-D") + name + "=" + std::to_string(value); }

// One token of each sequence in a gated delta net, whose inputs and states become those after it.
Tensor delta_step(const Tensor& projected, const Tensor& conv, const Tensor& inputs, const Tensor& states, const std::array<const Tensor*, 3>& by_head,
                  double eps) {
  const Tensor from = projected.contiguous();
  const int64_t rows = states.size(0), heads = states.size(1), key_dim = states.size(2), value_dim = states.size(3);
  const int64_t key_heads = (inputs.size(1) - heads * value_dim) / (2 * key_dim);
  for (const Tensor* of : {&conv, &inputs, by_head[0], by_head[1], by_head[2]}) check("delta_step", *of, from, from.scalar_type());
  check("delta_step", states, from, at::kFloat);
  Tensor out = at::empty({rows, heads * value_dim}, from.options());
  const DeltaArgs args{halves(from),        halves(conv),        halves(inputs), to_floats(states), halves(*by_head[0]), halves(*by_head[1]),
                       halves(*by_head[2]), halves(out),         key_heads,      heads / key_heads, conv.size(1),        eps};
  const std::vector<std::string> definitions{format(from.scalar_type()), define("KEY_DIM", key_dim), define("VALUE_DIM", value_dim)};
  launch(from, "delta_step", definitions, {rows * key_heads}, (2 * value_dim + 31) / 32 * 32, args);
  return out;
}

// Why a device can't run the kernels; empty if it can. The first time, it compiles some.
std::string problem_of(int64_t device, bool* first) {
  static std::mutex mutex;
  static std::map<int64_t, std::string> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  *first = found == known.end();
  if (!*first) return found->second;
  std::string problem = library().problem;
  try {
    if (problem.empty() && generation(device) < 80) problem = "they need the Ampere generation or a newer one";
    const Tensor somewhere = problem.empty() ? at::empty({1}, at::TensorOptions(at::kFloat).device(at::kCUDA, static_cast<c10::DeviceIndex>(device))) : Tensor();
    if (problem.empty()) kernel(device, "swiglu", {"-DFORMAT=0"});
  } catch (const std::exception& error) {
    problem = error.what();
  }
  known[device] = problem;
  return problem;
}

// [rows, 3].
Tensor softmax(const Tensor& logits, const Tensor& targets) {
  check("softmax", logits, logits, at::kFloat), check("softmax", targets, logits, at::kLong);
  Tensor found = at::empty({logits.size(0), 3}, logits.options());
  SoftmaxArgs args{floats(logits), whole(targets), to_floats(found), nullptr, nullptr, nullptr, logits.size(1)};
  launch(logits, "softmax_found", {"-DFORMAT=0"}, {logits.size(0)}, threads_for(logits), args);
  return found;
}

Tensor softmax_gradient(const Tensor& logits, const Tensor& targets, const Tensor& found, const Tensor& slopes, const Tensor* entropy_slopes,
                            at::ScalarType kind) {
  Tensor gradient = at::empty(logits.sizes(), logits.options().dtype(kind));
  for (const Tensor* of : {&found, &slopes}) check("softmax", *of, logits, at::kFloat);
  if (entropy_slopes) check("softmax", *entropy_slopes, logits, at::kFloat);
  SoftmaxArgs args{floats(logits),   whole(targets),    to_floats(found), floats(slopes), entropy_slopes ? floats(*entropy_slopes) : nullptr,
                   halves(gradient), logits.size(1)};
  launch(logits, "softmax_gradient", {format(kind)}, {logits.size(0)}, threads_for(logits), args);
  return gradient;
}

// Tokens and log-probabilities [rows, 2].
Tensor draw(const Tensor& logits, const Tensor& settings) {
  check("draw", logits, logits, at::kFloat), check("draw", settings, logits, at::kDouble);
  const int64_t rows = logits.size(0), count = (logits.size(1) + PART - 1) / PART;
  Tensor drawn = at::empty({rows, 2}, settings.options()), parts = at::empty({rows, count, 3}, logits.options());
  const DrawArgs args{floats(logits), reinterpret_cast<const double*>(settings.data_ptr()), reinterpret_cast<double*>(drawn.data_ptr()),
                      to_floats(parts), logits.size(1), count};
  launch(logits, "draw_parts", {"-DFORMAT=0"}, {rows, count}, 128, args);
  launch(logits, "draw", {"-DFORMAT=0"}, {rows}, 512, args);
  return drawn;
}

struct Attended {
  int64_t page, heads, longest, window;
  double scale, cap, eps;
  const Tensor *q_norm, *k_norm, *sinks;
};

// One token of each slot, of which `table` [slots, width] has the pages in `cache`, and whose largest position is `longest` − 1.
Tensor attend(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& cache, const Tensor& positions, const Tensor& table, const Attended& of) {
  const int64_t slots = table.size(0), width = table.size(1), keys = cache.size(2), dim = cache.size(3), heads = of.heads;
  const Tensor from = qkv.contiguous();
  for (const Tensor* cosines : {&cos, &sin}) check("attend", *cosines, qkv, at::kFloat);
  check("attend", cache, qkv, qkv.scalar_type()), check("attend", positions, qkv, at::kLong), check("attend", table, qkv, at::kLong);
  TORCH_CHECK(from.size(0) == slots && positions.size(0) == slots && of.longest <= width * of.page && of.longest <= cos.size(0),
              "attend: a slot per row, and room for its position");
  // Long sequences of few slots are divided, so that all of the device works: four blocks for each of 132 processors.
  const int64_t splits = std::max<int64_t>(1, std::min((of.longest + 127) / 128, 528 / (slots * keys)));
  Tensor out = at::empty({slots, heads * dim}, from.options()), parts;
  if (splits > 1) parts = at::empty({slots * heads * splits * (dim + 1)}, from.options().dtype(at::kFloat));
  const AttendArgs args{halves(from),
                        floats(cos),
                        floats(sin),
                        of.q_norm ? halves(*of.q_norm) : nullptr,
                        of.k_norm ? halves(*of.k_norm) : nullptr,
                        halves(cache),
                        whole(positions),
                        whole(table),
                        of.sinks ? floats(*of.sinks) : nullptr,
                        halves(out),
                        splits > 1 ? to_floats(parts) : nullptr,
                        width,
                        of.window,
                        splits,
                        of.scale,
                        of.cap,
                        of.eps};
  const std::vector<std::string> definitions{format(from.scalar_type()), define("PAGE", of.page), define("DIM", dim), define("HEADS", heads), define("KEYS", keys)};
  launch(from, "attend", definitions, {keys, slots, splits}, 64, args);
  if (splits > 1) launch(from, "merge", definitions, {slots, heads}, std::min<int64_t>(dim, 128), args);
  return out;
}

}  // namespace

// What they take is in gpu.rs.
extern "C" {

// Null if the device runs the kernels, whose text is `text`; else why not. `first`: this was not asked for before.
char* rollflow_gpu_problem(int64_t device, const char* text, bool* first) {
  if (source().empty()) source() = text;
  const std::string problem = problem_of(device, first);
  return problem.empty() ? nullptr : strdup(problem.c_str());
}

// Compute capability, 90 for 9.0.
char* rollflow_gpu_generation(int64_t device, int64_t* number) {
  return guarded([&] { *number = generation(device); });
}

char* rollflow_gpu_add_rms_norm(Tensor** sum, Tensor** normed, Tensor* x, Tensor* y, Tensor* weight, double eps) {
  return guarded([&] {
    const auto both = AddRmsNorm::apply(*x, *y, *weight, eps);
    *sum = new Tensor(both[0]);
    *normed = new Tensor(both[1]);
  });
}

// Codes and scales in bytes, outer scales and tables in f32; `out` has as many numbers as the codes, a multiple of 64.
char* rollflow_gpu_nf4(Tensor* codes, Tensor* scales, Tensor* outer, Tensor* tables, int64_t outer_block, double offset, Tensor* out) {
  return guarded([&] {
    check("nf4", *codes, *out, at::kByte), check("nf4", *scales, *out, at::kByte);
    check("nf4", *outer, *out, at::kFloat), check("nf4", *tables, *out, at::kFloat);
    const auto bytes = [](Tensor* of) { return static_cast<const unsigned char*>(of->data_ptr()); };
    const int64_t len = out->numel();
    launch(*out, "nf4", {format(out->scalar_type())}, {std::min(BLOCKS, (len / 8 + 255) / 256)}, 256,
           Nf4Args{bytes(codes), bytes(scales), floats(*outer), floats(*tables), halves(*out), len, outer_block, offset});
  });
}

char* rollflow_gpu_swiglu(Tensor** out, Tensor* gate_up) {
  return guarded(out, [&] { return SwiGlu::apply(*gate_up); });
}

char* rollflow_gpu_delta_step(Tensor** out, Tensor* projected, Tensor* conv, Tensor* inputs, Tensor* states, Tensor* step_bias, Tensor* decay, Tensor* norm,
                              double eps) {
  return guarded([&] { *out = new Tensor(delta_step(*projected, *conv, *inputs, *states, {step_bias, decay, norm}, eps)); });
}

char* rollflow_gpu_send(Tensor** out, Tensor* x, Tensor* sources, Tensor* places) {
  return guarded([&] { *out = new Tensor(Send::apply(*x, *sources, *places)); });
}

char* rollflow_gpu_combine(Tensor** out, Tensor* rows, Tensor* places, Tensor* weights) {
  return guarded([&] { *out = new Tensor(Combine::apply(*rows, *places, *weights)); });
}

char* rollflow_gpu_rotate(Tensor** out, Tensor* x, Tensor* cos, Tensor* sin) {
  return guarded(out, [&] { return Rotate::apply(*x, *cos, *sin); });
}

char* rollflow_gpu_softmax(Tensor** out, Tensor* logits, Tensor* targets) {
  return guarded(out, [&] { return softmax(*logits, *targets); });
}

char* rollflow_gpu_softmax_gradient(Tensor** out, Tensor* logits, Tensor* targets, Tensor* found, Tensor* slopes, Tensor* entropy_slopes, bool half) {
  return guarded(out, [&] { return softmax_gradient(*logits, *targets, *found, *slopes, entropy_slopes, half ? at::kHalf : at::kBFloat16); });
}

char* rollflow_gpu_draw(Tensor** out, Tensor* logits, Tensor* settings) {
  return guarded(out, [&] { return draw(*logits, *settings); });
}

char* rollflow_gpu_attend(Tensor** out, Tensor* qkv, Tensor* cos, Tensor* sin, Tensor* cache, Tensor* positions, Tensor* table, Tensor* q_norm, Tensor* k_norm,
                          Tensor* sinks, int64_t page, int64_t heads, int64_t longest, int64_t window, double scale, double cap, double eps) {
  return guarded(out, [&] { return attend(*qkv, *cos, *sin, *cache, *positions, *table, {page, heads, longest, window, scale, cap, eps, q_norm, k_norm, sinks}); });
}
}
