// Finds NVRTC, NVIDIA's compiler of kernels. Nothing of libtorch: scripts/compile_kernels.py compiles this file by itself, to load NVRTC as the program does.

#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace {

// Returns true if a file belongs to a library.
using IsOf = bool (*)(const std::string& file);

bool begins(const std::string& file, const char* with) { return file.rfind(with, 0) == 0; }

// libtorch's archives have eight hexadecimal digits after the names of libraries: libcudart-3f9c1a2b.so.13. NVRTC's builtins keep theirs.
bool is_runtime(const std::string& file) { return begins(file, "libcudart.so") || begins(file, "libcudart-"); }
bool is_builtins(const std::string& file) { return begins(file, "libnvrtc-builtins.so"); }
bool is_nvrtc(const std::string& file) { return begins(file, "libnvrtc.so") || (begins(file, "libnvrtc-") && !begins(file, "libnvrtc-builtins")); }

// Where a library of this process is mapped from.
std::string folder_of(IsOf library) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto path = line.find('/'), file = line.rfind('/');
    if (path != std::string::npos && library(line.substr(file + 1))) return line.substr(path, file - path);
  }
  return "";
}

// Files of a library in a folder.
std::vector<std::string> files(const std::string& folder, IsOf library) {
  std::vector<std::string> found;
  std::error_code none;
  if (folder.empty()) return found;
  for (const auto& file : std::filesystem::directory_iterator(folder, none))
    if (library(file.path().filename().string())) found.push_back(file.path().string());
  return found;
}

void* open(const std::string& name) { return dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL); }

// NVRTC from `folder` or one near it, else as the loader finds it.
void* open_near(const std::string& folder) {
  for (const std::string& in : {folder, folder.empty() ? folder : folder + "/../../cuda_nvrtc/lib"})
    for (const auto& file : files(in, is_nvrtc))
      if (void* library = open(file)) return library;
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"})
    if (void* library = open(name)) return library;
  return nullptr;
}

}  // namespace

// NVRTC: this process's, or that next to the CUDA runtime, which is in `folder` if given; null if there is none. It looks for its builtins by their name alone, which the
// loader does not find in folders of wheels, so that these are loaded here.
extern "C" void* rollflow_nvrtc(const char* folder) {
  void* const process = dlopen(nullptr, RTLD_NOW);
  void* const nvrtc = dlsym(process, "nvrtcCreateProgram") ? process : open_near(folder ? folder : folder_of(is_runtime));
  for (const auto& file : files(folder_of(is_nvrtc), is_builtins)) open(file);
  return nvrtc;
}
