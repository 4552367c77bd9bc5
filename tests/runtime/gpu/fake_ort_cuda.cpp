// ONNX Runtime, of the library that FAKE_ORT_REAL names, with a provider for CUDA that computes on the host: there the
// stand-in for the CUDA runtime has a GPU's memory. It computes at once, as on a stream of its own; what the operators of
// this project queue on that stream is done at the end of a run.
#include "onnxruntime/functions.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "segmented/cudart.h"

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
F* of_cuda(char const* name) {
  return reinterpret_cast<F*>(dlsym(dlopen(std::getenv("TIDE_CUDART"), RTLD_NOW), name));
}
tide::cuda::Stream stream_of_runs() {
  static tide::cuda::Stream const made = [] {
    tide::cuda::Stream stream = nullptr;
    if (of_cuda<int(tide::cuda::Stream*, unsigned)>("cudaStreamCreateWithFlags")(&stream, 1) != 0) std::abort();
    return stream;
  }();
  return made;
}

// An operator for CUDA gets the nodes of the CPU, which is what there is.
RawStatus* add_operator(abi::Domain* domain, void const* given) {
  auto* const op = static_cast<abi::Operator*>(const_cast<void*>(given));
  char const* const provider = op->GetExecutionProviderType(op);
  if (provider != nullptr && std::strcmp(provider, "CUDAExecutionProvider") != 0) std::abort();
  op->GetExecutionProviderType = [](abi::Operator const*) -> char const* { return nullptr; };
  return reinterpret_cast<RawStatus* (*)(abi::Domain*, void const*)>(real->GetApi(abi::kVersion)[27])(domain, op);
}
RawStatus* stream_of(abi::Context const*, void** stream) {
  *stream = stream_of_runs();
  return nullptr;
}
RawStatus* run(RawSession* session, RawRunOptions const* given, RawBinding const* binding) {
  Functions const functions(real->GetApi(abi::kVersion));
  if (RawStatus* const status = functions.RunWithBinding(session, given, binding)) return status;
  if (of_cuda<int(tide::cuda::Stream)>("cudaStreamSynchronize")(stream_of_runs()) == 0) return nullptr;
  return reinterpret_cast<RawStatus* (*)(int, char const*)>(table[0])(1, "queued work failed");
}

template <typename F>
void replace(int position, F* function) {
  table[position] = reinterpret_cast<abi::Function>(function);
}

abi::Function const* api(std::uint32_t version) {
  std::copy_n(real->GetApi(version), kFunctions, table);
  replace(27, add_operator);
  replace(68, memory_info);
  replace(125, available);
  replace(126, release_available);
  replace(133, run);
  replace(193, stream_of);
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
