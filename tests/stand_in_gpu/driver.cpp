// NVRTC and the CUDA driver where there is no GPU: our kernels are compiled by this machine's C++ compiler (fibres.hpp), and run when they are launched.
// FIBRES is the folder of fibres.hpp.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "graph.hpp"
#include "order.hpp"
#include "stand_in_gpu.hpp"

namespace {

struct Program {
  std::string source, log, library;
};

Program& of(void* program) { return *static_cast<Program*>(program); }

struct Dim {
  unsigned x, y, z;
};

// Fibres of a kernel share what its library has. It is loaded this many times, so that as many kernels run at a time.
constexpr std::size_t COPIES = 2;

// As cuModuleLoadData gives it: in the context of a device.
struct Module {
  std::array<void*, COPIES> libraries;
  int device;
};

// As cuModuleGetFunction gives it.
struct Kernel {
  std::array<void (*)(const void*, const Dim*, unsigned), COPIES> run;
  std::size_t words;
  int device;
};

// CUDA's errors: of what can't be done while a graph is recorded, without a context, and with what is another context's.
constexpr int RECORDED = 900, NO_CONTEXT = 201, OTHER_CONTEXT = 400;

void run(const Kernel& kernel, const void* given, const Dim& grid, unsigned threads) {
  static std::array<std::mutex, COPIES> taken;
  static std::atomic<std::size_t> next{0};
  const auto take = [&] {
    for (std::size_t copy = 0; copy < COPIES; copy++)
      if (taken[copy].try_lock()) return copy;
    const std::size_t copy = next++ % COPIES;
    taken[copy].lock();
    return copy;
  };
  const std::size_t copy = take();
  const std::lock_guard<std::mutex> lock(taken[copy], std::adopt_lock);
  kernel.run[copy](given, &grid, threads);
}

// Shared memory by its address on the device: name and bytes.
struct Shared {
  std::mutex one;
  std::map<uint64_t, std::pair<std::string, size_t>> of;
};

Shared& shared() {
  static Shared shared;
  return shared;
}

}  // namespace

extern "C" {

// A device of compute capability 9.0.
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : 0;
  return 0;
}

int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*, const char* const*) {
  *program = new Program{source, "", ""};
  return 0;
}

int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  char folder[] = "/tmp/stand_in_kernels_XXXXXX";
  if (!mkdtemp(folder)) return 1;
  const std::string source = std::string(folder) + "/kernels.cpp", library = std::string(folder) + "/kernels.so";
  std::ofstream(source) << "#include \"" FIBRES "/fibres.hpp\"\n" << of(program).source;
  std::string command = "c++ -std=c++20 -O1 -w -shared -fPIC -o " + library + " " + source;
  for (int at = 0; at < count; at++)
    if (std::strncmp(options[at], "-D", 2) == 0) command += std::string(" ") + options[at];
  // The compiler is a program without GPUs.
  FILE* compiler = popen(("LD_PRELOAD= " + command + " 2>&1").c_str(), "r");
  std::array<char, 4096> part;
  while (compiler && std::fgets(part.data(), part.size(), compiler)) of(program).log += part.data();
  of(program).library = library;
  return compiler && pclose(compiler) == 0 ? 0 : 6;
}

int nvrtcGetProgramLogSize(void* program, size_t* size) {
  *size = of(program).log.size() + 1;
  return 0;
}

int nvrtcGetProgramLog(void* program, char* log) {
  std::strcpy(log, of(program).log.c_str());
  return 0;
}

int nvrtcGetCUBINSize(void* program, size_t* size) {
  *size = of(program).library.size() + 1;
  return 0;
}

int nvrtcGetCUBIN(void* program, char* binary) {
  std::strcpy(binary, of(program).library.c_str());
  return 0;
}

int nvrtcDestroyProgram(void** program) {
  delete static_cast<Program*>(*program);
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  if (context() < 0) return NO_CONTEXT;
  if (graph::records()) return RECORDED;
  const std::filesystem::path library = static_cast<const char*>(image);
  Module loaded{{}, context()};
  for (std::size_t copy = 0; copy < COPIES; copy++) {
    const auto file = library.parent_path() / (std::to_string(copy) + ".so");
    void*& of = loaded.libraries[copy];
    // Another device may have it, of files that are gone.
    if ((of = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD))) continue;
    std::error_code failed;
    std::filesystem::copy_file(library, file, failed);
    if (!(of = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL))) return 200;
  }
  // They stay mapped.
  std::filesystem::remove_all(library.parent_path());
  *module = new Module(loaded);
  return 0;
}

// The first time that it is asked for, a kernel is loaded.
int cuModuleGetFunction(void** function, void* module, const char* name) {
  const Module& of = *static_cast<Module*>(module);
  if (context() < 0) return NO_CONTEXT;
  if (graph::records()) return RECORDED;
  Kernel found{{}, 0, of.device};
  for (std::size_t copy = 0; copy < COPIES; copy++) {
    void* const words = dlsym(of.libraries[copy], (std::string(name) + "_words").c_str());
    found.run[copy] = reinterpret_cast<void (*)(const void*, const Dim*, unsigned)>(dlsym(of.libraries[copy], name));
    if (!found.run[copy] || !words) return 500;
    found.words = *static_cast<std::size_t*>(words);
  }
  *function = new Kernel(found);
  return 0;
}

// Memory that other processes map: a file of shared memory, whose name is its handle.
int cuMemAlloc_v2(uint64_t* memory, size_t bytes) {
  if (context() < 0) return NO_CONTEXT;
  static std::atomic<int> count{0};
  const std::string name = "/rollflow_stand_in_" + std::to_string(getpid()) + "_" + std::to_string(count++);
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return 2;
  void* real = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (real == MAP_FAILED) return 2;
  *memory = reinterpret_cast<uint64_t>(real) + AWAY;
  const std::lock_guard<std::mutex> lock(shared().one);
  shared().of[*memory] = {name, bytes};
  return 0;
}

int cuMemFree_v2(uint64_t memory) {
  if (context() < 0) return NO_CONTEXT;
  const std::lock_guard<std::mutex> lock(shared().one);
  const auto [name, bytes] = shared().of.at(memory);
  munmap(reinterpret_cast<void*>(memory - AWAY), bytes);
  shm_unlink(name.c_str());
  shared().of.erase(memory);
  return 0;
}

int cuIpcGetMemHandle(void* handle, uint64_t memory) {
  const std::lock_guard<std::mutex> lock(shared().one);
  std::strncpy(static_cast<char*>(handle), shared().of.at(memory).first.c_str(), 64);
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetUuid_v2(void* uuid, int device) {
  std::memset(uuid, 0x10 + device, 16);
  return 0;
}

// What a kernel writes is new, or a slot of a cache, which one stream has; so all it is given counts as read.
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned, void* stream, void** params,
                   void**) {
  const Kernel& kernel = *static_cast<Kernel*>(function);
  const c10::Stream where = stream_of_handle(stream);
  if (context() < 0) return NO_CONTEXT;
  if (kernel.device != context() || where.device_index() != context()) return OTHER_CONTEXT;
  order::check();
  order::begin(where);
  for (std::size_t at = 0; at < kernel.words; at++) {
    uint64_t word;
    std::memcpy(&word, static_cast<char*>(params[0]) + 8 * at, 8);
    if (word > AWAY) order::reads(reinterpret_cast<void*>(word - AWAY), where);
  }
  const Dim grid{x, y, z};
  if (!graph::records()) {
    run(kernel, params[0], grid, threads);
    return 0;
  }
  const std::vector<uint64_t> given(static_cast<uint64_t*>(params[0]), static_cast<uint64_t*>(params[0]) + kernel.words);
  graph::keep([kernel, given, grid, threads, where] {
    order::begin(where);
    run(kernel, given.data(), grid, threads);
  });
  return 0;
}
}
