// ONNX Runtime, of the library that FAKE_ORT_REAL names, with a provider for CUDA that computes on the host: there the
// stand-in for the CUDA runtime has a GPU's memory. It computes at once, as on a stream of its own.
#include "onnxruntime/functions.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

using namespace Ort;

extern "C" {
int fake_ort_on_gpu = 0;  // descriptions of a GPU's memory
}

namespace {

constexpr int kFunctions = 275;  // of the table, as far as it is used

abi::Function table[kFunctions];
abi::ApiBase const* real = nullptr;

RawStatus* available(char*** providers, int* count) {
  static char cuda[] = "CUDAExecutionProvider", cpu[] = "CPUExecutionProvider";
  static char* names[] = {cuda, cpu};
  *providers = names;
  *count = 2;
  return nullptr;
}
RawStatus* release_available(char**, int) { return nullptr; }

RawStatus* memory_info(char const* name, int allocator, int, int type, RawMemory** made) {
  Functions const functions(real->GetApi(abi::kVersion));
  bool const on_gpu = std::strcmp(name, "Cuda") == 0;
  fake_ort_on_gpu += on_gpu;
  return functions.CreateMemoryInfo(on_gpu ? "Cpu" : name, allocator, 0, type, made);
}

RawStatus* options(RawCuda** made) {
  *made = reinterpret_cast<RawCuda*>(table);
  return nullptr;
}
RawStatus* update(RawCuda*, char const* const* keys, char const* const* values, std::size_t count) {
  char const* const wanted[][2] = {{"device_id", std::getenv("FAKE_ORT_DEVICE")}, {"use_tf32", "0"}};
  if (count != 2) std::abort();
  for (std::size_t i = 0; i < count; ++i) {
    if (std::strcmp(keys[i], wanted[i][0]) != 0 || std::strcmp(values[i], wanted[i][1]) != 0) std::abort();
  }
  return nullptr;
}
RawStatus* append(RawOptions*, RawCuda const*) {
  char const* const missing = std::getenv("FAKE_ORT_MISSING");
  if (missing == nullptr) return nullptr;
  return reinterpret_cast<RawStatus* (*)(int, char const*)>(table[0])(1, missing);  // CreateStatus(ORT_FAIL)
}
void release(RawCuda*) {}

template <typename F>
void replace(int position, F* function) {
  table[position] = reinterpret_cast<abi::Function>(function);
}

abi::Function const* api(std::uint32_t version) {
  std::copy_n(real->GetApi(version), kFunctions, table);
  replace(68, memory_info);
  replace(125, available);
  replace(126, release_available);
  replace(204, append);
  replace(205, options);
  replace(206, update);
  replace(208, release);
  return table;
}

}  // namespace

extern "C" abi::ApiBase const* OrtGetApiBase() {
  void* const library = dlopen(std::getenv("FAKE_ORT_REAL"), RTLD_NOW | RTLD_LOCAL);
  real = reinterpret_cast<abi::ApiBase const* (*)()>(dlsym(library, "OrtGetApiBase"))();
  static abi::ApiBase const base{api, real->GetVersionString};
  return &base;
}
