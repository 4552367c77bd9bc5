// ONNX Runtime, of the library that FAKE_ORT_REAL names, with a provider for CUDA that computes on the host: there the
// stand-in for the CUDA runtime has a GPU's memory. Runs are queued on the stream that it is given, and are done when that
// is waited for; what operators of this project queue is done at the end of each.
//
// As the provider does, it records the run of a number that is new to a thread (and then does it once more), and replays it
// from then on: with other addresses than those recorded a replay fails here, where there it would use the old ones.
#include "onnxruntime/functions.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "segmented/cudart.h"

using namespace Ort;

extern "C" {
int fake_ort_on_gpu = 0;  // descriptions of a GPU's memory
long fake_ort_runs = 0, fake_ort_recordings = 0, fake_ort_replays = 0;
long fake_ort_released = 0;  // bindings
long fake_ort_waits = 0;  // less those of the stand-in itself
}

namespace {

constexpr int kFunctions = 275;  // of the table, as far as it is used

abi::Function table[kFunctions];
abi::ApiBase const* real = nullptr;

Functions const& real_functions() {
  static Functions const functions(real->GetApi(abi::kVersion));
  return functions;
}

tide::cuda::Stream runs_on = nullptr;  // of the sessions
bool records = false;                  // the next session
std::set<RawSession*> recording_sessions;
std::map<RawBinding const*, std::map<std::string, void*>> bound;  // addresses
std::map<RawRunOptions const*, std::map<std::string, std::string>> configured;
std::map<std::tuple<RawSession*, int, std::thread::id>, std::map<std::string, void*>> recorded;

RawStatus* available(char*** providers, int* count) {
  static char cuda[] = "CUDAExecutionProvider", cpu[] = "CPUExecutionProvider";
  static char* names[] = {cuda, cpu};
  *providers = names;
  *count = 2;
  return nullptr;
}
RawStatus* release_available(char**, int) { return nullptr; }

RawStatus* memory_info(char const* name, int allocator, int, int type, RawMemory** made) {
  Functions const& functions = real_functions();
  bool const on_gpu = std::strcmp(name, "Cuda") == 0;
  fake_ort_on_gpu += on_gpu;
  return functions.CreateMemoryInfo(on_gpu ? "Cpu" : name, allocator, 0, type, made);
}

RawStatus* options(RawCuda** made) {
  *made = reinterpret_cast<RawCuda*>(table);
  return nullptr;
}
RawStatus* failed(std::string const& reason) {
  return reinterpret_cast<RawStatus* (*)(int, char const*)>(table[0])(1, reason.c_str());  // CreateStatus(ORT_FAIL)
}

RawStatus* update(RawCuda*, char const* const* keys, char const* const* values, std::size_t count) {
  std::map<std::string, std::string> given;
  for (std::size_t i = 0; i < count; ++i) given[keys[i]] = values[i];
  if (given.size() != 5 || given["device_id"] != std::getenv("FAKE_ORT_DEVICE") || given["use_tf32"] != "0") std::abort();
  if (given["has_user_compute_stream"] != "1") std::abort();  // the provider would not read the next one
  runs_on = reinterpret_cast<tide::cuda::Stream>(std::strtoull(given["user_compute_stream"].c_str(), nullptr, 10));
  records = given["enable_cuda_graph"] == "1";
  return nullptr;
}
RawStatus* append(RawOptions*, RawCuda const*) {
  char const* const missing = std::getenv("FAKE_ORT_MISSING");
  return missing == nullptr ? nullptr : failed(missing);
}
RawStatus* session(RawEnv const* env, void const* data, std::size_t size, RawOptions const* given,
                   RawPackedWeights* packed, RawSession** made) {
  bool const recording = std::exchange(records, false);
  char const* const cpu_node = std::getenv("FAKE_ORT_CPU_NODE");
  if (recording && cpu_node != nullptr) return failed(cpu_node);
  Functions const& functions = real_functions();
  RawStatus* const status =
      functions.CreateSessionFromArrayWithPrepackedWeightsContainer(env, data, size, given, packed, made);
  if (recording) recording_sessions.insert(*made);
  return status;
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

RawStatus* bind_input(RawBinding* binding, char const* name, RawValue const* value) {
  void* address = nullptr;
  real_functions().GetTensorMutableData(const_cast<RawValue*>(value), &address);
  bound[binding][name] = address;
  return real_functions().BindInput(binding, name, value);
}
RawStatus* bind_output(RawBinding* binding, char const* name, RawValue const* value) {
  void* address = nullptr;
  real_functions().GetTensorMutableData(const_cast<RawValue*>(value), &address);
  bound[binding][name] = address;
  return real_functions().BindOutput(binding, name, value);
}
void release_binding(RawBinding*) { ++fake_ort_released; }  // it stays: queued runs use it
RawStatus* configure(RawRunOptions* of, char const* key, char const* value) {
  configured[of][key] = value;
  return nullptr;
}
void release_options(RawRunOptions* of) {
  configured.erase(of);
  real_functions().ReleaseRunOptions(of);
}

struct Queued {
  RawSession* session;
  RawBinding const* binding;
};

// Does a queued run; of an error, CUDA's number.
int done(void* of) {
  Queued const one = *static_cast<Queued*>(of);
  Functions const& functions = real_functions();
  RawRunOptions* plain = nullptr;
  functions.CreateRunOptions(&plain);
  RawStatus* const status = functions.RunWithBinding(one.session, plain, one.binding);
  functions.ReleaseRunOptions(plain);
  if (status != nullptr) {
    auto* const text = static_cast<char*>(dlsym(dlopen(std::getenv("TIDE_CUDART"), RTLD_NOW), "fake_cuda_error"));
    std::strncpy(text, functions.GetErrorMessage(status), 255);
    return 719;
  }
  --fake_ort_waits;  // this is none of the runtime's
  return of_cuda<int(tide::cuda::Stream)>("cudaStreamSynchronize")(stream_of_runs());
}

// Those with run options that say nothing are of the CPU.
RawStatus* run(RawSession* session, RawRunOptions const* given, RawBinding const* binding) {
  auto const found = configured.find(given);
  if (found == configured.end()) return real_functions().RunWithBinding(session, given, binding);
  if (found->second.at("disable_synchronize_execution_providers") != "1") std::abort();
  int const number = std::atoi(found->second.at("gpu_graph_id").c_str());
  int times = 1;
  if (number >= 0) {
    if (recording_sessions.count(session) == 0) std::abort();
    auto const [recording, is_new] = recorded.try_emplace({session, number, std::this_thread::get_id()}, bound.at(binding));
    if (!is_new && recording->second != bound.at(binding)) return failed("an address of a recorded run has changed");
    ++(is_new ? fake_ort_recordings : fake_ort_replays);
    char const* const fails = std::getenv("FAKE_ORT_RECORDING");
    if (is_new && fails != nullptr) return failed(fails);
    void* memory = nullptr;  // of the recording
    if (is_new && of_cuda<int(void**, std::size_t)>("cudaMalloc")(&memory, std::size_t{1} << 20) != 0) std::abort();
    times = is_new ? 2 : 1;
  }
  for (int i = 0; i < times; ++i) {
    auto* const queue = of_cuda<int(tide::cuda::Stream, int (*)(void*), void*)>("fake_cuda_queue");
    if (queue(runs_on, done, new Queued{session, binding}) != 0) return failed("the stream is another GPU's");
  }
  ++fake_ort_runs;
  return nullptr;
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
  replace(97, release_options);
  replace(133, run);
  replace(135, release_binding);
  replace(136, bind_input);
  replace(137, bind_output);
  replace(165, configure);
  replace(169, session);
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
