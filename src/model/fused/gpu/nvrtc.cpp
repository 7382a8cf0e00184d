// Finds NVRTC, NVIDIA's compiler of kernels. Nothing of libtorch: scripts/compile_kernels.py compiles this file by itself, to load NVRTC as the program does.

#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace {

// Where a library of this process is mapped from.
std::string folder_of(const char* name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto path = line.find('/'), file = line.rfind('/');
    if (path != std::string::npos && line.compare(file + 1, std::strlen(name), name) == 0) return line.substr(path, file - path);
  }
  return "";
}

// Files of a folder whose names begin so.
std::vector<std::string> files(const std::string& folder, const char* begin) {
  std::vector<std::string> found;
  std::error_code none;
  if (folder.empty()) return found;
  for (const auto& file : std::filesystem::directory_iterator(folder, none))
    if (file.path().filename().string().rfind(begin, 0) == 0) found.push_back(file.path().string());
  return found;
}

void* open(const std::string& name) { return dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL); }

// NVRTC from `folder` or one near it, else as the loader finds it.
void* open_near(const std::string& folder) {
  for (const std::string& in : {folder, folder.empty() ? folder : folder + "/../../cuda_nvrtc/lib"})
    for (const auto& file : files(in, "libnvrtc.so"))
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
  void* const nvrtc = dlsym(process, "nvrtcCreateProgram") ? process : open_near(folder ? folder : folder_of("libcudart"));
  for (const auto& file : files(folder_of("libnvrtc.so"), "libnvrtc-builtins.so")) open(file);
  return nvrtc;
}
