// Compiles our kernels for the GPU at hand by NVRTC, and launches them on libtorch's stream. Neither a CUDA compiler nor its headers are needed to build this: the
// driver's and NVRTC's functions are looked up by name when a GPU is first used.

#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "../context.hpp"
#include "launch.hpp"

// nvrtc.cpp
extern "C" void* rollflow_nvrtc(const char* folder);

namespace {

using at::Tensor;
using gpu::generation;

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

const Library& library() {
  static const Library library = [] {
    Library of{};
    void *process = dlopen(nullptr, RTLD_NOW), *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *nvrtc = rollflow_nvrtc(nullptr);
    const auto find = [&](auto& function, void* in, const char* name) {
      void* found = dlsym(process, name);
      if (!found && in) found = dlsym(in, name);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
      if (!found && of.problem.empty()) of.problem = std::string(name) + " is in no library here";
    };
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

// A kernel, compiled once for each device and set of definitions, and never unloaded. Requires the device's context.
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

// Why a device can't run the kernels, whose text is `text`; empty if it can. The first time, it compiles some.
std::string problem_of(int64_t device, const char* text, bool* first) {
  static std::mutex mutex;
  static std::map<int64_t, std::string> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (source().empty()) source() = text;
  const auto found = known.find(device);
  *first = found == known.end();
  if (!*first) return found->second;
  std::string problem = library().problem;
  try {
    if (problem.empty() && generation(device) < 80) problem = "they need the Ampere generation or a newer one";
    if (problem.empty()) {
      const DeviceContext context(device);
      kernel(device, "swiglu", {"-DFORMAT=0"});
    }
  } catch (const std::exception& error) {
    problem = error.what();
  }
  known[device] = problem;
  return problem;
}

}  // namespace

namespace gpu {

int generation(int64_t device) { return 10 * attribute(75, device) + attribute(76, device); }

void launch_with(const Tensor& on, const char* name, const std::vector<std::string>& definitions, Grid grid, int64_t threads, void* args) {
  if (grid.x == 0) return;
  const DeviceContext context(on.device().index());
  const c10::impl::VirtualGuardImpl streams(on.device().type());
  void* const stream = streams.getStreamNativeHandle(streams.getStream(on.device()));
  void* params[] = {args};
  const auto size = [](int64_t of) { return static_cast<unsigned>(of); };
  const int result = library().launch(kernel(on.device().index(), name, definitions), size(grid.x), size(grid.y), size(grid.z), size(threads), 1, 1, 0,
                                      stream, params, nullptr);
  TORCH_CHECK(result == 0, "the kernel ", name, " does not start: the CUDA driver's error ", result);
}

void prepare(const Tensor& on, const char* name, const std::vector<std::string>& definitions) {
  const DeviceContext context(on.device().index());
  kernel(on.device().index(), name, definitions);
}

}  // namespace gpu

// What they take is in gpu.rs.
extern "C" {

// Null if the device runs the kernels, whose text is `text`; else why not. `first`: this was not asked for before.
char* rollflow_gpu_problem(int64_t device, const char* text, bool* first) {
  const std::string problem = problem_of(device, text, first);
  return problem.empty() ? nullptr : strdup(problem.c_str());
}

// Compute capability, 90 for 9.0.
char* rollflow_gpu_generation(int64_t device, int64_t* number) {
  return guarded([&] { *number = generation(device); });
}
}
