#include "segmented/cudart.h"

#include <dlfcn.h>

#include <cctype>
#include <cstdlib>
#include <string>

#include "tide/errors.h"

namespace tide {
namespace cuda {
namespace {

constexpr char const* kLibraries[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};

void* open_library() {
  char const* const named = std::getenv("TIDE_CUDART");
  std::string reason;
  if (named != nullptr && *named != '\0') {
    if (void* const handle = ::dlopen(named, RTLD_NOW | RTLD_LOCAL)) return handle;
    reason = ::dlerror();
  } else {
    for (char const* const name : kLibraries) {
      if (void* const handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
      if (reason.empty()) reason = ::dlerror();
    }
  }
  throw ProviderError("the CUDA runtime cannot be opened (" + reason +
                      "): pip install -e '.[cuda]' in the clone, or name its library in TIDE_CUDART");
}

// Opened once; it stays open.
Functions const* opened() {
  void* const handle = open_library();
  auto* const functions = new Functions();
  auto const find = [&](char const* name) {
    void* const address = ::dlsym(handle, name);
    if (address == nullptr) throw ProviderError(std::string("the CUDA runtime has no ") + name + ": install CUDA 12 or 13");
    return address;
  };
#define TIDE_CUDA_FIND(name, arguments) functions->name = reinterpret_cast<Error(*) arguments>(find("cuda" #name));
  TIDE_CUDA_FUNCTIONS(TIDE_CUDA_FIND)
#undef TIDE_CUDA_FIND
#define TIDE_CUDA_FIND(name, arguments) functions->name = reinterpret_cast<Error(*) arguments>(::dlsym(handle, "cuda" #name));
  TIDE_CUDA_DECIDING_FUNCTIONS(TIDE_CUDA_FIND)
#undef TIDE_CUDA_FIND
  // In CUDA 12 the function of that name takes no data of edges.
  if (void* const address = ::dlsym(handle, "cudaGraphAddNode_v2")) {
    functions->GraphAddNode = reinterpret_cast<decltype(functions->GraphAddNode)>(address);
  }
  functions->GetErrorString = reinterpret_cast<char const* (*)(Error)>(find("cudaGetErrorString"));
  return functions;
}

}  // namespace

Functions const& functions() {
  static Functions const* const found = opened();
  return *found;
}

bool decides() {
  char const* const forbidden = std::getenv("TIDE_HOST_DECIDES");
  if (forbidden != nullptr && *forbidden != '\0') return false;
  Functions const& api = functions();
  int driver = 0, runtime = 0;
  bool const known = api.DriverGetVersion(&driver) == kSuccess && api.RuntimeGetVersion(&runtime) == kSuccess;
#define TIDE_CUDA_AND(name, arguments) &&api.name != nullptr
  return known && driver >= kDecidesSince && runtime >= kDecidesSince TIDE_CUDA_DECIDING_FUNCTIONS(TIDE_CUDA_AND);
#undef TIDE_CUDA_AND
}

bool finds_gpu() {
  try {
    int count = 0;
    bool const found = functions().GetDeviceCount(&count) == kSuccess && count > 0;
    functions().GetLastError();  // clears an error
    return found;
  } catch (ProviderError const&) {
    return false;
  }
}

std::string device_name(int gpu) {
  char properties[kPropertiesSize] = {};
  if (functions().GetDeviceProperties(properties, gpu) != kSuccess) return "none";
  std::string name;
  for (char const* at = properties; *at != '\0'; ++at) {
    bool const kept = std::isalnum(static_cast<unsigned char>(*at)) != 0 || *at == '.';
    if (kept) name += *at;
    if (!kept && !name.empty() && name.back() != '-') name += '-';
  }
  if (!name.empty() && name.back() == '-') name.pop_back();
  return name;
}

}  // namespace cuda
}  // namespace tide
